"""`pagedcli plan`: predict how a prompt file uses this machine's KV cache, without generating anything."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcli import bench, planning
from pagedcli.answers.cures import CURES_S, Cure
from pagedcli.answers.fits import NOT_PREDICTED, Fit, fits
from pagedcli.answers.hits import Hits, hits
from pagedcli.answers.settings import Subject
from pagedcli.answers.survey import FirstAnswer, PromptScan, first_answer, prompt_model, scan_prompts
from pagedcli.answers.time import MOST_IN_FULL, MOST_SIMULATED, SAMPLED, Forecast, time, with_hits_of_all
from pagedcli.batch.columns import Columns
from pagedcli.batch.line_sample import LineSample, sample_lines
from pagedcli.batch.lines import Line
from pagedcli.batch.prompts import open_source
from pagedcli.cli.cures import find_cures, or_note, print_answer
from pagedcli.cli.options import FLAGS, PLAN_KEYS, PROMPT_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.cli.plan_tune import tuned_settings
from pagedcli.cli.run_flags import GenerateOptions
from pagedcli.cli.summary import say_ignored, say_refused
from pagedcli.config import EngineConfig, LoadedConfig, load_config
from pagedcli.core.prefixes import BLOCK_SIZES
from pagedcli.errors import EXIT_BAD_ROWS, BackendError, UsageError
from pagedcli.planning.prompt_sample import MOST_TOKENS_OF_ALL, PromptSample
from pagedcli.planning.prompt_survey import UNIT
from pagedcli.printable import capitalized, duration_text, percent_text, plural, refused_text
from pagedcli.process import old_objects_left_alone
from pagedcli.show.plan_tables import engine_table, file_table, forecast_row, full_tables, run_tables, survey_facts
from pagedcli.show.simulation_tables import curve_table
from pagedcli.show.tables import Format
from pagedcli.show.terminal import ProgressLine, say, say_wrapped, working
from pagedcli.simulation.caches import accesses_of, ideal_hit_rate
from pagedcli.simulation.sources import PromptRequests, read_outputs

_time = partial(option, panel="Expected time")
_INPUT_HELP = "Input file (also .gz); - reads stdin."
_EXPECTED_HELP = "Expected tokens generated per row, where fewer than its max_tokens."
_NO_CALIBRATE_HELP = "Don't load the model: times are given only if it was calibrated before."
_TUNE_HELP = "Only print the fastest settings as YAML, for generate -C; times candidates for up to a minute."
_ALL_HELP = (
    "Show every table, and look for where prompts diverge in all rows, up to 67 million prompt tokens, instead of in"
    " 20,000. Takes about 0.05 GiB of memory per million tokens."
)
_CHANGE_THE_RUN = ("--resume", "--reuse", "--shard", "--ray", "--ray-address")  # what a plan knows nothing of
_SEVERAL_SAMPLES = "rows with several samples: near, not exact, as samples that draw the same tokens share blocks"
_LONG_FILE_CURES_S = 5.0  # seconds of trials on the sample of a long file


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The flags of `plan` itself; `generate --dry-run` sets some of them."""

    prompts: Annotated[str, typer.Argument(metavar="PROMPTS.jsonl", help=_INPUT_HELP)]
    tokenizer: Annotated[
        Path | None, option(metavar="DIR", help="Folder of the tokenizer, instead of the model's.")
    ] = None
    expected_output: Annotated[int | None, _time(help=_EXPECTED_HELP, metavar="N", min=1)] = None
    outputs: Annotated[
        str | None, _time(help="Take the output lengths from the output of an earlier run.", metavar="OUT.jsonl")
    ] = None
    no_calibrate: Annotated[bool, _time("--no-calibrate", help=_NO_CALIBRATE_HELP)] = False
    tune: Annotated[bool, option("--tune", help=_TUNE_HELP)] = False
    all_: Annotated[bool, option("--all", help=_ALL_HELP)] = False
    config: ConfigFile = None
    format_: FormatOption = Format.TABLE

    @property
    def lengths(self) -> str:
        """How long outputs are expected to be."""
        if self.outputs is not None:
            return f"output lengths: from {self.outputs}"
        if self.expected_output is not None:
            return f"output lengths: {plural(self.expected_output, 'token')} each, or max_tokens if smaller"
        return "output lengths: max_tokens of every row (see --expected-output, --outputs)"


