"""One training step of a PixArt on ragged captions, Kiln against diffusers' PixArtTransformer2DModel, in turn in one run.

Measures forward + backward + AdamW + EMA on random latents and captions of 1 to 120 rows: diffusers' model under
torch.autocast bf16 with fused AdamW, captions padded to 120 and masked, as its users train it, and `kiln train --data
synthetic`, which pads nothing. Every measurement is a process of its own; the rounds interleave.

    python benchmarks/peers/train_pixart.py --kiln build/kiln [--variants diffusers,kiln,kiln-recompute] [--rounds 3]
        [--out benchmarks/results/FILE.md]
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from copy import deepcopy

from measuring import conclude, device_name, in_turn, kiln_images_per_s

KILN_VARIANTS = {"kiln": "none", "kiln-recompute": "all"}
CAPTION_WIDTH, MOST_ROWS = 384, 120


def peer_worker(args):
    """Runs in a process of its own: diffusers' model and a plain epsilon loss, timed."""
    import torch
    from diffusers import DDPMScheduler, PixArtTransformer2DModel

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = PixArtTransformer2DModel(num_attention_heads=args.width // 64, attention_head_dim=64, in_channels=4, out_channels=4,
                                     num_layers=args.depth, cross_attention_dim=args.width, sample_size=args.latent_size, patch_size=2,
                                     caption_channels=CAPTION_WIDTH, use_additional_conditions=False).train()
    ema = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=True)
    schedule = DDPMScheduler(beta_schedule="linear")
    x = torch.randn(args.batch, 4, args.latent_size, args.latent_size)
    captions = torch.randn(args.batch, MOST_ROWS, CAPTION_WIDTH)
    lengths = torch.randint(1, MOST_ROWS + 1, (args.batch,))
    mask = (torch.arange(MOST_ROWS) < lengths.unsqueeze(1)).long()

    def step():
        t, noise = torch.randint(0, 1000, (args.batch,)), torch.randn_like(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(schedule.add_noise(x, noise, t), encoder_hidden_states=captions, encoder_attention_mask=mask, timestep=t,
                              added_cond_kwargs={"resolution": None, "aspect_ratio": None}).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - 0.9999)

    seconds = []
    for _ in range(args.warmup + args.steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"images_per_s": args.batch / statistics.median(seconds[args.warmup:]), "peak_bytes": peak}))


def run_kiln(args, recompute):
    with tempfile.TemporaryDirectory() as folder:
        config = {"caption_channels": CAPTION_WIDTH, "model_max_length": MOST_ROWS}
        command = [args.kiln, "train", "--model", "pixart", "--model-config", json.dumps(config), "--hidden-size", str(args.width),
                   "--num-heads", str(args.width // 64), "--depth", str(args.depth), "--patch-size", "2", "--data", "synthetic",
                   "--image-size", str(args.latent_size * 8), "--out", folder + "/run", "--max-steps", str(args.warmup + args.steps),
                   "--global-batch", str(args.batch), "--compute-dtype", "bf16", "--objective", "epsilon", "--ema-decay", "0.9999",
                   "--lr", "1e-4", "--seed", "0", "--recompute", recompute, "--checkpoint-every", "0", "--log-every", "1",
                   "--threads", str(args.threads)]
        usage_file = folder + "/usage"
        done = subprocess.run(["/usr/bin/time", "-f", "%M", "-o", usage_file, *command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"kiln failed: {done.stderr.strip()[-400:]}")
        lines = [json.loads(line) for line in open(f"{folder}/run/log.jsonl")]
        shares = [line["peak_share"] for line in lines if "peak_share" in line][args.warmup:]
        return {"images_per_s": kiln_images_per_s(folder + "/run", args.warmup), "peak_share": statistics.median(shares) if shares else None,
                "peak_bytes": int(pathlib.Path(usage_file).read_text().split()[-1]) * 1024}


def run_variant(args, variant):
    if variant in KILN_VARIANTS:
        return run_kiln(args, KILN_VARIANTS[variant])
    command = [sys.executable, __file__, "--worker", variant, "--width", str(args.width), "--depth", str(args.depth), "--batch",
               str(args.batch), "--latent-size", str(args.latent_size), "--steps", str(args.steps), "--warmup", str(args.warmup),
               "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{variant} failed: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(args, results, reference):
    tokens = (args.latent_size // 2) ** 2
    lines = [f"# Training step, PixArt of width {args.width} and depth {args.depth}, {tokens} tokens, captions of 1 to {MOST_ROWS} rows, "
             f"batch {args.batch}, bf16", "",
             f"{time.strftime('%Y-%m-%d')}, {device_name('cpu')}, {args.threads} threads, torch 2.11.0. Medians of {args.rounds} interleaved "
             f"rounds of {args.steps} steps after {args.warmup} of warm-up.", "",
             f"| program | images/s (min..max) | share of the measured peak | peak memory | speed / {reference} | memory / {reference} |",
             "|---|---|---|---|---|---|"]
    base_rate = statistics.median(run["images_per_s"] for run in results[reference])
    base_peak = statistics.median(run["peak_bytes"] for run in results[reference])
    for variant, runs in results.items():
        rates = [run["images_per_s"] for run in runs]
        shares = [run["peak_share"] for run in runs if run.get("peak_share")]
        peak, rate = statistics.median(run["peak_bytes"] for run in runs), statistics.median(rates)
        lines.append(f"| {variant} | {rate:.2f} ({min(rates):.2f}..{max(rates):.2f}) | "
                     f"{f'{100 * statistics.median(shares):.0f} %' if shares else '-'} | {peak / 1e9:.2f} GB | {rate / base_rate:.2f}x | "
                     f"{peak / base_peak:.2f}x |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--variants", default="diffusers,kiln,kiln-recompute")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--latent-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", help="also write the table to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return peer_worker(args)
    variants = args.variants.split(",")
    results = in_turn(args.rounds, {variant: lambda variant=variant: run_variant(args, variant) for variant in variants})
    conclude(report(args, results, variants[0]), args.out)


if __name__ == "__main__":
    main()
