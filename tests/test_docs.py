"""Every Python block of README.md and docs/ runs."""

import re
import sys
import textwrap
import types
from pathlib import Path
from typing import NamedTuple

import pytest

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
        if block.tag == "no-run":
            assert block.has_reason, f"{path}:{block.line}: a no-run block follows an HTML comment with the reason"
            continue
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


PAGES = [
    path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if python_blocks(path.read_text())
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_runs(path, page_module):
    """A reader who copies the page's code would get an error."""
    run_blocks(path, page_module)


def test_blocks_share_names_and_run_in_order(tmp_path, page_module):
    """A block could not use what an earlier one of its page defined."""
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\ntext\n\n- item\n\n  ```python\n  b = a + 1\n  ```\n")

    run_blocks(page, page_module)

    assert page_module.b == 2


def test_a_failing_block_fails_at_its_line(tmp_path, page_module):
    """A broken example would pass, or its traceback would not say where it is."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\nraise KeyError(a)\n```\n")

    with pytest.raises(KeyError) as caught:
        run_blocks(page, page_module)

    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("comment", ["", "<!-- Needs a GPU. -->\n"], ids=["without reason", "with reason"])
def test_no_run_needs_a_reason(comment):
    """A block could be skipped without saying why."""
    blocks = python_blocks(f"Text.\n\n{comment}```python no-run\nraise KeyError\n```\n")

    assert [(block.tag, block.has_reason) for block in blocks] == [("no-run", comment != "")]


def test_no_run_without_a_reason_fails(tmp_path, page_module):
    """The rule above would be written down and not enforced."""
    page = tmp_path / "page.md"
    page.write_text("```python no-run\nraise KeyError\n```\n")

    with pytest.raises(AssertionError, match="HTML comment"):
        run_blocks(page, page_module)


def test_only_python_fences_count():
    """Shell lines, or Python quoted inside a longer fence, would be executed."""
    assert python_blocks("```bash\nls\n```\n\n````text\n```python\nx\n```\n````\n") == []
