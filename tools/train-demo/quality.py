"""The quality ladder: the same held-out text through one engine after the other, all in float32.

    python quality.py score torch RUN/bf16 a.npz              # transformers on the BF16 weights
    python quality.py score torch ../../assets/demo b.npz     # transformers on the 4-bit weights, dequantized
    python quality.py score mlx ../../assets/demo c.npz       # mlx-lm on the 4-bit weights
    python quality.py score lily-reference ../../assets/demo d.npz    # lily's specification (`lily` on the PATH)
    python quality.py score lily-cpu ../../assets/demo e.npz          # lily's CPU backend
    python quality.py compare a.npz b.npz c.npz

Each document of heldout/{synthetic,kjv}.txt (they end with <|endoftext|> and a line break, which is not part of them) is read alone, from
an empty state, its special tokens parsed. Every token but the first is predicted, the end mark included. Perplexity is exp of the mean
over all these tokens; agreement is how often two engines have the same most likely token.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import generate

HERE = Path(__file__).resolve().parent
SETS = ("synthetic", "kjv")
BATCH_TOKENS = 16_384


def documents(name):
    tok = Tokenizer.from_file(str(generate.ASSETS / "tokenizer.json"))
    texts = [d + generate.END for d in (HERE / "heldout" / f"{name}.txt").read_text().split(generate.END + "\n") if d]
    return [e.ids for e in tok.encode_batch(texts, add_special_tokens=False)]


def batches(docs):
    """Indices of documents of like length, padded on the right: a causal model does not see the padding."""
    order = sorted(range(len(docs)), key=lambda i: len(docs[i]))
    now = []
    for i in order:
        if now and (len(now) + 1) * len(docs[i]) > BATCH_TOKENS:
            yield now
            now = []
        now.append(i)
    yield now


def torch_engine(checkpoint):
    import torch

    import model as demo

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    demo.plain_delta_rule()
    demo.dense_experts()
    model = demo.load(checkpoint, experts="eager").to(device).eval()

    def run(ids):
        x = torch.from_numpy(ids).to(device)
        with torch.no_grad():
            logp = model(input_ids=x, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        return logp.gather(-1, x[:, 1:, None])[..., 0].cpu().numpy(), logp.argmax(-1).cpu().numpy()

    return run


def mlx_engine(checkpoint):
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(checkpoint), strict=True)
    model.set_dtype(mx.float32)

    def run(ids):
        x = mx.array(ids)
        logits = model(x)[:, :-1]
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        got = mx.take_along_axis(logp, x[:, 1:, None], -1)[..., 0], mx.argmax(logp, -1)
        mx.eval(got)
        return tuple(np.array(g) for g in got)

    return run


def lily_engine(checkpoint, backend):
    from safetensors.numpy import load_file

    def row(ids, out):
        # Ids of the padding are read as well; a causal model does not see them.
        command = ["lily", "logits", ",".join(map(str, ids)), "--model", str(checkpoint), "--backend", backend, "--out", out]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        logits = load_file(out)["logits"][:-1].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        return np.take_along_axis(logp, ids[1:, None], -1)[:, 0], logits.argmax(-1)

    def run(ids):
        with tempfile.TemporaryDirectory() as folder:
            rows = [row(r, f"{folder}/logits.safetensors") for r in ids]
        return tuple(np.stack(column) for column in zip(*rows))

    return run


ENGINES = {
    "torch": torch_engine,
    "mlx": mlx_engine,
    "lily-cpu": lambda checkpoint: lily_engine(checkpoint, "cpu"),
    "lily-reference": lambda checkpoint: lily_engine(checkpoint, "reference"),
}


def score(engine, checkpoint, out):
    run, arrays = ENGINES[engine](checkpoint), {}
    for name in SETS:
        docs = documents(name)
        logp, top = [None] * len(docs), [None] * len(docs)
        for some in batches(docs):
            ids = np.zeros((len(some), max(len(docs[i]) for i in some)), np.int64)
            for row, i in zip(ids, some):
                row[:len(docs[i])] = docs[i]
            lp, t = run(ids)
            for row, i in enumerate(some):
                logp[i], top[i] = lp[row, :len(docs[i]) - 1], t[row, :len(docs[i]) - 1].astype(np.uint16)
        arrays[name + "_logp"], arrays[name + "_top"] = np.concatenate(logp).astype(np.float32), np.concatenate(top)
        print(name, len(arrays[name + "_logp"]), "tokens, perplexity", float(np.exp(-arrays[name + "_logp"].astype(np.float64).mean())), flush=True)
    np.savez(out, **arrays)


def compare(files):
    before = None
    print(f"{'':28}" + "".join(f"{n + ' perplexity':>22}{'top-1 as above':>16}" for n in SETS))
    for f in files:
        z = np.load(f)
        row = f"{Path(f).stem:28}"
        for name in SETS:
            row += f"{np.exp(-z[name + '_logp'].astype(np.float64).mean()):22.4f}"
            row += f"{(z[name + '_top'] == before[name + '_top']).mean():16.4%}" if before else " " * 16
        print(row)
        before = z


def main():
    ap = argparse.ArgumentParser()
    sub = ap.add_subparsers(dest="what", required=True)
    p = sub.add_parser("score")
    p.add_argument("engine", choices=ENGINES)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("out", type=Path)
    p = sub.add_parser("compare")
    p.add_argument("files", nargs="+")
    args = ap.parse_args()
    if args.what == "score":
        score(args.engine, args.checkpoint, args.out)
    else:
        compare(args.files)


if __name__ == "__main__":
    main()
