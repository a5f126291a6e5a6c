"""Trees from and to dicts, dataclasses, tuples, numpy, pandas, state dicts, and as data sets of a `DataLoader`."""

import dataclasses
from collections import namedtuple

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

import tdfunc as tdf
from tdfunc import Kind, TensorClass, TensorDict, lazy_stack
from tests.helpers import TiedLM, TinyMLP, assert_pure, assert_trees_equal
from tests.incumbent import Incumbent, IncumbentNonTensor, incumbent_class, tensordict
from tests.strategies import trees


class Point(TensorClass):
    x: Tensor
    note: str | None = None


@dataclasses.dataclass
class Plain:
    """A dataclass with a nested dict and an empty field."""

    a: Tensor
    inner: object
    absent: int | None = None


Pair = namedtuple("Pair", ["left", "right"])
A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])


@pytest.fixture
def td():
    """A batch of two with a nested tree, one string for each row, and names."""
    return TensorDict({"a": A, "n": {"b": B, "s": ["p", "qq"]}}, [2], names=["rows"])


# -- from -------------------------------------------------------------------------------------------------------


NESTED = Pair(A, {"b": B})
AS_TREE = TensorDict({"a": A, "inner": {"left": A, "right": {"b": B}}}, [2])
SOURCES = {
    "any": (lambda: TensorDict.from_any(Plain(A, NESTED), batch_size=[2]), AS_TREE),
    "dataclass": (
        lambda: TensorDict.from_dataclass(Plain(A, NESTED), auto_batch_size=True, batch_dims=1),
        AS_TREE,
    ),
    "namedtuple": (lambda: TensorDict.from_namedtuple(NESTED, batch_size=[2]), AS_TREE["inner"]),
    "tree": (lambda: TensorDict.from_any(AS_TREE), AS_TREE),
}


@pytest.mark.parametrize(("make", "expected"), SOURCES.values(), ids=SOURCES)
def test_from_any(make, expected):
    """Dicts, dataclasses and tuples become trees at any depth, and trees stay."""
    assert_trees_equal(make(), expected)


def test_from_any_keeps_instances():
    """A typed tree stays of its class."""
    assert type(TensorDict.from_any({"p": Point(A, batch_size=[2])})["p"]) is Point


def test_tuples_become_trees():
    """An element of a tuple has its place as key, at any depth."""
    found = TensorDict.from_any((A, {"x": (1, {"y": 2})}, "text"))

    assert found["0"] is A
    assert found["1", "x", "1", "y"] == 2
    assert found["2"] == "text"
    assert TensorDict.from_dataclass(Plain(A, (A, A)))["inner", "1"] is A


def test_sizes_and_other_objects_stay():
    """A size is a value like a list, and an object that is iterated stays itself."""
    loader = DataLoader([1], batch_size=1)
    found = TensorDict.from_any((A, {"size": Size([3, 4]), "l": [1, 2], "d": loader}))

    assert found["1", "size"].tolist() == [3, 4]
    assert found["1", "d"] is loader


def test_from_dict():
    """The options give the batch size, device and names."""
    found = TensorDict.from_dict({("n", "b"): B}, batch_size=[2], device="cpu", names=["r"])

    assert found.batch_size == (2,)
    assert found.device == torch.device("cpu")
    assert found.names == ["r"]
    assert TensorDict.from_dict({"a": A}).batch_size == ()
    assert TensorDict.from_dict({"a": A}, device="cpu", auto_batch_size=True).device == torch.device("cpu")


SOURCE = {"a": torch.zeros(2, 3, 4), "n": {"b": torch.zeros(2, 3, 5), "s": "x", "e": {}}}


def test_auto_batch_size():
    """Every tree gets the longest batch size that its entries share."""
    found = TensorDict.from_dict({**SOURCE, "w": ["p", "q"]}, auto_batch_size=True)

    assert found.batch_size == (2,)
    assert found["n"].batch_size == (2, 3, 5)
    assert found["n", "e"].batch_size == found["n"]._get("s").shape == (2, 3, 5)


