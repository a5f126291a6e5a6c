"""A wheel in an environment without the clone: `make test-wheel` installs it there and runs this program.

`bare` is the environment of `pip install tdfunc`; `full` has the extras demo, llm and cli. `types PYTHON` checks the
types of all public symbols with the pyright of another environment.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent


def run(*command: str) -> subprocess.CompletedProcess:
    """Run a command as a user would, away from the clone; pyright reads the environment whose `python` is first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{SCRIPTS}{os.pathsep}{environment['PATH']}"
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def check(command: tuple[str, ...], code: int, text: str) -> None:
    """Run a command, and compare its exit code and a part of its output."""
    done = run(*command)
    shown = done.stdout + done.stderr
    assert done.returncode == code, shown
    assert text in shown, shown
    print("ok", " ".join(command)[-90:])


def check_types(python: str) -> None:
    """Raise if a public symbol of the wheel has no type that every type checker would find."""
    done = run(python, "-m", "pyright", "--verifytypes", "tdfunc", "--ignoreexternal")
    # The score is rounded; one symbol without a type shows in the exit code alone.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Type completeness score: 100%" in done.stdout, done.stdout
    print(done.stdout[done.stdout.index("Symbols exported") :])


def readme() -> str:
    """Return the Python blocks of the README as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program = "\n".join(blocks)
    # The commands below read its file.
    assert 'tdf.save(tree, "ensemble.safetensors")' in program
    return program


def main(kind: str, *pythons: str) -> None:
    """Check the installed wheel."""
    python, tdfunc = sys.executable, str(SCRIPTS / "tdfunc")
    where = "import tdfunc; assert 'site-packages' in tdfunc.__file__, tdfunc.__file__; print('installed')"
    files = "from importlib.metadata import files; print(*[f for f in files('tdfunc') if 'dist-info' in str(f)])"
    check((python, "-c", where), 0, "installed")
    check((python, "-c", files), 0, "sboms/sbom.cdx.json")
    if kind == "types":
        check_types(*pythons)
        return
    if kind == "bare":
        check((tdfunc, "--help"), 1, "pip install 'tdfunc[cli]'")
        check((python, "-m", "tdfunc.demo"), 1, "pip install 'tdfunc[demo]'")
        return
    check((tdfunc, "--version"), 0, "tdfunc ")
    check((tdfunc, "--help"), 0, "verify")
    Path("readme.py").write_text(readme())
    check((python, "readme.py"), 0, "")
    check((tdfunc, "verify", "ensemble.safetensors"), 0, "whole")
    check((python, "-m", "tdfunc.demo", "--members", "4", "--out", "out"), 0, "")
    assert Path("out").is_dir()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(*sys.argv[1:])
