"""A LoRA adapter, as peft saves it, merged into a checkpoint's weights as they are read.

Source: LoRA, Hu et al., 2021; rsLoRA, Kalajdzievski, 2023.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import convert, read_json, todays_name
from pagedcli.models.hub import ADAPTER_FILES
from pagedcli.models.stacking import and_others

_NAME = re.compile(r"base_model\.model\.(.+?)(?:(\.lora_[AB]\.weight)|(\.weight|\.bias))")
# ways of training in which the weights below the adapter are not the checkpoint's
_OTHER_WEIGHTS = ("pissa", "olora", "loftq", "corda", "lora_ga")


class _Settings(msgspec.Struct, frozen=True):
    """adapter_config.json, as far as it matters for merging."""

    peft_type: str
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    init_lora_weights: Any = True
    layer_replication: Any = None
    alpha_pattern: dict[str, float] | None = None  # end of a module's name, as a pattern -> its alpha

    def refusal(self) -> str | None:
        """What it has that cannot be merged."""
        begin = str(self.init_lora_weights).lower()
        reasons = {
            f"peft_type {self.peft_type}": self.peft_type != "LORA",
            "use_dora": self.use_dora,
            "fan_in_fan_out": self.fan_in_fan_out,
            f"bias {self.bias!r}": self.bias != "none",
            f"init_lora_weights {self.init_lora_weights!r}": begin.startswith(_OTHER_WEIGHTS),
            "layer_replication": self.layer_replication is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def scale(self, module: str, rank: int) -> float:
        patterns = self.alpha_pattern or {}
        own = (alpha for end, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({end})", module))
        return next(own, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)


class Adapter:
    """The changes of an adapter to the weights of a model, by their names in its checkpoint."""

    def __init__(self, folder: Path, file: Any, body: str) -> None:
        """`file`: its open safetensors file; `body`: of the language model's names.

        Raises: ModelError for what cannot be merged.
        """
        settings_path = folder / ADAPTER_FILES[0]
        self._folder, self._file = folder, file
        self._settings = convert(read_json(settings_path), _Settings, settings_path)
        if (refusal := self._settings.refusal()) is not None:
            raise ModelError(
                f"{settings_path}: an adapter with {refusal} cannot be merged while loading",
                hint="merge it with peft's merge_and_unload, and use the folder that save_pretrained writes",
            )
        self._products: dict[str, str] = {}  # name of a weight -> module, of which the file has two factors
        self._whole: dict[str, str] = {}  # name of a tensor -> its name in the file, which replaces it
        names = set(file.keys())
        for stored in names:
            found = _NAME.fullmatch(stored)
            if found is None or "lora" in found[1] or (found[2] and not names.issuperset(_factors(found[1]))):
                raise ModelError(f"{folder / ADAPTER_FILES[1]}: tensor {stored!r} cannot be merged")
            if found[2]:
                self._products[todays_name(f"{found[1]}.weight", body)] = found[1]
            else:
                self._whole[todays_name(found[1] + found[3], body)] = stored

    def check(self, expected: Mapping[str, object]) -> None:
        """Raises: ModelError if it changes what the model does not have. `expected`: by the names of its tensors."""
        if unknown := sorted((self._products.keys() | self._whole.keys()) - expected.keys()):
            raise ModelError(
                f"{self._folder}: the model has no tensor {unknown[0]!r} to merge into{and_others(unknown)}",
                hint="the adapter was trained on another model; an output layer that is tied has no tensor of its own",
            )

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the checkpoint with the adapter's change, which makes it float32.

        Raises: ModelError if the adapter's factors do not fit its shape.
        """
        if name in self._whole:
            whole: Tensor = self._file.get_tensor(self._whole[name])
            return whole
        if (module := self._products.get(name)) is None:
            return tensor
        first, second = map(self._file.get_tensor, _factors(module))
        rank = len(first)
        if (second.shape, first.shape) != ((tensor.shape[0], rank), (rank, tensor.shape[-1])):
            raise ModelError(
                f"{self._folder}: the factors for {name!r} have shapes {list(first.shape)} and {list(second.shape)}, "
                f"but the weight has {list(tensor.shape)}",
                hint="the adapter was trained on another model",
            )
        change: Tensor = second.float() @ first.float() * self._settings.scale(module, rank)
        return tensor.float() + change


def _factors(module: str) -> tuple[str, str]:
    """The names of A, [rank, in], and B, [out, rank]."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"
