#!/usr/bin/env python3
"""Run mlx-lm's own model code on a checkpoint and write reference outputs.

    python make_goldens.py tiny CHECKPOINT_DIR goldens
    python make_goldens.py wide CHECKPOINT_DIR goldens

Writes goldens/<size>.safetensors and goldens/<size>.json.  Two runs of the same
weights are recorded:

  f32   every floating tensor widened to float32 (the packed integers stay), so
        all arithmetic is float32.  This is the number to be close to.
  bf16  the checkpoint as it is, activations in bfloat16, as mlx-lm runs it.
        This says how far an honest half-precision engine may be from f32.
        MLX's CPU kernels for quantized matmul add up in bfloat16 (2 to 7 % error
        at K = 256 to 4096), which its Metal kernels do not; so here those two
        operations widen their inputs and round only their result.

Everything goes through mlx_lm.utils.load_model and the model's own cache.
"""
import argparse
import json
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

PROMPT_SEED = 7
LENGTHS = {"tiny": [1, 7, 64, 65, 300, 1000], "wide": [1, 7, 64, 65, 300]}
BF16_STORED = {"tiny": 1000, "wide": 65}   # longest prompt whose bf16 logits are kept
CHUNKS = {1: [1], 7: [3, 1], 64: [16, 63], 65: [64, 1, 33], 300: [64, 37], 1000: [512, 300]}
STEPS = 32
TRACE_LEN = 7


def widen(fn):
    """A quantized matmul on bf16 that accumulates in float32 and rounds once."""
    def call(x, w, scales, biases=None, *args, **kwargs):
        if x.dtype != mx.bfloat16:
            return fn(x, w, scales, biases, *args, **kwargs)
        x, scales, biases = (v.astype(mx.float32) for v in (x, scales, biases))
        return fn(x, w, scales, biases, *args, **kwargs).astype(mx.bfloat16)
    return call


mx.quantized_matmul = widen(mx.quantized_matmul)
mx.gather_qmm = widen(mx.gather_qmm)


def prompts(size, vocab):
    """Uniform random ids below vocab-8 (the top ids play special tokens)."""
    rng = np.random.default_rng(PROMPT_SEED)
    return {n: rng.integers(0, vocab - 8, n).astype(np.int32) for n in LENGTHS[size]}


def forward(model, cache, ids):
    out = model(mx.array(np.asarray(ids)[None]), cache=cache)[0]
    mx.eval(out, [c.state for c in cache])
    return out


def f32(x):
    return np.array(x.astype(mx.float32))


def greedy(model, cache, last, steps=STEPS):
    """last: logits after the prompt.  Returns tokens, logits row of each choice."""
    tokens, rows = [], [f32(last)]
    for i in range(steps):
        tokens.append(int(rows[-1].argmax()))
        if i + 1 < steps:
            rows.append(f32(forward(model, cache, tokens[-1:])[-1]))
    return np.array(tokens, np.int32), np.stack(rows)


def margin(rows):
    top = np.sort(rows, -1)[:, -2:]
    return top[:, 1] - top[:, 0]


def diff(a, b):
    d = np.abs(a - b)
    la, lb = (x - x.max(-1, keepdims=True) for x in (a, b))
    la, lb = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (la, lb))
    kl = (np.exp(la) * (la - lb)).sum(-1)
    return {"max_abs": float(d.max()), "mean_abs": float(d.mean()),
            "rms": float(np.sqrt((d ** 2).mean())),
            "mean_kl": float(kl.mean()), "max_kl": float(kl.max()),
            "argmax_agree": float((a.argmax(-1) == b.argmax(-1)).mean())}


class Trace:
    """Records every submodule's output during one forward, by parameter path.

    A second call of the same module (rope: queries, then keys) gets "#1".
    """

    def __init__(self, model):
        from mlx_lm.models import qwen3_5
        from mlx_lm.models.gated_delta import compute_g
        self.out, self.undo = {}, []
        names = {id(m): n for n, m in model.named_modules() if n}
        for cls in {type(m) for _, m in model.named_modules()}:
            if "__call__" not in cls.__dict__:
                continue
            orig = cls.__call__

            def call(mod, *a, _orig=orig, **k):
                y = _orig(mod, *a, **k)
                name = names.get(id(mod))
                if name and isinstance(y, mx.array):
                    self.put(name, y)
                    if name.endswith(".switch_mlp"):
                        self.put(name + ".indices", a[1])
                return y

            self.patch(cls, "__call__", call)
        linear = sorted((n for n in names.values() if n.endswith(".linear_attn")),
                        key=lambda n: int(n.split(".")[-2]))
        update, step = qwen3_5.gated_delta_update, iter(linear)

        def gated(q, k, v, a, b, A_log, dt_bias, *rest, **kw):
            y, state = update(q, k, v, a, b, A_log, dt_bias, *rest, **kw)
            name = next(step)
            for key, x in dict(q=q, k=k, v=v, g=compute_g(A_log, a, dt_bias),
                               beta=mx.sigmoid(b), y=y).items():
                self.put(f"{name}.delta.{key}", x)
            return y, state

        self.patch(qwen3_5, "gated_delta_update", gated)

    def put(self, name, y):
        n, base = 0, name
        while name in self.out:
            n += 1
            name = f"{base}#{n}"
        self.out[name] = y

    def patch(self, owner, attr, new):
        self.undo.append((owner, attr, getattr(owner, attr)))
        setattr(owner, attr, new)

    def stop(self):
        for owner, attr, old in reversed(self.undo):
            setattr(owner, attr, old)


