"""A curve in characters, below tables that a picture makes clearer."""

from collections.abc import Callable, Mapping, Sequence

_WIDTH, _HEIGHT = 60, 6  # cells


def curve_lines(
    curves: Mapping[str, Callable[[float], float]],
    first: float,
    last: float,
    *,
    unit: str,
    label: Callable[[float], str],
) -> list[str]:
    """Values as the height of columns, over a logarithmic axis from `first` to `last`, which are above 0. `curves`: the
    character that fills each, the lower ones later. The line below has the labels of both ends and of the middle, if
    there is room for it."""
    places = [first * (last / first) ** (column / (_WIDTH - 1)) for column in range(_WIDTH)]
    heights = {character: [value_at(place) for place in places] for character, value_at in curves.items()}
    top = max(0.1, *map(max, heights.values()))
    lines = []
    for row in range(_HEIGHT, 0, -1):
        cells = [" "] * _WIDTH
        for character, values in heights.items():
            above = [value / top > (row - 0.5) / _HEIGHT for value in values]
            cells = [character if is_filled else cell for is_filled, cell in zip(above, cells, strict=True)]
        lines.append(f"{top * row / _HEIGHT:5.1f} {unit} |{''.join(cells)}".rstrip())
    lines.append(f"{0:5.1f} {unit} +{'-' * _WIDTH}")
    return [*lines, " " * (8 + len(unit)) + _axis([label(places[0]), label(places[_WIDTH // 2]), label(places[-1])])]


def _axis(labels: Sequence[str]) -> str:
    """The labels of the left end, the middle and the right end."""
    left, middle, right = labels
    line = left.ljust(_WIDTH // 2 - len(middle) // 2) + middle
    if len(left) + 2 + len(middle) > len(line) or len(line) + 2 + len(right) > _WIDTH:
        line = left  # there is no room for the middle one
    return line + right.rjust(_WIDTH - len(line))
