"""Canonical parameter names: what a parameter is called in the plain model, whatever is wrapped around it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

# The module names that FSDP1, activation checkpointing and torch.compile put between a model and its children.
WRAPPER_SEGMENTS: frozenset[str] = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})

# One dotted component that matches any of these marks a name as auxiliary.
AUX_COMPONENTS: tuple[str, ...] = ("aux", "aux_*", "predictive_*")

_DDP_PREFIX = "module."


def normalize_generator_fsdp_key(key: str) -> str:
    """Return the canonical name of one parameter or buffer: wrapper segments removed, wherever they stand.

    A leading `module.` stays: from a single name nobody can tell a DDP wrapper from a model's own child called
    `module`. `normalize_generator_fsdp_state_dict` decides that from all the names together.

    Args:
        key: dotted name, as `named_parameters()` or a state dict gives it.

    Returns:
        The name without the components in `WRAPPER_SEGMENTS`; unchanged if it has none.

    Raises:
        TypeError: `key` is not a string.
        ValueError: nothing but wrapper segments is in the name.

    Example:
        >>> normalize_generator_fsdp_key("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.attn.weight")
        'blocks.0.attn.weight'
        >>> normalize_generator_fsdp_key("module.weight")
        'module.weight'
    """
    if not isinstance(key, str):
        raise TypeError(f"a parameter name must be a string, got {key!r} ({type(key).__name__})")
    kept = [component for component in key.split(".") if component not in WRAPPER_SEGMENTS]
    if not kept:
        raise ValueError(
            f"{key!r} holds wrapper segments alone: a parameter name was expected behind them. "
            f"A model cannot have parameters called any of {', '.join(sorted(WRAPPER_SEGMENTS))}; rename the parameter."
        )
    return ".".join(kept)


def normalize_generator_fsdp_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict under canonical names: the same values (not copied), in the same order.

    Wrapper segments vanish wherever they stand. One leading `module.`, which a DDP wrapper puts there, vanishes if
    every name has it once the wrapper segments are gone.

    Args:
        state_dict: names to anything. It is not changed.

    Raises:
        TypeError: a name is not a string.
        ValueError: different names become the same canonical name (all of them are listed), or a name holds wrapper
            segments alone.

    Example:
        >>> normalize_generator_fsdp_state_dict({"module._orig_mod.weight": 1, "module._orig_mod.bias": 2})
        {'weight': 1, 'bias': 2}
        >>> normalize_generator_fsdp_state_dict({"module.weight": 1, "head.weight": 2})
        {'module.weight': 1, 'head.weight': 2}
    """
    canonical = {key: normalize_generator_fsdp_key(key) for key in state_dict}
    if all(name.startswith(_DDP_PREFIX) and name != _DDP_PREFIX for name in canonical.values()):
        canonical = {key: name.removeprefix(_DDP_PREFIX) for key, name in canonical.items()}
    _refuse_collisions(canonical)
    return {canonical[key]: value for key, value in state_dict.items()}


def _refuse_collisions(canonical: Mapping[str, str]) -> None:
    originals: dict[str, list[str]] = defaultdict(list)
    for key, name in canonical.items():
        originals[name].append(key)
    clashes = [f"{name}: {' and '.join(map(repr, keys))}" for name, keys in originals.items() if len(keys) > 1]
    if clashes:
        raise ValueError(
            "different names become one when wrapper segments are removed:\n  "
            + "\n  ".join(clashes)
            + "\nA state dict must name each tensor once: keep one of each, or normalize the two sources separately."
        )


def is_predictive_aux_key(key: str, patterns: Sequence[str] | None = None) -> bool:
    """Tell whether a name belongs to an auxiliary part, one that a checkpoint may lack.

    Args:
        key: dotted name; wrapper segments in it do not matter.
        patterns: shell-style patterns (`fnmatch`, case-sensitive; `*` crosses dots) for the whole canonical name.
            They replace the default, which is: some dotted component is `aux`, or starts with `aux_` or `predictive_`.
            An empty sequence means that nothing is auxiliary.

    Raises:
        TypeError: `patterns` is one string instead of a sequence of them, or `key` is not a string.
        ValueError: `key` holds wrapper segments alone.

    Example:
        >>> is_predictive_aux_key("decoder.predictive_head.weight")
        True
        >>> is_predictive_aux_key("decoder.auxiliary.weight")
        False
        >>> is_predictive_aux_key("decoder.auxiliary.weight", patterns=["*.auxiliary.*"])
        True
    """
    if isinstance(patterns, str):
        raise TypeError(
            f"patterns must be a sequence of patterns, got the single string {patterns!r}; pass [{patterns!r}]"
        )
    name = normalize_generator_fsdp_key(key)
    if patterns is None:
        return any(fnmatchcase(component, p) for component in name.split(".") for p in AUX_COMPONENTS)
    return any(fnmatchcase(name, p) for p in patterns)
