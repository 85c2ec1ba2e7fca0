"""A pytest plugin: each test gets a map of the faults that it reaches (fault_switch.h), and records how it went.

KILN_FAULT_RECORDS names the folder: records.jsonl has a line when a test begins and one when it ends. What a fixture of a
module does counts for the first test that asks for it.
"""
import json
import os
import time
from pathlib import Path

import pytest

FOLDER = Path(os.environ["KILN_FAULT_RECORDS"])
outcomes = {}


def record(**what):
    with open(FOLDER / "records.jsonl", "a") as file:
        file.write(json.dumps(what) + "\n")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    os.environ["KILN_FAULT_MAP"] = path = str(FOLDER / f"{len(outcomes)}.map")
    outcomes[item.nodeid] = "skipped"
    record(test=item.nodeid)
    begun = time.monotonic()
    yield
    record(test=item.nodeid, outcome=outcomes[item.nodeid], seconds=time.monotonic() - begun, map=path)


def pytest_runtest_logreport(report):
    if report.failed:
        outcomes[report.nodeid] = "failed"
    elif report.when == "call" and report.passed and outcomes[report.nodeid] != "failed":
        outcomes[report.nodeid] = "passed"
