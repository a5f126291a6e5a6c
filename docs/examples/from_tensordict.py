"""A tensordict program, ported: data passes both ways, edits return new trees.

The program rolls out a policy on a pendulum and fits models of its dynamics. The first
function is tensordict as many code bases have it, the second is its port; comments name
what changes. Both give the same numbers.

Run it with: python from_tensordict.py
"""

import tempfile
from pathlib import Path

import tensordict
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import tdfunc as tdf

BATCH, STEPS = 64, 40


def pendulum(state: Tensor, torque: Tensor) -> Tensor:
    """Return the angle and velocity one step later."""
    angle, velocity = state.unbind(-1)
    velocity = velocity + 0.1 * (-torch.sin(angle) + torque.squeeze(-1))
    return torch.stack([angle + 0.1 * velocity, velocity], -1)


def collect_with_tensordict(net: nn.Module, start: Tensor) -> tensordict.TensorDict:
    """Roll out a policy with tensordict: modules write into the tree."""
    policy = TensorDictModule(net, in_keys=["state"], out_keys=["torque"])
    td = tensordict.TensorDict({"state": start}, batch_size=[BATCH])
    steps = []
    for _ in range(STEPS):
        td = policy(td)
        td["next", "state"] = pendulum(td["state"], td["torque"])
        td["next", "reward"] = -td["next", "state"].square().sum(-1)
        steps.append(td)
        td = td["next"].select("state")
    return torch.stack(steps, 1)


def collect(net: nn.Module, start: Tensor) -> tdf.TensorDict:
    """Roll out the same policy: edits return a new tree."""
    apply, params, _ = tdf.functional(net)
    td = tdf.TensorDict({"state": start}, [BATCH])
    steps = []
    for _ in range(STEPS):
        # Was policy(td): a module is a function of its parameters.
        td = td.set("torque", apply(params, td["state"]))
        # Was td["next", "state"] = ...: a tuple of keys is a path here as well.
        after = pendulum(td["state"], td["torque"])
        td = td.set(("next", "state"), after)
        td = td.set(("next", "reward"), -after.square().sum(-1))
        steps.append(td)
        td = td["next"].select("state")
    return tdf.stack(steps, 1)


def main(folder: Path) -> None:
    """Compare the two, convert both ways, share folders, use what the port gives."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    start = torch.randn(BATCH, 2)
    with torch.no_grad():
        theirs, ours = collect_with_tensordict(net, start), collect(net, start)

    # Data passes both ways, and no tensor is copied.
    tdf.assert_close(tdf.TensorDict(theirs), ours)
    back = tensordict.TensorDict(ours.to_dict(), batch_size=ours.batch_size)
    assert (back == theirs).all()
    assert back["state"].data_ptr() == ours["state"].data_ptr()
    print(f"both collected {tuple(ours.batch_size)} transitions, equal leaf by leaf")

    # Memory-mapped folders have one layout: either library opens those of the other.
    theirs.memmap(folder / "theirs")
    assert (tdf.load(folder / "theirs") == ours).all()
    ours.memmap(str(folder / "ours"))
    assert (tensordict.TensorDict.load_memmap(folder / "ours") == theirs).all()

    # An assignment raises, and the error ends with the line to write instead.
    try:
        ours["state"] = -ours["state"]
    except tdf.ImmutableError as error:
        print(f"ImmutableError: {str(error).splitlines()[-1].strip()}")
    mirrored = ours.set("state", -ours["state"])
    assert mirrored["torque"] is ours["torque"]  # an edit shares what it did not change

    # Shapes, indices, masks and arithmetic are spelled as before.
    flat = ours.reshape(-1)
    fast = flat[flat["state"][:, 1].abs() > 1]
    reward = fast["next", "reward"].mean()
    print(f"{len(fast)} of {len(flat)} states move fast; mean reward {reward:.2f}")

    # What a port is for: five models of the dynamics, trained by one vmap(grad).
    apply, _, _ = tdf.functional(nn.Linear(3, 2))
    members = tdf.init_ensemble(lambda: nn.Linear(3, 2), 5)

    def loss(params: tdf.TensorDict, batch: tdf.TensorDict) -> Tensor:
        change = apply(params, torch.cat([batch["state"], batch["torque"]], -1))
        return (batch["state"] + change - batch["next", "state"]).square().mean()

    step = torch.vmap(torch.func.grad(loss))
    samples = flat[torch.randint(len(flat), (5, 512))]  # batch size [5, 512]
    optimizer = tdf.optim.adam(lr=0.05)
    state = optimizer.init(members)
    for _ in range(100):
        members, state = optimizer.update(members, step(members, samples), state)
    losses = torch.vmap(loss)(members, samples)
    print(f"errors of the models: {[round(value, 4) for value in losses.tolist()]}")
    assert losses.max() < 0.01


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
