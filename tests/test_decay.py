"""Decay schedules against their defining properties, in exact arithmetic where there is one."""

import json
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fsdp_ema_lib import decay as d

settings.register_profile("untimed", deadline=None)  # a shared machine may pause any example
settings.load_profile("untimed")

decays = st.floats(0.0, 1.0, exclude_max=True)
counts = st.integers(1, 10**7)
positive = st.floats(1e-6, 1e6)


@st.composite
def inverse_gammas(draw: st.DrawFn) -> d.InverseGamma:
    low, high = sorted([draw(st.floats(0, 1)), draw(st.floats(0, 1))])
    return d.InverseGamma(draw(positive), draw(st.floats(0.01, 5)), low, high)


schedules = st.one_of(
    st.builds(d.Constant, decays),
    st.builds(d.Warmup, decays),
    inverse_gammas(),
    st.builds(d.HalfLife, positive),
    st.builds(d.HalfLifeSamples, samples=positive, batch_size=st.integers(1, 10**6)),
    st.builds(d.HalfLifeFraction, st.floats(1e-6, 1)),
    st.builds(d.PowerFunction, st.floats(-0.99, 1e4)),
    st.builds(d.Cosine, decays, st.integers(1, 10**6)),
    st.builds(d.BiasCorrected, decays),
)


@given(schedules, counts)
def test_every_schedule_gives_a_decay_between_0_and_1(schedule, n):
    value = schedule(n)
    assert isinstance(value, float)
    assert 0.0 <= value <= 1.0
    assert d.decay_at(schedule, n) == value


@given(schedules, st.lists(counts, min_size=1, max_size=5))
def test_a_schedule_says_on_the_device_what_it_says_on_the_host(schedule, several):
    found = d.decay_on_device(schedule, torch.tensor(several))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([schedule(n) for n in several], abs=1e-12, rel=1e-12)


def test_a_plain_callable_cannot_run_on_the_device():
    with pytest.raises(TypeError, match=r"decay: .*<lambda> is a plain callable, which only the host can evaluate"):
        d.decay_on_device(lambda n: 0.5, torch.tensor(1))


@given(schedules)
def test_a_schedule_survives_json(schedule):
    assert d.from_config(json.loads(json.dumps(d.to_config(schedule)))) == schedule


@given(schedules, st.integers(0, 60))
def test_profile_holds_the_weights_of_the_recursion(schedule, n):
    weights = [Fraction(1)]  # exact: the average as a combination of what it has seen
    for step in range(1, n + 1):
        decay = Fraction(schedule(step))
        weights = [w * decay for w in weights] + [1 - decay]
    measured = d.profile(schedule, n)
    assert len(measured) == n + 1
    assert measured == pytest.approx([float(w) for w in weights], rel=1e-9, abs=1e-15)
    assert sum(measured) == pytest.approx(1, abs=1e-12)


@given(schedules, st.integers(1, 50), st.integers(0, 50))
def test_interval_decay_is_the_product_of_the_steps(schedule, first, more):
    exact = math.prod((Fraction(schedule(n)) for n in range(first, first + more + 1)), start=Fraction(1))
    assert d.decay_over_interval(schedule, first, first + more) == pytest.approx(float(exact), rel=1e-12, abs=1e-300)


@given(st.floats(0.01, 0.9999), st.integers(1, 40), st.integers(1, 5))
def test_updating_every_n_steps_keeps_the_half_life_in_steps(decay, every, times):
    each_step = d.profile(decay, every * times)[0]
    sparse = math.prod(
        d.decay_over_interval(decay, last - every + 1, last) for last in range(every, every * times + 1, every)
    )
    assert sparse == pytest.approx(each_step, rel=1e-9)


@given(decays, st.integers(1, 60))
def test_bias_corrected_is_the_debiased_zero_started_average(decay, n):
    # Adam's form: m_n = sum of (1 - decay) decay^(n-i) x_i, divided by 1 - decay^n.
    exact = Fraction(decay)
    debiased = [float((1 - exact) * exact ** (n - i) / (1 - exact**n)) for i in range(1, n + 1)]
    measured = d.profile(d.BiasCorrected(decay), n)
    assert measured[0] == 0.0
    assert measured[1:] == pytest.approx(debiased, rel=1e-9, abs=1e-300)
    assert sum(measured) == pytest.approx(1, abs=1e-12)


def test_bias_corrected_is_accurate_where_the_differences_cancel():
    decay = 1 - 2.0**-40
    exact = Fraction(decay) * (1 - Fraction(decay) ** 2) / (1 - Fraction(decay) ** 3)
    assert d.BiasCorrected(decay)(3) == pytest.approx(float(exact), rel=1e-15)


