"""The change between two runs: planted causes are named with what each changes alone, and equal runs show nothing."""

import json
import random
from array import array
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import msgspec
import pytest
from cli_harness import pagedcli, write_rows
from harness.core import plan_for

import pagedcli.events as ev
from pagedcli.show.difference_tables import sentence
from pagedcli.simulation.difference import Comparison, recorded_sides
from pagedcli.simulation.requests import Request, Requests
from pagedcli.simulation.run import simulate
from pagedcli.trace.files import TraceWriter

BASE = {
    "pool_tokens": 120, "block_size": 4, "eviction": "lru", "max_num_seqs": 4, "max_num_batched_tokens": 48,
    "checkpoints": "branches", "num_state_slots": None, "state_bytes": 0,
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
    "outputs": ("prompts", longer_outputs),
    "order": ("order", other_order),
    "block size": ("block_size", {"block_size": 8}),
    "small pool": ("pool", {"pool_tokens": 64}),
    "policy": ("policy", {"eviction": "fifo"}),
    "sequences": ("limits", {"max_num_seqs": 2}),
    "step tokens": ("limits", {"max_num_batched_tokens": 12}),
    "checkpoints": ("limits", {"checkpoints": "none"}),
}
ONE = [(name,) for name in PLANTS]
# rows that come and go have no place in another order, but the one that the comparison gives them
TOGETHER = [each for each in PLANTS if each != "rows"]
TWO, THREE = ([each for each in combinations(TOGETHER, num)
               if len({PLANTS[name][0] for name in each}) == num]
              for num in (2, 3))  # fmt: skip
