"""Type aliases, protocols, the `Kind` of a leaf, and the dtype of the library's own numbers."""

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

Path: TypeAlias = tuple[str, ...]
Group: TypeAlias = tuple[Path, ...]
Ties: TypeAlias = tuple[Group, ...]
Names: TypeAlias = tuple[str | None, ...]
NestedKey: TypeAlias = "str | tuple[NestedKey, ...]"
# A child of a tree: a tensor, tree, non-tensor data and, inside tree_map, anything.
Node: TypeAlias = Any
Device: TypeAlias = "torch.device | str | int"
LeafFn: TypeAlias = Callable[..., Any]

T = TypeVar("T")

if TYPE_CHECKING:
    # Any: lists of lists, where the batch has more dimensions.
    PerRow: TypeAlias = T | list[Any]
else:

    class PerRow:
        """Annotation of a field whose value may be a list along the batch.

        To a type checker it is the type or a list. A class with fields reads the type: it distributes a list over the
        rows where the annotation has no list.
        """

        def __class_getitem__(cls, item: Any) -> Any:
            return item


def wide_default_dtype() -> torch.dtype:
    """Return torch's default dtype, or float32 if the default has 16 bits, which would round our own numbers."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class Kind(enum.Enum):
    """The role of a leaf in the module that it came from.

    PARAMETER is trained; BUFFER is saved but not trained; NON_PERSISTENT is a buffer that a state dict leaves
    out; EXTRA_STATE is the result of `nn.Module.get_extra_state`.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    NON_PERSISTENT = "non_persistent"
    EXTRA_STATE = "extra_state"
