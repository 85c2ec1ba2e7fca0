"""A run that is forked from a loaded program (fork_server.py) is that of a program that is started: what it says, how it ends and
what it knows of its surroundings."""

import json
import os
import subprocess

import fork_server
import pytest
from conftest import program

TINY = ["train", "--model", "dit", "--hidden-size", 48, "--depth", 1, "--num-heads", 3, "--patch-size", 4, "--image-size", 64, "--data", "synthetic",
        "--global-batch", 4, "--device", "cpu", "--threads", 1, "--peak-tflops", 1, "--log-every", 1, "--no-tensorboard", "--seed", 3]


def loaded():
    return fork_server.loaded(os.path.abspath(program("kiln")))


def forked(*arguments, folder=".", timeout=120, **environment):
    command = [loaded().path, *map(str, arguments)]
    return loaded().run(command, os.environ | environment, os.path.abspath(folder), timeout)


@pytest.mark.parametrize("arguments, environment, status", [
    (["--version"], {}, 0),
    (["plan", "--help"], {}, 0),
    (["plan", "--recipe", "recipe.toml", "--gpu", "T4", "--json"], {}, 0),
    (["train", "--max-step", "3"], {}, 2),
    (["plan", "--gpu", "T5"], {}, 1),
    (["train", ""], {}, 2),
    (["--version"], {"KILN_CPU": "sse2"}, 1),
])
def test_it_says_and_ends_as_a_program_that_is_started(tmp_path, arguments, environment, status):
    (tmp_path / "recipe.toml").write_text('model = "DiT-S/8"\nglobal-batch = 16\n')
    one = forked(*arguments, folder=tmp_path, **environment)
    other = subprocess.run([program("kiln"), *arguments], capture_output=True, text=True, cwd=tmp_path, env=os.environ | environment)
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    assert one.returncode == status, one.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_as_a_program_that_is_started(tmp_path, ranks):
    """Two ranks: their launcher starts the command again that it finds as its own."""
    losses = []
    for name in ("forked", "started"):
        command = [*TINY, "--nproc", ranks, "--max-steps", 3, "--out", tmp_path / name]
        result = forked(*command) if name == "forked" else subprocess.run([str(part) for part in [program("kiln"), *command]], capture_output=True,
                                                                          text=True)
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        losses.append([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert len(losses[0]) == 3 and losses[0] == losses[1]


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        forked(*TINY, "--max-steps", 10**6, "--out", tmp_path / "run", timeout=2)
    pid = loaded().process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        assert file.read() == ""
    assert forked("--version").returncode == 0


def test_what_libraries_read_at_their_start_needs_one():
    assert forked("--version", OMP_NUM_THREADS="3") is None
    assert "KILN_CPU" not in fork_server.read_at_start({"KILN_CPU": "avx2"})
