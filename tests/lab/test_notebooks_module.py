import json
import math

import nbformat
import numpy as np
import pytest
import torch
from nbformat.v4 import new_code_cell, new_output

from fsdp_ema_lib.lab import notebooks
from fsdp_ema_lib.lab.notebooks import (
    NotebookError,
    at_default_parameters,
    check_parameters,
    find_notebook,
    functions_defined,
    hygiene,
    inspect_notebook,
    output_folder,
    parse_assignment,
    write_metrics,
)

CLOSING = """\
claims = {"it ran": True}
write_metrics(output_dir, claims, {}, at_defaults=True)
assert all(claims.values())"""
NO_CLAIM = "the last code cell asserts nothing that it writes: assert the claims of write_metrics"


def test_relative_output_folders_hang_from_the_repository_wherever_the_notebook_runs(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    for cwd in (tmp_path, tmp_path / "notebooks"):
        monkeypatch.chdir(cwd)
        assert output_folder("outputs/01_x") == tmp_path / "outputs" / "01_x"
    assert (tmp_path / "outputs" / "01_x").is_dir()
    assert output_folder(tmp_path / "elsewhere") == tmp_path / "elsewhere"


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        NotebookError, match="output_dir: .*01_x cannot be a folder, because it or one above it is a file"
    ):
        output_folder(tmp_path / "file" / "01_x")


def test_metrics_hold_tensors_arrays_and_numbers_that_are_not_finite(tmp_path):
    values = {"t": torch.tensor([1.0, math.inf]), "n": np.float32(2), "k": {1: (True, None)}, "nan": math.nan}
    write_metrics(tmp_path, {"a": np.bool_(True), "b": torch.tensor(False)}, values, at_defaults=False)
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "claims": {"a": True, "b": False},
        "values": {"t": [1.0, None], "n": 2.0, "k": {"1": [True, None]}, "nan": None},
        "at_defaults": False,
    }


@pytest.mark.parametrize(
    ("claims", "values", "error"),
    [
        ({}, {}, "at least one claim"),
        ({"a": 0.5}, {}, r"claims\['a'\]: expected True or False, got 0.5"),
        ({"a": torch.tensor([True, False])}, {}, r"claims\['a'\]: expected True or False"),
        ({"a": True}, {"x": [1, {"y": object()}]}, r"values\['x'\]\[1\]\['y'\]: object cannot be written"),
    ],
)
def test_metrics_that_say_nothing_are_refused_and_not_written(tmp_path, claims, values, error):
    with pytest.raises(NotebookError, match=error):
        write_metrics(tmp_path, claims, values, at_defaults=True)
    assert not (tmp_path / "metrics.json").exists()


def test_a_notebook_is_read_without_running_it(make_notebook):
    info = inspect_notebook(make_notebook("raise SystemExit"))
    assert (info.number, info.title, info.question, info.takes) == (
        "09",
        "Small",
        "Does a small notebook run?",
        "a second.",
    )
    assert {name: p.default for name, p in info.parameters.items()} == {
        "output_dir": "outputs/09_small",
        "device": "auto",
        "steps": 400,
        "rate": 0.5,
        "flag": True,
        "decays": [0.9, 0.99],
        "label": "a",
    }
    assert str(info.parameters["steps"]) == "steps = 400  # how many"


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ("steps = 2 * 3  # six", "steps: expected a plain value, nothing derived, found 'steps = 2 \\* 3'"),
        ("a = b = 1  # two", "expected one `name = plain value` on a line"),
        ("import math", "expected one `name = plain value` on a line, found 'import math'"),
        ("a = [\n 1,\n]  # long", "expected one `name = plain value` on a line"),
        ("a = 1  # one\na = 2  # two", "a is assigned twice"),
        ("%matplotlib inline", "parameters cell: plain Python expected"),
    ],
)
def test_a_parameters_cell_that_is_not_plain_is_named(make_notebook, parameters, error):
    path = make_notebook("1", parameters=parameters)
    with pytest.raises(NotebookError, match=error):
        inspect_notebook(path)
    assert any("parameters cell" in complaint for complaint in hygiene(path))


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"cells": [], "nbformat": 4, "nbformat_minor": 5}', "[]"])
def test_what_is_not_a_notebook_is_refused_by_name(tmp_path, text):
    path = tmp_path / "x.ipynb"
    path.write_text(text)
    with pytest.raises(NotebookError, match=r"x\.ipynb: not a notebook of format 4"):
        inspect_notebook(path)
    with pytest.raises(NotebookError, match=r"y\.ipynb: no such notebook"):
        inspect_notebook(tmp_path / "y.ipynb")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("steps=7", 7),
        ("steps = -1", -1),
        ("rate=2", 2.0),
        ("rate=1e-3", 1e-3),
        ("rate=-1.5E2", -150.0),
        ("rate=.inf", math.inf),
        ("flag=false", False),
        ("flag=off", False),
        ("label=12", "12"),
        ("label=on", "on"),
        ("label=", ""),
        ("label='12'", "12"),
        ("label=a=b", "a=b"),
        ("label=1:4", "1:4"),
        ("label=a # b", "a # b"),
        ("label={", "{"),
        ("label='a, b'", "a, b"),
        ('label="a" or "b"', '"a" or "b"'),
        ("decays=[0.5, 1]", [0.5, 1.0]),
        ("decays=[]", []),
    ],
)
def test_what_is_typed_gets_the_type_of_the_default(make_notebook, text, value):
    info = inspect_notebook(make_notebook("1"))
    name, typed = parse_assignment(info, text)
    checked = check_parameters(info, {name: typed})[name]
    assert checked == value and type(checked) is type(value)
    if isinstance(value, list):
        assert all(type(item) is float for item in checked)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("steps=4.0", r"09_small: steps: expected a whole number, like 400, found 4.0 \(float\)"),
        ("steps=true", r"steps: expected a whole number, like 400, found True \(bool\)"),
        ("steps=1e3", r"steps: expected a whole number, like 400, found '1e3' \(str\)"),
        ("steps=1:4", "steps: expected a whole number, like 400, found '1:4' .*0:4, are for -p of fsdp-ema sweep"),
        ("rate=1:30.5", r"rate: expected a number, like 0.5, found '1:30.5' \(str\); ranges of whole numbers"),
        ("decays=[1:30]", "decays: expected a number, like 0.9, found"),
        ("rate=fast", r"rate: expected a number, like 0.5, found 'fast' \(str\)"),
        ("rate=true", r"rate: expected a number, like 0.5, found True \(bool\)"),
        ("flag=0", r"flag: expected true or false, like True, found 0 \(int\)"),
        ("decays=0.9", r"decays: expected a list, like \[0.9, 0.99\], found 0.9 \(float\)"),
        ("decays=[a]", r"decays: expected a number, like 0.9, found \['a'\] \(list\)"),
        ("steps", "-p steps: expected name=value"),
        ("=1", "-p =1: expected name=value"),
        ("decays=[", "the value is not YAML"),
    ],
)
def test_a_wrong_type_says_what_was_expected(make_notebook, text, error):
    info = inspect_notebook(make_notebook("1"))
    with pytest.raises(NotebookError, match=error):
        check_parameters(info, dict([parse_assignment(info, text)]))


def test_all_wrong_parameters_are_named_at_once(make_notebook):
    info = inspect_notebook(make_notebook("1"))
    with pytest.raises(NotebookError, match=r"(?s)steps: .*rate: "):
        check_parameters(info, {"steps": "x", "rate": "y"})
    with pytest.raises(NotebookError, match="no parameter one, two. It takes:"):
        check_parameters(info, {"one": 1, "steps": 2, "two": 2})


def test_a_notebook_is_found_by_number_name_or_path(make_notebook, monkeypatch):
    path = make_notebook("1")
    other = make_notebook("1", name="10_other")
    monkeypatch.chdir(path.parent)
    for name in ("9", "09", "09_small", "09_small.ipynb", str(path)):
        assert find_notebook(name) == path
    assert find_notebook("10") == other
    for name in ("1", "small", "09_small.txt", "missing.ipynb"):
        with pytest.raises(NotebookError, match=f"{name}: no such notebook"):
            find_notebook(name)
    make_notebook("1", name="09_again")
    with pytest.raises(NotebookError, match=r"(?s)09: several notebooks fit.*09_again.*09_small"):
        find_notebook("09")


def test_without_a_checkout_it_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebooks, "__file__", str(tmp_path / "site" / "fsdp_ema_lib" / "lab" / "notebooks.py"))
    with pytest.raises(NotebookError, match="no notebooks in .*Run this inside a checkout"):
        find_notebook("01")


def test_a_notebook_in_order_gets_no_complaint(make_notebook):
    assert hygiene(make_notebook("%matplotlib inline\nx = 1\nx", CLOSING)) == []


def disorder_kernel(notebook):
    notebook.metadata.kernelspec.name = "python-of-mine"


def disorder_metadata(notebook):
    notebook.metadata.widgets = {}


def disorder_output(notebook):
    notebook.cells[-1].outputs = [new_output("stream", text="hello")]


