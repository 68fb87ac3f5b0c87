"""Flags, configuration files and help say the same thing."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import pagedcli
from pagedcli.cli.main import COMMANDS, app
from pagedcli.cli.options import FLAGS
from pagedcli.config import Config, EngineConfig, RunConfig, load_config, parse_seconds
from pagedcli.errors import ConfigError
from pagedcli.llm_keywords import engine_config
from pagedcli.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {"engine": EngineConfig, "sampling": SamplingParams, "run": RunConfig}
# in a YAML file only: as flags they would need a syntax of their own, or belong to a line
WITHOUT_FLAG = {"sampling.seed", "sampling.logit_bias", "sampling.skip_special_tokens", "sampling.detokenize"}
WITHOUT_FLAG |= {"sampling.early_stopping", "sampling.structured_outputs", "run.messages"}
WITHOUT_FLAG |= {f"engine.{name}" for name in ("revision", "weight_cache", "weight_cache_size", "prefix_store_days")}
WITHOUT_FLAG |= {
    "engine.min_prefill_tokens",
    "engine.async_scheduling",
    "engine.gpu_kernels",
    "run.read_ahead",
    "run.keep_reasoning",
}
WITHOUT_FLAG |= {"run.parse_tool_calls", "sampling.stop_token_ids", "sampling.include_stop_str_in_output"}
WITHOUT_FLAG |= {f"sampling.{name}_penalty" for name in ("length", "presence", "frequency", "repetition")}
WITHOUT_FLAG |= {"sampling.min_tokens", "run.sample_rows", "engine.pooling"}


def run(*arguments, **environment):
    return CliRunner(env={"COLUMNS": "80", **environment}).invoke(app, list(arguments))


def test_every_configuration_key_has_a_flag_of_its_name():
    keys = {f"{section}.{name}" for section, struct in SECTIONS.items() for name in struct.__struct_fields__}
    assert set(FLAGS) == keys - WITHOUT_FLAG
    help_ = run("generate", "--help", "all").stdout
    for key in FLAGS:
        assert f"--{key.split('.')[1].replace('_', '-')}" in help_, key


def test_the_help_fits_80_columns_and_cuts_no_flag():
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS), ["generate", "--help", "all"]):
        shown = run(*arguments)
        assert shown.exit_code == 0
        assert all(len(line) <= 80 or "  pagedcli " in line for line in shown.stdout.splitlines())
        assert "\u2026" not in shown.stdout


def test_the_first_screen_of_generate_fits_and_names_the_sections_that_hold_the_rest():
    first, whole = (run("generate", "--help", *section).stdout for section in ((), ("all",)))
    assert len(first.splitlines()) <= 40
    sections = re.findall(r"(\w+)\s+\((\d+)\)", first.partition("More flags: ")[2])
    found = set()
    for name, count in sections:
        flags = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", run("generate", "--help", name).stdout, re.MULTILINE))
        assert len(flags) == int(count)
        found |= flags
    assert found | {"--config", "--help"} == set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", whole, re.MULTILINE))
    assert len(found) <= 91
    assert "has no section 'no'" in run("generate", "--help", "no").stderr


def test_plan_takes_every_flag_of_generate():
    group = typer.main.get_command(app)
    commands = (group.resolve_command(None, [name])[1] for name in ("generate", "plan"))
    generate, plan = ({flag for each in command.params for flag in each.opts} for command in commands)
    assert len(generate) > 80
    assert generate <= plan


def test_default_yaml_changes_nothing():
    assert load_config(ROOT / "configs" / "default.yaml").config == Config()


def test_vllms_name_of_the_pool_is_read_in_files_flags_and_keywords(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("engine: {num_gpu_blocks_override: 40}")
    assert load_config(path).config.engine.num_kvcache_blocks == 40
    shown = run("generate", "--num-gpu-blocks-override", "30", "--show-config").stdout
    assert re.search(r"engine.num_kvcache_blocks +30 +--num-kvcache-blocks", shown)
    assert engine_config("builtin", {"num_gpu_blocks_override": 20}).num_kvcache_blocks == 20
    assert engine_config("builtin", {"num_kvcache_blocks": -1}).num_kvcache_blocks is None
    assert "blocks-override" not in run("generate", "--help", "all").stdout
    told = "never --num-gpu-blocks-override"  # a text is left as it is
    assert told in run("generate", "--system", told, "--show-config", "--num-gpu-blocks-override=30").stdout


def test_the_defaults_of_removed_keys_are_ignored(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("engine: {prefix_store_key: null, prefix_store_read: always}")
    assert load_config(path).config == Config()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")) + sorted((ROOT / "examples").glob("*.yaml")))
def test_every_configuration_file_is_valid(path):
    assert load_config(path).config != Config() or path.name == "default.yaml"


def test_show_config_tells_where_each_value_is_from(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("engine: {block_size: 32, kv_cache_memory: 4GiB}\n")
    shown = run("generate", "--show-config", "-C", str(path), "--block-size", "64", "--stop", "a", "--stop", "b")
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines() if line}
    assert rows["engine.block_size"] == ["64", "--block-size"]
    assert rows["engine.kv_cache_memory"] == [str(4 * 2**30), str(path)]
    assert rows["engine.max_num_seqs"] == ["256", "default"]
    assert rows["sampling.stop"] == ["['a',", "'b']", "--stop"]


def test_show_config_as_yaml_is_a_configuration_file(tmp_path):
    path = tmp_path / "shown.yaml"
    path.write_text(run("generate", "--show-config", "--format", "yaml", "--block-size", "4", "--top-p", "0.5").stdout)
    assert load_config(path).config == load_config(None, {"engine.block_size": 4, "sampling.top_p": 0.5}).config


@pytest.mark.parametrize("name", ["prompts", "chat", "openai_batch"])
def test_the_examples_run_without_an_error_row(name):
    result = run("generate", str(ROOT / "examples" / f"{name}.jsonl"), "--max-num-seqs", "8")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == len((ROOT / "examples" / f"{name}.jsonl").read_text().splitlines())
    assert all(row["error"] is None for row in rows)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("engine: " + "[" * 3000 + "]" * 3000, "is nested too deeply"),
        ("engine: &a {b: *a}", "is nested too deeply"),
        ("#" * 2**21, "it has more than 1,048,576 bytes"),
        (
            "a: &a [1,2,3,4,5,6,7,8,9]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijk")),
            "has over 100,000 values",
        ),
        ("engine:\n  seed: " + "9" * 5000, "is not valid YAML: Exceeds the limit"),
        ("engine:\n  block_size: x\n", "engine.block_size must be a whole number, not text"),
        ("engine:\n  block_size: 1.5\n", "engine.block_size must be a whole number, not a fraction"),
        ("run:\n  chat_template: 7\n", "run.chat_template must be text or null, not a whole number"),
        ("engine:\n  dtype: bf16\n", "engine.dtype is 'bf16', known: auto, float32, bfloat16, float16"),
        ("sampling:\n  early_stopping: maybe\n", "sampling.early_stopping is 'maybe', known: never, true, false"),
        ("sampling:\n  temprature: 1\n", "unknown key 'temprature' in sampling"),
        ("engine:\n  prefix_store_key: k\n", "prefix_store_key was removed, leave it out: a prefix"),
        ("engine:\n  prefix_store_read: auto\n", "prefix_store_read was removed, leave it out: a prefix store is"),
        ("samplin:\n  n: 1\n", "unknown key 'samplin' in the file"),
        ("block_size: 8\n", "unknown key 'block_size' in the file"),
        ("engine: 8\n", "must hold sections with keys"),
        ("sampling:\n  n: 1\n  n: 2\n", "the key 'n' occurs twice"),
        ("sampling: {n: 1}\nsampling: {n: 2}\n", "the key 'sampling' occurs twice"),
        ("sampling:\n  logit_bias: {x: 1}\n", "a key of sampling.logit_bias is of the wrong type"),
        ("engine:\n  block_size: 0\n", "block_size is 0, allowed: 1 to 1048576"),
    ],
    ids=lambda value: value[:30],
)
def test_a_wrong_file_is_refused_in_words(tmp_path, text, what):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert what in raised.value.message
    assert "`" not in raised.value.message
    assert "$" not in raised.value.message


def test_a_report_of_a_bug_names_versions_and_kernels():
    result = run("--version", "--verbose")
    first, *lines = result.stdout.splitlines()
    assert first == f"pagedcli {pagedcli.__version__}"
    found = dict(re.split(r" {1,}", line, maxsplit=1) for line in lines)
    assert list(found) == [
        "Python", "system", "processor", "kernels",
        "torch", "triton", "transformers", "tokenizers", "safetensors", "llguidance",
    ]  # fmt: skip
    assert all(found.values())


@pytest.mark.parametrize(("text", "seconds"), [("1h30m", 5400), ("90 min", 5400), ("1.5d", 129_600), ("45", 45)])
def test_a_time_may_have_several_units(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["1h30", "h", "3 weeks", ""])
def test_a_time_of_other_units_is_refused_as_it_was_given(text):
    with pytest.raises(ConfigError, match=f"cannot read '{text}' as a time"):
        parse_seconds(text)
