"""Sizes of numbers in a KV cache are those of torch's types."""

import torch

from pagedcli.core.budget import ITEMSIZE


def test_bytes_of_an_element_are_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE
