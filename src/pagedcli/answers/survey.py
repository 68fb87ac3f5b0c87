"""What a prompt file is, found in one pass, or about what it is, by a sample of a long one. For `plan` and
`profile-memory --prompts`.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import hypot
from pathlib import Path
from typing import Any

from pagedcli import planning
from pagedcli.answers.time import Forecast, time
from pagedcli.batch.grammar import Grammars
from pagedcli.batch.line_sample import About, LineSample
from pagedcli.batch.lines import Line
from pagedcli.batch.prompts import check_defaults, limits_without_pool, open_prompts
from pagedcli.batch.requests import BatchRow
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import LoadedConfig
from pagedcli.core.limits import Limits
from pagedcli.errors import RequestError, UsageError
from pagedcli.models.gguf.header import is_gguf
from pagedcli.models.hub import check_files, model_folder
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.planning.prompt_survey import PromptSurvey
from pagedcli.planning.step_time import load_step_time
from pagedcli.simulation.requests import work_of
from pagedcli.simulation.sources import PromptRequests

MAX_LISTED = 1000  # bad rows kept with their line and message; all are counted


@dataclass(slots=True)
class PromptScan:
    """One pass over a prompt file."""

    max_model_len: int | None  # tokens; None: a tokenizer's folder without config.json
    plan: PromptSurvey
    tokenizer: Tokenizer
    drawn: PromptSample = field(default_factory=PromptSample)  # sample of the prompts, to find where they diverge
    num_rows: int = 0
    num_deduplicated: int = 0  # rows left out because an equal one answers them (--deduplicate)
    bad_rows: list[dict[str, Any]] = field(default_factory=list)  # line, id, code, message; the first ones
    bad_codes: Counter[str] = field(default_factory=Counter)
    ignored: dict[str, int] = field(default_factory=dict)  # field without effect -> lines
    first_ignored: dict[str, int] = field(default_factory=dict)  # field without effect -> its first line
    scores: Counter[str] = field(default_factory=Counter)  # counts of scored rows and tokens: see add_scored

    def add_scored(self, num_context: int, num_known: int, continuations: list[list[int]], block_size: int) -> None:
        """Count a prompt with continuations, whose context begins with num_known tokens of earlier ones: the tokens
        that are computed if each continuation is alone with its context, if each context is computed once, and if an
        unlimited cache has what contexts share."""
        own = sum(len(token_ids) - 1 for token_ids in continuations)
        hit = min(num_known, num_context - 1) // block_size * block_size
        self.scores += Counter(
            num_continuations=len(continuations),
            tokens_alone=num_context * len(continuations) + own,
            tokens_by_row=num_context + own,
            tokens_shared=num_context - hit + own,
        )

    @property
    def num_bad(self) -> int:
        return self.bad_codes.total()

    @property
    def num_valid(self) -> int:
        return self.num_rows - self.num_bad

    def refuse(self, row: BatchRow, error: RequestError) -> None:
        self.bad_codes[error.code] += 1
        if len(self.bad_rows) < MAX_LISTED:
            what = {"code": error.code, "message": error.message}
            self.bad_rows.append({"line": row.line.number, "id": row.id, **what})


def prompt_model(loaded: LoadedConfig, tokenizer: Path | None) -> tuple[Path, ModelSpec | None]:
    """The tokenizer's folder and its model; None for a folder with only a tokenizer."""
    engine = loaded.config.engine
    if tokenizer is not None and not tokenizer.exists():
        raise UsageError(f"--tokenizer: there is no folder {tokenizer}", hint="name a folder with a tokenizer.json")
    if tokenizer is not None and tokenizer.is_dir():
        check_files(tokenizer)
    folder = tokenizer if tokenizer is not None else model_folder(engine, weights=False)
    has_model = is_gguf(folder) or (folder / "config.json").is_file()
    return folder, read_spec(folder, trust_remote_code=engine.trust_remote_code) if has_model else None


