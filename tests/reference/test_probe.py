"""kiln probe: a few real steps beside the plan, on one machine and without leaving anything."""

import json
import re
import subprocess

import pytest
from conftest import FULL, program

OPTIONS = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 2, "--num-classes", 4,
           "--data", "synthetic", "--image-size", 64, "--global-batch", 8, "--device", "cpu", "--peak-tflops", 1]


def run(command, *arguments, temporary=None):
    arguments = [str(part) for part in [program("kiln"), command, *OPTIONS, *arguments]]
    environment = {"TMPDIR": str(temporary)} if temporary else None
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    result = run("probe", "--steps", 6, "--json", "--cost-per-hour", 2, "--max-steps", 1000, temporary=folder)
    assert result.returncode == 0, result.stderr
    assert not list(folder.iterdir()), "the run folder is removed"
    return json.loads(result.stdout)


def test_both_sides_have_the_same_shape(probed):
    predicted, measured = probed["predicted"], probed["measured"]
    for key in ("peak_bytes", "by_kind", "by_phase", "step_s", "images_per_s", "phase_s", "curve"):
        assert key in predicted and key in measured, key
    assert set(measured["by_phase"]) <= set(predicted["by_phase"])
    assert set(measured["phase_s"]) == set(predicted["phase_s"])
    assert {"load", "first step", "steady step", "checkpoint"} <= set(measured["by_phase"])
    assert measured["curve"]["phase"] == predicted["curve"]["phase"]
    assert measured["num_steps"] == 4  # two warm up
    low, median, high = measured["step_s_quartiles"]
    assert 0 < low <= median <= high and measured["step_s"] == median
    assert measured["images_per_s"] == pytest.approx(8 / median)


def test_memory_is_as_predicted(probed):
    predicted, measured = probed["predicted"], probed["measured"]
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.03)
    assert sum(measured["by_kind"].values()) == measured["peak_bytes"]
    for kind in ("master", "moments", "ema", "gradients"):
        assert measured["by_kind"][kind] == predicted["by_kind"][kind], kind
    for phase, tolerance in (("load", 0.1), ("first step", 0.03), ("steady step", 0.03)):
        assert measured["by_phase"][phase] == pytest.approx(predicted["by_phase"][phase], rel=tolerance), phase
    assert measured["by_phase"]["checkpoint"] > 0
    assert not [finding for finding in probed["findings"] if "memory" in finding]


def test_whole_run_is_extrapolated(probed):
    whole = probed["extrapolated"]
    assert whole["steps"] == 1000
    assert whole["days"] == pytest.approx(1000 * probed["measured"]["step_s"] / 86400)
    assert whole["cost"] == pytest.approx(whole["days"] * 24 * 2)


def test_the_price_of_a_gpu_is_taken_too(tmp_path):
    result = run("probe", "--steps", 3, "--json", "--price-per-gpu-hour", 3, "--max-steps", 1000, temporary=tmp_path)
    assert result.returncode == 0, result.stderr
    whole = json.loads(result.stdout)["extrapolated"]
    assert whole["cost"] == pytest.approx(whole["days"] * 24 * 3)


def test_a_batch_too_large_for_one_pass_is_divided(tmp_path):
    """Without --micro-batch; with it, what does not fit is refused."""
    large = ["--global-batch", 4096, "--memory-budget", "420M", "--steps", 1]
    result = run("probe", *large, "--json", temporary=tmp_path)
    assert result.returncode == 0, result.stderr
    chosen = int(re.search(r"--micro-batch (\d+) ", result.stderr)[1])
    assert 0 < chosen < 4096
    assert json.loads(result.stdout)["measured"]["peak_bytes"] < 420 << 20
    result = run("probe", *large, "--micro-batch", 4096, temporary=tmp_path)
    assert result.returncode != 0 and "this fits" in result.stderr


def test_ranks_need_no_run_folder_and_passes_are_no_larger_than_what_they_have(tmp_path):
    """The batch is of 8 images, 4 for each rank."""
    common = ["--steps", 2, "--json", "--nproc", 2, "--threads", 1]
    peaks = []
    for micro_batch in (0, 8):
        result = run("probe", *common, "--micro-batch", micro_batch, temporary=tmp_path)
        assert result.returncode == 0, result.stderr
        assert ("beyond the 4 images" in result.stderr) == (micro_batch == 8)
        probed = json.loads(result.stdout)
        assert probed["measured"]["images_per_s"] > 0
        peaks.append((probed["predicted"]["peak_bytes"], probed["measured"]["peak_bytes"]))
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("batch", [[], pytest.param(["--global-batch", 256], marks=pytest.mark.skipif(
    not FULL, reason="minutes on a CPU"))])
def test_the_plain_command_works_anywhere(kiln, batch):
    """The default model; without a batch in seconds, and it says so."""
    result = kiln("probe", "--data", "synthetic", "--device", "cpu", "--steps", 4, "--json", *batch, timeout=3600)
    assert result.returncode == 0, result.stderr
    probed = json.loads(result.stdout)
    assert probed["measured"]["peak_bytes"] == pytest.approx(probed["predicted"]["peak_bytes"], rel=0.03)
    assert ("8 images a step, where kiln train has 256" in result.stderr) == (not batch)


def test_table_for_people():
    result = run("probe", "--steps", 3)
    assert result.returncode == 0, result.stderr
    assert "not run by a probe: resume\n" in result.stdout
    for text in ("peak memory", "memory of activations", "memory in load", "memory in checkpoint", "time of backward", "steps/s", "waiting for data", "the whole run"):
        assert text in result.stdout, text


@pytest.mark.parametrize("arguments, expected", [(["--steps", 0], "--steps"), (["--profile", "1:2"], "--profile"),
                                                 (["--image-size", 63], "--image-size")])
def test_what_cannot_be_probed_is_refused_in_one_line(arguments, expected, tmp_path):
    result = run("probe", *arguments, temporary=tmp_path)
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1 and expected in result.stderr
    assert not list(tmp_path.iterdir())


def test_training_compares_itself_with_its_plan(tmp_path):
    out = tmp_path / "run"
    result = run("train", "--out", out, "--max-steps", 4, "--log-every", 2)
    assert result.returncode == 0, result.stderr
    comparison = json.loads((out / "plan.json").read_text())
    assert comparison["measured"]["peak_bytes"] == pytest.approx(comparison["predicted"]["peak_bytes"], rel=0.03)
    report = (out / "report.html").read_text()
    assert "Plan against measurement" in report and "peak memory" in report
    for finding in comparison["findings"]:
        assert finding in report
