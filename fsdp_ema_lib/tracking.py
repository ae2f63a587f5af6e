"""What an average tracks, what an export copies from the live model, what it leaves out, and why."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from fsdp_ema_lib.layout import Layout, Shard

BUFFER_POLICIES = ("copy", "leave_out")


@dataclass(frozen=True)
class Coverage:
    """What becomes of each parameter and buffer of a model; printing it gives a table.

    Attributes:
        tracked: names that are averaged.
        copied: name -> why an export takes it from the live model.
        left_out: name -> why no export has it.
    """

    tracked: list[str] = field(default_factory=list)
    copied: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(name, "averaged", "") for name in self.tracked]
        rows += [(name, "copied", why) for name, why in self.copied.items()]
        rows += [(name, "left out", why) for name, why in self.left_out.items()]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {what:<8}  {why}".rstrip() for name, what, why in rows)


@dataclass(frozen=True)
class Selection:
    """Which parameters and buffers are averaged: patterns as `fnmatch` reads them, over canonical names.

    Args:
        include: only parameters that match one of these are tracked; None tracks all that can be.
        exclude: parameters that match one of these are not tracked, whatever `include` says.
        buffers: "copy" (exports carry the live buffers), "leave_out" (exports have none), or patterns of floating-point
            buffers to average, the others being copied.

    Raises:
        TypeError: a pattern is no string. ValueError: an unknown buffer policy.

    Example:
        >>> Selection(exclude=["head.*"])
        Selection(include=None, exclude=('head.*',), buffers='copy')
    """

    include: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    buffers: str | Sequence[str] = "copy"

    def __post_init__(self) -> None:
        if self.include is not None:
            object.__setattr__(self, "include", _patterns(self.include, "include"))
        object.__setattr__(self, "exclude", _patterns(self.exclude, "exclude"))
        if isinstance(self.buffers, str):
            if self.buffers not in BUFFER_POLICIES:
                raise ValueError(
                    f"buffers must be one of {', '.join(map(repr, BUFFER_POLICIES))} or a list of name patterns to "
                    f"average, got {self.buffers!r}"
                )
        else:
            object.__setattr__(self, "buffers", _patterns(self.buffers, "buffers"))

    def refuse_idle_patterns(self, layout: Layout) -> None:
        """Raise ValueError for patterns that match no name of the model: a misspelled one must not pass unnoticed."""
        parameters = [name for name, primary in layout.primary.items() if primary in layout.shards]
        buffers = [name for name, primary in layout.primary.items() if primary in layout.buffers]
        asked = [
            ("include", self.include or (), parameters, "parameter"),
            ("exclude", self.exclude, parameters, "parameter"),
            ("buffers", () if isinstance(self.buffers, str) else self.buffers, buffers, "buffer"),
        ]
        idle = [
            f"{where}: the pattern {pattern!r} matches no {kind} (the model has {_some(names)})"
            for where, patterns, names, kind in asked
            for pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in names)
        ]
        if idle:
            raise ValueError(
                "\n".join(idle) + "\nPatterns are matched against whole canonical names; * matches dots too."
            )

    def coverage(self, layout: Layout, *, averaged: Collection[str] = ()) -> Coverage:
        """Sort every parameter and buffer of a model; those of `averaged` are tracked already, and stay so."""
        found = Coverage()
        for name, shard in layout.shards.items():
            why = None if name in averaged else self._why_not(shard)
            if why is None:
                found.tracked.append(name)
            else:
                found.copied[name] = why
        for name, shard in layout.buffers.items():
            self._sort_buffer(name, shard, found)
        return found

    def _why_not(self, shard: Shard) -> str | None:
        names = (shard.name, *shard.aliases)
        if not is_averageable(shard.dtype):
            return f"{shard.dtype} has no average"
        if not shard.requires_grad:
            return "frozen"
        if self.include is not None and _first_match(names, self.include) is None:
            return "no include pattern matches"
        if (pattern := _first_match(names, self.exclude)) is not None:
            return f"excluded by {pattern!r}"
        return None

    def _sort_buffer(self, name: str, shard: Shard, found: Coverage) -> None:
        if self.buffers == "leave_out":
            found.left_out[name] = "buffers are left out"
        elif isinstance(self.buffers, str) or _first_match((name, *shard.aliases), self.buffers) is None:
            found.copied[name] = "buffer"
        elif not is_averageable(shard.dtype):
            found.copied[name] = f"buffer; {shard.dtype} has no average"
        else:
            found.tracked.append(name)


def is_averageable(dtype: torch.dtype) -> bool:
    """Whether values of this dtype have a meaningful average: floating point and complex ones do."""
    return dtype.is_floating_point or dtype.is_complex


def _patterns(patterns: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise TypeError(f"{what} must be a list of name patterns, got the string {patterns!r}; write [{patterns!r}]")
    found = tuple(patterns)
    bad = [pattern for pattern in found if not isinstance(pattern, str)]
    if bad:
        raise TypeError(f"{what} must be a list of name patterns (strings), got {bad[0]!r}")
    return found


def _first_match(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    names = list(names)
    return next((pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), None)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
