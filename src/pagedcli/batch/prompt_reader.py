"""Reads a prompt file without an engine: tokenized, and checked as a run would. Used by commands that plan a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedcli.batch.columns import Columns
from pagedcli.batch.grammar import Grammars
from pagedcli.batch.intake import Intake, Prepared, PreparedPrompt, Refused
from pagedcli.batch.job import batch_options, open_tokenizer
from pagedcli.batch.sources import check_kept, open_source
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.core.admission import admit
from pagedcli.core.limits import NO_LIMIT, Limits
from pagedcli.errors import RequestError
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.decide import resolve_max_model_len


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt that a run would serve."""

    line_number: int
    token_ids: list[int]
    num_new_tokens: int  # that each sample may generate; 0: unknown
    num_seqs: int  # samples, or beams
    is_beam_search: bool
    cache_salt: str | None


class PromptReader:
    """The prompts of a file, and the lines that a run would refuse, in their order.

    A line that is refused only because it does not fit into the pool is followed by its prompts.
    Raises: PagedcliError if the file cannot be read.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        input_name: str,
        folder: Path,
        spec: ModelSpec | None,
        limits: Limits | None = None,
    ) -> None:
        """`spec` is None for a tokenizer without a model, `limits` for an engine whose pool is unknown."""
        config = loaded.config
        columns = Columns.of(config.run)
        self.num_rows = 0  # so far
        self.max_model_len = None if spec is None else resolve_max_model_len(config.engine, spec)  # tokens
        self._limits = limits or limits_without_pool(config.engine, spec)
        self._lines = open_source(input_name, columns)
        check_kept(self._lines, columns)
        self._limit = config.run.limit
        tokenizer = open_tokenizer(config, folder)
        self._grammars = (
            Grammars(tokenizer, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size) if spec else None
        )
        self._intake = Intake(tokenizer, batch_options(loaded, columns), self._limits)

    @property
    def ignored(self) -> dict[str, int]:
        """Fields without effect -> lines."""
        return dict(self._intake.parser.ignored)

    def __iter__(self) -> Iterator[PlannedPrompt | Refused]:
        for line in self._lines:
            if self._limit is not None and line.index >= self._limit:
                return
            self.num_rows += 1
            taken = self._intake.prepare(line)
            assert taken is not None, "no row is done already"
            if isinstance(taken, Refused):
                yield taken
                continue
            try:
                num_new = [self._admit(prompt) for prompt in taken.prompts]
            except RequestError as error:
                yield Refused(taken.head, error)
                if error.code != "kv_cache_exceeded":
                    continue
                num_new = [prompt.params.max_tokens or 1 for prompt in taken.prompts]  # for a larger pool
            yield from self._planned(taken, num_new)

    def _admit(self, prompt: PreparedPrompt) -> int:
        """How many tokens the prompt may generate. Raises: RequestError if a run would refuse it."""
        if self._grammars is not None:
            self._grammars.guides(prompt.params)  # a run also refuses grammars that do not compile
        return admit(self._limits, prompt.token_ids, prompt.params)

    def _planned(self, taken: Prepared, num_new_tokens: list[int]) -> Iterator[PlannedPrompt]:
        for prompt, num_new in zip(taken.prompts, num_new_tokens, strict=True):
            known = self.max_model_len is not None or prompt.params.max_tokens is not None
            yield PlannedPrompt(
                taken.head.line_number,
                prompt.token_ids,
                num_new if known else 0,
                prompt.params.num_sequences,
                prompt.params.beam_width is not None,
                taken.cache_salt,
            )


def limits_without_pool(engine: EngineConfig, spec: ModelSpec | None) -> Limits:
    """What a request must fit into where the pool is not known; nor the model's length if `spec` is None."""
    return Limits.of(
        engine,
        max_model_len=NO_LIMIT if spec is None else resolve_max_model_len(engine, spec),
        max_num_batched_tokens=engine.max_num_batched_tokens or NO_LIMIT,
        vocab_size=None if spec is None else spec.vocab_size,
    )