@config_flags(
    *(*PLAN_KEYS, *PROMPT_KEYS, "sampling.n", "run.output_field", "run.keep", "run.reorder", "run.max_time"),
    hidden=FLAGS,
    ignored=GenerateOptions,
)
def plan(options: PlanOptions, *, flags: Flags, without: list[str]) -> None:
    """Predict how long a prompt file takes and how it uses the KV cache, without generating anything.

    Begins with the expected time and the share of tokens from the cache. Then come changes that are sure to help: to
    prompts that diverge although the rest of them is equal, and to settings. Then the file in a few lines; with --all
    also the expected run, prompt lengths, shared prefixes with their lines and text, waste at block sizes from 8 to
    256, how much this machine can hold, and which kernels it would use.

    It takes all flags of generate; those without effect on the forecast are not listed.

    The first plan of a model on a machine loads the model and times steps for about ten seconds; later plans reuse
    these times. Only --tune tries settings that change the time of a step.

    \b
    Examples:
      pagedcli plan prompts.jsonl
      pagedcli plan prompts.jsonl -m Qwen/Qwen3-0.6B --max-tokens 64
      pagedcli plan prompts.jsonl --max-tokens 512 --expected-output 180
      pagedcli plan mt_bench_question.jsonl --field turns --tokenizer ./qwen2
      pagedcli plan prompts.jsonl --format json | jq .forecast.hit_rate

    Exit codes: 0 all rows are good, 2 wrong usage or configuration, 3 some rows are bad.
    """  # fmt: skip
    if options.expected_output is not None and options.outputs is not None:
        raise UsageError("--expected-output and --outputs both set the output lengths", hint="use one of them")
    if options.tune and options.no_calibrate:
        raise UsageError("--tune times steps", hint="leave out --no-calibrate")
    loaded = load_config(options.config, flags)
    missing = [each for each in without if each in _CHANGE_THE_RUN]
    missing += ["--prefix-store"] if loaded.config.engine.prefix_store is not None else []
    if missing:
        say(f"note: this is the plan of a run without {', '.join(missing)}")
    raise typer.Exit(run_plan(loaded, options))


@dataclass(frozen=True, slots=True)
class _File:
    """What one pass over a file has found."""

    scan: PromptScan
    requests: PromptRequests
    decision: "planning.decision.Decision | None"  # None: there is no model, or its engine would refuse to start
    fit: Fit | None  # None: the memory of this model is not predicted
    refusal: str | None  # why it would

    @property
    def is_of_a_run(self) -> bool:
        """Whether there is an engine with a pool, and a row for it."""
        return self.fit is not None and self.fit.num_kvcache_blocks > 0 and bool(self.requests.workload.requests)


def run_plan(loaded: LoadedConfig, options: PlanOptions) -> int:
    """Print the plan of a prompt file, or with --tune only the best settings, as YAML. Returns the exit code."""
    file = _read(loaded, options)
    scan, is_table = file.scan, options.format_ is Format.TABLE
    code = EXIT_BAD_ROWS if scan.num_bad else 0
    if not scan.plan.num_prompts:
        say("the file has no valid row, so there is nothing to plan (--field names the field of the prompt)")
    if file.decision is not None and file.decision.pool is None:
        say(f"no forecast: {NOT_PREDICTED}")
    run = _expected_run(loaded, file, options) if file.is_of_a_run and options.tokenizer is None else None
    if options.tune:
        if run is None:
            raise UsageError(
                "--tune needs a model whose memory can be predicted, and a valid row", hint="name the model with -m"
            )

        print(tuned_settings(run.subject, run.found, loaded), end="")
        return code
    with working("looking for changes that help"):
        tried = None if run is None else _tried(file, run)
        pools = None if tried is None else _pools(*tried)
        cures = _cures(loaded.config.engine, file.scan, tried, pools)
    facts = survey_facts(scan, file.fit)
    facts |= {} if run is None else {"forecast": {**forecast_row(run.found), "time_source": run.source}}
    facts |= {} if pools is None else {"enough": pools.document()}
    if is_table and not options.all_:
        doubts = [] if run is None or _SEVERAL_SAMPLES not in run.notes else [_SEVERAL_SAMPLES]
        tables = [file_table(scan, file.fit, None if run is None else run.found, pools, doubts)]
    else:
        tables = full_tables(scan, file.fit)
        if run is not None and options.format_ is not Format.JSON:  # JSON has these figures as facts
            tables = [*run_tables(run.found, run.subject.num_blocks, run.source, run.notes), *tables]
    if pools is not None and pools.unlimited.hit_rate and is_table and options.all_:
        tables.append(curve_table(pools, None if file.fit is None else file.fit.block_bytes))
    engine = file.refusal if file.decision is None else file.decision.expected_plan
    if engine is not None and (options.all_ or not is_table or file.decision is None):
        tables.append(engine_table("Engine settings on this machine", engine))
    print_answer(_answer(file, run, loaded.config.run.max_time), cures, tables, options.format_, facts)
    say_ignored(scan.ignored, scan.first_ignored)
    return code


