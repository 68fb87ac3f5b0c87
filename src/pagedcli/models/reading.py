"""A Hugging Face folder -> ModelSpec: by our own reader of native families, or by transformers' config classes."""

from pathlib import Path

from pagedcli.errors import ModelError
from pagedcli.models.config_json import check_supported, read_json
from pagedcli.models.families import FAMILIES
from pagedcli.models.native_spec import native_spec
from pagedcli.models.quantization import read_quantization, refusal
from pagedcli.models.spec import ModelSpec


def read_spec(path: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The ModelSpec of a Hugging Face folder, from its config.json and generation_config.json.

    Raises: ModelError for a missing folder or file, broken JSON, a wrong type, or an unsupported value.
    """
    config = read_json(path / "config.json")
    check_supported(config, path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{path / 'config.json'} has no model_type", hint="use a Hugging Face model folder")
    if model_type in FAMILIES:
        return native_spec(path, config, model_type)
    if (quantization := read_quantization(config, path / "config.json")) is not None:
        raise refusal(path / "config.json", quantization.method, f"{model_type} runs through transformers")
    # AutoConfig has the defaults of every other family; only this import may load transformers
    from pagedcli.models.fallback_spec import read_fallback_spec

    return read_fallback_spec(path, trust_remote_code=trust_remote_code)
