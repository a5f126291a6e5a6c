"""A wrapper is a module over its model: state, gradients, trees in the place of parameters, models that change."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

import tdfunc as tdf
from tdfunc import ImmutableError, TensorDict, UnsupportedError
from tdfunc.llm import (
    LLMWrapperBase,
    RemoteWrapper,
    Tokens,
    TransformersWrapper,
    causal_lm,
    generate,
    score,
    vLLMWrapper,
)
from tdfunc.llm.wrappers.options import WrapperOptions
from tests.llm.models import make
from tests.llm.wrappers.fake import FakeWrapper
from tests.llm.wrappers.test_transformers import scorer, tokens_td


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_are_those_of_score():
    """Backward through the module, and grad over its parameters, agree with the pure function."""
    model, td = copy.deepcopy(make("llama")), tokens_td([4, 2], 0)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    wrapper(td)["log_probs"].full.sum().backward()
    lm, params, buffers = causal_lm(model)
    expected = torch.func.grad(lambda params: score(lm, params, td, buffers=buffers)["log_probs"].full.sum())(params)
    apply, own, rest = tdf.functional(wrapper)

    torch.testing.assert_close(model.lm_head.weight.grad, expected["lm_head", "weight"])
    found = torch.func.grad(lambda params: apply(params, td, buffers=rest)["log_probs"].full.sum())(own)
    torch.testing.assert_close(found["model", "lm_head", "weight"], expected["lm_head", "weight"])


def by_functional(wrapper, td, members):
    """The log-probs of each member."""
    apply, _, rest = tdf.functional(wrapper)
    return torch.vmap(lambda tree: apply(tree, td, buffers=rest)["log_probs"].full)(members)


def by_functional_call(wrapper, td, members):
    """The same with the function of torch, which takes a dict of names."""
    values = {f"model.{name}": value for name, value in members["model"].flatten_keys().items()}
    return torch.vmap(lambda one: torch.func.functional_call(wrapper, one, (td,))["log_probs"].full)(values)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("call", [by_functional, by_functional_call])
def test_members_are_scored_as_each_alone(call):
    """Vmap over the parameters of the module."""
    td, wrapper = tokens_td([4, 2], 0), scorer()
    apply, own, rest = tdf.functional(wrapper)
    members = torch.stack([own.detach(), 2 * own.detach()])
    expected = [wrapper(td)["log_probs"].full.detach(), apply(members[1], td, buffers=rest)["log_probs"].full]

    both = call(wrapper, td, members)
    torch.testing.assert_close(both, torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(both[0], both[1])


def test_it_is_a_module_over_its_model():
    """State, casts and copies are those of the model."""
    model, td = make("llama"), tokens_td([4, 3], 0)
    wrapper = scorer()
    before = wrapper(td)["log_probs"].full

    assert set(wrapper.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    wide = copy.deepcopy(wrapper).double()(td)["log_probs"].full
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), before, atol=1e-5, rtol=1e-5)
    assert torch.equal(pickle.loads(pickle.dumps(wrapper))(td)["log_probs"].full, before)


def test_what_trains_the_model_trains_the_wrapper():
    """And its other versions; new weights for it are new ones of the model."""
    model, td = copy.deepcopy(make("llama")), tokens_td([4, 3], 0)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    before = wrapper(td)["log_probs"].full
    new = wrapper.get_new_version(pad_output=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)

    assert not torch.allclose(wrapper(td)["log_probs"].full, before)
    assert torch.equal(new(td)["log_probs"].full[0], wrapper(td)["log_probs"].full[0][2:])
    with pytest.warns(UserWarning, match="keep their values"):
        wrapper.reset_parameters_recursive()
    assert not torch.allclose(wrapper(td)["log_probs"].full, before)


@pytest.fixture(scope="module")
def replaced():
    """A wrapper, its functional model and buffers, another tree of parameters, and tokens."""
    lm, params, buffers = causal_lm(make("llama"))
    return (
        scorer().get_new_version(batching=True),
        lm,
        buffers,
        params.apply(lambda leaf: leaf * 1.5),
        tokens_td([4, 3], 0),
    )


def test_a_tree_takes_the_place_of_the_parameters(replaced):
    """`params=` runs a tree, with the model's buffers or its own, and leaves the model and the wrapper as they are."""
    wrapper, lm, buffers, other, td = replaced
    before = wrapper(td)["log_probs"].full
    expected = score(lm, other, td, buffers=buffers)["log_probs"].full

    torch.testing.assert_close(wrapper(td, params=other)["log_probs"].full, expected)
    torch.testing.assert_close(wrapper(td, params=tdf.combine(other, buffers))["log_probs"].full, expected)
    torch.testing.assert_close(wrapper(td)["log_probs"].full, before)


