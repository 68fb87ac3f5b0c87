"""What a server offers, before anything is judged: its model, its tokens, log-probabilities, block size and salts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pagedcli.audit.answers import Answer
from pagedcli.audit.client import Client
from pagedcli.audit.compare import FACTOR_ALONE, LARGEST_TOLERANCE, USUAL_TOLERANCE, compare
from pagedcli.audit.plan import MAX_NEW, Ask, Probe, Prompts, Target
from pagedcli.audit.run import Endpoint, Runner
from pagedcli.errors import UsageError
from pagedcli.printable import one_line
from pagedcli.remote import RefusedError, ServerError

# each is one token with the space before it in the vocabularies of Llama, Qwen, Gemma, GPT-2 and of tiny test models
WORDS = tuple(
    "the to and he was her it in day be with said play his up that on mom she you they big of friend little time had"  # noqa: SIM905
    " we there so for want happy saw named but very do".split()
)
_FEWEST_WORDS = 12
_LENGTHS = (160, 640, 2048)  # tokens of the first prompts: the shortest that is cached at all tells where to look
_TRIED_LENGTHS = (2030, 1010, 500, 240)
_MOST_UNIT_PROBES = 8
_SHORTEST_TAIL = 4


@dataclass(slots=True)
class Survey:
    """What was found out."""

    endpoint: Endpoint
    target: Target
    cached_field: str | None = None  # path of the number of cached tokens in an answer
    full_hit: int | None = None  # cached tokens of a repeated prompt
    notes: list[str] = field(default_factory=list)


async def survey(
    client: Client, *, model: str | None, seed: int, concurrency: int, only_words: bool = False
) -> tuple[Runner, Survey]:
    """Ask the server about itself, or only how it counts words. Raises: ServerError, UsageError, LimitReached."""
    model, max_length = await _model(client, model)
    endpoint = await _probe_features(client, Endpoint(model, WORDS, 0))
    endpoint = await _probe_words(client, endpoint)
    target = Target(
        len(endpoint.words), endpoint.num_extra, max_length or 2048, None, has_logprobs=endpoint.has_logprobs,
        concurrency=concurrency,
    )  # fmt: skip
    runner = Runner(client, endpoint, reports=False)
    found = Survey(endpoint, target)
    if only_words:
        return runner, found
    await _find_unit(runner, found, seed, is_length_known=max_length is not None)
    if max_length is None:
        await _find_length(runner, found, seed)
    await _find_bypass(runner, found, seed)
    return runner, found


async def _model(client: Client, wanted: str | None) -> tuple[str, int | None]:
    """The name of the model, and its longest prompt if the server says so."""
    try:
        document = await client.get("/models")
    except RefusedError as error:
        if wanted is None or error.status in (401, 403):
            raise _with_hint(error) from error
        return wanted, None
    models = document.get("data") if isinstance(document, dict) else None
    known = [each for each in models if isinstance(each, dict) and isinstance(each.get("id"), str)] if isinstance(
        models, list
    ) else []  # fmt: skip
    if wanted is None:
        if len(known) != 1:
            names = ", ".join(one_line(client.secrets.without(each["id"]))[:60] for each in known[:8]) or "none"
            raise UsageError(f"the server has {len(known)} models: {names}", hint="choose one with -m MODEL")
        chosen = known[0]
    else:
        chosen = next((each for each in known if each["id"] == wanted), {"id": wanted})
    meta = chosen.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    for length in (chosen.get("max_model_len"), meta.get("n_ctx")):
        if isinstance(length, int) and not isinstance(length, bool) and 64 <= length < 1 << 30:
            return chosen["id"], min(length, 4096)
    return chosen["id"], None


def _with_hint(error: RefusedError) -> ServerError:
    hint = "put the key into a variable and name it: --key-env NAME" if error.status in (401, 403) else (
        "is this the part of the address before /completions, such as http://localhost:8000/v1?"
    )  # fmt: skip
    return ServerError(error.message, hint=hint)


async def _probe_features(client: Client, endpoint: Endpoint) -> Endpoint:
    """Leave out of the requests what the server refuses, one field after the other."""
    ask = Ask(tuple(range(8)))
    candidates = [
        endpoint, replace(endpoint, ignores_eos=False), replace(endpoint, has_logprobs=False),
        replace(endpoint, ignores_eos=False, has_logprobs=False),
    ]  # fmt: skip
    refused: RefusedError | None = None
    for candidate in candidates:
        try:
            answer = await client.complete(candidate.body(ask), num_tokens=16)
        except RefusedError as error:
            if error.status in (401, 403, 404):
                raise _with_hint(error) from error
            refused = refused or error
            continue
        if answer.num_prompt is None:
            raise ServerError("the server does not count the tokens of prompts (usage.prompt_tokens)")
        await _check_ids(client, candidate, answer)
        return replace(candidate, has_logprobs=bool(answer.choices[0].top))
    assert refused is not None, "a candidate was refused"
    raise refused


async def _check_ids(client: Client, endpoint: Endpoint, answer: Answer) -> None:
    """Raises: ServerError if prompts too short for most caches are all answered alike: then none is told apart."""
    again, *others = [
        compare(answer.choices[0], (await client.complete(endpoint.body(ask), num_tokens=16)).choices[0])
        for ask in (Ask(tuple(range(start, start + 8))) for start in (0, 8, 16, 24))
    ]
    noise = min(LARGEST_TOLERANCE, max(USUAL_TOLERANCE, FACTOR_ALONE * (again.distance or 0.0)))
    if all(other.exceeds(noise) for other in others):
        return
    raise ServerError(
        "different prompts get the same answer, as if all words had one token id: nothing can be said about the cache",
        hint="check the server's tokenizer, and that it runs the model",
    )


async def _probe_words(client: Client, endpoint: Endpoint) -> Endpoint:
    """Keep the words that are one token each, by halving groups whose token counts are too large."""

    async def num_tokens(numbers: Sequence[int]) -> int:
        body = {**endpoint.body(Ask(tuple(numbers), max_new=1))}
        answer = await client.complete(body, num_tokens=4 * len(numbers))
        if answer.num_prompt is None:
            raise ServerError("the server does not count the tokens of every prompt (usage.prompt_tokens)")
        return answer.num_prompt

    everything = tuple(range(len(endpoint.words)))
    half = len(everything) // 2
    groups = [everything[:half], everything[half:]]
    counts = [await num_tokens(group) for group in groups]
    num_extra = sum(counts) - await num_tokens(everything)
    good: list[int] = []
    for _ in range(12):
        if not groups:
            break
        group, count = groups.pop(0), counts.pop(0)
        if count - num_extra == len(group):
            good += group
        elif len(group) > 4:
            middle = len(group) // 2
            first = await num_tokens(group[:middle])
            groups += [group[:middle], group[middle:]]
            counts += [first, count - first + num_extra]
    if num_extra < 0 or len(good) < _FEWEST_WORDS:
        raise ServerError(
            "prompts of a known length cannot be made: the server does not count common words as one token each"
        )
    return replace(endpoint, words=tuple(endpoint.words[number] for number in sorted(good)), num_extra=num_extra)


async def _find_unit(runner: Runner, found: Survey, seed: int, *, is_length_known: bool) -> None:
    """The match unit, by repeating prompts and by sharing prefixes of chosen lengths; None if it stays unknown."""
    prompts = Prompts(found.target, seed)
    longest = found.target.max_length - MAX_NEW
    base_length = 0
    for length in _LENGTHS:
        length = min(length, longest)
        if length <= base_length:
            break
        try:
            hit = await _hit_of(runner, prompts, length, length)
        except RefusedError:
            if base_length == 0 or is_length_known:
                raise
            break  # longer than the server takes; no hit so far
        base_length = length
        found.cached_field = hit.cached_field or found.cached_field
        if hit.num_cached:
            runner.reports, found.full_hit = True, hit.num_cached
            break
    found.target = replace(found.target, reports=runner.reports)
    if found.full_hit is None:
        return
    unit, smallest = await _narrow(runner, prompts, base_length, found.full_hit)
    if unit is None:
        found.notes.append("hits of shared prefixes fit no block size")
    found.target = replace(found.target, unit=unit, smallest=smallest)


async def _find_length(runner: Runner, found: Survey, seed: int) -> None:
    """The longest prompt to use, of a server that does not say what it takes."""
    prompts = Prompts(found.target, seed + 2)
    for length in (length for length in _TRIED_LENGTHS if length < found.target.max_length):
        try:
            await runner.run(Probe("length", length, ((Ask(prompts.new(length), max_new=1),),)))
        except RefusedError:
            continue
        found.target = replace(found.target, max_length=length + MAX_NEW)
        return


async def _hit_of(runner: Runner, prompts: Prompts, length: int, shared: int) -> Answer:
    """The second of two answers whose prompts share the first `shared` tokens."""
    words = prompts.new(length)
    extra = prompts.target.num_extra
    other = words if shared == length else prompts.parting(words, shared - extra, length - extra)
    steps = ((Ask(words, max_new=1),), (Ask(other, max_new=1),))
    outcome = await runner.run(Probe("unit", length, steps))
    return outcome.seen[1].answer


async def _narrow(runner: Runner, prompts: Prompts, length: int, full_hit: int) -> tuple[int | None, int]:
    """The block size and the shortest prefix that is cached, from prefixes at which possible sizes disagree most."""
    sizes = {size for size in range(1, length + 1) if full_hit in ((length - 1) // size * size, length // size * size)}
    sizes |= {1} if full_hit >= length - 1 else set()
    longest = length - _SHORTEST_TAIL
    for _ in range(_MOST_UNIT_PROBES):
        shared = _most_telling(sizes, range(max(prompts.target.num_extra + 1, length // 3), longest))
        if shared is None:
            break
        cached = (await _hit_of(runner, prompts, length, shared)).num_cached or 0
        sizes = {size for size in sizes if shared // size * size == cached}
    unit = max(sizes, default=None)
    if unit is None:
        return None, 0
    low, high = 0, next((n for n in range(unit, length, unit) if n > length // 3), unit)  # blocks known to hit by now
    if unit >= _SHORTEST_TAIL and unit < longest:  # usually the first block is cached: then no bisection is needed
        if (await _hit_of(runner, prompts, length, min(longest, unit + 1))).num_cached:
            return unit, unit
        low = unit
    else:
        low = prompts.target.num_extra + 1
        if (await _hit_of(runner, prompts, length, low + 2)).num_cached:
            return unit, unit
    while high - low > unit:
        middle = low + max(unit, (high - low) // 2 // unit * unit)
        if (await _hit_of(runner, prompts, length, middle)).num_cached:
            high = middle
        else:
            low = middle
    return unit, high


def _most_telling(sizes: set[int], candidates: Sequence[int]) -> int | None:
    """The length of a shared prefix whose hit would rule out most sizes; None if no length tells them apart."""

    def groups(shared: int) -> int:
        return len({shared // size * size for size in sizes})

    best = max(candidates, key=groups, default=None)
    return best if best is not None and groups(best) > 1 else None


async def _find_bypass(runner: Runner, found: Survey, seed: int) -> None:
    """Whether salts are offered, and a way to compute a prompt again without the cache."""
    target = found.target
    prompts = Prompts(target, seed + 1)
    offered = await _refuses(runner, lambda body: {**body, "cache_salt": ""})
    if not target.reports:
        found.target = replace(target, isolates=None)
        return
    length = max(target.boundaries((1, 2)) or [target.max_length // 2])
    ways: tuple[Literal["salt", "cache_prompt"], ...] = ("salt", "cache_prompt")
    for way in ways:
        runner.endpoint = replace(runner.endpoint, bypass=way)
        ask = Ask(prompts.new(length), max_new=1)
        probe = Probe("bypass", length, ((ask,), (ask,), (replace(ask, is_cold=True),)))
        try:
            outcome = await runner.run(probe)
        except RefusedError:
            continue
        warm, cold = (each.answer.num_cached or 0 for each in outcome.seen[1:])
        if warm > cold and cold == 0:
            found.target = replace(target, bypass=way, isolates=True if way == "salt" else (False if offered else None))
            found.endpoint = runner.endpoint
            return
    runner.endpoint = found.endpoint = replace(runner.endpoint, bypass=None)
    found.target = replace(target, bypass=None, isolates=False if offered else None)


async def _refuses(runner: Runner, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Whether a body that is wrong in one field is refused: the server knows the field."""
    body = runner.endpoint.body(Ask((0, 1, 2, 3), max_new=1))
    try:
        await runner.client.complete(change(body), num_tokens=8)
    except RefusedError as error:
        return error.status in (400, 422)
    return False
