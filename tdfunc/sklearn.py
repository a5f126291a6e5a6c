"""Ensembles of neural networks as scikit-learn estimators: all members train in one vmapped, jitted run.

`import tdfunc` does not import this module, which needs scikit-learn. E is the number of members, N of examples, K of
targets.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tdfunc import optim, random, sweep
from tdfunc._jit import jit
from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import iter_leaves
from tdfunc.core.errors import LeafMismatchError, as_count, brief, check_choice, error, needs
from tdfunc.core.keys import Filter
from tdfunc.ensemble.ensemble import Ensemble
from tdfunc.ensemble.stack import init_ensemble
from tdfunc.metrics import uncertainty
from tdfunc.modules.extract import split
from tdfunc.modules.functional import Apply, functional
from tdfunc.modules.random import seeded
from tdfunc.storage.progress import progress_bar

with needs("tdfunc.sklearn", "scikit-learn", "tdfunc[demo]"):
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

if TYPE_CHECKING:
    from typing_extensions import Self

    # scikit-learn has no types: for a type checker its classes have every attribute.
    class BaseEstimator:
        """The base of estimators."""

        def __getattr__(self, name: str) -> Any: ...
        def __sklearn_tags__(self) -> Any: ...

    class ClassifierMixin:
        """The score of classifiers."""

    class RegressorMixin:
        """The score of regressors."""

else:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

__all__ = [
    "EnsembleClassifier",
    "EnsembleRegressor",
]

# Any: whatever scikit-learn takes as an array, and numbers of any dtype.
Array: TypeAlias = NDArray[Any]
Make: TypeAlias = Callable[[int, int], nn.Module]
Losses: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_FLOATS = [np.float64, np.float32]
# Examples that are predicted at once.
_CHUNK = 4096


class _Rows(NamedTuple):
    """Examples: inputs (N, F), targets (N) or (N, K), and weights (N)."""

    x: Tensor
    t: Tensor
    w: Tensor

    def take(self, index: Tensor) -> "_Rows":
        return _Rows(self.x[index], self.t[index], self.w[index])


def _keep_options(estimator: Any, arguments: dict[str, Any]) -> None:
    """Keep the arguments of a constructor as attributes of their names, where scikit-learn reads and sets them."""
    vars(estimator).update({name: value for name, value in arguments.items() if name != "self"})


class _Ensemble(BaseEstimator):
    """The options of the two estimators, and their training."""

    center_: Tensor
    scale_: Tensor
    params_: TensorDict
    buffers_: TensorDict

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (64,),
        *,
        make: Make | None = None,
        n_estimators: int = 8,
        learning_rate: float | Sequence[float] = 0.01,
        weight_decay: float | Sequence[float] = 0.0,
        max_iter: int = 100,
        batch_size: int = 256,
        bootstrap: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        device: str = "cpu",
        progress: bool = False,
        random_state: Any = None,
    ) -> None:
        _keep_options(self, locals())

    def _outputs(self, X: Any) -> Tensor:
        """Return the members' raw outputs, (E, N, outputs)."""
        check_is_fitted(self)
        checked = validate_data(self, X, reset=False, dtype=_FLOATS)
        x = torch.tensor(checked, dtype=torch.float64, device=self.center_.device)
        with torch.no_grad():
            standardised = ((x - self.center_) / self.scale_).to(self._dtype)
            outputs: list[Tensor] = []
            for chunk in standardised.split(_CHUNK):
                outputs.append(self.ensemble_(self.params_, chunk, buffers=self.buffers_))
            return torch.cat(outputs, 1)

    def _train(self, data: Array, t: Tensor, weights: Array, outputs: int, losses: Losses) -> None:
        """Train all members on checked data, and keep them."""
        for name in ("n_estimators", "max_iter", "batch_size", "n_iter_no_change"):
            as_count(name, getattr(self, name))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        key = random.key(seed, device=self.device)
        x = torch.tensor(data, device=self.device)
        w = torch.tensor(weights, device=self.device)
        self._dtype = x.dtype
        self.center_, self.scale_ = _moments(x, w)
        rows = _Rows(((x - self.center_) / self.scale_).to(x.dtype), t, w)

        def make() -> nn.Module:
            if self.make is None:
                model = _perceptron(data.shape[1], self.hidden_layer_sizes, outputs)
            else:
                model = self.make(data.shape[1], outputs)
            return model.to(device=self.device, dtype=rows.x.dtype)

        # A template of the structure, whose numbers are not used: torch's default generator stays as it is.
        with seeded(random.key(seed)):
            apply, _, _ = functional(make())
        self.params_, self.buffers_ = split(init_ensemble(make, self.n_estimators, key=seed))
        self.ensemble_: Ensemble = Ensemble(apply.eval())
        found = self.ensemble_(self.params_, rows.x[:1], buffers=self.buffers_).shape
        if found != (self.n_estimators, 1, outputs):
            raise LeafMismatchError(
                "make: the network does not have the outputs that it is made for.",
                expected=f"[N, {outputs}]",
                got=f"{list(found[1:])} for one example",
            )
        held = None
        if self.early_stopping:
            rows, held = self._hold_out(rows, random.fold_in(key, 0))
        self._run(apply, rows, held, losses, random.fold_in(key, 1))

    def _hold_out(self, rows: _Rows, key: Tensor) -> tuple[_Rows, _Rows]:
        """Return the examples to train on, and those that tell when to stop."""
        count = len(rows.x)
        held = max(round(self.validation_fraction * count), 1)
        if self.validation_fraction <= 0 or held >= count:
            raise error(
                ValueError,
                "early_stopping: one of the two parts has no example; set validation_fraction, or leave it out.",
                got=f"n_samples = {count}, validation_fraction = {self.validation_fraction}",
            )
        order = random.permutation(key, count)
        train = rows.take(order[held:])
        test = rows.take(order[:held])
        if not (train.w.any() and test.w.any()):
            raise error(ValueError, "early_stopping: one of the two parts has no weight above 0.")
        return train, test

    def _run(self, apply: Apply, rows: _Rows, held: _Rows | None, losses: Losses, key: Tensor) -> None:
        """Train until the last epoch, or until no member improves."""
        # A whole number may be a float.
        members = int(self.n_estimators)
        count = len(rows.x)
        device = rows.x.device
        rate = self._rate("learning_rate")
        decay = self._rate("weight_decay")
        optimizer = _optimizer(apply, rate, decay)
        step = _step(apply.train(), optimizer, losses)
        measure = None
        if held is not None:
            measure = partial(jit(_measure(apply.eval(), losses)), rows=tuple(held))
        own = torch.arange(count, device=device).expand(members, count)
        if self.bootstrap:
            own = sweep.bootstrap(random.fold_in(key, 0), count, members)
        batches = math.ceil(count / self.batch_size)
        size = math.ceil(count / batches)
        # The last batch is filled up with examples that count nothing.
        counts = (torch.arange(batches * size, device=device) < count).to(rows.w.dtype).reshape(batches, size)
        params = self.params_
        buffers = self.buffers_
        state = optimizer.init(self.params_)
        patience = sweep.EarlyStopping(self.n_iter_no_change, min_delta=self.tol)
        stopping = patience.init(members, device=device)
        active = None

        def keys_of(key: Tensor, i: int) -> Tensor:
            return random.fold_in(random.fold_in(key, i), torch.arange(members, device=device))

        bar = progress_bar("progress=True", show=self.progress, unit="epoch", total=int(self.max_iter))
        with bar as report:
            for epoch in range(1, int(self.max_iter) + 1):
                epoch_key = random.fold_in(key, epoch)
                index = own
                if batches > 1:
                    index = _shuffled(own, keys_of(epoch_key, 0), batches * size)
                for i, part in enumerate(index.reshape(members, batches, size).unbind(1)):
                    batch = rows.take(part)
                    batch = batch._replace(w=batch.w * counts[i])
                    params, buffers, state = step(
                        params, buffers, state, tuple(batch), keys_of(epoch_key, i + 1), active
                    )
                self.n_iter_ = epoch
                report(1)
                if measure is None:
                    continue
                stopping = patience.update(measure(params, buffers), stopping)
                active = stopping["active"]
                self.params_ = sweep.keep_best(self.params_, params, stopping["improved"])
                self.buffers_ = sweep.keep_best(self.buffers_, buffers, stopping["improved"])
                if not bool(active.any()):
                    break
        self.validation_loss_: Array | None = None
        if held is None:
            self.params_ = params
            self.buffers_ = buffers
        else:
            self.validation_loss_ = stopping["best"].numpy(force=True)
        self._check_trained(stopping["best"] if held is not None else None)

    def _check_trained(self, validation_loss: Tensor | None) -> None:
        """Raise if members have diverged: one of them makes every prediction of the ensemble NaN."""
        members = int(self.n_estimators)
        has_diverged = torch.zeros(members, dtype=torch.bool, device=self.device)
        # A member whose loss was never a number has its initial parameters.
        if validation_loss is not None:
            has_diverged |= ~validation_loss.isfinite()
        for _, leaf in iter_leaves(self.params_):
            has_diverged |= _any_of_member(~leaf.isfinite())
        # Buffers may hold infinities, such as the mask of an attention.
        for _, leaf in iter_leaves(self.buffers_):
            has_diverged |= _any_of_member(leaf.isnan())
        if not has_diverged.any():
            return
        raise error(
            ValueError,
            f"fit: members have diverged: {brief(has_diverged.nonzero().flatten().tolist())} of {members}.",
            expected="finite parameters after training, and with early_stopping a finite loss of held-out examples",
            got=f"learning_rate={brief(self.learning_rate)}",
            hint="a smaller learning_rate, or weights and values of y that are not as large.",
        )

    def _rate(self, name: str) -> float | Tensor:
        """Return an option that may have a value for each member."""
        value = getattr(self, name)
        if np.ndim(value) == 0:
            return float(value)
        return torch.as_tensor(value, dtype=torch.float64, device=self.device)