def _answer(file: _File, run: "_ExpectedRun | None", max_time: float | None) -> list[str]:
    """How long the file takes, and how much of it comes from the cache; and how many rows a run would refuse."""
    scan, survey = file.scan, file.scan.plan
    of_all = f"{scan.num_valid:,} of " if scan.num_bad else ""
    parts, refused = [of_all + plural(scan.num_rows, "row")], list[str]()
    if run is not None:
        found = run.found
        parts += [
            _count(found.num_prompt_tokens, "prompt token"),
            f"{percent_text(found.hit_rate)} of them from the cache",
        ]
        parts.append(f"{found.num_generated_tokens:,} to generate")
    elif survey.num_prompts:
        parts += [_count(survey.prompt_tokens, "prompt token"), f"up to {survey.output_tokens:,} to generate"]
    if num := file.requests.num_beam_searches:
        parts.append(f"without {plural(num, 'row')} of beam search")
    time = _here(None if run is None else run.found)
    why = f". Time unknown: {run.source.replace(': ', '; ', 1)}" if run is not None and not time else ""
    if scan.bad_rows:
        first = scan.bad_rows[0]
        refused = [refused_text(scan.num_bad, scan.num_rows, first["line"], first["message"], has_run=False)]
    served = [f"{time}{', '.join(parts)}{why}."] if scan.num_valid or not scan.num_bad else []
    if max_time is not None and run is not None and run.found.low is not None and run.found.low > max_time:
        served.append(f"--max-time ends the run after {duration_text(max_time)}, before its last row.")
    return [*served, *refused]


def _count(number: float, noun: str) -> str:
    return plural(round(number), noun) if number < 999_950 else f"{number / 1e6:,.1f} million {noun}s"


def _here(run: Forecast | None) -> str:
    """The expected time at the beginning of a sentence; empty: it is not known."""
    if run is None or run.in_words is None:
        return ""
    return f"{capitalized(run.in_words)} here: "


Tried = tuple[Subject, Forecast | None, float]
"""The run that other pools and settings are tried on; None: it has not been simulated; and seconds of trials."""


def _tried(file: _File, run: "_ExpectedRun") -> Tried:
    """Of a long file a part of its requests."""

    if file.requests.work + file.requests.left_out <= MOST_IN_FULL:
        return run.subject, run.found, CURES_S
    workload, left_out = file.requests.part(SAMPLED)
    return replace(run.subject, workload=workload, left_out=left_out), None, _LONG_FILE_CURES_S


def _pools(subject: Subject, base: Forecast | None, budget_s: float) -> Hits | None:
    """What other pools find; None if looking for it failed."""

    search = partial(hits, subject.in_order, subject.plan, subject.schedule, search_s=budget_s)
    return or_note("the smallest pool that is enough", search, None)


def _cures(engine: EngineConfig, scan: PromptScan, tried: Tried | None, pools: Hits | None) -> list[Cure]:
    """What to change."""
    size, rates = engine.block_size, dict[int, float]()
    if engine.enable_prefix_caching:
        sizes = [each for each in {*BLOCK_SIZES, size} if each <= size and not each % UNIT]
        rates = {each: scan.plan.ideal_hit_rate(each) for each in sizes}
    subject, base, budget_s = (None, None, None) if tried is None else tried
    how = {"base": base, "found": pools, "budget_s": budget_s, "rates_in_file": rates, "block_size": size}
    return find_cures(subject, prompts=scan.drawn, tokenizer=scan.tokenizer, **how)