@pytest.mark.parametrize("gamma", [0, 1, 2, 6])
def test_power_function_gives_step_i_the_share_of_i_to_the_gamma_plus_one(gamma):
    # The product telescopes: everything up to step i keeps (i/n)^(gamma+1).
    n = 50
    share = [Fraction(i, n) ** (gamma + 1) for i in range(n + 1)]
    exact = [float(share[i] - share[i - 1]) for i in range(1, n + 1)]
    assert d.profile(d.PowerFunction(gamma), n) == pytest.approx([0.0, *exact], rel=1e-10, abs=1e-300)


@pytest.mark.parametrize("sigma_rel", [0.05, 0.10, 0.15, 0.20, 0.25])
def test_power_function_profile_has_the_width_that_its_sigma_rel_says(sigma_rel):
    schedule = d.PowerFunction.from_sigma_rel(sigma_rel)
    assert schedule.sigma_rel == pytest.approx(sigma_rel, rel=1e-12)
    assert d.profile_sigma_rel(d.profile(schedule, 20_000)) == pytest.approx(sigma_rel, rel=1e-3)


def test_published_pairs_of_sigma_rel_and_gamma():
    # EDM2: sigma_rel 0.05 is gamma 16.97, and 0.10 is gamma 6.94.
    assert d.sigma_rel_to_gamma(0.05) == pytest.approx(16.97, abs=0.005)
    assert d.sigma_rel_to_gamma(0.10) == pytest.approx(6.94, abs=0.005)


@given(st.floats(0, 1e6))
def test_gamma_and_sigma_rel_are_inverse(gamma):
    # At gamma 0 the width is 0.29 - 0.05 gamma, so an error of one unit in the last place becomes a few in gamma.
    assert d.sigma_rel_to_gamma(d.gamma_to_sigma_rel(gamma)) == pytest.approx(gamma, rel=1e-9, abs=1e-14)


@given(st.floats(1e-9, 1 / math.sqrt(12)))
def test_sigma_rel_to_gamma_solves_the_cubic(sigma_rel):
    gamma = d.sigma_rel_to_gamma(sigma_rel)
    assert (gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)) == pytest.approx(sigma_rel**2, rel=1e-12)


def test_uniform_average_is_the_widest():
    assert d.sigma_rel_to_gamma(1 / math.sqrt(12)) == pytest.approx(0, abs=1e-14)
    assert d.profile(d.PowerFunction(0), 10) == pytest.approx([0.0] + [0.1] * 10)


def test_known_values():
    assert [d.Warmup(0.9)(n) for n in (1, 2, 10_000)] == [2 / 11, 3 / 12, 0.9]
    assert d.InverseGamma(gamma=2, power=1, max_decay=1)(2) == 0.5
    assert d.InverseGamma(min_decay=0.5)(1) == 0.5
    assert d.InverseGamma(max_decay=0.9)(10**9) == 0.9
    assert d.HalfLifeFraction(0.05)(1000) == d.HalfLife(50)(1000)
    assert d.HalfLifeSamples(1024, 256)(1) == d.HalfLife(4)(1)
    cosine = d.Cosine(0.9, 10)
    assert [cosine(n) for n in (1, 6, 11, 500)] == pytest.approx([0.9, 0.95, 1.0, 1.0])
    assert cosine(11) == cosine(500) == 1.0


@given(st.floats(1e-3, 1e12))
def test_half_life_round_trips(steps):
    decay = d.decay_from_half_life(steps)
    assume(decay > 0)
    assert d.half_life_of(decay) == pytest.approx(steps, rel=max(1e-9, steps * 1e-15))
    assert d.HalfLife(steps)(7) == decay


@given(st.floats(1, 1e12))
def test_window_round_trips(window):
    assert d.window_of(d.decay_from_window(window)) == pytest.approx(window, rel=max(1e-9, window * 1e-15))


@given(st.floats(0.01, 0.999))
def test_window_is_the_mean_age_plus_one(decay):
    n = math.ceil(math.log(1e-12) / math.log(decay))
    weights = d.profile(d.BiasCorrected(decay), n)
    mean_age = sum((n - i) * w for i, w in enumerate(weights))
    assert mean_age + 1 == pytest.approx(d.window_of(decay), rel=1e-6)


@given(st.floats(0.01, 0.9999), st.integers(1, 64))
def test_scaled_decay_keeps_the_half_life_in_samples(decay, kappa):
    scaled = d.scale_decay_for_batch(decay, kappa)
    assume(scaled > 1e-300)
    assert d.half_life_of(scaled) * kappa == pytest.approx(d.half_life_of(decay), rel=1e-9)


