"""A tree from its checked description (`decode.py`) and the values of its leaves."""

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import CorruptCheckpointError, TreeStructureError, UnsupportedError, brief
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc.core.shapes import as_names
from tdfunc.core.types import Kind, Path, Ties
from tdfunc.storage.tree.decode import Description, as_size
from tdfunc.storage.tree.encode import IS_PARAMETER, IS_VALUE, KIND_FLAGS, REQUIRES_GRAD
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
    return _Builder(plan, leaves, classes, device).build(root)


class _Builder:
    """Builds the nodes of one tree, each after the nodes in it."""

    def __init__(self, plan: Description, leaves: Any, classes: Classes, device: torch.device | None) -> None:
        self._plan = plan
        self._leaves = leaves
        self._is_list = type(leaves) is list
        self._classes = classes
        self._devices: Sequence[torch.device | None] | Mapping[int, torch.device] = plan.devices
        if device is not None:
            self._devices = defaultdict(lambda: device)
        self._make = TensorCollection._open._make
        # By number: a tree, or the value that a plain object became.
        self._built: dict[int, Any] = {}
        self._kinds = {flags: kind_of(flags) for flags in {*plan.marks, *_KINDS, ""}}
        self._has_kinds = any([self._kinds[flags] for flags in plan.marks])
        keeps_all = not isinstance(classes, (type, Mapping)) and PlainObject in classes
        self._keeps_objects = keeps_all or not plan.objects

    def build(self, root: int) -> TensorCollection:
        """Return the tree at a node."""
        numbers = range(len(self._plan.nodes))
        if root:
            numbers = self._plan.below(root)
        # A node comes after the one that it is in, so going back its sub-trees are there.
        for number in reversed(numbers):
            if number in self._plan.special or number in self._plan.ties:
                self._built[number] = self._special(number)
            else:
                self._built[number] = self._plain(number)
        return self._built[root]

    def _plain(self, number: int) -> TensorCollection:
        """Return a node of tensors and trees."""
        # There may be thousands, so the steps stay in one function: calls would take as long as they do.
        # Keys and items are one for each entry; values and flags of leaves are one for each leaf. Sub-trees are
        # between leaves in any order, so that both must be spread over the items.
        plan = self._plan
        keys = plan.keys[number]
        start = plan.starts[number]
        end = plan.starts[number + 1]
        if self._is_list:
            values = self._leaves[start:end]
        else:
            values = [self._leaves[leaf] for leaf in range(start, end)]
        if end - start != len(keys):
            rest = iter(values)
            values = [self._built[item["tree"]] if type(item) is dict else next(rest) for item in plan.items[number]]
        data: dict[str, Any] = dict(zip(keys, values, strict=False))
        if len(data) != len(keys):
            raise _twice(number)
        static = None
        if self._has_kinds:
            rest = iter(plan.flags[start:end])
            flags = ["" if type(item) is dict else next(rest) for item in plan.items[number]]
            kinds = self._kinds_of(keys, flags)
            if kinds:
                static = Static(kinds)
        return self._make(data, plan.sizes[number], self._devices[number], None, static)

    def _kinds_of(self, keys: Sequence[str], flags: Sequence[str]) -> dict[str, Kind]:
        """Return the kinds of the leaves that have one."""
        kinds: dict[str, Kind] = {}
        for key, flag in zip(keys, flags, strict=True):
            kind = self._kinds[flag]
            if kind is not None:
                kinds[key] = kind
        return kinds

    def _special(self, number: int) -> Any:
        """Return a node of any kind: with its own class, names, data or ties, or with other items than tensors."""
        plan = self._plan
        keys = plan.keys[number]
        values, flags = self._read_items(number)
        data: dict[str, Any] = dict(zip(keys, values, strict=False))
        if len(data) != len(keys):
            raise _twice(number)
        kinds = self._kinds_of(keys, flags)
        node = plan.nodes[number]
        size = plan.sizes[number]
        device = self._devices[number]
        names = None
        if "names" in node:
            names = as_names(node["names"], len(size))
        ties = plan.ties.get(number, ())
        if ties and not self._keeps_objects:
            ties = _outside(plan.path(number), ties, plan.objects)
        static = Static(kinds, ties, node.get("own"))
        cls: Any = TensorCollection._open
        if "class" in node:
            name = node["class"]
            if name == lazy_name():
                return _stack(data, size, device, names, static)
            if name == OBJECT and not self._keeps_objects:
                return unpack(data, static.own, size)
            if name == OBJECT:
                cls = PlainObject
            else:
                cls = resolve_class(name, self._classes, keys)
        check_fields(cls, data, plan.path(number))
        if static == Static():
            static = None
        return cls._make(data, size, device, names, static)

    def _read_items(self, number: int) -> tuple[list[Any], list[str]]:
        """Return the values and flags of the items of a node of any kind."""
        plan = self._plan
        leaf = plan.starts[number]
        # The batch size of a lazy stack is not the one of its items.
        outer = plan.sizes[number]
        if "own" in plan.nodes[number]:
            outer = Size(())
        values: list[Any] = []
        found: list[str] = []
        for item in plan.items[number]:
            if type(item) is dict:
                value = self._read_object(item, outer)
                flags = item.get("flags", "")
            else:
                value = self._leaves[leaf]
                flags = plan.flags[leaf]
                if IS_VALUE in flags:
                    # The fourth part of an item is the shape of the value.
                    shape = item[3] if len(item) > 3 else outer
                    value = NonTensorData(value, _batch(shape, outer))
                leaf += 1
            values.append(value)
            found.append(flags)
        return values, found

    def _read_object(self, item: dict[str, Any], outer: Size) -> Any:
        """Return the value of an item that is an object: a sub-tree, a tied leaf or non-tensor data."""
        if "tree" in item:
            return self._built[item["tree"]]
        if "tie" in item:
            return self._leaves[self._plan.tied[item["tie"]]]
        return _nontensor(item, outer)


