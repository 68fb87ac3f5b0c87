"""What decides the rows of a run. A journal made under another fingerprint must not be continued.

Left out on purpose: block size, pool size, batch limits, device and attention backend, which do not change tokens.
"""

from pathlib import Path

import msgspec
import xxhash

from pagedcli import __version__
from pagedcli.batch.lines import InputScan
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import Config

_PIECE_BYTES, _NUM_PIECES = 2**16, 64  # read of each weights file; one of up to 4 MiB is read whole


def run_fingerprint(
    config: Config, folder: Path, tokenizer: Tokenizer, scan: InputScan | None, *, shard: str, strict: bool
) -> dict[str, str]:
    """Named digests and values. `scan` is None for stdin, whose lines the journal compares one by one."""
    run, engine = config.run, config.engine
    return {
        "pagedcli": __version__,
        "model": f"{engine.model} {_model_digest(folder)}",
        "dtype": engine.dtype,
        "quantization": str(engine.quantization),
        "kv_cache_dtype": engine.kv_cache_dtype,
        "load_format": engine.load_format,
        "max_model_len": str(engine.max_model_len),
        "tokenizer": tokenizer.digest(),
        "chat_template": _digest(tokenizer.chat_template or ""),
        "system_prompt": _digest(run.system_prompt or ""),
        "sampling": msgspec.json.encode(config.sampling).decode(),
        "seed": str(engine.seed),
        "input": scan.digest if scan is not None else "stdin",
        "shard": shard,
        "output": "token_ids" if run.output_token_ids else "text",
        "strict": str(strict).lower(),
    }


def run_key(fingerprint: dict[str, str]) -> str:
    """One short word for the whole fingerprint."""
    return _digest(msgspec.json.encode(sorted(fingerprint.items())).decode())


def _model_digest(folder: Path) -> str:
    """Of the configuration, and of each weights file its name, its size and pieces from all over it: reading all of a
    large one takes too long, and other weights of the same shapes (a later checkpoint) differ everywhere."""
    digest = xxhash.xxh3_64()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes} ".encode())
        with path.open("rb") as file:
            for place in range(0, num_bytes, max(_PIECE_BYTES, num_bytes // _NUM_PIECES)):
                file.seek(place)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
