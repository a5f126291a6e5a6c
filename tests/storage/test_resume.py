"""A run that is killed with SIGKILL and resumed has the batches and losses of a run without interruption."""

import random
import signal
import time

import pytest

from tests.storage import scripts

TRAIN = """
    import sys, time
    from pathlib import Path

    import torch
    from torch import nn
    import tdfunc as tdf

    folder, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    data = tdf.TensorDict({"x": torch.randn(50, 4, generator=torch.Generator().manual_seed(0))}, [50])
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
    apply, params, _ = tdf.functional(net)
    params = params.apply(lambda leaf: torch.linspace(-1, 1, leaf.numel()).reshape(leaf.shape))
    optimizer = tdf.optim.adam(lr=1e-2)
    state = optimizer.init(params)
    key = tdf.random.key(1)
    place = tdf.random.key(2)

    manager = tdf.CheckpointManager(folder / "run", keep_last=2, async_save=True)
    step = 0
    if manager.latest() is not None:
        run = manager.load()
        params, state, place, step = run["params"], run["state"], run["place"], manager.latest() + 1
    for rows, place in tdf.random.batches(place, len(data), 8, epochs=6):
        def loss_of(params):
            x = data[rows]["x"]
            return (apply(params, x, rng=tdf.random.fold_in(key, step)) - x).square().mean()

        grads, loss = torch.func.grad_and_value(loss_of)(params)
        params, state = optimizer.update(params, grads, state)
        with open(folder / "log", "a") as log:
            log.write(f"{step} {rows.tolist()} {float(loss).hex()}\\n")
        manager.save(step, {"params": params, "state": state, "place": place})
        time.sleep(pause_s)
        step += 1
    manager.wait()
"""
STEPS = 42


def train(folder, pause_s=0.0):
    """Start the run in another process, or continue it."""
    folder.mkdir(exist_ok=True)
    return scripts.run(TRAIN, folder, pause_s)


def lines_of(folder):
    """The lines of a run's log, one a step."""
    log = folder / "log"
    if not log.exists():
        return []
    return log.read_text().splitlines()


def kill_after(folder, count):
    """Continue a run, and kill it with SIGKILL when its log has more lines."""
    process = train(folder, pause_s=0.05)
    while len(lines_of(folder)) < count and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return len(lines_of(folder))


@pytest.mark.slow
def test_a_killed_run_has_the_batches_and_losses_of_a_whole_one(tmp_path):
    """Batches in random order, dropout and losses of a run that was killed twice are those of a whole run, bitwise."""
    scripts.ended(train(tmp_path / "whole"))
    first = kill_after(tmp_path / "killed", random.randint(3, 15))
    kill_after(tmp_path / "killed", first + random.randint(3, 15))
    scripts.ended(train(tmp_path / "killed"))

    whole = lines_of(tmp_path / "whole")
    # A step whose save was killed is computed twice; its two lines must be equal.
    killed = sorted({*lines_of(tmp_path / "killed")}, key=lambda line: int(line.split()[0]))
    assert len(whole) == STEPS
    assert killed == whole
