"""Complex parameters: each rule against torch.optim, wrappers against their real and imaginary parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict, optim
from tests.helpers import assert_trees_equal, quick
from tests.optim.table import FAST, FUSED, RULES, TORCH, WRAPPERS, Lion, train

REFUSED = (TORCH.Adafactor, TORCH.Muon)
TAKEN = [name for name, (_, cls, _) in RULES.items() if cls not in REFUSED]
each_rule = pytest.mark.parametrize("name", quick(TAKEN, *set(FAST) & set(TAKEN)))
MEMBERS = 3
KEYS = ("z", "one", "real")
LAYOUTS = {"conjugate": lambda z: z.conj(), "transpose": lambda z: z.mT, "expanded": lambda z: z.expand(2, 3, 3)}


def random_tree(generator, dtype, batch=(MEMBERS,)):
    """A tree of complex and real leaves, of an odd number of elements."""
    make = lambda *shape, dtype=dtype: torch.randn((*batch, *shape), generator=generator, dtype=dtype)  # noqa: E731
    return TensorDict({"z": make(3, 5), "one": make(), "real": make(7, dtype=dtype.to_real())}, batch)


def parts_of(tree):
    """The same tree with real and imaginary parts as a last dimension."""
    return tree.apply(lambda x: torch.view_as_real(x) if x.is_complex() else x)


def train_torch(name, params, grads):
    """Train plain Parameters with torch.optim."""
    _, cls, options = RULES[name]
    leaves = {key: nn.Parameter(params[key].clone()) for key in KEYS}
    if cls is Lion:
        leaves = {key: nn.Parameter(parts_of(params)[key].clone()) for key in KEYS}
        grads = [parts_of(grad) for grad in grads]
    kernels = {"fused": False} if cls in FUSED else {}
    optimizer = cls(leaves.values(), foreach=False, **kernels, **options)
    for grad in grads:
        for key, leaf in leaves.items():
            leaf.grad = grad[key].clone()
        optimizer.step()
    trained = params.update({key: leaf.detach() for key, leaf in leaves.items()})
    if cls is Lion:
        trained = params.update({key: torch.view_as_complex(trained[key]) for key in ("z", "one")})
        trained = trained.set("real", leaves["real"].detach())
    return trained


@each_rule
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64], ids=str)
def test_steps_are_those_of_torch(name, dtype, generator):
    """A complex number is two real ones, in the state as well."""
    params, *grads = [random_tree(generator, dtype) for _ in range(6)]
    make, _, options = RULES[name]
    opt = make(**options)

    new, _ = train(opt.update, opt.init(params), params, grads)

    tolerance = 1e-10 if dtype == torch.complex128 else 2e-5
    assert_trees_equal(new, train_torch(name, params, grads), rtol=tolerance, atol=tolerance)


@each_rule
@pytest.mark.parametrize("wrap", [tdf.jit, torch.vmap], ids=["jit", "vmap"])
def test_transforms_equal_plain_steps(name, wrap, generator):
    """In a replay, and member by member."""
    params, *grads = [random_tree(generator, torch.complex128) for _ in range(4)]
    make, _, options = RULES[name]
    opt = make(**options)
    init = torch.vmap(opt.init) if wrap is torch.vmap else opt.init

    new, state = train(wrap(opt.update), init(params), params, grads)

    expected, expected_state = train(opt.update, opt.init(params), params, grads)
    assert_trees_equal(new, expected, rtol=1e-10, atol=1e-10)
    assert_trees_equal(state, expected_state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "parts"])
def test_wrappers_train_both_parts(name, generator):
    """Like a tree of the real and imaginary parts; "nest" clips by a norm that is the same for both."""
    params, *grads = [random_tree(generator, torch.complex128) for _ in range(6)]
    opt = WRAPPERS[name]()

    new, state = train(opt.update, opt.init(params), params, grads)

    split, split_state = train(opt.update, opt.init(parts_of(params)), parts_of(params), map(parts_of, grads))
    assert_trees_equal(parts_of(new), split, rtol=1e-10, atol=1e-10)
    average = parts_of(opt.eval_params(new, state))
    assert_trees_equal(average, opt.eval_params(split, split_state), rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 2**32), rates=st.lists(st.floats(1e-3, 0.5), min_size=MEMBERS, max_size=MEMBERS))
def test_members_have_rates_of_their_own(seed, rates):
    """Each is a run of its own."""
    generator = torch.Generator().manual_seed(seed)
    params, *grads = [random_tree(generator, torch.complex128) for _ in range(4)]
    opt = optim.adamw(torch.tensor(rates, dtype=torch.float64))

    new, _ = train(opt.update, opt.init(params), params, grads)

    alone = []
    for i, rate in enumerate(rates):
        own = optim.adamw(rate)
        alone.append(train(own.update, own.init(params[i]), params[i], [grad[i] for grad in grads])[0])
    assert_trees_equal(new, tdf.stack(alone), rtol=1e-9, atol=1e-9)


def test_a_loss_of_complex_parameters_is_trained(generator):
    """By the gradients of `tdf.grad`, as by `backward()` and torch.optim."""
    z, target = torch.randn(2, 4, generator=generator, dtype=torch.complex128)
    params, opt = TensorDict({"z": z}), optim.adam(0.1)
    state = opt.init(params)
    plain = nn.Parameter(z.clone())
    other = torch.optim.Adam([plain], 0.1)
    for _ in range(5):
        grads = tdf.grad(lambda p: (p["z"].square() - target).abs().square().sum())(params)
        params, state = opt.update(params, grads, state)
        other.zero_grad()
        (plain.square() - target).abs().square().sum().backward()
        other.step()

    torch.testing.assert_close(params["z"], plain.detach())


OPTIMIZERS = {"adam": optim.adam(), "masked": optim.masked(optim.adam(), "z"), "ema": optim.ema(optim.sgd(), 0.9)}


@pytest.mark.parametrize("opt", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_inactive_members_stay(opt, generator):
    """Their numbers are the same to the last bit."""
    params = random_tree(generator, torch.complex64)

    new, _ = opt.update(params, params, opt.init(params), active=torch.tensor([True, False, True]))

    assert_trees_equal(new[1], params[1])


def test_donated_leaves_are_as_before(generator):
    """A complex leaf is not overwritten, and the result is right."""
    params, grads = random_tree(generator, torch.complex64), random_tree(generator, torch.complex64)
    opt = optim.adam(0.1)

    new, _ = opt.update(params.clone(), grads, opt.init(params), donate=True)

    assert_trees_equal(new, opt.update(params, grads, opt.init(params))[0])


def test_leaves_that_require_grad_stay_leaves(generator):
    """Of a step that is not differentiated."""
    params = random_tree(generator, torch.complex64).apply(lambda x: x.requires_grad_())
    opt = optim.adam(0.1)

    new, _ = opt.update(params, params.detach(), opt.init(params))

    assert [leaf.requires_grad and leaf.is_leaf for leaf in new.leaves()] == [True] * 3


def test_a_step_is_differentiated(generator):
    """As plain autograd differentiates the same step."""
    z = torch.randn(4, generator=generator, dtype=torch.complex128, requires_grad=True)
    opt = optim.sgd(0.1)
    params = TensorDict({"z": z})
    [grad] = torch.autograd.grad(z.abs().pow(4).sum(), [z], create_graph=True)
    new, _ = opt.update(params, TensorDict({"z": grad}), opt.init(params))
    [found] = torch.autograd.grad(new["z"].abs().square().sum(), [z], retain_graph=True)

    [expected] = torch.autograd.grad((z - 0.1 * grad).abs().square().sum(), [z])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_trained(layout, generator):
    """A lazy conjugate, a transpose, and an expanded leaf."""
    z = LAYOUTS[layout](torch.randn(3, 3, generator=generator, dtype=torch.complex64))
    params, opt = TensorDict({"z": z}), optim.adam(0.1)

    new, _ = opt.update(params, params, opt.init(params))

    same = TensorDict({"z": z.resolve_conj().clone(memory_format=torch.contiguous_format)})
    assert_trees_equal(new.clone(), opt.update(same, same, opt.init(same))[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [optim.adafactor, optim.muon, optim.sparse_adam], ids=lambda make: make.__name__)
def test_rules_that_torch_refuses_are_refused(make):
    """With the leaf, and what to do."""
    params = TensorDict({"z": torch.ones(2, 2, dtype=torch.complex64)})

    with pytest.raises(tdf.LeafMismatchError, match=rf"(?s){make.__name__}: the leaf 'z' .* complex.*complex64.*multi"):
        make().init(params)


@pytest.mark.parametrize("clip", [optim.clip_by_global_norm(0.5), optim.clip_by_member_norm(0.5)], ids=repr)
def test_a_clip_is_that_of_torch(clip, generator):
    """Of one model."""
    grads = random_tree(generator, torch.complex128, ())
    leaves = {key: nn.Parameter(torch.zeros_like(grads[key])) for key in KEYS}
    for key, leaf in leaves.items():
        leaf.grad = grads[key].clone()
    torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)

    assert_trees_equal(clip(grads), grads.update({key: leaf.grad for key, leaf in leaves.items()}), rtol=1e-7)
