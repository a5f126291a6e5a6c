"""A replay buffer on disk: episodes of different lengths go in, random batches come out.

Episodes are typed trees. A LazyStack holds several of them although their lengths differ, `map_iter` prepares each on
its own, and the buffer is a memory-mapped folder: it takes no space before it is filled, may be larger than memory, and
another process reads it while this one writes.

Run it with: python replay_buffer.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdfunc as tdf

CAPACITY, DISCOUNT = 20_000, 0.97


class Step(tdf.TensorClass):
    """One step of a cart that has to stay near the centre of its track, or a batch of steps."""

    state: Tensor  # [..., 2], position and velocity
    action: Tensor  # 0: push to the left, 1: push to the right
    reward: Tensor
    future: Tensor | None = None  # the discounted sum of rewards from here on; a field that is None is absent


def play(policy: Callable[[Tensor, torch.Generator], Tensor], generator: torch.Generator) -> Step:
    """Play one episode: it ends when the cart leaves the track, or after 100 steps."""
    state = 0.2 * torch.randn(2, generator=generator)
    steps = []
    while state[0].abs() < 1 and len(steps) < 100:
        action = policy(state, generator)
        steps.append(Step(state, action, torch.tensor(1.0)))
        push = 0.1 * (2 * action - 1) + 0.05 * torch.randn((), generator=generator)
        state = torch.stack([state[0] + 0.2 * state[1], state[1] + push])
    return torch.stack(steps)


def add_future(episode: Step) -> Step:
    """Return an episode with its field `future`. It is given one episode, so rows before and after are at hand."""
    future, total = [], torch.zeros(())
    for reward in episode.reward.flip(0):
        total = reward + DISCOUNT * total
        future.append(total)
    return episode.replace(future=torch.stack(future).flip(0))


def act_randomly(state: Tensor, generator: torch.Generator) -> Tensor:
    """Push at random."""
    return torch.randint(2, (), generator=generator)


def main(folder: Path) -> None:
    """Collect, store, learn the value of each action, and act by it."""
    generator = torch.Generator().manual_seed(0)
    episodes = tdf.lazy_stack([play(act_randomly, generator) for _ in range(200)])
    lengths = [len(episode) for episode in episodes]
    print(f"{len(lengths)} episodes of {min(lengths)} to {max(lengths)} steps, batch size {tuple(episodes.batch_size)}")

    # One call for each episode, on two threads. Results have other lengths, so they come one by one, in order.
    ready = tdf.lazy_stack(list(episodes.map_iter(add_future, chunksize=0, num_workers=2, executor="threads")))
    assert [len(episode) for episode in ready] == lengths

    # A padded batch for models of sequences; the mask marks what is real.
    padded, mask = ready[:8].pad(return_mask=True)
    print(f"eight episodes padded: {tuple(padded.batch_size)}, {mask['reward'].float().mean():.0%} of it real")
    assert mask["reward"].sum() == sum(lengths[:8])

    # The buffer: one row, expanded to the capacity, gives the layout. Its files have holes until they are written.
    flat = torch.cat(list(ready))
    buffer = flat[0].expand(CAPACITY).memmap_like(folder / "buffer")
    filled = 0
    for episode in ready:
        places = torch.arange(filled, filled + len(episode)) % CAPACITY  # the oldest rows are overwritten
        buffer.at[places].set_(episode)
        filled += len(episode)

    # Loading maps the files; an index reads these rows only. Another process does the same.
    stored = Step.load(folder / "buffer")
    assert (stored[: len(flat)] == flat).all()

    # Learn the discounted future of both actions from random batches.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    apply, params, _ = tdf.functional(net)
    optimizer = tdf.optim.adam(lr=1e-2)
    optimizer_state = optimizer.init(params)

    def loss(params: tdf.TensorDict, batch: Step) -> Tensor:
        value = apply(params, batch.state).gather(1, batch.action[:, None])[:, 0]
        return F.smooth_l1_loss(value, batch.future / 10)

    for _ in range(400):
        batch = stored[torch.randint(min(filled, CAPACITY), (256,), generator=generator)]
        params, optimizer_state = optimizer.update(params, torch.func.grad(loss)(params, batch), optimizer_state)

    def act(state: Tensor, generator: torch.Generator) -> Tensor:
        with torch.no_grad():
            return apply(params, state).argmax()

    learned = [len(play(act, generator)) for _ in range(50)]
    before, after = sum(lengths) / len(lengths), sum(learned) / len(learned)
    print(f"mean length of an episode: {before:.1f} at random, {after:.1f} by the learned values")
    assert after > 1.5 * before


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
