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
        targets = self._targets()
        result = self.last_result = self.view.execute(cell, silent=False, targets=targets, block=False)
        if save_name:
            self.shell.user_ns[save_name] = result
        if not (self.view.block if block is None else block):
            return result
        stream = self.stream_output if stream_output is None else stream_output
        after = self.progress_after_seconds if progress_after is None else progress_after
        try:
            engines = [targets] if isinstance(targets, int) else targets
            self.ranks.finish(result, "%%px", engines=engines, show=stream, progress_after=after)
        finally:
            if not stream and result.done():
                result.wait_for_output(1)
                result.display_outputs(groupby)
        return None

    def _targets(self) -> int | list[int]:
        """What `--targets` names, if all of it is ranks; "all" does not mean other engines that a profile may have."""
        known, targets = list(self.ranks.view.targets), self.view.targets
        if targets == "all":
            return known
        asked = [targets] if isinstance(targets, int) else list(targets)
        if not asked or not set(asked) <= set(known):
            listed = ", ".join(map(str, known))
            raise ValueError(f"--targets: expected ranks, which are {listed}, got {targets!r}. Nothing was executed.")
        return targets if isinstance(targets, int) else asked
