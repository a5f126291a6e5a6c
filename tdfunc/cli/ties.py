"""Ties of several checkpoints: those that only some of them have."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tdfunc.cli.output import note, safe, shown
from tdfunc.cli.sources import Source, stored_leaves
from tdfunc.core.collection import TensorCollection
from tdfunc.core.types import Group, Path
from tdfunc.ops.base.reading import get
from tdfunc.ops.edits.edit import restore_ties, untie_paths
from tdfunc.storage.tree.build import without_values

# By path, all paths of its leaf.
Groups = Mapping[Path, Group]


def share_ties(sources: Sequence[Source], trees: Sequence[TensorCollection]) -> list[TensorCollection]:
    """Return trees in which files of torch.save tie only the paths that all checkpoints tie.

    Such a file does not record ties: its names share memory or not as the program that wrote it left them. A mean of
    each name by itself is right in both cases. Ties that a file records stay, and are compared.
    """
    every = [_groups_of(tree) for tree in trees]
    shared: list[TensorCollection] = []
    for source, tree in zip(sources, trees, strict=True):
        made = tree
        if not source.is_described:
            found = [_common_parts(group, every) for group in tree._ties]
            if any(len(parts) > 1 for parts in found):
                made = _split(source, tree, found)
        shared.append(made)
    return shared


def _groups_of(tree: TensorCollection) -> Groups:
    groups: dict[Path, Group] = {}
    for one in stored_leaves(tree):
        groups |= dict.fromkeys(one.paths, one.paths)
    return groups


def _common_parts(group: Group, every: Sequence[Groups]) -> list[list[Path]]:
    """Return the parts of a group of tied paths that are tied in all checkpoints."""
    parts: dict[tuple[Group, ...], list[Path]] = {}
    for path in group:
        # A checkpoint without the path is not a reason to split it off.
        own = [groups.get(path, groups.get(group[0], ())) for groups in every]
        parts.setdefault(tuple(own), []).append(path)
    return list(parts.values())


def _split(source: Source, tree: TensorCollection, groups: Sequence[Sequence[Sequence[Path]]]) -> TensorCollection:
    """Return a tree in which each part of a group is a leaf; the first part of a group keeps the tensor."""
    leaves: dict[Path, Tensor] = {}
    tied: list[Group] = []
    for first, *rest in groups:
        leaf = get(tree, first[0])
        for part in rest:
            own = without_values(leaf, leaf.dtype)
            source.readers[id(own)] = source.readers[id(leaf)]
            leaves |= dict.fromkeys(part, own)
            if len(part) > 1:
                tied.append(tuple(part))
            what = f"{shown(part[0])} is tied to {shown(first[0])}"
            note(f"{safe(source.path)}: {what} here and not everywhere: both are read")
    return restore_ties(untie_paths(tree, leaves), tuple(tied))
