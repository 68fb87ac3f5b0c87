"""Reads a prompt file for `plan` and `profile-memory --prompts`: every row judged and counted as a run would do it."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedcli.config import LoadedConfig
from pagedcli.distributed.partition import SharePlan
from pagedcli.errors import RequestError
from pagedcli.inspection.prompt_plan import PromptPlan

if TYPE_CHECKING:
    from pagedcli.models.spec import ModelSpec

PROMPT_KEYS = ("sampling.max_tokens", "run.system_prompt", "run.chat_template", "run.limit", "run.strict")
FieldOption = Annotated[
    str | None,
    typer.Option(
        "--field",
        metavar="NAME",
        help="Take the prompt from this field of each line; of a list, its first item.",
        show_default=False,
    ),
]
_LARGEST_ID = 2**63 - 1  # where the size of the vocabulary is not known
MAX_LISTED = 1000  # bad rows kept with their line and message; all are counted


@dataclass(slots=True)
class PromptScan:
    """One pass over a prompt file."""

    spec: "ModelSpec | None"  # None: a tokenizer's folder without config.json
    max_model_len: int | None  # tokens
    plan: PromptPlan = field(default_factory=PromptPlan)
    num_rows: int = 0
    bad_rows: list[dict[str, Any]] = field(default_factory=list)  # line, id, code, message; the first ones
    bad_codes: Counter[str] = field(default_factory=Counter)
    ignored: dict[str, int] = field(default_factory=dict)  # field without effect -> lines
    shares: SharePlan | None = None  # how workers would share the rows, if asked for

    @property
    def num_bad(self) -> int:
        return self.bad_codes.total()


def scan_prompts(
    loaded: LoadedConfig,
    input_name: str,
    *,
    field: str | None = None,
    tokenizer: Path | None = None,
    shares: SharePlan | None = None,
) -> PromptScan:
    """Read, tokenize and count every row. Bad rows are kept apart, as in a run. Raises: PagedcliError.

    Changes: adds every good row to `shares`.
    """
    from pagedcli.batch.grammar import Grammars
    from pagedcli.batch.intake import encode_request
    from pagedcli.batch.requests import RequestParser, RowHead, check_head, decode_line, read_head
    from pagedcli.batch.sources import open_source
    from pagedcli.batch.stats import SeenIds
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.engine.decide import model_folder, resolve_max_model_len
    from pagedcli.models.hub import check_files
    from pagedcli.models.reading import read_spec

    config, lines = loaded.config, open_source(input_name)
    if tokenizer is not None and tokenizer.is_dir():
        check_files(tokenizer)
    folder = tokenizer if tokenizer is not None else model_folder(config.engine, weights=False)
    spec = None
    if (folder / "config.json").is_file():  # not in a folder that holds a tokenizer alone
        spec = read_spec(folder, trust_remote_code=config.engine.trust_remote_code)
    scan = PromptScan(spec, None if spec is None else resolve_max_model_len(config.engine, spec), shares=shares)
    encoder = Tokenizer(
        folder, chat_template=config.run.chat_template, trust_remote_code=config.engine.trust_remote_code
    )
    grammars = None
    if spec is not None:
        grammars = Grammars(encoder, end_token_ids=spec.eos_token_ids, vocab_size=spec.vocab_size)
    parser = RequestParser(config.sampling, strict=config.run.strict)
    max_tokens_given = loaded.sources.get("sampling.max_tokens", "").startswith("--")
    seen_ids = SeenIds()
    for line in lines:
        if config.run.limit is not None and line.index >= config.run.limit:
            break
        scan.num_rows += 1
        head = RowHead(line.index, line.number)
        try:
            document = decode_line(line.content)
            head = read_head(document, line.index, line.number)
            if head.id is not None and not seen_ids.add(head.id):
                raise RequestError("duplicate_id", f"an earlier line has the same id {head.id!r}")
            check_head(document, head)
            request = parser.parse(document if field is None else _take_field(document, field), head)
            token_ids = encode_request(encoder, request, config.run.system_prompt)
            _check_ids(token_ids, _LARGEST_ID + 1 if spec is None else spec.vocab_size)
            max_tokens = _max_tokens(
                request.params.max_tokens,
                given=request.max_tokens_given or max_tokens_given,
                num_prompt=len(token_ids),
                max_model_len=scan.max_model_len,
            )
            if grammars is not None:
                grammars.guides(request.params)  # a grammar that does not compile is a bad row
            scan.plan.add(line.number, token_ids, max_tokens, n=request.params.n, cache_salt=request.cache_salt)
            if shares is not None:
                shares.add(token_ids, max_tokens * request.params.n, request.cache_salt)
        except RequestError as error:
            scan.bad_codes[error.code] += 1
            if len(scan.bad_rows) < MAX_LISTED:
                scan.bad_rows.append({"line": line.number, "id": head.id, "code": error.code, "message": error.message})
    scan.ignored = {} if field is not None else dict(parser.ignored)
    return scan


def _take_field(document: dict[str, Any], field: str) -> dict[str, Any]:
    """A plain line with the prompt that the field holds; other fields do not count."""
    if field not in document:
        raise RequestError("invalid_request", f"no field {field!r}")
    value = document[field]
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    key = "messages" if isinstance(value, list) and value and isinstance(value[0], dict) else "prompt"
    return {key: value}


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises: RequestError for an id outside the vocabulary."""
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise RequestError("invalid_token_id", f"token id {wrong} is not in the vocabulary (0 to {vocab_size - 1})")


def _max_tokens(max_tokens: int | None, *, given: bool, num_prompt: int, max_model_len: int | None) -> int:
    """Tokens that the row may generate, as a run would decide. Raises: RequestError for a row that never fits."""
    if num_prompt == 0:
        raise RequestError("empty_prompt", "the prompt has no tokens")
    if max_model_len is None:
        return max_tokens or 0
    room = max_model_len - num_prompt
    wanted = room if max_tokens is None else max_tokens if given else min(max_tokens, max(room, 1))
    if wanted > room or room < 1:
        raise RequestError(
            "context_length_exceeded",
            f"{num_prompt} prompt tokens and {max(wanted, 1)} to generate are over the model length of {max_model_len}",
        )
    return wanted
