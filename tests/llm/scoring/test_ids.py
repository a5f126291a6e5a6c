"""Log-probs of tokens in any layout against each row alone, for each family; transforms, memory, options."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import TensorDict, UnsupportedError
from tdfunc.llm import (
    LogProbs,
    Masks,
    Tokens,
    causal_lm,
    distribution,
    explain_scoring,
    logits,
    score,
    score_ids,
)
from tdfunc.llm.rows.packing import bins, equal_lengths
from tdfunc.llm.scoring.ids import logits_of_ids
from tdfunc.llm.scoring.model import PACKING
from tests.helpers import assert_trees_equal, examples
from tests.llm.models import FAMILIES, VOCAB, make, row_log_probs

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Model config"),
]
# Those whose rows influence each other when packed, by their positions or through a state.
UNPACKED = ("falcon, alibi", "bloom", "gpt_oss", "lfm2", "qwen3_next", "qwen3_5", "bamba", "mamba", "falcon_h1")
# Those that are packed well, too, but that nobody needs.
UNLISTED = ("granite", "cohere")
MASKED = ("opt", "falcon")
QUICK = ("llama", "gpt2", "opt", "gemma2, window", "bloom")


def rows(lengths, width, seed):
    """Rows of random tokens with these lengths, among pads at random places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (len(lengths), width), generator=generator)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(width, generator=generator)[:length]] = True
    return ids, mask


def check_rows(model, found, ids, mask, temperature=1.0):
    """Assert that each row has the log-probs of the row alone."""
    for row, (tokens, valid) in enumerate(zip(ids, mask, strict=True)):
        alone = tokens[valid]
        assert int(found.mask[row].sum()) == max(len(alone) - 1, 0)
        if len(alone) > 1:
            gap = (found.log_probs[row][found.mask[row]] - (expected := row_log_probs(model, alone, temperature))).abs()
            assert (gap <= torch.where(expected < -20, 1e-4, 1e-5)).all()
    assert (found.log_probs[~found.mask] == 0).all()


def check_family(name, seed):
    """Assert it for a family, with pads anywhere and at the left, packed and not."""
    model = make(name)
    if hasattr(model.config, "linear_num_key_heads"):
        # Gated delta nets multiply rounding, and only eager experts take float64.
        model = copy.deepcopy(model).double()
        model.config._experts_implementation = "eager"
    lm, params, buffers = causal_lm(model)
    ids, mask = rows([11, 5, 5, 4, 3, 1, 0], 14, seed)
    left = torch.arange(14) >= 14 - mask.sum(1, keepdim=True)

    for layout in (mask, left):
        for way in (lm.with_options(packed=False), lm.with_options(packed=True)):
            check_rows(model, score_ids(way, params, ids, layout, buffers=buffers), ids, layout)


@pytest.mark.parametrize("name", QUICK)
def test_all_layouts_equal_each_row_alone(name):
    """Pads on any side and in between, empty rows, and packed rows do not change a number."""
    check_family(name, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_families_equal_each_row_alone(name):
    """The same for every family, on new tokens each time."""
    check_family(name, int(torch.seed() % 2**31))


def error_of(name, way):
    """The largest error of packed rows of a family, packed in a way."""
    lm, params, buffers = causal_lm(make(name))
    ids, mask = rows([9, 5, 4, 4, 3], 9, seed=1)
    exact = score_ids(lm, params, ids, mask, buffers=buffers).log_probs
    other = dataclasses.replace(lm, packing=way, packed=True)
    return float((score_ids(other, params, ids, mask, buffers=buffers).log_probs - exact).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*UNPACKED, *UNLISTED)])
def test_the_table_of_packing_is_what_packing_does(name):
    """A family is in the table with the way that keeps its rows apart."""
    assert error_of(name, causal_lm(make(name))[0].packing) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in UNPACKED if name not in ("falcon, alibi", "bloom")])
def test_rows_of_other_families_meet(name):
    """With positions that begin anew."""
    assert error_of(name, "positions") > 0.1


