import os
import subprocess
import sys
import threading
from xml.etree import ElementTree

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from fsdp_ema_lib.lab import plots

STEPS = [250, 500, 750]
SERIES = {"live": [9.0, 7.0, 8.0], "EMA 0.9": [6.0, 5.0, 4.5], "EMA 0.99": [7.0, 4.5, 4.0]}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def all_figures():
    return {
        "loss": plots.loss_curve(np.linspace(2, 0.5, 300)),
        "metric": plots.metric_over_training(
            STEPS, SERIES, ylabel="Frechet distance", title="A title", reference=("real against real", 3.0)
        ),
        "distance": plots.distance_to_live(STEPS, {name: SERIES[name] for name in ("EMA 0.9", "EMA 0.99")}),
        "grid": plots.sample_grid({name: torch.zeros(25, 8, 8) for name in ("live", "a", "b", "c")}, title="Samples"),
        "progress": progress(),
        "progress before": plots.training_progress([], [], {}, {}, {}, total_steps=100),
    }


def progress():
    pair = {name: SERIES[name] for name in ("live", "EMA 0.9")}
    return plots.training_progress(
        np.linspace(2, 0.5, 750),
        STEPS,
        {"EMA 0.9": [0.1, 0.2, 0.3]},
        pair,
        {name: torch.zeros(30, 8, 8) for name in pair},
        total_steps=1000,
        reference=("real digits", 3.0),
        title="Some training",
    )


def test_style_changes_nothing_outside_its_block():
    before = dict(matplotlib.rcParams)
    with pytest.raises(KeyError), plots.style():
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(plots.OKABE_ITO)
        raise KeyError
    assert dict(matplotlib.rcParams) == before


def test_style_keeps_what_the_backend_sets_while_it_starts_inside_the_block():
    assert not plt.isinteractive()
    try:
        with plots.style():
            plt.ion()
        assert plt.isinteractive()
    finally:
        plt.ioff()


INLINE_CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell = InteractiveShell.instance()
shell.run_cell("from fsdp_ema_lib.lab import plots").raise_error()
for _ in range(3):
    with capture_output() as shown:
        shell.run_cell("figure = plots.loss_curve([1.0, 0.5])").raise_error()
    print([sorted(output.data) for output in shown.outputs])
"""


def test_a_notebook_shows_every_figure_once():
    """In a process of its own: the backend starts once in a process, at its first figure."""
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    found = subprocess.run(
        [sys.executable, "-c", INLINE_CELLS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["[['image/png', 'text/plain']]"] * 3


def test_save_makes_the_folder_and_returns_the_path_of_a_png_at_120_dpi(tmp_path):
    figure = plots.loss_curve([1.0, 0.5])
    first = plots.save(figure, tmp_path / "deep" / "folder", "loss")
    second = plots.save(figure, str(tmp_path), "loss.png")
    assert (first, second) == (tmp_path / "deep" / "folder" / "loss.png", tmp_path / "loss.png")
    width, height = figure.get_size_inches()
    assert plt.imread(first).shape[:2] == (round(height * 120), round(width * 120))
    assert b"Software" not in first.read_bytes()


def test_drawing_again_gives_the_same_bytes(tmp_path):
    for folder in ("1", "2"):
        for name, figure in all_figures().items():
            plots.save(figure, tmp_path / folder, name)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("1", "2"))
    assert one == two
    assert set(one) == {f"{name}.{suffix}" for name in all_figures() for suffix in ("png", "svg")}


def test_the_svg_is_vectors_of_the_size_of_the_figure(tmp_path):
    figure = plots.loss_curve([1.0, 0.5])
    root = ElementTree.parse(plots.save(figure, tmp_path, "loss").with_suffix(".svg")).getroot()
    width, height = figure.get_size_inches() * 72
    assert [float(root.get(side).removesuffix("pt")) for side in ("width", "height")] == pytest.approx([width, height])
    kinds = {element.tag.split("}")[1] for element in root.iter()}
    assert "path" in kinds and "image" not in kinds


def test_every_axis_has_a_label():
    for name, figure in all_figures().items():
        for axes in figure.axes:
            if axes.axison:  # a grid of pictures has none
                assert axes.get_xlabel() and axes.get_ylabel(), name
    assert sum(axes.axison for axes in all_figures()["progress"].axes) == 3


def test_one_thread_at_a_time_is_in_the_style():
    """Two that overlap would leave the house's settings behind: each puts back what it found."""
    before, inside, leave = dict(matplotlib.rcParams), threading.Event(), threading.Event()

    def stay():
        with plots.style():
            inside.set()
            leave.wait(60)

    def pass_through():
        with plots.style():
            pass

    first, second = threading.Thread(target=stay), threading.Thread(target=pass_through)
    first.start()
    assert inside.wait(60)
    second.start()
    second.join(0.05)
    assert second.is_alive(), "the second thread did not wait for the first"
    leave.set()
    first.join(60)
    second.join(60)
    assert dict(matplotlib.rcParams) == before


