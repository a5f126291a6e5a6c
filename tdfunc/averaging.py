"""Models along one run: their averages (EMA, SWA), a Gaussian (SWAG), the last of them (snapshots), `update_bn`.

Each is a pair of pure functions over a state that is a tree: `init(params)` and `update(params, state)`. They take one
model or a stacked tree, whose members are averaged each by itself, and work under `torch.vmap`, `tdfunc.jit` and
`torch.compile`. K is the number of models that are kept, E the number of members.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tdfunc import random
from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import has_values
from tdfunc.core.errors import (
    BatchSizeError,
    LeafMismatchError,
    TreeStructureError,
    as_count,
    brief,
    check_least,
    error,
)
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.core.walk import list_leaves, list_paths, rebuild, replace
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.modules.functional import Apply
from tdfunc.ops.base import cast
from tdfunc.ops.base.convert import join_nodes
from tdfunc.ops.base.foreach import leaves_like
from tdfunc.ops.base.reading import get, has
from tdfunc.ops.edits import maps
from tdfunc.optim.checks import check_dense, check_hyper, check_real, check_tree, list_trainable
from tdfunc.optim.optimizer import Hyper, Schedule, shown
from tdfunc.optim.rule import read_value
from tdfunc.random.draws import KeyLike, key_of

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

__all__ = [
    "EMA",
    "SWA",
    "SWAG",
    "Snapshots",
    "cosine_cycles",
    "update_bn",
]

T = TypeVar("T", bound=TensorCollection)
# The buffer of BatchNorm that counts the passes in its average.
_TRACKED = "num_batches_tracked"
# The buffers of BatchNorm before the first pass.
_FRESH = {"running_mean": 0, "running_var": 1, _TRACKED: 0}


class EMA:
    """An exponential moving average of any tree along a run: of parameters, of buffers, or of both.

    The state has `mean`, a tree like the one that is averaged, `weight`, the sum of the weights so far, and `count`.
    `state["mean"]` is the average. Numbers of 16 bits are averaged in float32; integers and bools, such as counters
    among buffers, come from the last update. `tdfunc.optim.ema` averages the parameters inside of an optimizer.

    Args:
        decay: The weight of the average so far: a number, a tensor with a value for each member of a stack, or a
            function of the number of updates so far, such as a schedule.
        debias: Begin with an empty average, and divide by the sum of the weights so far; otherwise begin with the tree
            that `init` receives.

    Raises:
        ValueError: `decay` is not in [0, 1).

    Source:
        `torch.optim.swa_utils.AveragedModel(use_buffers=True)`, whose first update is a copy: a decay of 0 at count 0;
        `timm.utils.ModelEmaV3`, which is `debias=False`.

    Examples:
        >>> ema = EMA(0.5)
        >>> state = ema.init(TensorDict({"running_mean": torch.zeros(1)}))
        >>> for value in (1.0, 4.0):
        ...     state = ema.update(TensorDict({"running_mean": torch.tensor([value])}), state)
        >>> state["mean", "running_mean"]  # (1 / 4 * 1 + 1 / 2 * 4) / (3 / 4)
        tensor([3.])
    """

    def __init__(self, decay: Hyper, *, debias: bool = True) -> None:
        # Any: a number, a tensor or a schedule.
        self.decay: Any = check_hyper("EMA", "decay", decay, 0.0, 1.0)
        self.debias = debias

    def __repr__(self) -> str:
        return f"EMA(decay={shown(self.decay)}, debias={self.debias})"

    def init(self, tree: TensorCollection) -> "TensorDict":
        """Return the state before the first update. With `debias` it reads only the shapes of the tree."""
        _check_params("EMA.init", tree)
        if self.debias:
            mean = maps.apply(tree, lambda x: torch.zeros_like(x, dtype=_wide(x)), ())
        else:
            mean = maps.apply(tree, lambda x: x.detach().to(_wide(x), copy=True), ())
        state = _state(tree, {"mean": mean})
        weight = torch.full_like(state["count"], 0.0 if self.debias else 1.0, dtype=torch.float64)
        return state._replace({**state._data, "weight": weight})

    def update(self, tree: TensorCollection, state: T, *, active: Tensor | bool = True) -> T:
        """Return the state with one more tree in the average; arguments and errors as in `SWA.update`."""
        old = _parts("EMA.update", state, {"mean", "weight"})
        count = _next_count("EMA.update", old, tree, old["mean"])
        decay = read_value("EMA", "decay", self.decay, old["count"])
        weight = old["weight"] * decay + (1 - decay)
        # While all weights are 0, the mean is the last tree.
        share = torch.where(weight > 0, (1 - decay) / torch.where(weight > 0, weight, 1.0), 1.0)

        def moved(mean: Tensor, x: Tensor) -> Tensor:
            if not (mean.is_floating_point() or mean.is_complex()):
                return x
            return torch.lerp(mean, x.detach().to(mean.dtype), _along(share, mean))

        mean = old["mean"].apply(moved, tree)
        return _advance("EMA.update", state, {"count": count, "mean": mean, "weight": weight}, active)


class SWA:
    """The running average of the parameters along a run.

    The state has `mean`, a tree like the parameters, and `count`. A member without an update has a count of 0, and
    zeros as its mean. Numbers of 16 bits are averaged in float32; integers and bools, such as counters among buffers,
    come from the last update.

    Source:
        Izmailov et al., "Averaging weights leads to wider optima and better generalization" (2018);
        `torch.optim.swa_utils.AveragedModel`.

    Examples:
        >>> swa = SWA()
        >>> state = swa.init(TensorDict({"w": torch.zeros(2)}))
        >>> for value in (1.0, 2.0, 6.0):
        ...     state = swa.update(TensorDict({"w": torch.full((2,), value)}), state)
        >>> state["mean", "w"]
        tensor([3., 3.])
    """

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first update, which reads only the shapes of `params`."""
        _check_params("SWA.init", params)
        return _state(params, {"mean": maps.apply(params, lambda x: torch.zeros_like(x, dtype=_wide(x)), ())})

    def update(self, params: TensorCollection, state: T, *, active: Tensor | bool = True) -> T:
        """Return the state with one more model in the average.

        Args:
            params: The model, or the stacked members.
            state: The result of `init`, or of the last `update`.
            active: True if the model counts, for all members or for each: `active=(step + 1) % 100 == 0`.

        Raises:
            TreeStructureError: The state is of another class, or `params` has other leaves than in `init`.
            TieError: `params` ties other paths than in `init`.
            LeafMismatchError: A leaf has another shape.
            BatchSizeError: `params` has another batch size, or `active` does not fit it.

        Shapes:
            `active` is (), or has the batch size of `params`.
        """
        old = _parts("SWA.update", state, {"mean"})
        count = _next_count("SWA.update", old, params, old["mean"])
        mean = old["mean"].apply(lambda mean, x: _moved(mean, x.detach(), count), params)
        return _advance("SWA.update", state, {"count": count, "mean": mean}, active)


