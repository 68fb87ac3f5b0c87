"""Real servers with tiny models: skipped, with the reason, where this machine has none (see real_servers)."""

import json
import sys
from urllib.request import Request, urlopen

import pytest
from real_servers import command_in, free_port, running, write_gguf, write_qwen

from pagedcli.audit.audit import Audit, Options, run_to_end
from pagedcli.audit.client import Budget, Client
from pagedcli.audit.verdicts import Status

pytestmark = pytest.mark.slow
COMPARED = ("repeat", "stream", "crowd")  # and `resume`, where answers begin with whole words


def audit(url, **options):
    """Verdicts by check; the whole table is printed for -s and for failures."""
    run = Audit(Client(url, Budget(300, 200_000, 280.0)), Options(**options))
    assert not run_to_end(run)
    for each in run.verdicts():
        print(f"{each.status:8}{each.check:9}{each.text}", file=sys.stderr)
    assert [each.text for each in run.verdicts() if each.status is Status.FAULT] == []
    return run, {each.check: each for each in run.verdicts()}


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    write_qwen(folder)
    return folder


@pytest.mark.parametrize("cache", ["true", "false"])
def test_llama_cpp_python(stories, cache, tmp_path):
    port = free_port()
    command = [
        command_in("PAGEDCLI_LLAMA_PYTHON"), "-m", "llama_cpp.server", "--model", str(stories), "--n_ctx", "512",
        "--logits_all", "true", "--n_threads", "1", "--host", "127.0.0.1", "--port", str(port), "--cache", cache,
    ]  # fmt: skip
    with running(command, port, log=tmp_path / "log", wait_s=120) as url:
        run, verdicts = audit(url)
    assert not run.evidence.survey.target.reports
    assert {verdicts[check].status for check in COMPARED} == {Status.OK}


@pytest.mark.parametrize("cache", [True, False])
def test_llama_server(stories, cache, tmp_path):
    port = free_port()
    command = [
        command_in("PAGEDCLI_LLAMA_SERVER"), "-m", str(stories), "-c", "2048", "-np", "4", "-t", "1",
        "--host", "127.0.0.1", "--port", str(port), *([] if cache else ["--no-cache-prompt"]),
    ]  # fmt: skip
    with running(command, port, log=tmp_path / "log", wait_s=120) as url:
        run, verdicts = audit(url)
    assert {verdicts[check].num_different for check in COMPARED} == {0}
    if cache:
        assert run.evidence.survey.target.unit == 1
        assert run.evidence.survey.target.bypass == "cache_prompt"
    else:
        assert not run.evidence.survey.target.reports


def test_llama_server_restarted_with_saved_slots(stories, tmp_path):
    """It takes the first slots first, so what is restored into the last ones outlives the survey."""
    num_slots = 160
    command = [
        command_in("PAGEDCLI_LLAMA_SERVER"), "-m", str(stories), "-c", str(512 * num_slots), "-np", str(num_slots),
        "-t", "1", "--host", "127.0.0.1", "--slot-save-path", str(tmp_path),
    ]  # fmt: skip
    port = free_port()
    with running([*command, "--port", str(port)], port, log=tmp_path / "before", wait_s=120) as url:
        before, _ = audit(url, checks=("repeat",), remembers=True)
        saved = [slot for slot in range(num_slots) if ask_slot(url, slot, "save", slot)["n_saved"]]
    port = free_port()
    with running([*command, "--port", str(port)], port, log=tmp_path / "after", wait_s=120) as url:
        for place, slot in enumerate(saved):
            ask_slot(url, num_slots - 1 - place, "restore", slot)
        after, verdicts = audit(url, checks=("repeat",), memory=before.memory)
    recalled = after.evidence.recalled
    assert len(recalled) == 16
    assert sum(outcome.seen[0].is_hit for outcome in recalled) >= 12
    assert verdicts["restart"].status is Status.OK


def ask_slot(url, slot, action, number):
    """Save a slot of a llama-server to the file of this number, or restore it."""
    place = f"{url.removesuffix('/v1')}/slots/{slot}?action={action}"
    body = json.dumps({"filename": f"slot-{number}"}).encode()
    with urlopen(Request(place, body, {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("cache", [True, False])
def test_vllm_on_a_cpu(qwen, cache, tmp_path):
    port = free_port()
    command = [
        command_in("PAGEDCLI_VLLM_PYTHON"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(qwen),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
        "--max-model-len", "1100", "--block-size", "32", "--num-kvcache-blocks", "256", "--max-num-seqs", "8",
        "--enable-prompt-tokens-details", "--enforce-eager",
        "--enable-prefix-caching" if cache else "--no-enable-prefix-caching",
    ]  # fmt: skip
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with running(command, port, log=tmp_path / "log", wait_s=400, env=env) as url:
        run, verdicts = audit(url)
    assert {verdicts[check].num_different for check in (*COMPARED, "samples")} == {0}
    if cache:
        assert run.evidence.survey.target.unit == 32
        assert run.evidence.survey.target.bypass == "salt"
        assert {verdicts[check].status for check in ("law", "twins", "moved", "salts", "evict")} == {Status.OK}
    else:
        assert not run.evidence.survey.target.reports