def test_training_progress_draws_what_it_is_given():
    loss, apart, quality, live, average = progress().axes
    assert len(loss.lines[0].get_ydata()) == 750
    assert {line.get_label(): list(line.get_ydata()) for line in apart.lines} == {"EMA 0.9": [0.1, 0.2, 0.3]}
    drawn = {line.get_label(): list(line.get_ydata()) for line in quality.lines}
    assert drawn == {"live": SERIES["live"], "EMA 0.9": SERIES["EMA 0.9"], "real digits": [3.0, 3.0]}
    assert [axes.get_title(loc="left") for axes in (live, average)] == ["live draws", "EMA 0.9 draws"]
    assert loss.get_xlim() == apart.get_xlim() == quality.get_xlim() == (0, 1000)


def test_training_progress_has_room_for_two_sets_of_images_and_wants_series_of_one_length():
    with pytest.raises(ValueError, match="room for two sets of weights, got a, b, c"):
        plots.training_progress([], [], {}, {}, dict.fromkeys("abc"), total_steps=1)
    with pytest.raises(ValueError, match=r"each of the 2 steps, got live: 1"):
        plots.training_progress([], [1, 2], {}, {"live": [1.0]}, {}, total_steps=1)


@pytest.mark.parametrize("name", ["", ".png", "a/b", "../loss", "loss.svg"])
def test_save_refuses_a_name_that_is_no_plain_file_name(tmp_path, name):
    figure, _ = plt.subplots()
    with pytest.raises(ValueError, match="name must be a plain file name"):
        plots.save(figure, tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["loss", "metric", "distance", "grid", "progress", "progress before"])
def test_nothing_sticks_out_of_the_figure_or_covers_the_axes(name):
    figure = all_figures()[name]
    figure.draw_without_rendering()
    frame = figure.bbox
    for axes in figure.axes:
        box = axes.get_tightbbox()
        if box is not None:
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert not any(axes.get_tightbbox().overlaps(box) for axes in figure.axes)


def test_loss_curve_draws_every_loss_and_their_trailing_mean():
    losses = np.random.default_rng(0).random(37)
    raw, smooth = plots.loss_curve(losses, window=5).axes[0].lines
    expected = [np.mean(losses[max(0, i - 4) : i + 1]) for i in range(37)]
    np.testing.assert_array_equal(raw.get_ydata(), losses)
    np.testing.assert_allclose(smooth.get_ydata(), expected, rtol=1e-12)
    assert list(raw.get_xdata()) == list(range(1, 38))


def test_loss_curve_needs_losses_and_a_window():
    with pytest.raises(ValueError, match="at least one number, got shape"):
        plots.loss_curve([])
    with pytest.raises(ValueError, match="window must be at least 1 step, got 0"):
        plots.loss_curve([1.0], window=0)


def test_the_same_weights_have_the_same_color_in_every_figure():
    metric = plots.metric_over_training(STEPS, SERIES, ylabel="y")
    distance = plots.distance_to_live(STEPS, {name: SERIES[name] for name in ("EMA 0.9", "EMA 0.99")})
    colors = {line.get_label(): line.get_color() for line in metric.axes[0].lines}
    assert colors["live"] == "#000000"
    assert len(set(colors.values())) == 3
    for line in distance.axes[0].lines:
        assert line.get_color() == colors[line.get_label()]


def test_more_series_than_colors_stay_distinct():
    series = {f"EMA {index}": [1.0, 2.0, 3.0] for index in range(14)}
    lines = plots.metric_over_training(STEPS, series, ylabel="y").axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 14


def test_series_of_the_wrong_length_are_all_named():
    with pytest.raises(ValueError, match=r"each of the 3 steps, got a: 2, b: 4"):
        plots.metric_over_training(STEPS, {"a": [1, 2], "ok": [1, 2, 3], "b": [1, 2, 3, 4]}, ylabel="y")
    with pytest.raises(ValueError, match="at least one line to draw, got none"):
        plots.distance_to_live(STEPS, {})


