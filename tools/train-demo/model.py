"""The demo model: transformers' own Qwen3.5-MoE text class at a small size, and what training it on a Hopper GPU needs.

The sizes keep Qwen3.6-35B-A3B's head dimensions and ratios: 8 query heads a KV head, 2 value heads a key head, three Gated DeltaNet
layers to one of full attention, a shared expert, an untied head.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers.integrations import moe
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as M
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

HERE = Path(__file__).resolve().parent
ASSETS = HERE.parent.parent / "assets" / "demo"
LAYERS = 8
VOCABULARY = 4096
IM_END, END_OF_TEXT = VOCABULARY - 33 + 2, VOCABULARY - 33


def text_config():
    """`text_config` of the checkpoint, with the real file's fields."""
    return {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": END_OF_TEXT, "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 256,
        "initializer_range": 0.02, "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 64, "num_attention_heads": 8, "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": LAYERS,
        "num_key_value_heads": 1, "output_router_logits": False, "pad_token_id": None, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 128, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def build(experts="grouped_mm"):
    config = Qwen3_5MoeTextConfig(**text_config())
    config._attn_implementation = "sdpa"
    config._experts_implementation = experts
    return M.Qwen3_5MoeForCausalLM(config).float()


def load(path, experts="grouped_mm"):
    """The model in float32: from BF16 pieces in transformers' layout, or from a checkpoint in MLX's, dequantized."""
    from safetensors.torch import load_file

    import export

    model, state, path = build(experts), {}, Path(path)
    if (path / "config.json").exists():
        state = {k: torch.from_numpy(np.array(v)) for k, v in export.import_state(path).items()}
    else:
        for piece in sorted(path.glob("*.safetensors")):
            state.update(load_file(piece))
    model.load_state_dict({k: v.float() for k, v in state.items()}, strict=True)
    return model


def plain_delta_rule():
    """Takes the delta rule from transformers' PyTorch code instead of fla: slower, and float32 all through."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        rule = getattr(M, name)
        setattr(M, name, getattr(rule, "__wrapped__", rule))


def dense_experts():
    """Runs every expert on every token and weighs most by zero: the same sums as choosing, in few large products (quick on a CPU)."""
    def forward(self, x, chosen, weights):
        share = torch.zeros(len(x), self.num_experts, dtype=x.dtype, device=x.device).scatter_(1, chosen, weights)
        gate, up = torch.einsum("td,eod->eto", x, self.gate_up_proj).chunk(2, -1)
        hidden = self.act_fn(gate) * up * share.T[..., None]
        return torch.einsum("eto,edo->td", hidden, self.down_proj)

    M.Qwen3_5MoeExperts.forward = forward


# --- training on Hopper ------------------------------------------------------------------------------------------------------------

def cast_experts_to_bf16():
    """`grouped_mm` is not an autocast operation: with float32 master weights it would multiply in float32."""
    plain = moe._grouped_mm
    moe._grouped_mm = lambda x, w, offs: plain(x.to(torch.bfloat16), w.to(torch.bfloat16), offs)


def _chunk_bwd_dqkwg(q, k, v, do, h, dh, w, g, dv, scale, chunk):
    """Gradients of q, k, w and the gate within chunks, as batched products. h, dh: states [B, N, H, K, V] at each chunk's start."""
    B, T, H, K = q.shape
    N, kind = T // chunk, q.dtype

    def chunks(x):
        return x.reshape(B, N, chunk, H, -1).permute(0, 1, 3, 2, 4).to(kind)

    q_, k_, v_, do_, dv_ = map(chunks, (q, k, v, do, dv))
    h_, dh_ = h.to(kind), dh.to(kind)
    g_ = g.float().reshape(B, N, chunk, H).transpose(2, 3)                    # cumulative, in log2 units
    last = g_[..., -1:]
    e, r = torch.exp2(g_)[..., None], torch.exp2(last - g_)[..., None]
    mask = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp2((g_[..., :, None] - g_[..., None, :]).masked_fill(~mask, float("-inf"))) * scale
    dq = (do_ @ h_.mT).float() * e * scale
    dk = (v_ @ dh_.mT).float() * r
    dw = -(dv_ @ h_.mT)
    dg_last = (h_.float() * dh_.float()).sum((-1, -2)) * torch.exp2(last[..., 0]) + (dk * k_.float()).sum((-1, -2))
    ds = ((do_ @ v_.mT).float() * decay).to(kind)
    dq = dq + (ds @ k_).float()
    dk = dk + (ds.mT @ q_).float()
    dg = (dq * q_.float()).sum(-1) - (dk * k_.float()).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + dg_last[..., None]], -1)

    def rows(x):
        return x.permute(0, 1, 3, 2, 4).reshape(B, T, H, -1).to(kind)

    return rows(dq), rows(dk), rows(dw), dg.transpose(2, 3).reshape(B, T, H)


