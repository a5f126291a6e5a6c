"""Trees, keys and files with leaves on a device: what the same calls on the CPU give."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import CheckpointManager, TensorDict, random
from tests.helpers import assert_trees_equal

EXACT, CLOSE = {}, {"rtol": 1e-5, "atol": 1e-6}


def make_tree():
    """Leaves of several dtypes, nested, with a value that is no tensor."""
    numbers = torch.arange(24.0).reshape(4, 3, 2)
    return TensorDict({"a": numbers / 7, "n": {"b": numbers.long()[:, 0], "c": numbers.bfloat16()}, "s": "text"}, [4])


INDEX, MASK = torch.tensor([3, 0, 0]), torch.tensor([True, False, True, True])
OPERATIONS = {
    "index": lambda t, on: t[on(INDEX)],
    "mask": lambda t, on: t[on(MASK)],
    "set": lambda t, on: t.at[on(INDEX[:2])].set(t[:2]),
    "write": lambda t, on: t.clone().at[1].set_(t[0]),
    "edit": lambda t, on: t.set(("n", "d"), on(torch.ones(4))).delete("a").rename_key("s", "r"),
    "stack": lambda t, on: torch.stack([t, t + 1]),
    "cat": lambda t, on: torch.cat([t, t[:1]]),
    "reshape": lambda t, on: t.reshape(2, 2).permute(1, 0),
    "arithmetic": lambda t, on: (t * 2 - t.abs()).clamp(0, 9),
    "reduction": lambda t, on: t.select("a").mean(0),
    "where": lambda t, on: t.where(on(MASK), t + 1),
    "cast": lambda t, on: t.select("a").half().float(),
    "apply": lambda t, on: t.apply(lambda x: x.flip(0)),
    "gather": lambda t, on: t.exclude("s").gather(0, on(INDEX)),
    "to": lambda t, on: t.to(on(MASK).device),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations(operation, device):
    """Results are on the device, and equal those of the CPU."""
    expected = operation(make_tree(), lambda x: x)
    found = operation(make_tree().to(device), lambda x: x.to(device))

    assert {leaf.device.type for leaf in found.leaves()} == {device.type}
    assert_trees_equal(found.cpu(), expected.cpu())


DRAWS = {
    "split": (lambda k: random.split(k, 100), EXACT),
    "fold_in": (lambda k: random.fold_in(k, torch.arange(50, device=k.device)), EXACT),
    "folded number": (lambda k: random.fold_in(k, 7), EXACT),
    "bits": (lambda k: random.bits(k, (1000,)), EXACT),
    "uniform": (lambda k: random.uniform(k, (1000,)), EXACT),
    "bernoulli": (lambda k: random.bernoulli(k, 0.3, (1000,)), EXACT),
    "randint": (lambda k: random.randint(k, (1000,), -5, 1000), EXACT),
    "permutation": (lambda k: random.permutation(k, 1000), EXACT),
    "vmap": (lambda k: torch.vmap(lambda one: random.bits(one, (9,)))(random.split(k, 6)), EXACT),
    # Logarithms and cosines of two devices differ in the last bits.
    "normal": (lambda k: random.normal(k, (1000,)), CLOSE),
    "exponential": (lambda k: random.exponential(k, (1000,)), CLOSE),
}


@pytest.mark.parametrize(("draw", "tolerance"), DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("seed", [0, 12345, -1])
def test_keys(draw, tolerance, device, seed):
    """A key draws on every device what it draws on the CPU, bit for bit where no logarithm is taken."""
    found, expected = draw(random.key(seed, device=device)), draw(random.key(seed))
    assert found.device.type == device.type
    torch.testing.assert_close(found.cpu(), expected, **(tolerance or {"rtol": 0, "atol": 0}))


def test_files(tmp_path, device):
    """A tree comes back to the device where it was, or to the one that is named; folders on disk, too."""
    here = make_tree().set("turned", torch.randn(1500, 4).t()).set("large", torch.randn(4, 750_000)).cpu()
    tree = here.to(device)
    path, folder = tmp_path / "t.safetensors", tmp_path / "folder"
    tdf.save(tree, path)
    tree.memmap(folder)

    assert_trees_equal(tdf.load(path), tree)
    assert_trees_equal(tdf.load(path, device="cpu"), here)
    there = [tdf.load(path, device=device), TensorDict.load_memmap(folder, device, non_blocking=True)]
    assert {leaf.device.type for found in there for leaf in found.leaves()} == {device.type}
    assert_trees_equal([found.cpu() for found in there], [here, here])
    with tdf.open(path) as file:
        assert torch.equal(file["n", "b"].cpu(), make_tree()["n", "b"])


def test_saves_in_the_background(tmp_path, device):
    """The leaves may be written as soon as the call has returned; what is on disk are the old values."""
    tree = make_tree().to(device)
    with CheckpointManager(tmp_path, async_save=True) as manager:
        for step in range(3):
            manager.save(step, tree, copy=True)
            for leaf in tree.leaves():
                leaf.add_(1)

    expected = make_tree().cpu()
    for step in range(3):
        found = CheckpointManager(tmp_path).load(step, device=device)
        assert_trees_equal(found.cpu(), expected)
        expected = expected + 1