class EnsembleClassifier(ClassifierMixin, _Ensemble):
    """An ensemble of networks that predicts the mean of its members' probabilities.

    The members train at once, each with its own AdamW. Inputs are standardised.

    Args:
        hidden_layer_sizes: The sizes of the hidden layers of a perceptron with ReLU.
        make: A function of the numbers of features and of outputs that returns another network, which may have dropout
            and BatchNorm. Parameters that do not require grad are not trained.
        n_estimators: E.
        learning_rate: The learning rate of all members, or a list with one for each.
        weight_decay: The weight decay of all members, or a list with one for each.
        max_iter: The largest number of epochs.
        batch_size: The largest number of examples in a step; each member shuffles by itself.
        bootstrap: Train each member on a sample with replacement.
        early_stopping: Stop a member when its loss on held-out examples no longer improves, and keep its best state.
        validation_fraction: The share of held-out examples.
        n_iter_no_change: The number of epochs without an improvement that stops a member.
        tol: The smallest change of the loss that is an improvement.
        device: The device on which to train and predict.
        progress: Show a progress bar of the epochs. Requires tqdm.
        random_state: A seed or generator, as in scikit-learn; with an int, fits repeat.

    Attributes:
        classes_: The labels, sorted.
        n_features_in_: The number of features; `feature_names_in_` are their names, if they were strings.
        n_iter_: The number of epochs that were run.
        validation_loss_: Each member's best loss on the held-out examples; None without `early_stopping`.
        params_: The members' parameters, a stacked tree, and `buffers_` their buffers.
        ensemble_: The `Ensemble` that runs them.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = EnsembleClassifier(learning_rate=[0.003, 0.01, 0.03, 0.1], n_estimators=4, random_state=0)
        >>> model.fit(X, y).score(X, y) > 0.9
        True
        >>> model.predict_uncertainty(X[:3])["mutual_information"].shape
        (3,)
    """

    if TYPE_CHECKING:
        classes_: Array

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "Self":
        """Train the members, from new ones each time.

        Args:
            X: Features of shape (N, F).
            y: Labels of shape (N).
            sample_weight: The weight of each example's loss.

        Raises:
            ValueError: A member has diverged, or an argument is out of range.
        """
        # Any: scikit-learn's types allow for no check at all.
        checked: Any = validate_data(self, X, y, dtype=_FLOATS)
        data, labels = checked
        check_classification_targets(labels)
        weights = _check_sample_weight(sample_weight, data, dtype=data.dtype, ensure_non_negative=True)
        self.classes_, t = np.unique(labels, return_inverse=True)
        losses = partial(F.cross_entropy, reduction="none")
        self._train(data, torch.tensor(t, device=self.device), weights, len(self.classes_), losses)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, (N, classes)."""
        return uncertainty(self._outputs(X), "classification")["mean"].numpy(force=True)

    def predict(self, X: Any) -> Array:
        """Return the most probable labels, (N)."""
        # Outside of the index, since `classes_` is missing before `fit`.
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_uncertainty(self, X: Any) -> dict[str, Array]:
        """Return the measures of `tdf.metrics.uncertainty` by name, `mean` (the probabilities) among them."""
        return _arrays(uncertainty(self._outputs(X), "classification"))


class EnsembleRegressor(RegressorMixin, _Ensemble):
    """An ensemble of networks that predicts the mean of its members.

    The members train at once, each with its own AdamW. Inputs and targets are standardised.

    Args:
        hidden_layer_sizes: The sizes of the hidden layers. This and the arguments that are not listed here are as in
            `EnsembleClassifier`.
        loss: The loss: `squared_error`; or `gaussian`, for which members also predict the variance of the noise.
        make: A function of the numbers of features and of outputs that returns another network. It has K outputs, or
            2 K for `gaussian`: a mean and a log-variance for each target.

    Attributes:
        n_features_in_: The number of features, and so on, as in `EnsembleClassifier`.

    Source:
        Lakshminarayanan et al., "Simple and scalable predictive uncertainty estimation using deep ensembles" (2017).

    Examples:
        >>> X = np.linspace(-1, 1, 64)[:, None]
        >>> model = EnsembleRegressor(loss="gaussian", random_state=0).fit(X, np.sin(3 * X[:, 0]))
        >>> sorted(model.predict_uncertainty(X))
        ['aleatoric', 'epistemic', 'mean', 'variance']
    """

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (64,),
        *,
        loss: Literal["squared_error", "gaussian"] = "squared_error",
        make: Make | None = None,
        n_estimators: int = 8,
        learning_rate: float | Sequence[float] = 0.01,
        weight_decay: float | Sequence[float] = 0.0,
        max_iter: int = 100,
        batch_size: int = 256,
        bootstrap: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        device: str = "cpu",
        progress: bool = False,
        random_state: Any = None,
    ) -> None:
        _keep_options(self, locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "Self":
        """Train the members, from new ones each time.

        Args:
            X: Features of shape (N, F).
            y: Values of shape (N), or (N, K).
            sample_weight: The weight of each example's loss.

        Raises:
            ValueError: A member has diverged, or an argument is out of range.
        """
        check_choice("loss", self.loss, _LOSSES)
        checked: Any = validate_data(self, X, y, dtype=_FLOATS, multi_output=True, y_numeric=True)
        data, values = checked
        weights = _check_sample_weight(sample_weight, data, dtype=data.dtype, ensure_non_negative=True)
        # Far from 0 targets may differ in their last digits only, which float32 lacks.
        t = torch.tensor(values.astype(np.result_type(data, values)), device=self.device)
        self._is_flat = t.dim() == 1
        if self._is_flat:
            t = t.unsqueeze(1)
        self._target_dtype = t.dtype
        center, scale = _moments(t, torch.tensor(weights, device=self.device))
        self.target_center_: Tensor = center
        self.target_scale_: Tensor = scale
        dtype = torch.float32 if data.dtype == np.float32 else torch.float64
        t = ((t - self.target_center_) / self.target_scale_).to(dtype)
        outputs = t.shape[1]
        if self.loss == "gaussian":
            # A mean and a log-variance of each.
            outputs *= 2
        self._train(data, t, weights, outputs, _LOSSES[self.loss])
        return self

    @overload
    def predict(self, X: Any, return_std: Literal[False] = False) -> Array: ...
    @overload
    def predict(self, X: Any, return_std: Literal[True]) -> tuple[Array, Array]: ...
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean prediction of the members, (N) or (N, K) as in `fit`.

        Args:
            X: Features of shape (N, F).
            return_std: Return a pair: the mean, and the standard deviation of the members' mixture.
        """
        found = self.predict_uncertainty(X)
        if return_std:
            return (found["mean"], np.sqrt(found["variance"]))
        return found["mean"]

    def predict_uncertainty(self, X: Any) -> dict[str, Array]:
        """Return the `mean` and `variance` of the members' mixture, in the units of `y`.

        With `loss="gaussian"` the result also has the parts of the variance: `aleatoric`, the noise, and `epistemic`,
        the disagreement.
        """
        out = self._outputs(X)
        if self.loss == "gaussian":
            found = uncertainty(out.unflatten(-1, (-1, 2)), "gaussian")
        else:
            found = uncertainty(out, "regression")
        parts: dict[str, Tensor] = {}
        for name, x in found.items():
            if name == "mean":
                part = self.target_center_ + self.target_scale_ * x
            else:
                part = self.target_scale_**2 * x
            if self._is_flat:
                part = part.squeeze(1)
            parts[name] = part.to(self._target_dtype)
        return _arrays(parts)


