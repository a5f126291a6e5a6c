"""Lazy stacks under transformations, copies and files."""

import copy
import pickle

import optree
import pytest
import torch
from torch import Size
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

from tdfunc import TensorClass, TensorDict
from tdfunc._lazystack import lazy_stack
from tdfunc.core.errors import BatchSizeError
from tdfunc.modules.extract import from_module
from tests.helpers import TiedLM
from tests.lazystack.trees import Message, assert_stacks_equal, ragged, tree


def columns(count=2):
    """Trees of three rows whose features differ, to be stacked behind the rows."""
    return [TensorDict({"x": torch.randn(3, n + 1), "n": {"y": torch.arange(3.0)}}, [3]) for n in range(count)]


def test_vmap_over_dimensions_before_the_stack():
    """Vmap takes a dimension in front of the stack, and gives it back."""
    lazy = lazy_stack(columns(), 1)
    seen = []

    def fn(t, w):
        seen.append((t.batch_size, t.stack_dim))
        return t * w

    out = torch.vmap(fn)(lazy, torch.arange(3.0))
    grads = torch.vmap(torch.func.grad(lambda t: sum((x**2).sum() for x in t["x"])))(lazy)

    assert seen == [(Size([2]), 0)]
    assert_stacks_equal(torch.vmap(lambda t: t * 2)(lazy.permute(1, 0).permute(1, 0)), lazy * 2)
    assert_stacks_equal(out, lazy * torch.arange(3.0)[:, None])
    assert_stacks_equal(torch.vmap(fn, chunk_size=2)(lazy, torch.arange(3.0)), out)
    assert_stacks_equal(grads.select("x"), lazy.select("x") * 2)


@pytest.mark.parametrize(("dim", "in_dims"), [(0, 0), (0, 1), (1, 1), (2, 2)])
def test_vmap_refuses_other_dimensions(dim, in_dims):
    """A dimension at or behind the stack's, which has another number in the leaves, is refused."""
    # Sizes are equal, so that no shape gives it away.
    trees = [TensorDict({"x": torch.randn(3, 3, 3)}, [3, 3]) for _ in range(3)]

    with pytest.raises(BatchSizeError, match=rf"vmap: in_dims(.|\n)*before {dim}\n.*in_dims={in_dims}"):
        torch.vmap(lambda t: t * 2, in_dims=in_dims)(lazy_stack(trees, dim))


def test_vmap_of_a_tree_around():
    """The same holds for a lazy stack inside a tree."""
    inner = lazy_stack(columns(3), 0)

    with pytest.raises(BatchSizeError, match="in_dims=0"):
        torch.vmap(lambda t: t)(TensorDict({"lazy": inner, "w": torch.zeros(3)}, [3]))
    out = torch.vmap(lambda t: t)(TensorDict({"lazy": inner.permute(1, 0), "w": torch.zeros(3)}, [3]))

    assert_stacks_equal(out["lazy"], inner.permute(1, 0))


def test_tree_map_inside_vmap():
    """A map over the leaves inside vmap is not taken for vmap."""
    lazy = lazy_stack([TensorDict({"x": torch.randn(3, 4)}, [3, 4]) for _ in range(2)], 1)
    out = torch.vmap(lambda t: pytree.tree_map(lambda x: x[0], t))(lazy)

    assert torch.equal(out["x"][1], lazy["x"][1][:, 0])


@pytest.fixture
def turned():
    """A ragged stack along its last dimension, with a name."""
    return lazy_stack(ragged(), 1).with_names(["t", None])


