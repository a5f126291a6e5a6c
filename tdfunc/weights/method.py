"""A merging method as a value: the function of one leaf, applied to trees, with its requirements and source."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast

import torch
import xxhash
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import has_values, is_known, require_values
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, UnsupportedError, brief, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.ops.base.foreach import leaves_like
from tdfunc.ops.base.reading import get
from tdfunc.random.draws import fold_in, key_of
from tdfunc.storage.scales import codes_in, refusal

P = ParamSpec("P")
T = TypeVar("T", bound=TensorCollection)
Weights = Tensor | Sequence[float]
Base = Literal["required", "optional", "unused"]
Sign = Literal["any", "not negative"]
# The annotation of an option that is one number for all models, or a number for each model.
PerModel = float | Sequence[float] | Tensor


class Method(Generic[P]):
    """A way to merge models. A call with trees returns a tree.

    A method is a function of one leaf, `(base, stacked, weights, **options)`, in operations that torch can
    differentiate and vmap. A keyword `key` makes it random. `method` is the decorator.

    Attributes:
        name: The name, which is also the name in configuration files of mergekit.
        leaf: The function of one leaf.
        formula: The definition, with x for a model, b for the base, d for x - b, and w for a weight.
        source: The paper.
        base: `"required"`, `"optional"` or `"unused"`.
        least: The smallest number of models, without the base.
        most: The largest number of models; None for any number.
        weight: The name of the weights in mergekit; None if they have no name.
        mean: True if the weights are divided by their sum; or the name of the option that decides it.
        sign: The weights that have a meaning: `"any"`, or `"not negative"`.
        options: The keywords with their defaults, except `key`.
        per_model: The names of options that can have a number for each model, annotated as `PerModel`.
        is_random: True if it takes a `key`.
    """

    def __init__(
        self,
        leaf: Callable[Concatenate[Any, Tensor, Tensor, P], Tensor],
        *,
        formula: str,
        source: str,
        base: Base,
        least: int,
        most: int | None,
        weight: str | None,
        mean: bool | str = False,
        sign: Sign = "any",
    ) -> None:
        functools.update_wrapper(self, leaf)
        self.name: str = leaf.__name__
        self.leaf = leaf
        self.formula = formula
        self.source = source
        self.base = base
        self.least = least
        self.most = most
        self.weight = weight
        self.mean = mean
        self.sign = sign
        parameters = list(inspect.signature(leaf).parameters.values())
        keywords = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
        # Any: the defaults of the options.
        self.options: dict[str, Any] = {one.name: one.default for one in keywords}
        self.per_model: frozenset[str] = frozenset([one.name for one in parameters if one.annotation == PerModel])
        self.is_random: bool = self.options.pop("key", None) is not None

    def __call__(self, base: T | None, stacked: T, weights: Weights, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the merged model, a tree like `base`; without a base, like one model of `stacked`.

        Each leaf is computed in float32 at least and returned in the dtype of the base. Leaves of integers and bools
        must be equal in all models. If a number is NaN in a model or in the base, it is NaN in the result. If the
        models are ensembles, each member is merged by itself, with its own random numbers.

        Args:
            base: The model that the others come from; None if the method does not require it.
            stacked: The models as one tree, the result of `torch.stack`.
            weights: A number for each model.
            args: Not used; all options are keywords.
            kwargs: The options of the method. A random method takes a key, a seed or a generator as `key=`.

        Raises:
            ValueError: The method requires a base or another number of models; a weight or an option is not finite; or
                the sum of the weights is 0 and the method divides by it.
            TreeStructureError: The trees have different paths.
            TieError: The trees tie different paths.
            LeafMismatchError: A leaf has another shape than in the base, or integers differ.
            UnsupportedError: Codes or scales of quantized weights differ between the models.
            BatchSizeError: `stacked` has no batch dimension, or `weights` has another length.

        Shapes:
            Leaves (*S) of the base, (K, *S) of the models; weights are (K,).
        """
        if not stacked._batch_size:
            hint = "torch.stack([a, b]) makes one tree of two models."
            raise BatchSizeError(f"{self.name}: the models are not stacked.", got="batch size []", hint=hint)
        count = stacked._batch_size[0]
        self.check(base is not None, count)
        w = weights if isinstance(weights, Tensor) else torch.tensor(weights, dtype=torch.float64)
        if w.shape != (count,):
            what = f"{self.name}: the weights are not one for each model."
            raise BatchSizeError(what, expected=[count], got=list(w.shape))
        like = stacked._index(0) if base is None else base
        rows = leaves_like(like, stacked, self.name)
        # Any: the type of one keyword of a ParamSpec is not known.
        options = cast("dict[str, Any]", kwargs)
        key = None
        if "key" in options:
            key = key_of(options["key"])
        for dtype in {compute_dtype(x.dtype) for x in rows if _has_mean(x)}:
            self.check_numbers(w, dtype, options)
        codes = _refusals(self.name, like) | _refusals(self.name, stacked)
        merged: list[Tensor] = []
        for path, own, x in zip(list_paths(like), list_leaves(like), rows, strict=True):
            name = dotted(path)
            if x.shape != (count, *own.shape):
                what = f"{self.name}: the leaf {name!r} does not have the shape of the base in each model."
                raise LeafMismatchError(what, expected=[count, *own.shape], got=list(x.shape))
            if name in codes or not _has_mean(own):
                self._check_equal(name, own, x, codes.get(name))
                merged.append(own)
                continue
            if key is not None:
                options["key"] = leaf_key(key, name)
            dims = member_dims(like, path)
            wide = self.on_members(None if base is None else own, x, w, dims, *args, **kwargs)
            merged.append(wide.to(own.dtype))
        return rebuild(like, merged)

    def _check_equal(self, name: str, own: Tensor, x: Tensor, refusal_of_codes: UnsupportedError | None) -> None:
        """Raise if a leaf that cannot be merged, codes or integers, differs between the models."""
        if refusal_of_codes is not None:
            if not _has_equal_rows(x, own):
                raise refusal_of_codes
        elif has_values() and not bool((x == own).all()):
            raise LeafMismatchError(
                f"{self.name}: the leaf {name!r} ({own.dtype}) differs between the models.",
                hint="tdf.partition(tree, where) splits off the leaves to merge.",
            )

    def on_members(
        self, base: Tensor | None, stacked: Tensor, w: Tensor, dims: int, *args: P.args, **kwargs: P.kwargs
    ) -> Tensor:
        """Return one leaf of ensembles, each member merged by itself, in the dtype in which it is computed.

        Args:
            base: The leaf of the base.
            stacked: The leaf of all models.
            w: The weights.
            dims: The number of dimensions of members, which are the first of a model; 0 for single models.
            args: Not used.
            kwargs: The options.
        """
        if dims == 0 or not stacked.numel():
            return self.on_wide_leaf(base, stacked, w, *args, **kwargs)
        members = stacked.flatten(1, dims)
        bases = None if base is None else base.flatten(0, dims - 1)
        # Any: the type of one keyword of a ParamSpec is not known.
        options = cast("dict[str, Any]", kwargs)
        key = options.get("key")
        merged: list[Tensor] = []
        for member in range(members.shape[1]):
            if key is not None:
                options["key"] = fold_in(key, member)
            own = None if bases is None else bases[member]
            merged.append(self.on_wide_leaf(own, members[:, member], w, *args, **kwargs))
        return torch.stack(merged).reshape(stacked.shape[1:])

    def on_wide_leaf(
        self, base: Tensor | None, stacked: Tensor, w: Tensor, *args: P.args, **kwargs: P.kwargs
    ) -> Tensor:
        """Return one merged leaf in the dtype in which it is computed."""
        if not stacked.numel():
            if base is None:
                return stacked[0]
            return base
        dtype = compute_dtype(stacked.dtype)
        own = None
        if base is not None and self.base != "unused":
            # A base can be wider than the models, and the result has all digits of the base.
            dtype = torch.promote_types(dtype, compute_dtype(base.dtype))
            own = base.to(dtype)
        w = w.to(stacked.device, _real(dtype))
        return self.leaf(own, stacked.to(dtype), w, *args, **kwargs)

    # Any: the options of the method.
    def check_numbers(self, w: Tensor, dtype: torch.dtype, options: Mapping[str, Any], where: str = "") -> None:
        """Raise unless weights and options are finite, and the mean of such weights is defined.

        Args:
            w: The weights.
            dtype: The dtype in which they are used.
            options: The options that are given.
            where: The leaf that has these weights, for messages: `" of layer.weight"`.
        """
        own = w.to(_real(dtype))
        shown = None
        if is_known(w):
            shown = w.tolist()

        def refuse(expected: str) -> ValueError:
            what = f"{self.name}: these weights{where} do not define a merge in {dtype}."
            return error(ValueError, what, expected=expected, got=shown)

        require_values(own.isfinite(), lambda: refuse("finite numbers"))
        if self.sign == "not negative":
            require_values(own >= 0, lambda: refuse("no negative number"))
        if self.is_mean(options):
            is_defined = ~is_cancelled(own, own.sum())
            require_values(is_defined, lambda: refuse("a finite sum other than 0, also after rounding"))
        for name, value in options.items():
            if name != "key":
                self._check_option(name, value, where)

    # Any: the value of an option.
    def _check_option(self, name: str, value: Any, where: str) -> None:
        """Raise if a text takes the place of a flag, or a number is not finite."""
        if isinstance(value, str) and isinstance(self.options.get(name), bool):
            # Every text but the empty one would be True.
            raise error(TypeError, f"{self.name}: {name} must be True or False.", got=brief(value))
        if isinstance(value, bool | str | None):
            return
        numbers = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        what = f"{self.name}: {name}{where} must be finite."
        require_values(numbers.isfinite(), lambda: error(ValueError, what, got=brief(value)))

    # Any: the options of the method.
    def is_mean(self, options: Mapping[str, Any]) -> bool:
        """Return whether the method divides the weights by their sum."""
        if isinstance(self.mean, bool):
            return self.mean
        return bool(options.get(self.mean, self.options[self.mean]))

    def check(self, has_base: bool, count: int) -> None:
        """Raise unless the method can merge this number of models, with or without a base."""
        if self.base == "required" and not has_base:
            raise error(ValueError, f"{self.name}: the method requires a base.", expected="the base", got="None")
        is_too_many = self.most is not None and count > self.most
        if count < self.least or is_too_many:
            if self.most is None:
                expected = f"at least {self.least}"
            elif self.most == self.least:
                expected = str(self.least)
            else:
                expected = f"at most {self.most}"
            what = f"{self.name}: this number of models, without the base, cannot be merged."
            raise error(ValueError, what, expected=expected, got=count)

    def __repr__(self) -> str:
        return f"<merging method {self.name}>"


