"""Every planted fault is found by the check made for it, and a correct server passes."""

import re

import pytest

from pagedcli.audit.audit import Audit, Options, exit_code, run_to_end
from pagedcli.audit.client import Budget, Client
from pagedcli.audit.faulty import FAULTS, Settings, serving, token_of
from pagedcli.audit.plan import CHECKS
from pagedcli.audit.self_test import FOUND_BY, trial
from pagedcli.audit.survey import WORDS
from pagedcli.audit.verdicts import Saving, Status
from pagedcli.remote import ServerError


def audit(settings, *, max_requests=300, max_tokens=200_000, **options):
    """A finished audit of a planted server."""
    with serving(settings) as server:
        run = Audit(Client(server.url, Budget(max_requests, max_tokens, 280.0)), Options(**options))
        assert not run_to_end(run)
    return run


def texts(run, status):
    return [(each.check, each.text) for each in run.verdicts() if each.status is status]


def test_every_fault_has_a_check_that_must_find_it():
    assert set(FOUND_BY) == set(FAULTS)


@pytest.mark.quick("moved-block")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    needed = FOUND_BY[fault] & CHECKS.keys() or {"speed"}  # the others are drawn from all that was sent
    result = trial(Settings(fault=fault), Options(seed=0, checks=("noise", *needed)))
    assert result.result == "right", f"found: {result.by}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_every_full_audit(fault, seed):
    result = trial(Settings(fault=fault, seed=100 + seed), Options())
    assert result.result == "right", f"found: {result.by}"


KINDS = {
    "as vLLM": {},
    "with a first token, no salts": {"has_bos": True, "has_salts": False},
    "blocks of 32": {"block_size": 32, "num_blocks": 128},
    "as llama-server": {"block_size": 1, "num_blocks": 8192, "has_salts": False, "has_bos": True, "is_llama": True},
    "reports nothing": {"reports": False, "has_salts": False},
}  # fmt: skip


def test_different_words_are_different_tokens_for_the_planted_server():
    """Else a prompt with one changed word is a hit of the other, and the law of hits seems broken."""
    assert len({token_of(word) for word in WORDS}) == len(WORDS)


@pytest.mark.long
@pytest.mark.quick("as vLLM-7")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_server_with_noise_passes(kind, seed):
    run = audit(Settings(seed=seed, **KINDS[kind]), seed=seed)
    assert texts(run, Status.FAULT) == []
    if KINDS[kind].get("reports", True):
        assert run.evidence.survey.target.unit == KINDS[kind].get("block_size", 16)


@pytest.mark.quick("True")
@pytest.mark.parametrize("separates", [False, True])
def test_whether_users_share_hits_is_said_and_is_no_fault(separates):
    run = audit(Settings(separates_users=separates), seed=1, checks=("noise", "users"))
    statuses = [each.status for each in run.verdicts() if each.check == "users"]
    assert statuses == [Status.OK, Status.OK if separates else Status.NOTE]
    assert any("hits of another user" in text for _, text in texts(run, statuses[1]))
    assert texts(run, Status.FAULT) == []


def test_a_correct_server_without_noise_follows_the_law_everywhere():
    run = audit(Settings(noise=0.0), seed=1, checks=("noise", "repeat", "resume", "crowd", "twins", "moved", "salts"))
    verdicts = {(each.check, each.status) for each in run.verdicts()}
    assert {status for _, status in verdicts} == {Status.OK}
    assert exit_code(run.verdicts()) == 0
    (law,) = [each for each in run.verdicts() if each.check == "law"]
    assert law.num_different == 0
    assert law.num_pairs > 60


def test_the_fields_of_llama_server_are_known():
    settings = Settings(fault="moved-block", block_size=8, has_salts=False, is_llama=True)
    run = audit(settings, seed=1, checks=("noise", "twins", "moved"))
    target = run.evidence.survey.target
    assert (run.evidence.survey.cached_field, target.unit, target.bypass) == ("timings.cache_n", 8, "cache_prompt")
    assert {check for check, _ in texts(run, Status.FAULT)} == {"law", "moved"}


