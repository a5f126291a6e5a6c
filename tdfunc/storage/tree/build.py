"""A tree from its checked description (`decode.py`) and the values of its leaves."""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import CorruptCheckpointError, TreeStructureError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.shapes import as_names
from tdfunc.core.types import Kind, Path, Ties
from tdfunc.storage.tree.decode import Description, as_size
from tdfunc.storage.tree.encode import IS_PARAMETER, IS_VALUE, KIND_FLAGS, REQUIRES_GRAD, check_tie_size, restrict
from tdfunc.storage.tree.objects import OBJECT, PlainObject, unpack
from tdfunc.storage.tree.specs import malformed

_KINDS = {flag: kind for kind, flag in KIND_FLAGS.items()}
Classes: TypeAlias = type[TensorCollection] | Sequence[type[TensorCollection]] | Mapping[str, type[TensorCollection]]


def build_tree(
    plan: Description, leaves: Any, classes: Classes = (), device: torch.device | None = None, root: int = 0
) -> TensorCollection:
    """Return the tree (or a sub-tree) around values: `leaves`, a list or a dict, has the value of leaf `i` at `i`.

    If `device` is given, all leaves are on it. Plain objects stay nodes if `classes` contains `PlainObject`.
    """
    objects = [i for i in plan.rich if plan.nodes[i].get("class") == OBJECT]
    keeps_objects = not objects or (not isinstance(classes, (type, Mapping)) and PlainObject in classes)
    ties = ties_of(plan)
    marked = set(plan.flags)
    if ties and not keeps_objects:
        inside = {plan.path(i) for i in objects}
        ties = {i: _outside(plan.path(i), groups, inside) for i, groups in ties.items()}
    built: dict[int, Any] = {}
    kinds = {flags: kind_of(flags) for flags in {*marked, *_KINDS, ""}}
    has_kinds = any(kinds[flags] for flags in marked)
    listed = type(leaves) is list
    make = TensorCollection._open._make
    # A node comes after the one that it is in, so going back its sub-trees are there.
    for number in reversed(plan.below(root) if root else range(len(plan.nodes))):
        keys = plan.keys[number]
        size = plan.sizes[number]
        is_rich = number in plan.rich
        start = plan.starts[number]
        end = plan.starts[number + 1]
        if is_rich:
            values, flags = _read_items(plan, number, leaves, built)
        else:
            if listed:
                values = leaves[start:end]
            else:
                values = [leaves[i] for i in range(start, end)]
            flags = ()
            if has_kinds:
                flags = plan.flags[start:end]
            if end - start != len(keys):
                rest = iter(values)
                further = iter(flags)
                items = plan.items[number]
                values = [built[what["tree"]] if type(what) is dict else next(rest) for what in items]
                flags = ()
                if has_kinds:
                    flags = ["" if type(what) is dict else next(further) for what in items]
        data: dict[str, Any] = dict(zip(keys, values, strict=False))
        if len(data) != len(keys):
            raise malformed("distinct keys", f"a key twice in node {number}")
        own = {}
        if flags:
            own = {key: kind for key, flag in zip(keys, flags, strict=False) if (kind := kinds[flag])}
        place = plan.devices[number] if device is None else device
        if not is_rich and number not in ties:
            built[number] = make(data, size, place, None, Static(own) if own else None)
            continue
        node = plan.nodes[number]
        names = None
        if "names" in node:
            names = as_names(node["names"], len(size))
        static = Static(own, ties.get(number, ()), node.get("own"))
        if "class" in node and node["class"] == lazy_name():
            built[number] = _stack(data, size, place, names, static)
            continue
        if "class" in node and node["class"] == OBJECT and not keeps_objects:
            built[number] = unpack(data, static.own, size)
            continue
        cls = TensorCollection._open
        if "class" in node:
            if node["class"] == OBJECT:
                cls = PlainObject
            else:
                cls = resolve_class(node["class"], classes, keys)
        check_fields(cls, data, plan.path(number))
        built[number] = cls._make(data, size, place, names, static if static != Static() else None)
    return built[root]


