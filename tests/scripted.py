"""An executor without a model, and the real engine core on top of it: sampled tokens come from a rule. No torch."""

import itertools
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import numpy as np
from oracle import EveryGuess

from pagedcli.core.engine_core import EngineCore
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.scoring import TokenScore
from pagedcli.core.sequence import TokenLogprobs
from pagedcli.core.step_input import StepBuilder, StepTokens, TargetScores
from pagedcli.events import CacheGroup
from pagedcli.sampling_params import SamplingParams


def rule(context, draw):
    """A token that depends on all tokens before it and on the random number."""
    return (sum(context) + len(context) + int(draw * 97)) % 5


def likeliest(context):
    """Candidates of a beam: tokens 0 to 9 with log-probabilities that depend on all tokens before."""
    start = sum((place + 1) * token for place, token in enumerate(context)) + len(context)
    # all different, so that no order depends on ties
    found = [(token, -((start * 31 + token * 17) % 101 + token / 16) / 40) for token in range(10)]
    return sorted(found, key=lambda pair: -pair[1])


def scored(context, token):
    """The score of a given token, which depends on all tokens before it."""
    mixed = sum((place + 3) * (each + 1) ** 2 for place, each in enumerate((*context, token)))
    return TokenScore(-(mixed % 1009) / 64, mixed % 3 == 0)


