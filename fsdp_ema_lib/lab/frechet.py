"""How far generated digits are from real ones: the Frechet distance in the features of a small classifier.

M. Heusel et al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium", NeurIPS 2017:
both sets are summed up by the mean and covariance of their features, and the distance is the one between two Gaussians,
|m_1 - m_2|^2 + tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2)) (D. C. Dowson and B. V. Landau, 1982).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_ema_lib.lab.digits import IMAGE_SIZE, NUM_CLASSES, Digits, Split, batches
from fsdp_ema_lib.lab.threads import cpu_threads

FEATURES = 64


class DigitClassifier(nn.Module):
    """A small MLP from images, shape (n, 8, 8), to class scores, shape (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(IMAGE_SIZE * IMAGE_SIZE, 128),
            nn.ReLU(),
            nn.Linear(128, FEATURES),
            nn.ReLU(),
        )
        self.head = nn.Linear(FEATURES, NUM_CLASSES)

    def features(self, images: Tensor) -> Tensor:
        """The last hidden layer, shape (n, 64): what the Frechet distance compares."""
        return self.body(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def train_classifier(split: Split, *, steps: int = 800, batch_size: int = 64, seed: int = 0) -> DigitClassifier:
    """Train the classifier whose features the distance uses; on the CPU, about a second.

    Repeatable: the same arguments on the same machine give the same weights, and the global random state is
    left as it was. Any rank may call by itself.

    Args:
        split: training images and labels.
        steps: optimizer steps, at least 1.
        batch_size: images per step.
        seed: initial weights and order of the images, at least 0.

    Raises:
        ValueError: `steps` is below 1, or `batch_size` or `seed` is out of range.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    data = batches(split, batch_size, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = DigitClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=1e-2)
    with cpu_threads(1):
        for _, (images, labels) in zip(range(steps), data, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(classifier(images), labels).backward()
            optimizer.step()
    return classifier.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(classifier: nn.Module, split: Split) -> float:
    """Share of `split` that the classifier labels right, from 0 to 1."""
    return float((classifier(split.images).argmax(1) == split.labels).double().mean())


def frechet_distance(features_a: Tensor, features_b: Tensor) -> float:
    """Frechet distance between the Gaussians that fit two sets of features; at least 0, 0 for equal sets.

    Computed in float64 on the CPU. The trace of the square root is taken from the eigenvalues of
    C_a^(1/2) C_b C_a^(1/2), which is symmetric, so nothing complex can appear where a covariance is singular.

    Args:
        features_a: shape (n, d), any floating dtype, any device, n at least 2.
        features_b: shape (m, d), m at least 2.

    Raises:
        ValueError: a shape is wrong, or a value is not finite.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
        >>> round(frechet_distance(points, points + 3), 6)
        18.0
    """
    mean_a, covariance_a = _gaussian(features_a, "features_a")
    mean_b, covariance_b = _gaussian(features_b, "features_b")
    if mean_a.shape != mean_b.shape:
        raise ValueError(
            f"features_a and features_b must have as many features, got {len(mean_a)} and {len(mean_b)} per sample"
        )
    root = _symmetric_sqrt(covariance_a)
    eigenvalues = torch.linalg.eigvalsh(root @ covariance_b @ root)
    cross = eigenvalues.clamp(min=0).sqrt().sum()
    distance = (mean_a - mean_b).square().sum() + covariance_a.trace() + covariance_b.trace() - 2 * cross
    return max(0.0, float(distance))


def _gaussian(features: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Mean, shape (d,), and covariance, shape (d, d), in float64."""
    if features.ndim != 2 or features.shape[0] < 2:
        raise ValueError(f"{what} must have shape (n, d) with n at least 2 samples, got {tuple(features.shape)}")
    values = features.detach().to("cpu", torch.float64)
    broken = int((~values.isfinite()).any(dim=1).sum())
    if broken:
        raise ValueError(
            f"{what}: {broken} of {len(values)} samples hold NaN or infinity; look at the generated images first "
            "(a learning rate that is too high diverges)"
        )
    return values.mean(0), torch.atleast_2d(values.T.cov())


def _symmetric_sqrt(matrix: Tensor) -> Tensor:
    """Square root of a symmetric positive semi-definite matrix."""
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    return (vectors * eigenvalues.clamp(min=0).sqrt()) @ vectors.T


class DigitDistance:
    """The Frechet distance of images to the held-out digits, in the features of a classifier trained on the spot.

    The classifier learns from the training digits; the held-out ones are the reference, so a generator that copies its
    training data gains nothing. Everything runs on the CPU and is repeatable.

    Args:
        digits: both parts of the data.
        seed: for the classifier's training.

    Example:
        >>> from fsdp_ema_lib.lab.digits import load_digits
        >>> distance = DigitDistance(load_digits())
        >>> distance.real < distance(torch.zeros(20, 8, 8))
        True
    """

    def __init__(self, digits: Digits, *, seed: int = 0) -> None:
        self.classifier = train_classifier(digits.train, seed=seed)
        self._reference = self.classifier.features(digits.held_out.images)
        #: The distance of the training digits to the held-out ones: what no generator can be expected to beat by much.
        self.real = self(digits.train.images)
        #: Share of the held-out digits that the classifier labels right.
        self.accuracy = accuracy(self.classifier, digits.held_out)

    def __call__(self, images: Tensor) -> float:
        """Distance of `images`, shape (n, 8, 8), n at least 2, any device, to the held-out digits; lower is better."""
        if images.ndim != 3 or tuple(images.shape[1:]) != (IMAGE_SIZE, IMAGE_SIZE):
            raise ValueError(f"images must have shape (n, {IMAGE_SIZE}, {IMAGE_SIZE}), got {tuple(images.shape)}")
        with torch.no_grad():
            return frechet_distance(self.classifier.features(images.float().cpu()), self._reference)
