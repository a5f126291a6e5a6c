"""jit(chunk_size=): calls for some members at a time give what one call for all gives."""

import copy
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc import TensorDict, random
from tdfunc._jit.chunked import chunks
from tests.helpers import examples

OPTIMIZERS = {
    "sgd": lambda: tdf.optim.sgd(0.1),
    "adam": lambda: tdf.optim.adam(1e-2),
    "adamw": lambda: tdf.optim.adamw(1e-2),
    "adagrad": lambda: tdf.optim.adagrad(1e-2),
    "rates of members": lambda: tdf.optim.adam(torch.linspace(1e-3, 1e-2, 7)),
    "ema": lambda: tdf.optim.ema(tdf.optim.adam(1e-2), 0.9),
    "accumulate": lambda: tdf.optim.accumulate(tdf.optim.adam(1e-2), 2),
}


class Net(nn.Module):
    """A convolution before BatchNorm, whose bias has no gradient but for rounding; dropout; a head."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, dtype=dtype), nn.BatchNorm1d(4, dtype=dtype)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 3, dtype=dtype)

    def forward(self, x):
        return self.head(self.drop(F.relu(self.norm(self.conv(x)))).mean(-1))


def make_nets(members, dtype=torch.float32):
    """Return the pure function, stacked parameters and stacked buffers."""
    nets = [Net(dtype) for _ in range(members)]
    apply, _, _ = tdf.functional(nets[0])
    params, buffers = tdf.split(tdf.stack_modules(nets))
    return apply, params, buffers


def make_step(apply, opt, donate=False):
    """Return the step of the guides: gradients of all members, statistics of BatchNorm, dropout by keys."""

    def step(params, buffers, state, keys, x, target):
        def loss(p, b, key):
            out, new = apply.with_buffers(p, b, x, rng=key)
            return F.cross_entropy(out, target), new

        grads, buffers = vmap(grad(loss, has_aux=True))(params, buffers, keys)
        return *opt.update(params, grads, state, donate=donate), buffers

    return step


IN_DIMS = (0, 0, 0, 0, None, None)


def assert_near(got, expected):
    """Compare the tensors of two results."""
    got, expected = tree_leaves(got), tree_leaves(expected)
    assert [x.shape for x in got] == [x.shape for x in expected]
    torch.testing.assert_close(got, expected)


def train(step, params, buffers, state, data, steps=3):
    """Return parameters, state and buffers after some steps."""
    for i in range(steps):
        keys = random.split(random.key(i), len(params))
        params, state, buffers = step(params, buffers, state, keys, *data)
    return params, state, buffers


def make_data(dtype=torch.float64):
    """Return inputs and classes."""
    return torch.randn(8, 2, 6, dtype=dtype), torch.randint(3, (8,))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_chunked_step_equals_the_whole_one(name):
    """Parameters, state and buffers after three steps, in float64."""
    apply, params, buffers = make_nets(7, torch.float64)
    opt, data = OPTIMIZERS[name](), make_data()
    chunked = tdf.jit(make_step(apply, opt), chunk_size=3, in_dims=IN_DIMS)
    got = train(chunked, params, buffers, opt.init(params), data)
    assert_near(got, train(tdf.jit(make_step(apply, opt)), params, buffers, opt.init(params), data))


@pytest.mark.slow
@given(members=st.integers(1, 9), chunk_size=st.integers(1, 10), seed=st.integers(0, 2**32 - 1))
@examples(5)
def test_law_sizes(members, chunk_size, seed):
    """Any number of members, in chunks of any size."""
    x = torch.randn(members, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    fn = vmap(lambda row: {"sorted": row.sort().values, "sum": row.sum()})
    got = tdf.jit(fn, chunk_size=chunk_size, in_dims=(0,))(x)
    assert torch.equal(got["sorted"], x.sort(-1).values)
    assert torch.equal(got["sum"], fn(x)["sum"])


@given(members=st.integers(2, 200), size=st.integers(1, 50))
def test_law_bounds(members, size):
    """Chunks cover the members in order, none has one member if it need not, and none is larger by more than one."""
    size = min(size, members - 1)
    sizes = [end - begin for begin, end in chunks._bounds(members, size)]
    assert sum(sizes) == members
    assert max(sizes) <= size + 1
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 1 or size == 1


@pytest.mark.slow
def test_donated_state_is_written_in_place():
    """The results are the tensors that were donated, with the values of the whole step."""
    apply, params, buffers = make_nets(6, torch.float64)
    opt, data = tdf.optim.adam(1e-2), make_data()
    expected = train(tdf.jit(make_step(apply, opt)), params, buffers, opt.init(params), data)
    given = params.clone(), buffers, opt.init(params).clone()
    step = tdf.jit(make_step(apply, opt, donate=True), chunk_size=2, in_dims=IN_DIMS)
    got = train(step, *given[:2], given[2], data)
    assert_near(got, expected)
    assert [x.data_ptr() for x in tree_leaves(got[0])] == [x.data_ptr() for x in tree_leaves(given[0])]


def test_a_step_has_one_record():
    """Later calls find the record of the first one, although a state begins with one number for all members."""
    apply, params, buffers = make_nets(6)
    opt = tdf.optim.adam(1e-2)
    step = tdf.jit(make_step(apply, opt), chunk_size=2, in_dims=IN_DIMS)
    train(step, params, buffers, opt.init(params), make_data(torch.float32))
    assert step.cache_info().misses == 1


@pytest.mark.slow
def test_bias_before_batch_norm_is_no_dependence():
    """Its gradient is rounding alone, and Adam makes steps of it, which another kernel may turn around."""
    apply, params, buffers = make_nets(6)
    opt = tdf.optim.adam(1e-2)
    step = tdf.jit(make_step(apply, opt), chunk_size=3, in_dims=IN_DIMS)
    got = train(step, params, buffers, opt.init(params), make_data(torch.float32), steps=1)
    assert got[0].batch_size == (6,)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"list": [x, x[:, 0]]},
        lambda x: (x, None, 3, "text"),
        lambda x: TensorDict({"x": x, "inner": {"y": x[:, 0]}}, [len(x)]),
        lambda x: x.mT.contiguous().mT,
        lambda x: x.to(torch.complex64),
        lambda x: (x > 0, x.long()),
        lambda x: x[:, :0],
    ],
    ids=["list", "values", "tree", "transposed", "complex", "integers", "empty"],
)
def test_results_of_any_kind(make):
    """They are joined along their first dimension, in the containers of the function."""
    x = torch.randn(5, 3, 4)
    got = tdf.jit(make, chunk_size=2, in_dims=(0,))(x)
    expected = make(x)
    assert str(got) == str(expected)


def test_non_tensor_data_of_members():
    """Each member keeps its own."""
    tree = TensorDict({"x": torch.randn(5, 2), "name": list("abcde")}, [5])
    got = tdf.jit(lambda tree: tree.set("y", tree["x"] * 2), chunk_size=2, in_dims=(0,))(tree)
    assert got["name"] == list("abcde")


@pytest.mark.parametrize("tree", [TensorDict({}, [5]), TensorDict({"x": torch.ones(5), "none": {}}, [5])])
def test_trees_without_leaves(tree):
    """The buffers of a model that has none keep their members."""
    got = tdf.jit(lambda tree: tree.clone(), chunk_size=2, in_dims=(0,))(
        TensorDict({"t": tree, "y": torch.ones(5)}, [5])
    )
    assert str(got["t"]) == str(tree)


def test_a_step_of_a_model_without_buffers():
    """Its buffers, a tree without leaves, are an argument of the next step."""
    step = tdf.jit(lambda x, buffers: (x * 2, buffers.clone()), chunk_size=2, in_dims=(0, 0))
    x, buffers = step(*step(torch.ones(5, 2), TensorDict({}, [5])))
    assert (x.unique().item(), buffers.batch_size) == (4.0, (5,))


def test_results_that_are_trained():
    """They require grad, as those of the function do."""
    got = tdf.jit(lambda x: (x * 2).requires_grad_(), chunk_size=2, in_dims=(0,))(torch.randn(5, 2))
    assert got.requires_grad
    assert got.is_leaf


def test_layout_of_results():
    """The order of the dimensions in memory is that of a chunk."""
    x = torch.randn(5, 2, 3, 4)
    got = tdf.jit(lambda x: x.to(memory_format=torch.channels_last) * 1.5, chunk_size=2, in_dims=(0,))(x)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_kept_results_stay():
    """Large results come from a pool, and are not written again while they are held."""
    x = torch.randn(4, 1 << 21)
    step = tdf.jit(lambda x: x * 2, chunk_size=2, in_dims=(0,))
    held = [step(x + i) for i in range(4)]
    assert [torch.equal(one, (x + i) * 2) for i, one in enumerate(held)] == [True] * 4


def test_the_pool_is_shown_and_freed():
    """`cache_info()` counts the memory of whole results, and `cache_clear()` frees it."""
    step = tdf.jit(lambda x: x * 2, chunk_size=2, in_dims=(0,))
    step(torch.randn(4, 1 << 21))
    held = step.cache_info().held_bytes
    step.cache_clear()
    assert held > step.cache_info().held_bytes == 0


def test_threads():
    """Calls of many threads do not meet."""
    step = tdf.jit(vmap(lambda row: row.cumsum(0)), chunk_size=2, in_dims=(0,))
    inputs = [torch.randn(7, 4) for _ in range(16)]
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: step(inputs[i])})) for i in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [torch.equal(found[i], inputs[i].cumsum(1)) for i in range(16)] == [True] * 16


def test_inside_a_transform_the_function_itself_is_called():
    """So it can be differentiated."""
    step = tdf.jit(lambda x: x.square(), chunk_size=2, in_dims=(0,))
    x = torch.randn(5, 2)
    assert torch.equal(grad(lambda x: step(x).sum())(x), 2 * x)


def test_meta_tensors():
    """They have no values to check, and run together."""
    got = tdf.jit(lambda x: x * 2, chunk_size=2, in_dims=(0,))(torch.ones(5, 2, device="meta"))
    assert got.shape == (5, 2)


def test_a_copy():
    """A copy has its own records."""
    step = tdf.jit(lambda x: x * 2, chunk_size=2, in_dims=(0,))
    x = torch.randn(5, 2)
    step(x)
    again = copy.deepcopy(step)
    assert torch.equal(again(x), x * 2)
    assert again.cache_info().misses == 2


def test_the_graph_of_a_chunk():
    """It has the members of the first chunk."""
    graph = tdf.jit(lambda x: x * 2, chunk_size=2, in_dims=(0,)).graph(torch.randn(6, 2))
    assert torch.equal(graph(torch.ones(2, 2))[0], torch.full((2, 2), 2.0))


def test_a_method():
    """A decorated method is bound to its object, whose place needs an entry of in_dims."""

    class Model:
        @tdf.jit(chunk_size=2, in_dims=(None, 0))
        def twice(self, x):
            return x * 2

    x = torch.randn(5, 2)
    assert torch.equal(Model().twice(x), x * 2)


def test_auto_runs_small_members_together():
    """Whose activations fit into the cache."""
    step = tdf.jit(vmap(lambda x: x.outer(x).exp().sum()), chunk_size="auto", in_dims=(0,))
    assert step.chunk_size(torch.randn(32, 16)) == 32


def test_auto_has_activations_of_a_chunk_in_the_cache():
    """Of 1 MB a member, in chunks of four."""
    step = tdf.jit(vmap(lambda x: x.outer(x).exp().sum()), chunk_size="auto", in_dims=(0,))
    assert step.chunk_size(torch.randn(32, 512)) == 4


def test_auto_counts_the_bytes_of_the_dtype():
    """Half of the bytes, twice as many members."""
    step = tdf.jit(vmap(lambda x: x.outer(x).exp().sum()), chunk_size="auto", in_dims=(0,))
    assert step.chunk_size(torch.randn(32, 512, dtype=torch.bfloat16)) == 8


def test_float32_alone():
    """A function that fixes a dtype is checked in it, without a log on the screen."""
    weight = torch.randn(3, 2)
    step = tdf.jit(lambda x: x @ weight, chunk_size=2, in_dims=(0,), captures="constants")
    x = torch.randn(5, 4, 3)
    torch.testing.assert_close(step(x), x @ weight)


def test_float32_alone_logs_nothing():
    """An operation that fails on fake tensors is logged by torch."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    weight = torch.randn(3, 2)
    tdf.jit(lambda x: x @ weight, chunk_size=2, in_dims=(0,), captures="constants")(torch.randn(5, 4, 3))
    log.removeHandler(handler)
    assert not records


