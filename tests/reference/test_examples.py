"""docs/first_hour.md is what examples/first_hour.sh runs, and it runs."""

import json
import os
import subprocess

import pytest
from browser import parts_of
from conftest import REPOSITORY, program

PAGE = (REPOSITORY / "docs" / "first_hour.md").read_text()


def commands_of_the_page():
    """Its commands, each in one line without the quotes that the shell takes away."""
    text = PAGE.replace("\\\n", " ")
    return [" ".join(line[2:].replace("'", "").split()) for line in text.splitlines() if line.startswith("$ ")]


def commands_of_a_call(folder, steps, **environment):
    """Of examples/first_hour.sh, as it prints them."""
    result = subprocess.run([REPOSITORY / "examples" / "first_hour.sh", folder, str(steps)], capture_output=True, text=True,
                            timeout=1800, env=os.environ | environment)
    assert result.returncode == 0, result.stderr
    return [" ".join(line[2:].split()) for line in result.stdout.splitlines() if line.startswith("$ ")]


def test_the_page_shows_the_commands_of_the_script(tmp_path):
    for name in ("kiln", "kiln-demo-data"):  # do nothing, well
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "first_hour"
    ran = commands_of_a_call(folder, 400, KILN_BUILD=str(tmp_path))
    assert [line.replace(str(folder), "first_hour") for line in ran] == commands_of_the_page()


@pytest.mark.slow
def test_the_first_hour_runs(tmp_path):
    folder = tmp_path / "hour"
    names = {"KILN_BUILD": str(program("kiln").parent), "KILN_CACHE": str(tmp_path / "own"), "HF_HOME": str(tmp_path / "hf")}
    assert len(commands_of_a_call(folder, 2, **names)) == len(commands_of_the_page())
    assert json.loads((folder / "result.json").read_text())["protocol"]["samples"]["ema"] == "ema-0.9"
    assert "By kiln evaluate" in (folder / "run" / "report.html").read_text()
    rows = [row for table in parts_of(folder / "runs.html", "table") for row in table["rows"]]
    assert [row[0] for row in rows].count("other") >= 2, "in the table of speed and in that of metrics"
