"""A small server of completions with a prefix cache that is right, or wrong in one chosen way.

Used by `pagedcli audit --self-test` and the tests. The model is a toy whose next token depends on every token of the
prompt and their places, so that any wrong block shows; the arithmetic has noise as large as that of bfloat16.
"""

import json
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pagedcli.audit.survey import WORDS
from pagedcli.printable import plural

Floats = npt.NDArray[np.float64]
Fault = Literal[
    "stale-block", "off-by-one", "full-hit", "across-salts", "wrong-positions", "moved-block", "wrong-row",
    "only-claimed", "second-hit", "long-hit", "silent-leak",
]  # fmt: skip
FAULTS: dict[Fault, str] = {
    "stale-block": "an evicted block is still found, with the content of another prompt",
    "off-by-one": "the last token of a block is not compared",
    "full-hit": "a prompt of whole blocks is a full hit, and its last token is computed one place too late",
    "across-salts": "cache_salt is checked, but not part of the key",
    "wrong-positions": "the tokens after a hit are computed one place too late",
    "moved-block": "a block is found by its own tokens, whatever is before it",
    "wrong-row": "log-probabilities of a hit are those of another request that runs at the same time",
    "only-claimed": "cached tokens are reported, and computed again",
    "second-hit": "a block is right when it is found first, and one place too late from then on",
    "long-hit": "the tokens after 50 and more cached blocks are computed one place too late",
    "silent-leak": "cache_salt is not part of the key, and hits of other salts are not reported",
}
_VOCABULARY = 997
_BOS = 0
_NUM_LOGITS = len(WORDS)
_STEP_S = 0.004  # least time of a request: those sent together run together
_SCALE, _OWN = 2.0, 1.5  # weights of all tokens and of the last one in the logits


def _word_tokens() -> dict[str, int]:
    """A token for each word of the audit, as in real vocabularies."""
    tokens: dict[str, int] = {}
    for word in WORDS:
        token = _hashed(word)
        while token in tokens.values():
            token = 1 + token % (_VOCABULARY - 1)
        tokens[word] = token
    return tokens


def _hashed(word: str) -> int:
    return 1 + zlib.crc32(word.encode()) % (_VOCABULARY - 1)


_TOKENS = _word_tokens()


