"""The promises of the documents that tdfunc was written from: trees, folders, maps and parameters.

One test for each block or claim, in the immutable spelling. Typed trees, language models, modules on trees
and processes that send trees to each other have their own tests.
"""

import inspect
from concurrent.futures import Future

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tdfunc as tdf
from tdfunc import TensorDict


def two_keys(**options):
    """The tree that most examples begin with."""
    leaves = {"key 1": torch.ones(3, 4, 5), "key 2": torch.zeros(3, 4, 5, dtype=torch.bool)}
    return TensorDict(leaves, batch_size=[3, 4], **options)


# -- a tree -----------------------------------------------------------------------------------------------------


def test_a_tree_is_a_batch_size_and_keys():
    """A tree has a batch size, and refuses a tensor that does not begin with it."""
    data = two_keys()

    assert data.batch_size == data.shape == torch.Size([3, 4])
    assert data["key 2"].dtype == torch.bool
    with pytest.raises(tdf.BatchSizeError, match=r"(?s)key 3.*\[3, 4\].*\[4, 3\]"):
        data.set("key 3", torch.zeros(4, 3))


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_tree_on_a_device_sends_there_what_is_set(non_blocking):
    """A value that is set in a tree on a device moves there."""
    data = two_keys(device="meta")

    assert data.set("key 3", torch.randn(3, 4), False, non_blocking)["key 3"].device.type == "meta"


def test_a_tree_on_a_device_sends_there_what_is_not_a_tensor():
    """The leaves of a tree that is set move; text stays what it is."""
    data = two_keys(device="meta")

    assert data.set("n", TensorDict({"x": torch.zeros(3, 4)}), non_blocking=True)["n", "x"].device.type == "meta"
    assert data.set("text", "a", non_blocking=True)["text"] == "a"


def test_nested_keys_in_any_tuples():
    """A nested tuple is the flat key, in reading, writing and `in`."""
    data = two_keys().set(("nested", "key"), torch.zeros(3, 4))
    data = data.set(("nested", ("supernested", ("key",))), torch.zeros(3, 4))

    assert (data["nested", "supernested", "key"] == 0).all()
    assert (("nested",), "supernested", (("key",),)) in data.keys(include_nested=True)
    with pytest.raises(tdf.BatchSizeError, match="nested"):
        data.set(("nested", "short"), torch.zeros(3))


def test_non_tensor_data():
    """A string comes back as it was put in."""
    data = TensorDict({"a-tensor": torch.randn(1, 2)}, batch_size=[1, 2]).set("non-tensor", "a string!")

    assert data["non-tensor"] == "a string!"


def test_indexing():
    """An index takes rows of all leaves, and no features."""
    sub = two_keys()[..., :2]

    assert sub.shape == torch.Size([3, 2])
    assert sub["key 1"].shape == torch.Size([3, 2, 5])


def test_stack_and_cat():
    """torch.stack and torch.cat of trees join every leaf along one batch dimension."""
    trees = [two_keys() for _ in range(2)]
    stacked, joined = torch.stack(trees, 1), torch.cat(trees, 0)

    assert stacked.shape == torch.Size([3, 2, 4])
    assert stacked["key 1"].shape == torch.Size([3, 2, 4, 5])
    assert joined.shape == torch.Size([6, 4])
    assert joined["key 1"].shape == torch.Size([6, 4, 5])


@pytest.mark.parametrize(
    ("reshape", "shape"),
    [
        (lambda td: td.view(-1), [12]),
        (lambda td: td.reshape(-1), [12]),
        (lambda td: td.unsqueeze(-1), [3, 4, 1]),
        (lambda td: td.unsqueeze(-1).squeeze(-1), [3, 4]),
        (lambda td: td.expand(2, 3, 4), [2, 3, 4]),
        (lambda td: td.split(2, 0)[0], [2, 4]),
        (lambda td: td.unbind(0)[0], [4]),
        (lambda td: td.permute(1, 0), [4, 3]),
        (lambda td: td.clone(recurse=True), [3, 4]),
        (lambda td: td.to("meta"), [3, 4]),
        (lambda td: td.to(torch.float64), [3, 4]),
    ],
)
def test_shape_operations(reshape, shape):
    """A tree has the shape that a tensor of its batch size has, and keeps feature dimensions."""
    result = reshape(two_keys())

    assert list(result.shape) == shape
    assert result["key 1"].shape == (*shape, 5)


