"""Trees of JAX's libraries as trees of tensors; `test_jax.py` runs these tests in a process that finds JAX."""

import importlib.util
import math
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict
from tests.ops.test_jax import GUIDE, guide_blocks

JAX_DTYPES = ["float32", "bfloat16", "float16", "bool", "int8", "int32", "uint16", "complex64", "float8_e4m3fn"]
TORCH_DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int32, torch.uint8, torch.complex64]


def mlp():
    """A model of equinox."""
    return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))


@pytest.mark.parametrize("dtype", JAX_DTYPES)
def test_arrays_are_read_in_place(dtype):
    """A tensor has the dtype and the memory of its array."""
    array = jnp.ones((2, 3), dtype)
    tree = tdf.from_jax({"a": {"b": array}})

    assert str(tree["a", "b"].dtype) == f"torch.{dtype}"
    assert tree["a", "b"].data_ptr() == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_are_read_in_place(dtype):
    """An array has the dtype and the memory of its tensor, also of a transposed one."""
    tree = TensorDict({"a": {"b": torch.ones(2, 3).to(dtype), "t": torch.ones(4, 5).to(dtype).T}})
    arrays = tdf.to_jax(tree)

    assert f"torch.{arrays['a']['b'].dtype}" == str(dtype)
    assert [arrays["a"][key].unsafe_buffer_pointer() for key in "bt"] == [tree["a", key].data_ptr() for key in "bt"]


leaves = st.builds(
    lambda shape, dtype: jnp.arange(math.prod(shape)).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(JAX_DTYPES),
)
pytrees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcde"), inner, max_size=3),
    max_leaves=8,
)


@given(pytree=st.dictionaries(st.sampled_from("abc"), pytrees, max_size=3))
def test_there_and_back(pytree):
    """Any pytree of dicts and lists comes back equal, in its structure."""
    found = tdf.to_jax(tdf.from_jax(pytree), like=pytree)

    assert eqx.tree_equal(found, pytree)


@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=3), data=st.data())
def test_any_layout(shape, data):
    """Slices, permutations and expansions of tensors have their numbers."""
    tensor = torch.randn(shape).permute(data.draw(st.permutations(range(len(shape)))))
    if data.draw(st.booleans()):
        tensor = tensor[1:]
    if data.draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)

    np.testing.assert_array_equal(tdf.to_jax(TensorDict({"a": tensor}))["a"], tensor.numpy())


def test_a_model_of_equinox():
    """Its arrays are a tree with the paths of its fields, and a changed tree is a model again."""
    model = mlp()
    tree = tdf.from_jax(eqx.filter(model, eqx.is_array))
    found = tdf.to_jax(tree * 2, like=model)
    x = jnp.ones(2)

    expected = jax.tree.map(lambda leaf: leaf * 2 if eqx.is_array(leaf) else leaf, model)
    assert tree.paths()[0] == ("layers", "0", "weight")
    np.testing.assert_allclose(found(x), expected(x))


def test_layers_of_equinox_fit_those_of_torch():
    """A linear layer has the layout of torch's, so a module computes the same with its tree."""
    model = mlp()
    apply, params, _ = tdf.functional(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 4), nn.Linear(4, 3)])}))
    tree = tdf.from_jax(eqx.filter(model, eqx.is_array))
    x = torch.randn(2)
    hidden = torch.relu(nn.functional.linear(x, tree["layers", "0", "weight"], tree["layers", "0", "bias"]))
    out = nn.functional.linear(hidden, tree["layers", "1", "weight"], tree["layers", "1", "bias"])

    assert set(tree.paths()) == set(params.paths())
    np.testing.assert_allclose(out.numpy(), model(jnp.asarray(x.numpy())), rtol=1e-5)


def test_a_state_of_optax():
    """Named tuples and counts come back in their classes."""
    state = optax.adam(1e-3).init(eqx.filter(mlp(), eqx.is_array))
    found = tdf.to_jax(tdf.from_jax(state), like=state)

    assert eqx.tree_equal(found, state)


def test_an_array_that_is_there_twice():
    """It is one tensor, and so a tie of the tree."""
    array = jnp.ones(3)
    tree = tdf.from_jax({"a": array, "b": [array]})

    assert tree["a"] is tree["b", "0"]


