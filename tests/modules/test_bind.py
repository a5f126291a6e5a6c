"""`to_module`: for good, in a block, inside transforms; what it checks and what it puts back."""

import copy
import gc
import pickle
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tdfunc import (
    ConcurrencyError,
    TensorDict,
    TieError,
    from_module,
    stack,
)
from tests.helpers import TiedLM
from tests.models import CASES, Norm, Shared, Tied, WithState, make_case, make_mlp


def slots_of(model):
    """Every parameter and buffer by name, aliases included: the very objects."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def is_untouched(model, before):
    """Whether the module holds the same objects in the same order."""
    now = slots_of(model)
    return list(now) == list(before) and all(now[name] is before[name] for name in before)


def zeros_of(model):
    """The module's tree with every leaf zero, unconnected to the module."""
    return from_module(model).apply(torch.zeros_like).detach()


def load_for_good(tree, model):
    """The call alone."""
    tree.to_module(model)


def load_in_a_block(tree, model):
    """The block alone: at a dual level the call binds nothing."""
    with torch.autograd.forward_ad.dual_level(), tree.to_module(model):
        pass


WAYS = [load_for_good, load_in_a_block]


# -- for good -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_law_a_tree_goes_round(name):
    """Loading a module's tree into another module would not make the two equal."""
    model, x = make_case(name)
    other, _ = make_case(name)
    from_module(model).clone().to_module(other)

    assert list(other.state_dict()) == list(model.state_dict())
    assert torch.equal(other.eval()(x), model.eval()(x))
    names = [n for n, _ in other.named_parameters()]
    assert names == [n for n, _ in model.named_parameters()]


def test_parameters_go_in_as_themselves():
    """An optimizer made on the tree's Parameters would train something else than the module."""
    source, model = make_mlp(), make_mlp()
    from_module(source).to_module(model)

    assert all(a is b for a, b in zip(source.parameters(), model.parameters(), strict=True))


def test_other_leaves_become_parameters_that_share_storage():
    """A load would copy, or keep a plain tensor that no optimizer sees."""
    model = make_mlp()
    tree = zeros_of(model)
    tree.to_module(model)

    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
    assert model[0].weight.data_ptr() == tree["0", "weight"].data_ptr()


def test_frozen_slots_stay_frozen():
    """A load would unfreeze what the module had frozen."""
    model = make_mlp()
    model[0].weight.requires_grad_(False)
    zeros_of(model).to_module(model)

    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


def test_history_is_cut():
    """A Parameter would keep the graph of the expression that it was computed by."""
    model = make_mlp()
    tree = from_module(model).apply(lambda p: p * 2.0)
    tree.to_module(model)

    assert all(p.is_leaf and p.requires_grad for p in model.parameters())


def test_integer_parameters():
    """A parameter that cannot have gradients would not load."""
    model = nn.Module()
    model.ids = nn.Parameter(torch.arange(3), requires_grad=False)
    TensorDict({"ids": torch.tensor([4, 5, 6])}).to_module(model)

    assert model.ids.tolist() == [4, 5, 6]


def test_buffers_are_plain_tensors():
    """A Parameter in a buffer slot would show up among the parameters."""
    model = Norm()
    tree = from_module(model).set(("norm", "running_mean"), nn.Parameter(torch.ones(4)))
    tree.to_module(model)

    assert type(model.norm.running_mean) is torch.Tensor
    assert not model.norm.running_mean.requires_grad


@pytest.mark.parametrize("make", [Tied, Shared])
def test_ties_survive_a_load(make):
    """After a load two names of one weight would be two weights, as in the incumbent."""
    model = make()
    zeros_of(model).to_module(model)
    named = dict(model.named_parameters(remove_duplicate=False))

    assert len({id(p) for p in named.values()}) == len(list(model.parameters()))
    assert len(named) > len(list(model.parameters()))


