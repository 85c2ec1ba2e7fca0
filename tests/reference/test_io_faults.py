"""An error at each place of the program that opens, reads, writes, maps, syncs, renames, removes, makes a folder, talks to a socket,
asks io_uring or takes at least 1 MiB of memory, at its first use or its last.

No signal ends the command. Where it cannot go on, one clear line names the file, and the same command, run again without errors,
ends with the bytes of one that nothing disturbed. Each place has one error in every run, all of them with --full, which also trains
on two ranks. There the places in LibTorch are left out: an error in its rendezvous ends a rank by a signal. What was tried stands in
build/results/io-faults.md, with the calls in the program's code that no command here reaches."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest
import torch
from conftest import FULL, REPOSITORY, program, succeed
from io_faults import FAULTS, FEWER, NETWORK, Place, Runner, Trial, calls_of_program, function_of, try_fault
from test_download import OWN, Server
from test_evaluate import as_folder, pictures
from test_extract import SIZE, write_pictures
from test_store import write_fast_dit
from test_text_store import FAMILIES, write_metadata
from test_tokenizers import MAKERS

DIT = ["--model", "dit", "--hidden-size", 128, "--depth", 2, "--num-heads", 2, "--patch-size", 4]
TRAIN = ["train", *DIT, "--objective", "flow", "--global-batch", 2, "--threads", 1, "--device", "cpu", "--peak-tflops", 1, "--log-every", 1,
         "--ema-decay", 0.9, "--checkpoint-every", 1, "--num-sampling-steps", 2, "--no-preflight", "--out", "run"]  # fmt: skip
BODY = bytes(range(256)) * 400


@dataclass
class Command:
    """Run in a folder of its own; what it writes has names below that folder."""

    name: str
    arguments: list
    results: list  # patterns of the files that must have the same bytes
    copies: dict = field(default_factory=dict)  # what lies in the folder before: {name: source}
    environment: dict = field(default_factory=dict)
    places: dict = field(default_factory=dict)  # {place: uses}, of the undisturbed run
    expected: dict = field(default_factory=dict)  # its result

    def prepare(self, folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, source in self.copies.items():
            shutil.copytree(source, folder / name)

    def result(self, folder):
        found = {}
        for path in sorted({path for pattern in self.results for path in folder.glob(pattern) if path.is_file()}):
            if path.name == "unfinished-shard.log":  # it may stay, and the next command removes it
                continue
            content = path.read_bytes()
            if path.name == "result.json":
                content = json.dumps(json.loads(content)["metrics"], sort_keys=True).encode()
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
        return found


def commands(inputs, server):
    store, run = inputs / "store", inputs / "run"
    train = [*TRAIN, "--data", store]
    pixels = ["--autoencoder", "pixels", "--image-size", SIZE, "--out", "store"]
    trained, resumed = [f"run/checkpoints/step-{steps:08}/*.safetensors" for steps in (2, 3)]
    features = inputs / "fast-dit/imagenet256_features"
    own = {"HF_HOME": "hf", "KILN_CACHE": "cache", "HF_ENDPOINT": server.url, "KILN_MIRROR": server.url, "http_proxy": "", "no_proxy": "127.0.0.1",
           "https_proxy": "http://127.0.0.1:9"}  # the authors' own address is never reached
    return [
        Command("extract", ["extract", "--data", inputs / "pictures", *pixels], ["store/**/*"]),
        Command("extract captions", ["extract", "--data", inputs / "captions", "--text-encoder", inputs / "encoder", "--enlarge", *pixels], ["store/**/*"]),
        Command("append", ["extract", "--append", "--data", inputs / "more/pictures", *pixels], ["store/**/*"], {"store": store}),
        Command("train", [*train, "--max-steps", 2], [trained]),
        Command("resume", [*train, "--max-steps", 3], [resumed], {"run": run}),
        Command("validation", [*train, "--max-steps", 2, "--validation-share", 0.34, "--validate-every", 1, "--sample-every", 2, "--num-samples", 2], [trained]),
        Command("train from pictures", [*TRAIN, "--data", inputs / "pictures", "--autoencoder", "pixels", "--image-size", SIZE, "--max-steps", 2], [trained]),
        Command("offload to a disk", [*train, "--max-steps", 2, "--zero-stage", 3, "--offload-optimizer", "nvme", "--offload-params", "nvme",
                                      "--nvme-path", "."], [trained]),
        Command("sample", ["sample", "--run", run, "--num-images", 2, "--num-sampling-steps", 2, "--seed", 1, "--out", "samples", "--npz", "samples.npz",
                           "--grid"], ["samples/*.png", "samples.npz"]),
        Command("evaluate", ["evaluate", inputs / "drawn", "--reference", inputs / "real", "--net", "random", "--out", "result.json",
                             "--save-reference", "reference.npz"], ["result.json", "reference.npz"]),
        Command("convert", ["convert", "--in", run, "--out", "weights.safetensors"], ["weights.safetensors"]),
        Command("convert to .pt", ["convert", "--in", run, "--out", "weights.pt"], ["weights.pt"]),
        Command("convert to diffusers", ["convert", "--in", run, "--out", "diffusers"], ["diffusers/**/*"]),
        Command("download", ["download", "DiT-XL-2-512x512"], [f"cache/{OWN}"], environment=own),
        Command("report", ["report", "run"], ["run/report.html"], {"run": run}),
        Command("store verify", ["store", "verify", store], []),
        Command("store import", ["store", "import", "--from", "fast-dit", features, features.parent / "imagenet256_labels", "--out", "store",
                                 "--image-size", 256], ["store/**/*"]),
        *([Command("train on two ranks", [*train, "--max-steps", 2, "--nproc", 2, "--zero-stage", 2, "--sample-every", 2, "--num-samples", 2], [trained])]
          if FULL else []),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_pictures(folder / "pictures", 6)
    write_pictures(folder / "more/pictures", 8)
    (folder / "captions").mkdir()
    write_metadata(folder / "captions", ["a red apple", "a green circle", "", "Ein gelbes Haus"])
    (folder / "encoder").mkdir()
    _, _, model_class, config = FAMILIES["bert"]
    MAKERS["wordpiece"](folder / "encoder")
    torch.manual_seed(0)
    model_class(config).eval().save_pretrained(folder / "encoder")
    as_folder(folder / "real", pictures(12, 1))
    as_folder(folder / "drawn", pictures(12, 2))
    write_fast_dit(folder / "fast-dit", 3)
    succeed("extract", "--data", folder / "pictures", "--autoencoder", "pixels", "--image-size", SIZE, "--out", folder / "store")
    succeed(*TRAIN[:-1], folder / "run", "--data", folder / "store", "--max-steps", 2)
    return folder


@pytest.fixture
def server():
    made = Server()
    made.files["/" + OWN] = BODY
    yield made
    made.close()


def count_places(command, runner, folder):
    """Runs a command undisturbed: what it uses, and what it leaves."""
    command.prepare(folder)
    result = runner.run(command.arguments, folder, command.environment)
    assert result.returncode == 0, f"{command.name}: {result.stderr}"
    command.expected = command.result(folder)
    assert command.expected or not command.results, f"{command.name} has left nothing to compare"
    command.places = runner.places()


def every_trial(command):
    """All errors at the first and the last use of each place."""
    for place, uses in command.places.items():
        if "--nproc" in command.arguments and is_of_libtorch(place):
            continue
        for use, fault in itertools.product(sorted({1, uses}), FAULTS[place.kind]):
            yield Trial(place, use, fault)


def is_of_libtorch(place):
    """Of its rendezvous and of its communication: what the program's own functions call there counts as theirs."""
    return place.module != "-" or place.kind in NETWORK or function_of(place).startswith(("Rendezvous::", "open_gloo", "network_device"))


