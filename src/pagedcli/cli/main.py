"""`pagedcli`: the commands, loaded lazily, and error handling."""

import atexit
import difflib
import errno
import logging
import os
import platform
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from itertools import groupby
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pagedcli import __version__, process
from pagedcli.errors import PagedcliError, check_room_for_torch, shortage
from pagedcli.process import nothing_to_collect
from pagedcli.show.terminal import discard, say

_BROKEN_PIPE = 141  # 128 + the signal's number, as shells do
_STREAM_ERRORS = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT, errno.EFBIG)
_LOAD_TORCH = ("generate", "plan", "profile-memory", "bench", "doctor")
_LESS_MEMORY = "lower --kv-cache-memory, --max-num-seqs or --max-num-batched-tokens, or use a smaller model"

# name -> its group and line in `pagedcli --help`; the command is the function of that name in pagedcli.cli.<name>
COMMANDS = {
    "generate": ("Run", "Generate from a JSONL file of prompts."),
    "verify": ("Run", "Compare outputs row by row."),
    "merge": ("Run", "Merge the outputs of all shards of a run."),
    "trace": ("Look inside", "Watch the KV cache of a run, live or recorded."),
    "explain": ("Look inside", "Explain why prefixes of a run were found or missed."),
    "diff": ("Look inside", "Explain what changed between two runs, and its effect."),
    "plan": ("Predict", "Predict how long a file takes and what its KV cache does."),
    "profile-memory": ("Predict", "Show where memory goes and how many KV blocks fit."),
    "simulate": ("Predict", "Simulate the KV cache on a trace, at many pool sizes."),
    "attach": ("Servers", "Watch a vLLM, SGLang or TensorRT-LLM server's KV cache."),
    "audit": ("Servers", "Check whether a server's prefix cache changes its answers."),
    "doctor": ("This machine", "Check what this machine supports, and test it."),
    "bench": ("This machine", "Measure speed and compare it with the machine's limits."),
    "store": ("This machine", "Manage the prefix cache on disk (--prefix-store)."),
    "learn": ("Learn", "Learn how a paged KV cache works, in eleven lessons."),
}
# old names of commands, for one version -> what stands for them
RENAMED = {"replay": ("trace",), "report": ("explain", "-o", "report.html")}

_OLD_POOL = re.compile("^--num-gpu-blocks-override(?==|$)")  # vLLM's name of the flag


class _Commands(TyperGroup):
    """Loads commands lazily and turns errors into messages and exit codes."""

    def get_params(self, ctx: Any) -> Any:
        """All are switches. Without a default, typer would load pydantic for them, which takes longer than a help."""
        found = super().get_params(ctx)
        for switch in found:
            switch.default = False
        return found

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stub for the list of commands: name and one line of help."""
        if cmd_name not in COMMANDS:
            return None
        return _as_command(lambda: None, cmd_name, COMMANDS[cmd_name][1])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Unlike typer's, in groups, and without shortening what the commands do."""
        width = max(map(len, COMMANDS))
        for title, commands in groupby(COMMANDS.items(), key=lambda item: item[1][0]):
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command to run."""
        args = [_OLD_POOL.sub("--num-kvcache-blocks", word) for word in args]
        if (words := RENAMED.get(args[0])) is not None:
            say(f"note: pagedcli {args[0]} is pagedcli {words[0]} now")
            args = [*words, *args[1:]]
        near = difflib.get_close_matches(args[0], COMMANDS, n=1, cutoff=0.6)
        if near and args[0] not in COMMANDS:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or name is None:
            return name, command, rest
        if name in _LOAD_TORCH and not {"-h", "--help"} & {*rest}:
            check_room_for_torch()
        with nothing_to_collect():
            function = getattr(import_module(f"pagedcli.cli.{name.replace('-', '_')}"), name.replace("-", "_"))
        return name, _as_command(function, name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            with _log_on_stderr():
                return super().invoke(ctx)
        except PagedcliError as error:
            raise _reported(error) from error
        except KeyboardInterrupt as error:
            say("\ninterrupted" if sys.stderr.isatty() else "interrupted")  # a terminal shows ^C on the line
            raise typer.Exit(process.EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            discard(sys.stdout)  # its reader is gone
            raise typer.Exit(_BROKEN_PIPE) from error
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if _debug() or _is_usage_error(error):
                raise
            if _is_of_stream(error):
                raise typer.Exit(_say_unwritable(error)) from error
            if (refused := shortage(error, f"pagedcli {ctx.invoked_subcommand}", _LESS_MEMORY)) is not None:
                raise _reported(refused) from error
            say(f"error: {type(error).__name__}: {error}")
            say("hint: this is a bug in pagedcli; PAGEDCLI_DEBUG=1 shows the traceback")
            raise typer.Exit(1) from error


def _reported(error: PagedcliError) -> typer.Exit:
    """Show an error. Returns the exit to raise."""
    if _debug():
        traceback.print_exc()
    say(f"error: {error.message}")
    if error.hint is not None:
        say(f"hint: {error.hint}")
    return typer.Exit(error.exit_code)


class _SayHandler(logging.Handler):
    """Prints log messages, such as a build of the native kernels, as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    logger, handler = logging.getLogger("pagedcli"), _SayHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


