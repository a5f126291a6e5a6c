"""Type checkers read the code of README.md, docs/ and notebooks/ without a finding that is ours."""

import pytest

from tests.typing.documented import ACCEPTED, CHECKERS, MYPY, findings, modules, unexpected, write_modules

PAGES = list(modules())


# With two mistakes: a call with a wrong argument, also in a function without annotations.
WRONG = ["", "import tdfunc as tdf", "", "def f(x):", "    return tdf.load(3)", "tdf.save(f(1), 'a', colour=2)"]


# One run for both claims: a checker reads torch and transformers for more than a minute.
@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_documented_lines_pass_and_mistakes_are_found(checker, tmp_path):
    """All lines pass in strict mode, except findings that other libraries cause; a mistake is found at its line."""
    found = unexpected(findings(checker, tmp_path, [*PAGES, ("docs/wrong.md", WRONG)]))

    assert [text.split(": ")[0] for text in found] == ["docs/wrong.md:5", "docs/wrong.md:6"]


def test_lines_keep_their_places(tmp_path):
    """A line of code is at the same line of its module, and commands of notebooks are statements."""
    write_modules(tmp_path, [("docs/a-b.md", ["", "x = 1", "if x:", "    %time y = 2"])])

    assert (tmp_path / "docs_a_b_md.py").read_text() == "\nx = 1\nif x:\n    pass\n"


def test_every_kind_of_page_is_read():
    """Pages, programs and notebooks are among the modules."""
    names = [name for name, _ in PAGES]

    assert {"README.md", "docs/trees.md", "docs/examples/ensemble.py"} <= {*names}
    assert sum(name.endswith(".ipynb") for name in names) == 9


def test_only_accepted_findings_are_left_out():
    """A finding is dropped for a pattern with a reason, and for nothing else."""
    ours = 'docs/a.md:3: Argument missing for parameter "x" (reportCallIssue) ## tdf.load()'
    theirs = 'docs/a.md:4: No parameter named "attn_implementation" (reportCallIssue) ## LlamaConfig('

    assert unexpected([ours, theirs]) == [ours]
    assert all(len(reason.split()) >= 4 for reason in ACCEPTED.values())
    assert "strict = True" in MYPY
