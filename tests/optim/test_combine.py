"""Clipping, chains and masks."""

import copy
import math
import pickle
import re
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import Filter, TensorDict, optim
from tdfunc._jit import jit
from tdfunc.ops.base.reading import entries
from tests.helpers import assert_pure, assert_trees_equal, examples
from tests.optim.table import RULES
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

    clipped = assert_pure(optim.clip_by_global_norm(max_norm), grads)

    torch.testing.assert_close(list(clipped.leaves()), [leaf.grad for leaf in parameters.leaves()])


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@examples(0.4)
@given(
    grads=trees(dtypes=st.just(torch.float64)).filter(lambda t: t.ndim), max_norm=st.sampled_from([0.0, 0.5, 1000.0])
)
def test_member_norm_equals_the_loop(wrap, grads, max_norm):
    """Each member's gradients are clipped as if they were alone, in a loop and by vmap."""
    clip = optim.clip_by_member_norm(max_norm)

    clipped = wrap(clip)(grads)

    for i in product(*map(range, grads.batch_size)):
        assert_trees_equal(clipped[i], optim.clip_by_global_norm(max_norm)(grads[i]), rtol=1e-12)
    if grads.batch_size[0] and grads.leaves():
        unnamed = clipped.with_names([None] * clipped.ndim)
        assert_trees_equal(torch.vmap(clip)(grads), unnamed, rtol=1e-12)


def flat(tree):
    """The leaves by path."""
    return {path: tree[path] for path in tree.paths()}


def chosen_paths(params, data):
    """A filter of some paths of a tree, of tied leaves by any of their paths."""
    paths = [path for entry in entries(params) for path in entry.paths]
    chosen = data.draw(st.sets(st.sampled_from(paths))) if paths else set()
    return Filter(lambda path, leaf: path in chosen)


def train_alone(opt, params, grads):
    """New parameters and state after a step of a part that is a tree of its own."""
    return opt.update(params, grads, opt.init(params))


ONE = optim.ema(optim.sgd(lr=0.5, momentum=0.9), 0.5, debias=False)
OTHER = optim.adam(lr=0.1)
equal = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@examples(0.4)
@given(params=trees(dtypes=st.sampled_from([torch.float32, torch.float64])), data=st.data())
def test_a_masked_part_is_trained_by_its_optimizer(wrap, params, data):
    """`masked` trains its part as if it were alone; a tied leaf is chosen by any path and stays tied."""
    where, grads = chosen_paths(params, data), params.apply(lambda x: x * 0.5 + 1)
    some, (part, rest), (part_of_grads, _) = optim.masked(ONE, where), params.partition(where), grads.partition(where)

    new, state = wrap(some.update)(params, part_of_grads, some.init(params))

    trained, slots = train_alone(ONE, part, part_of_grads)
    equal(flat(new), flat(trained) | flat(rest))
    equal(flat(state), flat(slots))
    assert new.paths() == params.paths()
    assert new.ties() == params.ties()
    assert new.batch_size == params.batch_size


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@examples(0.4)
@given(params=trees(dtypes=st.sampled_from([torch.float32, torch.float64])), data=st.data())
def test_parts_are_trained_by_their_optimizers(wrap, params, data):
    """`multi` trains each part as if it were alone; a tied leaf is chosen by any path and stays tied."""
    where, grads = chosen_paths(params, data), params.apply(lambda x: x * 0.5 + 1)
    both = optim.multi({where: ONE, "*": OTHER})

    whole, states = wrap(both.update)(params, grads, both.init(params))

    (part, rest), (part_of_grads, rest_of_grads) = params.partition(where), grads.partition(where)
    (first, slots), (second, other_slots) = (
        train_alone(ONE, part, part_of_grads),
        train_alone(OTHER, rest, rest_of_grads),
    )
    equal(flat(whole), flat(first) | flat(second))
    equal(flat(both.eval_params(whole, states)), flat(ONE.eval_params(first, slots)) | flat(second))
    equal({key: flat(states[key]) for key in ("0", "1")}, {"0": flat(slots), "1": flat(other_slots)})
    assert whole.paths() == params.paths()
    assert whole.ties() == params.ties()
    assert whole.batch_size == params.batch_size


