"""Every public name and argument of tensordict and its counterpart here.

Names supported under the same name are found in the classes; the tables below have the line to write for every other
name, or the reason why there is none. docs/differences.md has these names, and `python -m benchmarks.pages --show
methods functions arguments` prints all. test_operations.py compares the tables with both libraries.
"""

import inspect
import re
from pathlib import Path

import tdfunc
from tdfunc import LazyStack, TensorClass, TensorDict
from tdfunc.ops.base.spelling import PURE_CALLS
from tests.incumbent import Incumbent, tensordict

PAGE = Path(__file__).parents[2] / "docs/differences.md"
_PLACE = re.compile(r"(<!-- names -->\n\n).*?(\n*<!-- end of names -->)", re.DOTALL)

_FORMAT = "absent: a file format of another library; read it there and call `TensorDict.from_dict`"
_DTYPE = "`td.to(torch.{})`"
_LOCK = "absent: a tree is never written to, so there is nothing to lock"
_WHOLE = "absent: a folder is written as a whole, `td.set(key, value).memmap(path)`"
_STORE = "absent: trees in a key-value server; `td.memmap(path)` shares one through files"
_ARCHIVE = "absent: `tdfunc.save(td, path)` writes one file with checksums"
_PIPE = "absent: pipes of another library; `td.isend(dst)` and `td.irecv(src)` return handles"
_GLOBAL = "ranks are global: `torch.distributed.get_global_rank(group, rank)`"
_QUANTIZED = "absent: torch has deprecated quantized dtypes"
_STATE = "absent: no process-wide switches"
_INTERNAL = "absent: not an operation, an internal of tensordict"
_ARROW = "absent: a format of another library; `TensorDict.from_pandas(frame)` and `td.to_pandas()` go through pandas"
_PREDICATE = "`tdfunc.Filter(lambda path, x: x.{}())`"
_JOINED = "`td.exclude(*keys).set(new, torch.{}([td[k] for k in keys], dim))`"
_REARRANGE = "absent: `flip`, `permute`, `transpose`, `reshape`, `repeat`, `expand`, `split` and indexing do it"

