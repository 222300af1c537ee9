#!/usr/bin/env python3
"""How long a conversation of many tokens waits for the first token of its second turn, against its first. A benchmark.

    second_turn.py LILY CHECKPOINT [--tokens 16384] [--rounds 3] [-- ARGUMENTS OF lily serve]

Each round is a conversation of its own: a long question, its answer of 16 tokens, a short question. What is measured is the time from
sending the request to the first part of the answer, over a stream; printed are the rounds and the median of their ratios.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request


def start(lily, checkpoint, more):
    command = [lily, "serve", "--port", "0", "--model", checkpoint, *more]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        print(line, end="", file=sys.stderr)
        if found := re.search(r"http://\S+?(?= is ready)", line):
            return server, found.group()
    sys.exit("the server did not start")


def ask(address, messages):
    """Time to the first part of the answer, the answer, and the usage."""
    body = {"messages": messages, "max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}, "seed": 1}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    sent, first, text, usage = time.perf_counter(), None, "", None
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                part = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
                if part or choice["finish_reason"]:
                    first = first or time.perf_counter()
                text += delta.get("content") or ""
    return first - sent, text, usage


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lily")
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("more", nargs="*")
    args = parser.parse_args()
    server, address = start(args.lily, args.checkpoint, args.more)
    draw = random.Random(7)
    ratios = []
    try:
        for _ in range(args.rounds):
            # A digit and a space are a token each at most.
            question = " ".join(str(draw.randrange(10)) for _ in range(args.tokens // 2))
            messages = [{"role": "user", "content": question}]
            first, text, usage = ask(address, messages)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
            second, _, after = ask(address, messages)
            ratios.append(second / first)
            print(
                f"{usage['prompt_tokens']} tokens: first {first:.3f} s, second {second:.3f} s with "
                f"{after['prompt_tokens_details']['cached_tokens']} of {after['prompt_tokens']} cached, ratio {second / first:.4f}"
            )
    finally:
        server.terminate()
        server.wait()
    print(f"median ratio {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
