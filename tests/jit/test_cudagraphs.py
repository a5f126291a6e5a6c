"""Records captured as graphs, on a stand-in for the device: the same numbers, donation in place, refusals by name.

The stand-in is on the CPU, where values are, or on the meta device, which like a GPU gives none to Python.
"""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict, UnsupportedError, optim, random
from tdfunc._jit import jit
from tdfunc._jit.cudagraphs import CudaGraphs, _Watch
from tdfunc.optim import apart, kernel
from tests.helpers import assert_trees_equal, quick
from tests.jit.pools import StandIn, on_cpu
from tests.optim.table import RULES

pytestmark = pytest.mark.sample(2)

MEMBERS = 3


def make_cnn():
    """A convolution with buffers and dropout."""
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 2)
    return nn.Sequential(*layers)


def make_encoder():
    """Attention and dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32, 2))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)), (6,)),
    "cnn": (make_cnn, (1, 6, 6)),
    "encoder": (make_encoder, (4, 8)),
}


def make_step(name, device="cpu", opt=None, donate=True):
    """Return a step, the function that makes its first arguments, and a batch."""
    make, shape = MODELS[name]
    opt = opt or optim.adam(1e-2)
    apply, *_ = tdf.functional(make())

    def step(params, state, buffers, key, x, t):
        key, *keys = random.split(key, MEMBERS + 1).unbind()

        def loss(p, b, k):
            y, new = apply.with_buffers(p, b, x, rng=k)
            value = nn.functional.cross_entropy(y, t)
            return value, (new, value)

        grads, (buffers, losses) = torch.vmap(torch.func.grad(loss, has_aux=True))(params, buffers, torch.stack(keys))
        return *opt.update(params, grads, state, donate=donate), buffers, key, losses

    def start():
        params, buffers = tdf.split(tdf.stack_modules([make() for _ in range(MEMBERS)]))
        params, buffers = params.detach().to(device), buffers.to(device)
        return params, opt.init(params), buffers, random.key(7).to(device)

    return step, start, (torch.randn(5, *shape).to(device), torch.randint(2, (5,)).to(device))


def clone(values):
    """Copy trees and tensors."""
    return [x.clone() if isinstance(x, torch.Tensor) else x.apply(torch.Tensor.clone) for x in values]


def as_tree(steps):
    """One tree of the trees and tensors of each step, whose paths say what differs."""
    return TensorDict({f"step {i}": {f"value {j}": x for j, x in enumerate(step)} for i, step in enumerate(steps)})


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_record(name):
    """Steps equal those of the ordinary replay to the last bit, in the memory of the donated leaves."""
    pools = []
    step, start, batch = make_step(name)
    plain, captured = jit(step), jit(step, backend=on_cpu(pools))
    now = start()
    expected, weights = clone(now), list(now[0].leaves())
    found, wanted = [], []
    for _ in range(4):
        *now, losses = captured(*now, *batch)
        *expected, other = plain(*expected, *batch)
        found.append(clone([*now, losses]))
        wanted.append(clone([*expected, other]))

    assert_trees_equal(as_tree(found), as_tree(wanted))
    assert list(map(id, now[0].leaves())) == list(map(id, weights))
    assert len(pools) == 1
    assert pools[0].captures == 1
    assert pools[0].replays == 4


def test_donated_leaves_are_written_without_copies():
    """A step on the leaves that the last one returned copies other arguments and results, and shows in versions."""
    pools = []
    step, start, batch = make_step("mlp")
    captured = jit(step, backend=on_cpu(pools))
    *now, _ = captured(*start(), *batch)
    pools[0].written = weights = tuple(now[0].leaves())

    before, versions = pools[0].copied, [leaf._version for leaf in weights]
    captured(*now, *batch)

    # The count of steps, the key, the batch; and the count, the key, the losses.
    assert pools[0].copied - before == 4 + 3
    assert [leaf._version - version for leaf, version in zip(weights, versions, strict=True)] == [1] * len(weights)


def test_two_runs_take_turns():
    """A run in other memory than that of the capture is written in its own, and leaves the first alone."""
    step, start, batch = make_step("mlp")
    plain, captured = jit(step), jit(step, backend=on_cpu())
    runs = [start() for _ in range(2)]
    expected = [clone(run) for run in runs]
    before = [list(map(id, run[0].leaves())) for run in runs]
    memory, found, wanted = [], [], []
    for i in (0, 1, 1, 0, 1, 0):
        *runs[i], losses = captured(*runs[i], *batch)
        *expected[i], other = plain(*expected[i], *batch)
        memory.append([list(map(id, run[0].leaves())) for run in runs])
        found.append([losses, *clone([*runs[0], *runs[1]])])
        wanted.append([other, *clone([*expected[0], *expected[1]])])

    assert_trees_equal(as_tree(found), as_tree(wanted))
    assert memory == [before] * 6


def test_leaves_may_change_places():
    """Donated leaves that come in each other's captured memory are read before they are written."""
    opt = optim.sgd(0.5)
    update = lambda params, grads, state: opt.update(params, grads, state, donate=True)  # noqa: E731
    captured = jit(update, backend=on_cpu())
    a, b = torch.arange(3.0), torch.arange(3.0) + 10
    state, grads = opt.init(TensorDict({"a": a, "b": b})), TensorDict({"a": torch.ones(3), "b": -torch.ones(3)})
    captured(TensorDict({"a": a, "b": b}), grads, state)

    params, _ = captured(TensorDict({"a": b, "b": a}), grads, state)

    assert params["a"] is b
    assert a.tolist() == [0, 1, 2]
    assert b.tolist() == [10, 11, 12]