# -- training -----------------------------------------------------------------------------------------------------

# Any: trees, which jit and vmap pass through, and the optimizer's state.
Step: TypeAlias = Callable[..., tuple[Any, Any, Any]]


def _shuffled(rows: Tensor, keys: Tensor, size: int) -> Tensor:
    """Return each member's rows in its own order, filled up to a size with the first ones."""
    count = rows.shape[1]
    order = torch.vmap(lambda key: random.permutation(key, count))(keys)
    index = rows.gather(1, order)
    return torch.cat([index, index[:, : size - count]], 1)


def _optimizer(apply: Apply, rate: float | Tensor, decay: float | Tensor) -> optim.AbstractOptimizer:
    """Return AdamW, for the parameters that are not frozen in the network."""
    optimizer = optim.adamw(lr=rate, weight_decay=decay)
    frozen = apply.frozen
    if not frozen:
        return optimizer
    return optim.masked(optimizer, Filter(lambda path, leaf: path not in frozen))


def _step(apply: Apply, optimizer: Any, losses: Losses) -> Step:
    """Return one jitted step of all members, each on its own batch and with its own key."""

    def member(params: Any, buffers: Any, batch: tuple[Tensor, Tensor, Tensor], key: Tensor) -> tuple[Tensor, Any]:
        x, t, w = batch
        out, buffers = apply.with_buffers(params, buffers, x, rng=key)
        return (losses(out, t) * w).sum() / w.sum().clamp(min=torch.finfo(w.dtype).tiny), buffers

    def step(
        params: Any, buffers: Any, state: Any, batch: Any, keys: Tensor, active: Tensor | None
    ) -> tuple[Any, Any, Any]:
        grads, new = torch.vmap(torch.func.grad(member, has_aux=True))(params, buffers, batch, keys)
        params, state = optimizer.update(params, grads, state, active=active)
        if active is not None:
            new = torch.where(active, new, buffers)
        return params, new, state

    return jit(step)


