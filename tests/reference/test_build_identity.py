"""The name of a build: the same for the same sources wherever they are, another for others."""

import re
import shutil
import subprocess

import pytest
from conftest import REPOSITORY

SCRIPT = REPOSITORY / "cmake" / "BuildIdentity.cmake"


def identity_of(folder):
    out = folder / "build_identity.cpp"
    subprocess.run(["cmake", f"-DSOURCE={folder}", "-DVERSION=1.2.3", f"-DOUT={out}", "-P", SCRIPT], check=True)
    return re.search(r'"(1\.2\.3\+[0-9a-f]{12})"', out.read_text()).group(1)


@pytest.fixture
def sources(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "src" / "core").mkdir(parents=True)
        (tmp_path / name / "src" / "core" / "x.cpp").write_text("int x = 1;\n")
        (tmp_path / name / "src" / "y.h").write_text("#pragma once\n")
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_sources_make_the_identity(sources):
    first, second = sources
    same = identity_of(first)
    assert identity_of(second) == same
    (second / "src" / "core" / "x.cpp").write_text("int x = 2;\n")
    changed = identity_of(second)
    (second / "src" / "core" / "x.cpp").write_text("int x = 1;\n")
    (second / "src" / "z.h").write_text("")
    assert len({same, changed, identity_of(second)}) == 3


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_nothing_is_written_when_nothing_changed(sources):
    identity_of(sources[0])
    before = (sources[0] / "build_identity.cpp").stat().st_mtime_ns
    identity_of(sources[0])
    assert (sources[0] / "build_identity.cpp").stat().st_mtime_ns == before


def test_the_program_says_which_build_it_is(kiln):
    assert re.fullmatch(r"kiln \d+\.\d+\.\d+\+[0-9a-f]{12}\n", kiln("--version").stdout)
