"""The hard limits of the style guide: import direction, and sizes of files, classes and functions.

Each check takes sources by module name and returns its findings, so that it can be shown to fail.
"""

import ast
import functools
import re
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# docs/design.md, from the lowest layer up. A tuple is a layer, a string in it a line: a name on a line may import
# names from lower layers and the names before it on its line.
LAYERS = (
    ("core random",),
    ("ops",),
    ("modules", "storage parallel distributed"),
    ("_tensordict _tensorclass _lazystack spec",),
    ("_jit control gradient",),
    ("ensemble optim weights lora mixture metrics sweep plots calibration averaging sklearn",),
    ("nn",),
    ("llm",),
    ("cli demo",),
    ("__init__ __main__",),
)
# name -> (layer, line in the layer, place on the line)
PLACES = {
    name: (layer, line, place)
    for layer, lines in enumerate(LAYERS)
    for line, names in enumerate(lines)
    for place, name in enumerate(names.split())
}
ALWAYS_INSTALLED = {"torch", "numpy", "optree", "xxhash"}
MAX_FILE_LINES, MAX_PUBLIC_METHODS, MAX_BODY_LINES = 800, 20, 60
MAX_FOLDER_FILES = 14
# The file that owns the differences of operating systems, and the modules and members that only it may use.
PLATFORM = "tdfunc.core.system.platform"
SYSTEM_MODULES = {"fcntl", "grp", "msvcrt", "posix", "pwd", "resource", "termios"}
SYSTEM_MEMBERS = {
    "ctypes.CDLL", "ctypes.cdll", "mmap.MADV_WILLNEED", "mmap.MAP_PRIVATE", "mmap.PAGESIZE", "os.chmod", "os.chown",
    "os.fchmod", "os.fdatasync", "os.fork", "os.fsync", "os.geteuid", "os.getuid", "os.name", "os.open",
    "os.posix_fadvise", "os.posix_fallocate", "os.pread", "os.preadv", "os.pwrite", "os.pwritev",
    "os.register_at_fork", "os.rename", "os.replace", "os.sched_getaffinity", "os.statvfs", "os.supports_dir_fd",
    "os.sync", "os.sysconf", "os.uname", "signal.SIGKILL", "signal.SIGPIPE", "signal.pthread_sigmask", "sys.platform",
}  # fmt: skip
SYSTEM_WORDS = re.compile("|".join([r"\b(?:os|sys|signal|mmap|ctypes)\b|dir_fd|/proc/|/dev/", *sorted(SYSTEM_MODULES)]))


def read_sources(*folders):
    """Sources by dotted name; a package is named by its `__init__`: `tdfunc.ops.__init__`."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths}


def imported_modules(node, sources):
    """Dotted names that an import statement reaches, as in `sources` where they are there."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        # `from tdfunc.ops import shape` reaches the file shape.py, if there is one.
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if _as_module(name, sources) in sources else node.module for name in inner]
    return [_as_module(name, sources) for name in names]


def _as_module(name, sources):
    package = f"{name}.__init__"
    return package if package in sources else name


@functools.cache
def imports_in(source):
    """The relative imports of a source, and the imports of `runtime_imports`; syntax trees are large, and not kept."""
    tree = ast.parse(source)
    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    return relative, list(runtime_imports(tree))


def runtime_imports(tree):
    """Import statements outside `if TYPE_CHECKING:`, each with whether it stands at the top of the file."""
    top = True
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement, top
        elif _is_type_checking(statement) or _is_docstring(statement):
            continue
        else:
            top = False
            yield from ((node, False) for node in _nested_imports(statement))


