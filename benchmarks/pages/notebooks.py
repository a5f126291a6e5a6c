"""`python -m benchmarks.pages.notebooks [NAME ...]`: execute notebooks and keep their outputs, without times."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"


def main(names: list[str]) -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
        # The version of Python differs between machines, and nothing reads it.
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        print(f"written: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