class SWAG:
    """A Gaussian over the parameters: the average along a run, the variances, and the last K deviations.

    The state has `mean`, `variance` and `count`, and `deviations` of shape (K, *S) for a leaf of shape (*S), the
    oldest first.

    Args:
        rank: K, the number of deviations that give the covariance its part of low rank; 0 keeps only the variances.

    Raises:
        ValueError: `rank` is 1, which has no covariance, or negative.

    Source:
        Maddox et al., "A simple baseline for Bayesian uncertainty in deep learning" (2019), algorithm 1. The variance
        is updated by the difference of mean of squares and squared mean, without computing either (Welford, 1962).

    Examples:
        >>> swag = SWAG(rank=3)
        >>> state = swag.init(TensorDict({"w": torch.zeros(2)}))
        >>> for i in range(5):
        ...     state = swag.update(TensorDict({"w": tdf.random.normal(tdf.random.key(i), (2,))}), state)
        >>> swag.sample(state, 16, key=9)["w"].shape
        torch.Size([16, 2])
    """

    def __init__(self, rank: int = 20) -> None:
        self.rank: int = as_count("SWAG: rank", rank, 0)
        if self.rank == 1:
            raise error(ValueError, "SWAG: rank must be 0, or at least 2.", got=rank)

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first update, which reads only the shapes of `params`.

        Raises:
            LeafMismatchError: A leaf is not floating point.
        """
        _check_params("SWAG.init", params)
        list_trainable("SWAG.init", params)
        check_real("SWAG.init", params)
        zeros = maps.apply(params, lambda x: torch.zeros_like(x, dtype=_wide(x)), ())
        parts = {"mean": zeros, "variance": cast.clone(zeros, recurse=True)}
        if self.rank:
            parts["deviations"] = _rows(zeros, self.rank)
        return _state(params, parts)

    def update(self, params: TensorCollection, state: T, *, active: Tensor | bool = True) -> T:
        """Return the state with one more model, which replaces the oldest deviation; arguments as in `SWA.update`."""
        old = self._parts("SWAG.update", state)
        count = _next_count("SWAG.update", old, params, old["mean"])

        def moved_variance(variance: Tensor, before: Tensor, after: Tensor, x: Tensor) -> Tensor:
            return _moved(variance, (x.detach() - before) * (x.detach() - after), count)

        mean = old["mean"].apply(lambda mean, x: _moved(mean, x.detach(), count), params)
        variance = old["variance"].apply(moved_variance, old["mean"], mean, params)
        new: dict[str, Any] = {"count": count, "mean": mean, "variance": variance}
        if self.rank:
            deviation = mean.apply(lambda mean, x: x.detach() - mean, params)
            new["deviations"] = _pushed("SWAG.update", old["deviations"], deviation)
        return _advance("SWAG.update", state, new, active)

    def sample(self, state: TensorCollection, members: int, *, key: KeyLike, scale: float = 1.0) -> "TensorDict":
        """Return models sampled from the Gaussian, stacked; member i does not depend on their number.

        With deviations, half of the covariance comes from the variances and half from the deviations.

        Args:
            state: The state of this class, after at least two updates.
            members: The number of models.
            key: A random key, a seed or a generator.
            scale: A factor of the covariance.

        Returns:
            A tree like the parameters with the batch size (members, *batch): the members of an `Ensemble`.

        Shapes:
            A leaf of shape (*S) becomes (members, *S), in float32 at least. A stack of E gives (members, E, *S), which
            `flatten(0, 1)` makes one stack.

        Raises:
            ValueError: The state has fewer than two models.
            TreeStructureError: The state is of another class, or of another rank.
        """
        parts = self._parts("SWAG.sample", state)
        mean = parts["mean"]
        count = parts["count"]
        if has_values() and count.numel() and int(count.min()) < 2:
            raise error(
                ValueError,
                "SWAG.sample: the state has fewer than two models.",
                expected="count >= 2",
                got=brief(count.tolist()),
            )
        key = key_of(key)
        size = mean._batch_size
        means = list_leaves(mean)
        deviations = [variance.clamp(min=0).sqrt() for variance in list_leaves(parts["variance"])]
        columns: list[Tensor] = []
        # The share of each part in the standard deviation.
        share = 1.0
        if self.rank:
            columns = list_leaves(parts["deviations"])
            share = math.sqrt(0.5)
        # Deviations that are not there yet are zeros.
        kept = (count.clamp(max=self.rank) - 1).clamp(min=1)
        root = math.sqrt(scale)

        def draw(member: Tensor) -> Any:
            own = random.fold_in(key, member)
            z = random.normal(random.fold_in(own, 0), (*size, self.rank), dtype=torch.float64)
            z = z / kept.double().unsqueeze(-1).sqrt()
            leaves: list[Tensor] = []
            for place, (x, deviation) in enumerate(zip(means, deviations, strict=True)):
                noise = deviation * random.normal(random.fold_in(own, place + 1), tuple(x.shape), dtype=x.dtype)
                if self.rank:
                    ones = [1] * (x.dim() - len(size))
                    weights = z.reshape(*z.shape, *ones).to(x.dtype)
                    noise = noise + (weights * columns[place]).sum(len(size))
                leaves.append(x + root * share * noise)
            return rebuild(mean, leaves)

        return torch.vmap(draw)(torch.arange(members, device=key.device))

    def _parts(self, call: str, state: Any) -> dict[str, Any]:
        if not self.rank:
            return _parts(call, state, {"mean", "variance"})
        parts = _parts(call, state, {"mean", "variance", "deviations"})
        rank = parts["deviations"]._batch_size[-1]
        if rank != self.rank:
            raise TreeStructureError(f"{call}: the state is of another rank.", expected=self.rank, got=rank)
        return parts


class Snapshots:
    """The last K models of a run, as the members of an ensemble: one at the end of each cycle of the learning rate.

    The state has `members`, the oldest first, and `count`.

    Args:
        members: K.

    Raises:
        ValueError: `members` is below 1.

    Source:
        Huang et al., "Snapshot ensembles: train 1, get M for free" (2017).

    Examples:
        >>> snapshots, rate = Snapshots(2), cosine_cycles(0.1, 10)
        >>> state = snapshots.init(TensorDict({"w": torch.zeros(3)}))
        >>> for step in range(30):
        ...     params = TensorDict({"w": torch.full((3,), float(step))})
        ...     state = snapshots.update(params, state, active=(step + 1) % 10 == 0)
        >>> snapshots.stack(state)["w"][:, 0]
        tensor([19., 29.])
    """

    def __init__(self, members: int) -> None:
        self.members: int = as_count("Snapshots: members", members)

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first update, which reads only the shapes of `params`."""
        _check_params("Snapshots.init", params)
        return _state(params, {"members": _rows(params, self.members)})

    def update(self, params: TensorCollection, state: T, *, active: Tensor | bool = True) -> T:
        """Return the state with this model as the newest member; arguments as in `SWA.update`."""
        old = self._parts("Snapshots.update", state)
        count = _next_count("Snapshots.update", old, params, old["members"])
        members = _pushed("Snapshots.update", old["members"], maps.apply(params, lambda x: x.detach(), ()))
        return _advance("Snapshots.update", state, {"count": count, "members": members}, active)

    def stack(self, state: TensorCollection) -> "TensorDict":
        """Return the models collected so far as one stacked tree, the oldest first.

        Shapes:
            Leaves (*S) of one model give (K, *S); those (E, *S) of a stack (E * K, *S), the models of member 0 first.

        Raises:
            ValueError: No model was collected, or the members of a stack have collected different numbers of models.
        """
        parts = self._parts("Snapshots.stack", state)
        counts = parts["count"].clamp(max=self.members)
        kept = int(counts.min())
        if kept == 0 or kept != int(counts.max()):
            raise error(
                ValueError,
                "Snapshots.stack: the members have collected no models, or different numbers of them.",
                got=brief(counts.tolist()),
                hint="state[i] is the state of member i.",
            )
        dims = len(state._batch_size)
        newest = slice(self.members - kept, None)
        members = parts["members"][(slice(None),) * dims + (newest,)]
        if dims:
            return members.flatten(0, dims)
        return members

    def _parts(self, call: str, state: Any) -> dict[str, Any]:
        parts = _parts(call, state, {"members"})
        members = parts["members"]._batch_size[-1]
        if members != self.members:
            raise TreeStructureError(
                f"{call}: the state is of another number of members.", expected=self.members, got=members
            )
        return parts


