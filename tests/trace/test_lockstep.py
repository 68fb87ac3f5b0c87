"""The fold counts sequences that decode together at once; counting each alone must give the same numbers."""

import pytest
from harness.core import EventList, simulated
from test_check_fields import of_several_sequences

from pagedcli.errors import TraceError
from pagedcli.events import RequestPreempted, StepFailed, StepFinished, StepScheduled, TokensSampled
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import fold, pool_fold


class Alone(View):
    """Counts the tokens of each sequence by itself, and all sums anew after each change of a step."""

    def __init__(self):
        self.num_computed, self.num_output, self.num_recomputed, self.most = {}, {}, {}, {}
        self.num_checks = 0

    def on_prefix_looked_up(self, event, state):
        before = self.num_computed.get(event.seq_id, 0) if event.reason == "continued" else 0
        self.num_computed[event.seq_id] = before + event.tokens_hit

    def on_sequence_forked(self, event, state):
        self.num_computed[event.seq_id] = event.num_computed_tokens

    def on_request_preempted(self, event, state):
        self._drop(event.seq_id)

    def _drop(self, seq_id):
        self.most[seq_id] = max(self.most.get(seq_id, 0), self.num_computed.get(seq_id, 0))
        self.num_computed[seq_id] = 0

    def on_step_scheduled(self, event, state):
        for seq_id, num_new in zip(event.seq_ids, event.num_new_tokens, strict=True):
            before = self.num_computed[seq_id]
            again = max(0, min(before + num_new, self.most.get(seq_id, 0)) - before)
            self.num_recomputed[seq_id] = self.num_recomputed.get(seq_id, 0) + again
            self.num_computed[seq_id] = before + num_new
        self._check(state)

    def on_tokens_sampled(self, event, state):
        for seq_id in event.seq_ids:
            self.num_output[seq_id] = self.num_output.get(seq_id, 0) + 1

    def on_step_finished(self, event, state):
        self._check(state)

    def on_step_failed(self, event, state):
        for seq_id in event.seq_ids:
            self._drop(seq_id)
        self._check(state)

    def _check(self, state):
        self.num_checks += 1
        for seq in [*state.seqs.values(), *state.finished.values()]:
            expected = [counts.get(seq.seq_id, 0) for counts in (self.num_computed, self.num_output)]
            assert [seq.num_computed_tokens, seq.num_output_tokens] == expected, seq
            assert seq.num_recomputed_tokens == self.num_recomputed.get(seq.seq_id, 0)
        assert state.num_running == len(state.running())
        assert state.num_unfilled_slots() == state.count_unfilled_slots()
        assert state.num_full_blocks == sum(block_hash is not None for block_hash in state.hashes)


RUNS = {
    "everything": simulated,
    "failing": lambda: simulated(fails=0.1),
    "without-caching": lambda: simulated(caching=False),
    "wide": lambda: simulated(num_blocks=200, num_requests=40, max_num_seqs=16, max_num_batched_tokens=64),
    "one-ahead": lambda: simulated(runs_ahead=True),
    "windows": lambda: simulated(num_blocks=26, windows=(4, None), chunked_prefill_size=2),
    "windows-one-ahead": lambda: simulated(num_blocks=28, windows=(4, None), runs_ahead=True),
    "beams": of_several_sequences,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_counts_at_once_are_those_of_each_sequence(run):
    alone = Alone()
    fold(EventList(run()), alone)
    assert alone.num_checks > 20


def test_sampling_twice_in_a_step_is_refused_also_of_sequences_that_decode_together():
    events = simulated(num_blocks=200, num_requests=4, max_num_seqs=8, max_num_batched_tokens=64)
    places = [i for i, event in enumerate(events) if isinstance(event, TokensSampled) and len(event.seq_ids) > 1]
    folding = pool_fold()
    for event in events[: places[3] + 1]:
        folding(event)
    with pytest.raises(TraceError, match="tokens computed"):
        folding(events[places[3]])
    assert not any(isinstance(event, RequestPreempted | StepFailed) for event in events)
    assert any(isinstance(event, StepScheduled) and len(set(event.num_new_tokens)) > 1 for event in events)
    assert isinstance(events[-1], StepFinished)
