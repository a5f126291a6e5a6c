"""The form of a configuration file of mergekit: its entries, and a walk that checks a file against them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tdfunc.cli.output import safe
from tdfunc.core.errors import UnsupportedError, brief, error

# Raises unless a value of YAML has a form; the text is the name of its entry. Any: what YAML gives.
Form: TypeAlias = Callable[[Any, str], None]

# The values of a configuration, each counted as often as it is an alias: a small file can be a value without end.
_MAX_VALUES = 100_000


def refusal(at: str, expected: str, got: Any) -> ValueError:
    """Return the error of an entry with a value of another form."""
    return error(ValueError, f"merge: {at} must be {expected}.", got=brief(got))


def anything(value: Any, at: str) -> None:
    """Require nothing."""


def text(value: Any, at: str) -> None:
    """Require a text."""
    if not isinstance(value, str) or not value:
        raise refusal(at, "a text", value)


def whole(value: Any, at: str) -> None:
    """Require a whole number above 0."""
    if type(value) is not int or value < 1:
        raise refusal(at, "a whole number above 0", value)


def path(value: Any, at: str) -> None:
    """Require the path of a model, as a text or as in mergekit, {model: {path: x}, lora: {path: y}}."""
    if isinstance(value, dict):
        mapping(model=path, path=text, lora=path)(value, at)
        if value.get("model") is None and value.get("path") is None:
            raise refusal(at, "the path of a model", value)
    elif not isinstance(value, str) or not value:
        raise refusal(at, "the path of a model", value)


def layer_range(value: Any, at: str) -> None:
    """Require the first layer, and the layer after the last one."""
    # Not `isinstance`: a bool is not a number of a layer.
    is_pair = isinstance(value, list) and [type(number) for number in value] == [int, int]
    if not is_pair or not 0 <= value[0] < value[1]:
        raise refusal(at, "two whole numbers, the first layer and the layer after the last one", value)


def number(value: Any, at: str) -> None:
    """Require a number, a bool, or the text of a number: YAML reads 1e-5 as a text."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            raise refusal(at, "a number", value) from None
        return
    # Python makes no float of an integer that is much larger.
    is_huge = isinstance(value, int) and abs(value) > 1 << 63
    if is_huge or not isinstance(value, int | float):
        raise refusal(at, "a number", value)


def setting(value: Any, at: str) -> None:
    """Require a number, numbers over the depth, or conditions with a filter and such a value."""
    if isinstance(value, dict):
        value = [value]
    has_conditions = isinstance(value, list) and any(isinstance(one, dict) for one in value)
    if not has_conditions:
        _numbers(value, at)
        return
    condition = mapping(required=("value",), filter=text, value=_numbers)
    for place, one in _items(value, at):
        condition(one, place)


def _numbers(value: Any, at: str) -> None:
    if not isinstance(value, list):
        number(value, at)
        return
    for place, one in _items(value, at):
        number(one, place)


def settings(value: Any, at: str) -> None:
    """Require a mapping of parameters to their values."""
    if not isinstance(value, dict):
        raise refusal(at, "a mapping", value)
    for name, one in value.items():
        setting(one, f"{at}.{safe(str(name))}")


def list_of(form: Form) -> Form:
    """Return the form of a list."""

    def check(value: Any, at: str) -> None:
        for place, one in _items(value, at):
            form(one, place)

    return check


def mapping_of(form: Form) -> Form:
    """Return the form of a mapping of any texts."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, dict) or not value:
            raise refusal(at, "a mapping", value)
        for name, one in value.items():
            text(name, f"a key of {at}")
            form(one, f"{at}.{safe(name)}")

    return check


def mapping(required: tuple[str, ...] = (), **entries: Form) -> Form:
    """Return the form of a mapping with these entries; an entry without a value counts as absent."""

    def check(value: Any, at: str) -> None:
        if not isinstance(value, dict):
            raise refusal(at, "a mapping", value)
        unknown = [str(name) for name, one in value.items() if name not in entries and one is not None]
        if unknown:
            names = safe(", ".join(unknown[:10]))
            raise UnsupportedError(f"merge: {at} has unknown entries: {names}.", expected=", ".join(entries))
        for name in required:
            if value.get(name) is None:
                raise refusal(at, f"a mapping with the entry {name}", value)
        for name, one in value.items():
            if one is None:
                continue
            place = name if at == ROOT else f"{at}.{name}"
            entries[name](one, place)

    return check


def _items(value: Any, at: str) -> list[tuple[str, Any]]:
    if not isinstance(value, list) or not value:
        raise refusal(at, "a list with an entry", value)
    return [(f"{at}[{i}]", one) for i, one in enumerate(value)]


ROOT = "the configuration"
# Entries that people write, and that mergekit does not read: its seed is an option of its command, as here.
UNUSED = ("name", "random_seed")
_MODEL = mapping(required=("model",), model=path, parameters=settings)
_SOURCE = mapping(required=("model",), model=path, parameters=settings, layer_range=layer_range)
_SLICE = mapping(required=("sources",), sources=list_of(_SOURCE), base_model=path, parameters=settings)
_MODULE = mapping(models=list_of(_MODEL), slices=list_of(_SLICE), parameters=settings)
_CONFIG = mapping(
    merge_method=text,
    base_model=path,
    models=list_of(_MODEL),
    slices=list_of(_SLICE),
    modules=mapping_of(_MODULE),
    parameters=settings,
    dtype=text,
    out_dtype=text,
    tokenizer=mapping(source=text, pad_to_multiple_of=whole),
    tokenizer_source=text,
    **dict.fromkeys(UNUSED, anything),
)


def check(doc: Any) -> Mapping[str, Any]:
    """Return a configuration, whose entries all have their form.

    Raises:
        ValueError: An entry has another form; the message names it.
        UnsupportedError: `merge` does not support an entry; the message names it.
    """
    if _count(doc, {}) > _MAX_VALUES:
        raise refusal(ROOT, f"at most {_MAX_VALUES:,} values, with its aliases", doc)
    _CONFIG(doc, ROOT)
    return doc


def _count(value: Any, known: dict[int, float]) -> float:
    """Return the number of values in a value; infinity if it contains itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        # While it is counted.
        known[id(value)] = math.inf
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum([_count(one, known) for one in inner])
    return known[id(value)]


def typed(value: Any, default: Any, at: str) -> Any:
    """Return the value of an option in the type of its default.

    Raises:
        ValueError: The value does not have a value of that type; the message names the option.
    """
    if isinstance(default, bool):
        if value not in (0, 1):
            raise refusal(at, "true or false", value)
        return bool(value)
    if isinstance(default, int):
        if not math.isfinite(value) or value != int(value):
            raise refusal(at, "a whole number", value)
        return int(value)
    return float(value)
