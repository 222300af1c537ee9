#!/usr/bin/env python3
"""The chat page in Chromium, over `lily serve --script`.

    tools/server-tests/page.py target/debug/lily [--pictures DIR]

Every check fails loudly; the last one is that the browser's console has no complaint, about the page's policy included.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager

from browser import Browser

RICH = """Here is a *short* tour of **binary search**, with its `O(log n)` steps:

1. Look at the middle.
2. Keep the half that can hold the value:
   - the left one, if the middle is *larger*
   - the right one otherwise
3. Go on until nothing is left.

```python
def search(values, wanted):
    low, high = 0, len(values)

    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low
```

### When it fits

| values | steps |
| --- | --- |
| 1,000 | 10 |
| 1,000,000 | 20 |

> The list has to be sorted.

More is in the [encyclopedia](https://example.org/search?a=1&b=2)."""

THOUGHT = """The user wants a *tour* of binary search. It should have

- the idea in three steps,
- code that can be run, and where it fits,
- a table that shows how few steps a long list needs, so that the logarithm is more than a word."""

HOSTILE = """<img src=x onerror="window.stolen = 1"><script>window.stolen = 2</script>

**<b onclick=alert(1)>bold</b>** and [a link](javascript:window.stolen=3) and ![image](https://example.org/p.png)

```html
</code></pre><script>window.stolen = 4</script>
```

[x](https://example.org/"onmouseover="window.stolen=5)"""

SLOW = " ".join(f"word{n}" for n in range(2000))

SCRIPT = [
    {"when": "tour", "output": f"<think>\n{THOUGHT}\n</think>\n\n{RICH}", "tokens_per_second": 60},
    {"when": "hostile", "output": f"<think>\n<i>thought</i>\n</think>\n\n{HOSTILE}"},
    {"when": "slow", "output": f"<think>\nLong ago.\n</think>\n\n{SLOW}", "tokens_per_second": 60},
    {"when": "muse", "output": f"<think>\n{SLOW}\n</think>\n\nDone.", "tokens_per_second": 60},
    {"when": "broken", "output": "So far so", "error": "the device was unplugged"},
    {"output": "<think>\nA greeting.\n</think>\n\nHello! What shall we do?"},
    {"output": "The second answer."},
    {"output": "The third answer."},
]

# What each text becomes; of code blocks only the code.
MARKDOWN = {
    "one\ntwo": "<p>one\ntwo</p>",
    "2 * 3 * 4, snake_case_name, a\\*b": "<p>2 * 3 * 4, snake_case_name, a*b</p>",
    "**a `**` b** and ***c***": "<p><strong>a <code>**</code> b</strong> and <strong><em>c</em></strong></p>",
    "- a\n\n- b\n## Next\ntext": "<ul><li>a</li><li>b</li></ul><h4>Next</h4><p>text</p>",
    "3. a\n   - b\n   - c\n4. d": '<ol start="3"><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>',
    "1. a\n   ```\n   x\n\n     y\n   ```\n2. b": '<ol start="1"><li>a<pre>x\n\n  y</pre></li><li>b</li></ol>',
    "a\n```js\nlet x = `1`;": "<p>a</p><pre>let x = `1`;</pre>",
    "````\n```\n````\nb": "<pre>```</pre><p>b</p>",
    "---\n* a": "<hr><ul><li>a</li></ul>",
    "| a | b |\n|---|:-:|\n| 1 | `2` |": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
                                          "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>",
    "see (https://example.org/a_b). [x](file:///etc)":
        '<p>see (<a href="https://example.org/a_b">https://example.org/a_b</a>). [x](file:///etc)</p>',
    "&lt; <br>": "<p>&amp;lt; &lt;br&gt;</p>",
}

READ_MARKDOWN = """(async (text) => {
    const { Markdown } = await import('/page/markdown.js');
    const root = document.createElement('div');
    new Markdown(root).show(text);
    for (const figure of root.querySelectorAll('figure')) {
        const code = document.createElement('pre');
        code.textContent = figure.querySelector('code').textContent;
        figure.replaceWith(code);
    }
    for (const name of ['target', 'rel', 'tabindex', 'class']) {
        for (const node of root.querySelectorAll(`[${name}]`)) node.removeAttribute(name);
    }
    return root.innerHTML;
})"""

STREAM_MARKDOWN = """(async (text) => {
    const { Markdown } = await import('/page/markdown.js');
    const [streamed, whole] = [document.createElement('div'), document.createElement('div')];
    const stream = new Markdown(streamed);
    for (let end = 0; end <= text.length; end += 1) {
        whole.replaceChildren();
        new Markdown(whole).show(text.slice(0, end));
        stream.show(text.slice(0, end));
        if (streamed.innerHTML !== whole.innerHTML) return text.slice(0, end);
    }
    return null;
})"""

LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
IDLE = "!document.body.classList.contains('running')"


class Server:
    """`lily serve` with the script."""

    def __init__(self, program, *options, port=0):
        self.file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")
        self.file.write("\n".join(map(json.dumps, SCRIPT)))
        self.file.flush()
        self.process = subprocess.Popen(
            [program, "serve", "--script", self.file.name, "--port", str(port), "--grace", "1", *options],
            stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"http://\S+:(\d+)", line):
                self.url, self.port = found[0], int(found[1])
                break
        else:
            raise SystemExit(f"{program} serve did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.file.close()


@contextmanager
def serving(program, *options, port=0):
    server = Server(program, *options, port=port)
    try:
        yield server
    finally:
        server.stop()


class Pictures:
    """Pictures of a state in both themes and on a phone, where someone wants them."""

    def __init__(self, browser, folder):
        self.browser, self.folder = browser, folder
        if folder:
            os.makedirs(folder, exist_ok=True)

    def take(self, name):
        if self.folder:
            for label, look in {"light": (1200, 820, "light"), "dark": (1200, 820, "dark"), "phone": (390, 780, "light")}.items():
                self.browser.look(*look)
                time.sleep(0.3)
                self.browser.picture(f"{self.folder}/{name}-{label}.png")
        self.browser.look(1200, 820, "light")


def say(browser, text):
    browser.write("#draft", text)
    browser.press("Enter")


def answered(browser, text):
    """Sends a message and waits for the end of its answer; the answer's text."""
    count = browser.get("document.querySelectorAll('.assistant').length")
    say(browser, text)
    browser.until(f"document.querySelectorAll('.assistant').length > {count} && {IDLE}")
    return browser.get(f"{LAST}.querySelector(':scope > .text').innerText")


def contents(request):
    return [message["content"] for message in request["messages"]]


def an_answer_streams(browser, pictures):
    say(browser, "A tour, please.")
    assert browser.get("document.querySelector('#draft').value") == ""
    browser.until(f"{LAST}?.querySelector('details').open && {LAST}.querySelector('summary').innerText == 'Thinking …'")
    browser.until(f"{LAST}.querySelector(':scope > .text li')")
    assert not browser.get(IDLE), "the first item is there only with the end"
    assert not browser.get(f"{LAST}.querySelector('details').open"), "thinking stays open when the content begins"
    pictures.take("streaming")
    browser.until(IDLE)
    counts = browser.get(f"{LAST}.querySelector('.stats').innerText")
    assert re.search(r"^\d+ tokens · [\d.,]+ tok/s · 0 of \d+ prompt tokens cached$", counts), counts
    shown = browser.get(f"{LAST}.querySelector(':scope > .text').innerHTML")
    for part in [
        "<strong>binary search</strong>", "<em>short</em>", "<code>O(log n)</code>", "<h5>When it fits</h5>", "<td>1,000,000</td>",
        "<ol", "<ul><li>the left one, if the middle is <em>larger</em></li>", "<blockquote><p>The list has to be sorted.</p></blockquote>",
        '<a href="https://example.org/search?a=1&amp;b=2" target="_blank" rel="noopener noreferrer">encyclopedia</a>',
    ]:
        assert part in shown, f"{part} is not in {shown}"
    code = browser.get(f"{LAST}.querySelector('pre').innerText")
    assert code.startswith("def search") and "\n\n    while" in code and code.endswith("return low"), code
    pictures.take("answer")


def the_next_turn_comes_from_the_cache(browser, pictures):
    browser.click("#new-chat")
    assert answered(browser, "Hi") == "Hello! What shall we do?"
    assert answered(browser, "And now?") == "The second answer."
    assert contents(browser.requests[-1]) == ["Hi", "Hello! What shall we do?", "And now?"]
    counts = browser.get(f"{LAST}.querySelector('.stats').innerText")
    cached = int(re.search(r"(\d+) of \d+ prompt tokens cached", counts)[1])
    assert cached > 0, counts
    assert browser.get("/^\\d+ of [\\d,]+ tokens$/.test(document.querySelector('#count').innerText)")


def edited_messages_are_sent_again(browser, pictures):
    browser.click(".user:first-child .actions button:nth-child(2)")
    browser.write(".user:first-child textarea", "Good morning")
    pictures.take("edit")
    browser.press("Enter")
    browser.until(f"{IDLE} && {LAST}?.innerText.includes('shall we do?')")
    assert browser.get("document.querySelectorAll('.assistant').length") == 1
    assert contents(browser.requests[-1]) == ["Good morning"], browser.requests[-1]
    sent = len(browser.requests)
    browser.get(f"{LAST}.old = true")
    browser.click(".assistant:last-child .actions button:nth-child(2)")
    browser.until(f"{IDLE} && !{LAST}?.old && {LAST}?.innerText.includes('shall we do?')")
    assert contents(browser.requests[-1]) == ["Good morning"] and len(browser.requests) == sent + 1


def the_chat_survives_a_reload(browser, pictures):
    browser.send("Page.reload")
    browser.until(f"document.querySelectorAll('#messages > li').length == 2 && {LAST}.innerText.includes('shall we do?')")
    browser.click("#new-chat")
    browser.until("!document.querySelector('#messages > li')")
    pictures.take("empty")
    browser.click("#bring-back")
    browser.until("document.querySelectorAll('#messages > li').length == 2")


def settings_reach_the_request(browser, pictures):
    browser.click("#new-chat")
    values = {
        "temperature": 0.3, "top_p": 0.9, "top_k": 12, "min_p": 0.05, "presence_penalty": 0.4, "frequency_penalty": -0.2,
        "repetition_penalty": 1.1, "max_tokens": 5, "seed": 42,
    }
    browser.click("#open-settings")
    for name, value in values.items():
        browser.write(f"[name={name}]", str(value))
    browser.write("[name=system]", "Be brief.")
    pictures.take("settings")
    browser.click("#settings [type=submit]")
    browser.click("#thinking")
    answered(browser, "Hi")
    request = browser.requests[-1]
    assert {name: request.get(name) for name in values} == values, request
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert "cut at the limit" in browser.get(f"{LAST}.innerText")
    assert browser.get(f"{LAST}.querySelector('details').hidden"), "there is thinking"
    browser.click("#open-settings")
    browser.write("[name=temperature]", "5")
    browser.press("Escape")
    say(browser, "Hi")
    browser.until("document.querySelector('#notice').innerText.includes('temperature: found 5')")
    browser.click("#open-settings")
    browser.click("#empty-all")
    browser.click("#settings [type=submit]")
    browser.click("#thinking")
    browser.click("#again")
    browser.until(f"{IDLE} && {LAST}?.innerText.includes('The second answer.')")
    assert not values.keys() & browser.requests[-1].keys(), browser.requests[-1]


def answers_stop(browser, pictures):
    browser.click("#new-chat")
    say(browser, "Something slow")
    browser.until(f"{LAST}?.querySelector(':scope > .text').innerText.includes('word5')")
    browser.press("Escape")
    browser.until(IDLE)
    text = browser.get(f"{LAST}.innerText")
    assert "Stopped · " in text and "tok/s" in text, text
    time.sleep(0.3)
    assert browser.get(f"{LAST}.innerText") == text, "it goes on"
    browser.click("#new-chat")
    say(browser, "Please muse")
    browser.until(f"{LAST}?.querySelector('details').innerText.includes('word5')")
    browser.click("#stop")
    browser.until(IDLE)
    assert "Stopped" in browser.get(f"{LAST}.innerText")


def what_a_model_writes_stays_text(browser, pictures):
    browser.click("#new-chat")
    shown = answered(browser, "Be hostile")
    for part in [
        '<img src=x onerror="window.stolen = 1">', "<script>window.stolen = 4</script>", "[a link](javascript:", "<b onclick",
    ]:
        assert part in shown, f"{part} is not in {shown}"
    assert "<i>thought</i>" in browser.get(f"{LAST}.querySelector('details .text').textContent")
    names = set(browser.get(f"[...{LAST}.querySelectorAll('*')].map((node) => node.localName)"))
    assert not names & {"img", "script", "b", "i"}, names
    attributes = browser.get(f"[...{LAST}.querySelectorAll('*')].flatMap((node) => node.getAttributeNames())")
    links = browser.get(f"[...{LAST}.querySelectorAll('a')].map((link) => link.protocol)")
    assert set(links) == {"https:"}, links
    assert not [name for name in attributes if name.startswith("on")], attributes
    assert browser.get("window.stolen ?? null") is None
    browser.click("#new-chat")
    answered(browser, "<img src=x onerror='window.stolen = 6'>")
    assert browser.get("document.querySelector('.user img') ?? window.stolen ?? null") is None


def markdown_is_read_as_it_is_meant(browser, pictures):
    for text, expected in MARKDOWN.items():
        shown = browser.get(f"{READ_MARKDOWN}({json.dumps(text)})")
        assert shown == expected, f"{text!r}\n{shown}\n{expected}"


def text_that_grows_is_shown_as_the_whole(browser, pictures):
    for text in [RICH, HOSTILE, *MARKDOWN]:
        differs = browser.get(f"{STREAM_MARKDOWN}({json.dumps(text)})")
        assert differs is None, differs


def a_model_that_repeats_itself_is_shown(browser, pictures):
    for piece in ["**", "`", "` `` ", "[a](", "> ", ">", "_a ", "- ", "```", "| a ", "# ", "http://"]:
        text = piece * (20_000 // len(piece))
        # Neither the stack nor the patience of the browser is at its end.
        assert browser.get(f"{READ_MARKDOWN}({json.dumps(text)})"), piece


def a_broken_answer_is_told(browser, pictures):
    browser.click("#new-chat")
    say(browser, "This is broken")
    browser.until("document.querySelector('#notice').innerText.includes('The answer broke off. ')")
    assert "So far so" in browser.get(f"{LAST}.innerText")


def a_key_is_asked_for(browser, program, pictures):
    with serving(program, "--api-key", "sesame") as server:
        browser.open(server.url)
        for key, reason in [("wrong", "It is what --api-key"), ("sesame", "is wrong")]:
            browser.until(f"document.querySelector('#key').open && document.querySelector('#key').innerText.includes('{reason}')")
            browser.write("[name=key]", key)
            browser.press("Enter")
        browser.until("document.querySelector('#model').innerText == 'script'")
        assert answered(browser, "Hi") == "Hello! What shall we do?"
        assert browser.get("JSON.stringify(localStorage)").count("sesame") == 0


def a_busy_server_is_waited_for(browser, program, pictures):
    with serving(program, "--parallel", "1", "--queue", "1") as server:
        browser.open(server.url)
        body = json.dumps({"messages": [{"role": "user", "content": "slow"}], "stream": True}).encode()
        ask = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        others = [urllib.request.urlopen(ask)]
        waiting = threading.Thread(target=lambda: others.append(urllib.request.urlopen(ask)))
        waiting.start()
        time.sleep(0.5)
        say(browser, "Hi")
        browser.until("/busy with other requests. Trying again in \\d+ s/.test(document.querySelector('#notice').innerText)")
        others[0].close()
        waiting.join()
        others[1].close()
        browser.until(f"{IDLE} && {LAST}?.innerText.includes('shall we do?')")
        assert browser.get("document.querySelector('#notice').hidden")


def a_dead_server_is_told(browser, program, pictures):
    with serving(program) as server:
        browser.open(server.url)
        browser.until("document.querySelector('#model').innerText == 'script'")
        say(browser, "Something slow")
        browser.until(f"{LAST}?.querySelector(':scope > .text').innerText.includes('word5')")
    browser.until("document.querySelector('#notice').innerText.includes('broke off before')")
    browser.click("#new-chat")
    say(browser, "Hi")
    browser.until("document.querySelector('#notice').innerText.includes('cannot be reached. Is “lily serve” still running?')")
    pictures.take("gone")
    with serving(program, port=server.port):
        browser.click("#again")
        browser.until(f"{IDLE} && {LAST}?.innerText.includes('shall we do?')")


def unchanged_files_are_not_sent_again(url):
    with urllib.request.urlopen(f"{url}/page/app.js") as response:
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        tag = response.headers["ETag"]
    try:
        urllib.request.urlopen(urllib.request.Request(f"{url}/page/app.js", headers={"If-None-Match": tag}))
        raise AssertionError("sent again")
    except urllib.error.HTTPError as error:
        assert error.code == 304


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the built lily")
    parser.add_argument("--pictures", metavar="DIR", help="where pictures of the page are put")
    options = parser.parse_args()
    browser = Browser()
    pictures = Pictures(browser, options.pictures)

    def check(law, *arguments):
        began = time.monotonic()
        law(*arguments)
        print(f"ok  {law.__name__.replace('_', ' ')} ({time.monotonic() - began:.1f} s)", flush=True)

    try:
        browser.look(1200, 820, "light")
        with serving(options.program) as server:
            check(unchanged_files_are_not_sent_again, server.url)
            browser.open(server.url)
            browser.until("document.querySelector('#model').innerText == 'script'")
            for law in [
                an_answer_streams, the_next_turn_comes_from_the_cache, edited_messages_are_sent_again, the_chat_survives_a_reload,
                settings_reach_the_request, answers_stop, what_a_model_writes_stays_text,
                markdown_is_read_as_it_is_meant, text_that_grows_is_shown_as_the_whole,
                a_model_that_repeats_itself_is_shown, a_broken_answer_is_told,
            ]:
                check(law, browser, pictures)
        for law in [a_key_is_asked_for, a_busy_server_is_waited_for, a_dead_server_is_told]:
            check(law, browser, options.program, pictures)
        assert not browser.errors, "\n".join(browser.errors)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
