"""Meta-learning: differentiate through an inner adam, and learn its learning rates.

MAML looks for weights from which a few steps on a new task are enough. Its gradient goes through those steps. An
optimizer here is a pair of pure functions, so the inner loop is ordinary differentiable code: torch.func.grad of a
function that calls `update`. Learning rates are tensors as well, and are learned with the weights.

Run it with: python maml.py
"""

import torch
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict

INNER_STEPS, TASKS, META_STEPS = 3, 16, 150

torch.manual_seed(0)
apply, weights, _ = tdf.functional(
    nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
)


def draw_tasks(count: int, generator: torch.Generator) -> TensorDict:
    """Return regression tasks: sine waves with their own amplitude and phase, ten points to learn from, ten to test."""
    amplitude = 0.5 + 3 * torch.rand(count, 1, 1, generator=generator)
    phase = torch.pi * torch.rand(count, 1, 1, generator=generator)
    x = 10 * torch.rand(count, 20, 1, generator=generator) - 5
    points = TensorDict({"x": x, "y": amplitude * torch.sin(x + phase)}, [count, 20])
    return TensorDict({"support": points[:, :10], "query": points[:, 10:]}, [count])


def loss(params: TensorDict, points: TensorDict) -> Tensor:
    """Return the mean squared error of one model on some points."""
    return (apply(params, points["x"]) - points["y"]).square().mean()


def adapt(meta: TensorDict, support: TensorDict) -> TensorDict:
    """Return the weights after a few inner steps on one task."""
    inner, params = tdf.optim.adam(lr=torch.tensor(0.01)), meta["weights"]
    state = inner.init(params).set("lr", meta["log_lr"].exp())
    for _ in range(INNER_STEPS):
        grads = torch.func.grad(loss)(params, support)
        params, state = inner.update(params, grads, state)
    return params


def task_loss(meta: TensorDict, task: TensorDict) -> Tensor:
    """Return the loss on the query points after adapting to the support points."""
    return loss(adapt(meta, task["support"]), task["query"])


def meta_loss(meta: TensorDict, tasks: TensorDict) -> Tensor:
    """Return the mean over tasks, each of which adapts on its own."""
    return torch.vmap(task_loss, in_dims=(None, 0))(meta, tasks).mean()


def main() -> None:
    """Check the gradient, train, and compare with weights that were not meta-learned."""
    generator = torch.Generator().manual_seed(1)
    meta = TensorDict({"weights": weights, "log_lr": torch.tensor(0.01).log()})

    # The oracle: a difference quotient through all inner steps, in float64.
    double, tasks = meta.double(), draw_tasks(4, generator).double()
    slope = torch.func.grad(meta_loss)(double, tasks)["log_lr"]
    up, down = double.at["log_lr"].add(1e-5), double.at["log_lr"].add(-1e-5)
    torch.testing.assert_close(slope, (meta_loss(up, tasks) - meta_loss(down, tasks)) / 2e-5, rtol=1e-4, atol=1e-6)
    print(f"derivative by the logarithm of the inner learning rate: {slope:.4f}, as the difference quotient")

    optimizer = tdf.optim.chain(tdf.optim.clip_by_global_norm(10.0), tdf.optim.adam(lr=3e-3))
    state = optimizer.init(meta)

    @tdf.jit
    def step(meta: TensorDict, state: TensorDict, tasks: TensorDict) -> tuple[TensorDict, TensorDict, Tensor]:
        grads, value = torch.func.grad_and_value(meta_loss)(meta, tasks)
        return *optimizer.update(meta, grads, state), value

    for i in range(META_STEPS):
        meta, state, value = step(meta, state, draw_tasks(TASKS, generator))
        if i % 50 == 0:
            print(f"step {i}: loss after {INNER_STEPS} inner steps {value:.3f}")

    # New tasks: the meta-learned weights adapt in three steps, fresh ones do not.
    tasks = draw_tasks(200, generator)
    fresh = TensorDict({"weights": weights, "log_lr": meta["log_lr"]})
    before, after = meta_loss(fresh, tasks).item(), meta_loss(meta, tasks).item()
    print(f"new tasks: loss {before:.3f} from fresh weights, {after:.3f} from meta-learned ones")
    print(f"inner learning rate: 0.010 at first, {meta['log_lr'].exp():.3f} learned")
    assert after < 0.7 * before


if __name__ == "__main__":
    main()
