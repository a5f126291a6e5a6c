"""`to_module`: for good, in a block, inside transforms; the module is put back on every exit."""

import copy
import gc
import pickle
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import ConcurrencyError, TensorDict, from_module, functional, stack
from tests.helpers import TiedLM, run_in_threads
from tests.models import CASES, Norm, Shared, Tied, WithState, flat, make_case, make_mlp, zeros_of


def slots_of(model):
    """Every parameter and buffer by name, aliases included: the very objects."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def is_untouched(model, before):
    """Return whether the module holds the same objects in the same order, and no block is open on it."""
    now = slots_of(model)
    same = list(now) == list(before) and all(now[name] is before[name] for name in before)
    return same and not any("_tdfunc_owner" in sub.__dict__ for sub in model.modules())


# -- for good -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_law_a_tree_goes_round(name):
    """Loading a module's tree into another module makes the two equal."""
    model, x = make_case(name)
    other, _ = make_case(name)
    from_module(model).clone().to_module(other)

    assert list(other.state_dict()) == list(model.state_dict())
    assert torch.equal(other.eval()(x), model.eval()(x))
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_leaves_go_in_as_parameters():
    """Parameters go in themselves, a plain leaf as one without history, with its storage and the slot's flag."""
    source, model = make_mlp(), make_mlp()
    from_module(source).to_module(model)
    assert all(a is b for a, b in zip(source.parameters(), model.parameters(), strict=True))
    model[0].weight.requires_grad_(False)
    tree = from_module(model).apply(lambda p: p * 2.0)
    tree.to_module(model)

    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert model[0].weight.data_ptr() == tree["0", "weight"].data_ptr()


@pytest.mark.parametrize("mean", [torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3), requires_grad=False)])
def test_integer_parameters_and_buffers_go_in_as_they_are(mean):
    """A parameter that cannot have gradients loads, and a buffer slot gets a plain tensor."""
    model = nn.Module()
    model.ids = nn.Parameter(torch.arange(3), requires_grad=False)
    model.register_buffer("mean", torch.zeros(3))
    TensorDict({"ids": torch.tensor([4, 5, 6]), "mean": mean}).to_module(model)

    assert model.ids.tolist() == [4, 5, 6]
    assert type(model.mean) is torch.Tensor
    assert model.mean.requires_grad is False


def copies_of(model):
    """A tree of equal copies of the module's weights, each more by 1, without a tie."""
    return TensorDict({k: v.clone() + 1 for k, v in model.state_dict().items()}).unflatten_keys(".")


@pytest.mark.parametrize("tree_of", [zeros_of, copies_of], ids=["tied", "copies"])
@pytest.mark.parametrize("make", [Tied, Shared])
def test_ties_survive_a_load(make, tree_of):
    """Two names of one weight are one Parameter after a load, of a tree with the tie or of equal copies."""
    model = make()
    tree = tree_of(model)
    tree.to_module(model)
    named = dict(model.named_parameters(remove_duplicate=False))

    assert len({id(p) for p in named.values()}) == len(list(model.parameters())) < len(named)
    torch.testing.assert_close(named, {name: tree[tuple(name.split("."))] for name in named}, rtol=0, atol=0)


def test_one_name_of_a_tied_weight_is_enough():
    """Files that keep one name of a tied weight (as Hugging Face's do) fill both slots."""
    source, target = TiedLM(), TiedLM()
    part = from_module(source).untie(("out", "weight")).delete(("out", "weight"))
    part.to_module(target)
    ids = torch.arange(5)[None]

    assert target.out.weight is target.emb.weight
    assert torch.equal(target(ids), source(ids))
    assert torch.equal(functional(target)[0](part, ids), source(ids))
    with part.to_module(TiedLM(), strict=False) as bound:
        assert torch.equal(bound(ids), source(ids))


def test_parts_bind():
    """A sub-tree fits its submodule, and `strict=False` binds the parameters of `functional` without their buffers."""
    model = Norm()
    mean, weight = model.norm.running_mean, model.norm.weight
    zeros_of(model)["linear"].to_module(model.linear)
    assert not model.linear.weight.any()
    assert model.norm.weight is weight

    _, params, _ = functional(Norm())
    params.to_module(model, strict=False)
    assert torch.equal(model.linear.weight, params["linear", "weight"])
    assert model.norm.running_mean is mean


def test_a_state_dict_fits():
    """A checkpoint loads strictly: without non-persistent buffers and absent children, a tensor as extra state."""
    model = WithState()
    model.state = torch.tensor(5.0)
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model.register_module("absent", None)
    saved = TensorDict(model.state_dict()).unflatten_keys(".")
    model.state = torch.tensor(1.0)
    saved.to_module(model)

    assert torch.equal(model.cache, torch.ones(2))
    assert model.state == 5.0


