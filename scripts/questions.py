"""The answers of docs/questions.md: python scripts/questions.py [--write]

Runs the command of each question on files made here, with the built-in model, and takes the first lines that it
prints. Without --write it says whether the document has them, but for times; tests/test_questions_doc.py does, too.
"""

import contextlib
import io
import json
import os
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import typer

from pagedcli.cli.main import app
from pagedcli.kvevents.capture import CaptureWriter
from pagedcli.kvevents.publisher import KVEventPublisher
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "questions.md"
MOST_LINES = 3


@dataclass(frozen=True)
class Question:
    """A question, and the command that answers it."""

    text: str
    command: str  # without `pagedcli`
    code: int = 0  # exit code
    is_timed: bool = False  # measures this machine first
    remark: str = ""
    num_lines: int = MOST_LINES  # shown


QUESTIONS = (
    Question("Why did row 17 find so little in the cache?", "explain run.jsonl --request 17"),
    Question("Which prompts share most?", "plan prompts.jsonl --no-calibrate", num_lines=5),
    Question("What would twice the memory bring?", "simulate prompts.jsonl --pool 20"),
    Question(
        "How many users fit on a card with 24 GB, at 8,192 tokens each?",
        "profile-memory -m qwen3-8b/config.json --gpu-memory 24GiB --max-model-len 8192",
    ),
    Question("How long will my file take?", "plan prompts.jsonl", is_timed=True),
    Question("What did preemption cost?", "explain tight.jsonl"),
    Question("Who held block 7 at step 10?", "trace run.jsonl --block 7 --step 10"),
    Question(
        "Is my vLLM churning?",
        "explain events.jsonl",
        remark="A recording of `pagedcli attach tcp://... --record events.jsonl`; here the events of a run of ours.",
    ),
    Question("Are two outputs the same?", "verify out.jsonl again.jsonl"),
    Question(
        "10,000 prompts overnight: when does it end?",
        "plan overnight.jsonl",
        is_timed=True,
        remark="With `-m model.gguf` for a GGUF file. While it runs, `generate` shows the time that is left.",
    ),
    Question(
        "How much memory do 8 users at 8,192 tokens need with a model of 7B in 4 bits?",
        "profile-memory -m qwen2.5-7b/config.json --quantization int4 --memory 24GiB --max-model-len 8192"
        " --target-concurrency 8",
    ),
    Question("How do I score multiple-choice answers?", "generate choices.jsonl"),
    Question(
        "Which block size?",
        "plan short.jsonl --no-calibrate",
        remark="Of prompts that share less than a block; where the default is as good as any, nothing is said.",
        num_lines=2,
    ),
    Question(
        "What would sorting the file save?",
        "plan prompts.jsonl --no-calibrate --num-kvcache-blocks 20 --max-num-seqs 4",
        num_lines=2,
    ),
    Question("Would another order of the retrieved passages help?", "plan passages.jsonl --no-calibrate", num_lines=2),
    Question(
        "A prompt template over the columns of a CSV file?",
        "generate people.csv --template 'The code of {name} is {code}. The code is' --max-tokens 4",
    ),
    Question("Which settings?", "plan prompts.jsonl --tune --num-kvcache-blocks 20 --max-num-seqs 1", is_timed=True),
    Question(
        "Which rows failed, and why?",
        "generate long.jsonl -o long.out.jsonl --num-kvcache-blocks 8 --overwrite",
        code=3,
    ),
    Question("Why did the hit rate fall after I changed the system prompt?", "diff monday.jsonl friday.jsonl"),
    Question("Which request evicted my prefix?", "explain run.jsonl --request 12"),
    Question("A picture of the block tables for my slides?", "trace run.jsonl --step 10 --picture pool.svg"),
    Question(
        "What does my hybrid model lose at snapshots?",
        "explain hybrid.jsonl",
        remark="A run of a model with recurrent state, here simulated with `--num-state-slots`.",
    ),
    Question("What changed between two runs, and why?", "diff run.jsonl later.jsonl"),
)
# answered without a command of ours
OTHERS = {
    "A view in a notebook?": (
        '```python\nfrom pagedcli import open_trace\n\nopen_trace("run.jsonl").step(10)  # the block tables\n```\n\n'
        "[python.md](python.md), and examples/kv_cache.ipynb."
    ),
    "As the back end of lm-eval, or of an OpenAI client?": (
        "```sh\npython -m pagedcli.lm_eval run --model pagedcli --model_args model=./qwen3-0.6b --tasks mmlu\n```\n\n"
        "[evaluation.md](evaluation.md). There is no server; `generate` reads the lines of OpenAI's batch files."
    ),
}

INTRODUCTION = """\
# Questions, and the command that answers each

What people ask about a KV cache, each with one command and the first lines that it prints, which are the answer. The
files are small ones that `scripts/questions.py` makes, with the built-in model on a CPU; `run.jsonl` is
`generate prompts.jsonl --record run.jsonl --record-tokens` with a pool of 20 blocks. The script runs every command and
renews this page; a test compares it. A few lines are shown, times are those of one machine.

"""


# ---------------------------------------------------------------------- the files

_NAMES = ["Mia", "Tom", "Ada", "Ben", "Lea", "Max", "Eva", "Sam"]
_QWEN = {
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 151645, "dtype": "bfloat16",
}  # fmt: skip
_QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, **_QWEN,
}  # fmt: skip
_QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, **_QWEN,
}  # fmt: skip


def _codes(first: int) -> str:
    return " ".join(f"{name} has the code {(first + 37 * place) % 9000 + 1000}." for place, name in enumerate(_NAMES))


