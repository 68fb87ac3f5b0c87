"""The core alone, without a model and without torch: a simulation, a block manager, events.

A `Simulation` is the real engine core over an executor that keeps token ids in place of K and V. Which token follows is
a function of all tokens before it, as the block table says; a block that was never written, or that is another's, gives
other tokens. The pool is checked after each step.

    sim = Simulation(num_blocks=6, block_size=2)  # further keywords: fields of Limits and Plan
    first = sim.add([1, 2, 3, 4, 5], max_new_tokens=3)  # the sequence; n, cache_salt, params: of the request
    sim.step()
    sim.run()  # until nothing is left
    assert len(first.token_ids) == 5 + 3
    assert sim.stats.num_steps == 3
    assert sim.executor.steps[0] == [5]  # new tokens of each sequence in the first step

Its events, and what follows from them:

    events = []
    sim = Simulation(6, emit=events.append, trace_tokens=True)
    sim.add([1, 2, 3])
    sim.run()
    check_events(events)  # every law holds
    check_events(simulated(num_blocks=14, fails=0.1))  # a run in which everything happens

With guesses that are wrong as often as asked, and with a step that fails:

    sim = Simulation(20, drafter=Oracle({("request-0", 0): [1, 2, 3]}, wrong=0.3))
    sim.executor.fail_launch = True  # or fail_read

A block manager without an engine, whose sequences are what it reads of one:

    manager = BlockManager(num_blocks=6, block_size=2)
    seq = make_seq([1, 2, 3])
    assert prefill(manager, seq) == 0  # tokens found in the cache
    assert len(seq.block_table) == 2

`PoolMachine` does that in any order; a subclass changes the windows, the policy or the hash.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.cache import make_cache
from pagedcli.core.drafts import Drafting
from pagedcli.core.engine_core import EngineCore
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.prefixes import hash_block
from pagedcli.core.scoring import TokenScore
from pagedcli.core.sequence import Draft, TokenLogprobs
from pagedcli.core.sequence import Sequence as Seq
from pagedcli.core.step_input import StepBuilder, StepTokens, TargetScores
from pagedcli.events import CacheGroup, Event
from pagedcli.sampling_params import SamplingParams
from pagedcli.simulation.run import VOCAB_SIZE
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceWriter


class Oracle:
    """Guesses what each sample generates, with this share of wrong tokens. With `ragged` guesses have all lengths."""

    def __init__(
        self,
        answers: Mapping[tuple[str, int], Sequence[int]],  # (request_id, sample_index) -> its tokens
        *,
        wrong: float = 0.0,
        ragged: bool = False,
        seed: int = 0,
    ) -> None:
        self._answers = answers
        self._wrong, self._ragged, self._random = wrong, ragged, random.Random(seed)

    def draft(self, seq: Seq, most: int) -> Draft | None:
        most = self._random.randint(0, most) if self._ragged else most
        known = self._answers.get((seq.request_id, seq.sample_index), ())[seq.num_output_tokens :][:most]
        tokens = [token ^ 1 if self._random.random() < self._wrong else token for token in known]
        return Draft(tokens, "answers") if tokens else None

    def checked(self, seq: Seq, num_accepted: int) -> None:
        pass

    def ended(self, seq: Seq) -> None:
        pass


class EveryGuess(Drafting):
    """Guesses in every step, however many sequences decode and however many guesses were wrong."""

    def is_due(self, step: int, num_decodes: int) -> bool:
        return True


def stop_at(tokens):
    """Makes stop checkers of a 'stop string' of token ids."""

    def make():
        seen = []

        def check(token_id):
            seen.append(token_id)
            return "stop" if seen[-len(tokens) :] == tokens else None

        return check

    return make


def next_token(context, draw):
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
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        width,
        *,
        windows=(None,),
        choose: Callable = next_token,
        num_states=0,
    ):
        self.states = [None] * num_states  # of each slot: the tokens that its state has seen
        self.block_size = block_size
        self.windows = windows  # of each group of layers: a token depends on what each of them sees
        self.cache = [None] * (num_blocks * block_size)
        self.width = width * len(windows)
        self.tables = [0] * (max_num_seqs * self.width)
        self.last_tokens = []
        self.choose, self.score = choose, scored
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
            scores = [self.score(context, token) for context, token in given[: piece.num_tokens]]
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
        choose=next_token,
        drafter=None,
        make_cache=make_cache,
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
            make_builder=lambda scheduler: CheckedBuilder(scheduler.limits), make_cache=make_cache,
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

    def check_nothing_is_left(self):
        """Of requests that have ended."""
        assert not self._forks._parents | self._forks._contexts
        assert not self._forks._computed
        assert (self.scheduler.num_grouped, self.scheduler._num_scoring) == (0, 0)
        assert sorted(self.scheduler._free_rows) == list(range(self.limits.max_num_seqs))

    def run(self, max_steps=100_000):
        while self.has_unfinished_requests():
            assert self.stats.num_steps < max_steps, "the scheduler makes no progress"
            self.step()
        return self


def finish(engine):
    """Step any engine until nothing is left. Returns its outputs by request_id; the pool is checked after each step."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.cache.check([*engine.scheduler.running, *engine.scheduler.contexts])
    assert engine.block_manager.num_free_blocks == engine.limits.num_blocks
    return outputs


