"""What one can type after `:`: jumps by name, with completion. Independent of the screen."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

_MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Command:
    """A name with its argument. `run` does it and returns why it could not, or nothing."""

    name: str
    argument: str  # what to type after the name, for the help; empty: nothing
    meaning: str
    run: Callable[[str], str]
    choices: Callable[[], Iterable[str]] = tuple  # arguments to complete


def run_command(commands: Sequence[Command], text: str) -> str:
    """Do what was typed: a command, the beginning of one, or a number, which is the argument of the first command.
    Returns why it could not, or nothing."""
    name, _, argument = text.strip().removeprefix(":").partition(" ")
    if not name:
        return ""
    if name[0].isdigit():
        name, argument = commands[0].name, name
    named = _named(commands, name)
    if len(named) != 1:
        found = f"{name!r} may be {' or '.join(each.name for each in named)}" if named else f"there is no {name!r}"
        return found if named else f"{found}: use {', '.join(each.name for each in commands)}"
    [command] = named
    argument = argument.strip()
    if argument and not command.argument:
        return f"{command.name} takes no {argument!r}"
    if not argument and command.argument and not command.argument.startswith("["):
        return f"{command.name} needs {command.argument}"
    return command.run(argument)


def _named(commands: Sequence[Command], name: str) -> list[Command]:
    exact = [command for command in commands if command.name == name.lower()]
    return exact or [command for command in commands if command.name.startswith(name.lower())]


def completed(commands: Sequence[Command], text: str) -> str | None:
    """What was typed with its completion: the rest of a name, or of an argument."""
    name, space, argument = text.partition(" ")
    named = _named(commands, name) if name else []
    if not space:
        return named[0].name + (" " if named[0].argument else "") if named else None
    if not named:
        return None
    fitting = (choice for choice in named[0].choices() if choice.lower().startswith(argument.lower()))
    choice = next(fitting, None)
    return None if choice is None or not argument else f"{name} {choice}"


def hint(commands: Sequence[Command], text: str) -> str:
    """The commands that what was typed may become, or what the one it names does."""
    name, space, argument = text.strip(":").partition(" ")
    named = [each for each in commands if each.name.startswith(name.lower())]
    if not space or not named:
        return "  ".join(f"{each.name} {each.argument}".strip() for each in named or commands)
    choices = (choice for choice in named[0].choices() if choice.lower().startswith(argument.lower()))
    shown = ", ".join(islice(choices, _MOST_SHOWN))
    return f"{named[0].name} {named[0].argument}: {named[0].meaning}" + (f"; {shown} ..." if shown else "")


def help_lines(commands: Sequence[Command]) -> str:
    """A line per command, for the help page."""
    return "\n".join(f" :{each.name + ' ' + each.argument:<13} {each.meaning}" for each in commands)


def number(text: str) -> int | None:
    """A whole number as people write it, or None."""
    digits = text.replace(",", "")
    return int(digits) if digits.isascii() and digits.isdigit() else None
