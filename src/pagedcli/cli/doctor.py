"""`pagedcli doctor`: this machine's capabilities, what pagedcli uses of them, and a self-test."""

from dataclasses import dataclass
from typing import Annotated

import typer

from pagedcli import planning, runner
from pagedcli.answers.fits import NOT_PREDICTED, Fit, fit_in_words, fits, groups_and_states
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.bench.rates import measure_rates
from pagedcli.cli.options import FormatOption
from pagedcli.config import BUILTIN_MODEL, EngineConfig
from pagedcli.core.plan import Plan
from pagedcli.errors import UsageError
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec
from pagedcli.planning.floors import StepFloor
from pagedcli.records import as_row, size
from pagedcli.show.plan_tables import engine_table
from pagedcli.show.tables import Fact, Format, Table, print_tables, table
from pagedcli.show.terminal import say

EXIT_FAILED = 1


def doctor(
    *,
    device: Annotated[str, typer.Option(help="Device to test: auto, cpu, cuda, cuda:1, ...")] = "auto",
    model: Annotated[str | None, typer.Option("--model", "-m", help="Check this model instead of the machine.")] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Check what this machine supports: attention backends (and why others are unavailable), kernels, and a self-test.

    The self-test runs the built-in model through prefix hits, preemption and chunked prefill, and compares each
    available attention backend with the reference. It takes a few seconds on a CPU.

    With --model it reads only the config.json of that model: how it runs here, how much memory it takes, and how
    fast it can be at most.

    \b
    Examples:
      pagedcli doctor
      pagedcli doctor -m Qwen/Qwen3-0.6B
      pagedcli doctor --device cuda
      pagedcli doctor --format json | jq '.self_test[] | select(.passed | not)'

    Exit codes: 0 all checks passed, or the model fits, 1 a check failed, or the model does not fit, 2 wrong usage,
    or an unsupported model.
    """  # fmt: skip
    if model is not None:
        _judge(model, device, format_)
        return
    from pagedcli.attention.select import available_backends

    machine = planning.machine.this_machine()
    decision = _decided(device, machine)
    chosen = str(decision.attention.device)
    found = available_backends(decision.attention, machine.missing)
    backends = [Backend(name, reason is None, reason) for name, reason in found]
    results = _self_test(chosen, [each.backend for each in backends if each.available])
    (found_devices, device_notes), (paths, path_notes) = runner.inspection.devices(), runner.inspection.cpu_paths()
    tested = "check passed seconds detail"
    tables = [
        table(runner.inspection.Version, "versions", "Versions", runner.inspection.versions()),
        table(runner.inspection.Device, "devices", "Devices", found_devices, notes=device_notes),
        table(runner.inspection.CpuPath, "cpu_paths", "CPU kernels", paths, notes=path_notes),
        _weights_table(),
        table(Backend, "backends", f"Attention backends on {chosen}, in order of preference", backends),
        _engine_table(chosen),
        table(runner.self_test.CheckResult, "self_test", "Self-test with the built-in model", results, tested),
    ]
    failed = [result.check for result in results if not result.passed]
    outcome = f"{len(failed)} of {len(results)} checks failed on {chosen}: {', '.join(failed)}."
    if not failed:
        outcome = f"{chosen} works, with attention backend {decision.plan.backend!r}: all {len(results)} checks passed."
    print_tables(tables, format_, facts={"device": chosen, "passed": not failed}, story=[outcome])
    if format_ in (Format.JSON, Format.CSV):
        say(outcome)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _decided(
    device: str, machine: "planning.machine.Machine", model: str = BUILTIN_MODEL
) -> "planning.decision.Decision":
    """How a model runs here, of which only config.json is read."""
    config = EngineConfig(model=model, device=device)
    return planning.decide.decide(config, read_spec(model_folder(config, weights=False)), machine)


def _judge(model: str, device: str, format_: Format) -> None:
    """Says whether and how a model runs here."""
    decision = _decided(device, planning.machine.this_machine(free_memory=True), model)
    fit = None if decision.pool is None else fits(decision)
    does_fit = fit is None or fit.num_kvcache_blocks > 0
    found = _model_facts(decision, fit)
    tables = [
        table(Fact, "model", f"{model} on {decision.plan.device}, by its configuration alone", found),
        engine_table(f"Engine settings for {model}", decision.plan),
    ]
    memory = NOT_PREDICTED if fit is None else fit_in_words(fit)
    outcome = f"{model} {'runs' if does_fit else 'does not run'} on {decision.plan.device}: {memory}"
    facts = {"fits": does_fit, **({"device": decision.plan.device} if fit is None else as_row(fit))}
    print_tables(tables, format_, facts=facts, story=[outcome])
    if not does_fit:
        raise typer.Exit(EXIT_FAILED)


def _model_facts(decision: "planning.decision.Decision", fit: Fit | None) -> list[Fact]:
    """What a person asks of a model before downloading its weights."""
    spec, plan, tables = decision.spec, decision.plan, decision.plan.limits.tables
    cache = f"{size(plan.token_bytes)} per token"
    if tables.has_windows:
        kept = plan.token_bytes * tables.windows.count(None) // tables.num_groups
        cache += f", {size(kept)} once windows have passed it"
    found = [Fact("runs as", f"{spec.architecture}, decoder '{plan.decoder}'"), Fact("cache", cache)]
    if fit is None:
        return [*found, Fact("memory", NOT_PREDICTED)]
    weights = decision.footprint
    active = weights.active_parameters + weights.head.parameters
    found += [
        Fact("parameters", f"{_count(weights.parameters)}, of which a token uses {_count(active)}"),
        Fact("weights", size(fit.weights_bytes)),
    ]
    if fit.state_slot_bytes:
        found.append(Fact("state", f"{size(fit.state_slot_bytes)} per sequence"))
    if (words := groups_and_states(fit)) is not None:
        found.append(Fact("blocks", words))
    if plan.on_cpu:
        found.append(Fact("speed", _speed(decision)))
    return found


def _count(number: float) -> str:
    """`30.5 billion`, `268 million`."""
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _speed(decision: "planning.decision.Decision") -> str:
    """The most that memory and processor allow."""
    dtype = planning.decide.resolve_dtype(decision.config.dtype, decision.spec)
    roofline = measure_rates(dtype).limits
    floor = StepFloor.of(decision.own, decision.footprint, roofline, kv_dtype=decision.plan.kv_dtype)
    rates = [num / floor.seconds([(0, 1)] * num, num) for num in (1, 32)]
    one, many = (f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}" for rate in rates)
    gb_per_s = roofline.read_bytes_per_s / 1e9
    return f"at most {one} tokens/s for one sequence and {many} for 32, at {gb_per_s:.3g} GB/s"


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend, and why it does not run here."""

    backend: str
    available: Annotated[bool, "runs here"]
    reason: Annotated[str | None, "why not"]


def _weights_table() -> Table:
    """The packed weights that are kept for the next start."""
    kept = runner.weight_cache
    rows: list[runner.weight_cache.KeptWeights] = []
    most = f"at most {size(kept.DEFAULT_BYTES)} (engine.weight_cache_size, engine.weight_cache)"
    notes = [f"in {kept.weight_folder()}, {most}"]
    try:
        rows = kept.kept_weights()
    except (OSError, UsageError) as error:
        notes.append(str(error))
    return table(kept.KeptWeights, "weight_cache", "Packed weights kept for the next start", rows, notes=notes)


def _engine_table(device: str) -> Table:
    """How the engine runs the built-in model."""
    try:
        found: Plan | str = runner.LLMEngine(EngineConfig(device=device, num_kvcache_blocks=8)).plan
    except Exception as error:  # report whatever broke and continue: a driver can raise anything
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
    return engine_table(f"Engine settings on {device}, with the built-in model", found)


def _self_test(device: str, backends: list[str]) -> "list[runner.self_test.CheckResult]":
    results = []
    for result in runner.self_test.run_self_test(_lookups(), device=device, backends=backends):
        say(f"{'pass' if result.passed else 'FAIL'}  {result.check}")
        results.append(result)
    return results


def _lookups() -> "list[runner.self_test.LookUp]":
    tokenizer = Tokenizer(model_folder(EngineConfig()))
    lookups = []
    for prompt, answer in runner.self_test.look_up_texts():
        token_ids = tokenizer.encode(prompt)
        lookups.append(runner.self_test.LookUp(token_ids, tokenizer.encode(prompt + answer)[len(token_ids) :]))
    return lookups
