"""Nothing that comes from a file steers a terminal; JSON stays the same document."""

import json
import sys
import unicodedata

import msgspec
import pytest

from pagedcli.printable import expected_text, one_line, printable, printable_json

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
