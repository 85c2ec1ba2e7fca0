"""Training of DiT, or of a U-Net, on ranks of one machine: DeepSpeed's ZeRO against Kiln's, in turn in one run.

DeepSpeed trains the DiT of tests/reference/dit_torch.py (PyTorch modules, fused attention) over Gloo, with its own defaults but
for torch's AdamW (torch_adam: its own is an extension that would be compiled at the first use);
Kiln trains the same architecture with the same batch, ranks, threads and stage, and an average of the weights on top.
--model unet-half is diffusers' U-Net of Stable Diffusion 1.5 at half its width, activations channels-last, captions of 77 rows.
--offload keeps the optimizer in host memory in both; DeepSpeed's is then its own DeepSpeedCPUAdam, compiled at the first use.
Every measurement starts its own processes; the rounds interleave.

    PYTHON benchmarks/peers/train_deepspeed.py --kiln build/kiln [--stages 2,3] [--dtype bf16] [--rounds 3] [--out FILE.md]

PYTHON has torch, timm, diffusers, safetensors and deepspeed 0.19.8 (DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install
--no-build-isolation deepspeed==0.19.8). `--worker` is one of DeepSpeed's ranks; tests/reference/test_deepspeed_peer.py
lets it replay recorded batches.
"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from measuring import conclude, in_turn, kiln_images_per_s, processor
from train_text_model import HALF_SD15

MODELS = {  # hidden_size, depth, num_heads, patch_size
    "tiny": (48, 2, 3, 2),
    "DiT-S/2": (384, 12, 6, 2),
    "DiT-B/2": (768, 12, 12, 2),
}

UNETS = {
    "unet-tiny": dict(block_out_channels=[16, 24], layers_per_block=1, down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
                      up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"], norm_num_groups=8, cross_attention_dim=20,
                      attention_head_dim=4),
    "unet-half": HALF_SD15,
}
CAPTION_ROWS = 77
OFFLOADED = ("DeepSpeed's optimizer is its DeepSpeedCPUAdam on state in host memory, offload_optimizer's; the ranks are on a CPU, where Kiln's "
             "state is in host memory anyway.")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(command, ranks, **environment):
    """One process per rank; [(stdout, peak bytes)] of them, by rank."""
    common = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), **environment)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            variables = {key: str(value) for key, value in (common | dict(RANK=rank, LOCAL_RANK=rank)).items()}
            with open(f"{folder}/{rank}.out", "wb") as out, open(f"{folder}/{rank}.err", "wb") as err:
                processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | variables))
        results = []
        for rank, process in enumerate(processes):
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                for other in processes:
                    other.kill()
                raise RuntimeError(f"rank {rank} failed: {pathlib.Path(f'{folder}/{rank}.err').read_text()[-1500:]}")
            results.append((pathlib.Path(f"{folder}/{rank}.out").read_text(), usage.ru_maxrss * 1024))
        return results


def noised(x_0, noise, t):
    """The linear schedule of DDPM, alpha_bar in f64."""
    import torch

    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)[t].view(-1, 1, 1, 1)
    return (alpha_bar.sqrt() * x_0 + (1 - alpha_bar).sqrt() * noise).float()


def peer_model(args):
    """The model; what calls it on noisy latents, times, and labels or captions; one draw of those for `count` images."""
    import torch

    if args.model in UNETS:
        from diffusers import UNet2DConditionModel

        config = UNETS[args.model]
        model = UNet2DConditionModel(**config, sample_size=args.latent_size).train()  # DeepSpeed refuses channels-last weights
        return (model, lambda engine, x, t, captions: engine(x.contiguous(memory_format=torch.channels_last), t, captions).sample,
                lambda count, rows: torch.randn(count, CAPTION_ROWS, config["cross_attention_dim"], generator=rows))
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "reference"))
    from dit_torch import DiT

    width, depth, heads, patch = MODELS[args.model]
    model = DiT(input_size=args.latent_size, patch_size=patch, in_channels=4, hidden_size=width, depth=depth,
                num_heads=heads, num_classes=args.num_classes, learn_sigma=False)
    return (model, lambda engine, x, t, labels: engine(x, t, labels),
            lambda count, rows: torch.randint(0, args.num_classes, (count,), generator=rows))


def deepspeed_worker(args):
    """One rank: trains on the recorded batches of --batches, or on random ones, and prints a JSON line."""
    import deepspeed
    import deepspeed.ops
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Else it compiles its all-reduce through shared memory, a minute at the first use; both programs use Gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, predict, draw_condition = peer_model(args)
    if args.weights:
        model.load_state_dict(load_file(args.weights))
    micro_batch = args.batch // ranks // args.accumulation
    config = {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.999], "eps": 1e-8,
                                                  "weight_decay": args.weight_decay, "torch_adam": not args.offload}},
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": {"stage": args.stage} | ({"offload_optimizer": {"device": "cpu"}} if args.offload else {}),
        "steps_per_print": 1 << 30,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    rows = torch.Generator().manual_seed(rank)
    recorded = load_file(args.batches) if args.batches else None

    def micro_batches(step):
        """This rank's rows of the global batch: as Kiln divides it, consecutive ones."""
        if recorded is None:
            shape = (micro_batch, 4, args.latent_size, args.latent_size)
            for _ in range(args.accumulation):
                yield (torch.randn(shape, generator=rows), torch.randn(shape, generator=rows),
                       torch.randint(0, 1000, shape[:1], generator=rows), draw_condition(micro_batch, rows))
            return
        share, condition = args.batch // ranks, "encoder_hidden_states" if args.model in UNETS else "y"
        batch = [recorded[key].flatten(0, 1)[step * args.batch + rank * share:][:share] for key in ("x_start", "noise", "t", condition)]
        yield from zip(*(tensor.split(micro_batch) for tensor in batch))

    losses, seconds = [], []
    for step in range(args.steps + args.warmup):
        started, total = time.perf_counter(), 0.0
        for x_0, noise, t, condition in micro_batches(step):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
                prediction = predict(engine, noised(x_0, noise, t), t, condition)
            loss = ((prediction.float() - noise) ** 2).mean()
            engine.backward(loss)
            engine.step()
            total += loss.item() / args.accumulation
        mean = torch.tensor([total], dtype=torch.float64)
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        print(json.dumps({"losses": losses, "seconds": seconds[args.warmup:]}))


