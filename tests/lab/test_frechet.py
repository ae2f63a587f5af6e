import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from fsdp_ema_lib.lab.digits import Split, load_digits
from fsdp_ema_lib.lab.frechet import DigitDistance, accuracy, frechet_distance, train_classifier


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture(scope="module")
def distance(digits):
    return DigitDistance(digits)


def features_with(mean, covariance, count=200, seed=0):
    """Features whose sample mean and covariance are exactly those given."""
    raw = np.random.default_rng(seed).standard_normal((count, len(mean)))
    raw -= raw.mean(0)
    whiten = scipy.linalg.inv(scipy.linalg.sqrtm(np.cov(raw.T)).real)
    return torch.from_numpy(raw @ whiten @ scipy.linalg.sqrtm(covariance).real + mean)


def random_features(count, width, seed):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.standard_normal((count, width)) @ generator.standard_normal((width, width)))


def scipy_distance(a, b):
    a, b = a.double().numpy(), b.double().numpy()
    root = scipy.linalg.sqrtm(np.cov(a.T) @ np.cov(b.T))
    return np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root.real)


def test_gaussians_that_commute_have_the_textbook_distance():
    # |m|^2 + sum (s_a - s_b)^2 over the standard deviations.
    a = features_with(np.array([0.0, 0.0, 0.0]), np.diag([1.0, 4.0, 9.0]))
    b = features_with(np.array([1.0, 2.0, 2.0]), np.diag([4.0, 4.0, 1.0]), seed=1)
    assert frechet_distance(a, b) == pytest.approx(9 + 1 + 0 + 4, rel=1e-9)


@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_distance_agrees_with_scipys_matrix_square_root(width):
    a, b = random_features(300, width, 0), random_features(200, width, 1) + 0.5
    if width == 1:
        expected = float((a.mean() - b.mean()) ** 2 + (a.std() - b.std()) ** 2)
    else:
        expected = scipy_distance(a, b)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-8)


def test_equal_sets_are_at_distance_zero_and_order_does_not_matter():
    a = random_features(100, 20, 2)
    assert frechet_distance(a, a.flip(0)) == pytest.approx(0, abs=1e-9)


def test_a_singular_covariance_is_no_trouble():
    flat = torch.zeros(50, 4, dtype=torch.float64)
    flat[:, 0] = torch.linspace(-1, 1, 50)
    moved = flat + torch.tensor([0.0, 3.0, 0.0, 0.0])
    assert frechet_distance(flat, moved) == pytest.approx(9, rel=1e-9)
    assert frechet_distance(torch.zeros(5, 64), torch.ones(5, 64)) == pytest.approx(64)


@pytest.mark.parametrize(
    ("a", "b", "complaint"),
    [
        (torch.zeros(1, 3), torch.zeros(4, 3), r"features_a must have shape \(n, d\) with n at least 2.*got \(1, 3\)"),
        (torch.zeros(4, 3), torch.zeros(4, 3, 1), r"features_b must have shape \(n, d\).*got \(4, 3, 1\)"),
        (torch.zeros(4, 3), torch.zeros(4, 5), "must have as many features, got 3 and 5 per sample"),
        (torch.zeros(4, 3), torch.tensor([[0.0, 1.0, float("nan")]] * 3 + [[0.0] * 3]), "features_b: 3 of 4 samples"),
        (torch.full((4, 3), float("inf")), torch.zeros(4, 3), "features_a: 4 of 4 samples hold NaN or infinity"),
    ],
)
def test_bad_features_are_refused(a, b, complaint):
    with pytest.raises(ValueError, match=complaint):
        frechet_distance(a, b)


def test_the_classifier_reads_digits_it_has_not_seen(distance, digits):
    assert distance.accuracy > 0.95
    swapped = Split(digits.held_out.images, digits.held_out.labels.roll(1))
    assert accuracy(distance.classifier, swapped) < 0.3


def test_everything_is_repeatable_and_leaves_the_global_random_state(digits, distance):
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    again = DigitDistance(digits)
    assert torch.equal(torch.rand(2), expected)
    assert again.real == distance.real
    for one, two in zip(again.classifier.parameters(), distance.classifier.parameters(), strict=True):
        assert torch.equal(one, two)
    other = train_classifier(digits.train, steps=5, seed=1)
    assert not torch.equal(other.head.weight, train_classifier(digits.train, steps=5, seed=0).head.weight)


def test_the_distance_grows_as_digits_are_spoiled(distance, digits):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(digits.train.images.shape, generator=generator)
    spoiled = [distance(digits.train.images + strength * noise) for strength in (0.0, 0.2, 0.4, 0.8)]
    assert spoiled[0] == distance.real
    assert spoiled == sorted(spoiled)
    assert spoiled[-1] > 4 * spoiled[0]


def test_missing_classes_are_noticed(distance, digits):
    assert distance(digits.train.images[digits.train.labels < 5]) > 3 * distance.real


def test_images_of_another_shape_are_refused(distance):
    with pytest.raises(ValueError, match=r"images must have shape \(n, 8, 8\), got \(4, 64\)"):
        distance(torch.zeros(4, 64))


def test_the_classifier_needs_steps(digits):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        train_classifier(digits.train, steps=0)


def test_the_distance_leaves_nothing_to_differentiate(distance):
    images = nn.Parameter(torch.zeros(4, 8, 8))
    distance(images)
    assert images.grad is None and not any(p.requires_grad for p in distance.classifier.parameters())
