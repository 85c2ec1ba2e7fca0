"""Whether gradients that ranks sum in bf16 train worse than in f32: the same training with both, on ranks of this machine's CPU.

    python benchmarks/reduction_curve.py [--kiln build/kiln] [--ranks 8] [--steps 400] [--seeds 3] [--out FILE.md]

Without accumulation a rank's gradients have the compute dtype, and so have their sums unless --reduce-dtype says otherwise. The
table has the mean loss of the last quarter of the steps. A difference counts if it is larger than that between two seeds.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

MODEL = ["--model", "dit", "--hidden-size", "96", "--depth", "4", "--num-heads", "3", "--patch-size", "4", "--num-classes", "10",
         "--data", "synthetic", "--compute-dtype", "bf16", "--lr", "1e-3", "--log-every", "1", "--no-tensorboard", "--no-checkpoint",
         "--no-preflight", "--device", "cpu", "--threads", "1", "--peak-tflops", "1"]


def losses(args, dtype, seed):
    with tempfile.TemporaryDirectory() as folder:
        command = [args.kiln, "train", *MODEL, "--nproc", args.ranks, "--global-batch", 4 * args.ranks, "--max-steps", args.steps,
                   "--seed", seed, "--reduce-dtype", dtype, "--out", f"{folder}/run"]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}\n{done.stderr.strip()[-600:]}")
        lines = [json.loads(line) for line in open(f"{folder}/run/log.jsonl")]
    return [line["loss"] for line in lines if "loss" in line]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    lines = [f"{args.ranks} ranks, {args.steps} steps, mean loss of the last quarter:", "",
             "| seed | f32 | bf16 | difference | largest difference of a step |", "|---|---|---|---|---|"]
    ends = []
    for seed in range(args.seeds):
        curves = [losses(args, dtype, seed) for dtype in ("f32", "bf16")]
        end = [statistics.mean(curve[-args.steps // 4:]) for curve in curves]
        apart = max(abs(a - b) / a for a, b in zip(*curves))
        ends.append(end)
        lines.append(f"| {seed} | {end[0]:.5f} | {end[1]:.5f} | {100 * (end[1] / end[0] - 1):+.2f} % | {100 * apart:.1f} % |")
    if len(ends) > 1:
        spread = statistics.stdev(end[0] for end in ends) / statistics.mean(end[0] for end in ends)
        lines += ["", f"Seeds are {100 * spread:.2f} % apart (standard deviation in f32)."]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