def test_auto_batch_size_with_names():
    """Names are those of the batch size that is found."""
    found = TensorDict.from_dict(SOURCE, auto_batch_size=True, names=["r", "c"])

    assert found.batch_size == (2, 3)
    assert found.names == ["r", "c"]


def test_auto_batch_size_without_tensors():
    """Entries without a size share none."""
    bare = TensorDict.from_dict({"s": "x", "e": {}}, auto_batch_size=True)

    assert bare.batch_size == ()
    assert bare["e"].batch_size == ()


def test_batch_dims():
    """A number of batch dimensions bounds the batch size."""
    assert TensorDict.from_dict({"a": A}, batch_dims=1).batch_size == (2,)


# -- to ---------------------------------------------------------------------------------------------------------


def test_to_numpy(td):
    """Leaves become arrays, those that require gradients too, and share memory."""
    found = assert_pure(lambda t: t.apply(lambda x: x.double().requires_grad_()).numpy(), td)

    assert found["a"].tolist() == A.tolist()
    assert isinstance(found["n"]["b"], np.ndarray)
    assert found["n"]["s"] == ["p", "qq"]
    assert np.shares_memory(td.numpy()["a"], td["a"].numpy())


def test_to_lists(td):
    """Each row is a dict of its values; a class with a `tolist` of its own keeps its form inside a tree."""

    class Coded(TensorClass):
        x: Tensor

        def tolist(self, *, convert_tensors=False):
            return f"code {self.x.item() if convert_tensors else self.x}"

    found = td.tolist(convert_tensors=True)
    ragged = lazy_stack([TensorDict({"x": torch.arange(n)}, [n]) for n in (1, 2)])
    coded = TensorDict({"c": Coded(torch.tensor(3)), "p": Point(torch.tensor(2))})

    assert found == [{"a": [0, 1, 2], "n": {"b": 1, "s": "p"}}, {"a": [3, 4, 5], "n": {"b": 2, "s": "qq"}}]
    assert torch.equal(td.tolist()[1]["a"], A[1])
    assert TensorDict({"r": ragged}, [2]).tolist(convert_tensors=True) == [
        {"r": [{"x": 0}]}, {"r": [{"x": 0}, {"x": 1}]},
    ]  # fmt: skip
    assert coded.tolist(convert_tensors=True) == {"c": "code 3", "p": {"x": 2}}


def test_to_namedtuple(td):
    """Nested trees become named tuples, the outer one of the given class."""
    found = td.to_namedtuple()

    assert found.n.b is td["n", "b"]
    assert found.n.s == ["p", "qq"]
    assert isinstance(td.select("a").rename_key("a", "left").set("right", B).to_namedtuple(Pair), Pair)


def test_to_tensordict(td):
    """Typed trees inside become open ones, leaves are copies, and names and kinds are kept."""
    leaf = torch.ones(2)
    tree = TensorDict({"p": Point(A, batch_size=[2]), "a": leaf, "n": {"b": leaf}}, [2], names=["r"])
    found = tree.set("k", B, kind=Kind.BUFFER).to_tensordict()

    assert type(found["p"]) is TensorDict
    assert found["p", "x"].data_ptr() != A.data_ptr()
    assert found.names == ["r"]
    assert found.kind("k") is Kind.BUFFER
    assert_trees_equal(td.to_tensordict(), td)


# -- state dicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flatten", [True, False])
def test_state_dict_there_and_back(flatten):
    """Every value goes to its leaf, a leaf keeps its kind, and the tree stays as it was."""
    module, other = TinyMLP(), TinyMLP()
    tree = TensorDict.from_module(module)
    state = TensorDict.from_module(other).state_dict(flatten=flatten)
    found = assert_pure(lambda t: t.load_state_dict(state), tree)

    expected = other.state_dict()
    torch.testing.assert_close(
        {name: found[tuple(name.split("."))] for name in expected}, dict(expected), rtol=0, atol=0
    )
    assert found.kind(("hidden", "weight")) is Kind.PARAMETER


