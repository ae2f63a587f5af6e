"""What a notebook of this house is: its folder of results, its metrics, its parameters, its form.

The first half (`output_folder`, `write_metrics`) is called from notebooks. The second half reads a notebook without
running it: `inspect_notebook` says which question it asks and which parameters it takes, `parse_assignment` and
`check_parameters` turn what a person typed into a value of the right type, `hygiene` lists what is out of order.
"""

import ast
import io
import json
import math
import re
import tokenize
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from IPython.core.inputtransformer2 import TransformerManager

from fsdp_ema_lib.lab.light_nbformat import nbformat
from fsdp_ema_lib.storage import replacing

METRICS_FILE = "metrics.json"


class NotebookError(ValueError):
    """A notebook or a parameter for it that cannot be used; the text says which, and what would be right."""


def repo_root(start: str | Path | None = None) -> Path:
    """Find the folder that relative output folders hang from.

    Args:
        start: where to begin, the current directory by default.

    Returns:
        `start` or its nearest parent that holds a `pyproject.toml`, else `start` itself.

    Example:
        >>> repo_root("/").as_posix()
        '/'
    """
    start = Path.cwd() if start is None else Path(start).resolve()
    return next((folder for folder in (start, *start.parents) if (folder / "pyproject.toml").is_file()), start)


def output_folder(output_dir: str | Path) -> Path:
    """Make the folder that a notebook writes its figures and metrics to.

    Args:
        output_dir: absolute, or relative to the repository root, so that a notebook opened in `notebooks/` and one run
            from the root write to the same place.

    Returns:
        The absolute path of the folder, which exists.

    Raises:
        NotebookError: the path, or one above it, is a file.

    Example:
        >>> import tempfile
        >>> output_folder(tempfile.mkdtemp() + "/outputs/01_example").is_dir()
        True
    """
    folder = repo_root() / Path(output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotebookError(
            f"output_dir: {folder} cannot be a folder, because it or one above it is a file. "
            "Remove that file or choose another output_dir."
        ) from error
    return folder


def write_whole(path: Path, text: str) -> Path:
    """Write a text file whole or not at all: whoever reads it finds the old text or the new one.

    Raises:
        OSError: a full disk, for instance; it names the file, and what was there before still is.

    Example:
        >>> import tempfile
        >>> write_whole(Path(tempfile.mkdtemp()) / "result.json", "{}").read_text()
        '{}'
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        # A write that fails does not say of which file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def write_metrics(
    folder: str | Path, claims: Mapping[str, bool], values: Mapping[str, Any], at_defaults: bool
) -> dict[str, Any]:
    """Write `metrics.json`: what a notebook claims, whether it holds, and the numbers behind it.

    Args:
        folder: as returned by `output_folder`.
        claims: the sentence that is claimed, and whether this run bears it out.
        values: JSON-able numbers, strings, lists and dicts; tensors and NumPy values are converted, numbers that are
            not finite become null.
        at_defaults: whether the run used the default parameters. Only then must the caller assert the claims;
            elsewhere a claim that fails is a finding.

    Returns:
        What was written: `{"claims": ..., "values": ..., "at_defaults": ...}`.

    Raises:
        NotebookError: no claim, a claim whose verdict is no bool, or a value that JSON cannot hold.

    Example:
        >>> import tempfile
        >>> write_metrics(tempfile.mkdtemp(), {"two is even": True}, {"two": 2}, at_defaults=True)
        {'claims': {'two is even': True}, 'values': {'two': 2}, 'at_defaults': True}
    """
    if not claims:
        raise NotebookError("claims: a notebook makes at least one claim, got none")
    metrics = {
        "claims": {name: _verdict(name, holds) for name, holds in claims.items()},
        "values": _plain(values, "values"),
        "at_defaults": bool(at_defaults),
    }
    (Path(folder) / METRICS_FILE).write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return metrics


def _verdict(name: str, holds: Any) -> bool:
    value = _plain(holds, f"claims[{name!r}]")
    if not isinstance(value, bool):
        raise NotebookError(f"claims[{name!r}]: expected True or False, got {holds!r}. Compare it with something.")
    return value


def _plain(value: Any, where: str) -> Any:
    """JSON-able copy of a value; `where` names it in an error."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{position}]") for position, item in enumerate(value)]
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and NumPy scalars
        return _plain(value.tolist(), where)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise NotebookError(
        f"{where}: {type(value).__name__} cannot be written to {METRICS_FILE}; "
        "pass numbers, strings, lists, dicts or tensors"
    )


