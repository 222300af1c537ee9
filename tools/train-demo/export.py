"""From trained weights (BF16, transformers' layout) to the checkpoint in MLX's affine 4-bit layout.

    python export.py RUN/bf16 ../../assets/demo

Quantizes by MLX's rule in NumPy; `--check` compares every tensor with `mx.quantize` (PyPI mlx).
"""

import argparse
import json
import struct
from pathlib import Path

import numpy as np

import model as demo

GROUP = 64


def to_bf16(x):
    """float32 -> BF16 bits, rounded to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantize(w, bits):
    """MLX's affine rule on BF16 weights given as float32 [..., in]: (codes U32, scales, biases as BF16 bits).

    Per group of 64: the end of larger magnitude is met exactly. The scale is the range over 2^bits - 1, negative when that end is the
    maximum, then moved so that the end is a whole number of steps.
    """
    n, eps = np.float32(2 ** bits - 1), np.float32(1e-7)
    g = w.astype(np.float32).reshape(*w.shape[:-1], -1, GROUP)
    lo, hi = g.min(-1), g.max(-1)
    low_end = np.abs(lo) > np.abs(hi)
    scale = np.maximum((hi - lo) / n, eps)
    scale = np.where(low_end, scale, -scale).astype(np.float32)
    edge = np.where(low_end, lo, hi)
    q0 = np.round(edge / scale)
    at_zero = q0 == 0
    scale = np.where(at_zero, scale, edge / np.where(at_zero, 1, q0)).astype(np.float32)
    bias = np.where(at_zero, np.float32(0), edge).astype(np.float32)
    codes = np.clip(np.round((g - bias[..., None]) / scale[..., None]), 0, n).astype(np.uint32).reshape(w.shape)
    per = 32 // bits
    shifts = (np.arange(per, dtype=np.uint32) * bits).astype(np.uint32)
    packed = (codes.reshape(*w.shape[:-1], -1, per) << shifts).sum(-1, dtype=np.uint32)
    return packed, to_bf16(scale), to_bf16(bias)


def dequantize(packed, scales, biases):
    per = scales.shape[-1] * GROUP // packed.shape[-1]
    bits = 32 // per
    codes = ((packed[..., None] >> (np.arange(per, dtype=np.uint32) * bits)) & np.uint32(2 ** bits - 1)).reshape(*scales.shape, GROUP)
    return (codes.astype(np.float32) * from_bf16(scales)[..., None] + from_bf16(biases)[..., None]).reshape(*scales.shape[:-1], -1)


def mlx_names(state):
    """transformers' tensors -> MLX's names and conventions, all float32: norms hold the multiplier, the convolution is [C, 4, 1]."""
    out = {}
    for name, x in state.items():
        new = "language_model." + name
        if name.endswith("conv1d.weight"):
            x = x.transpose(0, 2, 1)
        elif name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")) or name == "model.norm.weight":
            x = x + 1
        if name.endswith("experts.gate_up_proj"):
            half = x.shape[1] // 2
            base = new.replace("experts.gate_up_proj", "switch_mlp.")
            out[base + "gate_proj.weight"], out[base + "up_proj.weight"] = x[:, :half], x[:, half:]
        elif name.endswith("experts.down_proj"):
            out[new.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = x
        else:
            out[new] = x
    return out


def is_quantized(name, x):
    return x.ndim >= 2 and "conv1d" not in name


def write_safetensors(path, tensors):
    """Like MLX: name -> (dtype, array), data in order, no padding."""
    header, at = {"__metadata__": {"format": "mlx"}}, 0
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for _, x in tensors.values():
            f.write(np.ascontiguousarray(x).tobytes())


def read_safetensors(path):
    """name -> array; BF16 comes as float32."""
    raw = Path(path).read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    out = {}
    for name, t in json.loads(raw[8:8 + n]).items():
        if name != "__metadata__":
            lo, hi = t["data_offsets"]
            kind = {"BF16": np.uint16, "U32": np.uint32, "F32": np.float32}[t["dtype"]]
            x = np.frombuffer(raw[8 + n + lo:8 + n + hi], kind).reshape(t["shape"])
            out[name] = from_bf16(x) if t["dtype"] == "BF16" else x
    return out


def export(weights, out, check=False):
    state = {}
    for piece in sorted(Path(weights).glob("*.safetensors")):
        state.update(read_safetensors(piece))
    config = demo.config_json()
    tensors = {}
    for name, x in mlx_names(state).items():
        base = name.removesuffix(".weight")
        if not is_quantized(name, x):
            tensors[name] = ("BF16", to_bf16(x))
            continue
        bits = config["quantization"].get(base, config["quantization"])["bits"]
        q, s, b = quantize(x, bits)
        if check:
            import mlx.core as mx

            want = mx.quantize(mx.array(x).astype(mx.bfloat16), group_size=GROUP, bits=bits, mode="affine")
            same = [np.array_equal(q, np.array(want[0]))] + [np.array_equal(from_bf16(a), np.array(w.astype(mx.float32))) for a, w in zip((s, b), want[1:])]
            if not all(same):
                off = (q != np.array(want[0])).mean()
                raise SystemExit(f"{name}: codes, scales, biases equal to mx.quantize: {same} ({off:.2%} of words differ)")
        tensors.update({base + ".weight": ("U32", q), base + ".scales": ("BF16", s), base + ".biases": ("BF16", b)})
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", tensors)
    demo.write_configs(out)
    print(len(tensors), "tensors,", (out / "model.safetensors").stat().st_size, "bytes")


def import_state(path):
    """The checkpoint back in transformers' layout, dequantized to float32: what the 4-bit weights stand for."""
    raw, state = read_safetensors(Path(path) / "model.safetensors"), {}
    for name, x in raw.items():
        if name.endswith((".scales", ".biases")):
            continue
        base = name.removesuffix(".weight")
        if base + ".scales" in raw:
            x = dequantize(x, to_bf16(raw[base + ".scales"]), to_bf16(raw[base + ".biases"]))
        new = name.removeprefix("language_model.")
        if new.endswith("conv1d.weight"):
            x = x.transpose(0, 2, 1)
        elif new.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")) or new == "model.norm.weight":
            x = x - 1
        state[new] = x
    for name in [n for n in state if n.endswith("switch_mlp.gate_proj.weight")]:
        base = name.removesuffix("switch_mlp.gate_proj.weight")
        state[base + "experts.gate_up_proj"] = np.concatenate([state.pop(name), state.pop(base + "switch_mlp.up_proj.weight")], 1)
        state[base + "experts.down_proj"] = state.pop(base + "switch_mlp.down_proj.weight")
    return state


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("weights", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--check", action="store_true")
    args = ap.parse_args()
    export(args.weights, args.out, args.check)
