"""Rows of a table that are trained themselves: new tokens."""

import pytest
import torch

import tdfunc as tdf
from tdfunc.lora import Lora
from tests.lora.layers import llama

TABLE = ("model", "embed_tokens", "weight")
INDICES = [3, 30, 7]
IDS = torch.tensor([[3, 1, 30, 2], [7, 7, 4, 3]])


def setup(where="*q_proj.weight", **options):
    """A model, its trees, a choice with rows, and adapters that changed."""
    torch.manual_seed(0)
    model = llama(**options)
    apply, params, buffers = tdf.functional(model)
    lora = Lora(where, rank=2, trainable_token_indices={"*embed_tokens.weight": INDICES})
    adapters = lora.init(params, key=0, apply=apply).apply(lambda leaf: leaf + 0.3 * torch.randn_like(leaf))
    return model, apply, params, buffers, lora, adapters


def test_fresh_rows_change_nothing():
    """They are the rows of the base."""
    _, apply, params, buffers, lora, _ = setup()
    fresh = lora.init(params, key=0, apply=apply)

    assert torch.equal(fresh[(*TABLE, "rows")], params[TABLE][INDICES])
    expected = apply(params, IDS, buffers=buffers).logits
    torch.testing.assert_close(lora.attach(apply)((params, fresh), IDS, buffers=buffers).logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_replace_the_rows_of_the_base(tied):
    """Oracle: an assignment into the table of the module, which also a tied head reads."""
    model, apply, params, buffers, lora, adapters = setup(tie_word_embeddings=tied)
    found = lora.attach(apply)((params, adapters), IDS, buffers=buffers).logits

    without = Lora("*q_proj.weight", rank=2)
    rest = adapters.delete(TABLE)
    without.merge(params, rest).to_module(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[INDICES] = adapters[(*TABLE, "rows")]

    torch.testing.assert_close(found, model(IDS).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_attached_rows_are_merged_rows(tied):
    """A tied table keeps its tie."""
    _, apply, params, buffers, lora, adapters = setup(tie_word_embeddings=tied)

    merged = lora.merge(params, adapters)

    assert merged.ties() == params.ties()
    expected = lora.attach(apply)((params, adapters), IDS, buffers=buffers).logits
    torch.testing.assert_close(apply(merged, IDS, buffers=buffers).logits, expected, atol=1e-5, rtol=1e-4)


def test_gradients_of_rows_are_those_of_the_table():
    """Only of these rows; oracle: the gradient of the merged table."""
    _, apply, params, buffers, lora, adapters = setup()
    merged = lora.merge(params, adapters)

    def loss(adapters):
        return lora.attach(apply)((params, adapters), IDS, buffers=buffers).logits.square().mean()

    grads = torch.func.grad(loss)(adapters)

    of_table = torch.func.grad(lambda p: apply(p, IDS, buffers=buffers).logits.square().mean())(merged)[TABLE]
    torch.testing.assert_close(grads[(*TABLE, "rows")], of_table[INDICES], atol=1e-6, rtol=1e-3)


def test_stacked_rows_are_those_of_each_adapter():
    """`vmap` over adapters is a loop."""
    _, apply, params, buffers, lora, first = setup()
    many = [first, first * 1.5]
    run = lora.attach(apply)

    found = torch.vmap(lambda a: run((params, a), IDS, buffers=buffers).logits)(tdf.stack(many))

    expected = torch.stack([run((params, one), IDS, buffers=buffers).logits for one in many])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_extracted_rows_are_those_of_the_tuned_model():
    """`extract` undoes `merge`."""
    _, apply, params, _, lora, adapters = setup()
    merged = lora.merge(params, adapters)

    found = lora.extract(params, merged, apply=apply)

    tdf.assert_close(lora.merge(params, found), merged, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("where", ["*q_proj.weight", tdf.Filter(lambda path, leaf: False)])
@pytest.mark.parametrize("tied", [False, True])
def test_files_have_the_rows(where, tied, tmp_path):
    """Saved and loaded they are the same, also without other adapters."""
    _, apply, params, buffers, lora, adapters = setup(where, tie_word_embeddings=tied)

    tdf.lora.save(tmp_path / "a", lora, adapters, apply)
    again, found = tdf.lora.load(tmp_path / "a", params)

    tdf.assert_close(found, adapters)
    tdf.assert_close(again.merge(params, found), lora.merge(params, adapters))


@pytest.mark.parametrize(
    ("indices", "words"),
    [([32], "0 to 31"), ([-1], "0 to 31"), ([1, 1], "each once"), ([], "each once")],
)
def test_indices_are_rows_of_the_table(indices, words):
    """The message has the range."""
    _, _, params, _, lora, _ = setup()
    wrong = Lora("*q_proj.weight", rank=2, trainable_token_indices={"*embed_tokens.weight": indices})

    with pytest.raises(ValueError, match=words):
        wrong.init(params, key=0)


@pytest.mark.parametrize("option", ["where", "whole"])
def test_a_table_is_not_adapted_twice(option):
    """Rows of an adapted table would be changed twice."""
    _, _, params, _, _, _ = setup()
    rows = {"*embed_tokens.weight": INDICES}
    options = {"where": "*q_proj.weight", option: "*embed_tokens.weight"}

    with pytest.raises(tdf.FilterError, match="trainable_token_indices"):
        Lora(**options, rank=2, trainable_token_indices=rows).init(params, key=0)


def test_a_leaf_without_rows_is_named():
    """A norm has no tokens."""
    _, _, params, _, _, _ = setup()

    with pytest.raises(tdf.LeafMismatchError, match="no rows of tokens"):
        Lora("*q_proj.weight", rank=2, trainable_token_indices={"model.norm.weight": [0]}).init(params, key=0)


def test_rows_have_no_base_to_return_to():
    """`unmerge` would need the replaced rows."""
    _, _, params, _, lora, adapters = setup()

    with pytest.raises(tdf.UnsupportedError, match="rows of tokens"):
        lora.unmerge(lora.merge(params, adapters), adapters)


def test_rows_of_a_batch_cannot_have_their_own_tables():
    """With `rows=True`."""
    _, apply, _, _, lora, _ = setup()

    with pytest.raises(tdf.UnsupportedError, match="no rows of a table"):
        lora.attach(apply, rows=True)
