"""What a new user mistypes or mistakes: one line that names the thing, what was expected and what to do."""

import functools
import subprocess

import conftest
import numpy as np
import pytest
from conftest import program, succeed, without_warnings
from run_files import losses
from safetensors.numpy import save_file
from test_extract import SIZE, arguments, write_pictures

MODEL = ["--model", "dit", "--hidden-size", 48, "--depth", 1, "--num-heads", 3, "--patch-size", 4, "--image-size", SIZE,
         "--objective", "flow", "--global-batch", 8, "--log-every", 1, "--device", "cpu", "--threads", 1, "--peak-tflops", 1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A store, a run on it, its weights, and files that are none of these."""
    folder = tmp_path_factory.mktemp("new-user")
    write_pictures(folder / "pictures", 12)
    for command in [arguments(folder / "pictures", folder / "store"),
                    ["train", *MODEL, "--data", folder / "store", "--out", folder / "run", "--max-steps", 1],
                    ["convert", "--in", folder / "run", "--out", folder / "weights.safetensors"]]:
        succeed(*command)
    (folder / "typo.toml").write_text("max-step = 3\n")
    (folder / "folder").mkdir()
    save_file({"a": np.zeros(1, dtype=np.float32)}, folder / "other.safetensors")
    return folder


refusal = functools.partial(conftest.refusal, code=None, lines=without_warnings, timeout=120)


@pytest.mark.parametrize("option, value, expected", [
    ("--seed", -1, "--seed: expects a whole number from 0 on, got -1"),
    ("--lr", "high", "--lr expects a number, got 'high'"),
    ("--max-steps", "1e3", "--max-steps expects a whole number, got '1e3'"),
    ("--max-step", 3, "did you mean --max-steps?"),
    ("--hidden-size", -48, "--hidden-size expects 0 or more, got -48"),
    ("--depth", 10**7, "--depth expects 10000 at most, got 10000000"),
    ("--global-batch", 10**20, "--global-batch expects 1000000000 at most"),
    ("--threads", 10**6, "--threads expects 1024 at most"),
    ("--loader-threads", 10**6, "--loader-threads expects 1024 at most"),
    ("--model", "dit-xl/2", 'did you mean "DiT-XL/2"?'),
    ("--data", "nowhere", "--data nowhere does not exist: give a store made by kiln extract, images with --autoencoder, or "
     "'synthetic'"),
    ("--memory-budget", "1M", "too little for one pass of all --global-batch 8; no smaller --micro-batch fits either"),
    ("--recipe", "typo.toml", "unknown option 'max-step': did you mean 'max-steps'?"),
    ("--recipe", "folder", "folder: it is a folder, a file is needed"),
    ("--recipe", "absent.toml", "absent.toml: No such file or directory"),
    ("--weights", "absent.pt", "absent.pt"),
    ("--weights", "other.safetensors", "unknown keys: a"),
])
def test_train(place, tmp_path, option, value, expected):
    if option in ("--recipe", "--weights"):
        value = place / value
    more = [] if option == "--max-steps" else ["--max-steps", 1]
    line = refusal("train", *MODEL, "--data", place / "store", "--out", tmp_path / "out", *more, option, value)
    assert expected in line
    assert not list(tmp_path.glob("out/checkpoints/*"))


@pytest.mark.parametrize("more, expected", [
    (["--seed", -4], "--seed: expects a whole number from 0 on, got -4"),
    (["--num-sampling-steps", 10**5], "expected at most 1000 sampling steps"),
    (["--num-sampling-steps", 10**12], "--num-sampling-steps to be 1 to 1000000"),
    (["--nproc", 10**6], "--nproc expects 0 to 1024"),
    (["--num-images", 10**12], "expected --num-images to be 1 to 100000000"),
    (["--threads", -1], "--threads expects 0 (all processors) to 1024, got -1"),
    (["--npz", "absent/x.npz"], "cannot write absent/x.npz: No such file or directory: the folder does not exist"),
    (["--npz", "absent/x.npz", "--no-png"], "the folder does not exist"),
])
def test_sample(place, tmp_path, more, expected):
    steps = [] if "--num-sampling-steps" in more else ["--num-sampling-steps", 2]
    assert expected in refusal("sample", "--run", place / "run", *steps, "--out", tmp_path / "out", *more)
    # The right command is not taken for one of other settings then.
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("more, expected", [
    (["--image-size", 0], "expected --image-size to be 1 to 65536, got 0"),
    (["--image-size", 10**6, "--enlarge"], "expected --image-size to be 1 to 65536"),
    (["--workers", 10**6], "--workers expects at most 1024"),
    (["--batch", 10**9], "--batch at most 1048576"),
    (["--threads", -1], "--threads expects 0 (all processors) to 1024, got -1"),
])
def test_extract(place, tmp_path, more, expected):
    command = ["extract", "--data", place / "pictures", "--autoencoder", "pixels", "--out", tmp_path / "out"]
    if "--image-size" not in more:
        more = [*more, "--image-size", SIZE]
    assert expected in refusal(*command, *more)
    assert not (tmp_path / "out").exists()


def test_weights_that_fit_are_where_training_starts(place, tmp_path):
    """Also through the pre-flight, which plans on tensors without data."""
    command = ["train", *MODEL, "--data", place / "store", "--max-steps", 1, "--out"]
    succeed(*command, tmp_path / "out", "--weights", place / "weights.safetensors")
    # They are the average of a run of one step: other than fresh ones.
    assert losses(place / "run")[0] != losses(tmp_path / "out")[0]


def test_paths_may_have_spaces_and_other_bytes(place, tmp_path):
    """What cannot be kept as text in config.toml is refused before anything is written."""
    spaced = tmp_path / "a run"
    succeed("train", *MODEL, "--data", place / "store", "--out", spaced, "--max-steps", 1)
    succeed("sample", "--run", spaced, "--num-images", 1, "--num-sampling-steps", 2, "--out", tmp_path / "my samples",
            "--npz", tmp_path / "my samples.npz")
    there = sorted(tmp_path.iterdir())
    out = bytes(tmp_path) + b"/run\xff"
    result = subprocess.run([bytes(program("kiln")), b"train", *(str(option).encode() for option in MODEL), b"--data",
                             bytes(place / "store"), b"--out", out, b"--max-steps", b"1"], capture_output=True)
    assert result.returncode == 1 and b"--out expects UTF-8" in result.stderr
    assert sorted(tmp_path.iterdir()) == there
