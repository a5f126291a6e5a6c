"""The tables of docs/models.md, and the complete ones of `--show`, written from the kept results."""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.models.checks import RIGHT, WRONG
from benchmarks.models.results import CHECKS, Entry, load, versions
from benchmarks.page import table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = ("model", "forward", "gradient", "training", "`jit`", "runs", "speed")
# Checks in words.
_NAMES = dict(zip(CHECKS, ("forward", "gradient", "training", "`jit`"), strict=True))


# The rows of torch.nn by family: each begins with this row.
FIRST = {
    "Linear": "linear layers, embeddings, parametrizations",
    "Conv1d": "convolutions, unfold, fold",
    "AvgPool1d": "pooling",
    "BatchNorm1d": "normalization",
    "CELU": "activations",
    "Dropout": "dropout",
    "CircularPad1d": "padding, shapes, upsampling, distances",
    "LSTM": "recurrent layers, also packed",
    "MultiheadAttention": "attention, transformers",
    "L1Loss": "losses as modules",
}
_TEXT = "T5, BART, Pegasus, mBART, Marian, M2M-100"
_DECODERS = (
    "GPT-2, GPT-Neo, GPT-NeoX, GPT-J, OPT, BLOOM, Falcon, Llama, Mistral, Qwen2, Gemma 2, Phi, OLMo, Mamba, "
    "Mixtral (`batched_mm`), CodeGen, BioGPT, XLNet"
)
_ENCODERS = (
    "BERT, RoBERTa, DistilBERT, ALBERT, ELECTRA, DeBERTa v2, MPNet, ModernBERT, FNet, Longformer, Nystromformer, "
    "Funnel, SqueezeBERT, MobileBERT, ConvBERT, RemBERT, RoFormer, ESM, Splinter, LayoutLM, Perceiver"
)
_VISION = (
    "ViT, DeiT, Swin, Swin v2, ConvNeXt, ConvNeXt v2, ResNet, MobileNetV2, RegNet, PoolFormer, DINOv2, BEiT, "
    "EfficientNet, CLIP, SigLIP, SegFormer, DPT, YOLOS, LeViT, PVT, MobileViT, Hiera, VideoMAE, TimeSformer"
)
_AUDIO = "Wav2Vec2, HuBERT, WavLM, Whisper, Audio spectrogram transformer, Speech2Text"
_SERIES = "PatchTST, Time series transformer, Informer, Decision transformer"
FAMILIES = {
    "text encoders": _ENCODERS.split(", "),
    "encoders and decoders of text": _TEXT.split(", "),
    "decoders": _DECODERS.split(", "),
    "vision and video": _VISION.split(", "),
    "audio": _AUDIO.split(", "),
    "series": _SERIES.split(", "),
}
# The models that fail a check or run as a loop: what is refused, and what to do.
ADVICE = {
    "scripted module": "Refused: its weights are in compiled code. Use the module before `torch.jit.script`.",
    "CrossMapLRN2d": "The forward is a loop. Gradients are refused: its `autograd.Function` has no `setup_context`. "
    "`LocalResponseNorm` runs stacked.",
    "AdaptiveLogSoftmaxWithLoss": "A loop, without `vmap(grad)` and `jit`: it selects rows by values. "
    "`LinearCrossEntropyLoss` runs stacked.",
    "Wav2Vec2": "A loop, without `jit`: LayerDrop branches on a random number.",
    "HuBERT": "As Wav2Vec2.",
    "WavLM": "As Wav2Vec2.",
    "BLOOM": "The forward is a loop. Gradients are refused: its GELU is an `autograd.Function` without "
    '`setup_context`. With `nn.GELU(approximate="tanh")` for each `BloomGelu`, it passes all checks.',
    "Mamba": "A loop, without `vmap(grad)`: the forward writes to its cache. With `use_cache=False` it passes all "
    "checks.",
    "Nystromformer": "Stacked, but `jit` is refused: the mask of its attention has another shape in a record.",
}


def page() -> str:
    """Return the page with its present results."""
    text = PAGE.read_text()
    results = load()
    text = put(text, "torch.nn", f"{counts(results['torch.nn'])}\n\n{layers(results['torch.nn'])}")
    text = put(text, "transformers", f"{counts(results['transformers'])}\n\n{families(results['transformers'])}")
    lines = [f"| {name} | {advice} |" for name, advice in ADVICE.items()]
    text = put(text, "exceptions", "\n".join(["| model | what to know |", "|---|---|", *lines]))
    return put(text, "versions", measured_with())