def disorder_count(notebook):
    notebook.cells[-1].execution_count = 3


def disorder_random_id(notebook):
    notebook.cells[-1].id = "1a2b3c4d"


def disorder_second_parameters(notebook):
    notebook.cells.append(new_code_cell("y = 1  # y", id="more", metadata={"tags": ["parameters"]}))


def disorder_order(notebook):
    notebook.cells.append(new_code_cell("y = 1", id="after-the-end"))


def disorder_class(notebook):
    notebook.cells[-1].source = "class Mine:\n    pass\n" + notebook.cells[-1].source


def disorder_length(notebook):
    notebook.cells[-1].source += "\nx = 1" * 60


def disorder_help(notebook):
    notebook.cells[1].source = notebook.cells[1].source.replace("  # how many", "")


def disorder_device(notebook):
    notebook.cells[1].source = notebook.cells[1].source.replace("device", "machine")


def disorder_output_dir(notebook):
    notebook.cells[1].source = notebook.cells[1].source.replace("09_small", "08_other")


def disorder_number(notebook):
    notebook.cells[0].source = notebook.cells[0].source.replace("09", "08")


def disorder_question(notebook):
    notebook.cells[0].source = notebook.cells[0].source.replace("Does a", "First. Does a")


def disorder_needs(notebook):
    notebook.cells[0].source = notebook.cells[0].source.replace("Needs", "Wants")


def disorder_takes(notebook):
    notebook.cells[0].source = notebook.cells[0].source.replace("Takes", "Lasts")


def disorder_assert(notebook):
    notebook.cells[-1].source = notebook.cells[-1].source.replace("assert all", "all")


def disorder_assertion_of_nothing(notebook):
    notebook.cells[-1].source = notebook.cells[-1].source.replace("all(claims.values())", "True")


def disorder_type(notebook):
    notebook.cells[1].source = notebook.cells[1].source.replace("[0.9, 0.99]", "None")


@pytest.mark.parametrize(
    ("disorder", "complaint"),
    [
        (disorder_kernel, "kernel python3 expected, found python-of-mine"),
        (disorder_metadata, "metadata left by a run or a tool: widgets"),
        (disorder_output, "cell 'step-1': outputs or a count of a run are left in it"),
        (disorder_count, "cell 'step-1': outputs or a count of a run are left in it"),
        (disorder_random_id, "cell '1a2b3c4d': a readable id is expected, not a random one"),
        (disorder_second_parameters, "one code cell tagged parameters expected, found 2"),
        (disorder_order, "the last code cell does not call write_metrics"),
        (disorder_class, "cell 'step-1': defines class Mine; classes live in the library"),
        (disorder_length, "cell 'step-1': 63 lines of code, more than a screen of 50"),
        (disorder_help, "parameter steps: no comment behind it"),
        (disorder_device, "no parameter device"),
        (disorder_output_dir, "parameter output_dir: \"outputs/09_small\" expected, found 'outputs/08_other'"),
        (disorder_number, "the first cell does not start with `# 09 · Title`"),
        (disorder_question, "the first sentence under the title is not a question"),
        (disorder_needs, "the first cell has no **Needs:** line"),
        (disorder_takes, "the first cell has no **Takes:** line"),
        (disorder_assert, NO_CLAIM),
        (disorder_assertion_of_nothing, NO_CLAIM),
        (disorder_type, "parameter decays: its default says no type, so anything would be taken"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_disorder_is_named(make_notebook, disorder, complaint):
    path = make_notebook(CLOSING)
    notebook = nbformat.read(path, as_version=4)
    disorder(notebook)
    nbformat.write(notebook, path)
    assert complaint in hygiene(path)


def test_a_file_name_out_of_order_is_named(make_notebook):
    assert "the file name is not NN_words_in_lower_case.ipynb" in hygiene(make_notebook(CLOSING, name="Small"))


def test_the_functions_of_a_notebook_are_listed(make_notebook):
    assert functions_defined(make_notebook("def a():\n    def b(): ...", "c = lambda: 1")) == {"a", "b"}


def test_default_parameters_are_told_from_others():
    defaults = {"repeats": 40, "ranks": 2, "output_dir": "elsewhere"}
    assert at_default_parameters("01_file_rendezvous", defaults)
    assert not at_default_parameters("01_file_rendezvous", defaults | {"ranks": 3})
    assert at_default_parameters("01_file_rendezvous", defaults | {"ranks": 3}, ignore=["ranks"])
    with pytest.raises(KeyError, match="ranks"):
        at_default_parameters("01_file_rendezvous", {"repeats": 40})
