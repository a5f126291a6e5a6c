"""Every Python block of README.md and docs/ runs; pictures and notebook outputs are committed."""

import importlib.util
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.helpers import quick

ROOT = Path(__file__).parent.parent


class Block(NamedTuple):
    line: int
    code: str
    tag: str
    has_reason: bool


def python_blocks(text):
    """Fenced Python blocks of a page, with the line number of their first line of code."""
    blocks, fence = [], None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = re.match(r" *(`{3,})(.*)$", line)
        if match is None:
            continue
        if fence is None:
            fence, info, start = match[1], match[2].strip(), number
        elif match[1] == fence and not match[2]:
            language, _, tag = info.partition(" ")
            if language == "python":
                before = [line for line in lines[:start] if line.strip()][-1:]
                code = textwrap.dedent("\n".join(lines[start + 1 : number]))
                blocks.append(Block(start + 2, code, tag, before != [] and before[0].rstrip().endswith("-->")))
            fence = None
    return blocks


def run_blocks(path, module):
    """Execute the blocks of a page one after another in the namespace of `module`."""
    for block in python_blocks(path.read_text()):
        if block.tag == "{no-run}":
            assert block.has_reason, f"{path}:{block.line}: a no-run block follows an HTML comment with the reason"
            continue
        assert block.tag == "", f"{path}:{block.line}: the site shows no block that is tagged {block.tag!r}"
        # Empty lines in front make tracebacks point at the line of the page.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(path), "exec"), vars(module))


@pytest.fixture
def page_module(tmp_path, monkeypatch):
    """A module for the names of one page, importable so that classes find their annotations; cwd is temporary."""
    module = types.ModuleType("tdfunc_docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return module


# Their blocks train, and compile.
LONG = {ROOT / "docs" / f"{name}.md" for name in ("forecasting", "lora", "training", "transforms")}
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if python_blocks(path.read_text())]


@pytest.mark.parametrize("path", quick(PAGES, *{*PAGES} - LONG), ids=lambda path: str(path.relative_to(ROOT)))
def test_page_runs(path, page_module):
    """The code of a page runs as it is copied, from its first block to its last."""
    run_blocks(path, page_module)


def test_readme_runs_twice(page_module):
    """The README runs, and runs again in the folder that holds the files of the first run."""
    run_blocks(ROOT / "README.md", page_module)
    run_blocks(ROOT / "README.md", page_module)


def test_blocks_share_names_and_run_in_order(tmp_path, page_module):
    """A block sees the names that earlier blocks of its page defined."""
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\ntext\n\n- item\n\n  ```python\n  b = a + 1\n  ```\n")

    run_blocks(page, page_module)

    assert page_module.b == 2


def test_a_failing_block_fails_at_its_line(tmp_path, page_module):
    """The traceback of a broken example points at its line of the page."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\nraise KeyError(a)\n```\n")

    with pytest.raises(KeyError) as caught:
        run_blocks(page, page_module)

    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("comment", ["", "<!-- Needs a GPU. -->\n"], ids=["without reason", "with reason"])
def test_no_run_needs_a_reason(comment):
    """A skipped block follows an HTML comment with the reason."""
    blocks = python_blocks(f"Text.\n\n{comment}```python {{no-run}}\nraise KeyError\n```\n")

    assert [(block.tag, block.has_reason) for block in blocks] == [("{no-run}", comment != "")]


def test_no_run_without_a_reason_fails(tmp_path, page_module):
    """A skipped block without a reason fails."""
    page = tmp_path / "page.md"
    page.write_text("```python {no-run}\nraise KeyError\n```\n")

    with pytest.raises(AssertionError, match="HTML comment"):
        run_blocks(page, page_module)


def test_only_python_fences_count():
    """Shell lines, and Python quoted inside a longer fence, are not executed."""
    assert python_blocks("```bash\nls\n```\n\n````text\n```python\nx\n```\n````\n") == []


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_their_outputs(path):
    """All cells of a notebook were executed, in order and without an error, and its outputs hold pictures."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]

    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_notebooks_have_numbers_and_install_first():
    """Notebooks are numbered without a gap, and the first code of each installs the package where it is missing."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    first = [next(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code") for path in notebooks]

    assert [path.name[:2] for path in notebooks] == [f"{number:02}" for number in range(1, len(notebooks) + 1)]
    assert len(set(first)) == 1
    assert 'if importlib.util.find_spec("tdfunc") is None:' in first[0]
    assert '%pip install -q "{source}[notebooks]"' in first[0]


def test_notebook_pages_show_code_and_outputs():
    """The page of a notebook has its text, its code, and each kind of output: text, a table and a picture."""
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs/notebooks.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    outputs = [
        new_output("stream", text="printed\n"),
        new_output("execute_result", {"text/plain": "TensorDict(...)", "text/html": "<table></table>"}),
        new_output("display_data", {"text/plain": "<Figure>", "image/png": "UE5H"}),
    ]
    cells = [new_markdown_cell("# Title"), new_code_cell("x = 1", outputs=outputs)]
    text, pictures = hook.make_page(new_notebook(cells=cells), "name")

    assert text.startswith("# Title\n\n````python\nx = 1\n````\n\n```` { .text .output .no-copy }\nprinted\n````\n")
    assert '<div class="output" markdown="0">\n<table></table>\n</div>' in text
    assert "(name-0.png)" in text
    assert pictures == {"name-0.png": b"PNG"}


def test_pictures_are_small():
    """A picture of the docs takes less than 100 kB of the repository."""
    pictures = [path for path in (ROOT / "docs/assets").iterdir() if path.suffix in (".svg", ".png")]

    assert len(pictures) >= 4
    assert [path.name for path in pictures if path.stat().st_size > 100_000] == []
