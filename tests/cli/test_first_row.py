"""What a run does before its first row is in the journal: counted, as seconds differ from machine to machine."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pagedcli.batch.tokenizer import WRAPPED, Tokenizer
from pagedcli.models.hub import resolve_model

# Says what is imported when the first row has been written.
WATCHED = """
import gc, json, sys
from pagedcli.batch.journal import Journal
written = Journal.append
def append(self, *args, **kwargs):
    written(self, *args, **kwargs)
    Journal.append = written
    with open("modules.json", "w") as file:
        json.dump([sorted(sys.modules), gc.isenabled(), gc.get_stats()], file)
Journal.append = append
sys.argv = ["pagedcli", "generate", "in.jsonl", "-o", "out.jsonl", "--max-tokens", "2"]
from pagedcli.__main__ import run
run()
"""
# The end of a run and other commands and models need these, which take long to import.
LATER = (
    *("rich.console", "transformers.models", "pagedcli.answers.cures", "pagedcli.answers.time"),
    *("pagedcli.kvevents", "pagedcli.views.explain", "pagedcli.views.whole_run", "pagedcli.show.data_files"),
    *("pyarrow", "pandas", "ray"),
    *(f"pagedcli.models.families.{name}" for name in ("mixtures", "hybrids", "latents", "gemma4")),
)
MOST_MODULES = 200  # of pagedcli


@pytest.mark.slow
def test_the_first_row_waits_for_no_module_that_it_does_not_need(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Once upon a time"}) + "\n")
    subprocess.run([sys.executable, "-c", WATCHED], cwd=tmp_path, check=True, capture_output=True)
    modules, collects, stats = json.loads((tmp_path / "modules.json").read_text())
    assert [name for name in LATER if name in modules] == []
    assert sum(name.startswith("pagedcli.") for name in modules) <= MOST_MODULES
    assert collects
    assert stats[2]["collections"] <= 2  # each looks through all of torch


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
@pytest.mark.parametrize("model_type", WRAPPED)
def test_a_tokenizer_is_of_the_class_that_transformers_chooses(tmp_path, model_type, name):
    builtin = resolve_model("builtin")
    for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        fields = json.loads((builtin / each).read_text())
        fields |= {"config.json": {"model_type": model_type}, "tokenizer_config.json": {"tokenizer_class": name}}.get(
            each, {}
        )
        (tmp_path / each).write_text(json.dumps(fields))
    own, chosen = Tokenizer(tmp_path)._hf, AutoTokenizer.from_pretrained(tmp_path)
    assert type(own) is type(chosen) is PreTrainedTokenizerFast
    assert own.init_kwargs.keys() - {"name_or_path"} == chosen.init_kwargs.keys() - {"name_or_path"}
    assert own.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert own.special_tokens_map == chosen.special_tokens_map
