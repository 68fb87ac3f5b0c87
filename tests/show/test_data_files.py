"""The data of --dump-kv FILE is the pool at every step, equal to the fold of the events, and other programs read it."""

import csv
import json
import random
import re
import resource
import tracemalloc

import pyarrow.parquet as pq
import pytest
from harness.core import Simulation

from pagedcli.core.groups import TableShape
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.events import PrefixLookedUp, StepScheduled
from pagedcli.records import hash_text
from pagedcli.show.data_files import DataFiles, data_paths, next_part
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.step_choice import StepChoice
from pagedcli.views.step_rows import StepRows, file_columns

ALL = StepChoice()
ENDINGS = ("csv", "jsonl", "parquet")
PARSERS = {
    "int": int, "float": float, "text": str, "bool": {"true": True, "false": False}.get, "ints": json.loads,
    "texts": json.loads,
}  # fmt: skip


def rows_of(path, table):
    """The rows of a file, typed as its columns are declared."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        types = {column.key: PARSERS[column.kind] for column in file_columns(table)}
        return [
            {name: None if cell == "" else types[name](cell) for name, cell in row.items()}
            for row in csv.DictReader(file)
        ]


class Expected(View):
    """The pool at each step, straight from the fold."""

    def __init__(self):
        self.pools = {}
        self.lookups = []

    def on_step_scheduled(self, event: StepScheduled, state: PoolState) -> None:
        content = {
            block_id: (state.ref_counts[block_id], hash_text(state.hashes[block_id]))
            for block_id in range(state.num_blocks)
            if state.ref_counts[block_id] or state.hashes[block_id] is not None
        }
        seqs = {
            seq.seq_id: (state.status_of(seq), seq.block_table.copy(), seq.num_computed_tokens, seq.num_output_tokens)
            for seq in state.seqs.values()
        }
        self.pools[event.step] = content, seqs, state.num_unfilled_slots(), state.num_empty_blocks

    def on_prefix_looked_up(self, event: PrefixLookedUp, state: PoolState) -> None:
        self.lookups.append((event.seq_id, event.reason, event.blocks_hit, event.tokens_hit))


def random_run(seed, emit):
    """A run of its own kind for each seed: windows, caching off, policies, forks, preemptions, failing steps."""
    rng = random.Random(seed)
    windows = ((None,), (None,), (5,), (4, None))[seed % 4]
    pool = TableShape(2, windows).most_blocks(22, 8) + rng.randrange(1, 12)
    sim = Simulation(
        pool, 2, emit=emit, trace_tokens=seed % 2 == 0, windows=windows, enable_prefix_caching=seed % 5 != 1,
        eviction=rng.choice(("lru", "prefix-lru")), max_num_seqs=rng.randrange(2, 6), runs_ahead=seed % 3 == 0,
        chunked_prefill_size=rng.choice((None, 3)), check=False,
    )  # fmt: skip
    for number in range(14):
        prompt = [9] * rng.randrange(8) + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        row_id = f'row "{number}", ünïcode' if number % 2 else None
        sim.add(prompt, rng.randrange(2, 9), n=1 + (number % 4 == 0), row_id=row_id, request_id=str(number))
    sim.run()


def written(paths):
    """The files that there are: without recurrent state none of slots, with one group of layers none of groups."""
    found = {table: path for table, path in paths.items() if path.exists()}
    assert paths.keys() - found.keys() <= {"slots", "groups"}
    return found


def dump(path, seed, chosen=ALL):
    expected, files = Expected(), DataFiles(path)
    random_run(seed, pool_fold(expected, StepRows(files.write, chosen)))
    assert files.close()
    return expected, {table: rows_of(file, table) for table, file in written(files.paths).items()}


@pytest.mark.parametrize("seed", range(20))
def test_the_files_hold_the_pool_at_every_step(tmp_path, seed):
    expected, tables = dump(tmp_path / f"kv.{ENDINGS[seed % 3]}", seed)
    for name, rows in tables.items():
        assert all(list(row) == [column.key for column in file_columns(name)] for row in rows)
    by_step = {name: {} for name in ("sequences", "blocks")}
    for name, steps in by_step.items():
        for row in tables[name]:
            steps.setdefault(row["step"], []).append(row)
    assert [row["step"] for row in tables["steps"]] == list(expected.pools)
    for step, (content, seqs, unfilled, empty) in expected.pools.items():
        blocks, sequences = by_step["blocks"].get(step, []), by_step["sequences"].get(step, [])
        assert {row["block_id"]: (row["ref_count"], row["hash"]) for row in blocks} == content
        found = {
            row["seq_id"]: (row["status"], row["block_table"], row["num_computed_tokens"], row["num_output_tokens"])
            for row in sequences
        }
        assert found == seqs
        held = {(seq_id, block_id) for seq_id, (_, table, _, _) in seqs.items() for block_id in table} - {
            (seq_id, None) for seq_id in seqs
        }
        assert {(seq_id, row["block_id"]) for row in blocks for seq_id in row["seq_ids"]} == held
        assert all(len(row["seq_ids"]) == len(row["requests"]) == row["ref_count"] for row in blocks)
        in_use = [row for row in blocks if row["state"] == "in_use"]
        assert sum(2 - row["num_tokens"] for row in in_use) == unfilled
        (summary,) = (row for row in tables["steps"] if row["step"] == step)
        assert (summary["used_blocks"], summary["cached_blocks"]) == (len(in_use), len(blocks) - len(in_use))
        assert summary["empty_blocks"] == empty == summary["num_blocks"] - len(blocks)
        of_groups = [row for row in tables.get("groups", ()) if row["step"] == step]
        assert len(of_groups) == (2 if seed % 4 == 3 else 0)
        for row in of_groups:
            own = [block for block in blocks if block["group"] == row["group"]]
            in_use = [block for block in own if block["ref_count"]]
            assert (row["used_blocks"], row["cached_blocks"]) == (len(in_use), len(own) - len(in_use))
    found = [(row["seq_id"], row["reason"], row["blocks_hit"], row["tokens_hit"]) for row in tables["lookups"]]
    assert found == expected.lookups


def test_the_random_runs_have_everything():
    seen = set()
    for seed in range(20):
        random_run(seed, lambda event: seen.add(type(event).__name__))
    assert {"RequestPreempted", "SequenceForked", "BlockCopied", "WindowPassed", "BlockEvicted", "BlocksReused"} <= seen


def test_a_choice_of_steps_keeps_every_lookup_of_its_range(tmp_path):
    _, whole = dump(tmp_path / "whole.jsonl", 4)
    _, some = dump(tmp_path / "some.jsonl", 4, StepChoice.parse("3-12", every=4))
    for name in ("steps", "sequences", "blocks"):
        assert some[name] == [row for row in whole[name] if row["step"] in (3, 7, 11)]
    assert some["lookups"] == [row for row in whole["lookups"] if 3 <= row["step"] <= 12]


def reader(program):
    """What reads a file into a table of its own, as its user would, and gives the rows."""
    module = pytest.importorskip(program)
    read = {
        "pandas": {"csv": "read_csv", "jsonl": "read_json", "parquet": "read_parquet"},
        "polars": {"csv": "read_csv", "jsonl": "read_ndjson", "parquet": "read_parquet"},
    }.get(program)
    if read is None:
        return lambda path: module.sql(f"from '{path}'").df().to_dict("records")
    options = {"lines": True} if program == "pandas" else {}

    def rows(path):
        ending = path.suffix[1:]
        frame = getattr(module, read[ending])(path, **(options if ending == "jsonl" else {}))
        return frame.to_dict("records") if program == "pandas" else frame.to_dicts()

    return rows


@pytest.mark.parametrize("program", ["pandas", "polars", "duckdb"])
def test_other_programs_read_every_file(tmp_path, program):
    read = reader(program)
    for ending in ENDINGS:
        dump(tmp_path / f"kv.{ending}", 8)
        for table, path in written(data_paths(tmp_path / f"kv.{ending}")).items():
            rows = read(path)
            assert list(rows[0]) == [column.key for column in file_columns(table)]
            steps = [row["step"] for row in rows_of(path, table)]
            assert [row["step"] for row in rows] == steps
            if table == "blocks":
                owners = [[int(each) for each in re.findall(r"\d+", str(row["seq_ids"]))] for row in rows]
                assert owners == [row["seq_ids"] for row in rows_of(path, table)]


# ---------------------------------------------------------------------- files


def test_memory_does_not_grow_with_the_run(tmp_path):
    def size(num_requests):
        events = []
        sim = Simulation(12, 2, emit=events.append, max_num_seqs=4, check=False)
        for number in range(num_requests):
            sim.add([number % 50, number % 7, 3], 4)
            while sim.has_unfinished_requests():
                sim.step()
        files = DataFiles(tmp_path / "kv.csv", overwrite=True)
        folding = pool_fold(StepRows(files.write, StepChoice(every=4)), keep_finished=False)
        tracemalloc.start()
        for event in events:
            folding(event)
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        files.close()
        return num_bytes

    size(40)  # fills the window of the last 100 steps, and loads what is loaded once
    assert size(140) < size(40) + 20_000  # a sequence that is kept takes over 300 bytes


def test_files_appear_complete_or_not_at_all(tmp_path):
    files = DataFiles(tmp_path / "kv.csv")
    assert not files.close(), "nothing was written"
    files = DataFiles(tmp_path / "kv.csv")
    files.write("steps", [])
    files.write("blocks", [])
    assert not any(path.exists() for path in files.paths.values())
    files.discard()
    assert list(tmp_path.iterdir()) == []
    files = DataFiles(tmp_path / "kv.csv")
    files.write("steps", [])
    files.write("blocks", [])
    assert files.names.endswith("kv.{steps,blocks}.csv")
    assert files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv.blocks.csv", "kv.steps.csv"]
    assert next_part(tmp_path / "kv.csv") == tmp_path / "kv.part2.csv"


@pytest.fixture
def full_disk():
    """No file can be written beyond its first byte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_ends_the_dump_and_close_says_so(tmp_path):
    files = DataFiles(tmp_path / "kv.jsonl")
    random_run(1, pool_fold(StepRows(files.write, ALL)))
    with pytest.raises(PagedcliError, match="File too large"):
        files.close()
    assert list(tmp_path.iterdir()) == []


def test_other_names_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write .*kv\.txt"):
        DataFiles(tmp_path / "kv.txt")
