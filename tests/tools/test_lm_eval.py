"""lm-evaluation-harness with our model: what its own `hf` model finds, and the same bits however it is computed."""

import importlib
import json
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import shared_data

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'pagedcli[lm-eval]'")
pytestmark = pytest.mark.tools

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from pagedcli.errors import UsageError  # noqa: E402
from pagedcli.lm_eval import PagedLM, found_text  # noqa: E402
from pagedcli.models.hub import resolve_model  # noqa: E402

STORIES = [
    "Once upon a time there was a little girl named Lily. She liked to play in the park with her friends. ",
    "One day, Tom saw a big dog. The dog was very happy. Tom said hello to the dog and they played all day. ",
    "The sun was hot and the cat was sleepy. She found a tree and sat down. ",
]
CHOICES = [
    [" The end.", " They went home and slept.", "!"],
    [" a", " b"],
    [" Then it rained. ", " x y z", " The", " Th"],
]
# Without it lm-eval takes the logits of another position where two requests are the same tokens, cut at other places.
EXACT = {"logits_cache": False}
FLOAT32 = {"dtype": "float32", "num_kvcache_blocks": 400, "block_size": 4}


@pytest.fixture(scope="module", params=["builtin", "stories260k"])
def model(request):
    return resolve_model("builtin") if request.param == "builtin" else shared_data(request.param)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Local tasks of three kinds, and their names."""
    folder = tmp_path_factory.mktemp("tasks")
    docs = [
        {"story": story, "text": story * 9, "choices": choices, "answer": place % len(choices)}
        for place, (story, choices) in enumerate(zip(STORIES, CHOICES, strict=True))
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/docs.jsonl\ntest_split: test\n"
    (folder / "choice.yaml").write_text(
        common + "task: toy_choice\noutput_type: multiple_choice\nnum_fewshot: 1\nfewshot_split: test\n"
        "doc_to_text: '{{story}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\ntarget_delimiter: ''\n"
    )
    (folder / "rolling.yaml").write_text(
        common + "task: toy_rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: word_perplexity\n"
    )
    (folder / "until.yaml").write_text(
        common + "task: toy_until\noutput_type: generate_until\ndoc_to_text: '{{story}}'\ndoc_to_target: answer\n"
        "generation_kwargs:\n  until: ['.', ' the']\n  max_gen_toks: 24\n"
    )
    return folder, ["toy_choice", "toy_rolling", "toy_until"]


def answers(model, tasks, **arguments):
    """The responses to each document, by task."""
    folder, names = tasks
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True, **arguments
    )
    samples = {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in names}
    return {name: [sample["filtered_resps"] for sample in rows] for name, rows in samples.items()}


@pytest.fixture(scope="module")
def ours(model, tasks):
    return answers(PagedLM(str(model), max_model_len=256, **FLOAT32), tasks)


def test_the_answers_are_those_of_the_hf_model_in_float32(model, tasks, ours):
    args = {"pretrained": str(model), "dtype": "float32", "max_length": 256, **EXACT}
    theirs = answers("hf", tasks, model_args=args, device="cpu", batch_size=2)
    assert ours["toy_until"] == theirs["toy_until"]
    assert any(text for (text,) in ours["toy_until"])
    for mine, other in zip(ours["toy_choice"], theirs["toy_choice"], strict=True):
        assert [is_greedy for _, is_greedy in mine] == [is_greedy for _, is_greedy in other]
        assert [logprob for logprob, _ in mine] == pytest.approx([logprob for logprob, _ in other], abs=1e-4)
    assert [each[0] for each in ours["toy_rolling"]] == pytest.approx(
        [each[0] for each in theirs["toy_rolling"]], rel=1e-5
    )


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


PAIRS = [(story, choice) for story, choices in zip(STORIES, CHOICES, strict=True) for choice in choices]
PAIRS += [("", "Once upon"), (STORIES[0] * 20, STORIES[1]), ("Once ", "upon"), ("Once", " upon a time")]
UNTIL = [(story, {"until": ["."], "max_gen_toks": 9}) for story in (*STORIES, STORIES[0] * 20)]
UNTIL += [("Tom", {"until": [], "do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 1, "max_gen_toks": 9})]


def test_the_order_of_requests_changes_no_bit(model):
    lm = PagedLM(str(model), max_model_len=256, **FLOAT32)
    for ask, kind, given in (
        (lm.loglikelihood, "loglikelihood", PAIRS),
        (lm.loglikelihood_rolling, "loglikelihood_rolling", [(story * 9,) for story in STORIES]),
        (lm.generate_until, "generate_until", UNTIL),
    ):
        whole = ask(instances(kind, given), disable_tqdm=True)
        order = random.Random(1).sample(range(len(given)), len(given))
        again = ask(instances(kind, [given[place] for place in order]), disable_tqdm=True)
        assert again == [whole[place] for place in order]
        alone = [ask(instances(kind, [each]), disable_tqdm=True)[0] for each in given]
        assert alone == whole


def test_long_and_empty_contexts_are_treated_as_by_hf(model, caplog):
    from lm_eval.models.huggingface import HFLM

    ours = PagedLM(str(model), max_model_len=128, **FLOAT32)
    theirs = HFLM(str(model), dtype="float32", device="cpu", max_length=128, **EXACT)
    mine = ours.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    assert "cut off a context" in caplog.text
    other = theirs.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in mine] == [is_greedy for _, is_greedy in other]
    assert [logprob for logprob, _ in mine] == pytest.approx([logprob for logprob, _ in other], abs=1e-4)
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    for text in ("Once", "<s>Once", "", " a  b\n"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)
    assert ours.generate_until(instances("generate_until", UNTIL[:4]), disable_tqdm=True) == theirs.generate_until(
        instances("generate_until", UNTIL[:4]), disable_tqdm=True
    )


def test_equal_contexts_are_computed_once(model):
    lm = PagedLM(str(model), max_model_len=256, **FLOAT32)
    context = lm.tok_encode(STORIES[0].strip())
    lm.loglikelihood(instances("loglikelihood", [(STORIES[0].strip(), choice) for choice in CHOICES[0]]))
    num_own = sum(len(lm.tok_encode(STORIES[0].strip() + each)) - len(context) - 1 for each in CHOICES[0])
    assert lm._llm.llm_engine.stats.num_computed_tokens == len(context) + num_own


def test_what_the_engine_does_not_have_is_refused_by_name():
    with pytest.raises(TypeError, match="unexpected keyword argument 'parallelize'"):
        PagedLM("builtin", parallelize=True)
    lm = PagedLM(pretrained="builtin", batch_size="auto", max_batch_size=4, device="cuda:0", **FLOAT32)
    with pytest.raises(UsageError, match="no parameter 'penalty_alpha'"):
        lm.generate_until(instances("generate_until", [("a", {"until": ["."], "penalty_alpha": 0.5})]))
    with pytest.raises(UsageError, match="leave no room for a prompt"):
        lm.generate_until(instances("generate_until", [("a", {"until": ["."], "max_gen_toks": 10**6})]))


def test_how_much_was_found_is_said_in_words():
    assert found_text(38_100_000, 39_200_000) == "38.1 of 39.2 million tokens were found in the cache"
    assert found_text(120, 1_000) == "120 of 1,000 tokens were found in the cache"


def test_the_command_is_that_of_lm_eval(tasks, tmp_path):
    folder, names = tasks
    engine = "dtype=float32,num_kvcache_blocks=400"
    arguments = ("--tasks", names[0], "--include_path", str(folder), "--output_path", str(tmp_path))

    def run(model):
        command = [sys.executable, "-m", "pagedcli.lm_eval", "run", "--model", "pagedcli", *arguments]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command += ["--model_args", f"model={model},{engine}"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)

    found = run("builtin")
    assert found.returncode == 0, found.stderr
    assert names[0] in found.stdout
    assert "tokens were found in the cache" in found.stderr
    refused = run(tmp_path / "nowhere")
    assert refused.returncode == 2
    assert "error: no model folder at" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_entry_points_lead_to_the_classes():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["pagedcli"].partition(":")
    assert getattr(importlib.import_module(module), name) is PagedLM
