"""examples/notebook.ipynb, executed with the wheel that it installs: every cell runs, and its last ones show curve and grid."""

import os
import subprocess
from pathlib import Path

import nbclient
import nbformat
import pytest
from conftest import BUILD, REPOSITORY, pack

NOTEBOOK = REPOSITORY / "examples/notebook.ipynb"
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")


def outputs_of(notebook, kind):
    """The data of this type that the cells show, by their code."""
    return {cell.source: output.data[kind] for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
            if kind in output.get("data", {})}


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.skipif(not FONT.exists(), reason="the emoji font is not installed (Debian: fonts-noto-color-emoji)")
def test_it_runs(built, site, tmp_path, monkeypatch):
    installed = tmp_path / "site"
    installed.mkdir()
    for name in ("torch", "nvidia"):  # beside the module, as pip puts them
        (installed / name).symlink_to(site / name)
    subprocess.run([BUILD / "kiln-demo-data", "--out", tmp_path / "pictures", "--classes",
                    "faces=face-*,flags=country-flag,signs=arrow+zodiac"], check=True, capture_output=True)
    for name, value in {"KILN_WHEEL": pack("wheel"), "KILN_PICTURES": tmp_path / "pictures", "KILN_MINUTES": "0.2",
                        "PIP_TARGET": installed, "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PYTHONPATH": installed,
                        "IPYTHONDIR": tmp_path / "ipython", "JUPYTER_RUNTIME_DIR": tmp_path / "jupyter"}.items():
        monkeypatch.setenv(name, str(value))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    (curve,), (grid,) = outputs_of(notebook, "image/svg+xml").items(), outputs_of(notebook, "image/png").items()
    assert curve[0].rstrip().endswith('curve([line["loss"] for line in log])') and "<polyline" in curve[1]
    assert grid[0].rstrip().endswith('Image("samples/grid.png")') and len(grid[1]) > 1000
    texts = "".join(output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "kiln extract takes" in texts and " weights, " in texts and " steps, loss " in texts
    assert os.path.exists(tmp_path / "run" / "report.html")
