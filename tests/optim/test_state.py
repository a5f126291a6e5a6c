"""The state tree, members that stop, and what is refused."""

import math

import pytest
import torch

from tdfunc import BatchSizeError, LeafMismatchError, TensorDict, TreeStructureError, UnsupportedError, lazy_stack
from tdfunc._jit import jit
from tdfunc.optim import adam, adamw, chain, clip_by_global_norm, clip_by_member_norm, sgd
from tests.helpers import TiedLM, assert_pure, assert_trees_equal


def make_tree(fill=1.0, members=3):
    """Return a tree of one number."""
    return TensorDict({"a": {"w": torch.full((members, 2, 2), fill)}, "b": torch.full((members, 4), fill)}, [members])


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@pytest.mark.parametrize("opt", [sgd(lr=0.1, momentum=0.9), adam(lr=0.1)], ids=["sgd", "adam"])
def test_inactive_members_stay(opt, wrap):
    """A finished member would go on training, or its step count would."""
    update = wrap(opt.update)
    params, state = update(make_tree(), make_tree(), opt.init(make_tree()))
    active = torch.tensor([True, False, True])

    moved, after = assert_pure(
        lambda *trees: update(*trees, active=active), params, make_tree(math.inf).at[::2].set(make_tree()[::2]), state
    )

    assert after["step"].tolist() == [2, 1, 2]
    assert_trees_equal(moved[1], params[1])
    assert_trees_equal(after[1], state[1])
    assert not torch.equal(moved["b"][0], params["b"][0])


def test_members_at_different_steps_equal_the_loop():
    """Adam's bias correction would use one member's step count for all."""
    opt = adam(lr=0.1)
    params, state = make_tree(), opt.init(make_tree())
    for active in ([True, False, True], [True, False, False], [True, True, True]):
        grads = make_tree(0.5)
        params, state = opt.update(params, grads, state, active=torch.tensor(active))

    for i, steps in enumerate([3, 1, 2]):
        alone, own = make_tree()[i], opt.init(make_tree()[i])
        for _ in range(steps):
            alone, own = opt.update(alone, make_tree(0.5)[i], own)
        assert_trees_equal(params[i], alone, rtol=1e-6, atol=1e-6)
        assert_trees_equal(state[i], own, rtol=1e-6, atol=1e-6)


def test_active_ignores_donate():
    """A frozen member's old values would be overwritten before they are put back."""
    opt = adam(lr=0.1)
    active = torch.tensor([True, False, True])
    params = make_tree()

    got, _ = opt.update(params, make_tree(), opt.init(params), active=active, donate=True)

    assert_trees_equal(got[1], make_tree()[1])


def test_state_rows_are_members_states():
    """A member's state could not be taken out of the ensemble's, or put together again."""
    opt = adamw(lr=torch.tensor([0.1, 0.2, 0.3]))
    params, state = opt.update(make_tree(), make_tree(), opt.init(make_tree()))

    rows = torch.stack([state[i] for i in range(3)])

    assert_trees_equal(rows, state)
    again = [opt.update(params, make_tree(), s)[0] for s in (rows, state)]
    assert_trees_equal(*again)


def test_hyperparameters_live_in_the_state():
    """A learning rate could not be changed without a new optimizer (or a new trace)."""
    opt = sgd(lr=torch.tensor([0.1, 0.2, 0.3]))
    update = jit(opt.update)
    state = opt.init(make_tree())
    update(make_tree(), make_tree(), state)

    params, _ = update(make_tree(), make_tree(), state.set("lr", torch.tensor([0.0, 0.5, 1.0])))

    torch.testing.assert_close(params["b"][:, 0], torch.tensor([1.0, 0.5, 0.0]))
    assert update.cache_info().misses == 1


def test_one_tensor_for_all_members():
    """A learning rate of no dimensions would not fit a stacked tree."""
    opt = adam(lr=torch.tensor(0.1), weight_decay=torch.tensor([0.0, 0.1, 0.2]))

    state = opt.init(make_tree())

    assert state["lr"].shape == (3,)
    assert opt.update(make_tree(), make_tree(), state)[1]["step"].tolist() == [1, 1, 1]


def test_stacked_leaves_without_batch_size():
    """A tree that does not declare its members could not have one learning rate for each."""
    params = TensorDict({"w": torch.ones(3, 2)})
    opt = sgd(lr=torch.tensor([0.0, 0.5, 1.0]))

    moved, _ = opt.update(params, params, opt.init(params))

    torch.testing.assert_close(moved["w"][:, 0], torch.tensor([1.0, 0.5, 0.0]))


def test_tied_leaves_step_once():
    """A tied weight would be stepped twice, or come apart."""
    params = TensorDict.from_module(TiedLM()).detach()
    grads = params.apply(torch.ones_like)
    opt = adam(lr=0.1)

    moved, state = opt.update(params, grads, opt.init(params))

    assert moved["emb", "weight"] is moved["out", "weight"]
    torch.testing.assert_close(moved["emb", "weight"], params["emb", "weight"] - 0.1)
    assert len(torch.utils._pytree.tree_leaves(state["exp_avg"])) == len(torch.utils._pytree.tree_leaves(params))


