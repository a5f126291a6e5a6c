"""The members of a sweep: hyperparameters as a tree, and the examples of each member.

E is the number of members and N the number of examples.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import xxhash
from torch import Tensor

from tdfunc import random
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import as_count, brief, error
from tdfunc.random.draws import KeyLike, key_of
from tdfunc.sweep.members import tree_of_members

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

Values: TypeAlias = "Tensor | Sequence[float] | Sequence[int] | Sequence[bool]"
Space: TypeAlias = "Callable[[Tensor, int], Tensor] | Tensor | Sequence[Any]"


def grid(**axes: Values) -> "TensorDict":
    """Return every combination of values, one for each member; the last name varies fastest.

    Shapes:
        Axes of n, m, ... values give leaves (n * m * ...), the batch size of the tree.

    Raises:
        TypeError: The values of a name are not numbers.

    Examples:
        >>> hyper = grid(lr=[0.1, 0.01], weight_decay=[0.0, 1e-4, 1e-2])
        >>> hyper.batch_size, hyper["lr"].tolist()[:4]
        (torch.Size([6]), [0.10000000149011612, 0.10000000149011612, 0.10000000149011612, 0.009999999776482582])
    """
    if not axes:
        return tree_of_members({})
    columns = {name: torch.atleast_1d(_numbers("grid", name, values)) for name, values in axes.items()}
    # A mesh of indices, because torch refuses a mesh of unequal dtypes.
    rows = torch.meshgrid(*[torch.arange(len(column)) for column in columns.values()], indexing="ij")
    pairs = zip(columns.items(), rows, strict=True)
    return tree_of_members({name: column[row.flatten()] for (name, column), row in pairs})


def random_search(key: KeyLike, members: int, **spaces: Space) -> "TensorDict":
    """Return random hyperparameters; the values of a member do not depend on the number of members or on other names.

    Args:
        key: A random key, a seed or a generator.
        members: The number of members.
        **spaces: For each name the values to choose from, one number for all members, or a function of a key and a
            shape: `log_uniform(1e-4, 0.1)`, `uniform(0.0, 1.0)`, `tdf.random.normal`.

    Raises:
        TypeError: The values of a name are not numbers.
        BatchSizeError: A function does not return one value for each member.

    Examples:
        >>> hyper = random_search(0, 64, lr=log_uniform(1e-4, 1e-1), dropout=[0.0, 0.1, 0.5])
        >>> hyper.batch_size
        torch.Size([64])
    """
    members = as_count("random_search: members", members, 0)
    key = key_of(key)
    drawn = dict[str, Tensor]()
    for name, space in spaces.items():
        own = random.fold_in(key, xxhash.xxh64_intdigest(name.encode()))
        if callable(space):
            drawn[name] = space(own, members)
        else:
            # One number is one choice, as in `grid`: `choice` would draw from the numbers below it.
            choices = torch.atleast_1d(_numbers("random_search", name, space))
            drawn[name] = random.choice(own, choices, (members,))
    return TensorCollection._open(drawn, [members])


def uniform(low: float, high: float) -> Callable[[Tensor, int], Tensor]:
    """Return a space of uniform numbers in [low, high)."""
    if not low <= high:
        raise error(ValueError, "uniform: high is below low.", expected=f">= {low}", got=high)
    return lambda key, shape: random.uniform(key, shape, minval=low, maxval=high)


def log_uniform(low: float, high: float) -> Callable[[Tensor, int], Tensor]:
    """Return a space of positive numbers whose logarithm is uniform."""
    if not 0 < low <= high:
        raise error(ValueError, "log_uniform: low must be above 0, and high not below it.", got=(low, high))
    return lambda key, shape: random.uniform(key, shape, minval=math.log(low), maxval=math.log(high)).exp()


def kfold(examples: int, folds: int, *, key: KeyLike | None = None) -> Tensor:
    """Return the mask of training examples of each fold; the other examples validate it.

    Args:
        examples: The number of examples N.
        folds: The number of folds K. Each example validates exactly one fold, and their sizes differ by at most one.
        key: A random key, a seed or a generator that orders the examples. By default folds are consecutive examples.

    Shapes:
        (K, N), bool. `mask.nonzero()` returns indices. Under `torch.vmap`, use the mask as a weight of each loss.

    Raises:
        ValueError: There are fewer than two folds, or more folds than examples.

    Source:
        `sklearn.model_selection.KFold`.

    Examples:
        >>> kfold(4, 2).int()
        tensor([[0, 0, 1, 1],
                [1, 1, 0, 0]], dtype=torch.int32)
    """
    examples = as_count("kfold: examples", examples)
    folds = as_count("kfold: folds", folds)
    if not 2 <= folds <= examples:
        raise error(ValueError, "kfold: folds must be at least 2, and at most all examples.", got=(examples, folds))
    sizes = torch.tensor([examples // folds + (i < examples % folds) for i in range(folds)])
    fold_of = torch.arange(folds).repeat_interleave(sizes)
    if key is not None:
        key = key_of(key)
        fold_of = random.permutation(key, fold_of.to(key.device))
    return fold_of != torch.arange(folds, device=fold_of.device).unsqueeze(1)


def bootstrap(key: KeyLike, examples: int, members: int) -> Tensor:
    """Return the indices of a sample with replacement for each member; `weights_of` turns them into weights.

    The indices of a member do not depend on the number of members.

    Shapes:
        (E, N), int64.

    Examples:
        >>> bootstrap(0, 100, 16).shape
        torch.Size([16, 100])
    """
    examples = as_count("bootstrap: examples", examples)
    members = as_count("bootstrap: members", members, 0)
    key = key_of(key)
    keys = random.fold_in(key, torch.arange(members, device=key.device))
    return torch.vmap(lambda own: random.randint(own, (examples,), 0, examples))(keys)


def weights_of(indices: Tensor, examples: int) -> Tensor:
    """Return the count of each example in each member's indices.

    Shapes:
        Indices (E, M) become (E, N), float.
    """
    counts = torch.zeros(indices.shape[0], examples, device=indices.device)
    return counts.scatter_add(1, indices, torch.ones_like(indices, dtype=counts.dtype))


# Any: lists of anything.
def _numbers(call: str, name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as err:
        raise error(
            TypeError,
            f"{call}: the values of {name!r} are not numbers, and members are rows of tensors.",
            got=brief(values),
            hint="run one sweep for each of these values.",
        ) from err
