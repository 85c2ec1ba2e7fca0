#!/usr/bin/env python3
"""Runs what scripts/gpu build has packed, on a machine with torch 2.11 and an NVIDIA GPU. Each run begins on a cold
machine, takes at most 7 minutes and leaves one file, DIR/<run>.tar.gz: the checks and all that their programs wrote.

    run first | second | third [--out DIR] [--minutes N] [--failed SUITE,...] [--rehearse]

first: the CUDA tests, the kernels' times and counters, steps against the CPU and against each other. second: suites that
failed, DiT-XL/2 at three batches, a peer. third: variants and algorithms of kernels, and plans before and after a
calibration. Prints a line per check; the exit status is 1 when one failed. The checks are in gpu_checks/. They need
python3 alone; what times torch itself (gpu_torch.py) runs in processes of its own.

--rehearse: every check on the CPU of the machine that compiled, on the emulated kernels where it is about these. Its
numbers mean nothing, and each of its rows says REHEARSAL.
"""
import argparse
import os
import signal
import sys
from pathlib import Path

from gpu_checks import cuda_tests, kernel_variants, kernels, speeds, trainings
from gpu_checks.machine import environment, find_gpu
from gpu_checks.session import BESIDE, Session


def first(session):
    session.check("ceilings", speeds.ceilings, limit=60)
    session.check("CUDA tests", cuda_tests.all_tests)
    session.check("bf16 attention without LD_LIBRARY_PATH", cuda_tests.without_library_path, limit=60)
    for batch in (32, 8, 256):
        session.check(f"kernels at batch {batch}", kernels.times, batch, limit=60)
    session.check("as on the CPU, f32", trainings.as_on_the_cpu, "f32", 1e-4, limit=120)
    session.check("as on the CPU, bf16", trainings.as_on_the_cpu, "bf16", 2e-2, limit=120)
    session.check("equal lines, bf16", trainings.equal_lines, "bf16", limit=180)
    session.check("counters of six kernels", kernels.counters, limit=120)


def second(session):
    session.check("failed suites again", cuda_tests.failed_again, limit=120)
    for batch, steps in ((32, 40), (256, 15), (8, 60)):
        session.check(f"DiT-XL/2 bf16, batch {batch}", speeds.speed_of, "DiT-XL/2", batch, steps, limit=120)
    session.check("epilogues served", speeds.epilogues)
    session.check("a peer, DiT-XL/2, batch 32", speeds.peer, limit=160)
    session.check("kernels of a step, batch 32", kernels.of_a_step, "DiT-XL/2", 32, limit=120)
    session.check("attention engines, (32, 16, 256, 72)", speeds.attention, limit=60)
    session.check("memcheck", cuda_tests.sanitized, "memcheck", limit=120)
    session.check("racecheck", cuda_tests.sanitized, "racecheck", limit=120)


def third(session):
    session.env["KILN_PROFILES"] = str((session.folder / "profiles").resolve())
    (session.folder / "profiles").mkdir(exist_ok=True)
    session.check("algorithms of products with an epilogue", kernels.algorithms, limit=60)
    session.check("equal lines with --untried-gpu", trainings.untried_lines, limit=120)
    for way in ("all", *trainings.WAYS):
        session.check(f"DiT-XL/2 bf16, batch 32, {trainings.UNTRIED} {way}", speeds.speed_of, "DiT-XL/2", 32, 20,
                      f"{trainings.UNTRIED}={way}", limit=60)
    session.check("variants of kernels", kernel_variants.variants, limit=150)
    for when in ("before", "after"):
        if when == "after":
            session.check("calibration", speeds.calibration, limit=160)
        for model, batch in (("DiT-B/2", 64), ("DiT-XL/2", 32)):
            session.check(f"{model}, batch {batch}, {when}", speeds.speed_of, model, batch, 20, limit=60)
    for graph in ([], ["--cuda-graph"]):
        session.check(f"DiT-XL/2 bf16, batch 8{', as a graph' if graph else ''}", speeds.speed_of, "DiT-XL/2", 8, 40, *graph,
                      limit=60)


RUNS = {"first": first, "second": second, "third": third}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-results"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=7, help="end all checks after so long")
    parser.add_argument("--failed", default="", help="second: suites to run again, if the first run's results are not in --out")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, where scripts/gpu build has compiled")
    args = parser.parse_args()
    if args.rehearse:
        programs = Path(os.environ.get("KILN_BUILD", BESIDE.parent / "build"))
        env, gpu = dict(os.environ), {"name": "REHEARSAL, no GPU"}
    else:
        programs = BESIDE / "bin"
        env = environment(BESIDE)
        gpu = find_gpu(env)
    session = Session(args.run, args.out, args.minutes, programs, env, gpu, args.rehearse)
    session.failed_suites = [suite for suite in args.failed.split(",") if suite]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(", ".join(session.gpu.values()), flush=True)
    try:
        RUNS[args.run](session)
    finally:
        session.end_programs()
        session.write()
    states = [check["state"] for check in session.checks]
    print(f"{'REHEARSAL: ' if args.rehearse else ''}{states.count('ok')} ok, {states.count('FAILED')} failed, "
          f"{states.count('not run')} not run: {session.out}/{args.run}.tar.gz")
    sys.exit(1 if "FAILED" in states else 0)


if __name__ == "__main__":
    main()