def _nested_imports(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not _is_type_checking(child):
            yield from _nested_imports(child)


def _is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_optional(module):
    package = module.partition(".")[0]
    return package not in {"tdfunc", *ALWAYS_INSTALLED, *sys.stdlib_module_names}


def check_import_style(sources):
    """Imports are absolute, at the top unless optional, and never of the public root."""
    found = []
    for name, source in sources.items():
        relative, at_run_time = imports_in(source)
        found += [f"{name}:{node.lineno}: relative import" for node in relative]
        for node, top in at_run_time:
            if node in relative:
                continue
            for target in imported_modules(node, sources):
                if not top and not _is_optional(target):
                    found.append(f"{name}:{node.lineno}: import of {target} below the top of the file")
                if target in {"tdfunc", "tdfunc.__init__"}:
                    found.append(f"{name}:{node.lineno}: import of the public root")
    return found


def import_graph(sources):
    """Module name -> modules of tdfunc that it imports at run time."""
    return {
        name: {
            target
            for node, _ in imports_in(source)[1]
            if not getattr(node, "level", 0)
            for target in imported_modules(node, sources)
            if target.startswith("tdfunc.") and target != "tdfunc.__init__"
        }
        for name, source in sources.items()
    }


def check_import_direction(sources):
    """Modules import from lower layers, or from names before them on their line of the table."""
    graph = import_graph(sources)
    units = {
        name: name.split(".")[1] for name in {*graph, *(target for targets in graph.values() for target in targets)}
    }
    found = [f"{name}: {unit} is not in the layer table" for name, unit in units.items() if unit not in PLACES]
    for name, targets in graph.items():
        for target in sorted(targets):
            unit, other = units[name], units[target]
            if unit in PLACES and other in PLACES and not _may_import(unit, other):
                found.append(f"{name}: imports {target}, which is not below it")
    return found


def _may_import(unit, other):
    (layer, line, place), (other_layer, other_line, other_place) = PLACES[unit], PLACES[other]
    if layer != other_layer:
        return other_layer < layer
    # Files in one folder are one unit; check_cycles looks inside it.
    return line == other_line and other_place <= place


def check_cycles(sources):
    """No module reaches itself through its imports."""
    try:
        TopologicalSorter(import_graph(sources)).prepare()
    except CycleError as error:
        return [f"cycle: {' -> '.join(error.args[1])}"]
    return []


def check_folder_cycles(sources):
    """The files and folders in one folder form no loop: what a folder imports is complete before it."""
    graphs = {}
    for name, targets in import_graph(sources).items():
        for target in targets:
            ours, theirs = name.split("."), target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            # A file and the package that it lies in are told apart by check_cycles.
            if depth is not None and "__init__" not in (ours[depth], theirs[depth]):
                graphs.setdefault(".".join(ours[:depth]), {}).setdefault(ours[depth], set()).add(theirs[depth])
    found = []
    for folder, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(f"{folder}: loop between {' -> '.join(error.args[1])}")
    return found


def check_folder_sizes(sources):
    """A folder holds at most 14 files, so that its list is read at a glance."""
    counts = Counter(name.rpartition(".")[0] for name in sources)
    return [
        f"{folder}: {count} files, the limit is {MAX_FOLDER_FILES}"
        for folder, count in counts.items()
        if count > MAX_FOLDER_FILES
    ]


def check_sizes(sources):
    """Files, classes and function bodies stay under their limits; generated files have none."""
    found = []
    for name, source in sources.items():
        if source.startswith("# Generated by"):
            continue
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{name}: {lines} lines, the limit is {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and (count := _count_public_methods(node)) > MAX_PUBLIC_METHODS:
                found.append(
                    f"{name}:{node.lineno}: {node.name} has {count} methods, the limit is {MAX_PUBLIC_METHODS}"
                )
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and (body := _body_lines(node)) > MAX_BODY_LINES
            ):
                found.append(f"{name}:{node.lineno}: {node.name} has {body} lines, the limit is {MAX_BODY_LINES}")
    return found


def _count_public_methods(node):
    # Overloads, getters and setters of one name count once.
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    return sum(not name.startswith("_") for name in names)


def _body_lines(node):
    # From the end of the signature or docstring, so that a comment above the first statement counts.
    body = node.body[1:] if _is_docstring(node.body[0]) else node.body
    if not body:
        return 0
    start = node.body[0].end_lineno if len(body) < len(node.body) else body[0].lineno - 1
    return node.end_lineno - start


def check_platform(sources):
    """One file uses the calls in which operating systems differ."""
    found = []
    for name, source in sources.items():
        # A syntax tree takes a hundred times as long as the look for a word.
        if name == PLATFORM or not SYSTEM_WORDS.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            found += [f"{name}:{node.lineno}: {what}, which {PLATFORM} owns" for what in _system_uses(node)]
    return found


def _system_uses(node):
    """Uses of one system in a node of a syntax tree."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        return [f"import of {module}" for module in modules if module.partition(".")[0] in SYSTEM_MODULES]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        text = f"{node.value.id}.{node.attr}"
        return [text] if text in SYSTEM_MEMBERS or text.startswith("os.O_") else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"hasattr", "getattr"}:
        asked = ast.unparse(node.args[0])
        return [f"{node.func.id}({asked}, ...)"] if asked in {"os", "signal", "mmap"} else []
    if isinstance(node, ast.keyword) and node.arg in {"dir_fd", "src_dir_fd", "dst_dir_fd"}:
        return [f"{node.arg}="]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("/proc/", "/dev/")):
        return [repr(node.value)]
    return []


def check_cached_properties(sources):
    """No property has the lock of `functools.cached_property`, which a forked process may find taken for ever."""
    found = []
    for name, source in sources.items():
        if re.search(
            r"^from functools import .*\bcached_property\b|functools\.cached_property\(|@functools\.cached",
            source,
            re.M,
        ):
            found.append(f"{name}: functools.cached_property, in place of that of tdfunc.core.context")
    return found


def check_nested_annotations(sources):
    """No function inside another is annotated by a ParamSpec: `torch.compile` guards on `P.args`, a new object."""
    found = []
    for name, source in sources.items():
        for outer in ast.walk(ast.parse(source)):
            if not isinstance(outer, ast.FunctionDef):
                continue
            inner = [node for node in ast.walk(outer) if isinstance(node, ast.FunctionDef) and node is not outer]
            found += [
                f"{name}:{node.lineno}: {node.name} is annotated by a ParamSpec inside a function; use Any"
                for node in inner
                if node.args.vararg is not None and isinstance(node.args.vararg.annotation, ast.Attribute)
            ]
    return found


CHECKS = [
    check_import_style,
    check_import_direction,
    check_cycles,
    check_folder_cycles,
    check_folder_sizes,
    check_platform,
    check_cached_properties,
    check_nested_annotations,
]


@pytest.mark.parametrize("check", CHECKS)
def test_package(check):
    """Imports are absolute, at the top and downwards, without cycles of files or folders; folders are small.

    One file owns the differences of operating systems, and no property has a lock of all objects.
    """
    assert check(read_sources("tdfunc")) == []


@pytest.mark.slow
def test_sizes():
    """Files, classes and functions stay under the limits."""
    assert check_sizes(read_sources("tdfunc", "tests", "benchmarks")) == []


FILES = ("tdfunc.__init__", "tdfunc.core.keys", "tdfunc.ops.__init__", "tdfunc.ops.edit", "tdfunc.storage.memmap.read")
FOLDER = [f"tdfunc.llm.losses.f{i}" for i in range(MAX_FOLDER_FILES)]
BODY = 'def f():\n    """Doc.\n\n    More.\n    """\n' + "    x = 1\n" * MAX_BODY_LINES
CLASS = "class A:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(MAX_PUBLIC_METHODS))
ROWS = {
    "tdfunc.llm.rows.batch": "",
    "tdfunc.llm.rows.read": "from tdfunc.llm.scoring import ids",
    "tdfunc.llm.scoring.ids": "",
}


def module(source, name="tdfunc.ops.shape"):
    """Sources of a small package whose module `name` is `source`."""
    return dict.fromkeys(FILES, "") | {name: source}


def upwards(name, target):
    """Sources in which one module imports another."""
    return module(f"from {target} import x", name)


FAULTS = [
    *[
        (check_import_style, module(source))
        for source in (
            "from . import edit",
            "if TYPE_CHECKING:\n    from . import edit",
            "import tdfunc",
            "from tdfunc import TensorDict",
            "x = 1\nimport torch",
            "def f():\n    from tdfunc.core.keys import y",
            "class A:\n    def f(self):\n        if self:\n            import optree",
        )
    ],
    (check_import_direction, upwards("tdfunc.core.shapes", "tdfunc.ops.edit")),
    (check_import_direction, upwards("tdfunc.storage.memmap.read", "tdfunc.modules.functional")),
    (check_import_direction, upwards("tdfunc._tensordict", "tdfunc._tensorclass")),
    (check_import_direction, upwards("tdfunc.stray", "torch")),
    (check_import_direction, module("from tdfunc.storage import memmap")),
    (check_cycles, module("from tdfunc.ops import edit") | {"tdfunc.ops.edit": "from tdfunc.ops.shape import x"}),
    (check_folder_cycles, ROWS | {"tdfunc.llm.scoring.trees": "import tdfunc.llm.rows.batch"}),
    (check_folder_sizes, dict.fromkeys([*FOLDER, "tdfunc.llm.losses.more"], "")),
    (check_sizes, {"a": "x = 1\n" * (MAX_FILE_LINES + 1)}),
    (check_sizes, {"a": CLASS + "    def more(self): ...\n"}),
    (check_sizes, {"a": BODY + "    x = 1\n"}),
    (check_cached_properties, module("from functools import cached_property, wraps")),
    (
        check_nested_annotations,
        module("def outer(f):\n    def run(*args: P.args, **kwargs: P.kwargs): ...\n\n    return run"),
    ),
    (
        check_cached_properties,
        module("import functools\n\n\nclass A:\n    @functools.cached_property\n    def f(self): ..."),
    ),
    *[
        (check_platform, module(source))
        for source in (
            "import fcntl",
            "from resource import getrlimit",
            "flags = os.O_DIRECTORY",
            "has = hasattr(os, 'fork')",
            "fd = open_it(path, dir_fd=root)",
            "x = sys.platform == 'linux'",
            "os.fsync(fd)",
            "place = f'/proc/self/fd/{fd}'",
        )
    ],
]
ALLOWED = [
    (
        check_import_style,
        module('"""Doc."""\nimport torch\nfrom tdfunc.core import keys\nfrom tdfunc.ops.edit import at'),
    ),
    (check_import_style, module("if TYPE_CHECKING:\n    from tdfunc import TensorDict\n\nimport torch")),
    (check_import_style, module("def f():\n    import transformers\n    if TYPE_CHECKING:\n        import torch")),
    (check_import_direction, upwards("tdfunc.core.types", "tdfunc.core.errors")),
    (check_import_direction, upwards("tdfunc.storage.memmap.read", "tdfunc.ops.shape")),
    (check_import_direction, upwards("tdfunc.spec", "tdfunc._tensordict")),
    (check_cycles, module("if TYPE_CHECKING:\n    from tdfunc.ops import edit") | {"tdfunc.ops.edit": ""}),
    (check_folder_cycles, ROWS),
    (check_folder_sizes, dict.fromkeys([*FOLDER, "tdfunc.llm.losses.inner.f"], "")),
    (
        check_sizes,
        {"a": "x = 1\n" * MAX_FILE_LINES, "b": BODY, "c": CLASS + "    def f0(self): ...\n    def _g(self): ...\n"},
    ),
    (check_sizes, {"a": "# Generated by a script.\n" + "x = 1\n" * MAX_FILE_LINES}),
    (check_platform, {PLATFORM: "import fcntl\nos.fsync(fd)"}),
    (check_platform, module("import os\nos.stat(path)\ngetattr(tree, 'a')")),
]


@pytest.mark.parametrize(("check", "sources"), FAULTS)
def test_checks_can_fail(check, sources):
    """Each check finds a fault of its kind."""
    assert check(sources) != []


@pytest.mark.parametrize(("check", "sources"), ALLOWED)
def test_checks_allow(check, sources):
    """What a rule allows, sizes at their limits among it, passes."""
    assert check(sources) == []
