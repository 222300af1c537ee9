"""The loss curve of a run: python plot.py run/log.jsonl run/loss.svg"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

matplotlib.rcParams.update({"svg.hashsalt": "lily", "font.size": 9})


def main(log, out):
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    train = [r for r in rows if "loss" in r]
    held = [r for r in rows if "heldout" in r]
    axes[0].plot([r["step"] for r in train], [r["loss"] for r in train], lw=0.8, label="training mix")
    for name, ax in (("synthetic", axes[0]), ("kjv", axes[1])):
        ax.plot([r["step"] for r in held], [r["heldout"][name] for r in held], marker=".", lw=0.8, label=f"held out, {name}")
    for ax in axes:
        ax.set_xlabel("step of 65 536 tokens")
        ax.set_ylabel("loss, nats a token")
        ax.grid(alpha=0.3)
        ax.legend()
    axes[0].set_yscale("log")
    fig.tight_layout()
    fig.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
