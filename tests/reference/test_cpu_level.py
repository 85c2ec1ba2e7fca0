"""KILN_CPU: the level in use is shown, and one that the processor lacks ends in one line."""

import os
import re

import pytest
from conftest import run_program

LEVELS = ["avx2", "avx512", "avx512_bf16", "amx"]
PROBE = ["probe", "--model", "dit", "--hidden-size", 48, "--depth", 1, "--num-heads", 3, "--patch-size", 4, "--data", "synthetic", "--image-size", 32,
         "--global-batch", 2, "--device", "cpu", "--peak-tflops", 1, "--steps", 3, "--no-checkpoint"]


def probe(level):
    environment = {name: value for name, value in os.environ.items() if name != "KILN_CPU"} | ({"KILN_CPU": level} if level else {})
    return run_program("kiln", *PROBE, env=environment, timeout=120)


def shown_by(result):
    assert result.returncode == 0, result.stderr
    return re.search(r", f32 on .*, (\w+) with \d+ threads?", result.stdout + result.stderr)[1]


def test_the_level_of_these_tests_is_shown():
    level = os.environ.get("KILN_CPU")
    shown = shown_by(probe(level))
    assert shown == level if level else shown in LEVELS


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.slow
def test_each_level_that_the_processor_has_is_shown_and_the_others_are_refused(level):
    own = shown_by(probe(None))
    result = probe(level)
    if LEVELS.index(level) <= LEVELS.index(own):
        assert shown_by(result) == level
    else:
        assert result.returncode == 1 and f"KILN_CPU={level}: this processor has no more than {own}" in result.stderr
