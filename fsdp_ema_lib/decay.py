"""Which decay to use at which update: pure functions of the update count, and what a decay means in steps.

An update is `average = decay * average + (1 - decay) * live`. Updates are counted from 1. A schedule is anything that
maps that count to a decay in [0, 1]; the classes here are frozen, comparable, and can be written to JSON and back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)
Schedule = Callable[[int], float]

_LARGEST_SIGMA_REL = 1 / math.sqrt(12)  # the uniform average: gamma = 0


def check_decay(value: Any, what: str = "decay") -> float:
    """Return `value` as a float if it can be a constant decay.

    Args:
        value: a real number in [0, 1).
        what: how the error calls it.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: it is not finite, or outside [0, 1).

    Example:
        >>> check_decay(0.999)
        0.999
    """
    number = _real(value, what)
    if not 0.0 <= number < 1.0:  # also refuses nan
        raise ValueError(
            f"{what} must be a finite number in [0, 1), got {value!r}: "
            "0 follows the live weights, values near 1 average over long times, and 1 would never move"
        )
    return number


class _Counted:
    def __call__(self, n: int) -> float:
        """Return the decay of update `n`, counted from 1."""
        _check_count(n)
        return float(self._decay(n))

    def _decay(self, n: Any) -> Any:
        """The formula, for one count or for a tensor of them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(_Counted):
    """The same decay at every update; the average starts at the initial weights and forgets them by `decay**n`.

    Source: Polyak & Juditsky 1992 average uniformly; the exponential form is Tarvainen & Valpola 2017, equation 1.

    Example:
        >>> Constant(0.99)(1)
        0.99
    """

    decay: float

    def __post_init__(self) -> None:
        check_decay(self.decay)

    def _decay(self, n: Number) -> Number | float:
        return self.decay


@dataclass(frozen=True)
class Warmup(_Counted):
    """`min(decay, (1 + n) / (10 + n))`: short averages at first, so that the initial weights are forgotten soon.

    Source: TensorFlow's `ExponentialMovingAverage` with `num_updates`.

    Example:
        >>> [round(Warmup(0.99)(n), 3) for n in (1, 10, 1000)]
        [0.182, 0.55, 0.99]
    """

    decay: float

    def __post_init__(self) -> None:
        check_decay(self.decay)

    def _decay(self, n: Number) -> Number | float:
        return _within((1 + n) / (10 + n), 0.0, self.decay)


@dataclass(frozen=True)
class InverseGamma(_Counted):
    """`1 - (1 + n / gamma) ** -power`, kept between `min_decay` and `max_decay`.

    `gamma` (updates, > 0) is where the rise begins and `power` (> 0) how fast it is: with gamma 1, power 2/3 reaches
    0.999 at 31.6 thousand updates and 3/4 at 10 thousand.

    Source: Katherine Crowson's inverse-gamma warm-up, as used by diffusers and ema-pytorch.

    Example:
        >>> round(InverseGamma(power=2 / 3, max_decay=1.0)(31_622), 4)
        0.999
    """

    gamma: float = 1.0
    power: float = 2 / 3
    min_decay: float = 0.0
    max_decay: float = 0.9999

    def __post_init__(self) -> None:
        _check_positive(self.gamma, "gamma")
        _check_positive(self.power, "power")
        low, high = _real(self.min_decay, "min_decay"), _real(self.max_decay, "max_decay")
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"0 <= min_decay <= max_decay <= 1 was expected, got min_decay={low}, max_decay={high}")

    def _decay(self, n: Number) -> Number | float:
        return _within(1 - (1 + n / self.gamma) ** -self.power, self.min_decay, self.max_decay)


@dataclass(frozen=True)
class HalfLife(_Counted):
    """The constant decay under which a step's weight halves every `steps` updates: `2 ** (-1 / steps)`.

    Example:
        >>> HalfLife(1)(1)
        0.5
    """

    steps: float

    def __post_init__(self) -> None:
        decay_from_half_life(self.steps)

    def _decay(self, n: Number) -> Number | float:
        return decay_from_half_life(self.steps)


