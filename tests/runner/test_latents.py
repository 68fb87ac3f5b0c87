"""What the cache of a model with multi-head latent attention holds."""

import pytest
from harness.engine import make_engine
from model_zoo import cached_model

from pagedcli.answers.fits import block_formula
from pagedcli.events import EngineStarted
from pagedcli.views.cache_groups import group_words

# 3 layers, whose latents have 40 numbers and rotary keys 8
TOKEN_BYTES = 3 * (40 + 8) * 4


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def model(request, tmp_path_factory):
    return cached_model(request.param, tmp_path_factory)


def test_a_token_takes_one_latent_and_one_rotary_key_per_layer(model):
    events = []
    engine = make_engine(model, block_size=16, num_kvcache_blocks=20, emit=events.append)
    assert engine.plan.block_bytes == 16 * TOKEN_BYTES
    assert engine.runner.kv_cache.nbytes == 20 * 16 * TOKEN_BYTES
    [started] = [event for event in events if isinstance(event, EngineStarted)]
    [group] = started.groups
    assert "latent 48 per token and layer" in group_words(started, 0)
    expected = "3 layers x 16 tokens x 48 latent per token and layer x 4 bytes = 9,216"
    assert block_formula(group, 16, "float32") == expected
