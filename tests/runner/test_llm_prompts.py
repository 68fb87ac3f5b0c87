"""Prompts of the Python interface: what counts as token ids, and what is refused with a plain message."""

import numpy as np
import pytest
import torch

from pagedcli import LLM, SamplingParams
from pagedcli.llm import _as_list
from pagedcli.llm_keywords import token_ids_of

IDS = [5, 6, 7, 8]
PARAMS = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def llm():
    return LLM(num_kvcache_blocks=64, max_num_seqs=4)


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
    (wanted,) = llm.generate([{"prompt_token_ids": IDS}], PARAMS, use_tqdm=False)
    for prompts in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        (found,) = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert found.prompt_token_ids == IDS
        assert found["token_ids"] == wanted["token_ids"]
    assert len(llm.generate([ids, ids], PARAMS, use_tqdm=False)) == 2


def test_the_rows_of_an_array_are_prompts(llm):
    for prompts in (np.array([IDS, IDS]), torch.tensor([IDS, IDS])):
        assert [each.prompt_token_ids for each in llm.generate(prompts, PARAMS, use_tqdm=False)] == [IDS, IDS]


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
        token_ids_of(prompt)
    with pytest.raises((TypeError, ValueError), match=what):
        llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)


def test_bytes_are_no_list_of_prompts():
    with pytest.raises(TypeError, match="not bytes"):
        _as_list(b"abc")
