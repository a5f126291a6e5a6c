"""The counts of kills, faults, damage and pushes keep the guarantees of docs/reliability.md."""

import json

import pytest

from benchmarks.reliability.__main__ import _RESULTS, fuzz_counts


def counted(part):
    """The last counts."""
    return json.loads((_RESULTS / f"{part}.json").read_text())


@pytest.mark.parametrize("key", ["lost", "not cleaned"])
def test_no_kill_did_harm(key):
    """The counted kills lost nothing and left nothing."""
    assert {kind: counts[key] for kind, counts in counted("kills").items() if counts[key]} == {}
    assert min(counts["kills"] for counts in counted("kills").values()) >= 300


def test_no_killed_rank_did_harm():
    """A thousand kills lost nothing and left nothing, and all other ranks raised the error that they should."""
    counts = counted("ranks").values()

    assert sum(n["kills"] for n in counts) >= 1000
    for key in ("lost", "foreign files lost", "not cleaned", "other ends"):
        assert [n[key] for n in counts] == [0, 0], key
    assert all(n["old"] and n["new"] for n in counts)


def test_no_full_disk_did_harm():
    """The counted full disks, limits and shared folders lost nothing and left nothing."""
    for counts in counted("faults").values():
        assert counts["read-only"] == "OSError 13 0"
        assert counts["shared"]["not whole"] == counts["shared"]["left behind"] == 0
        for name in ("limit", "full"):
            assert {counts[name][key] for key in ("killed by a signal", "old tree lost", "left behind")} == {0}


def test_no_call_did_harm():
    """The counted calls that failed, or were the last ones, lost nothing and left nothing."""
    assert {kind: n for kind, n in counted("calls").items() if n["lost"] or n["not cleaned"]} == {}


def test_no_input_did_harm():
    """The counted inputs did no harm."""
    for what, libraries in counted("damage").items():
        ours = [counts for name, counts in libraries.items() if "tensordict" not in name and "tdfunc" in name]
        checked = what.startswith(("file", "shards"))
        assert all(set(counts) <= {"refused", "equal"} for counts in ours if checked)
    for name, counts in counted("hostile").items():
        if "tdfunc" in name or "TensorDict" in name:
            harm = ("another error", "hung", "crashed", "ran code", "left the folder", "wrote")
            assert [counts[key] for key in harm] == [0] * len(harm), name


def test_every_faulty_push_was_caught():
    """None passed for ever, and a full proof caught each at once."""
    for kind, counts in counted("pushes").items():
        assert counts["prompt"]["never caught"] == counts["full"]["never caught"] == 0, kind
        assert counts["full"]["most"] == 1, kind


def test_the_end_of_a_fuzzer_is_read():
    """A run that did not end, and a finding, are counted."""
    assert fuzz_counts("\nDone 12 runs in 34 second(s)\n") == {"inputs": 12, "seconds": 34, "findings": 0}
    assert fuzz_counts("=== Uncaught Python exception: ===") == {"inputs": 0, "seconds": 0, "findings": 1}
