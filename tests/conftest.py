"""Fixtures that every test file may use."""

import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any

import pytest

from pool import RankPools


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPools]:
    """`ranks(world_size, worker, **kwargs)` runs a worker on real gloo ranks, returns its results by rank."""
    pools = RankPools(tmp_path_factory.mktemp("ranks"))
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def processes() -> BaseContext:
    """Starts processes that have all modules imported already: one more costs a fork, not five seconds."""
    context = multiprocessing.get_context("forkserver")
    # The server starts once, with what the first test asks for. torch._dynamo is what fully_shard imports at first use.
    context.set_forkserver_preload(["torch._dynamo", "test_checkpoint_faults", "test_agent_store"])
    return context


@pytest.fixture
def lone_rank() -> Iterator[None]:
    """A gloo group of one in the test's own process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Cells:
    """The cells of the layout matrix that passed, for the table at the end of the run."""

    def __init__(self) -> None:
        self.passed: dict[str, dict[str, dict[int, list[str]]]] = {}

    def add(self, test: str, layout: str, world_size: int, dtype: object) -> None:
        row = self.passed.setdefault(test, {}).setdefault(layout, {})
        row.setdefault(world_size, []).append(str(dtype).removeprefix("torch."))

    def join(self, passed: dict[str, dict[str, dict[int, list[str]]]]) -> None:
        """Take over what another worker of this run saw."""
        for test, rows in passed.items():
            for layout, worlds in rows.items():
                for world_size, dtypes in worlds.items():
                    for dtype in dtypes:
                        self.add(test, layout, world_size, dtype)


_CELLS = pytest.StashKey[Cells]()


@pytest.fixture(scope="session")
def cells(pytestconfig: pytest.Config) -> Cells:
    return pytestconfig.stash.setdefault(_CELLS, Cells())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (report := getattr(session.config, "workeroutput", None)) is not None:  # in a worker of pytest-xdist
        report["cells"] = session.config.stash.get(_CELLS, Cells()).passed


class _FromWorkers:
    """The hook that pytest-xdist calls when a worker has ended; pytest alone does not know it."""

    def __init__(self, config: pytest.Config) -> None:
        self.cells = config.stash.setdefault(_CELLS, Cells())

    def pytest_testnodedown(self, node: Any) -> None:
        self.cells.join(getattr(node, "workeroutput", {}).get("cells", {}))


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's background jobs ignore interrupts, and so do their children, which some tests interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_FromWorkers(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for test, rows in config.stash.get(_CELLS, Cells()).passed.items():
        terminalreporter.section(f"layouts that passed: {test}")
        for layout, worlds in rows.items():
            told = "  ".join(f"{world} rank{'s' * (world > 1)}: {', '.join(d)}" for world, d in sorted(worlds.items()))
            terminalreporter.write_line(f"{layout:<18} {told}")
    skipped = (report for report in terminalreporter.stats.get("skipped", []) if "tests/browser/" in report.nodeid)
    # Not in browser/conftest.py: the process that sums up what pytest-xdist's workers saw does not load that one.
    if reasons := {report.longrepr[2].removeprefix("Skipped: ") for report in skipped}:
        terminalreporter.section("JupyterLab in a browser was not tested")
        for reason in sorted(reasons):
            terminalreporter.write_line(reason)
