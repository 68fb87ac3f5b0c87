"""The tables of docs/models.md, computed by the code that reads models.

A table follows `<!-- table: name -->` and is what the function of that name returns. tests/test_docs.py compares them,
`scripts/renew.py --write models` renews them. `transformers` and `refused` ask the installed transformers (some 20 s).
"""

import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedcli.attention.base import AttentionBackend, AttentionSpec, dtype_name
from pagedcli.attention.cpu import CpuAttention
from pagedcli.attention.select import REGISTRY
from pagedcli.core.groups import TableShape, page_bytes, sized
from pagedcli.errors import ConfigError, ModelError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.base import DecoderNeeds
from pagedcli.models.families.registry import FAMILIES
from pagedcli.models.footprint import footprint
from pagedcli.models.formats import AS_STORED, FORMATS
from pagedcli.models.gguf.architectures import ARCHITECTURES
from pagedcli.models.gguf.types import REFUSED as GGML_REFUSED
from pagedcli.models.gguf.types import TYPES as GGML_TYPES
from pagedcli.models.gguf.types import GgmlType
from pagedcli.models.loading import IN_ONE_CALL, choose_decoder
from pagedcli.models.quantization import READABLE, REFUSED
from pagedcli.models.reading import native_spec
from pagedcli.models.sharding import shard_spec
from pagedcli.models.spec import ModelSpec, layer_groups
from pagedcli.models.transformers_fallback import refuse_by_class, spec_of, text_alone, trace_attention

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "full_attn_idxs": [1],  # LFM2 attends in all layers by default, which no published model does
    "linear_attn_config": {"full_attn_layers": [4]},
    "hybrid_override_pattern": "M-*-",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# Where published checkpoints differ from their class's defaults in what decides whether they run
_PUBLISHED: dict[str, dict[str, Any]] = {
    "bitnet": {"quantization_config": {"quant_method": "bitnet"}},  # microsoft/bitnet-b1.58-2B-4T
    "lfm2": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},  # LiquidAI/LFM2-1.2B
    "minimax_m3_vl_text": {  # MiniMaxAI/MiniMax-M3, whose sparse layers have an index of their own
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *3 * ["minimax_m3_sparse"]],
    },
}
_FAILURES = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError, StrictDataclassError)


def native() -> str:
    """Families that the project's own decoders run, those that run alike in one line."""
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for model_type, family in FAMILIES.items():
        spec = native_spec(Path("."), {"text_config": _SMALL} if family.text is not None else _SMALL, model_type)
        decoder = choose_decoder(DecoderNeeds(spec, CpuAttention, FORMATS[None]))
        on_cpu = "C++, a step in one call" if decoder == IN_ONE_CALL else "C++ kernels, layer by layer"
        state = next((layer.recurrent.name for layer in spec.layers if layer.recurrent is not None), "none")
        alike[on_cpu, family.config.windows, state, _split(spec)].append(f"`{model_type}`")
    head = ("model_type", "on a CPU", "sliding windows", "layers with a state", "tensor parallel")
    return _table(head, [(", ".join(names), *facts) for facts, names in alike.items()])


