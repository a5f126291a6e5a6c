"""Trees made from a tree: empty, of constants, with entries replaced or parted."""

from collections.abc import Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Size

from tdfunc.core.collection import LeafOp, TensorCollection, by_shape, per_tree
from tdfunc.core.errors import refuse_text
from tdfunc.core.keys import unravel
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.shapes import as_names, as_size, put_first
from tdfunc.core.types import LeafFn
from tdfunc.ops.base.cast import as_device, clone, on_device
from tdfunc.ops.base.reading import UNSET, has
from tdfunc.ops.edits.edit import delete_paths, replacements, set_
from tdfunc.ops.edits.maps import drop_empty
from tdfunc.ops.edits.structure import rename_key, select

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)


def empty(tree: TensorCollection, recurse: bool, batch_size: Any, device: Any, names: Any) -> Any:
    """Return an open tree without entries, or with empty sub-trees only; of a lazy stack, a stack of such trees."""
    if batch_size is None and tree._is_lazy:
        done = tree._each(lambda t: empty(t, recurse, None, device, UNSET))
        if names is UNSET:
            return done
        return done.with_names(names)
    size = tree._batch_size if batch_size is None else as_size(batch_size)
    place = tree._device if device is UNSET else as_device(device)
    if names is not UNSET:
        given = as_names(names, len(size))
    elif len(size) == len(tree._batch_size):
        given = tree._names
    else:
        given = None
    data: dict[str, Any] = {}
    if recurse:
        for key in tree._keys():
            node = tree._get(key)
            if isinstance(node, TensorCollection):
                inner = None if batch_size is None else size + node._batch_size[len(tree._batch_size) :]
                data[key] = empty(node, True, inner, device, UNSET)
    return tree._open._make(data, size, place, given)


def fill_new(tree: T, call: str, size: Size, value: Any, dtype: torch.dtype | None, device: Any) -> T:
    """Return a tree of another batch size that `Tensor.new_*` has made of every leaf."""
    n = len(tree._batch_size)
    place = as_device(device)
    arguments = ()
    if call == "new_full":
        arguments = (value,)
    options = {key: given for key, given in (("dtype", dtype), ("device", place)) if given is not None}

    def make(shape: Size) -> LeafFn:
        return methodcaller(call, (*size, *shape[n:]), *arguments, **options)

    leaf, plain = by_shape(make)
    made = tree._map(LeafOp(call, leaf, put_first(size, n), plain=plain))
    if place is None:
        return made
    return on_device(made, place)


@per_tree()
def open_trees(tree: TensorCollection, empty_fields: bool) -> Any:
    """Return `TensorDict`s in place of trees of any class, sharing the leaves; empty fields may become None."""
    data = {key: open_trees(n, empty_fields) if isinstance(n, TensorCollection) else n for key, n in tree._data.items()}
    if empty_fields:
        fields: tuple[str, ...] = getattr(tree, "_fields", ())
        data |= {name: NonTensorData(None, tree._batch_size) for name in fields if name not in data}
    return tree._open._make(data, tree._batch_size, tree._device, tree._names, tree._static)


def split_keys(tree: T, key_sets: Sequence[Any], strict: bool) -> tuple[T, ...]:
    """Return a tree for each set of keys, and the rest; a dict renames its keys."""
    parts: list[T] = []
    rest = tree
    for keys in key_sets:
        refuse_text("split_keys: the keys of a set", keys)
        names: dict[Any, Any] = dict(keys) if isinstance(keys, Mapping) else {key: key for key in keys}
        part = select(rest, list(names), strict)
        for old, new in names.items():
            if unravel(old) != unravel(new) and has(part, old):
                part = rename_key(part, old, new, True)
        parts.append(drop_empty(part))
        rest = delete_paths(rest, [unravel(key) for key in names])
    return (*parts, drop_empty(rest))


def _size(size: tuple[Any, ...]) -> Size:
    return as_size(size[0] if len(size) == 1 else size)


class MakeMethods(TensorCollection):
    """Trees made from a tree."""

    __slots__ = ()

    def empty(self, recurse: bool = False, *, batch_size: Any = None, device: Any = UNSET, names: Any = UNSET) -> Any:
        """Return a `TensorDict` without entries, of this batch size, device and names unless others are given.

        Args:
            recurse: Keep the sub-trees, without their entries.
            batch_size: Another batch size; sub-trees keep their own trailing dimensions.
            device: Another device, or None.
            names: Other names of the dimensions.
        """
        return empty(self, recurse, batch_size, device, names)

    def new_zeros(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> "Self":
        """Return a tree of zeros with these keys and feature dimensions, of another batch size.

        Raises:
            LeafMismatchError: Non-tensor data have a value for each row.

        Examples:
            >>> TensorDict({"obs": torch.ones(3, 4)}, [3]).new_zeros(10)["obs"].shape
            torch.Size([10, 4])
        """
        return fill_new(self, "new_zeros", _size(size), None, dtype, device)

    def new_ones(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> "Self":
        """Return a tree of ones, as `new_zeros`."""
        return fill_new(self, "new_ones", _size(size), None, dtype, device)

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> "Self":
        """Return a tree of uninitialised memory, as `new_zeros`."""
        return fill_new(self, "new_empty", _size(size), None, dtype, device)

    def new_full(self, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> "Self":
        """Return a tree of one value, as `new_zeros`."""
        return fill_new(self, "new_full", as_size(size), fill_value, dtype, device)

    def replace(self, changes: Mapping[Any, Any] | TensorCollection | None = None, /, **entries: Any) -> "Self":
        """Return a tree with entries replaced or added. Nested trees are replaced, where `update` merges them.

        Args:
            changes: New values by (nested) key, or a tree of them.
            **entries: More new values, by keyword.
        """
        tree = self
        for key, value in replacements(changes, entries).items():
            tree = set_(tree, key, value)
        return tree

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """Return a copy in which all trees are `TensorDict`s.

        Args:
            retain_none: Write empty fields of typed trees as non-tensor None, which `from_tensordict` reads; False
                leaves them out.
        """
        return clone(open_trees(self, retain_none is not False), recurse=True)

    def split_keys(self, *key_sets: Any, strict: bool = True) -> tuple[Any, ...]:
        """Return a tree for each set of (nested) keys, and one of the rest; sub-trees left empty are dropped.

        Args:
            *key_sets: Keys, or a dict from keys to the names that they get.
            strict: Raise for keys that do not exist.

        Raises:
            MissingKeyError: A key does not exist, or is in an earlier set.

        Examples:
            >>> td = TensorDict({"obs": torch.ones(2), "act": torch.zeros(2), "r": torch.ones(2)}, [2])
            >>> [list(part.keys()) for part in td.split_keys(["obs"], {"act": "action"})]
            [['obs'], ['action'], ['r']]
        """
        return split_keys(self, key_sets, strict)
