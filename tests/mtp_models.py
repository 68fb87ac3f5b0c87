"""Tiny models with an MTP head, as their publishers write them: the head's layer is one more of the model's."""

import json
from pathlib import Path
from typing import Any

import torch
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

_DEPTHS: dict[str, int] = {"qwen3_5": 4, "qwen3_next": 4, "glm4-moe": 2, "deepseek_v3": 3}
HEAD_FAMILIES = tuple(_DEPTHS)
_QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_DEEPSEEK = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
_OUT = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def model_with_head(family: str, path: Path, *, branches: float | None = None) -> Path:
    """Write a seeded random model whose last layer is that of its head, which `deep` next to it has as one of its own.

    With `branches`, what layers add to the residual is so much smaller, and the head is one that knows what follows a
    token in a model without layers."""
    depth, options = _DEPTHS[family], {}
    if family.startswith("qwen"):
        options["layer_types"] = ["linear_attention", "full_attention"] * 2 + ["full_attention"]
    deep = tiny_model(family, path / "deep", num_hidden_layers=depth + 1, **options)
    tensors, config = load_file(deep / "model.safetensors"), json.loads((deep / "config.json").read_text())
    last, width = f"model.layers.{depth}.", config["hidden_size"]
    is_qwen = family.startswith("qwen")
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randn(width, 2 * width, generator=generator) * 0.2]
    parts += [torch.randn(width, generator=generator) * 0.1 + (not is_qwen) for _ in range(3)]
    if branches is not None:
        parts[0] = torch.eye(width, 2 * width)
        parts[1:] = [torch.full((width,), float(not is_qwen))] * 3
        tensors["model.norm.weight"] = parts[1].clone()
        for name in tensors:
            tensors[name] *= branches if name.endswith(_OUT) else 1
    save_file(tensors, deep / "model.safetensors", metadata={"format": "pt"})
    if is_qwen:
        tensors = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        names = [f"mtp.{part}.weight" for part in _QWEN]
        config["layer_types"] = config["layer_types"][:depth]
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
        self.layer, self.rotary, self.eps = deep.layers[-1], deep.rotary_emb, deep.config.rms_norm_eps
        tensors = load_file(path / "model.safetensors")
        begin = "mtp." if "mtp.fc.weight" in tensors else f"model.layers.{self.model.config.num_hidden_layers}."
        names = _QWEN if begin == "mtp." else _DEEPSEEK
        self.projection, *norms = (tensors[f"{begin}{name}.weight"] for name in names)
        self.norms = [norm + (begin == "mtp.") for norm in norms]  # Qwen stores them less 1

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num_guesses: int) -> list[torch.Tensor]:
        """For the tokens after the given ones: of each guess [V], the next one after the likeliest of the last."""
        ids, found = torch.tensor([token_ids]), []
        hidden = self.model.model(ids[:, :-1]).last_hidden_state
        for _ in range(num_guesses):
            embedded = self._norm(self.model.model.embed_tokens(ids[:, 1:]), 0)
            x = torch.cat((embedded, self._norm(hidden, 1)), dim=-1) @ self.projection.T
            length = x.shape[1]
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            angles = self.rotary(x, positions)
            out = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
            out = self._norm(out[0] if isinstance(out, tuple) else out, 2)[:, -1:]
            found.append(self.model.lm_head(out)[0, 0])
            ids = torch.cat((ids, found[-1].argmax()[None, None]), dim=1)
            hidden = torch.cat((hidden, out), dim=1)
        return found

    def _norm(self, x: torch.Tensor, place: int) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norms[place]
