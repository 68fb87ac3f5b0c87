"""The tokenizer inside a GGUF file, against the original one."""

import json
import random

import pytest
from conftest import shared_data
from harness.engine import original
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Original

from pagedcli import files
from pagedcli.batch import gguf_tokenizer
from pagedcli.batch.reasoning import find_format
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.batch.tool_calls import find_tool_format
from pagedcli.errors import ModelError

gguf = pytest.importorskip("gguf")

RANGES = (
    *((0x20, 0x7F), (0, 0x20), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x500), (0x600, 0x700), (0x900, 0xE00)),
    *((0x1100, 0x1200), (0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1F680)),
)


def random_texts(count, seed=0):
    """Texts of characters of many scripts, mostly of a few of them."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        ranges = rng.sample(RANGES, 3)
        texts.append("".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 24))))
    return texts


def prompts():
    lines = (shared_data("prompts") / "mt_bench_question.jsonl").read_text().splitlines()
    others = (shared_data("prompts") / "ifeval_input_data.jsonl").read_text().splitlines()
    return [turn for line in lines for turn in json.loads(line)["turns"]] + [
        json.loads(line)["prompt"] for line in others
    ]


def write(path, architecture="llama", model=None, **fields):
    """A file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    if model is not None:
        writer.add_name(model)
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.{name.replace('__', '.')}", value)
        else:
            kind = {str: "string", bool: "bool", int: "uint32"}[type(value)]
            getattr(writer, f"add_{kind}")(f"tokenizer.{name.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """Qwen2's tokenizer: the original folder, and the same as a GGUF file."""
    folder = shared_data("qwen2_tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = json.loads((folder / "vocab.json").read_text())
    lines = (folder / "merges.txt").read_text().splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    added = {int(i): token["content"] for i, token in config["added_tokens_decoder"].items()}
    tokens = {i: token for token, i in vocab.items()} | added
    size = max(tokens) + 5  # padded, as embeddings are
    path = write(
        tmp_path_factory.mktemp("qwen2") / "model.gguf",
        ggml__model="gpt2",
        ggml__pre="qwen2",
        ggml__tokens=[tokens.get(i, f"[PAD{i}]") for i in range(size)],
        ggml__token_type=[3 if i in added else 1 if i in tokens else 5 for i in range(size)],
        ggml__merges=merges,
        ggml__eos_token_id=151645,
        ggml__add_bos_token=False,
        chat_template=config["chat_template"].removesuffix("template ends here"),
    )
    return Tokenizer(folder), Tokenizer(path)


@pytest.mark.long
def test_byte_level_ids_equal_those_of_the_original(qwen2):
    original, ours = qwen2
    for text in [*prompts(), *random_texts(10_000), "<|im_start|>user\nhello<|im_end|>", " a  b\n\n c\td", ""]:
        ids = ours.encode(text)
        assert ids == original.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


def test_special_tokens_and_the_chat_template_come_from_the_file(qwen2):
    _, ours = qwen2
    assert ours.eos_token_id == 151645
    assert {151643, 151644, 151645} <= set(ours.special_token_ids)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.render_chat(messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ours.decode(ours.encode_chat(messages)) == "user\nHi\nassistant\n"
    assert ours.all_token_bytes(151650)[-1] == b""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-llm", ["Hello", " world", "!!", " (", "x", ")", " ", "1", "2", " é", "t", "é", "世界カナ", "\r",
                          "\n", " don", "'", " ", "ნ한∑", "+", "  "]),
        ("deepseek-coder", ["Hello", " world", "!!", " (", "x", ")", " ", "1", "2", " été", " ", "世界", "\n", "\n",
                            " don", "'", " ", " ", "ნ", "∑", "+", "1", "  "]),
        ("seed-coder", ["Hello", " world", "!!", " (", "x", ")", " ", "1", "2", " été", "?DON", "'T", "\n\n", " ",
                        " x", " ∑+", "\n"]),
        ("kimi-k2", ["Hello", "世界", "DON'T", " ", "123", "45", " été", "!!\n", " ", " x", "語", "\t"]),
        ("deepseek-v3", ["Hello", "世界カナ", "don", "'t", " x", "123", "45", " été", " !!\n", "(a", ")",
                         " ", " y한글"]),
        ("exaone4", ["Hello", " world", "!!", " (", "x", ")", " 12", " été", " don", "'t", " ", " y", "\n"]),
    ],
)  # fmt: skip
def test_texts_are_split_as_the_original_tokenizers_do(name, words, tmp_path):
    fields = {"ggml__model": "gpt2", "ggml__tokens": ["a", "b", "ab"], "ggml__merges": ["a b"]}
    tokenizer = Tokenizer(write(tmp_path / "model.gguf", ggml__pre=name, **fields))
    text, offsets = "".join(words), []
    for _, (start, end) in original(tokenizer).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text):
        offsets.append(text[start:end])
    assert offsets == words


