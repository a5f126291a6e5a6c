"""The Python of README.md, docs/ and notebooks/ as modules for type checkers, and the findings that others cause.

A module has its lines at the places of its page, so that a finding of a checker names the line of the page.
"""

import faulthandler
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat

from tests.test_docs import python_blocks

ROOT = Path(__file__).parents[2]
# A checker reads torch and transformers anew: minutes, and more on a busy machine.
LIMIT_S = 1200

# The settings of pyproject.toml, and these: the code of a page is written as people type it.
PYRIGHT = {
    "typeCheckingMode": "strict",
    "pythonVersion": "3.11",
    "reportMissingTypeStubs": False,
    "reportPrivateUsage": False,
    "reportUnknownMemberType": False,
    "reportUnknownVariableType": False,
    "reportUnknownArgumentType": False,
    "reportUnknownLambdaType": False,
    "reportUnnecessaryIsInstance": False,
    # A function of a guide has no annotations; its body and its calls are checked.
    "reportMissingParameterType": False,
    "reportUnknownParameterType": False,
    # torch's generic classes (`Dataset`, `DataParallel`) are used without arguments.
    "reportMissingTypeArgument": False,
    # Blocks share the names of their page: a later one defines a function again, or repeats an import.
    "reportRedeclaration": False,
    "reportDuplicateImport": False,
    "reportUnusedImport": False,
    # `X` is a matrix, as scikit-learn writes it.
    "reportConstantRedefinition": False,
    # The last expression of a cell is its output.
    "reportUnusedExpression": False,
    # Names of a loop are used after it.
    "reportPossiblyUnboundVariable": False,
    # A layer's `forward(x)` for torch's `forward(input)`.
    "reportIncompatibleMethodOverride": False,
    # A guide uses a field, which may be None, after it was set. Arguments that may be None are checked.
    "reportOptionalMemberAccess": False,
    "reportOptionalSubscript": False,
    "reportOptionalOperand": False,
}

# --strict without the rules that correspond to those above.
MYPY = """
[mypy]
strict = True
disallow_untyped_defs = False
disallow_incomplete_defs = False
disallow_untyped_calls = False
disallow_any_generics = False
# torch returns Any.
warn_return_any = False
allow_redefinition = True
strict_optional = False
ignore_missing_imports = True
# Overloads of other libraries differ in an argument that strict_optional merges.
disable_error_code = import-untyped, override, no-redef, var-annotated, overload-cannot-match, overload-overlap

[mypy-tdfunc.*]
follow_imports = silent
"""

# Findings that no line of ours can prevent: (a pattern of the message, a pattern of the line) and the reason.
ANY = ""
REUSED = "a later block of the page gives the name to another thing"
ACCEPTED = {
    (r"Argument of type|has incompatible type \"\*\*dict", r"\*\*(sizes|shape|tokens|ids|options)\b"): (
        "a checker takes the values of an unpacked dict for the values of every keyword"
    ),
    (r"attn_implementation", ANY): "transformers reads keywords that the signature of a configuration does not have",
    (r'parameter "eos_token_id"', ANY): "transformers: the id of a tokenizer may be a list of texts, by its annotation",
    (r'parameter "token_ids"', r"decode\("): "transformers: decode takes a list of tensors, which its annotation lacks",
    (r'"(_pytree|checkpoint)" is not a known attribute of module "torch.utils"', ANY): "torch imports these itself",
    (r"(HashStore|CSVLogger)", ANY): "exported by the documentation of torch and lightning, not by their stubs",
    (r"FSDPModule", ANY): "torch: `fully_shard` returns the module, and its annotation is a mixin of it",
    (r"scatter|device_ids|target_gpus", r"scatter\("): "torch: `scatter` takes devices as texts and trees by protocol",
    (r"batch_sampler|list\[Any\]", r"batch_sampler="): "torch: a batch sampler yields lists, by its annotation",
    (r"Dataset", r"DataLoader\(rows,"): "torch: a list is a data set, except for the annotation",
    (r'"SubFigure"', r"\.savefig\("): "matplotlib: the figure of axes may be a part of another figure",
    (r"IO\[", r"get_sample_data"): "matplotlib: sample data may be a file, by its annotation",
    (r'"Tensor" (is )?not callable|type "Tensor" is not callable|"Tensor \| Module"', r"weight|self\.mean\."): (
        "torch: an attribute of a module is a tensor or a module"
    ),
    (r'"(c_attn|weight)" for class "Tensor"', ANY): "torch: an attribute of a module is a tensor or a module",
    (r'"probs"', r"get_dist"): "torch: a distribution has the attributes of its class",
    (r"LogProbFn|TensorTree|\"params\" for class", ANY): "posteriors takes pytrees, and its annotation names no tree",
    (r"BaseDistribution", ANY): "optuna: an invariant dict of a base class",
    (r"bool", r"\bnames\b"): "tensorboard: tags are True where there is one only",
    (r'return type "TensorDict"|type "Path"', r"stack\(steps|theirs"): "tensordict: its own trees and files, by type",
    (r"DataLoader\[", r'batch\["x"\]'): "lightning: a prepared loader may be one of several classes",
    (r"list\[object\]", r"AdamW\(groups"): "mypy joins the values of a dict to object",
    (r'"(core|_lazystack)" is not a known attribute', ANY): "names that only pickle needs are private",
    (r"safe_globals|list\[object\]", r"safe_globals\(known"): "torch: safe globals are functions, by its annotation",
    (r"no type arguments|\"(autocast|nocast)\" is not defined", r"TensorClass\["): (
        "mypy reads options as keywords: class A(TensorClass, nocast=True)"
    ),
    (r"type \"int\"|expected \"int\"", r"Counted\("): "`autocast` converts what the annotation of the field refuses",
    (r'"sqrt" for class "int"', r"sum\("): "Python's `sum` begins with the integer 0",
    (r"Number|int \| float|No overloads", r"norms\[i\]"): "torch: `tolist` and `item` return any number",
    (
        r'type "(Tensor|int) \| None" cannot|and "int \| None"',
        ANY,
    ): "a guide uses a field or a step, which may be None, after it was set",
    # Blocks of a page share names, and functions see all values that a page gives to a name.
    (r"refers to itself|declared type|not callable|Jitted", r"\bstep\b|meta_step|unanimous|moved|out = run"): REUSED,
    (r"advantages|group_normalized", ANY): REUSED,
    (r"topk_ids|topk_log_probs|\"mask\"", r"teacher"): REUSED,
    (r"Too few arguments", r"\(total\)"): REUSED,
}


