"""Shared fixtures: files of a run, data that may be absent, and few threads so that tests share two cores fairly."""

import ctypes
import multiprocessing
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import bit_settings
import pytest
from cli_harness import PROMPTS

if os.environ.get("PAGEDCLI_KERNEL_GUARD"):  # see layers/test_kernel_guard.py
    from kernel_guard import Guard

    Guard().install()

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
SHARED = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


def pytest_addoption(parser) -> None:
    parser.addoption("--renew-snapshots", action="store_true", help="write tests/snapshots anew")


def shared_data(name: str) -> Path:
    """A folder or file of ../shared/data; the test is skipped, with the reason, where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/data/{name} is not on this machine")
    return path


def forget_library():
    """The loader keeps its answer for the process: the next load finds or builds the library anew."""
    from pagedcli.native import build

    build._outcome.cache_clear()


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


@pytest.fixture
def no_compiler(monkeypatch):
    """Nothing compiles the native kernels, and none of them are loaded."""
    monkeypatch.setenv("PAGEDCLI_NATIVE", "build")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    forget_library()
    yield "the C++ compiler of $CXX does not exist: /nowhere/g++"
    forget_library()


@pytest.fixture
def add_backend(monkeypatch):
    """Adds a module of attention to the registry, as the first choice on some devices."""
    from pagedcli.attention import select

    def add(name, *devices, **functions):
        module = SimpleNamespace(**functions)
        monkeypatch.setitem(sys.modules, f"fake_{name}", module)
        monkeypatch.setattr(select, "REGISTRY", (select.Entry(name, f"fake_{name}", devices), *select.REGISTRY))

    return add


@pytest.fixture
def no_unnamed_files(monkeypatch):
    """Files have a name from the start, as on a network file system."""
    monkeypatch.setattr("pagedcli.files._unnamed_file", lambda folder: None)


@pytest.fixture
def store_files_of(monkeypatch):
    """Lets the files of a prefix store hold a given number of bytes of blocks."""
    return partial(monkeypatch.setattr, "pagedcli.core.store.FILE_BYTES")


@pytest.fixture(scope="module")
def own_digests(tmp_path_factory):
    """Digests of weights are remembered in a folder of the module's tests alone."""
    from pagedcli import content_files

    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("cache")
        patch.setattr(content_files, "cache_home", lambda: home)
        yield


@pytest.fixture
def image():
    """PIL.Image; the test is skipped, with the reason, where pictures cannot be drawn as pixels."""
    from pagedcli.errors import UsageError
    from pagedcli.show.raster import check_fonts

    pytest.importorskip("resvg_py")
    found = pytest.importorskip("PIL.Image")
    try:
        check_fonts()
    except UsageError as error:
        pytest.skip(error.message)
    return found


@pytest.fixture
def prompts(tmp_path):
    """A file of three prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    return path


@pytest.fixture
def out(tmp_path):
    """The path of an output that does not exist yet."""
    return tmp_path / "out.jsonl"


@pytest.fixture(scope="module")
def processes():
    """Processes that start with everything imported: a kill is about the run, not about imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pagedcli.cli.session", "pagedcli.llm", "transformers"])
    return context


@pytest.fixture(scope="module")
def prompts_wait_in_small_batches() -> Iterator[None]:
    """New prompts are held back as in a batch of many sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedcli.core.scheduler.ENOUGH_PROMPTS", 1)
        patch.setattr("pagedcli.core.scheduler.MOST_HELD", 3)
        yield


@pytest.fixture
def torch_cuda(monkeypatch):
    """Lets torch.cuda say what it says where there is a GPU: its functions by name."""

    def says(**functions):
        for name, function in functions.items():
            monkeypatch.setattr(f"torch.cuda.{name}", function)

    return says


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there, for tests in triton's interpreter."""
    from pretend_cuda import PretendGpu

    with PretendGpu().install(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def idle_gpu(monkeypatch):
    """One whose kernels compute nothing, for what does not depend on it."""
    from pretend_cuda import PretendGpu

    with PretendGpu(runs_kernels=False).install(monkeypatch) as gpu:
        yield gpu


@pytest.fixture(autouse=True, scope="session")
def _one_thread(tmp_path_factory) -> Iterator[None]:
    """And, for the tests marked `bits`, the setting of `make test-matrix`."""
    import torch

    name = os.environ.get(bit_settings.VARIABLE)
    if name is None:
        torch.set_num_threads(1)
        yield
        return
    setting = bit_settings.SETTINGS[name]
    torch.set_num_threads(setting.num_threads)
    with bit_settings.applied(setting, tmp_path_factory.mktemp(name)):
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_step_times(tmp_path_factory) -> Iterator[None]:
    """Calibrations of this session, within a fraction of a second: tests neither read nor change those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("step-times")
        patch.setattr("pagedcli.planning.step_time.cache_folder", lambda: folder)
        patch.setattr("pagedcli.bench.calibration.BUDGET_S", 0.2)
        patch.setattr("pagedcli.bench.calibration.MOST_TAKEN", 2.0)
        yield


@pytest.fixture
def step_times(tmp_path, monkeypatch):
    """The folder of calibrations of a test alone."""
    monkeypatch.setattr("pagedcli.planning.step_time.cache_folder", lambda: tmp_path / "times")
    return tmp_path / "times"


@pytest.fixture(autouse=True, scope="session")
def _own_weights(tmp_path_factory) -> Iterator[None]:
    """Packed weights of this session, however long a busy machine takes to load them."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache") / "weights"
        patch.setattr("pagedcli.runner.weight_cache.weight_folder", lambda: folder)
        yield


_MOST_REASONS = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config) -> None:
    """Mark as slow the cases of a test that `slow_cases` names by patterns, and those that `quick` does not name."""
    unseen = {}
    for item in items:
        for mark in item.iter_markers("quick"):
            is_quick = any(fnmatchcase(item.callspec.id, pattern) for pattern in mark.args)
            unseen[item.function] = unseen.get(item.function, True) and not is_quick
            if not is_quick:
                item.add_marker(pytest.mark.slow)
        for mark in item.iter_markers("slow_cases"):
            if any(fnmatchcase(item.callspec.id, pattern) for pattern in mark.args):
                item.add_marker(pytest.mark.slow)
    if any(unseen.values()) and not any("::" in argument for argument in config.args):
        names = [function.__name__ for function, is_unseen in unseen.items() if is_unseen]
        raise pytest.UsageError(f"no case has a name that the marker quick gives: {', '.join(names)}")
    # Processes of many tests start first: at the end one worker would wait for the other.
    items.sort(key=lambda item: "run_interpreted" not in item.function.__code__.co_names)


def pytest_terminal_summary(terminalreporter, config) -> None:
    """One line for all skipped tests, unless -rs asks for each."""
    if set("sAa") & set(config.option.reportchars):
        return
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    line = skipped_line(Counter(reason.removeprefix("Skipped: ") for reason in reasons))
    if line is not None:
        terminalreporter.write_line(line)


def skipped_line(reasons: Counter) -> str | None:
    """How many tests were skipped, and the most frequent reasons; None: none was."""
    if not reasons:
        return None
    parts = [f"{count} {reason}" for reason, count in reasons.most_common(_MOST_REASONS)]
    others = sum(count for _, count in reasons.most_common()[_MOST_REASONS:])
    parts += [f"{others} for other reasons"] if others else []
    return f"{reasons.total()} skipped: {'; '.join(parts)} (pytest -rs lists them)"


@pytest.fixture
def own_panels(monkeypatch):
    """Predictions assume panels as wide as those of the native library on this processor."""
    from pagedcli.native import load_library
    from pagedcli.native.structs import LinearStruct, bind

    functions = bind(load_library().functions)
    width = functions.linear_padded_rows(ctypes.byref(LinearStruct(kind=1, rows=1, columns=2)))
    monkeypatch.setattr("pagedcli.models.formats.PANEL", width)
