"""Optimizers of trees whose leaves are spread over processes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tdfunc import TensorDict
from tdfunc.optim import (
    accumulate,
    adafactor,
    adamw,
    adaptive_grad_clip,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    clip_by_member_norm,
    ema,
    lookahead,
    muon,
    sgd,
)
from tests.distributed.ranks import run_ranks
from tests.helpers import assert_trees_equal
from tests.optim.table import RULES, train

ELEMENTWISE = [name for name, (make, *_) in RULES.items() if make not in (adafactor, muon)]


@pytest.fixture(scope="module")
def mesh(process_group):
    """A mesh of this process alone."""
    return init_device_mesh("cpu", (1,))


def spread(tree, mesh):
    """Return a tree of one sharded and one replicated leaf."""
    places = {"x": [Shard(0)], "y": [Replicate()]}
    return TensorDict({key: distribute_tensor(tree[key], mesh, places[key]) for key in places}, tree.batch_size)


def assert_trained_alike(opt, mesh, generator, tolerance=1e-6):
    """Train a tree and its spread twin."""
    plain = [
        TensorDict({"x": torch.randn(3, 2, generator=generator), "y": torch.randn(3, generator=generator)}, [3])
        for _ in range(4)
    ]
    params, *grads = [spread(tree, mesh) for tree in plain]

    got, state = train(opt.update, opt.init(params), params, grads)

    expected, _ = train(opt.update, opt.init(plain[0]), plain[0], plain[1:])
    whole = got.apply(lambda leaf: leaf.full_tensor())
    assert_trees_equal(whole, expected, rtol=tolerance, atol=tolerance)
    return got, state


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rules(name, mesh, generator):
    """Sharded leaves are trained as whole ones, and the slots are sharded alike."""
    make, _, options = RULES[name]
    opt = make(**options)

    got, state = assert_trained_alike(opt, mesh, generator)

    assert [leaf.placements for leaf in got.leaves()] == [(Shard(0),), (Replicate(),)]
    assert all(type(leaf) is DTensor for slot in opt.rule.slots for leaf in state[slot].leaves())


@pytest.mark.parametrize("name", ["adamw", "nadam"])
def test_members_with_rates_of_their_own(name, mesh, generator):
    """A learning rate for each member reaches its rows."""
    make, _, options = RULES[name]
    assert_trained_alike(make(**{**options, "lr": torch.tensor([0.1, 0.2, 0.3])}), mesh, generator)


@pytest.mark.parametrize(
    "opt",
    [
        ema(adamw(0.1), 0.9),
        lookahead(adamw(0.1), 2),
        chain(clip_by_global_norm(0.1), clip_by_member_norm(0.1), adamw()),
    ],
    ids=["ema", "lookahead", "chain"],
)
def test_around_rules(opt, mesh, generator):
    """Averages and clips take them, too."""
    assert_trained_alike(opt, mesh, generator)


UNEVEN = {
    "clip_by_global_norm": chain(clip_by_global_norm(0.1), sgd(0.1)),
    "clip_by_member_norm": chain(clip_by_member_norm(0.1), sgd(0.1)),
    "apply_if_finite": apply_if_finite(sgd(0.1), 1),
}
# Rows that two ranks cannot halve, and the head of one output, which one rank has.
SIZES = {"table": (5, 3), "bias": (5,), "head": (1, 4)}


def _train_uneven(rank, name):
    spread_over = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    plain = [TensorDict({key: torch.randn(size, generator=generator) for key, size in SIZES.items()}) for _ in range(4)]
    if name == "apply_if_finite":
        # A number of the last rows, which one rank has.
        plain[2]["table"][4, 2] = torch.inf
    params, *grads = [tree.apply(lambda leaf: distribute_tensor(leaf, spread_over, [Shard(0)])) for tree in plain]
    opt = UNEVEN[name]

    got, _ = train(opt.update, opt.init(params), params, grads)

    expected, _ = train(opt.update, opt.init(plain[0]), plain[0], plain[1:])
    assert_trees_equal(got.apply(lambda leaf: leaf.full_tensor()), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEVEN)
def test_parts_of_unequal_lengths(name, tmp_path):
    """FSDP2 shards dimensions that its ranks do not divide."""
    run_ranks(_train_uneven, 2, tmp_path, name)


def _train_by_sums(rank, name):
    spread_over = init_device_mesh("cpu", (2,))
    make, _, options = RULES[name]
    opt = make(**options)
    plain = [TensorDict({"table": torch.full((4, 3), x), "number": torch.tensor(x)}) for x in (1.0, 0.5, -2.0)]
    params = plain[0].apply(lambda leaf: distribute_tensor(leaf, spread_over, [Replicate()]))
    share = (0.25, 0.75)[rank]
    grads = [tree.apply(lambda leaf: DTensor.from_local(share * leaf, spread_over, [Partial()])) for tree in plain[1:]]

    got, _ = train(opt.update, opt.init(params), params, grads)

    expected, _ = train(opt.update, opt.init(plain[0]), plain[0], plain[1:])
    assert_trees_equal(got.apply(lambda leaf: leaf.full_tensor()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adagrad", "nadam", "adafactor"])
def test_gradients_that_ranks_have_parts_of(name, tmp_path):
    """A batch that is sharded gives each rank a part of the sum."""
    run_ranks(_train_by_sums, 2, tmp_path, name)


BY_SUMS = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": adafactor(0.1),
    "accumulate": accumulate(sgd(0.1), 2),
    "chain": chain(clip_by_global_norm(0.1), adaptive_grad_clip(0.1), sgd(0.1)),
}


@pytest.mark.parametrize("place", [Replicate(), Shard(0)], ids=["replicated", "sharded"])
@pytest.mark.parametrize("opt", BY_SUMS.values(), ids=BY_SUMS)
def test_parameters_keep_their_placements(opt, place, mesh, generator):
    """A step by gradients that are parts of a sum does not make parameters and state such sums."""
    params = TensorDict({"x": distribute_tensor(torch.randn(3, 2, generator=generator), mesh, [place])})
    grads = params.apply(lambda leaf: DTensor.from_local(torch.ones(3, 2), mesh, [Partial()]))

    trained, state = train(opt.update, opt.init(params), params, [grads] * 3)

    spread_leaves = [leaf for tree in (trained, state) for leaf in tree.leaves() if isinstance(leaf, DTensor)]
    assert [leaf for leaf in spread_leaves if leaf.placements[0].is_partial()] == []
    assert trained["x"].placements == (place,)


def _train_few_rows(rank, name):
    few = TensorDict({"x": distribute_tensor(torch.ones(1, 3), init_device_mesh("cpu", (2,)), [Shard(0)])})
    make, _, options = RULES[name]
    opt = make(**options)

    trained, _ = train(opt.update, opt.init(few), few, [few] * 2)

    assert trained["x"].placements == (Shard(0),)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_rows_that_are_fewer_than_ranks_stay_sharded(name, tmp_path):
    """A product of matrices is then whole on each rank."""
    run_ranks(_train_few_rows, 2, tmp_path, name)


@pytest.mark.parametrize(
    "opt",
    [adamw(0.1), muon(0.1), ema(adamw(0.1), 0.9), accumulate(adamw(0.1), 1), lookahead(adamw(0.1), 2)],
    ids=["adamw", "muon", "ema", "accumulate", "lookahead"],
)
def test_parameters_after_a_step_are_leaves_of_autograd(opt, mesh, generator):
    """Parameters that require grad, as FSDP2 has them, keep no graph of their training."""
    tree = TensorDict({"x": distribute_tensor(torch.randn(3, 2, generator=generator), mesh, [Shard(0)])})
    params = tree.apply(lambda leaf: torch.nn.Parameter(leaf))

    trained, state = train(opt.update, opt.init(params), params, [tree] * 3)

    assert trained["x"].requires_grad
    assert all(leaf.grad_fn is None for tree in (trained, state) for leaf in tree.leaves())
