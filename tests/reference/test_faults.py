"""Ranks killed with -9 in a reduction, in a save and while state is written to the disk that it is offloaded to.

None of the others hangs, no torn checkpoint is picked up, and what resumes ends in the bits of a run that nobody interrupted
and that offloads nothing. Before a kill all ranks are stopped, so that the moment is what it is said to be on any machine;
`-s` prints each kill."""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import FULL
from interruptions import PATIENCE_S, wait_until
from run_files import assert_no_leftovers, log_lines, losses
from run_files import saved as saved_files
from test_ranks import ENDLESS, command, environment_of_ranks, train

MOST_ATTEMPTS = 12  # of a kill in a reduction: which collective the ranks are in is seen only afterwards
LEAST_WRITE = 1 << 15  # bytes at once: more than the log and a checkpoint's small files
SAVED_EVERY = 10  # steps of the uninterrupted run

ALL_ON_NVME = ["--zero-stage", 3, "--offload-optimizer", "nvme", "--offload-params", "nvme"]
DIVISIONS = {  # ranks, options
    "1 rank, all on NVMe": (1, ALL_ON_NVME),
    "2 ranks, stage 2, optimizer on NVMe": (2, ["--zero-stage", 2, "--offload-optimizer", "nvme"]),
    "2 ranks, stage 3, all on NVMe": (2, ALL_ON_NVME),
    "3 ranks, stage 1, optimizer on NVMe": (3, ["--zero-stage", 1, "--offload-optimizer", "nvme"]),
    "2 ranks, stage 2": (2, ["--zero-stage", 2]),
}


def moments_of(division):
    """Where no gather comes between, a rank waits for the others in a reduction or for the losses."""
    ranks, options = DIVISIONS[division]
    moments = ["save"]
    if "nvme" in options:
        moments.append("NVMe write")
    if ranks > 1:
        moments.append("collective" if 3 in options else "reduction")
    return moments



