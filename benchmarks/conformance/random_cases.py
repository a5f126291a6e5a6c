"""Random cases of the differential test: a tree, and one operation on it in both libraries and in plain torch."""

import operator

import numpy as np
import torch

from benchmarks.conformance.differential import Case, UnfitError
from benchmarks.conformance.random_trees import Branch, Lazy, like, parts, random_leaf, random_tree
from benchmarks.conformance.recorder import written_down
from tdfunc import TensorDict
from tdfunc.ops.base.cast import on_device
from tdfunc.ops.batch.rearrange import pad as pad_tree
from tests.incumbent import Incumbent
from tests.random_index import random_index


def random_case(rng, given=None, kinds=False):
    """One random operation on a random tree, or on the given one."""
    case = MAKERS[rng.integers(len(MAKERS))](rng, given, kinds)
    # The seeds of rare differences count on the order of draws, so these keep their places in the tables below.
    if case.name in LEFT_OUT:
        raise UnfitError
    return case


# Methods of tensordict that tdfunc leaves out.
LEFT_OUT = frozenset((
    "narrow", "tensor_split", "roll", "torch.roll", "rot90", "movedim", "swapaxes", "broadcast_to", "atleast_2d",
    "atleast_3d", "clear_device", "cummax", "cummin", "cat_tensors", "stack_tensors",
))  # fmt: skip


def start(rng, given, kinds=False, **options):
    """The tree of a case: the given one, or a random one."""
    if given is None:
        return random_tree(rng, kinds=kinds, **options)
    if not options.get("nontensor", True) and holds_words(given):
        raise UnfitError
    return given


def has_kinds(tree):
    """Return True if there is a lazy stack or a typed tree in a tree."""
    return any(isinstance(part, Lazy) or part.typed for part in parts(tree))


def holds_words(tree):
    """Return True if there is non-tensor data in a tree."""
    nodes = (torch.Tensor, Branch, Lazy)
    return any(
        not isinstance(value, nodes)
        for part in parts(tree)
        if isinstance(part, Branch)
        for value in part.entries.values()
    )


def _edit(fn):
    """Spell an edit for tensordict, which writes to the tree: on a copy that shares the tensors."""

    def call(tree, *rest):
        copy = tree.clone(recurse=False)
        result = fn(copy, *rest)
        return copy if result is None else result

    return call


def _same(name, detail, inputs, fn, oracle=None):
    return Case(name, detail, inputs, fn, fn, oracle)


def _key(rng, branch):
    """A key of the tree or, sometimes, another one, also nested."""
    found = list(branch.entries)
    key = str(rng.choice(found)) if found and rng.random() < 0.7 else str(rng.choice(["a", "new", "b"]))
    return (key, "in") if rng.random() < 0.2 else key


def make_construct(rng, given=None, kinds=False):
    """A case of construct."""
    branch = random_tree(rng, kinds=kinds)
    if given is not None or isinstance(branch, Lazy) or branch.typed:
        raise UnfitError
    size = branch.size if rng.random() < 0.6 else (5,)
    device = "cpu" if rng.random() < 0.2 else None

    def build(cls):
        data = {k: v.build(cls) if hasattr(v, "build") else v for k, v in branch.entries.items()}
        return cls(data, batch_size=list(size), device=device)

    return Case("construct", (size, device), [], lambda: build(TensorDict), lambda: build(Incumbent))


def make_set(rng, given=None, kinds=False):
    """A case of set."""
    branch = start(rng, given, kinds)
    key = _key(rng, branch)
    value = random_leaf(rng, branch.size if rng.random() < 0.8 else (7,))
    if rng.random() < 0.3:
        value = [3, 2.5, True, "text", random_leaf(rng, branch.size).tolist()][rng.integers(5)]
    return Case("set", (key, value), [branch], lambda t: t.set(key, value), _edit(lambda t: t.set(key, value)))


def make_get(rng, given=None, kinds=False):
    """A case of get."""
    branch = start(rng, given, kinds)
    key = _key(rng, branch)
    if rng.random() < 0.5:
        return Case("get", key, [branch], lambda t: t.get(key), lambda t: unwrapped(t, key))
    return Case("getitem", key, [branch], lambda t: t[key], lambda t: t[key])


@written_down
def unwrapped(tree, key):
    """The value of tensordict under a key, without its wrapper; None where there is none."""
    return None if tree.get(key, None) is None else tree[key]


def make_update(rng, given=None, kinds=False):
    """A case of update."""
    branch = start(rng, given, kinds)
    other = like(rng, branch, change=True) if rng.random() < 0.5 else random_tree(rng, branch.size)
    return Case("update", None, [branch, other], lambda t, o: t.update(o), _edit(lambda t, o: t.update(o)))


