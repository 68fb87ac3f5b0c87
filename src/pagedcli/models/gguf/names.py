"""The names that GGUF files give to a decoder's tensors. Free of torch."""

import re

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PARTS = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def stored_module(module: str, *, normed_before: bool) -> tuple[str, int | None]:
    """The name in the file of a module that transformers names so, and which of the stacked experts it is.

    `normed_before`: the model norms only before attention and MLP, so the second norm of a layer is that of the MLP.
    """
    if module in _TOP:
        return _TOP[module], None
    found = _PARTS.fullmatch(module)
    assert found is not None, f"{module} is no part of a layer"
    layer, inner = found[1], found[2]
    if inner == "post_attention_layernorm":
        return f"blk.{layer}.{'ffn_norm' if normed_before else 'post_attention_norm'}", None
    if (expert := _EXPERT.fullmatch(inner)) is None:
        return f"blk.{layer}.{LAYER[inner]}", None
    return f"blk.{layer}.{LAYER[f'{expert[1]}.{expert[3]}']}", int(expert[2])
