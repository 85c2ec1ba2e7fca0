"""kiln train on two hosts, which are network namespaces, over a link that this test carries packet by packet: it loses some, delays
all, and is cut for half a minute. No kernel needs a module for that but tun."""

import collections
import ctypes
import fcntl
import os
import random
import selectors
import shutil
import signal
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from run_files import losses, num_steps
from test_network import Machine, configure, say, start_on  # noqa: F401 (a fixture)
from test_ranks import ENDLESS, assert_same_losses, train

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
MOST_PACKET = 1 << 16
JOB = {"MASTER_ADDR": "10.213.8.1", "KILN_JOB_SECRET": "of a job between hosts"}
CUT_S, END_S = 30, 60


def device_of(machine):
    """A network device of the machine: what is read from the descriptor is what the machine sends, what is written it receives."""

    def opened():  # in a thread of its own, which stays in that namespace to its end
        with open(f"/proc/{machine.holder.pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"link0", IFF_TUN | IFF_NO_PI))
        return device

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(opened).result()
        except OSError as error:
            pytest.skip(f"/dev/net/tun: {error}")


class Link:
    """Carries packets between two devices until it is ended. `loss`: the share that is lost; `delay_s`: of each packet."""

    def __init__(self, devices):
        self.devices, self.loss, self.delay_s, self.is_cut = devices, 0.0, 0.0, False
        self.chance, self.carried, self.lost = random.Random(7), 0, 0
        self.is_over, self.thread = False, threading.Thread(target=self.carry)
        self.thread.start()

    def end(self):
        self.is_over = True
        self.thread.join()
        for device in self.devices:
            os.close(device)

    def carry(self):
        waiting = collections.deque()  # (when it arrives, where, packet), the earliest first as all have one delay
        with selectors.DefaultSelector() as ready:
            for device, other in zip(self.devices, self.devices[::-1]):
                ready.register(device, selectors.EVENT_READ, other)
            while not self.is_over:
                left_s = waiting[0][0] - time.monotonic() if waiting else 0.1
                for key, _ in ready.select(max(0.0, min(left_s, 0.1))):
                    self.take(key.fd, key.data, waiting)
                while waiting and waiting[0][0] <= time.monotonic():
                    _, other, packet = waiting.popleft()
                    try:
                        os.write(other, packet)
                    except OSError:  # the machine is full, or goes down: a packet that is lost
                        self.lost += 1

    def take(self, device, other, waiting):
        while True:
            try:
                packet = os.read(device, MOST_PACKET)
            except BlockingIOError:
                return
            if self.is_cut or self.chance.random() < self.loss:
                self.lost += 1
                continue
            self.carried += 1
            waiting.append((time.monotonic() + self.delay_s, other, packet))


@pytest.fixture
def hosts():
    """(machines, link)"""
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} of iproute2 and util-linux: not installed")
    machines, devices, link = [], [], None
    try:
        for number in (1, 2):
            machines.append(Machine())
            devices.append(device_of(machines[-1]))
            configure(*machines[-1].inside("ip", "addr", "add", f"10.213.8.{number}/24", "dev", "link0"))
            configure(*machines[-1].inside("ip", "link", "set", "link0", "up"))
            configure(*machines[-1].inside("ip", "link", "set", "lo", "up"))
        link = Link(devices)
        yield machines, link
    finally:
        if link:
            link.end()
        else:
            for device in devices:
                os.close(device)
        for machine in machines:
            machine.end()


class Run:
    """Ranks, one on each host, that are gone when the test is over."""

    def __init__(self, machines, out, steps, *options):
        self.ranks = start_on(machines, out, steps, "--zero-stage", 2, *options, **JOB)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def is_alive(self):
        return all(process.poll() is None for process in self.ranks)

    def has_ended(self):
        return all(process.poll() is not None for process in self.ranks)

    def ends_well(self):
        for process in self.ranks:
            _, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors


def saved_steps(out):
    return [int(path.name[5:]) for path in out.glob("checkpoints/step-*")]


@pytest.mark.slow
def test_a_link_that_loses_and_delays_changes_nothing_but_the_time(hosts, tmp_path, say):  # noqa: F811
    machines, link = hosts
    steps, alone, out = 6, tmp_path / "alone", tmp_path / "run"
    train(alone, steps)
    link.loss, link.delay_s = 0.01, 0.01
    begin = time.monotonic()
    with Run(machines, out, steps) as run:
        run.ends_well()
    assert_same_losses(out, losses(alone))
    assert link.lost > 0
    say(f"two hosts, 1 % of the packets lost and 10 ms each way: {steps} steps in {time.monotonic() - begin:.1f} s, {link.carried} packets carried and "
        f"{link.lost} lost, losses as on one rank")


@pytest.mark.parametrize("options", [[], ["--collective-timeout", 10]], ids=["patient", "impatient"])
@pytest.mark.slow
def test_a_link_that_is_cut_for_half_a_minute_is_outlived_or_named_by_both(hosts, tmp_path, say, options):  # noqa: F811
    machines, link = hosts
    alone, out = tmp_path / "alone", tmp_path / "run"
    with Run(machines, out, ENDLESS, "--checkpoint-every", 3, *options) as run:
        deadline = time.monotonic() + 60
        while num_steps(out) < 5 or not saved_steps(out):
            assert time.monotonic() < deadline and run.is_alive(), [process.communicate()[1] for process in run.ranks if process.poll() is not None]
            time.sleep(0.05)
        link.is_cut, begin, steps_at_end = True, time.monotonic(), None
        while not run.has_ended():
            passed = time.monotonic() - begin
            if link.is_cut and passed >= CUT_S:
                link.is_cut, steps_at_end = False, num_steps(out)
            if steps_at_end is not None and run.is_alive() and num_steps(out) >= steps_at_end + 3:
                break
            assert passed < CUT_S + END_S, "the run neither goes on nor ends"
            time.sleep(0.05)
        seconds = time.monotonic() - begin
        if run.has_ended():
            errors = [process.communicate()[1] for process in run.ranks]
            assert [process.returncode for process in run.ranks] == [1, 1], errors
            assert seconds < END_S
            for rank, error in enumerate(errors):
                assert f"rank {1 - rank} no longer answers" in error and "have no secret" not in error, errors
            ending = f"both ranks ended {seconds:.1f} s after the cut and named the other host"
        else:
            for process in run.ranks:
                process.send_signal(signal.SIGTERM)
            run.ends_well()
            ending = f"the run went on {seconds - CUT_S:.1f} s after the link was whole again"
    link.is_cut = False
    steps = max(saved_steps(out)) + 4
    with Run(machines, out, steps) as run:
        run.ends_well()
    train(alone, steps)
    assert_same_losses(out, losses(alone))
    say(f"two hosts, the link cut for {CUT_S} s {' '.join(map(str, options))}: {ending}; resumed, the losses are those of one rank")
