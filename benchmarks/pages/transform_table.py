"""The operations and transformations behind docs/transforms_table.md, which has the exceptions.

A row is an operation on a tree and the same on its tensors; a column runs both under a transformation and compares.
"""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict

PAGE = Path(__file__).parents[2] / "docs/transforms_table.md"


class State(TensorClass):
    x: Tensor
    y: Tensor
    scale: float = 2.0
    total: Tensor | None = None

    def __post_init__(self):
        return self.replace(total=self.x.sum(-1) * self.scale)


class Row(NamedTuple):
    """An operation on the tree `make(a, b)`, the tensors that it gives, by path, and the batch sizes of its results."""

    fn: Callable[[Any], Any]
    plain: Callable[[Tensor, Tensor], dict[str, Tensor]]
    batch: Any


def make(a, b):
    """The tree that every row gets: batch [3], leaves of shape [3, 2] and [3], and a word."""
    return TensorDict({"a": a, "n": {"b": b}, "s": "word"}, b.shape)


def typed(t):
    """A typed tree of the tensors of `make`."""
    return State(t["a"], y=t["n", "b"], batch_size=t.batch_size)


def lazy(t):
    """A lazy stack along the second dimension: `vmap` maps dimensions before it."""
    return tdf.lazy_stack([t.select("a"), t.select("a") * 2], dim=1)


MODEL = nn.Linear(2, 3)
APPLY, _, _ = tdf.functional(MODEL.double())
FLAT = lambda a, b: {"a": a, "n.b": b}  # noqa: E731
# Made outside: dynamo cannot read a glob.
FILTER = tdf.Filter("a")
KEEP, ORDER = [True, False, True], [2, 0]

