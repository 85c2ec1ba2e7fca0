"""One training step of a model that takes captions, Kiln against diffusers' model in PyTorch, in turn in one run.

Measures forward + backward + AdamW (+ EMA, but for LoRA) on random latents and captions: diffusers' model under
torch.autocast bf16 with fused AdamW, as its users train it, and `kiln train` of the same sizes. --model:
  pixart     PixArtTransformer2DModel, captions of 1 to 120 rows: the peer pads and masks them, Kiln pads nothing
  sana       SanaTransformer2DModel of width 512 and depth 8, 1,024 tokens, captions of 100 rows
  unet       UNet2DConditionModel, Stable Diffusion 1.5's of half its width, 32x32 latents, channels-last in the peer
  unet-lora  an adapter of rank 16 on its attention: peft on the same U-Net, whose frozen weights are bf16 in both
Every measurement is a process of its own; the rounds interleave.

    python benchmarks/peers/train_text_model.py --model sana --kiln build/kiln [--variants diffusers,kiln,kiln-recompute]
        [--rounds 3] [--out benchmarks/results/FILE.md]
"""
import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from copy import deepcopy

from measuring import conclude, in_turn, processor, run_kiln_training, speed_and_memory_table

KILN_VARIANTS = {"kiln": ["--recompute", "none"], "kiln-recompute": ["--recompute", "all"],
                 "kiln-bf16-masters": ["--recompute", "all", "--master-dtype", "bf16"]}  # the peer keeps f32 masters
SD_SCHEDULE = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
HALF_SD15 = dict(block_out_channels=[160, 320, 640, 640], cross_attention_dim=768, attention_head_dim=8)
LORA_RANK = 16
SANA_ROWS, CAPTION_WIDTH, PIXART_ROWS = 100, 384, 120


# --- the peers: (model, parameters to train, one call: () -> loss) ---