def scan_prompts(
    loaded: LoadedConfig,
    input_name: str,
    folder: Path,
    spec: ModelSpec | None,
    *,
    limits: Limits | None = None,
    requests: PromptRequests | None = None,
    lines: Iterable[Line] | None = None,
    tokenizer: Tokenizer | None = None,
    drawn: PromptSample | None = None,
    observe: Callable[[Line], None] = lambda line: None,
) -> PromptScan:
    """Survey the prompts of a file, or of only these of its lines, and count the rows that a run would refuse.

    `limits`: those of the engine, if its pool is known. Rows that do not fit into it are invalid, but part of the plan.
    `observe` receives each line as it is read.
    Changes: adds every good row to `requests` and `drawn`. Raises: PagedcliError.
    """
    engine = loaded.config.engine
    check_defaults(loaded.config.sampling)
    without_pool = limits_without_pool(engine, spec)
    survey = PromptSurvey(1 if limits is None else len(limits.windows))
    max_model_len = None if spec is None else without_pool.max_model_len
    prompts = open_prompts(
        loaded, input_name, folder, limits or without_pool, lines=lines, tokenizer=tokenizer, observe=observe
    )
    scan = PromptScan(max_model_len, survey, prompts.tokenizer, drawn or PromptSample())
    grammars = None
    if spec is not None:  # a run also refuses grammars that do not compile
        grammars = Grammars(prompts.tokenizer, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
    for row, num_new_tokens in prompts.admitted(grammars):
        if isinstance(num_new_tokens, RequestError):
            scan.refuse(row, num_new_tokens)
            continue
        if requests is not None:
            requests.add(row, num_new_tokens)
        for prompt, num_new in zip(row.prompts, num_new_tokens, strict=True):
            params, token_ids = prompt.params, array("q", prompt.computed_ids)
            num_new = 0 if max_model_len is None and params.max_tokens is None else num_new  # 0: unknown
            num_known = scan.plan.add(
                row.line.number,
                token_ids,
                num_new,
                num_seqs=params.num_sequences,
                is_beam_search=params.beam_width is not None,
                cache_salt=row.cache_salt,
                num_context=None if prompt.scored is None else len(prompt.token_ids),
            )
            scan.drawn.add(token_ids, row.cache_salt)
            if prompt.scored is not None:
                num_known *= engine.enable_prefix_caching
                scan.scores["num_rows"] += prompt is row.prompts[0]
                scan.add_scored(len(prompt.token_ids), num_known, prompt.scored.continuations, engine.block_size)
    scan.num_rows, scan.num_deduplicated = prompts.num_rows, prompts.num_deduplicated
    scan.ignored, scan.first_ignored = prompts.ignored, prompts.first_ignored
    return scan


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What a sample says of its file."""

    scan: PromptScan  # the scan of the sample
    rows: About
    prompt_tokens: About
    run: Forecast | None = None  # its hit rate is a lower bound: more rows have more beginnings in common


def first_answer(
    loaded: LoadedConfig,
    sample: LineSample,
    folder: Path,
    spec: ModelSpec | None,
    decision: "planning.decision.Decision | None",
    requests: PromptRequests,
) -> FirstAnswer | None:
    """What the sample says. `requests` is empty, and receives those of the sample; `decision`: the engine, if a block
    fits. None: no row of the sample is valid."""
    limits = None if decision is None else decision.expected_plan.limits
    scan = scan_prompts(loaded, "", folder, spec, limits=limits, requests=requests, lines=sample)
    if not requests.workload.requests:
        return None
    prompt_tokens, work = ([0.0] * scan.num_rows for _ in range(2))
    for request in requests.workload.requests:
        row = int(request.request_id.partition("/")[0])
        prompt_tokens[row] += request.num_prompt_tokens
        work[row] += work_of(request)
    rows, all_tokens = sample.about([1.0] * scan.num_rows), sample.about(prompt_tokens)
    if decision is None:
        return FirstAnswer(scan, rows, all_tokens)
    step_time, all_work, run = load_step_time(decision.time_key), sample.about(work), loaded.config.run
    found = time(
        requests.workload,
        decision.expected_plan,
        step_time,
        reorder=run.reorder,
        read_ahead=run.read_ahead,
        left_out=all_work.value - sum(work),
    )
    by_sample = (all_work.high - all_work.value) / all_work.value
    return FirstAnswer(scan, rows, all_tokens, replace(found, sample_error=hypot(found.sample_error, by_sample)))