def state_of(pid):
    """Of its main thread: S sleeping, T stopped, Z dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def written_by(pid):
    """Bytes given to disks so far; 0 where the system does not tell."""
    try:
        found = re.search(r"^write_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return 0
    return int(found[1]) if found else 0


def lines_so_far(out):
    return log_lines(out, killed=True) if (out / "log.jsonl").exists() else []


def num_resumes(out):
    return sum(line.get("event") == "resume" for line in lines_so_far(out))


def newest_step(out):
    return max((int(path.name[5:]) for path in out.glob("checkpoints/step-*")), default=0)


def is_saving(out):
    return any(out.glob("checkpoints/.partial-*"))


class Ranks:
    """Started by hand, so that no launcher ends them when one dies. They train until they are ended."""

    def __init__(self, out, division, *options):
        world_size, more = DIVISIONS[division]
        self.out, self.resumes = out, num_resumes(out) + (newest_step(out) > 0)
        self.saved = newest_step(out)
        arguments = command(out, ENDLESS, *more, "--nvme-path", out.parent, "--keep-checkpoints", 2, *options)
        self.messages = [out.parent / f"{out.name}.stderr-{rank}" for rank in range(world_size)]
        self.processes = []
        for environment, path in zip(environment_of_ranks(world_size), self.messages):
            with path.open("w") as file:
                self.processes.append(subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=file,
                                                       env=os.environ | environment))

    def steps(self):
        """That these processes have logged."""
        assert all(process.poll() is None for process in self.processes), self.said()
        lines = lines_so_far(self.out)
        resumed = [i for i, line in enumerate(lines) if line.get("event") == "resume"]
        if len(resumed) < self.resumes:
            return 0
        if resumed:
            assert lines[resumed[-1]]["step"] == self.saved  # the newest one, none of which is torn
        return sum("loss" in line for line in lines[resumed[-1] if resumed else 0:])

    def freeze(self, ranks=None):
        stopped = [self.processes[rank] for rank in (range(len(self.processes)) if ranks is None else ranks)]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        for process in stopped:
            wait_until(lambda pid=process.pid: state_of(pid) in "TZ", 0)

    def thaw(self):
        for process in self.processes:
            process.send_signal(signal.SIGCONT)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def said(self):
        return "".join(path.read_text() for path in self.messages)


def arrive_in_save(ranks, victim, chance):
    """A random time after it has begun, less each time that it was over by then."""
    window_s = 0.02
    while True:
        wait_until(lambda: is_saving(ranks.out), 0)
        time.sleep(chance.uniform(0, window_s))
        ranks.freeze()
        if is_saving(ranks.out):
            return "save"
        ranks.thaw()
        window_s /= 2


def arrive_in_write(ranks, victim, chance):
    """When the victim has just begun to write and no checkpoint (nor what follows one) is being written."""
    pid = ranks.processes[victim].pid
    begin, last, quiet_from, counts = ranks.steps(), written_by(pid), 0, False
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline
        now, steps = written_by(pid), ranks.steps()
        if is_saving(ranks.out):
            quiet_from = steps + 2
        elif now - last >= LEAST_WRITE and steps >= quiet_from:
            ranks.freeze()
            return "NVMe write"
        counts = counts or now - last >= LEAST_WRITE
        if steps >= begin + 20 and not counts:
            ranks.freeze()
            return "NVMe write (at random: the system does not count)"
        last = now


def arrive_in_collective(ranks, victim, chance):
    """The others are stopped somewhere in a step: the victim goes on until it needs them, and sleeps."""
    ranks.freeze([rank for rank in range(len(ranks.processes)) if rank != victim])
    in_a_row = 0

    def sleeps():
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if state_of(ranks.processes[victim].pid) == "S" else 0
        return in_a_row >= 15

    wait_until(sleeps, 0.002)
    return "collective"


def strike(out, division, moment, victims, chance):
    """Kills the ranks `victims`. Returns the moment and what the others were waiting for."""
    every = {"save": 1, "NVMe write": 25}.get(moment, 4)
    ranks = Ranks(out, division, "--checkpoint-every", every, "--checkpoint-copy", chance.choice(["memory", "page-cache"]))
    arrive = {"save": arrive_in_save, "NVMe write": arrive_in_write}.get(moment, arrive_in_collective)
    try:
        least = chance.randrange(1, 8)
        wait_until(lambda: ranks.steps() >= least and newest_step(out) > 0, 0.001)
        time.sleep(chance.uniform(0, 0.02))
        arrived = arrive(ranks, victims[0], chance)
        for victim in victims:
            ranks.processes[victim].kill()
        begin = time.monotonic()
        ranks.thaw()
        codes = [process.wait(timeout=PATIENCE_S) for process in ranks.processes]
        assert time.monotonic() - begin < 30
    finally:
        ranks.end()
    assert codes == [-signal.SIGKILL if rank in victims else 1 for rank in range(len(codes))], ranks.said()
    found = re.search(r"rank \d of \d: (.+?)(?: of (?:embed|blocks\.\d+|final))? failed after", ranks.said())
    assert found or len(victims) == len(codes), ranks.said()
    waiting = found[1] if found else "-"
    return "reduction" if "of the gradients" in waiting and arrived == "collective" else arrived, waiting


class Uninterrupted:
    """Runs of each division that keep all of their state in memory, as long as they are needed."""

    def __init__(self, folder):
        self.folder, self.runs = folder, {}

    def of(self, division, steps):
        ranks, options = DIVISIONS[division]
        have, out = self.runs.get(division, (0, None))
        if have < steps:
            have = max(60, 2 * steps)
            out = self.folder / f"{len(list(self.folder.iterdir()))}"
            train(out, have, "--nproc", ranks, *options[:2], "--checkpoint-every", SAVED_EVERY)
            self.runs[division] = (have, out)
        return out


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


def kill_and_resume(out, division, strikes, uninterrupted, chance):
    """Several kills of one run, which then ends by itself as if there had been none."""
    world_size, options = DIVISIONS[division]
    for moment, victims in strikes:
        for _ in range(MOST_ATTEMPTS):
            arrived, waiting = strike(out, division, moment, victims, chance)
            print(f"{division} | {arrived} | {f'rank {victims[0]}' if len(victims) == 1 else 'all'} | {waiting}")
            if moment != "reduction" or arrived == moment:
                break
        else:
            pytest.fail(f"none of {MOST_ATTEMPTS} kills was in a reduction")
    saved = newest_step(out)
    steps = (max(saved, *(line["step"] for line in lines_so_far(out))) // SAVED_EVERY + 1) * SAVED_EVERY
    result = train(out, steps, "--nproc", world_size, *options, "--nvme-path", out.parent)
    assert f"from step {saved} " in result.stdout
    expected = uninterrupted.of(division, steps)
    assert saved_files(out, steps) == saved_files(expected, steps)
    assert losses(out) == losses(expected)[:steps]
    assert_no_leftovers(out)
    assert not list(out.parent.glob(".kiln-state-*"))
    shutil.rmtree(out)


@pytest.mark.parametrize("division, strikes", [
    ("1 rank, all on NVMe", [("save", [0]), ("NVMe write", [0])]),
    ("2 ranks, stage 2, optimizer on NVMe", [("reduction", [1]), ("NVMe write", [0]), ("reduction", [0])]),
    ("2 ranks, stage 3, all on NVMe", [("NVMe write", [1]), ("save", [1]), ("save", [0])]),
], ids=["1-rank", "stage-2", "stage-3"])
@pytest.mark.slow
def test_a_killed_run_ends_in_the_bits_of_one_that_was_not(uninterrupted, tmp_path, division, strikes):
    """Every moment, and every rank; with --full every rank in each."""
    strikes = strikes if FULL else strikes[:2]
    kill_and_resume(tmp_path / "run", division, strikes, uninterrupted, random.Random(str(strikes)))


def ten_strikes(division, chance):
    """Every rank in every moment, and all ranks at once, as far as ten go and again from the beginning."""
    world_size, moments = DIVISIONS[division][0], moments_of(division)
    strikes = [(moment, [rank]) for moment in moments for rank in range(world_size)]
    if world_size > 1:
        strikes += [(moment, list(range(world_size))) for moment in moments if moment in ("save", "NVMe write")]
    ten = list(itertools.islice(itertools.cycle(strikes), 10))
    chance.shuffle(ten)
    return ten


@pytest.mark.skipif(not FULL, reason="50 kills: scripts/test --full")
@pytest.mark.parametrize("division", DIVISIONS)
def test_fifty_kills(uninterrupted, tmp_path, division):
    chance = random.Random(division)
    strikes = ten_strikes(division, chance)
    for half in (strikes[:5], strikes[5:]):
        kill_and_resume(tmp_path / "run", division, half, uninterrupted, chance)
