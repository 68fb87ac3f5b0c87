"""A server before and after a restart: each planted fault of what it kept is found, and no correct one is accused."""

from collections import OrderedDict
from functools import cache

import pytest
from cli_harness import pagedcli

from pagedcli.audit.audit import Audit, Options, exit_code, run_to_end
from pagedcli.audit.client import Budget, Client
from pagedcli.audit.faulty import Settings, serving
from pagedcli.audit.restart import load_memory, save_memory
from pagedcli.audit.verdicts import Status
from pagedcli.errors import UsageError

CHECKS = ("noise",)
RESTART_FAULTS = {
    "restored-state": "what is kept next to K and V, the state at the end of a block, is lost: LMCache 4492",
    "restored-stale": "the state at the end of a block is that of another prompt: vLLM 525",
    "restored-other": "a failed read counts as loaded, with the content of another prompt: dynamo 15079",
    "restored-model": "a block is found though another model has computed it",
    "claimed-model": "hits on blocks of another model are reported, and computed again",
}
OTHER_MODEL = {"restored-model", "claimed-model"}
KINDS = {
    "as vLLM": {},
    "blocks of 32": {"block_size": 32, "num_blocks": 256},
    "as llama-server": {"block_size": 1, "num_blocks": 16384, "has_salts": False, "has_bos": True, "is_llama": True},
    "no way around the cache": {"has_salts": False},
    "reports nothing": {"reports": False, "has_salts": False},
}


def audited(server, **options):
    run = Audit(Client(server.url, Budget(300, 200_000, 280.0)), Options(checks=CHECKS, **options))
    assert not run_to_end(run)
    return run


