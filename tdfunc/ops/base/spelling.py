"""tensordict's names that write to a tree, and the pure call that takes the place of each.

They are attributes of the class that raise when they are read, so that other attributes are as fast as without them.
"""

from typing import Any, NoReturn

from tdfunc.core.errors import ImmutableError

_BY_NAME = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh detach div erf erfc exp expm1 floor frac lerp
lgamma log log10 log1p log2 masked_fill maximum minimum mul neg pin_memory pow reciprocal round sigmoid sign sin sinh
sqrt sub tan tanh trunc
"""
_LOCK = "a tree is never written to, so there is nothing to lock"
PURE_CALLS = {
    **{f"{name}_": f"td = td.{name}(...)" for name in _BY_NAME.split()},
    **dict.fromkeys(("lock_", "unlock_", "clear_refs_for_compile_"), _LOCK),
    "apply_": "td = td.apply(fn)",
    "auto_batch_size_": "td = td.with_batch_size(size)",
    "auto_device_": "td = td.to(device)",
    "clear_device_": "td = TensorDict(td, td.batch_size)",
    "consolidate": "`tdfunc.save` writes one file, and leaves are plain tensors",
    "copy_at_": "td = td.at[index].set_(...)",
    "del_": "td = td.delete(key)",
    "fill_": "td = td.set(key, torch.full_like(td[key], value))",
    "filter_empty_": "td = td.apply(lambda x: x, filter_empty=True)",
    "rename_": "td = td.with_names(names)",
    "rename_key_": "td = td.rename_key(old, new)",
    "requires_grad_": "td = td.apply(lambda x: x.detach().requires_grad_())",
    "set_at_": "td = td.at[index].set(td[index].set(key, rows))",
    "update_at_": "td = td.at[index].set(td[index].update(rows))",
    "zero_": "td = torch.zeros_like(td)",
}


class _PureCall:
    """Raises the error that names the pure call; as it is also an `AttributeError`, `hasattr` is False."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, tree: Any, owner: Any = None) -> NoReturn:
        raise ImmutableError(f"{owner.__name__} is immutable: it has no {self._name!r}.", hint=PURE_CALLS[self._name])


class PureCallNames:
    """The names of `PURE_CALLS` as attributes that raise."""

    __slots__ = ()


for _name in PURE_CALLS:
    setattr(PureCallNames, _name, _PureCall(_name))
