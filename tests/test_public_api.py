"""Public names are the symbols that docs/api lists, package by package."""

import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

import tdfunc

ROOT = Path(__file__).parent.parent
METHODS = {*(ROOT / "docs/api").glob("methods*.md")}


def listed_symbols(text):
    """Symbols of mkdocstrings lines, `::: tdfunc.x`."""
    return re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)


def exported_names(source, *, is_package):
    """Public names of a module: what a package imports by name, what a plain module defines."""
    body = ast.parse(source).body
    if is_package:
        names = [
            alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
    else:
        names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {name for name in names if not name.startswith("_")}


def read_exports(package):
    """Public names of a package or module of this repository, given its dotted name."""
    path = ROOT.joinpath(*package.split("."))
    if path.is_dir():
        return exported_names((path / "__init__.py").read_text(), is_package=True)
    return exported_names(path.with_suffix(".py").read_text(), is_package=False)


def documented_symbols():
    """Symbols of all pages of docs/api except the pages of methods, with repetitions."""
    pages = {*(ROOT / "docs/api").rglob("*.md")} - METHODS
    return [symbol for page in pages for symbol in listed_symbols(page.read_text())]


def test_no_public_name_is_documented_twice():
    """Each public name is documented on one page."""
    assert [symbol for symbol, count in Counter(documented_symbols()).items() if count > 1] == []


def test_docs_list_every_public_name():
    """The pages of a package list its public names, and nothing else."""
    listed = {"tdfunc": set()}
    for symbol in documented_symbols():
        package, _, name = symbol.rpartition(".")
        listed.setdefault(package, set()).add(name)

    exported = {}
    documented = {}
    for package, names in listed.items():
        # A public module with symbols of its own, such as tdfunc.optim, is listed by them.
        modules = {other.rpartition(".")[2] for other in listed if other.rpartition(".")[0] == package}
        # At the top level a function of such a module may stand too, under the same name.
        aliases = set().union(*[listed[f"{package}.{module}"] for module in modules]) - names
        exported[package] = read_exports(package) - modules - aliases
        documented[package] = names - modules

    assert exported == documented


@pytest.mark.slow
def test_one_spelling_of_a_size():
    """An argument is called `chunk_size`, except in `map`, where it has tensordict's name."""
    sources = [(path, ast.walk(ast.parse(path.read_text()))) for path in (ROOT / "tdfunc").rglob("*.py")]
    folders = {path.parent.name for path, nodes in sources for n in nodes if getattr(n, "arg", None) == "chunksize"}

    assert folders == {"parallel"}


def test_docs_list_every_method_of_a_tree_once():
    """The pages of methods have each public method and property of `TensorDict` in one of its families."""
    symbols = [symbol for page in METHODS for symbol in listed_symbols(page.read_text())]
    listed = Counter(symbol.removeprefix("tdfunc.TensorDict.") for symbol in symbols)
    classes = [cls for cls in tdfunc.TensorDict.__mro__ if cls is not object]

    names = {name for cls in classes for name in vars(cls) if hasattr(cls, name)}
    assert set(listed) == {name for name in names if not name.startswith("_")}
    assert [name for name, count in listed.items() if count > 1] == []


def test_one_screen_names_everything():
    """The overview has every public name, and every method that it names exists."""
    text = (ROOT / "docs/api/index.md").read_text()
    names, methods = text.split("Methods of a tree")
    spelled = re.compile(r"`([A-Za-z_]+)`")
    inner = {"sgd", "adam", "adamw", "chain", "masked", "nll", "brier", "ece", "reliability_curve"}

    assert {*spelled.findall(names)} - inner == {*read_exports("tdfunc"), "nn", "sklearn", "llm"} - inner
    listed = [name for row in names.splitlines() for name in spelled.findall(row.split("|")[1] if "|" in row else "")]
    assert [name for name, count in Counter(listed).items() if count > 1] == []
    known = {*dir(tdfunc.TensorDict), *dir(tdfunc.LazyStack)}
    assert {*spelled.findall(methods)} - known == set()


def test_a_star_import_gives_the_public_names():
    """`from tdfunc import *` gives every public name, except those of Python's builtins, and nothing else."""
    names = {}
    exec("from tdfunc import *", names)

    assert names.keys() - {"__builtins__"} == read_exports("tdfunc") - {"map", "open"}


@pytest.mark.parametrize("name", ["averaging", "calibration", "distributed", "metrics", "nn", "optim",
                                  "optim.schedules", "random", "sklearn", "spec", "sweep"])  # fmt: skip
def test_a_module_shows_its_public_names(name):
    """`dir`, `__all__` and the pages name the same functions and classes."""
    module = importlib.import_module(f"tdfunc.{name}")

    assert set(dir(module)) == {*module.__all__} == read_exports(module.__name__)


def test_the_package_shows_its_public_names():
    """`dir(tdfunc)` has the public names, and the packages that are imported at their first use."""
    assert set(dir(tdfunc)) == {*read_exports("tdfunc"), "llm", "nn", "sklearn", "spec", "__version__"}


@pytest.mark.parametrize("name", ["llm", "nn", "sklearn", "spec"])
def test_a_package_is_imported_at_its_first_use(name):
    """The attribute is the package."""
    assert tdfunc.__getattr__(name) is importlib.import_module(f"tdfunc.{name}")


def test_a_name_that_is_not_there_is_refused():
    """As Python refuses it."""
    with pytest.raises(AttributeError, match="no attribute 'metric'"):
        tdfunc.metric  # noqa: B018


def test_symbols_and_exports_are_found():
    """Symbols of a page and exports of packages and modules are found."""
    package = "from tdfunc._a import x as x, _y as _y\nfrom tdfunc._b import Z as Z\n__all__ = ['x']\n"
    module = "from torch import nn\nclass A: ...\ndef f(): ...\ndef _g(): ...\n"

    assert listed_symbols("# Title\n\n::: tdfunc.x\n    options: {}\n\n::: tdfunc.Z\n") == ["tdfunc.x", "tdfunc.Z"]
    assert exported_names(package, is_package=True) == {"x", "Z"}
    assert exported_names(module, is_package=False) == {"A", "f"}


def test_star_imports_of_llm_have_no_submodules():
    """`from tdfunc.llm import *` gives the exports of the package but its modules, such as `losses`."""
    names = {}
    exec("from tdfunc.llm import *", names)
    source = (ROOT / "tdfunc" / "llm" / "__init__.py").read_text()

    exports = {name: getattr(tdfunc.llm, name) for name in exported_names(source, is_package=True)}
    assert names.keys() - {"__builtins__"} == {name for name, x in exports.items() if not isinstance(x, type(ast))}


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("pyproject.toml", r'^version = "(\S+)"$'),
        ("CITATION.cff", r"^version: (\S+)$"),
        ("docs/install.md", r"tdfunc-(\d\S+)-py3-none-any\.whl"),
        ("docs/changelog.md", r"^## (\S+)$"),
    ],
)
def test_one_version(path, pattern):
    """The version of the package stands in its metadata, in the citation, and at the head of the changelog."""
    found = re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)

    assert found[1] == tdfunc.__version__


def test_the_date_of_the_release():
    """The changelog and the citation have one date."""
    changelog = (ROOT / "docs/changelog.md").read_text()

    assert (
        re.search(r"^## \S+\n\n(\S+)$", changelog, re.MULTILINE)[1]
        == re.search(r"^date-released: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    )
