#!/usr/bin/env python3
"""A soak test of `lily serve`: random conversations for some minutes, every answer checked against a server that caches nothing.

    python soak.py PATH_OF_LILY [--minutes 1] [--seed 1] [--clients 4]

Clients talk with the demo model at once: new conversations, next turns, questions asked again, edited, or asked from an earlier turn,
tools and their results, thinking on and off, streamed or whole, greedy or drawn with a seed; some go away in the middle. The server has
little memory and a folder for what does not fit; it is stopped or killed and started again there, several times.

What must hold:

- Every whole answer is the one that a server without a cache gives to the same request: thinking, content, calls, why it ended, and the
  counts. Where a prompt went on from a cached one, chunks had other borders and sums another order, so from the first token that
  rounding may decide on it may differ: a greedy answer where the two most likely tokens of the cold run are less than DECIDED apart, a
  drawn one where the most likely token has less than CLEAR of the probability. At most a share of DIFFERENT and MORE answers do.
- What /metrics counts is what clients saw. Those who go away may or may not have been served to the end.
- At the end of each life nothing runs or waits, and sessions keep to their memory; that of the process does not grow with the time.
- Something was cached, and something came back from the disk.
"""

import argparse
import collections
import http.client
import json
import math
import random
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from serving import Server

# Twice the 8e-2 that logits over a BF16 cache may be apart when chunks have other borders (law_budget in
# crates/cli/src/selftest.rs): each of the two may move.
DECIDED = 0.16
# A draw that the most likely token does not win has this chance of being right all the same: 1 %.
CLEAR = 0.99
# A cache that hands out wrong states spoils every answer after them; rounding did at 1 of 132. In short runs a few more may come together.
DIFFERENT, MORE = 0.02, 3
# Room for half of the conversations; the rest goes to the disk.
MEMORY = 48_000_000
CONVERSATIONS = 2
# Sessions come back from the disk where they save 512 tokens or more, so half of the conversations begin with so many.
LONG_CHARACTERS = 3000
LONGEST_CHARACTERS = 8000
# Two servers and their clients share a machine: threads of one that wait for each other would wait for the others, too.
ONE_THREAD = ["--threads", 1]
# Seconds. A machine that others use may need minutes for a prompt; a server that hangs needs longer.
PATIENCE = 600
TASKS = Path(__file__).parent.parent / "train-demo/heldout/tasks.jsonl"
ENDS = ("stop", "length", "tool_calls")


class Answer:
    """A whole answer, from a body or from a stream."""

    def __init__(self):
        self.message = {"role": "assistant", "content": "", "reasoning_content": ""}
        self.calls, self.reason, self.usage = [], None, None

    def add(self, part, reason):
        for name in ("content", "reasoning_content"):
            self.message[name] += part.get(name) or ""
        for call in part.get("tool_calls") or []:
            at = call.get("index", len(self.calls))
            if at == len(self.calls):
                self.calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            for name in ("name", "arguments"):
                self.calls[at]["function"][name] += call["function"].get(name) or ""
        self.reason = reason or self.reason

    def as_message(self):
        return {**self.message, **({"tool_calls": self.calls} if self.calls else {})}

    def seen(self):
        """What has to be the same for whoever answers."""
        calls = [call["function"] for call in self.calls]
        counts = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return {**self.message, "calls": calls, "reason": self.reason, **counts}

    @property
    def cached(self):
        return self.usage["prompt_tokens_details"]["cached_tokens"]


def whole(text):
    answer, body = Answer(), json.loads(text)
    choice = body["choices"][0]
    answer.add(choice["message"], choice["finish_reason"])
    answer.usage = body["usage"]
    return answer


