"""Tiny models with an MTP head, as their publishers write them: the head's layers are further ones of the model's."""

import json
from pathlib import Path
from typing import Any

import torch
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

_DEPTHS: dict[str, int] = {"qwen3_5": 4, "qwen3_next": 4, "glm4-moe": 2, "deepseek_v3": 3, "nemotron_h-moe": 7}
HEAD_FAMILIES = tuple(_DEPTHS)
_QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_DEEPSEEK = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
_NEMOTRON = ("0.eh_proj", "0.enorm", "0.hnorm", "1.final_layernorm")
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN |= {"mscale": 0.9, "mscale_all_dim": 0.9}  # equal, as all files have them: GGUF keeps one of them
_OUT = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def model_with_head(family: str, path: Path, *, branches: float | None = None) -> Path:
    """Write a seeded random model whose last layer is that of its head, which `deep` next to it has as one of its own.

    With `branches`, what layers add to the residual is so much smaller, and the head is one that knows what follows a
    token in a model without layers."""
    depth, options = _DEPTHS[family], {}
    if family.startswith("qwen"):
        options["layer_types"] = ["linear_attention", "full_attention"] * 2 + ["full_attention"]
    if family == "deepseek_v3":
        options["rope_parameters"] = _YARN
    is_nemotron = family == "nemotron_h-moe"
    if is_nemotron:
        options = {"hybrid_override_pattern": "MEM*EME" + "*E", "num_nextn_predict_layers": 1}
    else:
        options["num_hidden_layers"] = depth + 1
    deep = tiny_model(family, path / "deep", **options)
    tensors, config = load_file(deep / "model.safetensors"), json.loads((deep / "config.json").read_text())
    last, width = f"model.layers.{depth}.", config["hidden_size"]
    is_qwen = family.startswith("qwen")
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randn(width, 2 * width, generator=generator) * 0.2]
    parts += [torch.randn(width, generator=generator) * 0.1 + (not is_qwen) for _ in range(3)]
    if branches is not None:
        parts[0] = torch.eye(width, 2 * width)
        parts[1:] = [torch.full((width,), float(not is_qwen))] * 3
        tensors["backbone.norm_f.weight" if is_nemotron else "model.norm.weight"] = parts[1].clone()
        for name in tensors:
            tensors[name] *= branches if name.endswith(_OUT) else 1
    save_file(tensors, deep / "model.safetensors", metadata={"format": "pt"})
    if is_qwen:
        tensors = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        names = [f"mtp.{part}.weight" for part in _QWEN]
        config["layer_types"] = config["layer_types"][:depth]
    elif is_nemotron:
        for i in range(2):
            begin, own = f"backbone.layers.{depth + i}.", f"mtp.layers.{i}."
            tensors = {name.replace(begin, own): tensor for name, tensor in tensors.items()}
        names = [f"mtp.layers.{part}.weight" for part in _NEMOTRON]
        config |= {key: config[key][:depth] for key in ("layers_block_type", "layer_types") if config.get(key)}
    else:
        names = [f"{last}{part}.weight" for part in _DEEPSEEK]
        copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        tensors |= {last + copy: tensors[name].clone() for copy, name in copies.items()}
    if config.get("mlp_layer_types") is not None:
        config["mlp_layer_types"] = config["mlp_layer_types"][:depth]
    tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": depth}))
    return path


class ReferenceHead:
    """The published formula in float32, with the layer of transformers."""

    def __init__(self, path: Path) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        deep = AutoModelForCausalLM.from_pretrained(path / "deep", **options).eval().model
        tensors, depth = load_file(path / "model.safetensors"), self.model.config.num_hidden_layers
        self.layers, self.rotary = deep.layers[depth:], getattr(deep, "rotary_emb", None)
        self.eps = getattr(deep.config, "rms_norm_eps", None) or deep.config.layer_norm_epsilon
        begin, names = f"model.layers.{depth}.", _DEEPSEEK
        if "mtp.fc.weight" in tensors:
            begin, names = "mtp.", _QWEN
        elif "mtp.layers.0.eh_proj.weight" in tensors:
            begin, names = "mtp.layers.", _NEMOTRON
        self.projection, *norms = (tensors[f"{begin}{name}.weight"] for name in names)
        self.norms = [norm + (begin == "mtp.") for norm in norms]  # Qwen stores them less 1

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num_guesses: int, *, begin: int = 0) -> list[torch.Tensor]:
        """For the tokens after the given ones: of each guess [V], the next one after the likeliest of the last. The
        head sees the tokens from `begin` on."""
        ids, found = torch.tensor([token_ids]), []
        hidden = self.model.model(ids[:, :-1]).last_hidden_state[:, begin:]
        ids = ids[:, begin:]
        for _ in range(num_guesses):
            embedded = self._norm(self.model.get_input_embeddings()(ids[:, 1:]), 0)
            x = torch.cat((embedded, self._norm(hidden, 1)), dim=-1) @ self.projection.T
            length = x.shape[1]
            positions = torch.arange(begin, begin + length)[None]
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            given = {"attention_mask": mask, "position_ids": positions}
            if self.rotary is not None:
                given["position_embeddings"] = self.rotary(x, positions)
            for layer in self.layers:
                x = layer(x, **given)
                x = x[0] if isinstance(x, tuple) else x
            out = self._norm(x, 2)[:, -1:]
            found.append(self.model.lm_head(out)[0, 0])
            ids = torch.cat((ids, found[-1].argmax()[None, None]), dim=1)
            hidden = torch.cat((hidden, out), dim=1)
        return found

    def _norm(self, x: torch.Tensor, place: int) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norms[place]