@dataclass(frozen=True)
class Parameter:
    """One line of a notebook's `parameters` cell.

    Args:
        name: the variable that papermill sets.
        default: the plain value that the notebook itself gives it.
        help: the comment behind it, empty if there is none.
    """

    name: str
    default: Any
    help: str

    def __str__(self) -> str:
        return f"{self.name} = {self.default!r}" + (f"  # {self.help}" if self.help else "")


@dataclass(frozen=True)
class NotebookInfo:
    """What can be said about a notebook without running it.

    Args:
        path: the file.
        number: the two digits that its name starts with, empty if it has none.
        title: text of the first heading, without the number.
        question: the first sentence that ends with a question mark in the first cell, empty if there is none.
        takes: what stands behind **Takes:** in the first cell, empty if nothing does.
        parameters: by name, in the order of the `parameters` cell; None if no cell has that tag.
    """

    path: Path
    number: str
    title: str
    question: str
    takes: str
    parameters: dict[str, Parameter] | None = field(hash=False)

    @property
    def stem(self) -> str:
        """File name without its ending: names the folder of results."""
        return self.path.stem


def read_notebook(path: str | Path) -> nbformat.NotebookNode:
    """Read a notebook file.

    Raises:
        NotebookError: there is no such file, or it is not a notebook.
    """
    path = Path(path)
    if not path.is_file():
        raise NotebookError(f"{path}: no such notebook")
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except (nbformat.ValidationError, nbformat.reader.NotJSONError, UnicodeDecodeError, AttributeError) as error:
        raise NotebookError(f"{path}: not a notebook of format 4: {str(error).splitlines()[0]}") from error
    return notebook


def inspect_notebook(path: str | Path) -> NotebookInfo:
    """Read question, run time and parameters of a notebook without running it.

    Raises:
        NotebookError: no readable notebook, more than one `parameters` cell, or a line in it that is not
            `name = plain value`.
    """
    notebook, path = read_notebook(path), Path(path).resolve()
    cells = _parameter_cells(notebook)
    if len(cells) > 1:
        raise NotebookError(f"{path.name}: expected one cell tagged parameters, found {len(cells)}. Merge them.")
    parameters = None
    if cells:
        parameters, complaints = _read_parameters(cells[0].source)
        if complaints:
            raise NotebookError(f"{path.name}: {'; '.join(complaints)}")
    opening = notebook.cells[0].source if notebook.cells and notebook.cells[0].cell_type == "markdown" else ""
    title, question, takes = _read_opening(opening)
    number = re.match(r"\d\d(?=_)", path.stem)
    return NotebookInfo(path, number[0] if number else "", title, question, takes, parameters)


def _parameter_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]


def _read_opening(text: str) -> tuple[str, str, str]:
    heading = re.match(r"#\s+(?:\d+\s*·\s*)?(.+)", text)
    body = text[heading.end() :] if heading else text
    paragraph = " ".join(body.strip().split("\n\n")[0].split())
    question = re.match(r".*?\?", paragraph)
    takes = re.search(r"\*\*Takes:\*\*\s*(.+?)\s*$", text, flags=re.MULTILINE)
    return (heading[1].strip() if heading else "", question[0] if question else "", takes[1] if takes else "")


def _read_parameters(source: str) -> tuple[dict[str, Parameter], list[str]]:
    """Parameters of a cell, and what is wrong with its lines (a missing comment is the hygiene checker's matter)."""
    try:
        statements = ast.parse(source).body
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError) as error:
        return {}, [f"parameters cell: plain Python expected, {error}"]
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    parameters: dict[str, Parameter] = {}
    complaints = []
    for statement in statements:
        line = ast.get_source_segment(source, statement)
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if statement.lineno == statement.end_lineno:
                pass
            case _:
                complaints.append(f"parameters cell: expected one `name = plain value` on a line, found {line!r}")
                continue
        try:
            default = ast.literal_eval(value)
        except ValueError:
            complaints.append(f"parameters cell: {name}: expected a plain value, nothing derived, found {line!r}")
            continue
        if name in parameters:
            complaints.append(f"parameters cell: {name} is assigned twice")
        parameters[name] = Parameter(name, default, comments.get(statement.lineno, ""))
    return parameters, complaints


