"""tools/plant_faults on a tree of a few lines: what it draws and plants, and which test it says to see it."""

import json
import os
import subprocess

import pytest
from conftest import REPOSITORY

SOURCES = {  # a file has places of one kind
    "operation": "int area(int w, int h) { return w * h; }\n#if 0\nint never(int a) { return a + 2; }\n#endif\n",
    "bound": "bool within(int at, int size) { return at < size; }\n",
    "order": "int minus(int a, int b);\nint depth(int a, int b) {\n  // not minus(b, a) + 2\n"
             "  return minus(a, b);\n}\n",
    "sign": "int last(int size) { return size - 1; }\n",
    "check": 'void fail(const char* who);\nvoid refuse(int size) {\n  if (size == 8) fail("size + 1 < 7, a * b");\n}\n',
}
PROGRAM = """#include <cstdio>
#include <cstdlib>
int area(int, int), depth(int, int), last(int);
int minus(int a, int b) { return a - b; }
bool within(int, int);
void refuse(int);
void fail(const char*) { std::exit(9); }
int main(int, char** words) {
  const int a = std::atoi(words[2]), b = std::atoi(words[3]);
  switch (words[1][0]) {
    case 'o': return area(a, b);
    case 'b': return within(a, b);
    case 'd': return depth(a, b);
    case 's': return last(a);
    default: refuse(a);
  }
}
"""
PYTEST = """import os, subprocess, pytest
def run(*words):
    return subprocess.run([os.environ["KILN_BUILD"] + "/program", *words]).returncode
def test_area(): assert run("o", "3", "4") == 12
def test_within(): assert run("b", "3", "4") == 1
@pytest.mark.slow
def test_last(): assert run("s", "3", "0") == 2
def test_fails_always(): assert run("s", "3", "0") == 7
"""
GTEST = """#include <gtest/gtest.h>
int depth(int, int);
int minus(int a, int b) { return a - b; }
void fail(const char*) {}
TEST(Depth, OfNothing) { EXPECT_EQ(depth(0, 0), 0); }
TEST(Depth, IsADifference) { EXPECT_EQ(depth(5, 3), 2); }
int main(int count, char** words) {
  ::testing::InitGoogleTest(&count, words);
  return RUN_ALL_TESTS();
}
"""


def committed(root, files):
    for name, text in ({"tests/main.cpp": GTEST} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in ["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]:
        subprocess.run(["git", "-C", root, *words], check=True)
    (root / ".venv").symlink_to(REPOSITORY / ".venv")
    return root


def plant(*words):
    result = subprocess.run([REPOSITORY / "tools/plant_faults", *map(str, words)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def faults_of(copy):
    return {fault["kind"]: fault for fault in json.loads((copy / "faults.json").read_text())["faults"]}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return committed(tmp_path_factory.mktemp("tree"), {f"src/{name}.cpp": text for name, text in SOURCES.items()} | {
        "program.cpp": PROGRAM, "tests/reference/test_tiny.py": PYTEST})


@pytest.fixture(scope="module")
def copy(tree, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copies") / "one"
    plant("copy", "--root", tree, "--out", copy, "--count", 5)
    (copy / "build/tests").mkdir(parents=True)
    sources = ["g++", "-std=c++20", "-Isrc", *(f"src/{name}.cpp" for name in SOURCES)]
    subprocess.run([*sources, "program.cpp", "-o", "build/program"], cwd=copy, check=True)
    subprocess.run([*sources, "tests/main.cpp", "-lgtest", "-o", "build/tests/test_depth"], cwd=copy, check=True)
    return copy


def test_a_seed_always_draws_the_same(tmp_path):
    sums = {f"src/sum{i}.cpp": f"int sum{i}(int a) {{ return a + 2; }}\n" for i in range(9)}
    tree = committed(tmp_path / "tree", sums)
    drawn = []
    for at, seed in enumerate([1, 1, 2, 3, 4]):
        plant("copy", "--root", tree, "--out", tmp_path / str(at), "--count", 1, "--seed", seed)
        drawn.append(faults_of(tmp_path / str(at))["operation"]["file"])
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1


@pytest.mark.slow
def test_each_kind_is_drawn_once_and_where_code_is_compiled(copy):
    assert {kind: (fault["file"], fault["original"], fault["mutated"]) for kind, fault in faults_of(copy).items()} == {
        "operation": ("src/operation.cpp", "w * h", "w / h"),
        "bound": ("src/bound.cpp", "at < size", "at <= size"),
        "order": ("src/order.cpp", "minus(a, b)", "minus(b, a)"),
        "sign": ("src/sign.cpp", "size - 1", "size + 1"),
        "check": ("src/check.cpp", "size == 8", "false")}


def test_a_fault_is_real_only_by_its_number_and_its_place_is_recorded(copy, tmp_path):
    numbers = {kind: fault["id"] for kind, fault in faults_of(copy).items()}

    def run(fault, words):
        names = {"KILN_FAULT": str(fault), "KILN_FAULT_MAP": str(tmp_path / words[0])}
        return subprocess.run([copy / "build/program", *words.split()], env=os.environ | names).returncode

    cases = {"operation": ("o 4 3", 12, 1), "bound": ("b 4 4", 0, 1), "order": ("d 5 3", 2, 254),
             "sign": ("s 3 0", 2, 4), "check": ("c 8 0", 9, 0)}
    for kind, (words, right, wrong) in cases.items():
        assert {number: run(number, words) for number in [0, *numbers.values()]} == {
            number: wrong if number == numbers[kind] else right for number in [0, *numbers.values()]}
        assert [number for number, mark in enumerate((tmp_path / words[0]).read_bytes()) if mark] == [numbers[kind]]


@pytest.mark.slow
def test_faults_run_against_the_tests_that_reach_them(copy, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # many processes of pytest start, for a moment each
    assert "test_fails_always fails without any fault" in plant("map", "--copy", copy)
    whole = json.loads((copy / "map.json").read_text())
    plant("map", "--copy", copy, "test_depth")
    again = json.loads((copy / "map.json").read_text())
    assert again["faults"] == whole["faults"] and again["tests"].keys() == whole["tests"].keys()
    table = plant("run", "--copy", copy)
    results = json.loads((copy / "results.json").read_text())
    numbers = {kind: str(fault["id"]) for kind, fault in faults_of(copy).items()}
    python = "tests/reference/test_tiny.py::test_"
    assert {kind: results[number].get("by", results[number]["state"]) for kind, number in numbers.items()} == {
        "operation": python + "area", "bound": "missed", "order": "test_depth:Depth.IsADifference",
        "sign": python + "last", "check": "not covered"}
    assert "3 seen, 1 missed, 1 not covered of 5" in table
    assert "2 seen, 2 missed, 1 not covered of 5" in plant("run", "--copy", copy, "--quick")
    assert "3 seen" in plant("table", "--copy", copy)


def test_faults_follow_their_lines_into_other_files(tree, copy, tmp_path):
    kept = {f"src/{name}.cpp": SOURCES[name] for name in ("operation", "order", "check")}
    other = "int first() { return 0; }\n" + SOURCES["bound"].replace("at < size", "at <\n      size")
    moved = committed(tmp_path / "moved", kept | {"src/other.cpp": other})
    said = plant("copy", "--root", moved, "--out", tmp_path / "same", "--same", copy / "faults.json")
    assert "is gone: size - 1" in said
    faults = faults_of(tmp_path / "same")
    assert faults["bound"]["file"] == "src/other.cpp" and "gone" in faults["sign"]
    assert "::kiln::fault" in (tmp_path / "same/src/other.cpp").read_text()
