"""Errors of optimizers: each call, its class, and the parts of its message."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from tdfunc import (
    BatchSizeError,
    FilterError,
    LeafMismatchError,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
    lazy_stack,
)
from tdfunc._jit import jit
from tdfunc.optim import (
    accumulate,
    adafactor,
    adam,
    adamw,
    adaptive_grad_clip,
    add_decayed_weights,
    apply_if_finite,
    chain,
    check_finite,
    clip_by_global_norm,
    clip_by_member_norm,
    ema,
    lookahead,
    masked,
    masters,
    multi,
    muon,
    rprop,
    sam,
    schedule_free,
    schedules,
    sgd,
    sparse_adam,
)

RATES = torch.tensor([1.0, 2.0, 3.0])
ROWS = lazy_stack([TensorDict({"w": torch.zeros(3)}) for _ in range(3)])
NAN = float("nan")
GROUPS = multi({"a*": sgd(momentum=0.9), "*": adam()})


def make_tree(members=3):
    """Return a tree of ones with two leaves."""
    return TensorDict({"a": {"w": torch.ones(members, 2, 2)}, "b": torch.ones(members, 4)}, [members])


def step(params=None, grads=None, state=None, opt=None, **options):
    """Do one Adam step with the given trees, and fitting ones for the rest."""
    opt = adam() if opt is None else opt
    params = make_tree() if params is None else params
    grads = make_tree() if grads is None else grads
    return opt.update(params, grads, opt.init(params) if state is None else state, **options)


def schedule(value, params, wrap=lambda f: f):
    """Do one step with a schedule that gives a value."""
    opt = adam(lr=lambda step: value)
    return wrap(opt.update)(params, params + 1, opt.init(params))


BAD = make_tree().set(("a", "w"), torch.full((3, 2, 2), NAN))
SPARSE = make_tree().apply(lambda x: x.to_sparse())
ONE = TensorDict({"w": torch.zeros(3)})
MESSAGES = [
    # Hyperparameters.
    (lambda: adam(lr=-1.0), ValueError, "adam: lr", "0.0 <= lr", "-1.0"),
    (lambda: adam(lr=NAN), ValueError, "lr", "nan"),
    (lambda: adam(lr=math.inf), ValueError, "lr", "inf"),
    (lambda: adam(lr=[0.1, 0.2]).init(make_tree()), BatchSizeError, "lr", "[3]", "[2]"),
    (lambda: adam(lr=np.array([0.1, -0.2])), ValueError, "adam: lr", "-0.2"),
    (lambda: adam(lr="0.1"), TypeError, "str"),
    (lambda: clip_by_global_norm("1.0"), TypeError, "str"),
    (lambda: adamw(weight_decay={"*.bias": 0.0}), TypeError, "dict"),
    (lambda: adam(betas=(0.9, 1.0)), ValueError, "beta2", "< 1.0", "1.0"),
    (lambda: adamw(weight_decay=torch.tensor([0.1, -0.1])), ValueError, "adamw: weight_decay", "-0.1"),
    (lambda: sgd(momentum=-0.1), ValueError, "momentum", "-0.1"),
    (lambda: sgd(nesterov=True), ValueError, "nesterov", "momentum = 0.0"),
    (lambda: sgd(nesterov=True, momentum=0.9, dampening=0.1), ValueError, "dampening = 0.1"),
    (lambda: clip_by_global_norm(-1.0), ValueError, "max_norm", "-1.0"),
    (lambda: clip_by_member_norm(NAN), ValueError, "max_norm", "nan"),
    (lambda: clip_by_member_norm(-math.inf), ValueError, "max_norm", "-inf"),
    (lambda: adam(lr=torch.ones(2)).init(make_tree()), BatchSizeError, "lr", "[3]", "[2]"),
    (lambda: adam(lr=torch.ones(2)).init(ONE), LeafMismatchError, "lr", "'w'", "[2]", "[3]"),
    (lambda: adam(lr=torch.ones(3, 1)).init(ONE), BatchSizeError, "[members]", "[3, 1]"),
    # Schedules.
    (lambda: schedule(RATES, TensorDict({"w": torch.zeros(3, 3)}, [3]), torch.vmap), BatchSizeError,
     "the schedule of lr", "one number", "[3]", "give the tensor itself"),
    (lambda: schedule(RATES, ONE), BatchSizeError, "the schedule of lr", "one number", "[3]", "with_batch_size"),
    (lambda: schedule(torch.ones(1), make_tree(2), jit), BatchSizeError, "the schedule of lr", "shape [2]", "[1]"),
    (lambda: schedule(torch.ones(2, 2), make_tree(2)), BatchSizeError, "the schedule of lr", "shape [2]", "[2, 2]"),
    (lambda: schedule(None, ONE), TypeError, "NoneType"),
    (lambda: schedules.linear(0.0, 1.0, 0), ValueError, "polynomial: transition_steps must be at least 1", "0"),
    (lambda: schedules.cosine_decay(1.0, 0), ValueError, "cosine_decay: decay_steps must be at least 1"),
    (lambda: schedules.warmup_cosine_decay(0.0, 1.0, 5, 5), ValueError, "include the warm-up", "above 5", "5"),
    (lambda: schedules.join_schedules([schedules.constant(1.0)], [3])(torch.tensor(0)), ValueError, "shorter than"),
    (lambda: schedules.join_schedules([schedules.constant(1.0)] * 3, [6, 3]), ValueError, "must ascend", "[6, 3]"),
    (lambda: schedules.ReduceOnPlateau(1.0), ValueError, "factor must be between 0 and 1", "1.0"),
    # Leaves, gradients and state.
    (lambda: adam().init({"w": RATES}), TypeError, "TensorDict", "dict"),
    (lambda: masked(sgd(), "a*").init({"a": RATES}), TypeError, "masked: params must be a tree", "dict"),
    (lambda: adam().init(make_tree().set("n", RATES.long())), LeafMismatchError, "'n'", "torch.int64", "split"),
    (lambda: step(make_tree().set(("a", "n"), RATES > 0)), LeafMismatchError, "'a.n'", "torch.bool"),
    (lambda: step(grads=make_tree().delete("b")), TreeStructureError, "gradient", "['a', 'b']", "['a']", "partition"),
    (lambda: step(grads=make_tree().set(("a", "c"), RATES)), TreeStructureError, "under 'a'", "['w']", "['c', 'w']"),
    (lambda: step(grads={"b": RATES}), TypeError, "the gradient must be a tree", "TensorDict", "dict"),
    (lambda: step(grads=make_tree().set("b", torch.ones(3, 5))), LeafMismatchError, "'b'", "[3, 4]", "[3, 5]"),
    (lambda: step(grads=make_tree().double()), LeafMismatchError, "'a.w'", "float32", "float64"),
    (lambda: step(grads=SPARSE), LeafMismatchError, "'a.w'", "torch.strided", "torch.sparse_coo", "to_dense"),
    (lambda: step(state=sgd().init(make_tree())), TreeStructureError, "exp_avg", "['step']", "opt.init"),
    (lambda: step(state=adam().init(make_tree(2))), BatchSizeError, "[3]", "[2]"),
    (lambda: step(state=adam().init(make_tree()).set(("exp_avg", "b"), torch.zeros(3, 1))), LeafMismatchError,
     "exp_avg of 'b'", "[3, 4]", "[3, 1]"),
    (lambda: step(grads=make_tree().apply(nn.Parameter)), TypeError, "Parameters", "update(params, grads, state)",
     "gradient of 'a.w'"),
    (lambda: step(active=torch.ones(2) > 0), BatchSizeError, "active", "[3]", "[2]"),
    # Members that are rows of a lazy stack.
    (lambda: adam().init(ROWS), UnsupportedError, "adam.init", "stacked along the batch", "a lazy stack"),
    (lambda: sgd().init(TensorDict({"rows": ROWS}, [3])), UnsupportedError, "stacked along the batch", "dense()"),
    (lambda: clip_by_member_norm(1.0)(ROWS), UnsupportedError, "clip_by_member_norm", "a lazy stack"),
    # Optimizers made of others.
    (lambda: chain(), TypeError, "last member must be an optimizer", "nothing"),
    (lambda: chain(clip_by_global_norm(1.0)), TypeError, "last member must be an optimizer", "GradientMap"),
    (lambda: chain(sgd(), adam()), TypeError, "Optimizer, Optimizer", "multi({filter: optimizer, ...})"),
    (lambda: step(opt=GROUPS, state=sgd().init(make_tree())), TreeStructureError, "['0', '1']", "['step']"),
    (lambda: step(opt=GROUPS, grads=make_tree().delete("b")), TreeStructureError, "multi.update", "['a', 'b']"),
    (lambda: step(opt=GROUPS, grads=make_tree().set("c", RATES)), TreeStructureError, "multi.update", "'c'"),
    (lambda: step(opt=multi({"a*": sgd()})), FilterError, "multi: no filter matches the leaf 'b'"),
    (lambda: masked(sgd(), "b").update(make_tree(), {"b": RATES}, None), TypeError, "masked.update: the gradient"),
    (lambda: masked(sgd(), "heads.*").init(make_tree()), FilterError, "'heads.*'"),
    (lambda: step(opt=multi({"*": sgd(), "b": adam()})), FilterError, "the group Filter('b')", "1 matches", "first"),
    (lambda: accumulate(sgd(), 0), ValueError, "accumulate: every", "0"),
    (lambda: lookahead(sgd(), 0), ValueError, "lookahead: every", "0"),
    (lambda: lookahead(sgd(), slow_step_size=NAN), ValueError, "slow_step_size", "nan"),
    (lambda: apply_if_finite(sgd(), -1), ValueError, "max_consecutive", "-1"),
    (lambda: ema(sgd(), 1.0), ValueError, "ema: decay", "< 1.0"),
    (lambda: schedule_free(ema(sgd(), 0.9)), TypeError, "a single rule", "Ema", "chain("),
    (lambda: schedule_free(sgd(), 0.0), ValueError, "beta must be between 0 and 1", "0.0"),
    (lambda: masters(sgd()).init(make_tree().set("n", RATES.long())), LeafMismatchError, "'n'", "torch.int64"),
    (lambda: ema(sgd(), 0.9).init({"a": RATES}), TypeError, "params must be a tree", "dict"),
    (lambda: ema(sgd(), 0.9).init(ROWS), UnsupportedError, "ema.init", "a lazy stack"),
    (lambda: step(opt=ema(sgd(), 0.9), state=sgd().init(make_tree())), TreeStructureError, "ema", "['step']"),
    (lambda: step(opt=ema(sgd(), 0.9), grads=make_tree().delete("b")), TreeStructureError, "ema.update", "['a']"),
    (lambda: step(opt=ema(sgd(), 0.9), active=torch.ones(2) > 0), BatchSizeError, "ema.update: active", "[3]", "[2]"),
    (lambda: step(opt=accumulate(sgd(), 2), active=torch.ones(2) > 0), BatchSizeError, "active", "[3]", "[2]"),
    # Rules that take some leaves only.
    (lambda: muon().init(make_tree()), LeafMismatchError, "'b'", "must be a matrix", "[3, 4]", "multi("),
    (lambda: muon(adjust_lr_fn="adam"), ValueError, "adjust_lr_fn", "original", "'adam'"),
    (lambda: muon(lr=RATES).init(ONE), LeafMismatchError, "must be a matrix"),
    (lambda: adafactor(lr=RATES).init(TensorDict({"w": torch.ones(3, 2)})), BatchSizeError, "lr", "with_batch_size"),
    (lambda: adafactor(d=0.5), ValueError, "adafactor: d", "1.0 <= d", "0.5"),
    (lambda: adafactor(beta2_decay=0.5), ValueError, "beta2_decay", "0.5"),
    (lambda: rprop(etas=(1.5, 1.2)), ValueError, "eta_minus", "< 1.0", "1.5"),
    (lambda: step(opt=sparse_adam()), LeafMismatchError, "'a.w'", "sparse_coo", "strided", "adam takes dense"),
    (lambda: step(opt=adafactor(), state=adafactor().init(make_tree()).set(("row_var", "b"), torch.ones(3, 4))),
     LeafMismatchError, "row_var of 'b'", "[3, 0]", "[3, 4]"),
    # Maps of gradients.
    (lambda: adaptive_grad_clip(0.1)(make_tree()), TypeError, "adaptive_grad_clip: params must be a tree"),
    (lambda: adaptive_grad_clip(-0.1), ValueError, "clipping", "-0.1"),
    (lambda: adaptive_grad_clip(0.1)(ROWS, ROWS), UnsupportedError, "adaptive_grad_clip", "a lazy stack"),
    (lambda: add_decayed_weights(NAN), ValueError, "weight_decay", "nan"),
    (lambda: add_decayed_weights(0.1, "c*")(make_tree(), make_tree()), FilterError, "'c*'"),
    (lambda: add_decayed_weights(0.1)(make_tree().delete("b"), make_tree()), TreeStructureError, "['a', 'b']"),
    (lambda: sam(lambda p: p, -1.0), ValueError, "sam: rho", "-1.0"),
    (lambda: sam(lambda p: p)({"w": RATES}), TypeError, "sam: params must be a tree", "dict"),
    (lambda: check_finite()(BAD), FloatingPointError, "'a.w'", "12 nan, 0 inf of 12"),
    (lambda: torch.vmap(check_finite())(make_tree()), UnsupportedError, "check_finite"),
    (lambda: jit(check_finite())(make_tree()), UnsupportedError, "check_finite"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(MESSAGES)))
def test_errors_name_the_leaf_and_both_values(i):
    """Each mistake raises the class that a caller would catch, with its parts in order."""
    call, error, *parts = MESSAGES[i]

    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        call()
