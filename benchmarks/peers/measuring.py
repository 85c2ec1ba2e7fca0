"""What the comparisons share: programs measured in turn, Kiln's logged rates, the table's words."""
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys


def processor():
    """"AMD EPYC 9B45, 2 cores": the cores this process may use."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def device_name(device):
    """Of the first GPU, as the driver calls it, or of the processor."""
    if device == "cpu":
        return processor()
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.returncode == 0 else "GPU"


def in_turn(rounds, measurements):
    """{name: [result of each round]} of {name: function}; each round runs every one of them once."""
    results = {name: [] for name in measurements}
    for number in range(rounds):
        for name, measure in measurements.items():
            results[name].append(measure())
            print(f"round {number + 1}: {name} {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def kiln_images_per_s(run, warmup):
    """The median over the logged steps of a run folder after the first `warmup`; the run logs every step."""
    lines = [json.loads(line) for line in open(f"{run}/log.jsonl")]
    return statistics.median([line["images_per_s"] for line in lines if "images_per_s" in line][warmup:])


def kiln_device_bytes(run):
    """The most that tensors took on the GPU, in the steps that a run folder logged."""
    return max(json.loads(line).get("peak_device_bytes", 0) for line in open(f"{run}/log.jsonl"))


def conclude(text, out):
    """Prints the report and, where `out` is given, writes it there."""
    print(text)
    if out:
        pathlib.Path(out).write_text(text)
