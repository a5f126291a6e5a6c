"""Clipping, chains and masks."""

import copy
import pickle
import re
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import Filter, TensorDict, stack_modules
from tdfunc._jit import jit
from tdfunc.optim import adam, chain, check_finite, clip_by_global_norm, clip_by_member_norm, masked, sgd
from tests.helpers import TiedLM, assert_pure, assert_trees_equal
from tests.strategies import trees


def make_tree(generator, batch=(3,)):
    """Return a random tree of two leaves."""
    return TensorDict(
        {"a": {"w": torch.randn(*batch, 4, 2, generator=generator)}, "b": torch.randn(*batch, 5, generator=generator)},
        batch,
    )


@given(trees(dtypes=st.sampled_from([torch.float32, torch.float64])), st.sampled_from([0.0, 0.5, 3.0, 1000.0]))
def test_global_norm_equals_torch(grads, max_norm):
    """Gradients are scaled as by torch's clip_grad_norm_, whatever the tree."""
    parameters = grads.apply(lambda x: nn.Parameter(torch.zeros_like(x)))
    for leaf, grad in zip(parameters.leaves(), grads.leaves(), strict=True):
        leaf.grad = grad.clone()
    nn.utils.clip_grad_norm_(parameters.leaves(), max_norm)

    clipped = assert_pure(clip_by_global_norm(max_norm), grads)

    for leaf, expected in zip(clipped.leaves(), parameters.leaves(), strict=True):
        torch.testing.assert_close(leaf, expected.grad)


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@given(
    grads=trees(dtypes=st.just(torch.float64)).filter(lambda t: t.ndim), max_norm=st.sampled_from([0.0, 0.5, 1000.0])
)
def test_member_norm_equals_the_loop(wrap, grads, max_norm):
    """Each member's gradients are clipped as if they were alone, in a loop and by vmap."""
    clip = clip_by_member_norm(max_norm)

    clipped = wrap(clip)(grads)

    for i in product(*map(range, grads.batch_size)):
        assert_trees_equal(clipped[i], clip_by_global_norm(max_norm)(grads[i]), rtol=1e-12)
    if grads.batch_size[0] and grads.leaves():
        unnamed = clipped.with_names([None] * clipped.ndim)
        assert_trees_equal(torch.vmap(clip)(grads), unnamed, rtol=1e-12)


def test_chain_maps_then_steps(generator):
    """A chain steps with mapped gradients; its state is that of its optimizer."""
    params, grads = make_tree(generator), make_tree(generator)
    opt = chain(clip_by_member_norm(0.1), clip_by_global_norm(1.0), sgd(lr=1.0))

    moved, state = opt.update(params, grads, opt.init(params))

    expected = params["b"] - clip_by_global_norm(1.0)(clip_by_member_norm(0.1)(grads))["b"]
    torch.testing.assert_close(moved["b"], expected)
    assert list(state.keys()) == ["step"]


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_masked_leaves_the_rest(wrap, generator):
    """Leaves outside the mask stay, need no gradients, and keep their order."""
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
    """A tied leaf is trained if any of its paths is chosen, and stays tied."""
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
    """Norms of 16-bit gradients may exceed the range of their dtype."""
    grads = TensorDict({"a": torch.full((1, 64), 3e4), "b": torch.full((1,), 3e4)}, [1])

    clipped = make(1.0)(grads.to(dtype))

    assert clipped["a"].dtype is dtype
    assert_trees_equal(clipped.float(), make(1.0)(grads), rtol=1e-2, atol=1e-3)
    assert clipped["a"].min() > 0.1


@pytest.mark.parametrize("make", [clip_by_global_norm, clip_by_member_norm])
@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_an_infinite_norm_clips_nothing(make, wrap, generator):
    """An infinite norm leaves all gradients as they are, infinite ones too."""
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
    """A copied or unpickled optimizer trains the same weights."""
    params, grads, opt = make_tree(generator), make_tree(generator), OPTIMIZERS[name]()
    state = opt.init(params)

    sent = send(opt)

    assert repr(sent) == repr(opt)
    for got, expected in zip(sent.update(params, grads, state), opt.update(params, grads, state), strict=True):
        assert_trees_equal(got, expected)