def parts() -> dict[str, str]:
    """Return all rows of each library."""
    return {
        name: f"## {name}\n\n{counts(entries)}\n\n{rows(entries)}\n\n{reasons(entries)}"
        for name, entries in load().items()
    }


def layers(entries: dict[str, Entry]) -> str:
    """Return a row for each family of torch.nn."""
    by_family: dict[str, list[Entry]] = {}
    family = ""
    for name, entry in entries.items():
        family = FIRST.get(name, family)
        by_family.setdefault(family, []).append(entry)
    lines = [[family, str(len(some)), *_family(some)] for family, some in by_family.items()]
    return table(("modules", "forms", "stacked", "speed, median (range)"), lines)


def families(entries: dict[str, Entry]) -> str:
    """Return a row for each family of transformers, with the names of its models."""
    lines = [
        [f"{family}: {', '.join(names)}", *_family([entries[name] for name in names])]
        for family, names in FAMILIES.items()
    ]
    return table(("models", "stacked", "speed, median (range)"), lines)


def _family(entries: list[Entry]) -> tuple[str, str]:
    """Return how many of a family run stacked, and their speed."""
    speeds = [entry.speed for entry in entries if entry.speed is not None]
    stacked = sum(entry.found.way == "vmap" for entry in entries)
    speed = f"{median(speeds):.1f}x ({min(speeds):.1f}x to {max(speeds):.1f}x)"
    return "all" if stacked == len(entries) else f"{stacked} of {len(entries)}", speed


def put(text: str, name: str, content: str) -> str:
    """Return a text with other content between the comments of this name."""
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n\n).*?(\n*<!-- end of {re.escape(name)} -->)", re.DOTALL)
    assert place.search(text), f"docs/models.md has no place for {name}"
    return place.sub(lambda match: f"{match[1]}{content}\n\n<!-- end of {name} -->", text)


def rows(entries: dict[str, Entry]) -> str:
    """Return the table of a library."""
    lines: list[list[str]] = []
    for name, entry in entries.items():
        speed = "" if entry.speed is None else f"{entry.speed:.1f}x"
        lines.append([name, *_cells(entry), speed])
    return table(_HEAD, lines)


def _cells(entry: Entry) -> list[str]:
    found = entry.found
    cells: list[str] = []
    for check in CHECKS:
        result = getattr(found, check)
        cells.append({RIGHT: "yes", WRONG: "**wrong**"}.get(result, "refused"))
    way = {"vmap": "stacked", "loop": "loop"}.get(found.way, "")
    return [*cells, f"{way}, torch warns" if found.warns else way]


def counts(entries: dict[str, Entry]) -> str:
    """Return a sentence with how many rows are right."""
    found = [entry.found for entry in entries.values()]

    def count(holds: Callable[..., bool]) -> int:
        return sum(map(holds, found))

    by_check = [f"{count(lambda one, c=check: getattr(one, c) == RIGHT)} ({_NAMES[check]})" for check in CHECKS]
    right = f"{', '.join(by_check[:-1])} and {by_check[-1]}"
    return (
        f"Of {len(found)} models, {right} are right. {count(lambda one: one.way == 'vmap')} run stacked, "
        f"{count(lambda one: one.way == 'loop')} run as a loop."
    )


def reasons(entries: dict[str, Entry]) -> str:
    """Return the models that something refuses or that run as a loop, and why."""
    lines: list[str] = []
    for name, (found, _) in entries.items():
        by_text: dict[str, list[str]] = {}
        for check in CHECKS:
            text = getattr(found, check)
            if text == WRONG:
                text = "the module has other results"
            if text != RIGHT:
                by_text.setdefault(text, []).append(_NAMES[check])
        if found.reason:
            by_text.setdefault(found.reason, []).append("loop")
        lines += [f"| {name} | {', '.join(what)} | {_as_code(text)} |" for text, what in by_text.items()]
    if not lines:
        return "Nothing is refused."
    return "\n".join(["| model | what | reason |", "|---|---|---|", *lines])


def _as_code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def measured_with() -> str:
    """Return a sentence with the versions of the packages."""
    named = [f"{name} {version}" for name, version in versions().items()]
    return f"Measured with {', '.join(named)}."
