"""The long runs of soak.py, shortened: that they work, and find no more than a long one would."""

import os

import pytest
import soak
from conftest import FULL

pytestmark = [pytest.mark.nothing_beside, pytest.mark.skipif(not FULL, reason="minutes: scripts/test --full")]


def test_two_minutes_undisturbed(tmp_path):
    assert soak.main(["--only", "undisturbed", "--minutes", "2", "--most-growth", "0.1", "--record", str(tmp_path / "record.md")]) == 0
    assert "evaluations" in (tmp_path / "record.md").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_three_minutes_disturbed(tmp_path):
    assert soak.main(["--only", "disturbed", "--minutes", "3", "--seed", "1", "--record", str(tmp_path / "record.md")]) == 0
