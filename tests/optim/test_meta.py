"""Derivatives through steps by `backward()`: those of `torch.func.grad` through the same steps."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict
from tests.optim.table import each_optimizer, each_rule, make_optimizer, random_tree

STEPS = 3


def inner_loss(params, data):
    """Return the loss that is trained."""
    return sum((leaf * x).sin().sum() for leaf, x in zip(params.leaves(), data.leaves(), strict=True))


def outer_loss(opt, params, state):
    """Return the loss of the trained parameters and of those that are evaluated."""
    both = [params, opt.eval_params(params, state)]
    return sum((leaf.double() ** 3).sum() for tree in both for leaf in tree.leaves())


def by_backward(opt, start, data):
    """Return the derivative by parameters that are results of others."""
    leaves = start.apply(lambda leaf: leaf.clone().requires_grad_())
    params = leaves.apply(lambda leaf: leaf * 1.0)
    state = opt.init(params)
    for _ in range(STEPS):
        grads = torch.autograd.grad(inner_loss(params, data), params.leaves(), create_graph=True)
        params, state = opt.update(params, rebuilt(params, grads), state)
    outer_loss(opt, params, state).backward()
    return leaves.apply(lambda leaf: leaf.grad)


def rebuilt(tree, leaves):
    """Return a tree around other leaves."""
    given = iter(leaves)
    return tree.apply(lambda _: next(given))


def by_transform(opt, start, data):
    """Return the derivative that torch.func takes."""

    def outer(params):
        state = opt.init(params)
        for _ in range(STEPS):
            params, state = opt.update(params, torch.func.grad(inner_loss)(params, data), state)
        return outer_loss(opt, params, state)

    return torch.func.grad(outer)(start)


def make_trees(name, generator):
    """Return parameters and data in float64."""
    return [random_tree(generator, torch.float64, name=name) for _ in range(2)]


@each_optimizer
def test_meta_gradients_reach_the_first_parameters(name, generator):
    """`backward()` through steps by gradients with a graph is the derivative of torch.func, for each optimizer."""
    start, data = make_trees(name, generator)
    opt = make_optimizer(name)

    found, expected = by_backward(opt, start, data), by_transform(opt, start, data)

    torch.testing.assert_close(found.leaves(), expected.leaves(), rtol=1e-7, atol=1e-9)


@each_rule
def test_meta_gradients_reach_parameters_that_are_leaves(name, generator):
    """A parameter that is a leaf of autograd gets its derivative too."""
    start, data = make_trees(name, generator)
    opt = make_optimizer(name)
    params = start.apply(lambda leaf: leaf.clone().requires_grad_())
    leaves, state = params.leaves(), opt.init(params)
    for _ in range(STEPS):
        grads = torch.autograd.grad(inner_loss(params, data), params.leaves(), create_graph=True)
        params, state = opt.update(params, rebuilt(params, grads), state)
    outer_loss(opt, params, state).backward()

    expected = list(by_transform(opt, start, data).leaves())
    torch.testing.assert_close([leaf.grad for leaf in leaves], expected, rtol=1e-7, atol=1e-9)


def make_tasks(generator):
    """Return inputs and targets of some tasks, to adapt to and to test on."""
    draw = lambda *shape: torch.randn(4, 6, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return TensorDict({"x": draw(3), "y": draw(1), "x2": draw(3), "y2": draw(1)}, [4])


def error(weight, bias, x, y):
    """Return the loss of a linear model."""
    return (torch.tanh(x @ weight) + bias - y).square().mean()


def maml_by_hand(weight, bias, tasks, rate, momentum):
    """Return the outer loss: steps of momentum written out, as `higher` takes them."""
    total = 0.0
    for task in tasks:
        now = [weight, bias]
        moved = [0.0, 0.0]
        for _ in range(STEPS):
            slopes = torch.autograd.grad(error(*now, task["x"], task["y"]), now, create_graph=True)
            moved = [momentum * old + slope for old, slope in zip(moved, slopes, strict=True)]
            now = [leaf - rate * step for leaf, step in zip(now, moved, strict=True)]
        total = total + error(*now, task["x2"], task["y2"])
    return total


def maml(params, tasks, opt):
    """Return the same by an optimizer, and gradients of `tdf.grad`."""

    def loss(params, x, y):
        return error(params["weight"], params["bias"], x, y)

    def adapted(params, task):
        state = opt.init(params)
        for _ in range(STEPS):
            params, state = opt.update(params, tdf.grad(loss)(params, task["x"], task["y"]), state)
        return loss(params, task["x2"], task["y2"])

    return sum(adapted(params, task) for task in tasks)


@pytest.mark.parametrize("leaf", [torch.nn.Parameter, lambda x: x.requires_grad_()], ids=["Parameters", "tensors"])
def test_maml_by_backward_is_that_by_hand(leaf, generator):
    """`loss.backward()` gives the first parameters the gradients of the steps written out in plain torch."""
    tasks = make_tasks(generator)
    start = [torch.randn(3, 1, generator=generator, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    weight, bias = [leaf(x.clone()) for x in start]
    maml(TensorDict({"weight": weight, "bias": bias}), tasks, tdf.optim.sgd(0.1, momentum=0.9)).backward()

    expected = [x.clone().requires_grad_() for x in start]
    maml_by_hand(*expected, tasks, 0.1, 0.9).backward()
    torch.testing.assert_close([weight.grad, bias.grad], [x.grad for x in expected], rtol=1e-10, atol=1e-12)


def test_a_learned_rate_of_maml_is_that_by_hand(generator):
    """The rate of the inner steps is trained with the parameters."""
    tasks = make_tasks(generator)
    start = [torch.randn(3, 1, generator=generator, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    maml(TensorDict(dict(zip(("weight", "bias"), start, strict=True))), tasks, tdf.optim.sgd(rate, 0.9)).backward()

    other = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    maml_by_hand(*[x.requires_grad_() for x in start], tasks, other, 0.9).backward()
    torch.testing.assert_close(rate.grad, other.grad, rtol=1e-10, atol=1e-12)


@each_optimizer
def test_training_by_backward_keeps_no_graph(name, generator):
    """Gradients without a graph, of parameters that require grad, leave leaves: memory does not grow with the steps."""
    start, data = make_trees(name, generator)
    opt = make_optimizer(name)
    params = start.apply(lambda leaf: leaf.clone().requires_grad_())
    state = opt.init(params)
    for _ in range(STEPS):
        grads = torch.autograd.grad(inner_loss(params, data), params.leaves())
        params, state = opt.update(params, rebuilt(params, grads), state)

    kept = [leaf for tree in (params, state) for leaf in tree.leaves() if leaf.grad_fn is not None]
    assert kept == []
    assert all(leaf.requires_grad for leaf in params.leaves())


MAPS = {
    "adaptive_grad_clip": tdf.optim.adaptive_grad_clip(0.01),
    "add_decayed_weights": tdf.optim.add_decayed_weights(0.1),
    "clip_by_global_norm": tdf.optim.clip_by_global_norm(0.1),
    "clip_by_member_norm": tdf.optim.clip_by_member_norm(0.1),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("carries", [False, True])
def test_maps_of_gradients_follow_as_steps_do(name, carries, generator):
    """A map that reads parameters makes a graph only for gradients that carry one."""
    start, data = make_trees("sgd", generator)
    opt = tdf.optim.chain(MAPS[name], tdf.optim.sgd(0.1))
    params = start.apply(lambda leaf: leaf.clone().requires_grad_())
    grads = torch.autograd.grad(inner_loss(params, data), params.leaves(), create_graph=carries)

    new, _ = opt.update(params, rebuilt(params, grads), opt.init(params))

    assert [leaf.grad_fn is not None for leaf in new.leaves()] == [carries] * 4


def test_no_grad_cuts_the_graph(generator):
    """Under `torch.no_grad()` a step is not followed, whatever its gradients carry."""
    start, data = make_trees("sgd", generator)
    opt = tdf.optim.adam(0.1)
    params = start.apply(lambda leaf: leaf.clone().requires_grad_())
    grads = torch.autograd.grad(inner_loss(params, data), params.leaves(), create_graph=True)

    with torch.no_grad():
        new, _ = opt.update(params, rebuilt(params, grads), opt.init(params))

    assert [leaf.grad_fn for leaf in new.leaves()] == [None] * 4


@pytest.mark.parametrize("name", ["multi", "masked"])
def test_a_part_without_a_graph_is_followed_with_the_others(name):
    """A leaf whose gradient carries no graph keeps the derivative by itself where other leaves are followed."""
    sgd = tdf.optim.sgd(0.5)
    opt = {"multi": tdf.optim.multi({"a": sgd, "*": sgd}), "masked": tdf.optim.masked(sgd, "*")}[name]
    a, b = [torch.tensor([2.0], requires_grad=True) for _ in range(2)]
    params = TensorDict({"a": a, "b": b})
    (grad,) = torch.autograd.grad((a**2).sum(), a, create_graph=True)

    new, _ = opt.update(params, TensorDict({"a": grad, "b": torch.ones(1)}), opt.init(params))
    (new["a"] + 3 * new["b"]).sum().backward()

    assert a.grad.item() == 0.0
    assert b.grad.item() == 3.0


LOOPS = {
    "adam": tdf.optim.adam(1e-3),
    "sgd": tdf.optim.sgd(1e-3),
    "around": tdf.optim.accumulate(tdf.optim.ema(tdf.optim.adamw(1e-3), 0.9), 1),
    "masters": tdf.optim.masters(tdf.optim.adamw(1e-3)),
    "part": tdf.optim.masked(tdf.optim.adamw(1e-3), "bias"),
}


def train_module(opt, params, steps):
    """Train by gradients of torch.func, which carry a graph where parameters require grad."""
    state = opt.init(params)
    for _ in range(steps):
        grads = torch.func.grad(lambda tree: sum(leaf.square().sum() for leaf in tree.leaves()))(params)
        params, state = opt.update(params, grads, state)
    return params


@pytest.mark.parametrize("opt", LOOPS.values(), ids=LOOPS)
def test_a_loop_that_keeps_its_graph_warns(opt):
    """A loop over the live Parameters of a module keeps the graph of all its steps."""
    with pytest.warns(UserWarning, match="keeps the graph of 100 steps"):
        train_module(opt, tdf.from_module(torch.nn.Linear(2, 1)), 101)


def test_a_loop_of_detached_parameters_keeps_no_graph():
    """As the warning says: it is not raised, and the parameters have no graph."""
    trained = train_module(LOOPS["adam"], tdf.from_module(torch.nn.Linear(2, 1)).detach(), 101)
    assert all(leaf.grad_fn is None for leaf in trained.leaves())


def test_parameters_that_are_detached_between_steps_do_not_warn():
    """The steps are counted from the last parameters without a graph."""
    params = tdf.from_module(torch.nn.Linear(2, 1))
    for _ in range(3):
        params = train_module(LOOPS["sgd"], params, 60).detach().apply(lambda leaf: leaf.requires_grad_())
    assert params["weight"].requires_grad
