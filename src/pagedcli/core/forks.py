"""Further sequences of a request, which share the blocks of its first: samples after the prompt, beams at every step.

Used by EngineCore; needs no torch.
"""

from collections.abc import Callable, Mapping

from pagedcli.core.beams import BeamSearch
from pagedcli.core.outputs import Request
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.sequence import Sequence

NewSequence = Callable[..., Sequence]  # makes one, as Sequence() does, with the next seq_id


class Forks:
    """Forks sequences in the scheduler.

    Does not refer to the engine: a cycle would keep its KV cache until the garbage collector runs.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._parents: set[int] = set()  # seq_ids

    def expect(self, seq: Sequence) -> None:
        """Remember the first sample of a request if others start once its prompt is computed."""
        if seq.params.n > 1 and not seq.is_beam:
            self._parents.add(seq.seq_id)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._parents.discard(request.seqs[0].seq_id)

    def will_fork(self, seq: Sequence) -> bool:
        """Whether more samples of the sequence's request start once its prompt is computed."""
        return seq.seq_id in self._parents

    def fork_samples(
        self, requests: Mapping[str, Request], sampled: list[Sequence], new_sequence: NewSequence
    ) -> tuple[list[Sequence], list[int] | None]:
        """Fork the other samples of requests whose prompt this step computes; they share its logits.

        Returns all sequences that get a token, and the logits row of each (None: one row per sequence).
        """
        parents = [(row, seq) for row, seq in enumerate(sampled) if self.will_fork(seq)] if self._parents else []
        if not parents:
            return sampled, None
        rows, sampled = list(range(len(sampled))), list(sampled)
        for row, parent in parents:
            request = requests[parent.request_id]
            for _ in range(len(request.seqs), parent.params.n):
                child = _new_sample(request, new_sequence)
                if self._scheduler.fork(parent, child):
                    sampled.append(child)
                    rows.append(row)
            self.forget(request)
        return sampled, rows

    def advance_beams(self, request: Request, now_s: float, new_sequence: NewSequence) -> list[Sequence]:
        """Continue the beams of a request, which all have candidates, with the tokens that its search chooses.
        Returns them, best first, with a finish reason if the search has ended."""
        search = request.search = request.search or BeamSearch(request.seqs[0])
        continuations = search.advance()
        beams = []
        for continuation, beam in zip(continuations, search.places(continuations), strict=True):
            parent = continuation.parent
            if beam is None:
                beam = _new_sample(request, new_sequence)
                beam.first_token_s = parent.first_token_s
                request.num_unfinished += 1
                forked = self._scheduler.fork(parent, beam)
                assert forked, "a beam search starts only with room for all its beams"
            elif beam is not parent:
                self._scheduler.replace(beam, parent)
            beams.append(beam)
        search.continue_with(beams, continuations, now_s)
        return beams


def _new_sample(request: Request, new_sequence: NewSequence) -> Sequence:
    """A further sequence of a request, with its prompt alone."""
    first = request.seqs[0]
    child = new_sequence(
        first.request_id,
        first.token_ids[: first.num_prompt_tokens],
        first.params,
        **request.parts(),
        max_new_tokens=first.max_new_tokens,
        seed=first.seed,
        sample_index=len(request.seqs),
        eos_token_ids=first.eos_token_ids,
        cache_salt=first.cache_salt,
        arrived_s=first.arrived_s,
        row_id=first.row_id,
    )
    child.admitted_s = first.admitted_s
    request.seqs.append(child)
    return child