def token_of(word: str) -> int:
    """The token of any word. Words that the audit does not send may have the same one."""
    return _TOKENS.get(word) or _hashed(word)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the server is like."""

    fault: Fault | None = None
    seed: int = 0
    block_size: int = 16
    num_blocks: int = 512
    has_bos: bool = False
    has_logprobs: bool = True
    has_one_id: bool = False  # the tokenizer maps all words to one id
    reports: bool = True
    has_salts: bool = True
    separates_users: bool = False
    is_llama: bool = False  # llama-server's fields: timings.cache_n and cache_prompt
    noise: float = 2**-8  # relative to a logit: bfloat16 keeps 8 bits
    seconds_per_token: float = 100e-6
    max_model_len: int = 2048


class ToyModel:
    """Logits from a sum over the values of all tokens, which are what the cache keeps."""

    def __init__(self, seed: int) -> None:
        self._table = np.random.default_rng(seed).normal(size=(_VOCABULARY, _NUM_LOGITS))
        self._turn = (np.arange(_NUM_LOGITS) + 1) % _NUM_LOGITS

    def values(self, tokens: list[int], start: int, before: Floats | None, *, shift: int = 0) -> Floats:
        """The values of tokens[start:], after the value `before` of the token at start - 1.

        `shift` is a fault: tokens that take themselves for later ones.
        """
        ids = np.array(tokens[start:], dtype=int)
        places = np.arange(start, len(tokens))[:, None] + shift
        values: Floats = self._table[ids[:, None], (np.arange(_NUM_LOGITS)[None, :] - 5 * places) % _NUM_LOGITS]
        last = np.zeros(_NUM_LOGITS) if before is None else before
        for row in values:  # each value depends on all tokens before it, as in a real model
            row += 0.5 * last[self._turn]
            last = row
        return values

    def logits(self, total: Floats, last: Floats, count: int) -> Floats:
        return np.asarray(_SCALE * total / np.sqrt(count) + _OWN * last)


class ToyCache:
    """Blocks of values, found by all tokens up to their end, evicted least recently used first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._blocks: dict[int, Floats] = {}
        self._index: dict[Any, int] = {}  # key -> block id
        self._found: set[Any] = set()  # keys
        self._owned: set[Any] = set()  # (salt, key)
        self._used: OrderedDict[int, Any] = OrderedDict()  # block id -> key, least recently used first

    def _key(self, tokens: list[int], end: int, salt: str) -> Any:
        fault = self._settings.fault
        start = end - self._settings.block_size if fault == "moved-block" else 0
        salt = "" if fault in ("across-salts", "silent-leak") else salt
        return salt, tuple(tokens[start : end - 1 if fault == "off-by-one" else end])

    def find(self, tokens: list[int], salt: str) -> list[Floats]:
        """The values of the longest cached prefix, in blocks; never of the last token."""
        size = self._settings.block_size
        last = len(tokens) if self._settings.fault == "full-hit" else len(tokens) - 1
        found: list[Floats] = []
        for end in range(size, last + 1, size):
            block_id = self._index.get(self._key(tokens, end, salt))
            if block_id is None:
                break
            self._used.move_to_end(block_id)
            found.append(self._blocks[block_id])
        return found

    def is_found_again(self, tokens: list[int], num_blocks: int, salt: str) -> bool:
        """Whether the last block of a hit was found before. From now on it was."""
        key = self._key(tokens, num_blocks * self._settings.block_size, salt)
        is_again = key in self._found
        self._found.add(key)
        return is_again

    def num_owned(self, tokens: list[int], num_blocks: int, salt: str) -> int:
        """How many blocks of a hit this salt has stored itself."""
        size = self._settings.block_size
        keys = [(salt, self._key(tokens, end, salt)) for end in range(size, num_blocks * size + 1, size)]
        return next((i for i, key in enumerate(keys) if key not in self._owned), num_blocks)

    def store(self, tokens: list[int], salt: str, values: Floats) -> None:
        size = self._settings.block_size
        for end in range(size, len(tokens) + 1, size):
            key = self._key(tokens, end, salt)
            self._owned.add((salt, key))
            if key in self._index:
                continue
            block_id = len(self._blocks)
            if block_id == self._settings.num_blocks:
                block_id, old = self._used.popitem(last=False)
                if self._settings.fault != "stale-block":
                    del self._index[old]
            self._index[key] = block_id
            self._used[block_id] = key
            self._blocks[block_id] = values[end - size : end].copy()


