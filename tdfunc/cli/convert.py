"""`convert`, `extract` and `cast`: a checkpoint made of another, leaf by leaf."""

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tdfunc.cli.numbers import FINITE, cast, has_values, not_finite
from tdfunc.cli.output import listed, note, progress, safe
from tdfunc.cli.scales import (
    check_cast,
    decoded,
    kept_leaves,
    note_described_codes,
    note_lost_scales,
    without_scales,
)
from tdfunc.cli.sources import Source, Stored, choose, make_filter, open_source, plain_values, stored_leaves
from tdfunc.cli.torch_files.files import write_torch
from tdfunc.core.collection import LeafOp, TensorCollection, iter_leaves
from tdfunc.core.errors import FilterError, UnsupportedError, brief, error
from tdfunc.core.keys import Entry, Filter, FilterLike, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.ops.display.text import bytes_text, count_text
from tdfunc.ops.edits.structure import keep_leaves
from tdfunc.storage.disk.remote import is_remote, local_path
from tdfunc.storage.manager.steps import ABOUT_FILE, list_steps
from tdfunc.storage.memmap.layout import META
from tdfunc.storage.memmap.write import check_target as check_memmap
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.plan import as_bytes
from tdfunc.storage.scales import Scaled
from tdfunc.storage.stream import memmap_stream, save_stream
from tdfunc.storage.tree.build import without_values
from tdfunc.storage.tree.specs import DTYPES

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
# The formats that are one file, and the formats that are a folder.
_FILES = ("safetensors", "torch")
_FOLDERS = ("shards", "memmap")
# The default of Hugging Face's tools.
_SHARD_SIZE = "5GB"
# For filters, which look at the path.
_NO_LEAF = torch.empty(0, device="meta")
Values = Callable[[Tensor], Iterable[Tensor]]


class Target(NamedTuple):
    """The place and form of the result in the options; `make_target` decides the rest."""

    path: str
    format: str | None = None
    max_shard_size: str | None = None
    force: bool = False


