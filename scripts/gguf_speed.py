"""How fast GGUF files run here and by llama.cpp: python scripts/gguf_speed.py --llama-python VENV/bin/python

VENV is a virtual environment with llama-cpp-python. Writes Qwen3 models with random weights (Q4_K_M: Q4_K with Q6_K
where llama-quantize puts it; Q8_0), loads each by both programs and lets them serve the same prompts in turns: token
ids, greedy, no end. Prints the median seconds of each, and how many times those of pagedcli llama.cpp takes, by the
clock and by processor time. Needs the packages of the tests; nothing else should run meanwhile. With --without-llama
only pagedcli runs. Takes about five minutes on two cores.

--shape gpt-oss-20b --types MXFP4: experts in MXFP4 and all else in Q8_0, as in the published 12 GB; the programs
run one after the other, and each needs 14 GB of memory.

--shape deepseek-v2-lite-3: three of its 27 layers, one with an MLP and two with experts. llama.cpp takes queries
without a rank only from files of 26 or 27 layers, so these have rank 1,536, as DeepSeek-V2's.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# name -> sequences, prompt tokens, new tokens, most rounds
WORKLOADS = {
    "1 sequence": (1, 128, 64, 3),
    "8 sequences": (8, 64, 64, 3),
    "32 sequences": (32, 64, 32, 2),
    "W3: 16 prompts of 512": (16, 512, 8, 1),
}
MOST_SEQS, MOST_TOKENS = 32, 576  # of a sequence
# hidden size, layers, heads, heads of K and V, head size, inner size of the MLP, vocabulary
SHAPES = {
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
    "tiny": (256, 4, 4, 2, 64, 512, 2048),
    "gpt-oss-20b": (2880, 24, 64, 8, 64, 2880, 201088),
    "gpt-oss-tiny": (256, 4, 4, 2, 64, 256, 2048),
    "deepseek-v2-lite-3": (2048, 3, 16, 1, 576, 10944, 102400),
    "deepseek-tiny": (256, 2, 4, 1, 576, 256, 2048),
}
EXPERTS = {"gpt-oss-20b": (32, 4), "gpt-oss-tiny": (4, 2)}  # of a layer, and of a token
# layers, the first of them with an MLP, experts of a layer, of a token and shared, their inner size, rank of queries
LATENTS = {"deepseek-v2-lite-3": (3, 64, 6, 2, 1408, 1536), "deepseek-tiny": (2, 4, 2, 1, 256, 256)}
LATENT_SIZES = (512, 64, 128, 128)  # rank of latents, numbers of the rotary key, of the rest of a query, of V
Prompts = list[list[int]]


def types_of(kind: str, layers: int) -> Callable[[str], str]:
    """The type of a tensor by its name, as llama-quantize mixes them."""

    def type_of(name: str) -> str:
        if kind != "Q4_K_M":
            return kind
        if name == "token_embd.weight":
            return "Q6_K"
        layer, eighth = int(name.split(".")[1]), max(1, layers // 8)
        more_bits = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        return "Q6_K" if more_bits and ("attn_v" in name or "ffn_down" in name) else "Q4_K"

    return type_of


def writer_of(path: Path, architecture: str, shape: str, value_dim: int | None = None) -> Any:
    """A writer of a file, with the sizes of a shape."""
    import gguf

    width, layers, heads, kv_heads, head_dim, inner, vocabulary = SHAPES[shape]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(40960)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(value_dim or head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    return writer


def write_gpt_oss(path: Path, shape: str, kind: str) -> None:
    """A gpt-oss file with random blocks: experts of type `kind`, all else Q8_0. Layers are equal: memory holds one."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import gguf
    from gguf_files import random_blocks

    width, layers, heads, kv_heads, head_dim, inner, vocabulary = SHAPES[shape]
    (num_experts, num_picked), rng = EXPERTS[shape], np.random.default_rng(0)
    writer = writer_of(path, "gpt-oss", shape)
    writer.add_sliding_window(128)
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(num_picked)
    writer.add_expert_feed_forward_length(inner)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)

    def add(name: str, rows: int, columns: int, each: str = "Q8_0", experts: int = 0) -> None:
        type_, blocks = gguf.GGMLQuantizationType[each], []
        for _ in range(experts or 1):
            blocks.append(random_blocks(type_, rows, columns, rng, 0.02))
        weight = np.stack(blocks) if experts else blocks[0]
        bias = np.zeros((experts, rows) if experts else rows, np.float32)
        for layer in range(layers):
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight, raw_dtype=type_)
            writer.add_tensor(f"blk.{layer}.{name}.bias", bias)

    for name in ("token_embd", "output"):
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", random_blocks(q8_0, vocabulary, width, rng, 0.02), raw_dtype=q8_0)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    add("attn_q", heads * head_dim, width)
    add("attn_k", kv_heads * head_dim, width)
    add("attn_v", kv_heads * head_dim, width)
    add("attn_output", width, heads * head_dim)
    for name, (rows, columns) in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
        add(f"ffn_{name}_exps", rows, columns, kind, num_experts)
    router = rng.standard_normal((num_experts, width), np.float32) * 0.02
    for layer in (f"blk.{i}." for i in range(layers)):
        for norm in ("attn_norm", "post_attention_norm"):
            writer.add_tensor(f"{layer}{norm}.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{layer}attn_sinks.weight", np.zeros(heads, np.float32))
        writer.add_tensor(f"{layer}ffn_gate_inp.weight", router)
        writer.add_tensor(f"{layer}ffn_gate_inp.bias", np.zeros(num_experts, np.float32))
    finish(writer)


