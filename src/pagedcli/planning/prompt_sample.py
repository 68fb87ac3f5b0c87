"""Some prompts of a file or a run, drawn by hash, for answers.divergence."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

MOST_ROWS, MOST_TOKENS = 20_000, 2**22  # looked at without --all
MOST_TOKENS_OF_ALL = 2**26  # limit with that flag


@dataclass(frozen=True, slots=True)
class SaltedPrompt:
    """The tokens of a prompt; only prompts of the same salt share blocks."""

    token_ids: Sequence[int]
    salt: str | None = None


@dataclass(slots=True)
class PromptSample:
    """At most `most_rows` prompts of a file, drawn by hash, in their order."""

    most_rows: float = MOST_ROWS
    most_tokens: float = MOST_TOKENS
    num_seen: int = 0
    _kept: list[tuple[int, int, SaltedPrompt]] = field(default_factory=list)  # a heap: the largest hash first
    _num_tokens: int = 0

    @classmethod
    def of(cls, prompts: "Iterable[tuple[Sequence[int], str | None]]") -> "PromptSample":
        """A sample of these prompts, each with its salt."""
        sample = cls()
        for token_ids, salt in prompts:
            sample.add(token_ids, salt)
        return sample

    def add(self, token_ids: Sequence[int], salt: str | None = None) -> None:
        number = self.num_seen
        self.num_seen += 1
        digest = xxhash.xxh64_intdigest(number.to_bytes(8, "little"))
        if self.num_seen > len(self._kept) + 1 and digest >= -self._kept[0][0]:
            return  # some have gone, and this would be the next
        heapq.heappush(self._kept, (-digest, number, SaltedPrompt(token_ids, salt)))
        self._num_tokens += len(token_ids)
        while len(self._kept) > self.most_rows or (self._num_tokens > self.most_tokens and len(self._kept) > 1):
            self._num_tokens -= len(heapq.heappop(self._kept)[2].token_ids)

    @property
    def prompts(self) -> list[SaltedPrompt]:
        return [prompt for _, _, prompt in sorted(self._kept, key=lambda each: each[1])]
