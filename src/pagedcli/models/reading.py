"""A Hugging Face folder or GGUF file -> ModelSpec: by our own reader of native families, or by transformers' classes.

Free of torch for native families."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pagedcli.errors import ModelError
from pagedcli.models.checkpoint_files import has_own_head
from pagedcli.models.config_json import check_supported, convert, read_json, stop_ids
from pagedcli.models.families import FAMILIES
from pagedcli.models.family import ATTENDS, Family, FamilyConfig, OptionalInt
from pagedcli.models.gguf.description import as_stored, describe, frequency_factors
from pagedcli.models.gguf.header import is_gguf, read_header
from pagedcli.models.mixers.attention import Attention
from pagedcli.models.mixers.recurrent import RecurrentMixer
from pagedcli.models.mlps import Experts, Mlp
from pagedcli.models.quantization import read_quantization, refusal
from pagedcli.models.rope import RopeSpec, read_rope_spec
from pagedcli.models.spec import LayerSpec, Mixer, ModelSpec, Scales
from pagedcli.models.tensors import NormStyle, TensorNames


def read_spec(path: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The ModelSpec of a Hugging Face folder, from its config.json and generation_config.json, or of a GGUF file.

    Raises: ModelError for a missing folder or file, broken JSON, a wrong type, or an unsupported value.
    """
    if is_gguf(path):
        return _gguf_spec(path)
    spec = _folder_spec(path, trust_remote_code)
    return replace(spec, tie_word_embeddings=spec.tie_word_embeddings and not has_own_head(path))


