"""Numbers of tests, files and results: from the tree, from pytest's collection and from kept results."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What pytest collects: arguments by the name of the count.
COLLECTED = {
    "fast tests": ["tests", "tdfunc"],
    "slow tests": ["tests", "tdfunc", "-m", "slow"],
    "tests against other programs": ["benchmarks/conformance", "-m", ""],
}
# Programs that results are compared with, and a file of tests that does.
ORACLES = {
    "torch": "tests/test_transform_table.py",
    "torch.optim": "tests/optim/test_narrow.py",
    "numpy": "tests/storage/test_numpy.py",
    "tensordict": "benchmarks/conformance/test_differential.py",
    "safetensors": "tests/storage/test_foreign.py",
    "transformers": "tests/stacked/test_rows.py",
    "PEFT": "benchmarks/conformance/test_peft.py",
    "TRL": "benchmarks/conformance/test_trl.py",
    "mergekit": "benchmarks/conformance/mergekit_oracle.py",
    "JAX": "tests/ops/test_jax.py",
    "vLLM": "tests/engines",
}
# Folders of files that other programs wrote.
FOREIGN = ("tests/storage/golden/others", "tests/lora/golden")
_FILES = (".safetensors", ".bin", ".json", ".npz", ".pt", ".gguf", ".msgpack")
# A count that is so many times the claim makes it old.
STALE = 1.3


def functions(folders: tuple[str, ...] = ("tests", "benchmarks")) -> Iterator[ast.FunctionDef]:
    """Yield the test functions of folders, without an import of their files."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            tree = ast.parse(path.read_text())
            yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_test(node))


def _is_test(node: ast.FunctionDef) -> bool:
    return node.name.startswith("test_")


def _has_random_inputs(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith(("given(", "hypothesis.given(")) for decorator in node.decorator_list)


def of_the_tree() -> dict[str, int]:
    """Return the counts that take seconds: functions of tests, random inputs, laws, and files of other programs."""
    found = list(functions())
    laws = (ROOT / "benchmarks/trust/laws.md").read_text()
    return {
        "test functions": len(found),
        "property tests": sum(map(_has_random_inputs, found)),
        "laws": len(re.findall(r"^\| .*`(?:tests|benchmarks)/", laws, re.MULTILINE)),
        "files of other programs": sum(
            path.suffix in _FILES for folder in FOREIGN for path in (ROOT / folder).rglob("*")
        ),
    }


def collected(name: str) -> int:
    """Return how many cases pytest collects, which takes a minute."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *COLLECTED[name]]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False, text=True).stdout
    return cases_of(printed)


def cases_of(printed: str) -> int:
    """Return the number in the last line of pytest's collection."""
    found = re.findall(r"^(\d+)(?:/\d+)? tests? collected", printed, re.MULTILINE)
    if not found:
        raise ValueError(f"pytest collected nothing:\n{printed[-2000:]}")
    return int(found[-1])


def claim(count: int) -> int:
    """Return the number of two digits that the page gives; the count is more than it."""
    size = 10 ** max(len(str(count)) - 2, 0)
    return (count - 1) // size * size


def holds(claimed: int, count: int) -> bool:
    """Return True if a count is more than the claim, and not so large that the claim is old."""
    return claimed < count <= claimed * STALE


def missing_tests(text: str) -> list[str]:
    """Return the files of tests that a text names and that are not there."""
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+(?:\.py|/))`", text)
    return [name for name, _ in Counter(named).items() if not (ROOT / name).exists()]
