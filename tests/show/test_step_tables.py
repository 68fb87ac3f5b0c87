"""The tables of a step have the same cells at every width and in a pipe, and name what is shared once."""

import io
import random
import re

import pytest
from harness.core import Simulation
from rich.console import Console

from pagedcli.events import StepScheduled
from pagedcli.show.step_tables import print_step_tables, shared_prefixes, step_markdown, step_tables, table_lines
from pagedcli.trace.fold import pool_fold
from pagedcli.views.moment import Moment

WIDTHS = (80, 120, 200, None)


def busy_moments(seed):
    """Moments with long ids, many blocks, waiting and preempted sequences, forks and lookups."""
    rng = random.Random(seed)
    moment, kept = Moment(), []
    fold = pool_fold(moment)

    def emit(event):
        fold(event)
        if isinstance(event, StepScheduled) and (
            rng.random() < 0.1 or moment.state.step.lookups or moment.state.step.preemptions
        ):
            kept.append(moment.copy())

    sim = Simulation(50, 2, emit=emit, max_num_seqs=5, max_num_batched_tokens=40, check=False)
    for number in range(12):
        long_id = f"customer-{number}/" + "conversation-" * (number % 9)
        prompt = [9] * rng.choice((4, 20, 21)) + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        sim.add(prompt, rng.randrange(2, 40), n=1 + (number % 5 == 0), row_id=None if number % 3 else long_id)
    sim.run()
    assert any(each.state.step.preemptions for each in kept)
    return kept


def cells(lines):
    """Cells of a printed table by row, from its own header: how many columns each line of a row has."""
    rule = next(place for place, line in enumerate(lines) if set(line) == {"─"})
    header = [re.split(r"\s{2,}", line.strip()) for line in lines[1:rule]]
    width = max(map(len, lines[rule]), default=0)
    assert all(len(line) <= max(width, len(lines[rule])) for line in lines[rule:])
    rows, names = [], [name for line in header for name in line]
    first = lines[rule + 1 :]
    starts = [place for place, line in enumerate(first) if re.match(r" {0,3}\S", line)]
    for start, end in zip(starts, [*starts[1:], len(first)], strict=True):
        rows.append("".join("".join(line.split()) for line in first[start:end]))
    return "".join("".join(name.split()) for name in names), rows


@pytest.mark.quick("3")
@pytest.mark.parametrize("seed", range(4))
def test_a_table_has_the_same_cells_at_every_width_and_in_a_pipe(seed):
    moments = busy_moments(seed)
    assert len(moments) > 5
    num_reflowed = 0
    for moment in moments:
        for table in step_tables(moment):
            printed = {width: [line.plain for line in table_lines(table, width)] for width in WIDTHS}
            for width, lines in printed.items():
                assert width is None or max(map(len, lines)) <= width, (width, lines)
            assert len({str(cells(lines)) for lines in printed.values()}) == 1, printed
            num_rows = len(cells(printed[80])[1])
            assert num_rows == len(table.rows)
            num_reflowed += len(printed[80]) > len(printed[None])
    assert num_reflowed > len(moments), "at 80 columns the tables need further lines"


def printed(moment, width, **options):
    console = Console(file=io.StringIO(), width=width, _environ={}, **options)
    print_step_tables(moment, console, width)
    return console.file.getvalue()


def test_states_and_shared_blocks_have_colours_and_the_words_say_the_same_without():
    moments = busy_moments(3)
    colours = {"prefill": "36", "decode": "32", "waiting": "33", "preempted": "1;31"}
    for moment in moments:
        coloured = printed(moment, 120, force_terminal=True, color_system="standard")
        for seq in moment.state.seqs.values():
            assert f"\x1b[{colours[seq.status]}m{seq.status}\x1b[0m" in coloured
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == printed(moment, 120)
    coloured = [printed(moment, 120, force_terminal=True, color_system="standard") for moment in moments]
    assert any(re.search(r"\x1b\[35mP\d", text) for text in coloured)


def test_markdown_has_the_cells_of_the_tables():
    for moment in busy_moments(5):
        text = step_markdown(moment)
        for table in step_tables(moment):
            body = text.split(f"### {table.title}\n\n")[1].split("\n\n")[0].splitlines()[2:]
            assert len(body) == len(table.rows)


# ---------------------------------------------------------------------- shared prefixes


def test_a_shared_prefix_is_named_once_and_names_build_on_each_other():
    tables = {0: [0, 1, 2, 3, 8], 1: [0, 1, 2, 3, 9], 2: [0, 1, 5], 3: [7], 4: [7, 6]}
    found, longest = shared_prefixes(tables)
    assert [(each.name, each.parent, each.block_ids, each.seq_ids) for each in found] == [
        ("P1", None, (0, 1), (0, 1, 2)),
        ("P2", "P1", (2, 3), (0, 1)),
    ]
    assert {seq_id: each.name for seq_id, each in longest.items()} == {0: "P2", 1: "P2", 2: "P1"}


def test_a_block_that_a_window_released_is_in_no_shared_prefix():
    found, longest = shared_prefixes({0: [None, 4, 5], 1: [None, 4, 5]})
    assert (found, longest) == ([], {})


@pytest.mark.parametrize("seed", range(20))
def test_names_stand_for_exactly_the_blocks_that_they_replace(seed):
    rng = random.Random(seed)
    tables = {}
    for seq_id in range(12):
        base = tables[rng.choice(list(tables))] if tables and rng.random() < 0.7 else []
        tables[seq_id] = base[: rng.randrange(len(base) + 1)] + rng.sample(range(100, 1000), rng.randrange(1, 4))
    found, longest = shared_prefixes(tables)
    whole = {}
    for each in found:  # parents first
        whole[each.name] = [*(whole[each.parent] if each.parent else []), *each.block_ids]
        assert {seq_id for seq_id, table in tables.items() if table[: each.end] == whole[each.name]} == set(
            each.seq_ids
        )
        assert len(each.block_ids) >= 2
    for seq_id, each in longest.items():
        assert tables[seq_id][: each.end] == whole[each.name]
    for one in tables:
        for other in tables:
            equal = 0
            while one < other and tables[one][equal : equal + 1] == tables[other][equal : equal + 1] != []:
                equal += 1
            if equal >= 2:
                assert longest[one].end + 1 >= min(equal, longest[one].end + 1)
                assert one in longest
                assert other in longest
