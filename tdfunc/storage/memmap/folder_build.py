"""A tree out of a memmap folder that was read and checked (`folder_read.py`), with its leaves put in."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.core.nontensor import NonTensorData
from tdfunc.storage.memmap.folder_meta import fit_names, malformed_meta, where
from tdfunc.storage.memmap.folder_read import Child, FolderReader, Node
from tdfunc.storage.tree.build import check_fields
from tdfunc.storage.tree.encode import IS_PARAMETER, IS_VALUE, REQUIRES_GRAD


def build_folder(
    reader: FolderReader, leaves: Sequence[Tensor | None], device: torch.device | None
) -> TensorCollection:
    """Return the tree around leaves in the order of `reader.leaves` (None for an alias), all on the device."""
    values = [_flagged(leaf, file.flags) for leaf, file in zip(leaves, reader.leaves, strict=True)]
    for alias, first in reader.aliases().items():
        values[alias] = values[first]
    built: list[Any] = [None] * len(reader.nodes)
    # A node comes after the one that it is in, so going back its sub-trees are there.
    for number in reversed(range(len(reader.nodes))):
        built[number] = _node(reader, reader.nodes[number], values, built, device)
    return built[0]


def _node(
    reader: FolderReader, node: Node, values: Sequence[Any], built: list[Any], device: torch.device | None
) -> Any:
    data: dict[str, Any] = {}
    for key, item in node.items.items():
        if isinstance(item, Child):
            data[key] = built[item.node]
        elif isinstance(item, int):
            value = values[item]
            if IS_VALUE in reader.leaves[item].flags:
                value = NonTensorData(value, node.shapes.get(key, node.size))
            data[key] = value
        else:
            data[key] = item
    if node.has_device and device is None:
        device = torch.device("cpu")
    if node.stack_dim is not None:
        return _lazy_stack(node, list(data.values()), device)
    static = Static(node.kinds, node.ties)
    cls = node.cls or TensorCollection._open
    check_fields(cls, data, node.path)
    return cls._make(data, node.size, device, node.names, static if static != Static() else None)


def _lazy_stack(node: Node, trees: list[Any], device: torch.device | None) -> Any:
    what, dim = f"the lazy stack at {where(node.path)}", node.stack_dim
    assert dim is not None
    if len({len(tree._batch_size) for tree in trees}) > 1 or len({type(tree) for tree in trees}) > 1:
        raise malformed_meta(what, "trees of one class with one number of batch dimensions", "different ones")
    if dim > len(trees[0]._batch_size):
        raise malformed_meta(what, f"a dimension of at most {len(trees[0]._batch_size)}", str(dim))
    made = TensorCollection._lazy._of(trees, dim)
    if node.outer is not None and made._batch_size[: len(node.outer)] != node.outer:
        raise malformed_meta(what, f"a batch size that starts with {list(node.outer)}", str(list(made._batch_size)))
    names = fit_names(node.names, len(made._batch_size), what)
    static = made._static._replace(ties=node.ties)
    return made._make(made._data, made._batch_size, device, names, static)


def _flagged(leaf: Tensor | None, flags: str) -> Any:
    if leaf is None or not flags:
        return leaf
    try:
        if IS_PARAMETER in flags:
            return nn.Parameter(leaf, REQUIRES_GRAD in flags)
        return leaf.requires_grad_() if REQUIRES_GRAD in flags else leaf
    except RuntimeError as err:
        raise CorruptCheckpointError("A leaf cannot have a gradient.", got=f"{err}"[:200]) from err
