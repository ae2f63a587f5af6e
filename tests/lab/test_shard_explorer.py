"""The shard explorer over layouts whose holders are known by arithmetic."""

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pytest
from explorers import errors_found_headless, keyboard_controls, move, pixels
from matplotlib.colors import to_rgb

from fsdp_ema_lib.lab.plots import OKABE_ITO
from fsdp_ema_lib.lab.shard_explorer import shard_explorer, shard_figure
from fsdp_ema_lib.lab.shard_map import OPERATIONS, ShardMap
from fsdp_ema_lib.lab.widgets import png


def by_rows(way, ranks, rows=8, columns=3):
    """A matrix of which rank r holds rows r, r + ranks, ...: no way of torch, and easy to predict."""
    own = [range(rank, rows, ranks) for rank in range(ranks)]
    boxes = [{"weight": [((row, 0), (1, columns)) for row in mine]} for mine in own]
    held = [{"weight": [row * columns + column for row in mine for column in range(columns)]} for mine in own]
    export = {"full_state_dict": {"all_gather": 3}}
    counts = {operation: [export.get(operation, {})] * ranks for operation in OPERATIONS}
    return ShardMap(way, {"weight": (rows, columns)}, boxes, held, counts, [3] * ranks)


MAPS = {(way, ranks): by_rows(way, ranks) for ranks, ways in {2: ["a", "b"], 4: ["a", "c"]}.items() for way in ways}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_the_figure_shows_each_rank_in_its_rows_and_counts_what_it_holds_and_sends():
    figure = shard_figure(MAPS["a", 4])
    picture = figure.axes[0].images[0].get_array()
    for row in range(8):
        np.testing.assert_allclose(picture[row], np.tile(to_rgb(OKABE_ITO[row % 4]), (3, 1)))
    assert figure.get_suptitle() == (
        "Elements per rank: 6\nCollectives and messages per rank: 0 in an update, 3 in a full export"
    )
    uneven = shard_figure(by_rows("a", 3))
    assert "Elements per rank: 9, 9, 6" in uneven.get_suptitle()


def test_one_rank_alone_is_in_color():
    picture = shard_figure(MAPS["a", 2], rank=1).axes[0].images[0].get_array()
    np.testing.assert_allclose(picture[1::2], np.broadcast_to(to_rgb(OKABE_ITO[1]), (4, 3, 3)))
    assert (picture[::2] == 1).all()
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        shard_figure(MAPS["a", 2], rank=2)


def test_every_control_changes_the_picture_which_is_that_of_the_plain_figure():
    explorer = shard_explorer(MAPS, way="a", ranks=2)
    for name, value in (("strategy", "b"), ("ranks", 4), ("rank", "3"), ("ranks", 2)):
        before = bytes(explorer.picture.value)
        move(explorer.controls[name], value)
        assert bytes(explorer.picture.value) != before, name
    # "b" exists on 2 ranks alone, "a" is the first on 4, and rank 3 is none of 2.
    assert [explorer.controls[name].value for name in ("ranks", "strategy", "rank")] == [2, "a", "all"]
    assert np.array_equal(pixels(explorer.picture), pixels(png(shard_figure(MAPS["a", 2]))))
    assert explorer.errors.text == ""


def test_it_starts_with_the_most_ranks_and_leaves_no_figure_to_pyplot():
    explorer = shard_explorer(MAPS)
    assert {name: control.value for name, control in explorer.controls.items()} == {
        "ranks": 4,
        "strategy": "a",
        "rank": "all",
    }
    assert plt.get_fignums() == []


def test_it_draws_without_pyplot_whose_figures_a_cell_that_ends_meanwhile_would_take(monkeypatch):
    explorer = shard_explorer(MAPS)
    before = bytes(explorer.picture.value)
    for name in ("figure", "subplots", "close"):
        monkeypatch.delattr(plt, name)
    move(explorer.controls["rank"], "1")
    assert bytes(explorer.picture.value) != before and explorer.errors.text == ""


def test_an_error_in_its_callback_is_found_headless(monkeypatch, tmp_path):
    explorer = shard_explorer(MAPS)

    def fail(*args, **kwargs):
        raise RuntimeError("no memory left")

    monkeypatch.setattr("fsdp_ema_lib.lab.shard_explorer.rank_grid", fail)
    move(explorer.controls["ranks"], 2)
    assert errors_found_headless(explorer, tmp_path) == ["RuntimeError: no memory left"]
    monkeypatch.undo()
    move(explorer.controls["ranks"], 4)
    assert errors_found_headless(explorer, tmp_path) == []


def test_a_layout_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"none of c on 2 ranks; there are a on 2, b on 2, a on 4, c on 4"):
        shard_explorer(MAPS, way="c", ranks=2)
    with pytest.raises(ValueError, match="expected at least one layout, as from map_shards; got none"):
        shard_explorer({})


def test_every_control_has_a_description():
    descriptions = ("number of ranks", "strategy", "rank shown")
    assert keyboard_controls(shard_explorer(MAPS)) == dict.fromkeys(descriptions, ipywidgets.Dropdown)
