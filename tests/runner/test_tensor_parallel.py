"""Two gloo ranks give the tokens of one; a worker that dies ends the run with its reason; all ranks leave the group
together, nobody waits for a lost one, no process stays."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch
import torch.distributed as dist
from harness.engine import ragged_prompts, run, worker_processes
from model_zoo import tiny_model
from quick import slow_but

from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError, ModelError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.formats import AsStored
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.reading import read_spec
from pagedcli.models.sharding import shard_parameters, shard_spec
from pagedcli.models.weights import CheckpointWeights, DummyWeights
from pagedcli.runner import llm_engine, tensor_parallel
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.tensor_parallel import COLLECTIVE_TIMEOUT, WorkerFailure
from pagedcli.sampling_params import SamplingParams

SPLIT = (
    "qwen2-moe",
    "gemma3",
    "gpt_oss",
    "nemotron",
    "stablelm-parallel",
    "deepseek_v3",
    "phimoe",
    "apertus",
    "laguna",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Untied, with every bias there is, and a vocabulary that does not split evenly."""
    return tiny_model("llama-untied", tmp_path_factory.mktemp("parallel"), vocab_size=321, num_hidden_layers=1)


def make_engine(path, **config):
    config = {"max_num_seqs": 4, "num_kvcache_blocks": 6, "chunked_prefill_size": 30, **config}
    return LLMEngine(EngineConfig(model=str(path), dtype="float32", device="cpu", **config))


@pytest.fixture
def close():
    engines = []
    yield lambda engine: engines.append(engine) or engine
    for engine in engines:
        engine.close()
    assert not dist.is_initialized()


def finish(engine):
    while engine.has_unfinished_requests():
        engine.step()


PARAMS = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 3 + [
    SamplingParams(temperature=1.0, n=2, seed=i, max_tokens=6, top_k=k, ignore_eos=True) for i, k in enumerate([0, 5])
]


@pytest.mark.long
def test_two_ranks_give_the_tokens_of_one_and_a_killed_worker_ends_the_run(model, close):
    prompts = ragged_prompts(5)
    expected = run(make_engine(model), prompts, PARAMS)
    engine = close(make_engine(model, tensor_parallel_size=2, async_scheduling=True))
    assert run(engine, prompts, PARAMS) == expected
    assert engine.num_steps_ahead > 0
    assert engine.stats.num_preemptions > 0
    long = (prompts[0] * 70)[:70]  # in chunks, of which all but the last sample nothing
    assert run(engine, [long], PARAMS[0]) == run(make_engine(model), [long], PARAMS[0])
    assert engine.plan.block_bytes == make_engine(model).plan.block_bytes // 2
    assert engine.model.weight_bytes < 0.6 * make_engine(model).model.weight_bytes

    engine.add_request("a", prompts[0], PARAMS[0])
    engine.step()
    [worker] = worker_processes(engine)
    os.kill(worker.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match=r"worker 1 of 2 .* was killed by SIGKILL"):
        finish(engine)
    assert time.monotonic() - start < COLLECTIVE_TIMEOUT.total_seconds() / 2
    with pytest.raises(WorkerFailure, match="was killed by SIGKILL"):
        engine.step()


@pytest.mark.long
@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("family", slow_but(("gemma3", "deepseek_v3"), SPLIT))
def test_experts_and_norms_around_are_split_over_two_ranks(family, tmp_path, close):
    """Every expert is split within, the shared one too; gemma's norms come after the sum over the ranks."""
    path, prompts = tiny_model(family, tmp_path / "m"), ragged_prompts(4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    alone = make_engine(path, num_kvcache_blocks=80)
    split = close(make_engine(path, tensor_parallel_size=2, num_kvcache_blocks=80))
    assert run(split, prompts, params) == run(alone, prompts, params)
    latents = family == "deepseek_v3"  # every rank makes all
    assert split.model.weight_bytes < (0.62 if latents else 0.6) * alone.model.weight_bytes


def writing(folder, num_rows, *options):
    """A run of two ranks that has written some rows of folder/out.jsonl: its command without output and ranks, its
    process, its workers."""
    prompts, out = folder / "prompts.jsonl", folder / "out.jsonl"
    prompts.write_text("".join(f'{{"prompt": "The old man number {i} went"}}\n' for i in range(num_rows)))
    options = ["--device", "cpu", "--max-num-seqs", "2", "--ignore-eos", *options]
    command, journal = [sys.executable, "-m", "pagedcli", "generate", prompts, *options], folder / "out.jsonl.partial"
    ranks = ["-o", out, "--tensor-parallel-size", "2"]
    process = subprocess.Popen([*command, *ranks], stderr=subprocess.PIPE, text=True, process_group=0)
    while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 3):
        time.sleep(0.02)
    return command, process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
