"""Clipping, chains and masks."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from tdfunc import Filter, TensorDict, stack_modules
from tdfunc._jit import jit
from tdfunc.optim import adam, chain, check_finite, clip_by_global_norm, clip_by_member_norm, masked, sgd
from tests.helpers import TiedLM, assert_pure, assert_trees_equal


def make_tree(generator, batch=(3,)):
    """Return a random tree of two leaves."""
    return TensorDict(
        {"a": {"w": torch.randn(*batch, 4, 2, generator=generator)}, "b": torch.randn(*batch, 5, generator=generator)},
        batch,
    )


def clip_by_torch(tree, max_norm):
    """Return the two leaves after torch's own clipping."""
    leaves = [nn.Parameter(tree["a", "w"]), nn.Parameter(tree["b"])]
    for leaf in leaves:
        leaf.grad = leaf.detach().clone()
    nn.utils.clip_grad_norm_(leaves, max_norm)
    return leaves[0].grad, leaves[1].grad


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_global_norm_equals_torch(max_norm, generator):
    """Gradients would be scaled by another norm than torch's clip_grad_norm_."""
    grads = make_tree(generator)

    clipped = assert_pure(clip_by_global_norm(max_norm), grads)

    w, b = clip_by_torch(grads, max_norm)
    torch.testing.assert_close(clipped["a", "w"], w)
    torch.testing.assert_close(clipped["b"], b)


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_member_norm_equals_the_loop(wrap, generator):
    """One member's large gradient would shrink those of the others."""
    grads = make_tree(generator)
    grads = grads.set("b", grads["b"] * torch.tensor([[0.01], [1.0], [1000.0]]))

    clipped = wrap(clip_by_member_norm(1.0))(grads)

    for i in range(3):
        w, b = clip_by_torch(grads[i], 1.0)
        torch.testing.assert_close(clipped["a", "w"][i], w)
        torch.testing.assert_close(clipped["b"][i], b)
    assert_trees_equal(torch.vmap(clip_by_global_norm(1.0))(grads), clipped, rtol=1e-6, atol=1e-6)


def test_member_norm_of_leaves_without_dimensions():
    """A leaf without dimensions is one element, in the tree of one model and inside vmap."""
    grads = TensorDict({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "temperature": torch.zeros(2)}, [2])
    clip = clip_by_member_norm(1.0)

    assert_trees_equal(torch.vmap(clip)(grads), clip(grads))
    assert_trees_equal(clip(grads[0]), clip(grads)[0])


def test_chain_maps_then_steps(generator):
    """A chain would step with the raw gradients, or keep its state elsewhere."""
    params, grads = make_tree(generator), make_tree(generator)
    opt = chain(clip_by_member_norm(0.1), clip_by_global_norm(1.0), sgd(lr=1.0))

    moved, state = opt.update(params, grads, opt.init(params))

    expected = params["b"] - clip_by_global_norm(1.0)(clip_by_member_norm(0.1)(grads))["b"]
    torch.testing.assert_close(moved["b"], expected)
    assert list(state.keys()) == ["step"]


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_masked_leaves_the_rest(wrap, generator):
    """Leaves outside the mask would move, or need gradients, or change their order."""
    params, grads = make_tree(generator), make_tree(generator)
    opt = masked(adam(lr=0.1), "a.*")
    state = opt.init(params)

    moved, state = wrap(opt.update)(params, grads.delete("b"), state)

    plain = adam(lr=0.1)
    alone, _ = plain.update(params.select("a"), grads.select("a"), plain.init(params.select("a")))
    assert_trees_equal(moved, params.set("a", alone["a"]))
    assert list(state["exp_avg"].keys()) == ["a"]
    assert torch.equal(moved["b"], params["b"])


TIED_WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, jit, torch.vmap], ids=["eager", "jit", "vmap"])


