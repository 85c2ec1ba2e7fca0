"""fast-DiT's table of training options, for Kiln on this machine: each row adds one option to the one before.

    original   f32, pictures encoded while training
    recompute  + every block's activations recomputed
    amp        + bf16 compute (fp16 with --half fp16)
    features   + latents from the store

    python benchmarks/fast_dit_table.py [--kiln build/kiln] [--model DiT-S/2] [--batch 8] [--steps 3] [--device cpu] [--out FILE.md]

The pictures are the demo's at 256 px, the autoencoder is Stable Diffusion's architecture with random weights (speed and
memory do not depend on their values).
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROWS = ["original", "recompute", "amp", "features"]
RECIPES = pathlib.Path(__file__).resolve().parent.parent / "recipes" / "fast-dit"


def make_autoencoder(folder):
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 4,
                  up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(128, 256, 512, 512), layers_per_block=2,
                  latent_channels=4, norm_num_groups=32, scaling_factor=0.18215).save_pretrained(folder)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr.strip()[-600:]}")


def measure(args, row, folder, data):
    out, usage = folder / "run", folder / "usage"
    subprocess.run(["rm", "-rf", out], check=True)
    command = ["/usr/bin/time", "-f", "%M", "-o", usage, args.kiln, "train", "--recipe", RECIPES / f"{row}.toml", "--model",
               args.model, "--image-size", "256", "--out", out, "--max-steps", str(args.steps + 1), "--global-batch",
               str(args.batch), "--micro-batch", str(args.batch), "--device", args.device, "--log-every", "1",
               "--checkpoint-every", "0", *data]
    if row in ("amp", "features"):
        command += ["--compute-dtype", args.half]
    run([str(part) for part in command])
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line][1:]
    gpu_bytes = max(line.get("peak_device_bytes", 0) for line in steps)
    peak = gpu_bytes if args.device == "cuda" else int(usage.read_text().split()[-1]) * 1024
    return statistics.median(line["images_per_s"] for line in steps), peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--demo-data", default="build/kiln-demo-data")
    parser.add_argument("--model", default="DiT-S/2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--half", default="bf16")
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_autoencoder(folder / "vae")
        run([args.demo_data, "--out", folder / "pictures", "--size", "256", "--classes", "faces=face-smiling"])
        run([args.kiln, "extract", "--data", folder / "pictures", "--autoencoder", folder / "vae", "--image-size", "256",
             "--out", folder / "store", "--device", args.device])
        lines = [f"# fast-DiT's training options in Kiln: {args.model}, 256 px, batch {args.batch}, {args.device}", "",
                 f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores. Median of {args.steps} steps; peak memory of the "
                 f"{'device' if args.device == 'cuda' else 'process'}.", "",
                 "| row | images/s | peak memory |", "|---|---|---|"]
        for row in ROWS:
            data = (["--data", folder / "store"] if row == "features" else
                    ["--data", folder / "pictures", "--autoencoder", folder / "vae"])
            rate, peak = measure(args, row, folder, data)
            lines.append(f"| {row} | {rate:.2f} | {peak / 1e9:.2f} GB |")
            print(lines[-1], file=sys.stderr, flush=True)
    table = "\n".join(lines) + "\n"
    print(table)
    if args.out:
        pathlib.Path(args.out).write_text(table)


if __name__ == "__main__":
    main()
