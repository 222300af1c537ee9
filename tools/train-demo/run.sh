#!/bin/sh
# One training run on one GPU: sh run.sh OUT STEPS KJV.txt [SEED]. Shards are written beside the training, which waits for them.
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=$1 steps=$2 kjv=$3 seed=${4:-lily}
mkdir -p "$out"
python3 "$here/generate.py" shards "$out/shards" $(((steps + 39) / 40)) --kjv "$kjv" --seed "$seed" --workers $(($(nproc) - 4)) >"$out/shards.txt" 2>&1 &
python3 "$here/train.py" --shards "$out/shards" --heldout "$here/heldout" --out "$out" --steps "$steps"
python3 "$here/export.py" "$out/bf16" "$out/mlx"
python3 "$here/quality.py" score torch "$out/bf16" "$out/torch-bf16-weights.npz"
python3 "$here/quality.py" score torch "$out/mlx" "$out/torch-4bit-weights.npz"
python3 "$here/quality.py" compare "$out/torch-bf16-weights.npz" "$out/torch-4bit-weights.npz"
python3 "$here/evaluate.py" torch "$out/mlx" --answers "$out/answers.jsonl" --out "$out/scores.json"
