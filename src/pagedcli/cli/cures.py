"""What to change, as commands look for it and print it: after the answer, before the tables."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pagedcli.answers.cures import CURES_S, Cure, cures
from pagedcli.answers.settings import recorded_subject
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.decoder import recorded_tokenizer
from pagedcli.errors import PagedcliError, TraceError
from pagedcli.kvevents.lookups import Lookups
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.show.tables import Format, Table, print_tables
from pagedcli.show.terminal import say
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState

_T = TypeVar("_T")


def print_answer(
    answer: Sequence[str], cures: Sequence[Cure], tables: Sequence[Table], format_: Format, facts: Mapping[str, Any]
) -> None:
    """Print the answer to the question that a command's name asks, what to change, and the tables."""
    said = [*answer, *(cure.text for cure in cures)]
    print_tables(tables, format_, facts={**facts, "answer": answer, "cures": cures}, story=said)


def or_note(what: str, find: Callable[[], _T], otherwise: _T) -> _T:
    """What `find` returns, or a line that says what is not known: a run and its tables are right without it."""
    try:
        return find()
    except PagedcliError:
        raise
    except Exception as error:
        say(f"note: {what} could not be determined: {type(error).__name__}: {error}".rstrip(": "))
        return otherwise


def find_cures(*given: Any, **how: Any) -> list[Cure]:
    """What to change (see answers.cures), or a line that says that looking for it failed."""
    return or_note("what to change", partial(cures, *given, **how), [])


def recorded_cures(view: RecordedRequests, state: PoolState, tokenizer: Tokenizer | None) -> list[Cure]:
    """What to change about a recorded run. `view` and `state`: at its end."""
    workload, prompts = view.finish(), None
    if workload.num_left_out and workload.hash_size is None:
        prompts = PromptSample.of(workload.prompts())
    return find_cures(
        recorded_subject(workload, state),
        prompts=prompts,
        tokenizer=tokenizer,
        block_size=state.block_size,
        budget_s=CURES_S,
    )


def seen_cures(found: Lookups, tokenizer: Tokenizer | None) -> list[Cure]:
    """What to change about the prompts that the KV events of a server show, if they show their tokens."""
    sample = PromptSample.of(found.prompts())
    return find_cures(None, prompts=sample, tokenizer=tokenizer, block_size=found.block_size or 1)


def told_of_recording(trace: Path) -> list[str]:
    """What to change about a recorded run, in words. Nothing of a damaged one, of which its reader tells."""
    view = RecordedRequests()
    try:
        state = fold(TraceReader(trace), view)
    except TraceError:
        return []
    return [cure.text for cure in recorded_cures(view, state, recorded_tokenizer(trace, None))]
