import subprocess

import nbformat

from fsdp_ema_lib.lab.notebooks import inspect_notebook
from fsdp_ema_lib.lab.provenance import commit, digests, library_folder, settings_of


def changed(before: dict, after: dict) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_code_parameters_and_library_count_and_prose_does_not(make_notebook):
    path = make_notebook("1")
    package = path.parents[1] / "fsdp_ema_lib"
    package.mkdir()
    for name in ("__init__.py", "ema.py"):
        (package / name).touch()
    info = inspect_notebook(path)
    assert library_folder(path.parents[1]) == package
    settings = settings_of(info, {"steps": 7})
    assert settings["steps"] == 7 and settings["rate"] == 0.5 and "output_dir" not in settings
    before = digests(info, settings)
    assert digests(info, settings) == before
    assert changed(before, digests(info, {**settings, "steps": 8})) == {"parameters"}

    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source += "\n\nMore prose."
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="left by JupyterLab")]
    nbformat.write(notebook, path)
    assert digests(info, settings) == before
    notebook.cells[2].source = "2"
    nbformat.write(notebook, path)
    assert changed(before, digests(info, settings)) == {"notebook"}

    before = digests(info, settings)
    (package / "notes.txt").write_text("no code")
    assert digests(info, settings) == before
    (package / "ema.py").write_text("x = 1\n")
    assert changed(before, digests(info, settings)) == {"library"}
    (package / "ema.py").rename(package / "averages.py")
    assert changed(before, digests(info, settings)) == {"library"}


def test_the_library_is_this_one_where_the_checkout_has_none(tmp_path):
    assert (library_folder(tmp_path) / "lab" / "provenance.py").is_file()


def test_a_commit_is_marked_dirty_where_files_differ_from_it(tmp_path):
    assert commit(tmp_path) == ""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    assert commit(tmp_path) == "", "no commit yet"
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
