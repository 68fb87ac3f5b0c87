"""To add a mechanism with recurrent state, touch its record, and its body in BODIES in models/recurrent_blocks.py.

Slots, snapshots, admission and memory follow from the record alone.
"""

import json
import shutil
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from engine_harness import make_engine, ragged_prompts, run
from model_zoo import cached_model

from pagedcli.models.families.hybrids import Lfm2
from pagedcli.models.families.registry import FAMILIES, Family
from pagedcli.models.mixers.recurrent import RecurrentMixer, StateTensor
from pagedcli.models.reading import read_spec
from pagedcli.models.recurrent_blocks import BODIES
from pagedcli.models.tensors import exact
from pagedcli.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps(RecurrentMixer):
    """What short convolutions compute, said in another way: one state tensor per input that is kept."""

    name: ClassVar[str] = "taps"
    channels: int
    kernel: int

    @property
    def inner(self):
        return self.channels

    @property
    def state(self):
        return tuple(StateTensor(f"tap {i}", (self.channels,)) for i in range(self.kernel - 1))

    def parameters(self, make, key, layer):
        name = f"{layer}.{make.names.recurrent}"
        return {
            **make.linear(f"{key}.inner", {f"{name}.in_proj": 3 * self.channels}, make.width),
            f"{key}.taps": exact({f"{name}.conv.weight": (self.channels, 1, self.kernel)}),
            **make.linear(f"{key}.out", {f"{name}.out_proj": make.width}, self.channels),
        }


class TapsBody:
    """Token by token: no kernels, no chunks."""

    def __init__(self, parts, shape, place, key):
        self.place, self.inner, self.out = place, parts.linear(f"{key}.inner"), parts.linear(f"{key}.out")
        self.taps = parts.small(f"{key}.taps").flatten(1).t()

    def __call__(self, x, step):
        slots, pools = step.state(self.place)
        b, c, values = self.inner(x).chunk(3, dim=1)
        inputs, found = b * values, []
        kept = [slots.load(pool) for pool in pools]
        for i, (start, end) in enumerate(zip(slots.cu_q_host, slots.cu_q_host[1:], strict=False)):
            rows = [tap[i] for tap in kept]
            for row in inputs[start:end]:
                rows.append(row)
                found.append(
                    sum(weight * each.float() for weight, each in zip(self.taps, rows[-len(self.taps) :], strict=True))
                )
            for tap, last in zip(kept, rows[len(rows) - len(kept) :], strict=True):
                tap[i] = last
        for pool, tap in zip(pools, kept, strict=True):
            slots.store(pool, tap)
        return self.out(c * torch.stack(found).to(x.dtype))


class Tapped(Lfm2):
    def recurrent(self):
        return Taps(channels=self.hidden_size, kernel=self.conv_L_cache)


@pytest.fixture
def twins(tmp_path, tmp_path_factory, monkeypatch):
    """A model with short convolutions, and the same weights with the new mixer."""
    monkeypatch.setitem(FAMILIES, "tapped", Family("TappedForCausalLM", Tapped))
    monkeypatch.setitem(BODIES, Taps, TapsBody)
    known = cached_model("lfm2", tmp_path_factory)
    new = shutil.copytree(known, tmp_path / "new")
    config = json.loads((known / "config.json").read_text())
    config |= {"model_type": "tapped", "architectures": ["TappedForCausalLM"]}
    (new / "config.json").write_text(json.dumps(config))
    return known, new


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_the_engine_keeps_its_state_through_chunks_caching_and_preemption(twins, backend):
    prompts, params = ragged_prompts(4), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    hard = {"chunked_prefill_size": 7, "num_kvcache_blocks": 9, "num_state_slots": 5, "max_model_len": 96}
    known, new = twins
    expected = run(make_engine(known, attention_backend=backend, max_model_len=96), prompts, params)
    engine = make_engine(new, attention_backend=backend, **hard)
    assert run(engine, prompts, params) == expected
    assert engine.stats.num_preemptions > 0


def test_the_record_says_the_bytes_of_its_state(twins):
    known, new = map(read_spec, twins)
    assert new.state_bytes(4) == known.state_bytes(4) > 0
    assert {layer.mixer.name for layer in new.layers if layer.mixer.state} == {"taps"}
