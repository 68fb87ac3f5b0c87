"""`pagedcli plan`: predict how a prompt file uses this machine's KV cache, without generating anything."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedcli.answers.fits import NOT_PREDICTED, Fit, fits
from pagedcli.cli.doctor import engine_table
from pagedcli.cli.options import PLAN_KEYS, ConfigFile, Flags, FormatOption, config_flags, option
from pagedcli.cli.partings import advice_or_note, find_partings, in_words, or_note, with_settings
from pagedcli.cli.plan_sample import first_answer
from pagedcli.cli.plan_tables import full_tables, in_short, short_tables, survey_facts
from pagedcli.cli.prompt_scan import PROMPT_KEYS, PromptScan, ReadingLine, prompt_model, scan_prompts
from pagedcli.cli.summary import say_refused
from pagedcli.config import EngineConfig, LoadedConfig, load_config
from pagedcli.core.prefixes import BLOCK_SIZES
from pagedcli.errors import EXIT_BAD_ROWS, BackendError, UsageError
from pagedcli.planning.prompt_sample import MOST_TOKENS_OF_ALL, PromptSample
from pagedcli.planning.prompt_survey import UNIT
from pagedcli.printable import percent_text, plural
from pagedcli.show.tables import Format, Table, print_tables
from pagedcli.show.terminal import ProgressLine, say, say_wrapped, working
from pagedcli.verdicts import Verdict, refused_verdict

if TYPE_CHECKING:
    from pagedcli.answers.time import Forecast
    from pagedcli.batch.line_sample import LineSample
    from pagedcli.planning.decision import Decision
    from pagedcli.planning.parting import Parting
    from pagedcli.simulation.advice import Advice
    from pagedcli.simulation.settings import Subject
    from pagedcli.simulation.sources import PromptRequests

_time = partial(option, panel="Expected time")
_INPUT_HELP = "Input file (also .gz); - reads stdin."
_EXPECTED_HELP = "Tokens that rows generate, if that is less than their max_tokens."
_NO_CALIBRATE_HELP = "Load no model: without an earlier calibration there are no times."
_TUNE_HELP = "Only print the fastest settings as YAML, for -C of generate; times some in turns, for up to a minute."
_ALL_HELP = (
    "Show every table, and look in every row for where prompts part, not only in 20,000; of more than 67 million prompt"
    " tokens in as many rows as have so many. It takes about 0.05 GiB of memory per million."
)
_LONG_FILE_ADVICE_S = 5.0  # seconds of trials on the sample of a long file


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The flags of `plan` itself; `generate --dry-run` sets some of them."""

    prompts: Annotated[str, typer.Argument(metavar="PROMPTS.jsonl", help=_INPUT_HELP)]
    tokenizer: Annotated[Path | None, option(metavar="DIR", help="Tokenizer folder, instead of the model's own.")] = (
        None
    )
    expected_output: Annotated[int | None, _time(help=_EXPECTED_HELP, metavar="N", min=1)] = None
    outputs: Annotated[str | None, _time(help="Output of a finished run: its lengths.", metavar="OUT.jsonl")] = None
    no_calibrate: Annotated[bool, _time("--no-calibrate", help=_NO_CALIBRATE_HELP)] = False
    tune: Annotated[bool, option("--tune", help=_TUNE_HELP)] = False
    all_: Annotated[bool, option("--all", help=_ALL_HELP)] = False
    config: ConfigFile = None
    format_: FormatOption = Format.TABLE

    @property
    def lengths(self) -> str:
        """How long outputs are expected to be."""
        if self.outputs is not None:
            return f"output lengths: those of {self.outputs}"
        if self.expected_output is not None:
            return f"output lengths: {plural(self.expected_output, 'token')} each, or max_tokens where that is less"
        return "output lengths: max_tokens of every row (see --expected-output, --outputs)"


