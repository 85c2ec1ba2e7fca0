"""The four additions of docs/adding.md, as patches (tests/patches): each applies, changes as few files as the page
says, and with all four the program is built and passes their tests."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import FULL, REPOSITORY

PATCHES = sorted((REPOSITORY / "tests/patches").glob("*.patch"))
PROGRAMS = ["test_models", "test_diffusion", "test_train"]


def output_of(*command, cwd=REPOSITORY, timeout=600):
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(cwd.parent)}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-8000:]}{result.stderr[-8000:]}"
    return result.stdout


def test_there_are_four():
    assert len(PATCHES) == 4


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_it_applies(patch):
    output_of("git", "apply", "--check", patch)


def test_all_apply_on_each_other():
    output_of("git", "apply", "--check", *PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_it_changes_as_many_files_of_src_as_the_page_says(patch):
    page = (REPOSITORY / "docs/adding.md").read_text()
    told = re.search(rf"\(\.\./tests/patches/{patch.name}\)[^|]*\| (\d+) \|", page)
    assert told, f"docs/adding.md does not tell of {patch.name}"
    files = [line.split("\t")[2] for line in output_of("git", "apply", "--numstat", patch).splitlines()]
    assert len([file for file in files if file.startswith("src/")]) == int(told[1]), files


def copy_changed(source, to):
    """Makes `to` a copy of the tree `source`. What is there already and equal keeps its time, so little is built again."""
    for path in [path for path in source.rglob("*") if path.is_file()]:
        copy = to / path.relative_to(source)
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    for copy in [copy for copy in to.rglob("*") if copy.is_file()]:
        if not (source / copy.relative_to(to)).exists():
            copy.unlink()


@pytest.mark.skipif(not FULL, reason="scripts/test --full builds the patched program: ten minutes")
def test_they_are_built_and_pass_their_tests(tmp_path):
    patched, build = REPOSITORY / "build/patched/tree", REPOSITORY / "build/patched/build"
    for name in output_of("git", "ls-files", "-co", "--exclude-standard").splitlines():
        if (REPOSITORY / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tmp_path / name)
    output_of("git", "apply", *PATCHES, cwd=tmp_path)
    copy_changed(tmp_path, patched)
    output_of("cmake", "-S", patched, "-B", build, "-G", "Ninja", f"-DKILN_SITE={REPOSITORY}/.deps/site", "-DKILN_BENCHMARKS=OFF",
              "-DCMAKE_UNITY_BUILD_BATCH_SIZE=48")
    output_of("ninja", "-C", build, *PROGRAMS, timeout=7200)
    new_tests = re.findall(r"^\+TEST\((\w+), (\w+)\)", "".join(patch.read_text() for patch in PATCHES), re.MULTILINE)
    suites = [*dict(new_tests), "Registry", "PublishedSettings", "OptionPage", "Objective", "*EveryObjective", "*FittingPair"]
    filters = ":".join(f"{suite}.*" for suite in suites)
    passed = "".join(output_of(build / "tests" / program, f"--gtest_filter={filters}", timeout=1800) for program in PROGRAMS)
    for suite, test in new_tests:
        assert f"[       OK ] {suite}.{test} (" in passed
