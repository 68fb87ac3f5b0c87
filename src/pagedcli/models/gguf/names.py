"""The names that GGUF files give to a decoder's tensors. Free of torch."""

import re

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
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
    "mlp.router": "ffn_gate_inp",
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
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Tensors that transformers gives no name of a module and a suffix.
_WHOLE = {"self_attn.sinks": "attn_sinks.weight", "feed_forward.expert_bias": "exp_probs_b.bias"}
_PARTS = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def stored_tensor(name: str, *, normed_before: bool) -> tuple[str, int | None]:
    """The same as stored_module of a tensor."""
    if (found := _PARTS.fullmatch(name)) is not None and found[2] in _WHOLE:
        return f"blk.{found[1]}.{_WHOLE[found[2]]}", None
    module, _, suffix = name.rpartition(".")
    stored, expert = stored_module(module, normed_before=normed_before)
    return f"{stored}.{suffix}", expert


def stored_module(module: str, *, normed_before: bool = True) -> tuple[str, int | None]:
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
