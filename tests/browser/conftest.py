"""One JupyterLab and one Chromium for all tests of this folder, and a picture of what a failed one saw."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser.chromium import NoBrowser, find_chromium
from browser.workplace import FAILURES, Workplace, workplace

OPEN = pytest.StashKey[Workplace]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--save-screenshots",
        type=Path,
        metavar="FOLDER",
        help="put two pictures of each explorer there (name tests/browser on the command line, else it is unknown)",
    )


@pytest.fixture(scope="package")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """JupyterLab on copies of the notebooks, in one page of one browser."""
    stash = request.config.stash
    try:
        find_chromium()
    except NoBrowser as missing:
        give_up(str(missing))
    with workplace(tmp_path_factory.mktemp("lab")) as place:
        stash[OPEN] = place
        yield place
        del stash[OPEN]


def give_up(missing: str) -> None:
    """Skip, or fail where `CI` says that nobody would notice a skip."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    place = item.config.stash.get(OPEN, None)
    if report.failed and place is not None and "lab" in getattr(item, "fixturenames", ()):
        path = FAILURES / f"{item.name.replace('/', '-')}-{report.when}.png"
        try:
            place.page.screenshot(path)
            report.sections.append(("what the page showed", str(path)))
        except Exception as error:  # the browser may be what failed
            report.sections.append(("no screenshot", repr(error)))
        report.sections.append(("end of the server's log", place.server.log.read_text(errors="replace")[-2000:]))
    return report