def test_tied_leaves_stay_tied():
    """The paths of a tied leaf get one tensor from a state dict with equal values."""
    tree, state = TensorDict.from_module(TiedLM()), TiedLM().state_dict()
    found = tree.load_state_dict({key: value.clone() for key, value in state.items()})

    assert found["emb", "weight"] is found["out", "weight"]
    assert torch.equal(found["emb", "weight"], state["emb.weight"])


def test_values_are_cast_or_assigned():
    """Values are cast to the leaf unless assigned, and non-tensor data are not part of a state dict."""
    tree = TensorDict({"a": A, "s": "x"}, [2])

    assert tree.load_state_dict({"a": A.double()})["a"].dtype is torch.float32
    assert tree.load_state_dict({"a": A.double()}, assign=True)["a"].dtype is torch.float64
    assert tree.load_state_dict({"other": B}, strict=False)["a"] is tree["a"]
    assert tree.load_state_dict({"a": A}, from_flatten=True)["s"] == "x"


FP8 = torch.tensor([448.0, 1.0, -2.0]).to(torch.float8_e4m3fn)
INT8 = torch.tensor([127, 1, -2], dtype=torch.int8)
CODES = {
    "compressed-tensors": {"q.weight": FP8, "q.weight_scale": torch.ones(())},
    "DeepSeek": {"q.weight": FP8, "q.weight_scale_inv": torch.ones(())},
    "ComfyUI": {"q.weight": FP8, "q.scale_weight": torch.ones(())},
    "bitsandbytes": {"q.weight": INT8, "q.SCB": torch.ones(3)},
    "nested": {"q": {"weight": INT8, "weight_scale": torch.ones(3)}},
}


@pytest.mark.parametrize("state", CODES.values(), ids=CODES)
def test_codes_are_not_loaded_without_their_scale(state):
    """The names that strict=False leaves out are the scales."""
    tree = TensorDict({"q": {"weight": torch.zeros(3)}})

    with pytest.raises(tdf.UnsupportedError, match="'q.weight' has codes, .*numbers only together with their scale"):
        tree.load_state_dict(state, strict=False)


@pytest.mark.parametrize(
    "others",
    [{}, {"k.weight_scale": torch.ones(())}, {"q.bias": torch.ones(3)}],
    ids=["no scale", "of another layer", "a bias"],
)
def test_numbers_of_8_bits_are_cast(others):
    """As by torch: nothing says that they are codes."""
    tree = TensorDict({"q": {"weight": torch.zeros(3)}})

    found = tree.load_state_dict({"q.weight": FP8, **others}, strict=False)

    assert found["q", "weight"].tolist() == [448.0, 1.0, -2.0]


def test_codes_are_kept_with_assign():
    """They are not cast."""
    tree = TensorDict({"q": {"weight": torch.zeros(3)}})

    found = tree.load_state_dict(CODES["DeepSeek"], strict=False, assign=True)

    assert found["q", "weight"].dtype is torch.float8_e4m3fn


# -- pandas -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(allow_nan=True, width=32), st.text()), max_size=5))
def test_pandas_round_trip(rows):
    """Values, dtypes, nested keys and rows come back from a data frame."""
    ints, floats, texts = ([row[i] for row in rows] for i in range(3))
    leaves = {"i": torch.tensor(ints, dtype=torch.int64), "n": {"f": torch.tensor(floats, dtype=torch.float32)}}
    strings = tdf.NonTensorStack(*texts) if texts else torch.zeros(0)
    tree = TensorDict({**leaves, ("n", "s"): strings}, [len(rows)])
    frame = tree.to_pandas(separator="/")

    assert list(frame.columns) == ["i", "n/f", "n/s"]
    assert_trees_equal(TensorDict.from_pandas(frame, separator="/"), tree)


