#!/usr/bin/env python3
"""Write a small, seeded, random-weight checkpoint in the on-disk format of
mlx-community/Qwen3.6-35B-A3B-4bit.

    python make_checkpoint.py tiny OUT_DIR
    python make_checkpoint.py wide OUT_DIR

The files are config.json, model-0000i-of-0000n.safetensors and
model.safetensors.index.json, with the tensor names, ranks, dtypes, order of
keys and quantization block of the real checkpoint; only sizes are smaller.
See README.md for what is and is not like the real thing.
"""
import argparse
import hashlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np

HERE = Path(__file__).resolve().parent
REAL_CONFIG = HERE.parents[1] / "testdata/qwen3.6/config.json"   # of the published checkpoint, byte for byte
GROUP, BITS, GATE_BITS = 64, 4, 8

SIZES = {
    "tiny": dict(
        seed=20260401, shard_bytes=768 << 10, out_gain=0.28,
        text=dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, linear_num_key_heads=2,
                  linear_num_value_heads=4, num_experts=8, num_experts_per_tok=2,
                  moe_intermediate_size=64, shared_expert_intermediate_size=64,
                  vocab_size=1024)),
    "wide": dict(
        seed=20260402, shard_bytes=12 << 20, out_gain=0.22,
        text=dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=16,
                  num_key_value_heads=2, linear_num_key_heads=4,
                  linear_num_value_heads=8, num_experts=32, num_experts_per_tok=8,
                  moe_intermediate_size=128, shared_expert_intermediate_size=128,
                  vocab_size=4096)),
}


def make_config(size):
    """The real config.json with the sizes changed and nothing else."""
    cfg = json.loads(REAL_CONFIG.read_text())
    text = cfg["text_config"]
    text.update(SIZES[size]["text"])
    layers, vocab = text["num_hidden_layers"], text["vocab_size"]
    text["layer_types"] = text["layer_types"][:layers]
    for key in ("bos_token_id", "eos_token_id"):
        text[key] = vocab - 2
    cfg["eos_token_id"] = [vocab - 1, vocab - 2]
    for i, key in enumerate(("image_token_id", "video_token_id",
                             "vision_start_token_id", "vision_end_token_id")):
        cfg[key] = vocab - 3 - i
    # A one-block vision tower, so that a loader meets tensors it has to skip.
    cfg["vision_config"].update(depth=1, hidden_size=64, intermediate_size=128,
                                num_heads=2, num_position_embeddings=16,
                                out_hidden_size=text["hidden_size"])
    for key in ("quantization", "quantization_config"):
        cfg[key] = {
            k: v for k, v in cfg[key].items()
            if not k.startswith("language_model.")
            or int(k.split(".")[3]) < layers
        }
    return cfg


class Maker:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.weights = {}

    def normal(self, *shape, mean=0.0, std=1.0):
        return mean + std * self.rng.standard_normal(shape, dtype=np.float32)

    def plain(self, name, value):
        self.weights[name] = mx.array(value).astype(mx.bfloat16)

    def quant(self, name, out, inp, gain, experts=None, bits=BITS):
        """A linear weight ~ N(0, gain/sqrt(inp)), bf16, then affine-quantized."""
        shape = (out, inp) if experts is None else (experts, out, inp)
        w = mx.array(self.normal(*shape, std=gain / inp ** 0.5)).astype(mx.bfloat16)
        q, s, b = mx.quantize(w, group_size=GROUP, bits=bits, mode="affine")
        self.weights[f"{name}.weight"] = q
        self.weights[f"{name}.scales"] = s
        self.weights[f"{name}.biases"] = b

    def norm(self, name, dim, mean=1.0, std=0.2):
        # What the file holds is the multiplier itself: the conversion added the 1.
        self.plain(f"{name}.weight",
                   np.clip(self.normal(dim, mean=mean, std=std), 0.3, None))


def inverse_softplus(x):
    return x + np.log(-np.expm1(-x))


