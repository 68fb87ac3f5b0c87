"""A template over the columns of a line, which makes the line's prompt or chat: "Translate {text} to {lang}".

Used by batch.columns and batch.requests.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from pagedcli.config import RunConfig, TemplateMessage
from pagedcli.errors import RequestError, UsageError

_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_HINT = "{name} stands for a column, {{ and }} for braces"


@dataclass(frozen=True, slots=True)
class ColumnTemplate:
    """The text of a prompt, or the messages of a chat, with names of columns in braces."""

    text: str | None  # None: a chat
    messages: tuple[TemplateMessage, ...]
    names: frozenset[str]  # the columns

    @classmethod
    def of(cls, run: RunConfig) -> Self | None:
        """The template of a configuration; None: it has none. Raises: UsageError if it is not one."""
        if run.template is None and run.messages is None:
            return None
        what = "--template" if run.template is not None else "run.messages"
        if run.template is not None and run.messages is not None:
            raise UsageError("--template and run.messages both make the prompts", hint="use one of them")
        if run.field is not None:
            raise UsageError(f"--field and {what} both make the prompts", hint="use one of them")
        messages = tuple(run.messages or ())
        found = [_names(text, what) for text in (run.template, *(each.content for each in messages)) if text]
        names = frozenset().union(*found)
        if not names:
            raise UsageError(f"{what} names no column, so all prompts would be equal", hint=_HINT)
        return cls(run.template, messages, names)

    def fill(self, document: dict[str, Any]) -> dict[str, Any]:
        """The line's `prompt` or `messages`. Raises: RequestError for a column that the line lacks."""

        def value(match: re.Match[str]) -> str:
            return match[0][0] if match[1] is None else _shown(document.get(match[1]), match[1])

        if self.text is not None:
            return {"prompt": _PARTS.sub(value, self.text)}
        return {"messages": [{"role": each.role, "content": _PARTS.sub(value, each.content)} for each in self.messages]}


def _names(text: str, what: str) -> set[str]:
    """The columns in a text. Raises: UsageError for a brace without its partner."""
    names = set()
    for match in _PARTS.finditer(text):
        if match[1] == "" or len(match[0]) == 1:
            around = text[max(0, match.start() - 12) : match.end() + 12]
            what_is_wrong = "braces without a name" if match[1] == "" else f"a single {match[0]!r}"
            raise UsageError(f"{what} has {what_is_wrong} at {around!r}", hint=_HINT)
        if match[1]:
            names.add(match[1])
    return names


def _shown(value: Any, name: str) -> str:
    """A column's value: text unchanged, everything else as JSON."""
    if value is None:
        raise RequestError("missing_column", f"the template needs the column {name!r}, which this line lacks")
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
