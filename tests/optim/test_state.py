"""The state tree, hyperparameters in it, and members that stop."""

import numpy as np
import pytest
import torch

from tdfunc import TensorDict
from tdfunc._jit import jit
from tdfunc.optim import adam, chain, clip_by_global_norm, lookahead, sgd
from tests.helpers import TiedLM
from tests.optim.table import each_optimizer, make_optimizer, random_tree


def make_tree(fill=1.0, members=3):
    """Return a tree of one number."""
    return TensorDict({"a": {"w": torch.full((members, 2, 2), fill)}, "b": torch.full((members, 4), fill)}, [members])


@pytest.mark.parametrize("make", [torch.tensor, np.array, list, tuple])
def test_hyperparameters_live_in_the_state(make):
    """A learning rate in the state, from whatever it was made, changes without a new optimizer or trace."""
    opt = sgd(lr=make([0.1, 0.2, 0.3]))
    update = jit(opt.update)
    state = opt.init(make_tree())
    update(make_tree(), make_tree(), state)
    torch.testing.assert_close(state["lr"], torch.tensor([0.1, 0.2, 0.3]), check_dtype=False)

    params, _ = update(make_tree(), make_tree(), state.set("lr", torch.tensor([0.0, 0.5, 1.0]).to(state["lr"])))

    torch.testing.assert_close(params["b"][:, 0], torch.tensor([1.0, 0.5, 0.0]))
    assert update.cache_info().misses == 1


def test_shapes_of_hyperparameters():
    """A tensor of no dimensions is the value of all members; a tree without a batch size may have one for each."""
    opt = adam(lr=torch.tensor(0.1), weight_decay=torch.tensor([0.0, 0.1, 0.2]))
    params = TensorDict({"w": torch.ones(3, 2)})
    rates = sgd(lr=torch.tensor([0.0, 0.5, 1.0]))

    assert opt.init(make_tree())["lr"].shape == (3,)
    assert opt.update(make_tree(), make_tree(), opt.init(make_tree()))[1]["step"].tolist() == [1, 1, 1]
    assert rates.update(params, params, rates.init(params))[0]["w"][:, 0].tolist() == [1.0, 0.5, 0.0]


def test_tied_leaves_step_once():
    """A tied weight is stepped once and stays tied."""
    params = TensorDict.from_module(TiedLM()).detach()
    grads = params.apply(torch.ones_like)
    opt = adam(lr=0.1)

    moved, state = opt.update(params, grads, opt.init(params))

    assert moved["emb", "weight"] is moved["out", "weight"]
    torch.testing.assert_close(moved["emb", "weight"], params["emb", "weight"] - 0.1)
    assert len(torch.utils._pytree.tree_leaves(state["exp_avg"])) == len(torch.utils._pytree.tree_leaves(params))


@each_optimizer
def test_states_are_made_where_the_parameters_are(name, generator):
    """All tensors of a state are on the device of the parameters, and after a step."""
    opt, params = make_optimizer(name), random_tree(generator, name=name).to("meta")
    state = opt.init(params)

    trees = [state, *opt.update(params, params, state)]
    assert all(leaf.is_meta for leaf in torch.utils._pytree.tree_leaves(trees))


def test_optimizers_show_their_hyperparameters():
    """The repr of an optimizer shows its hyperparameters."""
    opt = adam(lr=lambda step: 0.1 / (step + 1), betas=(torch.tensor(0.5), torch.ones(3) / 2), weight_decay=1e-4)
    words = "adam(lr=<a function>, beta1=0.5, beta2=tensor of shape [3], eps=1e-08, weight_decay=0.0001)"

    assert repr(opt) == words
    assert repr(lookahead(sgd(0.1))) == "Lookahead(optimizer=sgd(lr=0.1, weight_decay=0), every=6, slow_step_size=0.5)"
    assert repr(chain(clip_by_global_norm(1.0), opt)) == f"Chain(maps=(clip_by_global_norm,), last={words})"
