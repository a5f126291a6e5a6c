"""Placeholder while the tree is brought up."""

from tdfunc._collection import TensorCollection


class ModuleMethods(TensorCollection):
    """Filled by the modules part."""

    __slots__ = ()
