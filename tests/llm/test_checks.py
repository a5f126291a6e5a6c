"""Every check of a shape, a length or a mask raises the same error plainly and inside transforms: values alone hide."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import LeafMismatchError, MissingKeyError, TensorDict, lazy_stack
from tdfunc.llm import LogProbs, Tokens, TransformersWrapper, causal_lm, compare, distribution, logits, score, score_ids
from tdfunc.llm.losses.advantages import penalized_rewards
from tests.llm.losses.test_messages import MISTAKES
from tests.llm.models import make

LM, PARAMS, BUFFERS = causal_lm(make("llama", max_position_embeddings=8))
IDS = torch.arange(12).view(2, 6)
MASK, LONG = IDS > 0, torch.arange(20).view(2, 10)
SCORER = TransformersWrapper(make("llama", max_position_embeddings=8), input_mode="tokens", generate=False)


def tree(ids=IDS, size=(2,), **entries):
    """A tree with tokens, and the log-probs that it is given."""
    fields = {"prompt": ids[..., :3], "response": ids[..., 3:]} if entries.pop("parts", False) else {}
    return TensorDict({"tokens": Tokens(full=ids, batch_size=ids.shape[:-1], **fields), **entries}, size)


def ragged(ids, mask):
    """Rows of two lengths, with a mask of another length in one of them."""
    return lazy_stack([tree(ids[0, :n], (), attention_mask=mask[0, :length]) for n, length in ((6, 6), (4, 3))])


# Each with the data that a transform may map: ids, a mask, and ids of rows that are too long.
CHECKS = [
    ("ids of floats", LeafMismatchError, lambda i, m, r: score_ids(LM, PARAMS, i.float(), m)),
    ("a mask of other rows", LeafMismatchError, lambda i, m, r: score_ids(LM, PARAMS, i, m[:1])),
    ("a narrower mask", LeafMismatchError, lambda i, m, r: score_ids(LM, PARAMS, i, m[:, 1:])),
    ("candidates of other rows", LeafMismatchError, lambda i, m, r: score_ids(LM, PARAMS, i, at=i[:1, :, None])),
    ("a long row", ValueError, lambda i, m, r: score_ids(LM, PARAMS, r, buffers=BUFFERS)),
    ("a long row with a mask", ValueError, lambda i, m, r: score_ids(LM, PARAMS, r, r > -1, buffers=BUFFERS)),
    ("a long row of a packed batch", ValueError, lambda i, m, r: score(LM.with_options(packed=True), PARAMS, tree(r))),
    ("a long row of logits", ValueError, lambda i, m, r: logits(LM, PARAMS, tree(r), buffers=BUFFERS)),
    ("a long row of a distribution", ValueError, lambda i, m, r: distribution(LM, PARAMS, tree(r), buffers=BUFFERS)),
    (
        "a narrower mask of a tree",
        LeafMismatchError,
        lambda i, m, r: score(LM, PARAMS, tree(i, attention_mask=m[:, 1:])),
    ),
    ("a mask to add", LeafMismatchError, lambda i, m, r: score(LM, PARAMS, tree(i, attention_mask=m.float()))),
    ("a mask of other lengths", LeafMismatchError, lambda i, m, r: score(LM, PARAMS, ragged(i, m))),
    ("parts of behaviour", MissingKeyError, lambda i, m, r: score(LM, PARAMS, tree(i), under="behaviour")),
    (
        "adjusted behaviour",
        tdf.UnsupportedError,
        lambda i, m, r: score(
            LM, PARAMS, tree(i, parts=True, log_probs=LogProbs(adjusted=m[:, 0], batch_size=[2])), under="behaviour"
        ),
    ),
    ("log-probs of two shapes", LeafMismatchError, lambda i, m, r: compare(i.float(), i[:, 1:].float())),
    ("a mask of a comparison", LeafMismatchError, lambda i, m, r: compare(i.float(), i.float(), mask=m[:1])),
    ("rewards of other rows", LeafMismatchError, lambda i, m, r: penalized_rewards(i[:1, 0], i.float(), m)),
]
# Their rows are read, so that no transform can map them; and losses on tensors of their own.
KNOWN = [
    ("a long row of a wrapper", ValueError, lambda i, m, r: SCORER(tree(r))),
    ("tokens of another batch", LeafMismatchError, lambda i, m, r: SCORER(tree(i, ()))),
    ("a mask of a distribution", LeafMismatchError, lambda i, m, r: SCORER.get_dist(tree(i, w=m[:, 1:]), mask_key="w")),
    ("logits of a distribution", LeafMismatchError, lambda i, m, r: SCORER.get_dist(tree(i, w=m), logits_key="w")),
    *[
        (message, kind, lambda i, m, r, call=call: call())
        for call, kind, message in MISTAKES
        if kind is LeafMismatchError
    ],
]


def twice(fn, *data):
    """The data as two members."""
    return torch.vmap(fn)(*[torch.stack([x, x]) for x in data])


WAYS = {
    "plain": lambda fn, *data: fn(*data),
    "grad": lambda fn, *data: torch.func.grad(lambda x: fn(*data))(torch.ones(())),
    "vmap": lambda fn, *data: torch.vmap(lambda x: fn(*data))(torch.ones(2)),
    "vmap of the data": twice,
    "vmap of grad": lambda fn, *data: twice(lambda *data: torch.func.grad(lambda x: fn(*data))(torch.ones(())), *data),
    "jit": lambda fn, *data: tdf.jit(lambda i, m, r: fn(i, m, r))(*data),
}


CASES = [(*check, way) for check in CHECKS for way in WAYS]
CASES += [(*check, way) for check in KNOWN for way in ("plain", "grad", "vmap")]


@pytest.mark.parametrize(("name", "kind", "fn", "way"), CASES, ids=[f"{name}, {way}" for name, *_, way in CASES])
def test_a_check_runs_everywhere(name, kind, fn, way):
    """The error is the same one."""
    with pytest.raises(kind):
        WAYS[way](fn, IDS, MASK, LONG)