PAIRS = [*ONE, *random.Random(1).sample(TWO, 12), *random.Random(2).sample(THREE, 8)]


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
    """What the simulator itself makes of it."""
    workload = Requests(requests=[
        Request(str(name), None, len(prompt), len(output), token_ids=array("q", prompt),
                     output_ids=[array("q", output)], stopped=[False], max_new_tokens=len(output))
        for name, prompt, output in requests
    ])  # fmt: skip
    limits = {name: value for name, value in settings.items() if name != "pool_tokens"}
    plan = plan_for(workload, num_blocks=settings["pool_tokens"] // settings["block_size"], **limits)
    plan = replace(plan, limits=replace(plan.limits, max_model_len=200))
    run = simulate(workload, plan, emit=emit)
    return {
        "hit_rate": Fraction(*run.hit_tokens()),
        "computed_tokens": run.facts.num_computed_tokens,
        "preemptions": run.facts.num_preemptions,
    }


def record(path, requests, settings, *, tokens=True):
    """The run as a trace."""
    outputs, prompts = {name: output for name, _, output in requests}, {name: prompt for name, prompt, _ in requests}
    of_seq, num_sampled = {}, {}
    with TraceWriter(path) as writer:

        def with_tokens(event):
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

        return outcome(requests, settings, with_tokens if tokens else writer)


def compared(tmp_path, before, after, **options):
    facts = [
        record(tmp_path / f"{name}.jsonl", *run, **options) for name, run in (("before", before), ("after", after))
    ]
    return Comparison(*recorded_sides(tmp_path / "before.jsonl", tmp_path / "after.jsonl")), facts


def less(one, *others):
    return {name: value - sum(other[name] for other in others) for name, value in one.items()}


def expected_parts(base, plants):
    """What each plant changes alone, and all of them beyond that, from the simulator alone."""

    def run(*chosen):
        requests, settings = planted(base, chosen)
        if "checkpoints" in plants:
            settings |= {"num_state_slots": 10, "state_bytes": 8}
        return outcome(requests, settings)

    parts = {PLANTS[plant][0]: less(run(plant), run()) for plant in plants}
    together = less(run(*plants), run(), *parts.values())
    return parts | ({"together": together} if any(together.values()) else {})


@pytest.mark.parametrize("plants", PAIRS, ids=" and ".join)
def test_planted_causes_are_named_with_what_each_changes_alone(tmp_path, plants):
    base = requests_of(random.Random(str(plants)))
    first = planted(base, "with states" if "checkpoints" in plants else ())
    second = planted(base, plants)
    found, facts = compared(tmp_path, first, second)
    assert found.parts == expected_parts(base, plants)
    assert set(found.details) - {"together"} == {PLANTS[name][0] for name in plants}
    assert found.change == less(facts[1], facts[0])
    assert set(less(found.change, *found.parts.values()).values()) == {0}


def test_the_plants_change_something():
    """Pairs whose every share is 0 would prove nothing."""
    parts = [expected_parts(requests_of(random.Random(str(plants))), plants) for plants in PAIRS]
    assert sum(any(part["hit_rate"] for part in each.values()) for each in parts) > 22
    for cause in {cause for cause, _ in PLANTS.values()}:
        assert any(each[cause]["hit_rate"] for each in parts if cause in each), cause


def test_the_answer_names_the_cause_and_what_differs(tmp_path):
    base = requests_of(random.Random(4))
    found, facts = compared(tmp_path, planted(base, ()), planted(base, ("small pool",)))
    before, after = (100 * float(each["hit_rate"]) for each in facts)
    hits = f"hits fell from {before:.0f} % to {after:.0f} %"
    change = f"another pool (blocks 30 -> 16) {after - before:+.0f} points."
    for side in found.sides:
        side.seconds = 1.0
    assert sentence(found) == f"{hits.capitalize()}: {change}"
    found.sides[1].seconds = 53.0
    assert sentence(found) == f"The later run took 53 s instead of 1.0 s, and {hits}: {change}"


@pytest.mark.parametrize("plants", [("small pool",), ("order",), ("text",), ("order", "small pool", "sequences")])
def test_traces_without_tokens_are_compared_by_the_hashes_of_their_blocks(tmp_path, plants):
    base = [(name, prompt, output[:1]) for name, prompt, output in requests_of(random.Random(5))]
    found, facts = compared(tmp_path, planted(base, ()), planted(base, plants), tokens=False)
    assert found.parts == expected_parts(base, plants)
    assert found.change["hit_rate"] == facts[1]["hit_rate"] - facts[0]["hit_rate"]


def test_hashes_of_blocks_of_two_sizes_are_not_compared(tmp_path):
    base = requests_of(random.Random(6))
    found, _ = compared(tmp_path, planted(base, ()), planted(base, ("block size",)), tokens=False)
    assert "blocks of two sizes have different hashes" in found.no_prompts
    assert set(found.parts) == {"block_size"}
    assert set(less(found.change, *found.parts.values()).values()) == {0}


def test_a_run_without_prefix_caching_has_no_hashes_to_compare(tmp_path):
    base = [(name, prompt, output[:1]) for name, prompt, output in requests_of(random.Random(8))]
    requests, settings = planted(base, ())
    without = requests, settings | {"enable_prefix_caching": False}
    for before, after in (((requests, settings), without), (without, (requests, settings))):
        for path in tmp_path.glob("*.jsonl"):
            path.unlink()
        found, facts = compared(tmp_path, before, after, tokens=False)
        assert "a run without prefix caching has no hashes of blocks" in found.no_prompts
        assert found.parts["limits"]["hit_rate"] == found.change["hit_rate"] != 0
        assert found.change["hit_rate"] == facts[1]["hit_rate"] - facts[0]["hit_rate"]


def prompt_file(path, rows):
    return write_rows(path, [{"id": name, "prompt": prompt, "max_tokens": 3} for name, prompt in rows])


def test_two_prompt_files_are_compared_as_this_machine_would_run_them(tmp_path):
    rows = [(f"r{n}", [n % 4 + 5] * 48 + [n + 20] * (n % 5 + 1)) for n in range(24)]
    before = prompt_file(tmp_path / "a.jsonl", rows)
    after = prompt_file(
        tmp_path / "b.jsonl", [(name, [60 + n, *prompt] if n % 2 else prompt) for n, (name, prompt) in enumerate(rows)]
    )
    flags = ("--num-kvcache-blocks", "60", "--max-num-seqs", "2", "--format", "json")
    document = json.loads(pagedcli("diff", before, after, *flags).stdout)
    causes = {row["cause"]: row["hit_rate"] for row in document["causes"]}
    assert list(causes) == ["prompts"]
    assert causes["prompts"] == pytest.approx(document["changes"]["hit_rate"])
    assert document["changes"]["hit_rate"] < 0
    assert len(document["prompts"]) == 12
    shuffled = prompt_file(tmp_path / "c.jsonl", rows[::-1])
    assert "cures" in document
    document = json.loads(pagedcli("diff", before, shuffled, *flags).stdout)
    assert [row["cause"] for row in document["causes"]] == ["order"]
    same = pagedcli("diff", before, before, *flags[:-2]).stdout
    assert "in both runs: nothing differs." in same.splitlines()[0]
    bad = tmp_path / "d.jsonl"
    bad.write_text(before.read_text() + "{}\n")
    assert pagedcli("diff", before, bad, *flags, expect=3)
