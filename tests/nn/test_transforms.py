"""Modules on trees as pure functions: vmap, ensembles, gradients, `jit`, one graph of dynamo, exported programs."""

import copy
import io
import pickle

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch._dynamo.testing import CompileCounter

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.nn import (
    EnsembleModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tests.helpers import assert_trees_equal, quick


class Join(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 2)

    def forward(self, *, x, hidden):
        return self.linear(torch.cat([hidden, x], -1)), x


def make_sequence():
    """A nested key, a dict of keywords, a function without parameters."""
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], [("n", "h")]),
        TensorDictModule(Join(), {"hidden": ("n", "h"), "x": "x"}, ["y", "_"]),
        TensorDictModule(torch.tanh, ["y"], ["z"]),
    )


def make_policy():
    """A distribution at the end."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), ["x"], ["loc"]),
        TensorDictModule(torch.exp, ["loc"], ["scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["y"], distribution_class=D.Normal, return_log_prob=True,
            # A check of values cannot be traced.
            distribution_kwargs={"validate_args": False},
        ),
    )  # fmt: skip


MAKERS = {
    "module": lambda: TensorDictModule(nn.Linear(3, 2), ["x"], ["y"]),
    "sequence": make_sequence,
    "selection": lambda: make_sequence().select_out_keys("z"),
    "policy": make_policy,
}


def tree(size=(5,)):
    """An input."""
    return TensorDict({"x": torch.randn(*size, 3), "other": torch.ones(size)}, size)


@pytest.fixture(params=MAKERS)
def module(request):
    """Each kind of module."""
    return MAKERS[request.param]()


def test_functional(module):
    """The pure function of the module gives what the module gives."""
    apply, params, _ = tdf.functional(module)
    td = tree()

    assert_trees_equal(apply(params, td), module(td))
    assert_trees_equal(params, tdf.from_module(module).apply(torch.Tensor.detach))
    assert torch.equal(apply(params, td["x"])[-1], module(td["x"])[-1])


@pytest.mark.parametrize(
    "copied",
    [lambda module: module, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["itself", "deepcopy", "pickle"],
)
def test_lazy_stacks_copies_and_pickles(module, copied):
    """Each tree of a lazy stack is run alone, and a copy of the module computes the same."""
    rows = [tree((n,)) for n in (1, 4)]

    assert_trees_equal(list(copied(module)(tdf.lazy_stack(rows)).trees), [module(row) for row in rows])


@pytest.mark.parametrize("how", ["vmap", "loop", "auto"])
def test_members(module, how):
    """Over members: the loop of the modules, with the batch of the members first."""
    models = [copy.deepcopy(module) for _ in range(3)]
    for model in models:
        model.reset_parameters_recursive()
    apply, _, _ = tdf.functional(models[0])
    td, stacked = tree(), tdf.stack_modules(models)
    expected = torch.stack([model(td) for model in models])
    out = tdf.Ensemble(apply, how)(stacked, td)

    assert out.batch_size == (3, 5)
    tdf.assert_close(out, expected)
    if how == "vmap":
        tdf.assert_close(torch.vmap(apply, in_dims=(0, None))(stacked, td), expected)
        tdf.assert_close(EnsembleModule(apply, stacked)(td), expected)


def test_gradients(module):
    """Gradients by the tree of parameters are those of autograd; of each sample, too."""
    apply, params, _ = tdf.functional(module)
    td, key = tree(), module.out_keys[-1]
    grads = torch.func.grad(lambda p: apply(p, td)[key].sum())(params)
    module(td)[key].sum().backward()
    each = torch.vmap(torch.func.grad(lambda p, row: apply(p, row)[key].sum()), in_dims=(None, 0))(params, td)

    found = {path: grads[path] for path in grads.paths()}
    torch.testing.assert_close(found, {path: module.get_parameter(".".join(path)).grad for path in found})
    torch.testing.assert_close({path: each[path].sum(0) for path in found}, found)


def test_jit(module):
    """A jitted function of parameters and a tree gives the tree again, for new values too."""
    apply, params, _ = tdf.functional(module)
    step, given = tdf.jit(lambda p, td: apply(p, td)), [tree() for _ in range(3)]

    tdf.assert_close(torch.stack([step(params, td) for td in given]), torch.stack([module(td) for td in given]))


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(list(MAKERS)))
def test_compile(name):
    """A compiled call is one graph, for trees of several values, and for values in place of a tree."""
    torch._dynamo.reset()
    module, counter = MAKERS[name](), CompileCounter()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    given = [tree() for _ in range(3)]

    tdf.assert_close(torch.stack([compiled(td) for td in given]), torch.stack([module(td) for td in given]))
    assert counter.frame_count == 1
    td = given[-1]
    tdf.assert_close(torch.compile(torch.vmap(module), backend="aot_eager", fullgraph=True)(td), module(td))
    values = torch.compile(module, backend="aot_eager", fullgraph=True)(td["x"])
    torch.testing.assert_close(values, module(td["x"]))


@pytest.mark.slow
def test_compile_with_inductor():
    """The default backend compiles a training step on trees, pure and in place."""
    torch._dynamo.reset()
    module = make_sequence()
    apply, params, _ = tdf.functional(module)
    td = tree()
    loss = torch.compile(lambda p, td: torch.func.grad(lambda p: apply(p, td)["z"].sum())(p), fullgraph=True)
    torch.compile(module, fullgraph=True)(td)["z"].sum().backward()

    grads = loss(params, td)
    in_place = {path: module.get_parameter(".".join(path)).grad for path in params.paths()}
    torch.testing.assert_close({path: grads[path] for path in params.paths()}, in_place)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(list(MAKERS)))
def test_export(name):
    """An exported program takes and returns trees, also from a file."""
    module, td, file = MAKERS[name](), tree(), io.BytesIO()
    program = torch.export.export(module, (td,))
    # Examples in the file would be pickled trees.
    program.example_inputs = None
    torch.export.save(program, file)
    file.seek(0)

    td = tree()
    tdf.assert_close(program.module()(td), module(td))
    tdf.assert_close(torch.export.load(file).module()(td), module(td))


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(list(MAKERS)))
def test_export_of_any_number_of_rows(name):
    """A program that was exported without a batch size takes any number of rows."""
    module, rows = MAKERS[name](), torch.export.Dim("rows", min=2)
    shapes = (({0: rows}, {0: rows}),)
    program = torch.export.export(module, (tree().with_batch_size([]),), dynamic_shapes=shapes)

    three, nine = [tree((size,)).with_batch_size([]) for size in (3, 9)]
    tdf.assert_close(program.module()(three), module(three))
    tdf.assert_close(program.module()(nine), module(nine))
