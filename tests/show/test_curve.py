"""A curve in characters: as high as the shares, from one end of the axis to the other."""

from pagedcli.show.curve import curve_lines


def test_columns_rise_with_the_shares_over_a_logarithmic_axis():
    lines = curve_lines(lambda place: min(1.0, place / 64) / 2, 1, 4096, label=lambda place: f"{place:,.0f} blocks")
    *rows, base, axis = lines
    assert rows[0].startswith(" 50.0 % |")
    assert base.startswith("  0.0 % +---")
    heights = [sum(row[9 + column : 10 + column] == "#" for row in rows) for column in range(60)]
    assert heights == sorted(heights)
    assert (heights[0], heights[30], heights[-1]) == (0, len(rows), len(rows)), "half way the axis is at 64"
    assert axis.split("  ")[0].strip() == ""
    assert [part.strip() for part in axis.split("  ") if part.strip()] == ["1 blocks", "69 blocks", "4,096 blocks"]
    assert max(map(len, lines)) < 80