def test_shared_memory_and_updates():
    """A tree goes to shared memory; an update leaves the tree that it is called on alone."""
    data = two_keys()
    shared = data.clone().share_memory_()
    updated = data.update({"key 1": torch.zeros(3, 4, 5)})
    written = data.clone()
    written.update_({"key 1": torch.zeros(3, 4, 5)})

    assert shared.is_shared()
    assert not data.is_shared()
    assert (data["key 1"] == 1).all()
    assert (updated == written).all()


def test_apply():
    """A function of tensors maps over a tree, and drops the keys for which it returns None."""
    uniform = two_keys().select("key 1").apply(torch.rand_like)
    data = TensorDict({"a": torch.tensor(1.0), "b": torch.tensor(1)}, [])
    floats = data.apply(lambda x: x if x.dtype == torch.float else None)

    assert 0 < uniform["key 1"].mean() < 1
    assert "a" in floats
    assert "b" not in floats


def test_lazy_preallocation():
    """Filling an empty tree row by row, in any order, gives the stack of the rows."""

    def foo():
        return TensorDict({"a": torch.randn(3), "b": TensorDict({"c": torch.zeros(2)}, batch_size=[])}, batch_size=[])

    rows = [foo() for _ in range(10)]
    data = TensorDict({}, batch_size=[10])
    for i in torch.randperm(10).tolist():
        data = data.at[i].set_(rows[i])

    assert (data == torch.stack(rows)).all()
    assert data["b"].batch_size == (10,)


def test_nesting():
    """A nested tree may have a longer batch size, and keeps it in a flat tree; another one is refused."""
    inner = TensorDict({"sub-key": torch.randn(3, 4, 5, 6)}, batch_size=[3, 4, 5])
    data = TensorDict({"key 1": torch.ones(3, 4, 5), "key 2": inner}, batch_size=[3, 4])
    flat = data.flatten_keys(separator=".")

    assert set(flat.keys()) == {"key 1", "key 2.sub-key"}
    assert data["key 2", "sub-key"] is inner["sub-key"]
    assert (flat.unflatten_keys(".") == data).all()
    with pytest.raises(tdf.BatchSizeError, match="key 2"):
        data.set("key 2", TensorDict({"x": torch.zeros(3)}, [3]).unsqueeze(0))


# -- parameters -------------------------------------------------------------------------------------------------


def test_parameters_are_a_tree_and_stack_to_an_ensemble():
    """A state dict and a module give one tree, a block runs its weights, vmap over a stack runs each member's."""
    layers = nn.Linear(3, 4), nn.Linear(4, 4)
    model = nn.Sequential(*layers)
    params = TensorDict.from_module(model)
    parts = [TensorDict(layer.state_dict(), []).unflatten_keys(".") for layer in layers]
    x = torch.randn(10, 3)

    assert (params == TensorDict({"0": parts[0], "1": parts[1]}, [])).all()

    with (2 * params).to_module(model):
        doubled = model(x)

    torch.testing.assert_close(doubled, (x @ (2 * layers[0].weight.T) + 2 * layers[0].bias) @ (2 * layers[1].weight.T)
                               + 2 * layers[1].bias)  # fmt: skip

    def call(x, params):
        with params.to_module(model):
            return model(x)

    y = torch.vmap(call, (None, 0))(x, torch.stack([params, 2 * params], 0))

    assert y.shape == (2, 10, 4)
    torch.testing.assert_close(y[0], model(x))
    torch.testing.assert_close(y[1], doubled)


def test_clone_of_parameters_is_independent():
    """A clone of the parameters does not change with the module's."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    old = TensorDict.from_module(net).clone(recurse=True)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)

    assert not (old == TensorDict.from_module(net)).any()


@pytest.fixture
def saved_linears(tmp_path):
    """A module of two linear layers, and the folder that its parameters are in."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    TensorDict.from_module(model).memmap(tmp_path / "saved", num_threads=16)
    return model, tmp_path / "saved"


