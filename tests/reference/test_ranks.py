"""kiln train on several ranks: real processes, started by --nproc, by torchrun or by hand, that fail in real ways."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import FULL, assert_refused, matrix, program, succeed
from interruptions import wait_until
from run_files import losses, num_steps, step_lines
from safetensors.torch import load_file, save_file
from test_extract import SIZE, write_pictures

OPTIONS = {"--model": "dit", "--hidden-size": 48, "--depth": 2, "--num-heads": 3, "--patch-size": 2, "--num-classes": 7,
           "--data": "synthetic", "--image-size": 64, "--global-batch": 6, "--objective": "epsilon", "--lr": 1e-3,
           "--threads": 1, "--ema-decay": 0.9, "--log-every": 1, "--peak-tflops": 1, "--seed": 11, "--device": "cpu"}
STEPS = 30 if FULL else 16
ENDLESS = 10**6


def command(out, steps, *extra):
    options = OPTIONS | dict(zip(extra[::2], extra[1::2]))
    pairs = [part for pair in options.items() for part in pair]
    return [str(part) for part in [program("kiln"), "train", *pairs, "--no-tensorboard", "--out", out, "--max-steps", steps]]


def train(out, steps, *extra):
    return succeed(*command(out, steps, *extra)[1:], timeout=120)


def refused(out, steps, extra, *parts):
    assert_refused(command(out, steps, *extra)[1:], *parts, timeout=120)


def start(arguments, **environment):
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {name: str(value) for name, value in environment.items()})


def wait_for_steps(process, out, steps):
    wait_until(lambda: num_steps(out) >= steps, limit_s=60, running=[process])


def processes_under(parent):
    """{rank: process id} of the ranks below a launcher."""
    ranks = {}
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            ranks |= {int(entry[5:]): child for entry in environment if entry.startswith(b"RANK=")}
    return ranks


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_same_losses(out, expected, tolerance=5e-6):
    mine = step_lines(out)
    assert [line["step"] for line in mine] == list(range(1, len(mine) + 1))
    assert losses(out) == pytest.approx(expected, rel=tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    train(out, STEPS)
    return out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_what_one_trains(alone, tmp_path, stage):
    extra = ["--micro-batch", 2, "--recompute", "all"] if stage % 2 else []
    result = train(tmp_path, STEPS, "--nproc", 2, "--zero-stage", stage, *extra)
    assert result.stderr == ""
    assert_same_losses(tmp_path, losses(alone))
    assert result.stdout.count(f"step {STEPS:>7}") == 1 and "2 ranks" in result.stdout  # rank 0 alone prints
    name = f"checkpoints/step-{STEPS:08}/model.safetensors"
    one, two = load_file(alone / name), load_file(tmp_path / name)
    assert one.keys() == two.keys()
    one, two = (torch.cat([weights[key].flatten() for key in sorted(weights)]) for weights in (one, two))
    assert (one - two).norm() <= 1e-4 * one.norm()


@pytest.mark.slow
def test_ranks_need_not_divide_the_batch(alone, tmp_path):
    steps = 8
    train(tmp_path, steps, "--nproc", 4, "--zero-stage", 3, "--micro-batch", 1, "--reduce-bucket-size", 20000)
    assert_same_losses(tmp_path, losses(alone)[:steps])


def torchrun(*arguments):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2", *arguments]


@pytest.mark.slow
def test_torchrun(alone, tmp_path):
    result = subprocess.run(torchrun(*command(tmp_path, STEPS, "--zero-stage", 2)), capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == 0, result.stderr
    assert_same_losses(tmp_path, losses(alone))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)")
def test_mpirun(alone, tmp_path):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "-x", f"MASTER_PORT={free_port()}"]
    result = subprocess.run([*mpirun, *command(tmp_path, STEPS, "--zero-stage", 2)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "2 ranks, 2 on this machine" in result.stdout
    assert_same_losses(tmp_path, losses(alone))


@pytest.mark.nothing_beside
def test_a_rank_that_dies_under_torchrun_ends_the_others(tmp_path):
    process = start(torchrun(*command(tmp_path, ENDLESS, "--zero-stage", 3)))
    wait_for_steps(process, tmp_path, 3)
    ranks = processes_under(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    while is_running(ranks[0]) and time.monotonic() < begin + 20:
        time.sleep(0.05)
    assert time.monotonic() - begin < 10
    _, stderr = process.communicate(timeout=30)
    assert process.returncode != 0


@pytest.mark.parametrize("target", matrix(["rank 1"], ["launcher"]))  # tests/paths stops launchers
@pytest.mark.slow
def test_a_stop_signal_checkpoints_all_ranks(alone, tmp_path, target):
    process = start(command(tmp_path, ENDLESS, "--nproc", 2, "--zero-stage", 2, "--checkpoint-every", 0))
    wait_for_steps(process, tmp_path, 5)
    os.kill(process.pid if target == "launcher" else processes_under(process.pid)[1], signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "stopped by a signal" in stdout
    stopped_at = step_lines(tmp_path)[-1]["step"]
    assert (tmp_path / f"checkpoints/step-{stopped_at:08}/train_state.json").exists()
    (whole := tmp_path / "whole").mkdir()
    steps = stopped_at + 10
    train(whole, steps, "--nproc", 2, "--zero-stage", 2)
    train(tmp_path, steps, "--nproc", 2, "--zero-stage", 2)
    assert losses(tmp_path) == losses(whole)


@pytest.mark.nothing_beside
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_ends_the_others(tmp_path, victim):
    process = start(command(tmp_path, ENDLESS, "--nproc", 3, "--zero-stage", 2 + victim, "--checkpoint-every", 3))
    wait_for_steps(process, tmp_path, 4)
    # Written while training goes on.
    wait_until(lambda: list(tmp_path.glob("checkpoints/step-*/train_state.json")), limit_s=60, running=[process])
    ranks = processes_under(process.pid)
    os.kill(ranks[victim], signal.SIGKILL)
    begin = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == 1
    assert f"rank {victim} of 3 was killed by signal 9" in stderr.splitlines()[-1]
    assert not [rank for rank, pid in ranks.items() if is_running(pid)]
    assert f"rank {victim} no longer answers" in stderr  # said by those that waited for it
    assert sum(" of 3: " in line for line in stderr.splitlines()) == 1, stderr  # once, though two waited
    reached = step_lines(tmp_path, killed=True)[-1]["step"]
    resumed = train(tmp_path, reached + 2, "--nproc", 2)
    assert "resuming" in resumed.stdout


@pytest.mark.slow
def test_finding_3_a_stranger_at_the_rendezvous_ends_no_run(tmp_path):
    process = start(command(tmp_path, ENDLESS, "--nproc", 2))
    wait_for_steps(process, tmp_path, 2)
    ranks = processes_under(process.pid)
    environment = Path(f"/proc/{ranks[0]}/environ").read_bytes().split(b"\0")
    port = next(int(entry[12:]) for entry in environment if entry.startswith(b"MASTER_PORT="))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))  # as from another machine
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    assert store.check(["kiln/0/alive/0"]), "it is the right place"
    for key in ("gone", "failed/0", "failed/1"):
        store.set(f"kiln/0/{key}", "; \x1b[2Jended from outside")
    os.kill(ranks[1], signal.SIGSTOP)  # rank 0 waits for it, and looks for notices once a second
    time.sleep(2.5)
    os.kill(ranks[1], signal.SIGCONT)
    wait_for_steps(process, tmp_path, num_steps(tmp_path) + 20)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped by a signal" in stdout and "from outside" not in stdout + stderr, stderr


@pytest.mark.nothing_beside
def test_the_launcher_blames_the_killed_rank_not_those_that_missed_it(tmp_path):
    """Though it hears of both at once."""
    process = start(command(tmp_path, ENDLESS, "--nproc", 2))
    wait_for_steps(process, tmp_path, 3)
    ranks = processes_under(process.pid)
    process.send_signal(signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    wait_until(lambda: not is_running(ranks[0]), limit_s=60)
    process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rank 1 of 2 was killed by signal 9" in stderr.splitlines()[-1], stderr


@pytest.mark.nothing_beside
def test_a_stopped_rank_is_named_by_the_watchdog(tmp_path):
    process = start(command(tmp_path, ENDLESS, "--nproc", 2, "--zero-stage", 3, "--collective-timeout", 3))
    wait_for_steps(process, tmp_path, 3)
    ranks = processes_under(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode == 1
    named = [line for line in stderr.splitlines() if "rank 1 no longer answers" in line]
    assert named and "rank 0 of 2" in named[0] and " of " in named[0] and "failed after" in named[0]
    assert not is_running(ranks[1])


def test_ranks_end_with_their_launcher(tmp_path):
    process = start(command(tmp_path, ENDLESS, "--nproc", 2))
    wait_for_steps(process, tmp_path, 3)
    ranks = processes_under(process.pid)
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not any(map(is_running, ranks.values())), limit_s=10)


def free_port():
    """Below those that the system gives to connections: one of these could take it before the ranks do."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def environment_of_ranks(world_size):
    """Rank 0 hosts the rendezvous."""
    port = free_port()
    names = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)}
    return [names | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def processes_by_hand(arguments_of_ranks, world_size):
    return [start(arguments, **environment)
            for arguments, environment in zip(arguments_of_ranks, environment_of_ranks(world_size))]


def start_by_hand(arguments_of_ranks):
    processes = processes_by_hand(arguments_of_ranks, len(arguments_of_ranks))
    return [(process.communicate(timeout=60), process.returncode) for process in processes]


@pytest.mark.slow
def test_rank_0_that_dies_with_the_rendezvous_is_named(tmp_path):
    processes = processes_by_hand([command(tmp_path, ENDLESS, "--zero-stage", 2)] * 2, 2)
    wait_for_steps(processes[0], tmp_path, 3)
    processes[0].kill()
    _, stderr = processes[1].communicate(timeout=30)
    processes[0].communicate(timeout=30)
    assert processes[1].returncode == 1
    assert "rank 0 no longer answers, with the rendezvous at 127.0.0.1:" in stderr, stderr


@pytest.mark.nothing_beside
def test_a_rank_that_does_not_come_is_named(tmp_path):
    processes = processes_by_hand([command(tmp_path, 5, "--collective-timeout", 4)] * 2, 4)
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    for rank, error in enumerate(errors):
        assert f"rank {rank} of 4 did not meet the others" in error and len(error.splitlines()) == 1, error
        assert "ranks 2, 3 did not come within 4 s" in error, error
    assert not (tmp_path / "log.jsonl").exists()


def test_an_option_that_is_impossible_on_one_rank_ends_all_at_once(tmp_path):
    on_disk = ["--offload-optimizer", "nvme", "--zero-stage", 1, "--nvme-path"]
    begin = time.monotonic()
    for (_, stderr), code in start_by_hand([command(tmp_path, 5, *on_disk, path) for path in (tmp_path, tmp_path / "absent")]):
        assert code == 1
        assert "rank 1 of 2: --nvme-path expects a folder that exists" in stderr.splitlines()[-1], stderr
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_weights_that_differ_among_ranks_are_named(alone, tmp_path):
    weights = load_file(alone / f"checkpoints/step-{STEPS:08}/model.safetensors")
    for name in ("one", "same", "other"):
        save_file(weights if name != "other" else {key: tensor + 1e-3 for key, tensor in weights.items()},
                  tmp_path / f"{name}.safetensors")

    def train_with(name):
        return start_by_hand([command(tmp_path / name, 2, "--weights", tmp_path / f"{file}.safetensors")
                              for file in ("one", name)])

    for (_, stderr), code in train_with("other"):
        assert code == 1 and "the content of --weights is" in stderr, stderr
    assert [code for _, code in train_with("same")] == [0, 0]


@pytest.mark.parametrize("option,values", [("--lr", (1e-3, 2e-3)), ("--micro-batch", (0, 2)), ("--zero-stage", (0, 1)),
                                           ("--checkpoint-every", (5, 6))])
def test_options_that_differ_among_ranks_are_named(tmp_path, option, values):
    results = start_by_hand([command(tmp_path, 5, option, value) for value in values])
    for (_, stderr), code in results:
        assert code == 1
        message = stderr.splitlines()[-1]
        assert "mixed versions or options among ranks" in message and option in message
        assert "on rank 0" in message and "on rank 1" in message
    assert not (tmp_path / "log.jsonl").exists()


def test_data_that_differ_among_ranks_are_named(tmp_path):
    for count in (6, 7):
        write_pictures(tmp_path / f"pictures-{count}", count)
    common = ["--autoencoder", "pixels", "--image-size", SIZE, "--patch-size", 4, "--data"]
    results = start_by_hand([command(tmp_path / "run", 5, *common, tmp_path / f"pictures-{count}") for count in (6, 7)])
    for (_, stderr), code in results:
        assert code == 1 and "the content of --data" in stderr, stderr


def test_a_run_folder_in_use_is_refused_and_a_killed_run_lets_go_of_it(tmp_path):
    process = start(command(tmp_path, ENDLESS, "--checkpoint-every", 3))
    wait_for_steps(process, tmp_path, 5)
    refused(tmp_path, ENDLESS, [], f"{tmp_path} is being written by another kiln train", f"(process {process.pid} on ")
    wait_for_steps(process, tmp_path, num_steps(tmp_path) + 2)  # unharmed
    process.kill()
    process.communicate(timeout=30)
    train(tmp_path, step_lines(tmp_path, killed=True)[-1]["step"] + 1)


@pytest.mark.slow
def test_damaged_checkpoints_are_told_and_never_started_over(tmp_path):
    train(tmp_path, 4, "--checkpoint-every", 2)
    states = [tmp_path / f"checkpoints/step-{step:08}/model.safetensors" for step in (2, 4)]
    size = states[1].stat().st_size
    os.truncate(states[1], size - 1)
    converted = succeed("convert", "--in", tmp_path, "--out", tmp_path / "model.safetensors")
    assert f"has {size - 1} bytes, expected {size}" in converted.stderr
    resumed = train(tmp_path, 5, "--checkpoint-every", 0)
    assert f"model.safetensors of {states[1].parent} has {size - 1} bytes, expected {size}" in resumed.stderr
    assert "resuming" in resumed.stdout and "from step 2 " in resumed.stdout
    for state in (states[0], tmp_path / "checkpoints/step-00000005/model.safetensors"):
        state.unlink()
    log = (tmp_path / "log.jsonl").read_text()
    refused(tmp_path, 5, [], f"none of the 3 checkpoints of {tmp_path} is whole")
    assert (tmp_path / "log.jsonl").read_text() == log


def test_an_error_of_one_rank_ends_all_and_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "run", 5, ["--nproc", 2], "cannot create --out", "rank 0 of 2")


