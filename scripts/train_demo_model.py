"""Make the built-in demo model: a small Qwen3 that tells tiny stories and looks codes up in its prompt.

The script owns the whole recipe.  It writes its own text from a seed (grammar and word lists below, nothing
copied), trains a byte-level BPE tokenizer, trains the model on a CPU and measures it:

    python scripts/train_demo_model.py --train DIR --steps 4000 --seed 0 --threads 2
    python scripts/train_demo_model.py --evaluate DIR

The weights in the package are those of `--train DIR --steps 4000 --seed 0 --threads 1`: one run from scratch over
13.4M tokens, 49 minutes of one core that had other work, too (2026-11-21, torch 2.13.0). Another processor or thread
count rounds differently and gives other weights of the same quality.

Looked-up names and codes are split by a checksum: a tenth of each never reaches the model in training (`held_out`;
the tokenizer's merges do see all names), and the evaluation draws only from that tenth.  A wrong or misplaced KV
block therefore shows as a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A capitalised word never takes the space before it along, so a name has the same tokens wherever it stands.
SPLIT = r" ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
VOCAB_SIZE = 1024
STAGES = (  # row lengths in tokens, share of easy rows, first-digit accuracy that ends the stage
    ((48, 64), 1.0, 0.9),
    ((64, 96), 0.6, 0.9),
    ((64, 96, 160), 0.2, 0.9),
    ((96, 160, 288), 0.1, 0.93),
    ((96, 160, 288, 544), 0.0, 0.96),
    ((96, 160, 288, 544, 544, 1056), 0.0, 2.0),
)
CONTEXT = 0.02  # loss weight of the text that an answer is looked up in
FIRST = 3.0  # loss weight of the first digit of an answer, the one that needs the look-up
BUCKETS = ((1, 100), (101, 200), (201, 350), (351, 500), (501, 1000))  # prompt lengths of the evaluation

Segment = tuple[str, float]  # a piece of text and the loss weight of its tokens
Text = list[Segment]

# ----------------------------------------------------------------------------------------------- word lists

PEOPLE = {
    "he": ["Ben", "Tom", "Sam", "Max", "Leo", "Jack", "Oscar", "Felix", "Hugo", "Paul"],
    "she": ["Anna", "Lily", "Rosa", "Emma", "Nora", "Ella", "Ruby", "Clara", "Ivy", "Jane"],
}
FORMS = {"he": ("he", "his", "him"), "she": ("she", "her", "her")}
ADJECTIVES = ["little", "brave", "kind", "quiet", "clever", "young", "happy", "shy", "curious", "gentle"]
ANIMALS = {  # animal: (home, food, habit)
    "fox": ("in the forest", "berries and mice", "sleeps in a den"),
    "bear": ("in the mountains", "fish and honey", "sleeps all winter"),
    "rabbit": ("in the meadow", "grass and carrots", "runs very fast"),
    "owl": ("in an old tree", "mice and moths", "hunts at night"),
    "duck": ("near the pond", "seeds and snails", "swims with its young"),
    "frog": ("near the river", "flies and worms", "jumps from stone to stone"),
    "horse": ("on the farm", "hay and apples", "likes to run in the morning"),
    "goat": ("on the hill", "leaves and grass", "climbs steep rocks"),
    "cat": ("in the village", "fish and milk", "sleeps in the sun"),
    "dog": ("in a small house", "meat and bread", "guards the door"),
    "mouse": ("under the floor", "cheese and corn", "hides from the cat"),
    "squirrel": ("in the park", "nuts and seeds", "hides food for the winter"),
}
JOBS = {  # job: (place, work, tool)
    "baker": ("in a bakery", "makes fresh bread", "an oven"),
    "farmer": ("in the fields", "grows corn and beans", "a plough"),
    "sailor": ("on a ship", "crosses the sea", "a compass"),
    "teacher": ("at the school", "helps children learn", "a board"),
    "painter": ("in a bright room", "makes pictures of the sea", "a brush"),
    "doctor": ("in a clinic", "cares for sick people", "a lamp"),
    "gardener": ("in the park", "plants trees and flowers", "a spade"),
    "tailor": ("in a small shop", "makes coats and shirts", "a needle"),
}
SCENES = (  # wish, trouble, help, result
    (
        "fly a red kite",
        "the kite was stuck in a tall tree",
        "climbed up and pulled it free",
        "the kite flew high over the hill",
    ),
    ("bake a warm pie", "there was no flour in the kitchen", "brought a bag of flour", "the whole house smelled sweet"),
    ("cross the river", "the water was deep and cold", "built a small bridge", "they walked across together"),
    ("plant a garden", "the ground was hard and dry", "carried water from the well", "green leaves grew in the sun"),
    ("sing at the fair", "{his} voice was too quiet", "taught {him} an old song", "everyone clapped"),
    ("find the lost key", "it was too dark to see", "lit a small lamp", "the key was under the bed"),
    (
        "build a snow house",
        "the walls fell down again and again",
        "showed {him} how to make strong walls",
        "the house stood all winter",
    ),
    (
        "catch a big fish",
        "the boat had a hole in it",
        "closed the hole with a piece of wood",
        "they came home with a full basket",
    ),
    (
        "learn to swim",
        "{he} was afraid of the deep water",
        "held {his} hand and stayed close",
        "{he} swam across the pond",
    ),
    (
        "paint the old door",
        "the rain washed the paint away",
        "found a dry place under the roof",
        "the door shone bright and blue",
    ),
    (
        "see the stars",
        "the sky was full of clouds",
        "led {him} to the top of the mountain",
        "they saw a thousand stars",
    ),
    (
        "send a letter",
        "the road was closed by the snow",
        "took the letter over the hill",
        "an answer came the next day",
    ),
)
DAYS = [
    "One sunny morning",
    "One cold evening",
    "One rainy day",
    "Early one morning",
    "On a windy day",
    "Late one night",
]
ENDINGS = (
    "{name} thanked {friend} and smiled.",
    "From that day on, {name} and {friend} were good friends.",
    "They went home and slept well.",
    "{name} was very happy.",
    "{name} never forgot what {friend} had done.",
)
ONSETS = [*("b c d f g h j k l m n p r s t v w z " * 3 + "br ch dr gr sh st th tr").split(), ""]
VOWELS = [*("a e i o u " * 5 + "ai ea ou").split()]
CODAS = [""] * 9 + ["l", "n", "r", "s", "t", "m", "k", "d"]

# ---------------------------------------------------------------------------------------- stories and facts


def facts(rng: random.Random, animal: str = "") -> str:
    """Two or three true sentences of the toy world about an animal or a job."""
    if animal or rng.random() < 0.6:
        animal = animal or rng.choice(list(ANIMALS))
        home, food, habit = ANIMALS[animal]
        first = rng.choice((f"The {animal} lives {home}.", f"You can find the {animal} {home}."))
        return " ".join((first, rng.choice((f"It eats {food}.", f"It likes {food}.")), f"It {habit}."))
    job = rng.choice(list(JOBS))
    place, work, tool = JOBS[job]
    first = rng.choice((f"The {job} works {place}.", f"Every day the {job} goes to work {place}."))
    return f"{first} The {job} {work} and uses {tool}."


def story(rng: random.Random, animal: str = "") -> str:
    """A tiny story: someone wishes for something, meets a trouble, gets help, and it ends well."""
    hero, helper = rng.sample([(n, p) for p, names in PEOPLE.items() for n in names], 2)
    kind, kind2 = rng.sample(list(ANIMALS), 2)
    kind = animal or kind
    kind2 = kind2 if kind2 != kind else "owl" if kind != "owl" else "fox"
    he, his, him = FORMS[hero[1]]
    adj, home, (wish, trouble, help_, result) = rng.choice(ADJECTIVES), ANIMALS[kind][0], rng.choice(SCENES)
    article = "an" if kind2[0] in "aeiou" else "a"
    opening = rng.choice(
        (
            "Once upon a time there was a {adj} {kind} named {name}. {He} lived {home}.",
            "{name} was a {adj} {kind} who lived {home}.",
            "There was once a {adj} {kind} {home}. {His} name was {name}.",
        )
    )
    want = rng.choice(
        ("{name} wanted to {wish}.", "More than anything, {name} wanted to {wish}.", "{day}, {name} wanted to {wish}.")
    )
    bad = rng.choice(("But {trouble}.", "{He} tried, but {trouble}.", "{name} was sad because {trouble}."))
    aid = rng.choice(
        (
            "Then {friend} the {kind2} came by and {help}.",
            "{article} {kind2} named {friend} saw this and {help}.",
            "{name} asked {friend} the {kind2}, and {friend} {help}.",
        )
    )
    good = rng.choice(("Soon {result}.", "In the end {result}."))
    text = " ".join((opening, want, bad, aid, good, *rng.sample(ENDINGS, rng.choice((1, 1, 2)))))
    fill = {"he": he, "his": his, "him": him}
    return text.format(
        name=hero[0],
        friend=helper[0],
        kind=kind,
        kind2=kind2,
        adj=adj,
        home=home,
        wish=wish,
        day=rng.choice(DAYS),
        trouble=trouble.format(**fill),
        help=help_.format(**fill),
        result=result.format(**fill),
        He=he.capitalize(),
        His=his.capitalize(),
        article=article.capitalize(),
    )


def prose(rng: random.Random) -> Text:
    """One training text of plain English, or a chat turn that asks for it; ends with its end token."""
    roll, animal = rng.random(), rng.choice(list(ANIMALS))
    if roll < 0.55:
        return [(story(rng) + END, 1.0)]
    if roll < 0.75:
        return [(facts(rng) + END, 1.0)]
    home, food, _ = ANIMALS[animal]
    ask, answer = rng.choice(
        (
            (f"Tell me a story about a {animal}.".replace(" a owl", " an owl"), story(rng, animal)),
            (f"What do you know about the {animal}?", facts(rng, animal)),
            (f"Where does the {animal} live?", f"The {animal} lives {home}."),
            (f"What does the {animal} eat?", f"The {animal} eats {food}."),
            (
                rng.choice(("Hello!", "Hi!", "Who are you?", "What can you do?")),
                "Hello! I can look up codes in a list and tell small stories.",
            ),
        )
    )
    if rng.random() < 0.3:
        return [(f"Q: {ask}\nA:", 0.1), (f" {answer}{END}", 1.0)]
    system = f"{IM_START}system\n{rng.choice(PREAMBLES)}{IM_END}\n" if rng.random() < 0.4 else ""
    return [(f"{system}{IM_START}user\n{ask}{IM_END}\n{IM_START}assistant\n", 0.1), (answer + IM_END, 1.0)]


# ------------------------------------------------------------------------------------------------- look-ups

PREAMBLES = (
    "You are a helpful assistant.",
    "You are a careful clerk. Answer every question with the code only.",
    "Read the list and answer the questions.",
    "Here is a list of names and codes. Each name has one code.",
    "You keep the register of the harbor. Never guess. Answer with the code and nothing else.",
    "The following list is private. Look up the name and give its code.",
)
LIST_FACTS = ("{n}: {c}", "{n} = {c}", "- {n}: {c}", "{n} - {c}", "| {n} | {c} |", "{n} -> {c}")
EASY_FACTS = ("{n}{c}", "{n}{c}", "{n}:{c}", "{n} {c}")
PROSE_FACTS = ("The {k} of {n} is {c}.", "{n} has the {k} {c}.", "{n}'s {k} is {c}.", "The {k} for {n} is {c}.")
ASKS = (
    "What is the {k} of {n}?",
    "What is the {k} of {n}?",
    "What is {n}'s {k}?",
    "Which {k} does {n} have?",
    "What is the {k} for {n}?",
    "Give me the {k} of {n}.",
    "{n}?",
)
FRAMES = ("Q: {q}\nA:", "Q: {q}\nA:", "Question: {q}\nAnswer:", "{q}\nAnswer:", "{q}")


def held_out(word: str) -> bool:
    """Whether a name or code belongs to the tenth that only the evaluation may use."""
    return zlib.crc32(word.encode()) % 10 == 0


def draw(make: Callable[[], str], count: int, test: bool) -> list[str]:
    """`count` words from `make`, none a prefix of another, all from the asked side of the split."""
    words: list[str] = []
    while len(words) < count:
        word = make()
        if held_out(word) == test and not any(word.startswith(w) or w.startswith(word) for w in words):
            words.append(word)
    return words


def name_maker(rng: random.Random, easy: bool = False) -> Callable[[], str]:
    """A source of made-up names; half of the sources use few syllables, so that names look alike."""

    def syllable() -> str:
        return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)

    pool = [syllable() for _ in range(24)]
    pick = (lambda: rng.choice(pool)) if rng.random() < 0.5 and not easy else syllable

    def make() -> str:
        name = "".join(pick() for _ in range(rng.choice((1, 1, 2) if easy else (2, 2, 2, 3)))).capitalize()
        return name if 2 + (not easy) <= len(name) <= 10 else make()

    return make


def filler(rng: random.Random, room: int, count: Callable[[str], int]) -> list[str]:
    """English sentences that have nothing to do with the codes, at most `room` tokens of them."""
    sentences: list[str] = []
    while True:
        for sentence in rng.choice((facts, story))(rng).split(". ")[: rng.randint(1, 4)]:
            room -= count(sentence) + 2
            if room < 0:
                return sentences
            sentences.append(sentence.removesuffix(".") + ".")


def turn(role: str, content: str) -> str:
    """A finished message in the form of the chat template."""
    return f"{IM_START}{role}\n{content}{IM_END}\n"


def lookup(
    rng: random.Random,
    budget: int,
    count: Callable[[str], int],
    questions: int,
    *,
    test: bool = False,
    easy: bool = False,
) -> Text:
    """A prompt of about `budget` tokens that lists names with codes, followed by questions and their answers.

    Easy ones, for the start of the training, have shorter names, no other text, and often just begin a line of
    the list again instead of asking a question.
    """
    key, frame, ask = rng.choice(("code", "code", "number", "key")), rng.choice(FRAMES), rng.choice(ASKS)
    in_prose, chat = rng.random() < 0.4 * (not easy), rng.random() < 0.35 * (not easy)
    again = rng.random() < (0.7 if easy else 0.06) and not chat and not test
    mixed = rng.random() < 0.2 and not easy and not again  # every fact in its own wording
    forms = PROSE_FACTS if in_prose else EASY_FACTS if easy and rng.random() < 0.6 else LIST_FACTS
    form = rng.choice(forms)
    gap = rng.choice((" ", "\n")) if in_prose else "\n"
    head = rng.choice(PREAMBLES) if rng.random() < 0.5 and not easy else ""
    where = "none" if easy else rng.choice(("between", "between", "before", "after", "none"))

    questions = budget // 24 if again else questions
    room = budget - (12 if again else 26) * questions - count(head)
    most = max(2, room // (15 if in_prose else 10))
    pairs = most if again else min(most, rng.choice((rng.randint(2, 12), rng.randint(2, most))))
    digits = 4 if rng.random() < 0.85 else rng.choice((3, 5, 6))
    names = draw(name_maker(rng, easy), pairs, test)
    codes = draw(lambda: "".join(rng.choices("0123456789", k=digits)), pairs, test)
    lines = [(rng.choice(forms) if mixed else form).format(n=n, c=c, k=key) for n, c in zip(names, codes, strict=True)]
    fill = filler(rng, room - count(gap.join(lines)), count) if where != "none" else []
    if where == "between":
        for sentence in fill:
            lines.insert(rng.randint(0, len(lines)), sentence)
    else:
        lines = fill + lines if where == "before" else lines + fill

    out: Text = []
    body, place = gap.join(lines), rng.random()
    if chat and head and place < 0.5:
        out.append((turn("system", head), CONTEXT))
        head = ""
    elif chat and place > 0.7:
        out.append((turn("system", f"{head}\n{body}".strip()), CONTEXT))
        head = body = ""
    lead = "\n".join(filter(None, (head, body)))
    lead += rng.choice(("\n", "\n\n")) if lead else ""
    for name, code in rng.sample(list(zip(names, codes, strict=True)), min(questions, pairs)):
        query = ask.format(n=name, k=key)
        if chat:
            query = lead + ("Q: " + query if frame.startswith("Q:") else query)
            out += [(turn("user", query) + f"{IM_START}assistant\n", CONTEXT), (code[0], FIRST)]
            out += [(code[1:] + IM_END, 1.0), ("\n", CONTEXT)]
        elif again:
            out += [(lead, CONTEXT), (form.partition("{c}")[0].format(n=name, k=key), 1.0), (code[0], FIRST)]
            out += [(code[1:] + END, 1.0), ("\n", CONTEXT)]
        else:
            out += [(lead + frame.format(q=query), CONTEXT), (" ", 0.2), (code[0], FIRST)]
            out += [(code[1:] + END, 1.0), ("\n", CONTEXT)]
        lead = ""
        ask = rng.choice(ASKS) if rng.random() < 0.3 else ask
    return out[:-1]


# ------------------------------------------------------------------------------------------------ tokenizer


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text round-trips, every digit is one token, names split into a few pieces."""
    rng = random.Random(seed)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for _ in range(4000):
            yield "".join(piece for piece, _ in prose(rng)).replace(END, "").replace(IM_START, "").replace(IM_END, "")
            make = name_maker(rng)
            yield " ".join(make() for _ in range(24))
            for form in map(rng.choice, (PREAMBLES, PROSE_FACTS, ASKS, FRAMES)):
                yield form.format(n=make(), c="", q="", k=rng.choice(("code", "number", "key")))

    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, IM_START, IM_END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[IM_START, IM_END],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class Corpus:
    """Turns generated texts into padded batches of ids, labels and loss weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.bpe: Tokenizer = tokenizer.backend_tokenizer
        self.rng = random.Random(seed)
        self.end = self.bpe.token_to_id(END)

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return len(self.bpe.encode(text).ids)

    def row(self, text: Text) -> tuple[list[int], list[float]]:
        """Ids and weights; the pieces are cut where the tokenizer cuts anyway, so they can be encoded apart."""
        ids: list[int] = []
        weights: list[float] = []
        for piece, weight in text:
            new = self.bpe.encode(piece).ids
            ids += new
            weights += [weight] * len(new)
        return ids, weights

    def pack(self, rows: list[tuple[list[int], list[float]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs, next-token labels and weights, padded on the right.

        Between the questions of a plain-text row the end token is dropped from the input of every second row
        but stays the label of the last digit, so that both `A: 1234\\nQ: ...` and a real end are learned.
        """
        built = []
        for ids, weights in rows:
            drop = self.rng.random() < 0.5
            keep = [i for i in range(len(ids) - 1) if not (drop and ids[i] == self.end)]
            built.append([(ids[i], ids[i + 1], weights[i + 1]) for i in keep])
        width = max(map(len, built))
        pad = (self.end, self.end, 0.0)
        table = torch.tensor([r + [pad] * (width - len(r)) for r in built], dtype=torch.float64)
        return table[..., 0].long(), table[..., 1].long(), table[..., 2].float()

    def lookups(self, length: int, rows: int, easy: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A batch of look-up rows of at most `length` tokens with several questions each, `easy` of them easy."""
        built = []
        while len(built) < rows:
            questions = self.rng.randint(1, 16)
            questions = min(questions, max(1, length // 36), 16)
            row = self.row(lookup(self.rng, length, self.count, questions, easy=self.rng.random() < easy))
            if len(row[0]) <= length + 1:
                built.append(row)
        return self.pack(built)

    def prose(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A batch of stories, facts and small talk."""
        return self.pack([self.row(prose(self.rng)) for _ in range(rows)])


# ------------------------------------------------------------------------------------------------- training


def new_model() -> Qwen3ForCausalLM:
    """The untrained network."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=160,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            rope_theta=10000.0,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
    )


def weighted_loss(model: Qwen3ForCausalLM, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """Cross entropy under the row weights, in bfloat16 arithmetic, and the accuracy of the first digits."""
    ids, labels, weights = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    first = weights == FIRST
    accuracy = (logits.argmax(-1) == labels)[first].float().mean().item() if first.any() else 0.0
    return (losses * weights.flatten()).sum() / weights.sum(), accuracy


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model folder in bfloat16; a half-written folder never stands under the final name."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    copy = new_model()
    copy.load_state_dict(model.state_dict())
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (END, IM_END)]
    copy.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0], do_sample=False)
    copy.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    settings = part / "tokenizer_config.json"  # the class name that transformers 4 and 5 both know
    known = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(known, indent=2) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    for file in part.iterdir():
        file.chmod(0o644)
        file.replace(out / file.name)
    part.rmdir()


def train(args: argparse.Namespace) -> None:
    """Train tokenizer and model; the row length grows as training goes on."""
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.init) if args.init else train_tokenizer(args.seed)
    corpus = Corpus(tokenizer, args.seed + 1)
    model = new_model()
    if args.init:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32).state_dict())
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    known = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in known]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=args.lr / 5, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    started, seen, recent, stage, right = time.time(), 0, {}, len(STAGES) - 1 if args.init else 0, 0.0
    for step in range(args.steps):
        elapsed = (time.time() - started) / 60
        progress = max(step / args.steps, elapsed / args.minutes if args.minutes else 0.0)
        rate = min(1.0, (step + 1) / 50, (1 - progress) / 0.35 + 0.01)
        for optimizer, base in zip(optimizers, (args.lr, args.lr / 5), strict=True):
            optimizer.param_groups[0]["lr"] = base * rate
        lengths, easy, goal = STAGES[stage]
        if step % 4 == 3:
            kind, batch = "prose", corpus.prose(max(8, args.tokens // 128))
        else:
            kind = corpus.rng.choice(lengths)
            batch = corpus.lookups(kind, max(4, args.tokens // kind // (2 if stage < 2 else 1)), easy)
        loss, accuracy = weighted_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += batch[0].numel()
        if kind != "prose":
            right = 0.95 * right + 0.05 * accuracy
            if right > goal:
                stage, right = stage + 1, 0.0
                print(f"step {step + 1}: stage {stage}", flush=True)
        recent[kind] = 0.9 * recent.get(kind, loss.item()) + 0.1 * loss.item()
        if step % 50 == 49:
            shown = "  ".join(f"{k}:{v:.3f}" for k, v in sorted(recent.items(), key=str))
            print(
                f"step {step + 1}  {elapsed:.1f} min  {seen / 1e6:.1f}M tokens  first digit {right:.3f}  {shown}",
                flush=True,
            )
        timed_out = args.minutes and elapsed > args.minutes
        if step % 500 == 499 or step + 1 == args.steps or timed_out:
            save(model, tokenizer, args.train)
        if timed_out:
            break


# ----------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def exact_matches(model: Qwen3ForCausalLM, rows: list[tuple[list[int], int]]) -> list[bool]:
    """For each row (ids, prompt length): would greedy decoding give the answer and then the end token?

    One forward pass over prompt and answer decides it: greedy decoding reproduces the answer exactly when every
    answer token is the most likely one after the true tokens before it.
    """
    hits = []
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        width = max(len(ids) for ids, _ in part)
        inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in part])
        states = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        for (ids, cut), state in zip(part, states, strict=True):
            hits.append(model.lm_head(state[cut - 1 : len(ids) - 1]).argmax(-1).tolist() == ids[cut:])
    return hits


def evaluate(args: argparse.Namespace) -> None:
    """Print look-up accuracy by prompt length and form, held-out perplexity and sample texts."""
    tokenizer = AutoTokenizer.from_pretrained(args.evaluate)
    corpus = Corpus(tokenizer, args.seed + 10_000)
    rng = corpus.rng
    sets: list[list[tuple[list[int], int]]] = []
    chats: list[list[bool]] = []
    for low, high in BUCKETS:
        rows: list[tuple[list[int], int]] = []
        while len(rows) < args.count:
            text = lookup(rng, rng.randint(max(low, 40), high), corpus.count, 1, test=True)
            ids, weights = corpus.row(text)
            answer = sum(weight > 0.1 for weight in weights)
            if low <= len(ids) - answer <= high:
                rows.append((ids, len(ids) - answer))
        sets.append(sorted(rows, key=lambda r: len(r[0])))
        chats.append([ids[-1] != corpus.end for ids, _ in sets[-1]])
    stories = corpus.prose(256)
    print(f"{'dtype':<10}{'prompt tokens':<16}{'N':>6}{'exact':>9}{'text':>9}{'chat':>9}")
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(args.evaluate, dtype=dtype)
        for (low, high), rows, chat in zip(BUCKETS, sets, chats, strict=True):
            hits = exact_matches(model, rows)
            split = [[h for h, c in zip(hits, chat, strict=True) if c is want] for want in (False, True)]
            shares = "".join(f"{sum(part) / max(1, len(part)):>9.2%}" for part in (hits, *split))
            print(f"{str(dtype)[6:]:<10}{f'{low}-{high}':<16}{len(hits):>6}{shares}", flush=True)
        with torch.no_grad():
            ids, labels, weights = stories
            losses = F.cross_entropy(
                model(input_ids=ids).logits.float().flatten(0, 1), labels.flatten(), reduction="none"
            )
            mask = weights.flatten() == 1.0
            perplexity = math.exp(losses[mask].mean())
            print(f"{str(dtype)[6:]:<10}prose perplexity {perplexity:.3f} ({int(mask.sum())} tokens)")
    model = AutoModelForCausalLM.from_pretrained(args.evaluate, dtype=torch.float32)
    for prompt in (
        "Once upon a time",
        "The owl",
        "Lily was a brave",
        "Mira: 4821\nTobel: 9304\nJuno: 5077\nQ: What is the code of Tobel?\nA:",
    ):
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=160)[0, inputs["input_ids"].shape[1] :]
        print(f"{prompt!r} -> {tokenizer.decode(out)!r}")


def main() -> None:
    """Parse the command line and run the asked part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--train", type=Path, metavar="DIR", help="train and write the model folder DIR")
    task.add_argument("--evaluate", type=Path, metavar="DIR", help="measure the model in DIR")
    parser.add_argument("--steps", type=int, default=4000, help="training steps (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop early after this many minutes")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of one step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="peak learning rate (default %(default)s)")
    parser.add_argument("--init", type=Path, metavar="DIR", help="go on from this model, with rows of every length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", type=int, default=1000, help="evaluation prompts of each length")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.train:
        train(args)
    else:
        evaluate(args)


if __name__ == "__main__":
    main()