def test_parameters_in_a_folder(saved_linears):
    """A module is filled from a folder."""
    model, folder = saved_linears
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))

    TensorDict.load_memmap(folder, num_threads=16).to_module(other)

    assert (TensorDict.from_module(other) == TensorDict.from_module(model)).all()


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: TensorDict.load_memmap(folder, num_threads=16)["0"],
        lambda folder: TensorDict.load_memmap(folder / "0", num_threads=16),
    ],
    ids=["part of the tree", "folder in the folder"],
)
def test_a_layers_parameters_in_a_folder(saved_linears, read):
    """A layer of a module is filled, and the others stay."""
    model, folder = saved_linears
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))

    read(folder).to_module(other[0])

    assert torch.equal(other[0].weight, model[0].weight)
    assert not torch.equal(other[1].weight, model[1].weight)


def test_a_training_loop():
    """A model that reads and writes trees, and a loss of a tree, train with torch's optimizer."""
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(16, 3)
    dataset = TensorDict({"x": x, "y": x.sum(1, keepdim=True)}, [16]).split(4)
    losses = []
    for data in dataset * 20:
        data = data.set("prediction", net(data["x"]))
        loss = nn.functional.mse_loss(data["prediction"], data["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < 0.1 * losses[0]


def test_compile_of_a_model_on_a_tree():
    """`torch.compile` makes one graph of a function that runs a module with the parameters of a tree."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    data = TensorDict({"x": torch.randn(5, 3)}, [5])

    def run(params, data):
        with params.to_module(model):
            return data.set("y", model(data["x"]))

    params = TensorDict.from_module(model).detach() * 2
    out = torch.compile(run, fullgraph=True, backend="eager")(params, data)

    assert out.batch_size == (5,)
    torch.testing.assert_close(out["y"], run(params, data)["y"])


@pytest.mark.parametrize(
    "record",
    [
        lambda model, data: make_fx(model)(data),
        lambda model, data: torch.compile(model, fullgraph=True, backend="eager"),
    ],
    ids=["fx", "compile"],
)
def test_modules_of_trees_under_fx_and_compile(record):
    """A sequence of modules that read and write trees is a graph of torch.fx, and of `torch.compile`."""
    model = read_and_write()
    data = TensorDict({"x": torch.randn(5, 3)}, [5])
    other = data * 2

    found = record(model, data)(other)

    assert found.batch_size == (5,)
    torch.testing.assert_close(found["y"], model(other)["y"])


def test_a_graph_of_modules_of_trees_has_their_operations():
    """The graph of torch.fx is of torch's own functions."""
    graph = make_fx(read_and_write())(TensorDict({"x": torch.randn(5, 3)}, [5]))

    assert any("tanh" in str(node.target) for node in graph.graph.nodes)


def read_and_write():
    """A sequence of two modules that read and write trees."""
    linear = tdf.nn.TensorDictModule(nn.Linear(3, 4), ["x"], ["h"])
    tanh = tdf.nn.TensorDictModule(torch.tanh, ["h"], ["y"])
    return tdf.nn.TensorDictSequential(linear, tanh)


# -- folders ----------------------------------------------------------------------------------------------------


def keys_tree():
    """The tree of the examples of folders."""
    return TensorDict.fromkeys(["a", "b", "c", ("nested", "e")], 0)


def test_load_memmap_gives_what_memmap_wrote(tmp_path):
    """A folder holds the values that were written, and a folder inside it opens alone."""
    td = keys_tree()
    td.memmap(tmp_path / "saved_td")

    assert (td == TensorDict.load_memmap(tmp_path / "saved_td")).all()
    assert TensorDict.load_memmap(tmp_path / "saved_td" / "nested")["e"] == 0


def test_load_memmap_without_reading(tmp_path):
    """A folder loads on meta or as fake tensors without opening its files."""
    td = TensorDict({"a": torch.zeros(()), "b": {"c": torch.zeros(())}})
    td.save(tmp_path / "td")
    for file in (tmp_path / "td").rglob("*.memmap"):
        file.write_bytes(b"\xff" * 4)

    meta = TensorDict.load_memmap(tmp_path / "td", device="meta")
    with FakeTensorMode():
        fake = TensorDict.load_memmap(tmp_path / "td")

    assert meta.device == meta["b", "c"].device == torch.device("meta")
    assert "a: FakeTensor(shape=torch.Size([]), device=cpu, dtype=torch.float32, is_shared=False)" in repr(fake)
    assert repr(meta) == (
        "TensorDict(\n    fields={\n"
        "        a: Tensor(shape=torch.Size([]), device=meta, dtype=torch.float32, is_shared=False),\n"
        "        b: TensorDict(\n            fields={\n"
        "                c: Tensor(shape=torch.Size([]), device=meta, dtype=torch.float32, is_shared=False)},\n"
        "            batch_size=torch.Size([]),\n            device=meta,\n            is_shared=False)},\n"
        "    batch_size=torch.Size([]),\n    device=meta,\n    is_shared=False)"
    )


@pytest.mark.parametrize("write", ["memmap", "save", "dumps", "memmap_"])
def test_the_ways_to_write_a_folder_are_one(write, tmp_path):
    """`save`, `dumps` and `memmap_` write as `memmap` does, with its arguments."""
    td = keys_tree()
    written = getattr(td, write)(tmp_path / "td", False, num_threads=2, share_non_tensor=False, existsok=True)

    assert written.is_memmap()
    assert (TensorDict.load_memmap(tmp_path / "td") == keys_tree()).all()
    with pytest.raises(FileExistsError, match="td"):
        getattr(keys_tree(), write)(tmp_path / "td", existsok=False)


@pytest.mark.parametrize("write", ["memmap", "save", "dumps"])
def test_without_a_folder_the_files_have_no_name(write, tmp_path, monkeypatch):
    """`save()`, `dumps()` and `memmap()` put the tree on files that are deleted with it."""
    monkeypatch.chdir(tmp_path)

    written = getattr(keys_tree(), write)()

    assert written.is_memmap()
    assert (written == keys_tree()).all()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", ["save", "dumps"])
def test_the_arguments_are_those_of_the_seed(write):
    """`save` and `dumps` have the arguments of the seed by name, with its defaults."""
    parameters = inspect.signature(getattr(TensorDict, write)).parameters

    assert {name: parameters[name].default for name in list(parameters)[1:6]} == {
        "prefix": None, "copy_existing": False, "num_threads": 0, "return_early": False, "share_non_tensor": False,
    }  # fmt: skip


@pytest.mark.parametrize("write", ["memmap", "save", "dumps", "memmap_", "memmap_like"])
def test_return_early_gives_a_future(write, tmp_path):
    """A write in the background returns a future of the tree."""
    future = getattr(keys_tree(), write)(tmp_path / "td", num_threads=2, return_early=True)

    assert isinstance(future, Future)
    assert future.result(60).is_memmap()
    assert (tmp_path / "td" / "nested" / "e.memmap").exists()


def test_a_leaf_on_another_file_is_not_copied_unasked(tmp_path):
    """A tree that is on disk is written to another place only with `copy_existing=True`."""
    on_disk, nameless = keys_tree().memmap(tmp_path / "one"), keys_tree().memmap()

    with pytest.raises(FileExistsError, match=r"(?s)'a'.*two/a\.memmap.*one/a\.memmap.*copy_existing=True"):
        on_disk.memmap(tmp_path / "two")
    with pytest.raises(FileExistsError, match=r"(?s)'a'.*two/a\.memmap.*a file without a name.*copy_existing=True"):
        nameless.memmap(tmp_path / "two")
    assert not (tmp_path / "two").exists()
    assert on_disk.memmap(tmp_path / "two", copy_existing=True).is_memmap()
    assert (TensorDict.load_memmap(tmp_path / "two") == keys_tree()).all()


def test_sharing_of_non_tensor_data_is_refused(tmp_path):
    """`share_non_tensor=True` is refused: values do not change."""
    with pytest.raises(ValueError, match=r"(?s)share_non_tensor=False.*True.*does not change"):
        keys_tree().memmap(tmp_path / "td", share_non_tensor=True)


def test_memmap_like_of_an_expanded_tree(tmp_path):
    """Buffers of a million rows are made from one, and read as zeros until they are filled."""
    row = TensorDict({"a": torch.ones((3, 64, 64), dtype=torch.uint8), "b": torch.ones(1, dtype=torch.int64)})
    buffer = row.expand(1_000_000).memmap_like(tmp_path / "dataset", sparse_ok=True)
    buffer.at[999_999].set_(row)

    assert buffer["a"].shape == (1_000_000, 3, 64, 64)
    assert buffer["b"][[0, 999_999]].tolist() == [[0], [1]]


def test_a_dataset_on_disk(tmp_path):
    """One index reads rows from all over a data set on disk."""
    data = TensorDict(
        {"images": torch.zeros((128, 128, 3), dtype=torch.uint8), "labels": torch.zeros((), dtype=torch.int)}, []
    )
    data = data.expand(1_000_000).memmap_like(tmp_path / "dataset", sparse_ok=True)
    data.at[10_000].set_(data[0].clone().set("labels", torch.tensor(7, dtype=torch.int)))
    rows = data[torch.tensor([1, 10_000, 500_000])]

    assert rows["images"].shape == (3, 128, 128, 3)
    assert rows["labels"].tolist() == [0, 7, 0]


def test_memmap_refresh(tmp_path):
    """`memmap_refresh_` opens the folder that was written in place of the tree's own."""
    keys_tree().memmap(tmp_path / "td")
    seen = TensorDict.load_memmap(tmp_path / "td")
    (keys_tree() + 1).memmap(tmp_path / "td")

    assert seen["a"] == 0
    assert seen.memmap_refresh_()["a"] == 1
    with pytest.raises(tdf.UnsupportedError, match="'a' is on no file"):
        keys_tree().memmap_refresh_()


def test_load_takes_what_load_memmap_takes(tmp_path):
    """`load` of a folder takes a device by position, `out`, `non_blocking` and `num_threads`."""
    keys_tree().memmap(tmp_path / "td")
    out = keys_tree() + 1

    assert TensorDict.load(tmp_path / "td", "meta")["a"].is_meta
    assert TensorDict.load(tmp_path / "td", out=out) is out
    assert (out == keys_tree()).all()
    assert (TensorDict.load(tmp_path / "td", "cpu", non_blocking=True, num_threads=2) == keys_tree()).all()
    assert (TensorDict.load(tmp_path / "td", "cpu", True) == keys_tree()).all()


def test_options_of_folders_need_a_folder(tmp_path):
    """An option that only a folder of mapped files has is refused for a safetensors file."""
    tdf.save(keys_tree(), tmp_path / "td.safetensors")

    with pytest.raises(NotADirectoryError, match=r"td\.safetensors"):
        TensorDict.load(tmp_path / "td.safetensors", num_threads=2)


def test_load_into_a_tree(tmp_path):
    """`load_` and `load_memmap_` fill the leaves that are there."""
    (keys_tree() + 1).memmap(tmp_path / "td")
    one, two = keys_tree(), keys_tree()

    assert one.load_(tmp_path / "td") is one
    assert two.load_memmap_(tmp_path / "td") is two
    assert one["nested", "e"] == two["a"] == 1


# -- map --------------------------------------------------------------------------------------------------------


def process_data(data):
    """Flip the image and group the label of a row."""
    images, labels = data["images"].flip(-2), data["labels"] // 10
    return data.update({"images": images, "labels": labels})


@pytest.mark.slow
def test_map_over_processes(terminal):
    """Four workers map rows one at a time, in order, with a progress bar when it is asked for."""
    data = TensorDict({"images": torch.rand(12, 4, 3), "labels": torch.arange(12)}, [12])
    done = data.map(process_data, num_workers=4, chunksize=0, pbar=True)

    assert torch.equal(done["images"], data["images"].flip(-2))
    assert torch.equal(done["labels"], data["labels"] // 10)
    assert "12/12" in terminal.readouterr().err


def preprocess(data):
    """The function of the example: it writes to its rows and returns nothing."""
    images = data.get("images").flip(-2).clone()
    labels = data.get("labels") // 10
    data.set_("images", images)
    data.set_("labels", labels)


@pytest.mark.slow
def test_map_that_writes(tmp_path):
    """A function that writes in place and returns nothing changes the files of a tree that is on disk."""
    source = TensorDict({"images": torch.rand(6, 4, 3), "labels": torch.arange(6) * 10}, [6])
    data = source.memmap(tmp_path / "dataset")
    done = data.map(preprocess, num_workers=2, chunksize=0)

    assert done is None
    assert torch.equal(data["images"], source["images"].flip(-2))
    assert TensorDict.load_memmap(tmp_path / "dataset")["labels"].tolist() == list(range(6))
