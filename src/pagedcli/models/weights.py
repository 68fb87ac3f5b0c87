"""Sources of a decoder's weights: safetensors files, read one tensor at a time with strict names, or seeded noise."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedcli.attention.base import dtype_name
from pagedcli.errors import ModelError, shortage
from pagedcli.models.adapter import Adapter
from pagedcli.models.checkpoint_files import read_json, todays_name
from pagedcli.models.formats import DEVIATION, FLOAT8_DEVIATION, VECTOR
from pagedcli.models.gguf.header import is_gguf, read_header
from pagedcli.models.gguf.weights import GgufWeights
from pagedcli.models.hub import ADAPTER_FILES
from pagedcli.models.spec import ModelSpec
from pagedcli.models.stacking import UnreadTensors, and_others, kept_dtype, not_read, stacked
from pagedcli.models.tensors import LLAMA_NAMES, Parameter, TensorNames

# rotary tables, the shapes of packed weights, scales of activations, which are rounded per token or not at all, and of
# the KV cache, whose own scales are used
_UNUSED = (
    *(".inv_freq", ".weight_shape", ".input_scale", ".input_global_scale", ".activation_scale", ".input_zero_point"),
    *(".k_scale", ".v_scale"),
)


class WeightSource(Protocol):
    """Fills the tensors of a decoder."""

    notes: tuple[str, ...]  # notes for the user on what load has read

    def load(
        self, parameters: Mapping[str, Parameter], *, ignored: frozenset[str], dtype: torch.dtype, device: torch.device
    ) -> UnreadTensors:
        """The tensors by the keys of `parameters`, the names of which are checked at once.

        `ignored`: checkpoint tensors that are allowed but not needed (a tied lm_head, rotary buffers).
        """
        ...


def open_weights(path: Path, load_format: str, seed: int, spec: ModelSpec, adapter: Path | None = None) -> WeightSource:
    """The weights of a model's folder or GGUF file, or seeded noise with load_format dummy. `adapter`: the folder of
    one to merge into them. Raises: ModelError."""
    if adapter is not None and (is_gguf(path) or load_format == "dummy" or spec.quantization is not None):
        raise ModelError(
            f"the adapter {adapter} cannot be merged: {path} has no plain weights in safetensors files",
            hint="use the model that it was trained on; --quantization rounds the merged weights",
        )
    if is_gguf(path):
        if load_format == "dummy":
            raise ModelError(f"{path} is one file with its weights", hint="use no --load-format dummy")
        return GgufWeights(read_header(path))
    if load_format == "dummy":
        return DummyWeights(seed)
    alternating = spec.experts is not None and spec.experts.alternating
    change = None if adapter is None else Adapter(adapter, _open(adapter / ADAPTER_FILES[1]), spec.names.body)
    return CheckpointWeights(path, spec.names, alternating=alternating, adapter=change)


class DummyWeights:
    """`--load-format dummy`: normal noise of standard deviation 0.02, norm weights 1. No weight file is read.

    The same seed gives the same weights on every device and, up to rounding, in every dtype.
    """

    _BLOCK = 1 << 18  # values copied at a time: stays in the processor's cache
    _POOL = 16  # blocks of noise drawn, from which all values are copied: drawing 0.6 billion numbers takes seconds
    _STRIDE = 1_000_003  # a prime: each block comes from a different place in the pool

    notes: tuple[str, ...] = ()

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def load(
        self, parameters: Mapping[str, Parameter], *, ignored: frozenset[str], dtype: torch.dtype, device: torch.device
    ) -> UnreadTensors:
        """See WeightSource."""
        generator, size = torch.Generator().manual_seed(self._seed), self._POOL * self._BLOCK
        noise = torch.empty(size).normal_(0.0, DEVIATION, generator=generator).to(device, dtype)
        bits = torch.randint(256, (size,), generator=generator, dtype=torch.uint8).to(device)
        reads, first = {}, 0  # the blocks of a tensor follow those of the one before it
        for key, parameter in parameters.items():
            if parameter.stored.optional or parameter.stored.out_dim is None:  # the order of groups: neighbours
                continue
            init = parameter.stored.init if parameter.init is None else parameter.init
            own_dtype, whole = kept_dtype(parameter, dtype) or torch.float32, replace(parameter, parts={})
            if isinstance(init, int | float):
                reads[key] = partial(torch.full, parameter.shape, init, dtype=own_dtype, device=device)
                continue
            count = math.prod(whole.shape)
            if init == "bits":
                count *= own_dtype.itemsize
                reads[key] = partial(self._bits, bits, parameter, first, count, own_dtype)
            else:
                reads[key] = partial(self._numbers, noise, parameter, first, count, own_dtype)
            first += -(-count // self._BLOCK)
        return UnreadTensors(reads)

    def _bits(self, pool: Tensor, parameter: Parameter, first: int, count: int, dtype: torch.dtype) -> Tensor:
        [(name, shape)] = parameter.shapes.items()
        return parameter.kept(name, self._drawn(pool, first, count).view(dtype).view(shape))

    def _numbers(self, pool: Tensor, parameter: Parameter, first: int, count: int, dtype: torch.dtype) -> Tensor:
        tensor = self._drawn(pool, first, count).view(replace(parameter, parts={}).shape)
        if parameter.parts:  # the same noise for any number of ranks
            sizes = [shape[parameter.dim] for shape in parameter.shapes.values()]
            stacked = zip(parameter.shapes, torch.split(tensor, sizes, parameter.dim), strict=True)
            tensor = torch.cat([parameter.kept(*pair) for pair in stacked], parameter.dim)
        if dtype == torch.float8_e4m3fn:
            tensor = (tensor.float() * (FLOAT8_DEVIATION / DEVIATION)).to(dtype)
        return tensor if parameter.dtype is None else tensor.to(dtype)

    def _drawn(self, pool: Tensor, first: int, count: int) -> Tensor:
        """`count` values of the pool, [count], from the block `first` of the model on."""
        values, num_places = torch.empty(count, dtype=pool.dtype, device=pool.device), (self._POOL - 1) * self._BLOCK
        for number, block in enumerate(torch.split(values, self._BLOCK), first):
            place = number * self._STRIDE % num_places
            block.copy_(pool[place : place + block.numel()])
        return values


class CheckpointWeights:
    """model.safetensors, or the shards listed in model.safetensors.index.json. Files are memory-mapped."""

    notes: tuple[str, ...] = ()

    def __init__(
        self, path: Path, names: TensorNames = LLAMA_NAMES, *, alternating: bool = False, adapter: Adapter | None = None
    ) -> None:
        self._path, self._skipped, self._body, self._alternating = path, names.skipped, names.body, alternating
        self._adapter = adapter

    def load(
        self, parameters: Mapping[str, Parameter], *, ignored: frozenset[str], dtype: torch.dtype, device: torch.device
    ) -> UnreadTensors:
        """See WeightSource. Files stay open until the last tensor is read.

        Raises:  ModelError naming file and tensor: missing, unexpected, of another shape, not floating point, damaged.
        """
        files = {name: _Renamed(_open(self._path / name), self._body) for name in self._file_names()}
        where = {name: file_name for file_name, file in files.items() for name in file.keys()}  # noqa: SIM118
        self._skip(where)
        stored = dict(where)
        rounded = _rounded_weights(where, lambda name: files[stored[name]].get_tensor(name))
        expected = {name: shape for parameter in parameters.values() for name, shape in parameter.shapes.items()}
        views: dict[str, _View | _RoundedWeight] = {
            **_expert_views(files, where, expected, alternating=self._alternating),
            **rounded,
        }
        if rounded:
            self.notes += (
                f"{len(rounded)} weights that bitsandbytes rounded to 4 bits are widened while loading; --quantization"
                " int4 or int8 rounds them again",
            )
        if self._adapter is not None:
            self._adapter.check(expected)
        optional = {name for each in parameters.values() if each.stored.optional for name in each.shapes}
        self._check_names(expected.keys(), where, ignored | (optional - where.keys()))

        def read(parameter: Parameter) -> Tensor:
            parts = (
                parameter.kept(name, self._read(files[where[name]], where[name], name, parameter, views))
                for name in parameter.shapes
            )
            return parameter.scaled(stacked(parts, parameter, kept_dtype(parameter, dtype), device))

        return UnreadTensors(
            {
                key: partial(read, parameter)
                for key, parameter in parameters.items()
                if not parameter.stored.optional or where.keys() >= parameter.shapes.keys()
            }
        )

    def _file_names(self) -> list[str]:
        """The weight files, in the folder's order; each exists."""
        index_path = self._path / "model.safetensors.index.json"
        if (self._path / "model.safetensors").is_file():
            return ["model.safetensors"]
        if not index_path.is_file():
            names = sorted(file.name for file in self._path.glob("*.safetensors"))
            if len(names) == 1:
                return names
            raise self._no_weights(names)
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index_path} has no weight_map", hint="download the file again")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{index_path} names {name!r}, which is not in this folder")
        names = sorted(set(weight_map.values()))
        for name in names:
            if not (self._path / name).is_file():
                num_tensors = sum(file == name for file in weight_map.values())
                raise ModelError(
                    f"{self._path} lacks {name}, which {index_path.name} names for {num_tensors} tensors",
                    hint="download the missing file",
                )
        return names

    def _no_weights(self, names: list[str]) -> ModelError:
        if names:
            return ModelError(
                f"{self._path} has {len(names)} safetensors files but no model.safetensors.index.json",
                hint="download the index file",
            )
        hint = "download the *.safetensors files, or use --load-format dummy for random weights"
        if any(self._path.glob("*.bin")) or any(self._path.glob("*.pth")):
            hint = "pickled weights (*.bin, *.pth) can run code and are not read: convert the model to safetensors"
        return ModelError(f"{self._path} has no model.safetensors", hint=hint)

    def _check_names(self, expected: Any, where: dict[str, str], ignored: frozenset[str]) -> None:
        missing = sorted(expected - where.keys() - ignored)
        if missing:
            raise ModelError(
                f"{self._path}: tensor {missing[0]!r} is missing{and_others(missing)}",
                hint="the folder is incomplete, or config.json describes another model",
            )
        unexpected = sorted(
            name for name in where.keys() - expected if name not in ignored and not name.endswith(_UNUSED)
        )
        if unexpected:
            raise ModelError(
                f"{self._path / where[unexpected[0]]}: tensor {unexpected[0]!r} is not part of this architecture"
                f"{and_others(unexpected)}",
                hint="config.json describes another model, or the weights are adapted or quantized",
            )

    def _skip(self, where: dict[str, str]) -> None:
        """Changes: where, without the tensors that are not read, and notes."""
        found = [name for name in where if name.startswith(self._skipped)] if self._skipped else []
        for name in found:
            del where[name]
        if found:
            begin = " and ".join(f"{each}*" for each in self._skipped if any(name.startswith(each) for name in found))
            self.notes = (not_read(len(found), "checkpoint", f"as only text is generated, token by token: {begin}"),)

    def _read(self, file: Any, file_name: str, name: str, parameter: Parameter, views: Mapping[str, Any]) -> Tensor:
        tensor: Tensor = views[name].read(file) if name in views else file.get_tensor(name)
        if self._adapter is not None:
            tensor = self._adapter.merged(name, tensor)
        shape, stored_dtype = parameter.shapes[name], parameter.stored.dtype
        # scales, and what there is per expert, are written with and without sizes of 1
        is_loose = None in (parameter.stored.in_per, parameter.stored.out_per) or parameter.stored is VECTOR
        if is_loose and [n for n in tensor.shape if n != 1] == [n for n in shape if n != 1]:
            tensor = tensor.reshape(shape)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._path / file_name}: tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(shape)}",
                hint="config.json and the weights belong to different models",
            )
        floating = ("float32", "bfloat16", "float16", "float64")
        if dtype_name(tensor.dtype) not in (floating if stored_dtype is None else (stored_dtype,)):
            raise ModelError(
                f"{self._path / file_name}: tensor {name!r} is stored as {dtype_name(tensor.dtype)}",
                hint="config.json and the weights do not belong together: download both again",
            )
        return tensor


class _Renamed:
    """A file's tensors under today's names."""

    def __init__(self, file: Any, body: str) -> None:
        self._file, self._stored = file, {todays_name(name, body): name for name in file.keys()}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        return self._stored.keys()

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(self._stored[name])

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._stored[name])


@dataclass(frozen=True, slots=True)
class _View:
    """What belongs to one module within a tensor that stacks those of all experts: [experts, out, ...]."""

    name: str  # name of the stacked tensor
    index: int  # number of the expert
    rows: slice  # output features
    transposed: bool  # the tensor is [experts, in, out]

    def read(self, file: Any) -> Tensor:
        stacked = file.get_slice(self.name)
        if self.transposed or self.rows.step:
            whole: Tensor = stacked[self.index]
            part = (whole.T if self.transposed else whole)[self.rows]
        else:
            part = stacked[self.index, self.rows]
        return part.flatten(1) if part.ndim > 2 else part  # MXFP4 numbers lie in groups


# Experts that some checkpoints stack: the name of the tensor -> the names of each expert's modules, as they lie in it
_STACKED_EXPERTS = {
    **dict.fromkeys(("experts.gate_up_proj", "input_linear.weight"), ("gate_proj", "up_proj")),
    **dict.fromkeys(("experts.down_proj", "output_linear.weight"), ("down_proj",)),
}
_STACKED_SUFFIXES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}


