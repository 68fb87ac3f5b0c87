"""How many guesses are right, and how many steps they save: python scripts/guesses_right.py [--stories260k FOLDER]

Prints the table of docs/speculation.md: --speculation ngram over stories, look-ups and JSON of a grammar, by rows at
once. All answers are compared with those without guesses. The counts depend on the tokens alone, not on time.

With --openvino PYTHON IR, one row at a time and greedily, here and by the prompt lookup of OpenVINO GenAI: PYTHON has
openvino_genai, IR is the folder of the model as `optimum-cli export openvino` writes it.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedcli import LLM, SamplingParams
from pagedcli.config import BUILTIN_MODEL
from pagedcli.core.drafting import make_drafting
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.events import DRAFT_WORDS
from pagedcli.printable import percent_text

BEGINNINGS = ("Once upon a time", "Lily was a brave", "The fox", "One day, a little boy", "There was a bear")
NAMES = ("Mirano", "Tavek", "Solbin", "Dorpel", "Kesta", "Luvane", "Ragmor", "Finbul")
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
ROWS_AT_ONCE = (1, 4, 16)
Row = tuple[str, dict[str, Any]]  # prompt, sampling parameters


def stories() -> Iterator[Row]:
    for number in range(30):
        yield BEGINNINGS[number % len(BEGINNINGS)], {"temperature": 0.7, "seed": number, "max_tokens": 96}


def lookups() -> Iterator[Row]:
    for number in range(32):
        codes = {name: 1000 + (number * 1009 + place * 1237) % 9000 for place, name in enumerate(NAMES)}
        known = "\n".join(f"{name}: {code}" for name, code in codes.items())
        name = NAMES[number % len(NAMES)]
        prompt = f"Read the list and answer the questions.\n{known}\nQ: What is the code of {name}?\nA:"
        yield prompt, {"temperature": 0.0, "max_tokens": 12}


def entries() -> Iterator[Row]:
    schema = {"type": "json_schema", "json_schema": {"name": "entry", "schema": ENTRY, "strict": True}}
    for number in range(30):
        yield f"Story {number}:", {"temperature": 1.0, "seed": number, "max_tokens": 110, "response_format": schema}


TEXTS = {"stories": stories, "look-ups in a list": lookups, "JSON of a grammar": entries}


@dataclass
class Counts:
    """What a run of one text took."""

    num_steps: int = 0
    num_tokens: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    @property
    def right(self) -> str:
        """The share of right ones, and how many of each source."""
        if not self.drafted:
            return "no guess"
        parts = [f"{self.accepted[each]:,} of {count:,} from {DRAFT_WORDS[each]}" for each, count in
                 self.drafted.most_common()]  # fmt: skip
        return f"{percent_text(self.accepted.total() / self.drafted.total())}: {', '.join(parts)}"


def run(llm: LLM, rows: list[Row], speculation: str) -> tuple[list[list[int]], Counts]:
    """The tokens of the rows, and what they took. A run begins without answers to guess from."""
    engine = llm.llm_engine
    engine.scheduler.drafting = make_drafting(speculation, clock_ns=engine.clock_ns)  # type: ignore[arg-type]
    facts = engine.stats
    before = facts.num_steps, facts.num_generated_tokens, facts.drafted.copy(), facts.accepted.copy()
    params = [SamplingParams(**fields) for _, fields in rows]
    outputs = llm.generate([prompt for prompt, _ in rows], params, use_tqdm=False)
    counts = Counts(
        facts.num_steps - before[0], facts.num_generated_tokens - before[1], facts.drafted - before[2],
        facts.accepted - before[3],
    )  # fmt: skip
    return [list(each.outputs[0].token_ids) for each in outputs], counts


@dataclass
class Lookup:
    """What prompt lookup did. How many guesses there were in all is not known: the log has the share of right ones of
    each step after the prompt's, which is 0 if all were wrong and if there were none."""

    same: int = 0  # rows with the tokens of pagedcli
    num_steps: int = 0
    num_right: int = 0  # guesses
    num_known: int = 0  # guesses in steps in which one was right


