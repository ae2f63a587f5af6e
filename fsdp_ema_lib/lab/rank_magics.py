"""`%%px` for the ranks of `cluster`: ipyparallel's own, but one rank's failure does not leave the cell waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ipyparallel.client.magics import ParallelMagics

if TYPE_CHECKING:
    from fsdp_ema_lib.lab.cluster import Ranks


class RankMagics(ParallelMagics):
    """The magics `%px`, `%%px`, `%pxresult`, `%autopx` and `%pxconfig`, on the ranks of one cluster."""

    # A bar would stay in the executed notebook; `%%px --progress-after 2` asks for one.
    progress_after_seconds = -1

    def __init__(self, shell: Any, view: Any, ranks: Ranks) -> None:
        super().__init__(shell, view)
        self.ranks = ranks

    def parallel_execute(
        self,
        cell: str,
        block: bool | None = None,
        groupby: str = "type",
        save_name: str | None = None,
        stream_output: bool | None = None,
        progress_after: float | None = None,
        signal_on_interrupt: Any = None,
    ) -> Any:
        """Run the cell on every rank. An interrupt ends the ranks, so there is nothing to signal to them."""
        self.ranks.check_running()
        targets = self.view.targets
        result = self.last_result = self.view.execute(cell, silent=False, block=False)
        if save_name:
            self.shell.user_ns[save_name] = result
        if not (self.view.block if block is None else block):
            return result
        stream = self.stream_output if stream_output is None else stream_output
        after = self.progress_after_seconds if progress_after is None else progress_after
        try:
            engines = [targets] if isinstance(targets, int) else list(targets)
            self.ranks.finish(result, "%%px", engines=engines, show=stream, progress_after=after)
        finally:
            if not stream and result.done():
                result.wait_for_output(1)
                result.display_outputs(groupby)
        return None