def make_delete(rng, given=None, kinds=False):
    """A case of delete."""
    branch = start(rng, given, kinds)
    key = _key(rng, branch)
    return Case("delete", key, [branch], lambda t: t.delete(key), _edit(lambda t: t.del_(key)))


def make_keys(rng, given=None, kinds=False):
    """A case of keys."""
    branch = start(rng, given, kinds)
    keys = [_key(rng, branch) for _ in range(rng.integers(0, 3))]
    name = str(rng.choice(["select", "exclude"]))
    return _same(name, keys, [branch], lambda t: getattr(t, name)(*keys))


def make_flatten_keys(rng, given=None, kinds=False):
    """A case of flatten keys."""
    branch = start(rng, given, kinds)
    separator = str(rng.choice([".", "/", "_"]))
    name = str(rng.choice(["flatten_keys", "unflatten_keys"]))
    return _same(name, separator, [branch], lambda t: getattr(t, name)(separator))


def make_rename(rng, given=None, kinds=False):
    """A case of rename."""
    branch = start(rng, given, kinds)
    old, new = _key(rng, branch), _key(rng, branch)
    rename = _edit(lambda t: t.rename_key_(old, new))
    return Case("rename_key", (old, new), [branch], lambda t: t.rename_key(old, new), rename)


def make_index(rng, given=None, kinds=False):
    """A case of index."""
    branch = start(rng, given, kinds)
    index = random_index(rng, branch.size)
    return _same("index", index, [branch], lambda t: t[index], lambda x, n: x[full_index(index, n, x.dim())])


