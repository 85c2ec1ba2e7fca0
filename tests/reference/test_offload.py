"""`kiln train` with its optimizer's state elsewhere: the same losses to the last digit, and messages for what cannot be."""

import json

import pytest

TINY = ("train", "--data", "synthetic", "--model", "dit", "--hidden-size", "32", "--depth", "2", "--num-heads", "2",
        "--patch-size", "4", "--image-size", "64", "--global-batch", "4", "--max-steps", "4", "--log-every", "1",
        "--checkpoint-every", "2", "--threads", "1", "--peak-tflops", "1")


def losses(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def trained(kiln, run, *options):
    done = kiln(*TINY, "--out", run, *options)
    assert done.returncode == 0, done.stderr
    return done, losses(run)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_nvme_trains_what_memory_trains_and_either_resumes_the_other(kiln, tmp_path, dtype):
    common = ("--compute-dtype", dtype)
    nvme = ("--offload-optimizer", "nvme", "--nvme-path", tmp_path, "--nvme-block-size", "4096", "--nvme-queue-depth", "4")
    _, expected = trained(kiln, tmp_path / "none", *common)
    _, offloaded = trained(kiln, tmp_path / "nvme", *common, *nvme)
    assert offloaded == expected
    for name, first, second in (("to", (), nvme), ("from", nvme, ())):
        trained(kiln, tmp_path / name, *common, *first, "--max-steps", "2")
        _, resumed = trained(kiln, tmp_path / name, *common, *second)
        assert resumed == expected
    assert not list(tmp_path.glob(".kiln-state-*"))


def test_on_a_cpu_its_memory_is_the_hosts(kiln, tmp_path):
    _, expected = trained(kiln, tmp_path / "none")
    done, offloaded = trained(kiln, tmp_path / "cpu", "--offload-optimizer", "cpu", "--nvme-path", tmp_path)
    assert "warning: --nvme-path has no effect without --offload-optimizer nvme" in done.stderr
    assert "warning: --offload-optimizer cpu has no effect on a CPU" in done.stderr
    assert offloaded == expected


@pytest.mark.parametrize("options, message", [
    (("--offload-optimizer", "nvme"), "--offload-optimizer nvme needs a folder on the disk: give --nvme-path DIR"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/nowhere"), "--nvme-path expects a folder that exists, got '/nowhere'"),
    (("--offload-optimizer", "disk"), "--offload-optimizer expects one of none, cpu, nvme, got 'disk'"),
    (("--offload-params", "cpu"), "--offload-params cpu needs --zero-stage 3, got 0"),
    (("--offload-params", "cpu", "--zero-stage", "3"), "--offload-params cpu needs the optimizer there, too"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/", "--nvme-block-size", "1000"),
     "--nvme-block-size expects a multiple of 4096"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/", "--nvme-queue-depth", "0"),
     "--nvme-queue-depth expects 1 to 4096, got 0"),
    (("--offload-optimizer", "nvme", "--nvme-path", "/proc"),
     "--nvme-path expects a folder that exists and can be written to, got /proc"),
])
def test_what_cannot_be_is_refused_in_one_line(kiln, tmp_path, options, message):
    done = kiln(*TINY, "--out", tmp_path / "run", *options)
    assert done.returncode != 0
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith("warning")]) == 1
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
