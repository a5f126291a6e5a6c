"""Coverage-guided fuzzing of the loaders with atheris, outside of CI.

`python -m benchmarks.reliability.fuzz TARGET CORPUS [libFuzzer options]`, such as `-max_total_time=600`. TARGET is one of
`file` (a safetensors file), `tree` (the description of a tree, in an otherwise good file), `values` (non-tensor data,
kinds, ties and classes, in a file and a memmap folder), `index` (of shards), and `memmap` (the meta.json files of a folder). CORPUS is a folder, which is filled with good inputs if it is empty.
Needs the extra `fuzz`. An input counts as a finding if a load raises an error that is not ours, gives
other values than the files hold, or writes.
"""

# The tables of inputs are easier to check with several on a line.
# ruff: noqa: E501

import json
import os
import shutil
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from random import Random

_LIMIT_MB = 4000
_DICTIONARY = (
    "__metadata__", "tdfunc.header", "tdfunc.version", "tdfunc.tree", "tdfunc.leaves", "tdfunc.shards", "weight_map",
    "data_offsets", "dtype", "shape", "F32", "BF16", "F4", "C64", "BOOL", "specs", "nodes", "ties", "keys", "items", "own",
    "size", "device", "names", "class", "tree", "tie", "value", "values", "flags", "builtins:dict", "os:system",
    "tdfunc:TensorDict", "torch.float32", "torch.bfloat16", "_type", "stack_dim", "NonTensorData", "NonTensorStack",
    "_is_non_tensor", "special", "order", "count", "is_nested", "data", "cpu", "cuda", "meta", "None", "null", "true",
    "flags", "own", "shape", "benchmarks.reliability.values:Sample", "pPg", "bg", "n", "x", "-1", "1e999", "NaN", "9223372036854775808", "4294967296", "../x", "/etc/passwd", "\\\\u0000", "\\\\ud800",
)  # fmt: skip


def mutate_json(raw: bytes, seed: int) -> bytes | None:
    """Change values inside JSON, which keeps its form; None for other input."""
    random = Random(seed)
    try:
        doc = [json.loads(raw)]
    except (RecursionError, ValueError):
        return None
    for _ in range(random.randint(1, 3)):
        places = list(_places(doc))[:10_000]
        holder, key = random.choice(places)
        other, at = random.choice(places)
        # A copy: the same object in two places could come to hold itself.
        new = deepcopy(random.choice([
            other[at], [holder[key]], {"": holder[key]}, random.choice(_DICTIONARY), {random.choice(_DICTIONARY): other[at]},
            random.choice([None, True, 0, 1, -1, 2, 3, 2**31, 2**63, 2**70, 0.5, 1e300, "", [], {}]),
        ]))  # fmt: skip
        if isinstance(holder, dict) and random.random() < 0.5:
            value = holder.pop(key)
            holder[random.choice(_DICTIONARY)] = value
        elif isinstance(holder, list) and holder is not doc and random.random() < 0.3:
            holder.insert(random.randint(0, len(holder)), new)
        else:
            holder[key] = new
    return json.dumps(doc[0], separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _places(value):
    for key in list(value if isinstance(value, dict) else range(len(value))):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def mutate(target: str, raw: bytes, seed: int) -> bytes | None:
    """Change the JSON of an input; None where there is none."""
    if target == "memmap":
        new = mutate_json(raw[1:], seed)
        return None if new is None else raw[:1] + new
    if target != "file":
        return mutate_json(raw, seed)
    end = 8 + int.from_bytes(raw[:8], "little")
    new = mutate_json(raw[8:end].rstrip(b" "), seed)
    return None if new is None else len(new).to_bytes(8, "little") + new + raw[end:]


def main() -> None:
    """Run one target."""
    import atheris

    target, corpus = sys.argv[1], Path(sys.argv[2])
    with atheris.instrument_imports(include=["tdfunc.storage", "tdfunc.core.nontensor", "tdfunc.core.shapes"]):
        import tdfunc.storage.memmap.read  # noqa: F401
    from benchmarks.reliability import loads, targets

    root = Path(tempfile.mkdtemp(prefix="tdfunc-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    corpus.mkdir(parents=True, exist_ok=True)
    loads.prepare(root)
    if not any(corpus.iterdir()):
        for i, raw in enumerate(targets.SEEDS[target](root)):
            (corpus / f"seed-{i}").write_bytes(raw)
    words = root / "words"
    words.write_text("".join(f"{json.dumps(word)}\n" for word in _DICTIONARY if word.isascii() and "\\" not in word))
    check = targets.CHECKS[target]
    options = [
        f"-dict={words}",
        f"-rss_limit_mb={_LIMIT_MB}",
        "-timeout=30",
        "-max_len=4096",
        f"-artifact_prefix={corpus}-",
    ]

    def mutator(raw, max_size, seed):
        new = mutate(target, raw, seed) if seed % 2 else None
        return atheris.Mutate(raw, max_size) if new is None or len(new) > max_size else new

    arguments = [sys.argv[0], *options, *sys.argv[3:], str(corpus)]
    try:
        atheris.Setup(arguments, lambda raw: check(root, raw) and None, custom_mutator=mutator)
        atheris.Fuzz()
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
