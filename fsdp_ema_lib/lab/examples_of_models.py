"""Two models of Hugging Face transformers with data and losses, in the form in which `own_model` takes a reader's own.

Both are built from their configurations, so nothing is downloaded. A language model learns the source of Python's
standard library byte by byte; an image classifier learns scikit-learn's handwritten digits.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from fsdp_ema_lib.lab.digits import IMAGE_SIZE, NUM_CLASSES, load_digits, seeded_generator

CONTEXT = 64  # bytes that the language model sees at once
TEXTS_PER_BATCH = 16
IMAGES_PER_BATCH = 32


# --- a language model ------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """A GPT-2 over bytes with 0.5 million parameters: three blocks of width 112, tied embeddings, no dropout.

    Example:
        >>> gpt2()(torch.zeros(2, 5, dtype=torch.int64)).logits.shape
        torch.Size([2, 5, 256])
    """
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=112,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def text(train: bool, seed: int) -> Iterator[Tensor]:
    """Batches of stretches of the standard library's source: int64 bytes, shape (16, 65).

    One pass draws as many bytes as there are, at random places. Every tenth module is held out.

    Example:
        >>> batch = next(text(train=True, seed=0))
        >>> batch.shape, batch.dtype, int(batch.max()) < 256
        (torch.Size([16, 65]), torch.int64, True)
    """
    source = _standard_library(train)
    generator = seeded_generator("places", seed)
    for _ in range(len(source) // (TEXTS_PER_BATCH * CONTEXT)):
        starts = torch.randint(len(source) - CONTEXT, (TEXTS_PER_BATCH, 1), generator=generator)
        yield source[starts + torch.arange(CONTEXT + 1)].long()


@cache
def _standard_library(train: bool) -> Tensor:
    """The bytes of the modules to learn from, or of those held out; uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    chosen = [path for number, path in enumerate(modules) if (number % 10 != 0) == train]
    source = b"".join(path.read_bytes() for path in chosen)
    if len(source) <= 100 * CONTEXT:
        raise FileNotFoundError(f"{folder} holds no Python source to learn from; give text of your own by data=")
    return torch.from_numpy(np.frombuffer(source, dtype=np.uint8).copy())


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of each next byte, in nats per byte; `batch` is int64 of shape (n, length + 1).

    Example:
        >>> loss = next_byte_loss(gpt2(), torch.zeros(2, 9, dtype=torch.int64))
        >>> loss.shape, bool(loss > 0)
        (torch.Size([]), True)
    """
    logits = model(batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


# --- an image classifier ---------------------------------------------------------------------------------------------


def vit() -> nn.Module:
    """A vision transformer for 8x8 images with 0.2 million parameters: 16 patches of 2x2, three blocks of width 64.

    Example:
        >>> vit()(torch.zeros(5, 1, 8, 8)).logits.shape
        torch.Size([5, 10])
    """
    config = ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=NUM_CLASSES,
    )
    return ViTForImageClassification(config)


def digits(train: bool, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of handwritten digits: images, float32 of shape (32, 1, 8, 8), and labels, int64 of shape (32,).

    1200 images to learn from in an order that the seed decides, 597 held out; the last, smaller batch is left out.

    Example:
        >>> images, labels = next(digits(train=False, seed=0))
        >>> images.shape, labels.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """
    whole = load_digits()
    split = whole.train if train else whole.held_out
    order = torch.randperm(len(split), generator=seeded_generator("order", seed))
    for chosen in order.split(IMAGES_PER_BATCH):
        if len(chosen) == IMAGES_PER_BATCH:
            yield split.images[chosen].unsqueeze(1), split.labels[chosen]


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the class, in nats per image, of a batch of images and labels.

    Example:
        >>> loss = class_loss(vit(), (torch.zeros(4, 1, 8, 8), torch.arange(4)))
        >>> loss.shape, bool(loss > 0)
        (torch.Size([]), True)
    """
    images, labels = batch
    return nn.functional.cross_entropy(model(images).logits, labels)
