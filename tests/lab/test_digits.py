import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits as sklearn_digits

from fsdp_ema_lib.lab.digits import Split, batches, load_digits, rank_slice, seeded_generator


def rows(images, labels):
    """Images and labels as sortable tuples, so that sets of them can be compared."""
    return sorted(
        (*pixels, int(label)) for pixels, label in zip(images.reshape(len(labels), -1).tolist(), labels, strict=True)
    )


def numbered(count):
    """A split whose labels are the image's position."""
    return Split(torch.zeros(count, 8, 8), torch.arange(count))


def take(iterator, count):
    return [next(iterator)[1].tolist() for _ in range(count)]


def test_both_parts_together_are_the_data_set_scaled_to_minus_one_and_one():
    digits = load_digits(held_out=300, seed=4)
    raw = sklearn_digits()
    assert (len(digits.train), len(digits.held_out)) == (1497, 300)
    assert digits.train.images.dtype == torch.float32 and digits.train.labels.dtype == torch.int64
    images = torch.cat([digits.train.images, digits.held_out.images])
    labels = torch.cat([digits.train.labels, digits.held_out.labels])
    assert images.min() == -1 and images.max() == 1
    assert rows((images + 1) * 8, labels) == rows(np.float32(raw.images), raw.target)


def test_the_split_depends_on_the_seed_alone():
    first, again, other = load_digits(seed=1), load_digits(seed=1), load_digits(seed=2)
    assert torch.equal(first.held_out.images, again.held_out.images)
    assert not torch.equal(first.held_out.images, other.held_out.images)


@pytest.mark.parametrize("held_out", [0, 1797, -1])
def test_an_empty_part_is_refused(held_out):
    with pytest.raises(ValueError, match=f"held_out must be from 1 to 1796 images, got {held_out}"):
        load_digits(held_out=held_out)


@pytest.mark.parametrize("batch_size", [1, 7, 10, 30])
def test_every_pass_shows_each_image_once(batch_size):
    seen = [label for batch in take(batches(numbered(30), batch_size, seed=3), 90 // batch_size + 1) for label in batch]
    passes = [seen[start : start + 30] for start in (0, 30, 60)]
    for one in passes:
        assert sorted(one) == list(range(30))
    assert passes[0] != passes[1] != passes[2]


def test_images_come_with_their_own_labels():
    train = load_digits().train
    images, labels = next(batches(train, 100))
    lookup = {
        tuple(image.flatten().tolist()): int(label) for image, label in zip(train.images, train.labels, strict=True)
    }
    assert [lookup[tuple(image.flatten().tolist())] for image in images] == labels.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_parts_of_the_ranks_make_up_the_batch_of_one_process(world_size):
    whole = take(batches(numbered(25), 12, seed=5), 9)
    parts = [take(batches(numbered(25), 12, seed=5, rank=r, world_size=world_size), 9) for r in range(world_size)]
    for step in range(9):
        assert sum((part[step] for part in parts), []) == whole[step]
    assert parts[0] != parts[1]


@pytest.mark.parametrize("first_step", [1, 2, 3, 4, 8, 17])
def test_a_resumed_run_sees_the_batches_it_would_have_seen(first_step):
    straight = take(batches(numbered(30), 7, seed=2), 25)
    assert (
        take(batches(numbered(30), 7, seed=2, first_step=first_step), 25 - first_step + 1) == straight[first_step - 1 :]
    )


def test_seeds_give_other_orders():
    assert take(batches(numbered(30), 10, seed=0), 3) != take(batches(numbered(30), 10, seed=1), 3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"batch_size": 0}, "batch_size must be from 1 to the 30 images there are, got 0"),
        ({"batch_size": 31}, "batch_size must be from 1 to the 30 images there are, got 31"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"first_step": 0}, "first_step counts from 1, got 0"),
        ({"world_size": 3}, "must be a multiple of the world size 3, got 10"),
        ({"seed": -1}, "the seed of the batches must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused_before_a_batch_is_drawn(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        batches(numbered(30), **({"batch_size": 10} | arguments))


def test_rank_slices_cover_the_batch_without_overlap():
    covered = [position for rank in range(4) for position in range(20)[rank_slice(20, rank=rank, world_size=4)]]
    assert covered == list(range(20))


def test_generators_differ_by_purpose_and_by_every_number():
    streams = [("a", 0), ("b", 0), ("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("a", 1), ("a", 2**70)]
    draws = [tuple(torch.rand(4, generator=seeded_generator(*stream)).tolist()) for stream in streams]
    assert len(set(draws)) == len(streams)


def test_nothing_touches_the_global_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    next(batches(load_digits().train, 8))
    assert torch.equal(torch.rand(3), expected)
