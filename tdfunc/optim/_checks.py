"""What an optimizer checks before a step: leaves, gradients, state, and hyperparameters that differ by member."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import has_values
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TreeStructureError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.walk import list_leaves, list_paths, same_keys
from tdfunc.optim._lists import Coefficient, Leaves


def check_tree(name: str, params: TensorCollection) -> None:
    """Raise unless params are a tree."""
    if not isinstance(params, TensorCollection):
        raise error(
            TypeError,
            f"{name}: params must be a tree.",
            expected="a TensorDict",
            got=type(params).__name__,
            hint="TensorDict(params) makes one of a dict; tdfunc.functional(module) gives a module's.",
        )


def trainable(name: str, params: TensorCollection) -> Leaves:
    """Return the leaves of params; each must be a floating-point tensor."""
    check_tree(name, params)
    leaves = list_leaves(params)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            raise LeafMismatchError(
                f"{name}: the leaf {_path(params, i)!r} of params cannot be trained.",
                expected="a tensor of a floating-point dtype",
                got=str(leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf),
                hint="train a part of the tree: tdfunc.split separates buffers, tdfunc.partition any leaves.",
            )
    return leaves


def matched(name: str, what: str, params: TensorCollection, leaves: Leaves, other: Any) -> Leaves:
    """Return the leaves of `other`, which must be a tree with the keys, shapes and dtypes of params."""
    if not isinstance(other, TensorCollection) or not same_keys(params, other):
        raise _keys_differ(name, what, params, other)
    values = list_leaves(other)
    for i, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
        if not isinstance(value, Tensor) or value.shape != leaf.shape or value.dtype != leaf.dtype:
            raise LeafMismatchError(
                f"{name}.update: the {what} of {_path(params, i)!r} does not fit its parameter.",
                expected=f"shape {list(leaf.shape)}, {leaf.dtype}",
                got=f"shape {list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value),
            )
        if value.layout is not leaf.layout:
            raise LeafMismatchError(
                f"{name}.update: the {what} of {_path(params, i)!r} has another layout than its parameter.",
                expected=str(leaf.layout),
                got=str(value.layout),
                hint="grads.apply(lambda g: g.to_dense())" if leaf.layout is torch.strided else None,
            )
    return values


def _keys_differ(name: str, what: str, params: TensorCollection, other: Any) -> TreeStructureError:
    if not isinstance(other, TensorCollection):
        return TreeStructureError(
            f"{name}.update: the {what}s must be a tree.", expected=type(params).__name__, got=type(other).__name__
        )
    mine, theirs = {dotted(p) for p in list_paths(params)}, {dotted(p) for p in list_paths(other)}
    return TreeStructureError(
        f"{name}.update: params and the tree of the {what} have different leaves.",
        expected=f"a {what} for each of {sorted(mine - theirs)}" if mine - theirs else f"leaves {sorted(mine)}",
        got=f"leaves that params lack: {sorted(theirs - mine)}" if theirs - mine else "none",
        hint="leaves without a gradient are not trained: tdfunc.partition them off, or optim.masked.",
    )


def check_state(name: str, state: Any, wanted: set[str], size: torch.Size) -> None:
    """Raise unless `state` has the entries of this optimizer and a step count for this batch size."""
    if not isinstance(state, TensorCollection) or state._data.keys() != wanted:
        raise TreeStructureError(
            f"{name}.update: this is not a state of this optimizer.",
            expected=f"a tree with the entries {sorted(wanted)}",
            got=f"{sorted(state._data)}" if isinstance(state, TensorCollection) else type(state).__name__,
            hint="state = opt.init(params)",
        )
    step = state._data["step"]
    if step.shape != size:
        raise BatchSizeError(
            f"{name}.update: the step count of the state does not have the batch size of params.",
            expected=list(size),
            got=list(step.shape),
            hint="state = opt.init(params), of params with this batch size.",
        )


def check_members(name: str, what: str, value: Tensor, params: TensorCollection, leaves: Leaves) -> None:
    """Raise unless a tensor of one value per member fits the batch size and the leading dimensions of all leaves."""
    size = params._batch_size
    if value.shape != size and (size or value.dim() > 1):
        raise BatchSizeError(
            f"{name}: {what} does not have one value for each member.",
            expected=f"shape {list(size)}, the batch size of params" if size else "a number or shape [members]",
            got=f"shape {list(value.shape)}",
        )
    if value.dim():
        check_dense(name, f"{what} has a value for each member", params)
    for i, leaf in enumerate(leaves):
        if leaf.shape[: value.dim()] != value.shape:
            raise LeafMismatchError(
                f"{name}: {what} does not fit the leading dimensions of the leaf {_path(params, i)!r}.",
                expected=f"a leaf of shape {list(value.shape)} + (...)",
                got=f"shape {list(leaf.shape)}",
                hint="stack the members (tdfunc.stack_modules), or give one number.",
            )


# Any: a schedule may return anything.
def scheduled(name: str, what: str, value: Any, size: torch.Size) -> Coefficient:
    """Return what a schedule gave for one step: a float, or a float64 tensor that is one number or of this size."""
    if isinstance(value, Tensor):
        if not value.dim() or value.shape == size:
            return value.double()
        # A size of leaves alone, as in check_members, will not do: under vmap members would be features.
        raise BatchSizeError(
            f"{name}.update: the schedule of {what} gave a tensor that is not one number for each member.",
            expected=f"a number or shape {list(size)}, the batch size of params" if size else "one number",
            got=f"shape {list(value.shape)}",
            hint=f"a value for each member: give the tensor itself as {what}, which works under torch.vmap too; "
            "or params.with_batch_size([members]), if the leaves are stacked and the tree does not say so.",
        )
    if isinstance(value, (Real, torch.SymFloat, torch.SymInt)):
        return float(value)
    raise error(
        TypeError,
        f"{name}.update: the schedule of {what} gave no number.",
        expected="a number or tensor for each number of steps done",
        got=repr(value),
    )


def has_lazy_members(tree: TensorCollection) -> bool:
    """Whether members are rows of a lazy stack somewhere: the leaves there have no dimension for them."""
    return bool(tree._batch_size) and _has_lazy(tree)


def _has_lazy(tree: TensorCollection) -> bool:
    if tree._each(lambda t: t) is not None:
        return True
    return any(isinstance(node, TensorCollection) and _has_lazy(node) for node in tree._data.values())


def check_dense(call: str, what: str, tree: TensorCollection) -> None:
    """Raise if what differs by member would be spread over the features of a lazy stack's rows."""
    if has_lazy_members(tree):
        raise UnsupportedError(
            f"{call}: {what}, and members are rows of a lazy stack.",
            expected="leaves that are stacked along the batch",
            got="a lazy stack, whose rows are trees of their own",
            hint="stack the rows densely where they fit, or step each row with an optimizer of its own.",
        )