def simulated(*, num_blocks=14, num_requests=24, seed=5, caching=True, fails=0.0, **limits) -> list[Event]:
    """A run in which everything happens: hits, forks, copies, chunks, preemptions, evictions, waiting, salts. `fails`:
    share of steps whose launch or read raises."""
    rng = random.Random(seed)
    events: list[Event] = []
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 7, "chunked_prefill_size": 5, **limits}
    sim = Simulation(num_blocks, 2, emit=events.append, trace_tokens=True, enable_prefix_caching=caching, **limits)
    run_at_random(sim, rng, num_requests, fails)
    return events


def run_at_random(sim, rng, num_requests, fails=0.0):
    """Run requests of drawn prompts; see simulated."""
    for index in range(num_requests):
        prompt = [9] * rng.randrange(8) + [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        sim.add(prompt, rng.randrange(2, 9), n=1 + (index % 5 == 0), cache_salt="a" if index % 7 == 0 else None)
    while sim.has_unfinished_requests():
        sim.executor.fail_launch, sim.executor.fail_read = rng.random() < fails / 2, rng.random() < fails / 2
        with suppress(RuntimeError):
            sim.step()


def write(path, events):
    with TraceWriter(path) as writer:
        for event in events:
            writer(event)
    return path


class EventList:
    """Events in memory as a source."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.notes: list[str] = []
        self._events = events
        self._number = 0

    def __iter__(self) -> Iterator[Event]:
        for number, event in enumerate(self._events, 1):
            self._number = number
            yield event

    @property
    def place(self) -> str:
        return f"event {self._number}"


def check_events(events):
    """check_trace for events in memory; errors name the event's number, from 1."""
    return check_trace(EventList(events))


SIZE = 2


def plan_for(workload, **limits):
    """The plan of a simulated engine with these Limits, which serves every request that the pool can hold."""
    return Plan(limits=Limits(max_model_len=workload.longest, vocab_size=VOCAB_SIZE, **limits), model="simulation")


def make_seq(token_ids, seq_id=0, cache_salt=None):
    return SimpleNamespace(
        seq_id=seq_id,
        token_ids=list(token_ids),
        block_table=[],
        prefixes=[],
        cache_salt=cache_salt,
        num_computed_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        num_context_tokens=None,
    )


def prefill(manager, seq):
    """Allocate the whole sequence and count it as computed."""
    hit = manager.lookup(seq)
    manager.allocate(seq, hit, len(seq.token_ids) - manager.num_computed_after(seq, hit))
    cached = seq.num_computed_tokens
    seq.num_computed_tokens = len(seq.token_ids)
    return cached


class PoolMachine(RuleBasedStateMachine):
    """Any order of admissions, appends, forks and releases on a pool of 7 blocks of 2 tokens over 3 token values."""

    seqs = Bundle("seqs")
    hash_function = staticmethod(hash_block)
    eviction = "lru"
    windows = (None,)
    num_blocks = 7

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(
            self.num_blocks, SIZE, windows=self.windows, hash_function=self.hash_function, eviction=self.eviction
        )
        self.live = []
        self.next_id = 0

    def new_seq(self, tokens):
        self.next_id += 1
        return make_seq(tokens, self.next_id)

    @rule(target=seqs, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8), chunk=st.integers(1, 8))
    def admit(self, tokens, chunk):
        seq = self.new_seq(tokens)
        hit = self.manager.lookup(seq)
        new = min(chunk, len(tokens) - self.manager.num_computed_after(seq, hit))
        free = self.manager.num_free_blocks
        if self.manager.can_allocate(seq, hit, new):
            expected = free - hit.num_free - self.manager.num_new_blocks(seq, hit, new)
            self.manager.allocate(seq, hit, new)
            assert self.manager.num_free_blocks == expected
            seq.num_computed_tokens += new
            self.live.append(seq)
        return seq

    @rule(seq=seqs, token=st.integers(0, 2), chunk=st.integers(1, 4))
    def grow(self, seq, token, chunk):
        if not seq.block_table:
            return
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.token_ids.append(token)
        new = min(chunk, len(seq.token_ids) - seq.num_computed_tokens)
        self.manager.release_unseen(seq)
        if self.manager.can_append(seq, new):
            needed, free = self.manager.num_append_blocks(seq, new), self.manager.num_free_blocks
            copies = self.manager.may_append(seq, new)
            # a copy frees nothing here: the shared block has another owner
            assert self.manager.num_free_blocks == free - needed
            assert len(copies) in (0, len(self.windows))
            seq.num_computed_tokens += new

    @rule(seq=seqs, guesses=st.lists(st.integers(0, 2), min_size=1, max_size=6), data=st.data())
    def check_draft(self, seq, guesses, data):
        """A step computes the last token and guesses after it, of which the first ones are right."""
        if not seq.block_table or seq.num_computed_tokens < len(seq.token_ids):
            return
        seq.token_ids.append(0)
        self.manager.release_unseen(seq)
        if not self.manager.can_append(seq):
            seq.token_ids.pop()
            return
        self.manager.may_append(seq)
        num_cached = sum(block.prefix is not None for block in self.manager.blocks)
        room = self.manager.make_room_for_draft(seq, len(guesses))
        assert sum(block.prefix is not None for block in self.manager.blocks) == num_cached  # nothing is evicted
        seq.num_computed_tokens += 1
        num_right = data.draw(st.integers(0, room))
        seq.token_ids += guesses[:num_right]
        self.manager.keep_accepted(seq, room, num_right, None, num_again=0)
        assert seq.num_computed_tokens == len(seq.token_ids)
        assert len(seq.block_table) == self.manager.tables.num_entries(seq.num_computed_tokens)

    @rule(seq=seqs)
    def reuse_more(self, seq):
        if seq.block_table and seq.num_computed_tokens < len(seq.token_ids):
            before = seq.num_computed_tokens
            assert self.manager.reuse_more(seq) == seq.num_computed_tokens - before
            assert seq.num_computed_tokens < len(seq.token_ids)

    @precondition(lambda self: self.live)
    @rule(target=seqs, parent=seqs)
    def fork(self, parent):
        child = self.new_seq(parent.token_ids)
        if parent.block_table and parent.num_computed_tokens == len(parent.token_ids):
            self.manager.fork(parent, child)
            self.live.append(child)
        return child

    @rule(seq=consumes(seqs))
    def release(self, seq):
        self.manager.deallocate(seq)
        self.live = [other for other in self.live if other is not seq]

    @invariant()
    def holds(self):
        self.manager.check(self.live)

    @invariant()
    def content_in_the_pool_is_found(self):
        """Or, where hashes collide, other content of the same hash."""
        for block in self.manager.blocks:
            if block.prefix is not None:
                found = self.manager.blocks[self.manager.hash_to_block_id[block.hash]]
                assert found.prefix.same_as(block.prefix) or self.hash_function is not hash_block


class CollidingPoolMachine(PoolMachine):
    hash_function = staticmethod(lambda tokens, prefix: sum(tokens) % 2)