def notebooks_folder() -> Path:
    """Find `notebooks/` of the checkout that the current directory lies in, else of the one the library runs from.

    Raises:
        NotebookError: neither has one (an installed wheel brings no notebooks).
    """
    candidates = [repo_root() / "notebooks", Path(__file__).resolve().parents[2] / "notebooks"]
    for folder in candidates:
        if any(folder.glob("*.ipynb")):
            return folder
    looked = " or ".join(str(folder) for folder in candidates)
    raise NotebookError(f"no notebooks in {looked}. Run this inside a checkout of the repository, or give a path.")


def all_notebooks() -> list[Path]:
    """List the notebooks of `notebooks_folder()`, in the order of their numbers."""
    return sorted(notebooks_folder().glob("*.ipynb"))


def find_notebook(name: str) -> Path:
    """Find a notebook by its number (`2`, `02`), its stem or its path.

    Raises:
        NotebookError: none fits (the error lists what there is), or a number fits several.
    """
    if name.endswith(".ipynb"):
        if Path(name).is_file():
            return Path(name).resolve()
        raise NotebookError(f"{name}: no such notebook")
    known = all_notebooks()
    number = f"{int(name):02d}_" if name.isascii() and name.isdigit() else None
    fitting = [path for path in known if path.stem == name or (number and path.stem.startswith(number))]
    if len(fitting) == 1:
        return fitting[0]
    found = "several notebooks fit" if fitting else "no such notebook"
    listed = "\n".join(f"  {path.stem}" for path in fitting or known)
    raise NotebookError(f"{name}: {found}. Give the number, the name or the path of one:\n{listed}")


def at_default_parameters(name: str, given: Mapping[str, Any], *, ignore: Collection[str] = ()) -> bool:
    """Tell whether a notebook's parameters have the values that its parameters cell gives them.

    Args:
        name: of the notebook, as `find_notebook` takes it.
        given: the values in this run; a notebook passes `globals()`.
        ignore: parameters on which no claim depends, besides `output_dir` and `device`.

    Raises:
        NotebookError: no such notebook. KeyError: a parameter that is not in `given`.

    Example:
        >>> at_default_parameters("01", {"repeats": 40, "ranks": 2})
        True
    """
    defaults = inspect_notebook(find_notebook(name)).parameters
    ignored = {"output_dir", "device", *ignore}
    return all(given[key] == parameter.default for key, parameter in defaults.items() if key not in ignored)


def check_parameters(info: NotebookInfo, given: Mapping[str, Any]) -> dict[str, Any]:
    """Hold values against the parameters that a notebook takes.

    Args:
        info: from `inspect_notebook`.
        given: values by name, as YAML types them.

    Returns:
        The values, in the type of each default (an int given for a float becomes one).

    Raises:
        NotebookError: a name that the notebook does not know (the error lists those it does, with their defaults), or
            a value of another type; all of them in one error.
    """
    if given and info.parameters is None:
        raise NotebookError(f"{info.stem}: no cell is tagged parameters, so {', '.join(given)} would be ignored")
    known = info.parameters or {}
    if unknown := [name for name in given if name not in known]:
        listed = "\n".join(f"  {parameter}" for parameter in known.values())
        raise NotebookError(f"{info.stem} has no parameter {', '.join(unknown)}. It takes:\n{listed}")
    values, complaints = {}, []
    for name, value in given.items():
        try:
            values[name] = _fit(value, known[name].default)
        except TypeError as error:
            complaint = f"{info.stem}: {name}: {error}, found {value!r} ({type(value).__name__})"
            if isinstance(value, str) and ":" in value and type(known[name].default) in (int, float):
                complaint += "; ranges of whole numbers, such as 0:4, are for -p of fsdp-ema sweep"
            complaints.append(complaint)
    if complaints:
        raise NotebookError("\n".join(complaints))
    return values


def parse_assignment(info: NotebookInfo, text: str) -> tuple[str, Any]:
    """Turn `name=value` as typed on a command line into a name and a value, typed as YAML types it.

    A parameter whose default is a string takes the text as it stands, so that `label=12` and `label=on` stay strings;
    quotes around all of it are taken off.

    Raises:
        NotebookError: no `=` in the text, or a value that YAML cannot read.
    """
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not name.isidentifier():
        raise NotebookError(f"-p {text}: expected name=value")
    parameter = (info.parameters or {}).get(name)
    if parameter is not None and isinstance(parameter.default, str):
        quoted = re.fullmatch(r"""'([^']*)'|"([^"]*)\"""", raw)
        return name, raw if quoted is None else quoted[1] or quoted[2] or ""
    try:
        return name, load_yaml(raw)
    except yaml.YAMLError as error:
        raise NotebookError(f"-p {text}: the value is not YAML: {' '.join(str(error).split())}") from error


