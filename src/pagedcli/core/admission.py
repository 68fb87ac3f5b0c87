"""One rule for what a request may generate, and for which requests can never be served. Needs no torch."""

from collections.abc import Sequence as Ids

from pagedcli.core.beams import check_width
from pagedcli.core.limits import Limits
from pagedcli.errors import RequestError
from pagedcli.printable import plural
from pagedcli.sampling_params import SamplingParams


def admit(limits: Limits, prompt_token_ids: Ids[int], params: SamplingParams) -> int:
    """Return how many tokens a request may generate.

    Raises: RequestError if it can never be served.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("empty_prompt", "the prompt has no tokens")
    _check_ids(limits, prompt_token_ids, params)
    width = params.beam_width or 1
    check_width(limits, width, params)
    max_new_tokens = params.max_tokens
    if max_new_tokens is None:
        max_new_tokens = max(1, room_for(limits, num_prompt, width))
    if num_prompt + max_new_tokens > limits.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"{plural(num_prompt, 'prompt token')} and {max_new_tokens:,} to generate are over the model length of "
            f"{limits.max_model_len:,}",
            hint="shorten the prompt, lower max_tokens or raise --max-model-len",
        )
    needed = limits.tables.blocks_of_request(
        num_prompt,
        num_prompt + max_new_tokens - 1,
        width,
        chunk=limits.chunk_size,
        shares_prompt=shares_prompts(limits),
    )
    if limits.num_blocks is not None and needed > limits.num_blocks:
        raise RequestError(
            "kv_cache_exceeded",
            f"needs {plural(needed, 'block')} of {plural(limits.block_size, 'token')}, "
            f"the pool has {limits.num_blocks:,}",
            hint=f"lower {'beam_width or ' if width > 1 else ''}max_tokens, or enlarge the pool with --kv-cache-memory "
            "or --num-kvcache-blocks",
        )
    return max_new_tokens


def admit_scores(limits: Limits, context_token_ids: Ids[int], continuations: Ids[Ids[int]]) -> None:
    """Check a request for scores of continuations. Raises: RequestError if it can never be served."""
    num_context = len(context_token_ids)
    if num_context == 0:
        raise RequestError("empty_prompt", "the context has no tokens")
    if not continuations:
        raise RequestError("empty_continuation", "there are no continuations")
    _check_ids(limits, context_token_ids, SamplingParams())
    for index, token_ids in enumerate(continuations):
        if not token_ids:
            raise RequestError("empty_continuation", f"continuation {index} has no tokens")
        _check_ids(limits, token_ids, SamplingParams())
    index, longest = max(enumerate(map(len, continuations)), key=lambda each: each[1])
    num_tokens = num_context + longest - 1  # nothing follows the last token, so it is not computed
    if num_tokens > limits.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"{plural(num_context, 'context token')} and {longest:,} of continuation {index} are over the model length "
            f"of {limits.max_model_len:,} and 1",
            hint="shorten the context or raise --max-model-len",
        )
    needed = limits.tables.most_blocks(num_tokens, limits.chunk_size)
    if limits.num_blocks is not None and needed > limits.num_blocks:
        raise RequestError(
            "kv_cache_exceeded",
            f"needs {plural(needed, 'block')} of {plural(limits.block_size, 'token')}, "
            f"the pool has {limits.num_blocks:,}",
            hint="enlarge the pool with --kv-cache-memory or --num-kvcache-blocks",
        )


def room_for(limits: Limits, num_prompt: int, width: int) -> int:
    """Tokens that each of `width` sequences with a common prompt may generate; below 1 if none fits."""
    room = limits.max_model_len - num_prompt
    if limits.num_blocks is not None:
        tables = limits.tables
        shared = tables.prompt_blocks(num_prompt) if shares_prompts(limits) else 0
        own = (limits.num_blocks - shared) // width
        # the last generated token is never written to the cache
        room = min(room, tables.longest(shared + own, limits.chunk_size, limits.max_model_len) - num_prompt + 1)
    return room


def shares_prompts(limits: Limits) -> bool:
    """Whether sequences with a common prompt always find it in each other's blocks. With windows or recurrent state
    they do not after a preemption, as what they would continue from may be gone."""
    return limits.enable_prefix_caching and not limits.tables.has_windows and not limits.has_states


def _check_ids(limits: Limits, prompt_token_ids: Ids[int], params: SamplingParams) -> None:
    vocab_size = limits.vocab_size
    end = float("inf") if vocab_size is None else vocab_size
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= end:
        wrong = next(token_id for token_id in prompt_token_ids if not 0 <= token_id < end)
        known = "" if vocab_size is None else f" (0 to {vocab_size - 1})"
        raise RequestError("invalid_token_id", f"token id {wrong} is not in the vocabulary{known}")
    for token_id in params.logit_bias or ():
        if not 0 <= token_id < end:
            raise RequestError("invalid_token_id", f"logit_bias names {token_id}, which is not in the vocabulary")
