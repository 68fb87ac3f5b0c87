"""A model of lm-evaluation-harness: `--model pagedcli --model_args model=PATH`, after `python -m pagedcli.lm_eval run`.

It does as lm-eval's own `hf` does, but computes what requests share once, and gives the same bits in any batch.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from pagedcli.batch.requests import read_messages
from pagedcli.config import BUILTIN_MODEL
from pagedcli.errors import PagedcliError, RequestError, UsageError
from pagedcli.llm import LLM
from pagedcli.printable import plural
from pagedcli.sampling_params import SamplingParams

try:
    from lm_eval import utils
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
except ModuleNotFoundError as error:
    missing = UsageError("lm-evaluation-harness is not installed", hint="pip install 'pagedcli[lm-eval]'")
    if __name__ != "__main__":
        raise missing from error
    sys.exit(f"error: {missing.message}\nhint: {missing.hint}")

_logger = logging.getLogger("lm_eval.pagedcli")  # below lm-eval's own, which its command sets up
_DEFAULT_DEVICE = "cuda:0"  # lm-eval's, on any machine
_Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, tokens of the context, tokens of the continuation


class PagedLM(TemplateLM):  # type: ignore[misc,unused-ignore]  # lm-eval has no types where it is not installed
    """A model for lm-eval's tasks. `engine` are the keywords of LLM, for example max_model_len or quantization.

    `pretrained` is another name for `model`, as other models of lm-eval call it. Batch sizes have no effect: the engine
    makes its batches itself. Raises: as LLM.
    """

    def __init__(
        self,
        model: str = BUILTIN_MODEL,
        *,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **engine: Any,
    ) -> None:
        super().__init__()
        if device not in (None, _DEFAULT_DEVICE):
            engine["device"] = device
        self._llm = LLM(model if pretrained is None else pretrained, **engine)
        self.tokenizer = self._llm.tokenizer
        self._num_asked = 0  # tokens that each request would have computed alone

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int | None:
        """What an empty context is: BOS, or EOS where there is none."""
        return self.tokenizer.start_token_id

    @property
    def max_length(self) -> int:
        return self._llm.llm_engine.limits.max_model_len

    @property
    def max_gen_toks(self) -> int:
        return 256

    @property
    def tokenizer_name(self) -> str:
        return str(self._llm.llm_engine.model_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; by default with special tokens, unless the text begins with that of `prefix_token_id`."""
        if add_special_tokens is None:
            prefix = self.prefix_token_id
            begins = "" if prefix is None else self.tokenizer.decode([prefix], skip_special_tokens=False)
            add_special_tokens = not (begins and string.startswith(begins))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat; without its system messages where the template rejects them."""
        continues = not add_generation_prompt
        arguments = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continues}
        try:
            return self.tokenizer.render_chat(read_messages(chat_history), arguments)
        except RequestError as error:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            _logger.warning("%s; the system message is left out", error.message)
            return self.tokenizer.render_chat(read_messages(others), arguments)

    # ------------------------------------------------------------------ requests

    def _loglikelihood_tokens(
        self, requests: Sequence[_Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one. Equal contexts are one prompt."""
        places: dict[tuple[int, ...], list[int]] = {}
        for place, (_texts, context, continuation) in enumerate(requests):
            places.setdefault(tuple(self._cut(context, len(continuation))), []).append(place)
        outputs = self._llm.score(
            [list(context) for context in places],
            [[requests[place][2] for place in group] for group in places.values()],
            use_tqdm=not disable_tqdm,
        )
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for output, group in zip(outputs, places.values(), strict=True):
            if output.error is not None:
                raise RequestError("scores_failed", output.error)
            for place, score in zip(group, output.scores, strict=True):
                found[place] = score.logprob, score.is_greedy
                self._num_asked += len(output.prompt_token_ids) + score.num_tokens - 1
        self._say_cached()
        return found

    def _cut(self, context: list[int], num_continuation: int) -> list[int]:
        """The context, without its beginning where it is too long."""
        too_many = len(context) + num_continuation - self.max_length - 1
        if too_many <= 0:
            return context
        _logger.warning("%d tokens are cut off a context, which with its answer is too long", too_many)
        return context[too_many:]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length that predict each token once."""
        pairs: list[_Pair] = []
        ends = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            pairs += [(None, *utils.make_disjoint_window(window)) for window in windows]
            ends.append(len(pairs))
        found = [logprob for logprob, _ in self._loglikelihood_tokens(pairs, disable_tqdm)]
        return [sum(found[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy or sampled texts up to a stop string, which is not part of them."""
        asked = [self._generation(*request.args) for request in requests]
        order = sorted(range(len(asked)), key=lambda place: asked[place][0])  # what prompts share is then still cached
        outputs = self._llm.generate(
            [asked[place][0] for place in order], [asked[place][1] for place in order], use_tqdm=not disable_tqdm
        )
        found = [""] * len(asked)
        for place, output in zip(order, outputs, strict=True):
            if output.error is not None:
                raise RequestError("generation_failed", output.error)
            prompt, _params, until = asked[place]
            token_ids = output.outputs[0].token_ids
            found[place] = postprocess_generated_text(self.tokenizer.decode(token_ids), until, None)
            self._num_asked += len(prompt) + len(token_ids) - 1
        self._say_cached()
        return found

    def _generation(self, context: str, gen_kwargs: dict[str, Any]) -> tuple[list[int], SamplingParams, list[str]]:
        """The prompt's tokens, without its beginning where it is too long, the parameters, and the stop strings."""
        given = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        eos = self.eot_token_id
        end = None if eos is None else self.tokenizer.decode([eos], skip_special_tokens=False)
        until = [stop for stop in handle_stop_sequences(given.pop("until", None), end) if stop]
        max_tokens = given.pop("max_gen_toks")
        if not given.pop("do_sample"):
            given["temperature"] = 0.0
        if unknown := sorted(given.keys() - set(SamplingParams.__struct_fields__)):
            hint = "leave it out of gen_kwargs"
            raise UsageError(f"pagedcli has no parameter {unknown[0]!r} for generation", hint=hint)
        if (room := self.max_length - max_tokens) <= 0:
            raise UsageError(
                f"{plural(max_tokens, 'token')} to generate leave no room for a prompt in a model of {self.max_length}",
                hint="set max_gen_toks in gen_kwargs, or max_model_len in model_args",
            )
        prompt = self.tok_encode(context)
        if len(prompt) > room:
            _logger.warning("%d tokens are cut off a prompt, which with its answer is too long", len(prompt) - room)
        return prompt[-room:], SamplingParams(max_tokens=max_tokens, stop=until, **given), until

    def _say_cached(self) -> None:
        num_found = max(0, self._num_asked - self._llm.llm_engine.stats.num_computed_tokens)
        _logger.info("%s", found_text(num_found, self._num_asked))


def found_text(num_found: int, num_asked: int) -> str:
    """How many tokens were not computed: 38.1 of 39.2 million tokens were found in the cache."""
    if num_asked < 1_000_000:
        return f"{num_found:,} of {plural(num_asked, 'token')} were found in the cache"
    return f"{num_found / 1e6:.1f} of {num_asked / 1e6:.1f} million tokens were found in the cache"


def main() -> None:
    """lm-eval's own command, which then knows the model `pagedcli`."""
    import lm_eval.models  # noqa: F401  # registers lm-eval's models, which it does itself only while there are none
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "pagedcli" not in model_registry:  # a later lm-eval finds it by its entry point
        model_registry.register("pagedcli", target="pagedcli.lm_eval:PagedLM")
    try:
        cli_evaluate()
    except PagedcliError as error:
        hint = "" if error.hint is None else f"\nhint: {error.hint}"
        print(f"error: {error.message}{hint}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
