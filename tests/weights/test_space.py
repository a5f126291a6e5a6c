"""Distances, barriers, and the order of neurons."""

import itertools
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tdfunc as tdf
from tdfunc.weights.space.matching import _assign


def mlp():
    """A norm, and three linear layers with a norm between them."""
    layers = nn.Linear(4, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)
    return nn.Sequential(nn.LayerNorm(4), *layers)


def cnn():
    """Two convolutions with BatchNorm, whose maps are flattened for a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3)),
        *(nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 3)),
    )


def model_of(make, size):
    """A pure function of one tree, the tree with random statistics, and inputs."""
    module = make().eval()
    for name, buffer in module.named_buffers():
        buffer.data = torch.rand_like(buffer) + 0.5 if buffer.is_floating_point() else buffer
        assert name
    apply = tdf.functional(module)[0]
    return apply, tdf.from_module(module).detach(), torch.randn(5, *size)


both = pytest.mark.parametrize(("make", "size"), [(mlp, (4,)), (cnn, (2, 6, 6))])


@both
def test_an_order_of_neurons_changes_no_output(make, size):
    """Permuting each group leaves the function as it is; a matching finds the order back."""
    apply, params, x = model_of(make, size)
    groups = tdf.weights.channel_groups(params)
    orders = [torch.randperm(next(iter(params[path].shape[d] for path, d in group.items()))) for group in groups]

    moved = tdf.weights.permute_channels(params, groups, orders)

    assert tdf.weights.distance(moved, params) > 1
    torch.testing.assert_close(apply(moved, x), apply(params, x), atol=1e-5, rtol=1e-5)
    tdf.assert_close(tdf.weights.weight_matching(params, moved), params)


@both
def test_matching_lowers_the_distance(make, size):
    """Of two unrelated models the second one comes nearer, as the same function."""
    apply, a, x = model_of(make, size)
    _, b, _ = model_of(make, size)

    matched = tdf.weights.weight_matching(a, b)

    assert tdf.weights.distance(a, matched) < tdf.weights.distance(a, b)
    torch.testing.assert_close(apply(matched, x), apply(b, x), atol=1e-5, rtol=1e-5)


def deep():
    """Twelve linear layers of one width."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)))


def counted():
    """Eleven linear layers whose names end in numbers."""
    return nn.Sequential(OrderedDict((f"fc{i}", nn.Linear(4, 4)) for i in range(1, 12)))


def plain_norm():
    """A norm without parameters, whose statistics `combine` puts at the end."""
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3))


def foreign(tree, folder):
    """The tree as another program's file gives it."""
    save_file(tree.state_dict(), folder / "model.safetensors")
    return tdf.load(folder / "model.safetensors")


def recombined(tree, folder):
    """The tree of its parameters and its buffers."""
    assert folder
    return tdf.combine(*tdf.split(tree))


