"""Plain Python objects, such as the states of torch's optimizers, come back as they were."""

from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tdfunc import CheckpointManager, CorruptCheckpointError, Kind, NonTensorData, TensorDict
from tdfunc.storage.tree.objects import OBJECT
from tests.storage.test_round_trips import background, manager, single
from tests.storage.trees import assert_same, entry, forge, of_dtype, retie, same_bytes

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text("aé.~", max_size=3)
SHARED = torch.ones(2)
TIED = retie(TensorDict({"a": SHARED, "n": {"b": SHARED}}), [[("a",), ("n", "b")]])
TENSORS = [TIED, of_dtype("float32", (2,)), of_dtype("int64", ()), torch.zeros(0, 3), TensorDict({"w": torch.ones(2)})]
LEAVES = SCALARS | st.sampled_from(TENSORS)
KEYS = SCALARS.filter(lambda key: key == key) | st.tuples(st.integers(0, 3), st.text("ab", max_size=1))


def containers(inner):
    """Lists, tuples and dicts of every kind, with keys of every kind."""
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), dicts, dicts.map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    )  # fmt: skip


OBJECTS = st.recursive(LEAVES, containers, max_leaves=8)


def assert_equal(a, b):
    """Check that two objects are of the same types, with the same keys in the same order, tensors bit by bit."""
    assert type(a) is type(b)
    if isinstance(a, TensorDict):
        assert_same(a, b)
    elif isinstance(a, torch.Tensor):
        assert same_bytes(a, b)
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b))
        assert_equal(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert repr(a) == repr(b)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"a": (1, torch.zeros(2)), "b": 2.0}, id="type"),
        pytest.param({"b": 2.0, "a": [1, torch.zeros(2)]}, id="order"),
        pytest.param({"a": [1, torch.zeros(2)], "b": 2}, id="number"),
        pytest.param({"a": [1, -torch.zeros(2)], "b": 2.0}, id="tensor"),
        pytest.param({"a": [True, torch.zeros(2)], "b": 2.0}, id="bool"),
    ],
)
def test_the_comparison_can_fail(other):
    """The comparison finds another type, order, number and tensor."""
    with pytest.raises(AssertionError):
        assert_equal({"a": [1, torch.zeros(2)], "b": 2.0}, other)


def by_handle(tree, folder):
    """Save shards and read them by a handle."""
    tdf.save(tree, folder / "x", max_shard_size=8, fsync=False)
    with tdf.open(folder / "x") as f:
        assert f.keys() == list(tree)
        return {key: f[key].load() if isinstance(f[key], tdf.SavedTree) else f[key] for key in tree}


def by_folder(tree, folder):
    """Write a memmap folder and load it."""
    TensorDict({key: NonTensorData(value) for key, value in tree.items()}).memmap(folder / "m")
    return tdf.load(folder / "m")


@pytest.mark.parametrize("way", [manager, single, background, by_handle, by_folder])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=containers(OBJECTS), other=SCALARS)
def test_objects_come_back(way, value, other, tmp_path):
    """Types, keys of any kind, order, NaN and infinities, tensors and trees come back as they were."""
    back = way({"a": value, "b": other}, tmp_path)

    assert_equal(back["a"], value)
    assert_equal(back["b"], other)


def test_tensors_and_trees_by_name(tmp_path):
    """In a mapping, tensors are leaves and trees are trees; one tensor at two places of an object is one again."""
    weight = torch.ones(2)
    tree = {
        "w": weight,
        "t": TensorDict({"x": torch.ones(2)}, [2]),
        "o": {"one": weight, 2: weight, "s": [torch.ones(1)], "s.0": torch.zeros(1)},
        "n": None,
        "f": 2**2048 - 1,
    }

    back = single(tree, tmp_path)

    assert back.paths() == [("w",), ("t", "x")]
    assert_same(back["t"], tree["t"])
    assert back["o"]["one"] is back["o"][2]
    assert back["o"]["s"] == [1]
    assert back["o"]["s.0"] == 0
    assert back["n"] is None
    assert back["f"] == 2**2048 - 1


def in_a_file(tree, folder):
    """The tree after a save and a load."""
    tdf.save(tree, folder / "x.safetensors")
    return tdf.load(folder / "x.safetensors")


def in_a_folder(tree, folder):
    """The tree on mapped files, loaded."""
    tree.memmap(folder / "m")
    return tdf.load(folder / "m")


@pytest.mark.parametrize("round_trip", [in_a_file, in_a_folder])
def test_extra_state_of_any_kind(round_trip, tmp_path):
    """Extra state that JSON does not hold keeps its kind and its batch size."""
    tree = TensorDict({"a": torch.zeros(2), "_extra_state": NonTensorData((1, torch.ones(3)), [2])}, [2], device="cpu")
    tree = tree._replace(tree._data, kinds={"_extra_state": Kind.EXTRA_STATE})
    back = round_trip(tree, tmp_path)

    assert back.kind("_extra_state") is Kind.EXTRA_STATE
    assert back._data["_extra_state"].shape == (2,)
    assert_equal(back["_extra_state"], tree["_extra_state"])


