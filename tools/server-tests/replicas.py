#!/usr/bin/env python3
"""One `lily serve` on several NVIDIA GPUs, a replica on each:

    python tools/server-tests/replicas.py PATH_OF_LILY [GPUS]

Conversations at the same time get the answers that one GPU gives, each goes on from its own cache, and every GPU has part in it. Needs so
many GPUs (two if not said) and a checkout beside it for the demo model."""

import concurrent.futures
import pathlib
import subprocess
import sys

from serving import Server, run

LILY = sys.argv[1]
GPUS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
DEMO = pathlib.Path(__file__).resolve().parents[2] / "assets/demo"
CONVERSATIONS = 16
QUESTIONS = ["Tell me a story about a fox number {}.", "What did it find?"]


def serve(replicas):
    options = ("--model", DEMO, "--backend", "cuda", "--replicas", replicas, "--parallel", CONVERSATIONS)
    return Server(LILY, *options)


def converse(server, number):
    """Texts of the turns, and how many tokens of the last came from the cache."""
    messages, texts = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question.format(number)})
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 64, "prompt_cache_key": f"c{number}"}
        answer = server.answer("/v1/chat/completions", body)
        texts.append(answer["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def memory_by_gpu():
    """MiB that are in use on each GPU. Of the GPU, not of the process: in a container that one is not always named."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()]


def same_answers():
    before = memory_by_gpu()
    assert len(before) >= GPUS, f"{len(before)} GPUs, and {GPUS} are needed"
    with serve(1) as server:
        alone = [converse(server, number) for number in range(CONVERSATIONS)]
    with serve(GPUS) as server, concurrent.futures.ThreadPoolExecutor(CONVERSATIONS) as pool:
        together = list(pool.map(lambda number: converse(server, number), range(CONVERSATIONS)))
        during = memory_by_gpu()
    for number, ((texts, _), (expected, _)) in enumerate(zip(together, alone)):
        assert texts == expected, f"conversation {number}: {texts}, alone {expected}"
    for number, (_, cached) in enumerate(together):
        assert cached > 0, f"conversation {number}: nothing of its first turn was cached"
    grown = [after - least for after, least in zip(during, before)]
    assert all(more > 100 for more in grown[:GPUS]), f"MiB more by GPU: {grown}"
    print(f"MiB more by GPU: {grown}; cached tokens: {[cached for _, cached in together]}")


def too_many():
    command = [LILY, "serve", "--model", str(DEMO), "--backend", "cuda", "--replicas", "99", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and "GPU" in ended.stderr, ended


run([(f"{CONVERSATIONS} conversations on {GPUS} GPUs", same_answers), ("more replicas than GPUs", too_many)])
