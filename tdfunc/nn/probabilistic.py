"""Modules that choose a value from a distribution whose parameters are in the tree."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Independent

from tdfunc.core.errors import TreeStructureError, UnsupportedError, brief
from tdfunc.core.keys import unravel
from tdfunc.core.types import NestedKey
from tdfunc.nn.base import InKeys, Keys, TensorDictModuleBase, as_key, as_keys, dispatch, read_inputs, split_keys
from tdfunc.nn.interaction import GIVEN, InteractionType
from tdfunc.nn.sequential import TensorDictSequential


class ProbabilisticTensorDictModule(TensorDictModuleBase):
    """A distribution whose parameters are in the tree; calling it adds a value, and its log-probability if asked for.

    Args:
        in_keys: The keys of the parameters, the last part of each being the distribution's keyword, or a dict from
            keywords to keys.
        out_keys: The key of the value.
        distribution_class: A class of `torch.distributions`, or a function that returns a distribution.
        distribution_kwargs: Further arguments of the distribution.
        default_interaction_type: The way to choose the value. RANDOM samples with torch's default generator;
            `functional` makes the sample a function of `rng=`.
        return_log_prob: Add the log-probability of the value.
        log_prob_key: The key of the log-probability; by default the out key with `_log_prob` after it.

    Raises:
        MissingKeyError: In a call: a parameter is not in the tree.
        UnsupportedError: In a call: the distribution does not have this kind of value.

    Examples:
        >>> head = ProbabilisticTensorDictModule(
        ...     ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal, return_log_prob=True
        ... )
        >>> td = head(TensorDict({"loc": torch.zeros(3), "scale": torch.ones(3)}, [3]))
        >>> td["action"], td["action_log_prob"].shape, head.log_prob(td).shape
        (tensor([0., 0., 0.]), torch.Size([3]), torch.Size([3]))
    """

    _interacts: ClassVar[bool] = True
    _is_traceable = False

    def __init__(
        self,
        in_keys: InKeys,
        out_keys: Keys,
        *,
        distribution_class: Callable[..., Distribution],
        distribution_kwargs: Mapping[str, Any] | None = None,
        default_interaction_type: InteractionType | str = InteractionType.DETERMINISTIC,
        return_log_prob: bool = False,
        log_prob_key: "NestedKey | None" = None,
    ) -> None:
        super().__init__()
        keywords, keys = split_keys(in_keys)
        self.in_keys: Sequence[NestedKey] = keys
        self._keywords = keywords or [unravel(key)[-1] for key in keys]
        outputs = as_keys(out_keys)
        if len(outputs) != 1:
            raise TreeStructureError(
                f"{type(self).__name__}: there are {len(outputs)} out keys for one value.",
                expected="the key of the value",
                got=brief(outputs),
            )
        path = unravel(outputs[0])
        self.sample_key: NestedKey = outputs[0]
        self.log_prob_key: NestedKey = as_key(
            (*path[:-1], f"{path[-1]}_log_prob") if log_prob_key is None else log_prob_key
        )
        self.out_keys: Sequence[NestedKey] = [*outputs, self.log_prob_key] if return_log_prob else outputs
        self.return_log_prob = return_log_prob
        self.distribution_class = distribution_class
        # Any: options of the distribution.
        self.distribution_kwargs: dict[str, Any] = dict(distribution_kwargs or {})
        self.default_interaction_type: InteractionType = InteractionType(default_interaction_type)

    def get_dist(self, tensordict: Any) -> Distribution:
        """Return the distribution with the parameters that are in a tree.

        Raises:
            MissingKeyError: A parameter is not in the tree.
        """
        values = read_inputs(self, tensordict, self.in_keys)
        return self.distribution_class(**dict(zip(self._keywords, values, strict=True)), **self.distribution_kwargs)

    def log_prob(self, tensordict: Any, *, dist: Distribution | None = None) -> Tensor:
        """Return the log-probability, in nats, of the value that is in a tree.

        Args:
            tensordict: A tree with the value, and with the parameters unless `dist` is given.
            dist: A distribution to use in place of the one with the parameters.
        """
        (value,) = read_inputs(self, tensordict, [self.sample_key])
        return (self.get_dist(tensordict) if dist is None else dist).log_prob(value)

    @dispatch
    def forward(self, tensordict: Any, *, interaction_type: InteractionType | str | None = None) -> Any:
        """Return the tree with a value of the distribution.

        Args:
            tensordict: Any tree, or the parameters.
            interaction_type: The way to choose the value, in place of the default.
        """
        if tensordict._is_lazy:
            return tensordict._each(lambda tree: self.forward(tree, interaction_type=interaction_type))
        if interaction_type is GIVEN:
            if self.sample_key in tensordict:
                return tensordict
            interaction_type = None
        dist = self.get_dist(tensordict)
        value = choose(dist, InteractionType(interaction_type or self.default_interaction_type))
        out = tensordict.set(self.sample_key, value)
        if self.return_log_prob:
            return out.set(self.log_prob_key, dist.log_prob(value))
        return out

    def extra_repr(self) -> str:
        """Return the keys and the distribution."""
        name = getattr(self.distribution_class, "__name__", repr(self.distribution_class))
        return f"{super().extra_repr()}, distribution_class={name}, {self.default_interaction_type.value}"


def choose(dist: Distribution, kind: InteractionType) -> Tensor:
    """Return a value of a distribution.

    Raises:
        UnsupportedError: The distribution does not have it.
    """
    if kind is InteractionType.RANDOM:
        if dist.has_rsample:
            return dist.rsample()
        return dist.sample()
    if kind is InteractionType.DETERMINISTIC:
        return _choose_deterministic(dist)
    return _property(dist, kind.value, kind.value)


def _choose_deterministic(dist: Distribution) -> Tensor:
    """Return the distribution's own deterministic sample, its mode if its values can be counted, or its mean."""
    name = "deterministic_sample"
    if hasattr(dist, name):
        return _property(dist, name, name)
    base = dist
    while isinstance(base, Independent):
        base = base.base_dist
    if not base.has_enumerate_support:
        return _property(dist, "mean", name)
    mode = _property(dist, "mode", name)
    if isinstance(base, Bernoulli):
        # torch's mode is NaN where both values are equally likely; Categorical's is the first of them.
        return torch.where(dist.mean == 0.5, 0.0, mode)
    return mode


