"""Arrays and numbers of numpy in plain objects are saved and loaded as what they are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import tdfunc
from tdfunc import CheckpointManager, NonTensorData, TensorDict, UnsupportedError
from tests.cli.helpers import run
from tests.helpers import examples

DTYPES = (
    arrays.boolean_dtypes() | arrays.integer_dtypes(endianness="=") | arrays.unsigned_integer_dtypes(endianness="=")
    | arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)) | arrays.complex_number_dtypes(sizes=(64, 128))
    | arrays.unicode_string_dtypes(max_len=3) | arrays.byte_string_dtypes(max_len=3)
    | arrays.datetime64_dtypes(max_period="D", min_period="ns")
)  # fmt: skip


def same(a, b):
    """Whether two values of numpy are of one type, dtype and shape, with equal bytes."""
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def through_file(value, folder):
    """The value that a file gives back."""
    tdfunc.save({"o": {"x": [value]}}, folder / "t.safetensors")
    return tdfunc.load(folder / "t.safetensors")["o"]["x"][0]


def through_shards(value, folder):
    """The value that a folder of shards gives back."""
    tdfunc.save({"o": {"x": [value]}}, folder / "t", max_shard_size=16)
    return tdfunc.load(folder / "t")["o"]["x"][0]


def through_memmap(value, folder):
    """The value that a memmap folder gives back."""
    TensorDict({"o": NonTensorData({"x": [value]})}).memmap(folder / "m")
    return tdfunc.load(folder / "m")["o"]["x"][0]


def through_run(value, folder):
    """The value that a step gives back, saved in the background."""
    with CheckpointManager(folder / "run", async_save=True) as manager:
        manager.save(1, {"o": {"x": [value]}})
    return CheckpointManager(folder / "run").load()["o"]["x"][0]


def through_handle(value, folder):
    """The value that an open file gives back."""
    tdfunc.save({"o": {"x": [value]}}, folder / "t.safetensors")
    with tdfunc.open(folder / "t.safetensors") as file:
        return file["o"]["x"][0]


WAYS = [through_file, through_shards, through_memmap, through_run, through_handle]
VALUES = [
    np.float64(0.5), np.float64("nan"), np.int64(-3), np.bool_(True), np.float16(2), np.complex128(1 + 2j),
    np.str_("ab"),
    np.str_(""), np.uint64(2**64 - 1), np.datetime64("2020-01-01"), np.arange(6).reshape(2, 3), np.zeros((0, 3)),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(["a", "bcd"]), np.arange(3).astype(">f4"), np.array(3),
    np.arange(10)[::2], np.array([1 + 2j]),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value, way, tmp_path):
    """A value of numpy in a list in a dict comes back as what it was."""
    assert same(way(value, tmp_path), value)


@examples(1)
@given(st.data())
def test_arrays_come_back(tmp_path_factory, data):
    """An array of any dtype that is its bytes comes back as what it was."""
    value = data.draw(
        arrays.arrays(data.draw(DTYPES), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    )

    assert same(through_file(value, tmp_path_factory.mktemp("law")), value)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_continue(kind, tmp_path):
    """Each of numpy's generators continues its numbers after its state was saved."""
    generator = np.random.Generator(getattr(np.random, kind)(3))
    generator.random(5)
    CheckpointManager(tmp_path).save(0, {"w": torch.ones(1), "numpy": generator.bit_generator.state})
    other = np.random.Generator(getattr(np.random, kind)(9))

    other.bit_generator.state = CheckpointManager(tmp_path).load()["numpy"]

    assert np.array_equal(other.random(3), generator.random(3))


def test_a_shared_array_is_one(tmp_path):
    """An array at two places is one array again."""
    value = np.arange(3)
    tdfunc.save({"o": (value, [value])}, tmp_path / "t.safetensors")

    first, (second,) = tdfunc.load(tmp_path / "t.safetensors")["o"]

    assert first is second


def test_a_loaded_array_can_be_written(tmp_path):
    """A loaded array can be written to, and the file does not change."""
    through_file(np.zeros(3), tmp_path)[:] = 1

    assert tdfunc.load(tmp_path / "t.safetensors")["o"]["x"][0].tolist() == [0.0] * 3


def test_a_save_in_the_background_has_the_array_of_the_call(tmp_path):
    """A write to an array after the call does not reach the file."""
    value = np.zeros(100_000)
    with CheckpointManager(tmp_path, async_save=True) as manager:
        manager.save(1, {"o": [value]})
        value[:] = 1

    assert CheckpointManager(tmp_path).load()["o"][0].max() == 0


