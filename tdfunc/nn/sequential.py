"""`TensorDictSequential`: modules of trees, one after another."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from tdfunc.core.errors import TreeStructureError, UnsupportedError, brief
from tdfunc.core.types import NestedKey
from tdfunc.nn.base import TensorDictModuleBase, as_keys, dispatch
from tdfunc.nn.interaction import InteractionType


class TensorDictSequential(TensorDictModuleBase):
    """Modules of trees that run one after another, each on the result of the one before.

    `in_keys` are the keys that a module reads and no earlier one writes, `out_keys` the keys that the modules write.

    Args:
        *modules: The modules, or one list of them, or one dict with a name for each.
        partial_tolerant: Leave out modules whose in keys are missing; in a lazy stack, for the trees that lack them.
        selected_out_keys: The outputs to keep, as for `select_out_keys`.

    Raises:
        UnsupportedError: A module does not have `in_keys` and `out_keys`.
        MissingKeyError: A selected key is not among `out_keys`.

    Examples:
        >>> from tdfunc.nn import TensorDictModule
        >>> seq = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]), TensorDictModule(torch.relu, ["h"], ["y"])
        ... )
        >>> seq.in_keys, seq.out_keys, list(seq.state_dict())
        (['x'], ['h', 'y'], ['module.0.module.weight', 'module.0.module.bias'])
        >>> list(seq(TensorDict({"x": torch.zeros(3)})).keys())
        ['x', 'h', 'y']
    """

    _interacts: ClassVar[bool] = True

    def __init__(
        self, *modules: Any, partial_tolerant: bool = False, selected_out_keys: Iterable[NestedKey] | None = None
    ) -> None:
        super().__init__()
        given: Any = modules
        if len(modules) == 1 and not isinstance(modules[0], nn.Module) and isinstance(modules[0], Iterable):
            given = modules[0]
        named: dict[str, Any] | None = None
        if isinstance(given, Mapping):
            named = dict(given)
            given = named.values()
        parts: list[Any] = list(given)
        for i, part in enumerate(parts):
            if not (isinstance(part, nn.Module) and self.is_tdmodule_compatible(part)):
                raise UnsupportedError(
                    f"{type(self).__name__}: module {i} has no in_keys and out_keys.",
                    got=type(part).__name__,
                    hint="TensorDictModule(function, in_keys, out_keys) gives it keys.",
                )
        self.partial_tolerant = partial_tolerant
        # The keys of the tree decide which modules run.
        self._is_traceable = not partial_tolerant
        read = dict[NestedKey, None]()
        written = dict[NestedKey, None]()
        for part in parts:
            read.update((key, None) for key in as_keys(part.in_keys) if key not in written)
            for key in as_keys(part.out_keys):
                # A key is where it is written last.
                written.pop(key, None)
                written[key] = None
        self.in_keys: Sequence[NestedKey] = list(read)
        self.out_keys: Sequence[NestedKey] = list(written)
        self.module: nn.ModuleList | nn.ModuleDict = nn.ModuleList(parts) if named is None else nn.ModuleDict(named)
        if selected_out_keys is not None:
            self._select(as_keys(selected_out_keys))

    @dispatch
    def forward(self, tensordict: Any, *, interaction_type: InteractionType | str | None = None) -> Any:
        """Return the tree with the outputs of all modules.

        Args:
            tensordict: Any tree, or the values of the in keys.
            interaction_type: The way in which probabilistic modules choose a value, in place of their defaults.
        """
        return self._run(self._named(), tensordict, interaction_type)

    def select_subsequence(
        self, in_keys: Iterable[NestedKey] | None = None, out_keys: Iterable[NestedKey] | None = None
    ) -> Any:
        """Return a sequence of the modules that can run on some keys, and that contribute to others.

        Args:
            in_keys: The keys of the input. Modules that read other keys, which no kept module writes, are left out.
            out_keys: The keys to compute. Modules that contribute to none of them are left out.

        Returns:
            A sequence over the same submodules; names stay, and numbers are new.

        Raises:
            TreeStructureError: No module is left.

        Examples:
            >>> from tdfunc.nn import TensorDictModule
            >>> identity = lambda x: x
            >>> seq = TensorDictSequential(*[TensorDictModule(identity, [a], [b]) for a, b in ("ab", "bc", "cd", "ae")])
            >>> [seq.select_subsequence(out_keys=[key]).out_keys for key in "ce"], len(seq.select_subsequence(["c"]))
            ([['b', 'c'], ['e']], 1)
        """
        known = set(self.in_keys if in_keys is None else as_keys(in_keys))
        wanted = set(self.out_keys if out_keys is None else as_keys(out_keys))
        forward: list[tuple[str, Any]] = []
        for name, module in self._named():
            part = _inner(module, in_keys=known)
            if part is not None and known.issuperset(as_keys(part.in_keys)):
                known.update(as_keys(part.out_keys))
                forward.append((name, part))
        kept: list[tuple[str, Any]] = []
        for name, module in reversed(forward):
            part = _inner(module, out_keys=wanted)
            if part is not None and not wanted.isdisjoint(as_keys(part.out_keys)):
                wanted.update(as_keys(part.in_keys))
                kept.append((name, part))
        if not kept:
            raise TreeStructureError(
                "select_subsequence: these keys leave no module.",
                expected=f"in_keys among {brief(list(self.in_keys))}, out_keys among {brief(list(self.out_keys))}",
                got=f"in_keys={brief(in_keys)}, out_keys={brief(out_keys)}",
            )
        return self._of(kept[::-1])

    def __len__(self) -> int:
        return len(self.module)

    def __getitem__(self, index: int | str | slice) -> Any:
        """Return a module, by number or name, or a sequence of some."""
        named = list(self._named())
        if isinstance(index, slice):
            return self._of(named[index])
        if isinstance(index, str):
            return dict(named)[index]
        return named[index][1]

    def _named(self) -> Iterable[tuple[str, Any]]:
        return self.module._modules.items()

    def _of(self, named: list[tuple[str, Any]], cls: Any = None) -> Any:
        """Return a sequence with some of the modules."""
        if isinstance(self.module, nn.ModuleDict):
            parts = dict(named)
        else:
            parts = [module for _, module in named]
        return (cls or TensorDictSequential)(parts, partial_tolerant=self.partial_tolerant)

    def _run(
        self, named: Iterable[tuple[str, Any]], tensordict: Any, interaction_type: InteractionType | str | None
    ) -> Any:
        """Run some of the modules."""
        for _, module in named:
            tensordict = self._run_one(module, tensordict, interaction_type)
        return tensordict

    def _run_one(self, module: Any, tensordict: Any, interaction_type: InteractionType | str | None) -> Any:
        options = {}
        if getattr(module, "_interacts", False):
            options = {"interaction_type": interaction_type}
        if not self.partial_tolerant or all([key in tensordict for key in module.in_keys]):
            return module(tensordict, **options)
        if tensordict._is_lazy:
            return tensordict._each(lambda tree: self._run_one(module, tree, interaction_type))
        return tensordict


def _inner(module: Any, **keys: Any) -> Any:
    """Return the part of a module that is a sequence itself, None where nothing of it is left."""
    # One with selected outputs hides what its modules write.
    if type(module) is not TensorDictSequential or module._source is not None:
        return module
    try:
        return module.select_subsequence(**keys)
    except TreeStructureError:
        return None
