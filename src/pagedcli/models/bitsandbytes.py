"""Weights that bitsandbytes rounded to 4 bits: where a checkpoint keeps them, and their numbers as bitsandbytes unpacks
them. Used by models.weights.

Source: QLoRA, Dettmers et al., 2023: neighbours share their largest magnitude, which may be rounded, too.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedcli.errors import ModelError

_STATE = re.compile(r"(.*\.weight)\.quant_state\.bitsandbytes__\w+")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight of 4-bit numbers."""

    name: str
    state: str  # name of the tensor that holds the JSON of its sizes
    tensor: Callable[[str], Tensor]  # gives a tensor of the checkpoint by its name

    def read(self, _file: object = None) -> Tensor:
        """Its numbers, [out, in], in the dtype that it was rounded from. Raises: ModelError for a damaged one."""
        try:
            return self._numbers(json.loads(bytes(self.tensor(self.state).tolist())))
        except (ValueError, LookupError, TypeError, RuntimeError) as error:
            raise ModelError(
                f"tensor {self.name!r}, rounded by bitsandbytes, is damaged: {error}", hint="download the file again"
            ) from error

    def _numbers(self, said: dict[str, Any]) -> Tensor:
        packed, size, shape = self.tensor(self.name).flatten(), said["blocksize"], said["shape"]
        if said["dtype"] not in _DTYPES:
            raise ValueError(f"its dtype is {said['dtype']!r}")
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()  # the first of two in the high bits
        values = self._part("quant_map").float().index_select(0, codes.int())
        largest = self._part("absmax")
        if "nested_offset" in said:
            steps = _repeated(self._part("nested_absmax"), said["nested_blocksize"], len(largest))
            levels = self._part("nested_quant_map").float()
            largest = levels.index_select(0, largest.int()) * steps + said["nested_offset"]
        values *= _repeated(largest.float(), size, len(values))
        return values.view(shape).to(getattr(torch, said["dtype"]))

    def _part(self, suffix: str) -> Tensor:
        return self.tensor(f"{self.name}.{suffix}")


def _repeated(numbers: Tensor, times: int, length: int) -> Tensor:
    return numbers.repeat_interleave(times)[:length]


def rounded_weights(where: dict[str, str], tensor: Callable[[str], Tensor]) -> Mapping[str, RoundedWeight]:
    """The weights that bitsandbytes rounded, by name. Changes: where, without the tensors that belong to them."""
    states = {found[1]: name for name in where if (found := _STATE.fullmatch(name)) is not None}
    for name in [name for name in where if name.rpartition(".weight.")[0] + ".weight" in states]:
        if name not in states:
            del where[name]
    return {name: RoundedWeight(name, state, tensor) for name, state in states.items()}
