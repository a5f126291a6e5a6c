"""What a forward writes and no call returns: it is lost with a warning that names it."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import tdfunc as tdf


class Writes(nn.Module):
    """A module that writes in forward; subclasses say what."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.steps = 0
        self.average: Tensor | None = None
        self.constant = torch.zeros(2)
        self.side: dict[str, list[Tensor]] = {"losses": []}
        self.scale = 0.5
        self.register_buffer("hidden", None)

    def write(self, x: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.norm(self.layer(x))


class Counts(Writes):
    def write(self, x: Tensor) -> None:
        self.steps += 1


class Averages(Writes):
    def write(self, x: Tensor) -> None:
        self.average = x.mean() if self.average is None else 0.9 * self.average + 0.1 * x.mean()


class WritesConstant(Writes):
    def write(self, x: Tensor) -> None:
        self.constant.add_(1)


class Collects(Writes):
    def write(self, x: Tensor) -> None:
        self.side["losses"].append(x.mean())


class FillsBuffer(Writes):
    def write(self, x: Tensor) -> None:
        self.hidden = x.mean() if self.hidden is None else self.hidden + x.mean()


class SetsMomentum(Writes):
    def write(self, x: Tensor) -> None:
        self.norm.momentum = 0.3


class AddsAttribute(Writes):
    def write(self, x: Tensor) -> None:
        self.last = x


class SetsEqualNumber(Writes):
    def write(self, x: Tensor) -> None:
        self.scale = float("0.5")


class KeepsState(Counts):
    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


LOST = [
    (Counts, "steps"), (Averages, "average"), (WritesConstant, "constant"), (Collects, "side"),
    (FillsBuffer, "hidden"), (SetsMomentum, "norm.momentum"), (AddsAttribute, "last"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name"), LOST)
def test_a_written_attribute_is_named(make: type[Writes], name: str) -> None:
    """A counter would stay at its first value in silence."""
    apply, params, buffers = tdf.functional(make())
    message = rf"forward of {make.__name__} writes the attributes \['{name}'\] of its module"
    with pytest.warns(UserWarning, match=message):
        apply.with_buffers(params, buffers, torch.randn(3, 2))


@pytest.mark.parametrize(("make", "name"), LOST)
def test_it_is_named_under_the_name_of_a_submodule(make: type[Writes], name: str) -> None:
    """The name alone does not say where to look."""
    apply, params, buffers = tdf.functional(nn.Sequential(nn.Linear(2, 2), make()))
    with pytest.warns(UserWarning, match=rf"\['1\.{name}'\]"):
        apply.with_buffers(params, buffers, torch.randn(3, 2))


@pytest.mark.parametrize("make", [SetsEqualNumber, KeepsState])
def test_nothing_is_lost_without_a_change_or_with_extra_state(make: type[Writes]) -> None:
    """A warning that is false would be switched off."""
    apply, params, buffers = tdf.functional(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply.with_buffers(params, buffers, torch.randn(3, 2))


def test_the_warning_comes_once() -> None:
    """A training loop would repeat it at each step."""
    apply, params, buffers = tdf.functional(Counts())
    x = torch.randn(3, 2)
    with pytest.warns(UserWarning, match="steps"):
        apply.with_buffers(params, buffers, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply.with_buffers(params, buffers, x)


@pytest.mark.parametrize("make", [Counts, Averages, SetsMomentum])
def test_it_is_named_while_a_trace_is_recorded(make: type[Writes]) -> None:
    """A replay runs no Python: the trace is the last chance."""
    apply, params, buffers = tdf.functional(make())
    with pytest.warns(UserWarning, match="writes the attributes"):
        tdf.jit(apply.with_buffers)(params, buffers, torch.randn(3, 2))


def scaled(params: tdf.TensorDict, limit: float) -> tdf.TensorDict:
    """The change of the tree that the warning proposes."""
    return params.at["weight"].apply(lambda w: w * (limit / (w.norm(dim=-1, keepdim=True) + 1e-7)).clamp(max=1))


EMBEDDINGS = [nn.Embedding, nn.EmbeddingBag]
ROWS = torch.tensor([[0, 1], [2, 3]])


@pytest.mark.parametrize("make", EMBEDDINGS)
def test_training_with_max_norm_warns(make: type[nn.Module]) -> None:
    """Torch writes the scaled rows into the weight, and steps from there."""
    apply, params, _ = tdf.functional(make(4, 3, max_norm=0.1))
    with pytest.warns(UserWarning, match=r"scales rows of \['weight'\], which are longer than max_norm"):
        apply(params, ROWS)


@pytest.mark.filterwarnings("ignore:apply. forward")
@pytest.mark.parametrize("make", EMBEDDINGS)
def test_its_hint_trains_as_the_module(make: type[nn.Module]) -> None:
    """The hint is the only way to torch's numbers."""
    module = make(4, 3, max_norm=0.5).double()
    apply, params, _ = tdf.functional(module)
    target = torch.randn(apply(params, ROWS).shape, dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), 0.3)
    ours = tdf.optim.sgd(0.3)
    state = ours.init(params)

    def loss(params: tdf.TensorDict) -> Tensor:
        return (apply(params, ROWS) - target).square().mean()

    for _ in range(3):
        optimizer.zero_grad()
        (module(ROWS) - target).square().mean().backward()
        optimizer.step()
        params = scaled(params, 0.5)
        params, state = ours.update(params, tdf.grad(loss)(params), state)
    torch.testing.assert_close(params["weight"], module.get_parameter("weight").detach())


def test_max_norm_in_evaluation_does_not_warn() -> None:
    """There the results are those of the module."""
    apply, params, _ = tdf.functional(nn.Embedding(4, 3, max_norm=0.5).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(params, torch.arange(4))
