"""The configuration of an adapter: each entry is understood, or refused by its name.

`Config` contains the entries that decide the numbers of an adapter, and the layers that have one.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tdfunc.core.errors import UnsupportedError, brief, damaged
from tdfunc.lora.files.patterns import Ends, Modules, Pattern, PatternTable

# Entries that do not change the numbers of a saved adapter: its origin, its training, and the start of its training.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "megatron_core", "qalora_group_size", "corda_config", "eva_config", "loftq_config", "lora_ga_config",
    "ensure_weight_tying", "runtime_config",
}  # fmt: skip
# Starts that do not change the base.
_PLAIN_STARTS = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"}


@dataclass(frozen=True)
class Targets:
    """The layers that PEFT adapts, by their names.

    Attributes:
        modules: The ends of their names, a pattern of their complete names, or None if the configuration does not
            name them.
        excluded: Ends of names, or a pattern, of layers that are not adapted.
        layers: The numbers of the blocks whose layers are adapted; None for all.
        layers_pattern: The names of the lists of blocks.
        saved: The modules that are trained whole, in which no layer is adapted.
        parameters: The ends of the names of parameters that are adapted themselves.
    """

    modules: Ends | Pattern | None = None
    excluded: Ends | Pattern = Ends()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[Pattern, ...] = ()
    saved: Modules = Modules((), "")
    parameters: Ends = Ends()

    def has_module(self, name: str) -> bool:
        """Return whether a module is adapted.

        Source:
            `check_target_module_exists` of PEFT 0.21.
        """
        if _chooses(self.excluded, name) or self.saved.has(name):
            return False
        if self.modules is None or not _chooses(self.modules, name):
            return False
        if self.layers is None or isinstance(self.modules, Pattern) or name in self.modules.ends:
            return True
        return self._layer_of(name) in self.layers

    def has_parameter(self, name: str) -> bool:
        """Return whether a parameter is adapted itself."""
        return _chooses(self.parameters, name)

    def _layer_of(self, name: str) -> int | None:
        """Return the number of the block of a layer: the first number that follows the name of a list of blocks."""
        keys = name.split(".")
        for place in range(1, len(keys) - 1):
            if keys[place].isdecimal() and self._is_list(keys[:place]):
                return int(keys[place])
        return None

    def _is_list(self, keys: Sequence[str]) -> bool:
        """Return whether the keys before a number are the name of a list of blocks."""
        if not self.layers_pattern:
            return len(keys) > 1
        ends = [".".join(keys[start:]) for start in range(len(keys))]
        return any(pattern.matches(end) for pattern in self.layers_pattern for end in ends)


def _chooses(choice: Ends | Pattern, name: str) -> bool:
    """Return whether a pattern matches a name, or one of several ends is its end."""
    if isinstance(choice, Pattern):
        return choice.matches(name)
    return choice.has(name)


@dataclass(frozen=True)
class TokenIndices:
    """The numbers of trained rows.

    Attributes:
        tables: The numbers by the end of a table's name; one list under "" is of the only table.
    """

    tables: Mapping[str, tuple[int, ...]]

    def of(self, name: str) -> tuple[int, ...] | None:
        """Return the numbers of the rows of a table; None if there are none."""
        for end, numbers in self.tables.items():
            # As PEFT: also within a word.
            if name.endswith(end):
                return numbers
        return None

    @property
    def shown(self) -> str:
        """The numbers, for messages."""
        return brief(dict(self.tables))


@dataclass(frozen=True)
class Config:
    """The entries of a configuration that decide the numbers of an adapter.

    Attributes:
        ranks: The rank of a layer by its name.
        alphas: The alpha of a layer by its name.
        rslora: True if alpha is divided by the root of the rank.
        dora: True if all adapters have magnitudes; None if the file decides.
        bias: True if all adapters have biases; None if the file decides.
        dropout: The probability with which inputs are dropped.
        fan_in_fan_out: True if layers store (inputs, outputs).
        trained_biases: The biases of the base that are trained: "none", "all", or "lora_only" for the biases of
            layers with adapters.
        modules_to_save: The ends of the names of modules that are trained whole.
        version: The version of PEFT, as (major, minor).
        targets: The layers with adapters.
        tokens: The rows of tables that are trained, or None.
    """

    ranks: Mapping[str, Any] | PatternTable = field(default_factory=dict[str, Any])
    alphas: Mapping[str, Any] | PatternTable = field(default_factory=dict[str, Any])
    rslora: bool = False
    dora: bool | None = None
    bias: bool | None = None
    dropout: float = 0.0
    fan_in_fan_out: bool = False
    trained_biases: str = "none"
    modules_to_save: tuple[str, ...] = ()
    version: tuple[int, int] | None = None
    targets: Targets = Targets()
    tokens: TokenIndices | None = None


def load_config(path: str) -> Mapping[str, Any]:
    """Return the entries of a file of JSON.

    Raises:
        CorruptCheckpointError: It is not a dict in JSON.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except (ValueError, RecursionError) as err:
        raise damaged(f"lora.load: {path!r} is not JSON.", got=str(err)) from err
    if not isinstance(entries, dict):
        raise damaged(f"lora.load: {path!r} is not a configuration.", "a dict", type(entries).__name__)
    return entries  # pyright: ignore[reportUnknownVariableType]