def test_results_share_no_memory_with_those_of_later_calls():
    """Results keep their values at the next call."""
    fn = jit(lambda x: [(y := x + 1), y[1:], y.expand(2, 3), x[:1], x, y], backend=on_cpu())
    x = torch.zeros(3)

    first, second = fn(x), fn(x + 1)

    assert [y.tolist() for y in first] == [[1, 1, 1], [1, 1], [[1, 1, 1]] * 2, [0], [0, 0, 0], [1, 1, 1]]
    assert [y.tolist() for y in second[:2]] == [[2, 2, 2], [2, 2]]


def test_results_share_what_they_share_without_a_graph():
    """Results of one call are views of each other, and of arguments, as without a graph."""
    fn = jit(lambda x: [(y := x + 1), y[1:], y.expand(2, 3), x[:1], x, y], backend=on_cpu())
    x = torch.zeros(3)

    first, _ = fn(x), fn(x + 1)

    assert first[5] is first[0]
    assert first[2].stride() == (0, 1)
    assert first[3].data_ptr() == x.data_ptr()
    assert first[4] is x
    first[1].zero_()
    assert first[0].tolist() == [1, 0, 0]


COMPLEX = torch.tensor([[1 + 2j, 3 - 1j], [0j, 1j]])
LAYOUTS = {
    "turned": torch.randn(4, 3).t(),
    "gaps": torch.randn(4, 6)[1:, ::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "windows": torch.arange(6.0).unfold(0, 3, 1),
    "empty": torch.zeros(0, 3),
    "conjugate": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
}


@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(x):
    """Arguments and results keep values and strides, whatever the memory under them."""
    fn = lambda x: [x.t(), x * 2, (x + 1).conj(), (x + 1j).conj().imag, x.detach().view(x.shape)]  # noqa: E731
    plain, captured = jit(fn), jit(fn, backend=on_cpu())

    found, expected = [*captured(x), *captured(x)], [*plain(x), *plain(x)]

    assert [y.dtype for y in found] == [y.dtype for y in expected]
    assert [y.stride() for y in found] == [y.stride() for y in expected]
    values, wanted = [y.resolve_conj() for y in found], [y.resolve_conj() for y in expected]
    torch.testing.assert_close(values, wanted, rtol=0, atol=0)


def update_by(schedule):
    """Return a step of SGD with a schedule, which is called at each step."""
    opt = optim.sgd(schedule)
    return torch.no_grad()(lambda p: opt.update(p, p, opt.init(p)))


X, META = torch.ones(3), torch.ones(3, device="meta")
TREE = TensorDict({"w": META})
WAITS = "aten._local_scalar_dense.default reads a value of the device"
CPU, GPU = CudaGraphs(StandIn, "cpu"), CudaGraphs(StandIn, "meta")
REFUSED = {
    "another device": (CPU, lambda x, y: x, (X, {"a": META}), "argument 1['a'] is not on the device", "here cpu",
                       "meta, shape [3]", 'tree.to("cpu")'),
    "by its name": ("cudagraphs", lambda tree: tree, (TensorDict({"w": X}),), "argument 0['w'] is not on the device",
                    "cuda", "cpu, shape [3]", 'tree.to("cuda")', "without a backend"),
    "generator": (CPU, lambda x: x + torch.rand(3), (X,), "aten.rand.default draws from", "tdfunc.random"),
    "dropout": (CPU, nn.Dropout(), (X,), "draws from a generator", "`rng=`"),
    "from the CPU": (GPU, lambda x: x + torch.zeros(3).to(x.device), (META,), "aten._to_copy.default moves values"),
    "schedule": (GPU, update_by(lambda step: step.item()), (TREE,), WAITS, "torch.where"),
    # torch.tensor does it on a GPU, and not on the meta device.
    "number": (GPU, update_by(lambda step: torch.ops.aten.lift_fresh(META.sum())), (TREE,), "lift_fresh.default"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "fn", "args", "parts"), [(*row[:3], row[3:]) for row in REFUSED.values()], ids=list(REFUSED)
)
def test_refusals(backend, fn, args, parts):
    """What a graph cannot hold is refused by name, and leaves no trace."""
    captured = jit(fn, backend=backend)

    with pytest.raises(UnsupportedError, match="(?s)" + ".*".join(map(re.escape, parts))):
        captured(*args)
    assert captured.cache_info().currsize == 0


def test_a_refusal_leaves_donated_leaves():
    """A step that is refused after it was made has written nothing."""
    opt, params = optim.sgd(0.5), TensorDict({"w": torch.ones(3)})
    fn = jit(lambda p, s: (opt.update(p, p.clone(), s, donate=True), torch.rand(3)), backend=on_cpu())

    with pytest.raises(UnsupportedError, match="draws from a generator"):
        fn(params, opt.init(params))
    assert params["w"].tolist() == [1, 1, 1]


def test_leaves_that_begin_to_overlap():
    """Donated leaves that share memory in a later call are refused by their names, and stay."""
    opt = optim.sgd(0.5)
    captured = jit(lambda p, s: opt.update(p, p.clone(), s, donate=True), backend=on_cpu())
    params = TensorDict({"a": torch.ones(3), "b": torch.ones(3)})
    captured(params, opt.init(params))

    memory = torch.ones(4)
    with pytest.raises(UnsupportedError, match=r"(?s)argument 0\['a'\] and argument 0\['b'\] share memory.*clone\(\)"):
        captured(TensorDict({"a": memory[:3], "b": memory[1:]}), opt.init(params))
    assert memory.tolist() == [1, 1, 1, 1]


def test_threads_take_turns():
    """Calls of many threads on one graph return the results of their own arguments."""
    fn = jit(lambda x: (x * 2).cumsum(0), backend=on_cpu())
    inputs = [torch.full((1000,), float(i)) for i in range(40)]

    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(fn, inputs))

    torch.testing.assert_close(found, [(x * 2).cumsum(0) for x in inputs], rtol=0, atol=0)


