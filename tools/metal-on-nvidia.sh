#!/bin/sh
# The Metal kernels on an NVIDIA GPU: a second device beside the emulator, with true concurrency and layers of the full size.
#
#     tools/metal-on-nvidia.sh build DIR               # where there are Rust and clang-19: compiles and records into DIR
#     tools/metal-on-nvidia.sh run DIR REPORT [STAGE]  # where there is a GPU, in a checkout at the same path: some or all stages
#
# The files go through the token pass of lily-metal-emu and clang's CUDA mode; the backend above them is the one of every device.
# Stages: goldens (mlx-lm's outputs on the tiny checkpoint, with and without tensor units), layers (four layers of the full size
# against what the reference computed at the build), laws (the backend contract), racecheck and memcheck (compute-sanitizer over the
# goldens). Tensor units are threads that multiply: what they are fed and when is checked, not how they add.
set -eu
. "$(dirname "$0")/stages.sh"

usage() {
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
}

build() {
    mkdir -p "$1"
    binary=$(cargo test --no-run -p lily-metal --message-format json |
        python3 -c '
import json, sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("profile", {}).get("test") and m.get("executable"):
        print(m["executable"])')
    strip -o "$1/lily-metal" "$binary"
    "$1/lily-metal" --include-ignored --exact tests::nvidia::kernels_are_compiled_and_outputs_recorded
}

# The driver would assemble file by file; where there is ptxas that is done once, side by side.
assemble() {
    if command -v ptxas >/dev/null && [ ! -e "$dir/metal-nvidia/assembled" ]; then
        arch=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
        for ptx in "$dir"/metal-nvidia/*.ptx; do echo "$ptx"; done |
            xargs -P "$(nproc)" -I '{}' sh -c 'ptxas -arch=$0 "$1" -o "$1.cubin" && mv "$1.cubin" "$1"' "$arch" '{}'
        touch "$dir/metal-nvidia/assembled"
    fi
}

# The tests of the backend on NVIDIA whose names have this.
tests() {
    what=$1 name=$2
    shift 2
    note "$what" "$@" "$dir/lily-metal" --include-ignored --nocapture --test-threads 1 "tests::nvidia::$name"
}

stage() {
    case $1 in
    goldens) tests "outputs of mlx-lm on the tiny checkpoint" tiny_logits ;;
    layers) tests "layers of the full size as in the reference" full_size_layers ;;
    laws) tests "the laws of the backend contract" laws ;;
    racecheck) tests "racecheck over the goldens" tiny_logits compute-sanitizer --tool racecheck --error-exitcode 9 ;;
    memcheck) tests "memcheck over the goldens" tiny_logits compute-sanitizer --tool memcheck --error-exitcode 9 ;;
    *) usage ;;
    esac
}

case ${1-} in
build)
    [ $# = 2 ] || usage
    build "$2"
    ;;
run)
    [ $# -ge 3 ] || usage
    dir=$(realpath "$2") report=$3 failed=0
    shift 3
    assemble
    [ $# -gt 0 ] || set -- goldens layers laws racecheck memcheck
    for each in "$@"; do stage "$each"; done
    grep -h "largest difference" "$report.log" || true
    exit $failed
    ;;
*) usage ;;
esac
