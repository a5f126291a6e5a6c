"""Meta-learning: differentiate through an inner adam, and learn its learning rate.

MAML looks for weights from which a few steps on a new task are enough. Its gradient
goes through those steps. An optimizer here is a pair of pure functions, so the inner
loop is ordinary differentiable code. Its learning rate is a tensor, and is learned too.

Run it with: python maml.py
"""

import torch
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorDict

INNER_STEPS, TASKS, META_STEPS = 3, 16, 150

torch.manual_seed(0)
layers = [nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)]
apply, weights, _ = tdf.functional(nn.Sequential(*layers))


def draw_tasks(count: int, generator: torch.Generator) -> TensorDict:
    """Return random sine waves, each with 10 points to learn from and 10 to test."""
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
    # The derivative of adam's square root has no bound where gradients are tiny, as
    # they are behind a ReLU; eps_root bounds it.
    inner = tdf.optim.adam(lr=meta["log_lr"].exp(), eps_root=1e-8)
    params = meta["weights"]
    state = inner.init(params)
    for _ in range(INNER_STEPS):
        grads = torch.func.grad(loss)(params, support)
        params, state = inner.update(params, grads, state)
    return params


def meta_loss(meta: TensorDict, tasks: TensorDict) -> Tensor:
    """Return the mean loss on query points, each task adapted to its support points."""

    def task_loss(task: TensorDict) -> Tensor:
        return loss(adapt(meta, task["support"]), task["query"])

    return torch.vmap(task_loss)(tasks).mean()


def main() -> None:
    """Check the gradient, train, and compare with weights that were not learned."""
    generator = torch.Generator().manual_seed(1)
    meta = TensorDict({"weights": weights, "log_lr": torch.tensor(0.01).log()})

    # The oracle: a difference quotient through all inner steps, in float64.
    double, tasks = meta.double(), draw_tasks(4, generator).double()
    slope = torch.func.grad(meta_loss)(double, tasks)["log_lr"]
    up, down = (double.at["log_lr"].add(eps) for eps in (1e-5, -1e-5))
    quotient = (meta_loss(up, tasks) - meta_loss(down, tasks)) / 2e-5
    torch.testing.assert_close(slope, quotient, rtol=1e-4, atol=1e-6)
    print(f"derivative by the inner learning rate: {slope:.4f}, as the quotient")

    clip = tdf.optim.clip_by_global_norm(10.0)
    optimizer = tdf.optim.chain(clip, tdf.optim.adam(lr=1e-2))
    state = optimizer.init(meta)

    @tdf.jit
    def step(
        meta: TensorDict, state: TensorDict, tasks: TensorDict
    ) -> tuple[TensorDict, TensorDict, Tensor]:
        grads, value = torch.func.grad_and_value(meta_loss)(meta, tasks)
        return *optimizer.update(meta, grads, state), value

    for i in range(META_STEPS):
        meta, state, value = step(meta, state, draw_tasks(TASKS, generator))
        if i % 50 == 0:
            print(f"step {i}: loss after {INNER_STEPS} inner steps {value:.3f}")

    # On new tasks, three steps are enough from the meta-learned weights only.
    tasks, fresh = draw_tasks(200, generator), meta.set("weights", weights)
    before, after = meta_loss(fresh, tasks).item(), meta_loss(meta, tasks).item()
    print(f"new tasks: loss {before:.3f} from fresh weights, {after:.3f} from learned")
    print(f"inner learning rate: 0.010 at first, {meta['log_lr'].exp():.3f} learned")
    assert after < 0.7 * before


if __name__ == "__main__":
    main()
