"""What a configuration key means, its range and its flag, written once where a struct declares its type and default;
and how the text of a value is read.

Used by config and sampling_params, which declare keys, and by cli.options, which makes flags of them.
"""

import functools
import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_type_hints

import msgspec
import yaml

from pagedcli.errors import ConfigError, ParameterError

MOST = 2**40  # limit of any number without one of its own: sums of a few fit into 64 bits


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of the configuration, without its type and default."""

    panel: str  # heading in help texts and configuration files
    description: str  # includes the unit, no final period
    metavar: str | None = None  # placeholder of the value in help texts; None: by its type
    default: str | None = None  # meaning of None, for help texts
    has_flag: bool = True  # False: in configuration files only
    # whether another value may give other rows: then `--resume` refuses one, so forgetting to say False is safe
    affects_rows: bool = True
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    names_in: str | None = None  # MODULE:TABLE of the allowed names: those who add one need not know this key
    # @FILE stands for a file's content, which is read as text is; file: the value is its name, and it has JSON
    reads: Literal["text", "json", "yaml", "file"] | None = None
    removed: tuple[str, ...] = ()  # values that earlier versions had

    @property
    def is_bounded(self) -> bool:
        return any(limit is not None for limit in (self.at_least, self.above, self.at_most, self.names_in))

    @property
    def names(self) -> tuple[str, ...]:
        """The allowed names; none for keys of other values."""
        if self.names_in is None:
            return ()
        module, _, table = self.names_in.partition(":")
        return tuple(name for name in getattr(import_module(module), table) if name is not None)

    @property
    def allowed(self) -> str:
        """The range, for help texts and messages."""
        if self.names_in is not None:
            return ", ".join(self.names)
        low = f"above {_number(self.above)}" if self.above is not None else _number(self.at_least)
        if self.at_most is None:
            return low if self.above is not None else f"{low} or more"
        return f"{low} and at most {self.at_most:g}" if self.above is not None else f"{low} to {_number(self.at_most)}"

    def allows(self, value: Any) -> bool:
        """Whether the value is in the range; a NaN never is."""
        if self.names_in is not None:
            return value in self.names
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and bool(value <= (MOST if self.at_most is None else self.at_most))
        )


def key(panel: str, description: str, **fields: Any) -> msgspec.Meta:
    """The annotation of a struct field: a Key of these fields. The range is not left to msgspec, whose message omits
    the value."""
    return msgspec.Meta(description=description, extra={"key": ConfigKey(panel, description, **fields)})


def flag_name(key: str) -> str:
    """The flag of a configuration key or parameter: `engine.block_size` is set by `--block-size`."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


@functools.cache
def keys_of(struct: type[msgspec.Struct]) -> dict[str, tuple[Any, ConfigKey]]:
    """Name -> (type, key) of every field, in the order of their declaration."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        name: (hints[name].__origin__, meta.extra["key"])
        for name in struct.__struct_fields__
        for meta in hints[name].__metadata__
    }


def check_ranges(values: msgspec.Struct) -> None:
    """Raises: ParameterError naming the field, its value and the range, if a field is out of range."""
    for name, declared in _bounded(type(values)):
        value = getattr(values, name)
        if value is not None and not declared.allows(value):
            is_huge = not declared.names and declared.at_most is None and value > MOST
            allowed = f"{MOST} or less" if is_huge else declared.allowed
            raise ParameterError(f"{name} is {value}, allowed: {allowed}")


@functools.cache
def _bounded(struct: type[msgspec.Struct]) -> tuple[tuple[str, ConfigKey], ...]:
    return tuple((name, declared) for name, (_, declared) in keys_of(struct).items() if declared.is_bounded)


def _number(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


# ---------------------------------------------------------------------- texts

_MOST_YAML_VALUES = 100_000


def from_json(text: str, place: str) -> Any:
    """The value of a JSON text. Raises: ConfigError that says where the text is from."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}",
            hint="give JSON, or @ and the name of a file with JSON",
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, a number of 5,000 digits
        raise ConfigError(f"{place} is not usable JSON: {str(error).partition(';')[0]}") from error


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that occurs twice: PyYAML silently takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            if name.value in seen:
                problem = f"the key {name.value!r} occurs twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=name.start_mark)
            seen.add(name.value)
        return node


def from_yaml(text: str, place: str) -> Any:
    """The value of a YAML text. Raises: ConfigError that says where the text is from."""
    try:
        value = yaml.load(text, _OnceLoader)
        if _num_values(value, {}) > _MOST_YAML_VALUES:
            raise ConfigError(f"{place} has over {_MOST_YAML_VALUES:,} values: not a configuration")
    except RecursionError as error:
        raise ConfigError(f"{place} is nested too deeply: not a configuration") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is not valid YAML: {error}") from error
    except ValueError as error:  # a number of 5,000 digits, the 32nd of a month
        raise ConfigError(f"{place} is not valid YAML: {str(error).partition(';')[0]}") from error
    return value


def _num_values(value: Any, known: dict[int, int]) -> int:
    """How many values a document has with all aliases written out. Raises: RecursionError if it contains itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        each_value = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(each, known) for each in each_value)
    return known[id(value)]