def run_deepspeed(args, stage):
    command = [sys.executable, __file__, "--worker", "--model", args.model, "--batch", str(args.batch), "--latent-size",
               str(args.latent_size), "--steps", str(args.steps), "--warmup", str(args.warmup), "--threads",
               str(args.threads), "--dtype", args.dtype, "--stage", str(stage), "--accumulation", str(args.accumulation),
               *(["--offload"] if args.offload else [])]
    results = start_ranks(command, args.ranks, DS_ACCELERATOR="cpu")
    seconds = json.loads(results[0][0].strip().splitlines()[-1])["seconds"]
    return {"seconds": statistics.median(seconds), "peak_bytes": max(peak for _, peak in results)}


def run_kiln(args, stage):
    if args.model in UNETS:
        model = ["--model", "unet2d_condition", "--model-config", json.dumps(UNETS[args.model])]
    else:
        width, depth, heads, patch = MODELS[args.model]
        model = ["--model", "dit", "--hidden-size", width, "--depth", depth, "--num-heads", heads, "--patch-size", patch]
    with tempfile.TemporaryDirectory() as folder:
        command = [args.kiln, "train", *model, "--data", "synthetic", "--image-size", args.latent_size * 8, "--out", f"{folder}/run",
                   "--max-steps", args.steps + args.warmup, "--global-batch", args.batch, "--micro-batch",
                   args.batch // args.ranks // args.accumulation, "--compute-dtype", args.dtype, "--objective", "epsilon",
                   "--max-grad-norm", args.max_grad_norm, "--device", "cpu", "--threads", args.threads, "--zero-stage", stage,
                   "--offload-optimizer", "cpu" if args.offload else "none", "--checkpoint-every", 0, "--log-every", 1,
                   "--no-tensorboard", "--peak-tflops", 1]
        results = start_ranks([str(part) for part in command], args.ranks)
        return {"seconds": args.batch / kiln_images_per_s(f"{folder}/run", args.warmup),
                "peak_bytes": max(peak for _, peak in results)}


def report(args, results):
    lines = [f"# Training on {args.ranks} ranks: {args.model}, batch {args.batch}, {args.latent_size}x{args.latent_size}x4 "
             f"latents, {args.dtype}{', optimizer in host memory' if args.offload else ''}, against DeepSpeed 0.19.8", "",
             f"{time.strftime('%Y-%m-%d')}, {processor()}, {args.threads} thread(s) per rank, torch 2.11.0, Gloo. Medians of {args.rounds} "
             f"interleaved rounds of {args.steps} steps after {args.warmup} of warm-up. Memory is the larger rank's peak resident "
             "set of the whole process. Both clip gradients to the same norm; Kiln also keeps an f32 average of the weights (EMA). That both "
             f"compute the same losses is tests/reference/test_deepspeed_peer.py's. {OFFLOADED if args.offload else ''}".rstrip(), "",
             "| stage | program | s/step (min..max) | peak memory of a rank | speed | memory |", "|---|---|---|---|---|---|"]
    for stage in args.stages:
        base = results["deepspeed", stage]
        for program in ("deepspeed", "kiln"):
            runs = results[program, stage]
            seconds = [run["seconds"] for run in runs]
            peak = statistics.median(run["peak_bytes"] for run in runs)
            speed = statistics.median(run["seconds"] for run in base) / statistics.median(seconds)
            memory = peak / statistics.median(run["peak_bytes"] for run in base)
            lines.append(f"| {stage} | {program} | {statistics.median(seconds):.3f} ({min(seconds):.3f}..{max(seconds):.3f}) | "
                         f"{peak / 1e9:.2f} GB | {speed:.2f}x | {memory:.2f}x |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--model", default="DiT-S/2", choices=[*MODELS, *UNETS])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--latent-size", type=int, default=32)
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"])
    parser.add_argument("--stages", type=lambda text: [int(part) for part in text.split(",")], default=[2, 3])
    parser.add_argument("--offload", action="store_true", help="the optimizer in host memory")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--out", help="also write the table to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--num-classes", type=int, default=1000, help=argparse.SUPPRESS)
    parser.add_argument("--lr", type=float, default=1e-4, help=argparse.SUPPRESS)
    parser.add_argument("--weight-decay", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    parser.add_argument("--batches", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return deepspeed_worker(args)
    runs = {"deepspeed": run_deepspeed, "kiln": run_kiln}
    results = in_turn(args.rounds, {(program, stage): lambda run=run, stage=stage: run(args, stage)
                                    for stage in args.stages for program, run in runs.items()})
    conclude(report(args, results), args.out)


if __name__ == "__main__":
    main()
