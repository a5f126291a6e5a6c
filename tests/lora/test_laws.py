"""Laws of adapters on every layer: attached equals merged, fresh changes nothing, unmerge and extract undo merge."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc.lora import Lora
from tests.lora.layers import EMBEDDINGS, MODULES, NO_BIAS, Largest, trained

# The second: the merged model, in training mode, as its own module.
pytestmark = [
    pytest.mark.sample(4),
    pytest.mark.filterwarnings("ignore:apply. forward of Sequential scales rows:UserWarning"),
]
OPTIONS = {
    "plain": {},
    "rslora": {"rslora": True, "alpha": 3.0},
    "dora": {"dora": True},
    "bias": {"bias": True},
    "dora bias": {"dora": True, "bias": True},
    "pissa": {"start": "pissa"},
    "olora dora": {"start": "olora", "dora": True},
}
TABLE = [
    pytest.param(name, options, id=f"{name} {label}")
    for name in MODULES
    for label, options in OPTIONS.items()
    if not (options.get("bias") and name in NO_BIAS) and not (options.get("dora") and name == "tied")
]


def setup(name, options):
    """The function, the parameters, the choice and an input of a module of the table."""
    torch.manual_seed(0)
    make, where, inputs = MODULES[name]
    module = make()
    apply, params, _ = tdf.functional(module)
    lora = Lora(where, **{"rank": 2, "alpha": 3.0} | options)
    return apply, params, lora, inputs()


@pytest.mark.parametrize(("name", "options"), TABLE)
def test_attached_equals_merged(name, options):
    """The factored form computes what the merged weights compute, in which `extract` finds the adapters."""
    apply, params, lora, x = setup(name, options)
    run, adapters = lora.attach(apply), trained(lora, params, apply)
    fresh = lora.init(params, key=1, apply=apply)

    torch.testing.assert_close(run((params, fresh), x), apply(params, x), atol=2e-5, rtol=1e-4)
    assert (run((params, adapters), x) - apply(params, x)).abs().max() > 1e-3
    merged = lora.merge(params, adapters)
    torch.testing.assert_close(run((params, adapters), x), apply(merged, x), atol=2e-4, rtol=1e-4)
    assert merged.ties() == params.ties()
    if not lora.dora:
        tdf.assert_close(lora.unmerge(merged, adapters), params, atol=1e-4, rtol=1e-4)
    if lora.start == "kaiming":
        wide = replace(lora, rank=99)
        found = wide.extract(params, merged, apply=run)
        tdf.assert_close(wide.merge(params, found), merged, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("name", "drops"), [(name, name not in EMBEDDINGS) for name in MODULES if name != "tied"])
def test_dropout_takes_the_inputs_of_adapters(name, drops, dora):
    """In training mode all are zero here, so that the base is left; ids of an embedding are not dropped."""
    apply, params, lora, x = setup(name, {"dropout": 1 - 1e-9, "dora": dora})
    run, adapters = lora.attach(apply), trained(lora, params, apply)

    out, still = run((params, adapters), x, rng=0), run.eval()((params, adapters), x)

    torch.testing.assert_close(out, apply(params, x) if drops else still)
    assert (still - apply(params, x)).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "options"), TABLE)
def test_a_row_and_a_member_equal_their_own_run(name, options):
    """Rows, vmap over adapters, and its gradients equal one adapter alone."""
    apply, params, lora, x = setup(name, options)
    run, many = lora.attach(apply), [trained(lora, params, apply, seed) for seed in range(3)]
    stacked, which = torch.stack(many), torch.tensor([2, 0, 0, 1])

    def loss(adapters, x):
        return run((params, adapters), x).square().mean()

    mixed = lora.attach(apply, rows=True)((params, stacked[which]), x)
    outs = torch.vmap(run, ((None, 0), None))((params, stacked), x)
    grads = torch.vmap(torch.func.grad(loss), (0, None))(stacked, x)

    for row, i in enumerate(which.tolist()):
        torch.testing.assert_close(mixed[row], run((params, many[i]), x[row : row + 1])[0], atol=1e-4, rtol=1e-4)
    for i in range(3):
        torch.testing.assert_close(outs[i], run((params, many[i]), x), atol=1e-4, rtol=1e-4)
        tdf.assert_close(grads[i], torch.func.grad(loss)(many[i], x), atol=1e-4, rtol=1e-3)
    if "start" in options:
        assert all(leaf.abs().max() == 0 for path, leaf in grads.items(True, True) if path[-1] in ("A0", "B0"))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "scaled"])
def test_the_gradient_is_that_of_the_product(name):
    """A and B get the gradients of `W + s B A`."""
    apply, params, lora, x = setup(name, {})
    run, adapters = lora.attach(apply), trained(lora, params, apply)

    def fused(adapters):
        return apply(lora.merge(params, adapters), x).square().mean()

    grads = torch.func.grad(lambda adapters: run((params, adapters), x).square().mean())(adapters)

    tdf.assert_close(grads, torch.func.grad(fused)(adapters), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"start": "pissa"}], ids=["plain", "dora", "pissa"])
@pytest.mark.parametrize("name", ["linear", "experts"])
def test_a_step_of_several_adapters_is_factored(name, options):
    """Nothing has the size of all changed weights."""
    apply, params, lora, x = setup(name, options)
    stacked, run = torch.stack([trained(lora, params, apply, seed) for seed in range(3)]), lora.attach(apply)

    with Largest() as largest:
        torch.vmap(torch.func.grad(lambda adapters: run((params, adapters), x[:1]).square().sum()))(stacked)

    assert largest.size < 3 * max(leaf.numel() for leaf in params.leaves())


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_sixteen_bits_keep_their_dtype(name):
    """Adapters of a bfloat16 base are float32, and its results stay bfloat16; shapes name these layers."""
    apply, params, lora, x = setup(name, {"dora": True})
    params, x = params.to(torch.bfloat16), x.to(torch.bfloat16)
    adapters = trained(lora, params, None)

    out = lora.attach(apply)((params, adapters), x)
    merged = lora.merge(params, adapters)

    found = lora.extract(params, merged)
    assert {leaf.dtype for tree in (adapters, found) for leaf in tree.leaves()} == {torch.float32}
    assert {out.dtype, *(leaf.dtype for leaf in merged.leaves())} == {torch.bfloat16}
    torch.testing.assert_close(out, apply(merged, x), atol=0.1, rtol=0.1)


def test_a_start_and_whole_leaves_are_parts_of_the_tree():
    """`split` separates a start; leaves that are trained whole replace the base's, and statistics are updated."""
    module = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Linear(5, 2))
    apply, params, buffers = tdf.functional(module)
    lora, x = Lora("2.weight", rank=2, start="pissa", whole="1.*"), torch.randn(6, 3, 5)
    run, adapters = lora.attach(apply), trained(lora, params, apply)

    trainable, start = tdf.split(adapters)
    out, new = run.with_buffers((params, adapters), buffers, x)

    assert set(start["2", "weight"].keys()) == {"A0", "B0"}
    assert ("1", "weight") in trainable.paths()
    expected = apply.with_buffers(lora.merge(params, adapters), buffers, x)
    torch.testing.assert_close(run((params, tdf.combine(trainable, start)), x, buffers=buffers), out)
    torch.testing.assert_close(out, expected[0], atol=1e-4, rtol=1e-4)
    tdf.assert_close(new, expected[1], atol=1e-4, rtol=1e-4)
    tuned = replace(lora, start="kaiming").extract(params, lora.merge(params, adapters))
    tdf.assert_close(tuned["1"], adapters["1"])


