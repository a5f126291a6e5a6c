"""Type aliases, protocols and the `Kind` of a leaf."""

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

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


class Kind(enum.Enum):
    """The role of a leaf in the module that it came from.

    PARAMETER is trained; BUFFER is saved but not trained; NON_PERSISTENT is a buffer that a state dict leaves
    out; EXTRA_STATE is the result of `nn.Module.get_extra_state`.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    NON_PERSISTENT = "non_persistent"
    EXTRA_STATE = "extra_state"