@pytest.mark.parametrize("tree_map", [pytree.tree_map, optree.tree_map], ids=["torch", "optree"])
def test_pytree(tree_map, turned):
    """Both registries keep values, dimension and names."""
    assert_stacks_equal(tree_map(lambda x: x * 2, turned), turned * 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies(copied, turned):
    """A copy keeps values, dimension and names."""
    assert_stacks_equal(copied(turned), turned)


def test_pytrees_of_other_leaves(turned):
    """A map may give anything for a leaf, or take the trees themselves for leaves."""
    assert pytree.tree_map(lambda _: None, turned).batch_size == turned.batch_size
    assert pytree.tree_map(lambda x: x.dim(), turned)["x"] == (2, 2, 2)
    assert pytree.tree_map(lambda t: 1, turned, is_leaf=lambda t: isinstance(t, TensorDict)).keys() == set()
    assert len(pytree.tree_leaves(turned)) == len(turned.leaves()) == 6


def test_structures_of_pytrees(turned):
    """A structure goes through text, and tells stacks of other dimensions apart."""
    spec, plain = pytree.tree_structure(turned), pytree.tree_structure(turned.exclude("s"))

    assert pytree.treespec_loads(pytree.treespec_dumps(plain)) == plain
    assert spec == pytree.tree_structure(turned * 2)
    assert spec != pytree.tree_structure(turned.permute(1, 0))


@pytest.mark.parametrize("dim", [0, 1])
def test_key_paths_lead_to_leaves(dim):
    """Key paths of torch read the leaves."""
    lazy = lazy_stack([tree(2), tree(4)], dim)
    pairs = pytree.tree_flatten_with_path(lazy)[0]

    assert [path for path, leaf in pairs if pytree.key_get(lazy, path) is not leaf] == []


@pytest.mark.parametrize("dim", [0, 1])
def test_accessors_lead_to_leaves(dim):
    """Accessors of optree read the leaves; so does the code of an accessor."""
    lazy = lazy_stack([tree(2), tree(4)], dim)
    accessors, leaves, _ = optree.tree_flatten_with_accessor(lazy)
    codes = [accessor.codify("lazy") for accessor in accessors]

    assert [a for a, leaf in zip(accessors, leaves, strict=True) if a(lazy) is not leaf] == []
    assert [code for code, leaf in zip(codes, leaves, strict=True) if eval(code, {"lazy": lazy}) is not leaf] == []


def test_a_treespec_of_typed_trees_is_dumped():
    """`treespec_dumps` writes the treespec of a typed stack, of which pickle finds no class."""
    spec = pytree.tree_structure(lazy_stack([Message(None, torch.ones(n)) for n in (1, 2)]))

    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    with pytest.raises(pickle.PicklingError, match="LazyStack"):
        pickle.dumps(spec)


@pytest.mark.slow
def test_compile_typed():
    """A compiled function stacks instances of a class that was never stacked before, and compiles once."""

    class Row(TensorClass):
        x: torch.Tensor

    class Outer(TensorClass):
        row: Row

    torch.compiler.reset()
    count = CompileCounter()

    @torch.compile(backend=count, fullgraph=True)
    def fn(x):
        lazy = lazy_stack([Outer(Row(x)), Outer(Row(x[:2]))])
        return lazy, lazy.pad().row.x

    first, second = fn(torch.ones(3)), fn(torch.ones(3))
    uncompiled = type(lazy_stack([Outer(Row(torch.ones(3)))]))

    assert [type(lazy) for lazy, _ in (first, second)] == [uncompiled, uncompiled]
    assert [isinstance(lazy, Outer) for lazy, _ in (first, second)] == [True, True]
    assert [isinstance(lazy.row, Row) for lazy, _ in (first, second)] == [True, True]
    assert [padded.tolist() for _, padded in (first, second)] == [[[1, 1, 1], [1, 1, 0]]] * 2
    assert count.frame_count == 1


@pytest.mark.slow
def test_compiled_vmap_is_right_or_refused():
    """A compiled vmap takes a dimension in front of a stack that is last, and refuses others."""
    compiled = torch.compile(lambda t: torch.vmap(lambda u: u * 2)(t), backend="eager", fullgraph=True)
    lazy = lazy_stack(columns(), 1)

    assert_stacks_equal(compiled(lazy), lazy * 2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        compiled(lazy_stack(columns(), 0))


@pytest.fixture(scope="module")
def tied():
    """A stack of two trees, each with a tied leaf."""
    return lazy_stack([from_module(TiedLM(vocabulary=size)) for size in (5, 7)])


TIED = {
    "as it is": lambda lazy: lazy,
    "arithmetic": lambda lazy: lazy * 2,
    "edit": lambda lazy: lazy.set(
        ("emb", "weight"), tuple(torch.zeros_like(t["emb", "weight"]) for t in lazy.trees)
    ),
    "pytree": lambda lazy: pytree.tree_map(torch.clone, lazy),
    "deepcopy": copy.deepcopy,
    "padded": lambda lazy: lazy.pad(),
    "of stacks": lambda lazy: lazy_stack([lazy, lazy])[0],
}  # fmt: skip


@pytest.mark.parametrize("change", TIED.values(), ids=TIED)
def test_ties_inside_trees(change, tied):
    """Tied leaves of a tree in a stack stay one leaf."""
    assert [row["emb", "weight"] is row["out", "weight"] for row in change(tied)] == [True, True]


def test_tied_leaves_are_counted_once(tied):
    """A stack has the leaves of its trees, of which a tied one is one."""
    assert len(tied.leaves()) == 2 * len(tied.trees[0].leaves())
    assert len(pytree.tree_leaves(tied)) == len(tied.leaves())


def test_padding_keeps_ties_of_all_trees(tied):
    """A tie that all trees have stays when they are padded, and one of some trees does not."""
    padded, (first, second) = tied.pad(), tied.trees

    assert padded["out", "weight"] is padded["emb", "weight"]
    assert padded.ties() == first.ties()
    assert lazy_stack([first, second.untie(("out", "weight"))]).pad().ties() == []


def test_ties_have_the_paths_of_their_trees(tied):
    """Ties inside a stack in a tree are listed with the number of the tree."""
    assert TensorDict({"models": tied}).ties() == [
        ["models.0.emb.weight", "models.0.out.weight"],
        ["models.1.emb.weight", "models.1.out.weight"],
    ]


@pytest.mark.parametrize(("dim", "size"), [(0, [2]), (1, [3, 2])])
def test_a_stack_without_leaves_keeps_its_size(dim, size):
    """A rebuilt tree keeps the batch size of a stack without leaves inside."""
    inner = lazy_stack([TensorDict({}, size[:dim])] * 2, dim)
    tree = TensorDict({"lazy": inner, "x": torch.zeros(size)}, size)
    back = pytree.tree_unflatten(*pytree.tree_flatten(tree))

    assert back["lazy"].batch_size == Size(size)
    assert [t.batch_size for t in back["lazy"].trees] == [Size(size[:dim])] * 2
