"""The main job: an ensemble on real digits, compared, saved, loaded, and less certain about what it does not know."""

import sys

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch.testing import assert_close

from tdfunc import UnsupportedError, demo, functional, load, optim, split, stack_modules, uncertainty
from tdfunc.ensemble.stack import init_ensemble
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


@pytest.mark.slow
def test_report_says_what_was_found(folder):
    """A part of the job would be missing from the report, or a check would have been left out."""
    text = (folder / "report.md").read_text()

    for title in (
        "Quality on the test digits",
        "Speed of training",
        "not digits",
        "under rotation (means, nats)",
        "Checked",
        "Plots",
    ):
        assert f"{title}\n" in text
    for row in ("accuracy", "NLL (nats)", "Brier score", "ECE", "photo patches", "shuffled digits", "Python loop"):
        assert f"| {row}" in text
    for check in ("the loop has the same weights", "bit for bit", "member 2 is a plain nn.Module again"):
        assert check in text
    assert "3 members, 400 steps, seed 1" in text


@pytest.mark.slow
def test_files(folder):
    """The report's plots or the checkpoint would be missing, or a temporary file left over."""
    found = sorted(path.name for path in folder.iterdir())

    assert found == ["digits.png", "ensemble.safetensors", "reliability.png", "report.md", "rotation.png"]
    for name in ("digits", "reliability", "rotation"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.png)" in (folder / "report.md").read_text()


