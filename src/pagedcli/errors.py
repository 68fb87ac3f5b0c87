"""The exception hierarchy. Every user error is a PagedcliError that says what is wrong and what to do next.

Used by every package; imports none.
"""

EXIT_FATAL, EXIT_BAD_ROWS = 1, 3


class PagedcliError(Exception):
    """An error that the user can fix: `message` says what and where, `hint` the next action."""

    exit_code = EXIT_FATAL

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
    """A parameter is out of range. Also a ValueError: decoders then report its location."""


class ModelError(PagedcliError):
    """A model folder cannot be used: unsupported architecture, missing or damaged weights."""


class MissingModelError(ModelError, UsageError):
    """The model named on the command line does not exist (exit code 2)."""


class BackendError(ConfigError):
    """An attention backend is unknown, or does not support what is required (exit code 2)."""


class RequestError(PagedcliError):
    """One request cannot be served. `code` is a stable identifier, e.g. 'context_length_exceeded'."""

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class TraceError(PagedcliError):
    """A trace file is damaged, of another schema version, or breaks an invariant."""
