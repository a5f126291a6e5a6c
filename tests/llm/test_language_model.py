"""The program that trains a language model from nothing: its data, its steps, its checkpoints and its report."""

import importlib.util
from pathlib import Path

import pytest

from tdfunc import CheckpointManager
from tests.helpers import assert_trees_equal

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

PATH = Path(__file__).parents[2] / "docs/examples/language_model.py"
SPEC = importlib.util.spec_from_file_location("language_model", PATH)
demo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(demo)

PLAN = demo.Plan(text=3, chats=3, rewards=3, every=2)


@pytest.fixture(scope="module")
def setup():
    """A short run's setup."""
    return demo.make_setup(0, PLAN)


@pytest.fixture(scope="module")
def again():
    """Another one of the same seed, for the run that goes on."""
    return demo.make_setup(0, PLAN)


@pytest.fixture(scope="module")
def straight(setup, tmp_path_factory):
    """The steps of a run that was never stopped."""
    return list(demo.train(setup, CheckpointManager(tmp_path_factory.mktemp("straight"))))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 5, 8])
def test_a_stopped_run_goes_on_bit_for_bit(setup, again, straight, stop, tmp_path):
    """A run that is stopped between two checkpoints, in each phase, ends at the state of one that never was."""
    for step, _ in demo.train(setup, CheckpointManager(tmp_path)):
        if step == stop:
            break
    resumed = list(demo.train(again, CheckpointManager(tmp_path)))

    assert resumed[0][0] == stop // 2 * 2
    assert [step for step, _ in resumed] == list(range(resumed[0][0], PLAN.total + 1))
    assert_trees_equal(resumed[-1][1], straight[-1][1])


@pytest.mark.slow
def test_a_run_has_its_curves_and_a_sample(straight):
    """A member for each rate, its losses and rewards, and a text."""
    state = straight[-1][1]

    assert state["params"].batch_size == (len(demo.RATES),)
    assert state["losses"].shape == (6,)
    assert state["losses"].isfinite().all()
    assert state["rewards"].shape == (3, 4)
    assert state["sample"].startswith("The statement ")
