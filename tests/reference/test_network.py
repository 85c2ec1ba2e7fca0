"""kiln train over a real network: two network namespaces as two machines, joined by a link that is slow, or is cut."""

import json
import os
import shutil
import subprocess
import time

import pytest
from conftest import succeed
from interruptions import wait_until
from run_files import checkpoint, losses, num_steps
from safetensors.torch import load_file
from test_ranks import ENDLESS, assert_same_losses, command, train

STEPS = 5
LINK_BYTES_PER_S = 2.5e6  # 20 Mbit/s


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def configure(*command):
    """What this kernel and this user do not allow (in a container, say) cannot be tested here."""
    result = run(*command)
    if result.returncode != 0:
        pytest.skip(f"{' '.join(map(str, command))}: {(result.stderr or result.stdout).strip()}")


class Machine:
    """A network namespace that lives as long as a process in it: no folder has to be mounted for its name, as ip netns
    wants it, which chroots and some containers refuse."""

    def __init__(self):
        self.holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo ready; exec sleep 3600"],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline().strip() != "ready":
            pytest.skip(f"unshare --net: {self.holder.stderr.read().strip()}")

    def inside(self, *command):
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *map(str, command)]

    def end(self):
        self.holder.kill()
        self.holder.communicate()


@pytest.fixture
def machines():
    """Two namespaces, joined by a link."""
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} of iproute2 and util-linux: not installed")
    made = []
    try:
        for _ in range(2):
            made.append(Machine())
        # Made inside: the name is taken nowhere else.
        configure(*made[0].inside("ip", "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns",
                                  made[1].holder.pid))
        for i, machine in enumerate(made):
            configure(*machine.inside("ip", "addr", "add", f"10.213.7.{i + 1}/24", "dev", "link0"))
            configure(*machine.inside("ip", "link", "set", "link0", "up"))
            configure(*machine.inside("ip", "link", "set", "lo", "up"))
        yield made
    finally:
        for machine in made:
            machine.end()


def slow_down(machine):
    configure(*machine.inside("tc", "qdisc", "add", "dev", "link0", "root", "tbf", "rate", "20mbit", "burst", "32kb",
                              "latency", "400ms"))


@pytest.fixture
def say(capsys):
    """Told whether or not the test passes: where it could run is worth knowing."""

    def tell(text):
        with capsys.disabled():
            print(f"\n{text}")

    return tell


def start_on(machines, out, steps, *extra, **variables_of_job):
    ranks = []
    for rank, machine in enumerate(machines):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "10.213.7.1",
                     "MASTER_PORT": 29511} | variables_of_job
        ranks.append(subprocess.Popen(machine.inside(*command(out, steps, *extra)), text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      env=os.environ | {key: str(value) for key, value in variables.items()}))
    return ranks


@pytest.mark.slow
def test_a_slow_link_changes_nothing_but_the_time(machines, tmp_path, say):
    for machine in machines:
        slow_down(machine)
    alone, out = tmp_path / "alone", tmp_path / "run"
    train(alone, STEPS)
    for rank, process in enumerate(start_on(machines, out, STEPS, "--zero-stage", 2)):
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        assert ("whoever reaches 10.213.7.1:29511 can end them" in stderr) == (rank == 0), stderr
    assert_same_losses(out, losses(alone))
    folder = checkpoint(out, STEPS)
    num_weights = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    sent = STEPS * 4 * num_weights  # bytes each way: half of the f32 gradients to be summed, half of the weights
    seconds = json.loads((folder / "train_state.json").read_text())["train_seconds"]
    assert seconds > 0.8 * sent / LINK_BYTES_PER_S
    say(f"two network namespaces, 20 Mbit/s: {sent / 1e6:.1f} MB each way in {seconds:.1f} s, losses as on one rank")


@pytest.mark.slow
def test_a_cut_link_ends_both_sides_and_keeps_the_checkpoint(machines, tmp_path, say):
    ranks = start_on(machines, tmp_path, ENDLESS, "--zero-stage", 2, "--collective-timeout", 6, "--checkpoint-every", 3,
                     KILN_JOB_SECRET="of a job between machines")
    # A checkpoint is written while training goes on.
    wait_until(lambda: num_steps(tmp_path) >= 5 and list(tmp_path.glob("checkpoints/step-*")), limit_s=60, running=ranks)
    assert run(*machines[0].inside("ip", "link", "set", "link0", "down")).returncode == 0
    begin = time.monotonic()
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    seconds = time.monotonic() - begin
    assert seconds < 40
    assert [process.returncode for process in ranks] == [1, 1], errors
    for rank, error in enumerate(errors):
        assert "have no secret" not in error, error
        assert f"rank {rank} of 2" in error and "failed after" in error, error
    assert "rank 1 no longer answers" in errors[0]
    assert "rank 0 no longer answers, with the rendezvous at 10.213.7.1:29511" in errors[1]
    succeed("inspect", max((tmp_path / "checkpoints").iterdir()) / "model.safetensors")
    say(f"two network namespaces, the link cut: both sides ended {seconds:.1f} s later (--collective-timeout 6)")
