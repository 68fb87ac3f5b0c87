"""A file is read by what it holds, whatever its name or pipe says; one without rows is refused in one sentence."""

import gzip
import io
import json
import zipfile

import pytest
from cli_harness import FAST, PROMPTS, pagedcli, rows_of

from pagedcli.batch.columns import Columns
from pagedcli.batch.lines import LineSource
from pagedcli.batch.prompts import open_source
from pagedcli.errors import PagedcliError
from pagedcli.line_files import zstd

ROWS = [json.loads(line) for line in PROMPTS.splitlines()]
TABLE = "prompt,max_tokens\na,1\nb,2\n"


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("in.jsonl", content)
    return file.getvalue()


OTHERS = {  # what is given -> words of the message, and of the hint
    "a table": (TABLE.encode(), "its first line is 'prompt,max_tokens'", "--input-format csv"),
    "one column": (b"prompt\na\nb\n", "its first line is 'prompt'", "--input-format csv"),
    "tabs": (TABLE.replace(",", "\t").encode(), "no lines of JSON", "--input-format tsv"),
    "quotes": (b'"prompt","n"\n"a","1"\n', "no lines of JSON", "--input-format csv"),
    "Parquet": (b"PAR1" + bytes(64) + b"PAR1", "a Parquet file", ".parquet"),
    "UTF-16": (PROMPTS.encode("utf-16"), "UTF-16, not UTF-8", "iconv -f UTF-16"),
    "a zip archive": (zipped(PROMPTS), "a zip archive", "unzip -p"),
    "a model": (b"GGUF\3\0\0\0" + bytes(64), "a GGUF model file", "-m "),
    "zeros": (bytes(10_000), "begins with zeros", "the intended file"),
    "an array": (json.dumps(ROWS).encode(), "one JSON array", "jq -c '.[]'"),
    "an array of lines": (json.dumps(ROWS, indent=1).encode(), "one JSON array", "jq -c '.[]'"),
    "an array with a row per line": (b"[\n" + b",\n".join(map(str.encode, PROMPTS.split("\n"))) + b"]", "array", "jq"),
    "objects of several lines": (json.dumps(ROWS[0], indent=2).encode(), "several lines per object", "jq -c ."),
}


@pytest.mark.parametrize("through", ["a file", "a pipe", "a compressed file"])
@pytest.mark.parametrize("what", OTHERS)
def test_what_has_no_lines_of_json_is_refused_once_with_the_way_out(what, through, tmp_path):
    content, message, hint = OTHERS[what]
    path = tmp_path / "in.jsonl"
    path.write_bytes(gzip.compress(content) if through == "a compressed file" else content)
    given = {"stdin": content} if through == "a pipe" else {}
    result = pagedcli("generate", *(("-",) if given else (path,)), "-o", tmp_path / "out.jsonl", expect=2, **given)
    error, tip = result.stderr.splitlines()[-2:]
    assert message in error
    assert hint in tip
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress, bytes])
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "-"])
def test_lines_are_decompressed_by_their_content(pack, name, tmp_path):
    path = tmp_path / name
    path.write_bytes(pack(PROMPTS.encode()))
    given = ("-", path.read_bytes()) if name == "-" else (path, None)
    rows = rows_of(pagedcli("generate", given[0], *FAST, "--keep", "all", stdin=given[1]).stdout)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize("content", [b"[1, 2]\n{}\n", b"a, b\n{}\n", b"no\nnope\n", b'{"a":\n{}\n', b"\n\n", b"x"])
def test_a_bad_row_beside_others_stays_a_row(content, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert [row.content for row in LineSource(str(path))] == [line for line in content.split(b"\n") if line]


def test_a_parquet_name_with_other_content_names_the_flag(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "in.parquet"
    path.write_text(PROMPTS)
    with pytest.raises(PagedcliError, match="is not a Parquet file") as refused:
        open_source(str(path), Columns())
    assert "--input-format jsonl" in refused.value.hint
