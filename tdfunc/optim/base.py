"""`AbstractOptimizer`: the interface of every optimizer, those made of others included."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from tdfunc.core.collection import TensorCollection

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class How:
    """The options of a step, as optimizers made of others pass them on."""

    active: Tensor | None
    donate: bool

    def step(
        self, optimizer: "AbstractOptimizer", params: T, grads: TensorCollection, state: "TensorDict"
    ) -> "tuple[T, TensorDict]":
        """Do a step of another optimizer with these options."""
        return optimizer.update(params, grads, state, active=self.active, donate=self.donate)


class AbstractOptimizer(ABC):
    """The interface of every optimizer: two pure functions, `init` and `update`."""

    @abstractmethod
    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step.

        It has the batch size of `params`: row i is the state of member i, and members' states stack.

        Raises:
            LeafMismatchError: A leaf is not floating point or complex, or a hyperparameter has more or fewer values
                than it has members; the message names it.
            BatchSizeError: A hyperparameter does not have the batch size of `params`.
            FilterError: A filter, or a leaf in `multi`, has no match.
            UnsupportedError: Members are rows of a lazy stack.
        """

    def update(
        self,
        params: T,
        grads: TensorCollection,
        state: "TensorDict",
        *,
        active: Tensor | None = None,
        donate: bool = False,
    ) -> "tuple[T, TensorDict]":
        """Return the parameters and the state after one step.

        It works under `torch.vmap`, `torch.func.grad`, `tdfunc.jit` and `torch.compile`. Outside of transforms a step
        is differentiated if a gradient or a hyperparameter in the state requires grad, or a parameter is the result of
        such a step. Otherwise a leaf that requires grad becomes one that does. Detach gradients of
        `create_graph=True` if their steps are not differentiated: the graph would grow with each step. A warning
        names a graph of 100 steps.

        Args:
            params: The tree to train.
            grads: A tree with the same leaves. If you pass it before `params`, it is trained silently, unless `params`
                holds Parameters, which gradients never are.
            state: The result of `init`, or of the last `update`.
            active: A bool for each member: where it is False, parameters and state stay as they are.
            donate: Overwrite the leaves of `params` and `state`, which saves copies. From then on use the returned
                trees only, and mind that other trees may share the leaves. All are copied if some share memory, with
                each other or with a gradient, are expanded, or are on a read-only array of numpy.

        Shapes:
            `active` has the batch size of `params`.

        Raises:
            TreeStructureError: The trees have different leaves, or the state is another optimizer's.
            LeafMismatchError: A leaf is not floating point or complex, a gradient or state differs from it in shape or
                dtype, or a hyperparameter does not fit it; the message names the leaf.
            BatchSizeError: `active`, the step count in the state, or the value of a schedule does not have the batch
                size of `params`.
            TypeError: `active` is not a tensor of bools.
            UnsupportedError: In a replay of `tdfunc.jit`, donated leaves share memory that did not in its trace, or are
                on a read-only array.
        """
        return self._step(params, grads, state, How(active, donate))

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters to evaluate and to keep: the trained ones, or the average that the rule makes."""
        return params

    @abstractmethod
    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        """Do the step of `update`."""