def cosine_cycles(peak_value: float | Tensor, cycle_steps: int) -> Schedule:
    """Return the schedule that falls from a peak towards 0 along half a cosine, again and again.

    Args:
        peak_value: The value at the start of each cycle; a tensor of shape (E,) has one for each member.
        cycle_steps: The number of steps in a cycle.

    Raises:
        ValueError: `cycle_steps` is below 1.

    Source:
        Huang et al., "Snapshot ensembles" (2017), equation 2.

    Examples:
        >>> rate = cosine_cycles(0.1, 10)
        >>> [round(float(rate(torch.tensor(step))), 4) for step in (0, 5, 9, 10)]
        [0.1, 0.05, 0.0024, 0.1]
    """
    check_least("cosine_cycles: cycle_steps", cycle_steps)

    def value(step: Tensor) -> Tensor:
        share = (step % cycle_steps).to(torch.float64) / cycle_steps
        return peak_value * (1 + torch.cos(math.pi * share)) / 2

    return value


def update_bn(
    apply: Apply, params: TensorCollection, buffers: T, batches: Iterable[Any], *, rng: KeyLike | None = None
) -> T:
    """Return the buffers with the statistics that the BatchNorm layers have for these parameters.

    An average of models does not have the statistics of any of them. This function computes them anew, as the average
    over the batches, by forward passes in training mode. Statistics of 16 bits are averaged in float32.

    Args:
        apply: The pure function of the model, or of one member.
        params: The parameters of one model, or of a stack.
        buffers: Its buffers. Buffers of other layers are returned as the forward passes leave them.
        batches: Inputs; the first element of a tuple or list is the input.
        rng: A random key, a seed or a generator for dropout; batch i draws from `fold_in(key, i)`.

    Raises:
        ValueError: `batches` is empty.

    Source:
        `torch.optim.swa_utils.update_bn`.

    Examples:
        >>> apply, params, buffers = tdf.functional(nn.BatchNorm1d(1))
        >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])]
        >>> update_bn(apply, params, buffers, batches)["running_mean"]
        tensor([4.])
    """

    def cumulative(module: nn.Module) -> None:
        module.train()
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                part.momentum = None

    fresh = _fresh_statistics(apply.module, buffers)
    if not fresh:
        return buffers
    narrow = _narrow_norms(fresh)
    totals: dict[Path, Tensor] = {}
    run = apply._vary(cumulative)
    # The share of a batch is a Python number in torch's BatchNorm (2.13), which vmap cannot read.
    if params._batch_size:
        run = Ensemble(run, "loop")
    key = None
    if rng is not None:
        key = key_of(rng)
    buffers = replace(buffers, fresh)
    seen = 0
    with torch.no_grad():
        for batch in batches:
            x = batch[0] if isinstance(batch, (tuple, list)) else batch
            own = None
            if key is not None:
                own = random.fold_in(key, seen)
            _, buffers = run.with_buffers(params, buffers, x, rng=own)
            seen += 1
            if narrow:
                totals = _add_statistics(totals, buffers, narrow)
                # Each batch begins anew, so that its statistics are rounded once.
                buffers = replace(buffers, narrow)
    if not seen:
        raise error(ValueError, "update_bn: `batches` is empty.", got="no batches", hint="an iterator can be used up.")
    if narrow:
        return replace(buffers, _mean_statistics(totals, narrow))
    return buffers


