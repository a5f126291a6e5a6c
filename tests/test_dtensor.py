"""Leaves that are spread over processes: a tree does with them as torch does with each DTensor.

One process with a mesh of one suffices to see whether leaves stay DTensors, keep their placements and are not mixed
with plain tensors.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc import TensorDict, UnsupportedError


@pytest.fixture(scope="module")
def mesh(process_group):
    """A mesh of this process alone."""
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def td(mesh):
    """A sharded and a replicated leaf."""
    x = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    y = distribute_tensor(torch.arange(3.0), mesh, [Replicate()])
    return TensorDict({"x": x, "n": {"y": y}}, [3])


def whole(tree):
    """The tree of plain tensors."""
    assert all(type(leaf) is DTensor for leaf in tree.leaves())
    return tree.apply(lambda leaf: leaf.full_tensor())


SAME = {
    "add": lambda td: td + 1,
    "add a tree": lambda td: td + td * 2,
    "exp": lambda td: td.exp(),
    "apply": lambda td: td.apply(lambda x: x * 2),
    "tree_map": lambda td: pytree.tree_map(lambda x: x - 1, td),
    "sum": lambda td: td.sum(0),
    "stack": lambda td: torch.stack([td, td * 2]),
    "cat": lambda td: torch.cat([td, td]),
    "lazy stack": lambda td: tdf.lazy_stack([td, td]).dense(),
    "row": lambda td: td[0],
    "rows": lambda td: td[:2],
    "reshape": lambda td: td.reshape(3, 1),
    "set": lambda td: td.set("z", td["x"]),
    "partition": lambda td: tdf.combine(*tdf.partition(td, "x")),
    "at": lambda td: td.at[0].set(td[1]),
    "at rows": lambda td: td.at[1:].add(td[:2]),
    "at a number": lambda td: td.at[0].set(5).at["x"].set(0.5),
    "at in place": lambda td: td.clone().at[0].set_(td[1]),
    "update in place": lambda td: td.clone().update_(td * 2),
    "dtype": lambda td: td.to(torch.float64),
    "zeros_like": torch.zeros_like,
    "clone": lambda td: td.clone().detach(),
    "vmap": lambda td: torch.vmap(lambda row: row + 1)(td),
    "map": lambda td: td.map(lambda chunk: chunk + 1, num_workers=0),
    "state dict": lambda td: td.load_state_dict(td.state_dict()),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "deepcopy": copy.deepcopy,
    "collate": lambda td: tdf.collate([td[0], td[1]]),
}


@pytest.mark.parametrize("name", SAME)
def test_operations(td, name):
    """Leaves stay DTensors, with the values that a tree of plain tensors has."""
    result, expected = SAME[name](td), SAME[name](whole(td))

    assert result.batch_size == expected.batch_size
    tdf.assert_close(whole(result), expected)


@pytest.mark.parametrize(
    "run",
    [
        lambda td: td + 1,
        lambda td: td.apply(torch.exp),
        lambda td: td.clone(),
        lambda td: td.to(torch.float64),
        lambda td: td.set("z", td["x"]),
    ],
    ids=["add", "apply", "clone", "to", "set"],
)
def test_placements_stay(td, run):
    """An elementwise operation leaves a sharded leaf sharded."""
    tree = run(td)

    assert tree["x"].placements == (Shard(0),)
    assert tree["n", "y"].placements == (Replicate(),)


def test_gradients(td):
    """Gradients are DTensors."""
    params = td.apply(lambda x: x.detach().requires_grad_())
    (params * params)["x"].sum().full_tensor().backward()

    assert type(params.grad["x"]) is DTensor
    assert torch.equal(params.grad["x"].full_tensor(), 2 * td["x"].full_tensor())


def test_modules(mesh):
    """A distributed module runs as a pure function, in a block and after a step."""
    model = distribute_module(nn.Linear(2, 2), mesh)
    x = distribute_tensor(torch.ones(1, 2), mesh, [Replicate()])
    apply, params, _ = tdf.functional(model)
    opt = tdf.optim.adam(lr=0.1)
    new, _ = opt.update(params, params, opt.init(params))

    assert torch.equal(apply(params, x).full_tensor(), model(x).full_tensor())
    with (tdf.from_module(model) * 0).to_module(model):
        assert not model(x).full_tensor().any()
    torch.testing.assert_close(
        new["weight"].full_tensor(), params["weight"].full_tensor() - 0.1 * params["weight"].full_tensor().sign()
    )


def test_repr_and_html(td):
    """Looking at a tree waits for no other process."""
    assert "x: DTensor(shape=torch.Size([3, 2])" in repr(td)
    assert "DTensor" in td._repr_html_()


@pytest.mark.parametrize(
    "save",
    [lambda td, path: tdf.save(td, path / "shards", max_shard_size=100), lambda td, path: td.memmap(path / "folder")],
)
def test_saving_is_refused(td, save, tmp_path):
    """A leaf of which this process holds a part is not saved as if it were whole."""
    with pytest.raises(UnsupportedError, match=r"(?s)x.*a plain tensor or Parameter.*a DTensor.*full_tensor\(\)"):
        save(td, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
    tdf.save(whole(td), tmp_path / "whole.safetensors")
    assert tdf.load(tmp_path / "whole.safetensors")["x"].shape == (3, 2)


def test_sharing_is_refused(td):
    """Shared memory is refused, where torch ends the process with a segmentation fault."""
    with pytest.raises(UnsupportedError, match=r"(?s)share_memory_: 'x'.*a DTensor.*to_local"):
        td.share_memory_()


@pytest.mark.parametrize(
    "call",
    [lambda td: td + torch.ones(3), lambda td: td[torch.tensor([0, 2])], lambda td: torch.stack([td, whole(td)])],
    ids=["arithmetic", "index", "stack"],
)
def test_plain_tensors_beside_them(td, call):
    """Torch does not mix the two, and its message says what to do; nothing may be gathered in silence."""
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        call(td)
