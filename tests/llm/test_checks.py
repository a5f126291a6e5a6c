"""Every check of a shape, a length or a mask raises the same error plainly and inside transforms: values alone hide."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import LeafMismatchError, MissingKeyError, TensorDict, UnsupportedError, lazy_stack
from tdfunc.llm import (
    History,
    LogProbs,
    Tokens,
    TransformersWrapper,
    attention_inputs,
    causal_lm,
    compare,
    distribution,
    logits,
    score,
    score_ids,
)
from tdfunc.llm.losses.advantages import penalized_rewards
from tests.llm.losses.test_messages import MISTAKES
from tests.llm.models import make

LM, PARAMS, BUFFERS = causal_lm(make("llama", max_position_embeddings=8))
IDS = torch.arange(12).view(2, 6)
CHAT = History(role="user", content="a")
MASK, LONG = IDS > 0, torch.arange(20).view(2, 10)
SCORER = TransformersWrapper(make("llama", max_position_embeddings=8), input_mode="tokens", generate=False)


def tree(ids=IDS, size=(2,), **entries):
    """A tree with tokens, and the log-probs that it is given."""
    fields = {"prompt": ids[..., :3], "response": ids[..., 3:]} if entries.pop("parts", False) else {}
    return TensorDict({"tokens": Tokens(full=ids, batch_size=ids.shape[:-1], **fields), **entries}, size)


def ragged(ids, mask):
    """Rows of two lengths, with a mask of another length in one of them."""
    return lazy_stack([tree(ids[0, :n], (), attention_mask=mask[0, :length]) for n, length in ((6, 6), (4, 3))])


def uneven(ids):
    """Two batches of different numbers of rows."""
    row = tree(ids[0], ())
    return lazy_stack([lazy_stack([row, row]), lazy_stack([row])])


def adjusted(mask):
    """The record of draws that a penalty changed."""
    return LogProbs(adjusted=mask[:, 0], batch_size=[2])


SHAPES, LONGER, NARROW = r"are not integers \(B, T\)", "is longer than the positions", "tokens differ in shape"


def ids_of(*args, **options):
    """Score ids with the model."""
    return score_ids(LM, PARAMS, *args, buffers=BUFFERS, **options)


def of(ids, fn=score, lm=LM, **options):
    """A function of a tree with ids."""
    under = {"under": options.pop("under")} if "under" in options else {}
    return fn(lm, PARAMS, tree(ids, **options), buffers=BUFFERS, **under)


# The data is what a transform may map: ids, a mask, and ids of rows that are too long.
CHECKS = [
    (LeafMismatchError, SHAPES, lambda i, m, r: ids_of(i.float(), m)),
    (LeafMismatchError, r"got: +torch.bool of shape \(2, 6\)", lambda i, m, r: ids_of(m, i)),
    (LeafMismatchError, r"integers.*score_ids\(lm, params, ids", lambda i, m, r: score_ids(LM, i, PARAMS)),
    (LeafMismatchError, "got: .*TensorDict", lambda i, m, r: score_ids(LM, PARAMS, i, BUFFERS)),
    (LeafMismatchError, r"bool of shape \(1, 6\)", lambda i, m, r: ids_of(i, m[:1])),
    (LeafMismatchError, r"bool of shape \(2, 5\)", lambda i, m, r: ids_of(i, m[:, 1:])),
    (LeafMismatchError, r"\(2, 12, 1\)", lambda i, m, r: ids_of(i, at=i.repeat(1, 2)[..., None])),
    (ValueError, LONGER, lambda i, m, r: ids_of(r)),
    (ValueError, LONGER, lambda i, m, r: ids_of(r, r > -1)),
    (ValueError, LONGER, lambda i, m, r: of(r, lm=LM.with_options(packed=True))),
    (ValueError, LONGER, lambda i, m, r: of(r, logits)),
    (ValueError, LONGER, lambda i, m, r: of(r, distribution)),
    (LeafMismatchError, NARROW, lambda i, m, r: of(i, attention_mask=m[:, 1:])),
    (LeafMismatchError, "True or 1 at tokens", lambda i, m, r: of(i, attention_mask=m.float())),
    (LeafMismatchError, r"lengths of the tokens.*\[6, 4\].*\[6, 3\]", lambda i, m, r: score(LM, PARAMS, ragged(i, m))),
    (LeafMismatchError, r"ragged in more than their length.*\[2, -1\]", lambda i, m, r: score(LM, PARAMS, uneven(i))),
    (MissingKeyError, r"full'.*Tokens\(full=", lambda i, m, r: score(LM, PARAMS, TensorDict({"input_ids": i}, [2]))),
    (MissingKeyError, "'tokens.full'", lambda i, m, r: score(LM, PARAMS, TensorDict({"tokens": Tokens(prompt=i)}))),
    (MissingKeyError, r"History.*apply_chat_template\(tokenizer", lambda i, m, r: score(LM, PARAMS, CHAT)),
    (ValueError, "one of 'raw', 'behaviour'", lambda i, m, r: of(i, under="behavior")),
    (ValueError, "temperature must be above 0", lambda i, m, r: ids_of(i, temperature=0.0)),
    (MissingKeyError, "prompt and response", lambda i, m, r: of(i, under="behaviour")),
    (MissingKeyError, "record of the sampling", lambda i, m, r: of(i, parts=True, under="behaviour")),
    (UnsupportedError, r"and min-p\.", lambda i, m, r: of(i, parts=True, log_probs=adjusted(m), under="behaviour")),
    (LeafMismatchError, "differ in shape", lambda i, m, r: compare(i.float(), i[:, 1:].float())),
    (LeafMismatchError, "differ in shape", lambda i, m, r: compare(i.float(), i.float(), mask=m[:1])),
    (LeafMismatchError, "True or 1 at tokens", lambda i, m, r: attention_inputs(SCORER.model, m.float())),
    (LeafMismatchError, "not one reward for each row", lambda i, m, r: penalized_rewards(i[:1, 0], i.float(), m)),
]
# Their rows are read, so that no transform can map them; and losses, on tensors of their own.
KNOWN = [
    (ValueError, LONGER, lambda i, m, r: SCORER(tree(r))),
    (ValueError, "no token has both", lambda i, m, r: compare(i.float(), i.float(), m & False)),
    (LeafMismatchError, "below 0.*mask == 0", lambda i, m, r: ids_of(i, (~m).long() * -9)),
    (LeafMismatchError, "are not rows of the batch", lambda i, m, r: SCORER(tree(i, ()))),
    (LeafMismatchError, NARROW, lambda i, m, r: SCORER.get_dist(tree(i, w=m[:, 1:]), mask_key="w")),
    (LeafMismatchError, NARROW, lambda i, m, r: SCORER.get_dist(tree(i, w=m), logits_key="w")),
    *[(kind, text, lambda *_, call=call: call()) for call, kind, text in MISTAKES if kind is LeafMismatchError],
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


@pytest.mark.parametrize(("kind", "pattern", "fn", "way"), CASES)
def test_a_check_runs_everywhere(kind, pattern, fn, way):
    """The error is the same one."""
    with pytest.raises(kind, match=f"(?s){pattern}"):
        WAYS[way](fn, IDS, MASK, LONG)