_MOST_SHOWN = 40  # flags in the help of a command without sections
_USUAL = (  # flags of nearly every run, on the first screen of a help with sections
    *("model", "output_file", "resume", "max_tokens", "temperature", "system_prompt", "field", "dump_kv", "record"),
    "config",
)
_ALL = "all"  # the section of all flags


class _Command(TyperCommand):
    """Help in sections; flag names are never truncated. --dump-kv may have a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--dump-kv" in args and any("--dump-kv" in parameter.opts for parameter in self.get_params(ctx)):
            from pagedcli.cli.dump_kv import with_value

            args = with_value(args, self.make_parser(ctx))
        asked = next((place for place, word in enumerate(args) if word in ("-h", "--help")), None)
        if asked is not None and (named := args[asked + 1 : asked + 2]):
            sections = self._sections(ctx)
            if named[0] not in (*sections, _ALL):
                ctx.fail(f"The help has no section '{named[0]}'. Sections: {', '.join((*sections, _ALL))}.")
            ctx.meta["help section"] = named[0]
        has_urls = any("://" in word for word in args)
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:
            from pagedcli.cli.options import key_without_flag

            flag = getattr(error, "option_name", "")
            if (key := key_without_flag(flag)) is not None:
                ctx.fail(f"{flag} is not a flag: set {key} in the configuration file (-C).")
            raise
        if has_urls:
            from pagedcli.cli.urls import with_local_files

            with_local_files(ctx.info_name or "", ctx.params)
        return rest

    def invoke(self, ctx: Any) -> Any:
        urls = sys.modules.get("pagedcli.cli.urls")  # not loaded: no parameter is a URL
        with nullcontext() if urls is None else urls.sending():
            return super().invoke(ctx)

    def _sections(self, ctx: Any) -> dict[str, list[Any]]:
        """Section -> its flags, of a command with many; the name is the last word of the panel's title."""
        sections: dict[str, list[Any]] = {}
        for flag in self.get_params(ctx):
            if (panel := getattr(flag, "rich_help_panel", None)) is not None and not getattr(flag, "hidden", False):
                sections.setdefault(panel.partition(" (")[0].split()[-1].lower(), []).append(flag)
        return sections if sum(map(len, sections.values())) > _MOST_SHOWN else {}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """A section alone needs neither usage nor description."""
        if ctx.meta.get("help section", _ALL) == _ALL:
            super().format_help(ctx, formatter)
        else:
            self.format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters, sections = self.get_params(ctx), self._sections(ctx)
        name = ctx.meta.get("help section", "")
        if name in sections:
            parameters = sections[name]
        elif sections and name != _ALL:
            hidden = {flag for flags in sections.values() for flag in flags if flag.name.split("__")[-1] not in _USUAL}
            parameters = [each for each in parameters if each not in hidden]
        titled: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in parameters:
            if (record := parameter.get_help_record(ctx)) is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = default if sections and not name else getattr(parameter, "rich_help_panel", None) or default
                titled.setdefault(title, []).append(record)
        titled["Options"] = titled.pop("Options")  # the general ones last
        for title, records in titled.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if sections and not name:
            counts = ", ".join(f"{section} ({len(flags)})" for section, flags in sections.items())
            formatter.write_paragraph()
            formatter.write_text(f"More flags: {ctx.command_path} --help SECTION, one of {counts}, all.")


