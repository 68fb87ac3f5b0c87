"""One rule for what a request may generate, and for which requests can never be served. Needs no torch."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass

from pagedcli.core.groups import TableShape
from pagedcli.core.plan import Plan
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The limits that a request must fit into."""

    max_model_len: int  # tokens, prompt and output
    block_size: int  # tokens
    num_blocks: int | None  # of the pool; None: unknown
    vocab_size: int | None  # None: unknown
    max_num_seqs: int | None = None  # that run at once; None: unknown
    max_num_batched_tokens: int | None = None  # of a step; None: unknown
    enable_prefix_caching: bool = True
    windows: tuple[int | None, ...] = (None,)  # of each group of layers
    chunk_size: int = 1  # most tokens of one sequence in a step

    @classmethod
    def of(cls, plan: Plan) -> "AdmissionLimits":
        """Those of an engine."""
        return cls(
            plan.max_model_len,
            plan.block_size,
            plan.num_blocks,
            plan.vocab_size,
            plan.max_num_seqs,
            plan.max_num_batched_tokens,
            plan.enable_prefix_caching,
            plan.windows,
            plan.chunk_size,
        )

    @property
    def tables(self) -> TableShape:
        """The block tables of a sequence."""
        return TableShape(self.block_size, self.windows)

    def num_blocks_for(self, num_prompt: int, num_tokens: int, width: int) -> int:
        """Blocks that sequences of num_tokens with a common prompt take at most."""
        return self.tables.blocks_of_request(
            num_prompt, num_tokens, width, chunk=self.chunk_size, shares_prompt=self.enable_prefix_caching
        )

    def room_for(self, num_prompt: int, width: int) -> int:
        """Tokens that each of `width` sequences with a common prompt may generate; below 1 if none fits."""
        room = self.max_model_len - num_prompt
        if self.num_blocks is not None:
            shares = width > 1 and self.enable_prefix_caching
            shared = self.tables.prompt_blocks(num_prompt) if shares else 0
            own = (self.num_blocks - shared) // width
            # the last generated token is never written to the cache
            room = min(room, self.tables.longest(shared + own, self.chunk_size, self.max_model_len) - num_prompt + 1)
        return room


def admit(prompt_token_ids: Ids[int], params: SamplingParams, limits: AdmissionLimits) -> int:
    """Return how many tokens a request may generate.

    Raises: RequestError if it can never be served.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("empty_prompt", "the prompt has no tokens")
    _check_ids(prompt_token_ids, params, limits.vocab_size)
    width = params.beam_width or 1
    _check_beams(width, params, limits)
    max_new_tokens = params.max_tokens
    if max_new_tokens is None:
        max_new_tokens = max(1, limits.room_for(num_prompt, width))
    if num_prompt + max_new_tokens > limits.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"{num_prompt} prompt tokens and {max_new_tokens} to generate are over the model length of "
            f"{limits.max_model_len}",
            hint="shorten the prompt, lower max_tokens or raise --max-model-len",
        )
    needed = limits.num_blocks_for(num_prompt, num_prompt + max_new_tokens - 1, width)
    if limits.num_blocks is not None and needed > limits.num_blocks:
        raise RequestError(
            "kv_cache_exceeded",
            f"needs {needed:,} blocks of {limits.block_size} tokens, the pool has {limits.num_blocks:,}",
            hint=f"lower {'beam_width or ' if width > 1 else ''}max_tokens, or enlarge the pool with --kv-cache-memory "
            "or --num-gpu-blocks-override",
        )
    return max_new_tokens


def _check_beams(width: int, params: SamplingParams, limits: AdmissionLimits) -> None:
    """All beams of a request are computed in the same step."""
    budget = limits.max_num_batched_tokens
    for name, limit in (("max_num_seqs", limits.max_num_seqs), ("max_num_batched_tokens", budget)):
        if limit is not None and 1 < width > limit:
            flag = f"--{name.replace('_', '-')}"
            raise RequestError(
                "invalid_parameter", f"beam_width is {width}, but {name} is {limit}", hint=f"raise {flag}"
            )
    num_ends = 1 + len(params.stop_token_ids or ())
    if params.beam_width is not None and limits.vocab_size is not None and (1 + num_ends) * width > limits.vocab_size:
        raise RequestError(
            "invalid_parameter", f"beam_width is {width}, for a vocabulary of {limits.vocab_size} tokens"
        )


def _check_ids(prompt_token_ids: Ids[int], params: SamplingParams, vocab_size: int | None) -> None:
    end = float("inf") if vocab_size is None else vocab_size
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= end:
        wrong = next(token_id for token_id in prompt_token_ids if not 0 <= token_id < end)
        known = "" if vocab_size is None else f" (0 to {vocab_size - 1})"
        raise RequestError("invalid_token_id", f"token id {wrong} is not in the vocabulary{known}")
    for token_id in params.logit_bias or ():
        if not 0 <= token_id < end:
            raise RequestError("invalid_token_id", f"logit_bias names {token_id}, which is not in the vocabulary")
