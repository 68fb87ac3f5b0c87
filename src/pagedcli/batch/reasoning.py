"""Which generated tokens are reasoning and which the answer, where a chat format marks it.

The format is that of the tokenizer's tokens, whatever the model is called. Used by batch.rows, for answers in chats.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from itertools import takewhile

from pagedcli.batch.tokenizer import Tokenizer

TokenSpan = tuple[int, int]  # generated tokens: the first, and the one after the last


@dataclass(frozen=True, slots=True)
class Spans:
    """The parts of an output. Marks and headers belong to none."""

    reasoning: list[TokenSpan] = field(default_factory=list)
    answer: list[TokenSpan] = field(default_factory=list)
    title: str = ""  # optional first line of the reasoning
    padding: str = ""  # characters around the marks to strip with them

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(end - start for start, end in self.reasoning)

    def texts(self, text: str, length: Callable[[int], int]) -> tuple[str, str]:
        """Reasoning and answer. `length`: characters of the text of leading tokens; a stop string may have cut it."""

        def joined(spans: list[TokenSpan]) -> str:
            return "\n".join(text[length(start) : length(end)] for start, end in spans)

        reasoning = joined(self.reasoning).lstrip(self.padding).removeprefix(self.title).strip(self.padding)
        return reasoning, joined(self.answer).lstrip(self.padding)


# how reasoning begins and ends, and its title
_MARKS = (
    ("<think>", "</think>", ""),  # Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5 and many others
    ("[THINK]", "[/THINK]", ""),  # Magistral, Ministral 3 Reasoning
    ("<seed:think>", "</seed:think>", ""),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),  # Command A Reasoning
    ("<|channel>", "<channel|>", "thought\n"),  # Gemma 4
)
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_HARMONY_ENDS = ("<|return|>", "<|call|>")


def find_format(tokenizer: Tokenizer) -> "ReasoningFormat | None":
    """The format whose marks are tokens; None: there is none."""
    harmony = [each for token in _HARMONY if (each := tokenizer.token_id(token)) is not None]
    if len(harmony) == len(_HARMONY):
        start, channel, message, end = harmony
        others = frozenset(tokenizer.token_id(token) for token in _HARMONY_ENDS)
        return Channels(tokenizer, start, channel, message, others | {start, end})
    for opening, closing, title in _MARKS:
        first, last = tokenizer.token_id(opening), tokenizer.token_id(closing)
        if first is not None and last is not None:
            return Brackets(tokenizer, first, last, title)
    return None


@dataclass(frozen=True, slots=True)
class Brackets:
    """Reasoning between two marks, before the answer. The chat template may have written the first one."""

    tokenizer: Tokenizer
    start: int
    end: int
    title: str

    def spans(self, prompt_token_ids: Ids[int], output_token_ids: Ids[int], call: int | None = None) -> Spans | None:
        """The parts of an output; None: it has no marks. `call`: the token of a call, which ends an open reasoning."""
        ids, first = list(output_token_ids), 0
        if self._first(reversed(prompt_token_ids)) != self.start:
            if self._first(ids) == self.start:
                first = ids.index(self.start) + 1
            elif next((each for each in ids if each in (self.start, self.end)), None) != self.end:
                return None
        last = len(ids)
        place = next((i for i in range(first, last) if ids[i] == self.end), last)
        if place < last:
            answer = [(place + 1, last)]
        else:
            place = next((i for i in range(first, last) if ids[i] == call), last)
            answer = [(place, last)] if place < last else []
        return Spans([(first, place)], answer, self.title, padding="\n")

    def _first(self, token_ids: Iterable[int]) -> int | None:
        """The first token that is not blank."""
        return next((each for each in token_ids if self.tokenizer.token_text(each).strip()), None)


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """A message of an output; its header may have begun in the prompt."""

    header: list[int]  # tokens before the body: role, recipient, channel
    body: TokenSpan
    recipient: str | None  # the tool that it calls; None: it is for the user, or for the model itself


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages with a channel each: harmony. The prompt ends within the first one, mostly within its header."""

    tokenizer: Tokenizer
    start: int
    channel: int
    message: int
    ends: frozenset[int | None]

    def spans(self, prompt_token_ids: Ids[int], output_token_ids: Ids[int], call: int | None = None) -> Spans | None:
        """See Brackets. A call is part of the answer, with its header, whatever its channel."""
        begun = self._begun(prompt_token_ids)
        if self.channel not in begun and self.channel not in output_token_ids:
            return None
        spans = Spans()
        for message in self.messages(prompt_token_ids, output_token_ids):
            start, end = message.body
            is_named = self.channel in message.header
            header = message.header[message.header.index(self.channel) + 1 :] if is_named else []
            is_call = message.recipient is not None
            is_reasoning = not is_call and self.tokenizer.decode(header).strip().startswith("analysis")
            if is_call:
                start = max(0, start - 1 - len(header))
            (spans.reasoning if is_reasoning else spans.answer).append((start, end))
        return spans

    def messages(self, prompt_token_ids: Ids[int], output_token_ids: Ids[int]) -> Iterator[ChannelMessage]:
        """The messages of an output that have a body."""
        begun = self._begun(prompt_token_ids)
        ids, shift, first = [*begun, *output_token_ids], len(begun), 0
        while self.message in ids[first:]:
            body = ids.index(self.message, first) + 1
            end = next((i for i in range(body, len(ids)) if ids[i] in self.ends), len(ids))
            header = ids[first : body - 1]
            found = re.search(
                r"\bto=(?!assistant\b)([^\s<]+)", self.tokenizer.decode(header, skip_special_tokens=False)
            )
            yield ChannelMessage(header, (max(0, body - shift), max(0, end - shift)), found and found[1])
            first = end + 1

    def _begun(self, prompt_token_ids: Ids[int]) -> list[int]:
        """The tokens of the message in which the prompt ends."""
        return list(takewhile(lambda each: each != self.start, reversed(prompt_token_ids)))[::-1]


ReasoningFormat = Brackets | Channels  # how a chat format marks reasoning
