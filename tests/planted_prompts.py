"""Prompt files with a planted cause why they share less than they could, and the same files without it."""

import random
import uuid
from dataclasses import dataclass, field

WORDS = (
    *("the", "owl", "and", "fox", "live", "near", "a", "quiet", "river", "where", "old", "trees", "grow", "slowly"),
    *("under", "bright", "stars", "while", "children", "listen", "to", "long", "stories", "about", "brave", "who"),
    *("sailors", "found", "small", "islands", "full", "of", "golden", "fruit", "strange", "birds", "warm", "rain"),
    *("deep", "caves", "green", "hills", "broken", "bridges", "silver", "bells", "paper", "boats", "round", "stones"),
    *("tall", "grass", "soft", "wind", "red", "doors", "blue", "lamps", "heavy", "books"),
)
NAMES = ["Ada", "Bob", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Lena", "Milan"]
LANGUAGES = ["English", "German", "French", "Spanish", "Italian", "Polish", "Turkish", "Swedish", "Dutch", "Greek"]


@dataclass
class File:
    """Prompts as rendered texts and their salts."""

    texts: list[str]
    salts: list[str | None] = field(default_factory=list)

    def __post_init__(self):
        self.salts = self.salts or [None] * len(self.texts)


@dataclass
class Planted:
    """A file, the words of which one must be in the first sentence, and the file as it should be."""

    file: File
    words: tuple[str, ...]
    fixed: File | None = None


def words(draw, num):
    """Sentences of so many words in total."""
    found, left = [], num
    while left > 0:
        length = min(left, draw.randint(6, 14))
        found.append(" ".join(draw.choice(WORDS) for _ in range(length)).capitalize() + ".")
        left -= length
    return " ".join(found)


def chat(system, user):
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def _behind_system(draw, num, part, *, middle=False, num_shared=120, kind=()):
    """What differs is in the system prompt, and belongs at the end of it."""
    first = words(draw, 60) + " " if middle else ""
    shared, now, then = words(draw, num_shared), [], []
    for row in range(num):
        question, differs = words(draw, draw.randint(4, 25)), part(draw, row)
        now.append(chat(f"{first}{differs} {shared}", question))
        then.append(chat(f"{first}{shared} {differs}", question))
    return Planted(File(now), kind, File(then))


def clock(draw, num):
    return _behind_system(draw, num, lambda d, row: f"It is {d.randint(0, 23)}:{d.randint(10, 59)}.", kind=("time",))


def timestamp(draw, num):
    def part(d, row):
        return (
            f"Current time: 2026-03-{d.randint(10, 28)}T{d.randint(10, 23)}:{d.randint(10, 59)}:{d.randint(10, 59)}Z\n"
        )

    return _behind_system(draw, num, part, kind=("time",))


def date(draw, num):
    def part(d, row):
        return f"Today is {d.randint(1990, 2026)}-{d.randint(10, 12)}-{d.randint(10, 28)}."

    return _behind_system(draw, num, part, kind=("date",))


def identifier(draw, num):
    def part(d, row):
        return f"The request id is {uuid.UUID(int=d.getrandbits(128))}."

    return _behind_system(draw, num, part, middle=True, kind=("id",))


def ticket(draw, num):
    def part(d, row):
        return f"Ticket: {d.choice('ABCDEF')}{d.choice('KLMNOP')}-{d.randint(10000, 99999)}\n"

    return _behind_system(draw, num, part, kind=("id",))


def bracketed(draw, num):
    """An id in brackets leads an instruction of one sentence."""
    shared, now, then = words(draw, 120).replace(".", ",") + " as told.", [], []
    for _ in range(num):
        ticket, question = f"[AB-{draw.randint(10000, 99999)}]", words(draw, draw.randint(4, 25))
        now.append(f"{ticket} {shared} {question}")
        then.append(f"{shared} {ticket} {question}")
    return Planted(File(now), ("id",), File(then))


def bracketed_tickets(draw, num):
    """The same before tickets that begin with one of a few sentences, or by chance with the same word."""
    shared, now, then = words(draw, 120).replace(".", ",") + " as told.", [], []
    openers = ["Hello, I have a problem.", "Hi there, my parcel is late."]
    for row in range(num):
        ticket, text = f"[AB-{draw.randint(10000, 99999)}]", words(draw, draw.randint(12, 25))
        text = f"{openers[row % 2]} {text}" if row % 3 else text
        now.append(f"{ticket} {shared} {text}")
        then.append(f"{shared} {ticket} {text}")
    return Planted(File(now), ("id",), File(then))


def name(draw, num):
    def part(d, row):
        return f"You talk to {d.choice(NAMES)} {d.choice(NAMES)}{d.choice('aeiouln')}{d.choice('dfghstrm')}en."

    return _behind_system(draw, num, part, kind=("name",))


def counter(draw, num):
    return _behind_system(draw, num, lambda d, row: f"This is request {row + 1}.", kind=("counter",))


def language(draw, num):
    return _behind_system(draw, num, lambda d, row: f"Always answer in {d.choice(LANGUAGES)}.", kind=("language",))


def question_first(draw, num):
    """The question stands before a long text."""
    shared, now, then = words(draw, 150), [], []
    for _ in range(num):
        question = words(draw, draw.randint(8, 30))
        now.append(chat("Be brief.", f"Question: {question}\nContext: {shared}\nAnswer:"))
        then.append(chat("Be brief.", f"Context: {shared}\nQuestion: {question}\nAnswer:"))
    return Planted(File(now), ("text",), File(then))


def _in_any_order(draw, num, shown, *, item=lambda draw, number: words(draw, 40), kind=("documents",)):
    """The same five items in another order, as `shown(items in order, their places, question)` has them."""
    pool, now, then = [item(draw, number) for number in range(5)], [], []
    for _ in range(num):
        question, order = words(draw, draw.randint(5, 20)), draw.sample(range(5), 5)
        for made, places in ((now, order), (then, range(5))):
            made.append(shown([pool[place] for place in places], places, question))
    return Planted(File(now), kind, File(then))


def documents(draw, num):
    """The same documents in another order."""

    def shown(texts, places, question):
        named = "\n\n".join(f"Document {number}: {text}" for number, text in enumerate(texts, 1))
        return chat("Use the documents.", f"{named}\n\n{question}")

    return _in_any_order(draw, num, shown)


def named_documents(draw, num):
    """The same documents in another order, each with a name of its own."""

    def shown(texts, places, question):
        named = "\n\n".join(f"Document {place + 1}: {text}" for place, text in zip(places, texts, strict=True))
        return chat("Use the documents.", f"{named}\n\n{question}")

    return _in_any_order(draw, num, shown)


def passages(draw, num):
    """The same passages in another order, without names, the first of them right after the mark of the message."""
    return _in_any_order(draw, num, lambda texts, _, question: chat("Use them.", "\n\n".join([*texts, question])))


def clock_and_ticket(draw, num):
    """Two causes: the second one is found in prompts without the first."""
    shared, rest, now, then = words(draw, 60), words(draw, 90), [], []
    for _ in range(num):
        time, ticket = (
            f"It is {draw.randint(0, 23)}:{draw.randint(10, 59)}.",
            f"Ticket AB-{draw.randint(10000, 99999)}.",
        )
        question = words(draw, draw.randint(4, 12))
        now.append(chat(f"{time} {shared} {ticket} {rest}", question))
        then.append(chat(f"{shared} {rest} {time} {ticket}", question))
    return Planted(File(now), ("time", "id"), File(then))


def tools(draw, num):
    """The same tools in another order."""

    def tool(draw, number):
        return (
            f'{{"type": "function", "function": {{"name": "tool_{number}", "description": "{words(draw, 25)}",'
            f' "parameters": {{"type": "object"}}}}}}'
        )

    def shown(texts, places, question):
        return chat("Use the tools.\n\n<tools>\n" + "\n".join(texts) + "\n</tools>", question)

    return _in_any_order(draw, num, shown, item=tool, kind=("tools",))


def _in_groups(draw, num, variant, kind, size=2):
    """Groups that share a text of their own, each prompt of a group in another variant."""
    now, then = [], []
    for _ in range(0, num, size):
        shared = words(draw, 110)
        for place in range(min(size, num - len(now))):
            question = words(draw, draw.randint(5, 15))
            now.append(variant(place, shared, question))
            then.append(variant(0, shared, question))
    return Planted(File(now), kind, File(then))


def begin_twice(draw, num):
    """The token that a text begins with is there once more."""

    def variant(place, shared, question):
        return "<|endoftext|>" * (1 + place) + chat(shared, question)

    return _in_groups(draw, num, variant, ("begin",))


def blank(draw, num):
    def variant(place, shared, question):
        return " " * (1 + place) + f"{shared}\nQ: {question}\nA:"

    return _in_groups(draw, num, variant, ("blank",))


def blank_in_half(draw, num):
    """Groups of four, two prompts of each with a blank more: as they are, each finds one with its own beginning."""

    def variant(place, shared, question):
        return " " * (1 + place % 2) + f"{shared}\nQ: {question}\nA:"

    return _in_groups(draw, num, variant, ("blank",), size=4)


def templates(draw, num):
    def variant(place, shared, question):
        return chat(shared, question) if place == 0 else f"[INST] <<SYS>>\n{shared}\n<</SYS>>\n\n{question} [/INST]"

    return _in_groups(draw, num, variant, ("template",))


def salts(draw, num):
    shared = words(draw, 120)
    texts = [chat(shared, words(draw, draw.randint(5, 20))) for _ in range(num)]
    return Planted(File(texts, [f"user {draw.randrange(10**9)}" for _ in texts]), ("salt",), File(texts))


def short(draw, num):
    """A beginning shorter than a block."""
    texts = [f"Q: Is it so? A: {words(draw, draw.randint(6, 12))}" for _ in range(num)]
    return Planted(File(texts), ("block",))


CAUSES = {
    each.__name__: each
    for each in (
        clock, timestamp, date, identifier, ticket,
        bracketed, bracketed_tickets, name, counter, language, question_first, documents, named_documents,
        passages, tools,
        begin_twice, blank, templates, salts, short,
    )
}  # fmt: skip


# ---------------------------------------------------------------------- nothing wrong


def unique(draw, num):
    return File([words(draw, draw.randint(20, 200)) for _ in range(num)])


def shared_system(draw, num):
    system = words(draw, 120)
    return File([chat(system, words(draw, draw.randint(5, 60))) for _ in range(num)])


def grown_chats(draw, num):
    """Each prompt continues the one before it."""
    texts, text = [], ""
    for row in range(num):
        if row % 5 == 0:
            text = f"<|im_start|>system\n{words(draw, 40)}<|im_end|>\n"
        text += f"<|im_start|>user\n{words(draw, 20)}<|im_end|>\n<|im_start|>assistant\n"
        texts.append(text)
        text += f"{words(draw, 20)}<|im_end|>\n"
    return File(texts)


def clock_behind(draw, num):
    system = words(draw, 120)
    return File([chat(system, f"It is {row % 24}:{10 + row % 50}. {words(draw, 12)}") for row in range(num)])


def few_languages(draw, num):
    shared = words(draw, 100)
    return File([chat(f"Answer in {LANGUAGES[row % 2]}. {shared}", words(draw, 12)) for row in range(num)])


def sorted_documents(draw, num):
    pool = [words(draw, 40) for _ in range(4)]
    shown = "\n\n".join(f"Document {number}: {text}" for number, text in enumerate(pool, 1))
    return File([chat("Use the documents.", f"{shown}\n\n{words(draw, 15)}") for _ in range(num)])


def one_salt(draw, num):
    system = words(draw, 100)
    return File([chat(system, words(draw, 12)) for _ in range(num)], ["all"] * num)


def own_documents(draw, num):
    return File([chat("Be brief.", f"Document 1: {words(draw, 80)}\n\n{words(draw, 10)}") for _ in range(num)])


def repeated(draw, num):
    texts = [words(draw, 60) for _ in range(max(1, num // 4))]
    return File([draw.choice(texts) for _ in range(num)])


def short_closing(draw, num):
    return File([f"{words(draw, 60)}\nAnswer in one word." for _ in range(num)])


CLEAN = (
    unique, shared_system, grown_chats, clock_behind, few_languages, sorted_documents, one_salt, own_documents,
    repeated, short_closing,
)  # fmt: skip


def drawn(make, num, seed):
    """The same file for the same seed."""
    return make(random.Random(f"{make.__name__} {num} {seed}"), num)
