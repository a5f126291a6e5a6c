"""The rules of generation options: one table of what is accepted and its meaning, one of what is refused."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tdfunc.llm.generation.options import GenerationOptions

# options -> the attributes that differ from the defaults
ACCEPTED = [
    (None, {}),
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"do_sample": True, "temperature": 0.3}, {"temperature": 0.3}),
    ({"do_sample": False}, {}),
    ({"max_new_tokens": 0}, {"max_new_tokens": 0}),
    ({"max_tokens": 3, "max_new_tokens": 5}, {"max_new_tokens": 3}),
    ({"n": 2, "num_return_sequences": 3, "do_sample": True}, {"num_return_sequences": 2, "temperature": 1.0}),
    ({"n": None, "num_return_sequences": 3, "do_sample": True}, {"num_return_sequences": 3, "temperature": 1.0}),
    ({"do_sample": True, "top_k": 1, "top_p": 0.5}, {"temperature": 1.0, "top_k": 1, "top_p": 0.5}),
    ({"do_sample": True, "min_p": 1.0}, {"temperature": 1.0, "min_p": 1.0}),
    ({"top_p": 1, "min_p": 0}, {}),
    ({"repetition_penalty": 1.3, "min_new_tokens": 2}, {"repetition_penalty": 1.3, "min_new_tokens": 2}),
    ({"num_beams": 2, "n": 2, "length_penalty": 0.5, "early_stopping": "never"},
     {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": "never"}),
    ({"stop_sequences": "\n\n"}, {"stop_sequences": ("\n\n",)}),
    ({"stop_token_ids": 5, "stop_sequences": ["a", "b"]}, {"stop_token_ids": (5,), "stop_sequences": ("a", "b")}),
    ({"eos_token_ids": []}, {"eos_token_ids": ()}),
    (GenerationConfig(), {}),
    (GenerationConfig(max_new_tokens=4, do_sample=True, top_k=3),
     {"max_new_tokens": 4, "temperature": 1.0, "top_k": 3}),
    (GenerationConfig(max_new_tokens=4, max_length=9, pad_token_id=0), {"max_new_tokens": 4}),
    (GenerationConfig(eos_token_id=[1, 2], stop_strings="x"), {"eos_token_ids": (1, 2), "stop_sequences": ("x",)}),
    (GenerationConfig(eos_token_id=7), {"eos_token_ids": (7,)}),
    # As of Gemma 3.
    (GenerationConfig(cache_implementation="hybrid", do_sample=True, top_k=64), {"temperature": 1.0, "top_k": 64}),
    (GenerationConfig(prompt_lookup_num_tokens=4, disable_compile=True, low_memory=True), {}),
    (GenerationConfig(do_sample=True, top_k=0, typical_p=1.0, no_repeat_ngram_size=0), {"temperature": 1.0}),
]  # fmt: skip
REFUSED = [
    ({"no_such_option": 1}, TypeError, "'no_such_option' is not an option"),
    (GenerationConfig(typical_p=0.5), TypeError, "'typical_p'"),
    (GenerationConfig(max_length=9), ValueError, "has max_length, and no max_new_tokens"),
    ({"temperature": -1.0}, ValueError, "temperature must be finite and at least 0"),
    ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
    ({"temperature": float("inf")}, ValueError, "temperature must be finite"),
    ({"do_sample": True, "temperature": 0.0}, ValueError, "do_sample=True excludes temperature 0"),
    ({"do_sample": False, "temperature": 0.5}, ValueError, "do_sample=False excludes a temperature above 0"),
    ({"do_sample": True, "top_p": 0.0}, ValueError, "top_p must be above 0"),
    ({"do_sample": True, "top_p": 1.1}, ValueError, "top_p must be above 0 and at most 1"),
    ({"do_sample": True, "min_p": -0.1}, ValueError, "min_p must be above 0"),
    ({"do_sample": True, "top_k": 0}, ValueError, "top_k must be at least 1"),
    ({"top_k": 5}, ValueError, "top_k has no effect without sampling"),
    ({"top_p": 0.9}, ValueError, "top_p has no effect without sampling"),
    ({"min_p": 0.1, "temperature": 0.0}, ValueError, "min_p has no effect without sampling"),
    ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be above 0"),
    ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0"),
    ({"num_beams": 0}, ValueError, "num_beams must be at least 1"),
    ({"num_beams": 2, "do_sample": True}, ValueError, "beams exclude sampling"),
    ({"length_penalty": 2.0}, ValueError, "have no effect without beams"),
    ({"early_stopping": True}, ValueError, "have no effect without beams"),
    ({"num_beams": 2, "early_stopping": "soon"}, ValueError, "early_stopping must be one of"),
    ({"n": 2}, ValueError, "several responses to a prompt need sampling"),
    ({"num_beams": 2, "n": 3}, ValueError, "several responses to a prompt need sampling"),
    ({"do_sample": True, "n": 0}, ValueError, "num_return_sequences must be at least 1"),
    ({"stop_sequences": ["a", ""]}, ValueError, "a stop sequence must not be empty"),
    ({"stop_sequences": [3]}, TypeError, "a stop sequence is not a text"),
    ({"stop_sequences": 3}, TypeError, "a stop sequence is not a text"),
    ({"stop_token_ids": "3"}, TypeError, "an id of stop_token_ids must be a whole number"),
    ({"stop_token_ids": [3.5]}, TypeError, "an id of stop_token_ids must be a whole number"),
    ({"eos_token_ids": torch.tensor([0.5])}, TypeError, "an id of eos_token_ids must be a whole number"),
    ({"do_sample": "false"}, ValueError, "do_sample must be one of True, False"),
    ({"logprobs": "no"}, ValueError, "logprobs must be one of True, False"),
    ({"skip_special_tokens": "false"}, ValueError, "skip_special_tokens must be one of True, False"),
]
IDS = {
    "a list": [3, 5],
    "a set": {3, 5},
    "a tensor": torch.tensor([3, 5]),
    "an array": np.array([3, 5]),
    "numbers of numpy": (np.int64(3), np.uint8(5)),
    "whole floats": [3.0, 5.0],
}
COUNTS = ("max_new_tokens", "min_new_tokens", "num_return_sequences", "num_beams", "top_k")


def test_entries_of_other_programs_are_named():
    """Models with code of their own keep options for it in the file, as Qwen 1 does."""
    with pytest.warns(UserWarning, match="chat_format.*are not used"):
        options = GenerationOptions.parse(GenerationConfig(chat_format="chatml", max_new_tokens=3))
    assert options == GenerationOptions(max_new_tokens=3)


@pytest.mark.parametrize(("kwargs", "changed"), ACCEPTED, ids=str)
def test_options_have_one_meaning(kwargs, changed):
    """Options that are left out, or that turn nothing on, give the defaults; legacy names prevail."""
    assert GenerationOptions.parse(kwargs) == GenerationOptions(**changed)


@pytest.mark.parametrize(("kwargs", "kind", "pattern"), REFUSED, ids=str)
def test_contradictions_and_unknown_options_are_errors(kwargs, kind, pattern):
    """Each raises, and names the option."""
    with pytest.raises(kind, match=pattern):
        GenerationOptions.parse(kwargs)


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("name", ["stop_token_ids", "eos_token_ids"])
def test_ids_are_those_of_any_container(name, ids):
    """A set that was one id would never end a response."""
    assert sorted(getattr(GenerationOptions.parse({name: ids}), name)) == [3, 5]


@pytest.mark.parametrize("one", [7, np.int64(7), torch.tensor(7)], ids=["int", "numpy", "tensor"])
def test_one_id_is_one(one):
    """Without a container around it."""
    assert GenerationOptions.parse({"stop_token_ids": one}).stop_token_ids == (7,)


# What an option may not be without.
NEEDED = {
    "num_return_sequences": {"num_beams": 4},
    "top_k": {"do_sample": True},
    "top_p": {"do_sample": True},
    "min_p": {"do_sample": True},
    "repetition_penalty": {"do_sample": True},
    "length_penalty": {"num_beams": 2},
}


@pytest.mark.parametrize("number", [4.0, np.int64(4), torch.tensor(4)], ids=["float", "numpy", "tensor"])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_kept_as_a_plain_int(name, number):
    """Engines and servers read it."""
    options = {**NEEDED.get(name, {}), name: number}

    assert type(getattr(GenerationOptions.parse(options), name)) is int


def test_num_samples_is_num_return_sequences():
    """Either may be given, or both if they agree; a mapping that was given keeps its entries."""
    kwargs = {"do_sample": True, "num_return_sequences": 4}

    assert GenerationOptions.parse({"do_sample": True}, num_samples=4) == GenerationOptions.parse(kwargs)
    assert GenerationOptions.parse(kwargs, num_samples=4).num_return_sequences == 4
    assert kwargs == {"do_sample": True, "num_return_sequences": 4}
    with pytest.raises(ValueError, match="num_samples and num_return_sequences differ"):
        GenerationOptions.parse(kwargs, num_samples=2)
    with pytest.raises(ValueError, match="several responses"):
        GenerationOptions.parse({}, num_samples=2)


# By another way than `parse`: an attribute of the class, and an example of what it must refuse or convert.
OUT_OF_RANGE = [
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": 1.0, "top_p": 90},
    {"temperature": 1.0, "top_k": 0},
    {"top_k": 5},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": float("nan")},
    {"num_beams": 0},
    {"num_beams": 2, "num_return_sequences": 3},
    {"num_beams": 2, "length_penalty": float("nan")},
    {"num_beams": 2, "early_stopping": "Never"},
    {"min_new_tokens": -1},
]
CONVERTED = [
    ({"stop_sequences": "abc"}, ("stop_sequences", ("abc",))),
    ({"stop_token_ids": {5}}, ("stop_token_ids", (5,))),
    ({"eos_token_ids": torch.tensor([5])}, ("eos_token_ids", (5,))),
    ({"max_new_tokens": np.int64(3)}, ("max_new_tokens", 3)),
    ({"temperature": 1.0, "top_p": 1}, ("top_p", None)),
]


@pytest.mark.parametrize("options", OUT_OF_RANGE, ids=str)
def test_the_class_checks_its_options(options):
    """`generate(options=)` takes it, and a negative temperature would be greedy."""
    with pytest.raises(ValueError, match="generate: "):
        GenerationOptions(**options)


@pytest.mark.parametrize(("options", "expected"), CONVERTED, ids=str)
def test_the_class_has_the_values_of_parse(options, expected):
    """One text is one stop sequence, and not its characters."""
    name, value = expected

    assert getattr(GenerationOptions(**options), name) == value


@pytest.mark.parametrize("name", ["top_p", "min_p", "repetition_penalty", "length_penalty"])
def test_a_number_is_kept_as_a_plain_one(name):
    """Servers read JSON."""
    options = {**NEEDED[name], name: np.float32(0.5)}

    assert type(getattr(GenerationOptions.parse(options), name)) is float
