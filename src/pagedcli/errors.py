"""The exception tree. Every error a user can cause is a PagedcliError with what was wrong and what to do next.

Used by every package; knows none of them.
"""


class PagedcliError(Exception):
    """A mistake that a person can put right: `message` says what and where, `hint` the next action."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PagedcliError):
    """A flag, an argument or a path named on the command line is wrong (exit code 2)."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value is unknown, of the wrong type or impossible on this machine (exit code 2)."""


class ParameterError(PagedcliError, ValueError):
    """A sampling parameter is out of range. Also a ValueError, so that decoders report where it stood."""


class ModelError(PagedcliError):
    """A model folder cannot be used: unsupported architecture, missing or damaged weights."""


class MissingModelError(ModelError, UsageError):
    """There is no model where the command line says (exit code 2)."""


class BackendError(ConfigError):
    """An attention backend is unknown, or was asked for something it cannot do (exit code 2)."""


class RequestError(PagedcliError):
    """One request cannot be served. `code` is a stable word for machines, e.g. 'context_length_exceeded'."""

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class TraceError(PagedcliError):
    """A trace file is damaged, of another schema version, or breaks an invariant."""
