"""`pagedcli profile-memory`: where memory goes, how many KV blocks fit, and what N requests need."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

from pagedcli import runner
from pagedcli.answers import fits as answers
from pagedcli.answers.fits import AtOnce, Fit, Held, MemoryTerm, ServedNeed
from pagedcli.answers.survey import prompt_model, scan_prompts
from pagedcli.cli.options import MEASURED_KEYS, PROMPT_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import ConfigError, UsageError
from pagedcli.planning.cards import CARDS
from pagedcli.planning.prompt_survey import percentile
from pagedcli.printable import plural
from pagedcli.records import as_row, percent, size
from pagedcli.show.tables import Format, Table, print_tables, table
from pagedcli.show.terminal import say
from pagedcli.views.cache_groups import group_lines

_requests = partial(option, panel="Requests")
_ALL_HELP = "Show every table, also other request lengths, layer groups, weight formats and KV dtypes."
_described = partial(option, panel="Prediction for another machine (no GPU or weights needed)", metavar="BYTES")


@config_flags(*MEASURED_KEYS, *PROMPT_KEYS)
def profile_memory(
    *,
    prompts: Annotated[
        str | None, _requests(metavar="FILE", help="Also show how many requests of this file's lengths fit at once.")
    ] = None,
    target_concurrency: Annotated[
        int | None, _requests(metavar="N", min=1, help="Also show what N concurrent requests need.")
    ] = None,
    gpu: Annotated[str | None, _described(help="GPU model: " + ", ".join(CARDS) + ".", metavar="NAME")] = None,
    gpu_memory: Annotated[str | None, _described(help="Total memory of the GPU, e.g. 24GiB.")] = None,
    memory: Annotated[str | None, _described(help="Total memory of a machine without a GPU, e.g. 24GiB.")] = None,
    others: Annotated[str | None, _described(help="Memory that other processes hold, not counting this model.")] = None,
    used: Annotated[str | None, _described(help="Memory that all processes use, with this model loaded.")] = None,
    peak: Annotated[str | None, _described(help="Peak allocation of this process, during the largest step.")] = None,
    current: Annotated[str | None, _described(help="Allocation of this process with the model loaded.")] = None,
    all_: Annotated[bool, option("--all", help=_ALL_HELP)] = False,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Show where memory goes, how many KV blocks fit, and how many requests they serve.

    Begins with the number of blocks that fit and of sequences that they hold, or with how much memory is missing; then
    shows where the memory goes, or what --prompts asks for. --all and formats other than table show every table.

    Loads the model, runs the largest step that the limits allow, and measures it. With --gpu, --gpu-memory or --memory,
    or for a model that does not fit here, it predicts from config.json alone.

    \b
    Examples:
      pagedcli profile-memory
      pagedcli profile-memory -m Qwen/Qwen3-0.6B --prompts prompts.jsonl
      pagedcli profile-memory -m ./Qwen3-0.6B --gpu h200 --target-concurrency 512
      pagedcli profile-memory -m Qwen3-30B-A3B/config.json --quantization int4 --memory 24GiB
      pagedcli profile-memory -m ./Qwen3-0.6B --block-size 256 --gpu-memory 24GiB
               --used 3.69GiB --peak 1.58GiB --current 1.14GiB

    Exit codes: 0 success, 2 wrong usage or configuration, or no block fits.
    """  # fmt: skip

    loaded = load_config(config, flags)
    engine = loaded.config.engine
    profile = runner.memory_profile
    described = profile.read_described(gpu, gpu_memory, memory, used=used, others=others, peak=peak, current=current)
    fit = profile.profile_here(engine, say) if described is None else profile.profile_described(engine, described)
    lengths, shared = ({}, None) if prompts is None else _lengths_of(loaded, prompts)
    lengths = {"model length": fit.max_model_len} | lengths
    story = [answers.fit_in_words(fit), answers.groups_and_states(fit), answers.left_in_words(fit)]
    at_once, target = _concurrency_table(fit, lengths, shared), list[Table]()
    if target_concurrency is not None:
        needs = list(answers.target_rows(fit, target_concurrency, lengths, shared or 0))
        target.append(_target_table(target_concurrency, needs))
        story.append(_need(fit, target_concurrency, needs[-1]))
    tables = [_waterfall_table(fit)] if prompts is None else [at_once, *target]
    if format_ is not Format.TABLE or all_:
        tables = [_waterfall_table(fit), at_once, *_group_tables(fit, lengths), *_format_tables(fit), *target]
    print_tables(tables, format_, facts=as_row(fit) | {"shared_prefix_tokens": shared}, story=[*filter(None, story)])
    if not fit.num_kvcache_blocks:
        hint = answers.would_fit(fit) if fit.known is not None and fit.missing_bytes else fit.pool.hint
        raise ConfigError(fit.num_kvcache_blocks_reason, hint=hint)