def ask(port, body, cut_after=None):
    """The answer; None if the connection was cut after so many lines of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        if cut_after == 0:
            return None
        response = connection.getresponse()
        if not body.get("stream"):
            text = response.read()
            assert response.status == 200, (response.status, text)
            return whole(text)
        assert response.status == 200, (response.status, response.read())
        answer, last = Answer(), None
        for number, line in enumerate(response):
            if cut_after is not None and number >= cut_after:
                return None
            if line.startswith(b"data: "):
                last = line[6:].strip()
                if last != b"[DONE]":
                    event = json.loads(last)
                    assert "error" not in event, event
                    answer.usage = event.get("usage") or answer.usage
                    for choice in event["choices"]:
                        answer.add(choice["delta"], choice["finish_reason"])
        if last != b"[DONE]":
            raise ConnectionError("the stream ended in the middle")
        return answer
    finally:
        connection.close()


class Tally:
    """What clients saw of one life of the server."""

    def __init__(self):
        self.lock = threading.Lock()
        self.counts = collections.Counter()

    def add(self, **counts):
        with self.lock:
            self.counts.update(counts)


class Cold:
    """The server without a cache, and the records of what both servers read and wrote, which tell where answers part."""

    def __init__(self, lily, folder):
        self.folders = [Path(folder, name) for name in ("warm-trace", "cold-trace")]
        # A memory of one byte has no place for a second session.
        self.server = Server(lily, *ONE_THREAD, "--cache-memory", 1, "--parallel", 4, "--trace-dir", self.folders[1])
        stops = [self.server.answer("/tokenize", {"content": text})["tokens"] for text in ("<|im_end|>", "<|endoftext|>")]
        self.stops = {str(token): -100 for [token] in stops}

    def answer(self, body):
        answer = ask(self.server.port, {**body, "stream": False})
        assert answer.cached == 0, answer.usage
        return answer

    def parting(self, seed):
        """The step at which the answers with a seed part, and the two highest log-probabilities of the cold run there."""
        warm, cold = (record(folder, seed) for folder in self.folders)
        assert warm["prompt_ids"] == cold["prompt_ids"], "the prompts differ"
        pairs = list(zip(warm["output_ids"], cold["output_ids"]))
        step = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        # Of a stop token nothing would be reported, so it is made improbable; what is reported is not changed by that.
        body = {"prompt": cold["prompt_ids"] + cold["output_ids"][:step], "max_tokens": 1, "temperature": 0, "logprobs": 2}
        answer = self.server.answer("/v1/completions", {**body, "logit_bias": self.stops})
        top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return step, sorted(top.values(), reverse=True)

    def forget(self):
        for folder in self.folders:
            for file in folder.glob("*.json"):
                file.unlink()


def record(folder, seed):
    """Records are written when the client has its answer already."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for file in folder.glob("*.json"):
            try:
                found = json.loads(file.read_text())
            except ValueError:
                continue  # in the middle of being written
            if found.get("seed") == seed:
                return found
        time.sleep(0.2)
    raise AssertionError(f"no record of seed {seed} in {folder.name}")


