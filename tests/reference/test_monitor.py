"""What a run says about itself while it trains: phases, the loader, the GPU's driver, a trace of some steps."""

import json
import os
import re
import subprocess

import pytest
from conftest import assert_refused, succeed
from run_files import step_lines

OPTIONS = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 4, "--num-classes", 4,
           "--data", "synthetic", "--autoencoder", "pixels", "--image-size", 16, "--global-batch", 8, "--objective", "flow",
           "--log-every", 2, "--peak-tflops", 1, "--device", "cpu"]
PHASES = {"input", "forward", "loss", "recompute", "backward", "grad_norm", "optimizer", "offload", "communication", "graph", "data"}

# The functions of NVML that are loaded by name, with a GPU of fixed readings behind PCI address 0000:01:00.0 or index 0.
FAKE_NVML = """
#include <string.h>
static int initialized, device;
int nvmlInit_v2(void) { initialized = 1; return 0; }
int nvmlShutdown(void) { initialized = 0; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (!initialized || index > 1) return 2;
  *handle = &device; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) { return 6; }
int nvmlDeviceGetUtilizationRates(void* handle, unsigned* rates) {
  if (handle != &device) return 2;
  rates[0] = 87; rates[1] = 40; return 0; }
int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) { %s }
int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long* memory) {
  memory[0] = 80ull << 30; memory[1] = 77ull << 30; memory[2] = 3ull << 30; return 0; }
"""


def train(out, *extra, environment=None):
    return succeed("train", *OPTIONS, "--out", out, *extra, timeout=120, env=environment)


def with_nvml(folder, power, **environment):
    """The environment in which NVML is FAKE_NVML, whose readings of power are by the C code `power`."""
    (folder / "nvml.c").write_text(FAKE_NVML % power)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    return {"LD_LIBRARY_PATH": str(folder)} | environment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    result = train(out, "--max-steps", 6, "--profile", "3:4", "--recompute", "0")
    return out, result.stdout


def test_the_progress_line_tells_what_is_known(tmp_path):
    """Batches that wait, and the time that is left once a step has been timed."""
    result = train(tmp_path / "run", "--max-steps", 3, "--log-every", 1)
    lines = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert all(re.search(r"  ready [0-4]\.\d", line) for line in lines)
    assert [line.endswith(" left") for line in lines] == [False, True, True]


def test_phases_and_loader_are_logged(run):
    out, stdout = run
    for line in step_lines(out):
        assert set(line["phase_s"]) == PHASES
        assert all(seconds >= 0 for seconds in line["phase_s"].values())
        step_s = 8 / line["images_per_s"]
        assert 0 < sum(line["phase_s"].values()) < 1.05 * step_s
        for phase in ("forward", "recompute", "backward", "optimizer"):
            assert line["phase_s"][phase] > 0, phase
        assert 0 <= line["queue_depth"] <= 4
        assert not [key for key in line if key.startswith("gpu_")], "there is no GPU here to tell of"
    progress = [line for line in stdout.splitlines() if line.startswith("step ")]
    assert len(progress) == 3
    assert all("forward " in line and "backward " in line for line in progress)


def test_profile_is_a_chrome_trace_of_the_asked_steps(run):
    out, _ = run
    events = json.loads((out / "profile-3-4.json").read_text())["traceEvents"]
    slices = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in slices if event["name"].startswith("step ")]
    assert sorted(event["name"] for event in steps) == ["step 3", "step 4"]

    def inside(event):
        return any(step["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1
                   for step in steps)

    names = {event["name"] for event in slices}
    assert {"forward blocks.1", "recompute blocks.0", "backward embed", "optimizer final", "loss"} <= names
    fused = [event for event in slices if event["name"].startswith("kiln::")]
    assert fused and all(inside(event) for event in fused)
    assert any("Input Dims" in event.get("args", {}) for event in slices), "operations carry their shapes"


def test_a_profile_shows_what_ranks_send_beside_what_is_computed(tmp_path):
    train(tmp_path, "--max-steps", 3, "--profile", "2:3", "--nproc", 2, "--zero-stage", 3)
    events = json.loads((tmp_path / "profile-2-3.json").read_text())["traceEvents"]
    slices = [event for event in events if event.get("ph") == "X"]
    sent = [event for event in slices if event["name"].startswith("gloo:")]
    computed = [event for event in slices if event["name"].startswith(("forward ", "backward "))]
    assert "gloo:all_gather" in {event["name"] for event in sent}
    beside = [(one, other) for one in sent for other in computed
              if one["tid"] != other["tid"] and one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]]
    assert beside, "nothing was sent while a segment computed"


@pytest.mark.parametrize("text", ["5", "4:2", "0:3", "a:b"])
def test_impossible_profiles_are_refused(tmp_path, text):
    assert_refused(["train", *OPTIONS, "--out", tmp_path / "run", "--profile", text], "FROM:TO", f"'{text}'", code=None,
                   timeout=120)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("knows_power", [True, False])
def test_gpu_readings_come_from_nvml(tmp_path, knows_power):
    environment = with_nvml(tmp_path, "*milliwatts = 312500; return 0;" if knows_power else "return 3;")
    train(tmp_path / "run", "--max-steps", 2, environment=environment)
    [line] = step_lines(tmp_path / "run")
    assert line["gpu_utilisation"] == pytest.approx(0.87)
    assert line["gpu_memory_bytes"] == 3 << 30
    assert line["gpu_memory_total_bytes"] == 80 << 30
    assert line.get("gpu_watts") == (pytest.approx(312.5) if knows_power else None)


def test_every_gpu_of_the_machine_is_told_of(tmp_path):
    """Those of the other ranks, too."""
    environment = with_nvml(tmp_path, "*milliwatts = 312500; return 0;", PATH=os.environ["PATH"])
    train(tmp_path / "run", "--max-steps", 2, "--nproc", 2, "--threads", 1, environment=environment)
    [line] = step_lines(tmp_path / "run")
    assert len(line["gpus"]) == 2 and line["gpu_utilisation"] == pytest.approx(0.87)
    for gpu in line["gpus"]:
        assert gpu["utilisation"] == pytest.approx(0.87) and gpu["memory_total_bytes"] == 80 << 30
    report = (tmp_path / "run" / "report.html").read_text()
    assert "GPU 0" in report and "GPU 1" in report


def test_a_broken_nvml_is_as_none(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    train(tmp_path / "run", "--max-steps", 2, environment={"LD_LIBRARY_PATH": str(tmp_path)})
    [line] = step_lines(tmp_path / "run")
    assert "gpu_utilisation" not in line
