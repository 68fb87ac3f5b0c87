"""Tiny models as GGUF files of architectures whose tensors are split, joined or reordered, by llama.cpp's rules.

The rules are those of its conversion from safetensors, written out here apart from the code under test.
"""

import json
import math
import re

import numpy as np
from gguf_files import gguf, llama3_divisors, reordered
from safetensors.numpy import load_file

ARCHITECTURES = {
    "qwen3_next": "QWEN3NEXT",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "granitemoe": "GRANITE_MOE",
    "granitemoeshared": "GRANITE_MOE",
    "granitemoehybrid": "GRANITE_HYBRID",
    "gemma4_text": "GEMMA4",
    "ministral3": "MISTRAL3",
    "glm4": "GLM4",
    "exaone4": "EXAONE4",
    "ernie4_5": "ERNIE4_5",
    "seed_oss": "SEED_OSS",
    "olmo3": "OLMO2",
    "gemma": "GEMMA",
    "arcee": "ARCEE",
    "apertus": "APERTUS",
    "phimoe": "PHIMOE",
    "nemotron": "NEMOTRON",
    "stablelm": "STABLELM",
    "starcoder2": "STARCODER2",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "ernie4_5_moe": "ERNIE4_5_MOE",
    "glm4_moe": "GLM4_MOE",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "glm4_moe_lite": "DEEPSEEK2",
    "kimi_linear": "KIMI_LINEAR",
    "minicpm3": "MINICPM3",
    "falcon_h1": "FALCON_H1",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "hunyuan_v1_moe": "HUNYUAN_MOE",
    "nemotron_h": "NEMOTRON_H_MOE",
    "qwen3": "QWEN3VL",
    "qwen2": "QWEN2VL",
}

_KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


def tiled(rows, key_heads, value_heads):
    """Value heads along the first dimension in the order of their numbers within a key head."""
    shape = key_heads, value_heads // key_heads, -1, *rows.shape[1:]
    return np.ascontiguousarray(rows.reshape(shape).swapaxes(0, 1)).reshape(rows.shape)


def _of_experts(stack):
    """Gate and up of stacked experts [experts, 2 * inner, width]."""
    inner = stack.shape[1] // 2
    return stack[:, :inner], stack[:, inner:]


MAMBA2 = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")  # of a configuration, for _states


def _states(w, config, kernel, state_size, groups, rank, *, inner):
    """The sizes of layers with a state, by the names that a config has for them."""
    w.add_ssm_conv_kernel(config[kernel])
    w.add_ssm_state_size(config[state_size])
    w.add_ssm_group_count(config[groups])
    w.add_ssm_time_step_rank(config[rank])
    w.add_ssm_inner_size(inner)


