#!/usr/bin/env python3
"""Write mlx-lm's logits of held-out text, for `lily eval logits`.

    python heldout_logits.py ../../assets/demo ../train-demo/heldout OUT --tokens 12000

Documents of both held-out sets in turn, of each the first 1024 tokens, until there are so many; each is read from an
empty cache, its special tokens parsed. Every logits file has

  ids     I32 [n]         the tokens of all documents
  starts  I32 [documents] where each begins
  logits  [n, vocabulary] of each token's successor: F32 in OUT/mlx-lm-f32.safetensors, BF16 in OUT/mlx-lm-bf16.safetensors

The two runs are those of make_goldens.py: every floating tensor widened to float32, and the checkpoint as it is with
activations in bfloat16, where quantized matmuls add up in float32 and round once, as MLX's Metal kernels do. Printed is how
far the second is from the first, what rounding to bfloat16 does within one engine, as a record (bench/results/README.md).
"""
import argparse
import datetime
import importlib.metadata
import json
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

import make_goldens

END = "<|endoftext|>"
DOCUMENT = 1024
SETS = ("synthetic", "kjv")


def documents(tokenizer, heldout, tokens):
    """Ids of documents of each set in turn, until there are `tokens`."""
    sets = [[d + END for d in (heldout / f"{name}.txt").read_text().split(END + "\n") if d] for name in SETS]
    taken = 0
    for pair in zip(*sets):
        for text in pair:
            if taken >= tokens:
                return
            ids = tokenizer.encode(text, add_special_tokens=False).ids[:DOCUMENT]
            if len(ids) > 1:
                taken += len(ids)
                yield np.array(ids, np.int32)


def run(model, docs, name):
    """Logits [n, vocabulary] in the dtype of the model."""
    parts, began = [], time.time()
    for number, ids in enumerate(docs, 1):
        parts.append(make_goldens.forward(model, model.make_cache(), ids))
        if number % 20 == 0:
            print(f"{name}: {number} of {len(docs)} documents, {time.time() - began:.0f} s", flush=True)
    return mx.concatenate(parts)


def log_probabilities(logits):
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def compare(docs, exact, rounded):
    """How far the rounded logits are from the exact ones over all predicted tokens, as `lily eval logits` has it."""
    sums, worst, at = np.zeros(5), 0.0, 0
    for ids in docs:
        p, q = (log_probabilities(make_goldens.f32(x[at:at + len(ids) - 1])) for x in (exact, rounded))
        places = np.arange(len(ids) - 1), ids[1:]
        same, kl = (p.argmax(-1) == q.argmax(-1)).sum(), (np.exp(p) * (p - q)).sum(-1)
        sums += [len(ids) - 1, p[places].sum(), q[places].sum(), same, kl.sum()]
        worst = max(worst, kl.max())
        at += len(ids)
    n, p, q, same, kl = sums
    against = {"name": "mlx-lm-f32.safetensors", "perplexity": np.exp(-p / n), "same_top": same / n, "kl": kl / n, "worst_kl": worst}
    return {"tokens": int(n), "perplexity": np.exp(-q / n), "against": against}


def record(checkpoint, result):
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    engine = f"mlx-lm {importlib.metadata.version('mlx-lm')}"
    head = {"eval": "logits", "engine": engine, "commit": None, "date": now, "device": "cpu, bfloat16", "kv": "bf16"}
    return json.dumps({**head, "model": checkpoint.resolve().name, "result": result})


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("checkpoint", type=Path)
    ap.add_argument("heldout", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--tokens", type=int, default=12_000)
    args = ap.parse_args()
    mx.set_default_device(mx.cpu)
    docs = list(documents(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")), args.heldout, args.tokens))
    starts = np.cumsum([0] + [len(ids) for ids in docs[:-1]])
    model, _ = load_model(args.checkpoint, strict=True)
    rounded = run(model, docs, "bf16")
    model.set_dtype(mx.float32)
    exact = run(model, docs, "f32")
    assert (rounded.dtype, exact.dtype) == (mx.bfloat16, mx.float32)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, logits in (("f32", exact), ("bf16", rounded)):
        arrays = {"ids": mx.array(np.concatenate(docs)), "starts": mx.array(starts.astype(np.int32)), "logits": logits}
        mx.save_safetensors(str(args.out / f"mlx-lm-{name}.safetensors"), arrays)
    print(record(args.checkpoint, compare(docs, exact, rounded)))


if __name__ == "__main__":
    main()
