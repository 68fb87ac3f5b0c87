"""What a server answered before a restart, as a file, and whether it still does: `audit --remember` and `--recall`.

Prompts are sent twice, so that a store on disk keeps them. Afterwards each is sent again, without the cache if there is
a way around it (twice, which shows the noise), and once more.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from pagedcli.audit.answers import AnswerChoice
from pagedcli.audit.compare import AnswerDifference, measure_noise
from pagedcli.audit.plan import Ask, ComparedPair, Probe, ProbePrompts, Target
from pagedcli.audit.run import Runner
from pagedcli.errors import UsageError
from pagedcli.files import read_whole, whole_file
from pagedcli.remote import ServerError

CHECK = "restart"
FORMAT = "pagedcli-audit-memory-1"
RESTART_STEPS = {CHECK: "remembered prompts, again", "remember": "prompts for --recall, each twice"}  # names in a plan
_NUM_PROMPTS = 16
_MAX_FILE_BYTES = 16 << 20
_HINT = "name a file that audit --remember has written"


class RememberedPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt and its answer without the cache."""

    words: tuple[int, ...]  # numbers of the words
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]  # natural logarithms, of `tokens`
    top: tuple[dict[str, float], ...]  # per position: likely tokens, with their log-probabilities

    @property
    def choice(self) -> AnswerChoice:
        return AnswerChoice(self.text, self.tokens, self.logprobs, self.top)


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What --recall compares with."""

    format: str
    model: str
    words: tuple[str, ...]  # each of them one token
    num_extra: int  # tokens before the first word
    tolerance: float  # difference of log-probabilities that was noise for the server then
    prompts: tuple[RememberedPrompt, ...]


def remembered_asks(prompts: ProbePrompts) -> list[Ask]:
    """Prompts around the ends of blocks, and long ones."""
    target = prompts.target
    lengths = [length + i for length in target.boundaries() for i in (0, 1, -1)] + [target.long]
    return [Ask(prompts.new(lengths[i % len(lengths)])) for i in range(_NUM_PROMPTS)]


async def remember(runner: Runner, asks: Sequence[Ask]) -> Memory:
    """Send each prompt twice. Raises: ServerError, RefusedError, LimitReached."""
    prompts, pairs = [], list[AnswerDifference]()
    for ask in asks:
        outcome = await runner.run(_remembered(ask))
        pairs += [found for _, found in outcome.compared()]
        prompts.append(RememberedPrompt(words=ask.words, **asdict(outcome.seen[0].answer.choices[0])))
    endpoint = runner.endpoint
    return Memory(
        format=FORMAT, model=runner.client.secrets.without(endpoint.model), words=endpoint.words,
        num_extra=endpoint.num_extra, tolerance=measure_noise(pairs, pairs).tolerance, prompts=tuple(prompts),
    )  # fmt: skip


def save_memory(memory: Memory | None, path: Path, *, overwrite: bool) -> int:
    """Write the file, and return the number of prompts. Raises: ServerError if not all were answered."""
    if memory is None:
        hint = "raise --max-requests, --max-tokens or --max-seconds"
        raise ServerError("stopped before all prompts were answered: nothing was remembered", hint=hint)
    with whole_file(path, overwrite=overwrite) as file:
        file.write(msgspec.json.encode(memory) + b"\n")
    return len(memory.prompts)


def load_memory(path: Path) -> Memory:
    """Read such a file. Raises: UsageError if it is not one that --remember wrote."""
    try:
        memory = msgspec.json.decode(read_whole(path, _MAX_FILE_BYTES), type=Memory)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=_HINT) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = f"not what audit --remember writes ({FORMAT}), or damaged: {error}"
        raise UsageError(f"{path} is {why}", hint=_HINT) from error
    words_fit = all(0 <= number < len(memory.words) for prompt in memory.prompts for number in prompt.words)
    if memory.format != FORMAT or not memory.prompts or not words_fit:
        raise UsageError(f"{path} is not what audit --remember writes ({FORMAT})", hint=_HINT)
    return memory


def planned_probes(prompts: ProbePrompts, memory: Memory | None, *, remembers: bool) -> list[Probe]:
    """The probes around a restart that an audit of such a server makes, for the plan."""
    recalled = [] if memory is None else [_recalled(Ask(each.words), prompts.target, 0) for each in memory.prompts]
    asks = remembered_asks(prompts) if remembers else []
    return [*recalled, *map(_remembered, asks)]


def _remembered(ask: Ask) -> Probe:
    return Probe("remember", len(ask.words), ((ask,), (ask,)), (ComparedPair(0, 1),))


def _recalled(ask: Ask, target: Target, num_extra: int) -> Probe:
    cold = replace(ask, is_cold=True)
    steps = [(ask,)] if target.bypass is None else [(ask,), (cold,), (cold,)]
    pairs = (ComparedPair(0, 1),) if target.bypass is None else (ComparedPair(1, 0), ComparedPair(1, 3))
    return Probe(CHECK, len(ask.words) + num_extra, (*steps, (ask,)), pairs)


def recalled_probes(memory: Memory, runner: Runner, target: Target) -> list[Probe]:
    """A probe for each prompt. Raises: UsageError if the server now makes other tokens of them."""
    endpoint = runner.endpoint
    if (memory.words, memory.num_extra) != (endpoint.words, endpoint.num_extra):
        raise UsageError(
            "the server tokenizes the remembered prompts differently: its tokenizer has changed",
            hint="remember again, with the server as it is now",
        )
    probes = []
    for prompt in memory.prompts:
        ask = Ask(prompt.words)
        runner.know(ask)
        probes.append(_recalled(ask, target, endpoint.num_extra))
    return probes