def test_the_state_of_a_data_loader(tmp_path):
    """The state of torchdata's `StatefulDataLoader` (0.11) comes back equal, and its generator continues."""
    generator = torch.Generator().manual_seed(3)
    sampler = {"sampler_iter_state": {"generator": generator.get_state(), "yielded": 3}, "samples_yielded": 3}
    main = {"_base_seed": 7108202446872108501, "_num_workers": 1, "_sampler_iter_state": sampler, "_shared_seed": None}
    worker = {"dataset_state": None, "fetcher_state": None, "worker_id": 0}
    state = {
        "_iterator_finished": False,
        "_snapshot": {
            "_last_yielded_worker_id": 0, "_main_snapshot": main, "_snapshot_step": 1,
            "_worker_snapshots": {"worker_0": worker},
        },
        "_steps_since_snapshot": 0,
    }  # fmt: skip
    back = manager({"loader": state}, tmp_path)["loader"]
    found = back["_snapshot"]["_main_snapshot"]["_sampler_iter_state"]["sampler_iter_state"]["generator"]
    again = torch.Generator()
    again.set_state(found)

    assert_equal(back, state)
    assert torch.equal(torch.randperm(20, generator=again), torch.randperm(20, generator=generator))


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adamw, tensor lr": lambda p: torch.optim.AdamW([{"params": p, "lr": torch.tensor(0.1)}]),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
}
lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "milestones": lambda o: lr.MultiStepLR(o, [2, 2, 4]),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.1, 20, cycle_momentum=False),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "function": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequence": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], [3]),
}


@pytest.mark.parametrize(("optimizer", "scheduler"), [*zip(OPTIMIZERS, SCHEDULERS, strict=True)])
def test_states_of_torch(optimizer, scheduler, tmp_path):
    """States of a model, optimizer, schedule and scaler of torch come back equal; their own methods take them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optim = OPTIMIZERS[optimizer](model.parameters())
    schedule = SCHEDULERS[scheduler](optim)
    for _ in range(3):
        model(torch.randn(8, 3)).square().mean().backward()
        optim.step(lambda: torch.tensor(1.0))
        schedule.step(*[1.0] * isinstance(schedule, lr.ReduceLROnPlateau))
    parts = {"model": model, "optim": optim, "schedule": schedule, "scaler": torch.amp.GradScaler("cpu")}

    back = manager({name: part.state_dict() for name, part in parts.items()}, tmp_path)

    for name, part in parts.items():
        assert_equal(back[name], part.state_dict())
        part.load_state_dict(back[name])


REFUSED = {
    "a module": (nn.Linear(1, 1), "Linear$"),
    "a class": (int, "type"),
    "an object in a dict": ({"a": {3: object()}}, r"object <.* at a\.3"),
    "a tensor as key": ({torch.ones(1): 1}, "dict"),
    "a dict of its own class": (type("D", (dict,), {})(), "D {}"),
    "a long int": ([2**2048], "int of 2049 bits at 0"),
}


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda tree, folder: tdf.save(tree, folder / "x.safetensors"), id="save"),
        pytest.param(lambda tree, folder: CheckpointManager(folder).save(0, tree), id="manager"),
    ],
)
@pytest.mark.parametrize("case", REFUSED)
def test_other_objects_are_refused(case, write, tmp_path):
    """Another object is refused with its type and its place, and nothing is written."""
    value, shown = REFUSED[case]

    with pytest.raises(tdf.UnsupportedError, match=rf'(?m)save.*leaf "it" cannot be stored[\s\S]*got: +{shown}'):
        write({"it": value}, tmp_path)
    assert list(tmp_path.iterdir()) == []


AT = {"at": "w"}
HOSTILE = {
    "no such tensor": {"at": "x"},
    "a tensor in none": [],
    "two meanings": {"at": "w", "float": "nan"},
    "no meaning": [AT, {}],
    "another kind": [AT, {"os:system": []}],
    "another float": [AT, {"float": "1"}],
    "a key twice": {"dict": [[1, AT], [1, 2]]},
    "a list as key": {"dict": [[[], AT]]},
    "a pair of one": [AT, {"dict": [[1]]}],
    "a number of pairs": [AT, {"dict": 3}],
    "a tuple of a number": [AT, {"tuple": 3}],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_objects_that_lie(case, tmp_path):
    """A description of an object that does not fit its tensors is refused by the name of the file."""
    nodes = [
        {"keys": ["o"], "items": [{"tree": 1}]},
        {"class": OBJECT, "own": HOSTILE[case], "keys": ["w"], "items": [[0, "v"]]},
    ]
    raw = forge({"specs": [["F32", [2]]], "nodes": nodes, "ties": []}, [entry("o.w", "F32", [2], 0, 8)], bytes(8))
    (tmp_path / "f.safetensors").write_bytes(raw)

    with pytest.raises(CorruptCheckpointError, match=r"load .*f\.safetensors"):
        tdf.load(tmp_path / "f.safetensors")


def test_steps_lie_in_memory_as_torch_allocates_it(tmp_path):
    """Leaves of a step, and tensors of objects, are aligned: products of others may be rounded in another way."""
    tree = TensorDict({str(i): torch.ones(i) for i in range(1, 9)}).set(
        "o", NonTensorData((torch.ones(3), torch.ones(2)))
    )
    manager = CheckpointManager(tmp_path, fsync=False)
    manager.save(0, tree)

    back = manager.load()

    assert_same(back.delete("o"), tree.delete("o"))
    places = [leaf.data_ptr() for leaf in (*back.leaves(), *back["o"], *tdf.load(manager.path(0))["o"])]
    assert [place % 64 for place in places] == [0] * 12
