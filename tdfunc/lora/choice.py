"""The fields of `Lora`, which everything below it reads: the weights with adapters, their ranks, scales and start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from tdfunc.core.context import is_known
from tdfunc.core.errors import as_flag, as_number, check_choice, error
from tdfunc.core.keys import FilterLike

# One number for all leaves, or one for each filter; the first that matches a leaf counts.
Ranks: TypeAlias = "int | dict[FilterLike, int]"
Alphas: TypeAlias = "float | dict[FilterLike, float] | None"


def _plain(what: str, number: float | Tensor) -> Any:
    """Return a number as one of Python, which a file can have; a tensor that is followed stays.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not finite.
    """
    if isinstance(number, Tensor) and (number.requires_grad or not is_known(number)):
        return number
    return as_number(what, number)


@dataclass(frozen=True)
class Choice:
    """The fields of a `Lora`, which documents them, without its methods."""

    where: "FilterLike"
    rank: Ranks
    alpha: Alphas = None
    rslora: bool = False
    dora: bool = False
    bias: bool = False
    dropout: float = 0.0
    start: Literal["kaiming", "pissa", "olora"] = "kaiming"
    whole: "FilterLike | None" = None
    trainable_token_indices: "dict[FilterLike, Sequence[int]] | None" = None

    def __post_init__(self) -> None:
        check_choice("Lora: start", self.start, ("kaiming", "pissa", "olora"))
        for name in ("rslora", "dora", "bias"):
            self._set(name, as_flag(f"Lora: {name}", getattr(self, name)))
        self._set("dropout", _plain("Lora: dropout", self.dropout))
        if not 0 <= self.dropout < 1:
            raise error(ValueError, "Lora: dropout must be a probability below 1.", got=self.dropout)
        if isinstance(self.alpha, dict):
            self._set("alpha", {key: _plain("Lora: alpha", one) for key, one in self.alpha.items()})
        elif self.alpha is not None:
            self._set("alpha", _plain("Lora: alpha", self.alpha))

    # Any: a field, which is frozen after this.
    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
