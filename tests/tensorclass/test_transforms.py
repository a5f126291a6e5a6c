"""Typed trees under torch's transformations and compilers, in both pytree registries, files and other processes."""

import io
import pickle
from dataclasses import field
from typing import Any, ClassVar, Generic, TypeVar

import optree
import pytest
import torch
import torch.multiprocessing
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict, tensorclass
from tests.helpers import assert_trees_equal, quick
from tests.tensorclass.classes import Foo, Inner
from tests.tensorclass.classes import foo as make

V = TypeVar("V")


class Completed(TensorClass):
    x: Tensor
    weight: Tensor = field(default_factory=lambda: torch.ones(3))
    total: Tensor | None = None
    scale: int = 2
    names_seen: ClassVar[tuple] = ()

    def __post_init__(self):
        return self.replace(total=self.x.sum(-1) * self.scale + self.weight)

    @property
    def doubled(self):
        return self * 2


class Auto(TensorClass["autocast"]):
    count: int
    x: Tensor


class NoCast(TensorClass["nocast"]):
    count: Any
    x: Tensor


class Only(TensorClass["tensor_only"]):
    x: Tensor


class Box(TensorClass, Generic[V]):
    x: V


@tensorclass
class Decorated:
    x: Tensor

    def __post_init__(self):
        return self.replace(x=self.x + 1)


def foo(note=None):
    """Three rows, with a nested instance."""
    return make(3, note)


# -- pytrees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree_map", [pytree.tree_map, optree.tree_map])
def test_tree_map(tree_map):
    """Both registries keep the class, empty fields and non-tensor data, and follow the batch size."""
    mapped = tree_map(lambda x: x[0], foo("kept"))

    assert type(mapped) is Foo
    assert type(mapped.inner) is Inner
    assert mapped.batch_size == torch.Size([])
    assert mapped.note == "kept"
    assert tree_map(lambda x: x, foo()).note is None


def test_pytree_structure():
    """Leaves and paths agree in both registries; a structure can be written as text, and names the class."""
    made = foo()
    leaves, spec = pytree.tree_flatten(made)

    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in optree.tree_leaves(made)]
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(made)[0]] == ["['inner']['y']", "['x']"]
    assert_trees_equal(pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))), made)
    assert spec != pytree.tree_structure(TensorDict(made))


# -- torch.func -------------------------------------------------------------------------------------------------


def test_vmap_in_dims():
    """A tree of in_dims may be an instance, and out_dims move the batch size."""
    made = foo().reshape(3, 1)
    dims = tdf.in_dims(made, {"x": 0, "*": None})

    out = torch.vmap(lambda t: t.x.sum() * t.inner.y.sum(), in_dims=(dims,))(made)
    moved = torch.vmap(lambda t: t + 1, out_dims=1)(made)

    assert type(dims) is Foo
    assert torch.equal(out, made.x.sum((1, 2)) * 3)
    assert moved.batch_size == torch.Size([1, 3])


# -- compilers --------------------------------------------------------------------------------------------------

X = torch.arange(6.0).reshape(3, 2)
COMPILED = {
    "constructor": (lambda x: Foo(x, None, Inner(x, batch_size=[3]), batch_size=[3]), X),
    "by name": (lambda x: Foo(inner=None, x=x, note=None, batch_size=[3], device="cpu", names=["a"]), X),
    "post init and defaults": (lambda x: Completed(x, batch_size=[3]), X),
    "given default": (lambda x: Completed(x, weight=x[:, 0], batch_size=[3]).doubled, X),
    "decorated": (lambda x: Decorated(x, batch_size=[3])[1:], X),
    "generic": (lambda x: Box(x, batch_size=[3]), X),
    "autocast": (lambda x: Auto(2.0, x, batch_size=[3]).count * x, X),
    "nocast": (lambda x: NoCast(2, x, batch_size=[3]).count * x, X),
    "tensor only": (lambda x: Only(x, batch_size=[3]).x + 1, X),
    "non-tensor": (lambda x: x * len(Foo(x, note="abc", batch_size=[3]).note), X),
    "edits": (lambda t: t.set("x", t.x * 2).replace(inner=None).update({"x": t.x + 1}).set(("inner"), t.inner), foo()),
    "emptied": (lambda t: t.delete("inner").set("x", None), foo()),
    "conversions": (lambda t: Foo.from_tensordict(t.to_tensordict(retain_none=False)), foo()),
    "isinstance": (lambda t: t + 1 if isinstance(t, Foo) and isinstance(t.inner, TensorClass) else t, foo()),
}


@pytest.mark.parametrize("backend", quick(["eager", "aot_eager"], "eager"))
@pytest.mark.parametrize("name", quick(COMPILED, "constructor"))
def test_compile(name, backend):
    """`torch.compile` makes one graph of constructors, defaults, `__post_init__`, edits and operations."""
    torch.compiler.reset()
    fn, argument = COMPILED[name]

    assert_trees_equal(torch.compile(fn, fullgraph=True, backend=backend)(argument), fn(argument))


def test_recompiles():
    """A new instance of the same structure compiles nothing."""
    torch.compiler.reset()
    count = CompileCounter()
    compiled = torch.compile(lambda t: t.replace(x=t.x + 1)[0], fullgraph=True, backend=count)
    for _ in range(3):
        compiled(foo())

    assert count.frame_count == 1


class Exported(torch.nn.Module):
    def forward(self, t):
        return t.replace(x=t.x + 1)[1:]


def test_export():
    """An exported program takes and returns instances, also when it is saved and loaded."""
    program = torch.export.export(Exported(), (foo(),))
    file = io.BytesIO()
    program._example_inputs = None
    torch.export.save(program, file)
    file.seek(0)
    expected = Exported()(foo())

    assert_trees_equal(program.module()(foo()), expected)
    assert_trees_equal(torch.export.load(file).module()(foo()), expected)


# -- copies, files, processes -----------------------------------------------------------------------------------


def test_torch_save():
    """`torch.load(weights_only=True)` takes an instance with the documented allow-list."""
    file = io.BytesIO()
    torch.save(foo(), file)

    def load():
        file.seek(0)
        return torch.load(file, weights_only=True)

    with pytest.raises(pickle.UnpicklingError, match="safe_globals"):
        load()
    with torch.serialization.safe_globals(SAFE):
        assert_trees_equal(load(), foo())


SAFE = [Foo, Inner, tdf.core.collection._remake]
