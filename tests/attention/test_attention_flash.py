"""flash-attn without a GPU (tests/fake_flash.py): our arguments, taken as documented, give exact attention."""

import types
from dataclasses import replace

import fake_flash
import pytest
import torch
from attention_cases import TOLERANCE, Case, run, worst_error

from pagedcli.attention import flash
from pagedcli.errors import BackendError

DTYPE = torch.bfloat16
RAGGED = [(1, 1), (300, 1), (520, 40), (256, 256), (17, 17)]
DECODE = [(1, 1), (300, 1), (520, 1)]


def backend_of(version):
    _, functions = fake_flash.MODULES[version]
    return getattr(flash, f"{version}_backend")(types.SimpleNamespace(**functions))


@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["ragged", "decode"])
@pytest.mark.parametrize(("group", "window"), [(1, None), (4, None), (1, 100)])
@pytest.mark.parametrize("name", fake_flash.MODULES)
def test_arguments_taken_as_documented_give_exact_attention(name, group, window, lengths):
    case = Case(lengths, 256, 2 * group, 2, 64, DTYPE)
    case.layer = replace(case.layer, window=window)
    assert worst_error(run(backend_of(name), case), case.expected()) < TOLERANCE[DTYPE]


def test_old_signatures_are_refused_by_what_they_lack():
    def of_flash_attn_2_3(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False, window_size=None):
        raise AssertionError("never called")

    old = types.SimpleNamespace(
        flash_attn_with_kvcache=of_flash_attn_2_3, flash_attn_varlen_func=fake_flash.flash2_varlen
    )
    with pytest.raises(BackendError, match="does not take block_table"):
        flash.flash2_backend(old)


@pytest.mark.parametrize(("num_seqs", "total"), [(1, 1), (1, 40), (3, 1)])
def test_entries_of_a_block_table_are_neighbours_in_every_group_of_layers(num_seqs, total):
    """flash-attn refuses others, also where a table has one entry."""
    from pagedcli.runner.device_state import DeviceState, Upload

    device, tokens = torch.device("cpu"), torch.ones(num_seqs, dtype=torch.int32)
    state = DeviceState(
        device=device, block_size=16, num_groups=2, num_state_slots=0, kv_cache=tokens, states=(),
        tables=torch.arange(24, dtype=torch.int32).view(3, 8), last_tokens=tokens, upload=Upload(device),
    )  # fmt: skip
    rows, slots = torch.arange(num_seqs), torch.zeros(2, num_seqs, dtype=torch.int32)
    tables = state.tables_of(rows, total)
    batch = state.batch(tables, slots, max_total=total, cu_q=tokens, num_tokens=tokens, max_new=1)
    width = -(-total // 16)
    for group, each in enumerate((batch, *batch.others)):
        assert each.block_table.tolist() == [[8 * row + 2 * i + group for i in range(width)] for row in range(num_seqs)]
        assert each.block_table.stride() == (width, 1)