@pytest.mark.slow
def test_ways_of_packing():
    """Families that are not in the table have none, and two have a mask."""
    ways = {name: causal_lm(make(name))[0].packing for name in FAMILIES}

    assert {name for name, way in ways.items() if way is None} == {*UNPACKED, *UNLISTED}
    assert {name for name, way in ways.items() if way == "mask"} == {*MASKED}


@examples(0.2)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 2**16), data=st.data())
def test_random_rows(lengths, seed, data):
    """Any lengths, temperatures and chunks."""
    model = make("llama")
    lm, params, buffers = causal_lm(model)
    ids, mask = rows(lengths, 9, seed)
    temperature, packed = data.draw(st.sampled_from([0.3, 1.0, 2.0])), data.draw(st.booleans())
    lm = lm.with_options(chunk_size=data.draw(st.sampled_from([None, 1, 3])), packed=packed)

    for heat in (temperature, torch.full((len(lengths),), temperature)):
        found = score_ids(lm, params, ids, mask, buffers=buffers, temperature=heat)
        check_rows(model, found, ids, mask, temperature)


def test_rows_share_bins_or_lengths():
    """No bin is longer than the longest row, and rows without tokens are left out."""
    assert bins([9, 5, 5, 3, 1, 0]) == [[0], [1, 3, 4], [2]]
    assert equal_lengths([9, 5, 5, 3, 1, 0]) == [[4], [3], [1, 2], [0]]


def test_the_page_has_the_table_of_packing():
    """docs/llm_scoring.md names each family with its way."""
    lines = Path("docs/llm_scoring.md").read_text().splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| ")]
    ways = {"positions that begin anew": "positions", "a mask of pairs": "mask"}
    listed = {
        name.removesuffix(" (rotary)").strip(): ways[way.strip()]
        for names, way in rows
        if way.strip() in ways
        for name in names.strip().split(", ")
    }

    assert listed == PACKING


def test_the_head_is_that_of_the_family():
    """Scales and softcaps are found by comparison, and a head that differs is computed whole, with equal numbers."""
    assert causal_lm(make("gemma2"))[0].head.softcap == 30.0
    assert causal_lm(make("granite"))[0].head.scale == pytest.approx(1 / 3)

    class Shifted(type(make("llama"))):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * torch.linspace(0.5, 2, VOCAB)
            return out

    model = Shifted(make("llama").config).eval()
    lm, params, buffers = causal_lm(model)
    ids, mask = rows([6, 3], 7, seed=2)
    assert lm.head is None
    assert "all positions at once" in explain_scoring(lm)
    check_rows(model, score_ids(lm, params, ids, mask, buffers=buffers), ids, mask)
    found = logits_of_ids(lm, params, ids[:, mask[0]], buffers=buffers).log_probs
    torch.testing.assert_close(found[:, 1:], model(ids[:, mask[0]], use_cache=False).logits[:, :-1].detach())


