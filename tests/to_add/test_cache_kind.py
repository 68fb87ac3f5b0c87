"""A kind of cache is one class and its entry in KINDS: here one number per four tokens, the sum of these and of all
before them, which a prefix can only continue with if it is still kept."""

import json

import pytest
from cli_harness import pagedcli
from scripted import Simulation
from trace_harness import check_events

from pagedcli.core import cache
from pagedcli.core.admission import admit
from pagedcli.core.cache import pool_bytes
from pagedcli.core.limits import Limits
from pagedcli.errors import RequestError
from pagedcli.events import EngineStarted, PrefixLookedUp
from pagedcli.sampling_params import SamplingParams

TOKENS = 4  # per number
NUMBER_BYTES = 8
WORDS = ("dog", "cat", "boat", "tree", "hat", "dog")  # the numbers of the first are gone when it comes again


class Sums:
    """Keeps the numbers of the prefixes that ended last, of at most `most` sequences."""

    name = "sums"
    made = ()  # all objects so far

    def __init__(self, block_size, most=3):
        self.block_size, self.most = block_size, most
        self.running = {}  # seq_id -> its numbers
        self.kept = []  # prefixes of tokens with their numbers, oldest first

    @classmethod
    def is_needed(cls, limits):
        return True

    @classmethod
    def make(cls, limits, blocks, emit):
        made = cls(limits.block_size)
        Sums.made = (*Sums.made, made)
        return made

    @classmethod
    def bytes(cls, limits):
        return (limits.num_blocks or 0) * limits.block_size // TOKENS * NUMBER_BYTES

    def boundaries(self, seq, most):
        """Whole numbers alone, never the last token, and only of what is kept."""
        spans = range(1, most + 1)
        ends = ((span, span * self.block_size) for span in spans)
        return [span for span, end in ends if end % TOKENS == 0 and end < len(seq.token_ids) and self._find(seq, end)]

    def _find(self, seq, end):
        wanted = tuple(seq.token_ids[:end])
        return next((numbers[: end // TOKENS] for tokens, numbers in self.kept if tokens[:end] == wanted), None)

    def allocate(self, seq, hit):
        end = hit.num_spans * self.block_size
        self.running[seq.seq_id] = list(self._find(seq, end)) if end else []

    def grow(self, seq, num_new_tokens):
        numbers, known = self.running[seq.seq_id], seq.token_ids[: seq.num_computed_tokens + num_new_tokens]
        for end in range((len(numbers) + 1) * TOKENS, len(known) + 1, TOKENS):
            numbers.append(sum(known[:end]))

    def release(self, seq):
        numbers = self.running.pop(seq.seq_id, None)
        if numbers:
            self.kept = [*self.kept, (tuple(seq.token_ids[: len(numbers) * TOKENS]), numbers)][-self.most :]

    def fork(self, parent, child):
        self.running[child.seq_id] = list(self.running[parent.seq_id])

    def recover(self):
        self.running.clear()

    def check(self, seqs):
        for tokens, numbers in self.kept:
            assert numbers == [sum(tokens[:end]) for end in range(TOKENS, len(tokens) + 1, TOKENS)]
        for seq in seqs or ():
            assert seq.seq_id in self.running

    def why_wait(self, seq, hit):
        return None

    def next_stop(self, seq, num_computed, num_new_tokens):
        return num_new_tokens

    def can_grow(self, seqs):
        return True

    def nothing(self, *args, **kwargs):
        """The hooks that it does not need."""

    expect = forget = begin_step = confirm = count = offer = nothing

    def stored(self, seq, most, store):
        return ()

    def restore(self, seq, num_spans, store):
        return num_spans == 0


@pytest.fixture
def sums(monkeypatch):
    monkeypatch.setitem(cache.KINDS, "sums", Sums)
    monkeypatch.setattr(Sums, "made", ())


PROMPTS = [[7] * 8 + [number % 5, number % 3, 1, 2] for number in range(12)]


@pytest.mark.parametrize("limits", [{}, {"num_state_slots": 6}, {"windows": (5, None)}, {"runs_ahead": True}])
def test_tokens_are_the_same_and_the_trace_is_lawful(sums, limits, monkeypatch):
    events = []
    num_blocks = 16 * len(limits.get("windows", (None,)))
    sim = Simulation(num_blocks, 2, emit=events.append, trace_tokens=True, max_num_batched_tokens=16, **limits)
    for prompt in PROMPTS:
        sim.add(prompt, 5)
    sim.run()
    monkeypatch.delitem(cache.KINDS, "sums")
    without = Simulation(num_blocks, 2, max_num_batched_tokens=16, **limits)
    for prompt in PROMPTS:
        without.add(prompt, 5)
    without.run()
    assert [seq.token_ids for seq in sim.seqs] == [seq.token_ids for seq in without.seqs]
    lookups = [event for event in events if isinstance(event, PrefixLookedUp)]
    assert any(event.vetoed_by == "sums" for event in lookups)
    assert any(event.blocks_hit for event in lookups)
    assert sim.stats.num_cached_tokens <= without.stats.num_cached_tokens
    start = next(event for event in events if isinstance(event, EngineStarted))
    assert start.kinds == (("state", "sums") if "num_state_slots" in limits else ("sums",))
    check_events(events)


def test_its_memory_counts(sums):
    limits = Limits(num_blocks=10, block_size=16)
    assert pool_bytes(limits, 100) == 10 * 100 + 10 * 4 * NUMBER_BYTES


def test_beams_may_have_to_compute_their_prompt_each_in_blocks_of_its_own(sums, monkeypatch):
    """After a preemption what the kind would continue from may be gone."""
    limits, params = Limits(num_blocks=9, block_size=2), SamplingParams(beam_width=2, max_tokens=2)
    with pytest.raises(RequestError, match="needs 10 blocks of 2 tokens, the pool has 9"):
        admit(limits, [1] * 8, params)
    monkeypatch.delitem(cache.KINDS, "sums")
    assert admit(limits, [1] * 8, params) == 2


def test_the_commands_run_with_it(sums, tmp_path):
    prompts, trace = tmp_path / "in.jsonl", tmp_path / "run.jsonl"
    rows = [{"prompt": f"{word} and {word} went to the sea"} for word in WORDS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = ("--max-tokens", "4", "--block-size", "4", "--num-gpu-blocks-override", "64", "--max-num-seqs", "1")
    flags = (*shared, "--max-model-len", "128")
    done = pagedcli("generate", prompts, "-o", tmp_path / "out.jsonl", "--record", trace, "--record-tokens", *flags)
    assert done.exit_code == 0, done.output
    assert Sums.made
    assert not Sums.made[-1].running
    assert '"vetoed_by":"sums"' in trace.read_text()
    assert "another kind of cache could not continue there" in pagedcli("explain", trace).stdout
    for command in (
        ("replay", trace, "--check"),
        ("profile-memory", *flags[2:]),
        ("simulate", trace, *shared[2:4]),
    ):
        result = pagedcli(*command)
        assert result.exit_code == 0, (command, result.output)
    live = pagedcli("trace", prompts, *flags)
    assert live.exit_code == 0, live.output
