"""The weights of a GGUF file: a WeightSource."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagedcli.models.gguf.blocks import numbers
from pagedcli.models.gguf.description import reordered_heads
from pagedcli.models.gguf.header import Header, StoredTensor
from pagedcli.models.gguf.names import stored_tensor
from pagedcli.models.parameters import Parameter
from pagedcli.models.stacking import UnreadTensors, kept_dtype, stacked

# used by the rotary embedding, or by nothing
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "attn_rot_embd.weight")


class GgufWeights:
    """Tensors of a GGUF file or of all parts of a split one, which are memory-mapped."""

    notes: tuple[str, ...] = ()

    def __init__(self, header: Header) -> None:
        self._header = header
        self._normed_before = "blk.0.post_attention_norm.weight" not in header.tensors
        self._maps: dict[Path, np.ndarray] = {}

    def load(
        self, parameters: Mapping[str, Parameter], *, ignored: frozenset[str], dtype: torch.dtype, device: torch.device
    ) -> UnreadTensors:
        """See WeightSource. Quantized linear layers stay views of the file.

        Raises: ModelError naming the tensor: missing, unexpected, or of another shape.
        """
        names = [name for parameter in parameters.values() for name in parameter.shapes]
        stored = {name: stored_tensor(name, normed_before=self._normed_before) for name in names}
        self._check_names({name for name, _ in stored.values()})

        def read(parameter: Parameter) -> Tensor:
            own_dtype = kept_dtype(parameter, dtype)
            parts = (
                parameter.kept(name, self._read(name, *stored[name], parameter, own_dtype or torch.float32))
                for name in parameter.shapes
            )
            return stacked(parts, parameter, own_dtype, device)

        return UnreadTensors({key: partial(read, parameter) for key, parameter in parameters.items()})

    def _check_names(self, expected: set[str]) -> None:
        found = self._header.tensors
        if missing := sorted(expected - found.keys()):
            others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise self._header.error(f"tensor {missing[0]!r} is missing{others}", "download the file again")
        extra = sorted(name for name in found.keys() - expected if not name.endswith(_UNUSED))
        if extra:
            others = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise self._header.error(f"tensor {extra[0]!r:.80} is not part of this architecture{others}")

    def _read(
        self, name: str, stored_name: str, expert: int | None, parameter: Parameter, dtype: torch.dtype
    ) -> Tensor:
        """The numbers of a tensor, or its blocks if the parameter keeps them."""
        stored, shape = self._header.tensors[stored_name], parameter.shapes[name]
        keeps_blocks = parameter.stored.dtype == "uint8"
        blocks = self._blocks(stored)
        if expert is not None and blocks.dim() == len(shape) + 2 and expert < len(blocks):
            blocks = blocks[expert]
        found = (*blocks.shape[:-2], blocks.shape[-2] if keeps_blocks else blocks.shape[-2] * stored.type.block)
        if [size for size in found if size != 1] != [size for size in shape if size != 1]:
            raise self._header.error(
                f"tensor {stored_name!r} has shape {list(stored.shape)}, which its metadata do not lead to"
            )
        blocks = blocks.reshape(*shape[:-1], *blocks.shape[-2:])
        if (heads := reordered_heads(self._header, stored_name)) is not None and not len(blocks) % (2 * heads):
            blocks = blocks.reshape(heads, -1, 2, *blocks.shape[1:]).transpose(1, 2).flatten(0, 2)
        return blocks if keeps_blocks else numbers(blocks, stored.type, dtype).reshape(shape)

    def _blocks(self, stored: StoredTensor) -> Tensor:
        """The bytes of a tensor: [..., blocks of a row, bytes of a block] uint8."""
        if stored.file not in self._maps:
            # copy on write: torch takes no read-only arrays; nobody writes
            self._maps[stored.file] = np.memmap(stored.file, mode="c")
        content = self._maps[stored.file][stored.offset : stored.offset + stored.num_bytes]
        blocks = stored.shape[-1] // stored.type.block
        return torch.from_numpy(content).reshape(*stored.shape[:-1], blocks, stored.type.num_bytes)