# The norms and the softmax of Llama and Gemma compute in float32.
@pytest.mark.parametrize(("name", "tolerance"), [("llama", 1e-4), ("gemma2", 1e-4), ("gpt2", 1e-9)])
def test_gradients(name, tolerance):
    """Gradients equal those of whole logits, also of each sample, of members, and of a temperature."""
    model = make(name, attn_implementation="eager").double()
    lm, params, buffers = causal_lm(model)
    ids, mask = rows([7, 5, 1], 8, seed=3)
    lm = lm.with_options(chunk_size=4)

    def total(params, ids, mask, temperature=1.0):
        return score_ids(lm, params, ids, mask, temperature=temperature, buffers=buffers).log_probs.sum()

    def whole(params, ids, mask, temperature=1.0):
        found = logits_of_ids(lm, params, ids, mask, buffers=buffers)
        lp = (found.log_probs / temperature).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return torch.where(found.mask, lp, 0).sum()

    expected = torch.func.grad(whole)(params, ids, mask)
    tdf.assert_close(torch.func.grad(total)(params, ids, mask), expected, rtol=tolerance, atol=tolerance)
    of_row = torch.func.grad(lambda p, i, m: total(p, i[None], m[None]))
    each = torch.vmap(of_row, in_dims=(None, 0, 0))(params, ids, mask)
    tdf.assert_close(each.apply(lambda x: x.sum(0), batch_size=[]), expected, rtol=tolerance, atol=tolerance)
    live = params.apply(lambda x: x.clone().requires_grad_())
    total(live, ids, mask).backward()
    tdf.assert_close(live.apply(lambda x: x.grad), expected, rtol=tolerance, atol=tolerance)
    heat = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        torch.func.grad(lambda t: total(params, ids, mask, t))(heat).sum(),
        torch.func.grad(lambda t: whole(params, ids, mask, t[:, None, None]))(heat).sum(),
    )
    stacked = torch.stack([params, params.apply(lambda x: x * 1.1)])
    members = torch.vmap(lambda p: score_ids(lm, p, ids, mask, buffers=buffers).log_probs)(stacked)
    single = score_ids(lm, stacked[1], ids, mask, buffers=buffers).log_probs
    torch.testing.assert_close(members[1], single, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled():
    """Scoring compiles as one graph, and once more for all other shapes."""
    lm, params, buffers = causal_lm(make("llama"))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def score_all(p, b, i, m):
        return [score_ids(lm, p, i, m, buffers=b, temperature=heat)[0] for heat in (1.0, 2.0, m.sum(1) / 2)]

    run = torch.compile(score_all, fullgraph=True, backend=backend)
    batches = [rows([3] * count, width, seed=5) for count, width in ((3, 9), (4, 11), (5, 12), (6, 14))]
    found = [run(params, buffers, ids, mask) for ids, mask in batches]

    torch.testing.assert_close(found, [score_all(params, buffers, ids, mask) for ids, mask in batches])
    assert len(graphs) <= 2


FUSED, UNFUSED = {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}
TRAINED = [
    ("gpt2", {**FUSED, "n_layer": 1}),
    *[pytest.param(name, FUSED, marks=pytest.mark.slow) for name in ("llama", "mistral, window", "opt", "lfm2")],
    *[pytest.param(name, UNFUSED, marks=pytest.mark.slow) for name in ("gemma2, window", "lfm2")],
]


@pytest.mark.parametrize(("name", "options"), TRAINED)
def test_gradients_of_members_under_jit(name, options):
    """They are those of each member alone, with fused attention too, and for a mask that comes later."""
    lm, params, buffers = causal_lm(make(name, **options).double())
    members = torch.stack([params, params.apply(lambda x: x * 1.1)])

    def slopes(params, buffers, ids, mask):
        return torch.func.grad(lambda p: score_ids(lm, p, ids, mask, buffers=buffers).log_probs.sum())(params)

    step = tdf.jit(torch.vmap(slopes, in_dims=(0, None, None, None)))
    batches = [rows([7, 5], 8, 0), rows([3, 6], 8, 1)]
    found = [step(members, buffers, *batch) for batch in batches]
    expected = [torch.stack([slopes(member, buffers, *batch) for member in members.unbind(0)]) for batch in batches]

    assert_trees_equal(found, expected, rtol=1e-5, atol=1e-5)
    assert max([float(leaf.abs().max()) for leaf in found[1].leaves() if leaf.numel()]) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_softmax_is_in_float32(name, dtype):
    """Of logits in 16 bits, also where the states before the head are wider; one in 16 bits would show."""
    model = make(name)
    lm, params, buffers = causal_lm(copy.deepcopy(model).to(dtype))
    ids, mask = rows([9, 6], 9, seed=14)
    whole = logits_of_ids(lm, params, ids, mask, buffers=buffers)
    wide, narrow = [
        torch.where(whole.mask, x.log_softmax(-1).gather(-1, ids[..., None])[..., 0], 0)
        for x in (whole.log_probs.float(), whole.log_probs)
    ]

    found = score_ids(lm, params, ids, mask, buffers=buffers).log_probs
    assert lm.head is not None
    assert whole.log_probs.dtype is dtype
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wide, rtol=0, atol=1e-5)
    assert (found - narrow).abs().max() > 1e-3
    alone = copy.deepcopy(model).to(dtype)(ids[:1, mask[0]]).logits[0, :-1].float().log_softmax(-1)
    torch.testing.assert_close(found[0, 1:], alone.gather(-1, ids[0, 1:, None]).squeeze(-1), rtol=0, atol=1e-5)