def prompt_lookup(python: str, model: Path, prompts: list[list[int]], rows: list[Row], expected: list[list[int]],
                  most: int) -> Lookup:  # fmt: skip
    """The same rows by OpenVINO's prompt lookup with at most so many guesses a step."""
    given = [{"ids": ids, "max_tokens": fields["max_tokens"]} for ids, (_, fields) in zip(prompts, rows, strict=True)]
    driver, environment = Path(__file__).with_name("openvino_lookup.py"), {**os.environ, "OPENVINO_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        request = json.dumps({"model": str(model), "rows": given, "most": most})
        log = subprocess.run([python, str(driver), str(path)], input=request, env=environment, check=True,
                             capture_output=True, text=True).stdout  # fmt: skip
        found = json.loads(path.read_text(encoding="utf-8"))
    counts = Lookup()
    for row, answer, part in zip(found, expected, log.split("\nrow\n")[1:], strict=True):
        counts.same += row["token_ids"] == answer
        counts.num_steps += len(row["sizes"])
        _, _, shares = part.rpartition("|||")
        for size, share in zip(row["sizes"][1:], shares.split("\n")[0].split(), strict=True):
            counts.num_right += size - 1
            counts.num_known += round(100 * (size - 1) / float(share)) if size > 1 else 0
    return counts


def compare(python: str, model: str, folder: Path, texts: list[str]) -> None:
    """Rows of a table: guesses of pagedcli and of prompt lookup, greedily and one row at a time."""
    print("| text | guesses by | most at a time | steps without | steps | right guesses | guesses |")
    print("|---|---|---|---|---|---|---|")
    with LLM(model, device="cpu", speculation="ngram", max_num_seqs=1, enable_prefix_caching=False) as llm:
        for text in texts:
            lengths = {prompt: fields["max_tokens"] for prompt, fields in TEXTS[text]()}
            rows: list[Row] = [(each, {"temperature": 0.0, "max_tokens": most}) for each, most in lengths.items()]
            expected, without = run(llm, rows, "off")
            found, counts = run(llm, rows, "ngram")
            assert found == expected, "guesses have changed the tokens"
            steps = f"{without.num_steps:,}"
            drafted, right = counts.drafted.total(), counts.accepted.total()
            print(f"| {text} | pagedcli | {MOST_DRAFTED} | {steps} | {counts.num_steps:,} | {right:,} | {drafted:,} |")
            tokenizer = llm.get_tokenizer()
            prompts = [list(tokenizer.encode(prompt)) for prompt, _ in rows]
            for most in (3, MOST_DRAFTED):
                other = prompt_lookup(python, folder, prompts, rows, expected, most)
                name = f"{text}, {other.same} of {len(rows)} rows equal"
                cells = name, "OpenVINO", most, steps, f"{other.num_steps:,}", f"{other.num_right:,}"
                print("| " + " | ".join(map(str, cells)) + f" | at least {other.num_known:,} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "IR"), help="compare with OpenVINO's prompt lookup")
    parser.add_argument("--stories260k", help="folder of that model: its stories are counted, too")
    parser.add_argument("--json", action="store_true", help="the counts instead of the table")
    options = parser.parse_args()
    if options.openvino is not None:
        python, folder = options.openvino
        model, texts = options.stories260k or BUILTIN_MODEL, ["stories", "look-ups in a list"]
        compare(python, model, Path(folder), texts[:1] if options.stories260k else texts)
        return
    models = {"built-in model": (BUILTIN_MODEL, list(TEXTS))}
    if options.stories260k is not None:
        models["stories260k"] = (options.stories260k, ["stories"])
    if not options.json:
        print("| model | text | rows at once | steps without guesses | steps with | right guesses |")
        print("|---|---|---|---|---|---|")
    for name, (model, texts) in models.items():
        for num_rows in ROWS_AT_ONCE:
            with LLM(
                model, device="cpu", speculation="ngram", max_num_seqs=num_rows, enable_prefix_caching=False
            ) as llm:
                for text in texts:
                    rows = list(TEXTS[text]())
                    expected, without = run(llm, rows, "off")
                    found, counts = run(llm, rows, "ngram")
                    assert found == expected, "guesses have changed the tokens"
                    if options.json:
                        print(json.dumps({"model": name, "text": text, "rows": num_rows, "without": without.num_steps,
                                          "with": counts.num_steps, "drafted": counts.drafted,
                                          "accepted": counts.accepted}))  # fmt: skip
                        continue
                    cells = name, text, num_rows, f"{without.num_steps:,}", f"{counts.num_steps:,}", counts.right
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
