"""Which implementation runs a model, and its weights: load_model."""

from pathlib import Path
from typing import Literal, TypeGuard

import torch

from pagedcli.attention.base import AttentionBackend
from pagedcli.attention.cpu import CpuAttention
from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import SINGLE, ParallelContext
from pagedcli.models.base import CausalLM
from pagedcli.models.refusals import window_refusal
from pagedcli.models.spec import ModelSpec

LoadFormat = Literal["auto", "safetensors", "dummy"]


def load_model(
    path: Path,
    spec: ModelSpec,
    *,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    quantization: Literal["int8"] | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    parallel: ParallelContext = SINGLE,
) -> CausalLM:
    """Build the model of a folder with its weights on the device; of a parallel group, this rank's part.

    Units:   max_model_len in tokens (None: the length the model was made for).
    Raises:  ModelError for damaged or missing weights, or for an architecture that cannot run here, with the reason;
             ConfigError where `quantization` is asked for and cannot be.
    """
    max_model_len = max_model_len or spec.max_position_embeddings
    if spec.sliding_window is not None and max_model_len > spec.sliding_window:
        raise window_refusal(spec.architecture, spec.sliding_window, max_model_len)
    if not spec.is_fallback:
        from pagedcli.models.decoder import Decoder
        from pagedcli.models.weights import CheckpointWeights, DummyWeights

        source = DummyWeights(seed) if load_format == "dummy" else CheckpointWeights(path)
        if runs_in_one_call(backend, spec) and parallel is SINGLE:
            from pagedcli.models.cpu_decoder import CpuDecoder

            quantize = quantization == "int8"
            return CpuDecoder.load(
                spec, source, backend=backend, dtype=dtype, max_model_len=max_model_len, quantize=quantize
            )
        _refuse_quantization(quantization, backend)
        return Decoder.load(
            spec, source, backend=backend, dtype=dtype, device=device, max_model_len=max_model_len, parallel=parallel
        )
    _refuse_quantization(quantization, backend)
    from pagedcli.models.transformers_fallback import load_fallback

    return load_fallback(
        path,
        spec,
        backend=backend,
        dtype=dtype,
        device=device,
        load_format=load_format,
        seed=seed,
        trust_remote_code=trust_remote_code,
        max_model_len=max_model_len,
    )


def runs_in_one_call(backend: AttentionBackend, spec: ModelSpec) -> TypeGuard[CpuAttention]:
    """Whether the native library that serves attention can run the whole decoder."""
    return isinstance(backend, CpuAttention) and spec.hidden_size % 2 == spec.intermediate_size % 2 == 0


def _refuse_quantization(quantization: str | None, backend: AttentionBackend) -> None:
    if quantization is not None:
        raise ConfigError(
            f"quantization {quantization} needs the native CPU kernels and decoder, but attention is '{backend.name}'",
            hint="use --device cpu on a machine with a C++ compiler, and a Llama, Mistral, Qwen2 or Qwen3 model",
        )