class Client:
    """Someone with a few conversations, which outlive the server."""

    def __init__(self, number, seed, rows, soak):
        self.random = random.Random(1000 * seed + number)
        self.rows, self.soak = rows, soak
        self.seeds = iter(range(1_000_000 * (number + 1), 1_000_000 * (number + 2)))
        self.conversations = [self.new() for _ in range(CONVERSATIONS)]

    def new(self):
        row = self.random.choice(self.rows)
        messages = row["messages"]
        if self.random.random() < 0.5:
            text = ""
            while len(text) < LONG_CHARACTERS:
                text += self.words() + "\n\n"
            messages = [{"role": "system", "content": text}, *messages]
        # Some rows have functions as the template also takes them, bare; the API wants them as tools.
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in row["tools"] or []]
        return {"tools": tools, "messages": messages}

    def words(self):
        return self.random.choice([row for row in self.rows if not row["tools"]])["messages"][-1]["content"]

    def next_messages(self, conversation):
        """The conversation as it is sent next."""
        messages = conversation["messages"]
        if messages[-1]["role"] != "assistant":
            return messages
        kind = self.random.choices(["next", "again", "edited", "branch"], [6, 2, 2, 2])[0]
        if kind == "next":
            calls = messages[-1].get("tool_calls", [])
            if calls:
                result = lambda: json.dumps({"result": self.random.randrange(100)})
                return messages + [{"role": "tool", "tool_call_id": call["id"], "content": result()} for call in calls]
            return messages + [{"role": "user", "content": self.words()}]
        if kind == "again":
            return messages[:-1]
        asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
        at = self.random.choice(asked)
        words = messages[at]["content"] + " Please." if kind == "edited" else self.words()
        return messages[:at] + [{"role": "user", "content": words}]

    def act(self, server, tally):
        at = self.random.randrange(len(self.conversations))
        conversation = self.conversations[at]
        if self.random.random() < 0.1 or sum(len(str(m.get("content"))) for m in conversation["messages"]) > LONGEST_CHARACTERS:
            conversation = self.conversations[at] = self.new()
        messages = self.next_messages(conversation)
        streamed = self.random.random() < 0.5
        body = {
            "messages": messages,
            "seed": next(self.seeds),
            "temperature": self.random.choice([0, 0, 0, 1]),
            "max_tokens": self.random.choice([8, 24, 72]),
            "chat_template_kwargs": {"enable_thinking": self.random.random() < 0.3},
        }
        if conversation["tools"]:
            body["tools"] = conversation["tools"]
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            if self.random.random() < 0.3:
                lines = self.random.choice([0, 2, 10, 40])
                answer = ask(server.port, body, lines)
                if answer is None:
                    return tally.add(cut=1, cut_begun=lines > 0)
                return tally.add(**self.counts(answer))
        answer = ask(server.port, body)
        tally.add(**self.counts(answer))
        conversation["messages"] = messages + [answer.as_message()]
        self.soak.check(body, answer)

    @staticmethod
    def counts(answer):
        assert answer.reason in ENDS, answer.reason
        usage = answer.usage
        return {
            answer.reason: 1,
            "answers": 1,
            "hits": answer.cached > 0,
            "cached": answer.cached,
            "prompt": usage["prompt_tokens"],
            "completion": usage["completion_tokens"],
        }


