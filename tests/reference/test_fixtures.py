"""What the program writes is what tests/fixtures/fixtures.json says, fact by fact, and its runs are resumed."""

import importlib.machinery
import importlib.util
import json

import pytest
from conftest import FULL, REPOSITORY

_loader = importlib.machinery.SourceFileLoader("fixtures", str(REPOSITORY / "tools/fixtures"))
fixtures = importlib.util.module_from_spec(importlib.util.spec_from_loader("fixtures", _loader))
_loader.exec_module(fixtures)


# Until a processor with AVX-512 has found what one with AVX2 recorded, CI does not depend on it.
recorded_at_one_level = pytest.mark.skipif(not FULL, reason="scripts/test --full compares: a minute, and recorded at AVX2 alone")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixtures") / "now"
    return folder, fixtures.write(folder)


@recorded_at_one_level
def test_what_is_written_has_not_changed(written):
    recorded = json.loads((REPOSITORY / "tests/fixtures/fixtures.json").read_text())
    found = fixtures.differences(recorded, written[1])
    assert not found, "\n".join(["Files, identities or first batches changed. A change of formats that is meant needs "
                                 "tools/fixtures write (tests/fixtures/README.md). Fact: recorded, now:", *found])


@recorded_at_one_level
@pytest.mark.parametrize("run", ["class", "text", "lora", "two ranks", "offload"])
def test_its_runs_resume(written, run, capsys):
    assert fixtures.resume(written[0], None, run) == 0, capsys.readouterr().out


def test_a_difference_is_named():
    old = {"store": {"bytes": "a", "losses": "~1.001 none", "gone": "3"}, "run": {"x": "1"}}
    assert fixtures.differences(old, old | {"store": {"bytes": "a", "losses": "~1.002 none", "gone": "3"}}) == []
    new = {"store": {"bytes": "b", "losses": "~1.001 0.5", "more": "2"}}
    assert fixtures.differences(old, new) == ["run: missing", "store, bytes: a, b", "store, gone: 3, None",
                                              "store, losses: ~1.001 none, ~1.001 0.5", "store, more: None, 2"]
