"""Storage against damage, crashes and hostile files: what is not tested beside each part of it.

`python -m tests.reliability` runs the same checks many more times and writes docs/reliability.md.
"""

import pytest
import torch

from tdfunc import CorruptCheckpointError, load
from tdfunc import open as open_file
from tests.storage.trees import entry, forge

WHOLE = entry("w", "I64", [1], 0, 8)
READS = {
    "load": load,
    "one leaf": lambda path: load(path, keys="w"),
    "compared": lambda path: load(path, like={"w": torch.zeros(1, dtype=torch.int64)}),
    "meta": lambda path: load(path, device="meta"),
    "spec": lambda path: _opened(path, lambda f: f.spec()),
    "leaf": lambda path: _opened(path, lambda f: f["w"]),
}


def _opened(path, read):
    with open_file(path) as f:
        return read(f)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("flags", ["g", "Pg", 5, ["P"], "?"])
def test_flags_that_do_not_fit_a_leaf(flags, read, tmp_path):
    """A header that marks an integer leaf as a trainable Parameter would raise torch's error, which names no file."""
    tree = {"specs": [["I64", [1]]], "nodes": [{"keys": ["w"], "items": [[0, flags]]}], "ties": []}
    path = tmp_path / "f.safetensors"
    path.write_bytes(forge(tree, [WHOLE], bytes(8)))

    with pytest.raises(CorruptCheckpointError, match=r"(?s)f\.safetensors.*(flags|grad)"):
        read(path)
