"""The demo's ensemble equals a loop, beats its members, doubts other images, and survives a save and a load."""

import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from sklearn.metrics import roc_auc_score
from torch.testing import assert_close

from tdfunc import Ensemble, demo, functional, load, optim, random, split, stack_modules
from tdfunc.ensemble.stack import init_ensemble
from tdfunc.metrics import nll, uncertainty
from tests.helpers import assert_pure, assert_trees_equal


def call_main(monkeypatch, *options):
    """Run the command in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["tdfunc.demo", *options])
    with pytest.raises(SystemExit) as caught:
        demo.main()
    return caught.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The output of one whole run with three members."""
    out = tmp_path_factory.mktemp("demo") / "nested" / "out"
    with pytest.MonkeyPatch.context() as patch:
        assert call_main(patch, "--members", "3", "--seed", "1", "--out", str(out)) == 0
    return out


@pytest.fixture(scope="module")
def report(folder):
    """The text of the report."""
    return (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Quality on the test digits", "Speed of training", "not digits"])
def test_report_has_a_title(report, title):
    """Each part of the job has one."""
    assert f"{title}\n" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["accuracy", "NLL (nats)", "Brier score", "ECE", "photo patches", "shuffled digits", "Python loop"]
)
def test_report_has_a_row(report, row):
    """Each measure has one."""
    assert f"| {row}" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["the loop has the same weights", "bit for bit", "member 2 is a plain nn.Module again"]
)
def test_report_has_a_check(report, check):
    """What was checked is said."""
    assert check in report


@pytest.mark.slow
def test_report_says_how_it_was_made(report):
    """The options stand in it."""
    assert "3 members, 400 steps, seed 1" in report


@pytest.mark.slow
def test_the_plot_is_beside_the_report_with_the_checkpoint(report, folder):
    """The folder has these three files, and the report shows the plot."""
    assert (folder / "overview.svg").read_bytes().startswith(b"<?xml")
    assert "(overview.svg)" in report
    assert len(list(folder.iterdir())) == 3


@pytest.mark.slow
def test_the_checkpoint_is_the_ensemble(folder):
    """The saved tree has the accuracy that the report gives."""
    params = load(folder / "ensemble.safetensors")
    data = demo.load_digits(1)
    right = uncertainty(demo.predict(params, data.test_x), "classification")["mean"].argmax(-1) == data.test_t

    assert params.batch_size == (3,)
    assert f"{float(right.double().mean()):.4f} |" in (folder / "report.md").read_text()


@pytest.fixture(scope="module", params=[0, 1, 2])
def learned(request):
    """Data, parameters of an ensemble that is trained on it, and the seed of both."""
    seed = request.param
    data = demo.load_digits(seed)
    *_, params = demo.stacked_steps(data, demo.bootstrap(1200, 16, demo.STEPS, seed), seed)
    return data, params, seed


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda data, seed: demo.photo_patches(len(data.test_x), seed),
        lambda data, seed: demo.corrupt(data.test_x, seed),
    ],
    ids=["photographs", "shuffled"],
)
def test_mutual_information_tells_what_is_no_digit(learned, make):
    """The ensemble is less sure about photographs and shuffled pixels than about digits."""
    data, params, seed = learned
    count = len(data.test_x)
    inside = uncertainty(demo.predict(params, data.test_x), "classification")
    outside = uncertainty(demo.predict(params, make(data, seed)), "classification")

    values = torch.cat([inside["mutual_information"], outside["mutual_information"]])
    assert roc_auc_score([0] * count + [1] * count, values) > 0.9
    assert outside["mutual_information"].mean() > 5 * inside["mutual_information"].mean()
    assert outside["entropy"].mean() > 3 * inside["entropy"].mean()


