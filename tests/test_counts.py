"""Work that grows with the number of leaves, names, rows or groups, and not with pairs of them."""

import operator
import sys
import time
import tracemalloc
from functools import reduce

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tdfunc as tdf
from tdfunc import Filter, TensorDict
from tdfunc.cli import main
from tdfunc.llm import TokenDataset
from tdfunc.llm.encoding.encode import encode_marked
from tdfunc.llm.rows.packing import bins
from tdfunc.llm.templates.base import Marked, Span
from tdfunc.llm.wrappers.batching import Batcher
from tests.llm.tokens import make_tokenizer


def flat(n):
    """Return a tree of n leaves."""
    return TensorDict({f"k{i:05}": torch.zeros(2) for i in range(n)})


def tied(n):
    """Return the tree of n pairs of tied leaves."""
    module = nn.Module()
    for i in range(n):
        shared = nn.Parameter(torch.zeros(2))
        module.register_parameter(f"a{i}", shared)
        module.register_parameter(f"b{i}", shared)
    return tdf.from_module(module)


def update_of_ties(n, tmp_path):
    """Write one leaf of each pair."""
    tree, values = tied(n), {f"a{i}": torch.ones(2) for i in range(n)}
    return lambda: tree.update(values)


def value_of_a_leaf_with_many_names(n, tmp_path):
    """Set a leaf that has n names."""
    module, shared = nn.Module(), nn.Parameter(torch.zeros(2))
    for i in range(n):
        module.register_parameter(f"a{i}", shared)
    tree = tdf.from_module(module)
    return lambda: tree.set("a0", torch.ones(2))


def record_of_an_optimizer(n, tmp_path):
    """Record a step of an optimizer."""
    tree, optimizer = flat(n), tdf.optim.adam(0.1)
    state, step = optimizer.init(tree), tdf.jit(lambda p, s: optimizer.update(p, p, s))
    return lambda: step(tree, state)


def step_of_groups(n, tmp_path):
    """Give each leaf its own optimizer, and do a step."""
    tree = flat(n)
    optimizer = tdf.optim.multi({f"k{i:05}": tdf.optim.sgd(0.1 * i) for i in range(n)})
    state = optimizer.init(tree)
    return lambda: optimizer.update(tree, tree, state)


def filter_of_names(n, tmp_path):
    """Choose leaves by their names, one by one."""
    tree, chosen = flat(n), reduce(operator.or_, map(Filter, [f"k{i:05}" for i in range(0, n, 2)]))
    return lambda: tree.partition(chosen)


def ranks_by_name(n, tmp_path):
    """Give each leaf its own rank."""
    params = TensorDict({f"k{i:05}": torch.zeros(2, 2) for i in range(n)})
    lora = tdf.lora.Lora("*", rank={f"k{i:05}": 1 + i % 2 for i in range(n)})
    return lambda: lora.init(params, key=0)


class Length(int):
    """A number whose comparisons are calls."""

    def __le__(self, other):
        return int(self) <= other

    def __gt__(self, other):
        return int(self) > other


def rows_in_bins(n, tmp_path):
    """Pack rows."""
    lengths = [Length(5 + i % 7) for i in range(n)]
    return lambda: bins(lengths)


