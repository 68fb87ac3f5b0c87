"""The change between two runs: planted causes are named with their exact shares, and equal runs show nothing."""

import json
import random
from array import array
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations

import msgspec
import pytest
from cli_harness import pagedcli

import pagedcli.events as ev
from pagedcli.simulation.causes import CAUSES, num_runs, shares
from pagedcli.simulation.difference import Comparison
from pagedcli.simulation.difference_tables import cause_rows, sentence
from pagedcli.simulation.requests import TraceRequest, Workload
from pagedcli.simulation.run import plan_for, simulate
from pagedcli.simulation.sides import recorded_sides
from pagedcli.trace.files import TraceWriter

BASE = {
    "pool_tokens": 120, "block_size": 4, "eviction": "lru", "max_num_seqs": 4, "max_num_batched_tokens": 48,
    "checkpoints": "branches", "num_state_slots": None, "state_bytes": 0, "restart": None,
}  # fmt: skip


def requests_of(rng, num=36):
    """Prompts of four families, which share heads of different lengths, with outputs that are known."""
    heads = [[family * 100 + token for token in range(rng.randrange(9, 26))] for family in range(4)]
    found = []
    for number in range(num):
        prompt = [*heads[rng.randrange(4)], *(rng.randrange(1000, 1100) for _ in range(rng.randrange(2, 9)))]
        found.append((f"r{number}", prompt, [rng.randrange(2000, 2100) for _ in range(rng.randrange(1, 9))]))
    return found


def other_order(requests):
    return requests[::2] + requests[1::2][::-1]


def other_prompts(requests):
    """A third of them begins with another token: nothing of theirs is shared as before."""
    return [(name, [7, *prompt[1:]] if place % 3 == 1 else prompt, output)
            for place, (name, prompt, output) in enumerate(requests)]  # fmt: skip


def fewer_and_more(requests):
    """Some prompts go, and others come between the rest."""
    kept = [each for place, each in enumerate(requests) if place % 5 != 2]
    return [*kept[:9], ("new1", [100, 101, 102, 103, 104, 5, 6], [9, 9]), *kept[9:], ("new2", list(range(30)), [8])]


def longer_outputs(requests):
    return [(name, prompt, [*output, 3, 4, 5, 6, 7, 8]) for name, prompt, output in requests]


# plant -> the cause that it is, and what it changes: the requests, or settings
PLANTS = {
    "text": ("prompts", other_prompts),
    "rows": ("prompts", fewer_and_more),
    "outputs": ("outputs", longer_outputs),
    "order": ("order", other_order),
    "block size": ("block_size", {"block_size": 8}),
    "small pool": ("pool", {"pool_tokens": 64}),
    "policy": ("pool", {"eviction": "fifo"}),
    "sequences": ("sequences", {"max_num_seqs": 2}),
    "step tokens": ("engine", {"max_num_batched_tokens": 12}),
    "restart": ("restarts", {"restart": Fraction(1, 2)}),
    "checkpoints": ("checkpoints", {"checkpoints": "none"}),
}
ONE = [(name,) for name in PLANTS]
# rows that come and go have no place in another order, but the one that the comparison gives them
TOGETHER = [each for each in PLANTS if each != "rows"]
# the output of another text belongs to that text
TWO, THREE = ([each for each in combinations(TOGETHER, num)
               if len({PLANTS[name][0] for name in each}) == num and not {"text", "outputs"} <= {*each}]
              for num in (2, 3))  # fmt: skip
PAIRS = [*ONE, *random.Random(1).sample(TWO, 17), *random.Random(2).sample(THREE, 12)]


def planted(base, plants):
    """The run with these plants: requests and settings."""
    requests, settings = base, dict(BASE)
    if "checkpoints" in plants or plants == "with states":
        settings |= {"num_state_slots": 10, "state_bytes": 8}
    # in this order, whatever that of the plants: what a prompt generates, then its text, then the order
    for name in sorted(plants, key=list(PLANTS).index) if plants != "with states" else ():
        change = PLANTS[name][1]
        if callable(change):
            requests = change(requests)
        else:
            settings |= change
    return requests, settings


