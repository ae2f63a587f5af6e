"""A small class-conditional generator: flow matching with straight paths on the digits.

Y. Lipman, R. T. Q. Chen, H. Ben-Hamu, M. Nickel, M. Le, "Flow Matching for Generative Modeling", ICLR 2023. The path
is the conditional optimal-transport path with sigma_min = 0: x_t = (1 - t) x_0 + t x_1 from noise x_0 to an image x_1,
whose velocity is x_1 - x_0.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from fsdp_ema_lib.lab.digits import IMAGE_SIZE, NUM_CLASSES, seeded_generator

Method = Literal["euler", "heun"]
METHODS: tuple[Method, ...] = ("euler", "heun")


class VelocityField(nn.Module):
    """Predict the velocity of the flow at a point, a time and a class.

    A residual MLP: the sum of a sinusoidal time embedding and a class embedding is added to the input of every block.
    With the default sizes it has 1.7 million parameters. It computes in the dtype of its weights and answers in fp32.

    Args:
        hidden: width, a positive even number.
        blocks: number of residual blocks, at least 1.

    Raises:
        ValueError: `hidden` or `blocks` is out of its range.

    Example:
        >>> field = VelocityField(hidden=32, blocks=1)
        >>> field(torch.zeros(5, 8, 8), torch.rand(5), torch.arange(5)).shape
        torch.Size([5, 8, 8])
    """

    def __init__(self, hidden: int = 512, blocks: int = 3) -> None:
        super().__init__()
        if hidden < 2 or hidden % 2:
            raise ValueError(f"hidden must be a positive even width, got {hidden}")
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        pixels = IMAGE_SIZE * IMAGE_SIZE
        self.time_features = 64
        self.input = nn.Linear(pixels, hidden)
        self.time = nn.Linear(self.time_features, hidden)
        self.label = nn.Embedding(NUM_CLASSES, hidden)
        self.blocks = nn.ModuleList(ResidualBlock(hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, pixels)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Velocity at `x`, shape (n, 8, 8), at times `t` in [0, 1], shape (n,), for `labels`, shape (n,)."""
        # FSDP's mixed precision makes the weights bf16 inside forward alone, so the dtype is read here, and from a
        # parameter too small to be a sharded unit of its own: that would be bf16 only inside its own forward.
        dtype = self.norm.weight.dtype
        condition = nn.functional.silu(self.time(time_embedding(t, self.time_features).to(dtype)) + self.label(labels))
        hidden = self.input(x.flatten(1).to(dtype))
        for block in self.blocks:
            hidden = block(hidden, condition)
        # Cloned because FSDP2 hooks the output and warns of a view: an in-place change of it would drop the hook.
        return self.output(self.norm(hidden)).float().view_as(x).clone()


class ResidualBlock(nn.Module):
    """Add to the hidden state, shape (n, width), an MLP of itself and the condition, shape (n, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        return hidden + self.outer(nn.functional.silu(self.inner(self.norm(hidden) + condition)))


def time_embedding(t: Tensor, features: int) -> Tensor:
    """Sines and cosines of the time at frequencies from 1 to 1000 radians, shape (n,) to (n, features), fp32.

    Args:
        t: times in [0, 1], shape (n,).
        features: number of features, an even number of at least 4.

    Example:
        >>> time_embedding(torch.zeros(1), 4)
        tensor([[0., 0., 1., 1.]])
    """
    exponents = torch.linspace(0, math.log(1000.0), features // 2, device=t.device)
    angles = t.float()[:, None] * exponents.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def flow_matching_loss(model: nn.Module, images: Tensor, labels: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity on the straight path from `noise` to `images`; a scalar.

    Lipman et al. (2023), equation 23 with sigma_min = 0. All ranks of a sharded model must call, each with its own
    part of the batch (the forward gathers weights).

    Args:
        model: called as `model(x, t, labels)`.
        images: x_1, shape (n, 8, 8), in [-1, 1].
        labels: shape (n,), int64.
        noise: x_0, standard normal, shape of `images`.
        times: uniform in [0, 1], shape (n,).

    Example:
        >>> images, noise = torch.ones(2, 8, 8), torch.zeros(2, 8, 8)
        >>> flow_matching_loss(lambda x, t, labels: 0 * x, images, torch.tensor([0, 1]), noise, torch.rand(2))
        tensor(1.)
    """
    t = times[:, None, None]
    predicted = model((1 - t) * noise + t * images, times, labels)
    return nn.functional.mse_loss(predicted, images - noise)


def draw_noise_and_times(batch_size: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Noise, shape (batch_size, 8, 8), and times, shape (batch_size,), of one training step; fp32, on the CPU.

    They depend on the seed and the step alone, so every rank can draw them for the whole batch and keep its part, and a
    resumed run or another device sees the same numbers.

    Example:
        >>> noise, times = draw_noise_and_times(4, seed=0, step=1)
        >>> noise.shape, times.shape
        (torch.Size([4, 8, 8]), torch.Size([4]))
    """
    generator = seeded_generator("training noise", seed, step)
    noise = torch.randn(batch_size, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return noise, torch.rand(batch_size, generator=generator)


@torch.no_grad()  # not inference_mode: FSDP2 would leave inference tensors in the weights that the next step trains
def sample(model: nn.Module, labels: Tensor, *, steps: int = 16, method: Method = "heun", seed: int = 0) -> Tensor:
    """Generate one image per label by following the flow from seeded noise at t = 0 to t = 1.

    All ranks of a sharded model must call with the same arguments; each gets all the images. The noise is drawn on
    the CPU, so that every device starts from the same. The model's train or eval mode is left as it is.

    Args:
        model: a trained `VelocityField`, plain or sharded.
        labels: classes to draw, shape (n,), int64, on the model's device.
        steps: equal time steps, at least 1; "heun" evaluates the model twice in each.
        method: "euler" (first order) or "heun" (second order, explicit trapezoid).
        seed: which noise to start from, at least 0.

    Returns:
        Images, shape (n, 8, 8), fp32, on the device of `labels`; mostly within [-1, 1], not clipped.

    Raises:
        ValueError: `steps` is below 1, or `method` is unknown.

    Example:
        >>> sample(VelocityField(hidden=32, blocks=1), torch.tensor([3, 7]), steps=2).shape
        torch.Size([2, 8, 8])
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    generator = seeded_generator("samples", seed)
    x = torch.randn(len(labels), IMAGE_SIZE, IMAGE_SIZE, generator=generator).to(labels.device)
    times = torch.linspace(0, 1, steps + 1).tolist()
    for now, then in zip(times, times[1:], strict=False):
        velocity = model(x, x.new_full((len(x),), now), labels)
        if method == "heun":
            ahead = x + (then - now) * velocity
            velocity = (velocity + model(ahead, x.new_full((len(x),), then), labels)) / 2
        x = x + (then - now) * velocity
    return x


def cycled_labels(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Labels 0 to 9 over and over, shape (count,), int64: classes as even as can be.

    Example:
        >>> cycled_labels(12).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    """
    return torch.arange(count, device=device) % NUM_CLASSES
