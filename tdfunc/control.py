"""Control flow over trees: `cond`, `while_loop`, `map` and `scan`.

torch's operators of these names take tensors in built-in containers, and only a compiler can capture them. Here trees
go in and come out. Run eagerly, each is the Python statement that it stands for; under a compiler it is torch's
operator, so that the program keeps both branches, or one copy of the loop's body.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch._higher_order_ops import map as _torch_map
from torch._higher_order_ops import scan as _torch_scan
from torch._higher_order_ops import while_loop as _torch_while_loop
from torch.autograd import forward_ad
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tdfunc._jit.recording.tracing import Recorder
from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.context import in_functorch, is_known, is_recording, is_tracing
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TreeStructureError, UnsupportedError, brief, error
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.pytree import Context, _follow, flatten, rebuilt_size, unflatten
from tdfunc.core.ties import Graft

# Any: operands and results are trees, tensors, and containers of these.
Fn = Callable[..., Any]

# Its annotation is of a function of two arguments, which it does not call with two.
_run_map: Any = _torch_map


def cond(pred: Any, true_fn: Fn, false_fn: Fn, operands: Sequence[Any] = ()) -> Any:
    """Return `true_fn(*operands)` if `pred` holds, else `false_fn(*operands)`.

    Run eagerly, this is Python's `if`: one branch runs. Under `torch.compile`, `torch.export` and `make_fx` it is
    `torch.cond`, which keeps both branches. If the value of `pred` is not known, both branches run and `torch.where`
    selects: inside `jit`, in a compiled `vmap` or `grad`, on meta tensors, and if it differs along a vmapped dimension.

    Args:
        pred: A bool, or a tensor of one element.
        true_fn: A function of the operands.
        false_fn: A function of the operands whose result has the same structure, shapes and dtypes.
        operands: A tuple or list of trees, tensors, and containers of these.

    Raises:
        UnsupportedError: `operands` is not a tuple or list.
        TreeStructureError: Both branches run, and their results differ in structure.
        LeafMismatchError: A leaf of the results differs in shape, dtype or device; the message names it.
        BatchSizeError: A tree of the results differs in batch size.

    Examples:
        >>> td = TensorDict({"x": torch.ones(3)}, [3])
        >>> tdf.cond(td["x"].sum() > 2, lambda t: t * 2, lambda t: t - 1, (td,))["x"]
        tensor([2., 2., 2.])
    """
    _check_operands("cond", operands)
    if not isinstance(pred, (Tensor, torch.SymBool)):
        if pred:
            return true_fn(*operands)
        return false_fn(*operands)
    if _is_captured():
        return _captured_cond(pred, true_fn, false_fn, operands)
    if not isinstance(pred, Tensor) or is_known(pred):
        if pred:
            return true_fn(*operands)
        return false_fn(*operands)
    yes = true_fn(*operands)
    no = false_fn(*operands)
    _check_alike("cond: the branches return unlike results", yes, no)
    flag = pred.reshape(()).to(torch.bool)
    leaves, spec = torch_pytree.tree_flatten(yes)
    pairs = zip(leaves, torch_pytree.tree_leaves(no), strict=True)
    chosen = [torch.where(flag, a, b) if isinstance(a, Tensor) else a for a, b in pairs]
    return torch_pytree.tree_unflatten(chosen, spec)


def while_loop(cond_fn: Fn, body_fn: Fn, carried: Sequence[Any]) -> tuple[Any, ...]:
    """Return `carried` after `carried = body_fn(*carried)` was done while `cond_fn(*carried)` holds.

    Run eagerly, this is Python's `while`; under `torch.compile`, `torch.export` and `make_fx` it is torch's
    `while_loop`. The number of steps must be the same for every element of a vmapped dimension. It cannot be found
    inside `jit`, or inside a compiled `vmap` or `grad`.

    Args:
        cond_fn: A function of the carried values that returns a bool or a tensor of one element.
        body_fn: A function of the carried values that returns a tuple of new ones, with the same structure, shapes and
            dtypes.
        carried: A tuple or list of trees, tensors, and containers of these.

    Raises:
        UnsupportedError: `carried` is not a tuple or list, or the number of steps is not known.
        TreeStructureError: The body changes the structure of the carried values.
        LeafMismatchError: The body changes the shape, dtype or device of a leaf; the message names it.
        BatchSizeError: The body changes the batch size of a tree.

    Examples:
        >>> td = TensorDict({"x": torch.ones(3)}, [3])
        >>> tdf.while_loop(lambda t: t["x"].sum() < 20, lambda t: (t * 2,), (td,))[0]["x"]
        tensor([8., 8., 8.])
    """
    _check_operands("while_loop", carried)
    if _is_captured():
        leaves, refill = _split(tuple(carried))

        def test(*given: Tensor) -> Any:
            holds = cond_fn(*refill(given))
            if isinstance(holds, Tensor):
                return holds.reshape(()).to(torch.bool)
            return holds

        def body(*given: Tensor) -> Any:
            new, _ = _split(_next_carry(body_fn, tuple(refill(given))))
            return tuple([leaf.clone() for leaf in new])

        return tuple(refill(_torch_while_loop(test, body, tuple(leaves))))
    if torch.compiler.is_dynamo_compiling():
        raise _unknown_steps("a compiled vmap or grad")
    values = tuple(carried)
    while True:
        holds = cond_fn(*values)
        if isinstance(holds, Tensor) and not is_known(holds):
            raise _unknown_steps("jit, vmap of what cond_fn reads, or meta tensors")
        if not holds:
            return values
        values = _next_carry(body_fn, values)


def map(fn: Fn, xs: Any, *args: Any) -> Any:
    """Return the results of `fn(row, *args)` for each row of `xs`, stacked: one row after another, as a loop does.

    `torch.vmap` does all rows at once; this takes the memory of one. Under `torch.compile`, `torch.export` and
    `make_fx` it is torch's `map`. `row` is as under `vmap`: every leaf, and the batch of every tree, without its
    first dimension. Errors are as in `scan`.

    Args:
        fn: A function of a row and of `args`.
        xs: A tree, a tensor, or a container of these.
        *args: Passed to every call as they are.

    Shapes:
        Leaves (N, *S) become rows (*S); results (*T) become (N, *T).

    Examples:
        >>> td = TensorDict({"x": torch.arange(6.0).reshape(3, 2)}, [3])
        >>> tdf.map(lambda row: row.set("n", row["x"].sum()), td)["n"]
        tensor([1., 5., 9.])
    """
    leaves, spec = torch_pytree.tree_flatten(xs)
    length = _check_rows("map", leaves, 0)
    if _is_captured():
        known = _non_tensors((xs, args))

        def body(row: list[Tensor]) -> Any:
            return _pack_only(fn(torch_pytree.tree_unflatten(row, spec), *args), known)

        return _unpack_only(_run_map(body, leaves), known)
    results: list[Any] = []
    for i in range(length):
        row = torch_pytree.tree_unflatten([leaf[i] for leaf in leaves], spec)
        results.append(fn(row, *args))
    return _stack_rows("map: the rows give unlike results", results, 0)


def scan(combine_fn: Fn, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> tuple[Any, Any]:
    """Carry a value through the rows of `xs`: `carry, out = combine_fn(carry, row)`, one row after another.

    Run eagerly, this is a loop; under `torch.compile`, `torch.export` and `make_fx` it is torch's `scan`, whose graph
    holds the first step, and one copy of the others.

    Args:
        combine_fn: A function of the carry and a row that returns the new carry, with the structure, shapes and dtypes
            of the old, and a result.
        init: The first carry: a tree, a tensor, or a container of these.
        xs: A tree, a tensor, or a container of these, which holds the rows; `torch.arange(n)` counts steps.
        dim: The dimension of every leaf of `xs`, and of the batch of its trees, that counts the rows; the results are
            stacked along it.
        reverse: Start with the last row; results stay at the places of their rows.

    Returns:
        The last carry, and the stacked results.

    Raises:
        ValueError: `xs` has no leaves, no rows, or leaves of different lengths.
        TreeStructureError: A step changes the structure of the carry, or two results differ in structure.
        LeafMismatchError: A step changes the shape, dtype or device of a leaf; the message names it.
        BatchSizeError: A step changes the batch size of a tree.

    Examples:
        >>> td = TensorDict({"x": torch.arange(4.0)}, [4])
        >>> last, sums = tdf.scan(lambda carry, row: (carry + row, carry + row), td[0] * 0, td)
        >>> last["x"], sums["x"]
        (tensor(6.), tensor([0., 1., 3., 6.]))
    """
    leaves, spec = torch_pytree.tree_flatten(xs)
    count = _check_rows("scan", leaves, dim)
    if _is_captured():
        return _captured_scan(combine_fn, init, leaves, spec, dim, reverse)
    carry = init
    outs: list[Any] = []
    order = range(count)
    if reverse:
        order = reversed(order)
    for i in order:
        row = torch_pytree.tree_unflatten([leaf.select(dim, i) for leaf in leaves], spec)
        carry, out = _next_step(combine_fn, carry, row)
        outs.append(out)
    if reverse:
        outs.reverse()
    return carry, _stack_rows("scan: the steps give unlike results", outs, dim)


# -- eager ------------------------------------------------------------------------------------------------------


def _is_captured() -> bool:
    """Return whether a compiler records the program, by means of torch's operators.

    They have no rules for transforms of torch.func, and `jit` records its own way: both run the Python statement.
    """
    if torch.compiler.is_dynamo_compiling():
        return not in_functorch()
    # torch.func.linearize records in a dual level.
    if not is_tracing() or in_functorch() or forward_ad._current_level >= 0:
        return False
    if any([isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()]):
        return False
    return torch.compiler.is_exporting() or is_recording()


def _unknown_steps(where: str) -> UnsupportedError:
    return UnsupportedError(
        "while_loop: the number of steps is not known.",
        expected="a value",
        got=where,
        hint="scan does a fixed number of steps; torch.where can leave elements that are done as they are.",
    )


def _next_carry(body_fn: Fn, values: tuple[Any, ...]) -> tuple[Any, ...]:
    out = tuple(body_fn(*values))
    _check_alike("while_loop: body_fn does not return a tuple like the one that it is given", values, out)
    return out


def _next_step(combine_fn: Fn, carry: Any, row: Any) -> tuple[Any, Any]:
    new, out = combine_fn(carry, row)
    _check_alike(
        "scan: combine_fn does not return (carry, result) with a carry like the one that it is given", carry, new
    )
    return new, out


def _stack_rows(rule: str, rows: Sequence[Any], dim: int) -> Any:
    for row in rows[1:]:
        _check_alike(rule, rows[0], row)
    flat = [torch_pytree.tree_leaves(row) for row in rows]
    stacked: list[Any] = []
    for column in zip(*flat, strict=True):
        first = column[0]
        if isinstance(first, Tensor):
            stacked.append(torch.stack(column, _place(first, dim)))
        else:
            stacked.append(first)
    return torch_pytree.tree_unflatten(stacked, torch_pytree.tree_structure(rows[0]))


def _place(leaf: Tensor, dim: int) -> int:
    """Return where rows are stacked: as torch does, in front of results with fewer dimensions."""
    if dim <= leaf.dim():
        return dim
    return 0


# -- checks -----------------------------------------------------------------------------------------------------


def _check_operands(call: str, operands: Any) -> None:
    if not isinstance(operands, (tuple, list)):
        raise UnsupportedError(
            f"{call}: the operands are not in a tuple or list.",
            expected="a tuple or list",
            got=type(operands).__name__,
            hint="put a single tree into a tuple: (tree,).",
        )


def _check_rows(call: str, leaves: Sequence[Any], dim: int) -> int:
    if not leaves or not all([isinstance(leaf, Tensor) and leaf.dim() > dim >= 0 for leaf in leaves]):
        raise error(
            ValueError,
            f"{call}: xs has no leaf, or one without rows along dim, counted from the front.",
            expected=f"tensors with dimension {dim}",
            got=brief([list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]),
        )
    lengths = [leaf.shape[dim] for leaf in leaves]
    if lengths[0] == 0 or any([length != lengths[0] for length in lengths]):
        raise error(
            ValueError,
            f"{call}: the leaves of xs have different numbers of rows, or none.",
            expected="one length above 0",
            got=brief(lengths),
            hint="let the function capture data that every row shares.",
        )
    return lengths[0]


def _check_alike(rule: str, a: Any, b: Any, path: str = "") -> None:
    """Raise unless two results have one structure, and leaves of the same shapes, dtypes and devices."""
    at = f"{rule}."
    if path:
        at = f"{rule}, at {path!r}."
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            raise LeafMismatchError(at, expected=_describe(a), got=_describe(b))
    elif type(a) is not type(b):
        raise TreeStructureError(at, expected=type(a).__name__, got=type(b).__name__)
    elif isinstance(a, TensorCollection):
        _check_alike_trees(rule, at, a, b, path)
    elif isinstance(a, dict):
        # The values of a dict come in its order.
        _check_same_keys(at, list(a), list(b))
        for key, value in a.items():
            _check_alike(rule, value, b[key], _below(path, key))
    elif isinstance(a, (tuple, list)):
        if len(a) != len(b):
            raise TreeStructureError(at, expected=f"{len(a)} values", got=f"{len(b)} values")
        for i in range(len(a)):
            _check_alike(rule, a[i], b[i], _below(path, i))
    elif a is not b and a != b:
        raise TreeStructureError(at, expected=brief(a), got=brief(b))


# Any: trees of one class.
def _check_alike_trees(rule: str, at: str, a: Any, b: Any, path: str) -> None:
    # The leaves of a tree come in sorted order.
    _check_same_keys(at, sorted(a._data), sorted(b._data))
    for key, value in a._data.items():
        _check_alike(rule, value, b._data[key], _below(path, key))
    if a._ties != b._ties:
        raise TreeStructureError(at, expected=f"ties {brief(a._ties)}", got=f"ties {brief(b._ties)}")
    if a._batch_size != b._batch_size:
        sizes = [f"batch size {list(tree._batch_size)}" for tree in (a, b)]
        raise BatchSizeError(at, expected=sizes[0], got=sizes[1])


def _check_same_keys(at: str, mine: list[Any], theirs: list[Any]) -> None:
    if mine != theirs:
        raise TreeStructureError(at, expected=f"keys {brief(mine)}", got=f"keys {brief(theirs)}")


def _below(path: str, key: object) -> str:
    if path:
        return f"{path}.{key}"
    return str(key)


def _describe(leaf: Tensor) -> str:
    return f"shape {list(leaf.shape)}, {leaf.dtype}, {leaf.device}"


# -- captured ---------------------------------------------------------------------------------------------------

# torch's operators carry tensors in built-in containers out of a body: neither a tree made inside, nor a note of its
# structure, survives the tracing. So a body returns {code: leaves}, where the code is the structure in plain tuples:
# torch compares the keys of a dict between branches, and gives them back.


def _captured_cond(pred: Any, true_fn: Fn, false_fn: Fn, operands: Sequence[Any]) -> Any:
    given, refill = _split(operands)
    known = _non_tensors(operands)

    def true_branch(*leaves: Tensor) -> Any:
        return _pack_only(true_fn(*refill(leaves)), known)

    def false_branch(*leaves: Tensor) -> Any:
        return _pack_only(false_fn(*refill(leaves)), known)

    if isinstance(pred, Tensor):
        pred = pred.reshape(()).to(torch.bool)
    return _unpack_only(torch.cond(pred, true_branch, false_branch, tuple(given)), known)


def _captured_scan(combine_fn: Fn, init: Any, leaves: list[Tensor], spec: Any, dim: int, reverse: bool) -> Any:
    # The first step is done outside of torch's scan: its result gives the structure of the others.
    length = leaves[0].shape[dim]
    first_row = length - 1 if reverse else 0
    row = torch_pytree.tree_unflatten([leaf.select(dim, first_row) for leaf in leaves], spec)
    carry, made = _next_step(combine_fn, init, row)
    if length == 1:
        return carry, _stack_rows("", [made], dim)
    start, refill = _split(carry)
    first, reshape = _split(made)

    def step(given: list[Tensor], row: list[Tensor]) -> Any:
        old = refill(given) if start else carry
        new, out = _next_step(combine_fn, old, torch_pytree.tree_unflatten(row, spec))
        _check_alike("scan: the steps give unlike results", made, out)
        kept = [given[0]]
        if start:
            kept, _ = _split(new)
        results, _ = _split(out)
        return [leaf.clone() for leaf in kept], [leaf.clone() for leaf in results]

    # torch's scan takes a carry of at least one tensor, which owns its memory.
    begin = [leaf.clone() for leaf in start] or [torch.zeros(())]
    rest_start = 0 if reverse else 1
    rest = [leaf.narrow(dim, rest_start, length - 1) for leaf in leaves]
    last, outs = _torch_scan(step, begin, rest, dim=dim, reverse=reverse)
    joined: list[Tensor] = []
    for leaf, others in zip(first, outs, strict=True):
        place = _place(leaf, dim)
        if reverse:
            parts = [others, leaf.unsqueeze(place)]
        else:
            parts = [leaf.unsqueeze(place), others]
        joined.append(torch.cat(parts, place))
    return refill(last) if start else carry, reshape(joined)


def _split(values: Any) -> tuple[list[Tensor], Fn]:
    """Return the tensors of a structure, and the function that puts others in their places."""
    flat, spec = torch_pytree.tree_flatten(values)
    places = [isinstance(leaf, Tensor) for leaf in flat]

    def refill(leaves: Any) -> Any:
        given = list(leaves)
        filled = [given.pop(0) if place else leaf for leaf, place in zip(flat, places, strict=True)]
        return torch_pytree.tree_unflatten(filled, spec)

    return [leaf for leaf in flat if isinstance(leaf, Tensor)], refill


def _non_tensors(value: Any) -> list[Any]:
    """Return the non-tensor nodes of the operands: a result may hold them again."""
    nodes = torch_pytree.tree_leaves(value, is_leaf=lambda node: isinstance(node, NonTensorBase))
    return [node for node in nodes if isinstance(node, NonTensorBase)]


def _pack_only(value: Any, known: list[Any]) -> dict[Any, tuple[Tensor, ...]]:
    """Return a result as a body returns it, `{code: leaves}`."""
    leaves: list[Tensor] = []
    code = _pack(value, leaves, known)
    return {code: tuple(leaves)}


def _pack(value: Any, leaves: list[Tensor], known: list[Any], batch_dims: int = 0) -> Any:
    """Append the tensors of a result to `leaves` and return its structure in hashable values.

    The leaves determine batch sizes, as after any map of them: the code has -1 for sizes, which may be symbols of
    the body's graph. A tree without leaves has the sizes of its dimensions after the first `batch_dims`, its parent's.
    """
    if isinstance(value, Tensor):
        # A result may not share memory with an operand or with another result.
        leaves.append(value.clone())
        return ("leaf", value.dtype, value.dim())
    if isinstance(value, TensorCollection):
        return _pack_tree(value, leaves, known, batch_dims)
    if isinstance(value, NonTensorBase):
        for i, node in enumerate(known):
            if node is value:
                return ("known", i)
        if isinstance(value, NonTensorData):
            return ("data", value._value, _sizes(value._size, batch_dims))
        return ("stack", tuple(value._array.ravel().tolist()), tuple(value._array.shape))
    if type(value) is dict:
        return ("dict", tuple([(key, _pack(item, leaves, known)) for key, item in value.items()]))
    if isinstance(value, (tuple, list)):
        parts = tuple([_pack(item, leaves, known) for item in value])
        return ("named" if hasattr(value, "_fields") else "items", type(value), parts)
    return ("value", value)


def _pack_tree(tree: TensorCollection, leaves: list[Tensor], known: list[Any], batch_dims: int) -> Any:
    children, context = flatten(tree)
    size = context.batch_size
    voting = any([isinstance(leaf, Tensor) for leaf in torch_pytree.tree_leaves(children)])
    inner = len(size) if voting else batch_dims
    parts = tuple([_pack(child, leaves, known, inner) for child in children])
    own = None
    if context.static is not None:
        own = (tuple(context.static.kinds.items()), context.static.own)
    grafts = tuple([tuple(item) for item in context.grafts])
    # `_unpack_tree` reads these parts. A plain tuple: see above.
    return (
        "tree", type(tree), parts, context.keys, context.ties, context.order, _sizes(size, inner), context.device,
        context.names, context.features, own, grafts,
    )  # fmt: skip


def _sizes(size: Size, unsaid: int) -> tuple[int, ...]:
    return (-1,) * unsaid + tuple(size[unsaid:])


def _unpack_only(result: Any, known: list[Any]) -> Any:
    """Return the result that a body returned as `{code: leaves}`."""
    [(code, leaves)] = result.items()
    return _unpack(code, list(leaves), known)


def _unpack(code: Any, leaves: list[Tensor], known: list[Any]) -> Any:
    kind = code[0]
    if kind == "leaf":
        return leaves.pop(0)
    if kind == "tree":
        return _unpack_tree(code, leaves, known)
    if kind == "known":
        return known[code[1]]
    if kind == "data":
        return NonTensorData._wrap(code[1], Size(code[2]))
    if kind == "stack":
        return NonTensorStack(*code[1]).reshape(code[2])
    if kind == "dict":
        return {key: _unpack(item, leaves, known) for key, item in code[1]}
    if kind == "value":
        return code[1]
    items = [_unpack(item, leaves, known) for item in code[2]]
    if kind == "named":
        return code[1](*items)
    return code[1](items)


def _unpack_tree(code: Any, leaves: list[Tensor], known: list[Any]) -> Any:
    _, cls, parts, keys, ties, order, size, device, names, features, own, grafts = code
    children = [_unpack(part, leaves, known) for part in parts]
    static = None
    if own is not None:
        kinds, own_static = own
        static = Static(dict(kinds), ties, own_static)
    made = tuple([Graft(*item) for item in grafts])
    context = Context(keys, ties, order, Size(size), device, names, features, static, made)
    voted = rebuilt_size(cls, tuple(children), context)[0]
    if voted is not None:
        for i, child in enumerate(children):
            # A stack of values keeps its length: dynamo (torch 2.13) cannot compare it.
            if not isinstance(child, NonTensorStack):
                children[i] = _follow(child, Size(size), voted)
        context = context._replace(batch_size=voted)
    return unflatten(cls, context, tuple(children))