def fix_fla_on_hopper(compiled=True):
    """fla 0.6.0 refuses the gated backward on Hopper with Triton 3.4 to 3.7.0 (its issue 640: wrong results); this replaces that step."""
    from fla.ops.gated_delta_rule import chunk

    step = torch.compile(_chunk_bwd_dqkwg, dynamic=False) if compiled else _chunk_bwd_dqkwg

    def chunk_bwd_dqkwg(q, k, v, do, h, dh, w=None, g=None, g_gamma=None, dv=None, scale=None, state_v_first=False, cu_seqlens=None,
                        chunk_size=64, chunk_indices=None):
        if cu_seqlens is not None or q.shape[1] % chunk_size or g_gamma is not None or q.shape[2] != v.shape[2]:
            raise ValueError("the replacement takes whole chunks, equal head counts and no cu_seqlens")
        if state_v_first:
            h, dh = h.mT, dh.mT
        return step(q, k, v, do, h, dh, w, g, dv, scale, chunk_size)

    chunk.chunk_bwd_dqkwg = chunk_bwd_dqkwg


def check_delta_gradients(limit=0.02):
    """Output and gradients of fla's operator with the fix, in BF16, against a float64 recurrence: relative errors, all under `limit`.

    BF16 operands give 0.4 to 1 %; a wrong formula gives tens of percent.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    torch.manual_seed(0)
    B, T, H, D = 2, 256, 4, 128
    q, k, v, do = (torch.randn(B, T, H, D, device="cuda") for _ in range(4))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta, g = torch.rand(B, T, H, device="cuda"), -torch.rand(B, T, H, device="cuda") * torch.tensor([0.01, 0.1, 0.5, 2.0], device="cuda")
    low = [x.bfloat16() for x in (q, k, v, beta)]
    low = [x.detach().requires_grad_() for x in low] + [g.detach().requires_grad_()]
    out, _ = chunk_gated_delta_rule(low[0], low[1], low[2], g=low[4], beta=low[3], scale=D ** -0.5)
    out.backward(do.bfloat16())
    high = [x.detach().double().requires_grad_() for x in low]
    q, k, v, beta, g = high
    S, outs = torch.zeros(B, H, D, D, dtype=torch.float64, device="cuda"), []
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        err = (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])) * beta[:, t][..., None]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], err)
        outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * D ** -0.5)
    ref = torch.stack(outs, 1)
    ref.backward(do.bfloat16().double())
    errors = {"out": ((out.double() - ref).norm() / ref.norm()).item()}
    for name, a, b in zip(("dq", "dk", "dv", "dbeta", "dg"), low, high):
        errors[name] = ((a.grad.double() - b.grad).norm() / b.grad.norm()).item()
    if not all(e < limit for e in errors.values()):
        raise SystemExit(f"the delta rule's gradients are wrong: {errors}")
    return errors


def watch_balance(model):
    """Each router notes its layer's balance: E * sum(share of choices * mean probability), 1 at best, and how often experts are chosen.

    The losses of the layers are averaged, not their statistics, so that one layer's imbalance cannot hide in another's.
    """
    gates = [layer.mlp.gate for layer in model.model.layers]

    def hook(gate, _, out):
        logits, _, chosen = out
        share = F.one_hot(chosen, gate.num_experts).float().mean((0, 1))
        gate.share = share.detach()
        gate.balance = gate.num_experts * (share * logits.float().softmax(-1).mean(0)).sum()

    for gate in gates:
        gate.register_forward_hook(hook)
    return gates


def config_json():
    """The checkpoint's config.json as an object: the real file's fields, and its quantization block for these layers."""
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    for i in range(LAYERS):
        for gate in ("gate", "shared_expert_gate"):
            quantization[f"language_model.model.layers.{i}.mlp.{gate}"] = {"group_size": 64, "bits": 8}
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "eos_token_id": [IM_END, END_OF_TEXT], "model_type": "qwen3_5_moe",
            "quantization": quantization, "quantization_config": quantization, "text_config": text_config(), "tie_word_embeddings": False}


def write_configs(out):
    out = Path(out)
    (out / "config.json").write_text(json.dumps(config_json(), indent=4) + "\n")
    generation = {"bos_token_id": END_OF_TEXT, "do_sample": True, "eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT,
                  "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=4) + "\n")