def neurons_matched(n, tmp_path):
    """Match the neurons of n / 4 layers."""
    layers = [layer for _ in range(n // 4) for layer in (nn.Linear(3, 3), nn.ReLU())]
    params = tdf.from_module(nn.Sequential(*layers)).detach()
    return lambda: tdf.weights.weight_matching(params, params, max_iter=1)


def mean_of_other_ties(n, tmp_path):
    """Average a file that ties pairs and one that does not."""
    tensors = [torch.zeros(2) for _ in range(n)]
    names = [f"{part}.{i}" for i in range(n) for part in "ab"]
    torch.save(dict(zip(names, [x for each in tensors for x in (each, each)], strict=True)), tmp_path / f"tied{n}.pt")
    torch.save({name: torch.zeros(2) for name in names}, tmp_path / f"apart{n}.pt")
    paths = [str(tmp_path / f"{name}{n}") for name in ("tied", "apart")]

    def run():
        with pytest.raises(SystemExit):
            main(["average", f"{paths[0]}.pt", f"{paths[1]}.pt", "-o", f"{paths[0]}.safetensors", "--force"])

    return run


# Of each the smaller number, and how many more calls four times as many may take.
CASES = {
    update_of_ties: (24, 4.5),
    value_of_a_leaf_with_many_names: (24, 4.5),
    record_of_an_optimizer: (24, 4.5),
    step_of_groups: (24, 4.5),
    filter_of_names: (24, 4.5),
    ranks_by_name: (24, 4.5),
    # Of a binary tree: a logarithm more.
    rows_in_bins: (24, 5.5),
    neurons_matched: (24, 4.5),
    mean_of_other_ties: (150, 4.5),
}


def count_calls(run):
    """Count the calls of functions of Python and C."""
    counts = {"call": 0, "c_call": 0}

    def note(frame, event, arg):
        if event in counts:
            counts[event] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(counts.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_four_times_as_many_take_few_more_calls_than_four_times(case, tmp_path):
    """The calls grow as the number does."""
    n, limit = CASES[case]
    # Imports and caches.
    case(8, tmp_path)()
    few, many = [count_calls(case(size, tmp_path)) for size in (n, 4 * n)]
    assert many <= limit * few


def count_lines(run):
    """Count the lines of Python that run."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def tied_layers(n):
    """Return n layers of two names of one tensor."""
    module = nn.Module()
    for i in range(n):
        layer = nn.Module()
        layer.a = layer.b = nn.Parameter(torch.zeros(2))
        module.add_module(f"k{i:05}", layer)
    return tdf.from_module(module)


LAYERS = {
    "tensors": lambda n: TensorDict({f"k{i:05}": {"w": torch.zeros(2)} for i in range(n)}),
    "strings": lambda n: TensorDict({f"k{i:05}": {"w": torch.zeros(2), "name": "a"} for i in range(n)}),
    "ties": tied_layers,
}
READS = {
    "load": lambda layer: layer.load(),
    "load to a device": lambda layer: layer.load(device="cpu"),
    "spec": lambda layer: layer.spec(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("plain", [TensorDict(), {"x": torch.zeros(2)}], ids=["trees", "plain objects"])
def test_an_open_file_reads_a_layer_without_a_look_at_the_others(layers, plain, read, tmp_path):
    """A loop over four times as many layers takes about four times as long."""

    def lines(n):
        path = tmp_path / f"{n}.safetensors"
        tdf.save({"layers": layers(n), "plain": plain}, path)
        with tdf.open(path) as file:
            part = file["layers"]
            keys = list(part.keys())
            read(part[keys[0]])
            return count_lines(lambda: [read(part[key]) for key in keys])

    assert lines(160) <= 4.5 * lines(40)


class Elements(TorchDispatchMode):
    """Counts the elements of all results."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += out.numel() if isinstance(out, torch.Tensor) else 0
        return out


def elements_of_an_epoch(n):
    """Count the elements that are made for batches of n rows."""
    column = {"input_ids": torch.zeros(n * 6, dtype=torch.int32), "offsets": torch.arange(n + 1) * 6}
    data = TokenDataset(TensorDict({"rows": TensorDict(column)}), name="rows")
    with Elements() as found:
        for _ in data.batches(4, truncation=True, max_length=8):
            pass
    return found.count


def test_batches_that_are_truncated_look_at_their_own_rows():
    """An epoch of 4 n rows makes some 4 times as many elements."""
    assert elements_of_an_epoch(800) <= 4.5 * elements_of_an_epoch(200)


def compared_groups(n):
    """Count the comparisons of groups in a batcher that answers n requests, each of its own group."""
    count = 0

    class Group:
        def __init__(self, number):
            self.number = number

        def __hash__(self):
            return self.number

        def __eq__(self, other):
            nonlocal count
            count += 1
            return self.number == other.number

    with Batcher(lambda requests: requests, min_batch_size=2, timeout_s=0.0) as batcher:
        futures = [batcher.submit(i, group=Group(i)) for i in range(n)]
        assert [future.result() for future in futures] == list(range(n))
    return count


def test_a_batcher_does_not_compare_pairs_of_groups():
    """The requests of a group are found by the group."""
    assert compared_groups(400) <= 400 * 10


ROWS = {
    "number": 9_999,
    "slice": slice(5000, 5004),
    "slice from the end": slice(-9, None, 2),
    "list": [9_999, -1, 0, 5],
    "tensor": torch.tensor([[1, 9_999], [-1, 5]]),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_few_trees_of_a_stack_take_no_list_of_all(rows):
    """Indexing takes memory for the trees of the index."""
    stack = tdf.lazy_stack([TensorDict({"x": torch.zeros(1)})] * 10_000)
    stack[rows]
    tracemalloc.start()
    try:
        stack[rows]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000


def test_a_filter_of_thousands_of_names():
    """A union of names is as deep as one name."""
    chosen = reduce(operator.or_, map(Filter, [f"k{i:05}" for i in range(0, 3000, 2)]))
    assert flat(3000).partition(chosen)[1].paths() == [(f"k{i:05}",) for i in range(1, 3000, 2)]


def test_a_filter_without_thousands_of_names():
    """So is what none of many names matches."""
    kept = reduce(operator.and_, [~Filter(f"k{i:05}") for i in range(1000)])
    assert flat(1002).partition(kept)[0].paths() == [("k01000",), ("k01001",)]


def test_a_stack_shows_few_of_many_places():
    """The text does not grow with the number of trees."""
    trees = [TensorDict({"a": torch.zeros(1), **({"b": torch.zeros(1)} if i % 2 else {})}) for i in range(2000)]
    assert len(repr(tdf.lazy_stack(trees))) < 1000


def cpu_time_of_an_encoding(n):
    """Return the least of three times for a text of n turns."""
    tokenizer, text = make_tokenizer(), "<|im_end|>a" * n
    marked = Marked(text, [Span(11 * i + 10, 11 * i + 11) for i in range(n)], [])
    times = []
    for _ in range(3):
        begin = time.process_time()
        encode_marked(tokenizer, marked, ("<|im_end|>",))
        times.append(time.process_time() - begin)
    return min(times)


def test_a_text_of_many_turns_is_encoded_in_time():
    """A set for each control string took 60 times as long for 8 times as many."""
    assert cpu_time_of_an_encoding(8000) <= 24 * cpu_time_of_an_encoding(1000)
