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