def _expert_views(
    files: Mapping[str, _Renamed], where: dict[str, str], expected: Mapping[str, tuple[int, ...]], *, alternating: bool
) -> dict[str, _View]:
    """The tensors of stacked experts, by the names they have in checkpoints that store each alone. `expected`: shapes
    by these names. `alternating`: see ExpertsSpec.

    Changes: where, in which these names replace those of the stacks."""
    views, stacks = {}, []
    for stack, file_name in where.items():
        found = _STACK.fullmatch(stack)
        shape = files[file_name].get_slice(stack).get_shape() if found is not None else []
        if found is not None and len(shape) >= (2 if found[3] else 3):  # an ordinary layer may have such a name, too
            stacks.append((stack, file_name, found, shape))

    def has_inputs_first(found: re.Match[str], shape: list[int]) -> bool:
        module = f"{found[1]}experts.0.{_STACKED_EXPERTS[found[2]][0]}"
        _, num_inputs = expected.get(f"{module}.weight", (0, 0))
        return not found[3] and shape[1] == num_inputs != shape[2]

    # a square stack does not say how it lies, but gate and up, and down, are not both square
    inputs_first = alternating or any(has_inputs_first(found, shape) for _, _, found, shape in stacks)
    for stack, file_name, found, shape in stacks:
        prefix, modules, suffix = found[1], _STACKED_EXPERTS[found[2]], _STACKED_SUFFIXES[found[3]]
        transposed = inputs_first and suffix == "weight"
        num_rows, count = shape[2 if transposed and len(shape) > 2 else 1], len(modules)
        del where[stack]
        for index in range(shape[0]):
            for place, module in enumerate(modules):
                rows = slice(place * num_rows // count, (place + 1) * num_rows // count)
                if alternating and count > 1:
                    rows = slice(place, None, count)
                view = f"{prefix}experts.{index}.{module}.{suffix}"
                views[view], where[view] = _View(stack, index, rows, transposed), file_name
    return views


_STACK = re.compile(f"(.*\\.)({'|'.join(map(re.escape, _STACKED_EXPERTS))})({'|'.join(_STACKED_SUFFIXES)})")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (MemoryError, RuntimeError) as error:  # torch maps the file, too
        raise shortage(error, f"mapping {file}") or ModelError(f"cannot map {file}: {error}") from error
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        with file.open("rb") as stream:
            is_pointer = stream.read(24) == b"version https://git-lfs."
        if is_pointer:
            raise ModelError(f"{file} is a Git LFS pointer, not the weights", hint="run `git lfs pull`") from error
        raise ModelError(
            f"{file} is damaged or cut short ({file.stat().st_size} bytes): {error}", hint="download the file again"
        ) from error


_STATE = re.compile(r"(.*\.weight)\.quant_state\.bitsandbytes__\w+")


@dataclass(frozen=True, slots=True)
class _RoundedWeight:
    """A weight that bitsandbytes rounded to 4 bits, with its numbers as bitsandbytes unpacks them.

    Source: QLoRA, Dettmers et al., 2023: neighbours share their largest magnitude, which may be rounded, too.
    """

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
        if said["dtype"] not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"its dtype is {said['dtype']!r}")
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()  # the first of two in the high bits
        values = self._part("quant_map").float().index_select(0, codes.int())
        largest = self._part("absmax")
        if "nested_offset" in said:
            steps = self._part("nested_absmax").repeat_interleave(said["nested_blocksize"])[: len(largest)]
            levels = self._part("nested_quant_map").float()
            largest = levels.index_select(0, largest.int()) * steps + said["nested_offset"]
        values *= largest.float().repeat_interleave(size)[: len(values)]
        return values.view(shape).to(getattr(torch, said["dtype"]))

    def _part(self, suffix: str) -> Tensor:
        return self.tensor(f"{self.name}.{suffix}")


def _rounded_weights(where: dict[str, str], tensor: Callable[[str], Tensor]) -> Mapping[str, _RoundedWeight]:
    """The weights that bitsandbytes rounded, by name. Changes: where, without the tensors that belong to them."""
    states = {found[1]: name for name in where if (found := _STATE.fullmatch(name)) is not None}
    for name in [name for name in where if name.rpartition(".weight.")[0] + ".weight" in states]:
        if name not in states:
            del where[name]
    return {name: _RoundedWeight(name, state, tensor) for name, state in states.items()}