def test_no_tensor_of_all_logits():
    """Neither pass makes a tensor of all positions and the vocabulary."""
    lm, params, buffers = causal_lm(make("llama"))
    ids, mask = rows([40] * 8, 40, seed=6)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    live = params.apply(lambda x: x.requires_grad_())
    score_ids(lm, live, ids, mask, buffers=buffers)
    with Sizes():
        score_ids(lm.with_options(chunk_size=32), live, ids, mask, buffers=buffers).log_probs.sum().backward()

    assert max(sizes) < 8 * 40 * VOCAB


# -- trees ------------------------------------------------------------------------------------------------------


def parts(ids, at):
    """Fields of tokens, of which the first `at` are the prompt."""
    return {"full": ids, "prompt": ids[..., :at], "response": ids[..., at:]}


@pytest.mark.parametrize("key", ["attention_mask", "masks"])
def test_score_keeps_the_layout_of_the_tree(key):
    """Any batch size, with the mask at either place; the tree is left alone."""
    lm, params, buffers = causal_lm(make("llama"))
    ids, mask = rows([6, 4, 2, 6], 6, seed=7)
    whole = mask.view(2, 2, 6)
    value = {"attention_mask": whole, "masks": Masks(all_attention_mask=whole, batch_size=[2, 2])}[key]
    td = TensorDict({"tokens": Tokens(**parts(ids.view(2, 2, 6), 4), batch_size=[2, 2]), key: value}, [2, 2])
    expected = score_ids(lm, params, ids, mask, buffers=buffers).log_probs.view(2, 2, 6)

    found = score(lm, params, td, buffers=buffers)["log_probs"]
    assert "log_probs" not in td
    assert torch.equal(found.full, expected)
    assert torch.equal(found.response, expected[..., 4:])
    assert found.padded is True


def test_ragged_rows_are_scored_as_each_alone():
    """Stacks with rows of their own lengths have log-probs of these."""
    model = make("llama")
    lm, params, buffers = causal_lm(model)
    ids, mask = rows([6, 4, 2, 6], 6, seed=7)
    valid = [row[known] for row, known in zip(ids, mask, strict=True)]
    ragged = tdf.lazy_stack([Tokens(**parts(row, 1)) for row in valid])

    found = score(lm, params, TensorDict({"tokens": ragged}, [4]), buffers=buffers)["log_probs"]
    assert isinstance(found, LogProbs)
    behind = [row[1:] for row in found.full]
    torch.testing.assert_close(behind, [row_log_probs(model, row) for row in valid], rtol=0, atol=1e-5)
    assert [row.tolist() for row in found.response] == [row.tolist() for row in behind]


def test_temperatures_have_the_layout_of_the_tree():
    """One for each row."""
    lm, params, buffers = causal_lm(make("llama"))
    ids, _ = rows([6, 4, 2, 6], 6, seed=7)
    td = TensorDict({"tokens": Tokens(**parts(ids.view(2, 2, 6), 4), batch_size=[2, 2])}, [2, 2])
    heat = torch.tensor([[0.5, 1.0], [2.0, 3.0]])

    found = score(lm, params, td, buffers=buffers, temperature=heat)["log_probs"]
    flat = score_ids(lm, params, ids, buffers=buffers, temperature=heat.view(4))
    assert torch.equal(found.full.flatten(0, 1), flat.log_probs)


def test_tokens_may_be_a_tensor():
    """Each but the first has a log-prob."""
    lm, params, buffers = causal_lm(make("llama"))
    ids, _ = rows([6, 4, 2, 6], 6, seed=7)

    assert score(lm, params, TensorDict({"tokens": ids}, [4]), buffers=buffers)["log_probs"].mask.sum() == 4 * 5


