"""One rule for what a request may generate, and for which requests can never be served. Needs no torch."""

from collections.abc import Sequence as Ids

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
    _check_beams(limits, width, params)
    max_new_tokens = params.max_tokens
    if max_new_tokens is None:
        max_new_tokens = max(1, limits.room_for(num_prompt, width))
    if num_prompt + max_new_tokens > limits.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"{plural(num_prompt, 'prompt token')} and {max_new_tokens:,} to generate are over the model length of "
            f"{limits.max_model_len:,}",
            hint="shorten the prompt, lower max_tokens or raise --max-model-len",
        )
    needed = limits.num_blocks_for(num_prompt, num_prompt + max_new_tokens - 1, width)
    if limits.num_blocks is not None and needed > limits.num_blocks:
        raise RequestError(
            "kv_cache_exceeded",
            f"needs {plural(needed, 'block')} of {plural(limits.block_size, 'token')}, "
            f"the pool has {limits.num_blocks:,}",
            hint=f"lower {'beam_width or ' if width > 1 else ''}max_tokens, or enlarge the pool with --kv-cache-memory "
            "or --num-gpu-blocks-override",
        )
    return max_new_tokens


def _check_beams(limits: Limits, width: int, params: SamplingParams) -> None:
    """All beams of a request are computed in the same step."""
    for name, limit in limits.of_step.items():
        if 1 < width > limit:
            flag = f"--{name.replace('_', '-')}"
            raise RequestError(
                "invalid_parameter", f"beam_width is {width}, but {name} is {limit}", hint=f"raise {flag}"
            )
    if width > 1 and limits.num_state_slots is not None and 2 * width > limits.num_state_slots:
        raise RequestError(
            "invalid_parameter",
            f"beam_width is {width}, which needs {2 * width} slots of recurrent state; there are "
            f"{limits.num_state_slots}",
            hint="raise --num-state-slots",
        )
    num_ends = 1 + len(params.stop_token_ids or ())
    if params.beam_width is not None and limits.vocab_size is not None and (1 + num_ends) * width > limits.vocab_size:
        raise RequestError(
            "invalid_parameter", f"beam_width is {width}, for a vocabulary of {limits.vocab_size:,} tokens"
        )


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