def _refusals(call: str, tree: TensorCollection) -> dict[str, UnsupportedError]:
    """Return the error for each leaf of codes in a tree, and for each leaf that belongs to codes."""
    found, specs = codes_in(tree)
    refusals: dict[str, UnsupportedError] = {}
    for scaled in found:
        for name in (scaled.name, *scaled.companions):
            refusals[name] = refusal(call, scaled, specs)
    return refusals


def _has_mean(x: Tensor) -> bool:
    """Return whether the numbers of a leaf can be merged: integers and bools cannot."""
    return x.is_floating_point() or x.is_complex()


def _has_equal_rows(x: Tensor, own: Tensor) -> bool:
    """Return whether all models have the leaf of the base, as far as values can be read."""
    wide = own.dtype if own.element_size() > 1 else torch.float32
    return has_values() and bool((x.to(wide) == own.to(wide)).all())


def method(
    formula: str,
    *,
    source: str,
    base: Base = "required",
    least: int = 1,
    most: int | None = None,
    weight: str | None = "weight",
    mean: bool | str = False,
    sign: Sign = "any",
) -> Callable[[Callable[Concatenate[Any, Tensor, Tensor, P], Tensor]], Method[P]]:
    """Make a `Method` from a function of one leaf; this is a decorator.

    Args:
        formula: The definition, with x for a model, b for the base, d for x - b, and w for a weight.
        source: The paper.
        base: `"required"`, `"optional"` or `"unused"`.
        least: The smallest number of models, without the base.
        most: The largest number of models; None for any number.
        weight: The name of the weights in mergekit; None if they have no name.
        mean: True if the weights are divided by their sum; or the name of the option that decides it.
        sign: The weights that have a meaning: `"any"`, or `"not negative"`.

    Examples:
        >>> @tdf.weights.method("b + max w d", source="none")
        ... def largest(base, stacked, weights):
        ...     '''Take the largest step.'''
        ...     steps = weights.reshape(-1, *[1] * base.dim()) * (stacked - base)
        ...     return base + steps.amax(0)
        >>> base = TensorDict({"w": torch.zeros(2)})
        >>> stacked = TensorDict({"w": torch.tensor([[1.0, 2.0], [3.0, 0.0]])}, [2])
        >>> largest(base, stacked, [1.0, 1.0])["w"]
        tensor([3., 2.])
    """

    def make_method(leaf: Callable[Concatenate[Any, Tensor, Tensor, P], Tensor]) -> Method[P]:
        return Method(
            leaf,
            formula=formula,
            source=source,
            base=base,
            least=least,
            most=most,
            weight=weight,
            mean=mean,
            sign=sign,
        )

    return make_method