class Tied(nn.Module):
    """A head that is the table of an embedding, and two norms."""

    def __init__(self, is_tied):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.one, self.two = nn.LayerNorm(4), nn.LayerNorm(4)
        if is_tied:
            self.head.weight, self.two.weight = self.table.weight, self.one.weight
        else:
            nn.init.normal_(self.two.weight)


def tied_pair():
    """Return a tied base, and a model that was tuned without the ties."""
    return [tdf.split(tdf.from_module(Tied(is_tied)))[0] for is_tied in (True, False)]


@pytest.mark.parametrize("where", ["table.weight", "head.weight"])
def test_extract_does_not_lose_a_leaf_that_was_tuned_apart(where):
    """One adapter of a tied weight cannot bring it to two values."""
    base, tuned = tied_pair()

    with pytest.raises(tdf.TieError, match=r"'table.weight' and 'head.weight' are one leaf of the base"):
        Lora(where, rank=4).extract(base, tuned)


def test_extract_does_not_lose_a_leaf_that_was_trained_whole_apart():
    """The same of a leaf without factors."""
    base, tuned = tied_pair()
    base = base.untie(("head", "weight"))

    with pytest.raises(tdf.TieError, match=r"'one.weight' and 'two.weight' are one leaf of the base"):
        Lora("table.weight", rank=4, whole="one.weight").extract(base, tuned)


@pytest.mark.parametrize("change", [lambda tree: tree, lambda tree: tree.exclude("head"), lambda tree: tree.clone()])
def test_extract_takes_equal_leaves_of_a_tied_weight(change):
    """Under both names, as two equal tensors, or under the first name alone, as files have it."""
    base = tied_pair()[0]
    tuned = base.apply(lambda leaf: leaf.detach() + torch.randn_like(leaf))
    given = change(tuned.untie(("head", "weight")))

    found = Lora("table.weight", rank=4).extract(base, given)

    merged = Lora("table.weight", rank=4).merge(base, found)
    torch.testing.assert_close(merged["head", "weight"], tuned["table", "weight"], atol=1e-4, rtol=1e-4)
