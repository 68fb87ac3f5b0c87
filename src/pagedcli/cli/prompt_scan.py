"""Surveys a prompt file for `plan` and `profile-memory --prompts`."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcli.config import LoadedConfig
from pagedcli.distributed.partition import SharePlan
from pagedcli.errors import UsageError
from pagedcli.planning.prompt_survey import PromptSurvey

if TYPE_CHECKING:
    from pagedcli.batch.prompts import Refused
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.core.limits import Limits
    from pagedcli.models.spec import ModelSpec
    from pagedcli.simulation.sources import PromptRequests

PROMPT_KEYS = (
    *("sampling.max_tokens", "sampling.response_format", "run.system_prompt", "run.tools", "run.chat_template"),
    *("run.field", "run.id_field", "run.limit", "run.strict", "run.deduplicate"),
)
MAX_LISTED = 1000  # bad rows kept with their line and message; all are counted


@dataclass(slots=True)
class PromptScan:
    """One pass over a prompt file."""

    spec: "ModelSpec | None"  # None: a tokenizer's folder without config.json
    max_model_len: int | None  # tokens
    plan: PromptSurvey
    tokenizer: "Tokenizer"
    num_rows: int = 0
    num_copied: int = 0  # of them: left out, because they have the answers of an earlier one (--deduplicate)
    bad_rows: list[dict[str, Any]] = field(default_factory=list)  # line, id, code, message; the first ones
    bad_codes: Counter[str] = field(default_factory=Counter)
    ignored: dict[str, int] = field(default_factory=dict)  # field without effect -> lines

    @property
    def num_bad(self) -> int:
        return self.bad_codes.total()

    @property
    def num_valid(self) -> int:
        return self.num_rows - self.num_bad

    def refuse(self, row: "Refused") -> None:
        head, error = row.head, row.error
        self.bad_codes[error.code] += 1
        if len(self.bad_rows) < MAX_LISTED:
            what = {"code": error.code, "message": error.message}
            self.bad_rows.append({"line": head.line_number, "id": head.id, **what})


def prompt_model(loaded: LoadedConfig, tokenizer: Path | None) -> "tuple[Path, ModelSpec | None]":
    """The tokenizer's folder and its model; None for a folder with only a tokenizer."""
    from pagedcli.models.gguf.header import is_gguf
    from pagedcli.models.hub import check_files
    from pagedcli.models.reading import read_spec
    from pagedcli.planning.decide import model_folder

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
    spec: "ModelSpec | None",
    *,
    shares: SharePlan | None = None,
    limits: "Limits | None" = None,
    requests: "PromptRequests | None" = None,
) -> PromptScan:
    """Survey the prompts of a file, and count the rows that a run would refuse.

    `limits`: those of the engine, if its pool is known. Rows that do not fit into it are invalid, but part of the plan.
    Changes: adds every good row to `shares` and `requests`. Raises: PagedcliError.
    """
    from pagedcli.batch.grammar import Grammars
    from pagedcli.batch.prompts import Refused, check_response_format, limits_without_pool, open_prompts

    engine = loaded.config.engine
    check_response_format(loaded.config.sampling)
    survey = PromptSurvey(shares_prompts=engine.enable_prefix_caching)
    if limits is not None:
        survey.windows, survey.chunk_size = limits.windows, limits.chunk_size
    without_pool = limits_without_pool(engine, spec)
    max_model_len = None if spec is None else without_pool.max_model_len
    prompts = open_prompts(loaded, input_name, folder, limits or without_pool)
    scan = PromptScan(spec, max_model_len, survey, prompts.tokenizer)
    grammars = None
    if spec is not None:  # a run also refuses grammars that do not compile
        grammars = Grammars(prompts.tokenizer, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
    for found in prompts.admitted(grammars):
        if isinstance(found, Refused):
            scan.refuse(found)
            continue
        row, num_new_tokens = found
        if requests is not None:
            requests.add(row, num_new_tokens)
        for prompt, num_new in zip(row.prompts, num_new_tokens, strict=True):
            params = prompt.params
            num_new = 0 if max_model_len is None and params.max_tokens is None else num_new  # 0: unknown
            scan.plan.add(
                row.line.number,
                prompt.token_ids,
                num_new,
                num_seqs=params.num_sequences,
                is_beam_search=params.beam_width is not None,
                cache_salt=row.cache_salt,
            )
            if shares is not None:
                shares.add(prompt.token_ids, num_new * params.num_sequences, row.cache_salt)
    scan.num_rows, scan.num_copied, scan.ignored = prompts.num_rows, prompts.num_copied, prompts.ignored
    return scan