def scores_alone(model, row):
    """The log-probs of a row that may be too short to have any."""
    return row_log_probs(model, row) if len(row) > 1 else torch.zeros(0)


@pytest.mark.parametrize(
    ("dim", "places"), [(0, [(0, 0), (0, 1), (1, 0), (1, 1)]), (1, [(0, 0), (1, 0), (0, 1), (1, 1)])]
)
def test_ragged_rows_have_their_masks_and_places(dim, places):
    """Pads in ragged rows are pads, and stacks of stacks along any dimension keep the place of each row."""
    model = make("llama")
    lm, params, buffers = causal_lm(model)
    ids, mask = rows([5, 3, 4, 1], 7, seed=13)
    ends = [7, 6, 7, 5]
    ragged = [(i[:n], m[:n]) for i, m, n in zip(ids, mask, ends, strict=True)]
    trees = [TensorDict({"tokens": Tokens(full=i), "attention_mask": m}) for i, m in ragged]
    td = tdf.lazy_stack([tdf.lazy_stack(trees[:2]), tdf.lazy_stack(trees[2:])], dim)
    alone = [i[m] for i, m in ragged]

    found = score(lm, params, td, buffers=buffers)["log_probs"]
    dist = distribution(lm, params, td, buffers=buffers)
    assert found.batch_size == dist.mask.shape[:2] == torch.Size([2, 2])
    of_rows = [found[at] for at in places]
    known = [dist.mask[at][:end].tolist() for at, end in zip(places, ends, strict=True)]
    assert [row.mask.tolist() for row in of_rows] == known
    assert [int(row.mask.sum()) for row in of_rows] == [max(len(row) - 1, 0) for row in alone]
    expected = [scores_alone(model, row) for row in alone]
    torch.testing.assert_close([row.full[row.mask] for row in of_rows], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 0, 3), (0,)])
@pytest.mark.parametrize(("name", "packed"), [("llama", False), ("llama", True), ("bloom", True)])
def test_no_rows_and_no_tokens(shape, name, packed):
    """Batches of no rows and rows of no tokens have empty results, packed and by length too."""
    lm, params, buffers = causal_lm(make(name))
    ids, lead = torch.zeros(shape, dtype=torch.int64), shape[:-1]
    td = TensorDict({"tokens": Tokens(full=ids, batch_size=lead)}, lead)
    lm, options = lm.with_options(packed=packed), {"buffers": buffers}

    assert score(lm, params, td, **options)["log_probs"].full.shape == shape
    assert score(lm, params, td, at=ids[..., None], **options)["log_probs"].full.shape == (*shape, 1)
    assert logits(lm, params, td, **options)["logits"].shape == (*shape, VOCAB)
    assert distribution(lm, params, td, **options).log_prob(ids).shape == shape


def test_distribution_logits_and_candidates():
    """Position i has the distribution of token i, `at` others than it; pads and first tokens count nothing."""
    lm, params, buffers = causal_lm(make("llama"))
    ids, mask = rows([6, 4], 6, seed=8)
    td = TensorDict({"tokens": Tokens(full=ids, batch_size=[2]), "attention_mask": mask}, [2])
    scored = score(lm, params, td, buffers=buffers)["log_probs"]
    dist = distribution(lm, params, td, buffers=buffers)

    torch.testing.assert_close(dist.log_prob(ids), scored.full)
    values = logits(lm, params, td, buffers=buffers)["logits"]
    p = values.softmax(-1)
    torch.testing.assert_close(dist.entropy(), torch.where(scored.mask, -(p * p.log()).sum(-1), 0))
    at = torch.randint(VOCAB, (2, 6, 4), generator=torch.Generator().manual_seed(1))
    found = score(lm, params, td, buffers=buffers, at=at)["log_probs"].full
    torch.testing.assert_close(found, torch.where(scored.mask.unsqueeze(-1), p.log().gather(-1, at), 0))