@pytest.mark.parametrize(
    "value", [np.array([None]), np.zeros(2, [("a", int)]), np.longdouble(1), np.ma.array([1])], ids=repr
)
def test_other_values_are_refused(value, tmp_path):
    """A value that is more than its bytes is refused by its place, and nothing is written."""
    with pytest.raises(UnsupportedError, match=r"at x\.0[\s\S]*hint"):
        through_file(value, tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- one value for each row -------------------------------------------------------------------------------------

ROWS = {
    "dates": [np.datetime64("2020-01-01"), np.datetime64("2021-01-01")],
    "arrays of two sizes": [np.arange(2, dtype=np.int16), np.arange(3.0)],
    "numbers and texts": [np.float64(0.5), "a"],
    "dicts": [{"box": np.zeros((2, 4))}, {"box": np.zeros((0, 4)), "n": np.int64(0)}],
    "tuples": [(1, 2.5), ()],
    "tensors in dicts": [{"x": torch.ones(2)}, {1: torch.zeros(3)}],
}


def file_of(tree, folder):
    """The tree that a file gives back."""
    tdfunc.save(tree, folder / "t.safetensors")
    return tdfunc.load(folder / "t.safetensors")


def shards_of(tree, folder):
    """The tree that a folder of shards gives back."""
    tdfunc.save(tree, folder / "t", max_shard_size=16)
    return tdfunc.load(folder / "t")


def memmap_of(tree, folder):
    """The tree that a memmap folder gives back."""
    tree.memmap(folder / "m")
    return TensorDict.load_memmap(folder / "m")


def step_of(tree, folder):
    """The tree that a step gives back, saved in the background."""
    with CheckpointManager(folder / "run", async_save=True) as manager:
        manager.save(1, tree)
    return CheckpointManager(folder / "run").load()


def assert_same(a, b):
    """Check that two objects are of the same types, with the same bytes in arrays and tensors."""
    assert type(a) is type(b)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert_same(list(a.items()), list(b.items()))
    elif isinstance(a, torch.Tensor):
        assert_same(a.numpy(), b.numpy())
    elif isinstance(a, (np.ndarray, np.generic)):
        assert same(a, b)
    else:
        assert a == b


@pytest.mark.parametrize("way", [file_of, shards_of, memmap_of, step_of], ids=lambda way: way.__name__)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_one_value_for_each_row_comes_back(rows, way, tmp_path):
    """Values of numpy, tuples and objects with tensors in the rows of a data set come back as what they were."""
    tree = TensorDict({"x": torch.arange(2), "note": rows}, [2])

    back = way(tree, tmp_path)

    assert_same(back["note"], rows)
    assert_same(back[1]["note"], rows[1])


def test_a_batch_of_two_dimensions_comes_back(tmp_path):
    """Values of a batch of several dimensions come back at their places."""
    days = [[np.datetime64(f"2020-01-{row}{day}") for day in range(1, 4)] for row in range(2)]
    tree = TensorDict({"day": days}, [2, 3])

    back = file_of(tree, tmp_path)

    assert_same(back["day"], days)
    assert back._data["day"].shape == (2, 3)


def test_an_open_file_gives_the_values(tmp_path):
    """A handle reads one value for each row."""
    tdfunc.save(TensorDict({"note": ROWS["dates"]}, [2]), tmp_path / "t.safetensors")

    with tdfunc.open(tmp_path / "t.safetensors") as file:
        assert_same(file["note"], ROWS["dates"])


def test_other_values_of_a_row_are_refused(tmp_path):
    """An object that cannot be stored is refused with the number of its row."""
    tree = TensorDict({"note": [np.float64(1), {"a": object()}]}, [2])

    with pytest.raises(UnsupportedError, match=r'leaf "note" cannot be stored[\s\S]*object .* at 1\.a'):
        tdfunc.save(tree, tmp_path / "t.safetensors")


def test_the_shell_shows_one_value_for_each_row(tmp_path):
    """`show` lists the values of the rows, as it does for texts."""
    tdfunc.save(TensorDict({"note": ROWS["dates"]}, [2]), tmp_path / "t.safetensors")

    (found,) = run("show", tmp_path / "t.safetensors", "--json").json["values"]

    assert found["per_element"] is True
