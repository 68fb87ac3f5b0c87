"""The requests that a run has served, kept while it runs, so that its end can be simulated with other settings."""

from array import array
from collections import Counter

from pagedcli import answers
from pagedcli.batch.requests import BatchRow, RowPrompt
from pagedcli.core.admission import admit
from pagedcli.core.plan import Plan
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.planning.step_time import TimeKey, load_step_time
from pagedcli.simulation.requests import Request, Requests, RowOutput, block_keys, request_of

_MOST_DRAWN, _MOST_DRAWN_TOKENS = 2_000, 2**19  # prompts kept to find where they diverge: seconds at the end of a run
_MOST_TOKENS = 2**22  # kept, at 8 bytes each


class ServedRequests:
    """Takes in rows as they are done; `subject` is the run that they were."""

    def __init__(self, plan: Plan) -> None:
        self._requests: dict[int, list[Request]] = {}  # row number -> its requests
        self._plan = plan
        self._num_tokens = 0
        self._is_too_much = False  # or cannot be simulated
        self.drawn = PromptSample(most_rows=_MOST_DRAWN, most_tokens=_MOST_DRAWN_TOKENS)

    def add(self, row: BatchRow, served: list[RowPrompt]) -> None:
        """A row is done; one with the answers of another row has not been started."""
        for prompt in row.prompts:
            self.drawn.add(array("q", prompt.token_ids), row.cache_salt)
        if self._is_too_much or row.number is None:
            return
        for prompt in served:
            self._num_tokens += len(prompt.token_ids)
            self._num_tokens += sum(len(sample.token_ids) for sample in prompt.result.samples)
            self._num_tokens += sum(map(len, prompt.scored.continuations)) if prompt.scored else 0
        is_beam_search = any(prompt.params.beam_width is not None for prompt in row.prompts)
        if is_beam_search or self._num_tokens > _MOST_TOKENS:
            self._is_too_much = True
            self._requests.clear()
            return
        self._requests[row.number] = []
        for prompt in served:
            samples = prompt.result.samples
            ids, stopped = [each.token_ids for each in samples], [each.finish_reason == "stop" for each in samples]
            max_tokens = 0 if prompt.scored else admit(self._plan.limits, prompt.token_ids, prompt.params)
            output = RowOutput(sum(map(len, ids)), ids, stopped)
            self._requests[row.number].append(
                request_of(prompt.result.request_id, prompt, row.cache_salt, max_tokens, output)
            )

    def num_shared_tokens(self, block_size: int) -> int:
        """Prompt tokens of the full blocks with which several requests begin, each block counted once."""
        requests = [each for of_row in self._requests.values() for each in of_row]
        keys = Counter(key for each in requests for key in block_keys(each, None, block_size))
        return block_size * sum(count > 1 for count in keys.values())

    @property
    def has_all(self) -> bool:
        """Whether all prompts have been drawn."""
        return len(self.drawn.prompts) == self.drawn.num_seen

    def subject(self, key: TimeKey, *, is_reordered: bool, read_ahead: int | None) -> "answers.settings.Subject | None":
        """The run, with the time of its steps by `key`; None: there were beam searches, or too many tokens. Rows of a
        run with --reorder prefix have come in that order."""
        if self._is_too_much:
            return None
        requests = [request for number in sorted(self._requests) for request in self._requests[number]]
        return answers.settings.Subject(
            Requests(requests, format="prompts"),
            self._plan,
            may_reorder=not is_reordered,
            read_ahead=read_ahead,
            step_time=load_step_time(key),
        )