def one_count(name: str, step: Tensor, params: TensorCollection) -> Tensor:
    """Return how many steps were done: one number if rows of a lazy stack are members, which must agree on it."""
    if not step.dim() or not has_lazy_members(params):
        return step
    if not step.numel():
        return step.new_zeros(())
    first = step[(0,) * step.dim()]
    # Strides of 0 say so without a look at the values, which a transform or trace does not have.
    is_known = has_values() and step.device.type != "meta"
    if is_known and any(step.stride()) and not bool((step == first).all()):
        check_dense(f"{name}.update", "the state has another step count for each member", params)
    return first


def check_active(name: str, active: Tensor, params: TensorCollection) -> None:
    """Raise unless `active` says yes or no for each member."""
    # Any: a caller may give a bool or a list.
    given: Any = active
    if not isinstance(given, Tensor) or given.dtype is not torch.bool:
        raise LeafMismatchError(
            f"{name}.update: active must be yes or no for each member.",
            expected="a tensor of torch.bool",
            got=str(given.dtype) if isinstance(given, Tensor) else type(given).__name__,
        )
    if active.shape != params._batch_size:
        raise BatchSizeError(
            f"{name}.update: active does not have the batch size of params.",
            expected=f"shape {list(params._batch_size)}",
            got=f"shape {list(active.shape)}",
            hint="if the leaves are stacked and the tree does not say so: params.with_batch_size([members]).",
        )
    check_dense(f"{name}.update", "active chooses members", params)


def check_hyper(rule: str, name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise unless every number in a hyperparameter lies in [low, high); functions are checked by nobody."""
    if callable(value):
        return
    if not isinstance(value, (Tensor, Real)):
        raise error(
            TypeError,
            f"{rule}: {name} is no hyperparameter.",
            expected="a number, a tensor with a value for each member, or a function of the step",
            got=repr(value),
            hint="torch.tensor([...]) makes a tensor of a list.",
        )
    numbers = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
    # Written so that nan fails.
    if not bool(((numbers >= low) & (numbers < high)).all()):
        raise error(
            ValueError,
            f"{rule}: {name} is out of range.",
            expected=f"{low} <= {name}" + (f" < {high}" if high < math.inf else ", finite"),
            got=value,
        )


def _path(tree: TensorCollection, i: int) -> str:
    return dotted(list_paths(tree)[i])