def full_index(index, n, ndim):
    """The index of a leaf that reaches its batch dimensions only: an Ellipsis must not span features."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(item is Ellipsis for item in items):
        return tuple(map(_as_torch, items))
    used = sum(_width(item) for item in items)
    filled = []
    for item in items:
        filled.extend([slice(None)] * (n - used) if item is Ellipsis else [_as_torch(item)])
    return tuple(filled)


def _as_torch(item):
    # Lists of bools or ints, arrays and ranges as one tensor: torch reads a list inside a list as a tuple.
    if isinstance(item, list | range | np.ndarray):
        tensor = torch.as_tensor(list(item) if isinstance(item, range) else item)
        return tensor if tensor.numel() or tensor.dtype is torch.bool else tensor.long()
    return item


def _width(item):
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    mask = _as_torch(item)
    return mask.dim() if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool else 1


def _join(rng, given, kinds, name, fn):
    branch = start(rng, given, kinds)
    others = [like(rng, branch, change=rng.random() < 0.1) for _ in range(rng.integers(0, 3))]
    dim = int(rng.integers(-len(branch.size) - 1, len(branch.size) + 1))
    return _same(name, dim, [branch, *others], lambda *trees: fn(list(trees), dim))


def right_aligned(tensor, features):
    """A tensor over the batch with dimensions of size 1 for the features."""
    return tensor[(..., *[None] * features)]


def make_stack(rng, given=None, kinds=False):
    """A case of stack."""
    return _join(rng, given, kinds, "stack", torch.stack)


def make_cat(rng, given=None, kinds=False):
    """A case of cat."""
    return _join(rng, given, kinds, "cat", torch.cat)


def make_shape(rng, given=None, kinds=False):
    """A case of shape."""
    branch = start(rng, given, kinds)
    n = len(branch.size)
    dims = [int(d) for d in rng.integers(-n - 1, n + 1, size=2)]
    order = [int(d) for d in rng.permutation(n)]
    if rng.random() < 0.1:
        order = order[:-1]
    numel = int(np.prod(branch.size))
    shapes = [(-1,), (numel,), branch.size[::-1], (*branch.size, 1), (2, -1), (-1, 0), (5, 5)]
    shape = shapes[rng.integers(len(shapes))]
    wide = tuple(4 if s == 1 else (-1 if rng.random() < 0.3 else s) for s in branch.size)
    wide = ((2, *wide), wide, wide[1:])[rng.integers(3)]
    calls = {
        "reshape": (shape, lambda t: t.reshape(*shape), lambda x, n: x.reshape((*_filled(shape, numel), *x.shape[n:]))),
        "view": (shape, lambda t: t.view(*shape), lambda x, n: x.view((*_filled(shape, numel), *x.shape[n:]))),
        "flatten": (dims, lambda t: t.flatten(*dims), None),
        "unflatten": (dims[0], lambda t: t.unflatten(dims[0], (-1, 1)), None),
        "permute": (order, lambda t: t.permute(*order), lambda x, n: x.permute((*order, *range(n, x.dim())))),
        "transpose": (dims, lambda t: t.transpose(*dims), lambda x, n: x.transpose(*(d % n for d in dims))),
        "unsqueeze": (dims[0], lambda t: t.unsqueeze(dims[0]), lambda x, n: x.unsqueeze(dims[0] % (n + 1))),
        "squeeze": (dims[0], lambda t: t.squeeze(dims[0]), lambda x, n: x.squeeze(dims[0] % n)),
        "squeeze_all": (None, lambda t: t.squeeze(), None),
        "expand": (wide, lambda t: t.expand(*wide), lambda x, n: x.expand((*wide, *x.shape[n:]))),
    }
    name = str(rng.choice(list(calls)))
    return _same(name, calls[name][0], [branch], calls[name][1], calls[name][2])


def _filled(shape, numel):
    rest = -int(np.prod(shape))
    return tuple(numel // rest if s == -1 and rest > 0 else s for s in shape)


def make_split(rng, given=None, kinds=False):
    """A case of split."""
    branch = start(rng, given, kinds)
    n = len(branch.size)
    dim = int(rng.integers(-n - 1, n + 1))
    total = branch.size[dim] if -n <= dim < n else 2
    sizes = [1, 2, [1, total - 1], [total], [1, 1]][rng.integers(5)]
    calls = {
        "split": ((sizes, dim), lambda t: t.split(sizes, dim), lambda x, n: x.split(sizes, dim % n)),
        "chunk": ((2, dim), lambda t: t.chunk(2, dim), lambda x, n: x.chunk(2, dim % n)),
        "unbind": (dim, lambda t: t.unbind(dim), lambda x, n: x.unbind(dim % n)),
    }
    name = str(rng.choice(list(calls)))
    return _same(name, calls[name][0], [branch], calls[name][1], calls[name][2])


def make_rearrange(rng, given=None, kinds=False):
    """A case of rearrange."""
    branch = start(rng, given, kinds)
    n = len(branch.size)
    dim, other = (int(d) for d in rng.integers(-n - (rng.random() < 0.1), n + (rng.random() < 0.1) + (n == 0), size=2))
    shift, k = (int(x) for x in rng.integers(-3, 4, size=2))
    times = tuple(int(x) for x in rng.integers(2, 4, size=n))
    first, length = (int(x) for x in rng.integers(0, 3, size=2))
    parts = [1, 2, 3, [1], [2, 1], [0, 5]][rng.integers(6)]
    total = branch.size[dim] if -n <= dim < n else 1
    counts = [2, 0, torch.as_tensor(rng.integers(0, 3, size=total))][rng.integers(3)]
    calls = {
        "narrow": ((dim, first, length), lambda x, d: x.narrow(d, first, length)),
        "tensor_split": ((parts, dim), lambda x, d: x.tensor_split(parts, d)),
        "flip": (dim, lambda x, d: x.flip(d)),
        "roll": ((shift, dim), lambda x, d: x.roll(shift, d)),
        "repeat_interleave": ((counts, dim), lambda x, d: x.repeat_interleave(counts, d)),
    }
    plane = {
        "movedim": ((dim, other), lambda x, a, b: x.movedim(a, b)),
        "swapaxes": ((dim, other), lambda x, a, b: x.swapaxes(a, b)),
        "rot90": ((1 + k % 3, (dim, other)), lambda x, a, b: x.rot90(1 + k % 3, (a, b))),
    }
    wide = (*[2] * int(rng.integers(0, 2)), *branch.size)
    whole = {
        "repeat": (times, lambda t: t.repeat(*times), lambda x, n: x.repeat(*times, *[1] * (x.dim() - n))),
        "broadcast_to": (wide, lambda t: t.broadcast_to(wide), lambda x, n: x.broadcast_to((*wide, *x.shape[n:]))),
        "atleast_2d": (None, lambda t: t.atleast_2d(), None),
        "atleast_3d": (None, lambda t: t.atleast_3d(), None),
    }
    # tensordict's `repeat` of a tree without dimensions raises.
    name = str(rng.choice([*calls, *plane, *(whole if n else ())]))
    if name in whole:
        return _same(name, whole[name][0], [branch], *whole[name][1:])
    if name in calls:
        given, call = calls[name]
        return _same(name, given, [branch], lambda t: call(t, dim), lambda x, n: call(x, dim % n))
    given, call = plane[name]
    return _same(name, given, [branch], lambda t: call(t, dim, other), lambda x, n: call(x, dim % n, other % n))


pad = written_down(pad_tree)


def make_pad(rng, given=None, kinds=False):
    """A case of pad."""
    branch = start(rng, given, kinds, nontensor=False)
    sizes = [int(x) for x in rng.integers(0, 3, size=2 * int(rng.integers(1, len(branch.size) + 2)))]

    def oracle(x, n):
        pairs = [*zip(sizes[::2], sizes[1::2], strict=True), *[(0, 0)] * (x.dim() - len(sizes) // 2)]
        return torch.nn.functional.pad(x, [size for pair in reversed(pairs) for size in pair], value=3)

    return Case("pad", sizes, [branch], lambda t: pad(t, sizes, 3), lambda t: t.pad(sizes, 3), oracle)


def make_gather(rng, given=None, kinds=False):
    """A case of gather."""
    branch = start(rng, given, kinds, nontensor=rng.random() < 0.2)
    n = len(branch.size)
    dim = int(rng.integers(-n - 1, n + 1))
    high = branch.size[dim] if -n <= dim < n else 1
    shape = list(branch.size)
    if -n <= dim < n:
        shape[dim] = int(rng.integers(0, 4))
    index = torch.as_tensor(rng.integers(0, max(high, 1), size=shape))

    def oracle(x, n):
        wide = right_aligned(index, x.dim() - n).expand(*index.shape, *x.shape[n:])
        return torch.gather(x, dim % n, wide)

    return _same("gather", (dim, index), [branch], lambda t: t.gather(dim, index), oracle)


def make_where(rng, given=None, kinds=False):
    """A case of where."""
    branch = start(rng, given, kinds, nontensor=rng.random() < 0.2)
    condition = torch.as_tensor(rng.random(branch.size if rng.random() < 0.8 else branch.size[:1]) < 0.5)
    if rng.random() < 0.5:
        other = like(rng, branch, change=rng.random() < 0.1)
        return _same("where", condition, [branch, other], lambda t, o: t.where(condition, o))
    number = [0, 1.5, True][rng.integers(3)]

    def oracle(x, n):
        return torch.where(right_aligned(condition, x.dim() - n), x, number)

    return _same("where", (condition, number), [branch], lambda t: t.where(condition, number), oracle)


def make_masked_select(rng, given=None, kinds=False):
    """A case of masked select."""
    branch = start(rng, given, kinds)
    mask = torch.as_tensor(rng.random(branch.size[: rng.integers(0, len(branch.size) + 1)]) < 0.5)
    return _same("masked_select", mask, [branch], lambda t: t.masked_select(mask), lambda x, n: x[mask])


def make_copy(rng, given=None, kinds=False):
    """A case of copy."""
    branch = start(rng, given, kinds)
    dtype = [torch.float32, torch.int64][rng.integers(2)]
    calls = {
        "clone": (lambda t: t.clone(), lambda x, n: x.clone()),
        "detach": (lambda t: t.detach(), lambda x, n: x.detach()),
        "to_dtype": (lambda t: t.to(dtype), lambda x, n: x.to(dtype)),
    }
    name = str(rng.choice([*calls, "to_device"]))
    if name == "to_device":
        # Other trees of a sequence have no device.
        ours = lambda t: without_device(t.to("cpu"))  # noqa: E731
        theirs = lambda t: t.to("cpu").clear_device_()  # noqa: E731
        return Case(name, dtype, [branch], ours, theirs, lambda x, n: x)
    return _same(name, dtype, [branch], *calls[name])


@written_down
def without_device(tree):
    """A tree that names no device."""
    return on_device(tree, None)


def double(x):
    """For `apply`: a new tensor."""
    return x + x


def keep_floats(x):
    """For `apply`: nothing for some leaves."""
    return x if x.is_floating_point() else None


def shrink(x):
    """For `apply`: a tensor without the batch."""
    return x.sum()


def _named(fn):
    def call(key, x):
        return fn(x)

    # By this name a script finds it.
    call.__name__ = f"random_cases.NAMED[{fn.__name__!r}]"
    return call


NAMED = {fn.__name__: _named(fn) for fn in (double, keep_floats, shrink)}


def make_apply(rng, given=None, kinds=False):
    """A case of apply."""
    branch = start(rng, given, kinds)
    calls = {
        "double": (double, lambda x, n: x + x),
        "drop": (keep_floats, None),
        "shrink": (shrink, None),
    }
    name = str(rng.choice(list(calls)))
    fn, oracle = calls[name]
    if rng.random() < 0.3:
        return _same("named_apply", name, [branch], lambda t: t.named_apply(NAMED[fn.__name__]), oracle)
    return _same("apply", name, [branch], lambda t: t.apply(fn), oracle)


OPERATORS = (
    "add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "and_", "or_", "xor", "eq", "ne", "lt", "le", "gt", "ge",
)  # fmt: skip


def make_pointwise(rng, given=None, kinds=False):
    """A case of pointwise."""
    # Without a batch, leaves and operands without dimensions meet, and promotion is at its oddest.
    size = () if rng.random() < 0.2 else None
    branch = start(rng, given, kinds, size=size, dtype=None if rng.random() < 0.5 else torch.float32)
    name = str(rng.choice(OPERATORS))
    fn = getattr(operator, name)
    kind = rng.integers(4)
    if kind == 0:
        other = like(rng, branch, change=rng.random() < 0.15)
        return _same(name, "tree", [branch, other], fn, lambda x, n, o: fn(x, o))
    if kind == 1:
        shape = branch.size if rng.random() < 0.7 else branch.size[-1:]
        operand = random_leaf(rng, shape, torch.float32)
        operand = operand.reshape(*operand.shape[: len(shape)], -1)[..., 0] if operand.numel() else torch.ones(shape)
        operand = operand.detach().nan_to_num()

        def oracle(x, n):
            # A tensor without dimensions promotes as a number does, so it stays one.
            return fn(x, right_aligned(operand, x.dim() - n) if operand.dim() else operand)

        return _same(name, operand, [branch], lambda t: fn(t, operand), oracle)
    number = [2, 0.5, True, -1][rng.integers(4)]
    if kind == 2:
        return _same("r" + name, number, [branch], lambda t: fn(number, t), lambda x, n: fn(number, x))
    return _same(name, number, [branch], lambda t: fn(t, number), lambda x, n: fn(x, number))


UNARY = (
    "abs", "neg", "exp", "log", "sqrt", "sigmoid", "sign", "floor", "round", "isnan", "isfinite", "reciprocal", "frac",
    "bitwise_not", "logical_not", "sin", "tanh", "erf", "lgamma", "trunc",
)  # fmt: skip


def make_unary(rng, given=None, kinds=False):
    """A case of unary."""
    branch = start(rng, given, kinds, dtype=None if rng.random() < 0.5 else torch.float32)
    name = str(rng.choice(UNARY))
    if not hasattr(Incumbent, name):
        return _same(name, None, [branch], lambda t: t.apply(getattr(torch, name)))
    return _same(name, None, [branch], lambda t: getattr(t, name)(), lambda x, n: getattr(torch, name)(x))


def make_reduce(rng, given=None, kinds=False):
    """A case of reduce."""
    branch = start(rng, given, kinds, dtype=None if rng.random() < 0.3 else torch.float32)
    name = str(rng.choice(["sum", "mean", "prod", "amax", "amin", "std", "var", "all", "any"]))
    n = len(branch.size)
    dim = [None, int(rng.integers(-n - 1, n + 1)), "feature"][rng.integers(3)]
    keep = {"keepdim": True} if name not in ("all", "any") and rng.random() < 0.3 else {}
    if name in ("all", "any"):
        dim = None if dim == "feature" else dim
    arguments = {} if dim is None else {"dim": dim}

    def oracle(x, n):
        dims = tuple(range(x.dim())) if dim is None else (dim % n,)
        if name == "prod" and dim is None:
            return x.prod().reshape([1] * x.dim() if keep else [])
        x, dims = (x, dims) if dims else (x.unsqueeze(-1), (-1,))
        return getattr(torch, name)(x, dims[0] if name == "prod" else dims, keepdim=bool(keep) and dims != (-1,))

    is_tree = dim is not None or name not in ("all", "any")
    known = oracle if is_tree and dim != "feature" else None
    return _same(name, (dim, keep), [branch], lambda t: getattr(t, name)(**arguments, **keep), known)


def make_arithmetic(rng, given=None, kinds=False):
    """A case of functions of several operands."""
    branch = start(rng, given, kinds, dtype=None if rng.random() < 0.2 else torch.float32)
    low, high = sorted(float(x) for x in rng.integers(-3, 4, size=2))
    first, second = (like(rng, branch, change=rng.random() < 0.05) for _ in range(2))
    mask = torch.as_tensor(rng.random(branch.size) < 0.5)
    dtype = str(rng.choice(["float", "double", "half", "bfloat16", "int", "bool"]))
    alone = {
        "clamp": ((low, high), lambda t: t.clamp(low, high), lambda x, n: x.clamp(low, high)),
        "cast": (dtype, lambda t: getattr(t, dtype)(), lambda x, n: getattr(x, dtype)()),
        "type": (None, lambda t: t.type(torch.int16), lambda x, n: x.type(torch.int16)),
        "masked_fill": (
            mask,
            lambda t: t.masked_fill(mask, 2),
            lambda x, n: x.masked_fill(right_aligned(mask, x.dim() - n), 2),
        ),
        "contiguous": (None, lambda t: t.contiguous(), lambda x, n: x.contiguous()),
    }
    several = {
        "clamp_min": (lambda t, a, b: t.clamp_min(a), lambda x, n, a, b: x.clamp_min(a)),
        "clamp_max": (lambda t, a, b: t.clamp_max(a), lambda x, n, a, b: x.clamp_max(a)),
        "clamp_trees": (lambda t, a, b: t.clamp(a, b), lambda x, n, a, b: x.clamp(a, b)),
        "lerp": (lambda t, a, b: t.lerp(a, 0.5), lambda x, n, a, b: x.lerp(a, 0.5)),
        "lerp_tree": (lambda t, a, b: t.lerp(a, b), lambda x, n, a, b: x.lerp(a, b)),
        "addcmul": (lambda t, a, b: t.addcmul(a, b, value=2), lambda x, n, a, b: x.addcmul(a, b, value=2)),
        "addcdiv": (lambda t, a, b: t.addcdiv(a, b, value=2), lambda x, n, a, b: x.addcdiv(a, b, value=2)),
    }
    name = str(rng.choice([*alone, *several]))
    if name in several:
        return _same(name, None, [branch, first, second], *several[name])
    return _same(name, alone[name][0], [branch], *alone[name][1:])


def make_scan(rng, given=None, kinds=False):
    """A case of functions along a dimension."""
    branch = start(rng, given, kinds, dtype=torch.float32, nontensor=rng.random() < 0.3)
    n = len(branch.size)
    dim = int(rng.integers(-n - (rng.random() < 0.1), n + (rng.random() < 0.1) + (n == 0)))
    # tensordict's results are classes with two trees.
    calls = {
        "softmax": (lambda t: t.softmax(dim), lambda x, n: x.softmax(dim % n)),
        "cummax": (lambda t: t.cummax(dim, return_indices=False), lambda x, n: x.cummax(dim % n).values),
        "cummin": (lambda t: t.cummin(dim, return_indices=False), lambda x, n: x.cummin(dim % n).values),
        "max": (lambda t: t.max(dim, return_indices=False), lambda x, n: x.max(dim % n).values),
        "min": (lambda t: t.min(dim, return_indices=False), lambda x, n: x.min(dim % n).values),
        "norm": (lambda t: t.norm(), lambda x, n: x.norm()),
        "nansum": (lambda t: t.nansum(dim), lambda x, n: x.nansum(dim % n)),
        "nanmean": (lambda t: t.nanmean(dim), lambda x, n: x.nanmean(dim % n)),
        "logsumexp": (lambda t: t.logsumexp(dim), lambda x, n: x.logsumexp(dim % n)),
        "quantile": (lambda t: t.quantile(0.3, dim), lambda x, n: x.quantile(0.3, dim % n)),
        "sum_all": (lambda t: t.sum(reduce=True), None),
        "max_all": (lambda t: t.max(reduce=True), None),
    }
    name = str(rng.choice(list(calls)))
    return _same(name, (dim, {}), [branch], *calls[name])


def make_made(rng, given=None, kinds=False):
    """A case of trees made from a tree."""
    branch = start(rng, given, kinds, nontensor=rng.random() < 0.2)
    size = ((), (4,), (2, 5))[rng.integers(3)]
    key, other = _key(rng, branch), _key(rng, branch)
    value = random_leaf(rng, branch.size)
    calls = {
        "empty": (None, lambda t: t.empty()),
        "empty_recurse": (None, lambda t: t.empty(recurse=True)),
        "new_zeros": (size, lambda t: t.new_zeros(*size)),
        "new_ones": (size, lambda t: t.new_ones(*size, dtype=torch.float64)),
        "new_full": (size, lambda t: t.new_full(size, 1)),
        "replace": (key, lambda t: t.replace({key: value})),
        "to_tensordict": (None, lambda t: t.to_tensordict(retain_none=False)),
        "split_keys": ((key, other), lambda t: t.split_keys([key], {other: "to"})),
        "split_keys_loose": ((key, other), lambda t: t.split_keys([key], [other], strict=False)),
        "auto_batch_size": (None, lambda t: t.from_dict(t.to_dict(), auto_batch_size=True)),
        "auto_batch_dims": (None, lambda t: t.from_dict(t.to_dict(), auto_batch_size=True, batch_dims=1)),
    }
    name = str(rng.choice(list(calls)))
    _check_open(name, branch)
    return _same(name, calls[name][0], [branch], calls[name][1])


def _check_open(name, branch):
    """Typed trees and lazy stacks are not made of dicts here: docs/differences.md has the line to write instead."""
    if name in ("from_dict", "auto_batch_size", "auto_batch_dims") and has_kinds(branch):
        raise UnfitError


def make_joined_entries(rng, given=None, kinds=False):
    """A case of cat_tensors and stack_tensors."""
    branch = start(rng, given, kinds, dtype=torch.float32, nontensor=False)
    keys = list(dict.fromkeys(_key(rng, branch) for _ in range(rng.integers(1, 3))))
    name, dim = str(rng.choice(["cat_tensors", "stack_tensors"])), int(rng.integers(0, 3))
    options = {"out_key": "out", "dim": dim, "keep_entries": bool(rng.random() < 0.5)}
    call = lambda t: getattr(t, name)(*keys, **options)  # noqa: E731
    return Case(name, (keys, options), [branch], call, _edit(call))


def make_at(rng, given=None, kinds=False):
    """A case of rows written at an index."""
    branch = start(rng, given, kinds, nontensor=rng.random() < 0.2)
    index = _rows_once(rng, branch.size)
    name = str(rng.choice(["at_set", "at_number", "at_add", "at_mul", "at_key"]))
    number = [0, 2, True][rng.integers(3)]
    if name == "at_key":
        key = _key(rng, branch)
        return Case(
            name, key, [branch],
            lambda t: t.at[key].add(number), _edit(lambda t: t.set(key, t[key] + number)),
        )  # fmt: skip
    if name == "at_set":
        other = like(rng, branch)
        return Case(
            name, index, [branch, other],
            lambda t, o: t.at[index].set(o[index]), lambda t, o: written(t, index, o[index]),
        )  # fmt: skip
    calls = {
        "at_number": (lambda t: t.at[index].set(number), lambda t: written(t, index, number)),
        "at_add": (lambda t: t.at[index].add(t[index]), lambda t: written(t, index, t[index] + t[index])),
        "at_mul": (lambda t: t.at[index].mul(2), lambda t: written(t, index, t[index] * 2)),
    }
    return Case(name, (index, number), [branch], *calls[name])


@written_down
def written(tree, index, value):
    """Tensordict's `tree[index] = value`, on a copy."""
    copy = tree.clone()
    copy[index] = value
    return copy