def restore(server, kept, fault):
    """Take over what an earlier server has kept; right if that is nothing after a change of model or block size."""
    cache, mine, earlier = server.cache, server.settings, kept._settings
    if mine.block_size != earlier.block_size or (mine.seed != earlier.seed and fault not in OTHER_MODEL):
        return
    cache._index, cache._used = dict(kept._index), OrderedDict(kept._used)
    cache._blocks = {block_id: values.copy() for block_id, values in kept._blocks.items()}
    for block_id, values in cache._blocks.items():
        other = kept._blocks[(block_id + len(kept._blocks) // 2) % len(kept._blocks)]
        if fault == "restored-state":
            values[-1] = 0
        elif fault == "restored-stale":
            values[-1] = other[-1]
        elif fault == "restored-other" and block_id % 3 == 0:
            values[:] = other
    if fault == "claimed-model":
        choices = server._choices
        server._choices = lambda body, tokens, blocks, salt, **crowd: choices(body, tokens, [], salt, **crowd)


@cache
def audited_before(settings):
    """What is remembered of a first server, and what it has kept."""
    with serving(settings) as server:
        return audited(server, remembers=True).memory, server.cache


def restarted(before, after, fault=None):
    """The verdicts on the second server's memory of the first, and whether anything is wrong."""
    memory, kept = audited_before(Settings(**before))
    with serving(Settings(**after)) as server:
        restore(server, kept, fault)
        run = audited(server, memory=memory)
    verdicts = run.verdicts()
    return [each for each in verdicts if each.check == "restart"], exit_code(verdicts) == 1


def planted(fault, seed, **kind):
    return restarted({"seed": seed, **kind}, {"seed": seed + (fault in OTHER_MODEL), **kind}, fault)


@pytest.mark.quick("restored-stale")
@pytest.mark.parametrize("fault", RESTART_FAULTS)
def test_a_planted_fault_of_a_restart_is_found(fault):
    verdicts, is_wrong = planted(fault, 1)
    assert is_wrong
    found = {verdict.text.partition(":")[0] for verdict in verdicts if verdict.status is Status.FAULT}
    assert ("hits are claimed that cannot be" if fault in OTHER_MODEL else "answers changed after the restart") in found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("fault", RESTART_FAULTS)
def test_a_planted_fault_of_a_restart_is_found_with_every_seed(fault, seed):
    names = list(KINDS)[: 4 if fault not in OTHER_MODEL else 3]
    assert planted(fault, 100 * seed, **KINDS[names[seed % len(names)]])[1]


@pytest.mark.quick("no way around the cache")
@pytest.mark.parametrize("kind", ["as vLLM", "no way around the cache"])
def test_a_correct_restart_passes(kind):
    verdicts, is_wrong = restarted({"seed": 1, **KINDS[kind]}, {"seed": 1, **KINDS[kind]})
    assert not is_wrong
    assert [verdict.status for verdict in verdicts] == [Status.OK]
    assert "answers are the remembered ones in 16 of 16; 1" in verdicts[0].text


def test_where_nothing_was_kept_nothing_is_passed():
    before, after = ({"seed": 1, "block_size": size} for size in (16, 32))
    verdicts, is_wrong = restarted(before, after)
    assert not is_wrong
    assert [verdict.status for verdict in verdicts] == [Status.NOTE]
    assert "; 0 of 16 remembered prompts were hits" in verdicts[0].text


def test_another_model_is_named_and_is_no_fault():
    verdicts, is_wrong = restarted({"seed": 1}, {"seed": 2})
    assert not is_wrong
    assert [(each.status, "another model or arithmetic" in each.text) for each in verdicts] == [(Status.NOTE, True)]
    assert "0 of 16 remembered prompts were hits" in verdicts[0].text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_no_correct_restart_is_accused(kind, seed):
    """The same server, one with another model, one with other blocks, one that kept nothing, in turns."""
    before = {"seed": seed, **KINDS[kind]}
    change = [{}, {"seed": seed + 1}, {"block_size": 2 * before.get("block_size", 16)}, {"noise": 0.0}][seed % 4]
    assert not restarted(before, {**before, **change})[1]


@pytest.mark.long
def test_the_command_remembers_and_recalls(tmp_path):
    memory = tmp_path / "before.json"
    with serving(Settings()) as server:
        said = pagedcli("audit", server.url, "--checks", "noise", "--remember", memory, "--output-dir", tmp_path).stderr
        assert f"remembered 16 prompts; after a restart: --recall {memory}" in said
        pagedcli("audit", server.url, "--checks", "noise", "--remember", memory, expect=2)
        shown = pagedcli("audit", server.url, "--checks", "noise", "--recall", memory, "--output-dir", tmp_path).stdout
    assert "answers are the remembered ones in 16 of 16" in " ".join(shown.split())


def test_a_file_that_is_not_a_memory_is_refused(tmp_path):
    path = tmp_path / "before.json"
    for content in (b"", b"[]", b'{"format": "pagedcli-audit-memory-1", "prompts": []}'):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"before\.json"):
            load_memory(path)


def test_another_tokenizer_is_refused(tmp_path):
    memory, _ = audited_before(Settings(seed=1))
    save_memory(memory, tmp_path / "a.json", overwrite=False)
    assert load_memory(tmp_path / "a.json") == memory
    with (
        serving(Settings(seed=1, has_bos=True)) as server,
        pytest.raises(UsageError, match="tokenizes the remembered prompts differently"),
    ):
        audited(server, memory=memory)


def test_without_a_way_around_the_cache_a_wrong_restart_is_found_by_memory():
    verdicts, is_wrong = planted("restored-other", 3, has_salts=False)
    assert is_wrong
    assert any("no longer the remembered ones" in verdict.text for verdict in verdicts)


def test_a_limit_before_all_is_remembered_writes_no_file(tmp_path):
    few = ("--checks", "noise", "--max-requests", "40", "--output-dir", tmp_path)
    with serving(Settings()) as server:
        said = pagedcli("audit", server.url, *few, "--remember", tmp_path / "a.json", expect=3).stderr
    assert "stopped before all prompts were answered" in said
    assert not (tmp_path / "a.json").exists()
