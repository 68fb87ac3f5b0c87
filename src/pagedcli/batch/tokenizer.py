"""Text to token ids and back: the model's own tokenizer, its chat template, exact output text, all at once or token by
token, and the search for stop strings.

Used by batch.run and the Python interface; the only module that uses transformers' tokenizers. The pieces of
incremental detokenization equal the text of decoding all tokens at once (tested).
"""

import re
from collections.abc import Sequence as Ids
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pagedcli.batch.chat_template import ChatRenderer, read_template
from pagedcli.core.prefixes import num_equal
from pagedcli.errors import ModelError, RequestError
from pagedcli.later import transformers
from pagedcli.models.gguf.header import is_gguf, read_header
from pagedcli.sampling_params import SamplingParams

# a long text is tokenized piece by piece at first: a prompt far beyond the model's length is refused after a small one
_FIRST_CHARACTERS, _GROWTH = 4096, 8
_PANIC = "PanicException"  # the Rust library's: no subclass of Exception, and its module cannot be imported
_TAIL = 8  # prompt tokens decoded before the output: enough to know whether its first word begins with a space
_ENCODE = "_encode_plus"  # the wrapper's method that all its ways of encoding call
NO_TOOLS = "the chat template does not show tools to the model"
_MOST_GROWTH = 1000  # times as long; known tokenizers at most double a text
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_WRAPPERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # two names of one class
WRAPPED = ("llama", "qwen3")  # model_types for which AutoTokenizer believes a tokenizer_class that is one of these
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)


