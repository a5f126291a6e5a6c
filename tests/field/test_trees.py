"""Trees and transforms: public reports of other projects that no other test shows."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict
from tests.helpers import assert_trees_equal

each_seed = pytest.mark.parametrize("seed", [0, 1])


class State(TensorClass):
    """A position and a count of steps."""

    position: torch.Tensor
    count: torch.Tensor


def ragged(seed, rows=10):
    """A lazy stack of rows of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (rows,), generator=generator).tolist()
    return tdf.lazy_stack([TensorDict({"x": torch.randn(n, generator=generator)}) for n in lengths])


def identity(rows):
    """The collate function that leaves a batch as it is."""
    return rows


def grow(state):
    """Another state, one step later."""
    return state.replace(position=state.position * 1.5, count=state.count + 1)


def is_small(state):
    """Whether a state is below the limit."""
    return state.position.sum() < 100


@pytest.mark.slow
@each_seed
def test_a_typed_tree_is_the_carry_of_a_compiled_loop(seed):
    """The compiled loop returns an instance with the values of Python's `while`."""
    torch.compiler.reset()
    start = State(torch.rand(3, generator=torch.Generator().manual_seed(seed)) + 0.1, torch.tensor(0), batch_size=[])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(state):
        return tdf.while_loop(is_small, lambda state: (grow(state),), (state,))[0]

    found = run(start)

    expected = start
    while is_small(expected):
        expected = grow(expected)
    assert_trees_equal(found, expected, rtol=1e-6)


@pytest.mark.parametrize("collate", [None, tdf.collate, identity], ids=["none", "collate", "identity"])
@each_seed
def test_a_data_loader_keeps_ragged_rows(seed, collate):
    """Each batch is a lazy stack of its rows, which are not stacked."""
    data = ragged(seed)

    batches = list(DataLoader(data, batch_size=4, collate_fn=collate))

    found = [row["x"].tolist() for batch in batches for row in batch.unbind(0)]
    assert found == [row["x"].tolist() for row in data.unbind(0)]


@pytest.mark.parametrize("fill", [float("nan"), 0.0, float("inf"), -3.0])
@each_seed
def test_masks_do_not_depend_on_the_fill_value(seed, fill):
    """A mask is that of the lengths, whatever fills the rest."""
    rows = ragged(seed).unbind(0)

    padded = tdf.pad_sequence(rows, padding_value=fill, return_mask=True)

    assert padded["masks", "x"].sum(-1).tolist() == [len(row["x"]) for row in rows]


def test_a_nested_dict_has_the_batch_size_that_is_given():
    """Without one it is empty, at each level."""
    nested = {"inner": {"a": torch.zeros(5, 4, 3), "b": torch.zeros(5, 4, 6)}, "words": list("abcde")}

    assert TensorDict(nested)["inner"].batch_size == ()


def test_a_nested_dict_has_the_batch_size_of_its_leaves_on_request():
    """The longest batch that all leaves below a level share."""
    nested = {"inner": {"a": torch.zeros(5, 4, 3), "b": torch.zeros(5, 4, 6)}, "words": list("abcde")}

    tree = TensorDict.from_dict(nested, auto_batch_size=True)

    assert {"outer": tree.batch_size, "inner": tree["inner"].batch_size} == {"outer": (5,), "inner": (5, 4)}


class MakesTree(torch.nn.Module):
    """A module that returns a tree with the batch size of its input."""

    def forward(self, x, y):
        return TensorDict({"x": x, "y": y}, x.shape[:1])


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_an_exported_tree_has_the_batch_size_of_the_call(rows):
    """A dynamic dimension stays the tree's."""
    batch = torch.export.Dim("batch", min=2)
    example = (torch.zeros(3, 4), torch.zeros(3, 4))
    program = torch.export.export(MakesTree(), example, dynamic_shapes={"x": {0: batch}, "y": {0: batch}})

    tree = program.module()(torch.ones(rows, 4), torch.ones(rows, 4))

    assert tree.batch_size == (rows,)


@each_seed
def test_a_mask_of_numpy_is_an_index(seed):
    """It chooses the rows that numpy chooses."""
    values = np.random.default_rng(seed).normal(size=(6, 2))
    mask = values[:, 0] > 0
    tree = TensorDict({"x": torch.from_numpy(values)}, [6])

    assert tree[mask]["x"].tolist() == values[mask].tolist()


