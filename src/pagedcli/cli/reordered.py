"""`plan --try-reordered`: a prompt file as it would be without the causes that make its prompts part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagedcli.errors import PagedcliError
from pagedcli.files import whole_file, writing

if TYPE_CHECKING:
    from pagedcli.batch.lines import Line
    from pagedcli.batch.requests import BatchRow
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.planning.parting import Parting


@dataclass(slots=True)
class Reordered:
    """Keeps the lines of a file with the texts of their prompts, and writes them changed."""

    _lines: list[bytes | None] = field(default_factory=list)
    _rows: dict[int, list[str]] = field(default_factory=dict)  # texts by the index of the line
    _with_id: int | None = None  # number of the first line whose id is in its prompt

    def add_line(self, line: "Line") -> None:
        self._lines.append(line.content)

    def add_row(self, row: "BatchRow", tokenizer: "Tokenizer") -> None:
        texts = [tokenizer.decode(each.token_ids, skip_special_tokens=False) for each in row.prompts]
        self._rows[row.line.index] = texts
        if self._with_id is None and isinstance(row.id, str) and any(row.id in text for text in texts):
            self._with_id = row.line.number

    def write(self, path: Path, found: "Sequence[Parting]") -> tuple[int, int]:
        """Write all lines. Returns how many have changed, and how many should have, but cannot be written: parts that
        come from the template or from token ids. Raises: PagedcliError."""
        if self._with_id is not None:  # which of the two texts moves could not be told
            why = f"cannot write the changed prompts {path}: the id of line {self._with_id} is also in its prompt"
            raise PagedcliError(why, hint="change the prompts where they are made, as the finding says")
        order = sorted(self._rows)
        before = [text for index in order for text in self._rows[index]]
        after = list(before)
        for each in found:
            if each.change is not None:
                after = each.change.apply(after)
        without_salt = any(each.action == "one salt" for each in found)
        num_changed = num_left = place = 0
        written = list(self._lines)
        for index in order:
            num = len(self._rows[index])
            olds, news = before[place : place + num], after[place : place + num]
            place += num
            content = self._lines[index]
            if content is None or (olds == news and not without_salt):
                continue
            changed = rewritten(content, olds, news, without_salt=without_salt)
            num_changed, num_left = num_changed + (changed is not None), num_left + (changed is None)
            written[index] = changed or content
        named = writing(f"the changed prompts {path}", PagedcliError, hint="name a new file")
        with named, whole_file(path, overwrite=False) as file:
            file.writelines(content + b"\n" for content in written if content is not None)
        return num_changed, num_left


def rewritten(content: bytes, before: Sequence[str], after: Sequence[str], *, without_salt: bool) -> bytes | None:
    """A line whose prompts are rendered to other texts. None: what changes is not in its own texts."""
    document = msgspec.json.decode(content)
    leaves = _leaves(document)
    for old, new in zip(before, after, strict=True):
        spans, pos = [], 0
        for leaf in leaves:
            text = leaf.value if old.find(leaf.value, pos) >= 0 else leaf.value.strip()
            start = old.find(text, pos) if text else -1
            if start >= 0:
                spans.append((leaf, start, start + len(text)))
                pos = start + len(text)
        if old != new and not _put(spans, old, new):
            return None
        used = {id(leaf) for leaf, _, _ in spans}
        leaves = [leaf for leaf in leaves if id(leaf) not in used]
    if without_salt:
        for each in (document, document.get("body")):
            if isinstance(each, dict):
                each.pop("cache_salt", None)
    changed = msgspec.json.encode(document)
    return changed if msgspec.json.decode(changed) != msgspec.json.decode(content) else None


@dataclass(slots=True)
class _Leaf:
    """A text in a line."""

    parent: Any
    key: Any
    value: str


def _leaves(document: Any, parent: Any = None, key: Any = None) -> list[_Leaf]:
    """All texts, in their order."""
    if isinstance(document, str):
        return [] if parent is None else [_Leaf(parent, key, document)]
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(document, dict):
        items = iter(document.items())
    elif isinstance(document, list):
        items = iter(enumerate(document))
    return [leaf for name, value in items for leaf in _leaves(value, document, name)]


def _put(spans: list[tuple[_Leaf, int, int]], old: str, new: str) -> bool:
    """Take the new values of the texts from where they stand between what the template writes; False: it differs."""
    if not spans:
        return False
    starts = [start for _, start, _ in spans] + [len(old)]
    ends = [0] + [end for _, _, end in spans]
    pieces = [old[end:start] for end, start in zip(ends, starts, strict=True)]
    if not new.startswith(pieces[0]) or not new.endswith(pieces[-1]):
        return False
    pos, last, values = len(pieces[0]), len(new) - len(pieces[-1]), []
    for place, (_leaf, start, end) in enumerate(spans):
        is_last = place == len(spans) - 1
        stop = last if is_last else new.find(pieces[place + 1], pos) if pieces[place + 1] else pos + end - start
        if not pos <= stop <= last:
            return False
        values.append(new[pos:stop])
        pos = stop + len(pieces[place + 1])
    for (leaf, _, _), value in zip(spans, values, strict=True):
        leaf.parent[leaf.key] = value
    return True