@TIED_WRAPS
@pytest.mark.parametrize(
    ("where", "moved"),
    [
        ("emb*", ("emb.weight", "out.weight")),
        ("out*", ("emb.weight", "out.weight")),
        ("*weight", ("emb.weight", "out.weight", "norm.weight")),
        ("*", ("emb.weight", "out.weight", "norm.weight", "norm.bias")),
        ("norm*", ("norm.weight", "norm.bias")),
        (~Filter("out*"), ("norm.weight", "norm.bias")),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", [sgd, adam])
def test_masked_ties(rule, where, moved, wrap):
    """A model whose head is its embedding could not be trained in part, or the two would come apart."""
    params = stack_modules([TiedLM() for _ in range(3)])
    grads = params.apply(lambda leaf: torch.full_like(leaf, 2.0))
    opt, plain = masked(rule(lr=0.5), where), rule(lr=0.5)

    new, state = wrap(opt.update)(params, grads, opt.init(params))

    full, _ = plain.update(params, grads, plain.init(params))
    for path in (("emb", "weight"), ("out", "weight"), ("norm", "weight"), ("norm", "bias")):
        torch.testing.assert_close(new[path], (full if ".".join(path) in moved else params)[path])
    assert new["emb", "weight"] is new["out", "weight"]
    again, _ = wrap(opt.update)(new, grads, state)
    assert again["emb", "weight"] is again["out", "weight"]


@pytest.mark.parametrize("make", [clip_by_global_norm, clip_by_member_norm])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_in_half_precision(make, dtype):
    """A norm above 65504 would be infinite, and all gradients come out as zeros."""
    grads = TensorDict({"a": torch.full((1, 64), 3e4), "b": torch.full((1,), 3e4)}, [1])

    clipped = make(1.0)(grads.to(dtype))

    assert clipped["a"].dtype is dtype
    assert_trees_equal(clipped.float(), make(1.0)(grads), rtol=1e-2, atol=1e-3)
    assert clipped["a"].min() > 0.1


@pytest.mark.parametrize("make", [clip_by_global_norm, clip_by_member_norm])
def test_norms_of_nothing(make):
    """A part of a tree without leaves, or a leaf without elements, would raise torch's words about lists of tensors."""
    nothing, hollow = TensorDict({"a": {}}, [3]), TensorDict({"a": torch.zeros(3, 0), "b": torch.ones(3)}, [3])

    assert_trees_equal(make(1.0)(nothing), nothing)
    assert make(1.0)(hollow)["a"].shape == (3, 0)
    assert make(9.0)(hollow)["b"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("make", [clip_by_global_norm, clip_by_member_norm])
@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_an_infinite_norm_clips_nothing(make, wrap, generator):
    """A sweep over norms could not end with none, or gradients that overflowed would turn to nan."""
    grads = make_tree(generator)
    huge = grads.set("b", torch.full((3, 5), torch.inf))

    assert_trees_equal(wrap(make(torch.inf))(grads), grads)
    assert_trees_equal(wrap(make(torch.inf))(huge), huge)


def halved(step):
    """A schedule that a pickle can name."""
    return 0.5**step


OPTIMIZERS = {
    "sgd": lambda: sgd(lr=halved),
    "momentum": lambda: sgd(lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda: adam(lr=torch.tensor([0.1, 0.2, 0.3]), amsgrad=True),
    "chain": lambda: chain(check_finite(), clip_by_global_norm(1.0), clip_by_member_norm(torch.inf), adam(0.1)),
    "masked": lambda: masked(chain(clip_by_member_norm(0.5), sgd(0.1)), "a*"),
    "filter": lambda: masked(sgd(0.1), (Filter(re.compile("a.*")) | torch.float64) & ~Filter("b")),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("send", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_optimizers_travel(name, send, generator):
    """An optimizer could not be sent to another process, or what arrives would train other weights."""
    params, grads, opt = make_tree(generator), make_tree(generator), OPTIMIZERS[name]()
    state = opt.init(params)

    sent = send(opt)

    assert repr(sent) == repr(opt)
    for got, expected in zip(sent.update(params, grads, state), opt.update(params, grads, state), strict=True):
        assert_trees_equal(got, expected)
