"""The fixtures and helpers of the reference tests, for the stations; and the table of what they differ by.

KILN_STATIONS_PAGE=FILE writes the table between the marks of that page (docs/stations.md).
"""

import importlib.util
import os
import sys
from pathlib import Path

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
sys.path.insert(0, str(REFERENCE))
# Helpers there say "from conftest import", which is this file here.
_spec = importlib.util.spec_from_file_location("reference_conftest", REFERENCE / "conftest.py")
_reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_reference)
globals().update({name: value for name, value in vars(_reference).items() if not name.startswith("__")})

BEGIN, END = "<!-- written by the stations' tests -->", "<!-- end -->"


def table_of(rows):
    """Markdown of {case: {station: levels or a reason}}; a station that no case has is left out."""
    from cases import EXCEPTIONS, STATIONS
    stations = [station for station in STATIONS if any(station in cells for cells in rows.values())]
    reasons = list(EXCEPTIONS.values())
    lines = ["| trained | " + " | ".join(stations) + " |", "|---" * (len(stations) + 1) + "|"]
    for case, cells in sorted(rows.items()):
        shown = []
        for station in stations:
            cell = cells.get(station, "")
            shown.append(f"[{reasons.index(cell) + 1}]" if cell in reasons else str(cell))
        lines.append(f"| {case} | " + " | ".join(shown) + " |")
    return "\n".join(lines + ["", *(f"[{number}] {reason}" for number, reason in enumerate(reasons, 1))]) + "\n"


def pytest_terminal_summary(terminalreporter):
    rows = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            rows.update(value for name, value in getattr(report, "user_properties", []) if name == "stations")
    if not rows:
        return
    table = table_of(rows)
    terminalreporter.write_line("\nworst difference from kiln sample --run, in levels of 255\n" + table)
    if page := os.environ.get("KILN_STATIONS_PAGE"):
        before, _, rest = Path(page).read_text().partition(BEGIN)
        Path(page).write_text(before + BEGIN + "\n" + table + END + rest.partition(END)[2])
