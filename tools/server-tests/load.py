"""A bounded load on `lily serve`: many clients, some of whom go away, send nonsense or read slowly.

    python load.py PATH_OF_LILY [SEED]
"""

import http.client
import json
import queue
import random
import socket
import sys
import threading
import time

from serving import Server, run, script

LILY = sys.argv[1]
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 1
REQUESTS, CONNECTIONS = 200, 16
MEMORY = 64_000_000
ANSWER_TOKENS = 24

STORIES = ["a fox", "a cat", "the sea", "a baker", "two friends", "a boat", "a wish", "a king"]
PROMPTS = [f"Tell me a story about {what}." for what in STORIES]
PROMPTS += [f"{8 * 'The fox ran over the hill and saw the sea. '}What did it see? It was {what}." for what in STORIES]
LONG = "The fox ran over the hill and saw the sea. " * 150


def ask(prompt):
    return [{"role": "user", "content": prompt}]


def chat_text(answer):
    message = answer["choices"][0].get("message") or answer["choices"][0].get("delta") or {}
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def response_text(event):
    if "output" in event:
        return "".join(part["text"] for item in event["output"] for part in item["content"])
    return event["delta"] if event["type"] in ("response.output_text.delta", "response.reasoning_text.delta") else ""


def message_text(event):
    if event["type"] == "message":
        return "".join(block.get("text") or block.get("thinking") for block in event["content"])
    return event.get("delta", {}).get("text") or event.get("delta", {}).get("thinking") or ""


# Path, body of a prompt, text of a whole answer or of one event.
APIS = {
    "/v1/chat/completions": (lambda p: {"messages": ask(p), "max_tokens": ANSWER_TOKENS}, chat_text),
    "/v1/completions": (lambda p: {"prompt": p, "max_tokens": ANSWER_TOKENS}, lambda a: a["choices"][0]["text"]),
    "/v1/responses": (lambda p: {"input": p, "max_output_tokens": ANSWER_TOKENS}, response_text),
    "/v1/messages": (
        lambda p: {"messages": ask(p), "max_tokens": ANSWER_TOKENS, "thinking": {"type": "adaptive"}},
        message_text,
    ),
}
LASTS = ("[DONE]", "response.completed", "response.incomplete", "message_stop")

MALFORMED = [
    (b"{", {}, 400),
    (b"", {}, 400),
    (b'{"messages": 7}', {}, 400),
    (b'{"messages": [{"role": "nobody", "content": []}]}', {}, 400),
    (b"\xff\xfe{}", {}, 400),
    (b"{}", {"Content-Type": "text/plain"}, 415),
    (b"[" * 100_000, {}, 400),
]


class Client:
    """One connection, opened again when it was cut."""

    def __init__(self, port, seed, expected):
        self.port, self.random, self.expected = port, random.Random(seed), expected
        self.connection = None

    def open(self, receive_bytes=None):
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
            self.connection.connect()
        if receive_bytes:
            self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)

    def cut(self):
        self.connection.close()
        self.connection = None

    def send(self, path, body, headers=None, **options):
        self.open(**options)
        data = body if isinstance(body, bytes) else json.dumps({"temperature": 0, **body}).encode()
        self.connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})

    def choose(self):
        path = self.random.choice(list(APIS))
        prompt = self.random.choice(PROMPTS)
        return path, prompt, APIS[path][0](prompt)

    def whole(self):
        path, prompt, body = self.choose()
        self.send(path, body)
        response = self.connection.getresponse()
        text = response.read()
        assert response.status == 200, (path, response.status, text)
        self.check(path, prompt, APIS[path][1](json.loads(text)))

    def streamed(self, pause=0.0, **options):
        path, prompt, body = self.choose()
        self.send(path, {**body, "stream": True}, **options)
        response = self.connection.getresponse()
        assert response.status == 200, (path, response.status, response.read())
        text, last = "", None
        for line in response:
            time.sleep(pause)
            if line.startswith(b"data: "):
                last = line[6:].strip().decode()
                if last != "[DONE]":
                    event = json.loads(last)
                    last = event.get("type", last)
                    if event.get("choices", True):
                        text += APIS[path][1](event) if "response" not in event else ""
        assert last in LASTS, (path, last)
        self.check(path, prompt, text)

    def check(self, path, prompt, text):
        alone = self.expected[path, prompt]
        assert text == alone, f"{path} {prompt!r}: {text!r}, but alone {alone!r}"

    def slow(self):
        # About a fifth of what an answer has goes into the buffers; the rest waits for its reader.
        self.streamed(pause=self.random.uniform(0.002, 0.02), receive_bytes=2048)
        self.cut()

    def gone_in_prompt(self):
        self.send("/v1/chat/completions", {"messages": ask(f"{self.random.random()} {LONG}"), "stream": True})
        time.sleep(self.random.uniform(0, 0.2))
        self.cut()

    def gone_in_answer(self):
        path, _, body = self.choose()
        self.send(path, {**body, "stream": True})
        response = self.connection.getresponse()
        for _ in range(self.random.randrange(1, 20)):
            response.readline()
        self.cut()

    def gone_in_body(self):
        self.open()
        self.connection.sock.sendall(b'POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{"messages": [')
        self.cut()

    def malformed(self):
        body, headers, expected = self.random.choice(MALFORMED)
        self.send("/v1/chat/completions", body, headers)
        response = self.connection.getresponse()
        text = response.read()
        assert response.status == expected and json.loads(text)["error"]["message"], (body[:40], response.status, text)
        # What was refused before its body was read ends the connection.
        self.cut()


