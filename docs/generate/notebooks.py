"""Run the notebooks of analysis/notebooks on recorded runs, and write them with their outputs as pages of the site."""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "analysis" / "notebooks"
RECORDED = ROOT / "results" / "measured" / "two_cores.zip"

RUNS: Mapping[str, Mapping[str, Any]] = {
    "first_look": {"RUNS": "testbed"},
    "reading_results": {"RUNS": "smoke"},
    "scaling_study": {"RUNS": "testbed"},
    "comparing_machines": {"RUNS": "testbed", "MACHINES": ("testbed_400mbit", "testbed_100mbit")},
}
"""Parameters of each notebook by its name, including the recorded runs that it reads."""

_PATIENCE_S = 250  # a notebook takes seconds on an idle machine


def write_pages(folder: Path) -> None:
    """Run every notebook, and write each as a page with its pictures into `folder`."""
    for name, parameters in RUNS.items():
        runs = RECORDED / parameters["RUNS"]
        notebook = run_notebook(name, folder, {**parameters, "RUNS": str(runs)})
        shown = str(runs.relative_to(ROOT))
        (folder / f"{name}.md").write_text("\n\n".join(_list_blocks(name, notebook, shown, folder)) + "\n")


def run_notebook(name: str, folder: Path, parameters: Mapping[str, Any]) -> Any:
    """Return a notebook with its outputs, after running it in `folder` with the given parameters."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    own = cell.source
    cell.source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
    NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        timeout=_PATIENCE_S,
        startup_timeout=_PATIENCE_S,
    ).execute()
    cell.source = own
    return notebook


def _list_blocks(name: str, notebook: Any, runs: str, folder: Path) -> Iterator[str]:
    pictures = 0
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            yield cell.source
        else:
            yield f"```python\n{cell.source}\n```"
        if number == 0:
            yield f"Run on the recorded runs of `{runs}` when this page was made."
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                picture = f"{name}_{pictures}.png"
                (folder / picture).write_bytes(base64.b64decode(data["image/png"]))
                yield f"![Output of the cell above]({picture})"
            elif "text/html" in data:
                # pandas asks for borders of its own, which would stand next to those of the theme
                shown = data["text/html"].replace('<table border="1" class="dataframe">', '<table class="docutils">')
                yield f'```{{raw}} html\n<div style="overflow-x: auto">{shown}</div>\n```'
            elif text := data.get("text/plain") or (output.get("name") == "stdout" and output.text):
                yield f"```text\n{text.rstrip()}\n```"