class Fragile(WithState):
    """A module whose extra state cannot be negative."""

    def set_extra_state(self, state):
        if state["scale"] < 0:
            raise ValueError("negative")
        super().set_extra_state(state)


def test_extra_state_is_set_or_the_load_undone():
    """Extra state is loaded with the weights; a module that refuses it keeps both."""
    model, good, bad = Fragile(), Fragile(), Fragile()
    good.state, bad.state = {"scale": 5.0}, {"scale": -1.0}
    from_module(good).to_module(model)
    before, tree = slots_of(model), from_module(bad)
    with pytest.raises(ValueError, match="negative"):
        tree.to_module(model)
    with pytest.raises(ValueError, match="negative"), torch.autograd.forward_ad.dual_level(), tree.to_module(model):
        pass

    assert is_untouched(model, before)
    assert model.state == {"scale": 5.0}


# -- in a block ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_every_exit_puts_back_what_was_there(error):
    """The module has its own weights after the block, and an exception passes as it is."""
    model, x = make_case("resnet")
    before, expected = slots_of(model), model.eval()(x)
    try:
        with zeros_of(model).to_module(model) as same:
            assert same is model
            assert not model(x).any()
            if error is not None:
                raise error
    except BaseException as err:
        assert type(err) is error  # noqa: PT017 - GeneratorExit and SystemExit pass through pytest.raises badly

    assert is_untouched(model, before)
    assert torch.equal(model(x), expected)


def interrupt_at(count, run):
    """Run with Ctrl-C at the line of that number within what enters and leaves blocks; False if it has fewer lines."""
    # Not in functions that hold the lock by `with`: an error at the line where that ends, which no signal can raise,
    # would leave it locked.
    inside = {"_claim", "_release", "_refuse_other_thread", "write", "restore"}
    left = count

    def trace(frame, event, arg):
        nonlocal left
        if event == "line" and frame.f_code.co_name in inside:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


def run_block(tree, model):
    """Enter a block and leave it."""
    with tree.to_module(model):
        pass


def test_ctrl_c_at_any_line_of_entering_and_leaving():
    """Ctrl-C between two assignments leaves no weight of the tree in the module."""
    model = Tied()
    before, ones = slots_of(model), zeros_of(model).apply(torch.ones_like)
    block = partial(run_block, ones, model)

    whole, more = [], True
    while more:
        more = interrupt_at(len(whole) + 1, block)
        whole.append(is_untouched(model, before))

    assert len(whole) >= 40
    assert [line for line, right in enumerate(whole, 1) if not right] == []


def test_ctrl_c_at_any_line_inside_another_block():
    """Ctrl-C in an inner block leaves the weights of the outer one, which puts the module's own back."""
    model = Tied()
    before, zeros = slots_of(model), zeros_of(model)
    block = partial(run_block, zeros.apply(torch.ones_like), model)

    kept, whole, more = [], [], True
    while more:
        with zeros.to_module(model):
            bound = slots_of(model)
            more = interrupt_at(len(whole) + 1, block)
            kept.append(all(a is b for a, b in zip(slots_of(model).values(), bound.values(), strict=True)))
        whole.append(is_untouched(model, before))

    assert len(whole) >= 40
    assert [line for line, right in enumerate(kept, 1) if not right] == []
    assert [line for line, right in enumerate(whole, 1) if not right] == []


def test_blocks_write_to_neither_side():
    """Buffers and extra state that forward writes change neither the tree nor the module."""
    model, state = Norm(), WithState()
    tree, other = from_module(model).clone(), WithState()
    other.state = {"scale": 7.0}
    with tree.to_module(model), from_module(other).to_module(state):
        model(torch.randn(8, 3))
        assert model.norm.num_batches_tracked == 1
        assert state.get_extra_state()["scale"] == 7.0
        state(torch.zeros(1, 3))

    assert tree["norm", "num_batches_tracked"] == model.norm.num_batches_tracked == 0
    assert state.state == {"scale": 1.0}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.booleans())
def test_law_blocks_nest(which, fails):
    """Blocks on a module and its submodules, in any nesting, unwind to what each found, errors included."""
    model = make_mlp()
    targets = [(model, lambda t: t), (model[0], lambda t: t["0"]), (model[3], lambda t: t["3"])]
    start = slots_of(model)

    def enter(depth):
        if depth == len(which):
            if fails:
                raise ValueError
            return
        before = slots_of(model)
        module, part = targets[which[depth]]
        tree = part(from_module(model).apply(lambda p: torch.full_like(p, depth)).detach())
        try:
            with tree.to_module(module):
                assert (module.weight if module is not model else model[0].weight).flatten()[0] == depth
                enter(depth + 1)
        finally:
            assert all(a is b for a, b in zip(slots_of(model).values(), before.values(), strict=True))

    try:
        enter(0)
    except ValueError:
        assert fails
    assert is_untouched(model, start)


