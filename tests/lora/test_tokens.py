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


# -- a vocabulary that was resized ------------------------------------------------------------------------------

RESIZED = {
    "layers": {"where": "*q_proj.weight"},
    "a table": {"where": tdf.Filter("*q_proj.weight") | "*embed_tokens.weight"},
    "a head": {"where": tdf.Filter("*q_proj.weight") | "lm_head.weight"},
    "tokens": {"where": "*q_proj.weight", "trainable_token_indices": {"*embed_tokens.weight": [32, 34]}},
}


def resized(seed, tied):
    """The same small model, with new rows that depend on the seed."""
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=tied)
    torch.manual_seed(seed)
    model.resize_token_embeddings(35)
    return tdf.functional(model)


@pytest.mark.filterwarnings("ignore")
# A tied head is the table.
@pytest.mark.parametrize(
    ("name", "tied"), [(name, tied) for name in RESIZED for tied in (False, True) if (name, tied) != ("a head", True)]
)
def test_a_resized_vocabulary_is_saved_and_loaded(name, tied, tmp_path):
    """In a fresh model, whose new rows are others, the merged model is the one that was saved."""
    apply, params, _ = resized(1, tied)
    lora = Lora(**RESIZED[name], rank=2)
    adapters = lora.init(params, key=0, apply=apply).apply(lambda leaf: leaf + 0.3 * torch.randn_like(leaf))
    tdf.lora.save(tmp_path / "a", lora, adapters, apply, base=params)
    apply, fresh, _ = resized(2, tied)

    base = tdf.lora.load_base(tmp_path / "a", fresh)
    again, found = tdf.lora.load(tmp_path / "a", base, apply=apply)

    tdf.assert_close(again.merge(base, found), lora.merge(params, adapters))


@pytest.mark.filterwarnings("ignore")
def test_tables_of_another_base_are_named(tmp_path):
    """`load` says how the file's tables are read."""
    apply, params, _ = resized(1, False)
    lora = Lora("*embed_tokens.weight", rank=2)
    adapters = lora.init(params, key=0, apply=apply).apply(torch.ones_like)
    tdf.lora.save(tmp_path / "a", lora, adapters, apply, base=params)
    _, fresh, _ = resized(2, False)

    with pytest.raises(tdf.UnsupportedError, match=r"(?s)another table.*tdf\.lora\.load_base"):
        tdf.lora.load(tmp_path / "a", fresh)


@pytest.mark.filterwarnings("ignore")
def test_a_base_that_was_not_resized_is_named(tmp_path):
    """The message has the call that resizes it."""
    apply, params, _ = resized(1, False)
    lora = Lora("*q_proj.weight", rank=2)
    adapters = lora.init(params, key=0).apply(torch.ones_like)
    tdf.lora.save(tmp_path / "a", lora, adapters, apply, base=params)
    _, small, _ = tdf.functional(llama())

    with pytest.raises(tdf.LeafMismatchError, match=r"resize_token_embeddings\(35\)"):
        tdf.lora.load(tmp_path / "a", small)


def test_embeddings_of_another_module_are_refused(tmp_path):
    """Only language models have them."""
    apply, params, _ = tdf.functional(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    lora = Lora("0.weight", rank=1)

    with pytest.raises(tdf.UnsupportedError, match="embeddings of a language model"):
        tdf.lora.save(tmp_path / "a", lora, lora.init(params, key=0), apply, base=params)