def _lengths_of(loaded: LoadedConfig, prompts: str) -> tuple[dict[str, int], int]:
    """Percentiles of the file's prompt and output lengths, and the prefix shared by half of the prompts."""
    scan = scan_prompts(loaded, prompts, *prompt_model(loaded, None))
    if scan.num_bad:
        say(f"{scan.num_bad:,} of {plural(scan.num_rows, 'row')} are invalid and ignored: see pagedcli plan")
    if not scan.plan.num_prompts:
        raise UsageError(f"{prompts} has no valid row", hint="see pagedcli plan")
    shares = {"file p50": 0.5, "file p95": 0.95, "file max": 1.0}
    found = {name: percentile(scan.plan.total_lengths, share) for name, share in shares.items()}
    return found, scan.plan.common_prefix_tokens()


def _need(fit: Fit, num_requests: int, need: ServedNeed) -> str:
    """What num_requests of the longest requests need at once, in a sentence."""
    numbers = (need.device_bytes, need.kv_cache_bytes, fit.weights_bytes, fit.total_bytes)
    whole, cache, weights, total = map(size, numbers)
    return (
        f"{plural(num_requests, 'request')} of {need.num_tokens:,} tokens at once need {whole}, with {cache} of KV"
        f" cache and {weights} of weights: {total} {'is' if need.fits else 'is not'} enough."
    )


def _target_table(num_requests: int, needs: list[ServedNeed]) -> Table:
    title, columns = f"What {num_requests:,} concurrent requests need", "at num_blocks kv_cache_bytes device_bytes"
    return table(ServedNeed, "target", title, needs, f"{columns} utilization fits")


def _waterfall_table(fit: Fit) -> Table:
    columns, headers = "name predicted_bytes note", {"predicted_bytes": "bytes"}
    if fit.measured:
        predicted = "predicted_bytes difference" if fit.forecast is not None else ""
        columns, headers = f"name measured_bytes {predicted} note", {}
    notes = [
        f"room for KV = {answers.budget_formula(fit)}",
        f"bytes/block = {answers.block_formula(answers.largest_group(fit), fit.block_size, fit.kv_dtype)}",
        *answers.cache_tensors(fit),
    ]
    num_ranks = fit.decision.config.tensor_parallel_size
    title = f"Memory of {fit.model}" + (f", each of {num_ranks} ranks" if num_ranks > 1 else "")
    return table(MemoryTerm, "waterfall", title, answers.waterfall(fit), columns, headers=headers, notes=notes)


def _concurrency_table(fit: Fit, lengths: Mapping[str, int], shared: int | None) -> Table:
    notes = []
    columns = "at num_tokens num_blocks max_concurrency max_concurrency_left"
    if shared:
        columns = columns.replace("_left", "_shared max_concurrency_left")
        notes.append(f"at least half of the rows share their first {shared:,} tokens; only full blocks are shared")
    elif shared == 0:
        notes.append("no prefix is shared by half of the rows")
    title = f"Requests that fit into the pool as configured, {plural(fit.num_kvcache_blocks, 'block')}"
    headers = {"max_concurrency_shared": f"requests sharing {plural(shared, 'token')}"} if shared else {}
    rows = answers.concurrency_rows(fit, lengths, shared)
    return table(AtOnce, "concurrency", title, rows, columns, headers=headers, notes=notes)


def _group_tables(fit: Fit, lengths: Mapping[str, int]) -> list[Table]:
    """What one sequence holds, where layers differ in windows or heads."""
    limits, block_bytes, length = fit.limits, fit.block_bytes, plural(fit.max_model_len, "token")
    if len(limits.groups) == 1 and not limits.tables.has_windows:
        return []
    rows = list(answers.group_rows(lengths, limits, block_bytes))
    longest = [row for row in rows if row.num_tokens == fit.max_model_len]
    unused = sum(row.unused_bytes for row in longest) / sum(row.kv_cache_bytes for row in longest)
    notes = [
        f"a block holds {limits.block_size} tokens of the layers of a group; blocks: while it generates; in prefill: at"
        f" most, with chunks of {plural(limits.chunk_size, 'token')}",
        f"unused: what the layers leave of these blocks, {percent(unused)} of the KV cache of a sequence of {length}",
        "if kept: the same layers, if no block were released before the sequence ends",
        *group_lines(limits.groups, block_size=limits.block_size, block_bytes=block_bytes),
    ]
    if num_shared := sum(layer.source is not None for layer in fit.decision.own.attention_layers):
        notes.append(f"without blocks: {plural(num_shared, 'layer')} sharing the K and V of an earlier layer")
    return [table(Held, "groups", "What one sequence holds, by window and heads", rows, notes=notes)]


_FORMAT_COLUMNS = "flags weights_bytes room_bytes token_bytes longest_request_left_tokens max_concurrency_left"


def _format_tables(fit: Fit) -> list[Table]:
    """What else could be chosen, where it is predicted."""
    formats = answers.other_formats(fit)
    keys = ("weight_format", "kv_dtype", "num_kvcache_blocks", "max_concurrency", *_FORMAT_COLUMNS.split())
    rows = [{key: getattr(each, key) for key in keys} for each in (fit, *formats)]
    notes = [f"at model length: requests of {plural(fit.max_model_len, 'token')} at once"]
    title = "What fits into all that is left, by weight format and KV dtype"
    return [table(Fit, "fits", title, rows, _FORMAT_COLUMNS, notes=notes)] if formats else []
