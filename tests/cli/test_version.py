"""What `pagedcli` says of itself."""

import re

from cli_harness import pagedcli

import pagedcli as package


def test_a_report_of_a_bug_names_versions_and_kernels():
    result = pagedcli("--version", "--verbose")
    first, *lines = result.stdout.splitlines()
    assert first == f"pagedcli {package.__version__}"
    found = dict(re.split(r" {1,}", line, maxsplit=1) for line in lines)
    assert list(found) == [
        "Python", "system", "processor", "kernels",
        "torch", "triton", "transformers", "tokenizers", "safetensors", "llguidance",
    ]  # fmt: skip
    assert all(found.values())