class ToyServer(ThreadingHTTPServer):
    """Listens on this machine only; start it with `serving`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, settings: Settings) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.settings = settings
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self._model = ToyModel(settings.seed)
        self.cache = ToyCache(settings)
        self._lock = threading.Lock()
        self.num_answers = 0
        self._num_running = 0
        self._last_row: list[dict[str, Any]] | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: clients that leave early are part of the tests."""

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises: ValueError for what a real server would refuse, too."""
        settings = self.settings
        if body["model"] != "toy":
            raise ValueError(f"there is no model {body['model']}")
        tokens = [_BOS] if settings.has_bos else []
        tokens += [1 if settings.has_one_id else token_of(word) for word in body["prompt"].split()]
        salt = body.get("cache_salt") if settings.has_salts else ""
        if settings.has_salts and salt == "":
            raise ValueError("cache_salt must not be empty")
        owner = f"{salt or ''} {body.get('user', '')}" if settings.separates_users else salt or ""
        if len(tokens) + body["max_tokens"] > settings.max_model_len:
            raise ValueError(f"the longest sequence has {plural(settings.max_model_len, 'token')}")
        with self._lock:
            self._num_running += 1
            is_bypassed = settings.is_llama and body.get("cache_prompt") is False
            blocks = [] if is_bypassed else self.cache.find(tokens, owner)
            num_cached = len(blocks) * settings.block_size
            num_reported = num_cached
            if settings.fault == "silent-leak":
                num_reported = self.cache.num_owned(tokens, len(blocks), owner) * settings.block_size
            is_crowded = self._num_running > 1
        uncached = len(tokens) if settings.fault == "only-claimed" else len(tokens) - num_cached
        time.sleep(settings.seconds_per_token * uncached + _STEP_S)
        with self._lock:
            is_crowded |= self._num_running > 1
            choices = self._choices(body, tokens, blocks, owner, is_crowded=is_crowded)
            self._num_running -= 1
            self.num_answers += 1
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": body["max_tokens"]}
        document = {"id": "0", "object": "text_completion", "model": "toy", "choices": choices, "usage": usage}
        if settings.reports and settings.is_llama:
            return {**document, "timings": {"cache_n": num_reported, "prompt_n": uncached}}
        if settings.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": num_reported} if num_reported else None  # as vLLM
        return document

    def _choices(
        self, body: dict[str, Any], tokens: list[int], blocks: list[Floats], salt: str, *, is_crowded: bool
    ) -> list[dict[str, Any]]:
        num_cached = len(blocks) * self.settings.block_size
        fault = self.settings.fault
        is_late = num_cached > 0 and (
            fault == "wrong-positions"
            or (fault == "long-hit" and len(blocks) >= 50)
            or (fault == "second-hit" and self.cache.is_found_again(tokens, len(blocks), salt))
        )
        start = min(num_cached, len(tokens) - 1)  # the last token of a full hit is computed again
        shift = 1 if is_late or num_cached == len(tokens) else 0
        cached = np.concatenate([np.empty((0, _NUM_LOGITS)), *blocks])
        new = self._model.values(tokens, start, cached[start - 1] if start else None, shift=shift)
        values = np.concatenate([cached, new])  # a full hit has its last token twice
        self.cache.store(tokens, salt, np.concatenate([cached[:start], new]))
        rows = [self._generate(body, tokens, values, shift, number) for number in range(body.get("n", 1))]
        if self.settings.fault == "wrong-row" and num_cached and is_crowded and self._last_row is not None:
            rows[0] = [{**mine, "top": other["top"]} for mine, other in zip(rows[0], self._last_row, strict=False)]
        else:
            self._last_row = rows[0]
        return [self._choice(body, number, row) for number, row in enumerate(rows)]

    def _generate(
        self, body: dict[str, Any], tokens: list[int], values: Floats, shift: int, number: int
    ) -> list[dict[str, Any]]:
        """Greedy tokens with their alternatives."""
        tokens = list(tokens)
        total, last, row = values.sum(axis=0), values[-1], []
        shape = (self._num_running, len(values), number, zlib.crc32(body["prompt"].encode()), time.monotonic_ns() % 97)
        noise = np.random.default_rng([self.settings.seed, *shape])
        for _ in range(body["max_tokens"]):
            logits = self._model.logits(total, last, len(tokens))
            logits = logits + self.settings.noise * np.abs(logits) * noise.normal(size=_NUM_LOGITS)
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logprobs)[: max(1, body.get("logprobs") or 1)]
            row.append({"token": f" {WORDS[best[0]]}", "top": {f" {WORDS[i]}": float(logprobs[i]) for i in best}})
            tokens.append(1 if self.settings.has_one_id else token_of(WORDS[best[0]]))
            last = self._model.values(tokens, len(tokens) - 1, last, shift=shift)[0]
            total = total + last
        return row

    def _choice(self, body: dict[str, Any], number: int, row: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [each["token"] for each in row]
        choice: dict[str, Any] = {"index": number, "text": "".join(texts), "finish_reason": "length", "logprobs": None}
        if self.settings.has_logprobs and body.get("logprobs"):
            values = [each["top"].get(each["token"], min(each["top"].values())) for each in row]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": values,
                "top_logprobs": [each["top"] for each in row],
            }
        return choice


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: ToyServer

    def do_GET(self) -> None:
        models = [{"id": "toy", "object": "model", "max_model_len": self.server.settings.max_model_len}]
        self._send(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer = self.server.complete(body)
        except ValueError as error:
            self._send(400, {"error": {"message": str(error), "type": "BadRequestError"}})
            return
        if body.get("stream"):
            self._stream(answer)
        else:
            self._send(200, answer)

    def _send(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in [*_events(answer), "[DONE]"]:
            text = event if isinstance(event, str) else json.dumps(event)
            line = f"data: {text}\n\n".encode()
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def _events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One event per token, then the usage."""
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        texts = [f" {word}" for word in choice["text"].split()]
        for place, text in enumerate(texts):
            part = None if logprobs is None else {key: values[place : place + 1] for key, values in logprobs.items()}
            yield {"choices": [{"index": choice["index"], "text": text, "logprobs": part}]}
    yield {**answer, "choices": []}


@contextmanager
def serving(settings: Settings) -> Iterator[ToyServer]:
    """A running server, in a thread."""
    server = ToyServer(settings)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