def test_behaviour_is_the_distribution_that_was_drawn_from():
    """Under top-k and a temperature the log-probs are those over the tokens that were left."""
    lm, params, buffers = causal_lm(make("llama"))
    ids, mask = rows([6, 5, 6], 6, seed=9)
    td = TensorDict({"tokens": Tokens(**parts(ids, 3), batch_size=[3]), "attention_mask": mask}, [3])
    warm = logits(lm, params, td, buffers=buffers)["logits"][:, 3:] / 0.7
    support = warm.topk(5, -1).indices
    support[..., 0] = ids[:, 3:]
    support[0, 0] = -1  # nothing was cut here
    kept = torch.full_like(warm, -torch.inf).scatter(-1, support.clamp(min=0), 0.0) + warm
    kept[0, 0] = warm[0, 0]
    expected = kept.log_softmax(-1).gather(-1, ids[:, 3:, None]).squeeze(-1)
    td = td.set("log_probs", LogProbs(support=support, batch_size=[3]))

    found = score(lm, params, td, buffers=buffers, under="behaviour", temperature=0.7)["log_probs"]
    torch.testing.assert_close(found.behaviour, torch.where(mask[:, 3:], expected, 0))
    at, options = torch.arange(VOCAB).expand(3, 6, -1), {"under": "behaviour", "temperature": 0.7, "buffers": buffers}
    every = score(lm, params, td, at=at, **options)["log_probs"].behaviour
    torch.testing.assert_close(every, torch.where(mask[:, 3:, None], kept.log_softmax(-1), 0))
    ragged = [
        TensorDict({"tokens": Tokens(**parts(row[valid], int(valid[:3].sum()))), "log_probs": LogProbs(support=cut)})
        for row, valid, cut in zip(ids, mask, (support[0], None, support[2]), strict=True)
    ]
    some = score(lm, params, tdf.lazy_stack(ragged), **options)["log_probs"].behaviour
    raw = score(lm, params, td, temperature=0.7, buffers=buffers)["log_probs"].response
    parts_of = [found.behaviour[0], raw[1, mask[1, 3:]], found.behaviour[2]]
    torch.testing.assert_close(list(some), parts_of, rtol=1e-5, atol=1e-5)


def test_ways_of_scoring_are_explained():
    """Packed rows take a family that keeps them apart; others have their reason."""
    lm, *_ = causal_lm(make("gpt2"))
    packed = lm.with_options(packed=True)

    assert "positions that begin anew" in explain_scoring(packed)
    assert "rows of one length at a time, because packed" in explain_scoring(dataclasses.replace(packed, packing=None))
    assert "depend on the longest row" in explain_scoring(dataclasses.replace(lm, by_length=True))


@pytest.mark.parametrize("has_mask", [False, True])
def test_packed_rows_need_tokens_with_values(has_mask):
    """Under vmap they have none."""
    lm, params, _ = causal_lm(make("gpt2"))
    packed = lm.with_options(packed=True)
    ids, mask = rows([6, 4], 6, seed=1)
    known = mask if has_mask else None
    with pytest.raises(UnsupportedError, match="cannot be packed"):
        torch.vmap(lambda ids: score_ids(packed, params, ids, known).log_probs)(ids[None])


def test_rows_of_one_length_need_a_mask_with_values_only():
    """Tokens under vmap are scored."""
    lm, params, buffers = causal_lm(make("gpt2"))
    apart = dataclasses.replace(lm.with_options(packed=True), packing=None)
    ids, mask = rows([6, 4], 6, seed=1)

    found = torch.vmap(lambda ids: score_ids(apart, params, ids, mask, buffers=buffers).log_probs)(ids[None])
    torch.testing.assert_close(found[0], score_ids(lm, params, ids, mask, buffers=buffers).log_probs)


def test_other_modules_are_refused():
    """A layer is no language model."""
    with pytest.raises(TypeError, match="is not a causal language model"):
        causal_lm(torch.nn.Linear(2, 2))
