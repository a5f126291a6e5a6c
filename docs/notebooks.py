"""A hook of mkdocs: each notebook of `notebooks/` is a page of the site, with its committed outputs."""

import base64
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and their pictures."""
    for path in sorted((Path(config.docs_dir).parent / "notebooks").glob("*.ipynb")):
        text, pictures = make_page(nbformat.read(path, as_version=4), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


# Any: a node of nbformat is a dict with attributes.
def make_page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        # The first cell installs the package, which has its own page.
        if cell.id == "install":
            continue
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"````python\n{cell.source}\n````")
        for output in cell.outputs:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                file = f"{name}-{len(pictures)}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![The figure of the cell above]({file}){{ .output }}")
            elif "text/html" in data:
                parts.append(
                    f'<div class="output" markdown="0">\n{data["text/html"]}\n</div>'
                )
            else:
                parts.append(
                    f"```` {{ .text .output .no-copy }}\n{data['text/plain'].rstrip()}\n````"
                )
    return "\n\n".join(parts) + "\n", pictures