def _fresh_statistics(module: nn.Module, buffers: TensorCollection) -> dict[Path, Tensor]:
    """Return the buffers of the BatchNorm layers as they are before the first pass."""
    fresh: dict[Path, Tensor] = {}
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        layer = tuple(name.split(".")) if name else ()
        for buffer, value in _FRESH.items():
            path = (*layer, buffer)
            if has(buffers, path):
                fresh[path] = torch.full_like(get(buffers, path), value)
    return fresh


def _narrow_norms(fresh: dict[Path, Tensor]) -> dict[Path, Tensor]:
    """Return the buffers of layers whose statistics have 16 bits, in which an average stops moving."""
    layers = {path[:-1] for path, leaf in fresh.items() if leaf.dtype != _wide(leaf)}
    return {path: leaf for path, leaf in fresh.items() if path[:-1] in layers}


def _add_statistics(
    totals: dict[Path, Tensor], buffers: TensorCollection, narrow: dict[Path, Tensor]
) -> dict[Path, Tensor]:
    """Return sums over all passes, given those before a batch and the averages over the passes of the batch."""
    new: dict[Path, Tensor] = {}
    for path in narrow:
        # A cast of all buffers makes a number of 16 bits of the count, which ends at 256.
        passes = get(buffers, (*path[:-1], _TRACKED)).long()
        leaf = get(buffers, path)
        if path[-1] == _TRACKED:
            own = passes
        else:
            own = leaf.to(_wide(leaf)) * passes.unsqueeze(-1)
        if path in totals:
            own = totals[path] + own
        new[path] = own
    return new