ROWS = {
    "constructor": Row(
        lambda t: TensorDict({"x": t["a"], ("n", "y"): t["n", "b"], "k": 2.0}, [3]),
        lambda a, b: {"x": a, "n.y": b, "k": torch.full((3,), 2.0)},
        [3],
    ),
    "set": Row(lambda t: t.set(("n", "c"), t["a"] * 2), lambda a, b: FLAT(a, b) | {"n.c": a * 2}, [3]),
    "update": Row(lambda t: t.update({"a": t["n", "b"] * 3}), lambda a, b: FLAT(b * 3, b), [3]),
    "delete": Row(lambda t: t.delete("n"), lambda a, b: {"a": a}, [3]),
    "select, exclude": Row(lambda t: t.select("a", "s").exclude("s"), lambda a, b: {"a": a}, [3]),
    "rename_key": Row(lambda t: t.rename_key("a", "r"), lambda a, b: {"r": a, "n.b": b}, [3]),
    "flatten_keys": Row(lambda t: t.flatten_keys(), FLAT, [3]),
    "unflatten_keys": Row(lambda t: t.flatten_keys().unflatten_keys(), FLAT, [3]),
    "at[...].set": Row(lambda t: t.at[0].set(t[1] * 2), lambda a, b: FLAT(*(_put(x, x[1] * 2) for x in (a, b))), [3]),
    "at[...].add": Row(lambda t: t.at[0].add(1.0), lambda a, b: FLAT(*(_put(x, x[0] + 1) for x in (a, b))), [3]),
    "index: int": Row(lambda t: t[1], lambda a, b: FLAT(a[1], b[1]), []),
    "index: slice": Row(lambda t: t[1:], lambda a, b: FLAT(a[1:], b[1:]), [2]),
    "index: mask": Row(lambda t: t.exclude("s")[torch.tensor(KEEP)], lambda a, b: FLAT(a[KEEP], b[KEEP]), [2]),
    "index: tensor": Row(lambda t: t[torch.tensor(ORDER)], lambda a, b: FLAT(a[ORDER], b[ORDER]), [2]),
    "index: tensor, a value for each row": Row(
        lambda t: t.set("r", ["word"] * 3)[torch.tensor(ORDER)], lambda a, b: FLAT(a[ORDER], b[ORDER]), [2]
    ),
    "stack": Row(
        lambda t: torch.stack([t.exclude("s"), t.exclude("s") * 2], 1),
        lambda a, b: FLAT(*(torch.stack([x, x * 2], 1) for x in (a, b))),
        [3, 2],
    ),
    "stack, with non-tensor data": Row(
        lambda t: torch.stack([t, t * 2]),
        lambda a, b: FLAT(*(torch.stack([x, x * 2]) for x in (a, b))),
        [2, 3],
    ),
    "set, a value for each row": Row(lambda t: t.set("r", ["word"] * 3), FLAT, [3]),
    "cat": Row(
        lambda t: torch.cat([t.exclude("s"), t.exclude("s") * 2]),
        lambda a, b: FLAT(*(torch.cat([x, x * 2]) for x in (a, b))),
        [6],
    ),
    "split": Row(lambda t: t.split(2)[0], lambda a, b: FLAT(a[:2], b[:2]), [2]),
    "unbind": Row(lambda t: t.unbind(0)[2], lambda a, b: FLAT(a[2], b[2]), []),
    "reshape": Row(lambda t: t.reshape(1, 3), lambda a, b: FLAT(a[None], b[None]), [1, 3]),
    "permute": Row(lambda t: t.unsqueeze(1).permute(1, 0), lambda a, b: FLAT(a[None], b[None]), [1, 3]),
    "squeeze": Row(lambda t: t.unsqueeze(0).squeeze(0), FLAT, [3]),
    "expand": Row(lambda t: t.expand(2, 3), lambda a, b: FLAT(a.expand(2, 3, 2), b.expand(2, 3)), [2, 3]),
    "gather": Row(lambda t: t.gather(0, torch.tensor(ORDER)), lambda a, b: FLAT(a[ORDER], b[ORDER]), [2]),
    "where": Row(
        lambda t: t.where(t["n", "b"] > 0, t * 2),
        lambda a, b: FLAT(torch.where(b[:, None] > 0, a, a * 2), torch.where(b > 0, b, b * 2)),
        [3],
    ),
    "arithmetic": Row(lambda t: (1 - t * 2) / 3 + t, lambda a, b: FLAT((1 - a * 2) / 3 + a, (1 - b * 2) / 3 + b), [3]),
    "arithmetic with a tensor": Row(lambda t: t["n", "b"] * t, lambda a, b: FLAT(b[:, None] * a, b * b), [3]),
    "pointwise": Row(
        lambda t: t.sin().clamp(min=0.1), lambda a, b: FLAT(a.sin().clamp(min=0.1), b.sin().clamp(min=0.1)), [3]
    ),
    "sum over the batch": Row(lambda t: t.sum(0), lambda a, b: FLAT(a.sum(0), b.sum(0)), []),
    "mean over features": Row(lambda t: t.mean(dim="feature"), lambda a, b: FLAT(a.mean(-1), b), [3]),
    "apply": Row(lambda t: t.apply(lambda x: x * x), lambda a, b: FLAT(a * a, b * b), [3]),
    "named_apply": Row(
        lambda t: t.named_apply(lambda name, x: x * len(name), nested_keys=True), lambda a, b: FLAT(a, b * 2), [3]
    ),
    "tree_map": Row(lambda t: pytree.tree_map(lambda x: x + 1, t), lambda a, b: FLAT(a + 1, b + 1), [3]),
    "clone": Row(lambda t: t.clone(), FLAT, [3]),
    "detach": Row(lambda t: t.detach() * t, lambda a, b: FLAT(a.detach() * a, b.detach() * b), [3]),
    "to": Row(
        lambda t: t.to(torch.float32).to(torch.float64), lambda a, b: FLAT(a.float().double(), b.float().double()), [3]
    ),
    "typed: constructor": Row(
        typed, lambda a, b: {"x": a, "y": b, "scale": torch.full((3,), 2.0), "total": a.sum(-1) * 2}, [3]
    ),
    "typed: operations": Row(
        lambda t: torch.stack([typed(t), typed(t) * 2])[1].select("x", "y").replace(y=t["n", "b"])[:2],
        lambda a, b: {"x": a[:2] * 2, "y": b[:2]},
        [2],
    ),
    "lazy stack": Row(lambda t: lazy(t) * 2, lambda a, b: {"0.a": a * 2, "1.a": a * 4}, [3, 2]),
    "lazy stack: dense": Row(lambda t: lazy(t)[:, 1:].dense(), lambda a, b: {"a": (a * 2)[:, None]}, [3, 1]),
    "lazy stack: pad": Row(
        lambda t: tdf.lazy_stack([t.select("a")[:1], t.select("a")]).pad(),
        lambda a, b: {"a": torch.stack([torch.cat([a[:1], torch.zeros_like(a[1:])]), a])},
        [2, 3],
    ),
    "functional": Row(
        lambda t: APPLY(TensorDict({"weight": t["a"], "bias": t["n", "b"]}), t["a"]),
        lambda a, b: {"": nn.functional.linear(a, a, b)},
        None,
    ),
    "partition, combine": Row(lambda t: tdf.combine(*tdf.partition(t, FILTER)), FLAT, [3]),
    "map": Row(lambda t: tdf.map(lambda row: row * 2, t), lambda a, b: FLAT(a * 2, b * 2), [3]),
    "map, of two dimensions": Row(
        lambda t: tdf.map(lambda row: row.set("r", "word")[None], t.unsqueeze(1)),
        lambda a, b: FLAT(a[:, None, None], b[:, None, None]),
        [3, 1, 1],
    ),
    "scan": Row(
        lambda t: tdf.scan(lambda c, row: (c + row, c * row), t.exclude("s")[0], t.exclude("s"))[0],
        lambda a, b: FLAT(a[0] + a.sum(0), b[0] + b.sum(0)),
        [],
    ),
    "cond": Row(
        lambda t: tdf.cond(t["n", "b"].sum() > 0, lambda t: t * 2, lambda t: t - 1, (t,)),
        lambda a, b: FLAT(torch.where(b.sum() > 0, a * 2, a - 1), torch.where(b.sum() > 0, b * 2, b - 1)),
        [3],
    ),
    "cond, to another batch": Row(
        lambda t: tdf.cond(
            t["n", "b"].sum() > 0, lambda t: t[:2].set("r", "word"), lambda t: t[1:].set("r", "word"), (t,)
        ),
        lambda a, b: FLAT(*(torch.where(b.sum() > 0, x[:2], x[1:]) for x in (a, b))),
        [2],
    ),
}


