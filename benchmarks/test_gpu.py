"""The rows of a GPU: the program runs on the CPU, and its results are a table of the page."""

import sys
import time
import warnings

import torch

from benchmarks import gpu, page, results


def test_rows_of_a_gpu_run_on_the_cpu(capsys, monkeypatch):
    """`make gpu` would fail where nobody can try it: the same programs, with another clock."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--quick"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gpu.main()

    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "Error" in line or "left out" in line]
    # One way takes tensors on a GPU and no others.
    assert len(lines) == 2 + 10 + 6 * 4 + 1
    assert len(failed) == 1
    assert "cudagraphs" in failed[0]
    assert "is not on the device of the graph" in failed[0]


def test_ways_that_fail_or_come_late_are_rows():
    """An error of a rival would end the run, and a slow one take the time of all."""
    plan = gpu.Plan(torch.device("cpu"), True, time.monotonic() + 60)
    rows = gpu.measure("sum", {"tdfunc": lambda: lambda: sum((1, 2)), "other": lambda: [].pop}, plan)
    late = gpu.measure("sum", {"tdfunc": lambda: lambda: sum((1, 2))}, plan._replace(deadline=0))

    assert [(row.way, row.us > 0, row.error) for row in rows] == [
        ("tdfunc", True, ""), ("other", False, "IndexError: pop from empty list"),
    ]  # fmt: skip
    assert [row.error for row in late] == ["left out: the time was up"]


def test_rows_of_a_gpu_are_on_the_page(tmp_path):
    """The page has a table of each device that was measured, and else says that none was."""
    rows = [gpu.Row("step", "tdfunc", 10.0, 5), gpu.Row("step", "loop", 250.0, 5), gpu.Row("step", "x", error="no")]
    path = gpu.store(rows, {"device": "Some GPU (80 GB)", "versions": "torch 9"}, tmp_path)
    text = "".join(page.render(results.load([], tmp_path)).values())

    assert path.name == "some-gpu-80-gb-.json"
    assert "Some GPU (80 GB); torch 9." in text
    assert "| step | loop | 10.0 us | 250 us | 25x |  |" in text
    assert "| step | x | 10.0 us |  |  | no |" in text
    assert "have not run on a GPU yet" not in text
    assert "have not run on a GPU yet" in "".join(page.render(results.Results()).values())
