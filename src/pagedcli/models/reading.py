"""A Hugging Face folder or GGUF file -> ModelSpec: by our own reader of native families, or by transformers' classes.

Free of torch for native families."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedcli import models
from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import check_supported, convert, read_json, stop_ids, stored_head
from pagedcli.models.families.registry import FAMILIES, defaults
from pagedcli.models.gguf.description import as_stored, describe, frequency_factors
from pagedcli.models.gguf.header import is_gguf, read_header
from pagedcli.models.quantization import becomes_plain, read_quantization, refusal
from pagedcli.models.spec import ModelSpec
from pagedcli.models.tensors import TensorNames


def read_spec(path: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The ModelSpec of a Hugging Face folder, from its config.json and generation_config.json, or of a GGUF file.

    Raises: ModelError for a missing folder or file, broken JSON, a wrong type, or an unsupported value.
    """
    if is_gguf(path):
        return _gguf_spec(path)
    spec = _folder_spec(path, trust_remote_code)
    head, tied = stored_head(path), spec.tie_word_embeddings
    if head == "absent" and not tied and not spec.is_fallback:
        return replace(spec, tie_word_embeddings=True, has_head=False)
    return replace(spec, tie_word_embeddings=tied and head != "own")


def _folder_spec(path: Path, trust_remote_code: bool) -> ModelSpec:
    """The ModelSpec of a folder, by its config.json alone."""
    config = read_json(path / "config.json")
    check_supported(config, path / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{path / 'config.json'} has no model_type", hint="use a Hugging Face model folder")
    if model_type in FAMILIES and not FAMILIES[model_type].config.through_transformers(config):
        return native_spec(path, config, model_type)
    quantization = read_quantization(config, path / "config.json")
    if quantization is not None or config.get("quantization_config"):
        method = "bitsandbytes" if quantization is None else quantization.formats[0].method
        raise refusal(path / "config.json", method, f"{model_type} runs through transformers")
    # AutoConfig has the defaults of every other family; only this may load transformers
    return models.transformers_fallback.read_fallback_spec(path, trust_remote_code=trust_remote_code)


def _gguf_spec(path: Path) -> ModelSpec:
    """The ModelSpec of a GGUF file. Raises: ModelError for what is damaged or does not run here."""
    header = read_header(path)
    model_type, fields = describe(header)
    check_supported(fields, path)
    spec = as_stored(native_spec(path, fields, model_type, where=path), header)
    divisors = frequency_factors(header)
    return spec.with_mixers(lambda mixer: replace(mixer, rope=mixer.rope and replace(mixer.rope, divisors=divisors)))


def native_spec(path: Path, config: dict[str, Any], model_type: str, *, where: Path | None = None) -> ModelSpec:
    """The ModelSpec of a native family. `where`: the file that errors name; None: its config.json.

    Raises: ModelError for a wrong type in config.json, or a value that we cannot run.
    """
    family, where = FAMILIES[model_type], where or path / "config.json"
    architectures, text_type = config.get("architectures") or [family.architecture], model_type
    if family.text is not None:
        config = _text_config(config, where)
        text_type = str(config.get("model_type") or family.text)
        if text_type not in FAMILIES:
            raise ModelError(f"{where}: text_config is of model_type {text_type!r:.60}, which is not supported there")
        text_type = FAMILIES[text_type].text or text_type
    kind = FAMILIES[text_type].config
    for name, allowed in kind.unsupported.items():
        if config.get(name) and config[name] not in allowed:
            raise ModelError(f"{where}: {name} is {config[name]!r}, which is not supported")
    said = {kind.renamed.get(name, name): value for name, value in config.items() if value or name != "rope_parameters"}
    fields = convert(defaults().get(text_type, {}) | said, kind, where)
    if architectures[0] not in (family.architecture, family.architecture.replace("ForCausalLM", "Model")):
        raise ModelError(
            f"{where}: architecture {architectures[0]!r} is not a causal language model",
            hint=f"model_type {model_type!r} runs as {family.architecture}",
        )
    if fields.activation not in kind.activations:
        allowed_name = repr(kind.activations[0])
        raise ModelError(
            f"{where}: hidden_act {fields.activation!r} is not supported for {model_type} (only {allowed_name})"
        )
    try:
        fields.check()
        layers = fields.layers()
    except ModelError as error:
        raise ModelError(f"{where}: {error.message}", hint=error.hint) from error
    ropes = [layer.attention.rope for layer in layers if layer.attention is not None]
    stretched = [rope.stretched_length for rope in ropes if rope is not None]
    names = nested_names(fields.tensor_names) if family.text is not None else fields.tensor_names
    return ModelSpec(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.mlp_width,
        layers=layers,
        norm=fields.norm,
        scales=fields.scales,
        layer_inputs=fields.layer_inputs,
        names=names,
        tie_word_embeddings=fields.tie_word_embeddings,
        head_bias=fields.lm_head_bias,
        max_position_embeddings=max([fields.max_position_embeddings, *stretched]),
        eos_token_ids=stop_ids(path, fields.eos_token_id, vocab_size=fields.vocab_size),
        bos_token_id=fields.bos_token_id,
        dtype=(fields.dtype or fields.torch_dtype or "float32").removeprefix("torch."),
        widened=becomes_plain(config),
        quantization=read_quantization(config, where, tied=fields.tie_word_embeddings, body=names.body),
    )


def _text_config(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """The fields of the language model within a larger one; what only the outer part says holds for it, too. Some lie
    next to those of the other parts, as Qwen2.5-VL's are published."""
    text = config.get("text_config", config if "hidden_size" in config else None)
    if not isinstance(text, dict):
        raise ModelError(f"{where}: text_config is {text!r}, not an object", hint="download the file again")
    outer = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "dtype", "torch_dtype", "quantization_config")
    return {name: config[name] for name in outer if name in config} | text


def nested_names(names: TensorNames) -> TensorNames:
    """Names of a language model within one that sees or hears, whose other tensors are skipped."""
    towers = ("model.visual.", "model.vision_tower.", "model.audio_tower.", "model.multi_modal_projector.")
    embedders = ("model.embed_vision.", "model.embed_audio.", "model.vision_embedder.", "model.vision_adapter.")
    return replace(
        names, body="model.language_model", skipped=(*towers, *embedders, "model.vision_projection.", *names.skipped)
    )