def _measure(apply: Apply, losses: Losses) -> Callable[..., Tensor]:
    """Return a function for each member's mean loss on examples that all share."""

    def measure(params: Any, buffers: Any, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, t, w = rows

        def member(params: Any, buffers: Any) -> Tensor:
            return (losses(apply(params, x, buffers=buffers), t) * w).sum() / w.sum()

        return torch.vmap(member)(params, buffers)

    return measure


def _perceptron(features: int, hidden: Sequence[int], outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    width = features
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _moments(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and deviation of each column, in float64; 1 for the deviation of a constant."""
    # In float32 the squares of small numbers vanish, and a deviation is lost beside a large mean.
    x = x.double()
    w = w.double()
    share = (w / w.sum()).unsqueeze(1)
    center = (share * x).sum(0)
    scale = (share * (x - center).square()).sum(0).sqrt()
    # Rounding leaves a constant column a little deviation.
    constant = scale <= 10 * torch.finfo(x.dtype).eps * center.abs()
    return center, torch.where(constant, 1, scale)


def _any_of_member(found: Tensor) -> Tensor:
    """Return for each member whether any of its entries is True."""
    return found.reshape(len(found), found[0].numel()).any(1)


def _squared_losses(out: Tensor, t: Tensor) -> Tensor:
    return (out - t).square().mean(-1)


def _gaussian_losses(out: Tensor, t: Tensor) -> Tensor:
    mean, log_variance = out.unflatten(-1, (-1, 2)).unbind(-1)
    return 0.5 * (log_variance + (t - mean).square() * torch.exp(-log_variance)).mean(-1)


_LOSSES: dict[str, Losses] = {"squared_error": _squared_losses, "gaussian": _gaussian_losses}


def _arrays(found: Any) -> dict[str, Array]:
    return {name: x.numpy(force=True) for name, x in found.items()}


def __dir__() -> list[str]:
    return list(__all__)