def test_empty_tree():
    """A partition that chooses nothing would crash."""
    opt = adam()
    params, state = opt.update(TensorDict({}), TensorDict({}), opt.init(TensorDict({})))

    assert list(params.keys()) == []
    assert int(state["step"]) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adam(lr=-1.0), ["adam: lr", "-1.0"]),
        (lambda: adam(lr=math.nan), ["lr", "nan"]),
        (lambda: adam(lr=math.inf), ["lr", "inf"]),
        (lambda: adam(betas=(0.9, 1.0)), ["beta2", "< 1.0", "1.0"]),
        (lambda: adam(betas=(0.9,)), ["adam: betas", "beta1, beta2", "(0.9,)"]),
        (lambda: adamw(weight_decay=torch.tensor([0.1, -0.1])), ["adamw: weight_decay", "-0.1"]),
        (lambda: sgd(momentum=-0.1), ["momentum", "-0.1"]),
        (lambda: sgd(nesterov=True), ["nesterov", "momentum = 0.0"]),
        (lambda: sgd(nesterov=True, momentum=0.9, dampening=0.1), ["dampening = 0.1"]),
    ],
)
def test_hyperparameters_out_of_range(make, words):
    """A sign error or nan would surface as a diverged run."""
    with pytest.raises(ValueError) as err:  # noqa: PT011
        make()

    assert all(word in str(err.value) for word in words)


def step(params=None, grads=None, state=None, **options):
    """Do one Adam step with what is given and fitting trees for the rest."""
    params = make_tree() if params is None else params
    return adam().update(
        params, make_tree() if grads is None else grads, adam().init(make_tree()) if state is None else state, **options
    )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: adam().init(make_tree().set("n", torch.zeros(3, dtype=torch.int64))),
            LeafMismatchError,
            ["'n'", "torch.int64", "split"],
        ),
        (lambda: adam().init({"w": torch.ones(3)}), TypeError, ["TensorDict", "dict"]),
        (lambda: step(make_tree().set(("a", "n"), torch.ones(3) > 0)), LeafMismatchError, ["'a.n'", "torch.bool"]),
        (lambda: step(grads=make_tree().delete("b")), TreeStructureError, ["gradient", "['b']", "partition"]),
        (lambda: step(grads=make_tree().set(("a", "c"), torch.ones(3))), TreeStructureError, ["['a.c']"]),
        (lambda: step(grads={"b": torch.ones(3)}), TreeStructureError, ["TensorDict", "dict"]),
        (lambda: step(grads=make_tree().set("b", torch.ones(3, 5))), LeafMismatchError, ["'b'", "[3, 4]", "[3, 5]"]),
        (
            lambda: step(grads=make_tree().set(("a", "w"), torch.ones(3, 2, 2).double())),
            LeafMismatchError,
            ["'a.w'", "float32", "float64"],
        ),
        (lambda: step(state=sgd().init(make_tree())), TreeStructureError, ["exp_avg", "['step']", "opt.init"]),
        (lambda: step(state=adam().init(make_tree(members=2))), BatchSizeError, ["[3]", "[2]"]),
        (
            lambda: step(state=adam().init(make_tree()).set(("exp_avg", "b"), torch.zeros(3, 1))),
            LeafMismatchError,
            ["exp_avg of 'b'", "[3, 4]", "[3, 1]"],
        ),
        (lambda: adam(lr=torch.ones(2)).init(make_tree()), BatchSizeError, ["lr", "[3]", "[2]"]),
        (
            lambda: adam(lr=torch.ones(2)).init(TensorDict({"w": torch.ones(3)})),
            LeafMismatchError,
            ["lr", "'w'", "[2]", "[3]"],
        ),
        (
            lambda: adam(lr=torch.ones(2, 2)).init(TensorDict({"w": torch.ones(2, 2)})),
            BatchSizeError,
            ["[members]", "[2, 2]"],
        ),
        (lambda: step(active=torch.ones(2) > 0), BatchSizeError, ["active", "[3]", "[2]"]),
        (lambda: step(active=torch.ones(3)), LeafMismatchError, ["torch.bool", "torch.float32"]),
        (lambda: step(active=True), LeafMismatchError, ["a tensor of torch.bool", "bool"]),
    ],
)
def test_refused(call, error, words):
    """A mismatch would be broadcast, skipped or corrupt memory instead of naming the leaf."""
    with pytest.raises(error) as err:
        call()

    assert all(word in str(err.value) for word in words), str(err.value)


@pytest.mark.parametrize("value", [[0.1, 0.2], "0.1", None])
def test_hyperparameters_of_another_type(value):
    """A list of learning rates would be accepted, and fail in the first step."""
    with pytest.raises(TypeError, match=r"(?s)adam: lr is no hyperparameter.*tensor with a value for each") as err:
        adam(lr=value)

    assert repr(value) in str(err.value)


