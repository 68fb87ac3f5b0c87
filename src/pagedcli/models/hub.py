"""Finds a model: a folder in the package or on the local disk, a GGUF file, or a download from the Hub."""

import functools
from importlib.resources import files
from pathlib import Path, PurePath

import huggingface_hub

from pagedcli.buckets import copied_once, is_url
from pagedcli.config import BUILTIN_MODEL, EngineConfig
from pagedcli.errors import MissingModelError, ModelError
from pagedcli.models.gguf.header import check_regular, find_gguf, is_gguf, read_header

# *.py for models with custom code, which runs only with --trust-remote-code
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_SUFFIXES = (*(pattern.removeprefix("*") for pattern in _WANTED), ".gguf")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# second copies of the weights in other formats; 1_Pooling/ is one of sentence-transformers' folders
_UNWANTED = ["consolidated*", "[!1]*/*"]


def model_folder(config: EngineConfig, *, weights: bool = True) -> Path:
    """The folder of a configuration's model. A hub model is downloaded first, its weights only if they are wanted."""
    return resolve_model(config.model, revision=config.revision, weights=weights)


def resolve_model(model: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a model: the built-in one, `model` itself if it is a folder, else the Hub id, downloaded once
    (with weights=False without its weights). Of a GGUF file, or a folder with only that, the file.

    Raises: ModelError, different for a missing folder, a missing Hub model, a gated one, and an unreachable Hub.
    """
    if model == BUILTIN_MODEL:
        return Path(str(files("pagedcli.assets"))) / "demo"
    path = Path(model).expanduser()
    if is_url(model):
        if model.startswith("hf://"):
            return _download(model.removeprefix("hf://"), revision, weights)
        path = _copied(model, weights)
    if path.name == "config.json" and path.is_file():  # means its folder
        path = path.parent
    if path.is_dir():
        check_files(path)
        found = None if (path / "config.json").is_file() else find_gguf(path)
        return path if found is None else found
    if is_gguf(path):
        return path
    if path.suffix == ".gguf":
        what, hint = ("does not exist", "check the path given with -m/--model")
        if path.exists():
            what, hint = "does not begin as a GGUF file does", "download the file again"
        raise MissingModelError(f"{path} {what}", hint=hint)
    if path.is_file():
        raise MissingModelError(
            f"{path} is a file; a model is a folder with config.json and *.safetensors, or a GGUF file",
            hint=f"use --model {path.parent}" if path.suffix in (".safetensors", ".json") else None,
        )
    if _looks_like_path(model):
        raise MissingModelError(f"no model folder at {path}", hint="check the path given with -m/--model")
    return _download(model, revision, weights)


def adapter_folder(config: EngineConfig) -> Path | None:
    """The folder of a configuration's adapter; None without one. Raises: ModelError."""
    return None if config.adapter is None else _resolved_adapter(config.adapter)


@functools.cache
def _resolved_adapter(adapter: str) -> Path:
    """The folder of an adapter, which is downloaded if it is a Hub id: once, as several ask for it."""
    folder = _copied(adapter, True) if is_url(adapter) else Path(adapter).expanduser()
    if not folder.is_dir():
        if _looks_like_path(adapter):
            raise MissingModelError(f"no adapter folder at {folder}", hint="check the path given with --adapter")
        folder = _download(adapter, None, weights=True)
    check_files(folder)
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} has no {name}", hint="--adapter names a folder that peft's save_pretrained has written"
            )
    return folder


def adapter_files(config: EngineConfig) -> list[Path]:
    """The files of a configuration's adapter; none without one. Raises: ModelError."""
    folder = adapter_folder(config)
    return [] if folder is None else [folder / name for name in ADAPTER_FILES]


def weight_files(model: Path) -> list[Path]:
    """The files with the weights of what resolve_model found."""
    return read_header(model).files if is_gguf(model) else sorted(model.glob("*.safetensors"))


def check_files(folder: Path) -> None:
    """Refuse a folder in which something other than a file has a model file's name: opening a FIFO would block forever.

    Raises: ModelError that names it.
    """
    try:
        # transformers reads the templates in the folder of this name, too
        paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}", hint="download the model again") from error
    for path in paths:
        if path.name.endswith(_SUFFIXES):
            check_regular(path)


@functools.cache
def _copied(url: str, weights: bool) -> Path:
    """A folder of a bucket, copied into the user's cache once."""
    unwanted = ("*/*",) if weights else ("*/*", "*.safetensors", "*.gguf")
    folder = copied_once(url, lambda name: name.endswith(_SUFFIXES) and not any(map(PurePath(name).match, unwanted)))
    if not any(folder.iterdir()):
        raise MissingModelError(f"no model folder at {url}", hint="name the folder that has its config.json")
    return folder


def _looks_like_path(model: str) -> bool:
    """Hub ids are `name` or `owner/name`; anything else must be a path."""
    return model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1 or model.endswith("/")


def _download(model: str, revision: str | None, weights: bool) -> Path:
    unwanted = _UNWANTED if weights else [*_UNWANTED, "*.safetensors"]
    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=_WANTED, ignore_patterns=unwanted
        )
    except huggingface_hub.errors.HFValidationError as error:
        raise ModelError(f"no folder {model!r}, and it is not a valid Hub id ({error})") from error
    except huggingface_hub.errors.GatedRepoError as error:
        raise ModelError(
            f"the Hub model {model!r} is gated", hint="accept its licence on the Hub, then set HF_TOKEN"
        ) from error
    except huggingface_hub.errors.RevisionNotFoundError as error:
        raise ModelError(f"the Hub model {model!r} has no revision {revision!r}") from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"no folder {model!r} here, and no such model on the Hub",
            hint="check the spelling; a private model needs HF_TOKEN",
        ) from error
    except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            f"no folder {model!r} here, and the Hub cannot be reached to download it (nothing cached either)",
            hint="check the path given with -m/--model, or the network",
        ) from error
    except huggingface_hub.errors.HfHubHTTPError as error:
        raise ModelError(f"the download of {model!r} failed: {error}", hint="try again later") from error
    return Path(folder)
