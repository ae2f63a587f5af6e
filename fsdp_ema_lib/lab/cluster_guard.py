"""The process that ends a local cluster's processes and removes its folder, whatever happens to the kernel.

`cluster` starts this file as a script, not as a module of the package: importing the package would load torch. It waits
until its standard input closes, which happens when the kernel asks for the end and also when the kernel is killed.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    """Arguments: the mark that the cluster's processes carry, and their folder."""
    # The file beside this one, found by its own name because this one runs as a script.
    from kernel_host import end_marked

    mark, folder = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        while os.read(0, 4096):
            pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
