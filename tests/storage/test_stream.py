"""A save leaf by leaf writes what a save of the whole tree writes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import TensorDict, load, save
from tdfunc.storage.stream import memmap_stream, save_stream
from tests.storage.trees import assert_same, tied_trees, trees


def in_pieces(leaf):
    """The values of a leaf, a few at a time."""
    return leaf.detach().reshape(-1).split(3) if leaf.numel() else ()


@given(st.one_of(trees(), tied_trees()))
def test_file_is_that_of_save(tmp_path_factory, tree):
    """A file written leaf by leaf has the bytes of a saved one."""
    folder = tmp_path_factory.mktemp("stream")
    save(tree, folder / "a.safetensors")

    save_stream(tree, in_pieces, folder / "b.safetensors", fsync=False)

    assert (folder / "a.safetensors").read_bytes() == (folder / "b.safetensors").read_bytes()


@given(trees(), st.sampled_from([1, 20, "1GB"]))
def test_shards_load_as_the_tree(tmp_path_factory, tree, size):
    """Shards written leaf by leaf load as the tree."""
    folder = tmp_path_factory.mktemp("stream") / "shards"

    save_stream(tree, in_pieces, folder, max_shard_size=size, fsync=False)

    assert_same(load(folder), tree)


def test_memmap_is_that_of_memmap(tmp_path):
    """A memmap folder written leaf by leaf loads as a written one."""
    tree = TensorDict({"a": torch.arange(7.0), "n": {"b": torch.ones(2, 3).T, "e": torch.empty(0)}, "v": "text"})
    tree.memmap(tmp_path / "a")
    spec = tree.apply(lambda leaf: leaf.to("meta"))
    values = dict(zip(map(id, spec.leaves()), tree.leaves(), strict=True))

    memmap_stream(spec, lambda leaf: in_pieces(values[id(leaf)]), tmp_path / "b")

    assert_same(load(tmp_path / "b"), load(tmp_path / "a"))


def test_each_leaf_has_one_turn_without_the_others(tmp_path):
    """Each leaf is asked for once, in its turn."""
    spec = TensorDict({str(i): torch.empty(10, dtype=torch.float32, device="meta") for i in range(5)})
    turns = []

    def values(leaf):
        turns.append(next(key for key, own in spec.items() if own is leaf))
        yield torch.full((4,), float(turns[-1]))
        yield torch.full((6,), float(turns[-1]))

    save_stream(spec, values, tmp_path / "t.safetensors")

    assert turns == list("01234")
    assert all((leaf == int(key)).all() for key, leaf in load(tmp_path / "t.safetensors").items())


@pytest.mark.parametrize("how", ["file", "shards", "memmap"])
def test_an_error_leaves_what_was_there(how, tmp_path):
    """An error of a source half way leaves the old checkpoint and nothing else."""
    old, new = (TensorDict({"a": make(3), "b": make(3)}) for make in (torch.ones, torch.zeros))
    writers = {
        "file": (tmp_path / "t.safetensors", lambda t, v, p: save_stream(t, v, p)),
        "shards": (tmp_path / "shards", lambda t, v, p: save_stream(t, v, p, max_shard_size=12)),
        "memmap": (tmp_path / "folder", memmap_stream),
    }
    path, write = writers[how]
    write(old, in_pieces, path)

    def values(leaf):
        if leaf is new["b"]:
            raise OSError(5, "damaged")
        return in_pieces(leaf)

    with pytest.raises(OSError, match="damaged|Input/output"):
        write(new, values, path)

    assert_same(load(path), old)
    assert sum(1 for _ in tmp_path.iterdir()) == 1
