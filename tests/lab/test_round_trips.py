import pytest
import torch

from fsdp_ema_lib.lab.round_trips import PARTS, differing_bytes, relative_difference, round_trips


@pytest.fixture(scope="module")
def cells():
    return round_trips(["plain 1", "FSDP1 full 2", "FSDP2 full 2"], steps=3, more=2, hidden=34)


def test_every_pair_of_layouts_is_a_cell_in_the_given_order(cells):
    layouts = ["plain 1", "FSDP1 full 2", "FSDP2 full 2"]
    assert [(cell.source, cell.target) for cell in cells] == [(a, b) for a in layouts for b in layouts]


def test_every_bit_comes_back_under_every_layout(cells):
    assert [cell for cell in cells if not cell.equal] == []


def test_the_comparison_sees_the_difference_that_the_load_took_away(cells):
    for cell in cells:
        # Random numbers of the same size share some bytes: the sign and most of the exponent.
        assert all(0.5 < cell.before[part] / cell.total[part] < 1 for part in PARTS), cell


def test_all_of_the_model_was_compared(cells):
    width, pixels, classes, blocks = 34, 64, 10, 1
    numel = 2 * (pixels + 1) * width + classes * width + blocks * (2 * width + 2 * (width + 1) * width)
    numel += 2 * width + (width + 1) * pixels
    parameters = 9 + 6 * blocks  # three linear layers, a norm and an embedding; a norm and two linear layers per block
    for cell in cells:
        assert cell.total["model"] == 4 * numel
        assert cell.total["EMA"] == 4 * numel + 8  # and the number of updates
        assert cell.total["AdamW"] == 8 * numel + 4 * parameters  # two moments, and a step of each


def test_only_the_layout_itself_goes_on_to_the_same_bits_for_sure(cells):
    for cell in cells:
        assert cell.apart == 0 if cell.source == cell.target else cell.apart < 1e-4, cell


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ([], "layouts: expected different ones, at least one"),
        (["plain 1", "plain 1"], "layouts: expected different ones"),
        (["plain"], "such as \"FSDP2 full 2\", got 'plain'"),
        (["FSDP3 full 2"], "got 'FSDP3 full 2'; the ways are plain, FSDP1 full"),
        (["plain 2"], "plain needs 1 rank, got 'plain 2'"),
        (["FSDP2 hybrid_full 3"], "an even number of at least 4 ranks"),
    ],
)
def test_layouts_that_there_are_not_are_refused(layouts, text):
    with pytest.raises(ValueError, match=text):
        round_trips(layouts)


def test_one_bit_is_one_byte_and_the_sign_of_zero_counts():
    assert differing_bytes({"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([-0.0, 1.0])}) == 1
    nan = torch.tensor([float("nan")])
    assert differing_bytes({"a": nan}, {"a": nan.clone()}) == 0


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"b": torch.zeros(2)}, r"a: found \(torch.float32, \(2,\)\), expected None\nb: found None"),
        ({"a": torch.zeros(3)}, r"a: found .*\(2,\)\), expected .*\(3,\)\)"),
        ({"a": torch.zeros(2, dtype=torch.float64)}, r"a: found .*float32.* expected .*float64"),
    ],
)
def test_states_of_another_form_are_not_compared(other, text):
    with pytest.raises(ValueError, match=text):
        differing_bytes({"a": torch.zeros(2)}, other)


def test_the_relative_difference_is_that_of_all_tensors_together():
    found = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 2.0])}
    expected = {"a": torch.tensor([0.0]), "b": torch.tensor([0.0, 2.0])}
    assert relative_difference(found, expected) == pytest.approx(5**0.5 / 2)
