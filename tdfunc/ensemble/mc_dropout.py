"""`MCDropout`: passes of one model with dropout switched on, as the members of an ensemble."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from tdfunc import random
from tdfunc.core.errors import UnsupportedError, as_count, brief
from tdfunc.modules.functional import Apply
from tdfunc.random.draws import KeyLike, key_of


class MCDropout:
    """Passes of one model in evaluation, except for dropout, as the members of an ensemble.

    The layers up to the first dropout run once for all passes.

    Args:
        apply: The pure function of the model, in any mode.
        members: The number of passes.
        layers: Further classes of layers to switch on, such as an attention or a stochastic depth that drops in its own
            forward. Layers inside of them stay in evaluation.
        chunk_size: The largest number of passes that run together. A smaller number needs less memory.

    Raises:
        UnsupportedError: The model has no dropout layer.
        ValueError: `members` is below 1.

    Shapes:
        A forward that gives (B, *F) gives (E, B, *F).

    Source:
        Gal and Ghahramani, "Dropout as a Bayesian approximation" (2016).

    Examples:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
        >>> apply, params, _ = tdf.functional(model)
        >>> logits = tdf.MCDropout(apply, 32)(params, torch.zeros(5, 3), rng=0)
        >>> tdf.metrics.uncertainty(logits, "classification")["mutual_information"].shape
        torch.Size([5])
    """

    def __init__(
        self,
        apply: Apply,
        members: int,
        *,
        layers: tuple[type[nn.Module], ...] = (),
        chunk_size: int | None = None,
    ) -> None:
        members = as_count("MCDropout: members", members)
        drops = (_DropoutNd, *layers)
        if not any(isinstance(part, drops) for part in apply.module.modules()):
            raise UnsupportedError(
                "MCDropout: the model has no dropout layer.",
                expected="nn.Dropout and its kin, or a class of layers=",
                got=brief(sorted({type(part).__name__ for part in apply.module.modules()})),
            )

        def switch(module: nn.Module) -> None:
            for part in module.modules():
                part.training = isinstance(part, drops)

        self.apply: Apply = apply._vary(switch)
        self.members = members
        self.chunk_size = chunk_size

    def __call__(self, params: Any, /, *args: Any, buffers: Any = None, rng: KeyLike, **kwargs: Any) -> Any:
        """Return the outputs of all passes, stacked along a new first dimension.

        Args:
            params: The tree of parameters, or of parameters and buffers.
            *args: Arguments of forward.
            buffers: The tree of buffers, unless `params` holds them.
            rng: A random key, a seed or a generator. Pass i draws from `fold_in(key, i)`, so it does not depend on the
                number of passes.
            **kwargs: Keyword arguments of forward.
        """
        key = key_of(rng)
        keys = random.fold_in(key, torch.arange(self.members, device=key.device))

        def one(key: Any) -> Any:
            return self.apply(params, *args, buffers=buffers, rng=key, **kwargs)

        return torch.vmap(one, chunk_size=self.chunk_size)(keys)