def read_config(entries: Mapping[str, Any]) -> Config:
    """Return the configuration that these entries of PEFT describe.

    Raises:
        UnsupportedError: An entry describes another computation than LoRA's, or its value is not usable; the message
            names it.
    """
    reader = _Reader(entries)
    if entries.get("peft_type") != "LORA":
        raise UnsupportedError("lora.load: the adapter is not LoRA.", got=f"peft_type {entries.get('peft_type')!r}")
    reader.check_start()
    modules_to_save = reader.names("modules_to_save")
    default_rank = reader.rank("r", 8)
    ranks = reader.table("rank_pattern", default_rank, _is_rank)
    default_alpha = reader.number("lora_alpha", 8)
    alphas = reader.table("alpha_pattern", default_alpha, _is_number)
    config = Config(
        ranks=ranks,
        alphas=alphas,
        rslora=reader.flag("use_rslora"),
        dora=reader.flag("use_dora"),
        bias=reader.flag("lora_bias"),
        dropout=reader.number("lora_dropout", 0.0),
        fan_in_fan_out=reader.flag("fan_in_fan_out"),
        trained_biases=reader.biases(),
        modules_to_save=modules_to_save,
        version=_version_of(entries.get("peft_version")),
        targets=_read_targets(reader, modules_to_save),
        tokens=reader.tokens(),
    )
    reader.check_rest()
    return config


def _read_targets(reader: "_Reader", modules_to_save: Sequence[str]) -> Targets:
    modules = reader.modules()
    excluded = reader.choice("exclude_modules") or Ends()
    layers = reader.layers()
    layers_pattern = [Pattern(text, "'layers_pattern'") for text in reader.names("layers_pattern", single=True)]
    saved = Modules(modules_to_save, "'modules_to_save'")
    parameters = Ends(reader.names("target_parameters"))
    return Targets(modules, excluded, layers, tuple(layers_pattern), saved, parameters)


def _version_of(given: object) -> tuple[int, int] | None:
    if not isinstance(given, str):
        return None
    match = re.match(r"(\d{1,9})\.(\d{1,9})", given)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