@pytest.fixture
def columns():
    """A frame with columns of numbers, dates, lists, categories and numbers that may be missing."""
    frame = pd.DataFrame({"i": np.arange(2), "d": pd.to_datetime(["2020-01-01", "2021-01-01"]), "l": [[1, 2], [3]]})
    frame["c"], frame["b"] = pd.Categorical(["u", "v"]), pd.array([True, None], dtype="boolean")
    frame["f"] = pd.array([1.5, None], dtype="Float64")
    return frame


def test_numbers_of_a_frame(columns):
    """Numbers become tensors of their own memory, and a missing one is NaN."""
    tree = TensorDict.from_pandas(columns)
    tree["i"].add_(1)

    assert columns["i"].tolist() == [0, 1]
    assert str(tree["f"].tolist()) == "[1.5, nan]"


def test_values_of_a_frame(columns):
    """Dates, categories, lists and bools that may be missing stay values."""
    tree = TensorDict.from_pandas(columns)

    assert {key: tree[key] for key in ("d", "c", "l", "b")} == {
        "d": [pd.Timestamp("2020-01-01"), pd.Timestamp("2021-01-01")],
        "c": ["u", "v"],
        "l": [[1, 2], [3]],
        "b": [True, pd.NA],
    }


def test_options_of_from_pandas(columns):
    """Columns are cast, and have the batch size that is given."""
    assert TensorDict.from_pandas(columns[["i"]], batch_size=[], device="cpu").batch_size == Size([])
    assert TensorDict.from_pandas(columns[["i"]], dtype=torch.float32)["i"].dtype is torch.float32


def test_bools_that_lack_values_are_cast():
    """A dtype is for columns of bools as well."""
    frame = pd.DataFrame({"b": pd.array([True, None, False], dtype="boolean")})

    assert str(TensorDict.from_pandas(frame, dtype=torch.float64)["b"].tolist()) == "[1.0, nan, 0.0]"


def test_typed_trees_and_empty_trees_as_frames():
    """A typed tree, one value for all rows, a leaf with a history and a tree without leaves have frames."""
    frame = Point(torch.ones(2, requires_grad=True), "all", batch_size=[2]).to_pandas()

    assert frame["note"].tolist() == ["all", "all"]
    assert frame["x"].tolist() == [1.0, 1.0]
    assert len(TensorDict({}, [3]).to_pandas()) == 3


# -- data sets --------------------------------------------------------------------------------------------------


def plain(n):
    """Rows with a nested tree, one string for each and one for all."""
    names = [f"r{i}" for i in range(n)]
    return TensorDict({"x": torch.arange(n), "n": {"y": torch.rand(n, 2)}, "s": names, "t": "all"}, [n])


SETS = {
    "TensorDict": plain(10),
    "TensorClass": Point(torch.rand(10, 2), "all", batch_size=[10]),
    "LazyStack": lazy_stack([TensorDict({"x": torch.arange(n)}, [n]) for n in range(1, 11)]),
    "two dimensions": TensorDict({"x": torch.rand(10, 3, 2)}, [10, 3], names=["row", None]),
}


def identity(batch):
    """The collate function of tensordict's users; a lambda cannot be pickled."""
    return batch


@pytest.mark.parametrize("collate", [None, tdf.collate, identity])
@pytest.mark.parametrize("name", SETS)
def test_a_tree_is_a_data_set(name, collate):
    """A batch is the rows of the tree."""
    data = SETS[name]

    assert_trees_equal(list(DataLoader(data, batch_size=4, collate_fn=collate)), [data[:4], data[4:8], data[8:]])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("name", SETS)