def make_weights(cfg, seed, out_gain):
    # out_gain scales every projection back into the residual stream. Small enough
    # that bf16 rounding, and the expert flips it causes, stay a perturbation.
    t, v = cfg["text_config"], cfg["vision_config"]
    m = Maker(seed)
    H, V, E = t["hidden_size"], t["vocab_size"], t["num_experts"]

    # Vision tower first, as in the real file (bf16, not quantized, unused).
    vh, vi, patch = v["hidden_size"], v["intermediate_size"], v["patch_size"]
    vm = vh * v["spatial_merge_size"] ** 2
    p = "vision_tower."

    def affine(name, out, inp):
        m.plain(f"{name}.weight", m.normal(out, inp, std=inp ** -0.5))
        m.plain(f"{name}.bias", m.normal(out, std=0.02))

    def layer_norm(name, dim):
        m.plain(f"{name}.weight", m.normal(dim, mean=1.0, std=0.1))
        m.plain(f"{name}.bias", m.normal(dim, std=0.02))

    m.plain(f"{p}patch_embed.proj.weight",
            m.normal(vh, v["temporal_patch_size"], patch, patch, v["in_channels"], std=0.03))
    m.plain(f"{p}patch_embed.proj.bias", m.normal(vh, std=0.02))
    m.plain(f"{p}pos_embed.weight", m.normal(v["num_position_embeddings"], vh, std=0.02))
    for i in range(v["depth"]):
        b = f"{p}blocks.{i}."
        layer_norm(b + "norm1", vh)
        layer_norm(b + "norm2", vh)
        affine(b + "attn.qkv", 3 * vh, vh)
        affine(b + "attn.proj", vh, vh)
        affine(b + "mlp.linear_fc1", vi, vh)
        affine(b + "mlp.linear_fc2", vh, vi)
    layer_norm(f"{p}merger.norm", vh)
    affine(f"{p}merger.linear_fc1", vm, vm)
    affine(f"{p}merger.linear_fc2", v["out_hidden_size"], vm)

    # Text model.
    L = "language_model.model."
    m.quant(L + "embed_tokens", V, H, gain=H ** 0.5)
    nk, nv = t["linear_num_key_heads"], t["linear_num_value_heads"]
    dk, dv = t["linear_key_head_dim"], t["linear_value_head_dim"]
    key, val, hd = nk * dk, nv * dv, t["head_dim"]
    for i, kind in enumerate(t["layer_types"]):
        p = f"{L}layers.{i}."
        if kind == "linear_attention":
            a = p + "linear_attn."
            # Taps of a causal filter, heavier on the newest sample (tap 3).
            taps = np.array([0.25, 0.35, 0.5, 0.8], np.float32)[None, :, None]
            m.plain(a + "conv1d.weight",
                    m.normal(2 * key + val, t["linear_conv_kernel_dim"], 1) * taps)
            m.quant(a + "in_proj_qkv", 2 * key + val, H, gain=1.3)
            m.quant(a + "in_proj_z", val, H, gain=1.5)
            m.quant(a + "in_proj_b", nv, H, gain=1.2)
            m.quant(a + "in_proj_a", nv, H, gain=0.8)
            # Decay rates spread over orders of magnitude, per value head.
            dt = np.exp(m.rng.uniform(np.log(0.01), np.log(0.5), nv)).astype(np.float32)
            m.plain(a + "dt_bias", inverse_softplus(dt))
            m.plain(a + "A_log", np.log(np.exp(
                m.rng.uniform(np.log(0.05), np.log(16.0), nv))).astype(np.float32))
            m.norm(a + "norm", dv, mean=0.9, std=0.15)
            m.quant(a + "out_proj", H, val, gain=1.2 * out_gain)
        else:
            a = p + "self_attn."
            m.quant(a + "q_proj", t["num_attention_heads"] * hd * 2, H, gain=1.2)
            m.quant(a + "k_proj", t["num_key_value_heads"] * hd, H, gain=1.2)
            m.quant(a + "v_proj", t["num_key_value_heads"] * hd, H, gain=1.2)
            m.quant(a + "o_proj", H, t["num_attention_heads"] * hd, gain=3.0 * out_gain)
            m.norm(a + "q_norm", hd, mean=1.4, std=0.25)
            m.norm(a + "k_norm", hd, mean=1.4, std=0.25)
        m.norm(p + "input_layernorm", H, mean=1.1, std=0.2)
        m.norm(p + "post_attention_layernorm", H, mean=1.2, std=0.2)
        f = p + "mlp."
        I, S = t["moe_intermediate_size"], t["shared_expert_intermediate_size"]
        m.quant(f + "gate", E, H, gain=2.0, bits=GATE_BITS)
        m.quant(f + "switch_mlp.gate_proj", I, H, gain=1.3, experts=E)
        m.quant(f + "switch_mlp.up_proj", I, H, gain=1.3, experts=E)
        m.quant(f + "switch_mlp.down_proj", H, I, gain=0.6 * out_gain, experts=E)
        m.quant(f + "shared_expert.gate_proj", S, H, gain=1.3)
        m.quant(f + "shared_expert.down_proj", H, S, gain=out_gain)
        m.quant(f + "shared_expert.up_proj", S, H, gain=1.3)
        m.quant(f + "shared_expert_gate", 1, H, gain=1.2, bits=GATE_BITS)
    m.norm(L + "norm", H, mean=1.5, std=0.3)
    m.quant("language_model.lm_head", V, H, gain=2.2)
    return m.weights


def save(out, cfg, weights, shard_bytes):
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    shards, cur, size = [], {}, 0
    for name, w in weights.items():
        if cur and size + w.nbytes > shard_bytes:
            shards.append(cur)
            cur, size = {}, 0
        cur[name] = w
        size += w.nbytes
    shards.append(cur)
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(out / file), shard, metadata={"format": "mlx"})
        weight_map.update({name: file for name in shard})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())},
             "weight_map": {k: weight_map[k] for k in sorted(weight_map)}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    (out / "config.json").write_text(json.dumps(dict(sorted(cfg.items())), indent=4))


def tensor_digest(weights):
    """SHA-256 over (name, dtype, shape, bytes) in name order; file layout free."""
    h = hashlib.sha256()
    for name in sorted(weights):
        w = weights[name]
        h.update(f"{name}|{w.dtype}|{tuple(w.shape)}|".encode())
        h.update(np.array(w.view(mx.uint8)).tobytes())
    return h.hexdigest()


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("size", choices=SIZES)
    ap.add_argument("out", type=Path)
    args = ap.parse_args()
    mx.set_default_device(mx.cpu)
    cfg = make_config(args.size)
    spec = SIZES[args.size]
    weights = make_weights(cfg, spec["seed"], spec["out_gain"])
    mx.eval(weights)
    save(args.out, cfg, weights, SIZES[args.size]["shard_bytes"])
    print(args.size, len(weights), "tensors",
          sum(w.nbytes for w in weights.values()), "bytes", tensor_digest(weights))


if __name__ == "__main__":
    main()
