"""Member i draws from `fold_in(key, i)`: in every way, for any number of members."""

import random
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from tdfunc import Ensemble, UnsupportedError, functional, init_ensemble, stack_modules
from tdfunc.core.generators import default_generators
from tdfunc.ensemble.draws import run_seeded, watch
from tests.ensemble.models import Attention, Returns, ensemble_of, line
from tests.helpers import examples, run_in_threads


def make_dropout():
    """A network with dropout and batch norm, in training mode."""
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


@examples(0.4)
@given(seed=st.integers(-(2**40), 2**40), members=st.integers(1, 5), chunk=st.none() | st.integers(1, 3))
@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
def test_law_member_i_is_apply_with_its_own_seed(seed, members, chunk):
    """Dropout under vmap equals the loop, whatever the chunks; members are the same among fewer."""
    tree = init_ensemble(make_dropout, members)
    apply, _, _ = functional(make_dropout())
    x = torch.arange(12.0).sin().reshape(4, 3)
    ways = {how: Ensemble(apply, how, chunk_size=chunk) for how in ("loop", "vmap", "auto")}
    expected = ways["loop"](tree, x, rng=seed)

    assert_close({how: way(tree, x, rng=seed) for how, way in ways.items()}, dict.fromkeys(ways, expected))
    assert_close({how: way(tree[:2], x, rng=seed) for how, way in ways.items()}, dict.fromkeys(ways, expected[:2]))


@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
def test_a_generator_gives_another_seed_each_call(generator):
    """A generator gives other masks at each step, decided by its state."""
    ensemble, tree = ensemble_of([make_dropout() for _ in range(3)])
    x = torch.ones(4, 3)
    state = generator.get_state()
    first, second = [ensemble(tree, x, rng=generator) for _ in range(2)]
    generator.set_state(state)

    assert not torch.allclose(first, second)
    assert torch.equal(ensemble(tree, x, rng=generator), first)


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["auto", "loop"])
@pytest.mark.parametrize(
    "make", [Attention, lambda: nn.Sequential(nn.Linear(3, 4), nn.RReLU())], ids=["attention", "rrelu"]
)
def test_the_loop_seeds_what_takes_no_generator(make, how):
    """Under `rng=` the loop is reproducible, independent of E, and leaves torch's default generator as it was."""
    ensemble, tree = ensemble_of([make() for _ in range(4)], how)
    x = torch.ones(5, 3)
    before = torch.get_rng_state()
    outs = [
        torch.utils._pytree.tree_leaves(ensemble(tree[:n], x, rng=seed))[0]
        for n, seed in ((4, 0), (4, 0), (2, 0), (4, 1))
    ]

    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0][:2], outs[2])
    assert not torch.allclose(outs[0], outs[3])
    assert not torch.allclose(outs[0][0], outs[0][1])


def test_the_loop_restores_the_default_generator_after_an_error():
    """An exception in forward leaves torch's default generator as it was before the call."""
    ensemble, tree = ensemble_of([Attention() for _ in range(3)], "loop")
    before = torch.get_rng_state()

    with pytest.raises(RuntimeError):
        ensemble(tree, torch.ones(5, 4), rng=0)
    assert torch.equal(before, torch.get_rng_state())


def test_ctrl_c_puts_the_default_generator_back():
    """Ctrl-C at any point of a seeded run leaves the default generator as it was."""
    before, generators = torch.get_rng_state(), default_generators([])

    def interrupt_at(count):
        left = count

        def profile(frame, event, arg):
            nonlocal left
            if event == "c_return" and frame.f_code is run_seeded.__code__:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            run_seeded(generators, 7, torch.default_generator.seed)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return left <= 0

    kept = []
    while interrupt_at(len(kept) + 1):
        kept.append(torch.equal(before, torch.get_rng_state()))

    assert len(kept) >= 3
    assert [point for point, right in enumerate(kept, 1) if not right] == []


def test_loops_in_threads_do_not_meet():
    """Two threads that seed the one default generator wait for each other."""
    ensemble, tree = ensemble_of([Attention() for _ in range(3)], "loop")
    x = torch.ones(5, 3)
    expected = [ensemble(tree, x, rng=seed) for seed in range(4)]
    before = torch.get_rng_state()
    wrong = []

    def work(seed):
        for _ in range(15):
            if not torch.equal(ensemble(tree, x, rng=seed), expected[seed]):
                wrong.append(seed)

    run_in_threads(work, range(4))

    assert wrong == []
    assert torch.equal(before, torch.get_rng_state())


def test_a_loop_inside_a_loop():
    """A member may run an ensemble itself."""
    inner, inner_tree = ensemble_of([Attention() for _ in range(2)], "loop")
    ensemble, tree = ensemble_of([Returns(lambda y: y + inner(inner_tree, torch.ones(2, 3), rng=1).sum())] * 2, "loop")

    assert ensemble(tree, torch.ones(5, 3), rng=0).shape == (2, 5, 2)


def test_another_threads_draws_are_not_the_members():
    """Draws in another thread, as of a data loader, are not those of forward."""
    models = [Returns(lambda y: (torch.rand(1), y)[1]).eval() for _ in range(2)]
    ensemble, tree = ensemble_of([Returns(draw_in_a_thread) for _ in range(2)], "loop")

    assert ensemble(tree, torch.ones(5, 3)).shape == (2, 5, 2)
    with pytest.raises(UnsupportedError, match="no rng was given"):
        Ensemble(functional(models[0])[0], "loop")(stack_modules(models), torch.ones(5, 3))


def test_draws_of_one_of_several_generators_are_seen():
    """A draw from one device's default generator counts, although the others stay."""
    generators = [torch.Generator(), torch.default_generator]

    _, has_drawn = watch(generators, lambda: torch.rand(1))
    assert has_drawn is True


def test_no_draws_are_seen():
    """Without a draw, the result comes back and nothing counts."""
    result, has_drawn = watch([torch.Generator(), torch.default_generator], lambda: torch.ones(1))

    assert result == 1
    assert has_drawn is False


def draw_in_a_thread(y):
    """Attention without dropout, while another thread moves the default generator."""
    thread = threading.Thread(target=torch.rand, args=(1,))
    thread.start()
    thread.join()
    return F.scaled_dot_product_attention(*[y[None, None]] * 3)[0, 0]


def test_a_generator_of_forwards_own_is_the_modules_affair():
    """A forward that brings its own generator runs without `rng=`."""
    models = [Returns(lambda y: y + torch.rand(2, generator=torch.Generator().manual_seed(1))) for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3)

    assert_close(ensemble(tree, x), torch.stack([model(x) for model in models]))
    assert line(ensemble).startswith("loop")


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
@pytest.mark.parametrize("members", [1, 3])
def test_draws_outside_torch_are_each_members_own(draw, members):
    """A forward that draws from Python or numpy goes to the loop, where each member draws its own numbers."""
    ensemble, tree = ensemble_of([Returns(lambda y: y * 0 + draw()) for _ in range(members)])
    outs = torch.stack([ensemble(tree, torch.ones(5, 3)) for _ in range(5)])[:, :, 0, 0]

    assert len(torch.unique(outs)) == 5 * members
    assert line(ensemble).startswith("loop")
    assert members == 1 or "Python's or numpy's generator" in line(ensemble)