class Part(NamedTuple):
    """Globs of the leaves to take; without globs, all leaves."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()


def rewrite(path: str, target: Target, part: Part, *, dtype_name: str | None = None, dequantize: bool = False) -> None:
    """Write (a part of) a checkpoint in a format and a dtype, with `dequantize` numbers in place of codes."""
    dtype = None
    if dtype_name is not None:
        dtype = find_dtype(dtype_name)
    with open_source(path) as source:
        target = make_target(target, source)
        tree = chosen_part(source, part)
        codes: dict[int, Scaled] = {}
        kept = set[int]()
        if dequantize:
            tree, codes = without_scales(source, tree)
            note_described_codes(target.path)
        else:
            if dtype is not None:
                check_cast("cast", source, tree, dtype)
            note_lost_scales(source, tree)
            kept = kept_leaves(source)
        origins: dict[int, Tensor] = {}
        if dtype is not None or codes:
            tree, origins = _retyped(tree, dtype, codes, kept)
        lost = Counter[int]()
        size = 0
        for one in stored_leaves(tree):
            origin = origins.get(id(one.leaf), one.leaf)
            size += one.leaf.numel() * origin.element_size()
        with progress("write", size) as tick:

            def values(leaf: Tensor) -> Iterator[Tensor]:
                origin = origins.get(id(leaf), leaf)
                if id(origin) in codes:
                    yield from decoded(source, origin, codes[id(origin)], leaf, lost, tick)
                    return
                for piece in source.pieces(origin, tick):
                    yield cast(piece, leaf, lost)

            write(target, tree, values, source, lost)


def _retyped(
    tree: TensorCollection, dtype: torch.dtype | None, codes: Mapping[int, Scaled], kept: set[int]
) -> tuple[TensorCollection, dict[int, Tensor]]:
    """Return a tree with its numbers in another dtype, and by the id of each new leaf the leaf that it comes from.

    Args:
        tree: The tree, without values.
        dtype: The dtype of all numbers. Without one, only the numbers of codes change, to float32.
        codes: The leaves of codes, by id.
        kept: The ids of leaves that stay as they are.
    """
    origins: dict[int, Tensor] = {}

    def retype(leaf: Tensor) -> Tensor:
        is_number = leaf.is_floating_point() and has_values(leaf.dtype) and id(leaf) not in kept
        if dtype is not None:
            wanted = dtype
        elif id(leaf) in codes:
            wanted = torch.float32
        else:
            wanted = leaf.dtype
        if not is_number or leaf.dtype == wanted:
            return leaf
        new = without_values(leaf, wanted)
        origins[id(new)] = leaf
        return new

    return tree._map(LeafOp("cast", retype)), origins


def find_dtype(name: str) -> torch.dtype:
    """Return the floating dtype of a name of torch or safetensors."""
    known = {code.lower(): dtype for code, dtype in DTYPES.items() if dtype.is_floating_point and has_values(dtype)}
    text = name.lower().removeprefix("torch.").replace("fp", "f")
    dtype = known.get(text, getattr(torch, text, None))
    if dtype is None or dtype not in known.values():
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in known.values()))
        raise error(ValueError, "--dtype is not a floating dtype.", expected=names, got=brief(name))
    return dtype


def chosen_part(source: Source, part: Part) -> TensorCollection:
    """Return the part of a tree that globs choose.

    As in `partition`, a pattern chooses leaves, and the rest has all else, also tensors that are non-tensor data. A
    plain object is whole: patterns do not choose the tensors and trees in it, and a note names those that match.

    Raises:
        UnsupportedError: The part has a tensor that cannot be read.
    """
    check_left_out(source, part)
    stored = stored_leaves(source.tree)
    # A pattern may exclude only what is left out anyway.
    exclude = [glob for glob in part.exclude if not _is_left_out(source, glob) or _matching(stored, Filter(glob))]
    where = make_filter(part.include, exclude)
    if where is None:
        return source.tree
    values = plain_values(source.tree)
    leaves: list[Stored] = []
    in_objects: list[Stored] = []
    # Tensors that patterns do not choose.
    others: list[Stored] = []
    for one in stored:
        is_in_object = any(one.path[:length] in values for length in range(1, len(one.path)))
        if is_in_object:
            in_objects.append(one)
        if is_in_object or one.is_value:
            others.append(one)
        else:
            leaves.append(one)
    chosen = choose(leaves, where)
    if part.include:
        _note_missed(_matching(others, where))
    else:
        chosen += in_objects
    paths = set[Path]()
    for one in chosen:
        paths.update(one.paths)
    return keep_leaves(source.tree, paths, nontensors=not part.include)


def _note_missed(missed: Sequence[Stored]) -> None:
    if missed:
        names = ", ".join([safe(one.name) for one in missed[:5]])
        note(f"not chosen: {count_text(len(missed), 'tensor')} in plain objects, which stay whole: {names}")


def _matching(leaves: Sequence[Stored], where: FilterLike) -> list[Stored]:
    """Return the leaves that a filter chooses, or none if a pattern of it matches none of them."""
    try:
        return choose(leaves, where)
    except FilterError:
        return []


def check_left_out(source: Source, part: Part) -> None:
    """Raise if a chosen part has a tensor that cannot be read; other values are noted by `write`."""
    for at, one in source.left_out.items():
        is_included = not part.include or _matches_any(part.include, at)
        if one.is_tensor and is_included and not _matches_any(part.exclude, at):
            name = dotted(at)
            raise UnsupportedError(
                f"{safe(source.path)}: {safe(name)!r} cannot be read.",
                expected="dense tensors in plain containers, in a file of the checkpoint that names them",
                got=safe(one.text),
                hint=f"--exclude {shlex.quote(name)} leaves it out (extract).",
            )


def _is_left_out(source: Source, glob: str) -> bool:
    return any(_matches(glob, at) for at in source.left_out)


def _matches_any(globs: Sequence[str], at: Path) -> bool:
    return any(_matches(glob, at) for glob in globs)


def _matches(glob: str, at: Path) -> bool:
    try:
        return Filter(glob).mask([Entry((at,), _NO_LEAF, None)])[0]
    except FilterError:
        return False


def make_target(options: Target, source: Source) -> Target:
    """Return the place and form of the result; raise if something would be overwritten without `--force`."""
    path = local_path(options.path)
    path = path.rstrip("/") or path
    format = _find_format(options, path, source)
    shard_size = None
    if format == "shards":
        shard_size = options.max_shard_size or _SHARD_SIZE
    target = Target(path, format, shard_size, options.force)
    if is_remote(path):
        if format in ("memmap", "torch"):
            raise UnsupportedError(f"{path}: {format} cannot be written to a URL.")
        return target
    _check_place(target)
    if format == "memmap":
        check_memmap(os.path.realpath(path), "convert", exist_ok=True)
    return target


def _find_format(options: Target, path: str, source: Source) -> str:
    """Return the format of the result: by an option, else by the name, else as the source has it."""
    by_name = _format_of_name(path)
    if options.format is not None:
        format = options.format
    elif options.max_shard_size is not None:
        format = "shards"
    elif by_name is None and source.format in _FOLDERS:
        format = source.format
    else:
        format = by_name
    # The name of a folder does not have the ending of a file.
    if format in _FILES:
        fits = format == by_name
    else:
        fits = by_name is None
    if format is None or not fits:
        raise error(
            ValueError,
            f"{path}: the name does not fit the format that is written.",
            expected=f"x.safetensors, {', '.join(_TORCH)}, or a folder with --to shards or --to memmap",
            got=f"{path} as {format}" if format is not None else path,
        )
    if options.max_shard_size is not None:
        # Raises for a text that is not a size.
        as_bytes(options.max_shard_size)
        if format != "shards":
            raise error(ValueError, "--max-shard-size is only for a folder of shards.", got=f"{path} as {format}")
    return format


def _format_of_name(path: str) -> str | None:
    """Return the format that the ending of a name stands for; None for another name, which is a folder's."""
    suffix = os.path.splitext(path)[1]
    if suffix == ".safetensors":
        return "safetensors"
    if suffix in _TORCH:
        return "torch"
    return None


