"""The Python door: scripts written for vLLM and nano-vllm run after changing the import."""

import pytest

from pagedcli import LLM, SamplingParams
from pagedcli.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
POOL = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm():
    return LLM(**POOL)


def test_all_forms_of_a_prompt_give_the_same(llm):
    text = "Once upon a time"
    ids = llm.tokenizer.encode(text)
    forms = [text, [text], [ids], ids, [{"prompt": text}], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert len({tuple(output[0].outputs[0].token_ids) for output in outputs}) == 1
    assert outputs[0][0].prompt == text
    assert outputs[2][0].prompt is None
    assert outputs[2][0].prompt_token_ids == ids


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


def test_a_request_that_cannot_be_served_raises_and_leaves_the_engine_clean(llm):
    with pytest.raises(RequestError, match="over the model length"):
        llm.generate(["Hello", [5] * 5000], GREEDY, use_tqdm=False)
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
    assert (llm.llm_engine.plan.block_size, llm.llm_engine.plan.num_blocks) == (8, 32)
    assert LLM(num_kvcache_blocks=-1, kv_cache_memory_bytes="1MiB").llm_engine.plan.num_blocks > 0


def test_mismatched_sampling_params_are_refused(llm):
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        llm.generate([{"text": "a"}], GREEDY, use_tqdm=False)


def test_nano_vllms_bench_runs_after_changing_the_import():
    """The body of its bench.py, with smaller numbers."""
    from random import randint, seed

    seed(0)
    llm = LLM("builtin", enforce_eager=False, max_model_len=512)
    prompt_token_ids = [[randint(0, 1000) for _ in range(randint(10, 40))] for _ in range(6)]
    sampling_params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(5, 20)) for _ in range(6)]
    llm.generate(["Benchmark: "], SamplingParams())
    outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
    total_tokens = sum(params.max_tokens for params in sampling_params)
    assert sum(len(output["token_ids"]) for output in outputs) == total_tokens
