import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from fsdp_ema_lib.lab import plots
from fsdp_ema_lib.lab.figure_check import FigureWarning, hard_to_read, unlabelled

WAVE = np.sin(np.linspace(0, 60, 600))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def axes():
    with plots.style():
        return plt.subplots()[1]


def grid(rows, columns, **shared):
    with plots.style():
        return plt.subplots(rows, columns, squeeze=False, **shared)


# --- labels ------------------------------------------------------------------------------------------------------


def test_every_axis_without_a_label_is_named_with_the_title_of_its_panel():
    figure, panels = grid(1, 2)
    panels[0, 0].set(title="Loss", xlabel="step")
    panels[0, 1].set(xlabel="  ", ylabel="seconds (s)")
    assert unlabelled(figure) == ["panel 1 (Loss): no label on the y axis", "panel 2: no label on the x axis"]


def test_a_shared_axis_or_a_common_label_is_a_label():
    figure, panels = grid(2, 2, sharex="col", sharey="row")
    for column in panels[1]:
        column.set_xlabel("step")
    assert len(unlabelled(figure)) == 4  # the y axes
    figure.supylabel("loss")
    assert unlabelled(figure) == []


def test_a_panel_that_shares_nothing_needs_labels_of_its_own():
    figure, panels = grid(2, 1)
    panels[1, 0].set(xlabel="step", ylabel="loss")
    assert unlabelled(figure) == ["panel 1: no label on the x axis", "panel 1: no label on the y axis"]


def test_a_second_scale_needs_a_label_of_its_own(axes):
    axes.set(xlabel="step", ylabel="loss")
    axes.twinx().plot([1, 2])
    assert unlabelled(axes.figure) == ["panel 2: no label on the y axis"]


def test_pictures_without_axes_or_ticks_need_no_label():
    figure, panels = grid(1, 2)
    for panel in panels.flat:
        panel.imshow(np.eye(3))
    panels[0, 0].set_axis_off()
    panels[0, 1].set(xticks=[], yticks=[])
    assert unlabelled(figure) == []


def test_a_color_bar_needs_one_label(axes):
    axes.set(xlabel="column", ylabel="row")
    bar = axes.figure.colorbar(axes.imshow(np.eye(3)))
    assert unlabelled(axes.figure) == ["panel 2: no label on the color bar"]
    bar.set_label("weight")
    assert unlabelled(axes.figure) == []


def test_saving_refuses_a_figure_without_labels_and_writes_nothing(axes, tmp_path):
    axes.plot([1, 2])
    with pytest.raises(ValueError, match=r"rise: panel 1: no label on the x axis; panel 1: .*axes\.set\(xlabel=, "):
        plots.save(axes.figure, tmp_path, "rise")
    assert list(tmp_path.iterdir()) == []


# --- what can be read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda axes: axes.plot(WAVE, label="a wave"), "a line"),
        (lambda axes: axes.axhline(0.5, label="middle"), "a line"),
        (lambda axes: axes.scatter(np.arange(600), WAVE, label="dots"), "points"),
        (lambda axes: axes.bar(range(9), [1] * 9, label="bars"), "a bar"),
        (lambda axes: (axes.imshow(np.eye(9)), axes.plot([], label="picture")), "an image"),
    ],
)
def test_a_legend_over_data_is_found_and_one_beside_it_is_not(axes, draw, found):
    draw(axes)
    legend = axes.legend(loc="center")
    assert hard_to_read(axes.figure) == [f"panel 1: the legend lies over {found}"]
    legend.remove()
    axes.figure.legend(loc="outside right upper")
    assert hard_to_read(axes.figure) == []


def test_a_legend_in_a_free_corner_is_no_fault(axes):
    axes.plot([0, 1], [0, 1], label="rise")
    axes.legend(loc="upper left")
    assert hard_to_read(axes.figure) == []
    axes.legend(loc="upper right")
    assert len(hard_to_read(axes.figure)) == 1


def test_values_that_are_not_finite_lie_under_no_legend(axes):
    axes.plot([0.0, 1.0, 2.0], [0.0, np.nan, 0.0], label="gap")
    axes.set_ylim(-1, 1)
    axes.legend(loc="center")
    assert hard_to_read(axes.figure) == []


def test_what_is_cut_off_by_the_edge_is_named(axes):
    axes.set_title("a title that is much too long for the figure " * 3)
    assert hard_to_read(axes.figure)[0].endswith("is cut off by the edge of the figure")
    axes.set_title("")
    axes.figure.text(0.98, 0.5, "off the edge")
    assert hard_to_read(axes.figure) == ["the text 'off the edge' is cut off by the edge of the figure"]


def test_tick_labels_that_run_into_each_other_are_found(axes):
    axes.set_xticks(range(8), [f"a long name {number}" for number in range(8)])
    assert hard_to_read(axes.figure) == ["panel 1: tick labels of the x axis run into each other"]
    axes.set_xlim(-0.5, 1.5)  # what is out of view collides with nothing
    assert hard_to_read(axes.figure) == []


def test_titles_of_neighbours_that_run_into_each_other_are_found():
    figure, panels = grid(1, 2)
    panels[0, 0].set_title("the first of two titles that are only a bit too long", loc="left")
    panels[0, 1].set_title("second", loc="left")
    assert hard_to_read(figure) == [
        "the titles 'the first of two titles that are only a bit too long' and 'second' run into each other"
    ]
    panels[0, 0].set_title("first", loc="left")
    assert hard_to_read(figure) == []


def test_saving_writes_a_figure_that_is_hard_to_read_and_says_so(axes, tmp_path):
    axes.plot(WAVE, label="a wave")
    axes.set(xlabel="step", ylabel="height (m)")
    axes.legend(loc="center")
    with pytest.warns(FigureWarning, match=r"wave\.png: panel 1: the legend lies over a line") as caught:
        path = plots.save(axes.figure, tmp_path, "wave")
    assert path.is_file() and caught[0].filename == __file__
