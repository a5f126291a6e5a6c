"""`TensorDict`: the tree with open keys, put together from the method mixins."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from tdfunc.core.collection import Slots, TensorCollection, check_one_shape
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.pytree import register
from tdfunc.core.shapes import as_names, as_size
from tdfunc.core.types import NestedKey
from tdfunc.distributed.methods import DistributedMethods
from tdfunc.modules.bind import ModuleMethods
from tdfunc.ops.autograd import MemoryMethods
from tdfunc.ops.base.cast import CastMethods, as_device, to
from tdfunc.ops.base.convert import adopt, is_plain, read_mapping, resize
from tdfunc.ops.base.reading import ReadMethods, refuse_options
from tdfunc.ops.base.spelling import PureCallNames
from tdfunc.ops.batch.index import IndexMethods
from tdfunc.ops.batch.rearrange import RearrangeMethods
from tdfunc.ops.batch.shape import ShapeMethods
from tdfunc.ops.display.show import ShowMethods
from tdfunc.ops.edits.edit import EditMethods, update
from tdfunc.ops.edits.make import MakeMethods
from tdfunc.ops.edits.maps import MapMethods
from tdfunc.ops.edits.structure import StructureMethods
from tdfunc.ops.interop import FromMethods, InteropMethods
from tdfunc.ops.math.arithmetic import ArithmeticMethods
from tdfunc.ops.math.pointwise import DtypeMethods, PointwiseMethods
from tdfunc.ops.math.reduce import ExtremeMethods, ReduceMethods
from tdfunc.ops.torch_function import DispatchMethods
from tdfunc.parallel.map import ParallelMethods
from tdfunc.storage.methods import MemmapMethods


class TreeMethods(
    IndexMethods, ShapeMethods, RearrangeMethods, ReadMethods, EditMethods, StructureMethods, MapMethods,
    PointwiseMethods, DtypeMethods, ArithmeticMethods, ReduceMethods, ExtremeMethods, CastMethods, MemoryMethods,
    MakeMethods, InteropMethods, ShowMethods, DispatchMethods, ModuleMethods, ParallelMethods,
    MemmapMethods, DistributedMethods, PureCallNames,
):  # fmt: skip
    """All methods of a tree, shared by `TensorDict`, `TensorClass` and `LazyStack`."""

    __slots__ = ()


@final
class TensorDict(TreeMethods, FromMethods):
    """An immutable tree of tensors under str keys, indexed along the batch dimensions that its leaves share.

    The pages Differences and Operations list the names of tensordict that are spelled otherwise here.

    Dicts become nested trees with the same batch size; numbers become tensors expanded to it; other objects are
    kept as non-tensor data. The tensors are not copied.

    Args:
        source: A mapping from (nested) keys to values, or another tree, including trees of tensordict.
        batch_size: The leading dimensions that every leaf has; by default none, or the batch size of a source tree.
        device: The device of every leaf; by default leaves stay on their devices.
        names: A name for each batch dimension.
        **entries: Entries by keyword.

    Raises:
        BatchSizeError: A leaf does not start with the batch size; the message names it.
        TypeError: A key is not a str, a value is None, the source is neither a mapping nor a tree, or it comes with an
            option of tensordict's (`lock=True`).

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
        compiling = is_compiling()
        static = None
        given = None
        place = None
        if device is not None:
            place = as_device(device)
        if entries and source is not None:
            # Arguments of tensordict's constructor, or of `from_dict`.
            refuse_options(entries, ("lock", "non_blocking", "auto_batch_size"), "TensorDict")
        if type(source) is not dict:
            source = adopt(source)
        if isinstance(source, TensorCollection):
            tree = _copy(source, batch_size, place)
            if entries:
                tree = update(tree, entries)
            data = tree._data
            size = tree._batch_size
            static = tree._static
            given = tree._names
        else:
            size = as_size(batch_size)
            # The common call, without the walk.
            if type(source) is dict and not entries and place is None and not compiling and is_plain(source, size):
                data = source.copy()
            else:
                data, static = read_mapping(_mapping(source, entries), size, place)
        if names is not None:
            given = as_names(names, len(size))
        if compiling:
            self._fill(self, data, size, place, given, static)
            return
        # As in `_make`: plain stores while it is of the class that may be written.
        new: Any = self
        object.__setattr__(new, "__class__", Slots)
        new._data = data
        new._batch_size = size
        new._device = place
        new._names = given
        new._static = static
        new._cache = None
        new.__class__ = TensorDict

    def __init_subclass__(cls) -> None:
        raise UnsupportedError(
            f"TensorDict is final, {cls.__name__} cannot subclass it.",
            hint="derive a typed tree from tdfunc.TensorClass, or write functions of a TensorDict.",
        )

    @classmethod
    def fromkeys(cls, keys: Iterable[NestedKey], value: Any = 0) -> "TensorDict":
        """Return a tree that holds one value under each (nested) key."""
        return cls({key: value for key in keys})


def _mapping(source: Any, entries: dict[str, Any]) -> Mapping[Any, Any]:
    source = {} if source is None else source
    if not isinstance(source, Mapping):
        raise error(TypeError, "TensorDict: the source is not a mapping or a tree.", got=type(source).__name__)
    return {**source, **entries}


def _copy(tree: TensorCollection, batch_size: Any, device: Any) -> TensorDict:
    """Return any tree as a `TensorDict` that shares its leaves, kinds and ties."""
    source: Any = tree
    check_one_shape(tree, "TensorDict")
    nodes = {key: source._get(key) for key in source._keys()}
    made = TensorDict._make(nodes, source._batch_size, source._device, source._names, source._static)
    if device is not None:
        made = to(made, device)
    size = made._batch_size if batch_size is None else as_size(batch_size)
    if size == made._batch_size:
        return made
    return resize(made, size)


TensorCollection._open = TensorDict
register(TensorDict)
