"""Shared fixtures: data that may be absent, and a small thread count so that tests share two cores fairly."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


def shared_data(name: str) -> Path:
    """A folder or file of ../shared/data; the test is skipped, with the reason, where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/data/{name} is not on this machine")
    return path


def native_library():
    """The native CPU kernels; the test is skipped, with the reason, where they cannot be built."""
    from pagedcli.errors import BackendError
    from pagedcli.native import load_library

    try:
        return load_library()
    except BackendError as error:
        pytest.skip(f"no native library here: {error.message}")


@pytest.fixture(scope="module")
def library():
    return native_library()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