@pytest.mark.slow
def test_the_checkpoint_is_the_ensemble(folder):
    """The saved tree would not be the one that the report is about."""
    params = load(folder / "ensemble.safetensors")
    data = demo.load_digits(1)
    right = uncertainty(demo.predict(params, data.test_x), "classification")["mean"].argmax(-1) == data.test_t

    assert params.batch_size == (3,)
    assert f"{float(right.double().mean()):.4f} |" in (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mutual_information_tells_what_is_no_digit(seed):
    """The ensemble would be as sure about photographs and shuffled pixels as about digits."""
    data = demo.load_digits(seed)
    params = demo.train(data, 16, seed)
    count = len(data.test_x)
    inside = uncertainty(demo.predict(params, data.test_x), "classification")
    for images in (demo.photo_patches(count, seed), demo.corrupt(data.test_x, seed)):
        outside = uncertainty(demo.predict(params, images), "classification")

        assert demo.auroc(inside["mutual_information"], outside["mutual_information"]) > 0.9
        assert outside["mutual_information"].mean() > 5 * inside["mutual_information"].mean()
        assert outside["entropy"].mean() > 3 * inside["entropy"].mean()


def test_the_vmapped_step_equals_the_loop():
    """Training all members at once would give other weights than training them one by one."""
    data = demo.load_digits(0)
    *_, params = demo.stacked_steps(data, 4, 7, steps=10)
    *_, models = demo.loop_steps(data, 4, 7, steps=10)

    assert_trees_equal(params.cpu(), stack_modules(models).cpu(), rtol=1e-4, atol=1e-5)


def test_member_i_does_not_change_with_the_number_of_members():
    """More members would train the first ones on other data."""
    data = demo.load_digits(0)
    *_, few = demo.stacked_steps(data, 2, 7, steps=3)
    *_, many = demo.stacked_steps(data, 4, 7, steps=3)

    assert_trees_equal(many[:2], few, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_step_compiles_in_one_graph():
    """torch.compile would meet a graph break, or compile again when only values change."""
    torch._dynamo.reset()
    apply, _, _ = functional(demo.make_model())
    params, _ = split(init_ensemble(demo.make_model, 3))
    optimizer = optim.adam(lr=1e-3)
    step = demo.make_step(apply, optimizer)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    # `init` gives a step count expanded to all members, `update` need not: the first step is not counted.
    params, state = step(params, optimizer.init(params), torch.ones(3, 5, 64), torch.zeros(3, 5, dtype=torch.int64))
    state = state.set("step", state["step"].contiguous())
    for i in range(3):
        x, t = torch.full((3, 5, 64), float(i)), torch.full((3, 5), i)
        expected = step(params, state, x, t)
        params, state = compiled(params, state, x, t)

        assert_trees_equal(params, expected[0], rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_data():
    """Training and test images would overlap, or be those of another seed."""
    data, again, other = [demo.load_digits(seed) for seed in (0, 0, 1)]
    rows = torch.cat([data.train_x, data.test_x])

    assert (len(data.train_x), len(data.test_x)) == (1200, 597)
    assert torch.equal(rows.sum(0), torch.cat([other.train_x, other.test_x]).sum(0))
    assert torch.equal(data.test_x, again.test_x)
    assert not torch.equal(data.test_x, other.test_x)
    assert float(rows.min()) == 0.0
    assert float(rows.max()) == 1.0


def test_bootstrap():
    """Members would share their data, or see all of it."""
    rows = demo.bootstrap(1000, 3, 400, seed=0)
    shares = [len(torch.unique(rows[:, i])) / 1000 for i in range(3)]

    assert rows.shape == (400, 3, demo.BATCH)
    # 1 - 1/e of the images are in a bootstrap sample.
    assert all(abs(share - 0.632) < 0.04 for share in shares)
    assert not torch.equal(rows[:, 0], rows[:, 1])
    assert torch.equal(rows[:, :2], demo.bootstrap(1000, 2, 400, seed=0))


@given(
    negative=st.lists(st.integers(-3, 3), min_size=1, max_size=20),
    positive=st.lists(st.integers(-3, 3), min_size=1, max_size=20),
)
def test_auroc_oracle(negative, positive):
    """The area would differ from scikit-learn's, ties included."""
    expected = roc_auc_score([0] * len(negative) + [1] * len(positive), negative + positive)

    assert demo.auroc(torch.tensor(negative), torch.tensor(positive)) == pytest.approx(expected)


def test_corruption_keeps_the_ink():
    """Shuffled digits would be told apart by their brightness alone."""
    x = demo.load_digits(0).test_x
    shuffled = assert_pure(lambda x: demo.corrupt(x, 0), x)

    assert torch.equal(shuffled.sort(1).values, x.sort(1).values)
    assert float((shuffled == x).all(1).double().mean()) == 0.0
    assert torch.equal(shuffled, demo.corrupt(x, 0))
    assert not torch.equal(shuffled, demo.corrupt(x, 1))


def test_photo_patches():
    """Patches would not be images like the digits, or the same place again and again."""
    patches = demo.photo_patches(50, seed=0)

    assert patches.shape == (50, 64)
    assert float(patches.min()) >= 0
    assert float(patches.max()) <= 1
    assert len(torch.unique(patches, dim=0)) == 50
    assert torch.equal(patches, demo.photo_patches(50, seed=0))


def test_rotation():
    """Images would be mirrored, shifted or blurred instead of turned."""
    x = demo.load_digits(0).test_x[:20]
    images = x.reshape(-1, 8, 8)

    assert_close(demo.rotate(x, 0), x)
    assert_close(demo.rotate(x, 90).reshape(-1, 8, 8), torch.rot90(images, 1, (1, 2)), atol=1e-5, rtol=0)
    assert_close(demo.rotate(x, 180).reshape(-1, 8, 8), images.flip(1, 2), atol=1e-5, rtol=0)


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "device", "expected"),
    [
        (1, "cpu", r"--members 2 or more.*--members 1"),
        (2, "warp", r"'warp'.*--device"),
        (2, "meta", r"'meta'.*--device"),
    ],
)
def test_options_that_cannot_work(members, device, expected, tmp_path):
    """Options that cannot work would fail after the training, or with a traceback."""
    with pytest.raises(UnsupportedError, match=f"(?s){expected}"):
        demo.check_options(members, tmp_path / "out", device)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    """A bad folder would be noticed after the training."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UnsupportedError, match=r"(?s)file/out.*--out"):
        demo.check_options(2, tmp_path / "file" / "out", "cpu")


def test_errors_are_printed_without_a_traceback(monkeypatch, capsys):
    """A user would read a traceback for a mistyped option."""
    assert call_main(monkeypatch, "--members", "0") == 2

    text = capsys.readouterr()
    assert "expected: --members 2 or more" in text.out
    assert "Traceback" not in text.out + text.err


def test_packages_that_are_missing(monkeypatch):
    """Without its extra the demo would fail with an ImportError somewhere inside."""
    monkeypatch.setattr(demo, "PACKAGES", ("sys", "no_such_package_a", "no_such_package_b"))

    assert call_main(monkeypatch) == (
        "tdfunc.demo needs no_such_package_a, no_such_package_b: pip install 'tdfunc[demo]'"
    )


def test_other_weights_in_the_loop_are_noticed(monkeypatch):
    """The check that the step and the loop agree could not fail."""
    honest = demo.loop_steps
    monkeypatch.setattr(demo, "loop_steps", lambda data, members, seed, steps: honest(data, members, seed + 1, steps))

    with pytest.raises(RuntimeError, match=r"(?s)different weights.*1e-4.*a difference of"):
        demo.race(demo.load_digits(0), 2, 0, demo.Report([], []), rounds=1, steps=1)


@pytest.mark.slow
def test_other_predictions_in_the_fresh_process_are_noticed(monkeypatch, tmp_path):
    """The check of the fresh process could not fail."""
    params, _ = split(init_ensemble(demo.make_model, 2))
    honest = demo.predict
    monkeypatch.setattr(demo, "predict", lambda params, x: honest(params, x) + 1)

    with pytest.raises(RuntimeError, match=r"(?s)fresh process.*the predictions differ"):
        demo.save_and_reload(demo.load_digits(0), params, tmp_path, demo.Report([], []))