def test_workers(name, method):
    """Batches come from workers however they start."""
    data = SETS[name]
    batches = list(DataLoader(data, batch_size=5, num_workers=1, multiprocessing_context=method))

    assert_trees_equal(batches[0], data[:5])
    assert_trees_equal(batches[1], data[5:])


class Rows(Dataset):
    """Rows with a tree among other things."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return SETS["TensorDict"][i], {"weight": float(i), "more": [SETS["TensorClass"][i]]}, "text"


@pytest.mark.parametrize("collate", [None, tdf.collate])
@pytest.mark.parametrize("workers", [0, 2])
def test_trees_among_other_things(workers, collate):
    """Trees in rows are stacked, and everything else is as torch collates it."""
    (first, second) = DataLoader(Rows(), batch_size=2, num_workers=workers, collate_fn=collate)
    tree, other, texts = first

    # Rows with the same value are put together as rows with values of their own, as `torch.stack` does.
    assert_trees_equal(tree, SETS["TensorDict"][:2].set("t", ["all", "all"]))
    assert torch.equal(other["weight"], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert type(other["more"][0]) is Point
    assert torch.equal(other["more"][0].x, SETS["TensorClass"].x[:2])
    assert list(texts) == ["text", "text"]
    assert second[0]["x"].tolist() == [2, 3]


def test_torchs_table_has_one_entry_more():
    """Rows without trees come out as from `default_collate`, which has an entry for trees alone."""
    rows = [(torch.ones(2), 1, "a", {"k": [torch.zeros(1)]}), (torch.zeros(2), 3, "b", {"k": [torch.ones(1)]})]
    table = torch.utils.data._utils.collate.default_collate_fn_map
    tree = TensorDict({"x": torch.ones(2)})

    assert str(tdf.collate(rows)) == str(default_collate(rows))
    assert [cls.__name__ for cls, fn in table.items() if fn.__module__.startswith("tdfunc")] == ["TensorCollection"]
    assert tdf.collate(tree) is tree


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("indices", [(1, 2), range(3), [3, 1], np.array([2, 0]), torch.tensor([1, 2])], ids=repr)
def test_positions_of_any_kind(name, indices):
    """A batch sampler may yield tuples, ranges, lists, arrays or tensors."""
    data = SETS[name]

    (batch,) = DataLoader(data, batch_sampler=[indices], collate_fn=tdf.collate)

    assert_trees_equal(batch, data[torch.tensor([int(i) for i in indices])])


def test_empty_batches_and_positions_in_two_dimensions():
    """No positions give no rows, and tuples of positions index several batch dimensions."""
    data = SETS["two dimensions"]

    (empty,) = DataLoader(data, batch_sampler=[[]], collate_fn=tdf.collate)
    (batch,) = DataLoader(data, batch_sampler=[[(0, 1), (2, 2), (9, 0)]], collate_fn=tdf.collate)

    assert_trees_equal(empty, data[:0])
    assert torch.equal(batch["x"], torch.stack([data["x"][0, 1], data["x"][2, 2], data["x"][9, 0]]))


# -- loggers ----------------------------------------------------------------------------------------------------

NUMBERS = st.recursive(
    st.floats(width=32) | st.integers(-(2**53), 2**53) | st.booleans() | st.lists(st.floats(width=32), min_size=1),
    lambda nodes: st.dictionaries(st.sampled_from("abc"), nodes, max_size=3),
    max_leaves=6,
).filter(lambda node: isinstance(node, dict))


def walk(node, path=()):
    """The numbers of nested dicts and lists by the joined path, in Python."""
    if isinstance(node, (dict, list)):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from walk(item, (*path, str(key)))
    else:
        yield "/".join(path), float(node)


@given(NUMBERS)
def test_scalars_are_the_numbers_by_path(nodes):
    """All numbers of a tree as Python floats, bit for bit, in the order of the tree."""
    found = tdf.scalars(TensorDict(nodes))

    assert list(map(repr, found.items())) == list(map(repr, walk(nodes)))
    assert all(type(value) is float for value in found.values())


def test_scalars_of_members_that_train():
    """Leaves that require grad, bfloat16, ties and typed trees."""
    assert tdf.scalars(TensorDict({"a": torch.ones((), requires_grad=True)})) == {"a": 1.0}
    assert tdf.scalars(TensorDict({"a": torch.tensor([0.5, 2], dtype=torch.bfloat16)}, [2])) == {"a/0": 0.5, "a/1": 2.0}
    assert tdf.scalars(Point(torch.tensor(3), batch_size=[])) == {"x": 3.0}
    leaf = torch.tensor(2.0)
    assert tdf.scalars(TensorDict({"a": leaf, "b": leaf})) == {"a": 2.0, "b": 2.0}


# -- tensordict -------------------------------------------------------------------------------------------------


def theirs(tree):
    """The same tree in tensordict."""
    nodes = {key: theirs(node) if isinstance(node, TensorDict) else tree[key] for key, node in tree._data.items()}
    return Incumbent(nodes, batch_size=tree.batch_size)


@given(trees(size=(2,), ties=False))
def test_trees_of_tensordict(tree):
    """A tree of tensordict's becomes one of ours with its batch sizes and names, wherever a dict is taken."""
    given = theirs(tree)
    made = {
        "constructor": TensorDict(given),
        "from_any": TensorDict.from_any(given),
        "entry": TensorDict({"k": given}, [2])["k"],
        "set": TensorDict({}, [2]).set("k", given)["k"],
        "update": TensorDict({}, [2]).update({"k": given})["k"],
    }

    assert_trees_equal(made, dict.fromkeys(made, tree.with_names(None)))
    assert [path for path in tree.paths() if made["constructor"][path] is not tree[path]] == []


