"""What a server offers, before anything is judged: its model, its tokens, log-probabilities, block size and salts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from pagedcli.audit.answers import Answer
from pagedcli.audit.client import Client
from pagedcli.audit.compare import FACTOR_ALONE, LARGEST_TOLERANCE, USUAL_TOLERANCE, compare
from pagedcli.audit.plan import MAX_NEW, Ask, Probe, ProbePrompts, Target
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


class Survey:
    """What was found out, and the runner that the requests of an audit go through."""

    def __init__(self, client: Client, concurrency: int) -> None:
        self.runner = Runner(client, Endpoint("", WORDS, 0), reports=False)
        self.target = Target(len(WORDS), concurrency=concurrency)
        self.cached_field: str | None = None  # path of the number of cached tokens in an answer
        self.notes: list[str] = []

    async def find_words(self, model: str | None) -> bool:
        """The model and how it counts words; whether the server says how long a prompt may be.

        Raises: ServerError, UsageError, LimitReached.
        """
        client = self.runner.client
        name, max_length = await _model(client, model)
        endpoint = await _probe_features(client, Endpoint(name, WORDS, 0))
        endpoint = self.runner.endpoint = await _probe_words(client, endpoint)
        self.target = replace(
            self.target, num_words=len(endpoint.words), num_extra=endpoint.num_extra, max_length=max_length or 2048,
            has_logprobs=endpoint.has_logprobs,
        )  # fmt: skip
        return max_length is not None

    async def find_all(self, model: str | None, seed: int) -> None:
        """Ask the server about itself. Raises: ServerError, UsageError, LimitReached."""
        is_length_known = await self.find_words(model)
        await self._find_unit(ProbePrompts(self.target, seed), is_length_known=is_length_known)
        if not is_length_known:
            await self._find_length(ProbePrompts(self.target, seed + 2))
        await self._find_bypass(ProbePrompts(self.target, seed + 1))

    async def _find_unit(self, prompts: ProbePrompts, *, is_length_known: bool) -> None:
        """The match unit, by repeating prompts and by sharing prefixes of chosen lengths; None if it stays unknown."""
        longest, length = self.target.max_length - MAX_NEW, 0
        for tried in sorted({min(tried, longest) for tried in _LENGTHS}):
            try:
                hit = await self._hit(prompts, tried, tried)
            except RefusedError:
                if length == 0 or is_length_known:
                    raise
                break  # longer than the server takes; no hit so far
            length, self.cached_field = tried, hit.cached_field or self.cached_field
            if hit.num_cached:
                self.runner.reports = True
                unit, smallest = await self._narrow(prompts, length, hit.num_cached)
                if unit is None:
                    self.notes.append("hits of shared prefixes fit no block size")
                self.target = replace(self.target, unit=unit, smallest=smallest)
                break
        self.target = replace(self.target, reports=self.runner.reports)

    async def _find_length(self, prompts: ProbePrompts) -> None:
        """The longest prompt to use, of a server that does not say what it takes."""
        for length in (length for length in _TRIED_LENGTHS if length < self.target.max_length):
            try:
                await self._send("length", length, Ask(prompts.new(length), max_new=1))
            except RefusedError:
                continue
            self.target = replace(self.target, max_length=length + MAX_NEW)
            return

    async def _send(self, check: str, length: int, *asks: Ask) -> Answer:
        """The answer to the last of some requests, one after the other."""
        outcome = await self.runner.run(Probe(check, length, tuple((ask,) for ask in asks)))
        return outcome.seen[-1].answer

    async def _hit(self, prompts: ProbePrompts, length: int, shared: int) -> Answer:
        """The second of two answers whose prompts share the first `shared` tokens."""
        words, extra = prompts.new(length), prompts.target.num_extra
        other = words if shared == length else prompts.parting(words, shared - extra, length - extra)
        return await self._send("unit", length, Ask(words, max_new=1), Ask(other, max_new=1))

    async def _narrow(self, prompts: ProbePrompts, length: int, full_hit: int) -> tuple[int | None, int]:
        """The block size and the shortest prefix that is cached, from prefixes at which possible sizes disagree most.

        full_hit: cached tokens of a repeated prompt.
        """
        sizes = {
            size for size in range(1, length + 1) if full_hit in ((length - 1) // size * size, length // size * size)
        }
        sizes |= {1} if full_hit >= length - 1 else set()
        longest, first = length - _SHORTEST_TAIL, prompts.target.num_extra + 1
        for _ in range(_MOST_UNIT_PROBES):
            shared = _most_telling(sizes, range(max(first, length // 3), longest))
            if shared is None:
                break
            cached = (await self._hit(prompts, length, shared)).num_cached or 0
            sizes = {size for size in sizes if shared // size * size == cached}
        unit = max(sizes, default=None)
        if unit is None:
            return None, 0
        is_block = _SHORTEST_TAIL <= unit < longest
        tried = min(longest, unit + 1) if is_block else first + 2
        if (await self._hit(prompts, length, tried)).num_cached:  # usually: then no bisection is needed
            return unit, unit
        low = unit if is_block else first
        high = next((n for n in range(unit, length, unit) if n > length // 3), unit)  # blocks known to hit by now
        while high - low > unit:
            middle = low + max(unit, (high - low) // 2 // unit * unit)
            if (await self._hit(prompts, length, middle)).num_cached:
                high = middle
            else:
                low = middle
        return unit, high

    async def _find_bypass(self, prompts: ProbePrompts) -> None:
        """Whether salts are offered, and a way to compute a prompt again without the cache."""
        runner, offered = self.runner, False
        body = {**runner.endpoint.body(Ask((0, 1, 2, 3), max_new=1)), "cache_salt": ""}
        try:  # a server that knows the field refuses it
            await runner.client.complete(body, num_tokens=8)
        except RefusedError as error:
            offered = error.status in (400, 422)
        if not self.target.reports:
            return
        self.target = replace(self.target, isolates=False if offered else None)
        length = max(self.target.boundaries((1, 2)))
        plain = runner.endpoint
        ways: tuple[Literal["salt", "cache_prompt"], ...] = ("salt", "cache_prompt")
        for way in ways:
            runner.endpoint = replace(plain, bypass=way)
            ask = Ask(prompts.new(length), max_new=1)
            probe = Probe("bypass", length, ((ask,), (ask,), (replace(ask, is_cold=True),)))
            try:
                _, warm, cold = (await runner.run(probe)).seen
            except RefusedError:
                continue
            if warm.num_cached > cold.num_cached == 0:
                isolates = True if way == "salt" else self.target.isolates
                self.target = replace(self.target, bypass=way, isolates=isolates)
                return
        runner.endpoint = plain


async def _model(client: Client, wanted: str | None) -> tuple[str, int | None]:
    """The name of the model, and its longest prompt if the server says so."""
    try:
        document = await client.get("/models")
    except RefusedError as error:
        if wanted is None or error.status in (401, 403):
            raise _with_hint(error) from error
        return wanted, None
    models = document.get("data") if isinstance(document, dict) else None
    by_name = {
        each["id"]: each for each in (models if isinstance(models, list) else ())
        if isinstance(each, dict) and isinstance(each.get("id"), str)
    }  # fmt: skip
    if wanted is None and len(by_name) != 1:
        names = ", ".join(one_line(client.secrets.without(name))[:60] for name in list(by_name)[:8]) or "none"
        raise UsageError(f"the server has {len(by_name)} models: {names}", hint="choose one with -m MODEL")
    name = next(iter(by_name)) if wanted is None else wanted
    chosen = by_name.get(name, {})
    meta = chosen.get("meta")
    for length in (chosen.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None):
        if isinstance(length, int) and not isinstance(length, bool) and 64 <= length < 1 << 30:
            return name, min(length, 4096)
    return name, None


def _with_hint(error: RefusedError) -> ServerError:
    hint = "put the key into a variable and name it: --key-env NAME" if error.status in (401, 403) else (
        "is this the part of the address before /completions, such as http://localhost:8000/v1?"
    )  # fmt: skip
    return ServerError(error.message, hint=hint)


async def _probe_features(client: Client, endpoint: Endpoint) -> Endpoint:
    """Leave out of the requests what the server refuses, one field after the other."""
    refused: RefusedError | None = None
    for has_logprobs, ignores_eos in product((True, False), repeat=2):
        candidate = replace(endpoint, has_logprobs=has_logprobs, ignores_eos=ignores_eos)
        try:
            answer = await client.complete(candidate.body(Ask(tuple(range(8)))), num_tokens=16)
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
        answer = await client.complete(endpoint.body(Ask(tuple(numbers), max_new=1)), num_tokens=4 * len(numbers))
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


def _most_telling(sizes: set[int], candidates: Sequence[int]) -> int | None:
    """The length of a shared prefix whose hit would rule out most sizes; None if no length tells them apart."""

    def groups(shared: int) -> int:
        return len({shared // size * size for size in sizes})

    best = max(candidates, key=groups, default=None)
    return best if best is not None and groups(best) > 1 else None