# Names of TensorDict that are spelled otherwise here, or absent. The names of writes have their line in the package.
METHODS = {
    **{name: f"`{line}`" if line.startswith("td ") else f"absent: {line}" for name, line in PURE_CALLS.items()},
    **dict.fromkeys(
        ("roll", "rot90", "tile", "fliplr", "flipud", "movedim", "moveaxis", "swapaxes", "swapdims", "narrow",
         "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "tensor_split"), _REARRANGE,
    ),
    "cat_tensors": _JOINED.format("cat"), "stack_tensors": _JOINED.format("stack"),
    "get_at": "`td[index].get(key)`, None where the key is missing; `td[key][index]` raises",
    "setdefault": "`td = td if key in td else td.set(key, value)`", "new_tensor":
    "`td.apply(lambda x: x.new_tensor(values), batch_size=[len(values)])`",
    "param_count": "`sum(x.numel() for x in td.leaves())`, a tied leaf once",
    "pack": "`torch.cat([x.reshape(*td.batch_size, -1) for x in td.leaves()], -1)`, in the order of `td.paths()`",
    "rename_keys": "`td = td.rename_key(old, new)` for each",
    "bytes": "`td.nbytes`", "cummax": "`td.apply(lambda x: x.cummax(0).values)`",
    "cummin": "`td.apply(lambda x: x.cummin(0).values)`",
    "gather_and_stack": "`trees = td.gather_to(dst)`, and `torch.stack(trees)` there",
    "init_remote": "`td.send(dst)`", "from_remote_init": "`tdfunc.distributed.recv(src)`",
    "arecv": _PIPE, "asend": _PIPE,
    "make_memmap": _WHOLE, "make_memmap_from_storage": _WHOLE, "make_memmap_from_tensor": _WHOLE,
    "saved_path": "absent: each leaf knows its file; `td.is_memmap()` is True if all have one",
    "from_consolidated": "absent: `tdfunc.load` reads one file",
    "is_consolidated": "absent: there is one form of a tree",
    "from_csv": _FORMAT, "from_h5": _FORMAT, "from_json": _FORMAT, "from_parquet": _FORMAT, "from_zarr": _FORMAT,
    "from_schema": _FORMAT, "to_csv": _FORMAT, "to_h5": _FORMAT, "to_json": _FORMAT, "to_parquet": _FORMAT,
    "to_zarr": _FORMAT, "to_mds": _FORMAT, "to_store": _FORMAT,
    "is_locked": _LOCK,
    "copy": "`td` itself, which never changes; `td.clone()` copies the tensors",
    "clear": "`td.empty()`", "popitem": "`key = list(td.keys())[-1]; td.pop(key)`",
    "create_nested": "`td = td.set(key, {})`", "set_non_tensor": "`td = td.set(key, tdfunc.NonTensorData(value))`",
    "get_non_tensor": "`td.get(key)`", 
    "zero_grad": "absent: gradients are values, `torch.func.grad` returns them",
    "backward":
    "`pairs = [(td[p], grads[p]) for p in td.paths() if td[p].requires_grad]; torch.autograd.backward(*zip(*pairs))`, "
    "or `torch.func.vjp`",
    "record_stream":
    "`for x in td.leaves(): x.record_stream(stream)`",
    "filter_non_tensor_data": "`td.select(*td.paths())`", "non_tensor_items":
    "`[(k, v) for k, v in td.items(True, True) if not isinstance(v, torch.Tensor)]`",
    "is_non_tensor": "absent: False for every tree; `isinstance(td.get(key), torch.Tensor)` tells leaves from values",
    "rename": "`td = td.with_names(names)`", 
    "refine_names": "`td = td.with_names(names)`",
    "separates": "`part, rest = td.split_keys(keys)`", "sorted_keys": "`list(td.keys(sort=True))`",
    "depth": "`max(map(len, td.paths()), default=1) - 1`", "dtype": "`{x.dtype for x in td.leaves()}`",
    "is_floating_point": "`all(x.is_floating_point() for x in td.leaves())`", "ndimension": "`td.ndim`",
    "data_ptr": "`[x.data_ptr() for x in td.leaves()]`, in the order of `td.paths()`",
    "is_cpu": '`td.device == torch.device("cpu")`', "is_cuda":
    '`td.device is not None and td.device.type == "cuda"`',
    "is_meta": '`td.device == torch.device("meta")`',
    "attrs": "`td.apply(fn)`, or `[fn(x) for x in td.leaves()]`", "entry_class":
    "`type(td.get(key))`, for non-tensor data the class of the value",
    "get_item_shape":
    "`td.get(key).shape`; non-tensor data have a value for each element of `td.batch_size`, or one for all",
    "mod": "`td.remainder(other)`, or `td % other`", "rsub": "`other - td`",
    "as_tensor": "absent: leaves are plain tensors",
    "stack": "`torch.stack(trees, dim)`, or `tdfunc.stack`", "cat": "`torch.cat(trees, dim)`, or `tdfunc.cat`",
    "stack_from_tensordict": "`torch.stack(td.leaves(), dim)`, in the order of `td.paths()`",
    "cat_from_tensordict": "`torch.cat(td.leaves(), dim)`, in the order of `td.paths()`",
    "lazy_stack": "`tdfunc.lazy_stack(trees, dim)`", "to_lazystack": "`tdfunc.lazy_stack(td.unbind(dim), dim)`",
    "maybe_dense_stack": "`tdfunc.lazy_stack(trees, dim)`; the kind of the result never depends on the shapes",
    "densify": "`lazy.dense()`", "to_padded_tensor": "`lazy.pad(value)`",
    "pad": "`tdfunc.pad(td, pad_size, value)`; `lazy.pad` pads a lazy stack",
    "from_dict_instance": "`TensorDict.from_dict(...)`",
    "from_list": "`tdfunc.lazy_stack(trees)`, or `torch.stack(trees)`",
    "from_tuple": "`TensorDict.from_any(tuple(values))`",
    "from_struct_array": "absent: a dict of the fields of an array of records is a tree",
    "to_struct_array": "absent: the frame of `to_pandas` makes records",
    "from_modules": "`tdfunc.stack_modules(modules)`", "from_pytree":
    "absent: a tree is a pytree itself, and nested dicts become trees",
    "to_pytree": "`td.to_dict()`; a tree is a pytree itself",
    "complex32": "`td.to(torch.complex32)`",
    "qint32": _QUANTIZED, "qint8": _QUANTIZED, "quint4x2": _QUANTIZED, "quint8": _QUANTIZED,
} | {
    name: _DTYPE.format(name)
    for name in (
        "complex64", "complex128", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8",
        "uint16", "uint32", "uint64",
    )
}  # fmt: skip

# Public names of the module.
FUNCTIONS = {
    "LazyStackedTensorDict": "`tdfunc.LazyStack`", "LazyStackedTensorDictStore": _STORE, "TensorDictStore": _STORE,
    "PersistentTensorDict": _FORMAT, "MemoryMappedTensor":
    "absent: leaves on files are plain tensors; `td.memmap(path)`", "TensorDictBase": "`tdfunc.TensorDict`",
    "TensorDictParams": "absent: parameters as a module; `tdfunc.from_module` returns them as a tree",
    "TensorClassModuleBase": "`tdfunc.nn.TensorClassModuleBase`",
    "TensorClassModuleWrapper": "`tdfunc.nn.TensorClassModuleBase.as_td_module`",
    "as_tensordict_module": "`tdfunc.nn.as_tensordict_module`",
    "TypedTensorDict": "`tdfunc.TensorClass`", "UnbatchedTensor": "absent: `in_dims` of `vmap` marks shared leaves",
    "NonTensorDataBase": "`tdfunc.NonTensorData` and `tdfunc.NonTensorStack`", "TensorAttrs": "`td.apply(fn)`",
    "MetaData":
    "`tdfunc.NonTensorData(value)`; stacked it is a value for each tree: stack `td.exclude(key)`, then `set` it",
    "NestedKey": "a str or a tuple of str",
    "assert_allclose_td": "`tdfunc.assert_close(a, b)`",
    "dense_stack_tds": "`torch.stack(trees)`, or `lazy.dense()`", "maybe_dense_stack": METHODS["maybe_dense_stack"],
    "from_any": "`TensorDict.from_any(...)`", "from_dataclass": "`TensorDict.from_dataclass(...)`",
    "from_dict": "`TensorDict.from_dict(...)`", "from_namedtuple": "`TensorDict.from_namedtuple(...)`",
    "from_struct_array": METHODS["from_struct_array"], "fromkeys": "`TensorDict.fromkeys(...)`",
    "from_tuple": METHODS["from_tuple"], "from_pytree": METHODS["from_pytree"],
    "from_modules": METHODS["from_modules"], "from_pandas": "`TensorDict.from_pandas(...)`",
    "from_consolidated": METHODS["from_consolidated"], "from_csv": _FORMAT, "from_h5": _FORMAT, "from_json": _FORMAT,
    "from_parquet": _FORMAT, "from_zarr": _FORMAT,
    "make_tensordict": "`TensorDict(...)`, or `TensorDict.from_dict(data, auto_batch_size=True)`",
    "merge_tensordicts":
    "`tdfunc.combine(a, b)` of trees without a common key, else `b.update(a)`: the first tree wins; for "
    "`callback_exist=`, `b.update(a).update({p: fn(a[p], b[p]) for p in a.paths() if p in b})`",
    "parse_tensor_dict_string": "absent: a printed tree is not read back",
    "is_tensor_collection": "`isinstance(x, tdfunc.TensorDict | tdfunc.TensorClass | tdfunc.LazyStack)`",
    "is_tensorclass": "`isinstance(x, tdfunc.TensorClass)`", "is_non_tensor":
    "`isinstance(x, tdfunc.NonTensorData | tdfunc.NonTensorStack)`; `td.get(key)` gives the plain value of either",
    "is_leaf_nontensor": "absent: maps never see non-tensor data", "default_is_leaf":
    "absent: maps never see non-tensor data",
    "KEY_SEPARATOR": _INTERNAL, "PackLayout": "absent: the columns of a packed tensor; see `pack` above",
    "TensorCollection": "`tdfunc.TensorDict | tdfunc.TensorClass | tdfunc.LazyStack`",
    "append_memmap": _WHOLE, "from_arrow": _ARROW, "to_arrow": _ARROW, "from_safetensors": "`tdfunc.load(path)`",
    "to_safetensors": "`tdfunc.save(td, path)`", "group_by":
    "`[td[td[key] == value] for value in td[key].unique()]`",
    "is_floating": _PREDICATE.format("is_floating_point"), "is_inexact":
    "`tdfunc.Filter(lambda path, x: x.is_floating_point() or x.is_complex())`",
    "is_bool": "`tdfunc.Filter(torch.bool)`",
    "is_integer":
    "`tdfunc.Filter(lambda path, x: not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool))`",
    "unpad_sequence": "`tdfunc.lazy_stack([row[:n] for row, n in zip(td, lengths)])`",
    "unravel_key_to_tuple": "absent: keys are str or tuples of str, which need no normal form",
    "unravel_key": "absent: keys are str or tuples of str, which need no normal form",
    "unravel_key_list": "absent: keys are str or tuples of str, which need no normal form",
    "load_memmap": "`TensorDict.load_memmap(path)`", "memmap": "`td.memmap(path)`", "pack_memmap": _ARCHIVE,
    "unpack_memmap": _ARCHIVE, "is_memmap_archive": _ARCHIVE, "refresh_archive_checksums": _ARCHIVE,
    "lazy_legacy": _STATE, "set_lazy_legacy": _STATE, "list_to_stack": _STATE, "set_list_to_stack": _STATE,
    "capture_non_tensor_stack": _STATE, "set_capture_non_tensor_stack": _STATE, "get_defaults_to_none": _STATE,
    "set_get_defaults_to_none": _STATE, "get_printoptions": _STATE, "set_printoptions": _STATE,
}  # fmt: skip

_TYPED = "`cls.from_tensordict(TensorDict.{}(...))`"
# Names of a lazy stack that other trees do not have.
LAZY = {
    "append": "`tdfunc.lazy_stack([*lazy.trees, tree], lazy.stack_dim)`",
    "extend": "`tdfunc.lazy_stack([*lazy.trees, *trees], lazy.stack_dim)`",
    "insert": "`tdfunc.lazy_stack([*lazy.trees[:i], tree, *lazy.trees[i:]], lazy.stack_dim)`",
    "get_nestedtensor": "`lazy.nested()[key]`", "valid_keys": "`lazy.keys()`", "hook_in": _INTERNAL,
    "hook_out": _INTERNAL,
}  # fmt: skip
# Names that a typed tree has, and not that a `TensorDict` has; the others are explained above.
TYPED = {
    "from_dict": _TYPED.format("from_dict"), "from_any": _TYPED.format("from_any"),
    "from_namedtuple": _TYPED.format("from_namedtuple"), "fromkeys": _TYPED.format("fromkeys"),
}  # fmt: skip

HEAD = """# tensordict {version}: {subject}

A method with the same name has the same effect, except for the differences of docs/differences.md: an operation that
would write returns a new tree. *Absent* names are missing on purpose. *Planned* names do not exist yet.
"""


def public(owner):
    """Public names of a class or module, without modules and imported names."""
    # The names of writes raise an AttributeError.
    names = [name for name in dir(owner) if not name.startswith("_") and hasattr(owner, name)]
    if inspect.isclass(owner):
        return names
    return [name for name in names if _is_own(owner, name)]


def _is_own(module, name):
    value = getattr(module, name)
    if name in getattr(module, "__all__", ()):
        return True
    if inspect.ismodule(value):
        return False
    return str(getattr(value, "__module__", "")).startswith(module.__name__)


def besides(owner, known):
    """Public names of a class that are not among the known ones."""
    return [name for name in public(owner) if name not in known]


def typed(name):
    """Return True if a name of a typed tree is not explained by the page's part about `TensorDict`."""
    return name not in public(Incumbent) or (name in public(TensorDict) and name not in public(TensorClass))


def explained(theirs, ours, table):
    """The explanation of each name that is not here under the same name; None without one."""
    return {name: table.get(name) for name in theirs if name not in ours}


def status(text):
    """The status that an explanation gives a name."""
    word = text.split(":")[0]
    return word if word in ("absent", "planned") else "renamed"


_POSITION = "the same argument under another name; give it by position"
_BLOCKING = "only `to`, `set` and loads move tensors; there it is"
_PLAIN = "leaves are tensors and non-tensor data; a sub-tree is `td[key]`, and `td.at[key].apply(fn)` maps it whole"
_OUT = "a function returns what is new; `td.update_(result)` copies it into existing storage"
_NO_LOCK = "a tree is never written to, so there is nothing to lock"
_ONE_FORM = "one form: read `tolist()` or `to_dict()`, and convert its leaves"

# Arguments that methods of the same name do not take here; `method.argument` goes before `argument`.
ARGUMENTS = {
    "default": "both trees have the same keys: `a.select(*b.keys())` first, or `a.apply(fn, b, default=...)`",
    "split_keys.default": "`strict=False` leaves out keys that do not exist",
    "out": _OUT, "lock": _NO_LOCK, "propagate_lock": _NO_LOCK, "ignore_lock": _NO_LOCK,
    "inplace": "a tree is never changed: `td = td.method(...)`",
    "call_on_nested": _PLAIN, "is_leaf": _PLAIN, "num_threads": "leaves are pinned one after another",
    "key_transform": "`td.rename_key(old, new)` of the result",
    "reproduce_struct": "each part has the nested trees of its keys",
    "canonical": "`td.apply(lambda x: x.clone(memory_format=torch.contiguous_format))` has the strides of the shape",
    "atomic": "every write to a folder is atomic", "cast_filter": '`td.to({"*.weight": dtype, "*": other})`',
    "load_memmap_.mode": "`TensorDict.load_memmap(path, mode=...)`", "non_blocking": _BLOCKING,
    "tensordict": _POSITION, "item": _POSITION, "input_dict_or_td": _POSITION, 
    "prefix": _POSITION, "size": _POSITION, 
    "auto_batch_size": "a frame has one dimension, its rows", "batch_dims": "a frame has one dimension, its rows",
    "batch_size": "`td.with_batch_size(size)` of the result",
    "clone": "`td.update(other.clone())`", "keys_to_update": "`td.update(other.select(*keys))`",
    "update_batch_size": "the batch size is what the leaves have; `td.with_batch_size(size)`",
    "pad": "both trees have the same keys", "layout": "leaves are strided, like the leaves of the tree",
    "pin_memory": "`td.pin_memory()` of the result",
    "requires_grad": "`td.apply(lambda x: x.requires_grad_())` of the result",
    "empty_lazy": "`lazy.dense()` first", "as_tensordict": "the result is a tree of the same class",
    "use_state_dict": "`TensorDict(module.state_dict())`, and `module.load_state_dict(td.state_dict())`",
    "filter_empty": "sub-modules without parameters are left out; `td.apply(fn, filter_empty=True)` for other trees",
    "init_tag": "`tag=`", "group_dst": _GLOBAL, "group_src": _GLOBAL, "pseudo_rand": "a message is one, of one tag",
    "consolidated": "every message is one block of bytes", "bucket_bytes": "one collective for each dtype",
    "async_op": "`td.isend` and `td.irecv` return handles", "return_premature": "`td.irecv` returns a handle",
    "isend.return_early": "`td.isend` returns a handle", "tensordicts": "`trees=`", "generator": "`key=`",
    "broadcast.device": "`td.to(device)` of the result", "scatter.device": "`td.to(device)` of the result",
    "_tensorclass_type": "an internal of tensordict",
    "as_module": "no `TensorDictParams`", "memo": "an internal of tensordict",
    "swap_dest": "an internal of tensordict", "return_swap": "the handle puts back the module's own weights",
    "preserve_module_state": "a block binds leaves as they are, a load makes Parameters",
    "subpath": "`load_memmap(path / key)` loads a folder inside", "allow_pickle": "pickles are never read",
    "robust_key": "keys are always encoded", "archive": "`tdfunc.save` writes one file", "compression":
    "`tdfunc.save` writes one file, which any safetensors reader opens",
    "pool": "`executor=`", "max_tasks_per_child": "`executor=ProcessPoolExecutor(max_tasks_per_child=...)`",
    "index_with_generator": "chunks are always cut as they are needed",
    "as_tensorclass": "`Class.from_tensordict(td)`", "dest_cls": "`Class.from_tensordict(td)`",
    "convert_tensors": "`td.numpy()`, or `td.tolist(convert_tensors=True)`",
    "retain_none": "None is not a value of a tree", "tolist_first": _ONE_FORM,
    "as_linked_list": _ONE_FORM, "convert_nodes": _ONE_FORM,
}  # fmt: skip

# Arguments that a method takes among its `**options`.
OPTIONS = {
    "apply": {"batch_size", "default", "device", "filter_empty", "names"},
    "named_apply": {"batch_size", "default", "device", "filter_empty", "names"},
    **dict.fromkeys(("add", "sub"), {"alpha"}),
    **dict.fromkeys(("dumps", "save"), {"num_threads", "return_early", "share_non_tensor", "existsok"}),
    **dict.fromkeys(
        ("from_any", "from_dataclass", "from_namedtuple"),
        {"auto_batch_size", "batch_dims", "batch_size", "device", "names"},
    ),
    "load": {"out", "num_threads", "mode"},
}


def named(method):
    """The arguments of a method that can be given by name."""
    try:
        found = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return set()
    return {
        name
        for name, one in found.items()
        if name not in ("self", "cls") and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


def absent_arguments():
    """Methods of both libraries by the arguments that they do not take here."""
    found = {}
    for name in public(TensorDict):
        ours, theirs = getattr(TensorDict, name), getattr(Incumbent, name, None)
        if callable(ours) and callable(theirs):
            for argument in sorted(named(theirs) - named(ours) - OPTIONS.get(name, set())):
                key = f"{name}.{argument}"
                found.setdefault(key if key in ARGUMENTS else argument, []).append(name)
    return dict(sorted(found.items()))


def argument_rows():
    """A row for each argument that is not here: its methods, and the line to write instead."""
    for argument, methods in absent_arguments().items():
        yield f"| `{argument.split('.')[-1]}` | {', '.join(f'`{m}`' for m in methods)} | {ARGUMENTS[argument]} |"


def by_remedy(others):
    """The names of each explanation; methods that write have one, which is their pure call."""
    grouped = {}
    for name, text in others.items():
        pure = text == f"`td = td.{name.removesuffix('_')}(...)`"
        grouped.setdefault("`td = td.name(...)`, the name without `_`" if pure else text, []).append(name)
    return grouped


def section(title, theirs, ours, table):
    """A part of the page: the supported names, then a row for each way to replace the others."""
    theirs = list(theirs)
    others = explained(theirs, ours, table)
    same = [name for name in theirs if name not in others]
    rows = [
        f"| {', '.join(f'`{name}`' for name in names)} | {status(text)} | {text.removeprefix(status(text) + ': ')} |"
        for text, names in by_remedy(others).items()
    ]
    counts = {word: sum(status(text) == word for text in others.values()) for word in ("renamed", "absent", "planned")}
    summary = ", ".join([f"{len(same)} with the same name", *(f"{n} {word}" for word, n in counts.items())])
    lines = [
        f"## {title}",
        "",
        f"{summary}.",
        "",
        "**Same name:** " + ", ".join(f"`{name}`" for name in same) + ".",
        "",
    ]
    return [*lines, "| tensordict | | instead, or the reason |", "|---|---|---|", *rows, ""]


def full():
    """The complete tables, by subject."""
    ours, theirs = public(TensorDict), public(Incumbent)
    more = [name for name in ours if name not in theirs]
    bodies = {
        "methods": section("Methods and properties of `TensorDict`", theirs, ours, METHODS),
        "functions": [
            *section("Functions and classes", public(tensordict), public(tdfunc), FUNCTIONS),
            *section("Lazy stacks", besides(tensordict.LazyStackedTensorDict, theirs), public(LazyStack), LAZY),
            *section("Typed trees", filter(typed, public(tensordict.TensorClass)), public(TensorClass), TYPED),
        ],
        "arguments": [
            "## Arguments", "",
            "tdfunc does not have these arguments of methods with the same name.", "",
            "| argument | of | instead, or the reason |", "|---|---|---|", *argument_rows(), "",
            "## Only here", "",
            "tensordict does not have these methods and properties of `TensorDict`: "
            + ", ".join(f"`{name}`" for name in more) + ".",
        ],
    }  # fmt: skip
    return {
        subject: "\n".join([HEAD.format(subject=subject, version=tensordict.__version__), *lines])
        for subject, lines in bodies.items()
    }


# -- the page -----------------------------------------------------------------------------------------------------


def follows_a_rule(name, text):
    """Return True for a name that the page explains by a rule: writes, dtypes, and constructors as functions."""
    if name in PURE_CALLS or text.startswith("`td.to(torch."):
        return True
    return text in (f"`TensorDict.{name}(...)`", f"`cls.from_tensordict(TensorDict.{name}(...))`")


def differing():
    """The names that the page lists, and their explanations."""
    theirs = public(Incumbent)
    tables = (
        (theirs, public(TensorDict), METHODS),
        (public(tensordict), public(tdfunc), FUNCTIONS),
        (besides(tensordict.LazyStackedTensorDict, theirs), public(LazyStack), LAZY),
        (filter(typed, public(tensordict.TensorClass)), public(TensorClass), TYPED),
    )
    found = {}
    for names, ours, table in tables:
        found |= {name: text for name, text in explained(names, ours, table).items() if not follows_a_rule(name, text)}
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def _row(names, text):
    """A row of a table: a bar would end its cell."""
    return f"| {', '.join(f'`{name}`' for name in names)} | {text.replace('|', chr(92) + '|')} |"


def _by_text(texts):
    """The names of each text, in the order of the names."""
    grouped = {}
    for name, text in texts.items():
        grouped.setdefault(text, []).append(name)
    return grouped


def _short(text):
    """The first line of code of an explanation, without the words around it."""
    code = re.match(r"`[^`]+`", text)
    return code[0] if code else text


def _table(head, rows):
    return [f"| {head} | |", "|---|---|", *(_row(names, text) for text, names in rows.items()), ""]


def names():
    """The part of the page: the line to write for each name and argument, or the reason why it is absent."""
    renamed, absent, arguments, without = {}, {}, {}, {}
    for name, text in differing().items():
        if status(text) == "renamed":
            renamed[name] = _short(text)
        else:
            absent[name] = text.removeprefix("absent: ")
    for key in absent_arguments():
        text = ARGUMENTS[key]
        if text.startswith("`"):
            arguments[key] = _short(text)
        else:
            without[key] = text
    lines = [
        *_table("renamed", _by_text(renamed)),
        *_table("absent", _by_text(absent)),
        *_table("argument of another name", _by_text(arguments)),
        *_table("absent argument", _by_text(without)),
    ]
    return "\n".join(lines[:-1])


def page():
    """docs/differences.md with the names of both libraries."""
    return _PLACE.sub(lambda place: f"{place[1]}{names()}\n\n<!-- end of names -->", PAGE.read_text())
