"""Configuration flags: names, types, choices, defaults and help come from the structs (see config_keys).

Used by every command that reads a configuration: `@config_flags(*ENGINE_KEYS)` adds the flags to a command. A command
may declare its own flags as the fields of a dataclass, which it then receives.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from pagedcli.config import Config
from pagedcli.config_keys import ConfigKey, flag_name, keys_of
from pagedcli.show.tables import Format

FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
_SHORT = {"engine.model": "-m", "run.system_prompt": "--system"}
_METAVARS = {int: "N", float: "X"}


def option(*names: str, panel: str | None = None, show_default: bool = False, **settings: Any) -> Any:
    """A flag in a section of the help, by default without its default. `settings` are those of typer.Option."""
    return typer.Option(*names, rich_help_panel=panel, show_default=show_default, **settings)


def do_not_apply(keys: Iterable[str]) -> str:
    """`--check, --follow do not apply`."""
    names = [flag_name(key) for key in keys]
    return f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} not apply"


def _flags(section: str) -> dict[str, Any]:
    """The flags of one configuration section: dotted key -> annotation for typer."""
    defaults: msgspec.Struct = getattr(Config(), section)
    flags = {}
    for name, (type_, declared) in keys_of(type(defaults)).items():
        if not declared.has_flag:
            continue
        long = flag_name(name)
        is_text = declared.metavar in ("BYTES", "TIME") or declared.reads or declared.removed
        taken = str if is_text else _flag_type(type_, declared)
        names = [f"{long}/--no-{long[2:]}" if taken is bool else long]
        if short := _SHORT.get(f"{section}.{name}"):
            names.insert(0, short)
        metavar = declared.metavar or _METAVARS.get(taken)
        help_ = _help(declared, getattr(defaults, name))
        declaration = option(*names, help=help_, metavar=metavar, panel=declared.panel)
        flags[f"{section}.{name}"] = Annotated[taken | None, declaration]
    return flags


def _flag_type(type_: Any, declared: ConfigKey) -> Any:
    """The type of the flag for a field. For a union that includes a list: the list, i.e. a repeatable flag."""
    if declared.names:
        choices: Any = Literal
        return choices[declared.names]
    if get_origin(type_) not in (Union, types.UnionType):
        return type_
    kinds = [kind for kind in get_args(type_) if kind is not type(None)]
    return next((kind for kind in kinds if get_origin(kind) is list), kinds[0])


def _help(declared: ConfigKey, value: Any) -> str:
    if value is None:
        default = declared.default
    elif isinstance(value, bool):
        default = "yes" if value else None
    else:
        default = f"{value:g}" if isinstance(value, float) else str(value)
    text = declared.description if declared.description.endswith(".") else declared.description + "."
    return text if default is None else f"{text} Default: {default}."


FLAGS: dict[str, Any] = {key: flag for section in Config.__struct_fields__ for key, flag in _flags(section).items()}
ENGINE_KEYS = tuple(key for key in FLAGS if key.startswith("engine."))
SAMPLING_KEYS = tuple(key for key in FLAGS if key.startswith("sampling."))
RUN_KEYS = tuple(key for key in FLAGS if key.startswith("run."))
MEASURED_KEYS = tuple(key for key in ENGINE_KEYS if not key.startswith("engine.prefix_store"))  # a store hides costs
PROMPT_KEYS = (
    *("sampling.max_tokens", "sampling.response_format", "run.system_prompt", "run.tools", "run.chat_template"),
    *("run.input_format", "run.field", "run.template", "run.id_field", "run.limit", "run.strict", "run.deduplicate"),
)
PLAN_KEYS = tuple(key for key in MEASURED_KEYS if key != "engine.seed")  # all that predictions depend on

Flags = dict[str, Any]


def key_without_flag(flag: str) -> str | None:
    """The configuration key of that name which only a file sets; None: there is none."""
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    sections = ((section, type(getattr(Config(), section))) for section in Config.__struct_fields__)
    found = (f"{section}.{name}" for section, struct in sections if name in struct.__struct_fields__)
    return next((key for key in found if key not in FLAGS), None)


ConfigFile = Annotated[
    Path | None, option("-C", "--config", help="YAML configuration file; flags override it.", metavar="FILE")
]


def config_flags(
    *keys: str, hidden: Iterable[str] = (), ignored: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of these keys to a command, whose keyword `flags: Flags` receives those that were given.
    Without keys it needs none.

    A parameter that is a dataclass becomes a flag for each of its fields. The flags of `hidden` keys are not in the
    help, nor are those of `ignored`, another command's dataclass: of these, `without: list[str]` receives the names.
    """
    names = {key: key.replace(".", "__") for key in dict.fromkeys((*keys, *hidden))}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        groups: dict[str, Any] = {}
        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            if is_dataclass(parameter.annotation):
                groups[name] = parameter.annotation
                parameters += _parameters(parameter.annotation)
            elif name not in ("flags", "without"):
                parameters.append(parameter)
        known = {parameter.name for parameter in parameters}
        others = [each for each in _parameters(ignored) if each.name not in known] if ignored else []
        parameters += [_parameter(names[key], FLAGS[key], None) for key in keys]
        of_hidden = [_parameter(name, FLAGS[key], None) for key, name in names.items() if key not in keys]
        parameters += map(_hidden, [*of_hidden, *others])

        @functools.wraps(command)
        def with_flags(*args: Any, **values: Any) -> Any:
            given = {key: values.pop(name, None) for key, name in names.items()}
            # typer gives an empty list for a repeatable flag that is absent
            flags = {key: value for key, value in given.items() if value is not None and value != []}
            unused = [flag_name(each.name) for each in others if values.pop(each.name) not in (each.default, [])]
            for name, group in groups.items():
                values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
            named = {"flags": flags, "without": unused}
            return command(*args, **{name: named[name] for name in named.keys() & signature.parameters}, **values)

        with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_flags

    return decorate


def _hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    """The same flag, but not in the help."""
    type_, declaration = parameter.annotation.__origin__, copy.copy(parameter.annotation.__metadata__[0])
    declaration.hidden = True
    return parameter.replace(annotation=Annotated[type_, declaration])


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(each.name, hints[each.name], each.default) for each in fields(group)]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
