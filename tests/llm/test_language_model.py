"""The program that trains a language model from nothing: its data, its steps, its checkpoints and its report."""

import importlib.util
from pathlib import Path

import pytest
import torch

import tdfunc as tdf
import tdfunc.llm
from tdfunc import CheckpointManager, random
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


def test_rewards_count_dice():
    """The mean of as many dice as were asked for, then an end and perhaps pads; anything else is worth nothing."""
    good = {("6<|im_end|>", 1): 1.0, ("132<|im_end|>", 3): 1 / 3, ("66<|im_end|>?", 2): 1.0, ("1<|im_end|>", 1): 1 / 6}
    bad = [("66", 2), ("66<|im_end|>", 1), ("7<|im_end|>", 1), ("<|im_end|>", 1), ("6 <|im_end|>", 2), ("", 1)]

    assert {call: demo.score_roll(*call) for call in good} == pytest.approx(good)
    assert [demo.score_roll(*call) for call in bad] == [0.0] * len(bad)


@pytest.mark.slow
def test_setup_is_a_function_of_its_seed(setup):
    """Weights and data are the same again; torch's generator is left alone."""
    before = torch.get_rng_state()
    again = demo.make_setup(0, PLAN)

    assert torch.equal(torch.get_rng_state(), before)
    assert_trees_equal(again.params, setup.params)
    assert_trees_equal(again.chats, setup.chats)
    assert torch.equal(again.text, setup.text)
    # All prompts have one length, so that none has pads; each chat teaches its dice and their end.
    texts = [setup.tokenizer.decode(row) for row in setup.prompts["tokens"].prompt]
    assert setup.prompts["attention_mask"].all()
    assert texts[1] == "<|im_start|>user\nRoll 2 dice<|im_end|>\n<|im_start|>assistant\n"
    assert setup.chats["assistant_masks"].sum(1).tolist() == [2] * 100 + [3] * 100 + [4] * 100


@pytest.mark.slow
def test_responses_are_rewarded_as_they_are_decoded(setup, monkeypatch):
    """The reward is that of the response's text and of its question; the log-probs are those of scoring."""

    # A model without training rolls no dice.
    def score_roll(text, count):
        return 1000.0 * count + sum(map(ord, text.partition("<|im_end|>")[0]))

    monkeypatch.setattr(demo, "score_roll", score_roll)
    drawn = demo.respond(setup, setup.params, random.key(1))
    old, ids = drawn["log_probs"], drawn["tokens"].full
    scores = tdf.llm.score_ids(setup.lm, setup.params, ids.flatten(0, 1), buffers=setup.buffers).log_probs

    assert drawn["reward"].shape == (3, demo.SAMPLES)
    torch.testing.assert_close(old.full[old.mask], scores.view_as(ids)[old.mask], rtol=1e-4, atol=1e-4)
    for i, count in enumerate(demo.DICE):
        for row, mask, reward in zip(ids[i], old.mask[i], drawn["reward"][i], strict=True):
            assert reward == score_roll(setup.tokenizer.decode(row[mask]), count)


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


@pytest.mark.slow
def test_members_are_their_own_runs(setup):
    """A step of all learning rates gives each member the weights of a step of its own."""
    params = setup.params.expand(len(demo.RATES)).clone()
    drawn = tdf.pad_sequence([demo.respond(setup, params[i], random.key(i)) for i in range(len(demo.RATES))], -1)
    # A model without training earns nothing, which teaches nothing.
    drawn = drawn.set("reward", torch.randn(drawn["reward"].shape))
    state = tdf.optim.adam(lr=torch.tensor(demo.RATES)).init(params)
    found, _ = setup.reinforce(params, state, setup.buffers, drawn)

    for i, rate in enumerate(demo.RATES):
        gains = tdf.llm.losses.advantages.group_normalized(drawn["reward"][i]).flatten()
        old, ids = drawn["log_probs"][i], drawn["tokens"].full[i].flatten(0, 1)

        def loss(params, ids=ids, gains=gains, old=old):
            scores = tdf.llm.score_ids(setup.lm, params, ids, buffers=setup.buffers).log_probs
            return tdf.llm.losses.dapo(scores, gains, old.mask.flatten(0, 1), old.full.flatten(0, 1)).loss

        optimizer = tdf.optim.adam(lr=rate)
        alone, _ = optimizer.update(setup.params, tdf.grad(loss)(setup.params), optimizer.init(setup.params))
        # Adam's first step is the sign of a gradient, which rounding decides where it is nearly 0.
        gap = torch.cat([leaf.flatten() for leaf in (found[i] - alone).leaves()]).abs()
        assert (gap > rate * 1e-2).float().mean() < 1e-2
        assert any([not torch.equal(a, b) for a, b in zip(alone.leaves(), setup.params.leaves(), strict=True)])


@pytest.mark.slow
def test_the_program_writes_its_report(tmp_path):
    """A short run writes its files; run again, it trains no more and reports the same."""
    first = demo.run(0, tmp_path, PLAN, progress=False)
    again = demo.run(0, tmp_path, PLAN, progress=False)

    assert "9 of 9 steps" in first
    assert "0 of 9 steps" in again
    assert "| after the chats |" in first
    assert "| GRPO, learning rate 0.0004 |" in first
    assert "The statement " in first
    # The second paragraph has the time.
    assert again.split("\n\n")[2:] == first.split("\n\n")[2:]
    assert (tmp_path / "training.svg").stat().st_size > 5000
    assert (tmp_path / "report.md").read_bytes() == again.encode()
    assert CheckpointManager(tmp_path / "checkpoints").latest() == PLAN.total
