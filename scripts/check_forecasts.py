"""Predicted against measured: 20 jobs of three models, each forecast as `plan` does and then run as `generate` does.
python scripts/check_forecasts.py [--seconds 8] [--models builtin,dense,moe] [--only chat,"short rows"] [--around]

The models are the built-in one, the shape of Qwen3-0.6B and a mixture of experts, the last two with random weights
(those of the mixture such that each token picks its own experts); nothing is downloaded. Each model is calibrated
first. Jobs have short and long prompts, shared prefixes, sampled tokens, several samples, and pools that force
preemptions; the number of rows is chosen so that a job takes about --seconds. Prints both times, how far they are
apart, and whether steps, hits, preemptions and peak blocks are equal. Exit code 1 if counts differ, or if the median
error is 10 % or more, or the largest 25 % or more (with --around, of the second prediction), or if more than one job in
20 is outside of its likely range. Jobs that other work on the machine disturbed are marked "busy" and count for nothing
but their counts.

--around also predicts each job by calibrations right before and after it: on a machine that is shared with others, and
whose speed changes within minutes, this tells errors of the model of a step from those changes.

--processor-time compares times of one thread that other work does not change much, for machines that are busy.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from pagedcli.answers.time import Forecast
from pagedcli.answers.time import time as forecast
from pagedcli.batch.prompts import BatchOptions, open_prompts, open_source, open_tokenizer
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import StreamSink
from pagedcli.bench.calibration import calibrate, calibration_config
from pagedcli.bench.spread import BusyWatch
from pagedcli.bench.throughput import shape_folder
from pagedcli.config import BUILTIN_MODEL, Config, EngineConfig, LoadedConfig, RunConfig
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepTime
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.simulation.sources import read_prompts

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": 512,
    "intermediate_size": 1536, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False, "attention_bias": False,
    "hidden_act": "silu", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "eos_token_id": 1,
    "bos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Rows alike but for their lengths, which are drawn from the upper half of these. Tokens."""

    name: str
    model: str
    prompt: int
    output: int
    shared: int = 0  # tokens that all prompts begin with
    num_seqs: int = 64
    pool: int | None = None  # blocks; None: the default
    temperature: float = 0.0
    n: int = 1  # samples of each row
    reorder: str = "none"


JOBS = [
    Job("short rows", "builtin", 24, 16, num_seqs=256),
    Job("chat", "builtin", 200, 120, temperature=1.0),
    Job("long answers", "builtin", 16, 600, num_seqs=16),
    Job("long prompts", "builtin", 1500, 30),
    Job("shared prefix", "builtin", 40, 60, shared=800),
    Job("many preemptions", "builtin", 100, 200, num_seqs=32, pool=150),
    Job("samples", "builtin", 60, 80, temperature=1.0, n=4, num_seqs=32),
    Job("sorted", "builtin", 200, 40, shared=200, reorder="prefix", pool=600),
    Job("short rows", "dense", 24, 8),
    Job("chat", "dense", 120, 40, num_seqs=32),
    Job("long prompts", "dense", 700, 8),
    Job("one after the other", "dense", 60, 30, num_seqs=1),
    Job("shared prefix", "dense", 30, 30, shared=400, num_seqs=32),
    Job("many preemptions", "dense", 60, 60, num_seqs=16, pool=60),
    Job("short rows", "moe", 24, 16),
    Job("chat", "moe", 200, 120, temperature=1.0, num_seqs=32),
    Job("long answers", "moe", 16, 300, num_seqs=8),
    Job("long prompts", "moe", 1500, 16),
    Job("shared prefix", "moe", 40, 60, shared=800, num_seqs=32),
    Job("many preemptions", "moe", 100, 100, num_seqs=32, pool=120),
]


@dataclass
class Model:
    """A calibrated model."""

    config: EngineConfig
    time: StepTime


def model_config(name: str, folder: Path) -> EngineConfig:
    if name == "builtin":
        return EngineConfig(model=BUILTIN_MODEL)
    if name == "dense":
        return EngineConfig(model=str(shape_folder("qwen3-0.6b")), load_format="dummy", max_model_len=4096)
    write_experts(folder)
    return EngineConfig(model=str(folder))