def modules():
    """(name of the page, lines of code at the lines of the page) of everything documented that runs."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        lines = []
        for block in python_blocks(path.read_text()):
            if block.tag:
                continue
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
        if lines:
            yield str(path.relative_to(ROOT)), lines
    for path in sorted((ROOT / "docs/examples").glob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text().splitlines()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        yield str(path.relative_to(ROOT)), "\n".join(cell.source for cell in cells).splitlines()


def write_modules(folder, pages):
    """Write a module for each page; return the pages by file name."""
    names = {}
    for page, lines in pages:
        name = re.sub(r"\W", "_", page) + ".py"
        # Commands of notebooks: a statement keeps the indentation valid.
        plain = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines]
        (folder / name).write_text("\n".join(plain) + "\n")
        names[name] = page, lines
    return names


def _run(command, folder, env=None):
    # The alarm of conftest.py ends a process sooner; this limit takes its place.
    faulthandler.cancel_dump_traceback_later()
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=LIMIT_S)


def run_pyright(folder):
    """(file name, line, message) of pyright's findings."""
    settings = {**PYRIGHT, "include": ["."], "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = _run(command, folder)
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        text = found["message"].partition("\n")[0]
        yield Path(found["file"]).name, found["range"]["start"]["line"] + 1, f"{text} ({found.get('rule')})"


def run_mypy(folder, settings=MYPY):
    """(file name, line, message) of mypy's findings."""
    (folder / "mypy.ini").write_text(settings)
    options = ["--config-file", "mypy.ini", "--python-executable", sys.executable, "--cache-dir", "cache"]
    files = sorted(path.name for path in folder.glob("*.py"))
    command = [sys.executable, "-m", "mypy", *options, "--no-error-summary", "--hide-error-context", *files]
    paths = {"MYPYPATH": str(ROOT), "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = _run(command, folder, paths)
    # 2: mypy itself failed.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(\w+\.py):(\d+): error: (.*)", line)
        if match is not None:
            yield match[1], int(match[2]), match[3]


CHECKERS = {"pyright": run_pyright, "mypy": run_mypy}


def findings(checker, folder, pages):
    """What a checker finds in pages, each as `PAGE:LINE: message ## source`."""
    names = write_modules(folder, pages)
    texts = []
    for name, number, message in CHECKERS[checker](folder):
        page, lines = names[name]
        texts.append(f"{page}:{number}: {message} ## {lines[number - 1].strip()}")
    return texts


def unexpected(texts):
    """The findings that no accepted pattern explains."""
    return [text for text in texts if not any(_explains(pair, text) for pair in ACCEPTED)]


def _explains(pair, text):
    message, source = text.split(" ## ", 1)
    return re.search(pair[0], message) is not None and re.search(pair[1], source) is not None
