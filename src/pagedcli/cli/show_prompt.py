"""`generate --show-prompt N`: what the model sees of a line, and what the chat template adds. Loads no model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pagedcli.batch.columns import Columns
from pagedcli.batch.line_sample import sample_lines
from pagedcli.batch.lines import Line, copied
from pagedcli.batch.prompts import limits_without_pool, open_prompts, open_source, open_tokenizer
from pagedcli.batch.requests import BatchRow, decode_line, request_of
from pagedcli.buckets import is_url
from pagedcli.config import LoadedConfig
from pagedcli.errors import UsageError
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.printable import plural, printable
from pagedcli.show.tables import Format, print_sentences, print_tables, table

_MOST_SHOWN = 100  # tokens


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt."""

    place: int  # 0-based
    id: Annotated[int, "token id"]
    text: Annotated[str, "text", repr]
    special: Annotated[bool, "special", lambda special: "yes" if special else ""]


def show_prompt(loaded: LoadedConfig, input_name: str, number: int, format_: Format, *, all_tokens: bool) -> None:
    """Print the first prompt of the row in a line. Raises: UsageError, ModelError."""
    engine, folder = loaded.config.engine, model_folder(loaded.config.engine)
    limits = limits_without_pool(engine, read_spec(folder, trust_remote_code=engine.trust_remote_code))
    columns = Columns.of(loaded.config.run)
    input_name = input_name if is_url(input_name) else str(copied(Path(input_name)))
    tokenizer, source = open_tokenizer(loaded.config, folder), open_source(input_name, columns)
    line = next((line for line in source if line.number == number), None)
    if line is None:
        raise UsageError(f"{input_name} has no row in line {number:,}")

    def rows(lines: Iterable[Line]) -> Iterator[BatchRow]:
        found = open_prompts(loaded, input_name, folder, limits, lines=lines, tokenizer=tokenizer)
        return (row for row in found if row is not None)

    def num_added(row: BatchRow) -> int:
        texts = own_texts(row.line, columns) if row.prompts else []
        own = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return sum(len(prompt.token_ids) for prompt in row.prompts) - own if texts else 0

    row = next(rows([line]))
    if row.error is not None:
        raise UsageError(f"line {number:,}: {row.error.message}", hint=row.error.hint)
    sample = sample_lines(source)
    of_rows, added = [num_added(each) for each in rows(sample or source)], num_added(row)
    to_all = sum(of_rows) if sample is None else round(sample.about(of_rows).value)
    ids, special = [each for prompt in row.prompts for each in prompt.token_ids], set(tokenizer.special_token_ids)
    text = ""
    for is_special, some in groupby(ids, special.__contains__):
        part = tokenizer.decode([*some], skip_special_tokens=False)
        text += f"⟦{part}⟧" if is_special else part
    facts = {"line": number, "text": text, "num_tokens": len(ids), "num_added": added, "num_added_to_all": to_all}
    if format_ is Format.TABLE:
        of_line = f"{len(ids) - added:,} of its own and {added:,} that chat template and system prompt add"
        about = "" if sample is None else "about "
        print_sentences([f"Line {number:,} is {plural(len(ids), 'token')}: {of_line} ({about}{to_all:,} to all rows)."])
        print(f"\n{printable(text)}\n")
    shown = [PromptToken(place, each, tokenizer.token_text(each), each in special) for place, each in enumerate(ids)]
    most = None if all_tokens else _MOST_SHOWN
    print_tables([table(PromptToken, "tokens", "Tokens", shown, max_shown=most)], format_, facts=facts)


def own_texts(line: Line, columns: Columns) -> list[str]:
    """The texts of the prompts or messages of a line; none of token ids."""
    asked = request_of(decode_line(line.content), columns)
    asked = asked.get("body", asked)
    return _texts(asked.get("messages", asked.get("prompt")))


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return _texts(value.get("content", value.get("text")))
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []
