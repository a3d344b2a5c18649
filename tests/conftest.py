# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: poisoned memory, the tested backends, no silent fallback, counted skips."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import WRONG_DEVICE, trace
from support.poison import poisoned
from support.seeds import shift_seeds

# Processes that tests start find `support` as pytest does, by pyproject.toml's `pythonpath`.
SUPPORT = str(Path(__file__).resolve().parent / "support")
inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [SUPPORT, *(p for p in inherited if p not in ("", SUPPORT))]
)
# Ignore this user's stored verification results.
os.environ.setdefault("PYTRANSFORMER_VERIFY", "off")
skipped: Counter[str] = Counter()
ran: Counter[tuple[str, str]] = Counter()  # (raw op, backend) -> calls
DECLINED = re.compile(
    r"backend 'torch' was forced but (cannot do this: [^\n(]*|did not run: NotLaunched: PyTorch's"
    r" kernels give no gradient)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-cases",
        type=int,
        default=300,
        help="random problems per fuzzed op and backend; --full draws 2,000",
    )
    parser.addoption(
        "--torch-seed",
        type=int,
        default=0,
        help="other random numbers everywhere: shifts the seeds that tests set too",
    )
    parser.addoption(
        "--raw-cases", type=int, default=2000, help="random wrong calls of the raw ops"
    )
    parser.addoption(
        "--fuzz-seed", type=int, default=0, help="seed of the fuzzer (printed with every failure)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if seed := config.getoption("--torch-seed"):
        os.environ["PYTRANSFORMER_TEST_SEED"] = str(seed)  # child processes of tests read it
        shift_seeds(seed)


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill outputs with NaN and turn writes beyond their ends into errors.

    The marker `unpoisoned` opts out. Tests need it if they measure memory, compile, or take more
    steps than fit into memory, because all poisoned memory lives until the end.
    """
    if request.node.get_closest_marker("unpoisoned"):
        yield
        return
    with poisoned():
        yield


@pytest.fixture(autouse=True)
def _no_unexpected_fallback(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test if the reference replaces a fused backend, unless marked `falls_back`."""
    pt.clear_fallbacks()
    with trace() as record:
        yield
    ran.update(record)
    found = pt.fallbacks()
    pt.clear_fallbacks()
    if found and not request.node.get_closest_marker("falls_back"):
        reasons = "; ".join(f"{f.op} at {f.call_site}: {f.reason}" for f in found)
        pytest.fail(f"ran on the reference where a fused backend was expected: {reasons}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)  # shifted by --torch-seed


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run on one thread: fastest for small problems, and two test processes do not compete."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _reasons() -> dict[str, str | None]:
    """Return attention's CPU backends with why each cannot run a plain problem, or None."""
    query = torch.zeros(1, 1, 1, 8)
    reasons = pt.explain("attention", query, query, query).reasons
    return {name: r for name, r in reasons.items() if not (r or "").startswith(WRONG_DEVICE)}


@pytest.fixture(params=_reasons())
def backend(request: pytest.FixtureRequest) -> str:
    """Return each attention backend on this device; skip those that cannot run a plain problem."""
    reason = _reasons()[request.param]
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skip tests of problems that the backend torch declines, with the reason.

    tests/ops/test_attention_torch.py counts the problems that it accepts.
    """
    try:
        return (yield)
    except Exception as error:  # opcheck and child processes quote the error in another type
        found = DECLINED.search(str(error))
        if pyfuncitem.funcargs.get("backend") != "torch" or not found:
            raise
        pytest.skip(found[0])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
    on_gpu = "gpu" in report.keywords or report.when == "???"  # "???" means a dead xdist worker
    if report.failed and on_gpu and "PYTEST_XDIST_WORKER" not in os.environ:
        # Print at once, because a GPU run may end before pytest's summary.
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End this process after a GPU error, which corrupts the CUDA context for all later tests.

    xdist replaces the worker.
    """
    result = yield
    if item.get_closest_marker("gpu") and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            lost = f"{item.nodeid} lost the CUDA context: {error}"
            if "PYTEST_XDIST_WORKER" not in os.environ:
                pytest.exit(lost, 1)
            print(lost, file=sys.__stderr__, flush=True)
            os._exit(1)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # an xdist worker
        session.config.workeroutput["ran"] = [(*key, count) for key, count in ran.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    for raw, name, count in getattr(node, "workeroutput", {}).get("ran", ()):
        ran[raw, name] += count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ran:
        terminalreporter.section("raw ops that ran")
        for (raw, name), count in sorted(ran.items()):
            terminalreporter.line(f"{raw:28} {name:40} {count}")
    if skipped:
        terminalreporter.section(f"{sum(skipped.values())} tests skipped")
        for reason, count in skipped.most_common():
            terminalreporter.line(f"{count:5}  {reason}")


@pytest.fixture
def native_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Return a factory of csrc/native_build.py over a tree at tmp_path/csrc.

    Its arguments are sources, names and texts, and options.
    """

    def build_of(sources: dict[str, str], options: dict[str, str]) -> ModuleType:
        csrc = Path(__file__).resolve().parent.parent / "csrc"
        monkeypatch.syspath_prepend(str(csrc))
        spec = importlib.util.spec_from_file_location(
            "native_build_of_a_tree", csrc / "native_build.py"
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        if module.find_compiler() is None or module.find_ninja() is None:
            pytest.skip("needs a C++ compiler and ninja")
        for name, text in sources.items():
            path = tmp_path / "csrc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(module, "CSRC", tmp_path / "csrc")
        monkeypatch.setattr(module, "ROOT", tmp_path)
        for option, value in options.items():
            monkeypatch.setenv(f"PYTRANSFORMER_{option}", value)
        monkeypatch.delenv("PYTRANSFORMER_BUILD_SANITIZE", raising=False)
        return module

    return build_of


class _Document(HTMLParser):
    """Collects the faults of an HTML text: tags that do not match, and anything it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "object", "img", "use"):
            self.faults.append(f"<{tag}>")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") or "url(" in (value or ""):
                self.faults.append(f"{name}={value}")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")


@pytest.fixture(scope="session")
def html_problems() -> Callable[[str], list[str]]:
    """Return a function that lists the faults of an HTML text, empty if it is self-contained."""

    def problems(text: str) -> list[str]:
        document = _Document()
        document.feed(text)
        document.close()
        return document.faults + [f"<{tag}> stays open" for tag in document.open]

    return problems
