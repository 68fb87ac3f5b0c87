"""Dispatch by event type: one method per event, named after it. Used by the state, the laws and all views."""

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

from pagedcli.events import Event

Handler = Callable[..., None]


def handlers_of(cls: type, prefix: str) -> dict[type[Event], Handler]:
    """The methods of a class named `prefix` + the tag of an event. Raises TypeError for a method whose name matches no
    event."""
    by_tag = {event_type.__struct_config__.tag: event_type for event_type in Event.__subclasses__()}
    names = [name for name in dir(cls) if name.startswith(prefix)]
    unknown = [name for name in names if name.removeprefix(prefix) not in by_tag]
    if unknown:
        raise TypeError(f"{cls.__name__} handles events that do not exist: {', '.join(unknown)}")
    return {by_tag[name.removeprefix(prefix)]: getattr(cls, name) for name in names}


class View:
    """A view of the pool's state: a method `on_<event>(event, state)` for each event type it needs, called after the
    event has been applied to the state."""

    _on: ClassVar[dict[type[Event], Handler]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._on = handlers_of(cls, "on_")

    def handlers(self, event_type: type[Event]) -> list[Handler]:
        """What to call, in this order, with each event of a type and the state."""
        method = self._on.get(event_type)
        return [] if method is None else [MethodType(method, self)]
