"""The names that a public module shows: in `dir`, and by `from module import *`."""

from types import ModuleType
from typing import Any


def surface(namespace: dict[str, Any], *modules: str) -> list[str]:
    """Set `__all__` and `__dir__` in the globals of a module: its own functions and classes; return the names.

    A package shows what it imports by name, and of modules only those that are named here. Type checkers and editors
    have the same rule, as `from a import b` exports nothing and `from a import b as b` does.
    """
    is_package = "__path__" in namespace
    names: list[str] = []
    for name, value in namespace.items():
        if name.startswith("_") or (isinstance(value, ModuleType) and name not in modules):
            continue
        is_own = callable(value) and getattr(value, "__module__", None) == namespace["__name__"]
        if is_package or is_own:
            names.append(name)
    namespace["__all__"] = names
    namespace["__dir__"] = names.copy
    return names
