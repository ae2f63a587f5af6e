"""Find Chromium, or say how to get it, and drive it through Playwright from a thread that no interrupt reaches."""

import asyncio
import contextlib
import importlib.util
import os
import platform
import shutil
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from playwright.async_api import Page

Result = TypeVar("Result")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VIEWPORT = {"width": 1440, "height": 1000}


class NoBrowser(Exception):
    """There is nothing to drive; the text says what is missing and the one command that brings it."""


def find_chromium() -> Path | None:
    """Where Chromium is: `CHROMIUM`, else on the PATH, else None where Playwright has downloaded its own.

    Raises:
        NoBrowser: there is none, or no Playwright to drive it, or `CHROMIUM` names no file.
    """
    if importlib.util.find_spec("playwright") is None:
        raise NoBrowser("Playwright is not installed. To get it: make setup")
    if named := os.environ.get("CHROMIUM"):
        if found := shutil.which(named):
            return Path(found)
        raise NoBrowser(f"CHROMIUM={named} is no program. To use the one on the PATH: unset CHROMIUM")
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return Path(found)
    if playwrights_own():
        return None
    raise NoBrowser(f"Chromium is not installed. To get it: {how_to_get_it()}")


def playwrights_own() -> bool:
    """Whether `playwright install chromium` was run."""
    with _loop_in_a_thread() as wait:
        return wait(_own_path()).is_file()


async def _own_path() -> Path:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        return Path(playwright.chromium.executable_path)


def how_to_get_it() -> str:
    """The command: Debian's own package where there is one, elsewhere Playwright's download."""
    try:
        debian = platform.freedesktop_os_release()["ID"] == "debian"
    except OSError:
        debian = False
    if debian:
        return "apt-get install -y chromium" if os.geteuid() == 0 else "sudo apt-get install -y chromium"
    return f"{sys.executable} -m playwright install --with-deps chromium"


class Waiter:
    """Run coroutines on a loop in another thread and wait for them here.

    Playwright's own synchronous interface keeps a loop running in the calling thread: no other test could use asyncio
    while a page is open, and an interrupt that strikes inside that loop ends it, so that nothing can be closed anymore.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, coroutine: Coroutine[Any, Any, Result], limit_s: float = 60.0) -> Result:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        finally:
            future.cancel()


@contextlib.contextmanager
def _loop_in_a_thread() -> Iterator[Waiter]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="playwright", daemon=True)
    thread.start()
    try:
        yield Waiter(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def chromium_page() -> Iterator[tuple["Page", Waiter]]:
    """One page in a fresh headless Chromium, and what waits for its coroutines.

    Raises:
        NoBrowser: as `find_chromium` does.
    """
    executable = find_chromium()
    from playwright.async_api import async_playwright

    with _loop_in_a_thread() as wait, contextlib.ExitStack() as stack:
        playwright = wait(async_playwright().start())
        stack.callback(lambda: wait(playwright.stop()))
        browser = wait(
            playwright.chromium.launch(
                executable_path=executable,
                args=["--no-proxy-server"],
                # Playwright would end the browser at Ctrl-C, before a test's clean-up has used it.
                handle_sigint=False,
            )
        )
        stack.callback(lambda: wait(browser.close()))
        yield wait(browser.new_page(viewport=VIEWPORT)), wait