def _outside(at: Path, groups: Ties, objects: set[Path]) -> Ties:
    """Return the groups of a node that have no path into a plain object, where trees have ties of their own."""
    through = [[(*at, *path[:i]) for path in group for i in range(1, len(path))] for group in groups]
    return tuple([group for group, paths in zip(groups, through, strict=True) if objects.isdisjoint(paths)])


def _read_items(plan: Description, number: int, leaves: Any, built: dict[int, Any]) -> tuple[list[Any], list[str]]:
    """Return the values and flags of the items of a node of any kind."""
    leaf = plan.starts[number]
    if "own" in plan.nodes[number]:
        outer = Size(())
    else:
        outer = plan.sizes[number]
    values: list[Any] = []
    found: list[str] = []
    for what in plan.items[number]:
        if type(what) is not dict:
            value = leaves[leaf]
            flags = plan.flags[leaf]
            if IS_VALUE in flags:
                value = NonTensorData(value, _batch(what[3] if len(what) > 3 else outer, outer))
            leaf += 1
        elif "tree" in what:
            value = built[what["tree"]]
            flags = what.get("flags", "")
        else:
            if "tie" in what:
                value = leaves[plan.tied[what["tie"]]]
            else:
                value = _nontensor(what, outer)
            flags = what.get("flags", "")
        values.append(value)
        found.append(flags)
    return values, found


def kind_of(flags: str) -> Kind | None:
    """Return the kind of leaf in flags."""
    return next((_KINDS[flag] for flag in flags if flag in _KINDS), None)


def flag_leaf(leaf: Tensor, flags: str) -> Tensor:
    """Return a leaf as the Parameter that it was, or with its `requires_grad`."""
    if IS_PARAMETER in flags:
        return nn.Parameter(leaf, REQUIRES_GRAD in flags)
    if REQUIRES_GRAD in flags:
        return leaf.requires_grad_()
    return leaf