def _folder_spec(path: Path, trust_remote_code: bool) -> ModelSpec:
    """The ModelSpec of a folder, by its config.json alone."""
    config = read_json(path / "config.json")
    check_supported(config, path / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{path / 'config.json'} has no model_type", hint="use a Hugging Face model folder")
    if model_type in FAMILIES and not FAMILIES[model_type].through_transformers(config):
        return native_spec(path, config, model_type)
    if (quantization := read_quantization(config, path / "config.json")) is not None:
        raise refusal(path / "config.json", quantization.method, f"{model_type} runs through transformers")
    # AutoConfig has the defaults of every other family; only this import may load transformers
    from pagedcli.models.fallback_spec import read_fallback_spec

    return read_fallback_spec(path, trust_remote_code=trust_remote_code)


def _gguf_spec(path: Path) -> ModelSpec:
    """The ModelSpec of a GGUF file. Raises: ModelError for what is damaged or does not run here."""
    header = read_header(path)
    found = describe(header)
    check_supported(found.config, path)
    spec = as_stored(native_spec(path, found.config, found.model_type, where=path), header)
    divisors = frequency_factors(header)

    def divided(rope: RopeSpec | None) -> RopeSpec | None:
        return None if rope is None else replace(rope, divisors=divisors)

    return spec.with_mixers(lambda mixer: replace(mixer, rope=divided(mixer.rope)))


_MOST_EXPERTS = 2**12


def native_spec(path: Path, config: dict[str, Any], model_type: str, *, where: Path | None = None) -> ModelSpec:
    """The ModelSpec of a native family. `where`: the file that errors name; None: its config.json.

    Raises: ModelError for a wrong type in config.json, or a value that we cannot run.
    """
    family = FAMILIES[model_type]
    where = where or path / "config.json"
    architectures = config.get("architectures") or [family.architecture]
    if is_nested := family.nested:
        config = _text_config(config, where)
        text_type = str(config.get("model_type") or model_type)
        if text_type not in FAMILIES:
            raise ModelError(f"{where}: text_config is of model_type {text_type!r:.60}, which is not supported there")
        family = replace(FAMILIES[text_type], architecture=family.architecture)
    config = {**family.defaults, **{family.renamed.get(name, name): value for name, value in config.items()}}
    _name_layers(config, family, where)
    _refuse_unknown(config, family, where)
    fields = convert(config, FamilyConfig, where)
    _check_layer_types(fields, family, where)
    if architectures[0] != family.architecture:
        raise ModelError(
            f"{where}: architecture {architectures[0]!r} is not a causal language model",
            hint=f"model_type {model_type!r} runs as {family.architecture}",
        )
    activation = fields.hidden_activation or fields.hidden_act
    if activation not in family.activations:
        allowed = repr(family.activations[0])
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported for {model_type} (only {allowed})")
    spec = _model(path, config, fields, model_type, family, where)
    return replace(spec, names=nested_names(spec.names)) if is_nested else spec


def _model(
    path: Path, config: dict[str, Any], fields: FamilyConfig, model_type: str, family: Family, where: Path
) -> ModelSpec:
    activation = fields.hidden_activation or fields.hidden_act
    num_heads = fields.num_attention_heads
    num_kv_heads = _default(fields.num_key_value_heads, family.num_kv_heads) or num_heads
    head_dim = _default(fields.head_dim, family.head_dim) or fields.hidden_size // num_heads
    max_positions = fields.max_position_embeddings or family.max_position_embeddings
    _check_sizes(fields, num_kv_heads, head_dim, where)
    layer_ropes = _layer_ropes(config, fields, family, max_positions, where)
    rope = next((rope for rope in reversed(layer_ropes) if rope is not None), None)
    traits = {
        "num_layers": fields.num_hidden_layers,
        "qk_norm": False,
        "hidden_act": activation,
        "intermediate_size": fields.intermediate_size,
        "qkv_bias": fields.attention_bias if family.qkv_bias is None else family.qkv_bias,
        "attention_out_bias": fields.attention_bias if family.out_bias is None else family.out_bias,
        "mlp_bias": fields.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        "layer_ropes": layer_ropes,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "windows": _windows(fields, family, where),
        **family.traits(fields),
    }
    _check_layers(fields, traits, where)
    default_bos, default_eos = family.special_ids
    eos = default_eos if isinstance(fields.eos_token_id, msgspec.UnsetType) else fields.eos_token_id
    return ModelSpec(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=traits["intermediate_size"],
        layers=_layers(traits),
        norm=NormStyle(
            eps=fields.rms_norm_eps,
            centred=traits.get("centred_norms", "no"),
            in_float32=traits.get("float_norms", False),
            offset=traits.get("norm_offset", False),
        ),
        scales=Scales(
            embedding=traits.get("embedding_multiplier", 1.0),
            residual=traits.get("residual_multiplier", 1.0),
            logits_divisor=traits.get("logits_divisor", 1.0),
            logits_soft_cap=traits.get("logits_soft_cap"),
        ),
        layer_inputs=traits.get("layer_inputs"),
        names=traits.get("names") or TensorNames(),
        tie_word_embeddings=fields.tie_word_embeddings,
        max_position_embeddings=max(max_positions, rope.stretched_length if rope is not None else 0),
        eos_token_ids=stop_ids(path, eos),
        bos_token_id=_default(fields.bos_token_id, default_bos),
        dtype=(fields.dtype or fields.torch_dtype or "float32").removeprefix("torch."),
        quantization=read_quantization(config, where),
    )


def _layers(traits: dict[str, Any]) -> tuple[LayerSpec, ...]:
    count, get, heads = traits["num_layers"], traits.get, (traits["num_kv_heads"], traits["head_dim"])
    attention = Attention(
        num_heads=traits["num_heads"],
        num_kv_heads=heads[0],
        head_dim=heads[1],
        scale=get("query_scale"),
        soft_cap=get("soft_cap"),
        sinks=get("sinks", False),
        output_gate=get("output_gate", False),
        qkv_bias=traits["qkv_bias"],
        out_bias=traits["attention_out_bias"],
        qk_norm="all" if get("qk_norm_all") else "heads" if traits["qk_norm"] else "none",
        norms_last=get("norms_last", False),
        value_norm=get("value_norm", False),
    )
    dense = Mlp(
        width=traits["intermediate_size"],
        activation=traits["hidden_act"],
        gated=get("gated_mlp", True),
        bias=traits["mlp_bias"],
    )
    kinds, branches = get("layer_kinds") or ["attention"] * count, get("branches") or [(i, i) for i in range(count)]
    windows, sources = traits["windows"] or (None,) * count, get("kv_sources") or (None,) * count
    widths, own_heads = get("layer_widths") or [dense.width] * count, get("layer_heads") or [heads] * count
    layers = []
    for i in range(count):
        mixer: Mixer = replace(
            attention,
            rope=traits["layer_ropes"][i],
            window=windows[i],
            source=sources[i],
            num_kv_heads=own_heads[i][0],
            head_dim=own_heads[i][1],
            keys_as_values=i in get("keys_as_values", ()),
        )
        if kinds[i] == "recurrent":
            mixer = traits["recurrent"]
        mlp: Mlp | Experts | None = replace(dense, width=widths[i])
        if isinstance(experts := get("experts"), Experts) and i not in get("dense_layers", ()):
            mlp = experts
            if mlp.beside is not None:
                mlp = replace(mlp, beside=replace(mlp.beside, width=widths[i]))
            if mlp.shared is not None and traits["mlp_bias"]:
                mlp = replace(mlp, shared=replace(mlp.shared, bias=True))
        number, mlp_number = branches[i]
        layers.append(
            LayerSpec(
                mixer=mixer,
                mlp=None if mlp_number is None else mlp,
                norms=get("layer_norms", "before"),
                number=number,
                mlp_number=None if mlp_number == number else mlp_number,
                has_scalar=get("layer_scalars", False),
            )
        )
    return tuple(layers)


def _check_recurrent(shape: RecurrentMixer | None, where: Path) -> None:
    """Raises: ModelError for sizes that no layer with a state can have."""
    if shape is None:
        return
    sizes, (heads, groups) = [size for tensor in shape.state for size in tensor.shape], shape.grouping
    if not 2 <= shape.kernel <= 8 or min(sizes) < 1 or groups < 1 or heads % groups:
        raise ModelError(
            f"{where}: a convolution over {shape.kernel} inputs, {heads} heads and {groups} groups of them are not "
            f"supported (2 to 8 inputs, whole groups)"
        )


def _check_layers(fields: FamilyConfig, traits: dict[str, Any], where: Path) -> None:
    """Raises: ModelError for layers whose state, heads, source of K and V, or inputs cannot be."""
    _check_recurrent(traits.get("recurrent"), where)
    num_heads = fields.num_attention_heads
    for num_kv_heads, head_dim in traits.get("layer_heads", ()):
        if min(num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads or head_dim % 2:
            raise ModelError(
                f"{where}: a layer has {num_kv_heads} key/value heads of size {head_dim}, which is not supported for "
                f"{num_heads} query heads"
            )
    shared, sources = fields.num_kv_shared_layers, traits.get("kv_sources", ())
    if shared and (not sources or not 0 < shared < len(sources) or None in sources[-shared:]):
        raise ModelError(
            f"{where}: num_kv_shared_layers is {shared}, but not all of the last {shared} layers have one of their kind"
            " before them to read K and V of"
        )
    if fields.enable_moe_block and not fields.num_experts:
        raise ModelError(f"{where}: enable_moe_block is true, but num_experts is {fields.num_experts}")
    inputs = traits.get("layer_inputs")
    if inputs is not None and not fields.vocab_size <= inputs.vocab_size <= 2**24:
        raise ModelError(
            f"{where}: vocab_size_per_layer_input is {inputs.vocab_size}, but vocab_size is {fields.vocab_size}"
        )


def _text_config(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """The fields of the language model within a larger one; what only the outer part says holds for it, too."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"{where}: text_config is {text!r}, not an object", hint="download the file again")
    outer = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "dtype", "torch_dtype", "quantization_config")
    return {name: config[name] for name in outer if name in config} | text


def nested_names(names: TensorNames) -> TensorNames:
    """Names of a language model within one that sees or hears, whose other tensors are skipped."""
    towers = ("model.visual.", "model.vision_tower.", "model.audio_tower.", "model.multi_modal_projector.")
    embedders = ("model.embed_vision.", "model.embed_audio.", "model.vision_embedder.")
    return replace(names, body="model.language_model", skipped=(*towers, *embedders, *names.skipped))


def _check_layer_types(fields: FamilyConfig, family: Family, where: Path) -> None:
    """Raises: ModelError for layers that the family does not have, and if none attends."""
    if not family.layer_types or fields.layer_types is None:
        return
    if unknown := sorted(set(fields.layer_types) - family.layer_types):
        raise ModelError(f"{where}: layer_types lists {unknown[0]!r}, which is not supported")
    if not ATTENDS & set(fields.layer_types):
        raise ModelError(f"{where}: no layer of layer_types attends, which is not supported")


def _name_layers(config: dict[str, Any], family: Family, where: Path) -> None:
    """Changes: config, in which the layers of a model with one branch each get their types and their number."""
    if not family.layer_letters:
        return
    letters, kinds = config.pop("hybrid_override_pattern", None), config.get("layer_types")
    if kinds is None and isinstance(letters, str):
        kinds = config["layer_types"] = [family.layer_letters.get(letter, letter) for letter in letters]
    if not isinstance(kinds, list):
        raise ModelError(f"{where} does not list its layers", hint="download the file again")
    config["num_hidden_layers"] = len(kinds)
    if any(before == after == "mlp" for before, after in pairwise(["mlp", *kinds])):
        raise ModelError(f"{where}: an MLP comes first or follows another one, which is not supported")


def _refuse_unknown(config: dict[str, Any], family: Family, where: Path) -> None:
    """What members of these families may have and our decoder has not."""
    for name, allowed in (("clip_qkv", ()), ("use_bidirectional_attention", family.bidirectional)):
        if config.get(name) and config[name] not in allowed:
            raise ModelError(f"{where}: {name} is {config[name]!r}, which is not supported")
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.get(name, only) != only:
            raise ModelError(f"{where}: {name} is {config[name]!r}, which is not supported (only {only})")


def _layer_ropes(
    config: dict[str, Any], fields: FamilyConfig, family: Family, max_positions: int, where: Path
) -> tuple[RopeSpec | None, ...]:
    """The rotary embedding of each layer."""
    layers = range(fields.num_hidden_layers)
    if family.ropes == "by window":
        by_kind = _ropes_by_window(config, family, max_positions, where)
        return tuple(by_kind[is_sliding] for is_sliding in _sliding_layers(fields, family))
    may = {"may_be_partial": family.partial_rope, "may_have_alpha": family.rope_alpha}
    rope = read_rope_spec(config, max_positions, where, **may)
    growth = rope.query_growth if family.query_growth else 0.0
    rope = replace(rope, neighbours=family.neighbours, query_growth=growth)
    if family.ropes == "if named" and fields.position_embedding_type != "rope":
        return (None,) * len(layers)
    if family.ropes in ("same", "if named"):
        return (rope,) * len(layers)
    if family.ropes == "in windows":
        has_windows = _default(fields.sliding_window, None) is not None
        return tuple(rope if slides or not has_windows else None for slides in _sliding_layers(fields, family))
    if family.ropes == "by theta":
        thetas = fields.layer_rope_theta or [rope.theta] * len(layers)
        if len(thetas) != len(layers) or min(thetas) < 0 or not 0 < max(thetas) < math.inf:
            raise ModelError(f"{where}: layer_rope_theta has no theta, or 0, for each of {len(layers)} layers")
        return tuple(replace(rope, theta=theta) if theta else None for theta in thetas)
    has_rope = fields.no_rope_layers or [(i + 1) % max(1, fields.no_rope_layer_interval) for i in layers]
    if len(has_rope) != len(layers) or not any(has_rope):
        raise ModelError(f"{where}: no_rope_layers does not say of each of {len(layers)} layers whether it has one")
    return tuple(rope if has else None for has in has_rope)


def _ropes_by_window(config: dict[str, Any], family: Family, max_positions: int, where: Path) -> dict[bool, RopeSpec]:
    """The rotary embeddings of layers that do not slide (False) and of those that do (True)."""

    def part(content: Any, name: str) -> dict[str, Any]:
        value = content.get(name) if isinstance(content, dict) else None
        if not isinstance(value, dict | None):
            raise ModelError(f"{where}: {name} is {value!r}, not an object")
        return value or {}

    nested, theta = part(config, "rope_parameters"), config.get("rope_theta", 1e6)
    full, sliding = part(nested, "full_attention"), part(nested, "sliding_attention")
    forms = {
        False: {"rope_theta": theta, **part(config, "rope_scaling"), **full},
        True: {"rope_theta": config.get("rope_local_base_freq", family.local_theta or theta), **sliding},
    }
    return {kind: read_rope_spec({"rope_parameters": form}, max_positions, where) for kind, form in forms.items()}


def _sliding_layers(fields: FamilyConfig, family: Family) -> list[bool]:
    """FamilyConfig.slides as this family has it."""
    return fields.slides(full_first=family.sliding == "alternating, full first", full_last=family.full_last)


def _windows(fields: FamilyConfig, family: Family, where: Path) -> tuple[int | None, ...]:
    """The window of each layer in tokens; empty when none has one (Qwen: only layers from max_window_layers on)."""
    window = _default(fields.sliding_window, 4096)
    alternates = family.sliding in ("alternating", "alternating, full first")
    may_slide = family.sliding == "all" or alternates or fields.use_sliding_window
    if family.sliding == "never" or window is None or not may_slide:
        return ()
    if window < 1:
        raise ModelError(f"{where}: sliding_window is {window}, but must be at least 1")
    layers = range(fields.num_hidden_layers)
    if family.sliding in ("all", "if used"):
        slides = [True for _ in layers]
    elif alternates or fields.layer_types is not None:
        slides = _sliding_layers(fields, family)
    elif family.sliding == "as listed":
        raise ModelError(f"{where}: use_sliding_window is true, but layer_types does not say in which layers")
    else:
        slides = [i >= fields.max_window_layers for i in layers]
    return tuple(window if each else None for each in slides) if any(slides) else ()


def _check_sizes(fields: FamilyConfig, num_kv_heads: int, head_dim: int, where: Path) -> None:
    _check_experts(fields, where)
    num_layers, layer_types = fields.num_hidden_layers, fields.layer_types
    if layer_types is not None and len(layer_types) != num_layers:
        raise ModelError(f"{where}: layer_types has {len(layer_types)} entries, but there are {num_layers} layers")
    if fields.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {fields.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim < 1:
        raise ModelError(f"{where}: hidden_size {fields.hidden_size} has no element for each of the attention heads")
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd, but rotary embedding turns pairs of elements")


def _check_experts(fields: FamilyConfig, where: Path) -> None:
    """Raises: ModelError for numbers of experts that cannot be."""
    num_experts, num_picked = fields.num_local_experts or fields.num_experts, fields.num_experts_per_tok
    if num_experts and not 1 <= (num_picked or 0) <= num_experts <= _MOST_EXPERTS:
        raise ModelError(
            f"{where}: num_experts_per_tok is {num_picked} and num_experts {num_experts}, allowed: 1 to num_experts, "
            f"and up to {_MOST_EXPERTS}"
        )


def _default(value: OptionalInt, default: int | None) -> int | None:
    return default if isinstance(value, msgspec.UnsetType) else value