def write_experts(folder: Path) -> None:
    """The mixture of experts with random weights. Its embeddings are much larger than what layers add to them, so that
    each token picks its own experts, as in a trained model, and leads to another token: where all weights are drawn
    alike, the mean of the earlier tokens prevails, sequences with a common beginning generate the same token, and steps
    read few experts."""
    (folder / "config.json").write_text(json.dumps(MOE))
    hidden, head, inner = MOE["hidden_size"], MOE["head_dim"], MOE["moe_intermediate_size"]
    query, key = MOE["num_attention_heads"] * head, MOE["num_key_value_heads"] * head
    sizes = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
             "self_attn.o_proj": (hidden, query), "mlp.gate": (MOE["num_experts"], hidden)}  # fmt: skip
    for expert in range(MOE["num_experts"]):
        sizes |= {f"mlp.experts.{expert}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        sizes[f"mlp.experts.{expert}.down_proj"] = hidden, inner
    draw = torch.Generator().manual_seed(0)

    def random_weight(*size: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(*size, generator=draw)).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": random_weight(MOE["vocab_size"], hidden, scale=1.0),
               "lm_head.weight": random_weight(MOE["vocab_size"], hidden, scale=0.02),
               "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}  # fmt: skip
    for layer in range(MOE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": head,
                 "self_attn.k_norm": head}  # fmt: skip
        weights |= {f"{prefix}.{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
        weights |= {f"{prefix}.{name}.weight": random_weight(*size, scale=0.02) for name, size in sizes.items()}
    save_file(weights, folder / "model.safetensors")


def calibrated(config: EngineConfig, clock_ns) -> Model:
    folder = model_folder(config)
    decision = decide(config, read_spec(folder), this_machine())
    tokenizer = open_tokenizer(Config(engine=config), folder)
    with LLMEngine(calibration_config(decision), clock_ns=clock_ns) as engine:
        return Model(config, calibrate(engine, tokenizer))


def write_rows(job: Job, num_rows: int, path: Path, vocab_size: int) -> None:
    draw = random.Random(0)
    shared = [draw.randrange(8, vocab_size) for _ in range(job.shared)]
    with path.open("w") as file:
        for _ in range(num_rows):
            own = [draw.randrange(8, vocab_size) for _ in range(draw.randint(job.prompt // 2, job.prompt))]
            row = {"prompt": shared + own, "max_tokens": draw.randint(max(1, job.output // 2), job.output),
                   "ignore_eos": True, "temperature": job.temperature, "n": job.n}  # fmt: skip
            file.write(json.dumps(row) + "\n")


def job_config(job: Job, config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, max_num_seqs=job.num_seqs, num_kvcache_blocks=job.pool)


def predicted(job: Job, model: Model, path: Path) -> Forecast:
    config = job_config(job, model.config)
    folder = model_folder(config)
    plan = decide(config, read_spec(folder), this_machine()).expected_plan
    loaded = LoadedConfig(Config(engine=config), {})
    workload = read_prompts(str(path), open_prompts(loaded, str(path), folder, plan.limits))
    return forecast(workload, plan, model.time, reorder=job.reorder)


def measured(job: Job, model: Model, path: Path, clock_ns) -> tuple[float, dict[str, int]]:
    """Seconds without loading, and the counts."""
    config = job_config(job, model.config)
    tokenizer = open_tokenizer(Config(engine=config), model_folder(config))
    options = BatchOptions(Config(sampling=SamplingParams(), run=RunConfig(reorder=job.reorder)))
    with LLMEngine(config, clock_ns=clock_ns) as engine:
        engine.add_request("warm-up", [5] * 4, SamplingParams(max_tokens=2))
        while engine.has_unfinished_requests():
            engine.step()
        engine.stats.num_steps = engine.stats.num_cached_tokens = 0
        rows = RowWriter(tokenizer, config.model, "check", 0)
        run = BatchRun(
            engine, tokenizer, open_source(str(path)), StreamSink(io.BytesIO(), order="input"), rows, options
        )
        stats = run.run().stats
        facts = stats.facts
        counts = {"steps": facts.num_steps, "hits": facts.num_cached_tokens, "preemptions": facts.num_preemptions,
                  "peak blocks": facts.peak_used_blocks}  # fmt: skip
        return stats.elapsed_s, counts


def check(
    job: Job, model: Model, folder: Path, options: argparse.Namespace, clock_ns
) -> tuple[list[float], bool, bool | None]:
    """Predict and run a job. Returns how far the prediction was off, then that of the calibrations right before and
    after the job if they are wanted, whether the counts were equal, and whether the time was in the likely range; None:
    other work disturbed the run."""
    path, spec = folder / "rows.jsonl", read_spec(model_folder(model.config))
    write_rows(job, 8, path, spec.vocab_size)
    each = (predicted(job, model, path).seconds or 1.0) / 8
    seconds = options.seconds
    num_rows = max(2, min(20_000, round(seconds / each)))
    for _ in range(2):  # many rows at once take less time each
        write_rows(job, num_rows, path, spec.vocab_size)
        found = predicted(job, model, path)
        assert found.seconds is not None, "the model is calibrated"
        num_rows = max(2, min(20_000, round(num_rows * seconds / found.seconds)))
    around = [calibrated(model.config, clock_ns)] if options.around else []
    watch = BusyWatch()
    took_s, counts = measured(job, model, path, clock_ns)
    busy = watch.read()
    expected = {"steps": found.num_steps, "hits": found.num_cached_tokens, "preemptions": found.num_preemptions,
                "peak blocks": found.peak_used_blocks}  # fmt: skip
    wrong = [f"{name} {expected[name]:,} and {counts[name]:,}" for name in counts if counts[name] != expected[name]]
    times_s = [found.seconds]
    if options.around:
        around.append(calibrated(model.config, clock_ns))
        times_s.append(statistics.mean(predicted(job, each, path).seconds or 0.0 for each in around))
    errors = [each_s / took_s - 1 for each_s in times_s]
    shown = "  ".join(f"{error:+7.1%}" for error in errors)
    is_disturbed = busy is not None and busy.disturbs
    others = f", busy: {busy.others:.0%}" if is_disturbed else ""
    equal = "; ".join(wrong) or "counts equal"
    low_s, high_s = found.low, found.high
    is_likely = low_s <= took_s <= high_s
    print(
        f"{job.model:8} {job.name:20} {found.num_requests:6,} rows  predicted {found.seconds:7.2f} s"
        f"  took {took_s:7.2f} s  {shown}  {counts['preemptions']:5,} preemptions  {equal}{others}"
        f"{'' if is_likely else f', not within {low_s:.2f} to {high_s:.2f} s'}",
        flush=True,
    )
    return [abs(error) for error in errors], not wrong, None if is_disturbed else is_likely


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of a job, roughly")
    parser.add_argument("--models", default="builtin,dense,moe", help="any of builtin, dense, moe")
    parser.add_argument("--only", help="jobs, by their names, with commas")
    parser.add_argument("--around", action="store_true", help="also predict by calibrations before and after each job")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, instead of the clock")
    options = parser.parse_args()
    clock_ns = time.perf_counter_ns
    if options.processor_time:
        torch.set_num_threads(1)
        clock_ns = time.process_time_ns
    jobs = [job for job in JOBS if options.only is None or job.name in options.only.split(",")]
    errors: list[list[float]] = []
    all_equal, likely = True, list[bool]()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
        for name in options.models.split(","):
            folder = Path(scratch) / name
            folder.mkdir()
            model = calibrated(model_config(name, folder), clock_ns)
            for job in (job for job in jobs if job.model == name):
                off, is_equal, is_likely = check(job, model, folder, options, clock_ns)
                all_equal &= is_equal
                if is_likely is not None:
                    likely.append(is_likely)
                    errors.append(off)
    counts, good = "equal" if all_equal else "different", False
    for off, calibration in zip(zip(*errors, strict=True), ("of its model", "before and after each job"), strict=False):
        median, largest = statistics.median(off), max(off)
        good = all_equal and median < 0.10 and largest < 0.25 and likely.count(False) <= len(off) / 20
        print(
            f"{len(off)} undisturbed jobs, calibration {calibration}: median error {median:.1%}, largest {largest:.1%}"
        )
    print(f"counts {counts}; {likely.count(False)} of {len(likely)} undisturbed jobs outside of their range")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