def covering_trials(of_commands):
    """(number of the command, trial): one error at each place, in the first command that uses it; errors and uses in turn."""
    seen, count = set(), dict.fromkeys(FAULTS, 0)
    for number, command in enumerate(of_commands):
        for place, uses in command.places.items():
            key = (place.kind, place.module, place.offset)
            if key in seen:
                continue
            seen.add(key)
            turn = count[place.kind]
            count[place.kind] += 1
            faults = FAULTS[place.kind]
            yield number, Trial(place, uses if turn // len(faults) % 2 else 1, faults[turn % len(faults)])


def table_of(head, rows):
    return "\n".join(["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]])


def write_record(path, own, outcomes):
    """As benchmarks/results keeps it."""
    endings = ("refused", "went on", "did not come")

    def counts(some):
        some = list(some)
        return [len(some), *(sum(outcome.ending == ending for outcome in some) for ending in endings), sum(bool(outcome.problem) for outcome in some)]

    by_command = [[command.name, len(command.places), *counts(outcome for number, outcome in outcomes if own[number] is command)] for command in own]
    faults = sorted({(outcome.trial.place.kind, outcome.trial.fault) for _, outcome in outcomes})
    by_kind = [[kind, "fewer bytes" if fault == FEWER else errno.errorcode[fault],
                *counts(outcome for _, outcome in outcomes if (outcome.trial.place.kind, outcome.trial.fault) == (kind, fault))]
               for kind, fault in faults]
    users = {}
    for command in own:
        for place in command.places:
            users.setdefault(Place(place.kind, place.module, place.offset), []).append(command.name)
    places = sorted((place.kind, function_of(place), ", ".join(dict.fromkeys(names))) for place, names in users.items())
    reached = {place.offset for place in users if place.module == "-"}
    unreached = sorted(call for offset, call in calls_of_program().items() if offset not in reached)
    processor = next(line.split(": ", 1)[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    head = ["tried", "ended with a line", "went on", "did not come", "failed"]
    parts = [
        f"# Errors of input and output: {processor}, {os.cpu_count()} cores, {date.today()}",
        f"`tests/reference/test_io_faults.py`{' with --full' if FULL else ''} at {revision}. Each command ran with one error at one place, at its "
        "first use or its last; those that ended ran again and left the bytes of an undisturbed run. The last use did not come where threads share "
        "their work in another order.",
        table_of(["command", "places", *head], by_command), table_of(["call", "error", *head], by_kind),
        "## Places\n\nThe function of the program, and where in it.", table_of(["call", "place", "commands"], places),
        f"## Calls that no command reaches\n\n{len(unreached)} calls in the program's code; the places above are all others, and memory.",
        table_of(["function", "call"], unreached),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")


@pytest.mark.nothing_beside
def test_an_error_at_every_place_ends_in_a_line_or_in_the_same_bytes(inputs, server, tmp_path):
    runner, folder, own = Runner(tmp_path / "logs"), tmp_path / "work", commands(inputs, server)
    for command in own:
        count_places(command, runner, folder)
    trials = [(number, trial) for number, command in enumerate(own) for trial in every_trial(command)] if FULL else list(covering_trials(own))
    outcomes = [(number, try_fault(runner, own[number], trial, folder)) for number, trial in trials]
    write_record(program("kiln").parent / "results/io-faults.md", own, outcomes)
    failed = [f"{own[number].name}, {outcome.trial.text()}: {outcome.problem}" for number, outcome in outcomes if outcome.problem]
    came = sum(outcome.ending != "did not come" for _, outcome in outcomes)
    print(f"{len(trials)} errors, {came} came, {len(failed)} failed, {sum(outcome.seconds for _, outcome in outcomes) / 60:.1f} minutes of processes")
    assert came > 0.8 * len(trials)
    assert not failed, f"{len(failed)} of {len(trials)}:\n" + "\n\n".join(failed[:20])


@pytest.mark.slow
def test_the_chosen_use_fails_and_no_other(inputs, tmp_path):
    """What the test above relies on."""
    runner = Runner(tmp_path / "logs")
    verify = ["store", "verify", inputs / "store"]
    assert runner.run(verify, tmp_path).returncode == 0
    places = runner.places()
    calls = calls_of_program()
    opens = {place: uses for place, uses in places.items() if place.module == "-" and calls.get(place.offset, ("", ""))[1].startswith("open")}
    place = max(opens, key=opens.get)  # where all files are opened that are read
    uses = opens[place]
    result = runner.run(verify, tmp_path, trial=Trial(place, uses, errno.EMFILE))
    assert result.returncode == 1 and os.strerror(errno.EMFILE) in result.stderr
    (path, _) = runner.fired()
    assert Path(path).name in result.stderr
    assert runner.run(verify, tmp_path, trial=Trial(place, uses + 1, errno.EMFILE)).returncode == 0
    assert runner.fired() is None