def test_a_mask_of_numpy_of_another_length_is_refused():
    """The message has both shapes."""
    tree = TensorDict({"x": torch.zeros(6)}, [6])

    with pytest.raises(IndexError, match=r"(?s)mask does not have the shape.*\[6\].*\[5\]"):
        tree[np.ones(5, dtype=bool)]


def trained_step(tree):
    """A step of gradients through a tree that a function passes on."""
    weight = torch.nn.Parameter(torch.ones(2))
    out = tree.set("y", tree["x"] * weight)
    out["y"].sum().backward()
    return out


@pytest.mark.parametrize(
    "use",
    [
        lambda tree: tdf.cat([tree, tree]),
        lambda tree: torch.cat([tree, tree]),
        lambda tree: tree.split(2),
        trained_step,
    ],
    ids=["cat", "torch.cat", "split", "backward"],
)
def test_trees_are_freed_without_the_garbage_collector(use):
    """No cycle keeps a leaf alive after its tree and the results are gone."""
    gc.disable()
    try:
        leaf = torch.randn(4, 2)
        alive = weakref.ref(leaf)
        tree = TensorDict({"x": leaf}, [4])
        use(tree)
        del leaf, tree
        found = alive()
    finally:
        gc.enable()

    assert found is None


class Rounded(torch.autograd.Function):
    """Rounds, and passes three times the gradient: a derivative that no rule of torch gives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def rounded_loss(tree):
    """A loss with the derivative 3 by each number."""
    return Rounded.apply(tree["x"]).sum()


@pytest.mark.parametrize(
    "derive",
    [
        lambda tree: tdf.grad(rounded_loss)(tree),
        lambda tree: torch.vmap(tdf.grad(rounded_loss))(tree),
        lambda tree: tdf.jit(tdf.grad(rounded_loss))(tree),
        lambda tree: tdf.jit(torch.vmap(tdf.grad(rounded_loss)))(tree),
    ],
    ids=["grad", "vmap", "jit", "jit of vmap"],
)
def test_a_custom_backward_is_kept(derive):
    """The gradient is that of the function's own `backward`."""
    tree = TensorDict({"x": torch.randn(4, 2)}, [4])

    assert derive(tree)["x"].unique().tolist() == [3.0]


@each_seed
def test_numbers_folded_in_another_order_give_another_key(seed):
    """`fold_in` does not commute."""
    key = tdf.random.key(seed)

    one_two = tdf.random.fold_in(tdf.random.fold_in(key, 1), 2)
    two_one = tdf.random.fold_in(tdf.random.fold_in(key, 2), 1)

    assert not torch.equal(one_two, two_one)


@each_seed
def test_large_numbers_give_keys_of_their_own(seed):
    """Numbers that agree in their lower 32 bits are told apart."""
    key = tdf.random.key(seed)
    numbers = [7 + (high << 32) for high in range(1000)]

    keys = {tuple(tdf.random.fold_in(key, number).flatten().tolist()) for number in numbers}

    assert len(keys) == len(numbers)


def quartic(tree):
    """A loss of two leaves whose Hessian is neither constant nor diagonal."""
    return (tree["a"].sum() * tree["b"].sum()).square() + tree["a"].pow(4).sum()


def pair(seed, *batch):
    """A tree of two leaves in float64."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {key: torch.randn(*batch, 3, generator=generator, dtype=torch.float64) for key in "ab"}
    return TensorDict(leaves, list(batch))


def flat_hessian(tree):
    """The matrix of second derivatives by autograd's own function, for one vector of all numbers."""

    def loss(vector):
        return quartic({"a": vector[:3], "b": vector[3:]})

    return torch.autograd.functional.hessian(loss, torch.cat([tree["a"], tree["b"]]))


@each_seed
def test_products_with_the_hessian_are_those_of_the_matrix(seed):
    """Forward over reverse, for a direction that is a tree."""
    tree, direction = pair(seed), pair(seed + 10)

    _, product = torch.func.jvp(torch.func.grad(quartic), (tree,), (direction,))

    expected = flat_hessian(tree) @ torch.cat([direction["a"], direction["b"]])
    torch.testing.assert_close(torch.cat([product["a"], product["b"]]), expected)


@each_seed
def test_mapped_hessians_are_those_of_a_loop(seed):
    """`vmap` of `hessian` over the rows of a tree."""
    tree = pair(seed, 4)

    found = torch.vmap(torch.func.hessian(quartic))(tree)

    expected = torch.stack([flat_hessian(row) for row in tree.unbind(0)])
    torch.testing.assert_close(found["a"]["b"], expected[:, :3, 3:])
