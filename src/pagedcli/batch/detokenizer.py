"""Incremental detokenization and the search for stop strings. Used for requests that have any.

The pieces equal the text of decoding all tokens at once (tested).
"""

from collections.abc import Sequence as Ids

from pagedcli.batch.tokenizer import Tokenizer, text_after
from pagedcli.sampling_params import SamplingParams


class IncrementalDetokenizer:
    """Returns the text that each new token adds. Bytes of an incomplete character are held back."""

    __slots__ = ("_decoded_from", "_decoded_text", "_skip_special_tokens", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Ids[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        tail, text = tokenizer.prompt_tail(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        # _token_ids begins with tokens whose text was already returned (_decoded_text): this context decides,
        # for example, whether the next word begins with a space
        self._token_ids = tail
        self._decoded_text = text
        self._decoded_from = len(tail)

    def add(self, token_id: int) -> str:
        """The text that this token adds; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        new_text = text_after(self._decoded_text, text)
        if not new_text or new_text.endswith("\ufffd"):
            return ""
        self._token_ids = self._token_ids[self._decoded_from :]
        self._decoded_from = len(self._token_ids)
        self._decoded_text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return new_text


class StopStringChecker:
    """Receives each token of one sample and finds stop strings in the text, even across token boundaries.

    A stop string counts only if it ends after `min_tokens` tokens. Then `stopped` is True and `text` is cut before
    it (after it with include_stop_str_in_output).
    """

    __slots__ = ("_detokenizer", "_include", "_min_tokens", "_num_tokens", "_stops", "stopped", "text")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Ids[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.text = ""
        self.stopped = False

    def __call__(self, token_id: int) -> str | None:
        """The stop string that this token completed, if any."""
        self._num_tokens += 1
        new_text = self._detokenizer.add(token_id)
        num_before = len(self.text)
        self.text += new_text
        if not new_text or self._num_tokens <= self._min_tokens:
            return None
        found = [(start, stop) for stop in self._stops if (start := self._find(stop, num_before)) is not None]
        if not found:
            return None
        start, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        self.text = self.text[: start + len(stop)] if self._include else self.text[:start]
        self.stopped = True
        return stop

    def _find(self, stop: str, num_before: int) -> int | None:
        """Index of `stop` in the text, if it ends after the first `num_before` characters."""
        start = self.text.find(stop, max(0, num_before - len(stop) + 1))
        return start if start >= 0 else None


class StopCheckers:
    """Makes the checkers of one request: the engine calls it once per sample."""

    __slots__ = ("_made", "_params", "_prompt_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Ids[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._made: list[StopStringChecker] = []  # in sample order

    def __call__(self) -> StopStringChecker:
        self._made.append(StopStringChecker(self._tokenizer, self._prompt_token_ids, self._params))
        return self._made[-1]

    def text(self, sample_index: int, output_token_ids: Ids[int]) -> str:
        """The text of a finished sample, cut at its stop string if it has one."""
        if self._made[sample_index].stopped:
            return self._made[sample_index].text
        return self._tokenizer.decode_output(
            self._prompt_token_ids, output_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )
