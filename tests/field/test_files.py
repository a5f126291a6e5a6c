"""Checkpoints and files: public reports of other projects that no other test shows."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
def test_leaves_without_elements_come_back_from_a_folder(shape, tmp_path):
    """With their shape and dtype, at any depth."""
    tree = TensorDict({"deep": {"none": torch.zeros(shape, dtype=torch.int16)}, "x": torch.ones(2)})
    tree.memmap(tmp_path / "tree")

    leaf = tdf.load(tmp_path / "tree")["deep", "none"]

    assert f"{leaf.dtype} {tuple(leaf.shape)}" == f"torch.int16 {shape}"


def test_a_folder_that_is_written_again_has_no_old_leaves(tmp_path):
    """The second tree lacks a leaf of the first one."""
    TensorDict({"a": torch.ones(5, 3), "d": torch.ones(5, 1)}, [5]).memmap(tmp_path / "tree")
    TensorDict({"a": torch.zeros(2, 3)}, [2]).memmap(tmp_path / "tree")

    assert tdf.load(tmp_path / "tree").paths() == [("a",)]


def test_a_folder_that_is_written_again_has_the_new_rows(tmp_path):
    """None is left of a longer leaf."""
    TensorDict({"a": torch.ones(5, 3)}, [5]).memmap(tmp_path / "tree")
    TensorDict({"a": torch.zeros(2, 3)}, [2]).memmap(tmp_path / "tree")

    assert tdf.load(tmp_path / "tree")["a"].tolist() == [[0.0] * 3] * 2