KINDS = {"whole": 5, "streamed": 5, "slow": 2, "gone_in_prompt": 2, "gone_in_answer": 3, "gone_in_body": 1, "malformed": 2}


def alone(port):
    """What each prompt gives when nothing else goes on."""
    expected = {}
    client = Client(port, 0, None)
    for path, (body, text) in APIS.items():
        for prompt in PROMPTS:
            client.send(path, body(prompt))
            expected[path, prompt] = text(json.loads(client.connection.getresponse().read()))
    return expected


def load(server, expected, seed):
    """Sends half of the requests; raises if any failed."""
    kinds = random.Random(seed).choices(list(KINDS), KINDS.values(), k=REQUESTS // 2)
    todo, failures, done = queue.SimpleQueue(), [], []
    for kind in kinds:
        todo.put(kind)

    def work(number):
        client = Client(server.port, 1000 * seed + number, expected)
        while True:
            try:
                kind = todo.get_nowait()
            except queue.Empty:
                return
            try:
                getattr(client, kind)()
            except Exception as error:
                failures.append(f"{kind}: {type(error).__name__}: {error}")
                client.cut()
            done.append(kind)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(CONNECTIONS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(done) == REQUESTS // 2
    assert not failures, f"{len(failures)} of {len(done)} failed:\n" + "\n".join(failures[:10])


def under_load(*options):
    with Server(LILY, *options) as quiet:
        expected = alone(quiet.port)
    with Server(LILY, "--cache-memory", MEMORY, *options) as server:
        load(server, expected, SEED)
        server.wait_idle()
        warm = server.resident_bytes()
        load(server, expected, SEED + 1)
        server.wait_idle()
        end = server.resident_bytes()
        metrics = server.metrics()
        held = sum(metrics[f'lily_memory_bytes{{kind="{kind}"}}'] for kind in ("states", "snapshots"))
        print(f"        resident after warm-up {warm / 1e6:.0f} MB, at the end {end / 1e6:.0f} MB, sessions {held / 1e6:.0f} MB")
        # Snapshots of requests that run come after room was made for them.
        assert metrics["lily_sessions_parked"] <= 64 and held <= 1.1 * MEMORY, (metrics["lily_sessions_parked"], held)
        # What an allocator keeps differs by so much from run to run.
        assert end < 1.1 * warm + 8e6, (warm, end)
        assert server.process.poll() is None and not any("panic" in line for line in server.log), server.log


def a_paced_script():
    words = "The fox ran over the hill and saw the sea, and it went home and slept well that night. "
    lines = [{"when": story, "output": f"<think>\nAbout {story}.\n</think>\n\nIt is {story}. {words}"} for story in STORIES]
    pace = {"tokens_per_second": 200, "prompt_tokens_per_second": 20000}
    under_load("--script", script(*lines, {"output": words}, pace), "--parallel", 4)


def the_demo_model():
    under_load("--parallel", 4)


def readers_that_stop_hold_up_nobody():
    # A stream of 20,000 tokens, 4 MB, is more than the buffers between server and reader take.
    lines = [{"when": "much", "output": 2000 * "The fox ran over the hill and saw the sea. "}, {"output": "Little."}]
    with Server(LILY, "--script", script(*lines), "--parallel", 4) as server:
        stopped = [Client(server.port, number, None) for number in range(4)]
        for client in stopped:
            client.send("/v1/chat/completions", {"messages": ask("much"), "stream": True}, receive_bytes=2048)
        time.sleep(1)
        body = {"messages": ask("Anything"), "enable_thinking": False}
        for _ in range(10):
            answer = server.answer("/v1/chat/completions", body)
            assert chat_text(answer) == "Little.", answer
        in_progress = lambda: json.loads(server.request("POST", "/drain")[2])["in_progress"]
        assert in_progress() == len(stopped), "they did not stop"
        for client in stopped:
            client.cut()
        deadline = time.monotonic() + 10
        while in_progress() > 0:
            assert time.monotonic() < deadline, "an answer without a reader is still in progress"
            time.sleep(0.05)
        server.wait_idle()


if __name__ == "__main__":
    run([(f.__name__, f) for f in (readers_that_stop_hold_up_nobody, a_paced_script, the_demo_model)])
