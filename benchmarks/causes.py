"""The causes of comparisons in which tdfunc is slower: docs/benchmarks.md has a row for each."""

from collections.abc import Sequence
from typing import NamedTuple


class Cause(NamedTuple):
    """A cause and what it explains: parts, their rivals and the beginnings of the names of cases."""

    words: str
    against: str
    of: tuple[tuple[str, str, str], ...]

    def explains(self, part: str, rival: str, case: str) -> bool:
        """Return True if a comparison has this cause."""
        return any((part, rival) == one[:2] and case.startswith(one[2]) for one in self.of)


CAUSES: Sequence[Cause] = (
    Cause(
        "Checks. The rival checks nothing, or only types. tdfunc checks keys, shapes, dtypes and batch sizes. The time "
        "per call counts more on 10 leaves than on 100.",
        "dicts, dataclasses, properties",
        (
            ("trees", "raw dict", ""),
            ("trees", "checked dict", ""),
            ("families", "raw dict", ""),
            ("tensorclass", "checked dataclass", ""),
            ("tensorclass", "bare property", ""),
        ),
    ),
    Cause(
        "Checks of modules. A stack compares the hyperparameters of all submodules. A swap compares shapes, and later "
        "looks for changes by `forward`. `init_ensemble` gives each torch call of `make()` a key.",
        "a bare loop, `module(x)`, `make()`",
        (("modules", "bare loop", ""), ("modules", "module(x)", ""), ("modules", "make()", "")),
    ),
    Cause(
        "Compiled programs. With few members, a step is many small kernels. Each call takes torch microseconds that a "
        "compiled program saves.",
        "JAX, `torch.compile`, inductor",
        (
            ("training", "jax.jit", ""),
            ("training", "equinox", ""),
            ("training", "torch.compile", ""),
            ("training", "jit(backend='inductor')", ""),
        ),
    ),
    Cause(
        "One member: nothing is stacked.",
        "a loop over modules",
        (("training", "loop of fused torch.optim", "CNN with BatchNorm, 1 member"),),
    ),
    Cause(
        "Dropout by keys. The masks take 40 us of a step of 110 us with 1 member, and 290 of 1,250 us with 64.",
        "the step without dropout, a loop over modules",
        (
            ("training", "the same step without", "MLP with dropout"),
            ("training", "loop of fused torch.optim", "CNN with BatchNorm, dropout"),
        ),
    ),
    Cause(
        "A learning rate for each member. torch's fused kernel takes one rate, so two more calls multiply and add.",
        "the step with one rate",
        (("training", "the same step without", "MLP with a learning rate"),),
    ),
    Cause(
        "Wide MLPs. A step writes new parameters and state beside the old ones, and waits for memory. With "
        "`donate=True` it writes into the old ones.",
        "a loop over modules",
        (("widths", "loop of fused torch.optim", "MLP"),),
    ),
    Cause(
        "Wide transformers and convolutions. The activations of all members leave the cache. "
        '`chunk_size="auto"` keeps them in it.',
        "a loop over modules",
        (
            ("widths", "loop of fused torch.optim", "transformer"),
            ("widths", "loop of fused torch.optim", "CNN"),
        ),
    ),
    Cause(
        "Recurrent layers. The kernels take most of the time and are the same for both. XLA compiles the loop over "
        "times.",
        "equinox, a loop over modules",
        (
            ("recurrent", "equinox", ""),
            ("recurrent", "loop of fused torch.optim", ""),
            ("recurrent", "loop of modules", ""),
        ),
    ),
    Cause(
        "Adapters. Each product with the adapters is 64 small products.",
        "one adapter, as many tokens",
        (("lora", "one adapter", ""),),
    ),
    Cause(
        "Text. transformers renders templates for 3.9 of 4.7 ms, as for the rival; the rest makes messages out of "
        "columns. For top_p, both sort all logits.",
        "the tokenizer, `model.generate`",
        (("llm", "tokenizer", ""), ("llm", "model.generate and log_softmax", "")),
    ),
    Cause(
        "Checksums and names. The rival moves bytes. tdfunc hashes them (262 MB in 24 ms), reads the header, and "
        "makes named tensors and a tree in Python.",
        "`os.write`, reading bytes, safetensors",
        (
            ("storage", "os.write", ""),
            ("storage", "load_file", ""),
            ("storage", "reading the bytes", ""),
        ),
    ),
    Cause(
        "Many small leaves in the background. Leaves of at most 64 kB are hashed before `save` returns.",
        "a copy of the tree",
        (("async", "copying the tree first", ""),),
    ),
    Cause(
        "Rows from a file. From the page cache, the copy into the batch is the same work.",
        "rows in memory",
        (("gather", "rows in memory", ""),),
    ),
    Cause(
        "Messages. 1,000 leaves are described, packed and cut again, which takes about 1 us for each leaf at each end.",
        "one tensor of the same bytes",
        (("messages", "one tensor", ""), ("messages", "one tensor, and 3 us for each leaf", "")),
    ),
)


def cause_of(part: str, rival: str, case: str) -> Cause | None:
    """Return the first cause that explains a comparison."""
    return next((cause for cause in CAUSES if cause.explains(part, rival, case)), None)