def holding(model, tree):
    """A generator that holds a block open between its values."""
    with tree.to_module(model):
        yield
        yield


@pytest.mark.parametrize("end", [list, lambda generator: generator.close()], ids=["exhausted", "closed"])
def test_interleaved_generators_restore_and_raise(end):
    """Blocks that are left out of order give the module its own weights back, and each exit raises."""
    model = make_mlp()
    before, tree = slots_of(model), zeros_of(model)
    first, second = holding(model, tree), holding(model[0], tree["0"])
    next(first)
    next(second)
    message = r"left out of order; its original weights are back[\s\S]*two generators"

    with pytest.raises(ConcurrencyError, match=message):
        end(first)
    assert is_untouched(model, before)
    with pytest.raises(ConcurrencyError, match=message):
        end(second)
    assert is_untouched(model, before)


def test_an_error_out_of_order_is_not_hidden():
    """An exception in a block passes, although the blocks are left out of order."""
    model = nn.Linear(2, 2)
    tree = zeros_of(model)
    outer, inner = tree.to_module(model), tree.to_module(model)

    def fail():
        with outer:
            inner.__enter__()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    with pytest.raises(ConcurrencyError):
        inner.__exit__(None, None, None)


def test_a_second_thread_is_refused():
    """A thread cannot load into a module, or a part of it, that another thread holds in a block."""
    model = make_mlp()
    tree, errors = zeros_of(model), []
    early = tree.apply(torch.ones_like).to_module(model)

    def enter(call):
        try:
            call()
        except ConcurrencyError as err:
            errors.append(str(err))

    with tree.to_module(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        run_in_threads(enter, [partial(tree.to_module, model), partial(tree["0"].to_module, model[0]), early.__enter__])
        assert not any(p.any() for p in model.parameters())
    run_in_threads(enter, [partial(tree.to_module, free) for free in (model, *copies)])

    assert len(errors) == 3
    assert all("another thread is inside a block on" in e and "apply(params, x) is thread-safe" in e for e in errors)


# -- inside transforms --------------------------------------------------------------------------------------------


def call_with(model, x):
    """A function of the tree that runs the model inside a block."""

    def run(tree):
        with tree.to_module(model, strict=False):
            return model(x)

    return run


def test_grad_vmap_jvp_through_a_block():
    """Derivatives of every mode are those of `functional_call`, and members differ."""
    model, x = make_mlp(), torch.randn(5, 3)
    params = from_module(model).detach()
    before, run = slots_of(model), call_with(model, x)

    def oracle(flat):
        return torch.func.functional_call(model, flat, (x,))

    grads = torch.func.grad(lambda p: run(p).square().sum())(params)
    expected = torch.func.grad(lambda p: oracle(p).square().sum())(flat(params))
    assert all(torch.equal(flat(grads)[name], value) for name, value in expected.items())

    tangent = params.apply(torch.ones_like)
    ours = torch.func.jvp(run, (params,), (tangent,))[1]
    assert torch.equal(ours, torch.func.jvp(oracle, (flat(params),), (flat(tangent),))[1])
    forward, reverse = torch.func.jacfwd(run)(params), torch.func.jacrev(run)(params)
    torch.testing.assert_close(forward["0", "weight"], reverse["0", "weight"])
    with torch.autograd.forward_ad.dual_level():
        dual = params.apply(lambda p: torch.autograd.forward_ad.make_dual(p, torch.ones_like(p)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(run(dual)).tangent, ours)

    stacked = stack([params, params * 2.0])
    torch.testing.assert_close(torch.vmap(run)(stacked), torch.stack([run(params), run(params * 2.0)]))
    assert is_untouched(model, before)


def test_the_call_alone_binds_nothing_in_a_transform():
    """No batched tensor stays in the module; the dropped handle warns, one that was entered does not."""
    model = nn.Linear(3, 2)
    before, stacked = slots_of(model), stack([from_module(model).detach()] * 2)

    def load(tree):
        tree.to_module(model)
        gc.collect()
        return tree["bias"]

    with pytest.warns(UserWarning, match="the call alone binds nothing"):
        torch.vmap(load)(stacked)
    torch.vmap(call_with(model, torch.zeros(3)))(stacked)
    gc.collect()

    assert is_untouched(model, before)
