"""Long runs of kiln train: pictures with captions, two ranks, grids and evaluations.

Usage: .venv/bin/python tests/reference/soak.py [--minutes 45] [--only undisturbed | disturbed] [--record FILE]

Undisturbed, the memory and the open files of each rank must stay what they are after the first tenth: less than 1 % more. Disturbed,
the disk fills and empties, processes get SIGTERM and SIGKILL, and a picture is changed under the run and put back, all at random; then
the run must have the bytes of one that nothing disturbed. That needs root, for a small disk in memory. The record is Markdown, as
benchmarks/results keeps it; status 1 says that something was not as it should be."""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
import torch
from conftest import REPOSITORY, complaints, program
from PIL import Image
from test_checkpoints import STATE, checkpoint
from test_faults import newest_step, wait_until
from test_ranks import ENDLESS, is_running, processes_under
from test_text_store import FAMILIES as ENCODERS
from test_text_training import FAMILIES, SIZE
from test_tokenizers import MAKERS

NUM_PICTURES, LEAST_DISK = 48, "48m"
PATIENCE_S = 240  # for a start, for the end of a run and for a checkpoint
MOST_GROWTH = 0.01
DISTURBANCES = ("SIGTERM", "SIGKILL", "a full disk", "a changed picture")


def make_inputs(folder):
    """Pictures with captions, and an encoder of them."""
    chance = np.random.default_rng(3)
    (folder / "pictures").mkdir()
    with open(folder / "pictures/metadata.jsonl", "w") as lines:
        for index in range(NUM_PICTURES):
            Image.fromarray(chance.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(folder / f"pictures/{index:02}.png")
            lines.write(json.dumps({"file_name": f"{index:02}.png", "text": f"picture {index} of {NUM_PICTURES}"}) + "\n")
    kind, _, model_class, config = ENCODERS[FAMILIES["pixart"][0]]
    (folder / "encoder").mkdir()
    MAKERS[kind](folder / "encoder")
    torch.manual_seed(0)
    model_class(config).eval().save_pretrained(folder / "encoder")


def command(inputs, out, steps, *more):
    options = ["--data", inputs / "pictures", "--autoencoder", "pixels", "--text-encoder", inputs / "encoder", "--model", "pixart", *FAMILIES["pixart"][1],
               "--image-size", SIZE, "--global-batch", 8, "--lr", 1e-4, "--ema-decay", 0.99, "--seed", 5, "--text-dropout-prob", 0.1, "--threads", 1,
               "--device", "cpu", "--peak-tflops", 1, "--nproc", 2, "--zero-stage", 2, "--keep-checkpoints", 2, "--log-every", 100]  # fmt: skip
    return [str(part) for part in [program("kiln"), "train", *options, "--out", out, "--max-steps", steps, *more]]


def watching(inputs, every):
    return ["--sample-every", every, "--num-samples", 4, "--num-sampling-steps", 4, "--evaluate-every", every, "--evaluate-images", 16,
            "--evaluate-reference", inputs / "pictures", "--checkpoint-every", every]  # fmt: skip


class Training:
    """A launcher and its two ranks. `said` is what they wrote to stderr."""

    def __init__(self, arguments, messages):
        self.messages = messages
        with messages.open("w") as file:
            self.launcher = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)
        self.ranks = {}
        wait_until(self.has_ranks, 0.05)

    def has_ranks(self):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process that ends while it is looked at
            self.ranks = processes_under(self.launcher.pid)
        return len(self.ranks) == 2 or self.has_ended()

    def has_ended(self):
        return self.launcher.poll() is not None

    def said(self):
        return self.messages.read_text(errors="replace")

    def end(self, sent=None):
        """Waits until no process is left. Returns the launcher's status; None if it did not end, and had to be ended."""
        if sent:
            self.launcher.send_signal(sent)
        try:
            status = self.launcher.wait(PATIENCE_S)
            wait_until(lambda: not any(map(is_running, self.ranks.values())), 0.05)
            return status
        except (subprocess.TimeoutExpired, AssertionError):
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGKILL)
            for rank in self.ranks.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)


def use_of(pid):
    """(bytes of memory that are no file's, open files)"""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * kib, len(os.listdir(f"/proc/{pid}/fd"))