def _read(loaded: LoadedConfig, options: PlanOptions) -> _File:
    """What is found in the file, after saying what a sample of a long one lets expect."""
    name, decision, refusal = options.prompts, None, None
    folder, spec = prompt_model(loaded, options.tokenizer)
    try:
        if spec is not None:
            machine = planning.machine.this_machine(free_memory=True)
            decision = planning.decide.decide(loaded.config.engine, spec, machine)
            say_refused(decision.plan)
    except BackendError as error:  # the rest of the plan is still useful
        refusal = error.message
    outputs = None if options.outputs is None else read_outputs(options.outputs)
    requests = PromptRequests(name, outputs, expected_tokens=options.expected_output, most_tokens=MOST_SIMULATED)
    fit = None if decision is None or decision.pool is None else fits(decision)
    first = None
    if outputs is None and (sample := _sample(loaded, options)) is not None:
        running = None if fit is None or not fit.num_kvcache_blocks else fit.decision
        own = PromptRequests(name, expected_tokens=options.expected_output)
        first = first_answer(loaded, sample, folder, spec, running, own)
    if first is not None:
        say_wrapped(f"{_first_words(first)}; reading all rows")
    progress = ProgressLine(line_every_s=5.0)

    def observe(line: Line) -> None:
        progress.show(lambda _: f"reading the prompts: {plural(line.index, 'row')}")

    with old_objects_left_alone():
        scan = scan_prompts(
            loaded,
            name,
            folder,
            spec,
            limits=None if fit is None else fit.decision.expected_plan.limits,
            requests=requests,
            tokenizer=None if first is None else first.scan.tokenizer,
            drawn=PromptSample(inf, MOST_TOKENS_OF_ALL) if options.all_ else None,
            observe=observe,
        )
    progress.close()
    return _File(scan, requests, decision, fit, refusal)


def _sample(loaded: LoadedConfig, options: PlanOptions) -> LineSample | None:
    """Rows from all over a long file; None for a short one, and what cannot be read anywhere."""
    # a pipe gives its rows once: it is opened by the one that reads all of it
    if loaded.config.run.limit is not None or not Path(options.prompts).is_file():
        return None
    return sample_lines(open_source(options.prompts, Columns.of(loaded.config.run)))


def _first_words(first: FirstAnswer) -> str:
    """What a sample lets expect, in a sentence. Its counts have three digits: it does not know more."""
    rows, tokens = (float(f"{each.value:.3g}") for each in (first.rows, first.prompt_tokens))
    found = [f"about {_count(rows, 'row')}", _count(tokens, "prompt token")]
    if first.run is not None:
        found.append(f"at least {percent_text(first.run.hit_rate)} of them from the cache")
    if first.scan.num_bad:
        found.append(f"{percent_text(first.scan.num_bad / first.scan.num_rows)} of the rows bad")
    return f"{_here(first.run)}{', '.join(found)}, from {plural(first.scan.num_rows, 'row')} spread over the file"


@dataclass(frozen=True, slots=True)
class _ExpectedRun:
    """The run that a file would be."""

    subject: Subject  # the run that cures are about
    found: Forecast
    source: str  # origin of the times, or why there are none
    notes: list[str]


def _expected_run(loaded: LoadedConfig, file: _File, options: PlanOptions) -> _ExpectedRun:
    decision, run, requests = file.decision, loaded.config.run, file.requests
    assert decision is not None, "it has a pool"
    plan, workload, progress = decision.expected_plan, requests.workload, ProgressLine(line_every_s=5.0)

    def show(text: Callable[[Any], str], value: float) -> None:
        progress.show(lambda _: text(value))

    step_time, source = bench.calibration.step_time_here(
        decision,
        may_calibrate=not options.no_calibrate,
        say=say,
        on_progress=partial(show, "calibrating: {:.0%}".format),
    )
    num_requests = plural(len(workload.requests), "request")
    found = time(
        workload,
        plan,
        step_time,
        reorder=run.reorder,
        read_ahead=run.read_ahead,
        observe=partial(show, ("simulating: {:,} of " + num_requests).format),
        left_out=requests.left_out,
    )
    if found.share < 1 and plan.limits.block_size in BLOCK_SIZES and plan.limits.enable_prefix_caching:
        ideal = ideal_hit_rate(accesses_of(workload, plan.limits.block_size))
        of_all = file.scan.plan.ideal_hit_rate(plan.limits.block_size)
        found = with_hits_of_all(found, ideal_of_sample=ideal, ideal_of_all=of_all)
    notes = [options.lengths, *workload.notes]
    if decision.plan.no_drafts is not None:
        notes.append(f"speculation: off, as {decision.plan.no_drafts}")
    if any(each.num_samples > 1 and each.is_random and each.output_ids is None for each in workload.requests):
        notes.append(_SEVERAL_SAMPLES)
    progress.close()
    subject = Subject(
        workload,
        plan,
        reorder=run.reorder,
        may_reorder=run.reorder == "none",
        read_ahead=run.read_ahead,
        step_time=step_time,
        left_out=requests.left_out,
    )
    return _ExpectedRun(subject, found, source, notes)
