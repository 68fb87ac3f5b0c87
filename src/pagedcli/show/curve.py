"""A curve in characters, below tables that a picture makes clearer."""

from collections.abc import Callable, Sequence

_WIDTH, _HEIGHT = 60, 6  # cells


def curve_lines(
    share_at: Callable[[float], float], first: float, last: float, *, label: Callable[[float], str]
) -> list[str]:
    """Shares between 0 and 1 as the height of columns, over a logarithmic axis from `first` to `last`, which are above
    0. The line below has the labels of both ends and of the middle, if there is room for it."""
    places = [first * (last / first) ** (column / (_WIDTH - 1)) for column in range(_WIDTH)]
    shares = [share_at(place) for place in places]
    top = max(*shares, 0.001)
    lines = []
    for row in range(_HEIGHT, 0, -1):
        cells = "".join("#" if share / top > (row - 0.5) / _HEIGHT else " " for share in shares)
        lines.append(f"{100 * top * row / _HEIGHT:5.1f} % |{cells}".rstrip())
    lines.append(f"{0:5.1f} % +{'-' * _WIDTH}")
    return [*lines, " " * 9 + _axis([label(places[0]), label(places[_WIDTH // 2]), label(places[-1])])]


def _axis(labels: Sequence[str]) -> str:
    """The labels of the left end, the middle and the right end."""
    left, middle, right = labels
    line = left.ljust(_WIDTH // 2 - len(middle) // 2) + middle
    if len(left) + 2 + len(middle) > len(line) or len(line) + 2 + len(right) > _WIDTH:
        line = left  # there is no room for the middle one
    return line + right.rjust(_WIDTH - len(line))
