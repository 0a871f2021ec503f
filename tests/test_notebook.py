"""The notebook of examples/: its cells run from top to bottom, and its policy learns."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.tiny_run import ROOT

NOTEBOOK = ROOT / "examples/first_run.ipynb"


def test_the_notebook_is_stored_without_outputs_and_its_links_lead_somewhere():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.slow
def test_the_notebook_runs_and_its_policy_learns(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel run the notebook")
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel run the notebook")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel run the notebook")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")  # as users compile
    book = nbformat.read(NOTEBOOK, as_version=4)
    there = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(book, timeout=900, kernel_name="python3", resources=there).execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in cells]
    assert "a laptop's run works here" in printed[1]
    before, after = (float(line.split(": ")[1].split()[0]) for line in printed[3].splitlines())
    assert after > before + 0.3, printed[3]
    (figures,) = [out.data["text/html"] for out in cells[4].outputs if out.output_type == "execute_result"]
    assert figures.count("<svg") == 3
    assert "--- the policy" in printed[5] and "ended by" in printed[5]
