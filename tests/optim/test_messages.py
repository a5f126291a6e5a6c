"""Errors of optimizers: each call, its class, and the parts of its message."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import optim
from tdfunc._jit import jit
from tests.helpers import TiedLM

RATES = torch.tensor([1.0, 2.0, 3.0])
ROWS = tdf.lazy_stack([tdf.TensorDict({"w": torch.zeros(3)}) for _ in range(3)])
NAN = float("nan")
GROUPS = optim.multi({"a*": optim.sgd(momentum=0.9), "*": optim.adam()})
FACTORED, RATED = optim.adafactor(beta2_decay=0.0), optim.sgd(lr=RATES)


def make_tree(members=3):
    """Return a tree of ones with two leaves."""
    return tdf.TensorDict({"a": {"w": torch.ones(members, 2, 2)}, "b": torch.ones(members, 4)}, [members])


def step(params=None, grads=None, state=None, opt=None, **options):
    """Do one Adam step with the given trees, and fitting ones for the rest."""
    opt = optim.adam() if opt is None else opt
    params = make_tree() if params is None else params
    grads = make_tree() if grads is None else grads
    return opt.update(params, grads, opt.init(params) if state is None else state, **options)


def schedule(value, params, wrap=lambda f: f):
    """Do one step with a schedule that gives a value."""
    opt = optim.adam(lr=lambda step: value)
    return wrap(opt.update)(params, params + 1, opt.init(params))


PLATEAU = optim.schedules.ReduceOnPlateau()
SPARSE = make_tree().apply(lambda x: x.to_sparse())
ONE, TIED = tdf.TensorDict({"w": torch.zeros(3)}), tdf.from_module(TiedLM()).detach()
MESSAGES = [
    # Hyperparameters.
    (lambda: optim.adam(lr=-1.0), ValueError, "adam: lr", "0.0 <= lr", "-1.0"),
    (lambda: optim.adam(lr=NAN), ValueError, "lr", "nan"),
    (lambda: optim.adam(lr=math.inf), ValueError, "lr", "inf"),
    (lambda: optim.adam(lr=[0.1, 0.2]).init(make_tree()), tdf.BatchSizeError, "lr", "[3]", "[2]"),
    (lambda: optim.adam(lr=np.array([0.1, -0.2])), ValueError, "adam: lr", "-0.2"),
    (lambda: optim.adam(lr="0.1"), TypeError, "lr is not a number"),
    (lambda: optim.adam(betas=(1.0, 0.9)), ValueError, "beta1", "< 1.0", "1.0"),
    (lambda: optim.adam(betas=(0.9, [0.5, 1.0])), ValueError, "beta2", "< 1.0", "1.0"),
    (lambda: optim.adamw(weight_decay=torch.tensor([0.1, -0.1])), ValueError, "adamw: weight_decay", "-0.1"),
    (lambda: optim.sgd(momentum=-0.1), ValueError, "momentum", "-0.1"),
    (lambda: optim.sgd(nesterov=True), ValueError, "nesterov", "momentum = 0.0"),
    (lambda: optim.sgd(nesterov=True, momentum=0.9, dampening=0.1), ValueError, "dampening = 0.1"),
    (lambda: optim.clip_by_global_norm(-1.0), ValueError, "max_norm", "-1.0"),
    (lambda: optim.clip_by_member_norm(-math.inf), ValueError, "max_norm", "-inf"),
    (lambda: optim.adam(lr=torch.ones(2)).init(ONE), tdf.LeafMismatchError, "lr", "'w'", "[2]", "[3]"),
    (lambda: optim.adam(lr=torch.ones(3, 1)).init(ONE), tdf.BatchSizeError, "[members]", "[3, 1]"),
    # Schedules.
    (lambda: schedule(RATES, tdf.TensorDict({"w": torch.zeros(3, 3)}, [3]), torch.vmap), tdf.BatchSizeError,
     "the schedule of lr", "one number", "[3]", "give the tensor itself"),
    (lambda: schedule(RATES, ONE), tdf.BatchSizeError, "the schedule of lr", "one number", "[3]", "with_batch_size"),
    (lambda: schedule(torch.ones(1), make_tree(2), jit), tdf.BatchSizeError, "the schedule of lr", "shape [2]", "[1]"),
    (lambda: schedule(torch.ones(2, 2), make_tree(2)), tdf.BatchSizeError, "the schedule of lr", "shape [2]", "[2, 2]"),
    (lambda: schedule(None, ONE), TypeError, "NoneType"),
    (lambda: optim.schedules.linear(0.0, 1.0, 0), ValueError, "polynomial: transition_steps must be at least 1", "0"),
    (lambda: optim.schedules.exponential_decay(1.0, 0, 0.5), ValueError, "exponential_decay: transition_steps must be"),
    (lambda: optim.schedules.cosine_decay(1.0, 0), ValueError, "cosine_decay: decay_steps must be at least 1"),
    (lambda: optim.schedules.warmup_cosine_decay(0.0, 1.0, 5, 5), ValueError, "decay_steps must be at least 6", "5"),
    (lambda: optim.schedules.join_schedules([optim.schedules.constant(1.0)], [3]), ValueError,
     "join_schedules: the number of boundaries", "1 schedules, boundaries [3]"),
    (lambda: optim.schedules.join_schedules([optim.schedules.constant(1.0)] * 2, [3, 6]), ValueError,
     "join_schedules: the number of boundaries", "2 schedules, boundaries [3, 6]"),
    (lambda: optim.schedules.join_schedules([], []), ValueError, "join_schedules: the number of boundaries"),
    (lambda: optim.schedules.join_schedules([optim.schedules.constant(1.0)] * 3, [6, 3]), ValueError, "do not ascend",
     "[6, 3]"),
    (lambda: optim.schedules.ReduceOnPlateau(1.0), ValueError, "factor must be between 0 and 1", "1.0"),
    *[(lambda size=size, metric=metric: PLATEAU.update(metric, PLATEAU.init(size)), tdf.BatchSizeError,
       "one number", str(size), str(list(metric.shape)))
      for size, metric in (([], torch.ones(2)), ([2], torch.ones(1)), ([2], torch.ones(3)), ([2], torch.ones(2, 2)))],
    (lambda: optim.schedules.ReduceOnPlateau(min_scale=5.0), ValueError, "min_scale must be between 0 and 1", "5.0"),
    (lambda: optim.schedules.ReduceOnPlateau(min_scale=float("nan")), ValueError, "min_scale must be between", "nan"),
    # Leaves, gradients and state.
    (lambda: optim.adam().init({"w": RATES}), TypeError, "TensorDict", "dict"),
    (lambda: optim.masked(optim.sgd(), "a*").init({"a": RATES}), TypeError, "masked: params is not a tree", "dict"),
    (lambda: optim.adam().init(make_tree().set("n", RATES.long())), tdf.LeafMismatchError, "'n'", "torch.int64",
     "split"),
    (lambda: step(make_tree().set(("a", "n"), RATES > 0)), tdf.LeafMismatchError, "'a.n'", "torch.bool"),
    (lambda: step(grads=make_tree().delete("b")), tdf.TreeStructureError, "gradient", "['a', 'b']", "['a']",
     "partition"),
    (lambda: step(TIED, TIED.untie(("out", "weight"))), tdf.TreeStructureError, "params tie different leaves",
     "'emb', 'weight'"),
    (lambda: step(grads={"b": RATES}), TypeError, "the gradient is not a tree", "TensorDict", "dict"),
    (lambda: step(grads=make_tree().set("b", torch.ones(3, 5))), tdf.LeafMismatchError, "'b'", "[3, 4]", "[3, 5]"),
    (lambda: step(grads=make_tree().double()), tdf.LeafMismatchError, "'a.w'", "float32", "float64"),
    (lambda: step(grads=SPARSE), tdf.LeafMismatchError, "'a.w'", "torch.strided", "torch.sparse_coo", "to_dense"),
    (lambda: step(state=optim.rmsprop().init(make_tree())), tdf.TreeStructureError,
     "['exp_avg', 'exp_avg_sq', 'step']", "['square_avg', 'step']", "opt.init"),
    (lambda: step(state=optim.adam().init(make_tree(2))), tdf.BatchSizeError, "[3]", "[2]"),
    (lambda: step(state=optim.adam().init(make_tree()).set(("exp_avg", "b"), torch.zeros(3, 1))), tdf.LeafMismatchError,
     "exp_avg of 'b'", "[3, 4]", "[3, 1]"),
    (lambda: step(ONE, ONE.apply(nn.Parameter)), TypeError, "Parameters", "(params, grads, state)", "gradient of 'w'"),
    (lambda: step(ONE, ONE, RATED.init(ONE).set("lr", RATES[1:]), RATED), tdf.LeafMismatchError, "lr", "'w'", "[2]"),
    (lambda: step(active=torch.ones(2) > 0), tdf.BatchSizeError, "active", "[3]", "[2]"),
    # Numbers would be added to the count of steps.
    (lambda: step(active=torch.tensor([1.0, 0.0, 0.5])), TypeError, "active is not a tensor of bools", "float32",
     "as_tensor(active) != 0"),
    (lambda: step(active=torch.tensor([2, 0, 1])), TypeError, "active is not a tensor of bools", "int64"),
    (lambda: step(active=[True, False, True]), TypeError, "active is not a tensor of bools", "[True, False, True]"),
    (lambda: step(opt=optim.ema(optim.sgd(), 0.9), active=torch.tensor([2, 0, 1])), TypeError,
     "ema.update: active is not", "int64"),
    # Members that are rows of a lazy stack.
    (lambda: optim.adam().init(ROWS), tdf.UnsupportedError, "adam.init", "stacked along the batch", "a lazy stack"),
    (lambda: optim.sgd().init(tdf.TensorDict({"rows": ROWS}, [3])), tdf.UnsupportedError, "stacked along the batch",
     "dense()"),
    (lambda: optim.clip_by_member_norm(1.0)(ROWS), tdf.UnsupportedError, "clip_by_member_norm", "a lazy stack"),
    # Optimizers made of others.
    (lambda: step(opt=optim.chain(optim.sgd(), optim.adam())), TypeError, "maps of gradients and then one optimizer"),
    (lambda: GROUPS.init({"a": RATES}), TypeError, "multi: params is not a tree", "dict"),
    (lambda: step(opt=GROUPS, state=optim.sgd().init(make_tree())), tdf.TreeStructureError, "['0', '1']", "['step']"),
    (lambda: step(opt=GROUPS, grads=make_tree().delete("b")), tdf.TreeStructureError, "multi.update", "['a', 'b']"),
    (lambda: step(opt=GROUPS, grads=make_tree().set("c", RATES)), tdf.TreeStructureError, "multi.update", "'c'"),
    (lambda: step(opt=optim.multi({"a*": optim.sgd()})), tdf.FilterError, "multi: no filter matches the leaf 'b'"),
    (lambda: optim.masked(optim.sgd(), "b").update(make_tree(), {"b": RATES}, None), TypeError,
     "masked.update: the gradient"),
    (lambda: optim.masked(optim.sgd(), "heads.*").init(make_tree()), tdf.FilterError, "'heads.*'"),
    (lambda: step(opt=optim.multi({"*": optim.sgd(), "b": optim.adam()})), tdf.FilterError, "the group Filter('b')",
     "1 matches", "first"),
    (lambda: optim.accumulate(optim.sgd(), 0), ValueError, "accumulate: every", "0"),
    (lambda: optim.lookahead(optim.sgd(), 0), ValueError, "lookahead: every", "0"),
    (lambda: optim.lookahead(optim.sgd(), slow_step_size=NAN), ValueError, "slow_step_size", "nan"),
    (lambda: optim.apply_if_finite(optim.sgd(), -1), ValueError, "max_consecutive must be at least 0", "-1"),
    (lambda: optim.ema(optim.sgd(), 1.0), ValueError, "ema: decay", "< 1.0"),
    (lambda: optim.schedule_free(optim.ema(optim.sgd(), 0.9)), TypeError, "a single rule", "Ema", "chain("),
    (lambda: optim.schedule_free(optim.sgd(), 0.0), ValueError, "beta must be between 0 and 1", "0.0"),
    (lambda: optim.masters(optim.sgd()).init(make_tree().set("n", RATES.long())), tdf.LeafMismatchError, "'n'",
     "torch.int64"),
    (lambda: optim.ema(optim.sgd(), 0.9).init({"a": RATES}), TypeError, "params is not a tree", "dict"),
    (lambda: optim.ema(optim.sgd(), 0.9).init(ROWS), tdf.UnsupportedError, "ema.init", "a lazy stack"),
    (lambda: step(opt=optim.ema(optim.sgd(), 0.9), state=optim.sgd().init(make_tree())), tdf.TreeStructureError, "ema",
     "['step']"),
    (lambda: step(opt=optim.ema(optim.sgd(), 0.9), grads=make_tree().delete("b")), tdf.TreeStructureError, "ema.update",
     "['a']"),
    (lambda: step(opt=optim.ema(optim.sgd(), 0.9), active=torch.ones(2) > 0), tdf.BatchSizeError, "ema.update: active",
     "[3]", "[2]"),
    (lambda: step(opt=optim.accumulate(optim.sgd(), 2), active=torch.ones(2) > 0), tdf.BatchSizeError, "active", "[3]",
     "[2]"),
    # Rules that take some leaves only.
    (lambda: optim.muon().init(make_tree()), tdf.LeafMismatchError, "'b'", "is not a matrix", "[3, 4]", "multi("),
    (lambda: optim.muon(adjust_lr_fn="adam"), ValueError, "adjust_lr_fn", "original", "'adam'"),
    (lambda: optim.muon(lr=RATES).init(ONE), tdf.LeafMismatchError, "is not a matrix"),
    (lambda: optim.adafactor(lr=RATES).init(tdf.TensorDict({"w": torch.ones(3, 2)})), tdf.BatchSizeError, "lr",
     "with_batch_size"),
    (lambda: optim.adafactor(d=0.5), ValueError, "adafactor: d", "1.0 <= d", "0.5"),
    (lambda: optim.adafactor(beta2_decay=0.5), ValueError, "beta2_decay", "0.5"),
    (lambda: optim.rprop(etas=(1.5, 1.2)), ValueError, "eta_minus", "< 1.0", "1.5"),
    (lambda: step(opt=optim.sparse_adam()), tdf.LeafMismatchError, "'a.w'", "sparse_coo", "strided",
     "adam takes dense"),
    (lambda: step(opt=FACTORED, state=FACTORED.init(make_tree()).set(("row_var", "b"), torch.ones(3, 4))),
     tdf.LeafMismatchError, "row_var of 'b'", "[3, 0]", "[3, 4]"),
    # Maps of gradients.
    (lambda: optim.adaptive_grad_clip(0.1)(make_tree()), TypeError, "adaptive_grad_clip: params is not a tree"),
    (lambda: optim.adaptive_grad_clip(-0.1), ValueError, "clipping", "-0.1"),
    (lambda: optim.adaptive_grad_clip(0.1, eps=-0.1), ValueError, "eps", "-0.1"),
    (lambda: optim.adaptive_grad_clip(0.1)(ROWS, ROWS), tdf.UnsupportedError, "adaptive_grad_clip", "a lazy stack"),
    (lambda: optim.add_decayed_weights(NAN), ValueError, "weight_decay", "nan"),
    (lambda: optim.add_decayed_weights(0.1, "c*")(make_tree(), make_tree()), tdf.FilterError, "'c*'"),
    (lambda: optim.add_decayed_weights(0.1)(make_tree().delete("b"), make_tree()), tdf.TreeStructureError,
     "['a', 'b']"),
    (lambda: optim.sam(lambda p: p, -1.0), ValueError, "sam: rho", "-1.0"),
    (lambda: optim.sam(lambda p: p)({"w": RATES}), TypeError, "sam: params is not a tree", "dict"),
    (lambda: optim.sam(tdf.value_and_grad(lambda p: p["w"].sum()))(ONE), TypeError, "sam: grad_fn returned neither",
     "begins with a Tensor", "-1"),
    (lambda: optim.sam(lambda p: p["w"].sum())(ONE), TypeError, "sam: grad_fn returned neither", "Tensor"),
    (lambda: optim.sam(lambda p: p)(ROWS), tdf.UnsupportedError, "sam: the members are not", "a lazy stack"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(MESSAGES)))
def test_errors_name_the_leaf_and_both_values(i):
    """Each mistake raises the class that a caller would catch, with its parts in order."""
    call, error, *parts = MESSAGES[i]

    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        call()