def _mean_statistics(totals: dict[Path, Tensor], narrow: dict[Path, Tensor]) -> dict[Path, Tensor]:
    """Return sums over all passes as averages, and the numbers of passes as they are."""
    means: dict[Path, Tensor] = {}
    for path, total in totals.items():
        if path[-1] != _TRACKED:
            # A layer that no pass reached keeps what it begins with.
            passes = totals[(*path[:-1], _TRACKED)].unsqueeze(-1)
            total = torch.where(passes > 0, total / passes.clamp(min=1), narrow[path])
        means[path] = total.to(narrow[path].dtype)
    return means


# -- states -----------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> torch.dtype:
    if x.is_floating_point():
        return torch.promote_types(x.dtype, torch.float32)
    return x.dtype


def _check_params(call: str, params: TensorCollection) -> None:
    check_tree(call, "params", params)
    check_dense(call, params)


# Any: the nodes are tensors and trees.
def _parts(call: str, state: Any, names: set[str]) -> dict[str, Any]:
    """Return the entries of a state, which must be a state of this class."""
    expected = {"count", *names}
    if isinstance(state, TensorCollection):
        if state._data.keys() == expected:
            return state._data
        got = str(sorted(state._data))
    else:
        got = type(state).__name__
    raise TreeStructureError(
        f"{call}: the state is not of this class.",
        expected=f"a tree with the entries {brief(sorted(expected))}",
        got=got,
        hint="state = init(params); the order is update(params, state).",
    )


