"""Tile sizes of the Triton attention kernels for each GPU, dtype and head size."""

from dataclasses import dataclass

import torch

MIN_ROWS = 16  # of the smallest tl.dot


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiling of one kernel: rows of queries, keys per tile, warps, tiles of K and V in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (element bytes, largest padded head_dim, config). No kernel of these spills, three decode programs fit the shared
# memory of an sm_90 multiprocessor and two that of an sm_80 (tests/test_triton_compile.py). Not autotuned:
# that would slow a cold start and needs a driver.
DECODE_CONFIGS = (
    (2, 64, TileConfig(MIN_ROWS, 128, 4, 3)),
    (2, 128, TileConfig(MIN_ROWS, 64, 4, 3)),
    (2, 256, TileConfig(MIN_ROWS, 32, 4, 3)),
    (4, 64, TileConfig(MIN_ROWS, 64, 4, 3)),
    (4, 128, TileConfig(MIN_ROWS, 32, 4, 3)),
    (4, 256, TileConfig(MIN_ROWS, 16, 4, 3)),
)
PREFILL_CONFIGS = (
    (2, 64, TileConfig(128, 64, 8, 3)),
    (2, 128, TileConfig(64, 64, 8, 3)),
    (2, 256, TileConfig(64, 32, 8, 3)),
    (4, 64, TileConfig(32, 16, 4, 3)),
    (4, 128, TileConfig(32, 16, 4, 3)),
    (4, 256, TileConfig(16, 16, 4, 3)),
)
# sm_90 keeps the operands of a product in shared memory, so more rows fit its registers.
PREFILL_CONFIGS_SM90 = ((2, 128, TileConfig(128, 64, 8, 3)), *PREFILL_CONFIGS)
ConfigTable = tuple[tuple[int, int, TileConfig], ...]


def tile_configs(dtype: torch.dtype, block_d: int, capability: tuple[int, int]) -> tuple[TileConfig, TileConfig]:
    """Tiling of the decode and prefill kernels for a padded head size and compute capability."""
    prefill = PREFILL_CONFIGS_SM90 if capability == (9, 0) else PREFILL_CONFIGS
    return config_for(DECODE_CONFIGS, dtype.itemsize, block_d), config_for(prefill, dtype.itemsize, block_d)


def config_for(table: ConfigTable, element_bytes: int, block_d: int) -> TileConfig:
    """The first entry of a config table for heads of that padded size."""
    return next(config for size, limit, config in table if size == element_bytes and block_d <= limit)
