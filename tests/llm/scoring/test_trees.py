"""Entropies and likeliest tokens beside log-probs equal the results of each sequence alone, in every layout."""

import copy

import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.llm import Tokens, causal_lm, losses, score
from tests.llm.models import VOCAB, make

WAYS = {
    "chunks": {"chunk_size": 3},
    "packed": {"packed": True},
    "one chunk": {},
}
LENGTHS = [7, 4, 1, 5]


def setup(name="llama"):
    """A model of float64, its trees, and rows of tokens with pads at random places."""
    model = copy.deepcopy(make(name)).double()
    ids = torch.randint(VOCAB, (4, 9))
    mask = torch.zeros(4, 9, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, torch.randperm(9)[:length]] = True
    td = TensorDict({"tokens": Tokens(full=ids, batch_size=[4]), "attention_mask": mask}, [4])
    return model, causal_lm(model), td


def alone(model, ids, temperature=1.0):
    """The log-probs of the distributions of all tokens but the first, of a sequence without pads."""
    with torch.no_grad():
        return (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)


def of_rows(td, found, row):
    """The values of the scored tokens of a row."""
    return found[row][td["log_probs"].mask[row]]


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("way", WAYS)
def test_entropies_are_those_of_each_sequence_alone(way, temperature, row):
    """Oracle: the unpadded sequence in float64, and a sum over the vocabulary."""
    model, (lm, params, buffers), td = setup()

    out = score(lm.with_options(**WAYS[way]), params, td, buffers=buffers, temperature=temperature, entropy=True)

    whole = alone(model, td["tokens"].full[row][td["attention_mask"][row]], temperature)
    expected = -(whole.exp() * whole).sum(-1)
    torch.testing.assert_close(of_rows(out, out["log_probs"].entropy, row), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_likeliest_tokens_are_those_of_each_sequence_alone(name, way, row):
    """With their log-probs, the likeliest first."""
    model, (lm, params, buffers), td = setup(name)

    out = score(lm.with_options(**WAYS[way]), params, td, buffers=buffers, topk=4)

    whole = alone(model, td["tokens"].full[row][td["attention_mask"][row]]).topk(4)
    assert torch.equal(of_rows(out, out["log_probs"].topk_ids, row), whole.indices)
    values = of_rows(out, out["log_probs"].topk_log_probs, row)
    torch.testing.assert_close(values, whole.values, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["entropy", "topk_log_probs", "topk_ids"])
def test_values_are_zero_without_a_log_prob(name):
    """At pads, and at the first token of a row."""
    _, (lm, params, buffers), td = setup()

    found = score(lm, params, td, buffers=buffers, entropy=True, topk=3)["log_probs"]

    assert not getattr(found, name)[~found.mask].any()


@pytest.mark.parametrize("name", ["entropy", "topk_log_probs", "topk_ids"])
def test_an_unknown_head_gives_the_same(name):
    """Whose logits are computed at once."""
    _, (lm, params, buffers), td = setup()
    unknown = tdf.lora.Lora("lm_head.weight", rank=2)
    zero = unknown.init(params, key=0, apply=lm.apply)

    found = score(unknown.attach(lm), (params, zero), td, buffers=buffers, entropy=True, topk=3)["log_probs"]

    expected = score(lm, params, td, buffers=buffers, entropy=True, topk=3)["log_probs"]
    torch.testing.assert_close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("name", ["full", "entropy", "topk_log_probs", "topk_ids"])
def test_ragged_tokens_have_ragged_values(name):
    """Each row has its own length."""
    _, (lm, params, buffers), td = setup()
    rows = [td["tokens"].full[i][td["attention_mask"][i]] for i in range(4)]
    trees = [TensorDict({"tokens": Tokens(full=row, batch_size=[])}) for row in rows]

    found = score(lm, params, tdf.lazy_stack(trees), buffers=buffers, entropy=True, topk=3)["log_probs"]

    single = [score(lm, params, tree, buffers=buffers, entropy=True, topk=3)["log_probs"] for tree in trees]
    values = [getattr(each, name) for each in found.unbind(0)]
    torch.testing.assert_close(values, [getattr(each, name) for each in single])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_entropies_are_those_of_whole_logits(way):
    """Of all parameters; oracle: the distributions with all logits."""
    _, (lm, params, buffers), td = setup()
    lm = lm.with_options(**WAYS[way])

    def mean_entropy(params):
        return score(lm, params, td, buffers=buffers, entropy=True)["log_probs"].entropy.sum()

    def whole(params):
        return tdf.llm.distribution(lm, params, td, buffers=buffers).entropy().sum()

    tdf.assert_close(torch.func.grad(mean_entropy)(params), torch.func.grad(whole)(params), atol=1e-9, rtol=1e-7)


def test_members_have_their_own_entropies():
    """`vmap` over parameters is a loop over members."""
    _, (lm, params, buffers), td = setup()
    td = td.set("attention_mask", torch.ones_like(td["attention_mask"]))
    members = [params, params * 1.1]

    def run(params):
        return score(lm, params, td, buffers=buffers, entropy=True)["log_probs"].entropy

    found = torch.func.vmap(run)(torch.stack(members))

    torch.testing.assert_close(found, torch.stack([run(each) for each in members]))


def test_a_teachers_candidates_are_the_candidates_of_a_student():
    """`distill` of the likeliest tokens is its value over whole distributions, where both agree elsewhere."""
    _, (lm, params, buffers), td = setup()
    student = params * 1.05

    teacher = score(lm, params, td, buffers=buffers, topk=VOCAB)["log_probs"]
    of_student = score(lm, student, td, buffers=buffers, at=teacher.topk_ids)["log_probs"]
    found = losses.distill(of_student.full, teacher.topk_log_probs, teacher.mask).loss

    whole = [tdf.llm.distribution(lm, each, td, buffers=buffers).logits for each in (student, params)]
    expected = losses.distill(*[each.log_softmax(-1) for each in whole], teacher.mask).loss
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("topk", [-1, 1.5])
def test_a_number_of_likeliest_tokens_is_a_count(topk):
    """The message names the option."""
    _, (lm, params, buffers), td = setup()

    with pytest.raises((ValueError, TypeError), match="score: topk"):
        score(lm, params, td, buffers=buffers, topk=topk)
