"""What holds for a model: several of it run stacked, next to a loop over the real modules in float64."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tdfunc as tdf
from benchmarks.measure import Effort, measure
from benchmarks.models.architectures import floats
from benchmarks.models.rows import Example, Row
from tdfunc.core.errors import forward_line
from tdfunc.modules.random import seeded

MEMBERS, MEMBERS_TIMED = 3, 8
STEPS = 2
RIGHT, WRONG = "right", "wrong"
# Parts of torch's warnings about functions that its vmap runs one member after the other.
_FALLBACK = ("performance drop", "batching rule")
# By dtype: how far numbers may differ, of themselves and absolutely, and a rate whose steps are well above that.
_CLOSE = {torch.float64: (1e-5, 1e-10), torch.float32: (1e-3, 2e-6)}
_RATES = {torch.float64: 1e-4, torch.float32: 1e-2}
_LONGEST = 150
# Before the line in a plan.
_AT = "  at "
_EFFORT = Effort(rounds=9, passes=1, round_s=0.002, longest_s=0.6)


class Found(NamedTuple):
    """A row's result: each check is "right", "wrong" or the first line of an error.

    `way` is how `Ensemble` ran the forward, `reason` why it ran as a loop; `warns` if torch warned of a loop in vmap.
    """

    forward: str
    gradient: str
    training: str
    jit: str
    way: str
    reason: str
    warns: bool


class Case(NamedTuple):
    """Members as real modules, and as pure functions and trees of the same numbers."""

    models: list[nn.Module]
    apply: tdf.Apply
    params: Any
    buffers: Any
    example: Example
    keys: Tensor
    draws: bool
    dtype: torch.dtype

    def rate(self) -> float:
        """Return the learning rate."""
        return _RATES[self.dtype]


def check(row: Row) -> Found:
    """Return what holds for a row."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        try:
            results = _check(row)
        finally:
            torch.set_warn_always(always)
    texts = [str(one.message) for one in said]
    return Found(*results, any(part in text for text in texts for part in _FALLBACK))


def _check(row: Row) -> tuple[str, str, str, str, str, str]:
    try:
        case = make_case(row, MEMBERS, row.dtype)
    # A row may be refused with any error: it is what the page shows.
    except Exception as err:
        return (*[_text_of(err)] * 4, "", "")
    ensemble = tdf.Ensemble(case.apply)
    in_training = tdf.Ensemble(case.apply.train())
    forward = _judge(lambda: _check_forward(case, ensemble))
    gradient = _judge(lambda: _check_gradient(case))
    training = _judge(lambda: _check_training(case, in_training))
    way, reason = _way_of(ensemble, in_training)
    if forward != RIGHT:
        way = reason = ""
    jit = _judge(lambda: _check_jit(case, row.example().to(row.dtype)))
    return forward, gradient, training, jit, way, reason


def _way_of(*ensembles: tdf.Ensemble) -> tuple[str, str]:
    """Return how ensembles ran, and the reason if one of them was a loop."""
    for ensemble in ensembles:
        first, second = ensemble.plan().splitlines()[:2]
        way, _, rest = first.partition(", ")
        if way == "loop":
            line = second.removeprefix(_AT) if second.startswith(_AT) else None
            return way, cut(rest.partition(": ")[2]) + _place(line)
    return "vmap", ""


def _judge(run: Callable[[], None]) -> str:
    try:
        run()
    except AssertionError:
        return WRONG
    # As in `_check`.
    except Exception as err:
        return _text_of(err)
    return RIGHT


def _text_of(err: Exception) -> str:
    """Return the class of an error and its first line."""
    lines = str(err).strip().splitlines() or [""]
    return f"{type(err).__name__}: {cut(lines[0].strip())}{_place(forward_line(err))}"


def _place(line: str | None) -> str:
    """Return the end of a text that names a line of a forward, without the folders of its file."""
    path, _, rest = (line or "").partition(":")
    if path in ("", __file__):
        return ""
    return f", at {Path(path).name}:{rest}"


