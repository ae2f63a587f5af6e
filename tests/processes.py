"""Other processes, which may end at any moment: between being listed and being asked, too."""

from collections.abc import Iterable

import psutil


def command(process: psutil.Process) -> str:
    """Its command line; nothing when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill_what_stays(processes: Iterable[psutil.Process], limit_s: float) -> list[str]:
    """Give them so many seconds to end, and kill the others; the command lines of these."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    commands = list(filter(None, map(command, alive)))
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return commands