def write_deepseek(path: Path, shape: str, kind: str) -> None:
    """A deepseek2 file with random blocks of type `kind`. Layers with experts are equal: memory holds one."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import gguf
    from gguf_files import random_blocks

    width, layers, heads, _, _, inner, vocabulary = SHAPES[shape]
    _, num_experts, num_picked, num_shared, each_inner, query_rank = LATENTS[shape]
    rank, rope, nope, value = LATENT_SIZES
    type_, rng = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    writer = writer_of(path, "deepseek2", shape, rank)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(num_picked)
    writer.add_expert_shared_count(num_shared)
    writer.add_expert_feed_forward_length(each_inner)
    writer.add_expert_weights_scale(1.0)
    writer.add_q_lora_rank(query_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rope)

    def add(name: str, rows: int, columns: int, count: int = 0, among: range = range(layers)) -> None:
        blocks = [random_blocks(type_, rows, columns, rng, 0.02) for _ in range(count or 1)]
        weight = np.stack(blocks) if count else blocks[0]
        for layer in among:
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight, raw_dtype=type_)

    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", random_blocks(type_, vocabulary, width, rng, 0.02), raw_dtype=type_)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    add("attn_q_a", query_rank, width)
    add("attn_q_b", heads * (nope + rope), query_rank)
    add("attn_kv_a_mqa", rank + rope, width)
    add("attn_k_b", rank, nope, heads)
    add("attn_v_b", value, rank, heads)
    add("attn_output", width, heads * value)
    mixtures, shared = range(1, layers), num_shared * each_inner
    for part in ("gate", "up", "down"):
        parts = {
            "": (inner, 0, range(1)),
            "_exps": (each_inner, num_experts, mixtures),
            "_shexp": (shared, 0, mixtures),
        }
        for suffix, (size, count, among) in parts.items():
            shape_of = (width, size) if part == "down" else (size, width)
            add(f"ffn_{part}{suffix}", *shape_of, count, among)
    norms = {"attn_norm": width, "ffn_norm": width, "attn_q_a_norm": query_rank, "attn_kv_a_norm": rank}
    for layer in range(layers):
        for norm, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(size, np.float32))
    router = rng.standard_normal((num_experts, width), np.float32) * 0.02
    for layer in mixtures:
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    finish(writer)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, shape: str, kind: str) -> None:
    """A file with random blocks: Qwen3, or of a shape with experts gpt-oss or DeepSeek-V2."""
    if shape in EXPERTS or shape in LATENTS:
        (write_gpt_oss if shape in EXPERTS else write_deepseek)(path, shape, kind)
        return
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import gguf
    from gguf_files import random_blocks

    width, layers, heads, kv_heads, head_dim, inner, vocabulary = SHAPES[shape]
    writer, rng = writer_of(path, "qwen3", shape), np.random.default_rng(0)
    norms = {"attn_norm": width, "ffn_norm": width, "attn_q_norm": head_dim, "attn_k_norm": head_dim}
    matrices = {
        "attn_q": (heads * head_dim, width),
        "attn_k": (kv_heads * head_dim, width),
        "attn_v": (kv_heads * head_dim, width),
        "attn_output": (width, heads * head_dim),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    blocks = [f"blk.{i}." for i in range(layers)]
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for name, size in ((block + name, size) for block in blocks for name, size in norms.items()):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    all_matrices = {"token_embd": (vocabulary, width)}
    all_matrices |= {block + name: size for block in blocks for name, size in matrices.items()}
    type_of = types_of(kind, layers)
    for name, (rows, columns) in all_matrices.items():
        each = gguf.GGMLQuantizationType[type_of(f"{name}.weight")]
        writer.add_tensor(f"{name}.weight", random_blocks(each, rows, columns, rng, 0.02), raw_dtype=each)
    finish(writer)


# ---------------------------------------------------------------------- the two programs


def pagedcli_generate(path: str, threads: int) -> Callable[[Prompts, int], Prompts]:
    from pagedcli import LLM, SamplingParams

    llm = LLM(
        path,
        max_num_seqs=MOST_SEQS,
        max_model_len=MOST_TOKENS,
        enable_prefix_caching=False,
        num_gpu_blocks_override=2 * MOST_SEQS * MOST_TOKENS // 16,  # layers with a window hold blocks of their own
    )

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def llama_generate(path: str, threads: int) -> Callable[[Prompts, int], Prompts]:
    """Greedy batches by llama.cpp's own calls; a sequence has a part of the cache to itself."""
    import llama_cpp as c

    quiet = c.llama_log_callback(lambda *_: None)
    c.llama_log_set(quiet, ctypes.c_void_p(0))
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_seq_max = MOST_SEQS * MOST_TOKENS, MOST_SEQS
    params.n_batch = params.n_ubatch * 4
    params.n_threads = params.n_threads_batch = threads
    context = c.llama_init_from_model(model, params)
    size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(params.n_batch, 0, 1)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Tokens with position, sequence and whether the next one is wanted -> the next ones."""
        wanted = []
        for start in range(0, len(tokens), params.n_batch):
            part = tokens[start : start + params.n_batch]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, ends) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, ends
            assert c.llama_decode(context, batch) == 0, "llama_decode failed"
            for i in (i for i, each in enumerate(part) if each[3]):
                logits = c.llama_get_logits_ith(context, i)
                wanted.append(int(np.ctypeslib.as_array(logits, (size,)).argmax()))
        return wanted

    def generate(prompts: Prompts, num_new: int) -> Prompts:
        c.llama_memory_clear(c.llama_get_memory(context), False)
        lengths = [len(prompt) for prompt in prompts]
        places = [
            (token, i, n, i == lengths[n] - 1) for n, prompt in enumerate(prompts) for i, token in enumerate(prompt)
        ]
        steps = [decode(places)]
        for step in range(num_new - 1):
            steps.append(decode([(token, lengths[n] + step, n, True) for n, token in enumerate(steps[-1])]))
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    return generate


PROGRAMS = {"pagedcli": pagedcli_generate, "llama.cpp": llama_generate}


def serve(program: str, path: str, threads: int) -> None:
    """A line of prompts in, a line of seconds out."""
    answers = os.fdopen(os.dup(1), "w")  # what programs print does not come between
    os.dup2(2, 1)
    start = time.perf_counter()
    generate = PROGRAMS[program](path, threads)
    print(json.dumps({"load": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        clock, processor = time.perf_counter(), time.process_time()
        tokens = generate(job["prompts"], job["new"])
        result = {"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor}
        assert [len(each) for each in tokens] == [job["new"]] * len(tokens), "an answer is too short"
        print(json.dumps(result), file=answers, flush=True)


class Program:
    """One of the programs with a model loaded, in a process of its own."""

    def __init__(self, name: str, python: str, path: Path, threads: int) -> None:
        command = [python, __file__, "--serve", name, "--file", str(path), "--threads", str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.load_seconds = self._answer()["load"]

    def run(self, prompts: Prompts, num_new: int) -> dict[str, float]:
        assert self._process.stdin is not None, "a pipe"
        print(json.dumps({"prompts": prompts, "new": num_new}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the program ended; its message is above")
        answer: dict[str, float] = json.loads(line)
        return answer


# ---------------------------------------------------------------------- measured in turns


@contextmanager
def programs(pythons: dict[str, str], options: argparse.Namespace, path: Path) -> Iterator[dict[str, Program]]:
    running: dict[str, Program] = {}
    try:
        for name, python in pythons.items():
            running[name] = Program(name, python, path, options.threads)
        yield running
    finally:
        for each in running.values():
            each.close()


def measure(running: dict[str, Program], name: str, rounds: int, vocabulary: int) -> None:
    """Prints a line: medians over the rounds, and ratios."""
    num_seqs, num_prompt, num_new, most = WORKLOADS[name]
    rng = random.Random(name)
    results: dict[str, list[dict[str, float]]] = {program: [] for program in running}
    for _ in range(min(rounds, most)):
        prompts = [[rng.randrange(10, min(10000, vocabulary)) for _ in range(num_prompt)] for _ in range(num_seqs)]
        for program, each in running.items():
            results[program].append(each.run(prompts, num_new))
    medians = {
        (program, of): statistics.median(result[of] for result in found)
        for program, found in results.items()
        for of in ("seconds", "processor")
    }
    line = f"  {name:22}" + "".join(f"{program} {medians[program, 'seconds']:7.2f} s   " for program in running)
    if len(running) == 2:
        ratios = [medians["llama.cpp", of] / medians["pagedcli", of] for of in ("seconds", "processor")]
        line += f"{ratios[0]:.2f} times, {ratios[1]:.2f} by processor time"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="the Python of an environment with llama-cpp-python")
    parser.add_argument("--without-llama", action="store_true", help="measure pagedcli alone")
    parser.add_argument("--types", nargs="+", default=["Q4_K_M", "Q8_0"], help="any type that gguf names, or Q4_K_M")
    parser.add_argument("--workloads", nargs="+", type=int, default=[1, 2, 3, 4], metavar="N", help="of the four")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3, help="at most; long workloads have fewer")
    parser.add_argument("--keep", type=Path, help="a folder for the files, which are reused")
    parser.add_argument("--serve", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.file, options.threads)
        return
    if options.llama_python is None and not options.without_llama:
        parser.error("name an environment with --llama-python, or give --without-llama")
    vocabulary, pythons = SHAPES[options.shape][-1], {"pagedcli": sys.executable}
    if options.llama_python is not None:
        pythons["llama.cpp"] = options.llama_python
    together = [{name: python} for name, python in pythons.items()] if options.shape in EXPERTS else [pythons]
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types:
            (options.keep or Path(folder)).mkdir(parents=True, exist_ok=True)
            path = (options.keep or Path(folder)) / f"{options.shape}-{kind}.gguf"
            if not path.exists():
                write_model(path, options.shape, kind)
            for of_these in together:
                with programs(of_these, options, path) as running:
                    loads = ", ".join(f"{name} loads in {each.load_seconds:.1f} s" for name, each in running.items())
                    print(
                        f"{kind}, {path.stat().st_size / 2**20:,.0f} MiB, {options.threads} threads; {loads}",
                        flush=True,
                    )
                    for each in running.values():
                        each.run([[10, 11, 12]] * 4, 4)
                    for number in options.workloads:
                        measure(running, list(WORKLOADS)[number - 1], options.rounds, vocabulary)


if __name__ == "__main__":
    main()