def test_other_leaves():
    """Numbers are tensors, text is text, None is left out, and arrays of numpy are read."""
    tree = tdf.from_jax(
        {"n": 3, "s": "text", "none": None, "f": np.ones(2), "b": jax.device_get(jnp.ones(2, "bfloat16"))}
    )

    assert sorted(tree.keys()) == ["b", "f", "n", "s"]
    dtypes = {name: tree[name].dtype for name in "nfb"}
    assert dtypes == {"n": torch.int32, "f": torch.float64, "b": torch.bfloat16}
    assert tdf.to_jax(tree.select("n", "s"))["s"] == "text"


def test_structures_without_arrays():
    """The result of `eval_shape` is a structure to fill."""
    like = jax.eval_shape(lambda: {"a": jnp.ones((2, 3)), "b": [jnp.ones(4)]})
    found = tdf.to_jax(TensorDict({"a": torch.ones(2, 3), "b": {"0": torch.ones(4)}}), like=like)

    assert [leaf.shape for leaf in jax.tree.leaves(found)] == [(2, 3), (4,)]


def test_live_parameters():
    """Leaves that require grad are read without their graph."""
    found = tdf.to_jax(tdf.from_module(nn.Linear(2, 3)))

    assert found["weight"].shape == (3, 2)


def test_64_bits_where_they_are_on():
    """They pass where JAX has them."""
    with jax.enable_x64(True):
        found = tdf.to_jax(TensorDict({"a": torch.ones(2, dtype=torch.float64)}))

    assert found["a"].dtype == "float64"


def test_a_model_of_flax(tmp_path):
    """Names, layouts and files are those of flax."""
    linen = pytest.importorskip("flax.linen")
    model = linen.Sequential([linen.Dense(4), linen.relu, linen.Dense(2)])
    x = jnp.ones((1, 3))
    params = model.init(jax.random.key(0), x)["params"]
    tree = tdf.from_jax(params)
    tdf.save(tree, tmp_path / "flax.safetensors")
    found = tdf.to_jax(tdf.load(tmp_path / "flax.safetensors"))

    assert tree["layers_0", "kernel"].shape == (3, 4)
    np.testing.assert_array_equal(model.apply({"params": found}, x), model.apply({"params": params}, x))
    assert "layers_0.kernel" in safetensors.numpy.load_file(tmp_path / "flax.safetensors")


TWO = TensorDict({"a": torch.ones(2)})
SPARSE = TensorDict({"a": torch.eye(2).to_sparse()})
MESSAGES = {
    "a function": (lambda: tdf.from_jax(mlp()), TypeError, "'activation' is not an array.*eqx.filter"),
    "an array alone": (lambda: tdf.from_jax(jnp.ones(3)), TypeError, "not a pytree.*from_dlpack"),
    "a random key": (lambda: tdf.from_jax({"k": jax.random.key(0)}), tdf.UnsupportedError, "'k' in place.*key_data"),
    "four bits": (lambda: tdf.from_jax({"k": jnp.ones(2, "int4")}), tdf.UnsupportedError, "'k' in place.*int4"),
    "64 bits": (lambda: tdf.to_jax(TWO.double()), tdf.LeafMismatchError, "would round.*float64.*jax_enable_x64"),
    "a sparse leaf": (lambda: tdf.to_jax(SPARSE), tdf.UnsupportedError, "cannot read the leaf 'a'"),
    "not a tree": (lambda: tdf.to_jax({"a": 1}), TypeError, "not a tree"),
    "a missing leaf": (lambda: tdf.to_jax(TWO, like={"b": jnp.ones(2)}), tdf.TreeStructureError, "'b' is missing"),
    "an unknown leaf": (lambda: tdf.to_jax(TWO, like={}), tdf.TreeStructureError, "no entry 'a'.*select"),
    "another shape": (lambda: tdf.to_jax(TWO, like={"a": jnp.ones(3)}), tdf.LeafMismatchError, r"'a'.*\(3,\).*\(2,\)"),
    "another dtype": (lambda: tdf.to_jax(TWO, like={"a": jnp.ones(2, "int8")}), tdf.LeafMismatchError, "int8.*float32"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "cls", "pattern"), MESSAGES.values(), ids=MESSAGES)
def test_messages(call, cls, pattern):
    """What cannot be converted is named."""
    with pytest.raises(cls, match=f"(?s){pattern}"):
        call()


def test_the_guide(tmp_path, monkeypatch):
    """The blocks about JAX in the guide run."""
    monkeypatch.chdir(tmp_path)
    names = {}
    of_equinox, of_flax = guide_blocks(Path(GUIDE).read_text())
    exec(of_equinox, names)
    if importlib.util.find_spec("flax") is not None:
        exec(of_flax, names)

    assert isinstance(names["model"], eqx.Module)
