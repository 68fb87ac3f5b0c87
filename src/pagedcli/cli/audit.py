"""`pagedcli audit`: whether the prefix cache of a running server changes its answers."""

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from pagedcli.audit.audit import ASSUMED_UNIT, EXIT_FAULT, Audit, Options, exit_code, planned, run_to_end, send_again
from pagedcli.audit.client import Budget, Client
from pagedcli.audit.plan import CHECKS
from pagedcli.audit.report import facts, page, plan_table, replay_table, summary, tables
from pagedcli.audit.restart import load_memory, save_memory
from pagedcli.audit.self_test import FaultTrial, trials
from pagedcli.audit.shrink import load_case
from pagedcli.cli.options import FormatOption, config_flags, option
from pagedcli.errors import UsageError
from pagedcli.files import check_files, whole_file
from pagedcli.printable import one_line, plural
from pagedcli.process import EXIT_INTERRUPTED
from pagedcli.show.tables import Format, print_tables, table
from pagedcli.show.terminal import ProgressLine, say

_limits, _connection, _output = (partial(option, panel=panel) for panel in ("Limits", "Connection", "Output"))
_URL_HELP = "Address before /completions: http://localhost:8000/v1."
_PROXY_HELP = "HTTP proxy to use. Proxies in the environment are ignored."


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The flags of `audit`."""

    url: Annotated[str | None, typer.Argument(metavar="URL", help=_URL_HELP)] = None
    model: Annotated[
        str | None,
        option("-m", "--model", metavar="NAME", help="Model to test. Default: the only model of the server."),
    ] = None
    checks: Annotated[
        str | None, option("--checks", metavar="A,B", help="Run only these checks; --dry-run lists them.")
    ] = None
    skip: Annotated[str | None, option("--skip", metavar="A,B", help="Skip these checks.")] = None
    replay: Annotated[
        Path | None, option("--replay", metavar="FILE", help="Send a failing pair again, with fresh prompts.")
    ] = None
    remember: Annotated[
        Path | None, option("--remember", metavar="FILE", help="Also save prompts and answers for --recall.")
    ] = None
    recall: Annotated[
        Path | None,
        option(
            "--recall",
            metavar="FILE",
            help="Also compare with what --remember saved before a restart. Use once per restart: it fills the cache.",
        ),
    ] = None
    dry_run: Annotated[bool, option("--dry-run", help="Print the plan and send nothing.")] = False
    self_test: Annotated[
        bool, option("--self-test", help="Audit faulty servers started on this machine, one per kind of fault.")
    ] = False
    max_requests: Annotated[
        int, _limits(metavar="N", min=30, max=100_000, help="Maximum requests to send. Default: 300.")
    ] = 300  # fmt: skip
    max_tokens: Annotated[
        int, _limits(metavar="N", min=5000, help="Maximum tokens of all prompts and answers. Default: 200000.")
    ] = 200_000  # fmt: skip
    max_seconds: Annotated[float, _limits(metavar="S", min=1, help="Maximum duration of the audit. Default: 290.")] = (
        290.0
    )
    timeout: Annotated[float, _limits(metavar="S", min=0.1, help="Maximum time for one answer. Default: 30.")] = 30.0
    concurrency: Annotated[int, _limits(metavar="N", min=2, max=64, help="Requests sent at a time. Default: 8.")] = 8
    key_env: Annotated[
        str | None, _connection(metavar="NAME", help="Environment variable that holds the API key.")
    ] = None  # fmt: skip
    proxy: Annotated[str | None, _connection(metavar="URL", help=_PROXY_HELP)] = None
    ca_file: Annotated[
        Path | None, _connection(metavar="PEM", help="Certificates to trust, instead of the system's.")
    ] = None  # fmt: skip
    output_file: Annotated[
        Path | None, _output("-o", "--output-file", metavar="PAGE.html", help="Also write an HTML page.")
    ] = None
    output_dir: Annotated[
        Path, _output(metavar="DIR", help="Folder for failing pairs, audit-<N>.json. Default: the current one.")
    ] = Path()  # fmt: skip
    overwrite: Annotated[bool, _output("--overwrite", help="Replace an existing page or --remember file.")] = False
    format_: FormatOption = Format.TABLE

    def client(self) -> Client:
        assert self.url is not None, "the command has checked it"
        budget = Budget(self.max_requests, self.max_tokens, self.max_seconds)
        return Client(
            self.url, budget, key=_key(self.key_env), timeout_s=self.timeout, concurrency=self.concurrency,
            proxy=self.proxy, ca_file=self.ca_file,
        )  # fmt: skip


@config_flags()
def audit(options: AuditOptions) -> None:
    """Check whether a server's prefix cache changes its answers.

    Sends random prompts to a server with the OpenAI completions API and compares answers with a cold and a warm cache:
    at block boundaries, as a next turn, among concurrent requests, streamed, with two samples, with other salts, after
    eviction. A difference counts only if it exceeds the server's noise, which is measured first. Nothing is sent to any
    other address.

    \b
    Examples:
      pagedcli audit http://localhost:8000/v1 --dry-run
      pagedcli audit http://localhost:8000/v1 -o audit.html
      pagedcli audit --replay audit-17.json http://localhost:8000/v1
      pagedcli audit http://localhost:8000/v1 --remember before.json    # then restart the server
      pagedcli audit http://localhost:8000/v1 --recall before.json
      pagedcli audit --self-test

    Exit codes: 0 all checks passed, 1 a check failed, 2 wrong usage, 3 a check was inconclusive, 130 interrupted.
    """
    _check_alone(options)
    if options.self_test:
        raise typer.Exit(_self_test(options.format_))
    if options.url is None:
        raise UsageError("there is no URL to audit", hint="pagedcli audit http://localhost:8000/v1")
    chosen = _chosen(options.checks, options.skip)
    client = options.client()
    if options.dry_run:
        _print_plan(options, client.shown, chosen)
        return
    _say_if_key_is_readable(options)
    if options.replay is not None:
        raise typer.Exit(_replay(options.replay, client, options))
    inputs = {} if options.recall is None else {"--recall": options.recall}
    check_files(inputs, {"-o": options.output_file, "--remember": options.remember}, overwrite=options.overwrite)
    if not options.output_dir.is_dir():
        raise UsageError(f"there is no folder {options.output_dir}", hint=f"mkdir -p {options.output_dir}")

    memory = None if options.recall is None else load_memory(options.recall)
    remembers = options.remember is not None
    asked = Options(options.model, chosen, None, options.concurrency, options.output_dir, remembers, memory)
    raise typer.Exit(_run(Audit(client, asked), options))


def _check_alone(options: AuditOptions) -> None:
    """Raises: UsageError for flags of another kind of audit than the one that is asked for."""
    kind = "--self-test" if options.self_test else "--replay" if options.replay is not None else None
    given: dict[str, object] = {"--remember": options.remember, "--recall": options.recall, "-o": options.output_file}
    if kind == "--self-test":
        given |= {"URL": options.url, "--replay": options.replay, "--dry-run": options.dry_run or None}
    useless = [name for name, value in given.items() if value is not None]
    if kind is not None and useless:
        raise UsageError(f"{useless[0]} has no effect with {kind}", hint="use one of them")


def _replay(path: Path, client: Client, options: AuditOptions) -> int:

    case = load_case(path)
    found = send_again(client, case, model=options.model, concurrency=options.concurrency)
    print_tables([replay_table(case, path.name, *found)], options.format_)
    return EXIT_FAULT if found[0] else 0


def _self_test(format_: Format) -> int:

    line = ProgressLine(line_every_s=10)
    results = list(trials(lambda text: line.show(lambda _: text)))
    line.close()
    print_tables([table(FaultTrial, "trials", "Self-test of the audit", results, "fault result by meaning")], format_)
    if any(result.was_interrupted for result in results):
        return EXIT_INTERRUPTED
    num_wrong = sum(result.result == "WRONG" for result in results)
    wrong = f"{num_wrong} of {len(results)} servers were judged wrongly"
    say(wrong if num_wrong else "All servers were judged rightly.")
    return 1 if num_wrong else 0


def _run(run: Audit, options: AuditOptions) -> int:
    line = ProgressLine(line_every_s=10)
    run.progress = lambda text: line.show(
        lambda s: f"{s:,.0f} s, {plural(run.client.budget.num_requests, 'request')}: {text}"
    )
    try:
        was_interrupted = run_to_end(run)
    finally:
        line.close()
    in_full = options.format_ in (Format.JSON, Format.CSV)
    print_tables(tables(run, in_full=in_full), options.format_, facts=facts(run, was_interrupted=was_interrupted))
    if options.output_file is not None:
        with whole_file(options.output_file, overwrite=options.overwrite) as file:
            file.write(page(run))
    if options.remember is not None:
        num_prompts = save_memory(run.memory, options.remember, overwrite=options.overwrite)
        say(f"remembered {plural(num_prompts, 'prompt')}; after a restart: --recall {options.remember}")
    verdicts = run.verdicts()
    say("interrupted: the verdicts cover only what was sent before" if was_interrupted else summary(verdicts))
    return EXIT_INTERRUPTED if was_interrupted else exit_code(verdicts)


def _print_plan(options: AuditOptions, url: str, checks: tuple[str, ...]) -> None:
    memory = None if options.recall is None else load_memory(options.recall)
    remembers, limits = options.remember is not None, (options.max_requests, options.max_tokens)
    probes = planned(checks, memory, *limits, remembers=remembers, concurrency=options.concurrency)
    notes = [
        f"to {url} only; at most {plural(options.max_requests, 'request')}, {options.max_tokens:,} "
        f"tokens, {options.max_seconds:,.0f} s, {plural(options.concurrency, 'request')} at a time",
        f"assumes blocks of {ASSUMED_UNIT} tokens and salts; an audit measures both first. Nothing was sent.",
    ]
    print_tables([plan_table(probes, notes)], options.format_)


def _chosen(checks: str | None, skip: str | None) -> tuple[str, ...]:

    only, without = ({each.strip() for each in (text or "").split(",")} - {""} for text in (checks, skip))
    if unknown := sorted((only | without) - set(CHECKS)):
        raise UsageError(f"there is no check {one_line(unknown[0])!r}", hint="the checks are " + ", ".join(CHECKS))
    only = set(CHECKS) if checks is None else only | {"noise"}
    chosen = tuple(check for check in CHECKS if check in only - without)
    if not chosen:
        raise UsageError("--checks and --skip leave no check", hint="the checks are " + ", ".join(CHECKS))
    return chosen


def _key(name: str | None) -> str | None:
    """The API key. Never printed, nor is a name that may be the key itself."""
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        shown = name if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) else "that --key-env names"
        raise UsageError(f"the environment variable {shown} is not set, or is not a key")
    return key


def _say_if_key_is_readable(options: AuditOptions) -> None:
    url = urlsplit(options.url or "")
    is_local = re.fullmatch(r"localhost|127(\.\d+){3}|::1", url.hostname or "") is not None
    if options.key_env is not None and url.scheme == "http" and not is_local:
        say("note: the key is sent without encryption, because the URL begins with http:")