def member_dims(tree: TensorCollection, path: Path) -> int:
    """Return the number of batch dimensions of the node of a leaf: in an ensemble they count its members."""
    node = get(tree, path[:-1]) if len(path) > 1 else tree
    return len(node._batch_size)


def leaf_key(key: Tensor, name: str) -> Tensor:
    """Return the key of a leaf by its dotted path, so that it does not depend on the rest of the tree."""
    return fold_in(key, xxhash.xxh3_64_intdigest(name.encode()))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which leaves of a dtype are merged: at least float32."""
    if dtype.itemsize == 1:
        return torch.float32
    return torch.promote_types(dtype, torch.float32)


def _real(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return dtype.to_real()
    return dtype


def is_cancelled(terms: Tensor, total: Tensor) -> Tensor:
    """Return where the sum of terms [K, ...] is 0 or lost in their rounding, or is not finite: no mean is defined."""
    size = terms.abs().sum(0)
    # NaN compares as False.
    return ~(total.abs() > len(terms) * torch.finfo(terms.dtype).eps * size)


def columns(w: Tensor, x: Tensor) -> Tensor:
    """Return numbers [K] in a shape that multiplies [K, *S]."""
    return w.reshape(-1, *[1] * (x.dim() - 1))


def shares(w: Tensor) -> Tensor:
    """Return weights divided by their sum."""
    return w / w.sum()