def pixart_peer(args):
    import torch
    from diffusers import DDPMScheduler, PixArtTransformer2DModel

    model = PixArtTransformer2DModel(num_attention_heads=args.width // 64, attention_head_dim=64, in_channels=4, out_channels=4,
                                     num_layers=args.depth, cross_attention_dim=args.width, sample_size=args.side, patch_size=2,
                                     caption_channels=CAPTION_WIDTH, use_additional_conditions=False).train()
    schedule = DDPMScheduler(beta_schedule="linear")
    x = torch.randn(args.batch, 4, args.side, args.side)
    captions = torch.randn(args.batch, PIXART_ROWS, CAPTION_WIDTH)
    lengths = torch.randint(1, PIXART_ROWS + 1, (args.batch,))
    mask = (torch.arange(PIXART_ROWS) < lengths.unsqueeze(1)).long()

    def loss():
        t, noise = torch.randint(0, 1000, (args.batch,)), torch.randn_like(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(schedule.add_noise(x, noise, t), encoder_hidden_states=captions, encoder_attention_mask=mask, timestep=t,
                              added_cond_kwargs={"resolution": None, "aspect_ratio": None}).sample
        return torch.nn.functional.mse_loss(predicted.float(), noise)

    return model, list(model.parameters()), loss


def sana_peer(args):
    import torch
    from diffusers import SanaTransformer2DModel

    heads = args.width // 32
    model = SanaTransformer2DModel(in_channels=3, out_channels=3, num_attention_heads=heads, attention_head_dim=32, num_layers=args.depth,
                                   num_cross_attention_heads=heads, cross_attention_head_dim=32, cross_attention_dim=args.width,
                                   caption_channels=CAPTION_WIDTH, sample_size=args.side, patch_size=1).train()
    x = torch.randn(args.batch, 3, args.side, args.side)
    captions = torch.randn(args.batch, SANA_ROWS, CAPTION_WIDTH)

    def loss():
        t, noise = torch.rand(args.batch, 1, 1, 1), torch.randn_like(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model((1 - t) * x + t * noise, encoder_hidden_states=captions, timestep=1000 * t.flatten()).sample
        return torch.nn.functional.mse_loss(predicted.float(), noise - x)

    return model, list(model.parameters()), loss


def unet_loss(args, model):
    import torch
    from diffusers import DDPMScheduler

    schedule = DDPMScheduler(**SD_SCHEDULE)
    x = torch.randn(args.batch, 4, args.side, args.side).to(memory_format=torch.channels_last)
    captions = torch.randn(args.batch, 77, HALF_SD15["cross_attention_dim"])

    def loss():
        t, noise = torch.randint(0, 1000, (args.batch,)), torch.randn_like(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(schedule.add_noise(x, noise, t), t, encoder_hidden_states=captions).sample
        return torch.nn.functional.mse_loss(predicted.float(), noise)

    return loss


def half_sd15(side):
    import torch
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**HALF_SD15, sample_size=side).to(memory_format=torch.channels_last).train()


def unet_peer(args):
    model = half_sd15(args.side)
    return model, list(model.parameters()), unet_loss(args, model)


def unet_lora_peer(args):
    """As diffusers' train_text_to_image_lora.py: the base in bf16, the adapter in f32."""
    import torch
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    model = half_sd15(args.side).requires_grad_(False).to(torch.bfloat16)
    model.add_adapter(LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, init_lora_weights="gaussian",
                                 target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    cast_training_params(model, dtype=torch.float32)
    return model, [p for p in model.parameters() if p.requires_grad], unet_loss(args, model)


# --- Kiln's options, and the files that they name ---

def sana_store(args, folder):
    """The arguments of a store of 16 small pictures as they are, whose captions have SANA_ROWS rows by a small BERT."""
    import numpy as np
    from PIL import Image

    encoder, pictures, draw = folder / "bert", folder / "pictures", random.Random(0)
    pictures.mkdir()
    subprocess.run([sys.executable, __file__, "--worker", "bert", "--folder", str(encoder)], check=True, capture_output=True)
    words = ["".join(pair) for pair in itertools.product("abcdefghij", repeat=2)]
    (encoder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    (encoder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}))
    with open(pictures / "metadata.jsonl", "w") as lines:
        for number in range(16):
            pixels = np.random.default_rng(number).integers(0, 256, (args.side, args.side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(pictures / f"{number}.png")
            caption = " ".join(draw.choices(words, k=SANA_ROWS - 2))
            lines.write(json.dumps({"file_name": f"{number}.png", "text": caption}) + "\n")
    subprocess.run([args.kiln, "extract", "--data", pictures, "--autoencoder", "pixels", "--image-size", str(args.side), "--out",
                    folder / "store", "--text-encoder", encoder, "--text-max-tokens", str(SANA_ROWS)], check=True, capture_output=True)
    return ["--data", folder / "store", "--text-dropout-prob", 0, "--no-flip"]


def bert_worker(args):
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(hidden_size=CAPTION_WIDTH, num_hidden_layers=1, num_attention_heads=6, intermediate_size=64, vocab_size=105,
                         max_position_embeddings=128)).save_pretrained(args.folder)


def base_weights(args, folder):
    subprocess.run([sys.executable, __file__, "--worker", "base", "--folder", str(folder), "--side", str(args.side)], check=True,
                   capture_output=True)
    return ["--data", "synthetic", "--weights", folder / "base.safetensors"]


def base_worker(args):
    from safetensors.torch import save_file

    save_file({key: value.contiguous() for key, value in half_sd15(args.side).state_dict().items()}, f"{args.folder}/base.safetensors")


@dataclasses.dataclass
class Case:
    title: str
    peer: object
    options: object  # Kiln's, of args
    files: object = lambda args, folder: ["--data", "synthetic"]  # made once; the options that name them
    sizes: dict = dataclasses.field(default_factory=dict)  # what args leaves open
    averages: bool = True


UNET_OPTIONS = ["--model", "unet2d_condition", "--model-config", json.dumps(HALF_SD15), "--objective", "epsilon", "--beta-schedule",
                SD_SCHEDULE["beta_schedule"], "--beta-start", SD_SCHEDULE["beta_start"], "--beta-end", SD_SCHEDULE["beta_end"]]
CASES = {
    "pixart": Case(
        "PixArt of width {width} and depth {depth}, {tokens} tokens, captions of 1 to 120 rows", pixart_peer,
        lambda args: ["--model", "pixart", "--model-config",
                      json.dumps({"caption_channels": CAPTION_WIDTH, "model_max_length": PIXART_ROWS}), "--num-heads", args.width // 64,
                      "--hidden-size", args.width, "--depth", args.depth, "--patch-size", 2, "--image-size", 8 * args.side,
                      "--objective", "epsilon"],
        sizes=dict(width=384, depth=12, batch=8, side=64)),
    "sana": Case(
        "Sana of width {width} and depth {depth}, {tokens} tokens, captions of 100 rows", sana_peer,
        lambda args: ["--model", "sana", "--hidden-size", args.width, "--num-heads", args.width // 32, "--depth", args.depth,
                      "--patch-size", 1, "--image-size", args.side, "--objective", "flow"],
        sana_store, dict(width=512, depth=8, batch=8, side=32)),
    "unet": Case("Stable Diffusion 1.5's U-Net of half its width, {side}x{side} latents", unet_peer,
                 lambda args: [*UNET_OPTIONS, "--image-size", 8 * args.side], sizes=dict(batch=4, side=32)),
    "unet-lora": Case(
        f"LoRA of rank {LORA_RANK} on the attention of Stable Diffusion 1.5's U-Net of half its width, {{side}}x{{side}} latents",
        unet_lora_peer, lambda args: [*UNET_OPTIONS, "--image-size", 8 * args.side, "--lora-rank", LORA_RANK], base_weights,
        dict(batch=4, side=32), averages=False),
}


def peer_worker(args):
    """Runs in a process of its own: diffusers' model, timed."""
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    case = CASES[args.model]
    model, trained, loss_of_batch = case.peer(args)
    ema = deepcopy(model).requires_grad_(False) if case.averages else None
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0, fused=True)

    def step():
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - 0.9999)

    seconds = []
    for _ in range(args.warmup + args.steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"images_per_s": args.batch / statistics.median(seconds[args.warmup:]), "peak_bytes": peak}))


