"""Forwards that write their parameters: the caller's leaves stay as they were, and gradients reach them."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tdfunc import Ensemble, from_module, functional, stack
from tdfunc.modules.functional import Apply

IDS = torch.tensor([0, 2])


class Clamped(nn.Module):
    """Writes its weight in one of several ways at each call, or at the calls after some."""

    def __init__(self, how):
        super().__init__()
        self.how, self.w = how, nn.Parameter(torch.tensor([[1.0, -2.0, 3.0], [0.1, 0.2, 0.3], [4.0, 5.0, 6.0]]))

    def forward(self, ids):
        if self.how == "data":
            self.w.data = self.w.data * 2
        elif self.how == "data in place":
            self.w.data.clamp_(max=0.5)
        elif self.how == "foreach":
            with torch.no_grad():
                torch._foreach_mul_([self.w], 2.0)
        elif self.how == "out":
            with torch.no_grad():
                torch.mul(self.w, 2.0, out=self.w)
        elif self.how == "mul":
            with torch.no_grad():
                self.w.mul_(2.0)
        else:
            with torch.no_grad():
                self.w.clamp_(max=0.5)
        return self.w[ids] ** 2


MODELS = {
    "embedding": lambda: nn.Embedding(4, 3, max_norm=0.1),
    "bag": lambda: nn.EmbeddingBag(4, 3, max_norm=0.1),
    **{how: lambda how=how: Clamped(how) for how in ("clamp", "mul", "data", "data in place", "foreach", "out")},
}
# torch refuses to assign .data inside a transform.
IN_TRANSFORMS = [name for name in MODELS if name != "data"]


def inputs(name):
    """What the model takes."""
    return IDS[None] if name == "bag" else IDS


def leaf_of(tree):
    """The only leaf of a tree, which may not be copied to look at it."""
    return next(iter(tree.values()))


@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_given_leaves_are_not_written(name, mode):
    """A call would write into the caller's tree, the first or any later one."""
    model = MODELS[name]()
    apply, params, buffers = functional(model)
    leaf, before = leaf_of(params), leaf_of(params).clone()
    expected = copy.deepcopy(model)(inputs(name)).detach()
    with {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
        for _ in range(3):
            memory, version = leaf.data_ptr(), leaf._version
            out = apply(params, inputs(name))

            assert torch.equal(out, expected)
            assert torch.equal(leaf, before)
            assert (leaf.data_ptr(), leaf._version) == (memory, version)
        apply.with_buffers(params, buffers, inputs(name))

    assert torch.equal(leaf, before)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_given_leaves(name):
    """The copies that forward writes would keep the gradients."""
    model = MODELS[name]()
    apply, params, _ = functional(model)
    params = params.apply(lambda p: p.requires_grad_())
    leaf, before = leaf_of(params), leaf_of(params).detach().clone()
    for _ in range(3):
        other = copy.deepcopy(model)
        (expected,) = torch.autograd.grad(other(inputs(name)).square().sum(), list(other.parameters()))
        (ours,) = torch.autograd.grad(apply(params, inputs(name)).square().sum(), [leaf])

        assert torch.equal(ours, expected)
        assert torch.equal(leaf.detach(), before)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", IN_TRANSFORMS)
def test_grad(name, warm):
    """`torch.func.grad` would write into the caller's tree, before or after a plain call."""
    model = MODELS[name]()
    apply, params, _ = functional(model)
    leaf, before = leaf_of(params), leaf_of(params).clone()
    if warm:
        apply(params, inputs(name))
    other = copy.deepcopy(model)
    (expected,) = torch.autograd.grad(other(inputs(name)).square().sum(), list(other.parameters()))
    for _ in range(3):
        ours = torch.func.grad(lambda p: apply(p, inputs(name)).square().sum())(params)

        assert torch.equal(leaf_of(ours), expected)
        assert torch.equal(leaf, before)


@pytest.mark.parametrize(
    ("name", "how"),
    [("embedding", "loop"), ("clamp", "loop"), ("data in place", "loop"), ("mul", "loop"), ("mul", "vmap")],
)
def test_ensemble(name, how):
    """Members would write into the stacked tree."""
    apply, params, _ = functional(MODELS[name]())
    many = stack([params, params * 2.0])
    leaf, before = leaf_of(many), leaf_of(many).clone()
    members = Ensemble(apply, how=how)
    for _ in range(3):
        out = members(many, IDS)

        assert torch.equal(leaf, before)
        assert torch.equal(out[1], apply(params * 2.0, IDS))


def test_live_leaves():
    """A call on the module's own parameters would write into the module."""
    model = nn.Embedding(4, 3, max_norm=0.1)
    apply, _, _ = functional(model)
    before = model.weight.detach().clone()
    for _ in range(2):
        apply(from_module(model), IDS)

    assert torch.equal(model.weight.detach(), before)


@pytest.mark.parametrize("name", ["embedding", "bag"])
def test_blocks(name):
    """A table with max_norm would renormalise the rows of the tree that was bound for a block."""
    model = MODELS[name]()
    tree = from_module(MODELS[name]()).clone().apply(lambda x: x.detach() * 5)
    before = tree.clone()
    with tree.to_module(model):
        model(inputs(name))

    assert (tree == before).all()


class Late(nn.Module):
    """Reaches its embedding in some calls only."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, max_norm=0.1)

    def forward(self, ids, use):
        return self.embedding(ids) if use else ids


def test_embeddings_that_the_first_call_did_not_reach():
    """A table with max_norm would be written by a later call, because the first one did not."""
    apply, params, _ = functional(Late())
    before = params["embedding", "weight"].clone()
    apply(params, IDS, False)
    apply(params, IDS, True)

    assert torch.equal(params["embedding", "weight"], before)


def test_flags_of_given_leaves():
    """Forward would change whether the caller's leaf takes gradients."""

    class Thawed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.w.requires_grad_()
            return self.w * x

    apply, params, _ = functional(Thawed())
    for _ in range(3):
        apply(params, 2.0)

        assert not params["w"].requires_grad


def test_only_written_leaves_are_copied():
    """Each call would copy the whole model, or a function from a file would write."""

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.kept = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, seen):
            with torch.no_grad():
                self.w.clamp_(max=0.5)
            seen.extend([self.w, self.kept])
            return self.w

    # A class of a function has no name to be pickled by: its function is made again from its parts.
    apply, params, _ = functional(Partly())
    make, parts = apply.__reduce__()
    for function in (apply, apply.eval(), make(*parts)):
        function(params, [])
        seen: list[torch.Tensor] = []
        function(params, seen)

        assert seen[0] is not params["w"]
        assert seen[1] is params["kept"]
    again: Apply = pickle.loads(pickle.dumps(functional(MODELS["clamp"]())[0]))
    table = functional(MODELS["clamp"]())[1]
    before = table["w"].clone()
    for _ in range(2):
        again(table, IDS)

    assert torch.equal(table["w"], before)


