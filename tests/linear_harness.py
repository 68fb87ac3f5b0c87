"""What every linear layer of the native library promises."""

import torch


def assert_rows_are_independent(linear, in_features, threads):
    """A row's bits depend neither on the other rows nor on the number of threads."""
    x = torch.randn(90, in_features)
    whole = linear(x)
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 5, 6, 40):
            assert torch.equal(linear(x[-tokens:].contiguous()), whole[-tokens:])
    finally:
        torch.set_num_threads(1)


def rounded(x):
    """Each row in whole steps of its largest magnitude / 127, times the step."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.nan_to_num(x / step).round() * step


def rounded_by_32(x):
    """Activations as the kernels of coded weights round them."""
    return torch.cat([rounded(group) for group in x.split(32, dim=-1)], dim=-1)