def outcome(requests, settings, emit=None):
    """What the simulator itself makes of it: facts, summed over what comes before and after a restart."""
    cut = len(requests) if settings["restart"] is None else round(settings["restart"] * len(requests))
    runs = []
    for part, chosen in enumerate((requests[:cut], requests[cut:]), 1):
        if not chosen:
            continue
        workload = Workload(requests=[
            TraceRequest(str(name), None, len(prompt), len(output), token_ids=array("q", prompt),
                         output_ids=[array("q", output)], stopped=[False], max_new_tokens=len(output))
            for name, prompt, output in chosen
        ])  # fmt: skip
        limits = {name: value for name, value in settings.items() if name not in ("pool_tokens", "restart")}
        num_blocks = settings["pool_tokens"] // settings["block_size"]
        plan = plan_for(workload, num_blocks=num_blocks, **limits)
        plan = replace(plan, limits=replace(plan.limits, max_model_len=200))
        runs.append(simulate(workload, plan, emit=None if emit is None else emit(part, chosen)))
    hits = [run.hit_tokens() for run in runs]
    return {
        "hit_rate": Fraction(sum(hit for hit, _ in hits), sum(tokens for _, tokens in hits)),
        "computed_tokens": sum(run.facts.num_computed_tokens for run in runs),
        "preemptions": sum(run.facts.num_preemptions for run in runs),
        "peak_used_blocks": max(run.facts.peak_used_blocks for run in runs),
        "steps": sum(run.facts.num_steps for run in runs),
    }


def record(path, requests, settings, *, tokens=True):
    """The run as a trace, in two parts where it restarts."""

    def emit(part, chosen):
        writer = TraceWriter(path, resume=part > 1)
        writers.append(writer)
        outputs, prompts = {name: output for name, _, output in chosen}, {name: prompt for name, prompt, _ in chosen}
        of_seq, num_sampled = {}, {}

        def with_tokens(event):
            if not tokens:
                writer(event)
                return
            if isinstance(event, ev.RequestAdded):
                of_seq[event.seq_id] = event.request_id
                event = msgspec.structs.replace(event, token_ids=tuple(prompts[event.request_id]))
            elif isinstance(event, ev.TokensSampled):
                ids = []
                for seq_id in event.seq_ids:
                    ids.append(outputs[of_seq[seq_id]][num_sampled.get(seq_id, 0)])
                    num_sampled[seq_id] = num_sampled.get(seq_id, 0) + 1
                event = msgspec.structs.replace(event, token_ids=tuple(ids))
            writer(event)

        return with_tokens

    writers = []
    found = outcome(requests, settings, emit)
    for writer in writers:
        writer.close()
    return found


def compared(tmp_path, before, after, **options):
    facts = [
        record(tmp_path / f"{name}.jsonl", *run, **options) for name, run in (("before", before), ("after", after))
    ]
    sides, outcomes = recorded_sides((tmp_path / "before.jsonl", tmp_path / "after.jsonl"))
    return Comparison(*sides), facts, outcomes


def expected_parts(base, plants):
    """The mean effect of each plant over all orders of planting, from the simulator alone."""
    known = {}

    def run(chosen):
        if chosen not in known:
            requests, settings = planted(base, chosen)
            if "checkpoints" in plants:
                settings |= {"num_state_slots": 10, "state_bytes": 8}
            known[chosen] = outcome(requests, settings)
        return known[chosen]

    orders = list(permutations(plants))
    parts = {}
    for plant in plants:
        total = dict.fromkeys(run(frozenset()), Fraction(0))
        for order in orders:
            done = frozenset(order[: order.index(plant)])
            after, before = run(done | {plant}), run(done)
            total = {name: total[name] + after[name] - before[name] for name in total}
        parts[PLANTS[plant][0]] = {name: value / len(orders) for name, value in total.items()}
    return parts


@pytest.mark.parametrize("plants", PAIRS, ids=" and ".join)
def test_planted_causes_are_named_with_their_exact_shares(tmp_path, plants):
    base = requests_of(random.Random(str(plants)))
    first = planted(base, "with states" if "checkpoints" in plants else ())
    second = planted(base, plants)
    found, facts, _ = compared(tmp_path, first, second)
    assert found.parts == expected_parts(base, plants)
    assert set(found.differing) == {PLANTS[name][0] for name in plants}
    changes = {name: facts[1][name] - facts[0][name] for name in facts[0]}
    assert {name: found.change[name] for name in changes} == changes
    assert set(found.unexplained.values()) == {0}
    rows = cause_rows(found)
    assert [row.cause for row in rows] == [*CAUSES, "unexplained"]
    assert sum(row.change for row in rows) == pytest.approx(float(changes["hit_rate"]), abs=1e-15)
    for name in changes:
        assert sum((part[name] for part in found.parts.values()), Fraction(0)) == changes[name]


def test_the_plants_change_something():
    """Pairs whose every share is 0 would prove nothing."""
    parts = [expected_parts(requests_of(random.Random(str(plants))), plants) for plants in PAIRS]
    assert sum(any(part["hit_rate"] for part in each.values()) for each in parts) > 30
    for cause in {cause for cause, _ in PLANTS.values()}:
        assert any(each[cause]["hit_rate"] for each in parts if cause in each), cause


def test_equal_runs_show_nothing(tmp_path):
    run = planted(requests_of(random.Random(0)), ())
    found, _, _ = compared(tmp_path, run, run)
    assert (found.differing, set(found.change.values())) == ([], {0})
    assert {row.change for row in cause_rows(found)} == {0}
    assert sentence(found).endswith("in both: nothing differs.")


def test_the_answer_names_the_cause_and_what_differs(tmp_path):
    base = requests_of(random.Random(4))
    found, facts, _ = compared(tmp_path, planted(base, ()), planted(base, ("small pool",)))
    change = 100 * float(facts[1]["hit_rate"] - facts[0]["hit_rate"])
    assert change < 0
    assert f"({change:+.1f} points): another pool or eviction (30 -> 16 blocks) {change:+.1f}." in sentence(found)


def test_a_prompt_that_lost_says_which_request_took_its_block(tmp_path):
    base = requests_of(random.Random(4))
    _, _, outcomes = compared(tmp_path, planted(base, ()), planted(base, ("small pool",)))
    words = [why for why, _ in outcomes.of_requests(None).values() if "was evicted" in why]
    assert words
    names = {name for name, _, _ in base}
    assert all(why.rpartition("its block went to request ")[2] in names for why in words)


def test_more_than_five_causes_are_swapped_in_a_named_order():
    causes, effects = list("abcdef"), {"a": 1, "b": 2, "c": 4, "d": 8, "e": 16, "f": 32}
    measured = []

    def measure(later):
        measured.append(later)
        # a and f together do more than each alone
        return {"hits": Fraction(sum(effects[each] for each in later) + 100 * ({"a", "f"} <= later))}

    parts = shares(causes, measure)
    assert {cause: part["hits"] for cause, part in parts.items()} == {**effects, "f": 132}
    assert len(set(measured)) == num_runs(6) == 7
    assert shares(list("af"), measure)["a"]["hits"] == 51


@pytest.mark.parametrize("plants", [("small pool",), ("order",), ("text",), ("order", "small pool", "sequences")])
def test_traces_without_tokens_are_compared_by_the_hashes_of_their_blocks(tmp_path, plants):
    base = [(name, prompt, output[:1]) for name, prompt, output in requests_of(random.Random(5))]
    found, facts, _ = compared(tmp_path, planted(base, ()), planted(base, plants), tokens=False)
    assert set(found.differing) == {PLANTS[name][0] for name in plants}
    assert found.parts == expected_parts(base, plants)
    assert found.change["hit_rate"] == facts[1]["hit_rate"] - facts[0]["hit_rate"]


