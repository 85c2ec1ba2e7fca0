"""scripts/gpu: what it packs starts on its own, refuses in one line where it cannot run, and its checks tell good runs
from bad ones. Runs on a CPU; what needs a GPU is in the pack.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from conftest import FULL, REPOSITORY, program

BUILD = Path(os.environ.get("KILN_BUILD", REPOSITORY / "build"))


def load_runner():
    spec = importlib.util.spec_from_file_location("gpu_run", REPOSITORY / "scripts" / "gpu_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runner(monkeypatch):
    """gpu_run.py, with a training that a CPU is done with at once."""
    module = load_runner()
    tiny = ["--model", "dit", "--hidden-size", "48", "--depth", "2", "--num-heads", "3", "--patch-size", "8",
            "--num-classes", "10", "--data", "synthetic", "--max-steps", "20", "--global-batch", "4", "--log-every", "1",
            "--checkpoint-every", "0", "--no-tensorboard", "--no-preflight", "--peak-tflops", "1", "--threads", "1"]
    monkeypatch.setattr(module, "TRAINED", tiny)
    monkeypatch.setattr(module, "HERE", BUILD)
    return module


@pytest.fixture
def session(runner, tmp_path):
    program("kiln")
    made = runner.Session("correct", tmp_path / "results", 5, dict(os.environ), {"name": "none"})
    made.device = "cpu"
    return made


def test_memory_choices_and_a_kill_log_equal_lines(runner, session, monkeypatch):
    if not FULL:  # the others do nothing else on a CPU
        kept = {"recompute", "optimizer on the disk", "stage 3, weights on the host"}
        monkeypatch.setattr(runner, "EQUAL_RUNS", {name: options for name, options in runner.EQUAL_RUNS.items() if name in kept})
    session.check("equal lines", runner.equal_lines, "f32")
    session.check("as on the CPU", runner.as_on_the_cpu, "f32", 1e-6)
    assert [check["state"] for check in session.checks] == ["ok", "ok"], session.checks
    assert session.checks[0]["summary"] == f"{9 if FULL else 5} runs logged the same numbers"
    assert len(session.checks[0]["details"]) == 20


def test_another_number_fails_the_check(runner, session, monkeypatch):
    monkeypatch.setattr(runner, "EQUAL_RUNS", {"another seed": ["--seed", "4"]})
    session.check("equal lines", runner.equal_lines, "f32")
    session.check("as on the CPU", lambda s: runner.as_on_the_cpu(s, "f32", -1))
    assert [check["state"] for check in session.checks] == ["FAILED", "FAILED"]
    assert "another seed (" in session.checks[0]["summary"]


def test_results_are_written_check_by_check(runner, tmp_path, capsys):
    session = runner.Session("speed", tmp_path / "out", 5, dict(os.environ), {"name": "Some GPU"})

    def fails(_):
        raise runner.Failed("too | slow")

    def lacks(_):
        raise runner.NotRun("no tool")

    session.check("one", lambda s: ("fine", {"x": 1}))
    session.check("two", fails)
    session.check("three", lacks)
    session.deadline = 0
    session.check("four", lambda s: ("never", None))
    session.check("five", lambda s: s.run("true"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines[:3]] == ["ok      one: fine", "FAILED  two: too | slow", "not run three: no tool"]
    written = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert [check["state"] for check in written["checks"]] == ["ok", "FAILED", "not run", "not run", "not run"]
    assert "| two | FAILED | too / slow |" in (tmp_path / "out" / "speed.md").read_text()


def test_a_program_that_fails_says_why(runner, session):
    session.check("bad", lambda s: runner.train(s, s.out, "bad", "--device", "cpu", "--lr", "-1"))
    assert session.checks[0]["state"] == "FAILED" and "kiln ended with" in session.checks[0]["summary"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """What scripts/gpu build packs, unpacked elsewhere."""
    for name in ("kiln-cuda", "tests/test_cuda"):
        if not (BUILD / name).exists():
            pytest.skip(f"{name} is not built: there is no nvcc")
    if BUILD != REPOSITORY / "build":
        pytest.skip("scripts/gpu packs what is in build/")
    done = subprocess.run([REPOSITORY / "scripts" / "gpu", "build"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("build/kiln-gpu.tar.xz: ")
    folder = tmp_path_factory.mktemp("elsewhere")
    with tarfile.open(BUILD / "kiln-gpu.tar.xz") as archive:
        archive.extractall(folder)
    return folder / "kiln-gpu"


def no_gpu(folder):
    """An environment whose nvidia-smi finds nothing."""
    folder.mkdir(exist_ok=True)
    fake = folder / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    fake.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}


def run_pack(pack, tmp_path, *arguments):
    return subprocess.run([sys.executable, pack / "run", *arguments, "--out", tmp_path / "out"], capture_output=True,
                          text=True, env=no_gpu(tmp_path / "bin"))


@pytest.mark.parametrize("run", ["correct", "speed", "calibrate"])
def test_the_pack_refuses_in_one_line_without_a_gpu(pack, tmp_path, run):
    done = run_pack(pack, tmp_path, run)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu: no GPU: nvidia-smi says: NVIDIA-SMI has failed\n"
    assert not (tmp_path / "out").exists()


def test_the_packed_programs_start_from_the_pack_alone(pack, tmp_path, monkeypatch):
    module = load_runner()
    monkeypatch.setattr(module, "HERE", pack)
    env = {**module.environment(), **no_gpu(tmp_path / "bin")}
    env["LD_LIBRARY_PATH"] = module.environment()["LD_LIBRARY_PATH"]
    done = subprocess.run([pack / "kiln", "train", "--data", "synthetic", "--device", "cuda", "--out", tmp_path / "run"],
                          capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr.startswith("kiln train: expected a CUDA GPU, found none")
    assert len(done.stderr.splitlines()) == 1
    session = module.Session("correct", tmp_path / "results", 5, env, {"name": "none"})
    summary, details = module.gtests(session, "*")
    assert summary.startswith("0 passed, ") and len(details["skipped"]) > 50
    assert {reason.splitlines()[-1] for reason in details["skipped"].values()} == {"no GPU"}


def test_the_pack_names_a_library_that_is_missing(pack, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(pack, copy)
    carried = next((copy / "lib").glob("libspng*"))
    carried.unlink()
    done = run_pack(copy, tmp_path, "correct")
    if "no GPU" in done.stderr:
        pytest.skip("this machine has the library itself")
    assert f"does not find {carried.name}" in done.stderr and len(done.stderr.splitlines()) == 1