class _Yaml(yaml.SafeLoader):
    """YAML without the numbers to base 60 of its version 1.1, in which 1:4 is 64."""


def _number_or_text(loader: _Yaml, node: yaml.ScalarNode) -> int | float | str:
    if ":" in node.value:
        return node.value
    kind = node.tag.rpartition(":")[2]
    return loader.construct_yaml_int(node) if kind == "int" else loader.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Yaml.add_constructor(f"tag:yaml.org,2002:{_kind}", _number_or_text)


def load_yaml(text: str) -> Any:
    """Read YAML, in which 1:4 is text and not 64.

    Raises:
        yaml.YAMLError: it is none.

    Example:
        >>> load_yaml("{seed: 3, range: 1:4}")
        {'seed': 3, 'range': '1:4'}
    """
    return yaml.load(text, _Yaml)


RANK_PARAMETERS = ("ranks", "world_size", "world_sizes")


def ranks_assignment(info: NotebookInfo, counts: Sequence[str]) -> str:
    """Turn numbers of ranks into an assignment to the parameter that the notebook takes them by.

    A notebook starts its ranks itself, so their number is a parameter of it: `ranks`, `world_size`, or a list
    `world_sizes`, of which each number becomes a list of its own.

    Args:
        info: from `inspect_notebook`.
        counts: one number, or several to sweep over, as typed.

    Raises:
        NotebookError: the notebook has none of these parameters, or a count is not a whole number above 0.

    Example:
        >>> ranks_assignment(inspect_notebook(find_notebook("01")), ["4"])
        'ranks=4'
        >>> ranks_assignment(inspect_notebook(find_notebook("05")), ["2", "4"])
        'world_sizes=[2],[4]'
    """
    for count in counts:
        if not (count.isascii() and count.isdigit() and int(count) > 0):
            raise NotebookError(f"--ranks: expected a whole number above 0, found {count!r}")
    for name in RANK_PARAMETERS:
        if name in (info.parameters or {}):
            as_list = isinstance(info.parameters[name].default, list)
            return f"{name}=" + ",".join(f"[{count}]" if as_list else count for count in counts)
    names = f"{', '.join(RANK_PARAMETERS[:-1])} or {RANK_PARAMETERS[-1]}"
    raise NotebookError(
        f"--ranks: {info.stem} has no parameter {names}: it works in one process. "
        "Leave --ranks out, or choose a notebook that starts ranks (fsdp-ema list shows them)."
    )


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a map"}


def _fit(value: Any, default: Any) -> Any:
    """`value` in the type of `default`; TypeError says what was expected."""
    if default is None:
        return value
    wanted = TypeError(f"expected {_KINDS.get(type(default), type(default).__name__)}, like {default!r}")
    if isinstance(default, float):
        # YAML 1.1 reads 1e-3 as text, since it lacks the dot.
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
            return float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wanted
        return float(value)
    if isinstance(default, list | tuple):
        if not isinstance(value, list | tuple):
            raise wanted
        return type(default)(_fit(item, default[0]) if default else item for item in value)
    if type(value) is not type(default):
        raise wanted
    return value


# --- form ---------------------------------------------------------------------------------------------------------

SCREEN = 50  # lines of code that still count as one thought
HOME_PARAMETERS = ("output_dir", "device")


def hygiene(path: str | Path) -> list[str]:
    """List what is out of order in a notebook of the house: empty if it may be committed.

    Checked are the file name, the kernel, that nothing of a run is left in it, readable unique cell ids, the opening
    cell (number, question, needs, time), the `parameters` cell, that no class is defined, the length of code cells, and
    that the last cell writes the metrics and asserts its claims.

    Raises:
        NotebookError: no readable notebook.
    """
    notebook, path = read_notebook(path), Path(path)
    complaints = _metadata_complaints(notebook)
    if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name):
        complaints.append("the file name is not NN_words_in_lower_case.ipynb")
    complaints += _opening_complaints(notebook, path)
    complaints += _parameter_complaints(notebook, path)
    for cell in notebook.cells:
        complaints += [f"cell {cell.get('id')!r}: {text}" for text in _cell_complaints(cell)]
    ids = [cell.get("id") for cell in notebook.cells]
    complaints += [f"cell id {name!r} is used twice" for name in sorted({i for i in ids if i and ids.count(i) > 1})]
    return complaints + _closing_complaints(notebook)


