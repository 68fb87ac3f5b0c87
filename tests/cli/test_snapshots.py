"""What each command prints in a terminal of 100 columns.

tests/snapshots/NAME.txt has the commands, each followed by what it printed, first on stdout, then on stderr.
`pytest tests/cli/test_snapshots.py --renew-snapshots` writes them anew, also for commands that were added.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import questions
from cli_harness import invoke
from conftest import native_library
from model_zoo import tiny_model
from models_by_config import QWEN3_30B_A3B

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = sorted((ROOT / "tests" / "snapshots").glob("*.txt"))
COMMAND = re.compile(r"^\$ pagedcli (.+?)(?: # exit code \d+)?$", re.MULTILINE)
# what differs from machine to machine, and from run to run
MASKS = (
    (r"(?<![\w.])[\d,]+(?:\.\d+)? (?:µs|ms|s|min|h|GB/s)(?=\W|$)", "# s"),
    (r"[\d,]+ (tok|tokens)/s", r"# \1/s"),
    (r"[\d.]+ GiB of memory are available", "# GiB of memory are available"),
    (r"pagedcli \d[\w.]*", "pagedcli #"),
    (r"(?m)^(seconds .*|[0-9a-f]{16} .*MiB +)\d+\.\d\d.*$", r"\1#"),
    (r"(\.(?:svg|html)): [\d.]+ KiB", r"\1: # KiB"),
    ("The later run took # s instead of # s, and h", "H"),  # a busy machine may have made one of them slower
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of scripts/questions.py, and some that are wrong."""
    native_library()
    made = tmp_path_factory.mktemp("snapshots")
    with questions.in_folder(made):
        questions.make_files(made)
    (made / "examples.jsonl").write_bytes((ROOT / "examples" / "prompts.jsonl").read_bytes())
    (made / "large").mkdir()
    # groups of three and two layers with heads of 32, and of two with heads of 64; one layer shares those of another
    sliding, full = "sliding_attention", "full_attention"
    tiny_model(
        "gemma4-e2b", made / "gemma4", num_hidden_layers=8, num_kv_shared_layers=1, sliding_window=64,
        layer_types=[sliding, sliding, full, sliding, sliding, full, sliding, sliding],
    )  # fmt: skip
    for name, content in FILES.items():
        (made / name).write_text(content)
    (made / "bad.bin").write_bytes(b"\xff\xfe\xfa")
    return made


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
FILES = {
    "shared.jsonl": lines({"id": f"user-{n}", "prompt": [5] * 240 + [20 + n] * 30, "max_tokens": 3} for n in range(4)),
    "same.jsonl": lines({"id": f"same-{n}", "prompt": [7] * 40, "max_tokens": 2} for n in range(3)),
    "clock.jsonl": lines(
        {"id": at, "prompt": f"Once upon a time it was 15:09:{at}", "max_tokens": 2} for at in (20, 34)
    ),
    "bad.jsonl": '{"prompt": "a", "max_tokens": 2}\n\nno\n{"prompt": "b", "max_tokens": -1}\n{"promt": "c"}\n'
    + lines([CHAT]),
    "typo.yaml": "engine:\n  blok_size: 4\n",
    "bias.yaml": "sampling: {logit_bias: {5: 1.0e+99}}",
    "bad.json": '{"type": "object",\n "x": tru}',
    "tools.json": '[{"type": "function", "function": {"name": "f"}}]',
    "notes.txt": "mine\n",
    "flash.yaml": "engine: {attention_backend: flash, device: cpu}",
    "llama.jsonl": lines(
        {"prompt": "You answer in one line.\n\x1b[31m" + "Once upon a time there was a llama. " * 12 + name}
        for name in "abcdef"
    ),
    "mtp.yaml": "engine: {speculation: mtp}",
    "mine.svg": "mine\n",
    "digits.jsonl": f'{{"prompt": [{"9" * 4000}]}}\n{{"prompt": "a", "seed": {"9" * 4000}}}\n',
    "tokens.jsonl": lines({"prompt": [token_id], "max_tokens": 2} for token_id in (2**63, 10**6, 5)),
    "edge.jsonl": lines([{"prompt": [5] * 2000}]),
    "several.jsonl": lines([{"prompt": [f"Once upon a time there was a llama {each}" for each in ("here", "there")]}]),
    "beams.jsonl": lines([{"prompt": "Once", "beam_width": 2, "max_tokens": 2}, {"prompt": "Once", "max_tokens": 2}]),
    "tiny.jsonl": lines({"prompt": [5, 6, 7], "max_tokens": 40} for _ in range(3)),
    "twice.jsonl": lines({"id": "x", "prompt": prompt, "max_tokens": 2} for prompt in "ab"),
    "hashes.jsonl": lines(
        {"timestamp": 2000 * n, "input_length": 8, "output_length": 5, "hash_ids": [n // 3, n]} for n in range(9)
    ),
    "timeless.jsonl": lines([{"block_size": 4, "hash_ids": [1], "input_length": 4}]),
    "large/config.json": json.dumps(QWEN3_30B_A3B),
}


def masked(text, folder):
    text = text.replace(f"{folder}/", "")
    for pattern, shown in MASKS:
        text = re.sub(pattern, shown, text)
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def transcript(commands, folder):
    """The commands, in their order, with what they print."""
    parts = []
    for command in commands:
        result = invoke(*shlex.split(command), columns=100)
        shown = f"{command} # exit code {result.exit_code}" if result.exit_code else command
        parts.append(f"$ pagedcli {shown}\n{masked(result.stdout + result.stderr, folder)}")
    return "\n".join(parts)


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("step_times")
def test_commands_print_what_their_snapshot_shows(folder, path, monkeypatch, request):
    monkeypatch.chdir(folder)
    written = path.read_text(encoding="utf-8")
    made = transcript(COMMAND.findall(written), folder)
    if request.config.getoption("--renew-snapshots"):
        path.write_text(made, encoding="utf-8")
    assert written == made, "where this is meant: pytest tests/cli/test_snapshots.py --renew-snapshots"
