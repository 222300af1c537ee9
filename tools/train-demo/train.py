"""Trains the demo model on one GPU from the shards that generate.py writes (it waits for a shard that is not there yet).

    python train.py --shards SHARDS --heldout heldout --out RUN --steps 5000
    python train.py ... --state RUN/state.pt          # go on where a stage stopped
    python train.py ... --weights RUN/bf16            # start a new schedule from trained weights

Writes RUN/log.jsonl, RUN/state.pt (every --save steps and at the end) and RUN/bf16/ (weights in transformers' layout).
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import generate
import model as demo

ROWS, LENGTH = 32, generate.ROW


def rate(step, steps, peak, warmup=150, floor=0.02):
    """Linear warm-up, then a cosine to `floor` of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    x = (step - warmup) / max(1, steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, x))))


class Shards:
    """Step -> batch. Shard files appear while training runs."""

    def __init__(self, folder, first=0):
        self.folder, self.first, self.index, self.rows = Path(folder), first, None, None
        self.per_shard = generate.ROWS_PER_SHARD // ROWS

    def batch(self, step):
        index = self.first + step // self.per_shard
        if index != self.index:
            path, waited = self.folder / f"{index:04}.npy", time.time()
            while not path.exists():
                if time.time() - waited > 300:
                    raise SystemExit(f"{path} did not appear within five minutes")
                time.sleep(0.2)
            rows = np.load(path)
            np.random.default_rng(index).shuffle(rows)
            self.index, self.rows = index, torch.from_numpy(rows.astype(np.int32)).pin_memory()
        at = step % self.per_shard * ROWS
        return self.rows[at:at + ROWS].cuda(non_blocking=True).long()


def labels_of(ids):
    """Next tokens; padding (an end mark after an end mark) does not count."""
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    labels[(inputs == demo.END_OF_TEXT) & (labels == demo.END_OF_TEXT)] = -100
    return inputs, labels


def heldout_rows(path):
    tok = Tokenizer.from_file(str(generate.ASSETS / "tokenizer.json"))
    docs = [d + generate.END for d in Path(path).read_text().split(generate.END + "\n") if d]
    ids = [e.ids for e in tok.encode_batch(docs, add_special_tokens=False)]
    count = -(-sum(map(len, ids)) // LENGTH)
    stream = iter(ids)
    rows = []
    while len(rows) < count:
        row, at = np.full(LENGTH + 1, demo.END_OF_TEXT, np.int64), 0
        for doc in stream:
            row[at:at + len(doc)] = doc[:LENGTH + 1 - at]
            at += len(doc)
            if at > LENGTH:
                break
        rows.append(row)
    return torch.from_numpy(np.stack(rows))


def loss_of(model, ids):
    inputs, labels = labels_of(ids)
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def evaluate(model, sets, gates):
    model.eval()
    out = {}
    with torch.compiler.set_stance("force_eager"):
        for name, rows in sets.items():
            losses, shares = [], []
            for i in range(0, len(rows), 16):
                losses.append(loss_of(model, rows[i:i + 16].cuda()).item() * len(rows[i:i + 16]))
                shares.append(torch.stack([g.share for g in gates]))
            out[name] = sum(losses) / len(rows)
            out[name + "_load"] = [round(x, 2) for x in (torch.stack(shares).mean(0) * gates[0].num_experts).aminmax() for x in [x.item()]]
    model.train()
    return out


def save_weights(model, out):
    """BF16 in transformers' layout, in pieces of at most 14 MB."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    piece, size, n = {}, 0, 0
    state = {k: v.detach().bfloat16().cpu().contiguous() for k, v in model.state_dict().items()}
    for name, tensor in [*state.items(), (None, None)]:
        if tensor is None or size + tensor.nbytes > 14_000_000:
            save_file(piece, out / f"model-{n}.safetensors")
            piece, size, n = {}, 0, n + 1
        if tensor is not None:
            piece[name], size = tensor, size + tensor.nbytes


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--shards", type=Path, required=True)
    ap.add_argument("--heldout", type=Path, required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--steps", type=int, required=True, help="length of the schedule")
    ap.add_argument("--stop", type=int, help="stop after this step, to go on later")
    ap.add_argument("--first-shard", type=int, default=0)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss of each layer")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--save", type=int, default=1000)
    ap.add_argument("--evaluate", type=int, default=250)
    ap.add_argument("--state", type=Path)
    ap.add_argument("--weights", type=Path)
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True

    demo.fix_fla_on_hopper()
    print("delta gradients", demo.check_delta_gradients(), flush=True)
    demo.cast_experts_to_bf16()
    model = (demo.load(args.weights) if args.weights else demo.build()).cuda()
    gates = demo.watch_balance(model)
    for layer in model.model.layers:
        layer.mlp.compile(dynamic=False)
    flat = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.95), fused=True)
    start = 0
    if args.state:
        state = torch.load(args.state, map_location="cuda")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    sets = {name: heldout_rows(args.heldout / f"{name}.txt") for name in ("synthetic", "kjv")}
    shards, log = Shards(args.shards, args.first_shard), open(args.out / "log.jsonl", "a")
    print(sum(p.numel() for p in model.parameters()), "parameters", flush=True)

    def note(**row):
        print(json.dumps(row), flush=True)
        log.write(json.dumps(row) + "\n")
        log.flush()

    stop = min(args.stop or args.steps, args.steps)
    began, last, losses = time.time(), (start, time.time()), []
    for step in range(start, stop):
        lr = rate(step, args.steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = loss_of(model, shards.batch(step))
        balance = torch.stack([g.balance for g in gates]).mean()
        (loss + args.balance * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        done = step + 1
        if done % 50 == 0 or done == stop:
            speed = (done - last[0]) * ROWS * LENGTH / (time.time() - last[1])
            note(step=done, seconds=round(time.time() - began, 1), lr=lr, loss=torch.stack(losses).mean().item(), norm=norm.item(), balance=balance.item(), tokens_per_second=round(speed))
            losses, last = [], (done, time.time())
        if done % args.evaluate == 0 or done == stop:
            note(step=done, seconds=round(time.time() - began, 1), heldout=evaluate(model, sets, gates))
            last = (done, time.time())
        if done % args.save == 0 or done == stop:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}, args.out / "state.pt")
            save_weights(model, args.out / "bf16")
            last = (done, time.time())
    shares = torch.stack([g.share for g in gates]) * gates[0].num_experts
    note(step=stop, loads_on_kjv=[[round(x, 2) for x in row] for row in shares.tolist()])


if __name__ == "__main__":
    main()
