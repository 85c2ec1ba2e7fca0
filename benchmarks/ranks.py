"""What several ranks cost: images/s of one rank with all threads against ranks that share them, in turn, as Markdown.

    python benchmarks/ranks.py [--rounds 3] [--kiln build/kiln]
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

STEPS, WARM_UP = 8, 3
TARGETS = {0: 0.92, 2: 0.9, 3: 0.85}


def images_per_s(kiln, nproc, stage, threads):
    """The median over the steps after the warm-up."""
    with tempfile.TemporaryDirectory() as out:
        command = [kiln, "train", "--model", "DiT-S/2", "--data", "synthetic", "--image-size", "256", "--global-batch", "32",
                   "--compute-dtype", "bf16", "--device", "cpu", "--nproc", nproc, "--zero-stage", stage, "--threads", threads,
                   "--max-steps", STEPS, "--log-every", "1", "--no-tensorboard", "--no-preflight", "--peak-tflops", "1",
                   "--checkpoint-every", "0", "--out", out]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return statistics.median(line["images_per_s"] for line in lines[WARM_UP:] if "loss" in line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    speeds = {stage: [] for stage in TARGETS} | {"alone": []}
    for _ in range(arguments.rounds):
        speeds["alone"].append(images_per_s(arguments.kiln, 1, 0, cores))
        for stage in TARGETS:
            speeds[stage].append(images_per_s(arguments.kiln, cores, stage, 1))
    alone = statistics.median(speeds.pop("alone"))
    print(f"DiT-S/2, batch 32, bf16, {cores} cores; medians of {arguments.rounds} rounds\n")
    print("| | images/s | ratio | target |\n|---|---|---|---|")
    print(f"| one rank of {cores} threads | {alone:.2f} | 1 | |")
    for stage, target in TARGETS.items():
        speed = statistics.median(speeds[stage])
        print(f"| {cores} ranks of one thread, stage {stage} | {speed:.2f} | {speed / alone:.2f} | {target} |")


main()
