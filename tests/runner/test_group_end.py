"""The end of a tensor-parallel group: all ranks leave it together, nobody waits for a lost one, no process stays."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch.distributed as dist
from harness.engine import ragged_prompts, worker_processes
from model_zoo import tiny_model

from pagedcli.config import EngineConfig
from pagedcli.runner import tensor_parallel
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.tensor_parallel import WorkerFailure
from pagedcli.sampling_params import SamplingParams

REPEATS = 5
LONG_WAIT_S = tensor_parallel.COLLECTIVE_TIMEOUT.total_seconds() / 2  # nothing but a hang takes so long
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# like NCCL, and unlike gloo: whoever leaves the group waits for the others
BARRIER = """
leave = tensor_parallel._leave_group
def leave_together(*args, **options):
    tensor_parallel.dist.barrier()
    leave(*args, **options)
tensor_parallel._leave_group = leave_together
"""
FAILURE = """
follow, steps = tensor_parallel.ModelRunner.follow, []
def fail_later(self, *args, **options):
    steps.append(1)
    if len(steps) > 3:
        raise ArithmeticError("the fourth step went wrong")
    follow(self, *args, **options)
tensor_parallel.ModelRunner.follow = fail_later
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("group_end"), num_hidden_layers=1)


@pytest.fixture
def change_workers(monkeypatch):
    """Lets workers run some code once their modules are imported."""

    def change(code):
        worker = f"import sys\nfrom pagedcli.runner import tensor_parallel\n{code}\n"
        popen = subprocess.Popen

        def start(command, **options):
            if "-c" in command:
                where = command.index("-c") + 1
                command = [*command[:where], worker + command[where], *command[where + 1 :]]
            return popen(command, **options)

        monkeypatch.setattr(tensor_parallel.subprocess, "Popen", start)

    return change


def two_ranks(path, **config):
    config = {"tensor_parallel_size": 2, "num_kvcache_blocks": 20, "max_num_seqs": 4, **config}
    return LLMEngine(EngineConfig(model=str(path), dtype="float32", device="cpu", **config))


def add_requests(engine):
    for i, prompt in enumerate(ragged_prompts(3)):
        engine.add_request(str(i), prompt, PARAMS)


def ten_steps(engine):
    add_requests(engine)
    for _ in range(10):
        engine.step()


def close_in_time(engine):
    workers = worker_processes(engine)
    engine.close()
    assert [worker.returncode for worker in workers] == [0] * len(workers)  # left before _LEAVE_S, and not killed
    assert not dist.is_initialized()
    engine.close()


@pytest.mark.long
def test_ranks_that_wait_for_each_other_leave_the_group_together(model, monkeypatch, change_workers):
    change_workers(BARRIER)
    scope = {"tensor_parallel": tensor_parallel}
    monkeypatch.setattr(tensor_parallel, "_leave_group", tensor_parallel._leave_group)  # put back at the end
    exec(BARRIER, scope)
    engine = two_ranks(model)
    ten_steps(engine)
    close_in_time(engine)


@pytest.mark.slow
def test_groups_start_and_end_again_and_again(model):
    for _ in range(REPEATS):
        engine = two_ranks(model)
        ten_steps(engine)
        close_in_time(engine)
        assert not psutil.Process().children(recursive=True)


@pytest.mark.long
def test_an_exception_in_a_worker_ends_the_run_with_its_words(model, change_workers):
    change_workers(FAILURE)
    with two_ranks(model) as engine:
        started = time.monotonic()
        with pytest.raises(WorkerFailure, match="failed: ArithmeticError: the fourth step went wrong"):
            ten_steps(engine)
    assert time.monotonic() - started < LONG_WAIT_S
    assert not dist.is_initialized()
    assert worker_processes(engine)[0].returncode is not None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_main_thread_stuck_with_a_dead_worker_ends_the_process(model, monkeypatch, capsys):
    codes = []

    def end(code):
        codes.append(code)
        raise SystemExit  # ends only the thread that watches

    monkeypatch.setattr(tensor_parallel, "_STUCK_S", 0.2)
    monkeypatch.setattr(tensor_parallel, "_LEAVE_S", 0.1)
    engine = two_ranks(model)
    monkeypatch.setattr(tensor_parallel.os, "_exit", end)
    worker_processes(engine)[0].kill()
    [watch] = [thread for thread in threading.enumerate() if thread.name == "pagedcli-ranks"]
    watch.join(10)
    assert codes == [1]
    assert "was killed by SIGKILL; the engine was waiting for it" in capsys.readouterr().err
    engine.close()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ctrl_c_of_all_processes_ends_all_and_keeps_the_rows(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(f'{{"prompt": "The old man number {i} went"}}\n' for i in range(200)))
    options = ["--device", "cpu", "--max-tokens", "8", "--max-num-seqs", "2", "--ignore-eos"]
    command = [sys.executable, "-m", "pagedcli", "generate", str(prompts), "-o", str(out), *options]
    journal = out.with_name(out.name + ".partial")
    with subprocess.Popen(
        [*command, "--tensor-parallel-size", "2"], stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 3):
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 1
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        errors = process.communicate(timeout=LONG_WAIT_S)[1]
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert journal.read_text().count("\n") > 3
    assert not psutil.wait_procs(children, timeout=LONG_WAIT_S)[1]


@pytest.mark.slow
def test_a_program_that_does_not_close_its_llm_ends_all_the_same(tmp_path):
    code = """
        from pagedcli import LLM, SamplingParams
        llm = LLM(tensor_parallel_size=2, device="cpu", num_kvcache_blocks=20)
        llm.generate("The fox", SamplingParams(max_tokens=3), use_tqdm=False)
        print(llm.llm_engine._group._ranks.workers[0].process.pid, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    assert process.wait(LONG_WAIT_S) == 0, process.stderr.read()
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_the_command_line_ends_even_if_the_group_cannot_be_left(tmp_path):
    """Destructors of a group with a lost rank can wait minutes; a normal exit runs them after atexit's functions."""
    code = f"""
        import atexit, torch.distributed as dist
        from pagedcli.cli import main
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
        atexit.register(print, "a normal exit")
        def end(**_):
            print("said before")
            raise SystemExit(3)
        main.app = end
        main.run()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "said before\n"), ended.stderr
