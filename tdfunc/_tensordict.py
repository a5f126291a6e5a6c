"""`TensorDict`: the tree with open keys, put together from the method mixins."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, final

import torch

from tdfunc._collection import TensorCollection, register
from tdfunc._errors import UnsupportedError, explain
from tdfunc._shapes import as_names, as_size
from tdfunc._types import NestedKey
from tdfunc.modules.bind import ModuleMethods
from tdfunc.ops import edit
from tdfunc.ops.cast import CastMethods
from tdfunc.ops.dispatch import DispatchMethods
from tdfunc.ops.edit import EditMethods
from tdfunc.ops.index import IndexMethods
from tdfunc.ops.maps import MapMethods
from tdfunc.ops.pointwise import PointwiseMethods
from tdfunc.ops.reduce import ReduceMethods
from tdfunc.ops.shape import ShapeMethods
from tdfunc.ops.show import ShowMethods
from tdfunc.ops.structure import StructureMethods


class TreeMethods(
    IndexMethods, ShapeMethods, EditMethods, StructureMethods, MapMethods, PointwiseMethods, ReduceMethods, CastMethods,
    ShowMethods, DispatchMethods, ModuleMethods,
):  # fmt: skip
    """All methods of a tree; what `TensorDict` and `TensorClass` share."""

    __slots__ = ()
    __hash__ = object.__hash__


@final
class TensorDict(TreeMethods):
    """An immutable tree of tensors under str keys, indexed along the batch dimensions that its leaves share.

    Dicts become nested trees with the same batch size; numbers become tensors expanded to it; other objects are
    kept as non-tensor data. The tensors are not copied.

    Args:
        source: A mapping from (nested) keys to values, or another tree.
        batch_size: The leading dimensions that every leaf has.
        device: Where every leaf is put; without it leaves stay where they are.
        names: A name for each batch dimension.
        **entries: Entries by keyword.

    Raises:
        BatchSizeError: A leaf does not start with the batch size; the message names it.
        TypeError: A key is no str, or a value is None.

    Examples:
        >>> td = TensorDict({"a": torch.zeros(3, 4), "b": {"c": torch.ones(3)}}, batch_size=[3])
        >>> td["b", "c"].shape, td[:2].batch_size
        (torch.Size([3]), torch.Size([2]))
    """

    __slots__ = ()

    def __init__(
        self,
        source: Mapping[Any, Any] | TensorCollection | None = None,
        batch_size: Any = None,
        device: Any = None,
        names: Sequence[str | None] | None = None,
        **entries: Any,
    ) -> None:
        size = as_size(batch_size)
        place = torch.device(device) if device is not None else None
        if isinstance(source, TensorCollection):
            source = {key: source._get(key) for key in source._keys()}
        if entries:
            source = {**(source or {}), **entries}
        if source is not None and not isinstance(source, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(explain("TensorDict: the source must be a mapping or a tree.", got=type(source).__name__))
        built = edit.build(TensorDict, source, size, place) if source else None
        object.__setattr__(self, "_data", built._data if built is not None else {})
        object.__setattr__(self, "_batch_size", size)
        object.__setattr__(self, "_device", place)
        object.__setattr__(self, "_names", as_names(names, len(size)))
        object.__setattr__(self, "_static", built._static if built is not None else None)
        object.__setattr__(self, "_cache", None)

    def __init_subclass__(cls) -> None:
        raise UnsupportedError(
            explain(
                f"TensorDict is final, {cls.__name__} cannot subclass it.",
                hint="derive a typed tree from tdfunc.TensorClass, or write functions of a TensorDict.",
            )
        )

    @classmethod
    def fromkeys(cls, keys: Iterable[NestedKey], value: Any = 0) -> "TensorDict":
        """Return a tree that holds one value under each (nested) key."""
        return cls({key: value for key in keys})


_final: Final = TensorDict
TensorCollection._open = TensorDict
register(TensorDict)
__all__ = ["ClassVar"]
