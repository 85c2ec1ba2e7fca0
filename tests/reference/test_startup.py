"""What a user waits for before a command begins: help comes without LibTorch's initialisation, a run soon begins."""

import os
import re
import resource
import subprocess

import pytest
from conftest import REPOSITORY, program, run_program, succeed

WITHOUT_LEVEL = {name: value for name, value in os.environ.items() if name != "KILN_CPU"}
RUNS = 5  # of which the fastest counts


def processor_s(*arguments, status=0, env=WITHOUT_LEVEL):
    """The least time that the processors have for a command."""
    best = float("inf")
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([program("kiln"), *map(str, arguments)], capture_output=True, text=True, env=env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == status, result.stderr
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def commands():
    names = re.findall(r"^  ([a-z][a-z-]*)  ", succeed("--help").stdout, re.MULTILINE)
    return [[], *([name] for name in names), ["store", "import"], ["store", "inspect"], ["store", "verify"]]


@pytest.mark.slow
def test_texts_of_the_build_are_those_of_the_program():
    """With KILN_CPU, which may be refused, the program makes them itself."""
    questions = [[*command, *asked] for command in commands() for asked in (["--help"], ["-h"], ["--help", "all"])]
    assert len(questions) > 50
    for question in [*questions, ["--version"], ["man"], *(["completion", shell] for shell in ("bash", "zsh", "fish"))]:
        ready = subprocess.run([program("kiln"), *question], capture_output=True, text=True, env=WITHOUT_LEVEL)
        made = run_program("kiln", *question, env=WITHOUT_LEVEL | {"KILN_CPU": "avx2"})
        assert (ready.returncode, ready.stdout, ready.stderr) == (made.returncode, made.stdout, made.stderr), question
        assert ready.returncode == 0 and ready.stdout, question


@pytest.mark.slow
def test_other_questions_are_parsed():
    for arguments in (["--help", "--version"], ["train --help"], ["train", "--help", "some"], ["completion", "tcsh"], [""]):
        ready = subprocess.run([program("kiln"), *arguments], capture_output=True, text=True, env=WITHOUT_LEVEL)
        made = run_program("kiln", *arguments, env=WITHOUT_LEVEL | {"KILN_CPU": "avx2"})
        assert (ready.returncode, ready.stdout, ready.stderr) == (made.returncode, made.stdout, made.stderr), arguments


@pytest.mark.nothing_beside
@pytest.mark.parametrize("question", [["--help"], ["train", "--help", "all"], ["completion", "bash"], ["--version"]])
def test_help_takes_50_milliseconds(question):
    assert processor_s(*question) < 0.05


@pytest.mark.nothing_beside
def test_a_plan_soon_follows_the_loading_of_libraries():
    """The goal is 0.2 s of the clock beyond it (benchmarks/start_up.py). A slow machine may take twice that."""
    loading = processor_s("--version", env=WITHOUT_LEVEL | {"KILN_CPU": "avx2"})  # which no ready text answers
    assert loading > 2 * processor_s("--version"), "the libraries are loaded"
    for plan in (["--recipe", REPOSITORY / "recipes/demo.toml", "--data", "synthetic", "--device", "cpu"],
                 ["--model", "DiT-XL/2", "--image-size", 512, "--gpu", "RTX-4090", "--gpus", 4]):  # fmt: skip
        assert processor_s("plan", *plan) - loading < 0.4, plan


@pytest.mark.nothing_beside
def test_the_demo_trains_its_first_step_after_a_second_and_a_half(tmp_path):
    """Until the line of the first step, which counts."""
    best = float("inf")
    for attempt in range(RUNS):
        process = subprocess.Popen(
            [program("kiln"), "train", "--recipe", REPOSITORY / "recipes/demo.toml", "--data", "synthetic", "--out", tmp_path / str(attempt),
             "--compute-dtype", "f32", "--device", "cpu", "--max-steps", "2", "--log-every", "1", "--sample-every", "0", "--no-checkpoint"],
            stdout=subprocess.PIPE, text=True, env=WITHOUT_LEVEL)  # fmt: skip
        for line in process.stdout:
            if line.startswith("step "):
                break
        fields = open(f"/proc/{process.pid}/stat").read().rsplit(")", 1)[1].split()
        process.communicate()
        assert process.returncode == 0
        best = min(best, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    assert best < 1.5
