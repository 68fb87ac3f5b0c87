"""What an extra brings is optional: without it, what needs it says how to install it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRIED_ELSEWHERE = {"dev", "inspect"}  # for developers; by tests/tools/test_inspect_ai.py, as it needs Inspect

COMMAND = "from pagedcli.cli.main import run; run()"
FLASH = """
import torch
from types import SimpleNamespace
from pagedcli.attention import flash
from pagedcli.errors import BackendError
try:
    flash.load(SimpleNamespace(device=torch.device("cuda"), capability=(8, 0)))
except BackendError as error:
    sys.exit(error.hint)
"""
TRITON = """
from pagedcli.errors import BackendError
try:
    import pagedcli.attention.triton_paged
except BackendError as error:
    sys.exit(error.hint)
"""
CODEBOOKS = """
from pathlib import Path
from pagedcli.errors import ModelError
from pagedcli.models.gguf.description import quantization
from pagedcli.models.gguf.header import Header, TensorInfo
from pagedcli.models.gguf.types import BY_NAME
tensor = TensorInfo("output.weight", BY_NAME["IQ2_S"], (1, 256), Path("m"), 0, 82)
try:
    quantization(Header(Path("m"), {}, {"output.weight": tensor}))
except ModelError as error:
    sys.exit(error.hint)
"""
COMPILER = """
import os
from pagedcli.errors import BackendError
from pagedcli.native.build import find_compiler
os.environ.update(PATH="", CXX="")
try:
    find_compiler()
except BackendError as error:
    sys.exit(error.hint)
"""
LM_EVAL = "import runpy; runpy.run_module('pagedcli.lm_eval', run_name='__main__')"

# the extra, the module that is missing, the program, its arguments
CASES = [
    ("attach", "zmq", COMMAND, ["attach", "tcp://127.0.0.1:9"]),
    ("attach", "zmq", COMMAND, ["generate", "in.jsonl", "-o", "out.jsonl", "--kv-events", "tcp://127.0.0.1:*"]),
    ("attach", "prometheus_client", COMMAND, ["attach", "tcp://127.0.0.1:9", "--metrics", "http://127.0.0.1:9"]),
    ("cuda", "triton", TRITON, []),
    ("flash-attn", "flash_attn", FLASH, []),
    ("gguf", "gguf", CODEBOOKS, []),
    ("lm-eval", "lm_eval", LM_EVAL, ["run"]),
    ("native", "ziglang", COMPILER, []),
    ("parquet", "pyarrow", COMMAND, ["generate", "in.parquet", "-o", "out.jsonl"]),
    ("parquet", "pyarrow", COMMAND, ["generate", "in.jsonl", "-o", "out.parquet"]),
    ("pictures", "resvg_py", COMMAND, ["trace", "run.jsonl", "--picture", "pool.png"]),
    ("pictures", "PIL", COMMAND, ["trace", "run.jsonl", "--picture", "pool.gif"]),
    ("ray", "ray", COMMAND, ["generate", "in.jsonl", "-o", "parts", "--ray"]),
    ("cloud", "s3fs", COMMAND, ["generate", "s3://b/in.jsonl"]),
]


@pytest.mark.quick("gguf-gguf-program5-arguments5", "native-ziglang-program7-arguments7")
@pytest.mark.parametrize(("extra", "module", "program", "arguments"), CASES)
def test_a_missing_extra_names_the_line_that_installs_it(extra, module, program, arguments, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    command = [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None\n{program}", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert f"pip install 'pagedcli[{extra}]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_every_extra_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {extra for extra, *_ in CASES} | TRIED_ELSEWHERE == set(project["optional-dependencies"])