@config_flags(*PLAN_KEYS, *PROMPT_KEYS, "run.output_field", "run.keep", "run.reorder")
def plan(options: PlanOptions, *, flags: Flags) -> None:
    """Predict how long a prompt file takes and how it uses the KV cache, without generating anything.

    Begins with what to change: where prompts part although they are equal afterwards, and which settings would save.
    Then the expected time and the file in a few lines; with --all also prompt lengths, shared prefixes with their lines
    and text, waste at block sizes from 8 to 256, how much this machine can hold, and which kernels it would use.

    The first plan of a model on a machine loads the model and times steps for about ten seconds; later ones use what it
    measured. Settings that change the time of a step are tried by --tune alone.

    \b
    Examples:
      pagedcli plan prompts.jsonl
      pagedcli plan prompts.jsonl -m Qwen/Qwen3-0.6B --max-tokens 64
      pagedcli plan prompts.jsonl --max-tokens 512 --expected-output 180
      pagedcli plan mt_bench_question.jsonl --field turns --tokenizer ./qwen2
      pagedcli plan prompts.jsonl --format json | jq .recommended_block_size

    Exit codes: 0 all rows are good, 2 wrong usage or configuration, 3 some rows are bad.
    """  # fmt: skip
    if options.expected_output is not None and options.outputs is not None:
        raise UsageError("--expected-output and --outputs both say how long outputs are", hint="use one of them")
    if options.tune and options.no_calibrate:
        raise UsageError("--tune times steps", hint="leave out --no-calibrate")
    raise typer.Exit(run_plan(load_config(options.config, flags), options))


def run_plan(loaded: LoadedConfig, options: PlanOptions) -> int:
    """Print the plan of a prompt file, or with --tune only the best settings, as YAML. Returns the exit code."""
    from pagedcli.answers.hits import NEARLY, Hits, hits
    from pagedcli.answers.time import MOST_IN_FULL, SAMPLED
    from pagedcli.cli.tuning import tuned_settings
    from pagedcli.simulation.advice import ADVICE_S, advise
    from pagedcli.simulation.run import Schedule
    from pagedcli.simulation.tables import advice_table, curve_table

    engine = loaded.config.engine
    survey = _survey(loaded, options)
    scan, fit = survey.scan, survey.fit
    code = EXIT_BAD_ROWS if scan.num_bad else 0
    _say_what_is_missing(survey)
    facts, advice, enough = survey_facts(scan, fit), None, None
    run_tables: list[Table] = []
    run: _ExpectedRun | None = None
    if survey.is_of_a_run and options.tokenizer is None:
        run = _expected_run(loaded, survey, options)
        if options.tune:
            print(tuned_settings(run.subject, run.found, loaded), end="")
            return code
        subject, budget_s = run.subject, ADVICE_S
        base: Forecast | None = run.found
        if survey.requests.work + survey.requests.left_out > MOST_IN_FULL:
            workload, left_out = survey.requests.part(SAMPLED)
            subject, base, budget_s = replace(subject, workload=workload, left_out=left_out), None, _LONG_FILE_ADVICE_S
        with working("looking for the smallest pool that is enough"):
            schedule = Schedule(read_ahead=subject.read_ahead)
            search = partial(hits, subject.in_order, subject.plan, schedule, search_s=budget_s)
            found_in_pools: Hits | None = or_note("the smallest pool that is enough", search, None)
        with working("trying other settings"):
            advice = advice_or_note(partial(advise, subject, base=base, budget_s=budget_s, found=found_in_pools))
        run_tables = [*run.tables, advice_table(advice)]
        if found_in_pools is not None:
            enough = found_in_pools.enough.num_blocks if found_in_pools.unlimited.hit_rate > NEARLY else None
            if options.all_ and options.format_ is Format.TABLE:
                run_tables.append(curve_table(found_in_pools, subject.plan.block_bytes))
        facts |= {"forecast": run.facts, **advice.document(), "recommended_num_blocks": enough}
    elif options.tune:
        raise UsageError("--tune needs a model whose memory is predicted, and a valid row", hint="name it with -m")
    is_short = options.format_ is Format.TABLE and not options.all_
    if is_short:
        tables = short_tables(run_tables, scan, fit, enough)
    else:
        tables = [*run_tables, *full_tables(scan, engine, fit, enough)]
    found = survey.refusal if survey.decision is None else survey.decision.expected_plan
    if found is not None and (not is_short or survey.decision is None):
        tables.append(engine_table("Engine settings on this machine", found))
    partings = _partings(scan, engine)
    verdicts = [*_refused(scan), *_verdicts(partings, engine, advice, scan.drawn.not_drawn, options)]
    forecast, time = (None, None) if run is None else (run.found, run.time)
    sizes = [each.block_size for each in partings if each.action == "block size"]  # The verdicts name them.
    if sizes:
        facts["recommended_block_size"] = sizes[0]
    elif advice is not None:
        facts["recommended_block_size"] = engine.block_size
    best_size, num_beams = None if sizes else facts["recommended_block_size"], survey.requests.num_beam_searches
    shortly = in_short(scan, forecast, time, best_size, num_beam_searches=num_beams)
    print_tables(tables, options.format_, facts=facts, verdicts=verdicts, in_short=shortly)
    return code