def test_hashes_of_blocks_of_two_sizes_are_not_compared(tmp_path):
    base = requests_of(random.Random(6))
    found, _, _ = compared(tmp_path, planted(base, ()), planted(base, ("block size",)), tokens=False)
    rows = {row.cause: row for row in cause_rows(found)}
    assert {cause for cause, row in rows.items() if not row.visible} == {"prompts", "outputs", "order"}
    assert "blocks of two sizes have different hashes" in rows["prompts"].detail
    assert sum(row.change or 0 for row in rows.values()) == pytest.approx(float(found.change["hit_rate"]))


def test_a_run_without_prefix_caching_has_no_hashes_to_compare(tmp_path):
    base = [(name, prompt, output[:1]) for name, prompt, output in requests_of(random.Random(8))]
    requests, settings = planted(base, ())
    without = requests, settings | {"enable_prefix_caching": False}
    for before, after in (((requests, settings), without), (without, (requests, settings))):
        for path in tmp_path.glob("*.jsonl"):
            path.unlink()
        found, facts, _ = compared(tmp_path, before, after, tokens=False)
        rows = {row.cause: row for row in cause_rows(found)}
        assert {cause for cause, row in rows.items() if not row.visible} == {"prompts", "outputs", "order"}
        assert found.parts["engine"]["hit_rate"] == found.change["hit_rate"] != 0
        assert found.change["hit_rate"] == facts[1]["hit_rate"] - facts[0]["hit_rate"]


def prompt_file(path, rows):
    path.write_text(
        "".join(json.dumps({"id": name, "prompt": prompt, "max_tokens": 3}) + "\n" for name, prompt in rows)
    )
    return path


def test_two_prompt_files_are_compared_as_this_machine_would_run_them(tmp_path):
    rows = [(f"r{n}", [n % 4 + 5] * 48 + [n + 20] * (n % 5 + 1)) for n in range(24)]
    before = prompt_file(tmp_path / "a.jsonl", rows)
    after = prompt_file(
        tmp_path / "b.jsonl", [(name, [60 + n, *prompt] if n % 2 else prompt) for n, (name, prompt) in enumerate(rows)]
    )
    flags = ("--num-gpu-blocks-override", "60", "--max-num-seqs", "2", "--format", "json")
    document = json.loads(pagedcli("diff", before, after, *flags).stdout)
    causes = {row["cause"]: row["change"] for row in document["causes"]}
    assert list(causes) == [*CAUSES, "unexplained"]
    assert causes["prompts"] == pytest.approx(document["change"])
    assert document["change"] < 0
    assert {row["parted_at"] for row in document["prompts"]} == {0}
    assert len(document["prompts"]) == 12
    lost = {row["label"]: (row["hit_before"], row["lost"]) for row in document["requests"]}
    assert lost
    assert set(lost) <= {name for n, (name, _) in enumerate(rows) if n % 2}
    assert lost["r23"][0] == 48
    shuffled = prompt_file(tmp_path / "c.jsonl", rows[::-1])
    assert "verdicts" in document
    document = json.loads(pagedcli("diff", before, shuffled, *flags).stdout)
    assert [
        row["cause"] for row in document["causes"] if row["detail"] not in ("the same", "recorded, less simulated")
    ] == ["order"]
    same = pagedcli("diff", before, before, *flags[:-2]).stdout
    assert "in both: nothing differs." in same.splitlines()[0]
    bad = tmp_path / "d.jsonl"
    bad.write_text(before.read_text() + "{}\n")
    assert pagedcli("diff", before, bad, *flags, expect=3)


def test_csv_has_the_causes(tmp_path):
    record(tmp_path / "a.jsonl", *planted(requests_of(random.Random(7)), ()))
    lines = pagedcli("diff", tmp_path / "a.jsonl", tmp_path / "a.jsonl", "--format", "csv").stdout.splitlines()
    assert lines[0].split(",")[:3] == ["cause", "change", "computed_tokens"]
    assert len(lines) == 2 + len(CAUSES)