def test_sample_grid_puts_every_image_in_its_place():
    images = torch.arange(7)[:, None, None].expand(7, 4, 6) / 7.0
    picture = plots.sample_grid({"live": images}, columns=3).axes[0].images[0].get_array()
    assert picture.shape == (3 * 5 - 1, 3 * 7 - 1)
    for index in range(7):
        top, left = (index // 3) * 5, (index % 3) * 7
        np.testing.assert_array_equal(picture[top : top + 4, left : left + 6], images[index].numpy())
    assert (picture[10:, 7:] == -1).all()  # the places of images that are not there are paper


def test_sample_grid_names_the_set_that_is_no_batch_of_images():
    with pytest.raises(ValueError, match=r"EMA: expected images of shape \(n, height, width\).*got \(4, 64\)"):
        plots.sample_grid({"live": torch.zeros(4, 8, 8), "EMA": torch.zeros(4, 64)})
    with pytest.raises(ValueError, match="columns must be at least 1, got 0"):
        plots.sample_grid({"live": torch.zeros(4, 8, 8)}, columns=0)
    with pytest.raises(ValueError, match="at least one set of images, got none"):
        plots.sample_grid({})


def test_the_equality_matrix_shows_each_count_in_its_part_of_its_cell():
    counts = {"model": np.array([[0, 0], [0, 12345]]), "EMA": np.array([[0, 7], [0, 0]])}
    figure = plots.equality_matrix(["a 1", "b 2"], ["c 1", "d 2"], counts, title="A title")
    [axes] = figure.axes
    found = {}
    for patch, text in zip(axes.patches, axes.texts[:4] + axes.texts[6:10], strict=True):
        assert patch.get_x() < text.get_position()[0] < patch.get_x() + patch.get_width()
        column, row = patch.get_center().round().astype(int)
        found.setdefault((int(row), int(column)), []).append((text.get_text(), to_hex(patch.get_facecolor()).upper()))
    equal, other = plots.OKABE_ITO[2], plots.OKABE_ITO[1]
    assert found == {
        (0, 0): [("0", equal), ("0", equal)],
        (0, 1): [("0", equal), ("7", other)],
        (1, 0): [("0", equal), ("0", equal)],
        (1, 1): [("12,345", other), ("0", equal)],
    }
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["c\n1", "d\n2"]


def test_the_magnitude_matrix_leaves_exact_zeros_without_a_color():
    figure = plots.magnitude_matrix(["a", "b"], ["a", "b"], [[0.0, 2e-7], [3e-8, 0.0]], label="distance")
    picture = figure.axes[0].images[0].get_array()
    assert np.ma.getmaskarray(picture).tolist() == [[True, False], [False, True]]
    assert picture.compressed() == pytest.approx(np.log10([2e-7, 3e-8]))
    assert figure.axes[0].images[0].get_clim() == (-8, -6)
    assert len(plots.magnitude_matrix(["a"], ["a"], [[0.0]]).axes) == 1, "no scale where all is zero"


def test_the_timeline_lays_every_attempt_over_the_undisturbed_run():
    attempts = [([1, 2, 3], {"loss": [5, 4, 3], "distance": [1, 2, 3]}), ([3, 4], {"loss": [3, 2], "distance": [3, 4]})]
    whole = {"loss": [5, 4, 3, 2], "distance": [1, 2, 3, 4]}
    loss, distance, bars = plots.timeline(whole, attempts, ["killed", "done"], saved=[2]).axes
    lines = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in loss.lines]
    assert lines[0] == ("undisturbed", [1, 2, 3, 4], [5, 4, 3, 2])
    assert lines[1][1:] == ([1, 2, 3], [5, 4, 3]) and lines[3][1:] == ([3, 4], [3, 2])
    assert lines[2][1:] == ([3], [3]) and len(lines) == 4, "a cross where the first attempt ended, none at the end"
    assert [(bar.get_x(), bar.get_width()) for bar in bars.patches] == [(0.5, 3), (2.5, 2)]
    assert [text.get_text() for text in bars.texts] == ["killed", "done"]
    assert distance.get_ylabel() == "distance"


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (lambda: plots.equality_matrix(["a"], ["b"], {}), r"shape \(1, 1\), got no part"),
        (lambda: plots.equality_matrix(["a"], ["b"], {"x": np.zeros((2, 1))}), r"got \{'x': \(2, 1\)\}"),
        (lambda: plots.magnitude_matrix(["a"], ["b"], [[-1.0]]), "finite, at least 0"),
        (lambda: plots.magnitude_matrix(["a"], ["b"], [[1.0, 1.0]]), r"of shape \(1, 1\), got shape \(1, 2\)"),
        (lambda: plots.timeline({}, [], []), "undisturbed must hold at least one measurement"),
        (lambda: plots.timeline({"x": [1]}, [], ["done"]), "one for each of the 0 attempts, got 1"),
        (lambda: plots.timeline({"x": [1]}, [([1], {})], ["done"]), "attempt 1: expected 1 values.* of x"),
    ],
)
def test_matrices_and_timelines_that_cannot_be_drawn_are_refused(draw, text):
    with pytest.raises(ValueError, match=text):
        draw()