class Tokenizer:
    """The tokenizer in a model's folder or GGUF file.

    `chat_template` is Jinja text, the path of a file with it, or the name of one of the tokenizer's own templates;
    None: these. Raises: ModelError if the folder has no usable tokenizer; UsageError for a bad template.
    """

    def __init__(self, folder: Path, *, chat_template: str | None = None, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self._hf = _load(folder, trust_remote_code=trust_remote_code)
        if chat_template is not None:
            named = self._hf.chat_template if isinstance(self._hf.chat_template, dict) else {}
            self._hf.chat_template = named.get(chat_template) or read_template(chat_template)
        if not isinstance(self._hf.chat_template, str | dict | None):
            raise ModelError(
                f"the chat_template of the tokenizer in {folder} is {self._hf.chat_template!r:.40}, not a template",
                hint="give one with --chat-template",
            )
        backend = getattr(self._hf, "backend_tokenizer", None)
        slow = partial(self._hf.decode, clean_up_tokenization_spaces=False)
        if backend is not None:
            _check_growth(folder, backend)
        self._decode = slow if backend is None else backend.decode  # 5 times as fast as the wrapper's
        self._backend = None if backend is None else _backend_of(self._hf)
        self._special_tokens = frozenset(self._hf.all_special_tokens)
        self._is_byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)
        self._has_byte_tokens = backend is None or "ByteFallback" in repr(backend.decoder)
        self._renderer = ChatRenderer(self._hf)
        if chat_template is not None:
            self._renderer.check(str(self._hf.chat_template))
        self.token_bytes = lru_cache(maxsize=2**16)(self._token_bytes)

    @property
    def chat_template(self) -> str | None:
        template = self._hf.chat_template
        return template if template is None or isinstance(template, str) else repr(sorted(template.items()))

    def stop_clock(self, time: datetime) -> None:
        """Let chat templates see this time from now on."""
        self._renderer.clock = time

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text; None: there is none."""
        token_id = self._hf.convert_tokens_to_ids(token)
        is_known = token_id is not None and self._hf.convert_ids_to_tokens(token_id) == token
        return int(token_id) if is_known else None

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template uses the tools that it is given."""
        return "tools" in (self.chat_template or "")

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @property
    def bos_token_id(self) -> int | None:
        token_id: int | None = self._hf.bos_token_id
        return token_id

    @property
    def start_token_id(self) -> int | None:
        """The token before a text's first one: BOS, or EOS where there is none."""
        return self.eos_token_id if self.bos_token_id is None else self.bos_token_id

    def has_two_bos(self, token_ids: Ids[int]) -> bool:
        """Whether a prompt begins with two BOS tokens: its text had one, and the tokenizer added another."""
        return len(token_ids) > 1 and token_ids[0] == token_ids[1] == self.bos_token_id

    def digest(self) -> str:
        """Hex digest of the files that define the tokenizer, or of a GGUF file's metadata about it."""
        digest = xxhash.xxh3_128()
        if is_gguf(self.folder):
            metadata = read_header(self.folder).metadata
            found = {name: metadata[name] for name in sorted(metadata) if name.startswith("tokenizer.")}
            digest.update(repr(found).encode())
        for name in _FILES:
            path = self.folder / name
            if path.is_file():
                digest.update(name.encode())
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, by default with the special tokens that the tokenizer itself adds (for example BOS).

        Raises: RequestError if the tokenizer fails, as one with an odd regular expression does on some texts.
        """
        try:
            found = (self._backend or self._hf).encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = found if self._backend is None else found.ids
        except BaseException as error:
            if not _is_failure(error):
                raise
            what = str(error).partition("\n")[0]
            raise RequestError("tokenizer_error", f"the tokenizer failed on this text: {what}") from error
        return ids

    def encode_within(self, text: str, num_allowed: int, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises: RequestError for one that has more than twice the number of tokens allowed; the
        time for that depends on this number, not on the text's length."""
        num_characters = _FIRST_CHARACTERS
        while num_characters * _GROWTH <= len(text):
            num_tokens = len(self.encode(text[:num_characters], add_special_tokens=add_special_tokens))
            if num_tokens > 2 * num_allowed:
                raise RequestError(
                    "context_length_exceeded",
                    f"the first {num_characters:,} of {len(text):,} characters of the prompt are {num_tokens:,} tokens,"
                    f" over the model length of {num_allowed:,}",
                    hint="shorten the prompt or raise --max-model-len",
                )
            num_characters *= _GROWTH
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_all(
        self, texts: list[str], num_allowed: int, *, add_special_tokens: bool = True
    ) -> list[list[int] | RequestError]:
        """encode_within of each text, or why it fails. All processors share several short ones."""
        if len(texts) > 1 and self._backend is not None and max(map(len, texts)) < _FIRST_CHARACTERS * _GROWTH:
            try:  # fast: without the places of tokens in the text
                found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
                return [each.ids for each in found]
            except BaseException as error:
                if not _is_failure(error):
                    raise  # Otherwise one text at a time shows which one fails.
        return [self._encoded(text, num_allowed, add_special_tokens=add_special_tokens) for text in texts]

    def _encoded(self, text: str, num_allowed: int, *, add_special_tokens: bool) -> list[int] | RequestError:
        try:
            return self.encode_within(text, num_allowed, add_special_tokens=add_special_tokens)
        except RequestError as error:
            return error

    def render_chat(self, messages: list[dict[str, Any]], template_arguments: dict[str, Any] | None = None) -> str:
        """The text of a conversation, up to the start of the assistant's answer, with all special tokens.

        Raises: RequestError if there is no chat template, or if it rejects the messages or exceeds a limit.
        """
        arguments = {"add_generation_prompt": True, **(template_arguments or {})}
        if self._hf.chat_template is None and arguments.get("chat_template") is None:
            raise RequestError(
                "no_chat_template",
                "the tokenizer has no chat template, so 'messages' cannot become a prompt",
                hint="give one with --chat-template, or use 'prompt'",
            )
        return self._renderer.render(messages, arguments)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        template_arguments: dict[str, Any] | None = None,
        *,
        num_allowed: int = 2**31,
    ) -> list[int]:
        """Token ids of a conversation; see render_chat and encode_within."""
        # the template has already written the special tokens
        return self.encode_within(self.render_chat(messages, template_arguments), num_allowed, add_special_tokens=False)

    def decode(self, token_ids: Ids[int], *, skip_special_tokens: bool = True) -> str:
        """The exact text of token ids, without clean-up. Raises: RequestError for a number that no token id can be."""
        try:
            text: str = self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            wrong = next(each for each in token_ids if not 0 <= each < 2**32)
            raise RequestError("invalid_token_id", f"token id {wrong} is not in the vocabulary") from error
        return text

    def prompt_tail(self, prompt_token_ids: Ids[int], *, skip_special_tokens: bool = True) -> tuple[list[int], str]:
        """The last prompt tokens and their text, after which output text begins.

        Decoding them with the output keeps its leading space, which many tokenizers drop from the first word of a
        text.
        """
        tail = list(prompt_token_ids[-_TAIL:])
        text = self.decode(tail, skip_special_tokens=skip_special_tokens)
        if not text:  # special tokens only
            tail = list(prompt_token_ids)
            text = self.decode(tail, skip_special_tokens=skip_special_tokens)
        return tail, text

    def decode_output(
        self, prompt_token_ids: Ids[int], output_token_ids: Ids[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text that the output adds to the prompt."""
        tail, tail_text = self.prompt_tail(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        return text_after(tail_text, self.decode([*tail, *output_token_ids], skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token as text; U+FFFD for a partial character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def all_token_bytes(self, vocab_size: int) -> list[bytes]:
        """token_bytes of every id of a vocabulary, which may be larger than the tokenizer's."""
        tokens: list[str | None] = self._hf.convert_ids_to_tokens(list(range(min(vocab_size, len(self._hf)))))
        known = [self._bytes_of(token, token_id) for token_id, token in enumerate(tokens)]
        return known + [b""] * (vocab_size - len(known))

    @property
    def special_token_ids(self) -> list[int]:
        """Tokens that are never part of a text: end of sequence, chat roles, padding."""
        token_ids: list[int] = self._hf.all_special_ids
        return token_ids

    def _token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, with the space that a word may begin with."""
        return self._bytes_of(self._hf.convert_ids_to_tokens(token_id), token_id)

    def _bytes_of(self, token: str | None, token_id: int) -> bytes:
        if token is None:  # an unused id of a padded vocabulary
            return b""
        if token in self._special_tokens:
            return token.encode()
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token) is not None:
            return bytes([int(token[3:5], 16)])
        if self._is_byte_level and all(char in _byte_of_char() for char in token):
            return bytes(_byte_of_char()[char] for char in token)
        if "\u2581" in token and not self._is_byte_level:  # SentencePiece's mark for a space
            return token.replace("\u2581", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


def _check_growth(folder: Path, tokenizer: Any) -> None:
    """Raises: ModelError for a tokenizer that can make a short text endless."""
    for name in ("normalizer", "post_processor", "decoder"):
        if (growth := _growth(getattr(tokenizer, name))) > _MOST_GROWTH:
            raise ModelError(
                f"the {name} of the tokenizer in {folder} can make a text {growth:.3g} times as long, allowed:"
                f" {_MOST_GROWTH}",
                hint="use the original tokenizer of the model",
            )


def _growth(component: Any) -> float:
    """How many times as long a component of a tokenizer can make a text."""
    try:
        states = [] if component is None else [msgspec.json.decode(component.__getstate__())]
    except Exception:  # one in Python, which only trusted code has
        return 1.0
    growth = 1.0
    for state in states:  # the list grows meanwhile
        if state["type"] == "Replace":
            pattern = state["pattern"].get("String")  # none: a regular expression, which may match between characters
            growth *= max(1.0, len(state["content"]) / len(pattern) if pattern else 1 + len(state["content"]))
        growth *= max(1, len(state.get("single", ())))
        states += [each for name in ("normalizers", "processors", "decoders") for each in state.get(name, ())]
    return growth


def _is_failure(error: BaseException) -> bool:
    """Whether the tokenizer failed, and nobody asked to stop."""
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


def _backend_of(hf: Any) -> Any:
    """The Rust library's tokenizer, set as the wrapper sets it in each call, which takes twice as long as to
    tokenize a short text. None for a class with an encoding of its own."""
    wrapper = transformers.PreTrainedTokenizerFast
    if any(getattr(type(hf), name, None) is not getattr(wrapper, name) for name in ("__call__", "encode", _ENCODE)):
        return None
    backend = hf.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = hf.split_special_tokens
    return backend


def text_after(before: str, text: str) -> str:
    """What `text` adds to its beginning, `before`, whose last character may be U+FFFD for the first bytes of one that
    `text` has complete."""
    if text.startswith(before):
        return text[len(before) :]
    return text[num_equal(before, text) :]


def _load(folder: Path, *, trust_remote_code: bool) -> Any:
    if is_gguf(folder):
        from pagedcli.batch.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(read_header(folder))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # the engine checks long prompts against the real limit
    try:
        return _wrapper(folder).from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the Rust tokenizers library raises bare Exception for a damaged file
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"no usable tokenizer in {folder}: {first_line}", hint="the model folder needs a tokenizer.json"
        ) from error


def _wrapper(folder: Path) -> Any:
    """What reads the tokenizer of a folder: the class that AutoTokenizer is known to choose (tested), or AutoTokenizer,
    which takes a quarter of a second to import."""
    model, own = (_fields(folder / name) for name in ("config.json", "tokenizer_config.json"))
    is_plain = own.get("tokenizer_class") in _WRAPPERS and "auto_map" not in own | model
    if is_plain and model.get("model_type") in WRAPPED and (folder / "tokenizer.json").is_file():
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def _fields(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none, of which AutoTokenizer then says what is wrong."""
    with suppress(OSError, ValueError):
        if isinstance(found := msgspec.json.decode(path.read_bytes()), dict):
            return found
    return {}


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable characters for bytes: printable ones map to themselves, the others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class IncrementalDetokenizer:
    """Returns the text that each new token adds. Bytes of an incomplete character are held back."""

    __slots__ = ("_decoded_from", "_decoded_text", "_skip_special_tokens", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Ids[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        tail, text = tokenizer.prompt_tail(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        # _token_ids begins with tokens whose text was already returned (_decoded_text): this context decides,
        # for example, whether the next word begins with a space
        self._token_ids = tail
        self._decoded_text = text
        self._decoded_from = len(tail)

    def add(self, token_id: int) -> str:
        """The text that this token adds; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        new_text = text_after(self._decoded_text, text)
        if not new_text or new_text.endswith("\ufffd"):
            return ""
        self._token_ids = self._token_ids[self._decoded_from :]
        self._decoded_from = len(self._token_ids)
        self._decoded_text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return new_text


class StopStringChecker:
    """Receives each token of one sample and finds stop strings in the text, even across token boundaries.

    A stop string counts only if it ends after `min_tokens` tokens. Then `stopped` is True and `text` is cut before
    it (after it with include_stop_str_in_output).
    """

    __slots__ = ("_detokenizer", "_include", "_min_tokens", "_num_tokens", "_stops", "stopped", "text")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Ids[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.text = ""
        self.stopped = False

    def __call__(self, token_id: int) -> str | None:
        """The stop string that this token completed, if any."""
        self._num_tokens += 1
        new_text = self._detokenizer.add(token_id)
        num_before = len(self.text)
        self.text += new_text
        if not new_text or self._num_tokens <= self._min_tokens:
            return None
        found = [(start, stop) for stop in self._stops if (start := self._find(stop, num_before)) is not None]
        if not found:
            return None
        start, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        self.text = self.text[: start + len(stop)] if self._include else self.text[:start]
        self.stopped = True
        return stop

    def _find(self, stop: str, num_before: int) -> int | None:
        """Index of `stop` in the text, if it ends after the first `num_before` characters."""
        start = self.text.find(stop, max(0, num_before - len(stop) + 1))
        return start if start >= 0 else None


class StopCheckers:
    """Makes the checkers of one request: the engine calls it once per sample."""

    __slots__ = ("_made", "_params", "_prompt_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Ids[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._made: list[StopStringChecker] = []  # one per sample, in order

    def __call__(self) -> StopStringChecker:
        self._made.append(StopStringChecker(self._tokenizer, self._prompt_token_ids, self._params))
        return self._made[-1]

    def text(self, sample_index: int, output_token_ids: Ids[int]) -> str:
        """The text of a finished sample, cut at its stop string if it has one."""
        if self._made[sample_index].stopped:
            return self._made[sample_index].text
        return self._tokenizer.decode_output(
            self._prompt_token_ids, output_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )
