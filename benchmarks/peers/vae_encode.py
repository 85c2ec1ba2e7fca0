"""Encoding pictures, Kiln against diffusers in bf16, in turn in one run; medians and their ratio.

Both encode the same number of random images with random weights of the shape of Stable Diffusion's autoencoder (kl) or
Sana's (dc): the time does not depend on the values. Kiln's side is benchmarks/ops/bench_autoencoders.cpp.

    python benchmarks/peers/vae_encode.py --bench build/benchmarks/bench_autoencoders [--model dc] [--rounds 3] [--decode]
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from measuring import in_turn

SIDE, BATCH = 256, 8  # as bench_autoencoders


def kl():
    """The autoencoder and the shape of a picture's latents."""
    from diffusers import AutoencoderKL
    return AutoencoderKL(in_channels=3, out_channels=3, latent_channels=4, layers_per_block=2, block_out_channels=[128, 256, 512, 512],
                         down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4), (4, SIDE // 8)


def dc():
    from diffusers import AutoencoderDC
    blocks = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
    return AutoencoderDC(encoder_block_types=blocks, decoder_block_types=blocks, encoder_layers_per_block=[2, 2, 2, 3, 3, 3],
                         upsample_block_type="interpolate", downsample_block_type="conv", scaling_factor=0.41407), (32, SIDE // 32)


def diffusers_worker(model, decode):
    """Runs in a process of its own; prints images/s of the best of two calls after one to warm up."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    vae, (channels, side) = {"kl": kl, "dc": dc}[model]()
    vae = vae.to(torch.bfloat16).eval()
    given = torch.randn(BATCH, channels, side, side) if decode else torch.rand(BATCH, 3, SIDE, SIDE) * 2 - 1
    run = vae.decode if decode else vae.encode
    seconds = []
    with torch.inference_mode():
        for _ in range(3):
            started = time.perf_counter()
            run(given.to(torch.bfloat16))
            seconds.append(time.perf_counter() - started)
    print(BATCH / min(seconds[1:]))


def measure_diffusers(arguments):
    command = [sys.executable, __file__, "--worker", "--model", arguments.model, *(["--decode"] if arguments.decode else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_kiln(arguments):
    name = "decode" if arguments.decode else "encode"
    command = [arguments.bench, f"--benchmark_filter={name}/{arguments.model}_bf16", "--benchmark_format=json", "--benchmark_min_time=4"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report["benchmarks"][0]["items_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", help="Kiln's bench_autoencoders")
    parser.add_argument("--model", choices=["kl", "dc"], default="kl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", action="store_true", help="decode latents instead")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return diffusers_worker(arguments.model, arguments.decode)
    if not arguments.bench:
        parser.error("--bench is missing")
    measured = in_turn(arguments.rounds, {"diffusers": lambda: measure_diffusers(arguments),
                                          "kiln": lambda: measure_kiln(arguments)})
    diffusers, kiln = (statistics.median(measured[name]) for name in ("diffusers", "kiln"))
    print(f"median: diffusers {diffusers:.2f} images/s, kiln {kiln:.2f}, ratio {kiln / diffusers:.2f}")


if __name__ == "__main__":
    main()
