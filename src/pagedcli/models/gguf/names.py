"""Where GGUF files keep a decoder's tensors. Free of torch."""

import re
from collections.abc import Container
from dataclasses import dataclass, replace

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "qkv", "q_a", "q_b", "kv_b", "k_b", "v_b")},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qkv"},
    **{f"self_attn.{part}_a_layernorm": f"attn_{part}_a_norm" for part in ("q", "kv")},
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "mamba.in_proj": "ssm_in",
    **{
        f"{mixer}.{part}": f"ssm_{stored}"
        for mixer in ("linear_attn", "mamba")
        for part, stored in {"conv1d": "conv1d", "norm": "norm", "out_proj": "out"}.items()
    },
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
    **{
        f"mlp.{module}{part}_proj": f"ffn_{part}{stored}"
        for module, stored in {"": "", "experts.": "_exps", "shared_expert.": "_shexp"}.items()
        for part in ("gate", "up", "down")
    },
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
# Tensors that transformers gives no name of a module and a suffix.
_WHOLE = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.expert_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    **{f"{mixer}.A_log": "ssm_a" for mixer in ("self_attn", "linear_attn", "mamba")},
    **{f"{mixer}.dt_bias": "ssm_dt.bias" for mixer in ("self_attn", "linear_attn", "mamba")},
    "mamba.D": "ssm_d",
}
# What some files call otherwise: a norm before the MLP of a model without one after attention, and LFM2's last norm.
_OTHERWISE = {"post_attention_norm": "ffn_norm", "output_norm": "token_embd_norm"}
# Two modules that some files keep as one: which half of its rows each is.
_HALVES = {
    "ffn_gate_exps": ("ffn_gate_up_exps", 0),
    "ffn_up_exps": ("ffn_gate_up_exps", 1),
    "ssm_beta": ("ssm_ba", 0),
    "ssm_alpha": ("ssm_ba", 1),
}
_PARTS = re.compile(r"model\.layers\.(\d+)\.(.*)")
_IN_METADATA = re.compile(r"model\.layers\.(\d+)\.mlp\.act_fn\.(.*)")  # numbers of xIELU
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in a file."""

    name: str
    expert: int | None = None  # number among the stacked ones
    half: int | None = None  # the first or second half of the rows
    layer: int | None = None  # number in a list of the metadata; None: it is a tensor


def stored_tensor(name: str, found: Container[str]) -> TensorPlace:
    """The place of a tensor, named as the parameters of a spec from a GGUF file are. `found`: the file's tensors."""
    if (listed := _IN_METADATA.fullmatch(name)) is not None:
        return TensorPlace(f"xielu.{listed[2]}", layer=int(listed[1]))
    if (parts := _PARTS.fullmatch(name)) is not None and parts[2] in _WHOLE:
        return TensorPlace(f"blk.{parts[1]}.{_WHOLE[parts[2]]}")
    module, _, suffix = name.rpartition(".")
    place = _stored_module(module, suffix, found)
    bare = place.name.replace("post_attention_norm", "ffn_norm")
    if bare in found:  # a norm of Falcon-H1 has no suffix
        return replace(place, name=bare)
    return replace(place, name=f"{place.name}.{suffix}")


def _stored_module(module: str, suffix: str, found: Container[str]) -> TensorPlace:
    if module in _TOP:
        return TensorPlace(_present("", _TOP[module], suffix, found))
    parts = _PARTS.fullmatch(module)
    assert parts is not None, f"{module} is no part of a layer"
    prefix, inner, expert = f"blk.{parts[1]}.", parts[2], None
    if (numbered := _EXPERT.fullmatch(inner)) is not None:
        inner, expert = f"{numbered[1]}.{numbered[3]}", int(numbered[2])
    own = _LAYER[inner]
    if own in _HALVES and f"{prefix}{own}.{suffix}" not in found:
        both, half = _HALVES[own]
        if f"{prefix}{both}.{suffix}" in found:
            return TensorPlace(prefix + both, expert, half)
    return TensorPlace(_present(prefix, own, suffix, found), expert)


def _present(prefix: str, own: str, suffix: str, found: Container[str]) -> str:
    """The name by which the file has it, the usual one if by none."""
    other = _OTHERWISE.get(own)
    uses_other = other is not None and f"{prefix}{own}.{suffix}" not in found and f"{prefix}{other}.{suffix}" in found
    return f"{prefix}{other if uses_other else own}"