def _put(x, row):
    return torch.cat([row[None], x[1:]])


# -- columns ----------------------------------------------------------------------------------------------------


def tensors(lead=()):
    """The tensors of a row, with a batch in front on request; every member differs."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*lead, 3, 2), (*lead, 3))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def leaves(out):
    """Tensors of a result by dotted path; other leaves are not compared."""
    if isinstance(out, Tensor):
        return {"": out}
    return (
        {".".join(path): out[path] for path in out.paths()}
        if not isinstance(out, tdf.LazyStack)
        else {f"{i}.{path}": leaf for i, tree in enumerate(out.trees) for path, leaf in leaves(tree).items()}
    )


def words(tree):
    """Non-tensor values of a tree, and of those inside it, each with the sizes of its list, which one word has not."""
    for node in tree.trees if isinstance(tree, tdf.LazyStack) else [tree]:
        for key, value in node._data.items():
            if isinstance(value, (tdf.NonTensorData, tdf.NonTensorStack)):
                yield node[key], node.batch_size if isinstance(value, tdf.NonTensorStack) else Size()
            elif not isinstance(value, Tensor):
                yield from words(value)


def compare(out, expected, batch):
    """Check values, keys and batch size of a result, and that its non-tensor data can be read."""
    for value, size in [] if isinstance(out, Tensor) else words(out):
        values = np.array(value, dtype=object)
        assert values.shape == size
        assert set(values.flat) == {"word"}
    found = leaves(out)
    assert sorted(found) == sorted(expected)
    for path, leaf in expected.items():
        torch.testing.assert_close(
            found[path], leaf.to(found[path].dtype), msg=lambda text, path=path: f"{path}: {text}"
        )
    if batch is not None:
        assert out.batch_size == Size(batch)


def stacked(row, a, b, dim=0):
    """The results of a row for each member, stacked."""
    parts = [row.plain(x, y) for x, y in zip(a, b, strict=True)]
    return {path: torch.stack([part[path] for part in parts], dim) for path in parts[0]}


def loss(out):
    """A number that depends on every floating leaf."""
    found = out if isinstance(out, dict) else leaves(out)
    return sum((x * x + x).sum() for x in found.values())


def grown(row, lead=(4,)):
    """The batch size of a result with more dimensions in front."""
    return None if row.batch is None else [*lead, *row.batch]


def same_trees(out, expected):
    """Check a gradient tree against the gradients of `a` and `b`."""
    compare(out, FLAT(*expected), [3])


def eager(row):
    """The operation itself."""
    a, b = tensors()
    compare(row.fn(make(a, b)), row.plain(a, b), row.batch)


def vmap(row):
    """Over members: whole, in chunks, with another randomness."""
    a, b = tensors((4,))
    t = make(a, b)
    compare(torch.vmap(row.fn)(t), stacked(row, a, b), grown(row))
    compare(torch.vmap(row.fn, chunk_size=3)(t), stacked(row, a, b), grown(row))
    compare(torch.vmap(row.fn, randomness="different")(t), stacked(row, a, b), grown(row))


def vmap_dims(row):
    """Over another dimension, with a tree of in_dims, and to another dimension."""
    a, b = tensors((4,))
    moved = make(a, b).permute(1, 0)
    compare(torch.vmap(row.fn, in_dims=1)(moved), stacked(row, a, b), grown(row))
    t, dims = make(a, b), tdf.in_dims(make(a, b), {"a": 0, "*": 0})
    compare(torch.vmap(row.fn, in_dims=(dims,))(t), stacked(row, a, b), grown(row))
    if row.batch:
        size = [row.batch[0], 4, *row.batch[1:]]
        compare(torch.vmap(row.fn, out_dims=1)(t), stacked(row, a, b, 1), size)


def vmap_nested(row):
    """Over two dimensions."""
    a, b = tensors((2, 2))
    flat = stacked(row, a.flatten(0, 1), b.flatten(0, 1))
    expected = {path: leaf.unflatten(0, (2, 2)) for path, leaf in flat.items()}
    compare(torch.vmap(torch.vmap(row.fn))(make(a, b)), expected, grown(row, (2, 2)))


def grad(row):
    """The gradient, by `grad` and by `vjp`."""
    a, b = tensors()
    expected = torch.func.grad(lambda a, b: loss(row.plain(a, b)), (0, 1))(a, b)
    same_trees(torch.func.grad(lambda t: loss(row.fn(t)))(make(a, b)), expected)
    back = torch.func.vjp(lambda t: loss(row.fn(t)), make(a, b))[1]
    same_trees(back(torch.ones((), dtype=torch.float64))[0], expected)


def vmap_grad(row):
    """The gradient of each member."""
    a, b = tensors((4,))
    plain = torch.func.grad(lambda a, b: loss(row.plain(a, b)), (0, 1))
    expected = [torch.stack(x) for x in zip(*[plain(*pair) for pair in zip(a, b, strict=True)], strict=True)]
    compare(torch.vmap(torch.func.grad(lambda t: loss(row.fn(t))))(make(a, b)), FLAT(*expected), [4, 3])


def _jacobian(transform, row):
    a, b = tensors()
    out = transform(lambda t: leaves(row.fn(t)))(make(a, b))
    expected = transform(row.plain, argnums=(0, 1))(a, b)
    for path, (da, db) in expected.items():
        torch.testing.assert_close(out[path]["a"], da)
        torch.testing.assert_close(out[path]["n", "b"], db)


def jacrev(row):
    """The jacobian, backwards."""
    _jacobian(torch.func.jacrev, row)


def jacfwd(row):
    """The jacobian, forwards."""
    _jacobian(torch.func.jacfwd, row)


def hessian(row):
    """The second derivatives of the loss."""
    a, b = tensors()
    out = torch.func.hessian(lambda t: loss(row.fn(t)))(make(a, b))
    expected = torch.func.hessian(lambda a, b: loss(row.plain(a, b)), (0, 1))(a, b)
    for i, one in enumerate(("a", ("n", "b"))):
        for j, other in enumerate(("a", ("n", "b"))):
            torch.testing.assert_close(out[one][other], expected[i][j])


def jvp(row):
    """The value and the tangent."""
    a, b = tensors()
    out, tangent = torch.func.jvp(row.fn, (make(a, b),), (make(a + 1, b * 2),))
    value, expected = torch.func.jvp(row.plain, (a, b), (a + 1, b * 2))
    compare(out, value, row.batch)
    compare(tangent, expected, row.batch)


def linearize(row):
    """The value and the linear map."""
    a, b = tensors()
    with warnings.catch_warnings():
        # From torch's own graph.
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
        out, push = torch.func.linearize(row.fn, make(a, b))
    value, expected = torch.func.jvp(row.plain, (a, b), (a + 1, b * 2))
    compare(out, value, row.batch)
    compare(push(make(a + 1, b * 2)), expected, row.batch)


def _gradients(fn):
    """Gradients of the loss of `fn(a, b)`, by `backward` and by `torch.autograd.grad`."""
    a, b = (x.requires_grad_() for x in tensors())
    by_call = torch.autograd.grad(loss(fn(a, b)), (a, b), materialize_grads=True)
    loss(fn(a, b)).backward()
    by_backward = [torch.zeros_like(x) if x.grad is None else x.grad for x in (a, b)]
    return [*by_call, *by_backward]


def _same_gradients(row, fn):
    for one, other in zip(_gradients(lambda a, b: fn(make(a, b))), _gradients(row.plain), strict=True):
        torch.testing.assert_close(one, other)


def autograd(row):
    """`backward` and `torch.autograd.grad`."""
    _same_gradients(row, row.fn)


def recompute(row):
    """The gradients through a checkpoint."""
    _same_gradients(row, lambda t: checkpoint(row.fn, t, use_reentrant=False))


def inference(row):
    """In inference mode, and on tensors made there."""
    a, b = tensors()
    with torch.inference_mode():
        compare(row.fn(make(a, b)), row.plain(a, b), row.batch)
    # Tensors of inference mode, used outside of it.
    with torch.inference_mode():
        t = make(*tensors())
    compare(row.fn(t), row.plain(a, b), row.batch)


def functionalize(row):
    """With writes made functional."""
    a, b = tensors()
    compare(torch.func.functionalize(row.fn)(make(a, b)), row.plain(a, b), row.batch)


def fx(row):
    """Recorded once, replayed on other values."""
    a, b = tensors()
    graph = make_fx(lambda a, b: leaves(row.fn(make(a, b))), tracing_mode="fake")(a, b)
    for x, y in ((a, b), (-a, b - 100)):
        for path, leaf in row.plain(x, y).items():
            torch.testing.assert_close(graph(x, y)[path], leaf.to(graph(x, y)[path].dtype))


def jit(row):
    """Traced once, replayed on other values."""
    step = tdf.jit(row.fn)
    a, b = tensors()
    for x, y in ((a, b), (-a, b - 100)):
        compare(step(make(x, y)), row.plain(x, y), row.batch)


class _Calls(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, t):
        return self.fn(t)


def export(row):
    """An exported program, and the same saved and loaded, on other values."""
    a, b = tensors()
    program = torch.export.export(_Calls(row.fn), (make(a, b),))
    program._example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for run in (program.module(), torch.export.load(file).module()):
        for x, y in ((a, b), (-a, b - 100)):
            compare(run(make(x, y)), row.plain(x, y), row.batch)


def _compile(row, backend):
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(row.fn, fullgraph=True, backend=counter)
    a, b = tensors()
    for x, y in ((a, b), (-a, b - 100), (a + 1, b)):
        compare(run(make(x, y)), row.plain(x, y), row.batch)
    # Other values are no reason to compile again.
    assert counter.frame_count <= 1


def compiled(row):
    """Compiled without a graph break, and once for all values."""
    _compile(row, "eager")


def compiled_autograd(row):
    """The gradients of the compiled operation."""
    torch.compiler.reset()
    _same_gradients(row, torch.compile(row.fn, fullgraph=True, backend="aot_eager"))


def inductor(row):
    """Compiled to machine code."""
    _compile(row, "inductor")


class Column(NamedTuple):
    """A transformation: its place on the page, its name, the check of a row, and True if that takes long."""

    group: str
    name: str
    check: Callable[[Row], None]
    slow: bool = False


COLUMNS = [
    Column("eager", "eager", eager),
    Column("eager", "inference mode", inference),
    Column("`vmap`", "vmap", vmap),
    Column("`vmap`", "in_dims and out_dims", vmap_dims),
    Column("`vmap`", "nested", vmap_nested),
    Column("derivatives", "grad", grad),
    Column("derivatives", "vmap(grad)", vmap_grad),
    Column("derivatives", "jacrev", jacrev),
    Column("derivatives", "jacfwd", jacfwd, slow=True),
    Column("derivatives", "hessian", hessian, slow=True),
    Column("derivatives", "jvp", jvp),
    Column("derivatives", "linearize", linearize, slow=True),
    Column("autograd", "backward", autograd),
    Column("autograd", "checkpoint", recompute),
    Column("graphs", "functionalize", functionalize),
    Column("graphs", "make_fx", fx, slow=True),
    Column("`tdf.jit`", "jit", jit),
    Column("`export`", "export", export, slow=True),
    Column("`compile`", "compile", compiled, slow=True),
    Column("`compile`", "compile with autograd", compiled_autograd, slow=True),
    Column("`compile`", "inductor", inductor, slow=True),
]

_UNMAPPED = (
    RuntimeError,
    "must match the existing size",
    "If a result does not depend on an argument (here, a constant), torch's `vmap` cannot move its dimension: "
    "`torch.vmap(lambda x: torch.ones(3), out_dims=1)` also raises an error",
)
_MASK = "The number of rows depends on values. Use `where` or integer positions"
_MADE = (
    "torch does not report the position of rows that the function creates. "
    "`exclude` the non-tensor data before the function returns"
)
_DATA = "dynamo cannot trace numpy's object arrays, which contain one value for each row. `exclude` the data first"
_TRACED = (
    "A trace has no values of an index tensor, and non-tensor data needs them. Use slices, or `exclude` the data first"
)
_BY_ROWS = "index: tensor, a value for each row"
# (row, name of the column): the error that is raised, a part of its message, and the reason.
RAISES = {
    ("constructor", "in_dims and out_dims"): _UNMAPPED,
    ("typed: constructor", "in_dims and out_dims"): _UNMAPPED,
    ("index: mask", "export"): (Exception, "data-dependent", _MASK),
    ("index: mask", "jit"): (tdf.UnsupportedError, "uses the value of a tensor", _MASK),
    (_BY_ROWS, "functionalize"): (RuntimeError, "unallocated storage", _TRACED),
    (_BY_ROWS, "make_fx"): (Exception, "data-dependent", _TRACED),
    (_BY_ROWS, "export"): (Exception, "data-dependent", _TRACED),
}

for _name in ("compile", "compile with autograd", "inductor"):
    for _row in ("stack, with non-tensor data", "set, a value for each row", _BY_ROWS):
        RAISES[_row, _name] = (Exception, "as_proxy|numpy", _DATA)
for _name in ("vmap", "in_dims and out_dims", "nested"):
    for _row in ("stack, with non-tensor data", "set, a value for each row", _BY_ROWS):
        RAISES[_row, _name] = (tdf.BatchSizeError, "exclude", _MADE)

START, END = "<!-- Written by benchmarks/pages/transform_table.py. -->", "<!-- End of the table. -->"


def _reasons():
    """The reasons of cells that raise, once each; their numbers begin with 1."""
    return list(dict.fromkeys(reason for _, _, reason in RAISES.values()))


def _notes():
    return [f"{i}. {reason}." for i, reason in enumerate(_reasons(), 1)]


def table():
    """All cells: a group works for an operation if all its columns do."""
    groups = list(dict.fromkeys(column.group for column in COLUMNS))
    lines = ["| operation | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups)]
    for row in ROWS:
        cells = []
        for group in groups:
            names = [column.name for column in COLUMNS if column.group == group]
            notes = {name: _reasons().index(RAISES[row, name][2]) + 1 for name in names if (row, name) in RAISES}
            cells.append(", ".join(f"{name}: raises ({n})" for name, n in notes.items()) or "yes")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_notes()])


def exceptions():
    """The table of the page: the operations that raise under a transformation, and why."""
    reasons = _reasons()
    lines = ["| operation | raises under | reason |", "|---|---|---|"]
    for row in ROWS:
        for reason in reasons:
            names = [column.name for column in COLUMNS if RAISES.get((row, column.name), ("", "", ""))[2] == reason]
            if names:
                lines.append(f"| {row} | {', '.join(names)} | {reasons.index(reason) + 1} |")
    works = ", ".join(row for row in ROWS if all(row != name for name, _ in RAISES))
    return "\n".join([*lines, "", *_notes(), "", f"These operations have no exception: {works}."])


def page():
    """The page with its table written anew."""
    head, rest = PAGE.read_text().split(START)
    return f"{head}{START}\n\n{exceptions()}\n\n{END}{rest.split(END)[1]}"