def test_metadata_of_tensordict():
    """Longer batch sizes inside and names of tensordict's are taken; a device may be given."""
    inner = Incumbent({"x": torch.ones(3, 4, 2)}, [3, 4])
    tree = TensorDict(Incumbent({"n": inner}, [3]), device="meta")

    assert tree["n"].batch_size == (3, 4)
    assert tree.device.type == "meta"
    assert TensorDict(Incumbent({"a": torch.ones(3)}, [3], names=["row"])).names == ["row"]


def test_values_of_tensordict():
    """Non-tensor data of tensordict's, for the batch and for each row, is taken."""
    tree = TensorDict(Incumbent({"s": "word", "r": IncumbentNonTensor[1]("p", "q", "r")}, [3]))

    assert tree["s"] == "word"
    assert tree["r"] == ["p", "q", "r"]
    assert tree[2]["r"] == "r"


def test_tensorclasses_of_tensordict():
    """An instance of tensordict's becomes an open tree of its fields, without the empty ones."""
    typed = incumbent_class(type("Typed", (), {"__annotations__": {"x": Tensor, "note": str, "absent": Tensor}}))
    made = TensorDict(typed(x=torch.ones(2), note="n", absent=None, batch_size=[2]))

    assert list(made.keys()) == ["x", "note"]
    assert made.batch_size == (2,)
    assert made["note"] == "n"


def test_lazy_stacks_of_tensordict():
    """A lazy stack of tensordict's becomes one of ours."""
    rows = [Incumbent({"x": torch.ones(n)}, [n]) for n in (1, 2)]
    lazy = TensorDict({"l": tensordict.lazy_stack(rows, 0)})["l"]

    assert isinstance(lazy, tdf.LazyStack)
    assert lazy.batch_size == (2, -1)


def test_rows_are_set_to_trees_of_tensordict():
    """A tree of tensordict's is a value of `at`."""
    made = TensorDict({"x": torch.zeros(2, 2)}, [2]).at[0].set(Incumbent({"x": torch.ones(2)}))

    assert made["x"].tolist() == [[1, 1], [0, 0]]