@dataclass(frozen=True)
class HalfLifeSamples(_Counted):
    """The half-life in training samples: `2 ** (-batch_size / samples)`, the same average at any batch size.

    Source: Karras et al. 2018 (Progressive GAN) and the EDM code (Karras et al. 2022), which count images.

    Example:
        >>> HalfLifeSamples(samples=512, batch_size=512)(1)
        0.5
    """

    samples: float
    batch_size: int

    def __post_init__(self) -> None:
        _check_positive(self.samples, "samples")
        _check_positive(self.batch_size, "batch_size")
        decay_from_half_life(self.samples / self.batch_size)

    def _decay(self, n: Number) -> Number | float:
        return decay_from_half_life(self.samples / self.batch_size)


@dataclass(frozen=True)
class HalfLifeFraction(_Counted):
    """A half-life that is a fixed fraction of the training so far: `2 ** (-1 / (fraction * n))`.

    The average always covers the same share of training, so the initial weights fade by a power of n.

    Source: the EMA ramp-up of StyleGAN2-ADA (Karras et al. 2020) and EDM (Karras et al. 2022), with 0.05.

    Example:
        >>> HalfLifeFraction(0.05)(20)
        0.5
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0.0 < _real(self.fraction, "fraction") <= 1.0:
            raise ValueError(f"fraction must be in (0, 1]: a share of training; got {self.fraction!r}")

    def _decay(self, n: Number) -> Number | float:
        return 2.0 ** (-1 / (self.fraction * n))


@dataclass(frozen=True)
class PowerFunction(_Counted):
    """`(1 - 1/n) ** (gamma + 1)`: step i gets weight proportional to about `i ** gamma`, and the start gets none.

    The profile keeps its shape and grows with training. Its width over its length is `sigma_rel`; EDM2 uses 0.05 and
    0.10. `gamma` > -1; 0 is the uniform average of all steps.

    Source: Karras et al. 2024 (EDM2), section 3.1.

    Example:
        >>> PowerFunction(gamma=0.0)(4)
        0.75
        >>> round(PowerFunction.from_sigma_rel(0.10).gamma, 2)
        6.94
    """

    gamma: float

    def __post_init__(self) -> None:
        gamma_to_sigma_rel(self.gamma)

    @classmethod
    def from_sigma_rel(cls, sigma_rel: float) -> "PowerFunction":
        """Choose gamma by the width of the profile relative to the length of training, in (0, 0.2887]."""
        return cls(sigma_rel_to_gamma(sigma_rel))

    @property
    def sigma_rel(self) -> float:
        """Standard deviation of the profile over the length of training."""
        return gamma_to_sigma_rel(self.gamma)

    def _decay(self, n: Number) -> Number | float:
        return (1 - 1 / n) ** (self.gamma + 1)


@dataclass(frozen=True)
class Cosine(_Counted):
    """From `base` at the first update to 1 after `total_updates`: `1 - (1 - base) * (1 + cos(pi * k / K)) / 2`.

    `k = n - 1` and `K = total_updates`; from then on the decay is 1 and the average stands still.

    Source: Grill et al. 2020 (BYOL), section 3.3; Caron et al. 2021 (DINO) use it from 0.996.

    Example:
        >>> [Cosine(0.996, total_updates=100)(n) for n in (1, 51, 101)]
        [0.996, 0.998, 1.0]
    """

    base: float
    total_updates: int

    def __post_init__(self) -> None:
        check_decay(self.base, "base")
        _check_positive(self.total_updates, "total_updates")

    def _decay(self, n: Number) -> Number | float:
        progress = _within((n - 1) / self.total_updates, 0.0, 1.0)
        return 1 - (1 - self.base) * (1 + _cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class BiasCorrected(_Counted):
    """The schedule whose average equals a zero-started one divided by `1 - decay**n`: the start gets no weight.

    `decay * (1 - decay**(n-1)) / (1 - decay**n)`: 0 at the first update, then up towards `decay`.

    Source: Kingma & Ba 2015 (Adam), section 3, rearranged into a recursion of the corrected average.

    Example:
        >>> BiasCorrected(0.9)(1)
        0.0
        >>> round(BiasCorrected(0.9)(2), 6)
        0.473684
    """

    decay: float

    def __post_init__(self) -> None:
        check_decay(self.decay)

    def _decay(self, n: Number) -> Number | float:
        if self.decay == 0.0:
            return 0.0
        log = math.log(self.decay)
        # expm1: for decays near 1 and small n the differences 1 - decay**n would cancel.
        return _within(self.decay * _expm1((n - 1) * log) / _expm1(n * log), 0.0, self.decay)


_KINDS: dict[str, type] = {
    "constant": Constant,
    "warmup": Warmup,
    "inverse_gamma": InverseGamma,
    "half_life": HalfLife,
    "half_life_samples": HalfLifeSamples,
    "half_life_fraction": HalfLifeFraction,
    "power_function": PowerFunction,
    "cosine": Cosine,
    "bias_corrected": BiasCorrected,
}
_KIND_OF = {cls: kind for kind, cls in _KINDS.items()}


def as_schedule(decay: float | Schedule) -> Schedule:
    """Return a schedule: a number becomes `Constant`, a schedule or other callable stays what it is.

    Raises:
        TypeError: neither a real number nor callable.
        ValueError: a number that is not finite or outside [0, 1).

    Example:
        >>> as_schedule(0.99)
        Constant(decay=0.99)
    """
    if callable(decay):
        return decay
    return Constant(check_decay(decay))


def decay_at(schedule: Schedule, n: int) -> float:
    """Ask a schedule for the decay of update `n` (from 1) and refuse what cannot be one.

    Raises:
        TypeError: the schedule returned something that is not a real number.
        ValueError: it returned a value that is not finite or outside [0, 1], or `n` is below 1.

    Example:
        >>> decay_at(lambda n: 1 / n, 4)
        0.25
    """
    _check_count(n)
    value = schedule(n)
    number = _real(value, f"the decay that {_name_of(schedule)} returned for update {n}")
    if not 0.0 <= number <= 1.0:  # also refuses nan
        raise ValueError(
            f"{_name_of(schedule)} returned {value!r} for update {n}: a decay must be a finite number in [0, 1]; "
            "correct the schedule"
        )
    return number


def decay_on_device(schedule: float | Schedule, n: Tensor) -> Tensor:
    """The decays of updates `n`, computed where the counts lie: for a CUDA graph, or without waiting for the device.

    Args:
        schedule: a number or a schedule of this module; a plain callable cannot run on a device.
        n: counts from 1, int64, of any shape.

    Returns:
        fp64, of the shape and device of `n`; within 1e-12 of what the schedule says on the host.

    Raises:
        TypeError: a plain callable.

    Example:
        >>> decay_on_device(PowerFunction(0.0), torch.tensor([1, 2, 4])).tolist()
        [0.0, 0.5, 0.75]
    """
    schedule = as_schedule(schedule)
    if not runs_on_device(schedule):
        raise TypeError(
            f"decay: {_name_of(schedule)} is a plain callable, which only the host can evaluate; on the device it must "
            f"be a number or a schedule from fsdp_ema_lib.decay"
        )
    counts = n.to(torch.float64)
    return torch.zeros_like(counts) + schedule._decay(counts)


def runs_on_device(schedule: Schedule) -> TypeGuard[_Counted]:
    """Whether `decay_on_device` can evaluate it: the schedules of this module, not plain callables.

    Example:
        >>> runs_on_device(Constant(0.9)), runs_on_device(lambda n: 0.9)
        (True, False)
    """
    return isinstance(schedule, _Counted)


def decay_over_interval(schedule: float | Schedule, first_step: int, last_step: int) -> float:
    """The one decay that stands for all steps `first_step` to `last_step`, both included: the product of theirs.

    An average that is updated every N steps keeps its half-life in steps when it uses this decay at step `last_step`.

    Args:
        schedule: a number or a schedule.
        first_step: from 1.
        last_step: at least `first_step`.

    Raises:
        ValueError: an empty interval, a step below 1, or a decay outside [0, 1].

    Example:
        >>> decay_over_interval(0.5, 1, 3)
        0.125
    """
    if last_step < first_step:
        raise ValueError(f"last_step must be at least first_step, got first_step={first_step}, last_step={last_step}")
    schedule = as_schedule(schedule)
    return math.prod(decay_at(schedule, n) for n in range(first_step, last_step + 1))


def profile(schedule: float | Schedule, n: int) -> list[float]:
    """The weight of each past step in the average after `n` updates.

    Args:
        schedule: a number or a schedule.
        n: number of updates, at least 0.

    Returns:
        n + 1 weights that sum to 1: first the weight of what the average started from, then of the live weights at
        update 1, 2, ..., n.

    Example:
        >>> profile(0.5, 3)
        [0.125, 0.125, 0.25, 0.5]
    """
    if n < 0:
        raise ValueError(f"n must be at least 0 updates, got {n}")
    schedule = as_schedule(schedule)
    weights, kept = [], 1.0
    for step in range(n, 0, -1):
        decay = decay_at(schedule, step)
        weights.append(kept * (1 - decay))
        kept *= decay
    return [kept, *reversed(weights)]


def profile_sigma_rel(weights: Sequence[float]) -> float:
    """The width of a profile over its length: the standard deviation of the steps under these weights, over n.

    Source: Karras et al. 2024 (EDM2), section 3.1, for any profile.

    Args:
        weights: as `profile` returns them, at least two; they need not sum to 1.

    Example:
        >>> round(profile_sigma_rel([0.0] + [1.0] * 10_000), 4)
        0.2887
    """
    total, n = math.fsum(weights), len(weights) - 1
    if n < 1 or not total > 0.0:
        raise ValueError(
            f"a profile of at least one update with a positive sum was expected, got {n + 1} weights of sum {total}"
        )
    mean = math.fsum(i * w for i, w in enumerate(weights)) / total
    variance = math.fsum((i - mean) ** 2 * w for i, w in enumerate(weights)) / total
    return math.sqrt(variance) / n


def gamma_to_sigma_rel(gamma: float) -> float:
    """The relative width of the power-function profile: `sqrt((gamma+1) / ((gamma+2)**2 * (gamma+3)))`.

    Source: Karras et al. 2024 (EDM2), section 3.1.

    Args:
        gamma: > -1.

    Example:
        >>> round(gamma_to_sigma_rel(6.94), 3)
        0.1
    """
    number = _real(gamma, "gamma")
    if not (math.isfinite(number) and number > -1.0):
        raise ValueError(f"gamma must be a finite number above -1, got {gamma!r}")
    return math.sqrt((number + 1) / (number + 3)) / (number + 2)


def sigma_rel_to_gamma(sigma_rel: float) -> float:
    """The power whose profile has this relative width: the inverse of `gamma_to_sigma_rel` for gamma >= 0.

    Source: Karras et al. 2024 (EDM2), appendix C; solved here by bisection, where the width falls steadily.

    Args:
        sigma_rel: in (0, 1/sqrt(12)]; the largest, 0.2887, is the uniform average (gamma = 0).

    Example:
        >>> round(sigma_rel_to_gamma(0.05), 2)
        16.97
    """
    target = _real(sigma_rel, "sigma_rel")
    if not 0.0 < target <= _LARGEST_SIGMA_REL * (1 + 1e-15):
        raise ValueError(
            f"sigma_rel must be in (0, 1/sqrt(12) = {_LARGEST_SIGMA_REL:.4f}], got {sigma_rel!r}: "
            "no profile that grows with the step is wider than the uniform average"
        )
    low, high = 0.0, 1 / target  # the width at gamma is below 1 / (gamma + 2)
    if math.isinf(high):
        raise ValueError(f"sigma_rel={sigma_rel!r} is too small: its gamma is beyond the range of floats")
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return middle
        if gamma_to_sigma_rel(middle) > target:
            low = middle
        else:
            high = middle


def decay_from_half_life(steps: float) -> float:
    """The constant decay under which a step's weight halves in `steps` updates (> 0).

    Example:
        >>> decay_from_half_life(1)
        0.5
    """
    return _not_one(0.5 ** (1 / _check_positive(steps, "half-life in steps")), f"a half-life of {steps} steps")


def half_life_of(decay: float) -> float:
    """After how many updates a step's weight has halved, under a constant decay; 0 for decay 0.

    Example:
        >>> round(half_life_of(0.99), 2)
        68.97
    """
    decay = check_decay(decay)
    return math.log(0.5) / math.log(decay) if decay > 0.0 else 0.0


def decay_from_window(window: float) -> float:
    """The constant decay that averages over about `window` steps: `1 - 1 / window`.

    The window is the length of the uniform average whose newest step has the same weight; it is also the mean age of
    what is averaged, plus one. At least 1 (decay 0).

    Example:
        >>> decay_from_window(100)
        0.99
    """
    number = _real(window, "window")
    if not (math.isfinite(number) and number >= 1.0):
        raise ValueError(f"window must be a finite number of at least 1 step, got {window!r}")
    return _not_one(1 - 1 / number, f"a window of {window} steps")


def window_of(decay: float) -> float:
    """Over how many steps a constant decay averages: `1 / (1 - decay)`.

    Example:
        >>> round(window_of(0.99), 6)
        100.0
    """
    return 1 / (1 - check_decay(decay))


def scale_decay_for_batch(decay: float, kappa: float) -> float:
    """The constant decay after the batch grew by `kappa` (> 0): `decay ** kappa`, the same average in samples.

    Source: Busbridge et al. 2023, "How to Scale Your EMA", the EMA scaling rule.

    Example:
        >>> scale_decay_for_batch(0.9, kappa=2)
        0.81
    """
    scaled = check_decay(decay) ** _check_positive(kappa, "kappa")
    return _not_one(scaled, f"decay {decay} scaled by kappa {kappa}")


def to_config(schedule: float | Schedule) -> dict[str, Any]:
    """Describe a schedule by a dict that JSON can hold; `from_config` builds it again.

    A plain callable is described by its name alone and cannot be built again.

    Example:
        >>> to_config(Warmup(0.999))
        {'kind': 'warmup', 'decay': 0.999}
    """
    schedule = as_schedule(schedule)
    kind = _KIND_OF.get(type(schedule))
    if kind is None:
        return {"kind": "callable", "name": _name_of(schedule)}
    # NumPy's numbers make good schedules, but JSON has no place for them.
    numbers = asdict(schedule).items()  # type: ignore[call-overload]
    return {"kind": kind, **{what: int(n) if isinstance(n, Integral) else float(n) for what, n in numbers}}


def from_config(config: Mapping[str, Any]) -> Schedule:
    """Build the schedule that `to_config` described.

    Raises:
        ValueError: the kind is unknown (the known ones are listed), the fields are not those of the kind, a value is
            out of range, or the schedule was a plain callable.

    Example:
        >>> from_config({"kind": "warmup", "decay": 0.999})
        Warmup(decay=0.999)
    """
    given = dict(config)
    kind = given.pop("kind", None)
    if kind == "callable":
        raise ValueError(
            f"the schedule was the function {given.get('name')}, which cannot be rebuilt from its name: "
            "pass the function itself as decay="
        )
    if kind not in _KINDS:
        raise ValueError(
            f"unknown schedule kind {kind!r}: expected one of {', '.join(_KINDS)}; "
            "a newer version of fsdp_ema_lib may have written it"
        )
    expected = [field.name for field in fields(_KINDS[kind])]
    if sorted(given) != sorted(expected):
        raise ValueError(f"schedule {kind!r} has the fields {', '.join(expected)}; got {', '.join(given) or 'none'}")
    return _KINDS[kind](**given)


def _within(value: Number, low: float, high: float) -> Number:
    return value.clamp(low, high) if isinstance(value, Tensor) else min(max(low, value), high)


def _cos(value: Number) -> Number:
    return value.cos() if isinstance(value, Tensor) else math.cos(value)


def _expm1(value: Number) -> Number:
    return value.expm1() if isinstance(value, Tensor) else math.expm1(value)


def _name_of(schedule: Schedule) -> str:
    if type(schedule) in _KIND_OF:
        return repr(schedule)
    named = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    return f"{named.__module__}.{named.__qualname__}"


def _real(value: Any, what: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{what} must be a real number, got {value!r} ({type(value).__name__})")
    return float(value)


def _check_positive(value: Any, what: str) -> float:
    number = _real(value, what)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{what} must be a finite number above 0, got {value!r}")
    return number


def _check_count(n: int) -> None:
    if n < 1:
        raise ValueError(f"updates are counted from 1, got {n}")


def _not_one(decay: float, what: str) -> float:
    if decay >= 1.0:
        raise ValueError(
            f"{what} needs a decay so near 1 that a float cannot tell it from 1: the average would never move"
        )
    return decay