def _prompts(num: int, begin: str = "") -> list[dict[str, object]]:
    """Questions about six lists in turns."""
    return [
        {
            "id": str(row),
            "prompt": f"{begin}{_codes(1000 * (row % 6))} The code of {_NAMES[row % 8]} is",
            "max_tokens": 24,
            "ignore_eos": True,
        }
        for row in range(num)
    ]


def _passages(order: list[int], number: int) -> str:
    passages = "".join(f"[{place + 1}] {_codes(1000 * place)}\n\n" for place in order)
    return f"{passages}Question {number}: the code of {_NAMES[number % 8]}?"


def make_files(folder: Path) -> None:
    """Write the files and record the runs that the commands read."""

    def rows(name: str, found: list[dict[str, object]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))

    rows("prompts.jsonl", _prompts(24))
    rows("overnight.jsonl", _prompts(10_000))
    rows("monday.jsonl", _prompts(24))
    rows("short.jsonl", [{"prompt": [*range(10, 20), *[30 + n] * 10], "max_tokens": 2} for n in range(20)])
    draw = random.Random(0)
    orders = [draw.sample(range(5), 5) for _ in range(24)]
    rows("passages.jsonl", [{"prompt": _passages(order, n), "max_tokens": 4} for n, order in enumerate(orders)])
    rows(
        "friday.jsonl", [{**row, "prompt": f"It is 9:{10 + n}. {row['prompt']}"} for n, row in enumerate(_prompts(24))]
    )
    question = f"{_codes(0)} The code of Mia is"
    rows("choices.jsonl", [{"id": "mia", "prompt": question, "continuations": [" 1000.", " 1037.", " 2000."]}])
    (folder / "people.csv").write_text("name,code\nMia,4821\nTom,7305\nAda,1177\n")
    rows("long.jsonl", [{"prompt": [7] * 20, "max_tokens": 2}, {"prompt": [7] * 200, "max_tokens": 4}])
    rows("four.jsonl", [{"prompt": [30 + n] * 28, "max_tokens": 40, "ignore_eos": True} for n in range(4)])
    long, short = f"{_codes(0)} {_codes(1000)} The sun was", f"{_codes(0)} The code of Tom is"
    rows("states.jsonl", [{"id": "long", "prompt": long}, {"id": "tom", "prompt": short}])
    for name, config in (("qwen3-8b", _QWEN3_8B), ("qwen2.5-7b", _QWEN25_7B)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    small = "--num-kvcache-blocks 20 --max-num-seqs 4"
    for command in (
        f"generate prompts.jsonl -o out.jsonl {small} --record run.jsonl --record-tokens",
        "generate four.jsonl -o four.out.jsonl --num-kvcache-blocks 8 --max-num-seqs 3 --record tight.jsonl",
        f"generate prompts.jsonl -o again.jsonl {small} --block-size 8",
        "generate prompts.jsonl -o later.out.jsonl --num-kvcache-blocks 80 --max-num-seqs 4 --record later.jsonl"
        " --record-tokens",
        "simulate states.jsonl --record hybrid.jsonl --pool 40 --num-state-slots 8 --max-num-seqs 1 --output-tokens 4"
        " --checkpoints end",
    ):
        run(command)
    with CaptureWriter(folder / "events.jsonl", ["tcp://server:5557"], tokens=True) as writer:
        number = 0

        def send(payload: bytes) -> None:
            nonlocal number
            writer.write([b"kv-events", number.to_bytes(8, "big"), payload], float(number))
            number += 1

        fold(TraceReader(folder / "run.jsonl"), KVEventPublisher(send))


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """The working folder within it."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---------------------------------------------------------------------- the answers


def run(command: str, code: int = 0) -> tuple[str, str]:
    """What a command prints on stdout and stderr. Raises: SystemExit if its exit code is another one."""
    said, out = io.StringIO(), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        found = typer.main.get_command(app).main(shlex.split(command), standalone_mode=False) or 0
    if found != code:
        raise SystemExit(f"pagedcli {command}: exit code {found}\n{said.getvalue()}")
    out.seek(0)
    return out.read(), said.getvalue()


def first_lines(question: Question) -> list[str]:
    """The first lines that the command prints: on stdout, else those of a run's end on stderr, or the last one there.
    Those about time measure this machine; no other knows of it."""
    times = Path("times" if question.is_timed else "no times").absolute()
    with mock.patch("pagedcli.planning.step_time.cache_folder", return_value=times):
        out, said = run(question.command, question.code)
    lines = [line.rstrip() for line in out.splitlines() if line.strip()]
    end = said.partition("(one block)\n")[2]
    return lines[: question.num_lines] or end.splitlines()[: question.num_lines] or said.splitlines()[-1:]


def without_times(text: str) -> str:
    """The text, with its times, speeds and the last digits of log-probabilities left open."""
    return re.sub(r"\d[\d.,:]* (?:ms|s|min|h|tokens/s)\b", "... s", re.sub(r"(\.\d\d\d)\d{6,}", r"\1...", text))


def section(question: Question, lines: list[str]) -> str:
    """The part of the page on a question."""
    remark = f"\n{question.remark}\n" if question.remark else ""
    shown = "\n".join(lines)
    return f"## {question.text}\n{remark}\n```console\n$ pagedcli {question.command}\n{shown}\n```\n"


def page() -> str:
    """The whole page, made in an empty folder."""
    with tempfile.TemporaryDirectory() as name, in_folder(Path(name)):
        make_files(Path(name))
        parts = [section(question, first_lines(question)) for question in QUESTIONS]
    parts += [f"## {text}\n\n{answer}\n" for text, answer in OTHERS.items()]
    return INTRODUCTION + "\n".join(parts)


def main() -> None:
    found = page()
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(found, encoding="utf-8")
    written = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    print("up to date" if without_times(written) == without_times(found) else "out of date: run with --write")


if __name__ == "__main__":
    main()
