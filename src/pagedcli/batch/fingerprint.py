"""The fingerprint of a run: everything that determines its rows. A resumed run must have the same one.

It derives from the configuration: every key is in it that does not say `affects_rows=False`, as block size, pool size,
batch limits, device and attention backend do. A journal adds the kernels, which decide the last bits.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from pagedcli import __version__, planning
from pagedcli.batch.embeddings import FILES as EMBEDDER_FILES
from pagedcli.batch.lines import InputScan
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import Config, EngineConfig
from pagedcli.config_keys import keys_of
from pagedcli.errors import BackendError, UsageError
from pagedcli.models.hub import adapter_files, weight_files
from pagedcli.native.build import instructions, load_library
from pagedcli.process import nothing_to_collect

_ALWAYS = (
    *("pagedcli", "model", "model files", "dtype", "quantization", "kv_cache_dtype", "load_format", "max_model_len"),
    *("tokenizer", "chat_template", "system_prompt", "sampling", "seed", "shard", "field", "id_field", "output_field"),
    *("keep", "output", "output_metrics", "strict"),
)
_PIECE_BYTES, _NUM_PIECES = 2**16, 64  # pieces read of each weights file; one of up to 4 MiB is read whole


_KERNELS = "kernels"
HINT_OTHER_RUN = "use --resume with the same input and settings, or --overwrite to start over"


def run_fingerprint(config: Config, folder: Path, tokenizer: Tokenizer, *, shard: str) -> dict[str, str]:
    """Named digests and values, except those of the input."""
    entries = {
        "pagedcli": __version__,
        "model files": _model_digest(folder, adapter_files(config.engine)),
        "tokenizer": tokenizer.digest(),
        "shard": shard,
        **_settings(config),
        "chat_template": _digest(tokenizer.chat_template or ""),
        "system_prompt": _digest(config.run.system_prompt or ""),
        "output": "token_ids" if config.run.output_token_ids else "text",
    }
    return {name: entries[name] for name in sorted(entries, key=_place)}


def _settings(config: Config) -> dict[str, str]:
    """Every key of the configuration that affects rows. One that _ALWAYS lacks is there only if it is not at its
    default, so that a journal written before the key existed can be resumed."""
    settings = {}
    for section in ("engine", "run"):
        values: msgspec.Struct = getattr(config, section)
        defaults = type(values)()
        for name, (_, declared) in keys_of(type(values)).items():
            value = getattr(values, name)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if isinstance(value, list) or name == "template":
                text = _digest(msgspec.json.encode(value).decode())
            if name in _ALWAYS:
                settings[name] = text
            elif declared.affects_rows and value != getattr(defaults, name):
                settings[f"{section}.{name}"] = text
    for name, value in msgspec.structs.asdict(config.sampling).items():
        settings[f"sampling.{name}"] = msgspec.json.encode(value).decode()
    settings.pop("run.output_token_ids", None)  # it is there under the name "output"
    return settings


def _place(name: str) -> int:
    """The place of a name in a fingerprint: as in the first journals, and new names at the end."""
    section = name.partition(".")[0]
    return _ALWAYS.index(section) if section in _ALWAYS else len(_ALWAYS)


def input_fingerprint(scan: InputScan | None) -> dict[str, str]:
    """The part about the input. None: it can be read only once, and the journal compares its lines one by one."""
    if scan is None:
        return {"input": "stdin"}
    return {"input": scan.digest, "input rows": str(scan.num_rows)}


def kernel_fingerprint(engine: EngineConfig) -> dict[str, str]:
    """The part about who computes: other instructions round otherwise, so a resumed run must have the same. Not part of
    run_key. Loads the native kernels, or builds them.

    Raises: ConfigError if there is no such device.
    """
    with nothing_to_collect():  # torch is imported
        device = planning.decide.resolve_device(engine.device, planning.machine.this_machine())
    kernels = "torch" if device.type == "cpu" else device.type
    if device.type == "cpu" and engine.attention_backend in ("auto", "cpu"):
        with contextlib.suppress(BackendError):
            kernels = instructions(load_library())
    return {_KERNELS: kernels}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One text per changed key: `temperature: 0.0 -> 0.5`, or `tokenizer: changed` for digests."""
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name}: {_shown(before.get(name))} -> {_shown(now.get(name))}"
        if not (_is_digest(before.get(name)) and _is_digest(now.get(name)))
        else f"{name}: changed"
        for name in names
        if before.get(name) != now.get(name)
    ]


def check_same_run(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises: UsageError that names every key in which the run that wrote `path` differs from this one. Kernels count
    where both name them: a finished run needs none."""
    if found := settings_that_differ(before, now):
        raise UsageError(f"{path} is of a run with other settings; " + "; ".join(found), hint=HINT_OTHER_RUN)


def settings_that_differ(
    before: Mapping[str, str], now: Mapping[str, str], *, apart_from: frozenset[str] = frozenset()
) -> list[str]:
    """See differences."""
    if not (_KERNELS in before and _KERNELS in now):
        apart_from |= {_KERNELS}
    return differences(*({name: each[name] for name in each if name not in apart_from} for each in (before, now)))


def run_key(fingerprint: dict[str, str]) -> str:
    return _digest(msgspec.json.encode(sorted(fingerprint.items())).decode())


def _model_digest(folder: Path, adapter: list[Path]) -> str:
    """Digest of the configuration, and of the name, the size and samples from all over each file of weights or of the
    adapter: reading a large file takes too long, and other weights of the same shapes (a later checkpoint) differ
    everywhere."""
    digest = xxhash.xxh3_64()
    for name in ("config.json", "generation_config.json", *EMBEDDER_FILES):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in [*weight_files(folder), *adapter]:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes} ".encode())
        with path.open("rb") as file:
            for place in range(0, num_bytes, max(_PIECE_BYTES, num_bytes // _NUM_PIECES)):
                file.seek(place)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _is_digest(value: str | None) -> bool:
    return value is not None and re.fullmatch(r"[0-9a-f]{16}|[0-9a-f]{32}", value) is not None


def _shown(value: str | None) -> str:
    if value is None:
        return "absent"
    return "other rows" if _is_digest(value) else value