def run_variant(args, files, variant):
    case = CASES[args.model]
    if variant in KILN_VARIANTS:
        return run_kiln_training([args.kiln, "train", *case.options(args), *files, "--max-steps", args.warmup + args.steps, "--global-batch",
                                  args.batch, "--compute-dtype", "bf16", "--ema-decay", "0.9999" if case.averages else "none",
                                  "--lr", "1e-4", "--seed", 0, *KILN_VARIANTS[variant], "--checkpoint-every", 0,
                                  "--log-every", 1, "--threads", args.threads], args.warmup)
    sizes = [word for key in case.sizes for word in (f"--{key}", str(getattr(args, key)))]
    command = [sys.executable, __file__, "--worker", variant, "--model", args.model, *sizes, "--steps", str(args.steps), "--warmup",
               str(args.warmup), "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{variant} failed: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(args, results, reference):
    title = CASES[args.model].title.format(tokens=(args.side // (2 if args.model == "pixart" else 1)) ** 2, **vars(args))
    average = "and an average of the weights" if CASES[args.model].averages else "and no average"
    return "\n".join([f"# Training step, {title}, batch {args.batch}, bf16", "",
                      f"{time.strftime('%Y-%m-%d')}, {processor()}, {args.threads} threads, torch 2.11.0; AdamW {average} in both. Medians of "
                      f"{args.rounds} interleaved rounds of {args.steps} steps after {args.warmup} of warm-up.", "",
                      *speed_and_memory_table(results, reference)]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--model", default="pixart", choices=CASES)
    parser.add_argument("--variants", default="diffusers,kiln,kiln-recompute")
    for name, what in (("width", "of the transformer"), ("depth", "blocks"), ("batch", "images"), ("side", "of the latents")):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: the model's)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", help="also write the table to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for key, value in CASES[args.model].sizes.items():
        setattr(args, key, getattr(args, key) or value)
    if args.worker:
        return {"base": base_worker, "bert": bert_worker}.get(args.worker, peer_worker)(args)
    variants = args.variants.split(",")
    with tempfile.TemporaryDirectory() as folder:
        files = CASES[args.model].files(args, pathlib.Path(folder))
        results = in_turn(args.rounds, {variant: lambda variant=variant: run_variant(args, files, variant) for variant in variants})
    conclude(report(args, results, variants[0]), args.out)


if __name__ == "__main__":
    main()
