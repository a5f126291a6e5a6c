"""Pages, public docstrings and error messages keep the rules of the style guide that a pattern can find."""

import ast
import re
import tokenize
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
RULES = {
    "2, repeat the noun in place of that of": r"\b(that|those) of\b",
    "5, also stands before its word, no sentence ends in too": r",? too[.,;:)]",
    "6, has its own": r"\bof (its|their|one's|his) own\b",
    "11, is not a, are not": r"(?<!there )\b(is|are|was|were) no\b(?! (longer|more|less|later|sooner)\b)",
    "12, silently": r"\bin silence\b",
    "12, is": r"\b(lies|lie|stands|stand)\b(?! for\b| in for\b)",
    "12, continues": r"\b(goes|go|went|going) on\b",
}


def broken(text):
    """The rules that a text breaks, each with the words."""
    plain = re.sub(r"``[^`]*``|`[^`]*`", "`", text)
    plain = re.sub(r"\s+", " ", plain)
    return [
        f"rule {rule}: ...{plain[max(found.start() - 40, 0) : found.end() + 20]}..."
        for rule, pattern in RULES.items()
        for found in re.finditer(pattern, plain, re.IGNORECASE)
    ]


def prose(page):
    """The text of a page without blocks of code and comments."""
    text = re.sub(r"(?ms)^ *(`{3,}).*?^ *\1 *$", "", page)
    return re.sub(r"(?s)<!--.*?-->|<(script|style|svg).*?</\1>", "", text)


def public_docstrings(tree):
    """Docstrings of a module and of what it defines under public names, with their lines."""
    if not isinstance(tree, ast.Module) and tree.name.startswith("_") and not tree.name.endswith("__"):
        return
    text = ast.get_docstring(tree)
    if text is not None:
        yield tree.body[0].lineno, text
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield from public_docstrings(node)


def private_docstrings(tree):
    """Docstrings of private definitions, with their lines."""
    public = dict(public_docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            line = node.body[0].lineno
            if line not in public:
                yield line, ast.get_docstring(node)


def comments(path):
    """The blocks of comments of a file, with their lines."""
    block, begin = [], 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                if block and token.start[0] != begin + len(block):
                    yield begin, " ".join(block)
                    block = []
                if not block:
                    begin = token.start[0]
                block.append(token.string.lstrip("# "))
    if block:
        yield begin, " ".join(block)


def messages(tree):
    """The texts of each raise statement and of each warning, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from strings(node.exc)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn"):
            yield from strings(node)


def strings(tree):
    """The texts in an expression, with their lines."""
    parts = [one for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    yield from ((part.lineno, part.value) for part in parts)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOURCES = sorted((ROOT / "tdfunc").rglob("*.py"))
# Sentences that are not mended yet: the numbers only fall.
LIMITS = {"pages": 0, "notebooks": 0, "docstrings": 0, "private docstrings": 0, "comments": 0, "messages": 0}


def pages(path):
    """The prose of a page, without a line."""
    yield 0, prose(path.read_text())


def notebook_pages(path):
    """The prose of a notebook, with the numbers of its cells."""
    for number, cell in enumerate(nbformat.read(path, 4).cells):
        if cell.cell_type == "markdown":
            yield number, prose(cell.source)


def of_source(read):
    """What `read` finds in the syntax tree of a file."""
    return lambda path: read(ast.parse(path.read_text()))


# Syntax trees of the whole package take seconds.
@pytest.mark.parametrize(
    ("name", "paths", "read"),
    [
        ("pages", PAGES, pages),
        ("notebooks", NOTEBOOKS, notebook_pages),
        ("docstrings", SOURCES, of_source(public_docstrings)),
        pytest.param("private docstrings", SOURCES, of_source(private_docstrings), marks=pytest.mark.slow),
        pytest.param("comments", SOURCES, comments, marks=pytest.mark.slow),
        pytest.param("messages", SOURCES, of_source(messages), marks=pytest.mark.slow),
    ],
)
def test_sentences_keep_the_rules(name, paths, read):
    """No more sentences of pages, public docstrings and messages break a rule than the limits allow."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {one}" for path in paths for line, text in read(path) for one in broken(text)
    ]

    assert len(found) <= LIMITS[name], "\n".join(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("The shape is that of the first leaf.", "2"),
        ("It reads files, too.", "5"),
        ("A member has a key of its own.", "6"),
        ("A list is no tree.", "11"),
        ("It fails in silence.", "12"),
        ("The file lies in a folder.", "12"),
        ("Training goes on.", "12"),
    ],
)
def test_each_rule_is_noticed(text, rule):
    """A sentence that breaks a rule is found, and its code is not read."""
    (found,) = broken(text)

    assert found.startswith(f"rule {rule},")
    assert broken(f"`{text}` holds.") == []
