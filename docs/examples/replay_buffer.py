"""A replay buffer on disk: episodes of any length go in, random batches come out.

Episodes are typed trees. A LazyStack holds several of them although their lengths
differ, `map_iter` prepares each on its own, and the buffer is a memory-mapped folder of
fixed capacity: it takes no space before it is filled, and may be larger than memory,
since an index reads only its rows.

Run it with: python replay_buffer.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import tdfunc as tdf

CAPACITY, DISCOUNT = 20_000, 0.97


class Step(tdf.TensorClass):
    """A step, or a batch of steps, of a cart that has to stay on its track."""

    state: Tensor  # [..., 2], position and velocity
    action: Tensor  # 0: push to the left, 1: push to the right
    reward: Tensor
    future: Tensor | None = None  # the discounted rewards from here on; absent at first


def play(policy: Callable[[Tensor, Generator], Tensor], generator: Generator) -> Step:
    """Play one episode: until the cart leaves the track, or for 100 steps."""
    state, steps = 0.2 * torch.randn(2, generator=generator), []
    while state[0].abs() < 1 and len(steps) < 100:
        action = policy(state, generator)
        steps.append(Step(state, action, torch.tensor(1.0)))
        push = 0.1 * (2 * action - 1) + 0.05 * torch.randn((), generator=generator)
        state = torch.stack([state[0] + 0.2 * state[1], state[1] + push])
    return tdf.stack(steps)


def add_future(episode: Step) -> Step:
    """Return an episode with its field `future`."""
    future, total = [], torch.zeros(())
    for reward in episode.reward.flip(0):
        total = reward + DISCOUNT * total
        future.append(total)
    return episode.replace(future=torch.stack(future).flip(0))


def act_randomly(state: Tensor, generator: Generator) -> Tensor:
    """Push at random."""
    return torch.randint(2, (), generator=generator)


def learn(buffer: Step, count: int) -> Callable[[Tensor, Generator], Tensor]:
    """Return the policy that takes the action of larger value, learned from batches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    apply, params, _ = tdf.functional(net)
    optimizer = tdf.optim.adam(lr=1e-2)
    state = optimizer.init(params)

    def loss(params: tdf.TensorDict, batch: Step) -> Tensor:
        values = apply(params, batch.state)
        value = values.gather(1, batch.action[:, None])[:, 0]
        return F.smooth_l1_loss(value, batch.future / 10)

    for _ in range(400):
        batch = buffer[torch.randint(count, (256,))]
        grads = torch.func.grad(loss)(params, batch)
        params, state = optimizer.update(params, grads, state)
    return lambda state, generator: apply(params, state).argmax()


def main(folder: Path) -> None:
    """Collect, store, learn the value of each action, and act by it."""
    generator = torch.Generator().manual_seed(0)
    episodes = tdf.lazy_stack([play(act_randomly, generator) for _ in range(200)])
    lengths = [len(episode) for episode in episodes]
    print(f"{len(lengths)} episodes of {min(lengths)} to {max(lengths)} steps")

    # A call for each episode, on two threads; results come in order.
    options = {"chunksize": 0, "num_workers": 2, "executor": "threads"}
    ready = tdf.lazy_stack(list(episodes.map_iter(add_future, **options)))
    assert [len(episode) for episode in ready] == lengths

    # A padded batch for models of sequences; the mask marks what is real.
    padded, mask = ready[:8].pad(return_mask=True)
    real = mask["reward"].float().mean()
    print(f"8 of them padded: batch size {tuple(padded.batch_size)}, {real:.0%} real")
    assert mask["reward"].sum() == sum(lengths[:8])

    # One row, expanded, gives the layout; the files are holes until they are written.
    row = ready[0][0]
    buffer = row.expand(CAPACITY).memmap_like(str(folder / "buffer"))
    count = 0
    for episode in ready:
        places = torch.arange(count, count + len(episode)) % CAPACITY  # a ring
        buffer.at[places].set_(episode)
        count += len(episode)

    # Loading maps the files; this or another process reads rows as it indexes them.
    stored = Step.load(folder / "buffer")
    assert (stored[: lengths[0]] == ready[0]).all()

    policy = learn(stored, min(count, CAPACITY))
    learned = [len(play(policy, generator)) for _ in range(50)]
    before, after = sum(lengths) / len(lengths), sum(learned) / len(learned)
    print(f"mean length: {before:.1f} at random, {after:.1f} by the learned values")
    assert after > 1.5 * before


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
