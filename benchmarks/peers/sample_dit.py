"""DiT's sampling loop, Kiln against the original's own code, in turn in one run; medians and their ratio.

Image-steps per second of DiT-S/2 on 32 x 32 latents under classifier-free guidance: facebookresearch/DiT's model and
p_sample_loop under torch.autocast bf16, and Kiln's loop in bf16 (benchmarks/ops/bench_sample.cpp). Random weights: the
time does not depend on the values. Nothing is decoded.

    python benchmarks/peers/sample_dit.py --dit DIT_CHECKOUT --bench build/benchmarks/bench_sample \\
        [--rounds 3] [--out benchmarks/results/FILE.md]
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from measuring import conclude, in_turn, processor

MODEL, BATCH, STEPS = "DiT-S/2", 8, 10  # as bench_sample


def dit_worker(repository):
    """Runs in a process of its own; prints image-steps/s of the better of two loops after a short one to warm up."""
    sys.path.insert(0, repository)
    import torch
    from diffusion import create_diffusion
    from models import DiT_models

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    model = DiT_models[MODEL](input_size=32, num_classes=1000).eval()
    noise = torch.randn(BATCH, 4, 32, 32)
    noise = torch.cat([noise, noise])
    labels = torch.cat([torch.arange(BATCH), torch.full((BATCH,), 1000)])

    def run(steps):
        diffusion = create_diffusion(str(steps))
        started = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            diffusion.p_sample_loop(model.forward_with_cfg, noise.shape, noise, clip_denoised=False, device="cpu",
                                    model_kwargs=dict(y=labels, cfg_scale=4.0))
        return time.perf_counter() - started

    run(2)
    print(BATCH * STEPS / min(run(STEPS) for _ in range(2)))


def measure_dit(arguments):
    command = [sys.executable, __file__, "--worker", "--dit", arguments.dit]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_kiln(arguments):
    command = [arguments.bench, "--benchmark_filter=s_2/bf16", "--benchmark_format=json", "--benchmark_min_time=8"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report["benchmarks"][0]["items_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dit", required=True, help="checkout of facebookresearch/DiT")
    parser.add_argument("--bench", help="Kiln's bench_sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="also write the table to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return dit_worker(arguments.dit)

    rates = in_turn(arguments.rounds, {"DiT": lambda: measure_dit(arguments), "Kiln": lambda: measure_kiln(arguments)})
    dit, kiln = (statistics.median(rates[name]) for name in ("DiT", "Kiln"))
    lines = [
        f"{MODEL}, guidance, batch {BATCH}, {STEPS} steps, bf16; {processor()};",
        f"medians of {arguments.rounds} rounds in turn.", "",
        "| | image-steps/s | ratio |", "|---|---|---|",
        f"| facebookresearch/DiT, torch.autocast bf16 | {dit:.2f} | 1.00 |",
        f"| Kiln | {kiln:.2f} | {kiln / dit:.2f} |",
    ]
    conclude("\n".join(lines) + "\n", arguments.out)


if __name__ == "__main__":
    main()
