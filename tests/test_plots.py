"""Pictures of runs: what is drawn, from every kind of source."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import tdfunc as tdf
from tdfunc import TensorDict, plots, sweep


def new_axes():
    """Axes of a figure that pyplot does not keep."""
    return Figure().subplots()


def band_of(ax, number=0):
    """The steps, lower and upper edges of a band."""
    points = ax.collections[number].get_paths()[0].vertices
    steps = np.unique(points[:, 0])
    return steps, *[np.array([edge(points[points[:, 0] == step, 1]) for step in steps]) for edge in (np.min, np.max)]


@given(steps=st.integers(1, 6), members=st.integers(2, 9), seed=st.integers(0, 2**32))
def test_the_line_and_the_band(steps, members, seed):
    """The line is the median of the members, the band goes from their 10% to their 90% quantile."""
    torch.manual_seed(seed)
    values = torch.randn(steps, members, dtype=torch.float64)
    ax = plots.training_curve({"loss": values}, ax=new_axes())
    x, low, high = band_of(ax)

    np.testing.assert_allclose(ax.lines[0].get_ydata(), np.median(values, axis=1))
    np.testing.assert_array_equal(x, np.arange(steps))
    np.testing.assert_allclose(low, np.quantile(values, 0.1, axis=1))
    np.testing.assert_allclose(high, np.quantile(values, 0.9, axis=1))


def by_folder(manager, folder):
    """A run named by its folder."""
    return folder


@pytest.mark.parametrize("source", [lambda manager, folder: manager, by_folder, lambda manager, folder: str(folder)])
def test_the_metadata_of_a_run(source, tmp_path):
    """Numbers are lines and lists have a band, over the steps of the run; other entries are left out."""
    manager = tdf.CheckpointManager(tmp_path)
    for step in (10, 20, 30):
        metadata = {"loss": 1 / step, "members": [1.0, 2.0, step], "note": "text", "flag": True, "none": None}
        manager.save(step, TensorDict({"w": torch.zeros(1)}), metadata=metadata)
    ax = plots.training_curve(source(manager, tmp_path), ax=new_axes())

    lines = {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines}
    assert lines == {
        "loss": ([10, 20, 30], [1 / 10, 1 / 20, 1 / 30]),
        "members (median of 3)": ([10, 20, 30], [2.0, 2.0, 2.0]),
    }


SOURCES = {
    "a list of numbers": [3.0, 2.0],
    "a list of tensors": [torch.tensor(3.0), torch.tensor(2.0, requires_grad=True)],
    "numpy": np.array([3, 2]),
    "bfloat16": torch.tensor([3.0, 2.0], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("values", SOURCES.values(), ids=SOURCES)
def test_values_of_every_kind(values):
    """Numbers, tensors and arrays are drawn."""
    ax = plots.training_curve({"loss": values}, ax=new_axes())

    assert ax.lines[0].get_ydata().tolist() == [3.0, 2.0]
    assert ax.get_ylabel() == "loss"


def test_a_tree_of_values():
    """The names of lines are the paths of leaves."""
    tree = TensorDict({"train": {"loss": torch.ones(4)}, "valid": torch.ones(4, 2), "note": "text"})
    ax = plots.training_curve(tree, ax=new_axes())

    assert [line.get_label() for line in ax.lines] == ["train.loss", "valid (median of 2)"]


def test_values_that_are_not_finite():
    """They are left out of the median and the band, and a step without any other is left out."""
    values = torch.tensor([[1.0, math.nan, 3.0], [math.nan, math.inf, -math.inf], [5.0, 5.0, 5.0]])
    ax = plots.training_curve({"loss": values}, ax=new_axes())

    assert ax.lines[0].get_xdata().tolist() == [0, 2]
    assert ax.lines[0].get_ydata().tolist() == [2.0, 5.0]


def rows_of(ax, columns):
    """The texts of a table, row by row."""
    texts = [text.get_text() for text in ax.texts]
    return [texts[i : i + columns] for i in range(0, len(texts), columns)]


@pytest.mark.parametrize(("mode", "first"), [("min", "1"), ("max", "0")])
def test_the_best_member_is_first(mode, first):
    """Rows are in the order of the scores, with a nan last."""
    hyper = sweep.grid(lr=[0.1, 0.01, 0.001])
    ax = plots.sweep_table(hyper, torch.tensor([3.0, 1.0, math.nan]), mode=mode, ax=new_axes())
    rows = rows_of(ax, 3)

    assert rows[0] == ["member", "lr", "score"]
    assert rows[1][0] == first
    assert rows[3] == ["2", "0.001", "nan"]


@pytest.mark.slow
@given(members=st.integers(1, 12), rows=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_every_row_is_a_member(members, rows, seed):
    """The table has the members that `elites` returns, with their values."""
    hyper = sweep.random_search(seed, members, lr=sweep.log_uniform(1e-4, 0.1), layers=[1, 2, 3], bias=[True, False])
    scores = tdf.random.normal(tdf.random.key(seed), (members,))
    ax = plots.sweep_table(hyper, scores, rows=rows, ax=new_axes())

    best = sweep.elites(hyper.set("score", scores), scores, min(rows, members))
    shown = [
        [f"{row['lr']:.4g}", str(int(row["layers"])), str(bool(row["bias"])), f"{row['score']:.4g}"] for row in best
    ]
    assert [row[1:] for row in rows_of(ax, 5)[1:]] == shown


def test_colors():
    """The score of the best member is the greenest, and high values are the darkest of their column."""
    hyper = sweep.grid(lr=[1e-3, 1e-2, 1e-1])
    ax = plots.sweep_table(hyper, torch.tensor([1.0, 2.0, 3.0]), ax=new_axes())
    cells = [sum(to_rgb(each.get_facecolor()[0])) for each in ax.collections]
    lr = cells[4::3]
    score = cells[5::3]

    assert sorted(lr, reverse=True) == lr
    assert sorted(score) == score


def test_text_and_nested_names():
    """Text is a column without colors, and a long path keeps its end."""
    hyper = sweep.grid(lr=[0.1, 0.2]).set("kind", tdf.NonTensorStack("adam", "sgd"))
    hyper = hyper.set(("a_group_of_hyperparameters", "momentum"), torch.zeros(2))
    rows = rows_of(plots.sweep_table(hyper, torch.ones(2), ax=new_axes()), 5)

    assert rows[0] == ["member", "lr", "kind", "...erparameters.momentum", "score"]
    assert rows[1] == ["0", "0.1", "adam", "0", "1"]


def test_a_part_of_the_members_is_titled():
    """A table that leaves members out says so."""
    ax = plots.sweep_table(sweep.grid(lr=[0.1, 0.2, 0.3]), torch.ones(3), rows=2, ax=new_axes())

    assert ax.get_title() == "the best 2 of 3 members"


def test_a_figure_of_its_own():
    """Without axes a new figure fits the table."""
    from matplotlib import pyplot

    figures = [plots.sweep_table(sweep.grid(lr=torch.rand(n)), torch.rand(n), rows=n).figure for n in (3, 30)]
    pyplot.close("all")

    assert figures[1].get_size_inches()[1] > 5 * figures[0].get_size_inches()[1]


TABLE = sweep.grid(lr=[0.1, 0.2])
MESSAGES = {
    "nothing": (lambda: plots.training_curve({}), ValueError, "nothing to draw.*expected.*metadata="),
    "no row": (lambda: plots.training_curve({"a": torch.ones(2, 3, 4)}), ValueError, r"'a' is not a row.*\(2, 3, 4\)"),
    "no steps": (lambda: plots.training_curve({"a": []}), ValueError, "'a' is not a row"),
    "no column": (
        lambda: plots.sweep_table(TensorDict({"w": torch.ones(2, 3)}), torch.ones(2)), tdf.BatchSizeError,
        r"'w' is not one value.*\[2\].*\[2, 3\].*run\[\"hyper\"\]",
    ),
    "other scores": (lambda: plots.sweep_table(TABLE, torch.ones(3)), tdf.BatchSizeError, "'lr' is not one value"),
    "no rows": (lambda: plots.sweep_table(TABLE, torch.ones(2), rows=0), ValueError, "rows"),
    "a mode": (lambda: plots.sweep_table(TABLE, torch.ones(2), mode="low"), ValueError, "mode"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "cls", "pattern"), MESSAGES.values(), ids=MESSAGES)
def test_messages(call, cls, pattern):
    """What cannot be drawn is named, before a figure is made."""
    with pytest.raises(cls, match=f"(?s){pattern}"):
        call()


def test_members_of_a_run_that_change(tmp_path):
    """A list of another length at a later step is an error."""
    manager = tdf.CheckpointManager(tmp_path)
    for step, members in enumerate(([1.0, 2.0], [1.0])):
        manager.save(step, TensorDict({"w": torch.zeros(1)}), metadata={"loss": members})

    with pytest.raises(ValueError, match=r"(?s)'loss' has another number of members.*\[1, 2\]"):
        plots.training_curve(manager)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_table_of_results_is_the_table_of_their_parts(mode):
    """The mode of the results decides which member is the first."""
    hyper = sweep.grid(lr=[0.5, 0.25, 0.125])
    scores = torch.randn(3)

    found = plots.sweep_table(sweep.Results(hyper, scores, mode=mode), ax=new_axes())

    wanted = plots.sweep_table(hyper, scores, mode=mode, ax=new_axes())
    assert [text.get_text() for text in found.texts] == [text.get_text() for text in wanted.texts]


def test_hyperparameters_without_scores_are_refused():
    """They have no order."""
    with pytest.raises(TypeError, match=r"sweep_table: there are no scores\.\n.*hint: .*sweep_table\(hyper, scores\)"):
        plots.sweep_table(sweep.grid(lr=[0.5]))
