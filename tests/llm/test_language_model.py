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


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(setup, tmp_path):
    """A run that is stopped between two checkpoints, in each phase, ends at the state of one that never was."""
    straight = list(demo.train(setup, CheckpointManager(tmp_path / "straight")))
    again = demo.make_setup(0, PLAN)
    for stop in (3, 5, 8):
        folder = tmp_path / str(stop)
        for step, _ in demo.train(setup, CheckpointManager(folder)):
            if step == stop:
                break
        resumed = list(demo.train(again, CheckpointManager(folder)))

        assert resumed[0][0] == stop // 2 * 2
        assert [step for step, _ in resumed] == list(range(resumed[0][0], PLAN.total + 1))
        assert_trees_equal(resumed[-1][1], straight[-1][1])
    params = straight[-1][1]["params"]
    assert params.batch_size == (len(demo.RATES),)
    assert straight[-1][1]["losses"].isfinite().all()
    assert straight[-1][1]["losses"].shape == (6,)
    assert straight[-1][1]["rewards"].shape == (3, 4)
    assert straight[-1][1]["sample"].startswith("The statement ")
