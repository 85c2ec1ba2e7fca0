"""Planned against measured peak memory of training steps on a CPU: PixArt, Sana and Stable Diffusion's U-Net with captions,
configurations drawn at random. Usage: plan_memory.py FOLDER [--count 20] [--seed 0] [--families pixart sana unet]

FOLDER takes the stores and the runs, one at a time. Needs KILN_BUILD. Prints Markdown; the same seed draws the same configurations.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "reference"))
from planned_memory import DRAWN, make_stores, planned_and_measured, relative_error, state_bytes  # noqa: E402


def options_text(configuration):
    """As on a command line, without what all share."""
    words = []
    for name, value in configuration.items():
        if name in ("store", "seed", "objective"):
            continue
        if name == "model-config":
            value = json.dumps(value, separators=(",", ":")).replace('"', "")
        words.append(f"--{name}" if value is True else f"--{name} {value}")
    return " ".join(words)


def measure(family, number, options, stores):
    """One line of the table; returns the error and whether the state is exactly as planned."""
    configuration = DRAWN[family](random.Random(f"{options.seed} {family} {number}"))
    folder = options.folder / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plan = planned_and_measured(configuration, stores, folder)
    error = relative_error(plan)
    state = [state_bytes(plan[side]) for side in ("predicted", "measured")]
    print(f"| {number} | `{options_text(configuration)}` | {plan['predicted']['peak_bytes']:,} | {plan['measured']['peak_bytes']:,} | "
          f"{100 * error:+.3f} % | {'equal' if state[0] == state[1] else f'planned {state[0]}, is {state[1]}'} |", flush=True)
    shutil.rmtree(folder)
    return abs(error), state[0] == state[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", default=list(DRAWN), choices=DRAWN)
    parser.add_argument("--numbers", type=int, nargs="+", help="only these of a family's configurations")
    options = parser.parse_args()
    shutil.rmtree(options.folder / "stores", ignore_errors=True)
    stores = make_stores(options.folder / "stores")
    for family in options.families:
        print(f"\n## {family}\n\n| | options | planned | measured | error | training state |\n|---|---|---|---|---|---|")
        results = [measure(family, number, options, stores) for number in options.numbers or range(options.count)]
        errors = [error for error, _ in results]
        print(f"\n{len(errors)} configurations: median {100 * statistics.median(errors):.3f} %, worst {100 * max(errors):.3f} %, the state of "
              f"{sum(equal for _, equal in results)} is equal to the byte")


if __name__ == "__main__":
    main()