class ScriptedExecutor:
    """Keeps a cache of token ids in place of K and V: a token depends on what the block table says comes before it: a
    block that was never written, or is another's, gives other tokens."""

    def __init__(
        self, num_blocks, block_size, max_num_seqs, width, *, windows=(None,), choose: Callable = rule, num_states=0
    ):
        self.states = [None] * num_states  # of each slot: the tokens that its state has seen
        self.block_size = block_size
        self.windows = windows  # of each group of layers: a token depends on what each of them sees
        self.cache = [None] * (num_blocks * block_size)
        self.width = width * len(windows)
        self.tables = [0] * (max_num_seqs * self.width)
        self.last_tokens = []
        self.choose = choose
        self.steps = []  # new tokens per sequence
        self.num_sampled = []  # rows of logits in each step
        self.kept = {}  # place -> the tokens of a sequence with a repetition penalty
        self.fail_launch = self.fail_read = False  # of the next step

    def launch(self, step, sampling):
        return self.launch_model(step)(sampling)

    def launch_model(self, step):
        if self.fail_launch:
            self.fail_launch = False
            raise RuntimeError("launch failed")
        check_shapes(step)
        for place, block_id in zip(step.table_index.tolist(), step.table_values.tolist(), strict=True):
            self.tables[place] = block_id
        size = self.block_size
        for source, copy in step.copies:
            self.cache[copy * size : (copy + 1) * size] = self.cache[source * size : (source + 1) * size]
        ids = step.input_ids.tolist()
        if step.source_rows is not None:
            ids = [
                (self.last_tokens[row] or 0) if row >= 0 else id_
                for id_, row in zip(ids, step.source_rows, strict=True)
            ]
        if self.states:
            self._update_states(step, ids)
        for slots in step.slots.tolist():
            for slot, token_id in zip(slots, ids, strict=True):
                if slot >= 0:
                    self.cache[slot] = token_id
        self.steps.append((step.cu_q[1:] - step.cu_q[:-1]).tolist())
        return partial(self._sample, self._contexts(step), self._target_scores(step))

    def _sample(self, contexts, target_scores, sampling):
        self.last_tokens, scored, logprobs = [], dict(sampling.scored), {}
        if sampling.logits_rows is not None:
            contexts = [contexts[row] for row in sampling.logits_rows]
        self.num_sampled.append(len(contexts))
        for row, (context, draw) in enumerate(zip(contexts, sampling.rows.uniform.tolist(), strict=True)):
            token = self.choose(context, draw)
            self.last_tokens.append(None if token is None else self._changed(token, row, sampling))
            self._keep(row, context, sampling)
            if row in scored:
                logprobs[row] = TokenLogprobs(token, 0.0, likeliest(context)[: scored[row]])
        failing, self.fail_read = self.fail_read, False
        return ScriptedStep(None if failing else self.last_tokens, logprobs, target_scores)

    def _target_scores(self, step):
        """Scores of the given tokens that the step asks for."""
        found, given = [], [] if step.prompt_rows is None else list(self._given(step))
        for piece in () if step.prompt_rows is None else step.prompt_rows.pieces:
            scores = [scored(context, token) for context, token in given[: piece.num_tokens]]
            del given[: piece.num_tokens]
            found.append(TargetScores(piece.seq_id, piece.first, scores))
        return found

    def _given(self, step):
        rows = step.prompt_rows
        for place, token in zip(rows.places.tolist(), rows.token_ids.tolist(), strict=True):
            yield self._context(step, int(step.logits_rows[rows.scored[place]])), token

    def _update_states(self, step, ids):
        """All sequences read, then all write. A state has seen exactly the tokens before those of the step."""
        reads, writes, states, self.scanned = step.state_reads.tolist(), step.state_writes.tolist(), [], []
        seen = step.cu_q[1:] if step.state_ends is None else step.state_ends
        for seq, (start, end) in enumerate(itertools.pairwise(step.cu_q.tolist())):
            before = () if reads[seq] < 0 else self.states[reads[seq]]
            assert before is not None, "a slot that was never written was read"
            assert len(before) == step.num_tokens[seq] - (end - start), "the state of another place"
            states.append((*before, *ids[start : seen[seq]]))
            self.scanned.append((*before, *ids[start:end]))
        others = [each for seq, each in enumerate(reads) if each != writes[seq]]
        assert len({*writes, *others}) == len(writes) + len(set(others)), "a slot is written that others use"
        for slot, state in zip(writes, states, strict=True):
            self.states[slot] = state

    def _contexts(self, step):
        """The tokens before each row of logits."""
        rows = range(step.cu_q[-1]) if step.logits_rows is None else step.logits_rows.tolist()
        rows = rows if step.prompt_rows is None else [rows[row] for row in step.prompt_rows.sampled]
        return [self._context(step, row) for row in rows]

    def _context(self, step, row):
        """The tokens up to a row of the step."""
        ends = step.cu_q[1:].tolist()
        seq = next(place for place, end in enumerate(ends) if row < end)
        first, size, num_groups = int(step.table_rows[seq]) * self.width, self.block_size, len(self.windows)
        length = int(step.num_tokens[seq]) - (ends[seq] - 1 - row)
        context = []
        for group, window in enumerate(self.windows):
            for place in range(max(0, length - (window or length)), length):
                block = self.tables[first + place // size * num_groups + group]
                context.append(self.cache[block * size + place % size])
        assert None not in context, "a slot that was never written was read"
        if self.states:
            assert self.windows != (None,) or list(self.scanned[seq][:length]) == context, "the state of other tokens"
        return context

    def _keep(self, row, context, sampling):
        """The tokens that penalties look at are those before the row of logits; then the one just sampled, if all
        guesses before it were right."""
        changes = sampling.changes
        if changes is None or row not in changes.repeated:
            return
        at = changes.repeated.tolist().index(row)
        place, guess = int(changes.repeated_places[at]), int(changes.repeated_guesses[at])
        started = {at: token_ids for at, token_ids, _ in changes.started}
        if guess < 0:
            kept = self.kept[place] = started.get(place) or self.kept[place]
            self.seen, self.are_right = kept.copy(), True
        else:
            self.are_right &= self.last_tokens[row - 1] == guess
            self.seen.append(guess)
        assert self.windows != (None,) or self.seen == context, "the tokens of another sequence"
        if self.are_right:
            self.kept[place].append(self.last_tokens[row])

    def _changed(self, token, row, sampling):
        """The first token from `token` on that the grammar of the row allows."""
        for guided, bits, _ in () if sampling.changes is None else sampling.changes.guided:
            if guided == row:
                allowed = int.from_bytes(bits, "little")
                return next(t for t in itertools.chain(range(token, 8), range(8)) if allowed >> t & 1)
        return token


def check_shapes(step):
    """What a step says of its sequences is what its arrays have."""
    begins, ends, lengths = step.cu_q[:-1].tolist(), step.cu_q[1:].tolist(), step.num_tokens.tolist()
    counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert (step.num_seqs, step.max_new, step.max_total) == (len(counts), max(counts), max(lengths))
    assert step.pure_decode == (set(counts) == {1} and step.logits_rows is None and step.copies == ())
    pairs = zip(lengths, counts, strict=True)
    assert step.positions.tolist() == [place for end, count in pairs for place in range(end - count, end)]
    if step.source_rows is not None:  # of pending tokens only the last one of a sequence is on the device
        pending = [row for row, source in enumerate(step.source_rows.tolist()) if source >= 0]
        assert set(pending) <= {end - 1 for end in ends}
        assert not step.input_ids[pending].any()


class ScriptedStep:
    """A LaunchedStep whose tokens are None if reading them fails."""

    def __init__(self, tokens, logprobs, target_scores):
        self.tokens, self.logprobs, self.target_scores = tokens, logprobs, target_scores

    def read(self):
        if self.tokens is None:
            raise RuntimeError("read failed")
        return StepTokens(self.tokens, self.logprobs, target_scores=self.target_scores)


class CheckedBuilder(StepBuilder):
    """Checks that what a step takes over from the one before is what a builder without a past makes of it."""

    def build(self, work, source_rows=None):
        step, rows = super().build(work, source_rows)
        fresh = StepBuilder(self.limits)
        fresh._tables = self._tables
        expected, _ = fresh.build(work, source_rows)
        for name in {field.name for field in fields(step)} - {"table_index", "table_values", "prompt_rows"}:
            found, wanted = getattr(step, name), getattr(expected, name)
            if isinstance(wanted, np.ndarray):
                found, wanted = (found.dtype, found.tolist()), (wanted.dtype, wanted.tolist())
            assert found == wanted, name
        return step, rows


def scripted_plan(num_blocks, block_size=2, **changes):
    """A plan with changes of its own fields or of its limits. `windows`: of each group of layers."""
    limits = {
        "block_size": block_size, "num_blocks": num_blocks, "max_model_len": num_blocks * block_size + 64,
        "max_num_seqs": 4, "max_num_batched_tokens": 8, "vocab_size": 1_000_000,
    }  # fmt: skip
    windows = changes.pop("windows", (None,))
    # one layer each, of one head of one element in two bytes
    limits["groups"] = tuple(CacheGroup(window, (layer,), (1, 1), 4) for layer, window in enumerate(windows))
    limits |= {name: value for name, value in changes.items() if name in Limits.__dataclass_fields__}
    others = {name: value for name, value in changes.items() if name not in Limits.__dataclass_fields__}
    return Plan(**{"limits": Limits(**limits), "model": "none", "block_bytes": block_size * 4, **others})


class Simulation(EngineCore):
    """The engine core over a ScriptedExecutor, with a clock that ticks by itself. `seqs` are all sequences so far."""

    def __init__(
        self,
        num_blocks,
        block_size=2,
        *,
        emit=None,
        trace_tokens=False,
        check=True,
        choose=rule,
        drafter=None,
        **changes,
    ):
        changes |= {} if drafter is None else {"speculation": "ngram"}
        plan = scripted_plan(num_blocks, block_size, **changes)
        width = -(-plan.limits.max_model_len // block_size)
        executor = ScriptedExecutor(
            num_blocks, block_size, plan.limits.max_num_seqs, width, windows=plan.limits.windows, choose=choose,
            num_states=plan.limits.num_state_slots or 0,
        )  # fmt: skip
        self.seqs = []
        self._check = check
        ticks = itertools.count(step=100)
        super().__init__(
            plan, executor, emit=emit, trace_tokens=trace_tokens, clock_ns=lambda: next(ticks),
            make_builder=lambda scheduler: CheckedBuilder(scheduler.limits),
        )  # fmt: skip
        if drafter is not None:
            self.scheduler.drafting = EveryGuess(drafter)

    def add(self, token_ids, max_new_tokens=3, *, n=1, cache_salt=None, request_id=None, **options):
        params = options.pop("params", None) or SamplingParams(n=n, max_tokens=max_new_tokens, temperature=0)
        self.add_request(
            request_id or f"request-{self._num_added}", token_ids, params, cache_salt=cache_salt, **options
        )
        return self.seqs[-1]

    def _new_sequence(self, *args, **fields):
        seq = super()._new_sequence(*args, **fields)
        self.seqs.append(seq)
        return seq

    def step(self):
        try:
            return super().step()
        finally:
            if self._check:
                self.cache.check([*self.scheduler.running, *self.scheduler.contexts])

    def run(self, max_steps=100_000):
        while self.has_unfinished_requests():
            assert self.stats.num_steps < max_steps, "the scheduler makes no progress"
            self.step()
        return self