def without_values(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a leaf of a shape and a dtype on the meta device: a Parameter if the given one is."""
    made = torch.empty(leaf.shape, dtype=dtype, device="meta")
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(made, leaf.requires_grad)
    return made.requires_grad_(leaf.requires_grad)


def move_leaf(leaf: Tensor, target: torch.device, *, non_blocking: bool = False) -> Tensor:
    """Return a leaf on a device."""
    try:
        return leaf.to(target, non_blocking=non_blocking)
    # A torch without CUDA raises an AssertionError.
    except (AssertionError, NotImplementedError, RuntimeError) as err:
        raise UnsupportedError(
            "the leaves must be on a device of this machine.",
            expected=str(target),
            got=f"{type(err).__name__}: {err}"[:200],
            hint='load(path, device="cpu").',
        ) from err


def ties_of(plan: Description) -> dict[int, Ties]:
    """Return the groups of tied paths by node, relative to it."""
    if not plan.groups:
        return {}
    depths = [0] * len(plan.nodes)
    for number, above in enumerate(plan.parents):
        depths[number] = depths[above[0]] + 1 if above is not None else 0
    check_tie_size(sum((depths[node] + 1) ** 2 for refs in plan.groups for node, _ in refs), CorruptCheckpointError)
    paths = [[(*plan.path(node), key) for node, key in refs] for refs in plan.groups]
    result: dict[int, Ties] = {0: tuple(tuple(group) for group in paths)}
    inner: dict[int, dict[str, Ties]] = {0: restrict(result[0])}
    for number, above in enumerate(plan.parents):
        if above is not None and above[1] in inner.get(above[0], {}):
            result[number] = inner[above[0]][above[1]]
            inner[number] = restrict(result[number])
    return result


def _batch(shape: Any, size: Size) -> Size:
    if not isinstance(shape, Size):
        shape = as_size(shape)
    if shape[: len(size)] != size:
        raise malformed(f"a shape that starts with the batch size {list(size)}", str(list(shape)))
    return shape


def _nontensor(what: dict[str, Any], size: Size) -> NonTensorBase:
    shape = _batch(what.get("shape", size), size)
    if "value" in what:
        return NonTensorData(what["value"], shape)
    array = np.empty(len(what["values"]), dtype=object)
    for i, value in enumerate(what["values"]):
        array[i] = value
    return NonTensorStack._wrap(array.reshape(shape))


def lazy_name() -> str:
    """Return the recorded name of the class of lazy stacks."""
    return f"{TensorCollection._lazy.__module__}:{TensorCollection._lazy.__qualname__}"


def _stack(
    data: dict[str, Any], size: Size, device: torch.device | None, names: tuple[str | None, ...] | None, static: Static
) -> Any:
    """Return a lazy stack of trees, in the class for theirs."""
    trees = list(data.values())
    kinds = {(type(tree), len(tree._batch_size)) if isinstance(tree, TensorCollection) else None for tree in trees}
    if len(kinds) != 1 or None in kinds or list(data) != [str(number) for number in range(len(trees))]:
        raise malformed("a lazy stack of trees of one class and number of dimensions, in order", repr(list(data)))
    dim = static.own
    if type(dim) is not int or not -len(size) <= dim < 0 or len(trees[0]._batch_size) != len(size) - 1:
        raise malformed(f"the dimension of a lazy stack whose batch size is {list(size)}", repr(dim))
    made = TensorCollection._lazy._of(trees, len(size) + dim)
    if made._batch_size != size:
        raise malformed(f"a lazy stack of the batch size {list(size)}", str(list(made._batch_size)))
    return made._make(made._data, size, device, names, static)


def check_classes(plan: Description, classes: Classes) -> None:
    """Raise unless this process has the classes of all nodes of a description."""
    for number in plan.rich:
        name = plan.nodes[number].get("class")
        if name is not None and name not in (OBJECT, lazy_name()):
            resolve_class(name, classes, plan.keys[number])


# Any: the class may be a TensorClass, which is of a higher layer.
def check_fields(cls: Any, keys: Collection[str], path: Path) -> None:
    """Raise unless a class of fixed fields has all saved fields; fields may be missing, also required ones."""
    if not hasattr(cls, "_fields") or cls._any_key:
        return
    unknown = [key for key in keys if key not in cls._fields]
    if unknown:
        lacking = [name for name in cls._required if name not in keys]
        raise TreeStructureError(
            f"{cls.__name__} must have the fields that were saved at {dotted(path) if path else 'the root'!r}.",
            expected=f"the fields {list(cls._fields)}",
            got=f"{list(keys)}: unknown {unknown}, missing {lacking}",
            hint=f"load(path, classes=TensorDict) gives plain trees; {cls.__name__}.from_tensordict takes one.",
        )


def resolve_class(name: Any, classes: Classes, keys: Sequence[str]) -> type[TensorCollection]:
    """Return a class by its recorded name: a given class, or a class of a module that is imported already.

    A class that was moved, renamed, or defined in a script or function is found among the given ones: by its qualified
    name, else by the keys of the node if exactly one class has these fields.
    """
    if isinstance(classes, type):
        if classes is TensorCollection._open:
            return classes
        classes = (classes,)
    given: Any = classes if isinstance(classes, Mapping) else {f"{c.__module__}:{c.__qualname__}": c for c in classes}
    if name in given:
        return given[name]
    module, _, path = name.partition(":")
    alike = [cls for other, cls in given.items() if other.partition(":")[2] == path]
    if not alike:
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            # Not getattr: a module or class may run code to answer.
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        is_tree = isinstance(found, type) and issubclass(found, TensorCollection)
        if is_tree and (found.__module__, found.__qualname__) == (module, path):
            return found
        # Fields that are None are not among the keys.
        alike = [cls for cls in given.values() if set(getattr(cls, "_fields", ())) >= set(keys)]
        alike = [cls for cls in alike if len(cls._fields) == len(keys)] or alike
    if len(alike) == 1:
        return alike[0]
    raise UnsupportedError(
        f"the class {name!r} of a node must be imported or given.",
        expected=f"classes={{{name!r}: its class}}, for a node with the keys {list(keys)}",
        got=f"{'several that fit' if alike else 'none that fits'} of {list(given)}" if given else "no classes",
        hint="the mapping takes any class; import its module; or take plain trees: load(path, classes=TensorDict).",
    )