class _Reader:
    """The entries of a configuration, and those that were read."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._read = {"peft_type"}

    def _get(self, name: str) -> Any:
        self._read.add(name)
        return self._entries.get(name)

    def _refusal(self, name: str, expected: str) -> UnsupportedError:
        return UnsupportedError(
            f"lora.load: the value of {name!r} in the configuration is not usable.",
            expected=expected,
            got=f"{name}={brief(self._entries.get(name))}",
        )

    def _typed(self, name: str, default: Any, test: Callable[[object], bool], expected: str) -> Any:
        """Return an entry that passes a test; without the entry the default."""
        value = self._get(name)
        if name not in self._entries:
            return default
        if not test(value):
            raise self._refusal(name, expected)
        return value

    def rank(self, name: str, default: int) -> int:
        """Return an entry that is a whole number above 0."""
        return self._typed(name, default, _is_rank, "a whole number above 0")

    def number(self, name: str, default: float) -> float:
        """Return an entry that is a finite number."""
        return self._typed(name, default, _is_number, "a finite number")

    def flag(self, name: str) -> bool:
        """Return an entry that is true or false; null is false."""
        value = self._typed(name, False, lambda value: value is None or isinstance(value, bool), "true or false")
        return bool(value)

    def table(self, name: str, default: Any, test: Callable[[object], bool]) -> PatternTable:
        """Return an entry that is a dict of patterns."""
        given = self._get(name) or {}
        if not isinstance(given, dict) or not all(map(test, given.values())):  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            raise self._refusal(name, "a dict from patterns to numbers")
        pairs: list[tuple[str, Any]] = list(given.items())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        return PatternTable(pairs, repr(name), default)

    def names(self, name: str, *, single: bool = False) -> tuple[str, ...]:
        """Return an entry that is a list of texts, or with `single` one text."""
        given = self._get(name) or ()
        if single and isinstance(given, str):
            return (given,)
        if not isinstance(given, Sequence) or isinstance(given, str) or not all(map(_is_text, given)):
            raise self._refusal(name, "a list of texts")
        return tuple(given)

    def choice(self, name: str) -> Ends | Pattern | None:
        """Return an entry that is a list of ends of names, or a pattern."""
        given = self._get(name)
        if given is None:
            return None
        if isinstance(given, str):
            return Pattern(given, repr(name))
        return Ends(self.names(name))

    def modules(self) -> Ends | Pattern | None:
        """Return the layers that are adapted; None if the configuration does not name them."""
        if self._get("target_modules") == "all-linear":
            return None
        return self.choice("target_modules")

    def layers(self) -> tuple[int, ...] | None:
        """Return the numbers of the blocks that are adapted."""
        given = self._get("layers_to_transform")
        if given is None or given == []:
            return None
        numbers = given if isinstance(given, list) else [given]  # pyright: ignore[reportUnknownVariableType]
        if not all(map(_is_whole, numbers)):  # pyright: ignore[reportUnknownArgumentType]
            raise self._refusal("layers_to_transform", "a whole number or a list of them")
        return tuple(numbers)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def tokens(self) -> TokenIndices | None:
        """Return the rows of tables that are trained."""
        # Any: JSON.
        given: Any = self._get("trainable_token_indices")
        if not given:
            return None
        tables = given if isinstance(given, dict) else {"": given}
        for numbers in tables.values():
            if (
                not isinstance(numbers, list)
                or not numbers
                or not all([_is_whole(one) and one >= 0 for one in numbers])
            ):
                raise self._refusal("trainable_token_indices", "a list of numbers of rows, or a dict of such lists")
        return TokenIndices({name: tuple(numbers) for name, numbers in tables.items()})

    def biases(self) -> str:
        """Return the biases of the base that are trained."""
        kinds = ("none", "all", "lora_only")
        return self._typed("bias", "none", lambda value: value in kinds, " or ".join(map(repr, kinds)))

    def check_start(self) -> None:
        """Raise unless the start of the training left the base as it was."""
        start = True
        if "init_lora_weights" in self._entries:
            start = self._get("init_lora_weights")
        if str(start).lower() not in _PLAIN_STARTS:
            raise UnsupportedError(
                f"lora.load: the start {brief(start)} changes the base in a way that the file does not contain.",
                expected="a start that does not change the base",
                got=f"init_lora_weights={brief(start)}",
                hint="peft writes plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...).",
            )

    def check_rest(self) -> None:
        """Raise if an entry that was not read has a value."""
        for name, value in self._entries.items():
            is_understood = name in self._read or name in _WITHOUT_EFFECT
            if value and not is_understood:
                raise UnsupportedError(
                    f"lora.load: the entry {brief(name)} of the configuration is not supported.",
                    expected="LoRA, rsLoRA or DoRA",
                    got=f"{name[:80]}={brief(value)}",
                )