def test_a_changed_token_that_changes_nothing_shows_without_reports_or_salts():
    hidden = {"reports": False, "has_salts": False}
    run = audit(Settings(fault="off-by-one", **hidden), seed=1, checks=("noise", "twins"))
    assert [check for check, _ in texts(run, Status.FAULT)] == ["change"]
    run = audit(Settings(**hidden), seed=1, checks=("noise", "twins"))
    assert texts(run, Status.FAULT) == []
    assert "change" in {check for check, _ in texts(run, Status.OK)}


def test_a_fault_without_logprobs_shows_in_the_texts():
    hidden = {"has_logprobs": False, "noise": 0.0}
    run = audit(Settings(fault="wrong-positions", **hidden), seed=1, checks=("noise", "repeat"))
    assert [check for check, _ in texts(run, Status.FAULT)] == ["repeat"]


@pytest.mark.quick("limits0")
@pytest.mark.parametrize("limits", [{"max_requests": 40}, {"max_tokens": 6000}])
def test_a_limit_ends_the_audit_with_what_is_known(limits):
    run = audit(Settings(seconds_per_token=1e-6), seed=1, **limits)
    budget = run.client.budget
    assert budget.num_requests <= limits.get("max_requests", 300)
    assert budget.num_tokens <= limits.get("max_tokens", 200_000)
    assert exit_code(run.verdicts()) == 3
    assert any("limit of" in text for _, text in texts(run, Status.UNKNOWN))
    assert "unit" in {check for check, _ in texts(run, Status.OK)}


def test_a_server_whose_cache_is_off_is_not_passed():
    run = audit(Settings(num_blocks=1, block_size=2048), seed=1, checks=("noise", "repeat"))
    assert exit_code(run.verdicts()) == 3


def test_of_eviction_the_shortest_failing_prompt_is_named(tmp_path):
    run = audit(Settings(fault="stale-block"), seed=1, checks=("noise", "evict"), folder=tmp_path)
    (verdict,) = [each for each in run.verdicts() if each.status is Status.FAULT]
    (outcome,) = run.evidence.of("evict")
    tolerance = run.evidence.noise().tolerance
    pairs = zip(outcome.probe.pairs, outcome.differences, strict=True)
    failing = [outcome.seen[pair.warm].num_prompt for pair, found in pairs if found.exceeds(tolerance)]
    assert f"shortest failing prompt: {min(failing)} tokens" in verdict.text


def test_a_server_that_maps_every_text_to_the_same_ids_is_not_accused():
    with serving(Settings(has_one_id=True)) as server:
        run = Audit(Client(server.url, Budget(300, 200_000, 280.0)), Options(seed=1))
        with pytest.raises(ServerError, match="different prompts get the same answer"):
            run_to_end(run)
    assert run.verdicts() == []


def test_noise_is_measured_past_the_cache_where_that_is_possible():
    run = audit(Settings(fault="second-hit", noise=0.0), seed=1, checks=("noise", "repeat"))
    assert run.evidence.noise().largest == 0.0
    assert [check for check, _ in texts(run, Status.FAULT)] == ["repeat"]


@pytest.mark.long
def test_a_fault_of_many_blocks_names_how_many():
    run = audit(Settings(fault="long-hit"), seed=1, checks=("noise", "repeat"))
    (verdict,) = [each for each in run.verdicts() if each.status is Status.FAULT]
    assert "1,024" in verdict.text
    shortest = int(re.search(r"shortest failing prompt: ([\d,]+) tokens", verdict.text)[1].replace(",", ""))
    assert 800 <= shortest <= 832


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1.0] * 7, None),  # too few to exclude chance
        ([1.0] * 8, True),
        ([0.0] * 8, False),
        ([0.0] + [1.0] * 7, None),
        ([0.0, 0.1] + [1.0] * 18, True),
        ([0.3] * 30, True),
        ([0.2] * 30, False),
        ([-1.0, 0.0, 1.0] * 10, None),
    ],
)
def test_times_are_clear_when_chance_does_not_explain_them(shares, expected):
    assert Saving(sorted(shares)).is_there is expected


def test_times_that_are_not_clear_say_how_many_more_requests_would_tell():
    assert Saving([1.0] * 8).needs(4) == ""
    assert Saving([1.0] * 7).needs(4) == "; about 4 more requests would tell (--max-requests, --max-tokens)"
    assert "about 76 more requests" in Saving([0.0] * 2 + [1.0] * 6).needs(4)
    assert "too uneven" in Saving([-1.0] * 6 + [1.0] * 7).needs(4)
