"""Configuration flags: names, types, choices, defaults and help come from the structs (see config_keys).

Used by every command that reads a configuration: `@config_flags(*ENGINE_KEYS)` adds the flags to a command.
"""

import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import typer

from pagedcli.config import Config
from pagedcli.config_keys import Key, keys_of

_SHORT = {"engine.model": "-m"}
_METAVARS = {int: "N", float: "X"}


def _flags(section: str) -> dict[str, Any]:
    """The flags of one configuration section: dotted key -> annotation for typer."""
    defaults: msgspec.Struct = getattr(Config(), section)
    flags = {}
    for name, (type_, declared) in keys_of(type(defaults)).items():
        if not declared.has_flag:
            continue
        long = "--" + name.replace("_", "-")
        taken = str if declared.metavar == "BYTES" else _flag_type(type_)
        names = [f"{long}/--no-{long[2:]}" if taken is bool else long]
        if short := _SHORT.get(f"{section}.{name}"):
            names.insert(0, short)
        option = typer.Option(
            *names,
            help=_help(declared, getattr(defaults, name)),
            metavar=declared.metavar or _METAVARS.get(taken),
            rich_help_panel=declared.panel,
            show_default=False,
        )
        flags[f"{section}.{name}"] = Annotated[taken | None, option]
    return flags


def _flag_type(type_: Any) -> Any:
    """The type of the flag for a field. For a union that includes a list: the list, i.e. a repeatable flag."""
    if get_origin(type_) not in (Union, types.UnionType):
        return type_
    kinds = [kind for kind in get_args(type_) if kind is not type(None)]
    return next((kind for kind in kinds if get_origin(kind) is list), kinds[0])


def _help(declared: Key, value: Any) -> str:
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
# irrelevant for predictions
_UNPLANNED = {
    "load_format",
    "eviction",
    "preemption_policy",
    "async_scheduling",
    "seed",
}
PLAN_KEYS = tuple(key for key in ENGINE_KEYS if key.split(".")[1] not in _UNPLANNED)

Flags = dict[str, Any]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "-C", "--config", help="YAML configuration file; flags override it.", metavar="FILE", show_default=False
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option("--show-config", help="Show the effective configuration and the source of each value, then exit."),
]


def config_flags(*keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags of these keys to a command, whose keyword `flags: Flags` receives those that were given."""
    names = {key: key.replace(".", "__") for key in keys}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=FLAGS[key])
            for key, name in names.items()
        ]

        @functools.wraps(command)
        def with_flags(*args: Any, **values: Any) -> Any:
            given = {key: values.pop(name, None) for key, name in names.items()}
            # typer gives an empty list for a repeatable flag that is absent
            flags = {key: value for key, value in given.items() if value is not None and value != []}
            return command(*args, flags=flags, **values)

        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return with_flags

    return decorate