def test_gradients_of_a_tree_are_those_of_score(replaced):
    """Through the wrapper."""
    wrapper, lm, buffers, other, td = replaced
    found = torch.func.grad(lambda tree: wrapper(td, params=tree)["log_probs"].full.sum())(other)
    expected = torch.func.grad(lambda tree: score(lm, tree, td, buffers=buffers)["log_probs"].full.sum())(other)

    tdf.assert_close(found, expected)


def test_draws_of_a_tree_are_those_of_generate(replaced):
    """And not those of the model."""
    wrapper, lm, buffers, other, td = replaced
    sampler = wrapper.get_new_version(generate=True, generate_kwargs={"max_new_tokens": 3, "temperature": 1.0})
    asked = TensorDict({"tokens": Tokens(prompt=td["tokens"].full, batch_size=[2])}, [2])
    drawn = generate(lm, other, asked, key=0, buffers=buffers, max_new_tokens=3, temperature=1.0)

    assert (sampler(asked, key=0, params=other)["tokens"] == drawn["tokens"]).all()
    assert not (sampler(asked, key=0)["tokens"].response == drawn["tokens"].response).all()


def test_a_backend_without_trees_refuses_them(replaced):
    """Its weights are elsewhere."""
    *_, other, td = replaced
    asked = TensorDict({"tokens": Tokens(prompt=td["tokens"].full, batch_size=[2])}, [2])
    with pytest.raises(UnsupportedError, match="params= is not supported"):
        FakeWrapper(input_mode="tokens")(asked, params=other)


@pytest.mark.parametrize("cls", [LLMWrapperBase, TransformersWrapper, vLLMWrapper, RemoteWrapper, FakeWrapper])
def test_options_have_their_names_in_signatures(cls):
    """`help` shows the arguments of each wrapper, and each option once."""
    names = list(inspect.signature(cls).parameters)

    assert names[0] == "model"
    assert set(names) > {field.name for field in dataclasses.fields(WrapperOptions)}
    assert "options" not in names
    assert cls.generate is vars(LLMWrapperBase)["generate"]


def test_a_wrapper_with_arguments_of_its_own_has_no_others():
    """Its signature is that of its `__init__`."""

    class Plain(FakeWrapper):
        def __init__(self, model):
            super().__init__(model, input_mode="tokens")

    assert list(inspect.signature(Plain).parameters) == ["model"]


def test_signatures_have_defaults():
    """Those of connections."""
    defaults = {name: each.default for name, each in inspect.signature(RemoteWrapper).parameters.items()}
    expected = {"timeout_s": 600.0, "max_retries": 5, "backoff_s": 0.5, "max_concurrency": 64, "stream": False}

    assert defaults | expected == defaults


def double(module, args, out):
    """A hook that doubles an output."""
    return out * 2


def bend(module, args, out):
    """A hook that changes the logits."""
    return out.__class__(logits=out.logits.sin())


CHANGES = {
    "nothing": lambda model: None,
    "a hook of a layer": lambda model: model.lm_head.register_forward_hook(double),
    "a hook of the model": lambda model: model.register_forward_hook(bend),
    "an attribute": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.7),
    "a function": lambda model: vars(model.model.layers[0].mlp).update(act_fn=torch.sin),
    "another function": lambda model: vars(model.model.layers[0].mlp).update(act_fn=torch.cos),
    "the configuration": lambda model: model.config.update({"attn_implementation": "eager"}),
    "a layer": lambda model: setattr(model.model, "norm", torch.nn.Identity()),
}


def test_a_model_that_changes_is_prepared_anew():
    """One after the other: a new layer, a hook, an attribute and an entry of the configuration count."""
    model, td = copy.deepcopy(make("llama")), tokens_td([6, 6], 0)
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    ids, found, expected = td["tokens"].full, {}, {}
    for name, change in CHANGES.items():
        change(model)
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)
        expected[name] = log_probs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        found[name] = wrapper(td)["log_probs"].full[:, 1:].detach()

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("ends", "found"), [([7, 8], (7, 8)), (None, ()), (5, (5,))])
def test_ends_of_a_model_may_change(ends, found):
    """Its prepared form is made anew, once."""
    model = copy.deepcopy(make("llama"))
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=False)
    assert wrapper.lm.eos_ids == (1,)
    model.generation_config.eos_token_id = ends

    assert wrapper.lm.eos_ids == found
    assert wrapper.lm.apply is wrapper.lm.apply


def test_a_new_version_may_have_another_model():
    """The model of a wrapper is not assigned."""
    td, wrapper, other = tokens_td([6, 6], 0), scorer(), make("llama", rms_norm_eps=0.5)
    with pytest.raises(ImmutableError, match="get_new_version"):
        wrapper.model = other
    expected = TransformersWrapper(other, input_mode="tokens", generate=False, pad_output=True)(td)

    assert torch.equal(wrapper.get_new_version(model=other)(td)["log_probs"].full, expected["log_probs"].full)
    assert wrapper.model is make("llama")