def cut(text: str) -> str:
    """Return the first sentence of a text, or as much of it as a page can show."""
    first = text.split(". ")[0].rstrip(".")
    return first if len(first) <= _LONGEST else first[:_LONGEST] + " ..."


def make_case(row: Row, members: int, dtype: torch.dtype) -> Case:
    models = [row.make().to(dtype).eval() for _ in range(members)]
    with torch.no_grad():
        for model in models:
            _disturb(model)
    apply, _, _ = tdf.functional(models[0])
    params, buffers = tdf.split(tdf.stack_modules(models))
    # Separate trees, since training changes the modules.
    keys = tdf.random.split(tdf.random.key(int(torch.randint(1 << 30, ()))), members)
    return Case(models, apply, params.clone(), buffers.clone(), row.example().to(dtype), keys, row.draws, dtype)


def _disturb(model: nn.Module) -> None:
    """Have the members differ also where modules begin with equal numbers, and train all of their parameters."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(1 + 0.1 * torch.rand_like(buffer))


def loss_of(output: Any) -> Tensor:
    """Return a number that depends on each entry of an output in another way."""
    total: Any = 0.0
    for tensor in floats(output):
        weights = torch.arange(tensor.numel(), dtype=tensor.dtype).add(1).cos().reshape(tensor.shape)
        total = total + (tensor * weights).mean() + tensor.square().mean() * 0.1
    return total


def loss_of_all(output: Any) -> Tensor:
    """Return the sum of the losses of members whose outputs are stacked."""
    return torch.vmap(lambda *parts: loss_of(parts))(*floats(output)).sum()


# -- the checks ---------------------------------------------------------------------------------------------------


def _copies(case: Case) -> list[nn.Module]:
    """Return copies of the real modules, since a forward may leave tensors in its module."""
    return [copy.deepcopy(model) for model in case.models]


def _call(model: nn.Module, case: Case, member: int, *, keyed: bool = False) -> Any:
    """Return the output of a real module, its draws served from the member's key."""
    if not (keyed or case.draws):
        return model(*case.example.args, **case.example.kwargs)
    # Draws inside torch's kernels come from the default generator, which a looped member seeds by its key.
    torch.manual_seed(int(tdf.random.bits(case.keys[member])))
    with seeded(case.keys[member]):
        return model(*case.example.args, **case.example.kwargs)


def _check_forward(case: Case, ensemble: tdf.Ensemble) -> None:
    with torch.no_grad():
        rng = case.keys if case.draws else None
        got = ensemble(case.params, *case.example.args, buffers=case.buffers, rng=rng, **case.example.kwargs)
        want = [_call(model, case, member) for member, model in enumerate(_copies(case))]
    if any(tensor.isnan().any() for output in want for tensor in floats(output)):
        raise ValueError("the module itself returns NaN, which shows nothing.")
    _assert_outputs(got, want)


def _assert_outputs(stacked: Any, single: Sequence[Any]) -> None:
    columns = zip(*map(floats, single), strict=True)
    _assert_equal(floats(stacked), [torch.stack(column) for column in columns])