def _as_command(function: Any, name: str, help_: str | None = None) -> Any:
    """A command from a function, or from a Typer app with subcommands."""
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command(name, help=help_, cls=_Command)(function)
    return typer.main.get_command(app)


def _is_usage_error(error: Exception) -> bool:
    """Whether typer shows it itself: a wrong flag or argument."""
    return hasattr(error, "exit_code") and hasattr(error, "format_message")


def _debug() -> bool:
    return os.environ.get("PAGEDCLI_DEBUG", "") not in ("", "0")


def _about_installation() -> Iterator[tuple[str, str]]:
    """What a report of a bug needs, without loading torch."""
    from importlib import metadata

    from pagedcli.native.prebuilt import library, runnable

    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    found, target = library(), runnable()
    instructions = "none that wheels have kernels for" if target is None else target.name
    yield "processor", f"{platform.machine()}, best instructions: {instructions}"
    if isinstance(found, str):
        yield "kernels", f"compiled on first use ({found})"
    else:
        yield "kernels", f"{found.name}, installed with the package"
    for name in ("torch", "triton", "transformers", "tokenizers", "safetensors", "llguidance"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


app = typer.Typer(
    name="pagedcli",
    cls=_Commands,
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def pagedcli(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --version: print what a bug report needs.")] = False,
) -> None:
    """LLM batch generation and KV-cache inspection.

    Begin: pagedcli generate "Once upon a time"

    pagedcli generate prompts.jsonl -o out.jsonl
    """
    if version:
        print(f"pagedcli {__version__}")
        for name, value in _about_installation() if verbose else ():
            print(f"{name:<12} {value}")
        raise typer.Exit
    if verbose or context.invoked_subcommand is None:
        context.fail("Missing command." if not verbose else "--verbose goes with --version.")


def _is_of_stream(error: Exception) -> bool:
    """Whether a standard stream is closed or full: no file has a name in the error."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _STREAM_ERRORS


def _say_unwritable(error: Exception) -> int:
    """A message for stdout that cannot be written. Returns the exit code."""
    discard(sys.stdout)
    say(f"error: cannot write to standard output: {getattr(error, 'strerror', error)}")
    return 1


def run() -> None:
    """Run the command line and exit."""
    try:
        _run()
    except SystemExit as end:
        if isinstance(end.code, str) or "torch" not in sys.modules:
            raise
        if _is_in_process_group():  # functions and destructors of a normal exit could wait minutes for a lost rank
            os._exit(end.code or 0)
        if all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            atexit._run_exitfuncs()
            os._exit(end.code or 0)  # to take down torch's modules one by one takes 0.6 s
        raise


def _run() -> None:
    try:
        try:
            app(prog_name="pagedcli")
        finally:
            sys.stdout.flush()  # at exit Python itself would print a traceback
            sys.stderr.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(_BROKEN_PIPE)
    except OSError as error:
        if not _is_of_stream(error):
            raise
        sys.exit(_say_unwritable(error))


def _is_in_process_group() -> bool:
    """Whether a tensor-parallel group could not be left."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: most commands do without torch
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
