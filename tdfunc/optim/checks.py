"""Checks of a step's arguments: leaves, gradients, state, and hyperparameters."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import has_values, is_compiling
from tdfunc.core.errors import (
    BatchSizeError,
    LeafMismatchError,
    TreeStructureError,
    UnsupportedError,
    brief,
    error,
    explain,
)
from tdfunc.core.keys import dotted
from tdfunc.core.walk import Difference, list_leaves, list_paths, same_keys, zip_trees
from tdfunc.optim.lists import LOW_PRECISION, Coefficient, Leaves, place_alike, wide_dtype

# The entry of a node's metadata that counts steps, and the count at which a loop is likely not to differentiate them.
_STEPS = "tdfunc_steps"
_MANY_STEPS = 100


# Any: the check is for values of other types.
def check_tree(call: str, what: str, value: Any) -> None:
    """Raise unless a value is a tree."""
    if not isinstance(value, TensorCollection):
        raise error(
            TypeError,
            f"{call}: {what} is not a tree.",
            expected="a TensorDict",
            got=type(value).__name__,
            hint="TensorDict(params) makes one of a dict; tdfunc.functional(module) gives a module's.",
        )


def check_dense(call: str, tree: TensorCollection) -> None:
    """Raise if members are rows of a lazy stack, whose leaves have no dimension for them."""
    nodes: list[Any] = [tree] if tree._batch_size else []
    for node in nodes:
        if isinstance(node, TensorCollection._lazy):
            raise UnsupportedError(
                f"{call}: the members are not stacked along the batch.",
                expected="leaves with a dimension for the members",
                got="a lazy stack, whose rows are separate trees",
                hint="dense() stacks rows of one shape; otherwise give each row its own optimizer.",
            )
        nodes += [child for child in node._data.values() if isinstance(child, TensorCollection)]


def list_trainable(name: str, params: TensorCollection) -> Leaves:
    """Return the leaves of params; each must be a floating-point or complex tensor."""
    check_tree(name, "params", params)
    leaves = list_leaves(params)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            raise LeafMismatchError(
                f"{name}: the leaf {path_of(params, i)!r} of params is not a floating-point or complex tensor.",
                got=str(leaf.dtype) if isinstance(leaf, Tensor) else brief(leaf),
                hint="train a part of the tree: tdfunc.split separates buffers, tdfunc.partition any leaves.",
            )
    return leaves


def check_real(name: str, params: TensorCollection) -> None:
    """Raise if a leaf is complex."""
    for path, leaf in zip(list_paths(params), list_leaves(params), strict=True):
        if leaf.is_complex():
            raise LeafMismatchError(
                f"{name}: the leaf {dotted(path)!r} of params is complex.",
                expected="floating-point numbers",
                got=str(leaf.dtype),
                hint="adam, sgd and most others train complex leaves; multi gives them to another rule.",
            )


def warn_narrow(name: str, leaves: Leaves) -> None:
    """Warn if a rule is to step parameters of 16 bits, whose rounding loses small steps."""
    low = next((leaf.dtype for leaf in leaves if leaf.dtype in LOW_PRECISION), None)
    if low is not None and not is_compiling():
        message = explain(
            f"{name}: rounding parameters to 16 bits loses the steps that are small beside them.",
            expected="parameters of float32, or an optimizer inside masters",
            got=low,
            hint=f"tdfunc.optim.masters({name}(...)) keeps what rounding cuts off; a warnings filter hides this.",
        )
        warnings.warn(message, stacklevel=3)


def warn_graph(name: str, before: Sequence[Leaves], after: Sequence[Leaves]) -> None:
    """Warn if autograd keeps the graph of many steps, as in a loop that never differentiates through them.

    Each node says how many steps its graph holds.

    Args:
        name: The name of the rule.
        before: The parameters and the slots before the step.
        after: The same after it.
    """
    steps = 1
    for node in _first_nodes(before):
        steps = max(steps, node.metadata.get(_STEPS, 0) + 1)
    for node in _first_nodes(after):
        node.metadata[_STEPS] = steps
    if steps == _MANY_STEPS:
        message = explain(
            f"{name}: autograd keeps the graph of {steps} steps, and memory grows with each step.",
            expected="gradients and parameters that do not require grad, unless you differentiate through the steps",
            hint="train params.detach(), and detach other trees that the loss reads, such as from_module(model); "
            "or call under torch.no_grad(). A warnings filter hides this.",
        )
        warnings.warn(message, stacklevel=3)


# Any: a node of autograd, whose metadata torch does not declare.
def _first_nodes(columns: Sequence[Leaves]) -> list[Any]:
    """Return the node of the first leaf of each list that has one."""
    found: list[Any] = []
    for leaves in columns:
        nodes = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        found += nodes[:1]
    return found


def check_keys(name: str, what: str, params: TensorCollection, other: Any) -> None:
    """Raise unless `other` is a tree with the keys and ties of params."""
    check_tree(f"{name}.update", f"the {what}", other)
    if not same_keys(params, other):
        found = zip_trees(params, other)
        if isinstance(found, Difference):
            hint = "optim.masked trains the leaves that have a gradient; tdfunc.partition takes them out of the tree."
            raise found.error(f"{name}.update", hint=hint, note=f", in params and in the {what}")
        raise TreeStructureError(
            f"{name}.update: the {what} and params tie different leaves.",
            expected=brief(params._ties),
            got=brief(other._ties),
        )


def list_matching(
    name: str,
    what: str,
    params: TensorCollection,
    leaves: Leaves,
    other: Any,
    *,
    layout: torch.layout | None = None,
    shapes: Sequence[torch.Size] | None = None,
    is_wide: bool = False,
) -> Leaves:
    """Return the leaves of `other`, which must be a tree with the keys, ties, shapes and dtypes of params.

    Shapes, and the layout of all leaves, may be given where they are others. With `is_wide`, leaves may also have the
    dtype in which a state keeps them.
    """
    check_keys(name, what, params, other)
    values = list_leaves(other)
    if values and type(values[0]) is Parameter and type(leaves[0]) is not Parameter:
        raise _order_error(name, what, params)
    # No function for each leaf, for speed: every update compares all leaves.
    for i, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
        shape = leaf.shape if shapes is None else shapes[i]
        kind = leaf.layout if layout is None else layout
        dtype = leaf.dtype
        if is_wide and value.dtype != dtype:
            dtype = wide_dtype(leaf)
        if value.shape == shape and value.dtype == dtype and value.layout is kind:
            continue
        hint = None
        if value.layout is not kind and layout is None:
            hint = "grads.apply(lambda g: g.to_dense())"
        elif value.layout is not kind:
            hint = "adam takes dense gradients."
        raise LeafMismatchError(
            f"{name}.update: the {what} of {path_of(params, i)!r} does not fit its parameter.",
            expected=f"shape {list(shape)}, {dtype}, {kind}",
            got=f"shape {list(value.shape)}, {value.dtype}, {value.layout}",
            hint=hint,
        )
    return values


def list_gradients(
    name: str, params: TensorCollection, leaves: Leaves, grads: Any, *, layout: torch.layout | None = None
) -> Leaves:
    """Return the leaves of the gradients as `list_matching` does, DTensors with the placements of their parameters."""
    values = list_matching(name, "gradient", params, leaves, grads, layout=layout)
    # Of a batch that is sharded each rank has a part of a sum. A step by it would make the parameter such a sum as
    # well, of which no rank has the values, and which cannot be saved.
    return place_alike(values, leaves)


def _order_error(name: str, what: str, params: TensorCollection) -> TypeError:
    """Return the error for parameters in the place of gradients."""
    return error(
        TypeError,
        f"{name}.update: the {what} is made of Parameters, and params are not.",
        expected="update(params, grads, state)",
        got=f"a Parameter as {what} of {path_of(params, 0)!r}",
        hint="put the arguments in this order.",
    )


def check_state(name: str, state: Any, wanted: set[str]) -> None:
    """Raise unless `state` has the entries of this optimizer."""
    if not isinstance(state, TensorCollection) or state._data.keys() != wanted:
        raise TreeStructureError(
            f"{name}.update: the state is not of this optimizer.",
            expected=f"a tree with the entries {brief(sorted(wanted))}",
            got=brief(sorted(state._data)) if isinstance(state, TensorCollection) else type(state).__name__,
            hint="state = opt.init(params); the order is update(params, grads, state).",
        )


def check_step(name: str, step: Tensor, size: torch.Size) -> None:
    """Raise unless a step count is for this batch size."""
    if step.shape != size:
        raise BatchSizeError(
            f"{name}.update: the step count of the state does not have the batch size of params.",
            expected=list(size),
            got=list(step.shape),
            hint="state = opt.init(params), of params with this batch size.",
        )


def check_active(name: str, active: Tensor | None, size: torch.Size) -> None:
    """Raise unless there is one bool for each member."""
    if active is None:
        return
    # Any: other types. Numbers would be added to the count of steps.
    given: Any = active
    is_bool = isinstance(given, Tensor) and given.dtype is torch.bool
    if not is_bool:
        raise error(
            TypeError,
            f"{name}.update: active is not a tensor of bools.",
            expected=f"torch.bool of shape {list(size)}",
            got=str(given.dtype) if isinstance(given, Tensor) else brief(given),
            hint="active=torch.as_tensor(active) != 0.",
        )
    if active.shape != size:
        raise BatchSizeError(
            f"{name}.update: active does not have the batch size of params.",
            expected=f"shape {list(size)}",
            got=f"shape {list(active.shape)}",
            hint="params.with_batch_size([members]), if the leaves are stacked and the tree has no batch size.",
        )


def check_members(
    name: str, what: str, value: Tensor, params: TensorCollection, leaves: Leaves, *, only_batch: bool = False
) -> None:
    """Raise unless a tensor of one value per member fits the batch size and the leading dimensions of all leaves."""
    size = params._batch_size
    if value.shape != size and (size or only_batch or value.dim() > 1):
        expected = "a number or shape [members]"
        hint = None
        if size:
            expected = f"shape {list(size)}, the batch size of params"
        elif only_batch:
            hint = "params.with_batch_size([members]), if the leaves are stacked."
        raise BatchSizeError(
            f"{name}: {what} does not have one value for each member.",
            expected=expected,
            got=f"shape {list(value.shape)}",
            hint=hint,
        )
    for i, leaf in enumerate(leaves):
        if leaf.shape[: value.dim()] != value.shape:
            raise LeafMismatchError(
                f"{name}: {what} does not fit the leading dimensions of the leaf {path_of(params, i)!r}.",
                expected=f"a leaf of shape {list(value.shape)} + (...)",
                got=f"shape {list(leaf.shape)}",
                hint="stack the members (tdfunc.stack_modules), or give one number.",
            )


# Any: a schedule may return anything.
def check_scheduled(name: str, what: str, value: Any, size: torch.Size) -> Coefficient:
    """Return the value of a schedule: a float, or a float64 tensor that is one number or of this size."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.dim() and value.shape != size:
        # A size of leaves alone, as in check_members, will not do: under vmap members would be features.
        raise BatchSizeError(
            f"{name}.update: the schedule of {what} does not give one number for each member.",
            expected=f"a number or shape {list(size)}, the batch size of params" if size else "one number",
            got=f"shape {list(value.shape)}",
            hint=f"a value for each member: give the tensor itself as {what}, which also works under torch.vmap; "
            "or params.with_batch_size([members]), if the leaves are stacked and the tree has no batch size.",
        )
    return value.double()


def check_hyper(rule: str, name: str, value: Any, low: float, high: float = math.inf) -> Any:
    """Return a hyperparameter, whose numbers must all be in [low, high); lists and arrays become tensors.

    Schedules have no numbers yet.
    """
    if isinstance(value, (list, tuple, np.ndarray)):
        value = torch.tensor(value, dtype=torch.float64)
    if callable(value) or (isinstance(value, Tensor) and not has_values()):
        return value
    if isinstance(value, str) or value is None:
        raise error(TypeError, f"{rule}: {name} is not a number.", got=brief(value))
    # Written so that nan fails.
    if isinstance(value, Tensor):
        fits = bool(((value >= low) & (value < high)).all())
    else:
        fits = low <= value < high
    if not fits:
        bound = ", finite"
        if high < math.inf:
            bound = f" < {high}"
        raise error(ValueError, f"{rule}: {name} is out of range.", expected=f"{low} <= {name}{bound}", got=value)
    return value


def path_of(tree: TensorCollection, i: int) -> str:
    """Return the path of the leaf with this number as messages show it."""
    return dotted(list_paths(tree)[i])
