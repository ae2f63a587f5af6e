"""What the explorers share: one picture per move, errors that are shown, kept and found."""

import ipywidgets
import pytest
from explorers import errors_found_headless, move
from matplotlib.figure import Figure

from fsdp_ema_lib.lab.widgets import ErrorBox, Explorer, png


def slider(**settings):
    return ipywidgets.IntSlider(**{"value": 1, "min": 0, "max": 9, "description": "size", **settings})


def explorer_of(draw, **settings):
    return Explorer("sizes", {"size": slider(), "other": slider(description="other")}, draw, alt="nothing", **settings)


def test_each_move_draws_once_with_the_values_of_all_controls():
    drawn = []
    explorer = explorer_of(lambda **values: drawn.append(values) or b"picture %d" % len(drawn))
    explorer.controls["size"].value = 3
    explorer.controls["other"].value = 4
    assert drawn == [{"size": 1, "other": 1}, {"size": 3, "other": 1}, {"size": 3, "other": 4}]
    assert bytes(explorer.picture.value) == b"picture 3"


def test_what_an_adjustment_changes_belongs_to_the_same_move():
    drawn = []

    def adjust(changed):
        explorer.controls["other"].value = explorer.controls[changed].value + 1

    explorer = explorer_of(lambda **values: drawn.append(values) or b"", adjust=adjust)
    explorer.controls["size"].value = 5
    assert drawn[1:] == [{"size": 5, "other": 6}]


@pytest.mark.parametrize("where", ["draw", "adjust"])
def test_an_error_in_a_callback_is_shown_raised_and_found_headless_until_the_next_success(tmp_path, where):
    def fail_at_7(*changed, **values):
        if 7 in values.values() or (changed and explorer.controls["size"].value == 7):
            raise KeyError("seven")
        return b""

    explorer = explorer_of(lambda **values: b"", adjust=fail_at_7) if where == "adjust" else explorer_of(fail_at_7)
    assert errors_found_headless(explorer, tmp_path) == []
    with pytest.raises(KeyError, match="seven"):
        explorer.controls["size"].value = 7
    assert explorer.errors.text == "KeyError: 'seven'"
    assert any("fail_at_7" in line for line in explorer.errors.outputs[0]["traceback"])
    assert errors_found_headless(explorer, tmp_path) == ["KeyError: 'seven'"]
    explorer.controls["size"].value = 8
    assert errors_found_headless(explorer, tmp_path) == []


def test_an_error_that_the_front_end_caused_goes_no_further_and_is_found_all_the_same(tmp_path):
    explorer = explorer_of(lambda size, other: bytes(6 // (3 - size)))
    move(explorer.controls["size"], 3)
    assert errors_found_headless(explorer, tmp_path) == ["ZeroDivisionError: integer division or modulo by zero"]


def test_the_first_picture_must_succeed():
    with pytest.raises(ZeroDivisionError):
        explorer_of(lambda size, other: bytes(1 // (size - 1)))


def test_a_control_without_a_description_is_refused_by_name():
    with pytest.raises(ValueError, match="every control needs a description, these have none: size"):
        Explorer("sizes", {"size": slider(description="")}, lambda size: b"", alt="nothing")


def test_the_picture_can_be_found_and_says_what_it_shows():
    explorer = explorer_of(lambda **values: b"")
    assert "sizes" in explorer._dom_classes
    assert "sizes-picture" in explorer.picture._dom_classes
    assert explorer.picture.tooltip == "nothing"


def test_an_interrupt_is_not_taken_for_an_error():
    box = ErrorBox()
    with pytest.raises(KeyboardInterrupt), box.showing():
        raise KeyboardInterrupt
    assert box.text == ""


def test_png_has_the_pixels_of_the_figure():
    data = png(Figure(figsize=(3, 2), dpi=50))
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (150, 100)