def _partings(scan: PromptScan, engine: EngineConfig) -> "list[Parting]":
    """Where prompts part; of drawn ones with the hits of the whole file as it is, where it has any."""
    block_size, rates = engine.block_size, dict[int, float]()
    if engine.enable_prefix_caching:
        sizes = [size for size in {*BLOCK_SIZES, block_size} if size <= block_size and not size % UNIT]
        rates = {size: scan.plan.ideal_hit_rate(size) for size in sizes}
    return find_partings(scan.drawn, block_size, scan.tokenizer, rates_in_file=rates)


def _refused(scan: PromptScan) -> list[Verdict]:
    """How many rows a run would refuse, and the first one."""
    if not scan.bad_rows:
        return []
    first = scan.bad_rows[0]
    return [refused_verdict(scan.num_bad, scan.num_rows, first["line"], first["message"], has_run=False)]


def _verdicts(
    partings: "list[Parting]",
    engine: EngineConfig,
    advice: "Advice | None",
    not_drawn: str | None,
    options: PlanOptions,
) -> list[Verdict]:
    """Where prompts part, what settings would save, or that nothing is to change."""
    found = in_words(partings, is_cached=engine.enable_prefix_caching, has_all=options.all_)
    if advice is None:
        return found
    left = not_drawn if not_drawn is None or options.all_ else f"{not_drawn} (--all: every row)"
    return with_settings(found, advice, left)


# ---------------------------------------------------------------------- the run that a file would be


@dataclass(frozen=True, slots=True)
class _Survey:
    """What one pass over a file has found, for the forecast and the adviser."""

    scan: PromptScan
    requests: "PromptRequests"
    decision: "Decision | None"  # None: there is no model, or its engine would refuse to start
    fit: Fit | None  # what this machine holds of the model, if it is predicted
    refusal: str | None  # why it would

    @property
    def is_of_a_run(self) -> bool:
        """Whether there is an engine with a pool, and a row for it."""
        return self.fit is not None and self.fit.num_kvcache_blocks > 0 and bool(self.requests.workload.requests)


def _say_what_is_missing(survey: _Survey) -> None:
    if not survey.scan.plan.num_prompts:
        say("this file has no valid row, so there is nothing to plan (see --field if prompts have another name)")
    if survey.decision is not None and survey.decision.pool is None:
        say(f"no forecast: {NOT_PREDICTED}")


def _survey(loaded: LoadedConfig, options: PlanOptions) -> _Survey:
    """What is found in the file, after saying what a sample of a long one lets expect."""
    from pagedcli.answers.time import MOST_SIMULATED
    from pagedcli.planning.decide import decide
    from pagedcli.planning.machine import this_machine
    from pagedcli.process import old_objects_left_alone
    from pagedcli.simulation.sources import PromptRequests, read_outputs

    input_name, decision, refusal = options.prompts, None, None
    folder, spec = prompt_model(loaded, options.tokenizer)
    try:
        if spec is not None:
            decision = decide(loaded.config.engine, spec, this_machine(free_memory=True))
            say_refused(decision.plan)
    except BackendError as error:  # the rest of the plan is still useful
        refusal = error.message
    outputs = None if options.outputs is None else read_outputs(options.outputs)
    requests = PromptRequests(input_name, outputs, expected_tokens=options.expected_output, most_tokens=MOST_SIMULATED)
    fit = None if decision is None or decision.pool is None else fits(decision)
    running = None if fit is None or not fit.num_kvcache_blocks else fit.decision
    first = None
    if outputs is None and (sample := _sample(loaded, options)) is not None:
        own = PromptRequests(input_name, expected_tokens=options.expected_output)
        first = first_answer(loaded, sample, folder, spec, running, own)
    if first is not None:
        say_wrapped(f"{first.in_words}; reading all of them")

    def estimate(share: float) -> None:
        if first is None and running is not None and requests.workload.requests:
            _say_estimate(loaded, running, requests, share)

    reading = ReadingLine(input_name, loaded.config.run.limit, estimate)
    with old_objects_left_alone():
        scan = scan_prompts(
            loaded,
            input_name,
            folder,
            spec,
            limits=None if fit is None else fit.decision.expected_plan.limits,
            requests=requests,
            tokenizer=None if first is None else first.scan.tokenizer,
            drawn=PromptSample(inf, MOST_TOKENS_OF_ALL) if options.all_ else None,
            observe=reading.observe,
        )
    reading.close()
    return _Survey(scan, requests, decision, fit, refusal)


