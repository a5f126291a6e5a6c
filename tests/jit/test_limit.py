"""Past the number of records: the function itself, one warning that names what varies, and few recordings."""

import warnings

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict, UnsupportedError
from tdfunc._jit import jit
from tests.helpers import run_in_threads

SIZE = 4


def double(tree, x):
    """Return a result of a tree and a tensor."""
    return tree * x.sum(), x * 2


def call_each(fn, sizes, **options):
    """Return the results for inputs of these sizes, and the messages of all warnings."""
    tree = TensorDict({"w": torch.ones(3)})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [fn(tree, torch.arange(float(size)), **options) for size in sizes]
    return results, [str(one.message) for one in said]


@pytest.mark.parametrize("seed", range(3))
def test_results_stay_those_of_the_function(seed):
    """Calls of many sizes in any order give what the function gives, recorded or not."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 4 * SIZE, (60,), generator=generator).tolist()

    got, _ = call_each(jit(double, cache_size=SIZE), sizes)

    expected, _ = call_each(double, sizes)
    same = [torch.equal(a[0]["w"], b[0]["w"]) and torch.equal(a[1], b[1]) for a, b in zip(got, expected, strict=True)]
    assert same == [True] * len(sizes)


@pytest.mark.parametrize(("kinds", "rounds"), [(SIZE + 1, 40), (5 * SIZE, 8), (200, 1)])
def test_recordings_are_few(kinds, rounds):
    """Sizes in turn, more than there are records, are recorded about as often as there are records."""
    fn = jit(double, cache_size=SIZE)
    call_each(fn, [*range(1, kinds + 1)] * rounds)

    assert fn.cache_info().misses <= SIZE + 1 + kinds * rounds // 256


@pytest.mark.parametrize("kinds", [SIZE - 1, SIZE])
def test_nothing_is_said_within_the_limit(kinds):
    """As many kinds of calls as records are all recorded, without a warning."""
    fn = jit(double, cache_size=SIZE)

    _, said = call_each(fn, [*range(1, kinds + 1)] * 20)

    assert said == []
    assert fn.cache_info().misses == kinds


def test_the_warning_comes_once_and_names_the_dimension():
    """The argument, its dimension, the sizes so far, and both cures are in one warning."""
    fn = jit(double, cache_size=SIZE)

    _, said = call_each(fn, range(2, 50))

    [message] = said
    assert "dimension 0 of argument 1 varies, from 3 to 7" in message
    assert "pad" in message
    assert "drop_last" in message
    assert "argument 0" not in message


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda n: (torch.ones(3, n, 2),), r"dimension 1 of argument 0 varies"),
        (lambda n: ({"ids": torch.ones(2, n)},), r"dimension 1 of argument 0\['ids'\] varies"),
        (lambda n: (TensorDict({"a": {"w": torch.ones(n, 2)}}, [n]),), r"dimension 0 of argument 0\[.*a.*w.*\] varies"),
        (lambda n: (torch.ones([1] * n),), r"argument 0 has from 2 to \d dimensions"),
        (lambda n: (torch.ones(2), str(n)), r"Python values, structures or layouts"),
    ],
)
def test_what_varies_is_named(make, pattern):
    """The warning names a dimension of a tensor in any container, or that no shape varies."""
    fn = jit(lambda *args: [leaf * 1 for leaf in torch.utils._pytree.tree_leaves(args[0])], cache_size=SIZE)

    with pytest.warns(UserWarning, match=pattern):
        _ = [fn(*make(n)) for n in range(1, 10)]


def test_many_dimensions_are_cut():
    """Three dimensions are named, and the number of the others."""
    fn = jit(lambda *tensors: tensors[0] * 1, cache_size=SIZE)

    with pytest.warns(UserWarning, match="argument 2 varies.*; and 4 more"):
        _ = [fn(*[torch.ones(n) for _ in range(7)]) for n in range(1, 10)]


def test_a_program_that_goes_on_to_other_shapes_is_recorded_again():
    """Shapes that are called often after the limit was reached get records in place of those not used any more."""
    fn = jit(double, cache_size=SIZE)
    call_each(fn, range(1, 100))
    before = fn.cache_info().hits
    call_each(fn, [200] * 1000)

    assert fn.cache_info().hits - before > 500


def test_clearing_the_cache_begins_anew():
    """After `cache_clear` calls are recorded, and the warning may come again."""
    fn = jit(double, cache_size=SIZE)
    call_each(fn, range(1, 100))
    fn.cache_clear()

    _, said = call_each(fn, range(1, 100))

    assert len(said) == 1
    assert fn.cache_info().currsize == SIZE


@pytest.mark.filterwarnings("ignore:.*was called in more ways")
def test_arguments_are_refused_past_the_limit_as_before():
    """A tensor that requires grad is refused by name whether the call would be recorded or not."""
    fn = jit(double, cache_size=1)
    call_each(fn, range(1, 10))

    with pytest.raises(UnsupportedError, match="argument 1 requires grad"):
        fn(TensorDict({"w": torch.ones(3)}), torch.ones(50, requires_grad=True))


@pytest.mark.filterwarnings("ignore:.*was called in more ways")
def test_a_graph_is_shown_past_the_limit():
    """`graph` records for its arguments in any case."""
    fn = jit(double, cache_size=1)
    call_each(fn, range(1, 10))

    assert "mul" in fn.graph(TensorDict({"w": torch.ones(3)}), torch.ones(50)).code


@pytest.mark.filterwarnings("ignore:.*was called in more ways")
def test_a_training_run_of_many_shapes_is_that_without_jit(generator):
    """Members trained with donated memory on batches of all sizes end where the plain loop ends."""
    apply, _, _ = tdf.functional(nn.Linear(3, 1))
    opt = tdf.optim.adam(torch.tensor([0.1, 0.2]))

    def step(params, state, x):
        grads = torch.vmap(torch.func.grad(lambda p, x: apply(p, x).square().mean()), (0, None))(params, x)
        return opt.update(params, grads, state)

    start = tdf.init_ensemble(lambda: nn.Linear(3, 1), 2)
    fast, runs = jit(step, cache_size=2), []
    batches = [torch.randn(size, 3, generator=generator) for size in [*range(1, 8)] * 2]
    for update in (fast, step):
        params, state = start, opt.init(start)
        for x in batches:
            params, state = update(params, state, x)
        runs.append(params["weight"].tolist())

    assert runs[0] == runs[1]


@pytest.mark.filterwarnings("ignore:.*was called in more ways")
def test_threads_past_the_limit():
    """Concurrent calls of more sizes than records each get their own result."""
    fn, wrong = jit(lambda x: x * 2, cache_size=2), []

    def work(i):
        for n in range(1, 30):
            x = torch.full((n % 7 + 1,), float(i))
            if not torch.equal(fn(x), x * 2):
                wrong.append((i, n))

    run_in_threads(work, range(4))

    assert wrong == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was called in more ways")
def test_a_traced_ensemble_of_many_batch_sizes_is_the_loop(generator):
    """`how="traced"` gives the members' outputs for more batch sizes than it keeps records."""
    models = [nn.Linear(3, 2) for _ in range(2)]
    apply, _, _ = tdf.functional(models[0])
    traced, tree = tdf.Ensemble(apply, "traced"), tdf.stack_modules(models)
    batches = [torch.randn(size, 3, generator=generator) for size in range(1, 76)]

    outputs = [traced(tree, x) for x in batches]

    errors = [
        (out - torch.stack([model(x) for model in models])).abs().max().item()
        for out, x in zip(outputs, batches, strict=True)
    ]
    assert max(errors) < 1e-6
