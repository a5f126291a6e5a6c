"""A tensordict program, ported: data passes both ways, edits return new trees.

The program collects transitions of a pendulum and fits a model of its dynamics. The first half is tensordict as many
code bases have it. The second half is its port; comments name what changes. Both give the same numbers.

Run it with: python from_tensordict.py
"""

import tempfile
from pathlib import Path

import tensordict
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import tdfunc as tdf

BATCH, STEPS = 64, 40


def pendulum(state: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
    """Return the angle and velocity one step later."""
    angle, velocity = state.unbind(-1)
    velocity = velocity + 0.1 * (-torch.sin(angle) + torque.squeeze(-1))
    return torch.stack([angle + 0.1 * velocity, velocity], -1)


def collect_with_tensordict(net: nn.Module, start: torch.Tensor) -> tensordict.TensorDict:
    """Roll out a policy with tensordict: modules write into the tree, rows are assigned."""
    policy = TensorDictModule(net, in_keys=["state"], out_keys=["torque"])
    td = tensordict.TensorDict({"state": start}, batch_size=[BATCH])
    steps = []
    for _ in range(STEPS):
        td = policy(td)
        td["next", "state"] = pendulum(td["state"], td["torque"])
        td["next", "reward"] = -td["next", "state"].square().sum(-1)
        steps.append(td)
        td = tensordict.TensorDict({"state": td["next", "state"]}, batch_size=[BATCH])
    return torch.stack(steps, 1)


def collect(net: nn.Module, start: torch.Tensor) -> tdf.TensorDict:
    """Roll out the same policy: a module is a function of its parameters, an edit returns a new tree."""
    apply, params, _ = tdf.functional(net)
    td = tdf.TensorDict({"state": start}, [BATCH])
    steps = []
    for _ in range(STEPS):
        # TensorDictModule(net, in_keys=["state"], out_keys=["torque"])(td)
        td = td.set("torque", apply(params, td["state"]))
        # td["next", "state"] = value; a tuple of keys is a path, and the inner tree is made where it is missing
        after = pendulum(td["state"], td["torque"])
        td = td.set(("next", "state"), after).set(("next", "reward"), -after.square().sum(-1))
        steps.append(td)
        td = td["next"].select("state")
    return torch.stack(steps, 1)


def main(folder: Path) -> None:
    """Compare the two, convert both ways, share a folder, and do what needed a port."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    start = torch.randn(BATCH, 2)
    with torch.no_grad():
        theirs = collect_with_tensordict(net, start)
        ours = collect(net, start)

    # Data passes both ways, and no tensor is copied.
    converted = tdf.TensorDict(theirs.to_dict(), batch_size=theirs.batch_size)
    tdf.assert_close(ours, converted)
    assert converted["state"].data_ptr() == theirs["state"].data_ptr()
    back = tensordict.TensorDict(ours.to_dict(), batch_size=ours.batch_size)
    assert (back == theirs).all()
    print(f"both collected {tuple(ours.batch_size)} transitions, equal leaf by leaf")

    # Memory-mapped folders have one layout, so either library opens those of the other.
    theirs.memmap(folder / "theirs")
    assert (tdf.load(folder / "theirs") == ours).all()
    ours.memmap(folder / "ours")
    assert (tensordict.TensorDict.load_memmap(folder / "ours") == theirs).all()

    # td[0] = row; td["state"] += 1: the line to write instead is the text of the error.
    try:
        ours["state"] = torch.zeros_like(ours["state"])
    except tdf.ImmutableError as error:
        print(f"an assignment raises {type(error).__name__}: {str(error).splitlines()[-1].strip()}")
    mirrored = ours.at["state"].mul(-1)
    assert mirrored["torque"] is ours["torque"]  # an edit shares all that it did not change

    # td.reshape, indexing, masks, stack, cat and arithmetic are spelled as before.
    flat = ours.reshape(-1)
    fast = flat[flat["state"][:, 1].abs() > 1]
    print(f"{len(fast)} of {len(flat)} states move fast; their mean reward is {fast['next', 'reward'].mean():.2f}")

    # What a port is for: five dynamics models on bootstrapped data, one call of vmap(grad).
    apply, _, _ = tdf.functional(nn.Linear(3, 2))
    members = tdf.init_ensemble(lambda: nn.Linear(3, 2), 5)

    def loss(params: tdf.TensorDict, batch: tdf.TensorDict) -> torch.Tensor:
        change = apply(params, torch.cat([batch["state"], batch["torque"]], -1))
        return (batch["state"] + change - batch["next", "state"]).square().mean()

    own = flat[torch.randint(len(flat), (5, 512))]  # a batch of size [5, 512]: a sample for each member
    optimizer = tdf.optim.adam(lr=0.05)
    state = optimizer.init(members)
    for _ in range(100):
        grads, losses = torch.vmap(torch.func.grad_and_value(loss))(members, own)
        members, state = optimizer.update(members, grads, state)
    print(f"errors of five dynamics models: {[round(value, 4) for value in losses.tolist()]}")
    assert losses.max() < 0.01


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
