#!/usr/bin/env python3
"""Cut the goldens of the tiny checkpoint down to what the repository keeps.

    python cut_goldens.py OUT/tiny.safetensors ../../testdata/goldens/tiny.safetensors

Kept: the float32 logits of every position of every prompt, the greedy
continuations with their margins, the router margins, and the trace. Left out:
the BF16 run, the logits behind the greedy continuations, and traces that repeat
another tensor.
"""
import argparse

import mlx.core as mx

MOST_BYTES = 8_000_000
# Module outputs that are also kept as the output of the module around them or as the logits.
REPEATED = ("language_model", "language_model.lm_head", "language_model.model",
            ".out_proj", ".o_proj", "shared_expert.down_proj", "switch_mlp.down_proj")


def keep(name):
    if name.startswith("trace."):
        path = name.removeprefix("trace.")
        return path not in REPEATED and not path.endswith(REPEATED[3:])
    return not (".bf16." in name or name.endswith(".greedy_logits"))


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("goldens")
    ap.add_argument("out")
    args = ap.parse_args()
    kept = {name: x for name, x in mx.load(args.goldens).items() if keep(name)}
    size = sum(x.nbytes for x in kept.values())
    if size > MOST_BYTES:
        raise SystemExit(f"{size} bytes are kept, at most {MOST_BYTES} are wanted in the repository")
    mx.save_safetensors(args.out, kept)
    print(len(kept), "tensors", size, "bytes")


if __name__ == "__main__":
    main()