DEPENDENT = {
    "a norm of all": (lambda x: x / x.norm(), "depends on the values of other members"),
    "a clipped norm": (lambda x: x * torch.clamp(1 / x.norm(), max=1.0), "depends on the values of other members"),
    "a maximum": (lambda x: torch.minimum(x, x.max() - 1e6), "depends on the values of other members"),
    "the next one": (lambda x: x.roll(1, 0), "depends on the values of other members"),
    "a small step by the mean": (
        lambda x: x - 1e-4 * grad(lambda x: x.square().mean())(x),
        "depends on the number of other members",
    ),
    "their number": (lambda x: (x, len(x)), "depends on the number of other members"),
    "a number for each": (lambda x: x * torch.arange(len(x))[:, None], "depends on its place"),
    "a place from the end": (
        lambda x: x - torch.arange(len(x), dtype=x.dtype)[:, None].flip(0),
        "depends on its place",
    ),
    "a key for all": (lambda x: x + random.normal(random.key(0), x.shape), "depends on its place"),
    "a key for all, rarely": (lambda x: x + 1e-6 * random.normal(random.key(0), x.shape), "depends on its place"),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_members_are_refused(name):
    """By calls for a few members with other values, and with more of them."""
    fn, message = DEPENDENT[name]
    with pytest.raises(tdf.UnsupportedError, match=message):
        tdf.jit(fn, chunk_size=2, in_dims=(0,))(torch.randn(6, 4))


def test_draws_of_the_default_generator_are_refused():
    """Their order would be another for each size."""
    with pytest.raises(tdf.UnsupportedError, match="draws from torch's default generator"):
        tdf.jit(lambda x: x + torch.rand_like(x), chunk_size=2, in_dims=(0,))(torch.randn(6, 4))


BAD_CALLS = {
    "entries": ((0, 0), (torch.ones(4),), "another number of entries"),
    "sizes": ((0, 0), (torch.ones(4), torch.ones(5)), "4 in argument 0, 5 in argument 1"),
    "no tensor": ((0,), (3,), "no tensor"),
    "no dimension": ((0,), (torch.ones(()),), "a tensor without dimensions"),
    "nothing": ((None,), (torch.ones(4),), "do not have one number of members"),
    "no batch": ((0,), (TensorDict({"x": torch.ones(4)}),), "a tree without batch dimensions"),
    "lazy": ((0,), (tdf.LazyStack([TensorDict({"x": torch.ones(4)})] * 5),), "holds a lazy stack"),
    "sparse": ((0,), (torch.ones(4, 2).to_sparse(),), "a tensor of layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_arguments_without_members(name):
    """The message names the argument."""
    in_dims, args, message = BAD_CALLS[name]
    with pytest.raises(tdf.BatchSizeError, match=message):
        tdf.jit(lambda *args: args, chunk_size=2, in_dims=in_dims)(*args)


def test_results_without_members():
    """A mean over members has none."""
    with pytest.raises(tdf.BatchSizeError, match="does not have the members along its first dimension"):
        tdf.jit(lambda x: x.mean(), chunk_size=2, in_dims=(0,))(torch.randn(6, 4))


BAD_OPTIONS = {
    "chunk_size alone": ({"chunk_size": 2}, "are given together"),
    "in_dims alone": ({"in_dims": (0,)}, "are given together"),
    "in_dims 1": ({"chunk_size": 2, "in_dims": (1,)}, "is a tuple of 0 and None"),
    "in_dims 0": ({"chunk_size": 2, "in_dims": 0}, "is a tuple of 0 and None"),
    "chunk_size 0": ({"chunk_size": 0, "in_dims": (0,)}, "jit: chunk_size"),
    "chunk_size text": ({"chunk_size": "large", "in_dims": (0,)}, "jit: chunk_size"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options(name):
    """They are checked when the function is made."""
    options, message = BAD_OPTIONS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        tdf.jit(lambda x: x, **options)