def _check_place(target: Target) -> None:
    """Raise if the place of a result on this machine has something that must not be replaced."""
    path = target.path
    is_file = target.format in _FILES
    if os.path.lexists(path) and os.path.isdir(path) is is_file:
        kinds = "a folder, and the result a file" if is_file else "a file, and the result a folder"
        raise error(FileExistsError, f"{path} is {kinds}.")
    if _is_protected(target):
        raise error(
            FileExistsError,
            f"{path} belongs to a CheckpointManager, or contains a memmapped tree.",
            expected="a new place",
            hint="CheckpointManager.save(..., overwrite=True) replaces a step.",
        )
    taken = [place for place in _replaced_files(target) if os.path.lexists(place)]
    if taken and not target.force:
        raise error(FileExistsError, f"{taken[0]} exists.", expected="a new name", hint="--force replaces it.")


def _is_protected(target: Target) -> bool:
    """Return whether the place belongs to a step or a run, or is a memmapped tree that shards would be written into."""
    if target.format in _FILES:
        folder, name = os.path.split(target.path)
        return name == SINGLE and os.path.isfile(os.path.join(folder, ABOUT_FILE))
    is_step = os.path.isfile(os.path.join(target.path, ABOUT_FILE))
    has_memmap = target.format == "shards" and os.path.lexists(os.path.join(target.path, META))
    return is_step or has_memmap or bool(list_steps(target.path))


def _replaced_files(target: Target) -> list[str]:
    """Return the files that a result would take the place of, whether they exist or not."""
    if target.format not in _FILES:
        return [os.path.join(target.path, name) for name in (INDEX, SINGLE, META)]
    folder, name = os.path.split(target.path)
    names = [name]
    if name == SINGLE:
        # A model.safetensors takes the place of an index and its shards.
        names.append(INDEX)
    return [os.path.join(folder, name) for name in names]


