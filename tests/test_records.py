"""Records that are shown: header, format, side and key of a column follow from the type of its field; and nothing that
comes from a file steers a terminal."""

import json
import sys
import unicodedata
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from pagedcli.printable import expected_text, one_line, printable, printable_json
from pagedcli.records import LEFT, RIGHT, Bytes, Means, Share, as_row, columns_of, computed, text
from pagedcli.show.tables import as_csv, as_text, table


@dataclass(frozen=True, slots=True)
class Pool:
    num_blocks: int
    seq_id: int | None
    kv_bytes: Annotated[Bytes | None, "KV cache"]
    hit_rate: Share
    waited: Annotated[float, "waited, s", LEFT]
    state: Literal["full", "empty"]
    line: Annotated[int, text]
    token: Annotated[str, RIGHT]
    fits: bool
    block_ids: Annotated[list[int | None], Means("its blocks", "blocks")]
    shared: int | UnsetType = UNSET


ROW = Pool(1200, None, 2048, 0.5, 1.5, "full", 1200, "3/4", True, [1, None])


def test_a_column_follows_from_the_type_of_its_field():
    columns = columns_of(Pool)
    assert [each.header for each in columns.values()] == [
        "blocks", "seq", "KV cache", "hit rate", "waited, s", "state", "line", "token", "fits", "block ids", "shared",
    ]  # fmt: skip
    numbers = {name for name, each in columns.items() if each.is_number}
    assert numbers == {"num_blocks", "seq_id", "kv_bytes", "hit_rate", "token", "shared"}
    kinds = ["int", "int", "int", "float", "float", "text", "int", "text", "bool", "ints", "int"]
    assert [each.kind for each in columns.values()] == kinds
    assert (columns["block_ids"].meaning, columns["block_ids"].unit) == ("its blocks", "blocks")


def test_records_as_a_table():
    shown = as_text(table(Pool, "pools", "Pools", [ROW], notes=["all"]))
    assert shown.splitlines()[1].split("  ")[-1] == "block ids"  # UNSET in every row: no column
    assert shown.splitlines()[3].split() == [
        "1,200", "-", "2.00", "KiB", "50.0", "%", "1.50", "full", "1200", "3/4", "yes", "[1,", "None]",
    ]  # fmt: skip
    chosen = table(Pool, "pools", "Pools", [ROW], "state num_blocks", headers={"state": "is"})
    assert as_text(chosen) == "Pools\nis    blocks\n----  ------\nfull   1,200\n"
    assert as_csv(chosen) == "state,num_blocks\nfull,1200\n"
    assert list(as_row(ROW)) == list(columns_of(Pool))[:-1]
    assert len(table(Pool, "pools", "Pools", []).columns) == 11


def test_fields_computed_when_they_are_read():
    class Twice:
        def __init__(self, number):
            self._number = number

        number: int = computed(lambda row: row._number)
        twice: Annotated[int, Means("the number, two times")] = computed(lambda row: 2 * row._number)

    assert as_row(Twice(4)) == {"number": 4, "twice": 8}


DANGEROUS = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cs")]
DIRECTION = [chr(code) for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]


def test_control_characters_and_marks_of_direction_become_escapes():
    for char in [*DANGEROUS, *DIRECTION, "\u2028", "\U000e0041"]:
        assert one_line(f"a{char}b").isprintable()
        assert printable(char) == char if char in "\t\n" else printable(char).isascii()


@pytest.mark.parametrize("text", ["plain", "日本語", "é ñ", "👩\u200d💻", "a\u00a0b"])
def test_ordinary_text_stays(text):
    assert one_line(text) == printable(text) == text


def test_json_stays_the_same_document():
    text = "".join([*DANGEROUS, *DIRECTION, "\u2028\ufeff\U000e0041é日👩"]).encode(errors="ignore").decode()
    encoded = printable_json(msgspec.json.encode({"a": text}))
    assert json.loads(encoded) == {"a": text}
    assert encoded.decode().isprintable()


@pytest.mark.parametrize(
    ("seconds", "low", "high", "said"),
    [
        (0.047, 0.0, 0.159, "under 0.2 s"),
        (0.001, 0.0, 0.002, "under 0.1 s"),
        (0.94, 0.9, 0.98, "under 1 s"),
        (5.8, 4.4, 7.6, "about 5.8 s (4.4 s to 7.6 s)"),
        (0.774, 0.421, 1.1, "about 0.8 s (0.4 s to 1.1 s)"),
        (1.2, 0.0, 3.0, "at most 3.0 s"),
        (35.0, 4.9, 43.0, "at most 43 s"),
    ],
)
def test_an_expected_time_is_one_that_a_person_can_use(seconds, low, high, said):
    assert expected_text(seconds, low, high) == said
