import math

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ema_lib.lab.flow import (
    VelocityField,
    cycled_labels,
    draw_noise_and_times,
    flow_matching_loss,
    sample,
    time_embedding,
)
from fsdp_ema_lib.wrapping import fsdp2_wrap, fsdp_wrap


def small_field(seed=0, hidden=32, blocks=2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VelocityField(hidden, blocks)


def test_the_default_model_has_1_7_million_parameters():
    assert sum(p.numel() for p in VelocityField().parameters()) == pytest.approx(1.7e6, rel=0.02)


def test_the_field_depends_on_time_and_on_class():
    field, x = small_field(), torch.randn(2, 8, 8)
    at = lambda t, label: field(x, torch.full((2,), t), torch.full((2,), label))  # noqa: E731
    assert not torch.allclose(at(0.1, 3), at(0.9, 3), atol=1e-4)
    assert not torch.allclose(at(0.1, 3), at(0.1, 4), atol=1e-4)


def test_every_parameter_gets_a_gradient():
    field = small_field()
    noise, times = draw_noise_and_times(20, seed=0, step=1)
    flow_matching_loss(field, torch.randn(20, 8, 8), cycled_labels(20), noise, times).backward()
    assert [name for name, p in field.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_bf16_weights_compute_and_answer_in_fp32():
    field = small_field()
    x, t, labels = torch.randn(5, 8, 8), torch.rand(5), cycled_labels(5)
    exact = field(x, t, labels)
    rounded = field.bfloat16()(x, t, labels)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_time_embedding_is_sines_then_cosines_up_to_1000_radians():
    t = np.array([0.0, 0.25, 1.0])
    frequencies = 1000.0 ** (np.arange(6) / 5)
    expected = np.concatenate([np.sin(np.outer(t, frequencies)), np.cos(np.outer(t, frequencies))], axis=1)
    np.testing.assert_allclose(time_embedding(torch.tensor(t), 12).numpy(), expected, atol=5e-4)


def test_the_loss_is_the_error_of_the_velocity_on_the_straight_path():
    field = small_field()
    images, labels = torch.rand(6, 8, 8) * 2 - 1, cycled_labels(6)
    noise, times = draw_noise_and_times(6, seed=1, step=2)
    total = 0.0
    for i in range(6):
        t = float(times[i])
        x_t = (1 - t) * noise[i].numpy() + t * images[i].numpy()
        with torch.no_grad():
            predicted = field(torch.from_numpy(x_t)[None].float(), times[i : i + 1], labels[i : i + 1])[0].numpy()
        total += np.mean((predicted.astype(np.float64) - (images[i] - noise[i]).double().numpy()) ** 2)
    assert flow_matching_loss(field, images, labels, noise, times).item() == pytest.approx(total / 6, rel=1e-5)


def test_noise_is_normal_and_times_uniform_and_both_belong_to_the_step():
    noise, times = draw_noise_and_times(4000, seed=0, step=7)
    assert noise.mean().abs() < 0.01 and abs(noise.std() - 1) < 0.01
    assert 0 <= times.min() < 0.01 and 0.99 < times.max() <= 1 and abs(times.mean() - 0.5) < 0.02
    again, other_step, other_seed = (
        draw_noise_and_times(4000, seed=seed, step=step)[0] for seed, step in ((0, 7), (0, 8), (1, 7))
    )
    assert torch.equal(noise, again)
    assert not torch.equal(noise, other_step) and not torch.equal(noise, other_seed)


@pytest.mark.parametrize("method", ["euler", "heun"])
def test_a_constant_velocity_is_followed_exactly(method):
    drift = torch.linspace(-1, 1, 64).view(8, 8)
    start = sample(lambda x, t, labels: torch.zeros_like(x), cycled_labels(3), steps=1, method=method, seed=5)
    end = sample(lambda x, t, labels: drift.expand_as(x), cycled_labels(3), steps=7, method=method, seed=5)
    torch.testing.assert_close(end, start + drift)


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2)])
def test_the_error_falls_with_the_order_of_the_method(method, order):
    # dx/dt = 3 t^2 x has the solution x(1) = e x(0): time enters, so a wrong time would show.
    field = lambda x, t, labels: 3 * t[:, None, None] ** 2 * x  # noqa: E731
    start = sample(lambda x, t, labels: torch.zeros_like(x), cycled_labels(4), steps=1)
    errors = [
        (sample(field, cycled_labels(4), steps=steps, method=method) - math.e * start).norm().item()
        for steps in (16, 32)
    ]
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.15)


def test_samples_depend_on_the_seed_and_not_on_the_global_random_state():
    field = small_field()
    torch.manual_seed(0)
    first = sample(field, cycled_labels(10), steps=2, seed=3)
    torch.manual_seed(1)
    assert torch.equal(sample(field, cycled_labels(10), steps=2, seed=3), first)
    assert not torch.equal(sample(field, cycled_labels(10), steps=2, seed=4), first)
    assert not first.requires_grad


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"method": "rk4"}, "method must be one of 'euler', 'heun', got 'rk4'"),
        ({"seed": -1}, "the seed of the samples must be at least 0, got -1"),
    ],
)
def test_sampling_refuses_bad_arguments(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        sample(small_field(), cycled_labels(2), **arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"hidden": 33}, "hidden must be a positive even width, got 33"),
        ({"hidden": 0}, "hidden must be a positive even width, got 0"),
        ({"blocks": 0}, "blocks must be at least 1, got 0"),
    ],
)
def test_impossible_models_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        VelocityField(**arguments)


def worker_sample(wrapper):
    field = small_field()
    wrap = fsdp_wrap if wrapper == "fsdp1" else fsdp2_wrap
    model = wrap(field, sharding_strategy="full", mixed_precision=False, min_num_params=2 * 32**2)
    labels = cycled_labels(10)
    noise, times = draw_noise_and_times(10, seed=0, step=1)
    sampled = sample(model, labels, steps=3)
    # Sampling leaves units gathered; the next training step and the next sampling must not mind.
    flow_matching_loss(model, sampled, labels, noise, times).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9) if wrapper == "fsdp2" else model.clip_grad_norm_(1e9)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return sampled, float(norm), sample(model, labels, steps=3)


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_sharded_model_samples_and_trains_as_the_plain_one(ranks, wrapper):
    plain, labels = small_field(), cycled_labels(10)
    expected = sample(plain, labels, steps=3)
    noise, times = draw_noise_and_times(10, seed=0, step=1)
    flow_matching_loss(plain, expected, labels, noise, times).backward()
    expected_norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters()))
    for rank, (sampled, norm, again) in enumerate(ranks(2, worker_sample, wrapper=wrapper)):
        torch.testing.assert_close(
            sampled, expected, rtol=1e-4, atol=1e-5, msg=lambda text, r=rank: f"rank {r}: {text}"
        )
        assert norm == pytest.approx(expected_norm, rel=1e-4), f"rank {rank}"
        assert torch.equal(again, sampled), f"rank {rank}"
