import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fsdp_ema_lib.lab.plots import OKABE_ITO, rank_grid
from fsdp_ema_lib.lab.shard_map import OPERATIONS, ShardMap

# A 3 x 2 matrix, cut after its third element: rank 0 holds row 0 and half of row 1.
BOXES = [{"w": [((0, 0), (1, 2)), ((1, 0), (1, 1))]}, {"w": [((1, 1), (1, 1)), ((2, 0), (1, 2))]}]


def shard_map(boxes=BOXES, held=({"w": [0, 1, 2]}, {"w": [3, 4, 5]})):
    counts = {operation: [{"allgather": 2, "gather": 1}, {"allgather": 2}] for operation in OPERATIONS}
    return ShardMap("by hand", {"w": (3, 2)}, list(boxes), list(held), counts, [1, 0])


def test_holders_are_the_boxes_of_each_rank():
    holders = shard_map().holders()["w"]
    assert holders.tolist() == [
        [[True, True], [True, False], [False, False]],
        [[False, False], [False, True], [True] * 2],
    ]
    assert shard_map().elements() == [3, 3]
    assert shard_map().total("update") == [3, 2]


def test_a_cut_inside_a_row_is_seen():
    whole = [{"w": [((0, 0), (2, 2))]}, {"w": [((2, 0), (1, 2))]}]
    assert shard_map().rows_cut() == ["w"]
    assert shard_map(whole).rows_cut() == []


@pytest.mark.parametrize(
    ("held", "faults"),
    [
        (({"w": [0, 1, 2]}, {"w": [3, 4, 5]}), []),
        (({"w": [0, 1, 3]}, {"w": [3, 4, 5]}), ["rank 0: w"]),
        (({"w": [0, 1, 2]}, {"w": [3, 4]}), ["rank 1: w"]),
        (({"w": [0, 1, 2, 2]}, {"w": []}), ["rank 0: w", "rank 1: w"]),
    ],
)
def test_boxes_that_are_not_what_is_in_memory_are_named(held, faults):
    assert shard_map(held=held).misplaced() == faults


def picture_of(holders):
    figure = rank_grid({"a layout": {"w": holders}})
    picture = figure.axes[0].images[0].get_array()
    plt.close(figure)
    return np.asarray(picture)


def test_a_cell_has_the_color_of_its_rank():
    picture = picture_of(shard_map().holders()["w"])
    colors = [to_rgb(OKABE_ITO[rank]) for rank in (0, 0, 0, 1, 1, 1)]
    assert picture.reshape(-1, 3).tolist() == [list(color) for color in colors]


def test_a_cell_of_several_ranks_is_divided_and_one_of_none_is_white():
    holders = np.array([[True, False], [False, False], [True, False]])
    picture = picture_of(holders)
    assert picture[0].tolist() == [list(to_rgb(OKABE_ITO[0])), list(to_rgb(OKABE_ITO[2]))]
    assert picture[1].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ({}, "layouts must hold at least one layout"),
        (
            {"a": {"w": np.ones((1, 2), bool)}, "b": {"v": np.ones((1, 2), bool)}},
            r"b: every layout must have .*\['w'\]",
        ),
        ({"a": {"w": np.ones((1, 2))}}, r"a: w: expected a boolean array .* got float64 of shape \(1, 2\)"),
        ({"a": {"w": np.ones(2, bool)}}, r"a: w: expected .* got bool of shape \(2,\)"),
        ({"a": {"w": np.ones((9, 2), bool)}}, "colors for 8 ranks, got 9"),
    ],
)
def test_what_cannot_be_drawn_is_refused(layouts, text):
    with pytest.raises(ValueError, match=text):
        rank_grid(layouts)
