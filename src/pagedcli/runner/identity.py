"""What the bits of packed weights depend on, and with more what those of computed blocks depend on."""

from pathlib import Path

import torch

from pagedcli import __version__
from pagedcli.config import EngineConfig
from pagedcli.content_files import digest_of, file_digest
from pagedcli.models.hub import adapter_files, weight_files
from pagedcli.native.build import instructions, library_key, load_library
from pagedcli.planning.decision import Decision


def model_files(model_path: Path, *, weights: bool = True) -> list[Path]:
    """The files that say what a model is, and those of its weights."""
    about = [model_path / "config.json"] if model_path.is_dir() else []
    return [*about, *(weight_files(model_path) if weights else ())]


def weights_identity(config: EngineConfig, decision: Decision, model_path: Path) -> dict[str, str]:
    """Named parts: everything that the weights in memory depend on. Raises: OSError if a file cannot be read."""
    files = [*model_files(model_path, weights=config.load_format != "dummy"), *adapter_files(config)]
    return weights_form(config, decision) | {"model files": digest_of(" ".join(map(file_digest, files)).encode())}


def weights_form(config: EngineConfig, decision: Decision) -> dict[str, str]:
    """weights_identity without the model's files, which take time to read."""
    is_dummy = config.load_format == "dummy"
    return {
        "pagedcli": __version__,
        "torch": str(torch.__version__),
        "dtype": decision.plan.dtype,
        "quantization": decision.plan.weights or "none",
        "load format": f"dummy, seed {config.seed}" if is_dummy else "files",
        "decoder": decision.plan.decoder,
        "instructions": instructions(load_library()),
        "kernels": library_key(),
        "rank": f"0 of {config.tensor_parallel_size}",
    }