def growth(samples, which):
    """(mean early, mean late, share): of the time from a tenth to three tenths, and of the last fifth."""
    values = [sample[which] for sample in samples]
    early, late = values[len(values) // 10 : 3 * len(values) // 10], values[4 * len(values) // 5 :]
    early, late = sum(early) / len(early), sum(late) / len(late)
    return early, late, late / early - 1


def undisturbed(folder, minutes, most_growth):
    """Returns (lines of the record, problems)."""
    inputs, out, every_s = folder, folder / "long", min(5.0, minutes)
    training = Training(command(inputs, out, ENDLESS, *watching(inputs, 400)), folder / "long.stderr")
    samples = {rank: [] for rank in training.ranks}
    begin = time.monotonic()
    while time.monotonic() < begin + 60 * minutes and not training.has_ended():
        time.sleep(every_s)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):  # it has just ended
            for rank, pid in training.ranks.items():
                samples[rank].append(use_of(pid))
    ended_early, status = training.has_ended(), training.end(signal.SIGTERM)
    problems = [f"it ended by itself with status {status}: {training.said()[-500:]}"] if ended_early or status != 0 else []
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    evaluations, grids = sum(line.get("event") == "evaluation" for line in lines), len(list(out.glob("samples/*.png")))
    rows = [f"{minutes:g} minutes, {newest_step(out)} steps, {evaluations} evaluations, {grids} grids.", "",
            "| rank | memory early | late | growth | open files early | late |", "|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for rank in sorted(samples):
        early, late, share = growth(samples[rank], 0)
        files_early, files_late, more_files = growth(samples[rank], 1)
        rows.append(f"| {rank} | {early / 1e6:.1f} MB | {late / 1e6:.1f} MB | {100 * share:+.2f} % | {files_early:.1f} | {files_late:.1f} |")
        if share >= most_growth or more_files >= most_growth:
            problems.append(f"rank {rank} grows: memory {100 * share:+.2f} %, open files {100 * more_files:+.2f} %")
    if evaluations < 2 or grids < 2:
        problems.append(f"only {evaluations} evaluations and {grids} grids")
    return rows, problems


@contextlib.contextmanager
def small_disk(folder):
    """A disk of its own, in memory, that can be filled."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={LEAST_DISK}", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        sys.exit(f"soak.py: a small disk needs root: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class Disturbed:
    """A run on a small disk. Each disturbance returns a problem, or "" where all was as it should be."""

    def __init__(self, inputs, disk, chance):
        self.inputs, self.disk, self.out, self.chance = inputs, disk, disk / "run", chance
        self.count, self.endings, self.training, self.number = Counter(), Counter(), None, 0

    def start(self):
        self.number += 1
        self.training = Training(command(self.inputs, self.out, ENDLESS, *watching(self.inputs, 50)), self.inputs / f"disturbed-{self.number}.stderr")

    def goes_on(self):
        """Starts it where it has ended, and waits for a checkpoint and a little more. Returns a problem."""
        if self.training is None or self.training.has_ended():
            self.start()
        saved = newest_step(self.out)
        wait_until(lambda: newest_step(self.out) > saved or self.training.has_ended(), 0.05)
        if not self.training.has_ended():
            time.sleep(self.chance.uniform(0, 3))
        return f"it ended undisturbed: {self.training.said()[-700:]}" if self.training.has_ended() else ""

    def problem_of(self, status, *names):
        """Of a run that was to end with a line that has one of these names."""
        said, lines = self.training.said(), complaints(self.training.said())
        if status != 1 or not 1 <= len(lines) <= 3 or not any(name in said for name in names):
            return f"status {status}: {said[-700:]}"
        return ""

    def disturb(self, how):
        self.count[how] += 1
        return {"SIGTERM": self.term, "SIGKILL": self.kill, "a full disk": self.fill, "a changed picture": self.change}[how]()

    def term(self):
        status = self.training.end(signal.SIGTERM)
        self.endings["with a checkpoint"] += 1
        return f"status {status}: {self.training.said()[-700:]}" if status != 0 else ""

    def kill(self):
        victim = self.chance.choice([self.training.launcher.pid, *self.training.ranks.values()])
        os.kill(victim, signal.SIGKILL)
        status = self.training.end()
        if victim == self.training.launcher.pid:
            self.endings["without their launcher"] += 1
            return "" if status == -signal.SIGKILL else f"status {status}"
        self.endings["without a rank"] += 1
        return self.problem_of(status, "killed by signal 9", "no longer answers")

    def fill(self):
        filler, until = self.disk / "filler", time.monotonic() + 60
        try:
            with filler.open("ab", buffering=0) as file:
                while not self.training.has_ended() and time.monotonic() < until:
                    with contextlib.suppress(OSError):  # it is full; what the run frees is taken, too
                        while True:
                            file.write(bytes(1 << 16))
                    time.sleep(0.02)
        finally:
            filler.unlink()
        if not self.training.has_ended():
            self.endings["not at all"] += 1
            return ""
        self.endings["on a full disk"] += 1
        return self.problem_of(self.training.end(), str(self.out))

    def change(self):
        path = self.chance.choice(sorted((self.inputs / "pictures").glob("*.png")))
        content, beside = path.read_bytes(), self.inputs / "changed"

        def put(new):
            beside.write_bytes(new)
            os.replace(beside, path)

        put(content[:-1] + bytes([content[-1] ^ 1]))
        try:
            status = self.training.end()
        finally:
            put(content)
        self.endings["with the name of a changed picture"] += 1
        return self.problem_of(status, path.name)


def disturbed(folder, minutes, seed):
    """Returns (lines of the record, problems)."""
    chance, problems = random.Random(seed), []
    with small_disk(folder / "disk") as disk:
        run, begin, order = Disturbed(folder, disk, chance), time.monotonic(), []
        try:
            while time.monotonic() < begin + 60 * minutes and len(problems) < 5:
                if problem := run.goes_on():
                    problems.append(problem)
                    continue
                order = order or chance.sample(DISTURBANCES, len(DISTURBANCES))
                how = order.pop()
                if problem := run.disturb(how):
                    problems.append(f"{how}: {problem}")
            if problem := run.goes_on():
                problems.append(problem)
        finally:
            status = run.training.end(None if run.training.has_ended() else signal.SIGTERM) if run.training else 0
        if status != 0:
            problems.append(f"the last end has status {status}: {run.training.said()[-500:]}")
        steps = newest_step(run.out)
        found = {name: (checkpoint(run.out, steps) / name).read_bytes() for name in STATE}
    whole = folder / "undisturbed"
    result = subprocess.run(command(folder, whole, steps), capture_output=True, text=True)
    if result.returncode != 0:
        return [], [*problems, f"the run to compare with: {result.stderr[-500:]}"]
    different = [name for name in STATE if (checkpoint(whole, steps) / name).read_bytes() != found[name]]
    if different:
        problems.append(f"other bytes than undisturbed at step {steps}: {', '.join(different)}")
    rows = [f"{minutes:g} minutes, seed {seed}, {run.number} starts, {steps} steps: " +
            ("other bytes than" if different else "the weights, averages and moments of") + " a run that nothing disturbed.", "",
            "| disturbed by | times |", "|---|---:|", *(f"| {how} | {run.count[how]} |" for how in DISTURBANCES), "",
            "| ended | times |", "|---|---:|", *(f"| {how} | {times} |" for how, times in run.endings.most_common())]  # fmt: skip
    return rows, problems


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="of each")
    parser.add_argument("--only", choices=["undisturbed", "disturbed"])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the disturbances")
    parser.add_argument("--most-growth", type=float, default=MOST_GROWTH, help="share, of memory and of open files")
    parser.add_argument("--record", type=Path, help="Markdown file to write")
    options = parser.parse_args(arguments)
    processor = next(line.split(": ", 1)[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    record = [f"# Soak: {processor}, {os.cpu_count()} cores, {date.today()}", "",
              f"`tests/reference/soak.py --minutes {options.minutes:g}` at {revision}: PixArt on {NUM_PICTURES} pictures with captions, both encoded in steps, "
              "two ranks, ZeRO stage 2, grids and evaluations."]  # fmt: skip
    failed = []
    with tempfile.TemporaryDirectory(prefix="kiln-soak-") as name:
        folder = Path(name)
        make_inputs(folder)
        for kind, soak in (("undisturbed", lambda: undisturbed(folder, options.minutes, options.most_growth)),
                           ("disturbed", lambda: disturbed(folder, options.minutes, options.seed))):  # fmt: skip
            if options.only in (None, kind):
                rows, problems = soak()
                record += ["", f"## {kind.capitalize()}", "", *rows, "", *(f"- **Failed**: {' '.join(problem.split())}" for problem in problems)]
                failed += problems
    text = "\n".join(record).rstrip() + "\n"
    print(text)
    if options.record:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
