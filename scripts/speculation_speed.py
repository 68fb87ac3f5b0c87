"""Speed with guessed tokens over that without: python scripts/speculation_speed.py [--quantization int8]

The guesses come from an oracle, which knows what a run without guesses has generated and is wrong at a share of the
tokens. One engine runs all of it in turns: without guesses, then with each share. The figures are processor time
without guesses over that with them, which other work on the machine disturbs least, or with --wall wall time: medians
of the turns. `without again` is that ratio of two runs without guesses: as far as it is from 1, so far may all be.
With --drafts head the model has random weights in the shape of Qwen3.5-0.8B with its MTP head, or with another
vocabulary: what the head guesses takes its time, and is replaced by what the oracle knows.
`deciding` is the most that looking for guesses and choosing among them took of the steps' time, in any turn and share.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path

from pagedcli.bench.throughput import shape_folder
from pagedcli.config import BUILTIN_MODEL, EngineConfig
from pagedcli.core.drafting import Drafting, EveryGuess, GuessesThatPay, Room
from pagedcli.core.drafts import Draft, Drafter, HeadDrafter, NgramDrafter
from pagedcli.core.sequence import Sequence
from pagedcli.events import DraftSource
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from oracle import Oracle

PROMPT_TOKENS = 16
QWEN_WITH_HEAD = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1024,
    "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_value_head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 4096, "eos_token_id": 0, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
Answers = dict[tuple[str, int], list[int]]


class KnowingHead(HeadDrafter):
    """As many guesses as the head made, of an oracle."""

    def __init__(self, oracle: Drafter) -> None:
        super().__init__(one_more=False)
        self._oracle = oracle

    def draft(self, seq: Sequence, most: int) -> Draft | None:
        if not seq.ahead or (found := self._oracle.draft(seq, min(most, len(seq.ahead)))) is None:
            return None
        return Draft(found.token_ids, "mtp")


class Clocked:
    """A Drafting, and the seconds of its thread that deciding took."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafter, self.head, self.head_pauses = drafting.drafter, drafting.head, drafting.head_pauses
        self._drafting, self.seconds = drafting, 0.0

    def choose(self, seqs: Items[Sequence], room: Room) -> list[tuple[int, Draft]]:
        start = time.thread_time()
        chosen = self._drafting.choose(seqs, room)
        self.seconds += time.thread_time() - start
        return chosen

    def checked(self, seq: Sequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        start = time.thread_time()
        self._drafting.checked(seq, source, num_drafted, num_accepted)
        self.seconds += time.thread_time() - start

    def ended(self, seq: Sequence) -> None:
        start = time.thread_time()
        self._drafting.ended(seq)
        self.seconds += time.thread_time() - start

    def ahead(self, seqs: Items[Sequence], most: Callable[[], list[int]]) -> list[int] | None:
        start = time.thread_time()
        counts = self._drafting.ahead(seqs, most)
        self.seconds += time.thread_time() - start
        return counts

    def step_took(self, step_ns: int, head_ns: int = 0) -> None:
        start = time.thread_time()
        self._drafting.step_took(step_ns, head_ns)
        self.seconds += time.thread_time() - start


def generate(engine: LLMEngine, num_rows: int, num_tokens: int, first: int) -> tuple[Answers, float, float]:
    """The tokens of rows that all start at once, and the seconds that their steps took: of the processor, and all.
    `first`: number of the first row, which its prompt and its random numbers depend on."""
    for row in range(first, first + num_rows):
        prompt = [10 + (row * 37 + place * place) % 400 for place in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=1, max_tokens=num_tokens, ignore_eos=True, seed=row)
        engine.add_request(str(row), prompt, params)
    answers: Answers = {}
    start, start_cpu = time.perf_counter(), time.process_time()
    while engine.has_unfinished_requests():
        answers |= {(each.request_id, 0): list(each.samples[0].token_ids) for each in engine.step()}
    return answers, time.process_time() - start_cpu, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help="a built-in shape with random weights, builtin, or a folder"
    )
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32], help="rows at once")
    parser.add_argument("--wrong", type=float, nargs="+", default=[0, 0.3, 0.7, 1], help="shares of wrong tokens")
    parser.add_argument(
        "--speculation", choices=["auto", "ngram"], default="auto", help="ngram: every guess is checked"
    )
    parser.add_argument(
        "--drafts", choices=["oracle", "text", "head"], default="oracle", help="text: real guesses, no shares"
    )
    parser.add_argument("--vocab-size", type=int, default=248320, help="with --drafts head")
    parser.add_argument("--num-state-slots", type=int, help="as many as rows: recurrent states see no guess")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--turns", type=int, default=3)
    clock = parser.add_mutually_exclusive_group()
    clock.add_argument("--wall", action="store_true", help="wall time, on an idle machine")
    clock.add_argument("--busy", action="store_true", help="what is guessed depends on processor time, too")
    options = parser.parse_args()
    if options.busy:  # of the steps and of the head
        time.perf_counter_ns = time.process_time_ns
    if options.drafts == "head":
        options.model = with_head(options.vocab_size)
    is_shape = options.model != BUILTIN_MODEL and not Path(options.model).is_dir()
    is_random = is_shape or options.drafts == "head"
    config = EngineConfig(
        model=str(shape_folder(options.model)) if is_shape else options.model,
        load_format="dummy" if is_random else "auto", quantization=options.quantization, device="cpu",
        dtype=options.dtype, enable_prefix_caching=False, speculation=options.speculation,
        max_model_len=PROMPT_TOKENS + options.tokens, max_num_seqs=max(16, 2 * max(options.rows)),
        num_state_slots=options.num_state_slots,
    )  # fmt: skip
    with LLMEngine(config, clock_ns=time.perf_counter_ns) as engine:
        assert engine.plan.no_drafts is None, engine.plan.no_drafts
        made = _maker(engine, options.speculation, knows_head=options.drafts == "head")
        generate(engine, 2, 8, 10**6)  # warm-up
        shares = [0.0] if options.drafts == "text" else options.wrong
        name = f"Qwen3.5-0.8B, vocabulary of {options.vocab_size}" if options.drafts == "head" else options.model
        print(f"{name}, {options.quantization or engine.plan.dtype}, {options.speculation}, {options.drafts}")
        print(
            "| rows at once | without again | "
            + " | ".join(f"{share:.0%} wrong" for share in shares)
            + " | right | deciding |"
        )
        print("|---|" + "---|" * (len(shares) + 3))
        for num_rows in options.rows:
            ratios: list[list[float]] = [[] for _ in shares]
            counts, again, deciding = [0, 0], list[float](), 0.0
            for turn in range(options.turns):
                first = turn * num_rows
                engine.scheduler.drafting = None
                known, *plain_s = generate(engine, num_rows, options.tokens, first)
                again.append(
                    plain_s[options.wall] / generate(engine, num_rows, options.tokens, first)[1 + options.wall]
                )
                for place, share in enumerate(shares):
                    drafter: Drafter = Oracle(known, wrong=share, seed=turn)
                    if options.drafts == "text":
                        drafter = NgramDrafter(one_more=options.speculation == "ngram")
                    engine.scheduler.drafting = clocked = Clocked(made(drafter))
                    before = engine.stats.num_drafted_tokens, engine.stats.num_accepted_tokens
                    start = time.thread_time()
                    found, *took_s = generate(engine, num_rows, options.tokens, first)
                    deciding = max(deciding, clocked.seconds / (time.thread_time() - start))
                    assert found == known, "guesses have changed the tokens"
                    ratios[place].append(plain_s[options.wall] / took_s[options.wall])
                    after = engine.stats.num_drafted_tokens, engine.stats.num_accepted_tokens
                    counts = [count + new - old for count, new, old in zip(counts, after, before, strict=True)]
            cells = " | ".join(f"{statistics.median(each):.2f}" for each in ratios)
            print(
                f"| {num_rows} | {statistics.median(again):.2f} | {cells} | {counts[1]:,} of {counts[0]:,} |"
                f" {deciding:.1%} |",
                flush=True,
            )


def with_head(vocab_size: int) -> str:
    """A folder with the config.json of a model with a head."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({**QWEN_WITH_HEAD, "vocab_size": vocab_size}), encoding="utf-8")
    return str(folder)


def _maker(engine: LLMEngine, speculation: str, *, knows_head: bool) -> Callable[[Drafter], Drafting]:
    if speculation == "ngram":
        return EveryGuess

    def make(drafter: Drafter) -> Drafting:
        head = KnowingHead(drafter) if knows_head else None
        drafter = Oracle({}) if knows_head else drafter
        return GuessesThatPay(drafter, clock_ns=engine.clock_ns, least_ns=engine.least_ns, head=head)

    return make


if __name__ == "__main__":
    main()