class Conversion:
    """The tensors of a checkpoint by the file's names, and the file's metadata."""

    def __init__(self, source, arch=None):
        self.config = json.loads((source / "config.json").read_text())
        self.model_type = self.config["model_type"]
        if "layers_block_type" in self.config:
            self.config["num_hidden_layers"] = len(self.config["layers_block_type"])
        for name, other in _KIMI_NAMES.items() if self.model_type == "kimi_linear" else ():
            self.config[name] = self.config[other]
        self.arch = arch or getattr(gguf.MODEL_ARCH, ARCHITECTURES[self.model_type])
        self._names = gguf.get_tensor_name_map(self.arch, self.config["num_hidden_layers"])
        self._stored = load_file(source / "model.safetensors")

    def tensors(self):
        """File's name -> values."""
        found, experts = {}, {}
        for name, values in self._stored.items():
            if ".act_fn." in name:  # metadata
                continue
            if (parts := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", name)) is not None:
                experts.setdefault(f"{parts[1]}.{parts[3]}", {})[int(parts[2])] = values
                continue
            for new_name, new in self._converted(name, values.astype(np.float32)):
                found[new_name] = np.ascontiguousarray(new)
        for name, numbered in experts.items():
            stacked = re.sub(r"backbone(.*)mixer", r"model\1mlp", name)  # as the conversion calls them
            found[self._mapped(stacked)] = np.stack([numbered[i] for i in range(len(numbered))]).astype(np.float32)
        return found | self.frequencies()

    def _mapped(self, name):
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    def _converted(self, name, values):
        config, layer = self.config, "".join(re.findall(r"layers\.(\d+)", name))
        if name.endswith(".A_log"):
            values = -np.exp(values)
        name = name.replace(".dt_bias", ".dt_proj.bias").replace(".layer_scalar", ".layer_scalar.weight")
        if "linear_attn." in name and self.model_type.startswith("qwen3_5"):
            values = self._tiled(name, values)
        if "conv1d.weight" in name and self.model_type != "kimi_linear":
            values = values.squeeze(1)
        if (
            self.model_type.startswith(("qwen3_5", "qwen3_next"))
            and name.endswith("norm.weight")
            and "linear_attn.norm" not in name
        ):
            values = values + 1
        if self.model_type in ("gemma", "nemotron") and name.endswith("norm.weight"):
            values = values + 1
        name, values = (
            name.replace("correction_bias", "correction.bias"),
            values[0] if "moe_statics" in name else values,
        )
        if self.arch.name in ("GRANITE_MOE", "GRANITE_HYBRID", "MISTRAL3", "ARCEE"):
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
            if (part := name.split(".")[-2]) in heads:
                values = reordered(values, config[heads[part]])
        if self.model_type == "falcon_h1":
            values = self._multiplied(name, values)
        if "in_proj_qkvz" in name:
            yield from self._flat(layer, values)
        elif "kv_b_proj" in name and self.model_type != "minicpm3":
            nope, by_heads = (
                config["qk_nope_head_dim"],
                values.reshape(config["num_attention_heads"], -1, values.shape[1]),
            )
            yield f"blk.{layer}.attn_k_b.weight", by_heads[:, :nope].swapaxes(1, 2)
            yield f"blk.{layer}.attn_v_b.weight", by_heads[:, nope:]
        elif self.model_type == "kimi_linear" and name.endswith(".A_log"):
            yield self._mapped(name), values
        elif self.model_type == "kimi_linear" and "_conv1d" in name:
            yield self._mapped(name), values.reshape(1, -1, 1, values.shape[-1])
        elif name.endswith((".A_log", ".D")):
            yield self._mapped(name), values[:, None] if "mamba" in name or "mixer" in name else values
        elif name.endswith("mixer.norm.weight"):
            yield self._mapped(name), values.reshape(config["n_groups"], -1)
        elif name.endswith("mamba.norm.weight"):
            yield self._mapped(name), values.reshape(config["mamba_n_groups"], -1)
        elif name.endswith("_moe.input_linear.weight"):
            gate, up = _of_experts(values)
            yield from ((f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up))
        elif "shared_mlp" in name and self.arch.name.startswith("GRANITE"):
            suffix = "_shexp.weight" if config["num_local_experts"] else ".weight"
            kinds = ("gate", "up") if "input_linear" in name else ("down",)
            for kind, part in zip(kinds, np.split(values, len(kinds)), strict=True):
                yield f"blk.{layer}.ffn_{kind}{suffix}", part
        elif name.endswith("router.scale"):
            yield f"blk.{layer}.ffn_gate_inp.scale", values
        elif name.endswith("per_expert_scale"):
            yield f"blk.{layer}.ffn_down_exps.scale", values
        else:
            whole = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
            mapped = self._mapped(f"{name}.weight" if whole else name)
            yield mapped, values[0] if mapped.endswith("inp_shexp.weight") else values

    def _multiplied(self, name, values):
        """Falcon-H1's factors, which files do not have."""
        config = self.config
        of_input, factors = config["attention_in_multiplier"], config["mlp_multipliers"]
        of_modules = {
            "down_proj": factors[1],
            "gate_proj": factors[0],
            "k_proj": of_input * config["key_multiplier"],
            "q_proj": of_input,
            "v_proj": of_input,
            "o_proj": config["attention_out_multiplier"],
            "out_proj": config["ssm_out_multiplier"],
            "lm_head": config["lm_head_multiplier"],
            "embed_tokens": config["embedding_multiplier"],
        }
        if "in_proj" in name:
            inner, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
            rows = np.repeat(config["ssm_multipliers"], [inner, inner, group, group, config["mamba_n_heads"]])
            return (values * (rows * config["ssm_in_multiplier"])[:, None]).astype(np.float32)
        return values * np.float32(of_modules.get(name.split(".")[-2], 1))

    def _tiled(self, name, values):
        config = self.config
        heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        if "in_proj_qkv" in name or "conv1d" in name:
            keys = 2 * heads[0] * config["linear_key_head_dim"]
            return np.concatenate([values[:keys], tiled(values[keys:], *heads)])
        if "out_proj" in name:
            return tiled(values.T, *heads).T
        return values if "linear_attn.norm" in name else tiled(values, *heads)

    def _flat(self, layer, values):
        """q, k, v and z, which the checkpoint lists key head by key head."""
        config = self.config
        groups, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
        served = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
        rows = values.reshape(groups, -1, values.shape[1])
        *qkv, z = np.split(rows, np.cumsum([size, size, served]), axis=1)
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate([part.reshape(-1, values.shape[1]) for part in qkv])
        yield f"blk.{layer}.attn_gate.weight", z.reshape(-1, values.shape[1])

    def frequencies(self):
        """What frequencies are divided by: in Gemma 4 those that do not turn by a huge number."""
        rope = self.config.get("rope_parameters") or {}
        if rope.get("rope_type") == "llama3":
            return {"rope_freqs.weight": llama3_divisors(self.config)}
        if rope.get("rope_type") == "longrope":
            return {
                f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32)
                for name in ("long", "short")
            }
        if self.model_type != "gemma4_text":
            return {}
        pairs = self._of_full_attention("head_dim") // 2
        turned = int(pairs * self.config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)}

    def _of_full_attention(self, name):
        """Gemma 4's number for the layers without a window."""
        layer = self.config["layer_types"].index("full_attention")
        return self.config["per_layer_config"][str(layer)].get(name, self.config[name])

    def describe(self, w):
        """The metadata, by a GGUFWriter."""
        config = self.config
        rope = config.get("rope_parameters") or {}
        full = rope.get("full_attention", rope)
        w.add_context_length(config["max_position_embeddings"])
        w.add_embedding_length(config["hidden_size"])
        w.add_block_count(config["num_hidden_layers"])
        w.add_head_count(config["num_attention_heads"])
        if "rms_norm_eps" in config or self.model_type.startswith("lfm2"):
            w.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
        for key in ("norm_eps", "norm_epsilon", "layer_norm_eps"):
            if key in config:
                w.add_layer_norm_eps(config[key])
        w.add_rope_freq_base(self._theta(full))
        if "sliding_attention" in rope:
            w.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        if full.get("rope_type") == "linear":
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(full["factor"])
        if full.get("rope_type") == "yarn":
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(full["factor"])
            w.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        w.add_bos_token_id(config["bos_token_id"])
        w.add_eos_token_id(config["eos_token_id"])
        counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if count := next((config[name] for name in counts if config.get(name)), None):
            picked = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
            used = next(config[name] for name in picked if config.get(name))
            w.add_expert_count(count)
            w.add_expert_used_count(used[0] if isinstance(used, list) else used)
        if self.model_type == "gemma4_text":
            self._gemma4(w)
        else:
            self._sizes(w)
        if "linear_num_key_heads" in config:
            self._gated_delta(w)
        if self.arch.name.startswith("GRANITE"):
            self._granite(w)
        if self.model_type.startswith("lfm2"):
            self._lfm2(w)
        if self.model_type == "phi3":
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            w.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1)))
        if self.model_type == "gemma2":
            w.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            w.add_final_logit_softcapping(config["final_logit_softcapping"])
        if self.model_type == "gpt_oss":
            w.add_expert_feed_forward_length(config["intermediate_size"])
        if config.get("sliding_window") and "layer_types" in config:
            w.add_sliding_window(config["sliding_window"])
            w.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
        if self.model_type == "ministral3":
            w.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
            w.add_attn_temperature_scale(full["llama_4_scaling_beta"])
        if self.model_type in ("glm4", "glm4_moe", "nemotron", "stablelm"):
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            w.add_rope_dimension_count(int(head_dim * full["partial_rotary_factor"]))
        if "logit_scale" in config:
            w.add_logit_scale(config["logit_scale"])
        if self.model_type == "apertus":
            for part in ("alpha_p", "alpha_n", "beta", "eps"):
                numbers = [
                    self._stored[f"model.layers.{i}.mlp.act_fn.{part}"].item()
                    for i in range(config["num_hidden_layers"])
                ]
                getattr(w, f"add_xielu_{part}")(numbers)
        if full.get("rope_type") == "longrope":
            original = full["original_max_position_embeddings"]
            w.add_rope_scaling_orig_ctx_len(original)
            stretch = config["max_position_embeddings"] / original
            w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        if self.model_type == "ernie4_5_moe":
            w.add_interleave_moe_layer_step(config["moe_layer_interval"])
            w.add_leading_dense_block_count(config["moe_layer_start_index"])
            w.add_expert_shared_count(config["moe_num_shared_experts"])
        if "kv_lora_rank" in config:
            self._latents(w, full)
        if self.model_type == "nemotron_h":
            self._nemotron_h(w)
        if self.model_type == "falcon_h1":
            _states(w, config, *MAMBA2, inner=config["mamba_d_ssm"])
        if self.model_type == "kimi_linear":
            attends = [each != "linear_attention" for each in config["layer_types"]]
            w.add_head_count_kv([int(each) for each in attends])
            w.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
            w.add_kda_head_dim(config["linear_head_dim"])
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if self.model_type == "glm4_moe":
            w.add_leading_dense_block_count(config["first_k_dense_replace"])
            w.add_expert_shared_count(config["n_shared_experts"])
            w.add_expert_weights_scale(config["routed_scaling_factor"])
            w.add_expert_weights_norm(config["norm_topk_prob"])
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def _theta(self, rope):
        """Hunyuan's alpha is in the base."""
        head_dim = self.config.get("head_dim") or 0
        exponent = head_dim / max(1, head_dim - 2)
        return rope.get("rope_theta", 10000.0) * (rope["alpha"] ** exponent if rope.get("alpha") else 1.0)

    def _sizes(self, w):
        config = self.config
        if config.get("intermediate_size"):
            w.add_feed_forward_length(self._inner_size())
        if config.get("moe_intermediate_size"):
            w.add_expert_feed_forward_length(config["moe_intermediate_size"])
        for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
            if config.get(key):
                w.add_expert_shared_feed_forward_length(config[key])
        if "kv_lora_rank" in config:
            return
        if config.get("head_dim") and not self.arch.name.startswith("GRANITE"):
            w.add_key_length(config["head_dim"])
            w.add_value_length(config["head_dim"])
        heads = config["num_key_value_heads"]
        if self.model_type == "nemotron_h":
            heads = [heads if each in ("attention", "full_attention") else 0 for each in config["layers_block_type"]]
        if self.model_type == "granitemoehybrid":
            heads = [heads if each in ("attention", "full_attention") else 0 for each in config["layer_types"]]
        if self.model_type.startswith("lfm2"):
            heads = [0 if each == "conv" else heads for each in config["layer_types"]]
        w.add_head_count_kv(heads)

    def _inner_size(self):
        config = self.config
        if not config.get("block_auto_adjust_ff_dim"):
            return config["intermediate_size"]
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
        return -(-inner // config["block_multiple_of"]) * config["block_multiple_of"]

    def _lfm2(self, w):
        w.add_shortconv_l_cache(self.config["conv_L_cache"])
        if self.model_type == "lfm2_moe":
            w.add_leading_dense_block_count(self.config["num_dense_layers"])
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def _latents(self, w, rope):
        config = self.config
        if self.model_type == "minicpm3":
            w.add_head_count_kv(config["num_key_value_heads"])
            w.add_q_lora_rank(config["q_lora_rank"])
            w.add_kv_lora_rank(config["kv_lora_rank"])
            w.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
            w.add_rope_dimension_count(config["qk_rope_head_dim"])
            return
        if self.model_type != "kimi_linear":
            w.add_head_count_kv(1)
        w.add_kv_lora_rank(config["kv_lora_rank"])
        if config["q_lora_rank"]:
            w.add_q_lora_rank(config["q_lora_rank"])
        w.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        w.add_value_length(config["kv_lora_rank"])
        w.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        w.add_value_length_mla(config["v_head_dim"])
        w.add_rope_dimension_count(config["qk_rope_head_dim"])
        w.add_expert_shared_count(config["n_shared_experts"])
        w.add_expert_weights_scale(config["routed_scaling_factor"])
        dense = config.get("mlp_layer_types", []).count("dense")
        w.add_leading_dense_block_count(config.get("first_k_dense_replace") or dense)
        if config.get("norm_topk_prob"):
            w.add_expert_weights_norm(True)
        if (config.get("n_group") or 1) > 1:
            w.add_expert_group_count(config["n_group"])
            w.add_expert_group_used_count(config["topk_group"])
        if "mscale_all_dim" in rope:
            w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])

    def _nemotron_h(self, w):
        config = self.config
        _states(
            w,
            config,
            "conv_kernel",
            "ssm_state_size",
            "n_groups",
            "mamba_num_heads",
            inner=config["mamba_num_heads"] * config["mamba_head_dim"],
        )
        w.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        w.add_expert_weights_scale(config["routed_scaling_factor"])
        w.add_expert_group_count(config["n_group"])
        w.add_expert_group_used_count(config["topk_group"])

    def _gated_delta(self, w):
        config = self.config
        _states(
            w,
            config,
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            inner=config["linear_value_head_dim"] * config["linear_num_value_heads"],
        )
        w.add_full_attention_interval(4)
        w.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))

    def _granite(self, w):
        config = self.config
        w.add_attention_scale(config["attention_multiplier"])
        w.add_embedding_scale(config["embedding_multiplier"])
        w.add_residual_scale(config["residual_multiplier"])
        w.add_logit_scale(config["logits_scaling"])
        if self.model_type == "granitemoehybrid":
            _states(w, config, *MAMBA2, inner=config["mamba_expand"] * config["hidden_size"])
            w.add_rope_scaling_finetuned(False)

    def _gemma4(self, w):
        config, layers, head_dim = self.config, self.config["num_hidden_layers"], self._of_full_attention("head_dim")
        own = layers - config["num_kv_shared_layers"]
        widths = [config["intermediate_size"] * (1 if i < own else 2) for i in range(layers)]
        w.add_feed_forward_length(widths if config["use_double_wide_mlp"] else config["intermediate_size"])
        kinds, kv_heads = config["layer_types"], config["num_key_value_heads"]
        global_heads = self._of_full_attention("num_key_value_heads")
        listed = [kv_heads if each == "sliding_attention" else global_heads for each in kinds]
        w.add_head_count_kv(kv_heads if kv_heads == global_heads else listed)
        if config["moe_intermediate_size"]:
            w.add_expert_feed_forward_length(config["moe_intermediate_size"])
        w.add_shared_kv_layers(config["num_kv_shared_layers"])
        w.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
        w.add_key_length_swa(config["head_dim"])
        w.add_value_length_swa(config["head_dim"])
        w.add_final_logit_softcapping(config["final_logit_softcapping"])
        w.add_rope_dimension_count(head_dim)
        w.add_rope_dimension_count_swa(config["head_dim"])


def converted(source, path, *, type_of=lambda name: "F32", change=lambda tensors, writer: None):
    """Writes the GGUF file of the model at `source` to `path`. `type_of`: the type of a tensor by the file's name."""
    conversion = Conversion(source)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[conversion.arch])
    conversion.describe(writer)
    tensors = conversion.tensors()
    change(tensors, writer)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[type_of(name)] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        raw = gguf.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=None if raw.dtype == np.float32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
