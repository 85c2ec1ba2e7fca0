"""The fixtures and helpers of the reference tests, for the paths: a path is walked with one number of ranks at a time."""

import importlib.util
import sys
from pathlib import Path

import pytest

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
sys.path.insert(0, str(REFERENCE))
# Helpers there say "from conftest import", which is this file here.
_spec = importlib.util.spec_from_file_location("reference_conftest", REFERENCE / "conftest.py")
_reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_reference)
globals().update({name: value for name, value in vars(_reference).items() if not name.startswith("__")})


def pytest_generate_tests(metafunc):
    """A path is walked on one rank and on two, or on as many as its file's RANKS say."""
    if "walk" in metafunc.fixturenames:
        ranks = getattr(metafunc.module, "RANKS", [1, 2])
        metafunc.parametrize("walk", ranks, indirect=True, scope="module", ids=[f"{n}-rank" + "s" * (n > 1) for n in ranks])


@pytest.fixture(scope="module")
def walk(request, tmp_path_factory):
    """A reader's folder for one path; the tests of a file are its stations, in their order."""
    from walks import Walk
    with Walk(tmp_path_factory.mktemp("path"), request.param) as walk:
        yield walk


@pytest.fixture(scope="module", autouse=True)
def a_guide_takes_a_minute():
    """On each number of ranks, the program's commands of a file: processor time, which a busy machine does not change."""
    from walks import Spent
    Spent.commands.clear()
    yield
    for ranks in {ranks for ranks, *_ in Spent.commands if ranks} or {1}:
        commands = [(seconds, command) for of, seconds, command in Spent.commands if of in (None, ranks)]
        total, (most, command) = sum(seconds for seconds, _ in commands), max(commands)
        assert total <= 60, f"{ranks} ranks: {total:.0f} s, of which {most:.0f} s are kiln {command}"


@pytest.fixture(autouse=True)
def ranks_of_commands(request):
    from walks import Spent
    Spent.ranks = request.node.callspec.params.get("walk") if hasattr(request.node, "callspec") else None


@pytest.fixture(scope="session")
def browser():
    from browser import Browser
    with Browser() as browser:
        yield browser