def _metadata_complaints(notebook: nbformat.NotebookNode) -> list[str]:
    complaints = []
    if (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        complaints.append(f"format 4.5 expected, found {notebook.nbformat}.{notebook.nbformat_minor}")
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        complaints.append(f"kernel python3 expected, found {kernel}")
    if extra := sorted(set(notebook.metadata) - {"kernelspec", "language_info"}):
        complaints.append(f"metadata left by a run or a tool: {', '.join(extra)}")
    return complaints


def _opening_complaints(notebook: nbformat.NotebookNode, path: Path) -> list[str]:
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        return ["the first cell is not markdown"]
    text, complaints = notebook.cells[0].source, []
    _, question, takes = _read_opening(text)
    if not re.match(rf"# {path.name[:2]} · \S", text):
        complaints.append(f"the first cell does not start with `# {path.name[:2]} · Title`")
    if not question or re.search(r"[.!]\s+[A-Z]", question):
        complaints.append("the first sentence under the title is not a question")
    if not re.search(r"^\*\*Needs:\*\* \S", text, flags=re.MULTILINE):
        complaints.append("the first cell has no **Needs:** line")
    if not takes:
        complaints.append("the first cell has no **Takes:** line")
    return complaints


def _parameter_complaints(notebook: nbformat.NotebookNode, path: Path) -> list[str]:
    cells = _parameter_cells(notebook)
    if len(cells) != 1 or cells[0].cell_type != "code":
        return [f"one code cell tagged parameters expected, found {len(cells)}"]
    parameters, complaints = _read_parameters(cells[0].source)
    complaints += [f"parameter {name}: no comment behind it" for name, p in parameters.items() if not p.help]
    untyped = [name for name, p in parameters.items() if p.default in (None, [], {}, ())]
    complaints += [f"parameter {name}: its default says no type, so anything would be taken" for name in untyped]
    complaints += [f"no parameter {name}" for name in HOME_PARAMETERS if name not in parameters]
    home = f"outputs/{path.stem}"
    if "output_dir" in parameters and parameters["output_dir"].default != home:
        complaints.append(f'parameter output_dir: "{home}" expected, found {parameters["output_dir"].default!r}')
    return complaints


def _cell_complaints(cell: nbformat.NotebookNode) -> list[str]:
    complaints, name = [], cell.get("id", "")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or re.fullmatch(r"[0-9a-f]{8}", name):
        complaints.append("a readable id is expected, not a random one")
    if cell.cell_type != "code":
        return complaints
    if cell.outputs or cell.execution_count is not None:
        complaints.append("outputs or a count of a run are left in it")
    if (lines := len(cell.source.splitlines())) > SCREEN:
        complaints.append(f"{lines} lines of code, more than a screen of {SCREEN}")
    classes = [node.name for node in ast.walk(_parse(cell)) if isinstance(node, ast.ClassDef)]
    if classes:
        complaints.append(f"defines class {', '.join(classes)}; classes live in the library")
    return complaints


def _closing_complaints(notebook: nbformat.NotebookNode) -> list[str]:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    nodes = list(ast.walk(_parse(code[-1]))) if code else []
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    written = [argument for call in calls if call.func.id == "write_metrics" for argument in call.args]
    complaints = []
    if not written:
        complaints.append("the last code cell does not call write_metrics")
    asserted = [node.test for node in nodes if isinstance(node, ast.Assert)]
    if not _names_in(written) & _names_in(asserted):
        complaints.append("the last code cell asserts nothing that it writes: assert the claims of write_metrics")
    return complaints


def _names_in(nodes: Collection[ast.expr]) -> set[str]:
    return {node.id for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name)}


def functions_defined(path: str | Path) -> set[str]:
    """Name the functions that a notebook defines: one that two notebooks define belongs into the library."""
    code = [cell for cell in read_notebook(path).cells if cell.cell_type == "code"]
    return {node.name for cell in code for node in ast.walk(_parse(cell)) if isinstance(node, ast.FunctionDef)}


def _parse(cell: nbformat.NotebookNode) -> ast.Module:
    return ast.parse(TransformerManager().transform_cell(cell.source))