class Soak:
    def __init__(self, lily, folder, cold, clients, seed):
        self.lily, self.cold = lily, cold
        self.options = [*ONE_THREAD, "--parallel", 3, "--cache-memory", MEMORY, "--cache-dir", Path(folder, "sessions")]
        self.options += ["--trace-dir", cold.folders[0]]
        rows = [json.loads(line) for line in TASKS.read_text().splitlines()]
        self.clients = [Client(number, seed, rows, self) for number in range(clients)]
        self.failures, self.partings, self.total = [], [], Tally()

    def check(self, body, answer):
        """The answer against the cold one."""
        cold = self.cold.answer(body)
        self.total.add(checked=1)
        if answer.seen() == cold.seen():
            return
        step, top = self.cold.parting(body["seed"])
        margin, likeliest = top[0] - top[-1], math.exp(top[0])
        undecided = margin < DECIDED if body["temperature"] == 0 else likeliest < CLEAR
        what = (
            f"temperature {body['temperature']}, {answer.cached} of {answer.usage['prompt_tokens']} tokens cached: parts at token "
            f"{step}, where the most likely has probability {likeliest:.4f} and a margin of {margin:.4f}"
        )
        assert undecided, f"{what}\n  got  {answer.seen()}\n  cold {cold.seen()}\n  of   {json.dumps(body)}"
        with self.total.lock:
            self.partings.append(what)

    def live(self, seconds, killed):
        """One life of the server, at the end of which it is killed at work, or stopped when its clients are done."""
        tally, samples, dying = Tally(), [], threading.Event()
        deadline = time.monotonic() + seconds

        def work(client):
            while time.monotonic() < deadline and not dying.is_set():
                try:
                    client.act(server, tally)
                except Exception as error:
                    if dying.is_set() and isinstance(error, (OSError, http.client.HTTPException)):
                        return
                    self.failures.append(traceback.format_exc())
                    return

        with Server(self.lily, *self.options) as server:
            workers = [threading.Thread(target=work, args=(client,)) for client in self.clients]
            for worker in workers:
                worker.start()
            while time.monotonic() < deadline and any(worker.is_alive() for worker in workers):
                metrics = server.metrics()
                samples.append((server.resident_bytes(), held(metrics)))
                time.sleep(0.5)
            if killed:
                dying.set()
                server.kill()
            for worker in workers:
                worker.join()
            self.total.add(lives=1, loads=loads(metrics), **tally.counts)
            if killed:
                return
            if not self.failures:
                self.end(server, tally.counts, samples)
            log = server.log
        assert server.process.returncode == 0, server.process.returncode
        assert not any("panic" in line or "ERROR" in line for line in log), log

    def end(self, server, seen, samples):
        """What holds of a server whose clients are done."""
        server.wait_idle()
        metrics = server.metrics()
        turns = collections.Counter({end: int(metrics.get(f'lily_turns_total{{outcome="{end}"}}', 0)) for end in ENDS})
        others = {name: value for name, value in metrics.items() if name.startswith("lily_turns_total")}
        abandoned = others.get('lily_turns_total{outcome="abandoned"}', 0)
        assert sum(others.values()) == sum(turns.values()) + abandoned, others
        # Who went away may have been served before it was noticed, or before the request was read.
        unseen = sum(turns.values()) - seen["answers"]
        assert all(turns[end] >= seen[end] for end in ENDS), (turns, seen)
        assert seen["cut_begun"] <= unseen + abandoned <= seen["cut"], (turns, abandoned, seen)
        for name, counter in (("prompt", "prompt"), ("cached", "cached"), ("completion", "completion")):
            counted = metrics[f"lily_{counter}_tokens_total"]
            assert counted == seen[name] if unseen == 0 else counted >= seen[name], (name, counted, seen)
        events = {kind: metrics[f'lily_cache_events{{kind="{kind}"}}'] for kind in ("hit", "miss")}
        assert seen["hits"] <= events["hit"] <= seen["hits"] + seen["cut"], (events, seen)
        assert seen["answers"] <= events["hit"] + events["miss"] <= seen["answers"] + seen["cut"], (events, seen)
        # Snapshots of requests that run come after room was made for them.
        assert held(metrics) <= 1.1 * MEMORY, held(metrics)
        assert json.loads(server.request("POST", "/drain")[2])["in_progress"] == 0
        # What an allocator keeps differs by a tenth and 8 MB from run to run; sessions may fill what they may have.
        early, late = samples[len(samples) // 4], (server.resident_bytes(), held(metrics))
        most = 1.1 * early[0] + 8e6 + max(0, late[1] - early[1])
        print(f"        {seen['answers']} answers; resident {early[0] / 1e6:.0f} MB early, {late[0] / 1e6:.0f} MB at the end", flush=True)
        assert late[0] < most, f"resident memory grew from {early} to {late}"


def loads(metrics):
    return int(metrics['lily_cache_events{kind="load"}'])


def held(metrics):
    return sum(metrics[f'lily_memory_bytes{{kind="{kind}"}}'] for kind in ("states", "snapshots"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lily")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    # Lives long enough for memory to show its course, and one of each kind at least.
    lives = max(3, round(args.minutes / 2))
    with tempfile.TemporaryDirectory() as folder:
        cold = Cold(args.lily, folder)
        soak = Soak(args.lily, folder, cold, args.clients, args.seed)
        with cold.server:
            for life in range(lives):
                killed = life % 3 == 1
                print(f"life {life + 1} of {lives}, {'killed' if killed else 'stopped'} at its end", flush=True)
                try:
                    soak.live(60 * args.minutes / lives, killed)
                except AssertionError:
                    soak.failures.append(traceback.format_exc())
                if soak.failures:
                    sys.exit("\n".join(soak.failures) + f"\nfailed with --seed {args.seed}")
                cold.forget()
    counts, parted = soak.total.counts, len(soak.partings)
    print("\n".join(soak.partings))
    print(
        f"{counts['checked']} answers checked, {parted} of them part where rounding decides; {counts['hits']} had {counts['cached']} of "
        f"their tokens cached, {counts['loads']} sessions came from the disk; {counts['cut']} were cut; {counts['lives']} lives"
    )
    assert counts["hits"] > 0 and counts["loads"] > 0, counts
    assert parted <= MORE + DIFFERENT * counts["checked"], f"{parted} of {counts['checked']} answers part"


if __name__ == "__main__":
    main()
