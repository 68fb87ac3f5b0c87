"""Packed weights kept on disk: a model that takes long to pack on a CPU maps its weights into memory at the next start.

Used by runner.loading and `doctor`. A file is found by everything that its bytes depend on, is never changed, and every
byte of it is compared with what was written before it is used.
"""

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from pagedcli.config import EngineConfig
from pagedcli.content_files import ContentFile, ContentFolder, DamagedFile, digest_of
from pagedcli.errors import UsageError
from pagedcli.files import cache_home, is_ours_alone
from pagedcli.layers.packed_layers import PackedLayers, described, restored
from pagedcli.models.hub import adapter_files
from pagedcli.models.loading import IN_ONE_CALL
from pagedcli.planning.decision import Decision
from pagedcli.records import Bytes, Seconds, size
from pagedcli.runner.identity import model_files, weights_form, weights_identity

log = logging.getLogger("pagedcli")
DEFAULT_BYTES = 20_000_000_000
LEAST_S = 2.0  # weights that are loaded faster are not kept
_MULTIPLE = 64  # bytes: a load of the widest register stays within a line
_SOURCES = ("layers", "models")  # folders of Python that decides, with the kernels, the form of packed weights


def weight_folder() -> Path:
    """Where packed weights are kept for this user."""
    return cache_home() / "weights"


def most_bytes(config: EngineConfig) -> int:
    """The bound of the folder."""
    return DEFAULT_BYTES if config.weight_cache_size is None else config.weight_cache_size


def open_folder(config: EngineConfig) -> ContentFolder:
    """The folder of packed weights, which is made if it does not exist. Raises: UsageError, also if others can write to
    it: their weights would be computed with."""
    folder = ContentFolder(weight_folder(), most_bytes=most_bytes(config), spares_disk=True)
    if not is_ours_alone(folder.path):
        raise UsageError(f"{folder.path} can be written by others", hint=f"chmod 700 {folder.path}")
    return folder


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of its content."""

    model: str  # name of the folder or file
    layers: bytes  # see layers.packed_layers

    @classmethod
    def of(cls, file: ContentFile) -> "_Note":
        """Raises: msgspec.DecodeError."""
        return msgspec.msgpack.decode(file.head.note, type=cls)


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """A model's packed weights on disk."""

    model: str
    weights: str
    num_bytes: Annotated[Bytes, "size"]
    seconds: Annotated[Seconds, "loading took"]
    days: Annotated[float, "days without use", "{:.1f}".format]


def kept_weights() -> list[KeptWeights]:
    """What is kept for this user. Raises: UsageError, OSError."""
    if not weight_folder().is_dir():
        return []
    found = []
    for file in open_folder(EngineConfig()).files()[0]:
        with suppress(msgspec.DecodeError):
            identity, days = file.head.identity, (time.time() - file.used_s) / 86_400
            stored = f"{identity['dtype']}, quantization {identity['quantization']}"
            found.append(KeptWeights(_Note.of(file).model, stored, file.num_bytes, file.head.seconds, days))
    return found


class WeightCache:
    """The packed layers of one model."""

    def __init__(self, config: EngineConfig, decision: Decision, model_path: Path) -> None:
        self._config, self._decision, self._path = config, decision, model_path
        self.notes: tuple[str, ...] = ()
        self._read = self._states()
        self.layers, self._began_s = PackedLayers(), time.monotonic()
        if self._is_used and weight_folder().is_dir():
            self._find()

    @property
    def _is_used(self) -> bool:
        plan = self._decision.plan
        return self._config.weight_cache and self._config.load_format != "dummy" and plan.decoder == IN_ONE_CALL

    def _states(self) -> list[tuple[int, int, int]]:
        """What tells whether a file of the model has changed. Raises: OSError."""
        files = [*model_files(self._path), *adapter_files(self._config)] if self._is_used else []
        states = [path.stat() for path in files]
        return [(each.st_size, each.st_mtime_ns, each.st_ino) for each in states]

    @cached_property
    def _form(self) -> dict[str, str]:
        """What says of kept weights whether they may be this model's, before its files are read."""
        root = Path(__file__).parents[1]
        sources = b"".join(path.read_bytes() for name in _SOURCES for path in sorted((root / name).rglob("*.py")))
        return weights_form(self._config, self._decision) | {"packing": digest_of(sources)}

    @cached_property
    def _identity(self) -> dict[str, str]:
        return weights_identity(self._config, self._decision, self._path) | self._form

    def _find(self) -> None:
        """Changes: layers, notes."""
        try:
            folder = open_folder(self._config)
            for file in folder.files()[0]:
                if self._form.items() <= file.head.identity.items() and file.head.identity == self._identity:
                    self._map(folder, file)
                    return
        except (OSError, UsageError, DamagedFile, msgspec.DecodeError) as error:
            self._say(f"packed weights that were kept are not used: {error}")

    def _map(self, folder: ContentFolder, file: ContentFile) -> None:
        """Changes: layers, notes. Raises: DamagedFile, msgspec.DecodeError; then the file is gone."""
        try:
            self.layers.kept = restored(_Note.of(file).layers, folder.mapped(file))
        except (DamagedFile, msgspec.DecodeError):
            folder.remove(file.path)
            raise
        self._say(f"packed weights are those kept in {folder.path} ({size(file.num_bytes)})")

    def keep(self) -> None:
        """Write what this process has packed, if that took long, in a thread of its own. Changes: notes."""
        seconds = time.monotonic() - self._began_s
        if not self._is_used or self.layers.kept or seconds < LEAST_S:
            return
        num_bytes = sum(layer.linear.nbytes for layer in self.layers.made.values())
        if num_bytes > (bound := most_bytes(self._config)):
            self._say(f"packed weights of {size(num_bytes)} are not kept: weight_cache_size is {size(bound)}")
            return
        self._say(f"loading took {seconds:.1f} s: the packed weights are kept in {weight_folder()} for the next start")
        threading.Thread(target=self._write, args=(seconds,), name="weight-cache").start()

    def _write(self, seconds: float) -> None:
        layers, buffers = described(self.layers.made)
        note = msgspec.msgpack.encode(_Note(self._path.name, layers))
        try:
            folder = open_folder(self._config)
            identity = self._identity
            if self._states() != self._read:  # the digests may be of other bytes than were packed
                kept: ContentFile | str = "the model's files have changed"
            else:
                kept = folder.write(identity, note, buffers, seconds=seconds, multiple=_MULTIPLE)
            why = kept if isinstance(kept, str) else None
        except (OSError, UsageError) as error:
            why = str(error)
        if why is not None:
            log.warning("packed weights were not kept: %s", why)

    def _say(self, note: str) -> None:
        self.notes += (note,)
