"""Reads a prompt file for `plan` and `profile-memory --prompts`, validating and counting rows as a run would."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcli.config import LoadedConfig
from pagedcli.distributed.partition import SharePlan
from pagedcli.errors import RequestError
from pagedcli.inspection.prompt_survey import PromptSurvey

if TYPE_CHECKING:
    from pagedcli.batch.grammar import Grammars
    from pagedcli.batch.intake import PreparedPrompt, Refused
    from pagedcli.engine.admission import AdmissionLimits
    from pagedcli.models.spec import ModelSpec

PROMPT_KEYS = (
    *("sampling.max_tokens", "run.system_prompt", "run.chat_template"),
    *("run.field", "run.id_field", "run.limit", "run.strict"),
)
_NO_LIMIT = 2**62  # tokens, if the model is unknown
MAX_LISTED = 1000  # bad rows kept with their line and message; all are counted


@dataclass(slots=True)
class PromptScan:
    """One pass over a prompt file."""

    spec: "ModelSpec | None"  # None: a tokenizer's folder without config.json
    max_model_len: int | None  # tokens
    plan: PromptSurvey = field(default_factory=PromptSurvey)
    num_rows: int = 0
    bad_rows: list[dict[str, Any]] = field(default_factory=list)  # line, id, code, message; the first ones
    bad_codes: Counter[str] = field(default_factory=Counter)
    ignored: dict[str, int] = field(default_factory=dict)  # field without effect -> lines
    shares: SharePlan | None = None  # how workers would share the rows, if asked for

    @property
    def num_bad(self) -> int:
        return self.bad_codes.total()

    @property
    def num_valid(self) -> int:
        return self.num_rows - self.num_bad

    def refuse(self, row: "Refused") -> None:
        """Count an invalid row."""
        head, error = row.head, row.error
        self.bad_codes[error.code] += 1
        if len(self.bad_rows) < MAX_LISTED:
            what = {"code": error.code, "message": error.message}
            self.bad_rows.append({"line": head.line_number, "id": head.id, **what})


def prompt_model(loaded: LoadedConfig, tokenizer: Path | None) -> "tuple[Path, ModelSpec | None]":
    """The tokenizer's folder and its model; None for a folder with only a tokenizer."""
    from pagedcli.engine.decide import model_folder
    from pagedcli.models.hub import check_files
    from pagedcli.models.reading import read_spec

    engine = loaded.config.engine
    if tokenizer is not None and tokenizer.is_dir():
        check_files(tokenizer)
    folder = tokenizer if tokenizer is not None else model_folder(engine, weights=False)
    has_model = (folder / "config.json").is_file()
    return folder, read_spec(folder, trust_remote_code=engine.trust_remote_code) if has_model else None


def scan_prompts(
    loaded: LoadedConfig,
    input_name: str,
    folder: Path,
    spec: "ModelSpec | None",
    *,
    num_blocks: int | None = None,
    shares: SharePlan | None = None,
) -> PromptScan:
    """Read, tokenize and validate every row as a run would. Invalid rows are kept apart.

    `num_blocks`: of the pool. Rows that do not fit into it are invalid, but part of the plan.
    Changes: adds every good row to `shares`. Raises: PagedcliError.
    """
    from pagedcli.batch.columns import Columns
    from pagedcli.batch.grammar import Grammars
    from pagedcli.batch.intake import Intake, Refused
    from pagedcli.batch.job import batch_options
    from pagedcli.batch.sources import check_kept, open_source
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.engine.admission import AdmissionLimits
    from pagedcli.engine.decide import resolve_max_model_len

    config = loaded.config
    columns = Columns.of(config.run)
    lines = open_source(input_name, columns)
    check_kept(lines, columns)
    scan = PromptScan(spec, None if spec is None else resolve_max_model_len(config.engine, spec), shares=shares)
    encoder = Tokenizer(
        folder, chat_template=config.run.chat_template, trust_remote_code=config.engine.trust_remote_code
    )
    limits = AdmissionLimits(
        scan.max_model_len or _NO_LIMIT, config.engine.block_size, num_blocks, None if spec is None else spec.vocab_size
    )
    grammars = None
    if spec is not None:
        grammars = Grammars(encoder, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
    intake = Intake(encoder, batch_options(loaded, columns), limits)
    for line in lines:
        if config.run.limit is not None and line.index >= config.run.limit:
            break
        scan.num_rows += 1
        taken = intake.prepare(line)
        assert taken is not None, "no row is done already"
        if isinstance(taken, Refused):
            scan.refuse(taken)
            continue
        try:
            max_tokens = [_max_tokens(prompt, grammars, limits) for prompt in taken.prompts]
        except RequestError as error:
            scan.refuse(Refused(taken.head, error))
            if error.code != "kv_cache_exceeded":
                continue
            max_tokens = [prompt.params.max_tokens or 1 for prompt in taken.prompts]  # another pool may hold it
        for prompt, most in zip(taken.prompts, max_tokens, strict=True):
            ids, n = prompt.token_ids, prompt.params.n
            num_new = most if spec is not None or prompt.params.max_tokens is not None else 0  # 0: not known
            scan.plan.add(line.number, ids, num_new, n=n, cache_salt=taken.cache_salt)
            if shares is not None:
                shares.add(ids, num_new * n, taken.cache_salt)
    scan.ignored = dict(intake.parser.ignored)
    return scan


def _max_tokens(prompt: "PreparedPrompt", grammars: "Grammars | None", limits: "AdmissionLimits") -> int:
    """How much the prompt may generate. Raises: RequestError if a run would refuse it."""
    from pagedcli.engine.admission import admit

    if grammars is not None:
        grammars.guides(prompt.params)  # a grammar that does not compile is a bad row
    return admit(prompt.token_ids, prompt.params, limits)