def sentence_pieces(folder, texts):
    """A SentencePiece-like tokenizer trained on texts, with its tokens, scores and types as a file has them."""
    tokenizer = Original(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    mark = "\u2581"
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator((text.replace(" ", f" {mark}") for text in texts), trainer)
    content = json.loads(tokenizer.to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    tokenizer = Original.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return vocab, merges


def fields_of_pieces(vocab, merges, added=()):
    """The fields of a file with these pieces, whose scores give the merges."""
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
    tokens = [*sorted(vocab, key=vocab.get), *added]
    return {
        "ggml__model": "llama",
        "ggml__tokens": tokens,
        "ggml__scores": [-float(ranks.get(token, len(ranks))) for token in tokens],
        "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * (len(vocab) - 259) + [3, *[4] * len(added)][: len(added)],
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
    }


@pytest.mark.parametrize("is_gemma_4", [False, True])
def test_sentence_piece_ids_equal_those_of_the_original(tmp_path, is_gemma_4):
    """The merges of Gemma 4 are listed, and nothing is put before a text."""
    texts = prompts()
    vocab, merges = sentence_pieces(tmp_path, texts[:200])
    fields = fields_of_pieces(vocab, merges)
    if is_gemma_4:
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        content["decoder"]["decoders"].pop()
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        del fields["ggml__scores"]
        fields |= {"ggml__model": "gemma4", "ggml__merges": [" ".join(pair) for pair in merges]}
        fields["ggml__add_space_prefix"] = False
    original, ours = Tokenizer(tmp_path), Tokenizer(write(tmp_path / "model.gguf", **fields))
    for text in [*texts, *random_texts(2000), "<s>a</s> b", "  two  spaces", "a\n\n\nb\tc"]:
        ids = ours.encode(text)
        assert ids == original.encode(text), text
        assert ours.decode(ids) == original.decode(ids)


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    """A small SentencePiece tokenizer, whose merges are kept as those of a large one are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_tokenizer, "_KEPT", 1)
    return write(tmp_path / "model.gguf", **pieces_fields())


def said(tokenizer):
    return original(tokenizer).backend_tokenizer.to_str()


def test_merges_are_found_once_and_kept_for_later_starts(pieces, monkeypatch):
    first = Tokenizer(pieces)
    with monkeypatch.context() as patched:
        patched.setattr(gguf_tokenizer, "_found_merges", None)
        kept = Tokenizer(pieces)
    assert said(kept) == said(first)
    other = write(pieces.with_name("other.gguf"), **pieces_fields() | {"ggml__scores": list(map(float, range(266)))})
    assert said(Tokenizer(other)) != said(first)


@pytest.mark.parametrize("fault", ["damaged", "others can write", "no folder"])
def test_kept_merges_that_cannot_be_trusted_are_found_again(pieces, fault):
    first = Tokenizer(pieces)
    folder = files.cache_home() / "tokenizers"
    (file,) = folder.iterdir()
    content = file.read_bytes()
    if fault == "damaged":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif fault == "others can write":
        folder.chmod(0o777)
    else:
        file.unlink()
        folder.rmdir()
        folder.write_text("")
    assert said(Tokenizer(pieces)) == said(first)


def test_merges_with_equal_scores_are_in_the_order_of_ids():
    rng = random.Random(0)
    pieces = sorted({"".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(100)}, key=lambda _: rng.random())
    vocab = {piece: i for i, piece in enumerate(pieces)}
    scores = [float(rng.randint(0, 3)) for _ in pieces]
    pairs = [(piece[:cut], piece[cut:], piece) for piece in pieces for cut in range(1, len(piece))]
    found = sorted(
        (-scores[vocab[piece]], vocab[piece], vocab[left], vocab[right], left, right)
        for left, right, piece in pairs
        if left in vocab and right in vocab
    )
    assert gguf_tokenizer._merges(pieces, vocab, scores) == [pair[4:] for pair in found]


ADDED = ("<|user|>", "<think>", "a▁b", "  ")
PHI3 = [("phi3", None), ("llama", "Phi 3 Mini 4k Instruct"), ("llama", "unsloth-phi-3.5"), ("llama", None)]


@pytest.mark.parametrize(("architecture", "model"), PHI3)
def test_added_tokens_are_found_anywhere_and_phi_3s_take_the_space_after_them(tmp_path, architecture, model):
    vocab, merges = sentence_pieces(tmp_path, prompts()[:100])
    takes_space = (architecture, model) != ("llama", None)
    original = Original.from_file(str(tmp_path / "tokenizer.json"))
    for i, token in enumerate(ADDED):
        added = AddedToken(token, special=i == 0, normalized=False, rstrip=takes_space)
        original.add_special_tokens([added]) if i == 0 else original.add_tokens([added])
    path = write(tmp_path / "model.gguf", architecture, model, **fields_of_pieces(vocab, merges, ADDED))
    ours, choose = Tokenizer(path), random.Random(4)
    pieces = [*ADDED, " ", "\n", "\t", "a", "hello", " world", "<s>", "▁"]
    for _ in range(500):
        text = "".join(choose.choices(pieces, k=choose.randint(1, 8)))
        if not takes_space or "<s>" not in text:
            assert ours.encode(text) == original.encode(text).ids, text
    assert ours.encode("<s> a")[1:] == ours.encode("<s>" + " a")[1:] != ours.encode("<s>a")[1:]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ggml__pre": "nobody-knows"}, "tokenizer.ggml.pre is 'nobody-knows', which is not known"),
        ({"ggml__model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"ggml__tokens": ["a", "a"]}, "a token occurs twice"),
        ({"ggml__token_type": [1]}, "2 tokens, but 1 types"),
        ({"ggml__merges": ["x y"]}, "merges is missing or damaged"),
        ({"ggml__tokens": ["a", "b" * 5000]}, "a token of 5,000 characters, allowed: 1,024"),
        ({"ggml__tokens": [str(i) for i in range(2**14 + 1)], "ggml__token_type": [3] * (2**14 + 1)}, "control tokens"),
        ({"ggml__model": "llama", "ggml__tokens": ["a" * i for i in range(1, 1000)], "ggml__scores": [0.0] * 999},
         "its 999 tokens have 499,500 characters, the longest 999"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_known_or_damaged_is_refused(tmp_path, change, what):
    fields = {"ggml__model": "gpt2", "ggml__pre": "gpt-2", "ggml__tokens": ["a", "b"], "ggml__merges": ["a b"]}
    with pytest.raises(ModelError) as error:
        Tokenizer(write(tmp_path / "model.gguf", **fields | change))
    assert what in error.value.message
    assert "model.gguf" in error.value.message


def test_templates_of_a_file_are_chosen_by_name_as_transformers_chooses(tmp_path):
    vocab = {"ggml__model": "gpt2", "ggml__pre": "gpt-2", "ggml__tokens": ["a", "b", "ab"], "ggml__merges": ["a b"]}
    templates = {"chat_template": "plain", "chat_template__tool_use": "with tools", "chat_template__rag": "rag"}
    path = write(tmp_path / "model.gguf", **vocab, **{name: f"{text}{{{{ '' }}}}" for name, text in templates.items()})
    tokenizer, chat = Tokenizer(path), [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(chat) == "plain"
    assert tokenizer.render_chat(chat, {"tools": [{"type": "function", "function": {"name": "f"}}]}) == "with tools"
    assert Tokenizer(path, chat_template="rag").render_chat(chat) == "rag"
    assert tokenizer.shows_tools


def byte_level_fields():
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["th", "the", "in", "ing"]
    return {
        "ggml__model": "gpt2",
        "ggml__pre": "qwen2",
        "ggml__tokens": [*chars, *words, "<think>", "<|end|>"],
        "ggml__token_type": [1] * (len(chars) + len(words)) + [4, 3],
        "ggml__merges": ["t h", "th e", "i n", "in g"],
        "ggml__eos_token_id": len(chars) + 5,
        "chat_template": "{{ messages[0].content }}",
    }


def pieces_fields():
    pieces = ["\u2581", "a", "b", "ab", "\u2581ab", "<think>", "<|end|>"]
    return {
        "ggml__model": "llama",
        "ggml__tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces],
        "ggml__scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * 5 + [4, 3],
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0,
        "ggml__add_space_prefix": True,
    }


def mutated_fields(fields, choose):
    """Fields of which some are missing, of another kind, or lists with other members."""
    fields = {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
    for _ in range(choose.randint(1, 4)):
        name = choose.choice(list(fields))
        value = fields[name]
        others = ["", "llama", "gpt2", "gemma4", 5, 2**32 - 1, True, [1], [0.5], ["a"], ["", "a"], [True] * 3]
        if not isinstance(value, list) or choose.random() < 0.3:
            fields[name] = choose.choice(others)
        elif len(value) > 1:
            place = choose.randrange(len(value))
            odd = {str: ["", "a", " ", "\u2581" * 50, "x" * 2000, "<0xZZ>", "\x00", "\u00e9", "a b c"]}
            odd |= {int: [0, -1, 3, 4, 5, 6, 99, 2**31 - 1], float: [0.0, 1e38, float("nan"), float("-inf")]}
            value[place] = choose.choice(odd.get(type(value[place]), [False]))
            if choose.random() < 0.2:
                del value[choose.randrange(len(value)) :]
    return fields


@pytest.mark.long
def test_120_mutated_tokenizers_work_or_are_refused_with_an_error_of_ours(tmp_path):
    choose, num_refused = random.Random(7), 0
    for _ in range(120):
        fields = mutated_fields(choose.choice([byte_level_fields, pieces_fields])(), choose)
        path = write(tmp_path / "model.gguf", **{name: value for name, value in fields.items() if value != []})
        content = bytearray(path.read_bytes())
        if choose.random() < 0.3:
            content[choose.randrange(24, len(content))] = choose.randrange(256)
            path.write_bytes(content[: choose.choice((len(content), choose.randrange(len(content))))])
        try:
            tokenizer = Tokenizer(path)
        except ModelError as error:
            num_refused += "model.gguf" in error.message
            continue
        ids = tokenizer.encode("the string ab <think> \u00e9\U0001f642<|end|>\n")
        tokenizer.decode([*ids, 0, 10**6])
        tokenizer.all_token_bytes(400)
        tokenizer.digest()
        assert find_format(tokenizer) is find_tool_format(tokenizer) is None
    assert 20 < num_refused < 100