def test_rows_written_before_a_worker_died_are_kept_and_resumed(tmp_path):
    out, reference = tmp_path / "out.jsonl", tmp_path / "reference.jsonl"
    command, run_cut_short, [worker] = writing(tmp_path, 24, "--dtype", "float32", "--max-tokens", "24")
    worker.kill()
    errors = run_cut_short.communicate(timeout=60)[1]
    assert run_cut_short.returncode == 1, errors
    assert "tensor-parallel worker 1 of 2" in errors
    assert "--resume" in errors
    assert not out.exists()
    for more in (["-o", out, "--resume"], ["-o", reference]):
        subprocess.run([*command, *more], check=True, capture_output=True)
    texts = [[json.loads(line)["text"] for line in path.read_text().splitlines()] for path in (out, reference)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24


@pytest.mark.long
def test_a_worker_that_cannot_load_says_why_and_nobody_waits(model, change_workers):
    change_workers("tensor_parallel.load_engine = lambda *_, **__: open('/no/such/model')")
    with pytest.raises(WorkerFailure, match=r"worker 1 of 2 .* failed: .*/no/such/model"):
        make_engine(model, tensor_parallel_size=2)
    assert not dist.is_initialized()


@pytest.mark.long
def test_workers_end_when_rank_0_cannot_load(model, monkeypatch):
    groups = []

    def fail(config, **_):
        raise ModelError("no such weights")

    class Group(tensor_parallel.WorkerGroup):
        def __init__(self, config):
            super().__init__(config)
            groups.append(self)

    monkeypatch.setattr(tensor_parallel, "load_engine", fail)
    monkeypatch.setattr(llm_engine, "WorkerGroup", Group)
    with pytest.raises(ModelError, match="no such weights"):
        make_engine(model, tensor_parallel_size=2)
    assert [worker.process.returncode for worker in groups[0]._ranks.workers] != [None]
    assert not dist.is_initialized()


def test_impossible_numbers_of_ranks_are_refused_with_the_reason(model, tmp_path):
    with pytest.raises(ConfigError, match="4 query heads"):
        shard_spec(read_spec(model), ParallelContext(0, 3))
    spec = read_spec(tiny_model("gemma4-26b", tmp_path))
    part = shard_spec(spec, ParallelContext(1, 4))
    assert [mixer.heads for mixer in part.attentions] == [(1, 1, 32), (1, 1, 32), (1, 1, 64)] * 2
    counts = iter((3, 2, 5) * 2)
    with pytest.raises(ConfigError, match="does not divide the model's 3 key/value heads, 5 key/value heads"):
        shard_spec(spec.with_mixers(lambda mixer: replace(mixer, num_kv_heads=next(counts))), ParallelContext(0, 2))
    with pytest.raises(ConfigError, match="1 to 8"):
        make_engine(model, tensor_parallel_size=9)


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_make_up_the_whole(model, size):
    spec = read_spec(model)
    whole = decoder_parameters(spec, AsStored())
    options = {"ignored": frozenset(), "dtype": torch.float32, "device": torch.device("cpu")}
    for source in (CheckpointWeights(model), DummyWeights(0)):
        full = source.load(whole, **options)
        ranks = [ParallelContext(rank, size) for rank in range(size)]
        parts = [source.load(shard_parameters(whole, spec, rank), **options) for rank in ranks]
        for key in ("embedding", "lm_head"):
            assert torch.equal(torch.cat([part[key] for part in parts]), full[key])
        for key in ("layers.0.out.weight", "layers.0.down.weight"):
            assert torch.equal(torch.cat([part[key] for part in parts], dim=1), full[key])
        own = shard_spec(spec, ranks[0])
        rows = own.num_heads * spec.head_dim
        q = torch.cat([part["layers.0.qkv.weight"][:rows] for part in parts])
        assert torch.equal(q, full["layers.0.qkv.weight"][: spec.num_heads * spec.head_dim])
        k = [part["layers.0.qkv.bias"][rows : rows + own.num_kv_heads * spec.head_dim] for part in parts]
        # with more ranks than key/value heads neighbours hold the same head
        distinct = k[:: max(1, size // spec.num_kv_heads)]
        first = spec.num_heads * spec.head_dim
        expected = full["layers.0.qkv.bias"][first : first + spec.num_kv_heads * spec.head_dim]
        assert torch.equal(torch.cat(distinct), expected)
        assert torch.equal(parts[-1]["final_norm"], full["final_norm"])


@pytest.mark.long
def test_a_worker_runs_nothing_from_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    worker = tensor_parallel._start_worker(EngineConfig(device="cuda:99"), 1, 2, str(tmp_path / "store"))
    worker.process.wait(60)
    assert "cuda:99" in worker.obituary()
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
@pytest.mark.parametrize("family", slow_but(("gemma4-26b",), ("gemma4-e2b", "gemma4-26b")))
def test_two_ranks_release_the_blocks_out_of_a_window(family, tmp_path, close):
    """Heads by kind of layer are split or shared; K = V, layers that read others, inputs of layers, experts beside."""
    path = tiny_model(family, tmp_path, sliding_window=12)
    config = {"num_kvcache_blocks": 60, "block_size": 4, "max_model_len": 120}
    prompts = ragged_prompts(4)
    alone, split = make_engine(path, **config), close(make_engine(path, tensor_parallel_size=2, **config))
    assert run(split, prompts, PARAMS[0]) == run(alone, prompts, PARAMS[0])
    assert split.model.weight_bytes < 0.7 * alone.model.weight_bytes


# ---------------------------------------------------------------------- the end of a group

REPEATS = 5
LONG_WAIT_S = COLLECTIVE_TIMEOUT.total_seconds() / 2  # nothing but a hang takes so long
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
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


def two_ranks(path):
    return make_engine(path, tensor_parallel_size=2, num_kvcache_blocks=20)


def ten_steps(engine):
    for i, prompt in enumerate(ragged_prompts(3)):
        engine.add_request(str(i), prompt, TEN)
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
    _, process, children = writing(tmp_path, 200, "--max-tokens", "8")
    assert len(children) == 1
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    errors = process.communicate(timeout=LONG_WAIT_S)[1]
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "out.jsonl.partial").read_text().count("\n") > 3
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