def _state(params: TensorCollection, parts: dict[str, Any]) -> Any:
    size = params._batch_size
    device = next((x.device for x in list_leaves(params)), None)
    count = torch.zeros(size, dtype=torch.int64, device=device)
    return join_nodes({"count": count, **parts}, size, params._device, params._names)


def _rows(tree: T, n: int) -> T:
    """Return zeros for n models, along a new dimension after the members."""
    dims = len(tree._batch_size)
    size = [*tree._batch_size, n]
    return maps.apply(tree, lambda x: x.new_zeros((*x.shape[:dims], n, *x.shape[dims:])), (), batch_size=size)


def _pushed(call: str, rows: T, tree: TensorCollection) -> T:
    """Return the rows without the oldest one, and with a new one at the end."""
    dims = len(tree._batch_size)
    leaves: list[Tensor] = []
    for old, new in zip(list_leaves(rows), leaves_like(rows, tree, call), strict=True):
        kept = old.narrow(dims, 1, old.shape[dims] - 1)
        leaves.append(torch.cat([kept, new.to(old.dtype).unsqueeze(dims)], dims))
    return rebuild(rows, leaves)


def _moved(mean: Tensor, x: Tensor, count: Tensor) -> Tensor:
    """Return the average of `count` values, given the average of the others and the last value."""
    if not (mean.is_floating_point() or mean.is_complex()):
        return x
    return mean + (x.to(mean.dtype) - mean) / _along(count, mean)


def _along(value: Tensor, leaf: Tensor) -> Tensor:
    """Return a number for each member in the dtype of a leaf, as it is broadcast along its other dimensions."""
    ones = [1] * (leaf.dim() - value.dim())
    return value.reshape((*value.shape, *ones)).to(leaf.dtype)


def _next_count(call: str, state: dict[str, Any], params: TensorCollection, kept: TensorCollection) -> Tensor:
    """Return the number of models with this one, whose leaves must be like those that the state keeps."""
    check_tree(call, "params", params)
    count: Tensor = state["count"]
    if count.shape != params._batch_size:
        raise BatchSizeError(
            f"{call}: params and the state have different batch sizes.",
            expected=list(count.shape),
            got=list(params._batch_size),
        )
    leaves = leaves_like(kept, params, call)
    # The rows of `Snapshots` have a further dimension.
    dims = len(params._batch_size)
    extra = len(kept._batch_size) - dims
    for path, old, new in zip(list_paths(kept), list_leaves(kept), leaves, strict=True):
        expected = [*old.shape[:dims], *old.shape[dims + extra :]]
        if list(new.shape) != expected:
            raise LeafMismatchError(
                f"{call}: the leaf {dotted(path)!r} has another shape in the state.",
                expected=expected,
                got=list(new.shape),
            )
    return count + 1


def _advance(call: str, state: T, new: dict[str, Any], active: Tensor | bool) -> T:
    """Return the new state, or for members that are not active the old one."""
    changed = state._replace(new)
    if active is True:
        return changed
    size = state._batch_size
    chosen = torch.as_tensor(active, device=new["count"].device)
    if chosen.shape not in ((), size):
        raise BatchSizeError(
            f"{call}: active is not one bool, and does not have the batch size of params.",
            expected=f"shape [] or {list(size)}",
            got=f"shape {list(chosen.shape)}",
        )
    return torch.where(chosen.expand(size), changed, state)  # pyright: ignore[reportArgumentType, reportCallIssue]


def __dir__() -> list[str]:
    return list(__all__)
