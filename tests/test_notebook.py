"""Training in a notebook: a real kernel executes the example from top to bottom."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples/notebook.ipynb"


def test_the_notebook_runs_and_shows_progress_and_report_inline(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # stored without results
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    training, grades, result = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"][1:]
    lines = [each["data"]["text/plain"] for each in training if each.output_type == "display_data"]
    assert any(line.startswith("step 1/2  reward") for line in lines) and any("step 2/2" in line for line in lines)
    assert grades[0]["data"]["text/plain"].startswith(
        "'17 answers graded"
    )  # two steps of eight, and the first reference answer
    (shown,) = result
    assert "<iframe" in shown["data"]["text/html"] and "sparse_rl" in shown["data"]["text/html"]
    assert (tmp_path / "runs/notebook/report.html").exists()