def _assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    """Raise unless tensors agree up to rounding, in float32 where a forward casts to it."""
    for one, other in zip(got, want, strict=True):
        largest = float(other.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if other.numel() else 0.0
        relative, rounding = _CLOSE.get(other.dtype, _CLOSE[torch.float32])
        torch.testing.assert_close(one, other, rtol=relative, atol=0.1 * relative * largest + rounding, equal_nan=True)


def _check_gradient(case: Case) -> None:
    def loss(params: Any, buffers: Any, key: Tensor) -> Tensor:
        rng = key if case.draws else None
        return loss_of(case.apply(params, *case.example.args, buffers=buffers, rng=rng, **case.example.kwargs))

    got = torch.vmap(torch.func.grad(loss))(case.params, case.buffers, case.keys)
    for member, model in enumerate(_copies(case)):
        loss_of(_call(model, case, member)).backward()
        _assert_named(model, got[member], _gradient)


def _gradient(name: str, parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad


def _change_since(start: nn.Module) -> Callable[[str, Tensor], Tensor]:
    before = dict(start.named_parameters(remove_duplicate=False))
    return lambda name, parameter: parameter - before[name]


def _assert_named(model: nn.Module, tree: Any, read: Callable[[str, Tensor], Tensor]) -> None:
    """Raise unless the leaves of a member's tree are what `read` returns for the parameters of its module."""
    names = dict(model.named_parameters(remove_duplicate=False))
    got = _leaves(tree)
    assert set(got) <= set(names)
    _assert_equal(list(got.values()), [read(name, names[name]).detach() for name in got])


def _leaves(tree: Any) -> dict[str, Tensor]:
    return dict(tree.flatten_keys().items())


def make_step(case: Case, training: tdf.Ensemble | None = None) -> Callable[..., Any]:
    """Return one step of gradient descent of all members in training mode, each with its key."""
    training = training or tdf.Ensemble(case.apply.train())

    def step(params: Any, buffers: Any, keys: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def loss(params: Any) -> Any:
            output, new = training.with_buffers(params, buffers, *args, rng=keys, **kwargs)
            return loss_of_all(output), new

        grads, buffers = torch.func.grad(loss, has_aux=True)(params)
        return params - grads * case.rate(), buffers

    return step


def _check_training(case: Case, training: tdf.Ensemble) -> None:
    step = make_step(case, training)
    params = case.params
    buffers = case.buffers
    for _ in range(STEPS):
        params, buffers = step(params, buffers, case.keys, *case.example)
    for member, model in enumerate(_copies(case)):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), case.rate())
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(_call(model, case, member, keyed=True)).backward()
            optimizer.step()
        # The changes: a small one would vanish in the weight.
        _assert_named(model, params[member] - case.params[member], _change_since(case.models[member]))
        _assert_buffers(model, buffers[member])


def _assert_buffers(model: nn.Module, tree: Any) -> None:
    names = dict(model.named_buffers(remove_duplicate=False))
    pairs = [(leaf, names[name]) for name, leaf in _leaves(tree).items() if name in names and leaf.is_floating_point()]
    _assert_equal([a for a, _ in pairs], [b for _, b in pairs])


def _check_jit(case: Case, other: Example) -> None:
    step = make_step(case)
    jitted = tdf.jit(step)
    for factor in (1.0, 0.9, 1.1):
        _assert_same_step(step, jitted, case.params * factor, case, case.example)
    if jitted.cache_info().misses != 1:
        raise RuntimeError("each call is recorded anew.")
    _assert_same_step(step, jitted, case.params, case, other)


def _assert_same_step(step: Any, jitted: Any, params: Any, case: Case, example: Example) -> None:
    changes: list[list[Tensor]] = []
    for run in (jitted, step):
        new, _ = run(params, case.buffers, case.keys, *example)
        changes.append(list(_leaves(new - params).values()))
    _assert_equal(*changes)


# -- time ---------------------------------------------------------------------------------------------------------


def speed(row: Row) -> float:
    """Return how many times faster a step of 8 members is than a loop over 8 modules, by CPU time."""
    case = make_case(row, MEMBERS_TIMED, torch.float32)
    step = tdf.jit(make_step(case))
    models = [model.train() for model in case.models]
    optimizers = [torch.optim.SGD(model.parameters(), case.rate()) for model in models]

    def stacked() -> None:
        step(case.params, case.buffers, case.keys, *case.example)

    def looped() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(*case.example.args, **case.example.kwargs)).backward()
            optimizer.step()

    found = measure({"stacked": stacked, "looped": looped}, _EFFORT)
    return found["looped"].cpu_us / found["stacked"].cpu_us