def test_equal_copies_restore_a_tie():
    """A checkpoint that stored both names could not be loaded into the tied module."""
    model = Tied()
    saved = {key: value.clone() + 1 for key, value in model.state_dict().items()}
    TensorDict(saved).unflatten_keys(".").to_module(model)

    assert model.out.weight is model.emb.weight
    assert torch.equal(model.out.weight, saved["emb.weight"])


def test_extra_state_is_set():
    """The module would keep its old extra state under new weights."""
    model, other = WithState(), WithState()
    model.state = {"scale": 5.0}
    from_module(model).to_module(other)

    assert other.state == {"scale": 5.0}


def test_a_slice_binds_to_its_submodule():
    """A sub-tree would not fit the submodule that it came from."""
    model = make_mlp()
    zeros_of(model)["0"].to_module(model[0])

    assert not model[0].weight.any()
    assert model[3].weight.any()


def test_a_state_dict_without_non_persistent_buffers_fits():
    """A checkpoint never has them, so that it could never be loaded strictly."""
    model = make_mlp()
    model.register_buffer("cache", torch.ones(2), persistent=False)
    TensorDict(model.state_dict()).unflatten_keys(".").to_module(model)

    assert torch.equal(model.cache, torch.ones(2))


def test_other_devices_and_memory_formats_go_in():
    """A leaf on the meta device or in another memory format would be refused or converted."""
    model = nn.Conv2d(2, 3, 1)
    from_module(model).apply(lambda p: p.detach().to("meta")).to_module(model)
    assert model.weight.is_meta

    tree = from_module(nn.Conv2d(2, 3, 1)).apply(lambda p: p.detach())
    tree = tree.set("weight", tree["weight"].to(memory_format=torch.channels_last))
    tree.to_module(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


# -- checks come before writes ------------------------------------------------------------------------------------


class Fragile(WithState):
    """A module whose extra state cannot be negative."""

    def set_extra_state(self, state):
        if state["scale"] < 0:
            raise ValueError("negative")
        super().set_extra_state(state)


@pytest.mark.parametrize("load", WAYS)
def test_a_failing_set_extra_state_undoes_the_load(load):
    """A module that refuses its extra state would be left half written, and its block open."""
    model, bad = Fragile(), Fragile()
    bad.state = {"scale": -1.0}
    before, tree = slots_of(model), from_module(bad)
    with pytest.raises(ValueError, match="negative"):
        load(tree, model)

    assert is_untouched(model, before)
    assert model.state == {"scale": 1.0}
    assert "_tdfunc_owner" not in model.__dict__


# -- in a block ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_every_exit_puts_back_what_was_there(error):
    """An exception in the block would leave the module with the tree's weights, or be replaced by another."""
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
    assert not any("_tdfunc_owner" in sub.__dict__ for sub in model.modules())


def interrupt_at(count, run):
    """Run with Ctrl-C at the line of that number within what enters and leaves blocks; False if it has fewer lines."""
    # Not in functions that hold the lock by `with`: an error at the line where that ends, which no signal can raise,
    # would leave it locked.
    inside = {"_claim", "_release", "_blocks", "_refuse_other_thread", "write", "restore"}
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


def test_ctrl_c_at_any_line_of_entering_and_leaving():
    """Ctrl-C between two assignments would leave a module with some weights of the tree, for good."""
    model = Tied()
    before, zeros = slots_of(model), zeros_of(model)

    def run():
        with zeros.to_module(model):
            pass

    count = 1
    while interrupt_at(count, run):
        assert is_untouched(model, before), count
        assert not any("_tdfunc_owner" in sub.__dict__ for sub in model.modules()), count
        count += 1
    assert count > 40


def test_ctrl_c_in_nested_blocks():
    """A block that Ctrl-C ends would take the weights of the block around it away, or leave its own."""
    model = make_mlp()
    before, zeros = slots_of(model), zeros_of(model)
    ones = zeros.apply(torch.ones_like)
    around = []

    def inner():
        with ones.to_module(model):
            pass

    count = 1
    while True:
        with zeros.to_module(model):
            bound = slots_of(model)
            more = interrupt_at(count, inner)
            around.append(is_untouched(model, bound))
        assert is_untouched(model, before), count
        if not more:
            break
        count += 1
    assert all(around)


def test_gradients_reach_the_leaves():
    """Leaves would be detached into Parameters of their own, as in 0.14.0 of the incumbent."""
    model = make_mlp()
    leaf = from_module(model).detach().apply(lambda p: p.clone().requires_grad_())
    derived = leaf.apply(lambda p: p * 2.0)
    with derived.to_module(model):
        model(torch.ones(1, 3)).sum().backward()

    assert all(p.grad is not None for p in leaf.values(True, True))
    assert all(p.grad is None for p in model.parameters())


def test_buffers_of_the_tree_are_not_written():
    """BatchNorm would write its statistics into the tree, or into the module."""
    model = Norm()
    tree = from_module(model).clone()
    with tree.to_module(model):
        model(torch.randn(8, 3))
        assert model.norm.num_batches_tracked == 1

    assert tree["norm", "num_batches_tracked"] == 0
    assert model.norm.num_batches_tracked == 0


def test_extra_state_is_put_back():
    """A block would leave its extra state behind, also where the module updates it in place."""
    model, other = WithState(), WithState()
    other.state = {"scale": 7.0}
    with from_module(other).to_module(model):
        assert model.get_extra_state()["scale"] == 7.0
        model(torch.zeros(1, 3))

    assert model.state == {"scale": 1.0}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_law_blocks_nest(which):
    """Blocks on a module and its submodules, in any nesting, would not unwind to what each found."""
    model = make_mlp()
    targets = [(model, lambda t: t), (model[0], lambda t: t["0"]), (model[3], lambda t: t["3"])]
    seen = []

    def enter(depth):
        seen.append(slots_of(model))
        if depth < len(which):
            module, part = targets[which[depth]]
            tree = part(from_module(model).apply(lambda p: torch.full_like(p, depth)).detach())
            with tree.to_module(module):
                assert (module.weight if module is not model else model[0].weight).flatten()[0] == depth
                enter(depth + 1)
        assert is_untouched(model, seen.pop())

    enter(0)
    assert not any("_tdfunc_owner" in sub.__dict__ for sub in model.modules())


def test_inner_exception_leaves_the_outer_block_bound():
    """An exception caught between two blocks would leave the inner one's weights in place."""
    model = nn.Linear(2, 2)
    ones, twos = (from_module(model).apply(lambda p, v=v: torch.full_like(p, v)).detach() for v in (1.0, 2.0))
    with ones.to_module(model):
        with pytest.raises(ValueError, match="inner"), twos.to_module(model):
            raise ValueError("inner")

        assert model.weight[0, 0] == 1.0


def holding(model, tree, log):
    """A generator that holds a block open between its values."""
    with tree.to_module(model):
        for _ in range(2):
            log.append(model.weight.detach().flatten()[0].item())
            yield


def test_interleaved_generators_restore_and_raise():
    """Two generators on one module would leave it with the weights of one of them, for good."""
    model = nn.Linear(2, 2)
    before = slots_of(model)
    trees = [from_module(model).apply(lambda p, v=v: torch.full_like(p, v)).detach() for v in (0.0, 1.0)]
    log = []
    first, second = (holding(model, tree, log) for tree in trees)
    next(first)
    next(second)
    with pytest.raises(ConcurrencyError, match=r"left in order; its original weights are back[\s\S]*two generators"):
        list(first)

    assert is_untouched(model, before)
    with pytest.raises(ConcurrencyError, match="left in order"):
        list(second)
    assert is_untouched(model, before)
    assert not any("_tdfunc_owner" in sub.__dict__ for sub in model.modules())


def test_closing_an_outer_generator_first_raises():
    """`close()` would hide that the module's blocks were left out of order."""
    model = nn.Linear(2, 2)
    before, tree = slots_of(model), zeros_of(nn.Linear(2, 2))
    first, second = (holding(model, tree, []) for _ in range(2))
    next(first)
    next(second)
    with pytest.raises(ConcurrencyError):
        first.close()

    assert is_untouched(model, before)
    with pytest.raises(ConcurrencyError):
        second.close()


def test_out_of_order_over_a_submodule():
    """Blocks that share only a submodule would not be unwound together."""
    model = make_mlp()
    before, tree = slots_of(model), zeros_of(make_mlp())
    outer = tree.to_module(model)
    outer.__enter__()
    inner = tree["0"].to_module(model[0])
    inner.__enter__()
    for handle in (outer, inner):
        with pytest.raises(ConcurrencyError):
            handle.__exit__(None, None, None)

        assert is_untouched(model, before)
    assert not any("_tdfunc_owner" in sub.__dict__ for sub in model.modules())


def test_an_error_out_of_order_is_not_hidden():
    """The user's own exception would be replaced by ours."""
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


def test_a_handle_is_entered_once():
    """A second `with` on one handle would put back the wrong things."""
    model = nn.Linear(2, 2)
    handle = zeros_of(model).to_module(model)
    with handle:
        pass

    with pytest.raises(ConcurrencyError, match="entered once"):
        handle.__enter__()


def test_a_second_thread_is_refused():
    """Two threads would swap weights under each other's forward."""
    model = make_mlp()
    tree, errors = zeros_of(model), []

    def enter(target, part):
        try:
            part.to_module(target)
        except ConcurrencyError as err:
            errors.append(str(err))

    with tree.to_module(model):
        for target, part in ((model, tree), (model[0], tree["0"])):
            thread = threading.Thread(target=enter, args=(target, part))
            thread.start()
            thread.join()
    thread = threading.Thread(target=enter, args=(model, tree))
    thread.start()
    thread.join()

    assert len(errors) == 2
    assert "another thread is inside a block on Sequential" in errors[0]
    assert "apply(params, x) is thread-safe" in errors[1]


def test_copies_made_in_a_block_are_free():
    """A copy or pickle made inside a block would be locked for other threads for ever, or hold the block."""
    model = make_mlp()
    with zeros_of(model).to_module(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    results = []
    for new in copies:
        thread = threading.Thread(target=lambda m=new: results.append(zeros_of(m).to_module(m)))
        thread.start()
        thread.join()

    assert len(results) == 2


# -- inside transforms --------------------------------------------------------------------------------------------


def call_with(model, x):
    """A function of the tree that runs the model inside a block."""

    def run(tree):
        with tree.to_module(model, strict=False):
            return model(x)

    return run


@pytest.mark.parametrize("name", CASES)
def test_a_block_equals_functional_call(name):
    """A block would bind other weights than `torch.func.functional_call` does."""
    model, x = make_case(name)
    model.eval()
    tree = from_module(model).detach().apply(lambda p: p * 0.5 if p.is_floating_point() else p)
    flat = {".".join(path): leaf for path, leaf in tree.items(True, True)}

    assert torch.equal(call_with(model, x)(tree), torch.func.functional_call(model, flat, (x,)))


def test_grad_vmap_jvp_through_a_block():
    """Leaves would be wrapped on their way in: derivatives would be zero, or members equal."""
    model, x = make_mlp(), torch.randn(5, 3)
    params = from_module(model).detach()
    run = call_with(model, x)
    flat = {".".join(path): leaf for path, leaf in params.items(True, True)}

    def oracle(flat):
        return torch.func.functional_call(model, flat, (x,))

    grads = torch.func.grad(lambda p: run(p).square().sum())(params)
    expected = torch.func.grad(lambda p: oracle(p).square().sum())(flat)
    assert all(torch.equal(grads[tuple(name.split("."))], value) for name, value in expected.items())

    tangent = params.apply(torch.ones_like)
    ours = torch.func.jvp(run, (params,), (tangent,))[1]
    theirs = torch.func.jvp(oracle, (flat,), ({k: torch.ones_like(v) for k, v in flat.items()},))[1]
    assert ours.any()
    assert torch.equal(ours, theirs)

    stacked = stack([params, params * 2.0])
    torch.testing.assert_close(torch.vmap(run)(stacked), torch.stack([run(params), run(params * 2.0)]))
    assert is_untouched(model, slots_of(model))


def test_jacfwd_and_dual_levels_through_a_block():
    """Forward-mode derivatives would be zero in silence, as in the incumbent."""
    model, x = make_mlp(), torch.randn(5, 3)
    params = from_module(model).detach()
    run = call_with(model, x)
    forward, reverse = torch.func.jacfwd(run)(params), torch.func.jacrev(run)(params)
    torch.testing.assert_close(forward["0", "weight"], reverse["0", "weight"])
    assert forward["0", "weight"].any()

    with torch.autograd.forward_ad.dual_level():
        dual = params.apply(lambda p: torch.autograd.forward_ad.make_dual(p, torch.ones_like(p)))
        tangent = torch.autograd.forward_ad.unpack_dual(run(dual)).tangent
    expected = torch.func.jvp(run, (params,), (params.apply(torch.ones_like),))[1]
    torch.testing.assert_close(tangent, expected)


def test_the_call_alone_binds_nothing_in_a_transform():
    """A batched or dual tensor would stay in the module after the transform."""
    model = nn.Linear(3, 2)
    before, stacked = slots_of(model), stack([from_module(model).detach()] * 2)

    def load(tree):
        tree.to_module(model)
        gc.collect()
        return tree["bias"]

    with pytest.warns(UserWarning, match="the call alone binds nothing"):
        torch.vmap(load)(stacked)

    assert is_untouched(model, before)


def test_no_warning_for_a_block_that_was_entered():
    """Every block in a transform would warn."""
    model = nn.Linear(3, 2)
    torch.vmap(call_with(model, torch.zeros(3)))(stack([from_module(model).detach()] * 2))

    gc.collect()


def test_values_of_a_tie_cannot_be_compared_in_a_transform():
    """Inside grad two copies of a tied weight would be taken for one, and one gradient lost."""
    model = Tied()
    tree = TensorDict({"emb": {"weight": torch.zeros(5, 4)}, "out": {"weight": torch.zeros(5, 4)}})

    with pytest.raises(TieError, match=r"'emb.weight' and 'out.weight'"):
        torch.func.grad(lambda t: call_with(model, torch.arange(3))(t).sum())(tree)


def test_maml_through_blocks():
    """A gradient through an inner update would miss the part that goes through the weights."""
    model, x, t = make_mlp(), torch.randn(5, 3), torch.randn(5, 2)
    params = from_module(model).detach()
    flat = {".".join(path): leaf for path, leaf in params.items(True, True)}

    def inner(call, p, update):
        grads = torch.func.grad(lambda p: (call(p) - t).square().mean())(p)
        return (call(update(p, grads)) - t).square().mean()

    ours = torch.func.grad(lambda p: inner(call_with(model, x), p, lambda p, g: p - g * 0.1))(params)
    theirs = torch.func.grad(
        lambda p: inner(
            lambda q: torch.func.functional_call(model, q, (x,)), p, lambda p, g: {k: p[k] - 0.1 * g[k] for k in p}
        )
    )(flat)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[tuple(name.split("."))], value)


def test_one_name_of_a_tied_weight_is_enough():
    """Files that keep one name of a tied weight (as Hugging Face's do) would leave the other name as it was."""
    source, target = TiedLM(), TiedLM()
    part = tdf.from_module(source).untie(("out", "weight")).delete(("out", "weight"))

    part.to_module(target)

    ids = torch.arange(5)[None]
    assert target.out.weight is target.emb.weight
    assert torch.equal(target(ids), source(ids))
    apply, _, _ = tdf.functional(target)
    assert torch.equal(apply(part, ids), source(ids))
    with part.to_module(TiedLM(), strict=False) as bound:
        assert torch.equal(bound(ids), source(ids))
