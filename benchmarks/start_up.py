"""How soon the program begins, beside what is promised: a help text, a plan, the first step of the demo's model. Prints Markdown.

    python benchmarks/start_up.py [--kiln build/kiln] [--rounds 9]

Times of the clock and of the processors, medians of rounds in turns. "LibTorch alone" is a version asked for with KILN_CPU: the program
loads and initialises its libraries, and prints a line. Nothing else should run on the machine.
"""

import argparse
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = ["train", "--recipe", REPOSITORY / "recipes/demo.toml", "--data", "synthetic", "--device", "cpu", "--max-steps", "1", "--log-every", "1", "--sample-every", "0",
         "--no-checkpoint"]  # fmt: skip
CASES = {
    "`kiln --help`": ["--help"],
    "LibTorch alone": ["--version"],
    "`kiln plan`, the demo": ["plan", "--recipe", REPOSITORY / "recipes/demo.toml", "--data", "synthetic", "--device", "cpu"],
    "`kiln plan`, DiT-XL/2 on four RTX 4090": ["plan", "--model", "DiT-XL/2", "--image-size", "512", "--gpu", "RTX-4090", "--gpus", "4"],
    "`kiln train`, the demo's first step": TRAIN,
}
WITH_LIBRARIES = "LibTorch alone"
# Seconds, and what they come on top of.
GOALS = {
    "`kiln --help`": (0.05, None),
    "`kiln plan`, the demo": (0.2, WITH_LIBRARIES),
    "`kiln plan`, DiT-XL/2 on four RTX 4090": (0.2, WITH_LIBRARIES),
    "`kiln train`, the demo's first step": (1.5, None),
}


def seconds_of(kiln, name):
    """Seconds of the clock until the last line, or that of the first step, and of the processors until the end."""
    environment = {key: value for key, value in os.environ.items() if key != "KILN_CPU"}
    if name == WITH_LIBRARIES:
        environment["KILN_CPU"] = "avx2"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", Path(folder) / "run"] if CASES[name][0] == "train" else []
        begin = time.perf_counter()
        process = subprocess.Popen([kiln, *map(str, [*CASES[name], *out])], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        for line in process.stdout:
            if line.startswith("step "):
                break
        clock = time.perf_counter() - begin
        process.communicate()
        assert process.returncode == 0, name
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default=REPOSITORY / "build/kiln")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    taken = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name in CASES:
            taken[name].append(seconds_of(options.kiln, name))
    medians = {name: [statistics.median(times) for times in zip(*rounds)] for name, rounds in taken.items()}
    print("| | s | processor, s | goal, s |\n|---|---:|---:|---|")
    for name, (clock, processor) in medians.items():
        goal, beyond = GOALS.get(name, (None, None))
        over = f"{goal} beyond LibTorch alone: {clock - medians[beyond][0]:.2f}" if beyond else goal or ""
        print(f"| {name} | {clock:.3f} | {processor:.3f} | {over} |")


if __name__ == "__main__":
    main()