# Of checkpoints with recurrent layers: the fields that decide their sizes
_RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3.5-0.8B": (
        "qwen3_5_text",
        {
            **{"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
            **{"num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16},
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen3.5-27B": (
        "qwen3_5_text",
        {
            **{"vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64},
            **{"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
        },
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        "qwen3_next",
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48},
            **{"num_attention_heads": 16, "num_key_value_heads": 2},
        },
    ),
    "LiquidAI/LFM2-1.2B": (
        "lfm2",
        {
            **{"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        },
    ),
    "ibm-ai-platform/Bamba-9B-v1": (
        "bamba",
        {
            **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27]},
            "mamba_d_state": 128,
        },
    ),
    "nvidia/Nemotron-H-8B-Base-8K": (
        "nemotron_h",
        {
            **{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32},
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        },
    ),
}


def published_states() -> str:
    """Sizes of published checkpoints with recurrent layers."""
    rows = []
    for name, (model_type, config) in _RECURRENT.items():
        spec = native_spec(Path("."), config, model_type)
        count, recurrent = footprint(spec, AS_STORED, "torch", 2).parameters, len(spec.states)
        layers = f"{len(spec.attention_layers)} attend, {recurrent} keep a state"
        rows.append((f"`{name}`", f"{count / 1e9:.1f}", layers, f"{spec.state_bytes(2) / 2**20:,.2f}"))
    return _table(("checkpoint", "parameters, 1e9", "layers", "state, MiB"), rows)


# Of checkpoints whose layers differ in their key/value heads: the fields that decide their sizes
_DIFFERING: dict[str, tuple[str, dict[str, Any]]] = {
    "google/gemma-4-E2B": (
        "gemma4_text",
        {
            **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8},
            **{"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
            "sliding_window_pattern": 5,
        },
    ),
    "google/gemma-4-E4B": (
        "gemma4_text",
        {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8},
            **{"num_key_value_heads": 2, "num_kv_shared_layers": 18},
        },
    ),
    "google/gemma-4-12B": (
        "gemma4_unified_text",
        {
            **{"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        },
    ),
    "google/gemma-4-26B-A4B": (
        "gemma4_text",
        {
            **{"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
            **{"sliding_window": 1024, "hidden_size_per_layer_input": 0},
        },
    ),
    "google/gemma-4-31B": (
        "gemma4_text",
        {
            **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32},
            **{"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
            **{"sliding_window": 1024, "hidden_size_per_layer_input": 0},
        },
    ),
}


def published_caches() -> str:
    """What published checkpoints whose layers differ keep of a sequence: blocks of 16 tokens in bfloat16."""
    rows = []
    for name, (model_type, config) in _DIFFERING.items():
        spec = native_spec(Path("."), {"vocab_size": 262144, **config}, model_type)
        own = spec.num_kv_heads, spec.head_dim
        groups = sized(layer_groups(spec.attention_layers), heads=own, kv_dtype="bfloat16")
        num_bytes, sizes = page_bytes(groups, 16), [group.used_bytes(16) or 0 for group in groups]
        overall = [size for group, size in zip(groups, sizes, strict=True) if group.window is None]
        windowed_bytes = sum(sizes) - sum(overall)
        used = windowed_bytes / num_bytes / (len(groups) - len(overall)), sum(overall) / num_bytes / len(overall)
        tables, kept = TableShape.of(16, groups), [layer for layer in spec.attention_layers if layer.source is None]
        windowed = sum(layer.window is not None for layer in kept)
        layers = f"{windowed} + {len(kept) - windowed} + {spec.num_layers - len(kept)}"
        held = (tables.most_blocks(length, 1) * num_bytes / 2**20 for length in (8192, 131072))
        rows.append(
            (
                f"`{name}`",
                f"{footprint(spec, AS_STORED, 'torch', 2).parameters / 1e9:.1f}",
                layers,
                f"{len(groups)}",
                f"{num_bytes / 1024:g}",
                ", ".join(f"{each:.0%}" for each in used),
                *(f"{each / 16 / 1024:g}" for each in (sum(sizes), sum(overall))),
                *(f"{each:,.0f}" for each in held),
            )
        )
    head = ("checkpoint", "parameters, 1e9", "layers: window + all + none", "groups", "block, KiB", "used of it")
    lengths = ("8,192 tokens, MiB", "131,072 tokens, MiB")
    return _table((*head, "token within the window, KiB", "before it, KiB", *lengths), rows)


def _split(spec: ModelSpec) -> str:
    try:
        shard_spec(spec, ParallelContext(0, 2))
    except ConfigError as error:
        return "no: it " + error.message.partition(f"{spec.architecture} ")[2]
    return "yes"


def attention_backends() -> str:
    """What each attention backend supports, in order of preference. Needs triton, whose kernels are not compiled."""
    flags = ("windows", "soft_cap", "sinks", "strided_blocks", "batch_invariant", "graph_safe")
    rows = []
    for entry in REGISTRY:
        kinds: dict[type[AttentionBackend], str] = {}
        for capability in ((9, 0), (8, 0)):
            device = torch.device(entry.auto_devices[-1])
            spec = AttentionSpec(device, torch.bfloat16, 256, 1, 1, 64, capability=capability)
            kinds.setdefault(import_module(entry.module).check(spec), f"{capability[0]}.{capability[1]}")
        for kind, capability_name in kinds.items():
            able = kind.capabilities
            name = f"`{entry.name}`" if len(kinds) == 1 else f"`{entry.name}`, compute capability {capability_name}"
            caches = ", ".join(sorted(map(dtype_name, able.kv_dtypes)))
            sizes = "any" if able.max_head_dim is None else f"to {able.max_head_dim}"
            multiple = "any" if able.block_size_multiple == 1 else f"multiples of {able.block_size_multiple}"
            asked = ["yes" if getattr(able, flag) else "no" for flag in flags]
            rows.append((name, " ".join(entry.auto_devices), sizes, caches or "-", multiple, *asked))
    head = (
        "backend",
        "device",
        "head sizes",
        "caches besides the model's dtype",
        "block sizes",
        "windows",
        "soft caps",
    )
    return _table((*head, "sinks", "layers with other heads", "same bits in any company", "CUDA graphs"), rows)


def rounding() -> str:
    """Formats that --quantization names."""
    rows = []
    for name, stored in FORMATS.items():
        flag = "(default)" if name is None else f"`--quantization {name}`"
        refusal = stored.refusal("torch")
        rows.append((flag, stored.name, "yes", "yes" if refusal is None else f"no: {refusal}"))
    return _table(("flag", "weights", "CPU", "CUDA"), rows)


def checkpoints() -> str:
    """Checkpoints that were quantized before, by the quant_method of their quantization_config."""
    rows = [(f"`{method}`", "read", what) for method, what in READABLE.items()]
    rows += [(f"`{method}`", "refused", what) for method, what in REFUSED.items()]
    return _table(("quant_method and format", "", "what"), rows)


def gguf_families() -> str:
    """Architectures of GGUF files: those whose model_type has their name, then the others."""
    others = defaultdict(list)
    alike = [name for name, kind in ARCHITECTURES.items() if name == kind.family]
    for name, kind in ARCHITECTURES.items():
        if name != kind.family:
            others[kind.family].append(f"`{name}`")
        for key, model_type in kind.others.items():
            others[model_type].append(f"`{name}` with `{key}`")
    found = [f"{' and '.join(names)} as `{family}`" for family, names in others.items()]
    return "\n".join(
        textwrap.wrap(
            f"By their own name: {', '.join(f'`{name}`' for name in alike)}. Others: {', '.join(found)}.", 120
        )
    )


def _in_triton(kind: GgmlType) -> str:
    if kind.is_float:
        return "as stored"
    return f"{kind.in_triton / 32:g} bits" if kind.in_triton else "widened"


def gguf_types() -> str:
    """Types of the numbers in GGUF files."""
    rows = []
    for kind in GGML_TYPES.values():
        bits = f"{8 * kind.num_bytes / kind.block:g}"
        kept = "as stored" if kind.is_float else f"{kind.packed / 32:g} bits"
        rows.append((kind.name, bits, kind.codes or "floating point", kept, _in_triton(kind)))
    for name, what in GGML_REFUSED.values():
        rows.append((name, "", what, "refused", "refused"))
    return _table(("type", "bits in the file", "a weight", "kept on a CPU", "CUDA"), rows)


def through_transformers() -> str:
    """Families that transformers' own layers run over the paged cache."""
    return ", ".join(f"`{model_type}`" for model_type in _families_of_transformers()[None])


def refused() -> str:
    """Families that do not run, and why."""
    families = _families_of_transformers()
    rows = [(reason, ", ".join(f"`{each}`" for each in found)) for reason, found in families.items() if reason]
    return _table(("the model", "model_type"), sorted(rows, key=lambda row: (-row[1].count(","), row[0])))


def version() -> str:
    """The transformers that the last two tables ask."""
    return transformers.__version__


@cache
def _families_of_transformers() -> dict[str | None, list[str]]:
    """Reason to refuse (None: it may run) -> model types without a native decoder. A model of the default sizes, or of
    those in _PUBLISHED, is built on the meta device; families whose config builds none are left out."""
    transformers.utils.logging.set_verbosity_error()
    found: dict[str | None, list[str]] = defaultdict(list)
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if model_type not in FAMILIES:
            try:
                found[_refusal(model_type, architecture)].append(model_type)
            except _FAILURES as error:  # of a family's own code, run with sizes that nobody chose for it
                print(f"{model_type} is left out: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
    return found


def _refusal(model_type: str, architecture: str) -> str | None:
    config: Any = text_alone(CONFIG_MAPPING[model_type](**_PUBLISHED.get(model_type, {})))
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        return f"has quantized weights ({REFUSED[quantized['quant_method']]})"
    try:
        spec = spec_of(Path("."), config, architecture)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        model.eval()
        refuse_by_class(model, spec)
        trace_attention(model, spec.within(spec.max_position_embeddings), spec.max_position_embeddings)
    except ModelError as error:
        return error.message.partition("it ")[2]
    return None


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


FAST: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (native, published_states, published_caches, rounding, checkpoints, gguf_families, gguf_types)
}
TABLES = FAST | {each.__name__: each for each in (attention_backends, version, through_transformers, refused)}
