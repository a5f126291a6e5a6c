"""What a record has in place of functions that torch cannot trace: experts, and the checks of distributions."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Gamma, MultivariateNormal, Normal

import tdfunc as tdf
from tdfunc import UnsupportedError
from tests.lora.layers import experts

MEMBERS = 3
ENDS = [torch.tensor(ends, dtype=torch.int32) for ends in ([2, 2, 6], [0, 5, 6], [6, 6, 6])]


def products(rows, matrices, ends):
    """Rows times the matrices of their groups, which are transposed as those of a linear layer."""
    return F.grouped_mm(rows, matrices.mT, offs=ends)


def gradients(rows, matrices, ends):
    """The gradients of both by torch.func."""
    return torch.func.grad(lambda r, m: products(r, m, ends).square().sum(), (0, 1))(rows, matrices)


def backward(rows, matrices, ends):
    """The same by autograd."""
    leaves = [x.detach().requires_grad_() for x in (rows, matrices)]
    return torch.autograd.grad(products(*leaves, ends).square().sum(), leaves)


# The kernel takes no gradient whose rows do not start at multiples of 16 bytes.
@pytest.mark.parametrize(("fn", "columns"), [(products, 5), (products, 8), (gradients, 8), (backward, 8)])
def test_a_record_of_groups_of_rows(fn, columns):
    """A record in float32 has the numbers of the call without it, for other groups too."""
    rows, matrices = torch.randn(6, 4), torch.randn(3, columns, 4)
    jitted = tdf.jit(fn)

    got = [jitted(rows, matrices, ends) for ends in ENDS]

    torch.testing.assert_close(got, [fn(rows, matrices, ends) for ends in ENDS])


@pytest.mark.parametrize("columns", [1, 5, 8])
def test_a_recorded_product_has_the_memory_of_the_kernel(columns):
    """Its rows start at multiples of 16 bytes."""
    inputs = torch.randn(6, 4), torch.randn(3, columns, 4), ENDS[0]
    seen = []

    def strides(*inputs):
        out = products(*inputs)
        seen.append(out.stride())
        return out

    tdf.jit(strides)(*inputs)

    assert set(seen) == {products(*inputs).stride()}


def loss_of(apply, **buffers):
    """The loss of a language model, of weights and tokens."""
    return lambda params, ids: apply(params, input_ids=ids, **buffers).logits.square().sum()


def test_experts_in_a_record(recwarn):
    """A record of the gradients of members equals `backward` of each model, and torch warns of nothing."""
    models = [experts() for _ in range(MEMBERS)]
    params = tdf.stack_modules(models)
    ids = torch.randint(32, (2, 8))
    step = tdf.jit(torch.vmap(torch.func.grad(loss_of(tdf.functional(models[0])[0])), (0, None)))

    got = [step(params, ids) for _ in range(2)][1]

    for model in models:
        model(input_ids=ids).logits.square().sum().backward()
    want = [torch.stack([one.grad for one in same]) for same in zip(*[m.parameters() for m in models], strict=True)]
    names = [tuple(name.split(".")) for name, _ in models[0].named_parameters()]
    torch.testing.assert_close([got[name] for name in names], want, rtol=1e-4, atol=1e-4)
    assert not [str(each.message) for each in recwarn if "batching rule" in str(each.message)]


def test_experts_of_one_model_in_a_record():
    """Without vmap, a record has the gradients of `backward`."""
    model, ids = experts(), torch.randint(32, (2, 8))
    apply, params, buffers = tdf.functional(model)

    got = tdf.jit(torch.func.grad(loss_of(apply, buffers=buffers)), captures="constants")(params, ids)

    model(input_ids=ids).logits.square().sum().backward()
    want = {tuple(name.split(".")): parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: got[name] for name in want}, want, rtol=1e-4, atol=1e-4)


def test_experts_without_a_gradient_name_the_remedy():
    """The kernel does not take float64."""
    apply, params, buffers = tdf.functional(experts().double())
    step = tdf.jit(torch.func.grad(loss_of(apply, buffers=buffers)), captures="constants")

    with pytest.raises(UnsupportedError, match='set_experts_implementation."batched_mm"'):
        step(params, torch.randint(32, (2, 8)))


def log_prob(scale, x):
    """The log likelihood; torch.compile turns the checks off for all distributions without `validate_args`."""
    return Normal(x.mean(), scale, validate_args=True).log_prob(x).sum()


WAYS = {
    "forward": lambda scale, x: log_prob(scale[0], x),
    "grad": lambda scale, x: torch.func.grad(log_prob)(scale[0], x),
    "vmap": lambda scale, x: torch.vmap(log_prob, (0, None))(scale, x),
    "vmap of grad": lambda scale, x: torch.vmap(torch.func.grad(log_prob), (0, None))(scale, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_distribution_with_checks_in_a_record(way):
    """A record has the numbers of the call without it."""
    fn, x = WAYS[way], torch.randn(4)
    scales = [torch.rand(MEMBERS) + 0.1 for _ in range(2)]
    jitted = tdf.jit(fn)

    got = [jitted(scale, x) for scale in scales]

    torch.testing.assert_close(got, [fn(scale, x) for scale in scales])


@pytest.mark.parametrize("way", WAYS)
def test_each_replay_checks_the_arguments_of_a_distribution(way):
    """A scale below 0 is refused, also that of the first member alone."""
    jitted = tdf.jit(WAYS[way])
    jitted(torch.ones(MEMBERS), torch.randn(4))

    with pytest.raises(RuntimeError, match=r"torch\.distributions"):
        jitted(torch.tensor([-1.0, 1.0, 1.0]), torch.randn(4))


def test_each_replay_checks_the_values_of_a_distribution():
    """A value outside of the support is refused."""
    jitted = tdf.jit(lambda rate, x: Gamma(rate, rate, validate_args=True).log_prob(x))
    jitted(torch.ones(2), torch.ones(2))

    with pytest.raises(RuntimeError, match=r"torch\.distributions"):
        jitted(torch.ones(2), torch.tensor([1.0, -1.0]))


def test_a_check_that_a_record_cannot_hold_names_the_remedy():
    """Some constraints read values in between."""
    with pytest.raises(UnsupportedError, match="validate_args=False"):
        tdf.jit(lambda matrix: MultivariateNormal(matrix[0] * 0, matrix, validate_args=True).mean)(torch.eye(2))


def test_the_same_question_of_the_users_own_stays_a_tensor():
    """Only distributions ask it to raise."""
    ask = vars(torch)["_is_all_true"]
    jitted = tdf.jit(lambda x: ask(x > 0) * x)
    jitted(torch.ones(2))

    torch.testing.assert_close(jitted(torch.tensor([1.0, -1.0])), torch.zeros(2), rtol=0, atol=0, check_dtype=False)
