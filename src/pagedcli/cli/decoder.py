"""The text of recorded tokens. Used by explain, report and --block."""

from pathlib import Path
from typing import Annotated

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.options import option
from pagedcli.errors import ModelError
from pagedcli.events import EngineStarted, RequestAdded
from pagedcli.models.hub import resolve_model
from pagedcli.show.terminal import say
from pagedcli.trace.files import TraceReader
from pagedcli.trace.tokens import Decode

TokenizerOption = Annotated[
    str | None,
    option(metavar="MODEL", help="Decode recorded tokens with this model's tokenizer. Default: the model that ran."),
]


def recorded_decoder(trace: Path, tokenizer: str | None) -> Decode | None:
    """A decoder for the trace's token ids; see recorded_tokenizer."""
    loaded = recorded_tokenizer(trace, tokenizer)
    return None if loaded is None else loaded.decode


def recorded_tokenizer(trace: Path, tokenizer: str | None) -> Tokenizer | None:
    """The tokenizer for the trace's token ids, by default that of its model. None if the trace has no token ids, or if
    that tokenizer is not available, which is said. Raises: ModelError if the given one is not."""
    events = iter(TraceReader(trace))
    engine = next(events)
    assert isinstance(engine, EngineStarted), "the reader checks the first record"
    added = next((event for event in events if isinstance(event, RequestAdded)), None)
    if added is None or added.token_ids is None:
        return None

    model = tokenizer or engine.model
    try:
        return Tokenizer(resolve_model(model, weights=False))
    except ModelError as error:
        if tokenizer is not None:
            raise
        say(f"note: token ids are shown undecoded: {error.message}")
        return None
