"""`save` and `load`: a whole tree in one safetensors file that any reader of the format opens."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor, nn

from tdfunc._collection import TensorCollection
from tdfunc._errors import CorruptCheckpointError, UnsupportedError, explain
from tdfunc._types import Device, Path
from tdfunc.storage.atomic import replace_file
from tdfunc.storage.decode import Classes, Plan
from tdfunc.storage.encode import IS_PARAMETER, REQUIRES_GRAD, Outline, outline
from tdfunc.storage.format import Layout, Spec, check_size, check_version, lay_out, parse_entries
from tdfunc.storage.read import Source, map_bytes, opened, verify_leaves, view_leaves
from tdfunc.storage.write import plan_file, write_file

_SUFFIX = ".safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_MAX_FOREIGN_DEPTH = 64


def save(td: TensorCollection, path: str | os.PathLike[str], *, fsync: bool = True) -> None:
    """Save a tree as one safetensors file, which holds the old tree or the new one whatever happens meanwhile.

    Everything is kept: batch sizes, devices, names, key order, empty sub-trees, ties (stored once, under the first
    path), kinds, Parameters, `requires_grad`, and non-tensor data that JSON holds unchanged. Each leaf and the
    header get a checksum. Memory layout is not kept: leaves are written row by row.

    Args:
        td: The tree.
        path: The file, which must end in `.safetensors`; its folder must exist.
        fsync: Wait until the disk has the file. Without it a power failure (not a crash of the program) may undo
            the save.

    Raises:
        ValueError: The file name has another suffix.
        UnsupportedError: A leaf or value cannot be stored unchanged; the message names it. Nothing was written.
        OSError: The file could not be written; an old file is whole and nothing is left behind.

    Examples:
        >>> import tempfile
        >>> td = TensorDict({"w": torch.ones(2, 3), "note": "first"}, batch_size=[2], names=["row"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tdf.save(td, folder + "/tree.safetensors")
        ...     back = tdf.load(folder + "/tree.safetensors")
        >>> bool((back == td).all()), back.names, back["note"]
        (True, ['row'], 'first')
    """
    target = check_target(path)
    save_outline(outline_of(td), target, fsync=fsync)


def outline_of(td: TensorCollection) -> Outline:
    """Describe a tree that is to be saved; what cannot be is refused here."""
    if not isinstance(td, TensorCollection):
        raise TypeError(
            explain(
                "save: this is no tree.",
                expected="a TensorDict",
                got=type(td).__name__,
                hint="save(TensorDict(mapping), path).",
            )
        )
    if type(torch.empty(0, device="cpu")) is not Tensor:
        raise UnsupportedError(
            explain(
                "save: a mode is active under which tensors have no values.",
                got=type(torch.empty(0)).__name__,
                hint="save outside of FakeTensorMode.",
            )
        )
    return outline(td)


def save_outline(out: Outline, target: str, *, fsync: bool = True, digests: Mapping[str, str] | None = None) -> None:
    """Write a tree that was outlined; a leaf with a digest must still have it."""
    plan = plan_file(out, digests)
    replace_file(target, lambda fd: write_file(fd, plan), size_bytes=plan.size_bytes, fsync=fsync)


def load(
    path: str | os.PathLike[str], *, verify: bool = True, device: "Device | None" = None, classes: "Classes" = ()
) -> Any:  # the class of the tree is what the file says
    """Load a tree from a safetensors file, on a copy-on-write mapping: leaves are read when they are first used.

    In-place writes to the leaves stay in memory; the file does not change. A file of another program becomes a
    nested tree by its dotted names, or a flat one where the names do not nest (`a` beside `a.b`).

    Args:
        path: The file.
        verify: Read everything once and compare the checksums. Files of other programs have none.
        device: Where the leaves are put; without it, where the tree was (leaves of a tree without a device are on
            the CPU). `"meta"` reads the header only, as does `FakeTensorMode`.
        classes: The classes of the tree's nodes where they are not TensorDicts; those of imported modules are
            found without it. `TensorDict` loads all nodes as that.

    Returns:
        The tree that was saved.

    Raises:
        CorruptCheckpointError: The file is not what was saved; the message names the leaf and both values.
        UnsupportedError: A class, dtype, device or format version that is not here.
        TreeStructureError: An entry is no field of the class that it was saved from, which has changed since.
        FileNotFoundError: There is no such file.
        IsADirectoryError: The path is a folder.
    """
    name = os.fsdecode(path)
    place = torch.device(device) if device is not None else None
    with opened(name, verify=verify) as source:
        header = source.header
        if not any(key.startswith("tdfunc") for key in header.metadata):
            return _load_foreign(source, name, place)
        check_version(header.metadata)
        plan = Plan(_tree_text(header.metadata), source.begin)
        layout = lay_out(plan.names, plan.specs)
        check_size(source.begin + layout.size_bytes, source.size_bytes)
        begins = _begins(source, plan, layout, verify=verify)
        data = None if _is_fake(place) else map_bytes(source, name)
        if verify and data is not None:
            verify_leaves(data, source, plan.names, plan.specs, layout.order)
        leaves = _values(data, plan.specs, begins, place or plan.places)
        for i, flags in enumerate(plan.flags):
            if flags:
                leaves[i] = _flagged(leaves[i], flags)
        return plan.build(leaves, classes, place)


def check_target(path: str | os.PathLike[str]) -> str:
    """Return the name of a file that a tree can be saved as."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        got = type(path).__name__
        raise TypeError(
            explain("save: not a path.", expected="a file name", got=got, hint="save(tree, path), in this order.")
        )
    target = os.fsdecode(path)
    suffix = os.path.splitext(target)[1]
    if suffix != _SUFFIX:
        other = (
            "torch.save(td.state_dict(), path) writes such a file"
            if suffix in _TORCH_SUFFIXES
            else "this is the only format that it writes"
        )
        raise ValueError(
            explain(
                f"save {target}: the file name has another suffix.",
                expected=_SUFFIX,
                got=suffix or "none",
                hint=f"{other}.",
            )
        )
    if os.path.isdir(target):
        raise IsADirectoryError(explain(f"save {target}: this is a folder.", expected="the name of a file"))
    return target


def _tree_text(metadata: dict[str, str]) -> str:
    text = metadata.get("tdfunc.tree")
    if text is None:
        raise UnsupportedError(
            explain(
                "the file describes no tree: it is one shard of a larger save.",
                expected="tdfunc.tree in the metadata",
                got=", ".join(metadata),
            )
        )
    return text


def _begins(source: Source, plan: Plan, layout: Layout, *, verify: bool) -> list[int]:
    """Return the first byte of each leaf in the file; the header's own entries must agree with the tree."""
    entries = source.header.entries
    if entries is None:
        if source.header.rest.rstrip(" ") == f"{layout.entries}}}":
            return [source.begin + begin for begin in layout.begins]
        if verify:
            raise CorruptCheckpointError(
                explain(
                    "the header's entries are not those of its tree.",
                    expected=layout.entries[:200],
                    got=source.header.rest[:200],
                )
            )
        entries = parse_entries(source.raw, source.size_bytes)[1]
    # Another program wrote the header; the names still say which leaf is which.
    found = {entry.name: entry for entry in entries}
    begins: list[int] = []
    for name, spec in zip(plan.names, plan.specs, strict=True):
        entry = found.pop(json.loads(name), None)
        if entry is None or entry.spec != spec:
            got = f"{entry.spec.code} {list(entry.spec.shape)}" if entry is not None else "nothing of this name"
            raise CorruptCheckpointError(
                explain(
                    f"leaf {name} is not what the tree says.",
                    expected=f"{spec.code} {list(spec.shape)}",
                    got=got,
                )
            )
        begins.append(source.begin + entry.begin)
    if found:
        raise CorruptCheckpointError(
            explain("the file has leaves that its tree does not have.", got=", ".join(map(repr, list(found)[:5])))
        )
    return begins


# -- leaves -----------------------------------------------------------------------------------------------------


def _is_fake(place: torch.device | None) -> bool:
    """Whether leaves without values are asked for."""
    return (place is not None and place.type == "meta") or type(torch.empty(0, device="cpu")) is not Tensor


def _values(
    data: Any, specs: Sequence[Spec], begins: Sequence[int], place: torch.device | Sequence[torch.device | None] | None
) -> list[Tensor]:
    """Return the leaves on one device, or each on its own; without data, tensors without values."""
    places = place if isinstance(place, Sequence) else [place] * len(specs)
    if data is None:
        return [torch.empty(s.size, dtype=s.dtype, device=p or "cpu") for s, p in zip(specs, places, strict=True)]
    leaves = view_leaves(data, specs, begins)
    for i, target in enumerate(places):
        if target is not None and target.type != "cpu":
            leaves[i] = _move(leaves[i], target)
    return leaves


def _move(leaf: Tensor, target: torch.device) -> Tensor:
    try:
        return leaf.to(target)
    # A torch without CUDA says so by an assertion.
    except (AssertionError, NotImplementedError, RuntimeError) as err:
        raise UnsupportedError(
            explain(
                "the leaves cannot be put on their device.",
                expected=str(target),
                got=f"{type(err).__name__}: {err}"[:200],
                hint='load(path, device="cpu").',
            )
        ) from err


def _flagged(leaf: Tensor, flags: str) -> Tensor:
    if IS_PARAMETER in flags:
        return nn.Parameter(leaf, REQUIRES_GRAD in flags)
    return leaf.requires_grad_() if REQUIRES_GRAD in flags else leaf


# -- files of other programs ------------------------------------------------------------------------------------


def _load_foreign(source: Source, path: str, place: torch.device | None) -> TensorCollection:
    entries = source.header.entries or []
    data = None if _is_fake(place) else map_bytes(source, path)
    begins = [source.begin + entry.begin for entry in entries]
    leaves = _values(data, [entry.spec for entry in entries], begins, place)
    names = [entry.name for entry in entries]
    if "" in names:
        raise UnsupportedError(
            explain("a leaf has an empty name, which is no key.", hint="safetensors.torch.load_file reads it.")
        )
    paths = [tuple(name.split(".")) for name in names]
    if not _nests(paths):
        paths = [(name,) for name in names]
    return _nest(dict(zip(paths, leaves, strict=True)), place)


def _nests(paths: Sequence[Path]) -> bool:
    """Whether dotted names can be read as paths in one way: no empty key, no leaf that is also a sub-tree."""
    if any("" in path or len(path) > _MAX_FOREIGN_DEPTH for path in paths):
        return False
    inner = {path[:i] for path in paths for i in range(1, len(path))}
    return inner.isdisjoint(paths)


def _nest(leaves: dict[Path, Tensor], place: torch.device | None) -> TensorCollection:
    groups: dict[str, dict[Path, Tensor]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    data = {key: inner[()] if () in inner else _nest(inner, place) for key, inner in groups.items()}
    return TensorCollection._open._make(data, Size(()), place, None, None)
