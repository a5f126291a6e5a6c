"""The table of faults of `python -m benchmarks.pages --show torchrl` names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "benchmarks/pages/torchrl.md"


def test_each_fault_has_a_test():
    """Thirty rows, each with a function of a file of this folder."""
    rows = re.findall(r"\| (D\d+) \|.*`([\w/]+\.py)::(\w+)` \|", TABLE.read_text())

    assert [number for number, _, _ in rows] == [f"D{i}" for i in range(1, 31)]
    assert [row for row in rows if f"\ndef {row[2]}(" not in (HERE / row[1]).read_text()] == []