def test_friction_31_an_error_of_all_ranks_is_told_once(tmp_path):
    refused(tmp_path / "run", 5, ["--nproc", 2, "--weights", tmp_path / "absent.safetensors"], "absent.safetensors")


@pytest.mark.slow
def test_a_time_limit_ends_all_ranks_after_the_same_step(tmp_path):
    result = train(tmp_path, ENDLESS, "--nproc", 2, "--zero-stage", 1, "--max-minutes", 0.02, "--lr-schedule", "cosine")
    assert "finished" in result.stdout
    rates = [line["lr"] for line in step_lines(tmp_path)]
    assert all(later <= earlier for earlier, later in zip(rates, rates[1:]))


def test_impossible_launches_are_one_line(tmp_path):
    cases = [(["--nproc", 8], {}, "--global-batch 6 is less than one image for each of 8 ranks"),
             (["--nproc", 2], {"RANK": 0, "WORLD_SIZE": 1}, "--nproc 2 does not fit the launcher"),
             ([], {"RANK": 5, "WORLD_SIZE": 2}, "RANK expects 0 to WORLD_SIZE - 1 (2), got 5"),
             ([], {"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": "x"}, "MASTER_PORT"),
             (["--zero-stage", 4], {}, "--zero-stage"), (["--collective-timeout", 0], {}, "--collective-timeout")]
    for extra, environment, expected in cases:
        process = start(command(tmp_path, 5, *extra), **environment)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1, extra
        assert expected in stderr and len(stderr.splitlines()) == 1, (extra, stderr)


def test_settings_without_effect_warn(tmp_path):
    result = train(tmp_path, 2, "--zero-stage", 1, "--prefetch-segments", 2)
    assert "--zero-stage has no effect on a single rank" in result.stderr
    assert "--prefetch-segments has no effect" in result.stderr
