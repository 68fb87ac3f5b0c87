"""Inspect AI with our model, in this process: chats, tools, log-probabilities, many requests at once."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

inspect_ai = pytest.importorskip("inspect_ai", reason="needs inspect-ai: pip install 'pagedcli[inspect]'")
pytestmark = pytest.mark.tools

from harness.engine import chain_model, with_tokens  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, get_model  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate, system_message, use_tools  # noqa: E402
from inspect_ai.tool import ToolFunction, tool  # noqa: E402

import pagedcli.inspect_ai  # noqa: E402  # registers the model, as its entry point does
from pagedcli import LLM, SamplingParams  # noqa: E402
from pagedcli.errors import RequestError, UsageError  # noqa: E402

CALL = '{"name": "add", "arguments": {"x": 40, "y": 2}}'
WORDS = ["Look", "Sum", " forty", "-two"]
# a call after Look, an answer after Sum, which follows the result of a tool
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}\n{% endfor %}"
    "{% if tools and messages[-1].role != 'tool' %}Look{% else %}Sum{% endif %}"
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that calls a tool if there is one, and then answers."""
    tokens = [*WORDS, "<tool_call>", "</tool_call>", CALL]
    folder = with_tokens(tmp_path_factory.mktemp("caller"), tokens, template=TEMPLATE)
    return chain_model(folder, ["Look", "<tool_call>", CALL, "</tool_call>"], ["Sum", " forty", "-two"])


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: The first.
            y: The second.
        """
        return str(x + y)

    return execute


def evaluated(folder, solver, samples=1, tmp_path=None, **arguments):
    task = inspect_ai.Task(
        dataset=[Sample(input=f"Question {place}?", target="forty-two") for place in range(samples)],
        solver=solver,
        scorer=includes(),
    )
    model_args = {"num_kvcache_blocks": 256, "dtype": "float32"}
    (log,) = inspect_ai.eval(
        task, model=f"pagedcli/{folder}", model_args=model_args, log_dir=str(tmp_path), display="none", **arguments
    )
    assert log.status == "success", log.error
    return log


def test_a_task_with_a_tool_runs_to_its_answer(caller, tmp_path):
    log = evaluated(caller, [system_message("Add."), use_tools(add()), generate()], samples=20, tmp_path=tmp_path)
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    for sample in log.samples:
        system, user, call, result, answer = sample.messages
        assert (system.text, user.role) == ("Add.", "user")
        assert (call.tool_calls[0].function, call.tool_calls[0].arguments) == ("add", {"x": 40, "y": 2})
        assert (result.text, answer.text) == ("42", " forty-two")
        usage = next(iter(sample.model_usage.values()))
        assert usage.input_tokens + (usage.input_tokens_cache_read or 0) + usage.output_tokens == usage.total_tokens


def test_input_tokens_leave_out_those_read_from_the_cache(caller, tmp_path):
    log = evaluated(caller, [system_message("Be brief. " * 20), generate()], samples=8, tmp_path=tmp_path,
                    max_connections=1)  # fmt: skip
    usages = [next(iter(sample.model_usage.values())) for sample in log.samples]
    whole = {usage.input_tokens + (usage.input_tokens_cache_read or 0) for usage in usages}
    assert len(whole) == 1, "all prompts are equally long"
    assert sorted(usage.input_tokens_cache_read or 0 for usage in usages)[1] > 0, "all but the first find the system"
    assert sum(usage.input_tokens for usage in usages) < 8 * whole.pop()


@pytest.mark.anyio
async def test_outputs_are_those_of_the_engine_with_logprobs(caller):
    model = get_model(f"pagedcli/{caller}", num_kvcache_blocks=256, dtype="float32", memoize=False)
    config = GenerateConfig(max_tokens=3, logprobs=True, top_logprobs=2, num_choices=2, stop_seqs=["zzz"])
    found = await model.generate("Hi", config=config)
    with LLM(str(caller), num_kvcache_blocks=256, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
        (expected,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert [choice.message.text for choice in found.choices] == [expected.outputs[0].text] * 2
    values = [position.logprob for position in found.choices[0].logprobs.content]
    assert values == [
        tokens[id_].logprob
        for tokens, id_ in zip(expected.outputs[0].logprobs, expected.outputs[0].token_ids, strict=True)
    ]
    assert all(len(position.top_logprobs) == 2 for position in found.choices[0].logprobs.content)
    assert await model.api.tokenize("Hi") == llm.tokenizer.encode("Hi")
    assert await model.api.count_text_tokens("Hi") == len(llm.tokenizer.encode("Hi"))
    too_long = await model.generate("word " * 400)
    assert (too_long.stop_reason, too_long.completion) == ("model_length", "")
    with pytest.raises(RequestError, match="'tool_choice' is not supported"):
        await model.generate("Hi", tools=[add()], tool_choice=ToolFunction("add"))
    with pytest.raises(RequestError, match="'reasoning_effort' is not supported"):
        await model.generate("Hi", config=GenerateConfig(reasoning_effort="low"))
    await model.api.aclose()


@pytest.fixture
def anyio_backend():
    return "asyncio"


def test_an_unknown_argument_is_refused_by_name(caller):
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocks'"):
        get_model(f"pagedcli/{caller}", blocks=3, memoize=False)


def test_a_schema_and_extra_fields_reach_the_engine(caller):
    from inspect_ai.model import ResponseSchema
    from inspect_ai.util import JSONSchema

    schema = ResponseSchema(name="flag", json_schema=JSONSchema(type="boolean"))
    found = pagedcli.inspect_ai._parameters(GenerateConfig(response_schema=schema, extra_body={"min_p": 0.1}))
    wanted = {"type": "json_schema", "json_schema": {"name": "flag", "schema": {"type": "boolean"}}}
    assert found == {"response_format": wanted, "min_p": 0.1}


def test_the_entry_point_leads_to_the_module():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    module = importlib.import_module(project["entry-points"]["inspect_ai"]["pagedcli"])
    assert module is pagedcli.inspect_ai


def test_without_openai_the_extra_is_named(monkeypatch, caller):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UsageError, match=r"pip install 'pagedcli\[inspect\]'"):
        get_model(f"pagedcli/{caller}", memoize=False)
