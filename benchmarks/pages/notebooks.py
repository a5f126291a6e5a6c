"""`python -m benchmarks.pages.notebooks`: execute the notebooks and keep their outputs, without times of execution."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
        # The version of Python differs between machines, and nothing reads it.
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
