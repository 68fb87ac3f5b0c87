"""Where the prompts of a file or a run part, with the texts of a tokenizer."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pagedcli.errors import RequestError
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.verdicts import Verdict

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.planning.parting import Parting
    from pagedcli.simulation.requests import TraceRequest

_NO_LIMIT = 2**31  # tokens of a text


def find_partings(
    drawn: PromptSample, block_size: int, tokenizer: "Tokenizer | None", *, rate_in_file: float | None = None
) -> "list[Parting]":
    """Causes why these prompts share less than they could. Without a tokenizer they are found, but not named.
    `rate_in_file`: the hits of all prompts in an unlimited cache, drawn or not; None: not counted."""
    from pagedcli.planning.parting import Finder  # loads numpy

    if tokenizer is None:
        return Finder(block_size, num_in_file=drawn.num_seen, rate_in_file=rate_in_file).find(drawn.prompts)

    def encode(texts: list[str]) -> list[list[int]]:
        found = tokenizer.encode_all(texts, _NO_LIMIT, add_special_tokens=False)
        return [[] if isinstance(ids, RequestError) else ids for ids in found]

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    try:
        template = tokenizer.encode_chat([{"role": "user", "content": "word"}])
    except RequestError:  # no template, or none that takes a single word
        template = []
    return Finder(block_size, decode, encode, template, drawn.num_seen, rate_in_file).find(drawn.prompts)


def part_verdicts(
    drawn: PromptSample, block_size: int, tokenizer: "Tokenizer | None", *, change: str | None = None
) -> list[Verdict]:
    """The same as verdicts. `change`: the command that writes the changed prompts."""
    if not drawn.num_seen:
        return []
    from pagedcli.planning.parting_words import parting_verdict

    return [parting_verdict(found, change=change) for found in find_partings(drawn, block_size, tokenizer)]


def request_verdicts(
    requests: "Iterable[TraceRequest]", block_size: int, tokenizer: "Tokenizer | None"
) -> list[Verdict]:
    """The same of simulated requests, as far as their tokens are known."""
    sample = PromptSample()
    for request in requests:
        if request.token_ids is not None:
            sample.add(request.token_ids, request.cache_salt)
    return part_verdicts(sample, block_size, tokenizer)
