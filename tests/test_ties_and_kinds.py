"""Functions that return a tree shaped as their argument return its ties and kinds, and the result is saved."""

import copy
import pickle

import optree
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc import averaging, optim
from tdfunc.core.collection import TensorCollection
from tdfunc.storage.tree.encode import restrict
from tests.optim.table import RULES, WRAPPERS, make_optimizer

MEMBERS = 2


class Block(nn.Module):
    """A tie inside of one sub-tree."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.twin = self.weight
        self.bias = nn.Parameter(torch.randn(4, 1))


class Tied(nn.Module):
    """Ties inside of a sub-tree and across sub-trees, and a leaf of every kind."""

    def __init__(self):
        super().__init__()
        self.one, self.block = nn.Embedding(5, 4), Block()
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.one.weight
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("rate", torch.rand(3), persistent=False)

    def forward(self, ids):
        hidden = self.one(ids) @ self.block.weight @ self.block.twin + self.block.bias.flatten() + self.mean
        return self.out(hidden)


@pytest.fixture
def whole():
    """All leaves of two models, stacked."""
    return tdf.stack_modules([Tied() for _ in range(MEMBERS)])


@pytest.fixture
def params(whole):
    """The parameters of two models, stacked."""
    return tdf.split(whole)[0]


def marks(tree):
    """Return the groups of tied paths, and the kind of each leaf."""
    return set(map(frozenset, tree._ties)), {path: tree.kind(path) for path in tree.paths()}


def broken_ties(tree):
    """Return the nodes whose groups differ from those around them, and the tied paths that hold another tensor."""
    found = [path for group in tree._ties for path in group if tree.get(path) is not tree.get(group[0])]
    inside = restrict(tree._ties)
    for key, node in tree._data.items():
        if isinstance(node, TensorCollection):
            if set(map(frozenset, inside.get(key, ()))) != set(map(frozenset, node._ties)):
                found.append((key,))
            found += [(key, *path) for path in broken_ties(node)]
    return found


def test_a_broken_tie_is_found(whole):
    """The check fails on a state made without the ties of its parts."""
    state = tdf.TensorDict._make({"average": whole}, whole.batch_size)

    assert broken_ties(state) == [("average",)]


def saved(tree, folder):
    """Return the tree after a round trip through one file."""
    tdf.save(tree, folder / "tree.safetensors")
    return tdf.load(folder / "tree.safetensors")


def managed(tree, folder):
    """Return the tree after a round trip through a manager, beside another entry."""
    manager = tdf.CheckpointManager(folder)
    manager.save(1, {"tree": tree, "epoch": 3})
    return manager.load()["tree"]


def mapped(tree, folder):
    """Return the tree after a round trip through a memmap folder."""
    tree.memmap(folder / "map")
    return tdf.TensorDict.load_memmap(folder / "map")


def sharded(tree, folder):
    """Return the tree after a round trip through several files."""
    tdf.save(tree, folder / "shards", max_shard_size=100)
    return tdf.load(folder / "shards")


def loss(tree):
    """Return a number whose gradient reads every leaf."""
    return sum(leaf.square().sum() for leaf in tree.leaves())


def sampled(tree):
    """Return models sampled by SWAG."""
    swag = averaging.SWAG(2)
    state = swag.update(tree, swag.update(tree, swag.init(tree)))
    return swag.sample(state, MEMBERS, key=0)[0]


def snapshot(tree):
    """Return the last models of a run."""
    snapshots = averaging.Snapshots(1)
    return snapshots.stack(snapshots.update(tree, snapshots.init(tree)))


def lazily(tree):
    """Return the members as a stack of trees."""
    return tdf.lazy_stack([tree[0], tree[1]])


def merged(method, tree, **options):
    """Return the models merged by a method, twice, as a stack."""
    return torch.stack([method(tree[0], tree, [0.5, 0.5], **options)] * MEMBERS)


def adapted(tree):
    """Return one model with new adapters merged."""
    lora = tdf.lora.Lora("one.weight", rank=1)
    return lora.merge(tree, lora.init(tree, key=0))


NO, YES = torch.tensor([False, True]), torch.tensor(True)
SAME = {
    "apply": lambda t: t.apply(torch.neg),
    "named_apply": lambda t: t.named_apply(lambda name, x: x + 1),
    "map": lambda t: t.map(lambda x: x, 0, num_workers=0, chunksize=1),
    "arithmetic": lambda t: (2.0 - t) * t + t**2,
    "comparison": lambda t: t == t,
    "reduction": lambda t: t.sum(0, keepdim=True).expand(MEMBERS),
    "softmax": lambda t: t.softmax(-1),
    "clone": lambda t: t.clone(),
    "to": lambda t: t.to(torch.float64),
    "zeros_like": torch.zeros_like,
    "rand_like": torch.rand_like,
    "full_like": lambda t: torch.full_like(t, 2.0),
    "new_zeros": lambda t: t.new_zeros([MEMBERS]),
    "eval_shape": lambda t: tdf.eval_shape(lambda tree: tree, t),
    "at a row": lambda t: t.at[0].set(t[1]),
    "at a path": lambda t: t.at["one", "weight"].apply(torch.neg),
    "set": lambda t: t.set(("out", "weight"), torch.zeros(MEMBERS, 5, 4), kind=tdf.Kind.PARAMETER),
    "update": lambda t: t.update(t.apply(torch.neg)),
    "where": lambda t: torch.where(NO, t, torch.zeros_like(t)),
    "index": lambda t: t[torch.tensor([1, 0])],
    "reshape": lambda t: t.reshape(1, MEMBERS)[0],
    "stack": lambda t: torch.stack(t.unbind(0)),
    "cat": lambda t: torch.cat(t.split(1)),
    "gather": lambda t: t.gather(0, torch.tensor([0, 1])),
    "unstack": lambda t: torch.stack(tdf.unstack(t)),
    "flatten_keys": lambda t: t.flatten_keys("/").unflatten_keys("/"),
    "partition": lambda t: tdf.combine(*tdf.partition(t, "*one*")),
    "ravel": lambda t: (lambda vector, back: back(vector))(*tdf.ravel(t)),
    "state_dict": lambda t: t.new_zeros([MEMBERS]).load_state_dict(t.state_dict()),
    "dense": lambda t: lazily(t).dense(),
    "pad": lambda t: lazily(t).pad(0.0),
    "masks of pad": lambda t: lazily(t).pad(0.0, return_mask=True)[1],
    "nested": lambda t: lazily(t).nested(),
    "tree_map": lambda t: pytree.tree_map(torch.neg, t),
    "optree": lambda t: optree.tree_map(torch.neg, t),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "vmap": lambda t: torch.vmap(lambda tree: tree * 2.0)(t),
    "jvp": lambda t: torch.func.jvp(lambda tree: tree * 2.0, (t,), (t,))[1],
    "jit": lambda t: tdf.jit(lambda tree: tree * 2.0)(t),
    "cond": lambda t: tdf.cond(YES, lambda tree: tree * 2.0, lambda tree: tree + 0.0, (t,)),
    "scan": lambda t: tdf.scan(lambda tree, x: (tree * 2.0, x), t, torch.arange(3))[0],
    "elites": lambda t: tdf.sweep.elites(t, torch.tensor([0.0, 1.0]), MEMBERS),
    "keep_best": lambda t: tdf.sweep.keep_best(t, t, NO),
}
# These take real leaves only.
TRAINED = {
    "grad": torch.func.grad(loss),
    "tdf.grad": tdf.grad(loss),
    "vjp": lambda t: torch.func.vjp(lambda tree: tree * 2.0, t)[1](t)[0],
    "sam": optim.sam(tdf.grad(loss)),
    "clip_by_global_norm": optim.clip_by_global_norm(1.0),
    "adaptive_grad_clip": lambda t: optim.adaptive_grad_clip(0.1)(t, t),
    "SWAG": sampled,
    "Snapshots": snapshot,
    "linear": lambda t: merged(tdf.weights.linear, t),
    "ties": lambda t: merged(tdf.weights.ties, t, density=0.5),
    "dare_ties": lambda t: merged(tdf.weights.dare_ties, t, density=0.5, key=0),
    "lora.merge": lambda t: torch.stack([adapted(t[0])] * MEMBERS),
}


@pytest.mark.parametrize("call", SAME.values(), ids=SAME)
def test_a_function_keeps_ties_and_kinds(whole, call):
    """The result has the groups and kinds of the argument."""
    assert marks(call(whole)) == marks(whole)


@pytest.mark.parametrize("call", SAME.values(), ids=SAME)
def test_a_function_ties_what_it_returns(whole, call):
    """One tensor is at all paths of a group, and each node has the groups inside it."""
    assert broken_ties(call(whole)) == []


@pytest.mark.parametrize("call", TRAINED.values(), ids=TRAINED)
def test_a_function_of_parameters_keeps_ties_and_kinds(params, call):
    """The result has the groups and kinds of the argument."""
    assert marks(call(params)) == marks(params)


@pytest.mark.parametrize("call", TRAINED.values(), ids=TRAINED)
def test_a_function_of_parameters_ties_what_it_returns(params, call):
    """One tensor is at all paths of a group, and each node has the groups inside it."""
    assert broken_ties(call(params)) == []


@pytest.mark.parametrize("way", [saved, managed, mapped, sharded])
def test_a_file_keeps_ties_and_kinds(whole, way, tmp_path):
    """A tree comes back with its groups and kinds."""
    assert marks(way(whole, tmp_path)) == marks(whole)


def test_padding_keeps_the_ties_of_all_trees(whole):
    """Paths are tied in a padded stack if they are tied in each tree."""
    padded = tdf.lazy_stack([whole[0], whole[1].untie(("out", "weight"))]).pad(0.0)

    assert padded._ties == ((("block", "weight"), ("block", "twin")),)


AVERAGES = {"SWA": averaging.SWA(), "SWAG": averaging.SWAG(2), "Snapshots": averaging.Snapshots(2)}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_keeps_the_ties_of_the_parameters(params, name):
    """Each part of the state is tied as the parameters are."""
    state = AVERAGES[name].update(params, AVERAGES[name].init(params))

    assert broken_ties(state) == []


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_saved_and_continued(params, name, tmp_path):
    """A state from a file is updated as the state in memory."""
    average = AVERAGES[name]
    state = average.update(params, average.init(params))

    assert tdf.tree_equal(average.update(params, managed(state, tmp_path)), average.update(params, state))


GROUPS = {"out.weight": optim.ema(optim.sgd(0.1), 0.5), "*": optim.masked(optim.lookahead(optim.adam(0.1), 2), "*twin")}


def make(name):
    """Return an optimizer of the table; `parts` with groups of these parameters."""
    return optim.multi(GROUPS) if name == "parts" else make_optimizer(name)


def trained(params, opt):
    """Return the parameters, state and gradient after two steps."""
    grads = params.apply(torch.sin)
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.update(params, grads, state)
    return params, state, grads


@pytest.mark.parametrize("name", [*RULES, *WRAPPERS])
def test_the_state_of_an_optimizer_is_tied(params, name):
    """Each part of the state like the parameters is tied as they are, before a step and after it."""
    opt = make(name)
    _, state, _ = trained(params, opt)

    assert broken_ties(opt.init(params)) + broken_ties(state) == []


@pytest.mark.parametrize("name", [*RULES, *WRAPPERS])
def test_an_optimizer_keeps_the_marks_of_the_parameters(params, name):
    """The trained parameters, and those to evaluate, have the groups and kinds of the given ones."""
    opt = make(name)
    new, state, _ = trained(params, opt)

    assert [marks(new), marks(opt.eval_params(new, state))] == [marks(params)] * 2


@pytest.mark.parametrize("name", [*RULES, *WRAPPERS])
def test_a_run_of_tied_weights_resumes_bit_for_bit(params, name, tmp_path):
    """Parameters and state from a manager go on as those in memory."""
    opt = make(name)
    new, state, grads = trained(params, opt)
    manager = tdf.CheckpointManager(tmp_path)
    manager.save(1, {"params": new, "opt": state})
    back = manager.load(like={"params": new, "opt": state})

    assert all(map(tdf.tree_equal, opt.update(back["params"], grads, back["opt"]), opt.update(new, grads, state)))


def test_the_buffers_that_a_model_returns_keep_their_kinds(whole):
    """`with_buffers` returns the buffers as they were marked."""
    apply, params, buffers = tdf.functional(Tied())
    _, new = apply.with_buffers(params, buffers, torch.tensor([1, 2]))

    assert marks(new) == marks(buffers)


class Three(nn.Module):
    """Three matrices of one shape, two of which are one leaf."""

    def __init__(self, names, tied):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3, bias=False))
        first, second = tied
        getattr(self, second).weight = getattr(self, first).weight


def three(names="abc", tied="ab"):
    """Return two stacked models."""
    return tdf.split(tdf.stack_modules([Three(names, tied) for _ in range(MEMBERS)]))[0]


def averaged(average, one, other):
    """Return the state of an average that took one model, and then the other."""
    return average.update(other, average.update(one, average.init(one)))


def continued(wrapper, one, other):
    """Return the parameters of the other model after a step with the state of the first."""
    optimizer = wrapper(optim.sgd(lr=0.1))
    return optimizer.update(other, other, optimizer.init(one))


def evaluated(wrapper, one, other):
    """Return the parameters to evaluate of the other model, with the state of the first."""
    optimizer = wrapper(optim.sgd(lr=0.1))
    return optimizer.eval_params(other, optimizer.init(one))


HOLDERS = {
    "ema": lambda inner: optim.ema(inner, 0.9),
    "lookahead": optim.lookahead,
    "schedule_free": optim.schedule_free,
}
# Functions of two trees, whose leaves belong together.
TWO = {
    "add": lambda one, other: one + other,
    "where": lambda one, other: torch.where(NO, one, other),
    "stack": lambda one, other: torch.stack([one, other]),
    "distance": tdf.weights.distance,
    "cosine": tdf.weights.cosine,
    "linear": lambda one, other: tdf.weights.linear(one[0], other, [0.5, 0.5]),
    "task_arithmetic": lambda one, other: tdf.weights.task_arithmetic(one[0], other, [1.0, 1.0]),
    "SWA": lambda one, other: averaged(averaging.SWA(), one, other)["mean"],
    "SWAG": lambda one, other: averaged(averaging.SWAG(2), one, other)["deviations"],
    "Snapshots": lambda one, other: averaged(averaging.Snapshots(2), one, other)["members"],
}
STATES = {f"{name}.update": lambda a, b, w=wrapper: continued(w, a, b) for name, wrapper in HOLDERS.items()}
STATES |= {f"{name}.eval_params": lambda a, b, w=wrapper: evaluated(w, a, b) for name, wrapper in HOLDERS.items()}
STATES["accumulate.update"] = lambda a, b: continued(lambda inner: optim.accumulate(inner, 2), a, b)


@pytest.mark.parametrize("call", (TWO | STATES).values(), ids=TWO | STATES)
@pytest.mark.parametrize("tied", ["bc", "ac"])
def test_trees_that_tie_other_leaves_are_not_paired_by_number(call, tied):
    """Lists of leaves of one length, whose leaves have one shape, are not lists of the same leaves."""
    with pytest.raises((tdf.TieError, tdf.TreeStructureError), match="tie"):
        call(three(), three(tied=tied))


@pytest.mark.parametrize("call", TWO.values(), ids=TWO)
def test_groups_in_another_order_are_the_same_groups(call):
    """Trees of modules whose parts were registered in another order are paired by path."""
    one, other = three("abc", "ac"), three("cba", "ca")
    apart = [tree.untie(("a", "weight")) for tree in (one, other)]
    tied = call(one, other)
    if not isinstance(tied, torch.Tensor):
        torch.testing.assert_close(tied.untie(("a", "weight")).to_dict(), call(*apart).to_dict())
        return
    # Of a tied leaf each number counts once.
    alone = [tree.exclude("c") for tree in apart]
    torch.testing.assert_close(tied, call(*alone))