def _property(dist: Distribution, found: str, name: str) -> Tensor:
    """Return a property of a distribution; `name` is the property that its class may get instead."""
    try:
        return getattr(dist, found)
    except (AttributeError, NotImplementedError) as err:
        raise UnsupportedError(
            f"{type(dist).__name__} has no {found}.",
            hint=f"choose another InteractionType, or give its class a property {name!r}.",
        ) from err


class ProbabilisticTensorDictSequential(TensorDictSequential):
    """Modules that run one after another, the last of which chooses a value from a distribution.

    Args:
        *modules: The modules, as for `TensorDictSequential`; the last is a `ProbabilisticTensorDictModule`, or a
            sequence like this.
        partial_tolerant: Leave out modules whose in keys are missing, as for `TensorDictSequential`.
        selected_out_keys: The outputs to keep, as for `select_out_keys`.

    Raises:
        UnsupportedError: The last module is not probabilistic.

    Examples:
        >>> from tdfunc.nn import TensorDictModule
        >>> policy = ProbabilisticTensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
        ...     ProbabilisticTensorDictModule(
        ...         ["logits"], ["action"], distribution_class=torch.distributions.Categorical
        ...     ),
        ... )
        >>> td = TensorDict({"observation": torch.zeros(5, 3)}, [5])
        >>> policy(td, interaction_type="random")["action"].shape, policy.get_dist(td)
        (torch.Size([5]), Categorical(logits: torch.Size([5, 4])))
    """

    def __init__(
        self, *modules: Any, partial_tolerant: bool = False, selected_out_keys: Iterable[NestedKey] | None = None
    ) -> None:
        super().__init__(*modules, partial_tolerant=partial_tolerant, selected_out_keys=selected_out_keys)
        if not len(self) or not isinstance(self[-1], _PROBABILISTIC):
            raise UnsupportedError(
                f"{type(self).__name__}: the last module is not probabilistic.",
                expected="a ProbabilisticTensorDictModule or ProbabilisticTensorDictSequential",
                got=type(self[-1]).__name__ if len(self) else "no modules",
                hint="TensorDictSequential takes any modules.",
            )

    def get_dist(self, tensordict: Any, *, interaction_type: InteractionType | str | None = None) -> Distribution:
        """Return the distribution of the last module, after the others have run.

        Args:
            tensordict: Any tree with the in keys.
            interaction_type: The way in which probabilistic modules before the last choose their values.
        """
        *before, (_, last) = self._named()
        options = {}
        if isinstance(last, ProbabilisticTensorDictSequential):
            options = {"interaction_type": interaction_type}
        return last.get_dist(self._run(before, tensordict, interaction_type), **options)

    def log_prob(self, tensordict: Any, *, dist: Distribution | None = None) -> Tensor:
        """Return the log-probability, in nats, of the last module's value that is in a tree.

        Probabilistic modules before the last keep the values that the tree has for them.

        Args:
            tensordict: A tree with the value, and with the in keys unless `dist` is given.
            dist: The distribution, in place of the one that the other modules lead to.
        """
        if dist is None:
            dist = self.get_dist(tensordict, interaction_type=GIVEN)
        return self[-1].log_prob(tensordict, dist=dist)

    def _of(self, named: list[tuple[str, Any]], cls: Any = None) -> Any:
        if named and isinstance(named[-1][1], _PROBABILISTIC):
            return super()._of(named, ProbabilisticTensorDictSequential)
        return super()._of(named, TensorDictSequential)


_PROBABILISTIC = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
