#!/bin/sh
# Everything that shows the CUDA backend right, in stages of less than ten minutes, with a report.
#
#     tools/cuda-check.sh build DIR               # where there is Rust: builds what the stages run and puts it into DIR
#     tools/cuda-check.sh run DIR REPORT [STAGE]  # where there is a GPU, in a checkout at the same path: some or all stages
#
# Stages: laws (the backend contract; rows, kernels of older GPUs, each linear and the choice of experts), layers (every stage of a pass against the reference, at the published sizes and at
# odd ones; attention beyond 100,000 tokens), goldens (mlx-lm's outputs; those of the wide checkpoint if `cargo xtask goldens` made
# them), quality (held-out text through the demo model), memcheck and racecheck (compute-sanitizer over the demo model and over rows
# that share a pass).
set -eu
. "$(dirname "$0")/stages.sh"

usage() {
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
}

build() {
    mkdir -p "$1"
    cargo test --no-run --release -p lily-cuda --message-format json |
        python3 -c '
import json, sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("profile", {}).get("test") and m.get("executable"):
        print(m["target"]["name"], m["executable"])' |
        while read -r name file; do
            strip -o "$1/$name" "$file"
        done
    cargo build --release -p lily-cli
    strip -o "$1/lily" "${CARGO_TARGET_DIR:-target}/release/lily"
}

# Tests of a binary, those that need a GPU too.
tests() {
    what=$1 binary=$2
    shift 2
    note "$what" "$dir/$binary" --include-ignored --nocapture --test-threads 1 "$@"
}

sanitize() {
    tool=$1
    set -- compute-sanitizer --tool "$tool" --error-exitcode 9
    model="--model assets/demo --backend cuda"
    # Watching all kernels at once, racecheck takes more memory than there is: some words in their names at a time.
    words=all
    if [ "$tool" = racecheck ]; then words="gemm attend attention delta norm rows route experts head updates"; fi
    for word in $words; do
        only=
        if [ "$word" != all ]; then only="--kernel-name kns=$word"; fi
        # shellcheck disable=SC2086
        note "$tool: a prompt in chunks and decoding, $word" "$@" $only "$dir/lily" bench $model --contexts 300 --decode 6 --rounds 1
    done
    for law in batch_neighbours_do_not_change_a_row draws_depend_on_seed_and_position_only a_mask_decides_what_may_be_sampled; do
        note "$tool: $law" "$@" "$dir/conformance" --include-ignored "bf16_kv::$law"
    done
}

stage() {
    case $1 in
    laws)
        tests "laws of the contract" conformance
        tests "rows that share a pass" rows
        tests "kernels of older GPUs" older
        tests "linears and the choice of experts" lily_cuda kernels::tests
        ;;
    layers) tests "stages against the reference" layers ;;
    goldens)
        tests "tiny goldens" goldens tiny
        if [ -f target/goldens/wide.safetensors ]; then
            tests "wide goldens" goldens wide
        else
            echo "left out: wide goldens (cargo xtask goldens makes them)" | tee -a "$report"
        fi
        ;;
    quality) tests "held-out text" quality ;;
    memcheck | racecheck) sanitize "$1" ;;
    *) usage ;;
    esac
}

case "${1:-}" in
build)
    [ $# = 2 ] || usage
    build "$2"
    ;;
run)
    [ $# -ge 3 ] || usage
    dir=$2 report=$3 failed=0
    shift 3
    if [ $# = 0 ]; then
        set -- laws layers goldens quality memcheck racecheck
    fi
    for name in "$@"; do
        echo "== $name" | tee -a "$report" "$report.log"
        stage "$name"
    done
    exit $failed
    ;;
*) usage ;;
esac
