"""A new notebook from the house's template: numbered, in order, and running as it is."""

import re
from pathlib import Path

import nbformat

from fsdp_ema_lib.lab.notebooks import NotebookError, notebooks_folder, read_notebook, repo_root

TEMPLATE = Path(__file__).with_name("templates") / "notebook.ipynb"


def new_notebook(name: str, *, question: str | None = None, folder: str | Path | None = None) -> Path:
    """Start a notebook: the template under the next free number, which passes `hygiene` and runs as it is.

    Args:
        name: what it shows, as words: "batch size" becomes `NN_batch_size.ipynb`.
        question: the question that it answers, ending with a question mark.
        folder: where the notebooks are; by default `notebooks/` of the project that the current directory lies in.

    Returns:
        The new file.

    Raises:
        NotebookError: a name that is no words or that a notebook has already, a question without a question mark, no
            number left, or a folder that cannot be written to.

    Example:
        >>> import tempfile
        >>> new_notebook("Batch size", folder=tempfile.mkdtemp()).name
        '01_batch_size.ipynb'
    """
    words = re.sub(r"[\s_-]+", "_", name.strip()).strip("_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", words):
        raise NotebookError(
            f"{name!r}: expected words of the letters a to z and digits, such as batch_size, starting with a letter; "
            "the number comes by itself"
        )
    if question is not None and not re.fullmatch(r"[^.!?\n]+\?", question.strip()):
        raise NotebookError(f"--question: expected one sentence that ends with a question mark, found {question!r}")
    slug, title = words.lower(), words.replace("_", " ")
    folder = _folder() if folder is None else Path(folder)
    number = _free_number(folder, slug)
    title = title[0].upper() + title[1:]
    filled = {
        "NN": number,
        "NAME": f"{number}_{slug}",
        "TITLE": title,
        "QUESTION": question.strip() if question else f"What does {title[0].lower()}{title[1:]} change?",
    }
    notebook = read_notebook(TEMPLATE)
    for cell in notebook.cells:
        cell.source = re.sub(r"\b(NN|NAME|TITLE|QUESTION)\b", lambda match: filled[match[0]], cell.source)
    path = folder / f"{number}_{slug}.ipynb"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            nbformat.write(notebook, file)
    except OSError as error:
        raise NotebookError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _folder() -> Path:
    here = repo_root()
    return here / "notebooks" if (here / "pyproject.toml").is_file() else notebooks_folder()


def _free_number(folder: Path, slug: str) -> str:
    taken = {}
    for path in folder.glob("*.ipynb"):
        if match := re.match(r"(\d\d)_(.+)", path.stem):
            taken[match[1]] = path
            if match[2] == slug:
                raise NotebookError(f"{path} is there already; choose another name")
    free = (f"{number:02d}" for number in range(1, 100))
    number = next((number for number in free if number not in taken), None)
    if number is None:
        raise NotebookError(f"{folder}: the numbers 01 to 99 are all taken")
    return number
