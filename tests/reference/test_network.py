"""kiln train over a real network: two network namespaces as two machines, joined by a link that is slow, or is cut."""

import json
import os
import shutil
import subprocess
import time

import pytest
from conftest import program
from safetensors.torch import load_file
from test_ranks import ENDLESS, assert_same_losses, command, lines_of, losses, train

STEPS = 5
LINK_BYTES_PER_S = 2.5e6  # 20 Mbit/s


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def configure(*command):
    """What this kernel and this user do not allow (in a container, say) cannot be tested here."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {result.stderr.strip()}")


@pytest.fixture
def machines():
    """Names of two namespaces: a slow link joins them."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("iproute2 is not installed")
    names = [f"kiln-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            configure("ip", "netns", "add", name)
        configure("ip", "link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        for i, name in enumerate(names):
            configure("ip", "-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "link0")
            configure("ip", "-n", name, "link", "set", "link0", "up")
            configure("ip", "-n", name, "link", "set", "lo", "up")
            configure("tc", "-n", name, "qdisc", "add", "dev", "link0", "root", "tbf", "rate", "20mbit", "burst", "32kb",
                      "latency", "400ms")
            configure("ip", "netns", "exec", name, "true")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def start_on(machines, out, steps, *extra):
    ranks = []
    for rank, name in enumerate(machines):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "10.213.7.1",
                     "MASTER_PORT": 29511}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", name, *command(out, steps, *extra)], text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      env=os.environ | {key: str(value) for key, value in variables.items()}))
    return ranks


def test_a_slow_link_changes_nothing_but_the_time(machines, tmp_path):
    alone, out = tmp_path / "alone", tmp_path / "run"
    assert train(alone, STEPS).returncode == 0
    for process in start_on(machines, out, STEPS, "--zero-stage", 2):
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    assert_same_losses(out, losses(alone))
    checkpoint = out / f"checkpoints/step-{STEPS:08}"
    num_weights = sum(weight.numel() for weight in load_file(checkpoint / "model.safetensors").values())
    sent = STEPS * 4 * num_weights  # bytes each way: half of the f32 gradients to be summed, half of the weights
    seconds = json.loads((checkpoint / "train_state.json").read_text())["train_seconds"]
    assert seconds > 0.8 * sent / LINK_BYTES_PER_S


def test_a_cut_link_ends_both_sides_and_keeps_the_checkpoint(machines, tmp_path):
    ranks = start_on(machines, tmp_path, ENDLESS, "--zero-stage", 2, "--collective-timeout", 6, "--checkpoint-every", 3)
    deadline = time.monotonic() + 60
    while len(lines_of(tmp_path)) < 5:
        assert time.monotonic() < deadline and all(process.poll() is None for process in ranks)
        time.sleep(0.05)
    assert ip("-n", machines[0], "link", "set", "link0", "down").returncode == 0
    begin = time.monotonic()
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert time.monotonic() - begin < 40
    assert [process.returncode for process in ranks] == [1, 1], errors
    for rank, error in enumerate(errors):
        assert f"rank {rank} of 2" in error and "failed after" in error, error
    assert "rank 1 no longer answers" in errors[0]
    assert "rank 0 no longer answers, with the rendezvous at 10.213.7.1:29511" in errors[1]
    verified = subprocess.run([program("kiln"), "inspect", str(max((tmp_path / "checkpoints").iterdir()) / "model.safetensors")],
                              capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
