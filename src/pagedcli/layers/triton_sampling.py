"""Sampling on a GPU: one pass over the logits for greedy and sampled rows in any mixture.

Defined as in layers.sampling, up to float32 rounding of the cumulative sum. Imported only if triton is installed.
"""

import torch
from torch import Tensor

from pagedcli.layers import triton_kernels as kernels

CHUNK = 4096  # logits per program: a row of 152k is 38 programs


def choose_tokens(logits: Tensor, temperature: Tensor, uniform: Tensor, floor: Tensor | None = None) -> Tensor:
    """See layers.sampling.choose_tokens. A row's token does not depend on the other rows."""
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_chunks = -(-vocab_size // CHUNK)
    top, mass = torch.empty((2, num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    token = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    floors = temperature if floor is None else floor
    sizes = {"V": vocab_size, "C": num_chunks, "CHUNK": CHUNK, "FLOOR": floor is not None}
    kernels.sample_chunks_kernel[(num_rows, num_chunks)](
        logits, temperature, floors, top, token, mass, logits.stride(0), **sizes, num_warps=8
    )
    kernels.sample_rows_kernel[(num_rows,)](
        logits,
        temperature,
        uniform,
        floors,
        top,
        token,
        mass,
        out,
        logits.stride(0),
        **sizes,
        BLOCK_C=1 << (num_chunks - 1).bit_length(),
        num_warps=8,
    )
    return out