@pytest.mark.parametrize("value", [1.0, 1.5, -0.1, math.nan, math.inf])
def test_constant_decays_out_of_range_are_refused(value):
    for build in (d.check_decay, d.Constant, d.Warmup, d.BiasCorrected, d.as_schedule):
        with pytest.raises(ValueError, match=r"decay must be a finite number in \[0, 1\), got " + str(value)):
            build(value)
    with pytest.raises(ValueError, match=r"base must be a finite number in \[0, 1\)"):
        d.Cosine(value, 10)


@pytest.mark.parametrize("value", ["0.9", None, True, [0.9]])
def test_decays_that_are_no_numbers_are_refused(value):
    with pytest.raises(TypeError, match=r"ema decay must be a real number, got "):
        d.check_decay(value, "ema decay")
    with pytest.raises(TypeError, match=r"decay must be a real number, got "):
        d.as_schedule(value)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: d.HalfLife(0), r"half-life in steps must be a finite number above 0, got 0"),
        (lambda: d.HalfLife(1e18), r"a half-life of 1e\+18 steps needs a decay so near 1"),
        (lambda: d.HalfLifeSamples(100, 0), r"batch_size must be a finite number above 0, got 0"),
        (lambda: d.HalfLifeFraction(1.5), r"fraction must be in \(0, 1\].*got 1.5"),
        (lambda: d.InverseGamma(gamma=0), r"gamma must be a finite number above 0, got 0"),
        (lambda: d.InverseGamma(min_decay=0.9, max_decay=0.5), r"got min_decay=0.9, max_decay=0.5"),
        (lambda: d.PowerFunction(-1), r"gamma must be a finite number above -1, got -1"),
        (lambda: d.PowerFunction.from_sigma_rel(0.3), r"sigma_rel must be in \(0, 1/sqrt\(12\) = 0.2887\], got 0.3"),
        (lambda: d.sigma_rel_to_gamma(0), r"sigma_rel must be in .*got 0"),
        (lambda: d.sigma_rel_to_gamma(5e-324), r"too small"),
        (lambda: d.Cosine(0.9, 0), r"total_updates must be a finite number above 0, got 0"),
        (lambda: d.decay_from_window(0.5), r"window must be a finite number of at least 1 step, got 0.5"),
        (lambda: d.scale_decay_for_batch(0.9, 0), r"kappa must be a finite number above 0, got 0"),
        (lambda: d.Constant(0.9)(0), r"updates are counted from 1, got 0"),
        (lambda: d.decay_over_interval(0.9, 5, 4), r"first_step=5, last_step=4"),
        (lambda: d.decay_over_interval(0.9, 0, 4), r"counted from 1, got 0"),
        (lambda: d.profile(0.9, -1), r"at least 0 updates, got -1"),
        (lambda: d.profile_sigma_rel([1.0]), r"at least one update"),
    ],
)
def test_bad_arguments_are_named(build, text):
    with pytest.raises(ValueError, match=text):
        build()


def crooked(n):
    return [0.5, 1.5, math.nan, "x"][n - 1]


def test_what_a_callable_returns_is_checked():
    assert d.decay_at(crooked, 1) == 0.5
    for n, found in [(2, "1.5"), (3, "nan")]:
        with pytest.raises(ValueError, match=rf"test_decay.crooked returned {found} for update {n}.*\[0, 1\]"):
            d.decay_at(crooked, n)
    with pytest.raises(TypeError, match=r"decay that test_decay.crooked returned for update 4 must be a real number"):
        d.decay_at(crooked, 4)
    with pytest.raises(ValueError, match=r"returned 1.5 for update 2"):
        d.profile(crooked, 2)


def test_a_callable_is_kept_and_described_but_not_rebuilt():
    assert d.as_schedule(crooked) is crooked
    config = d.to_config(crooked)
    assert config == {"kind": "callable", "name": "test_decay.crooked"}
    with pytest.raises(ValueError, match=r"function test_decay.crooked, which cannot be rebuilt.*pass the function"):
        d.from_config(config)


def test_a_number_is_described_as_a_constant():
    assert d.from_config(d.to_config(0.25)) == d.Constant(0.25)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"kind": "quantum"}, r"unknown schedule kind 'quantum': expected one of constant, warmup.*newer version"),
        ({}, r"unknown schedule kind None"),
        ({"kind": "warmup"}, r"'warmup' has the fields decay; got none"),
        ({"kind": "constant", "decay": 0.9, "x": 1}, r"'constant' has the fields decay; got decay, x"),
        ({"kind": "constant", "decay": 2.0}, r"decay must be a finite number"),
    ],
)
def test_bad_configs_are_refused(config, text):
    with pytest.raises(ValueError, match=text):
        d.from_config(config)