def _noting(values: Values, leaves: Sequence[Stored], lost: Counter[int]) -> Values:
    """Return the values of leaves, after each of which a note counts the values that it should not have."""
    by_id = {id(one.leaf): one for one in leaves}
    noted: set[int] = set()

    def counted(leaf: Tensor) -> Iterator[Tensor]:
        # A file that has to be written again reads the values again.
        lost[id(leaf)] = 0
        found = FINITE
        for piece in values(leaf):
            found += not_finite(piece)
            yield piece
        one = by_id[id(leaf)]
        facts: list[str] = []
        if lost[id(leaf)]:
            facts.append(f"{count_text(lost[id(leaf)], 'value')} out of the range of {one.dtype_name}")
        if found != FINITE:
            facts.append(f"of {leaf.numel():,} written values {found}")
        if facts and id(leaf) not in noted:
            noted.add(id(leaf))
            note(f"{safe(one.name)}: {'; '.join(facts)}")

    return counted


def _empty(target: Target, names: Sequence[str]) -> Exception:
    """Return the error for a result that would have nothing of what the source has."""
    what = f"{safe(target.path)} would be empty: it would have none of {count_text(len(names), 'entry')}."
    hint = "nothing was written. show lists the paths; a tied leaf has all of its names."
    if target.format == "torch":
        hint = "nothing was written. A state dict has named tensors only; x.safetensors also keeps plain objects."
    return error(ValueError, what, got=", ".join(map(safe, names[:5])), hint=hint)


def write(target: Target, tree: TensorCollection, values: Values, source: Source, lost: Counter[int]) -> None:
    """Write a tree leaf by leaf.

    Values that are not finite, and values that a cast lost, are noted with their leaf before anything is replaced.
    """
    leaves = stored_leaves(tree)
    if not leaves and not plain_values(tree):
        names = [one.name for one in stored_leaves(source.tree)]
        if names:
            raise _empty(target, names)
    values = _noting(values, leaves, lost)
    _note_not_kept(source)
    if target.format == "torch":
        leaves = _write_state(target, tree, leaves, values)
    elif target.format == "memmap":
        memmap_stream(tree, values, target.path, existsok=True)
    else:
        save_stream(tree, values, target.path, max_shard_size=target.max_shard_size)
    size = bytes_text(sum(one.size_bytes for one in leaves))
    note(f"wrote {safe(target.path)} ({target.format}, {count_text(len(leaves), 'leaf')}, {size})")


def _note_not_kept(source: Source) -> None:
    """Note on stderr the parts of a checkpoint that its tree does not have."""
    if source.metadata:
        note(f"the metadata of {safe(source.path)} are not kept: {', '.join(map(safe, source.metadata))}")
    left_out = [f"{dotted(at)}: {one.text}" for at, one in source.left_out.items()]
    for text in listed([*source.altered, *left_out]):
        note(f"not kept: {safe(text)}")


def _write_state(target: Target, tree: TensorCollection, leaves: Sequence[Stored], values: Values) -> list[Stored]:
    """Write the state dict of a tree; return the leaves in it, and note the entries that it cannot hold."""
    skipped = set[Path]()
    for one in leaves:
        if one.kind is Kind.NON_PERSISTENT:
            skipped.update(one.paths)
    state = _state_dict(tree, skipped)
    hidden = [dotted(path) for path in [*sorted(skipped), *plain_values(tree)]]
    hidden += [one.name for one in leaves if one.is_value]
    if hidden and not state:
        raise _empty(target, hidden)
    if hidden:
        more = ", ..." if len(hidden) > 5 else ""
        names = ", ".join(map(safe, hidden[:5])) + more
        note(f"{target.path} is a state dict, which cannot hold {count_text(len(hidden), 'entry')}: {names}")
    write_torch(state, values, target.path)
    return [one for one in leaves if not one.is_value and not skipped.issuperset(one.paths)]


def _state_dict(tree: TensorCollection, skipped: set[Path]) -> dict[str, Tensor]:
    """Return the leaves of a tree by dotted name, except those at skipped paths."""
    state: dict[str, Tensor] = {}
    for path, leaf in iter_leaves(tree):
        name = dotted(path)
        if name in state:
            raise error(
                ValueError,
                f"two paths become the name {name!r} in a state dict.",
                hint="extract one of them, or convert to another format.",
            )
        if path not in skipped:
            state[name] = leaf
    return state
