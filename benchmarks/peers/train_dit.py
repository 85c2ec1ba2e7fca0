"""One training step of DiT, Kiln against the peers' own code, in turn in one run.

Measures forward + backward + AdamW + EMA on random latents: facebookresearch/DiT's model and diffusion under
torch.autocast bf16 (and under torch.compile), chuanyangjin/fast-DiT with its gradient checkpointing, and `kiln train
--data synthetic`. Every measurement is a process of its own, so that peak memory is its own; the rounds interleave.

    python benchmarks/peers/train_dit.py --dit DIT_CHECKOUT --fast-dit FAST_DIT_CHECKOUT --kiln build/kiln \\
        [--variants dit,dit-compile,fast-dit,kiln,kiln-some,kiln-recompute] [--rounds 3] [--device cuda] \\
        [--out benchmarks/results/FILE.md]

On a CPU, peak memory is that of the process; on a GPU, what tensors take there. The checkouts are folders with the peers'
models.py and diffusion/; their code is run as it is.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from copy import deepcopy

from measuring import conclude, device_name, in_turn, run_kiln_training, speed_and_memory_table

# --recompute: within fast-DiT's memory a third of DiT-S's blocks is enough.
KILN_VARIANTS = {"kiln": "none", "kiln-some": "0-3", "kiln-recompute": "all"}


def peer_worker(args):
    """Runs in a process of its own: the peer's model and diffusion, its train.py's step, timed."""
    sys.path.insert(0, args.worker_repo)
    import torch
    from diffusion import create_diffusion
    from models import DiT_models

    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = DiT_models[args.model](input_size=args.latent_size, num_classes=1000).train().to(device)
    ema = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    diffusion = create_diffusion(timestep_respacing="")
    step_model = torch.compile(model) if args.worker == "dit-compile" else model
    ema_weights, weights = OrderedDict(ema.named_parameters()), OrderedDict(model.named_parameters())
    x = torch.randn(args.batch, 4, args.latent_size, args.latent_size, device=device)
    y = torch.randint(0, 1000, (args.batch,), device=device)

    def step():
        t = torch.randint(0, diffusion.num_timesteps, (args.batch,), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = diffusion.training_losses(step_model, x, t, dict(y=y))["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                ema_weights[name].mul_(0.9999).add_(weight.data, alpha=1 - 0.9999)

    def timed_step():
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(args.warmup):
        timed_step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed_step() for _ in range(args.steps)]
    peak = (torch.cuda.max_memory_allocated() if on_gpu else
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    print(json.dumps({"images_per_s": args.batch / statistics.median(seconds), "peak_bytes": peak}))


def run_kiln(args, recompute):
    return run_kiln_training(
        [args.kiln, "train", "--model", args.model, "--data", "synthetic", "--image-size", args.latent_size * 8, "--max-steps",
         args.warmup + args.steps, "--global-batch", args.batch, "--micro-batch", args.batch, "--compute-dtype", "bf16", "--objective",
         "iddpm", "--ema-decay", "0.9999", "--lr", "1e-4", "--seed", "0", "--device", args.device, "--recompute", recompute,
         "--checkpoint-every", "0", "--log-every", "1", "--threads", args.threads], args.warmup)


def run_variant(args, variant):
    if variant.startswith("kiln"):
        return run_kiln(args, KILN_VARIANTS[variant])
    repo = args.fast_dit if variant == "fast-dit" else args.dit
    command = [sys.executable, __file__, "--worker", variant, "--worker-repo", repo, "--model", args.model, "--batch",
               str(args.batch), "--latent-size", str(args.latent_size), "--steps", str(args.steps), "--warmup",
               str(args.warmup), "--threads", str(args.threads), "--device", args.device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{variant} failed: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(args, results, reference):
    lines = [f"# Training step, {args.model}, batch {args.batch}, {args.latent_size}x{args.latent_size}x4 latents, bf16",
             "", f"{time.strftime('%Y-%m-%d')}, {device_name(args.device)}, {args.threads} threads, torch 2.11.0. Medians of "
             f"{args.rounds} interleaved rounds of {args.steps} steps after {args.warmup} of warm-up.", "",
             *speed_and_memory_table(results, reference)]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dit", help="checkout of facebookresearch/DiT")
    parser.add_argument("--fast-dit", help="checkout of chuanyangjin/fast-DiT")
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--variants", default="dit,dit-compile,fast-dit,kiln,kiln-some,kiln-recompute")
    parser.add_argument("--model", default="DiT-S/2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--latent-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", help="also write the table to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-repo", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return peer_worker(args)
    variants = args.variants.split(",")
    results = in_turn(args.rounds, {variant: lambda variant=variant: run_variant(args, variant) for variant in variants})
    conclude(report(args, results, variants[0]), args.out)


if __name__ == "__main__":
    main()
