"""The Python API: scripts written for vLLM and nano-vllm run after changing the import."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import pagedcli
from pagedcli import LLM, SamplingParams, StructuredOutputsParams
from pagedcli.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
POOL = {"dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm():
    return LLM(**POOL)


def test_results_are_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert [output.prompt for output in outputs] == ["a", "b", "c"]


def test_outputs_read_like_vllms_and_like_nano_vllms(llm):
    (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    sample = output.outputs[0]
    assert output["text"] == sample.text == sample["text"]
    assert output["token_ids"] == sample.token_ids
    assert output.finished
    assert sample.finish_reason in ("stop", "length")
    assert sample.logprobs is None
    assert sample.cumulative_logprob is None


def test_logprobs_by_token_id(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    sample = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    assert len(sample.logprobs) == 3
    for token_id, found in zip(sample.token_ids, sample.logprobs, strict=True):
        assert found[token_id].rank == 1, "greedy takes the likeliest"
        assert len(found) == 2
        assert found[token_id].decoded_token == llm.tokenizer.token_text(token_id)
    total = sum(found[token_id].logprob for token_id, found in zip(sample.token_ids, sample.logprobs, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total)


def test_n_samples_and_stop_strings(llm):
    (whole,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    stop = whole["text"][4:7]
    (output,) = llm.generate(
        "Once upon a time", SamplingParams(temperature=0.0, max_tokens=8, n=2, stop=stop), use_tqdm=False
    )
    assert [sample.text for sample in output.outputs] == [whole["text"][: whole["text"].index(stop)]] * 2
    assert [sample.stop_reason for sample in output.outputs] == [stop] * 2


def test_chat_takes_one_conversation_or_many(llm):
    messages = [{"role": "user", "content": "Hello!"}]
    (one,) = llm.chat(messages, GREEDY, use_tqdm=False)
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert len(two) == 2
    assert one["text"] == two[0]["text"] == two[1]["text"]
    rendered = llm.tokenizer.encode_chat(messages)
    assert one["text"] == llm.generate([rendered], GREEDY, use_tqdm=False)[0]["text"]
    with pytest.raises(RequestError, match="wizard"):
        llm.chat([{"role": "wizard", "content": "x"}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.generate(["a", None], use_tqdm=False), TypeError, r"^prompts\[1\]: a prompt is text"),
        (lambda llm: llm.generate(["a", [1, -1]], use_tqdm=False), RequestError, r"^prompts\[1\]: token id -1"),
        (
            lambda llm: llm.generate(["a", [5] * 5000], use_tqdm=False),
            RequestError,
            r"^prompts\[1\]: 5,000 prompt .* over",
        ),
        (lambda llm: llm.generate(["a", {"x": 1}], use_tqdm=False), ValueError, r"^prompts\[1\]: a prompt "),
        (lambda llm: llm.score(["b", "a"], [["x"], [""]], use_tqdm=False), RequestError, r"^prompts\[1\]: "),
        (
            lambda llm: llm.chat([[{"role": "user", "content": "a"}], [{"role": 3}]], use_tqdm=False),
            RequestError,
            r"^prompts\[1\]: ",
        ),
        (lambda llm: llm.generate([None], use_tqdm=False), TypeError, "^a prompt is text"),
        (lambda llm: llm.generate("a" * 10**7, use_tqdm=False), RequestError, "^the first .* of 10,000,000 characters"),
    ],
)
def test_an_error_says_which_of_several_prompts_it_is_about(llm, call, error, message):
    with pytest.raises(error, match=message):
        call(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.block_manager.num_free_blocks == 64
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0]["text"]


def test_an_interrupt_leaves_the_engine_clean(llm, monkeypatch):
    step = llm.llm_engine.step

    def interrupted():
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "Once"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert llm.llm_engine.block_manager.num_free_blocks == 64
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0]["text"]


def test_the_progress_bar_is_on_stderr_and_can_be_off(llm, capsys):
    llm.generate("Hello", GREEDY)
    shown = capsys.readouterr()
    assert "1/1" in shown.err
    assert shown.out == ""
    llm.generate("Hello", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(TypeError, match="'blok_size'; did you mean 'block_size'"):
        LLM(blok_size=4)
    with pytest.raises(ConfigError, match="int"):
        LLM(block_size="four")


def test_nano_vllms_keywords_are_known():
    llm = LLM(kvcache_block_size=8, num_kvcache_blocks=32, enforce_eager=True, max_model_len=200)
    assert (llm.llm_engine.limits.block_size, llm.llm_engine.plan.num_blocks) == (8, 32)
    assert LLM(num_kvcache_blocks=-1, kv_cache_memory_bytes="1MiB").llm_engine.plan.num_blocks > 0


def test_mismatched_sampling_params_are_refused(llm):
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        llm.generate([{"text": "a"}], GREEDY, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params are SamplingParams, one or a list, not dict"):
        llm.generate(["a"], {"max_tokens": 2}, use_tqdm=False)


# ---------------------------------------------------------------------- what else vLLM's users call


def test_token_ids_as_a_keyword_in_all_forms(llm):
    ids = llm.tokenizer.encode("Once upon a time")
    found = [llm.generate(prompt_token_ids=each, sampling_params=GREEDY, use_tqdm=False) for each in (ids, [ids])]
    assert {output.outputs[0].text for (output,) in found} == {
        llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0]["text"]
    }
    for wrong in ({}, {"prompts": "a", "prompt_token_ids": ids}):
        with pytest.raises(ValueError, match="either prompts or prompt_token_ids"):
            llm.generate(**wrong)


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ({"lora_request": object()}, "does not support 'lora_request': there are no LoRA adapters"),
        ({"priority": [1]}, "does not support 'priority'"),
        ({"smapling_params": None}, "unexpected keyword argument 'smapling_params'"),
    ],
)
def test_unsupported_keywords_are_named(llm, keyword, said):
    for call in (llm.generate, llm.chat):
        with pytest.raises(TypeError, match=said):
            call([{"role": "user", "content": "x"}] if call == llm.chat else "x", GREEDY, use_tqdm=False, **keyword)


def test_vllms_keywords_without_effect_here_are_accepted(llm):
    assert llm.generate("a", GREEDY, use_tqdm=False, lora_request=None, priority=None)
    other = LLM(**POOL, swap_space=4, disable_log_stats=True, tokenizer="builtin", enable_chunked_prefill=True)
    assert other.tokenizer.encode("Hello") == llm.tokenizer.encode("Hello")
    with pytest.raises(TypeError, match="enable_chunked_prefill=True only"):
        LLM(**POOL, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="no field 'multi_modal_data'"):
        llm.generate({"prompt": "a", "multi_modal_data": {}}, GREEDY, use_tqdm=False)


def test_default_sampling_params_are_those_that_the_model_recommends(tmp_path):
    assert LLM(**POOL).get_default_sampling_params() == SamplingParams()
    source, folder = LLM(**POOL).llm_engine.model_path, tmp_path / "model"
    shutil.copytree(source, folder)
    recommended = {"temperature": 0.7, "top_k": 20, "max_new_tokens": 5, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    llm = LLM(str(folder), **POOL)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=20, max_tokens=5)
    (output,) = llm.generate("Once upon a time", use_tqdm=False)
    assert len(output["token_ids"]) <= 5
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match=r"generation_config.json.*temperature"):
        llm.get_default_sampling_params()


def test_a_reset_prefix_cache_gives_no_hits_and_the_same_tokens():
    llm = LLM(**POOL, block_size=4)
    prompt = "Once upon a time there was a fox who lived in the forest"
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens > first.num_cached_tokens == 0
    assert llm.reset_prefix_cache()
    third, fourth = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (third.num_cached_tokens, fourth.num_cached_tokens) == (0, second.num_cached_tokens)
    assert first["token_ids"] == third["token_ids"]
    salted = llm.generate({"prompt": prompt, "cache_salt": "x"}, GREEDY, use_tqdm=False)[0]
    assert salted.num_cached_tokens == 0


def test_chat_with_another_template_tools_and_the_start_of_an_answer(llm, tmp_path):
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Once"}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].name if tools }}"
    (tmp_path / "t.jinja").write_text(template)
    for given in (template, str(tmp_path / "t.jinja")):
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=given, tools=[{"name": "look"}])
        assert output.prompt_token_ids == llm.tokenizer.encode("Hello!Oncelook")
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert llm.tokenizer.decode(output.prompt_token_ids).endswith("Once")


@pytest.mark.parametrize(
    ("structure", "texts"),
    [
        ({"choice": ["yes", "no way"]}, {"yes", "no way"}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
        ({"json": {"enum": [5]}}, {"5"}),
        ({"json": '{"enum": [6]}'}, {"6"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ],
)
def test_structured_outputs_constrain_the_text(llm, structure, texts):
    params = SamplingParams(temperature=1, max_tokens=16, structured_outputs=StructuredOutputsParams(**structure))
    assert llm.generate("The answer is", params, use_tqdm=False)[0]["text"] in texts


def test_a_structure_has_exactly_one_form():
    with pytest.raises(ValueError, match="exactly one of its fields, given: none"):
        StructuredOutputsParams()
    with pytest.raises(ValueError, match="given: json, regex"):
        StructuredOutputsParams(json={}, regex="a")
    with pytest.raises(ValueError, match="none together with a regex"):
        SamplingParams(regex="a", structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_threads_that_share_an_llm_take_turns(llm):
    prompts = [[f"Story {number} of thread {thread}" for number in range(6)] for thread in range(4)]
    expected = [texts(llm, each) for each in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = pool.map(lambda each: texts(llm, each), prompts)
            llm.reset_prefix_cache()
            assert list(found) == expected


def texts(llm, prompts):
    answered = llm.chat([{"role": "user", "content": prompts[0]}], GREEDY, use_tqdm=False)
    return [output["text"] for output in answered + llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_the_package_lists_its_names_and_a_model_says_what_it_is(llm):
    assert {"LLM", "SamplingParams", "StructuredOutputsParams", "__version__"} <= set(dir(pagedcli))
    plan = llm.llm_engine.plan
    blocks = f"{plan.num_blocks:,} blocks of {plan.limits.block_size} tokens"
    assert repr(llm) == f"LLM('builtin', device='cpu', dtype='{plan.dtype}', {blocks})"


# ---------------------------------------------------------------------- what counts as token ids

IDS = [5, 6, 7, 8]
SHORT = SamplingParams(temperature=0, max_tokens=3)


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        np.array(IDS, np.uint16),
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        [np.int64(each) for each in IDS],
        list(torch.tensor(IDS)),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_token_ids_of_every_kind_give_the_same_answer(llm, ids):
    (wanted,) = llm.generate([{"prompt_token_ids": IDS}], SHORT, use_tqdm=False)
    for prompts in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        (found,) = llm.generate(prompts, SHORT, use_tqdm=False)
        assert found.prompt_token_ids == IDS
        assert found["token_ids"] == wanted["token_ids"]
    assert len(llm.generate([ids, ids], SHORT, use_tqdm=False)) == 2


def test_the_rows_of_an_array_are_prompts(llm):
    for prompts in (np.array([IDS, IDS]), torch.tensor([IDS, IDS])):
        assert [each.prompt_token_ids for each in llm.generate(prompts, SHORT, use_tqdm=False)] == [IDS, IDS]


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([1.5, 2], "a token id is a whole number, not 1.5"),
        ([True, 2], "a token id is a whole number, not True"),
        (["1", 2], "a token id is a whole number, not '1'"),
        ([None], "a token id is a whole number, not None"),
        (np.array([1.0, 2.0]), "a token id is a whole number, not 1.0"),
        (torch.tensor([1.5]), "a token id is a whole number, not 1.5"),
        (np.array([True]), "a token id is a whole number, not True"),
        (b"abc", "a prompt is text or token ids, not bytes"),
        (7, "a prompt is text or token ids, not int"),
        (np.array([[1, 2]]), "the token ids of a prompt have one dimension, this array has 2"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(llm, prompt, what):
    with pytest.raises((TypeError, ValueError), match=what):
        llm.generate([{"prompt_token_ids": prompt}], SHORT, use_tqdm=False)


def test_bytes_are_no_list_of_prompts(llm):
    with pytest.raises(TypeError, match="not bytes"):
        llm.generate(b"abc", use_tqdm=False)