def _twice(number: int) -> CorruptCheckpointError:
    return malformed("distinct keys", f"a key twice in node {number}")


def _outside(at: Path, groups: Ties, objects: Collection[Path]) -> Ties:
    """Return the groups of a node that have no path into a plain object, where each tree has its own ties."""

    def enters(path: Path) -> bool:
        return any([(*at, *path[:depth]) in objects for depth in range(1, len(path))])

    return tuple([group for group in groups if not any(map(enters, group))])


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
    # torch 2.13 without CUDA raises an AssertionError.
    except (AssertionError, NotImplementedError, RuntimeError) as err:
        raise UnsupportedError(
            "the leaves cannot be put on the device.",
            expected=str(target),
            got=f"{type(err).__name__}: {err}"[:200],
            hint='load(path, device="cpu").',
        ) from err


def _batch(shape: Any, size: Size) -> Size:
    if not isinstance(shape, Size):
        shape = as_size(shape)
    if shape[: len(size)] != size:
        raise malformed(f"a shape that starts with the batch size {list(size)}", str(list(shape)))
    return shape


def _nontensor(item: dict[str, Any], size: Size) -> NonTensorBase:
    shape = _batch(item.get("shape", size), size)
    if "value" in item:
        return NonTensorData(item["value"], shape)
    return NonTensorStack._of_values(item["values"], shape)


def lazy_name() -> str:
    """Return the recorded name of the class of lazy stacks."""
    return f"{TensorCollection._lazy.__module__}:{TensorCollection._lazy.__qualname__}"