class Sparse(nn.Module):
    """Has a weight without memory of its own, and writes it if told to."""

    def __init__(self, write):
        super().__init__()
        self.write, self.w = write, nn.Parameter(torch.eye(3).to_sparse())

    def forward(self, x):
        if self.write:
            with torch.no_grad():
                self.w.mul_(2.0)
        return torch.sparse.mm(self.w, x)


@pytest.mark.parametrize(("write", "places"), [(False, []), (True, [0])])
def test_sparse(write, places):
    """A sparse weight would be written, or every call would be watched because of it."""
    apply, params, _ = functional(Sparse(write))
    for _ in range(3):
        out = apply(params, torch.eye(3))

        assert torch.equal(out, torch.eye(3) * (1 + write))
        assert torch.equal(params["w"].to_dense(), torch.eye(3))
        assert apply._written.params == places


def test_sparse_in_inference():
    """Inference tensors count no writes: a sparse one would be taken as never written."""
    apply, params, _ = functional(Sparse(True))
    with torch.inference_mode():
        for _ in range(3):
            out = apply(params, torch.eye(3))

            assert torch.equal(out, torch.eye(3) * 2)
            assert torch.equal(params["w"].to_dense(), torch.eye(3))


@pytest.mark.parametrize("name", ["embedding", "clamp"])
def test_compiled(name):
    """A compiled call would write into the caller's tree."""
    torch._dynamo.reset()
    apply, params, _ = functional(MODELS[name]())
    leaf, before = leaf_of(params), leaf_of(params).clone()
    compiled = torch.compile(lambda p: apply(p, IDS), backend="aot_eager")
    for _ in range(2):
        ours = compiled(params)

        assert torch.equal(leaf, before)
    torch.testing.assert_close(ours, apply(params, IDS))