def _rows_once(rng, size):
    """An index that names no row twice, for which the order of writes would count."""
    kind, n = rng.integers(5), size[0] if size else 0
    picks = rng.permutation(n)[: rng.integers(0, n + 1)] if n else np.zeros(0, dtype=np.int64)
    if kind == 0:
        return int(rng.integers(-n, n)) if n else 0
    if kind == 1:
        return torch.as_tensor(picks)
    if kind == 2:
        return torch.as_tensor(rng.random(size[: rng.integers(0, len(size) + 1)]) < 0.5)
    if kind == 3:
        return (..., slice(0, 1)) if size else ...
    return slice(int(rng.integers(0, n + 1)), None)


def make_convert(rng, given=None, kinds=False):
    """A case of conversions, and of trips through them."""
    branch = start(rng, given, kinds)
    n = len(branch.size)
    calls = {
        "to_dict": (lambda t: t.to_dict(), lambda t: t.to_dict()),
        "from_dict": (lambda t: t.from_dict(t.to_dict(), batch_size=branch.size),) * 2,
        "to_namedtuple": (lambda t: fields_of(t),) * 2,
        "state_dict": (lambda t: t.apply(torch.zeros_like).load_state_dict(t.clone().state_dict()),) * 2,
        "detach_numpy": (lambda t: t.detach().numpy(),) * 2,
        "unlazy": (lambda t: t.contiguous(),) * 2,
        "with_names": (
            lambda t: t.with_names(list("pqrstu"[:n])),
            _edit(lambda t: t.rename(*"pqrstu"[:n]) if n else t),
        ),
        "with_batch_size": (
            lambda t: t.with_batch_size(branch.size[: n // 2]),
            lambda t: resized(t, branch.size[: n // 2]),
        ),
        "leaves": (tensors,) * 2,
        "items": (lambda t: dict(t.items()), lambda t: {key: t[key] for key in t.keys()}),  # noqa: SIM118
        "numel": (lambda t: [t.numel(), t.ndim, len(t)],) * 2,
        "pop": (lambda t: t.pop("a"), popped),
    }
    name = str(rng.choice(list(calls)))
    _check_open(name, branch)
    return Case(name, None, [branch], *calls[name])


@written_down
def fields_of(value):
    """The named tuples of a tree as dicts, which keep the names."""
    return _named_values(value.to_namedtuple())


def _named_values(value):
    return {key: _named_values(item) for key, item in value._asdict().items()} if hasattr(value, "_asdict") else value


@written_down
def tensors(tree):
    """The tensors of a tree by path; those of a lazy stack are tuples."""
    values = {path: tree[path] for path in tree.keys(True, True)}
    return {
        path: value for path, value in values.items() if isinstance(value, torch.Tensor | tuple) and not _is_text(value)
    }


def _is_text(value):
    return isinstance(value, tuple) and not isinstance(value[0], torch.Tensor | tuple)


@written_down
def resized(tree, size):
    """Tensordict's `tree.batch_size = size`, on a copy."""
    copy = tree.clone(recurse=False)
    copy.batch_size = size
    return copy


@written_down
def popped(tree):
    """Tensordict's `tree.pop`, on a copy, and the rest."""
    copy = tree.clone(recurse=False)
    return copy.pop("a"), copy


def make_torch(rng, given=None, kinds=False):
    """A case of functions of torch, given a tree."""
    branch = start(rng, given, kinds)
    n = len(branch.size)
    dim = int(rng.integers(-n - (rng.random() < 0.1), n + (rng.random() < 0.1) + (n == 0)))
    order = tuple(int(d) for d in rng.permutation(n))
    condition = torch.as_tensor(rng.random(branch.size) < 0.5)
    calls = {
        "zeros_like": (lambda t: torch.zeros_like(t),) * 2,
        "ones_like": (lambda t: torch.ones_like(t),) * 2,
        "full_like": (lambda t: torch.full_like(t, 3),) * 2,
        "torch.clone": (lambda t: torch.clone(t),) * 2,
        "torch.unbind": (lambda t: torch.unbind(t, dim),) * 2,
        "torch.split": (lambda t: torch.split(t, 1, dim),) * 2,
        "torch.chunk": (lambda t: torch.chunk(t, 2, dim), lambda t: t.chunk(2, dim)),
        "torch.squeeze": (lambda t: torch.squeeze(t, dim), lambda t: t.squeeze(dim)),
        "torch.unsqueeze": (lambda t: torch.unsqueeze(t, dim), lambda t: t.unsqueeze(dim)),
        "torch.permute": (lambda t: torch.permute(t, order), lambda t: t.permute(order)),
        "torch.transpose": (lambda t: torch.transpose(t, dim, 0), lambda t: t.transpose(dim, 0)),
        "torch.flatten": (lambda t: torch.flatten(t, 0, dim), lambda t: t.flatten(0, dim)),
        "torch.reshape": (lambda t: torch.reshape(t, (-1,)), lambda t: t.reshape(-1)),
        "torch.flip": (lambda t: torch.flip(t, [dim]), lambda t: t.flip([dim])),
        "torch.roll": (lambda t: torch.roll(t, 1, dim), lambda t: t.roll(1, dim)),
        "torch.abs": (lambda t: torch.abs(t), lambda t: t.abs()),
        "torch.add": (lambda t: torch.add(t, t), lambda t: t + t),
        "torch.mul": (lambda t: torch.mul(t, 2), lambda t: t * 2),
        "torch.sum": (lambda t: torch.sum(t, dim), lambda t: t.sum(dim)),
        "torch.mean": (lambda t: torch.mean(t, dim), lambda t: t.mean(dim)),
        "torch.where": (lambda t: torch.where(condition, t, 0), lambda t: t.where(condition, 0)),
        "torch.masked_select": (lambda t: torch.masked_select(t, condition), lambda t: t.masked_select(condition)),
    }
    name = str(rng.choice(list(calls)))
    return Case(name, (dim, {}), [branch], *calls[name])


MAKERS = [
    make_construct, make_set, make_get, make_update, make_delete, make_keys, make_flatten_keys, make_rename,
    make_index, make_index, make_index, make_stack, make_cat, make_shape, make_shape, make_shape, make_rearrange,
    make_rearrange, make_pad, make_split, make_gather, make_where, make_masked_select, make_copy, make_apply,
    make_pointwise, make_pointwise, make_unary, make_reduce, make_arithmetic, make_scan, make_made,
    make_joined_entries, make_at, make_at, make_convert, make_torch,
]  # fmt: skip