def _sample(loaded: LoadedConfig, options: PlanOptions) -> "LineSample | None":
    """Rows from all over a long file; None for a short one, and what cannot be read anywhere."""
    from pagedcli.batch.columns import Columns
    from pagedcli.batch.line_sample import sample_lines
    from pagedcli.batch.prompts import open_source

    # a pipe gives its rows once: it is opened by the one that reads all of it
    if loaded.config.run.limit is not None or not Path(options.prompts).is_file():
        return None
    return sample_lines(open_source(options.prompts, Columns.of(loaded.config.run)))


def _say_estimate(loaded: LoadedConfig, decision: "Decision", requests: "PromptRequests", share: float) -> None:
    """Say what the beginning of a long file lets expect, while the rest is read."""
    from pagedcli.answers.time import SAMPLED, time
    from pagedcli.planning.step_time import load_step_time

    workload, left_out = requests.part(SAMPLED)
    step_time = load_step_time(decision.time_key)
    left_out += (requests.work + requests.left_out) * (1 / share - 1)
    read_ahead = loaded.config.run.read_ahead
    found = time(workload, decision.expected_plan, step_time, read_ahead=read_ahead, left_out=left_out)
    parts = [plural(found.num_requests, "prompt"), plural(found.num_prompt_tokens, "token")]
    if found.in_words is not None:
        parts.append(found.in_words)
    say(f"estimate from the first {percent_text(share)} of the file: about {', '.join(parts)}; reading the rest")


@dataclass(frozen=True, slots=True)
class _ExpectedRun:
    """The run that a file would be."""

    subject: "Subject"  # what advice is given for
    found: "Forecast"
    facts: dict[str, Any]  # fields of the JSON
    tables: list[Table]
    time: str | None  # time and its range in words; None: there is no calibration


def _expected_run(loaded: LoadedConfig, survey: _Survey, options: PlanOptions) -> _ExpectedRun:
    from pagedcli.answers.time import time, with_hits_of_all
    from pagedcli.bench.calibration import step_time_here
    from pagedcli.simulation.caches import accesses_of, ideal_hit_rate
    from pagedcli.simulation.forecast_tables import forecast_row, forecast_table, parts_table
    from pagedcli.simulation.settings import Subject

    decision, run, requests = survey.decision, loaded.config.run, survey.requests
    assert decision is not None, "it has a pool"
    plan = decision.expected_plan
    workload, progress = requests.workload, ProgressLine(line_every_s=5.0)

    def show(text: Callable[[Any], str], value: float) -> None:
        progress.show(lambda _: text(value))

    step_time, source = step_time_here(
        decision,
        may_calibrate=not options.no_calibrate,
        say=say,
        on_progress=partial(show, "calibrating: {:.0%}".format),
    )
    num_requests = plural(len(workload.requests), "request")
    of_plan = partial(
        time,
        workload,
        step_time=step_time,
        reorder=run.reorder,
        read_ahead=run.read_ahead,
        observe=partial(show, ("simulating: {:,} of " + num_requests).format),
        left_out=requests.left_out,
    )
    found = of_plan(plan)
    if found.share < 1 and plan.limits.block_size in BLOCK_SIZES and plan.limits.enable_prefix_caching:
        ideal = ideal_hit_rate(accesses_of(workload, plan.limits.block_size))
        of_all = survey.scan.plan.ideal_hit_rate(plan.limits.block_size)
        found = with_hits_of_all(found, ideal_of_sample=ideal, ideal_of_all=of_all)
    notes = [options.lengths, *workload.notes]
    if decision.plan.no_drafts is not None:
        notes.append(f"speculation: off, as {decision.plan.no_drafts}")
    if requests.num_beam_searches:
        notes.append(f"{plural(requests.num_beam_searches, 'row')} with beam search: left out")
    if any(each.num_samples > 1 and each.is_random and each.output_ids is None for each in workload.requests):
        notes.append("rows with several samples: near, not exact, as samples that draw the same tokens share blocks")
    tables = [forecast_table(found, num_blocks=plan.num_blocks, source=source, notes=notes)]
    if found.seconds is not None:
        tables.append(parts_table(found))
    subject = Subject(
        workload,
        plan,
        reorder=run.reorder,
        may_reorder=run.reorder == "none",
        read_ahead=run.read_ahead,
        step_time=step_time,
        left_out=requests.left_out,
    )
    progress.close()
    facts = {**forecast_row(found), "time_source": source}
    return _ExpectedRun(subject, found, facts, tables, found.in_words)
