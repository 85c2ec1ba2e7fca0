"""kiln doctor: what this machine has, and exit status 1 where it lacks something."""

import json
import os
import time

import pytest


def test_it_says_what_the_machine_has(kiln, tmp_path):
    result = kiln("doctor", "--json", "--no-peak", "--folder", tmp_path)
    found = json.loads(result.stdout)
    assert found["program"].startswith("0.") and found["diagnosis"] in ("has", "gains", "lacks")
    assert result.returncode == (found["diagnosis"] == "lacks"), result.stderr
    by_name = {finding["about"]: finding for finding in found["findings"]}
    assert {"instructions", "threads", "memory", "disk of runs", "drivers", "links", "clock", "locale"} <= set(by_name)
    assert by_name["threads"]["values"]["own"] >= 1
    assert 0 < by_name["memory"]["values"]["available_bytes"] <= by_name["memory"]["values"]["total_bytes"]
    assert by_name["disk of runs"]["values"]["folder"] == str(tmp_path)
    text = kiln("doctor", "--no-peak", "--folder", tmp_path).stdout
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == [
        finding["diagnosis"] for finding in found["findings"]]


def test_a_folder_without_space_is_one_line_and_status_1(kiln):
    result = kiln("doctor", "--no-peak", "--folder", "/proc")
    assert result.returncode == 1
    assert result.stderr.startswith("kiln doctor: disk of runs: ") and len(result.stderr.splitlines()) == 1


def test_a_lowered_processor_is_named(kiln):
    result = kiln("doctor", "--json", "--no-peak", env={**os.environ, "KILN_CPU": "avx2"})
    if "this processor has no more than" in result.stderr:
        pytest.skip("this processor has no AVX2")
    first = json.loads(result.stdout)["findings"][0]
    assert first["values"]["level"] == "avx2"
    assert first["values"]["best"] == "avx2" or "unset KILN_CPU" in first["advice"]


@pytest.mark.nothing_beside
def test_the_peak_takes_five_seconds(kiln):
    begin = time.monotonic()
    result = kiln("doctor", "--json")
    assert 5 < time.monotonic() - begin < 20
    peak = json.loads(result.stdout)["findings"][-1]
    assert peak["about"] == "peak" and peak["values"]["f32_flops"] > 1e9
    assert peak["values"]["memory_bytes_per_s"] > 1e8
