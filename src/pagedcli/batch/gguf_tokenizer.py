"""The tokenizer inside a GGUF file: `tokenizer.ggml.*` -> a tokenizer of transformers. Used by batch.tokenizer only.

Pipelines are those of the original tokenizers, so that their ids are equal (tested).
"""

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagedcli.content_files import ContentFolder, DamagedFile, digest_of
from pagedcli.errors import ModelError, UsageError
from pagedcli.files import cache_home, is_ours_alone
from pagedcli.later import transformers
from pagedcli.models.gguf.header import Header

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# More than any tokenizer has: a hostile file must not take gigabytes, or minutes.
_LONGEST, _MOST_CONTROLS = 1024, 2**14  # characters of a token, control tokens
_MOST_CHARACTERS, _MOST_SQUARES = 2**22, 2**26  # of SentencePiece's tokens, which are split in every way
_KEPT, _MOST_KEPT_BYTES = 2**16, 2**27  # this many tokens take a second at every start
_MARK = "\u2581"  # SentencePiece's for a space
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a text is split into words before pairs are merged."""

    pattern: str | None = None  # None: GPT-2's
    before: tuple[str, ...] = ()  # patterns whose matches are split off first, one after the other
    single_digits: bool = False  # digits are split off first
    composed: bool = False  # Unicode's normal form C first
    whole_words: bool = False  # a word that is a token is taken as it is
    adds_bos: bool = False  # default where the file says nothing


_LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_OTHERS = r"&&[^\p{Han}]]"  # what is no Chinese character
_KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_OTHERS}*{_LOWER[:-1]}{_OTHERS}+{_SUFFIXES}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_OTHERS}+{_LOWER[:-1]}{_OTHERS}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}|{_REST}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# cased letters that DeepSeek's first tokenizers leave out of words
_UNLISTED = (
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bf\U00010d50-\U00010d8f\U00016e40-\U00016e7f\U0001d400-\U0001dfff"
)
_DEEPSEEK_WORDS = rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+"
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_OTHERS = "[\u0800-\u9fa5\uac00-\ud7ff]+"
# by tokenizer.ggml.pre
SPLITTINGS: Mapping[str, _Splitting] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        _Splitting(_LLAMA3, whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Splitting(_LLAMA3)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        _Splitting(_DEEPSEEK3, before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Splitting(_QWEN2, composed=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), _Splitting(_QWEN2)),
    "qwen35": _Splitting(_QWEN35, composed=True),
    "kimi-k2": _Splitting(_KIMI, whole_words=True),
    "tekken": _Splitting(_TEKKEN, whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Splitting(_GPT4O)),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "exaone4"), _Splitting()),
    "seed-coder": _Splitting(_SEED),
    "deepseek-llm": _Splitting(
        r"\p{N}", before=(r"[\r\n]", _DEEPSEEK_WORDS, _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_OTHERS)
    ),
    "deepseek-coder": _Splitting(r"\p{N}", before=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_OTHERS)),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _Splitting(single_digits=True)),
}


def gguf_tokenizer(header: Header) -> Any:
    """A transformers tokenizer with the file's vocabulary, special tokens and chat template.

    Raises: ModelError for a kind of tokenizer or splitting that is not known, or damaged lists.
    """
    made = _Made(header)
    special = {f"{name}_token": made.named(name) for name in ("bos", "eos", "unknown", "padding")}
    renamed = {"unknown_token": "unk_token", "padding_token": "pad_token"}
    found = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_Uncopied(made.tokenizer()),
        chat_template=made.template,
        clean_up_tokenization_spaces=False,
        **{renamed.get(name, name): token for name, token in special.items() if token is not None},
    )
    found.extra_special_tokens = made.controls  # as an argument each would be looked for among all of them
    return found


@dataclass(frozen=True, slots=True)
class _Uncopied:
    """A tokenizer that transformers takes as it is, instead of a deep copy, which takes longer than to make it."""

    tokenizer: Tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self.tokenizer


class _Made:
    """A tokenizer in the making."""

    def __init__(self, header: Header) -> None:
        self._header, self._metadata = header, header.metadata
        self._tokens = self._list("tokens", str)
        if not self._tokens:
            raise self._error("it has no tokenizer.ggml.tokens")
        if (longest := max(map(len, self._tokens))) > _LONGEST:
            raise self._error(f"it has a token of {longest:,} characters, allowed: {_LONGEST:,}")
        self._types = self._list("token_type", int) or [_NORMAL] * len(self._tokens)
        if len(self._types) != len(self._tokens):
            raise self._error(f"there are {len(self._tokens)} tokens, but {len(self._types)} types of tokens")
        # special ones too, which then keep their ids when they are added; unused ones fill the vocabulary up
        self._vocab = {
            token: i for i, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)) if kind != _UNUSED
        }
        if len(self._vocab) + self._types.count(_UNUSED) != len(self._tokens):
            raise self._error("a token occurs twice")
        if (num_controls := self._types.count(_CONTROL)) > _MOST_CONTROLS:
            raise self._error(f"it has {num_controls:,} control tokens, allowed: {_MOST_CONTROLS:,}")
        if not self._vocab:
            raise self._error("all its tokens are of type 5, unused")

    @property
    def template(self) -> str | dict[str, str] | None:
        """The chat template, or several by name as transformers has them: `tool_use` is for chats with tools."""
        key = "tokenizer.chat_template"
        found = {name: each for name, each in self._metadata.items() if name == key or name.startswith(f"{key}.")}
        for name, template in found.items():
            if not isinstance(template, str):
                raise self._error(f"{name} is {template!r:.40}, not a text")
        named = {name[len(key) + 1 :] or "default": str(template) for name, template in found.items()}
        return named.get("default") if named.keys() <= {"default"} else named

    @property
    def controls(self) -> list[str]:
        return [token for token, kind in zip(self._tokens, self._types, strict=True) if kind == _CONTROL]

    def named(self, name: str) -> str | None:
        """The token that ends a text, begins it, ...; None if the file names none, or one that is not used."""
        token_id = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(self._tokens):
            return None
        token: str = self._tokens[token_id]
        return token if token in self._vocab else None

    def tokenizer(self) -> Tokenizer:
        kind = self._metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            tokenizer, adds_bos = self._byte_level()
        elif kind == "llama":
            tokenizer, adds_bos = self._pieces(self._merges_by_score()), True
        elif kind == "gemma4":
            tokenizer, adds_bos = self._pieces(self._listed_merges()), True
        else:
            known = "gpt2 (BPE), llama (SentencePiece) and gemma4 (its BPE)"
            raise self._error(f"tokenizer.ggml.model is {kind!r:.40}; {known} are read")
        self._add_tokens(tokenizer, takes_space=kind == "llama" and self._is_phi3())
        self._add_ends(tokenizer, adds_bos=adds_bos)
        return tokenizer

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        """GPT-2's kind: words are split by a pattern, and their bytes merged."""
        name = self._metadata.get("tokenizer.ggml.pre")
        if not isinstance(name, str) or name not in SPLITTINGS:
            raise self._error(f"tokenizer.ggml.pre is {name!r:.40}, which is not known")
        splitting = SPLITTINGS[name]
        merges = self._listed_merges()
        tokenizer = Tokenizer(models.BPE(vocab=self._vocab, merges=merges, ignore_merges=splitting.whole_words))
        if splitting.composed:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
        patterns = (*splitting.before, *((splitting.pattern,) if splitting.pattern is not None else ()))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, splitting.adds_bos

    def _listed_merges(self) -> list[tuple[str, str]]:
        vocab, pairs = self._vocab, [merge.partition(" ") for merge in self._list("merges", str)]
        if not pairs or any(part not in vocab for left, _, right in pairs for part in (left, right, left + right)):
            raise self._error("tokenizer.ggml.merges is missing or damaged")
        return [(left, right) for left, _, right in pairs]

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece's: of all neighbours those that make the token with the highest score are merged first."""
        scores = self._list("scores", float)
        if len(scores) != len(self._tokens) or any(map(math.isnan, scores)):
            raise self._error(f"there are {len(self._tokens)} tokens, but {len(scores)} scores")
        pieces = [token for token, i in self._vocab.items() if self._types[i] in (_NORMAL, _USER_DEFINED)]
        lengths = list(map(len, pieces))
        if sum(lengths) > _MOST_CHARACTERS or sum(length * length for length in lengths) > _MOST_SQUARES:
            raise self._error(
                f"its {len(pieces):,} tokens have {sum(lengths):,} characters, the longest {max(lengths):,}"
            )
        return _merges(pieces, self._vocab, scores)

    def _pieces(self, merges: list[tuple[str, str]]) -> Tokenizer:
        """BPE of a whole text, in which a mark stands for a space, and bytes for what has no token."""
        vocab = self._vocab
        has_bytes = sum(kind == _BYTE for kind in self._types) == 256
        unknown = next((token for token, i in vocab.items() if self._types[i] == _UNKNOWN), None)
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
        )
        adds_space = self._metadata.get("tokenizer.ggml.add_space_prefix", True)
        spaces = normalizers.Replace(" ", _MARK)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), spaces]) if adds_space else spaces
        steps: list[Any] = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        if adds_space:
            steps.append(decoders.Strip(content=" ", left=1, right=0))
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _is_phi3(self) -> bool:
        names = (self._metadata.get(f"general.{name}") for name in ("architecture", "name"))
        return any(isinstance(name, str) and re.search("phi[- ]?3", name.lower()) is not None for name in names)

    def _add_tokens(self, tokenizer: Tokenizer, *, takes_space: bool) -> None:
        """Tokens that are found in a text before anything else, in the order of their ids. `takes_space`: with the
        white space after them, as Phi-3's tokenizer has it, which a file does not say."""
        plain = ("<unk>", "<s>", "<|endoftext|>")
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False, rstrip=takes_space and token not in plain)
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
        num_tokens = tokenizer.get_vocab_size()
        tokenizer.add_tokens(added)  # all at once: each call looks at all added tokens
        assert tokenizer.get_vocab_size() == num_tokens, "they are in the vocabulary"

    def _add_ends(self, tokenizer: Tokenizer, *, adds_bos: bool) -> None:
        bos, eos = self.named("bos"), self.named("eos")
        if not self._metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
            bos = None
        if not self._metadata.get("tokenizer.ggml.add_eos_token", False):
            eos = None
        ends = [token for token in (bos, eos) if token is not None]
        if not ends:
            return
        single, pair = ([*([bos] if bos else []), text, *([eos] if eos else [])] for text in ("$A", "$B"))
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(ends)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=single + pair, special_tokens=ids)

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self._error(f"tokenizer.ggml.{name} is no list of {kind.__name__}")
        return values

    def _error(self, what: str) -> ModelError:
        return self._header.error(what, "use another file of this model, or its Hugging Face folder")


def _merges(pieces: list[str], vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, the highest score first; among equal ones in the order of ids."""
    if len(pieces) < _KEPT:
        return _found_merges(pieces, vocab, scores)
    identity = {"merges": "1", "of": digest_of(msgspec.msgpack.encode((pieces, vocab, scores)))}
    folder = None
    with suppress(UsageError, OSError, DamagedFile):  # what cannot be kept is found again
        path = cache_home() / "tokenizers"
        folder = ContentFolder(path, most_bytes=_MOST_KEPT_BYTES, spares_disk=True)
        kept = folder.files()[0] if is_ours_alone(path) else []
        for file in (each for each in kept if each.head.identity == identity):
            return msgspec.msgpack.decode(folder.read(file, [0])[0], type=list[tuple[str, str]])
    began_s = time.monotonic()
    found = _found_merges(pieces, vocab, scores)
    if folder is not None:
        folder.write(identity, b"", [msgspec.msgpack.encode(found)], seconds=time.monotonic() - began_s)
    return found


def _found_merges(pieces: list[str], vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda piece: (-scores[vocab[piece]], vocab[piece])):
        pairs = [
            (left, right)
            for cut in range(1, len(piece))
            if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
        ]
        found += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])) if len(pairs) > 1 else pairs
    return found