def test_the_vmapped_step_equals_the_loop():
    """Training all members at once gives the weights of training them one by one, and of fewer members."""
    data, rows = demo.load_digits(0), demo.bootstrap(1200, 3, 4, 7)
    *_, params = demo.stacked_steps(data, rows, 7)
    *_, models = demo.loop_steps(data, rows, 7, keys=True)
    *_, few = demo.stacked_steps(data, rows[:, :2], 7)

    assert_trees_equal(params.cpu(), stack_modules(models).cpu(), rtol=1e-4, atol=1e-5)
    assert_trees_equal(params[:2], few, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_step_compiles_in_one_graph():
    """torch.compile meets no graph break, and does not compile again when only values change."""
    torch._dynamo.reset()
    apply, _, _ = functional(demo.make_model())
    params, buffers = split(init_ensemble(demo.make_model, 3))
    optimizer = optim.adam(lr=demo.learning_rates(3))
    step = demo.make_step(Ensemble(apply), optimizer)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    # `init` gives a step count expanded to all members, `update` need not: the first step is not counted.
    batch = torch.ones(3, 5, 64), torch.zeros(3, 5, dtype=torch.int64), random.key(0)
    params, buffers, state = step(params, buffers, optimizer.init(params), *batch)
    state = state.set("step", state["step"].contiguous())
    found, expected = [], []
    for i in range(3):
        batch = torch.rand(3, 5, 64), torch.full((3, 5), i), random.key(i)
        expected.append(step(params, buffers, state, *batch)[:2])
        params, buffers, state = compiled(params, buffers, state, *batch)
        found.append((params, buffers))

    assert_trees_equal(found, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_training_improves_every_member_and_the_ensemble_is_best(monkeypatch):
    """The curves hold the NLL of each member and, last, of the ensemble, at every tenth step."""
    monkeypatch.setattr(demo, "STEPS", 40)
    data = demo.load_digits(0)
    params, curves = demo.learn(data, 3, 0)
    logits = demo.predict(params, data.test_x)

    assert curves.shape == (4, 4)
    assert (curves[-1] < curves[0]).all()
    assert curves[-1, 3] < curves[-1, :3].mean()
    assert_close(curves[-1], torch.stack([nll(y, data.test_t) for y in (*logits, logits)]))


def test_data_is_in_the_unit_interval():
    """The least pixel is 0, the largest 1."""
    data = demo.load_digits(0)
    rows = torch.cat([data.train_x, data.test_x])

    assert float(rows.min()) == 0.0
    assert float(rows.max()) == 1.0


def test_data_is_split():
    """Two parts of fixed sizes."""
    data = demo.load_digits(0)

    assert len(data.train_x) == 1200
    assert len(data.test_x) == 597


def test_the_seed_decides_the_split():
    """Another seed divides the same images otherwise."""
    data, again, other = [demo.load_digits(seed) for seed in (0, 0, 1)]
    rows = torch.cat([data.train_x, data.test_x])

    assert torch.equal(rows.sum(0), torch.cat([other.train_x, other.test_x]).sum(0))
    assert torch.equal(data.test_x, again.test_x)
    assert not torch.equal(data.test_x, other.test_x)


def test_bootstrap():
    """Each member sees a sample of its own, which does not depend on the number of members."""
    rows = demo.bootstrap(1000, 3, 400, seed=0)
    shares = [len(torch.unique(rows[:, i])) / 1000 for i in range(3)]

    assert rows.shape == (400, 3, demo.BATCH)
    # 1 - 1/e of the images are in a bootstrap sample.
    assert max(abs(share - 0.632) for share in shares) < 0.04
    assert not torch.equal(rows[:, 0], rows[:, 1])
    assert torch.equal(rows[:, :2], demo.bootstrap(1000, 2, 400, seed=0))


def test_shuffled_digits_keep_their_ink():
    """Each image has the same pixels in another order."""
    x = demo.load_digits(0).test_x
    shuffled = assert_pure(lambda x: demo.corrupt(x, 0), x)

    assert torch.equal(shuffled.sort(1).values, x.sort(1).values)
    assert not (shuffled == x).all(1).any()


def test_photo_patches_are_of_different_places():
    """Images in [0, 1], the same for a seed."""
    patches = demo.photo_patches(51, seed=0)

    assert patches.shape == (51, 64)
    assert 0 <= float(patches.min()) <= float(patches.max()) <= 1
    assert len(torch.unique(patches, dim=0)) == 51
    assert torch.equal(patches, demo.photo_patches(51, seed=0))


def test_wrong_options_and_missing_packages(monkeypatch, capsys):
    """Too few members and missing packages end the command at once with a message."""
    assert call_main(monkeypatch, "--members", "1") == 2
    assert "--members" in capsys.readouterr().err
    monkeypatch.setattr(demo, "PACKAGES", ("sys", "no_such_package_a", "no_such_package_b"))

    assert call_main(monkeypatch) == (
        "tdfunc.demo needs no_such_package_a, no_such_package_b: pip install 'tdfunc[demo]'"
    )


@pytest.mark.slow
def test_other_weights_in_the_loop_are_noticed(monkeypatch):
    """The check that the step and the loop agree can fail."""
    honest = demo.loop_steps
    monkeypatch.setattr(demo, "loop_steps", lambda data, rows, seed, **keys: honest(data, rows, seed + 1, **keys))

    with pytest.raises(RuntimeError, match=r"different weights: they differ by"):
        demo.race(demo.load_digits(0), 2, 0, [], rounds=1, steps=1)


@pytest.mark.slow
def test_other_predictions_in_the_fresh_process_are_noticed(monkeypatch, tmp_path):
    """The check of the fresh process can fail."""
    params = init_ensemble(demo.make_model, 2)
    honest = demo.predict
    monkeypatch.setattr(demo, "predict", lambda params, x: honest(params, x) + 1)

    with pytest.raises(subprocess.CalledProcessError):
        demo.save_and_reload(demo.load_digits(0), params, tmp_path, [])