@pytest.mark.parametrize(
    ("make", "size", "changed"),
    [
        (deep, (4,), foreign),
        (cnn, (2, 6, 6), foreign),
        (counted, (4,), foreign),
        (plain_norm, (4,), recombined),
    ],
)
def test_numbered_layers_run_by_number(make, size, changed, tmp_path):
    """The keys of a tree may have another order than the layers."""
    _, a, _ = model_of(make, size)
    apply, b, x = model_of(make, size)

    matched = tdf.weights.weight_matching(changed(a, tmp_path), changed(b, tmp_path))

    torch.testing.assert_close(apply(matched, x), apply(b, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", ["", "net."])
def test_names_of_a_file_in_no_order_are_refused(prefix, tmp_path):
    """The norms come before the convolutions, and nothing says which follows which."""
    names = [f"{prefix}{name}" for name in ("conv1", "bn1", "conv2", "bn2")]
    leaves = [f"{name}.{key}" for name in names for key in ("weight", "bias")]
    save_file(
        {leaf: torch.randn(3, 3) if leaf.endswith("weight") else torch.randn(3) for leaf in leaves},
        tmp_path / "model.safetensors",
    )

    with pytest.raises(tdf.UnsupportedError, match="the order of the layers .* is not known"):
        tdf.weights.channel_groups(tdf.load(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_assignment_is_the_best_of_all(n, generator):
    """The sum is that of the best permutation."""
    rows, orders = torch.arange(n), torch.tensor(list(itertools.permutations(range(n))))

    for profit in torch.randn(50, n, n, generator=generator, dtype=torch.float64):
        torch.testing.assert_close(profit[rows, _assign(profit)].sum(), profit[rows, orders].sum(1).max())


def test_barriers_are_those_of_each_pair():
    """The matrix has the barrier of each pair, as a loop over the points computes it."""
    apply, members = tdf.functional(mlp())[0], tdf.split(tdf.init_ensemble(mlp, 3, key=0))[0]
    x, t = torch.randn(20, 4), torch.randn(20, 3)
    loss = lambda p: (20 * apply(p, x) - t).sin().mean()  # noqa: E731

    heights = tdf.weights.barriers(loss, members, chunk_size=2)

    for i, j in itertools.combinations(range(3), 2):
        line = torch.stack([loss(members[i].lerp(members[j], k / 10)) for k in range(11)])
        above = line - line[0] - (line[-1] - line[0]) * torch.arange(11) / 10
        torch.testing.assert_close(tdf.weights.line_losses(loss, members[i], members[j]), line)
        for height in (heights[i, j], tdf.weights.barrier(loss, members[i], members[j])):
            torch.testing.assert_close(height, above.max())
    torch.testing.assert_close(heights, heights.T)
    assert heights.max() > 0
    assert heights.diag().tolist() == [0, 0, 0]


def test_distances_are_those_of_flat_vectors():
    """Distances and cosines equal torch's of the concatenated leaves, for models and for stacks."""
    members = tdf.split(tdf.init_ensemble(mlp, 3, key=0))[0]
    members = members.set("number", torch.randn(3))
    flat = lambda tree: torch.cat([leaf.flatten() for leaf in tree.leaves()])  # noqa: E731
    a, b, base = (members[i] for i in range(3))

    torch.testing.assert_close(tdf.weights.distance(a, b), torch.dist(flat(a), flat(b)))
    torch.testing.assert_close(
        tdf.weights.cosine(a, b, base=base), torch.cosine_similarity(flat(a) - flat(base), flat(b) - flat(base), dim=0)
    )
    torch.testing.assert_close(
        tdf.weights.cosine(members, a),
        torch.stack([torch.cosine_similarity(flat(members[i]), flat(a), dim=0) for i in range(3)]),
    )
    assert tdf.weights.distance(members, base)[2] == 0
    a, b = a.bfloat16(), b.bfloat16()
    assert tdf.weights.distance(a, b) == tdf.weights.distance(a.float(), b.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(), (2,)])
def test_the_gradient_of_a_distance_of_equal_models_is_zero(size, dtype):
    """As that of `torch.dist`; a penalty for leaving a model begins there."""
    model = tdf.TensorDict({"w": torch.ones((*size, 3), dtype=dtype), "b": torch.zeros(size, dtype=dtype)}, size)

    grads = tdf.grad(lambda params: tdf.weights.distance(params, model).sum())(model)

    tdf.assert_close(grads, model.apply(torch.zeros_like), atol=0, rtol=0)


def test_the_gradient_of_a_distance_is_that_of_torch():
    """Also where one member is equal."""
    a = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    b = torch.tensor([[0.0, 0.0], [1.0, 1.0]])

    grads = tdf.grad(lambda p: tdf.weights.distance(p, tdf.TensorDict({"w": b}, [2])).sum())(
        tdf.TensorDict({"w": a}, [2])
    )

    torch.testing.assert_close(grads["w"], torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


@pytest.fixture(params=[torch.complex64, torch.complex128], ids=str)
def spectral(request, generator):
    """Two models with a weight of complex numbers, as of a Fourier layer, and the one vector of each."""
    models = []
    vectors = []
    for _ in range(2):
        w = torch.randn(3, 2, dtype=request.param, generator=generator)
        b = torch.randn(4, dtype=w.real.dtype, generator=generator)
        models.append(tdf.TensorDict({"w": w, "b": b}))
        vectors.append(torch.cat([w.real.flatten(), w.imag.flatten(), b]))
    return models, vectors


def test_complex_weights_have_a_distance(spectral):
    """They are two numbers each, beside the real weights."""
    models, vectors = spectral

    torch.testing.assert_close(tdf.weights.distance(*models), torch.dist(*vectors))


def test_complex_weights_have_an_angle(spectral):
    """The angle of the vectors of real and imaginary parts."""
    models, vectors = spectral

    torch.testing.assert_close(tdf.weights.cosine(*models), torch.cosine_similarity(*vectors, dim=0))


def test_complex_weights_lie_on_a_line(spectral):
    """The middle of a line is the mean of both ends."""
    models, _ = spectral
    a, b = models

    found = tdf.weights.line_losses(lambda model: model["w"].real.sum(), a, b, points=3)

    torch.testing.assert_close(found[1], ((a["w"] + b["w"]) / 2).real.sum())


def test_counters_of_batchnorm_lie_on_a_line():
    """A complete tree has integers, which have no line: each end has its own."""
    a = tdf.TensorDict({"w": torch.tensor([0.0]), "count": torch.tensor(3)})
    b = tdf.TensorDict({"w": torch.tensor([1.0]), "count": torch.tensor(8)})
    losses = tdf.weights.line_losses(lambda p: p["w"].sum() + p["count"], a, b, points=5)

    assert losses.tolist() == [3.0, 3.25, 8.5, 8.75, 9.0]


def test_barriers_of_complete_trees(generator):
    """The trees that `stack_modules` and `from_module` make have the buffers of BatchNorm."""
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval() for _ in range(3)]
    stacked = tdf.stack_modules(models)
    x = torch.randn(5, 3, generator=generator)
    apply = tdf.functional(models[0])[0]

    assert tdf.weights.barriers(lambda p: apply(p, x).square().mean(), stacked).shape == (3, 3)


def test_layers_are_stacked_in_order():
    """Layers come from the parts, all else from the first; experts inside a layer are not layers."""
    layer = lambda n: {"experts": {"0": {"w": torch.full((1,), float(n))}, "1": {"w": torch.zeros(1)}}}  # noqa: E731
    a = tdf.TensorDict({"embed": torch.zeros(2), "model": {"layers": {str(i): layer(i) for i in range(3)}}})
    b = a.apply(lambda x: x + 10)

    deep = tdf.weights.stack_layers([(a, range(2)), (b, [2, 0])])

    found = [deep["model", "layers", str(i), "experts", "0", "w"].item() for i in range(4)]
    assert found == [0, 1, 12, 10]
    assert len(deep["model", "layers"].keys()) == 4
    assert deep["embed"] is a["embed"]


def test_layers_of_the_tree_itself():
    """An `nn.Sequential` is a tree of layers."""
    model = tdf.TensorDict({str(i): {"w": torch.full((1,), float(i))} for i in range(2)})

    deep = tdf.weights.stack_layers([(model, [1, 0, 1])])

    assert [deep[str(i), "w"].item() for i in range(3)] == [1.0, 0.0, 1.0]


W, T, MISFIT = tdf.weights, tdf.TensorDict, tdf.LeafMismatchError
PAIR = T({"a": torch.zeros(3, 2), "b": torch.zeros(2, 4)})
ONES = PAIR.apply(torch.ones_like)
MODEL = T({"layers": {"0": {"w": torch.zeros(1)}}})
TIED = tdf.from_module(nn.ModuleDict({"m": nn.ModuleDict(dict.fromkeys("01", nn.Linear(2, 2)))}))


def matched(a, b):
    """The second model with its three neurons in the order of the first."""
    return W.weight_matching(a, b, groups=[{("a",): 0}])


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: W.stack_layers([(MODEL, [1])]), ValueError, "'layers' must have the layer 1"),
        (lambda: W.stack_layers([(MODEL["layers", "0"], [])]), tdf.TreeStructureError, "one node"),
        (lambda: W.stack_layers([(TIED, [0])]), tdf.TieError, "under 'm' is tied"),
        (lambda: W.channel_groups(MODEL.expand(3)), tdf.BatchSizeError, "each has its own order"),
        (lambda: W.weight_matching(PAIR.expand(3), PAIR.expand(3)), tdf.BatchSizeError, "each has its own order"),
        (lambda: W.channel_groups(TIED), tdf.UnsupportedError, "a leaf is tied"),
        (lambda: W.distance(MODEL, TIED), tdf.TreeStructureError, "different keys"),
        (lambda: W.barriers(lambda p: p, MODEL), tdf.BatchSizeError, "are not stacked"),
        (lambda: W.weight_matching(PAIR, PAIR.select("b"), groups=[]), tdf.TreeStructureError, "different keys"),
        (lambda: W.weight_matching(PAIR, PAIR, groups=[{("a",): 0, ("b",): 1}]), MISFIT, "'b' is not a multiple"),
        (
            lambda: matched(ONES, ONES.set("a", torch.full((3, 2), torch.nan))),
            ValueError,
            "'a' of the second model is not",
        ),
        (
            lambda: matched(ONES.set("a", torch.full((3, 2), torch.inf)), ONES),
            ValueError,
            "'a' of the first model is not",
        ),
        (lambda: matched(ONES.double() * 1e200, ONES.double() * 1e200), ValueError, "products of the weights overflow"),
    ],
)
def test_errors_name_what_must_hold(call, kind, text):
    """Each mistake has its message."""
    with pytest.raises(kind, match=text):
        call()