@pytest.mark.parametrize("members", [(), (3,)], ids=["one", "stacked"])
def test_groups_equal_parameter_groups(members, generator):
    """AdamW without decay of vectors, with one clip, trains as torch.optim's parameter groups do, member by member."""
    of = lambda dims: Filter(lambda path, leaf: leaf.dim() < 2 + dims)  # noqa: E731
    make_opt = lambda dims: optim.chain(  # noqa: E731
        optim.clip_by_member_norm(1.0),
        optim.multi({of(dims): optim.adamw(0.01, weight_decay=0.0), "*": optim.adamw(0.01)}),
    )
    opt = make_opt(len(members))
    make = lambda: make_tree(generator, members).double()  # noqa: E731
    params, grads = make(), [make() for _ in range(60)]
    new, state = params, opt.init(params)
    mapped, mapped_state = params, state
    for grad in grads:
        new, state = opt.update(new, grad, state)
        if members:
            mapped, mapped_state = torch.vmap(make_opt(0).update)(mapped, grad, mapped_state)

    for i in [(k,) for k in range(members[0])] if members else [()]:
        w, b = [nn.Parameter(params[path][i].clone()) for path in (("a", "w"), "b")]
        torchs = torch.optim.AdamW([{"params": [w]}, {"params": [b], "weight_decay": 0.0}], lr=0.01)
        for grad in grads:
            w.grad, b.grad = grad["a", "w"][i].clone(), grad["b"][i].clone()
            nn.utils.clip_grad_norm_([w, b], 1.0)
            torchs.step()
        for got in (new, mapped) if members else (new,):
            torch.testing.assert_close([got["a", "w"][i], got["b"][i]], [w.detach(), b.detach()], rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("make", [optim.clip_by_global_norm, optim.clip_by_member_norm])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_in_half_precision(make, dtype):
    """Norms of 16-bit gradients may exceed the range of their dtype."""
    grads = TensorDict({"a": torch.full((1, 64), 3e4), "b": torch.full((1,), 3e4)}, [1])

    clipped = make(1.0)(grads.to(dtype))

    assert clipped["a"].dtype is dtype
    assert_trees_equal(clipped.float(), make(1.0)(grads), rtol=1e-2, atol=1e-3)
    assert clipped["a"].min() > 0.1


@pytest.mark.parametrize("make", [optim.clip_by_global_norm, optim.clip_by_member_norm])
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
    "sgd": lambda: optim.sgd(lr=halved),
    "momentum": lambda: optim.sgd(lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(lr=torch.tensor([0.1, 0.2, 0.3]), amsgrad=True),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.clip_by_member_norm(torch.inf), optim.adam(0.1)),
    "masked": lambda: optim.masked(optim.chain(optim.clip_by_member_norm(0.5), optim.sgd(0.1)), "a*"),
    "multi": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.multi({"a*": optim.sgd(0.1), Filter("b"): optim.adam(0.1)})
    ),
    "maps": lambda: optim.chain(
        optim.adaptive_grad_clip(0.1), optim.add_decayed_weights(0.1, "a*"), optim.schedule_free(optim.adam(halved))
    ),
    "nest": lambda: optim.ema(
        optim.lookahead(optim.masters(optim.apply_if_finite(optim.accumulate(optim.sgd(0.1), 1), 2)), 1), 0.9
    ),
    **{name: partial(rule, **options) for name, (rule, _, options) in RULES.items() if rule is not optim.muon},
    "filter": lambda: optim.masked(optim.sgd(0.1), (Filter(re.compile("a.*")) | torch.float64) & ~Filter("b")),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("send", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_optimizers_travel(name, send, generator):
    """A copied or unpickled optimizer trains the same weights."""
    params, grads, opt = make_tree(generator), make_tree(generator), OPTIMIZERS[name]()
    state = opt.init(params)

    sent = send(opt)

    assert repr(sent) == repr(opt)
    assert_trees_equal(sent.update(params, grads, state), opt.update(params, grads, state))


@pytest.mark.parametrize("active", [None, torch.tensor([True, False])])
def test_any_function_is_a_map(active):
    """A function in a chain gets the gradients; an inactive member has zeros."""
    seen = []
    opt = optim.chain(lambda grads, params: seen.append(grads) or grads, optim.sgd(1.0))
    params = TensorDict({"w": torch.ones(2)}, [2])
    new, _ = opt.update(params, params, opt.init(params), active=active)

    assert new["w"].tolist() == [0.0, 0.0 if active is None else 1.0]
    assert seen[0]["w"].tolist() == [1.0, 1.0 if active is None else 0.0]


def test_clips_by_member_leave_inactive_gradients():
    """A NaN of a member that takes no step reaches no other one, in a replay as well."""
    opt = optim.chain(optim.clip_by_member_norm(0.5), optim.sgd(1.0))
    params = TensorDict({"w": torch.zeros(3, 2)}, [3])
    grads = TensorDict({"w": torch.tensor([[3.0, 4.0], [math.nan, 1.0], [0.3, 0.0]])}, [3])
    active = torch.tensor([True, False, True])
    for update in (opt.update, jit(opt.update)):
        new, _ = update(params, grads, opt.init(params), active=active)
        torch.testing.assert_close(new["w"], torch.tensor([[-0.3, -0.4], [0.0, 0.0], [-0.3, 0.0]]))
