import math
import socket
from itertools import islice

import pytest
import torch

from fsdp_ema_lib.lab import examples_of_models as examples
from fsdp_ema_lib.lab.own_model import StudyConfig, averages, build_model, load_hooks, study

ROOM = "fsdp_ema_lib.lab.examples_of_models"
GPT2 = (f"{ROOM}:gpt2", f"{ROOM}:text", f"{ROOM}:next_byte_loss")
VIT = (f"{ROOM}:vit", f"{ROOM}:digits", f"{ROOM}:class_loss")


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to reach another machine fails the test."""

    def refuse(*arguments):
        raise AssertionError(f"reached for the network: {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)


@pytest.mark.parametrize(("paths", "nothing_known"), [(GPT2, math.log(256)), (VIT, math.log(10))], ids=["gpt2", "vit"])
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_the_examples_learn_without_the_network(lone_rank, no_network, paths, nothing_known, sharding):
    hooks = load_hooks(*paths)
    config = StudyConfig(steps=40, eval_every=40, eval_batches=2, sharding=sharding, learning_rate=3e-3)
    model = build_model(hooks, config)
    result = study(model, hooks, config, averages(model, 0.5, [0.9]), progress=False)
    assert result.untrained == pytest.approx(nothing_known, rel=0.1)
    _, losses = result.history.series("loss")
    assert all(values[-1] < result.untrained for values in losses.values()), losses


def test_a_tied_embedding_is_averaged_once():
    model = examples.gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    (ema, *_) = averages(model, 0.9, []).values()
    assert sum(average.numel() for average in ema.shadow.values()) == sum(p.numel() for p in model.parameters())


def test_the_text_depends_on_the_seed_alone_and_what_is_held_out_is_never_trained_on():
    first, second = (list(islice(examples.text(True, 5), 3)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], next(examples.text(True, 6)))
    learned, held_out = (bytes(examples._standard_library(train).tolist()) for train in (True, False))
    assert len(held_out) > 100_000 and len(learned) > 4 * len(held_out)
    assert held_out[:2000] not in learned


def test_one_pass_over_the_digits_shows_every_image_at_most_once():
    images = torch.cat([images for images, _ in examples.digits(True, 1)])
    assert len(images) == 1200 // examples.IMAGES_PER_BATCH * examples.IMAGES_PER_BATCH
    held_out = torch.cat([images for images, _ in examples.digits(False, 0)])
    seen = {tuple(image.flatten().tolist()) for image in images}
    assert not any(tuple(image.flatten().tolist()) in seen for image in held_out)


def test_a_python_without_its_source_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(examples.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds no Python source to learn from; give text of your own by data="):
        examples._standard_library.__wrapped__(True)
