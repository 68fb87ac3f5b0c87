"""A drafter that knows the answers, and is wrong as often as it is asked to be; and drafting whatever was right."""

import random
from collections.abc import Mapping, Sequence

from pagedcli.core.drafts import Drafting
from pagedcli.core.sequence import Draft
from pagedcli.core.sequence import Sequence as Seq


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
