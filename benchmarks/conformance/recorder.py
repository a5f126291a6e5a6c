"""Writes the calls of a case on its trees as text that runs in either library."""

from functools import wraps

import numpy as np
import torch

from benchmarks.conformance.random_trees import Branch, Lazy

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "floordiv": "//", "mod": "%", "and": "&",
    "or": "|", "xor": "^", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip


class Recorder:
    """Stands for a tree: an operation on it is an expression of it."""

    def __init__(self, text):
        self._text = text

    def __getattr__(self, name):
        return Recorder(f"{self._text}.{name}")

    def __call__(self, *args, **kwargs):
        given = [*map(source, args), *(f"{key}={source(value)}" for key, value in kwargs.items())]
        return Recorder(f"{self._text}({', '.join(given)})")

    def __getitem__(self, index):
        return Recorder(f"{self._text}[{source(index)}]")

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    __hash__ = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", repr(func))
        base = "torch" if getattr(torch, name, None) is func else "torch.Tensor"
        return Recorder(f"{base}.{name}")(*args, **(kwargs or {}))


def _binary(symbol, swapped):
    def method(self, other):
        pair = (source(other), self._text) if swapped else (self._text, source(other))
        return Recorder(f"({pair[0]} {symbol} {pair[1]})")

    return method


for _name, _symbol in _INFIX.items():
    setattr(Recorder, f"__{_name}__", _binary(_symbol, False))
    if _name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Recorder, f"__r{_name}__", _binary(_symbol, True))
for _name, _symbol in (("neg", "-"), ("invert", "~"), ("abs", "abs")):
    setattr(Recorder, f"__{_name}__", lambda self, symbol=_symbol: Recorder(f"{symbol}({self._text})"))


def source(value):
    """Python text of an argument."""
    if isinstance(value, Recorder):
        return value._text
    if isinstance(value, torch.Tensor):
        text = f"torch.tensor({value.detach().tolist()}, dtype={value.dtype})"
        text = text.replace("nan", "float('nan')").replace("inf", "float('inf')")
        if 0 in value.shape:
            text = f"torch.zeros({tuple(value.shape)}, dtype={value.dtype})"
        return text + ".requires_grad_()" * value.requires_grad
    if isinstance(value, np.ndarray):
        return f"np.array({value.tolist()}, dtype=np.{value.dtype})"
    if isinstance(value, Branch | Lazy):
        return tree_source(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(source, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(source, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{source(key)}: {source(item)}" for key, item in value.items()) + "}"
    if value is Ellipsis:
        return "..."
    return getattr(value, "__name__", None) or repr(value)


def tree_source(tree):
    """Python text that builds a tree; `TensorDict`, `Sample` and `lazy_stack` are those of the library at hand."""
    if isinstance(tree, Lazy):
        return f"lazy_stack([{', '.join(map(tree_source, tree.branches))}], {tree.dim})"
    names = f", names={list(tree.names)}" if tree.names else ""
    entries = source(tree.entries)
    if tree.typed:
        return f"Sample(**{entries}, batch_size={list(tree.size)}{names})"
    return f"TensorDict({entries}, batch_size={list(tree.size)}{names})"


def written_down(fn):
    """Let a function of the cases be recorded as a call of it, not as its own calls."""

    @wraps(fn)
    def call(*args):
        if any(isinstance(arg, Recorder) for arg in args):
            return Recorder(f"random_cases.{fn.__name__}")(*args)
        return fn(*args)

    return call


def recorded(fn, count):
    """The text of a call on trees `tree`, `other1`, ...; of a function that reads a tree as it goes, its calls."""
    names = ["tree", *(f"other{i}" for i in range(1, count))]
    try:
        result = fn(*map(Recorder, names))
    except Exception as error:  # noqa: BLE001 - a function that a recorder cannot stand in for
        return repr(f"a call that cannot be written down: {error!r}")
    if isinstance(result, tuple | list | dict):
        return f"{source(result)}"
    return source(result)