def _stack(
    data: dict[str, Any], size: Size, device: torch.device | None, names: tuple[str | None, ...] | None, static: Static
) -> Any:
    """Return a lazy stack of trees, in the class for theirs."""
    trees = list(data.values())
    in_order = [str(number) for number in range(len(trees))]
    if not _are_alike(trees) or list(data) != in_order:
        raise malformed("a lazy stack of trees of one class and number of dimensions, in order", repr(list(data)))
    dim = static.own
    if type(dim) is not int or not -len(size) <= dim < 0 or len(trees[0]._batch_size) != len(size) - 1:
        raise malformed(f"the dimension of a lazy stack whose batch size is {list(size)}", repr(dim))
    made = TensorCollection._lazy._of(trees, len(size) + dim)
    if made._batch_size != size:
        raise malformed(f"a lazy stack of the batch size {list(size)}", str(list(made._batch_size)))
    return made._make(made._data, size, device, names, static)


def _are_alike(trees: Sequence[Any]) -> bool:
    """Return whether there are trees, all of one class and number of dimensions."""
    if not all([isinstance(tree, TensorCollection) for tree in trees]):
        return False
    return len({(type(tree), len(tree._batch_size)) for tree in trees}) == 1


def check_classes(plan: Description, classes: Classes) -> None:
    """Raise unless this process has the classes of all nodes of a description."""
    for number in plan.special:
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
        where = dotted(path) if path else "the root"
        got = f"{brief(list(keys))}: unknown {brief(unknown)}, missing {brief(lacking)}"
        raise TreeStructureError(
            f"{cls.__name__} does not have all fields that were saved at {where!r}.",
            expected=f"the fields {brief(list(cls._fields))}",
            got=got,
            hint=f"load(path, classes=TensorDict) gives plain trees; {cls.__name__}.from_tensordict takes one.",
        )


def resolve_class(name: Any, classes: Classes, keys: Sequence[str]) -> type[TensorCollection]:
    """Return a class by its recorded name: a given class, or a class of a module that is imported already.

    A class that was moved, renamed, or defined in a script or function is found among the given ones: by its qualified
    name, else by the keys of the node if exactly one class has these fields.
    """
    if classes is TensorCollection._open:
        return TensorCollection._open
    given = _by_name(classes)
    if name in given:
        return given[name]
    module, _, path = name.partition(":")
    alike = [cls for other, cls in given.items() if other.partition(":")[2] == path]
    if not alike:
        imported = _find_imported(module, path)
        if imported is not None:
            return imported
        alike = _with_fields(given, keys)
    if len(alike) == 1:
        return alike[0]
    got = "no classes"
    if given:
        fit = "several that fit" if alike else "none that fits"
        got = f"{fit} of {brief(list(given))}"
    raise UnsupportedError(
        f"the class {name!r} of a node is not imported or given.",
        expected=f"classes={{{name!r}: its class}}, for a node with the keys {brief(list(keys))}",
        got=got,
        hint="the mapping takes any class; import its module; or take plain trees: load(path, classes=TensorDict).",
    )


# Any: as in `check_fields`.
def _by_name(classes: Classes) -> Mapping[str, Any]:
    """Return the given classes by the names that a file has for them."""
    if isinstance(classes, Mapping):
        return classes
    if isinstance(classes, type):
        classes = (classes,)
    return {f"{cls.__module__}:{cls.__qualname__}": cls for cls in classes}


def _find_imported(module: str, path: str) -> type[TensorCollection] | None:
    """Return the class of trees with this qualified name in a module that is imported already."""
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not hasattr(found, "__dict__"):
            return None
        # Not getattr: a module or class may run code to answer.
        found = vars(found).get(part)
    is_tree = isinstance(found, type) and issubclass(found, TensorCollection)
    # A class under another name is one that somebody imported there.
    if is_tree and (found.__module__, found.__qualname__) == (module, path):
        return found
    return None


def _with_fields(given: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    """Return the given classes whose fields are the keys of a node; without one, those that have them all."""
    # Fields that are None are not among the keys.
    alike = [cls for cls in given.values() if set(getattr(cls, "_fields", ())) >= set(keys)]
    exact = [cls for cls in alike if len(cls._fields) == len(keys)]
    return exact or alike
