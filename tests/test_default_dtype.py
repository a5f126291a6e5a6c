"""With 16 bits as torch's default dtype, numbers that the library makes or keeps by itself keep their digits."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict, calibration, metrics, optim
from tdfunc.llm.losses.selection import AdaptiveKLController
from tdfunc.llm.wrappers.engine import _prompt_log_probs

NARROW = [torch.float16, torch.bfloat16]
# An improvement of 2e-4 a step, which neither of the two dtypes sees near 1.
LOSSES = [1 - 2e-4 * step for step in range(40)]
SCORES = [0.5 + 1e-5 * i for i in range(20)]


@pytest.fixture(params=NARROW, ids=str)
def narrow(request):
    """Make 16 bits the default dtype while a test runs."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


def test_slow_improvements_are_no_plateau(narrow):
    """The best metric is kept with the digits that the threshold compares."""
    plateau = optim.schedules.ReduceOnPlateau(0.5, 2)
    state = plateau.init()
    for loss in LOSSES:
        state = plateau.update(loss, state)

    assert state["scale"].item() == 1.0


def test_a_coefficient_moves_by_small_factors(narrow):
    """Each of 100 updates multiplies it by 1 + 0.2 / 1000."""
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=1000)
    state = controller.init()
    for _ in range(100):
        state = controller.update(state, torch.tensor(60.0), n_steps=1)

    assert state["kl_coef"].item() == pytest.approx(0.1 * (1 + 0.2 / 1000) ** 100, rel=1e-4)


@pytest.mark.parametrize("transform", [lambda update: update, torch.vmap, tdf.jit], ids=["eager", "vmap", "jit"])
def test_a_product_in_the_state_of_nadam_is_not_rounded(narrow, transform):
    """The steps of float32 parameters do not depend on the default dtype."""
    params = TensorDict({"w": torch.ones(2, 3, dtype=torch.float32)}, [2])
    opt = optim.nadam(lr=0.1)

    def train():
        trained = params
        state = opt.init(params)
        for _ in range(6):
            trained, state = transform(opt.update)(trained, trained * 0.5, state)
        return trained["w"]

    found = train()
    torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, train(), rtol=1e-6, atol=0)


def test_noise_of_a_choice_has_no_ties(narrow):
    """With the draw of float32, weights of float32 choose the same rows."""
    key = tdf.random.key(3)
    p = torch.ones(500, dtype=torch.float32)
    found = tdf.random.choice(key, 500, (300,), replace=False, p=p)

    torch.set_default_dtype(torch.float32)
    assert torch.equal(found, tdf.random.choice(key, 500, (300,), replace=False, p=p))


@pytest.mark.parametrize(
    "score",
    [
        lambda: metrics.auroc(SCORES, [i % 2 == 0 for i in range(20)]),
        lambda: metrics.nll([[0.123, 0.456], [0.7, 0.1]], [0, 1]),
        lambda: calibration.conformal_threshold(SCORES, 0.3),
    ],
    ids=["auroc", "nll", "threshold"],
)
def test_lists_of_numbers_are_not_rounded(narrow, score):
    """A list of Python's numbers means what it means with the default dtype float32."""
    found = score()

    torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, score(), rtol=1e-6, atol=0)


class Logprob:
    """A log-prob as vLLM returns it."""

    logprob = -1.2345678


class Output:
    """A scored prompt of two tokens as vLLM returns it."""

    prompt_token_ids = (5, 7)
    prompt_logprobs = (None, {7: Logprob})


def test_log_probs_of_an_engine_are_not_rounded(narrow):
    """They are Python's numbers, from which ratios of policies are made."""
    found = _prompt_log_probs(Output)

    assert found[1].item() == pytest.approx(-1.2345678, rel=1e-6)