def test_copies_capture_anew():
    """A copy of a jitted function has graphs of its own, as it has traces."""
    fn = jit(lambda x: x, backend="cudagraphs")

    assert copy.deepcopy(fn)._graphs is not fn._graphs is not None


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_does_not_wait(name, donate, monkeypatch):
    """A training step is captured where there are no values: it reads none, draws by keys and moves nothing."""
    # There all tensors have one address, and the kernel of Adam is that of a GPU.
    monkeypatch.setattr(apart, "_refuse_shared", lambda *_: None)
    monkeypatch.setattr(kernel, "_FUSED_DEVICES", ("cpu", "meta"))
    step, start, batch = make_step(name, "meta", donate=donate)
    captured = jit(step, backend=CudaGraphs(StandIn, "meta"))

    *now, losses = captured(*start(), *batch)
    captured(*now, *batch)

    assert losses.is_meta
    assert captured.cache_info().misses == 1


@pytest.mark.parametrize("lr", ["float", "tensor", "schedule"])
@pytest.mark.parametrize("name", quick(RULES, "adam", "nadam", "muon"))
def test_kernels_of_optimizers_do_not_wait(name, lr, monkeypatch):
    """A step of a rule runs on the device alone, whether its members have done as many steps or not."""
    make, _, options = RULES[name]
    values = {"float": 0.1, "tensor": torch.full((MEMBERS,), 0.1), "schedule": lambda step: 0.1 * (step + 1) ** -0.5}
    opt = make(**options | {"lr": values[lr]})
    # torch has no fused SGD for the meta device.
    monkeypatch.setattr(kernel, "_FUSED_DEVICES", ("cpu",) if make is optim.sgd else ("cpu", "meta"))
    params = TensorDict({"w": torch.empty(MEMBERS, 4, 5), "v": torch.empty(MEMBERS, 5, 5)}, [MEMBERS]).to("meta")
    state = opt.init(params).to("meta")
    slots = [leaf for slot in opt.rule.slots for leaf in state[slot].leaves()]
    writes = [*params.leaves(), *slots, *[state[name] for name in opt.rule.scalars]]
    tensors = [state[name] for name in opt._tensors()]
    layout = kernel.Layout(opt.rule.slots, opt.rule.scalars, tuple(opt._tensors()))

    for step in (state["step"], torch.empty(MEMBERS, dtype=torch.int64, device="meta")):
        with _Watch():
            reads = [*params.clone().leaves(), step, *tensors]
            kernel.step_in_place(opt.rule, opt.hyper, layout, writes, reads)
