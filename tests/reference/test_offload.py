"""`kiln train` with its optimizer's state elsewhere: the same losses to the last digit, and messages for what cannot be."""

import resource
import subprocess

import pytest
from conftest import FULL, assert_refused, program, succeed, without_warnings
from run_files import step_lines

TINY = ("train", "--data", "synthetic", "--model", "dit", "--hidden-size", "32", "--depth", "2", "--num-heads", "2",
        "--patch-size", "4", "--image-size", "64", "--global-batch", "4", "--max-steps", "4", "--log-every", "1",
        "--checkpoint-every", "2", "--threads", "1", "--peak-tflops", "1")


WEIGHTS = ("--offload-params", "nvme")
BOTH = (*WEIGHTS, "--offload-optimizer", "nvme")


def trained(run, *options):
    done = succeed(*TINY, "--out", run, *options)
    return done, {line["step"]: line["loss"] for line in step_lines(run)}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.slow
def test_nvme_trains_what_memory_trains_and_either_resumes_the_other(tmp_path, dtype):
    common = ("--compute-dtype", dtype)
    nvme = ("--offload-optimizer", "nvme", "--nvme-path", tmp_path, "--nvme-block-size", "4096", "--nvme-queue-depth", "4")
    _, expected = trained(tmp_path / "none", *common)
    _, offloaded = trained(tmp_path / "nvme", *common, *nvme)
    assert offloaded == expected
    ways = {"to": ((), nvme), "from": (nvme, ())}
    for name in ways if FULL else ["to" if dtype == "f32" else "from"]:
        first, second = ways[name]
        trained(tmp_path / name, *common, *first, "--max-steps", "2")
        _, resumed = trained(tmp_path / name, *common, *second)
        assert resumed == expected
    assert not list(tmp_path.glob(".kiln-state-*"))


# Which state is on the disk in the first half of a run and in the second one.
WAYS = {"weights": (WEIGHTS, WEIGHTS), "both": (BOTH, BOTH), "to": ((), BOTH), "from": (WEIGHTS, ())}


@pytest.mark.parametrize("ranks, ways", [(1, list(WAYS)), (2, list(WAYS) if FULL else ["both", "from"])], ids=["1", "2"])
@pytest.mark.slow
def test_weights_on_nvme_train_what_memory_trains_and_either_resumes_the_other(tmp_path, ranks, ways):
    """One rank too: stage 3 then means that segments come from the disk one by one."""
    common = ("--zero-stage", "3", "--micro-batch", "1", "--compute-dtype", "bf16", "--nproc", ranks)
    disk = ("--nvme-path", tmp_path, "--nvme-block-size", "4096")
    _, expected = trained(tmp_path / "none", *common)
    for name in ways:
        first, second = ((*options, *disk) if options else () for options in WAYS[name])
        trained(tmp_path / name, *common, *first, "--max-steps", "2")
        done, resumed = trained(tmp_path / name, *common, *second)
        assert resumed == expected
        assert "--zero-stage has no effect" not in done.stderr or not second
        assert "--nvme-path has no effect" not in done.stderr
    assert not list(tmp_path.glob(".kiln-state-*"))


def test_on_a_cpu_its_memory_is_the_hosts(tmp_path):
    _, expected = trained(tmp_path / "none")
    done, offloaded = trained(tmp_path / "cpu", "--offload-optimizer", "cpu", "--nvme-path", tmp_path)
    assert "warning: --nvme-path has no effect without --offload-optimizer nvme or --offload-params nvme" in done.stderr
    assert "warning: --offload-optimizer cpu has no effect on a CPU" in done.stderr
    assert offloaded == expected


@pytest.mark.parametrize("options, message", [
    (("--offload-optimizer", "nvme"), "--offload-optimizer nvme needs a folder on the disk: give --nvme-path DIR"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/nowhere"), "--nvme-path expects a folder that exists, got '/nowhere'"),
    (("--offload-optimizer", "disk"), "--offload-optimizer expects one of none, cpu, nvme, got 'disk'"),
    (("--offload-params", "cpu"), "--offload-params cpu needs --zero-stage 3, got 0"),
    (("--offload-params", "nvme", "--zero-stage", "3"),
     "--offload-params nvme needs a folder on the disk: give --nvme-path DIR"),
    (("--offload-params", "nvme", "--zero-stage", "2", "--nvme-path", "/"), "--offload-params nvme needs --zero-stage 3, got 2"),
    (("--offload-params", "nvme", "--zero-stage", "3", "--nvme-path", "/nowhere"),
     "--nvme-path expects a folder that exists, got '/nowhere'"),
    (("--offload-params", "nvme", "--zero-stage", "3", "--nvme-path", "/proc"),
     "--nvme-path expects a folder that exists and can be written to, got /proc"),
    (("--offload-params", "disk", "--zero-stage", "3"), "--offload-params expects one of none, cpu, nvme, got 'disk'"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/", "--nvme-block-size", "1000"),
     "--nvme-block-size expects a multiple of 4096"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/", "--nvme-queue-depth", "0"),
     "--nvme-queue-depth expects 1 to 4096, got 0"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/proc"),
     "--nvme-path expects a folder that exists and can be written to, got /proc"),
])
def test_what_cannot_be_is_refused_in_one_line(tmp_path, options, message):
    assert_refused([*TINY, "--out", tmp_path / "run", *options], message, code=None, lines=without_warnings)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@pytest.mark.parametrize("what", ["--offload-optimizer", "--offload-params"])
def test_a_disk_without_room_is_refused_before_training(tmp_path, what):
    size = 1 << 15
    command = [program("kiln"), *TINY, "--out", tmp_path / "run", "--zero-stage", "3", what, "nvme", "--nvme-path", tmp_path]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    assert done.returncode == 1
    [line] = without_warnings(done.stderr)
    assert "GiB free, the offloaded state needs" in line and "File too large" in line
    assert "give another --nvme-path" in line
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