def route_margin(model, ids):
    """Gap between the k-th and (k+1)-th router logit: [layer][position]."""
    from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock as Block
    seen, orig = [], Block.__call__

    def call(self, x):
        g = np.sort(f32(self.gate(x))[0], -1)
        seen.append(g[:, -self.top_k] - g[:, -self.top_k - 1])
        return orig(self, x)

    Block.__call__ = call
    try:
        forward(model, model.make_cache(), ids)
    finally:
        Block.__call__ = orig
    return np.stack(seen)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("size", choices=LENGTHS)
    ap.add_argument("checkpoint", type=Path)
    ap.add_argument("out", type=Path)
    args = ap.parse_args()
    mx.set_default_device(mx.cpu)
    t0 = time.time()

    def log(*a):
        print(f"{time.time() - t0:6.1f}s", *a, flush=True)

    model, cfg = load_model(args.checkpoint)
    vocab = cfg["text_config"]["vocab_size"]
    ids = prompts(args.size, vocab)
    arrays, info = {}, {"prompts": {}}
    for n, p in ids.items():
        arrays[f"p{n}.ids"] = mx.array(p)

    bf = {}
    for n, p in ids.items():
        cache = model.make_cache()
        out = forward(model, cache, p)
        assert out.dtype == mx.bfloat16
        bf[n] = f32(out)
        if n <= BF16_STORED[args.size]:
            arrays[f"p{n}.bf16.logits"] = out
        tok, rows = greedy(model, cache, out[-1])
        arrays[f"p{n}.bf16.greedy"] = mx.array(tok)
        log("bf16", n)

    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    for n, p in ids.items():
        cache = model.make_cache()
        out = forward(model, cache, p)
        assert out.dtype == mx.float32
        full = f32(out)
        tok, rows = greedy(model, cache, out[-1])
        gap = margin(rows)
        arrays[f"p{n}.f32.logits"] = mx.array(full)
        arrays[f"p{n}.f32.greedy"] = mx.array(tok)
        arrays[f"p{n}.f32.greedy_margin"] = mx.array(gap)
        if args.size == "tiny":
            arrays[f"p{n}.f32.greedy_logits"] = mx.array(rows)
        rec = info["prompts"][str(n)] = {
            "greedy": tok.tolist(), "greedy_min_margin": float(gap.min()),
            "min_argmax_margin": float(margin(full).min()),
            "logit_std": float(full.std()), "chunked_prefill": {},
        }
        # The same logits when the prompt and its continuation are fed at once.
        again = f32(forward(model, model.make_cache(), np.concatenate([p, tok[:-1]])))
        rec["decode_vs_one_pass"] = diff(rows, again[n - 1:])
        rec["prefill_vs_longer_prefill"] = diff(full, again[:n])
        for size in CHUNKS[n]:
            cache = model.make_cache()
            parts = [f32(forward(model, cache, p[i:i + size])) for i in range(0, n, size)]
            tail, _ = greedy(model, cache, mx.array(parts[-1][-1]), steps=4)
            rec["chunked_prefill"][str(size)] = dict(
                diff(full, np.concatenate(parts)), greedy_same=bool((tail == tok[:4]).all()))
        gaps = route_margin(model, p)
        # A prompt's positions after its smallest margin may differ by a whole expert.
        arrays[f"p{n}.f32.router_margin"] = mx.array(gaps.min(0))
        rec["route_margin"] = {"min": float(gaps.min()),
                               "p1": float(np.percentile(gaps, 1)),
                               "median": float(np.median(gaps))}
        rec["bf16_vs_f32"] = diff(full, bf[n])
        same = np.array(arrays[f"p{n}.bf16.greedy"]) == tok
        rec["bf16_greedy_same_prefix"] = STEPS if same.all() else int(same.argmin())
        log("f32", n, json.dumps(rec)[:160])

    if args.size == "tiny":
        # Every module's output for the short prompt, and the caches after it.
        trace = Trace(model)
        cache = model.make_cache()
        forward(model, cache, ids[TRACE_LEN])
        trace.stop()
        for name, y in trace.out.items():
            keep = mx.int32 if name.endswith(".indices") else mx.float32
            arrays[f"trace.{name}"] = y.astype(keep)
        for i, c in enumerate(cache):
            # linear attention: conv inputs, state; full attention: keys, values
            kept = c.cache if hasattr(c, "cache") else [
                c.keys[..., :c.offset, :], c.values[..., :c.offset, :]]
            for j, state in enumerate(kept):
                arrays[f"trace.cache.{i}.{j}"] = state.astype(mx.float32)
        info["trace_prompt"] = TRACE_LEN

    args.out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(args.out / f"{args.size}.safetensors"), arrays)
    (args.out / f"{args.size}.json").write_text(json.dumps(info, indent=1))
    log("done", sum(a.nbytes for a in arrays.values()), "bytes")


if __name__ == "__main__":
    main()