RATES = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
@pytest.mark.parametrize("rule", [sgd, adam, adamw])
def test_a_schedule_may_differ_by_member(rule, wrap):
    """A schedule with a value for each member would be refused, or give other numbers than the constant tensor."""
    params = TensorDict({"w": torch.zeros(3, 3)}, [3])
    scheduled, constant = rule(lr=lambda step: RATES), rule(lr=RATES)

    moved, _ = wrap(scheduled.update)(params, params + 1, scheduled.init(params))

    assert_trees_equal(moved, constant.update(params, params + 1, constant.init(params))[0])


@pytest.mark.parametrize(
    ("wrap", "params", "value", "words"),
    [
        (torch.vmap, TensorDict({"w": torch.zeros(3, 3)}, [3]), RATES, ["one number", "[3]", "give the tensor itself"]),
        (lambda f: f, TensorDict({"w": torch.zeros(3)}), RATES, ["one number", "[3]", "with_batch_size"]),
        (jit, TensorDict({"w": torch.zeros(3)}), RATES, ["one number", "[3]"]),
        (lambda f: f, make_tree(members=2), torch.ones(2, 2), ["shape [2]", "[2, 2]"]),
        (jit, make_tree(members=2), torch.ones(1), ["shape [2]", "[1]"]),
    ],
    ids=["vmap", "one model", "jit", "matrix", "one row"],
)
@pytest.mark.parametrize("rule", [sgd, adam, adamw])
def test_a_schedule_of_another_shape(rule, wrap, params, value, words):
    """A learning rate for each member would be one for each feature, without a word."""
    opt = rule(lr=lambda step: value)

    with pytest.raises(BatchSizeError, match="the schedule of lr") as err:
        wrap(opt.update)(params, params + 1, opt.init(params))

    assert all(word in str(err.value) for word in words), str(err.value)


@pytest.mark.parametrize("value", [None, "0.1", [0.1], 1j])
@pytest.mark.parametrize("wrap", [lambda f: f, torch.vmap], ids=["eager", "vmap"])
def test_a_schedule_without_a_number(wrap, value):
    """A schedule that forgets to return would end in Python's words about float(), or text be read as a number."""
    opt = adam(weight_decay=lambda step: value)

    with pytest.raises(
        TypeError, match=r"(?s)adam.update: the schedule of weight_decay gave no number.*expected"
    ) as err:
        wrap(opt.update)(make_tree(), make_tree(), opt.init(make_tree()))

    assert repr(value) in str(err.value)


LAZY = lazy_stack([TensorDict({"w": torch.zeros(3)}) for _ in range(3)])
LAZY_TREES = pytest.mark.parametrize(
    "params", [LAZY, TensorDict({"rows": LAZY, "b": torch.zeros(3, 2)}, [3])], ids=["stack", "inside"]
)


@LAZY_TREES
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: sgd(lr=RATES).init(p), "sgd: lr has a value for each member"),
        (
            lambda p: adam().update(p, p, adam().init(p), active=torch.tensor([True, False, True])),
            "adam.update: active chooses members",
        ),
        (
            lambda p: adam().update(p, p, adam().init(p).set("step", torch.tensor([0, 1, 2]))),
            "adam.update: the state has another step count",
        ),
        (lambda p: clip_by_member_norm(1.0)(p), "clip_by_member_norm: each member has a norm"),
    ],
    ids=["lr", "active", "counts", "clip"],
)
def test_lazy_members_are_alike(call, words, params):
    """What belongs to a member would be spread over the features of every row of a lazy stack."""
    with pytest.raises(UnsupportedError, match=words + r"[\s\S]*stacked along the batch[\s\S]*a lazy stack"):
        call(params)


@LAZY_TREES
@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "jit"])
def test_lazy_members_share_a_schedule(params, wrap):
    """A schedule's values for three members would be values for three features; one number would be refused."""
    opt, wrong = adam(lr=lambda step: 0.1 * 0.5**step), adam(lr=lambda step: RATES)
    grads, state = params + 1, opt.init(params)

    new, state = wrap(opt.update)(params, grads, state)
    new, state = wrap(opt.update)(new, grads, state)

    assert_trees_equal(new, params - 0.15, rtol=1e-5, atol=1e-6)
    assert state["step"].tolist() == [2, 2, 2]
    with pytest.raises(BatchSizeError, match=r"the schedule of lr[\s\S]*one number[\s\S]*\[3\]"):
        wrap(wrong.update)(params, grads, wrong.init(params))


def test_optimizers_show_their_hyperparameters():
    """A notebook would show the addresses of functions."""
    opt = adam(lr=lambda step: 0.1 / (step + 1), betas=(torch.tensor(0.5), torch.ones(3) / 2), weight_decay=1e-4)
    words = "adam(lr=<a function>, beta1=0.5, beta2=tensor of shape [3], eps=1e-08, weight_decay=0.0001)"

    assert repr(opt) == words
    assert repr(chain(clip_by_global_norm(1.0), opt)) == f"Chain(maps=(clip_by_global_norm,), last={words})"
