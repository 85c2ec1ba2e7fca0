#!/usr/bin/env python3
"""Does LoRA move a model's pictures to a set that it has not seen? Everything from nothing, on a CPU.

A KL autoencoder (diffusers) and a CLIP with random weights (transformers) are made from the pictures; all else is done by
Kiln's own commands: features, a small U-Net trained on emoji and Tux Paint's stamps without one category, an adapter
trained on that category, pictures by both for the same prompts. Each picture votes by its five nearest real ones among
the category and as many others, drawn again for each of 20 votes.

    .venv/bin/python benchmarks/lora_fine_tune.py [--work demo/lora] [--category symbols/alphabets/asl]
        [--out benchmarks/results/FILE.md] [--grid FILE.png]

Needs the packages fonts-noto-color-emoji, unicode-data and tuxpaint-stamps-default. Running it again goes on.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from measuring import conclude, processor  # noqa: E402

SIDE, ROWS, NEAREST, VOTES = 32, 24, 5, 20
STAMPS = Path("/usr/share/tuxpaint/stamps")
UNET = {"block_out_channels": [64, 128], "layers_per_block": 1, "attention_head_dim": 4, "norm_num_groups": 16,
        "down_block_types": ["CrossAttnDownBlock2D"] * 2, "up_block_types": ["CrossAttnUpBlock2D"] * 2}
OBJECTIVE = ["--objective", "epsilon", "--beta-schedule", "scaled_linear", "--beta-start", "0.00085", "--beta-end", "0.012"]


def kiln(args, *command):
    """Runs it to its end also when interrupted: it then writes a checkpoint, from which the next run goes on."""
    process = subprocess.Popen([args.kiln, *map(str, command)])
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if status:
        sys.exit(f"kiln {command[0]} failed")


def on_white(path):
    """A picture with its transparency on a white square of SIDE pixels."""
    picture = Image.open(path).convert("RGBA")
    picture.thumbnail((SIDE, SIDE), Image.LANCZOS)
    square = Image.new("RGB", (SIDE, SIDE), "white")
    square.paste(picture, ((SIDE - picture.width) // 2, (SIDE - picture.height) // 2), picture)
    return square


def stamps():
    """(path, caption) of Tux Paint's pictures that say in English what they are."""
    for path in sorted(STAMPS.rglob("*.png")):
        words = path.with_suffix(".txt")
        caption = words.read_text().splitlines()[0].strip().rstrip(".!") if words.exists() else ""
        if caption and not path.stem.endswith("_mirror"):
            yield path, caption


def write_pictures(folder, pictures):
    folder.mkdir(parents=True)
    lines = []
    for number, (picture, caption) in enumerate(pictures):
        picture.save(folder / f"{number:05}.png")
        lines.append(json.dumps({"file_name": f"{number:05}.png", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def make_pictures(args):
    """WORK/base and WORK/set."""
    if (args.work / "set" / "metadata.jsonl").exists():
        return
    for name in ("emoji", "base", "set"):
        shutil.rmtree(args.work / name, ignore_errors=True)
    emoji = args.work / "emoji"
    subprocess.run([Path(args.kiln).parent / "kiln-demo-data", "--out", emoji, "--no-skin-tones"], check=True)
    base = []
    for line in (emoji / "metadata.jsonl").read_text().splitlines():
        line = json.loads(line)
        base.append((on_white(emoji / line["file_name"]), line["text"]))
    inside, others = [], []
    for path, caption in stamps():
        (inside if path.parent == STAMPS / args.category else others).append((on_white(path), caption))
    if not inside:
        sys.exit(f"{STAMPS / args.category} holds no captioned pictures: install tuxpaint-stamps-default or name another --category")
    write_pictures(args.work / "base", base + others)
    write_pictures(args.work / "set", inside)


def captions_of(folder):
    return [json.loads(line)["text"] for line in (folder / "metadata.jsonl").read_text().splitlines()]


def read_all(paths):
    return np.stack([np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255 for path in paths])


def make_autoencoder(args):
    """A small KL autoencoder, 2 pixels a side of a latent, trained with diffusers on the base's pictures."""
    if (args.work / "vae" / "config.json").exists():
        return
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=[32, 64], layers_per_block=1, latent_channels=4, norm_num_groups=16, sample_size=SIDE,
                        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
    images = torch.from_numpy(read_all(sorted((args.work / "base").glob("*.png")))).permute(0, 3, 1, 2) * 2 - 1
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.autoencoder_steps)
    for step in range(args.autoencoder_steps):
        x = images[torch.randint(len(images), (32,))]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            got = vae.decode(posterior.sample()).sample.float()
        loss = (got - x).abs().mean() + 1e-5 * posterior.kl().float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"autoencoder: step {step}, loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        spread = torch.cat([vae.encode(part).latent_dist.mean for part in images[:512].split(64)]).std().item()
    vae.register_to_config(scaling_factor=1 / spread)
    vae.save_pretrained(args.work / "vae")


def make_text_encoder(args):
    """CLIP's tokenizer with merges of these captions, and a CLIP with random weights: frozen, it still tells words apart."""
    folder = args.work / "clip"
    if (folder / "config.json").exists():
        return
    import torch
    from tokenizers import Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder.mkdir(exist_ok=True)
    backend = CLIPTokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer, trained.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    trained.train_from_iterator(captions_of(args.work / "base") + captions_of(args.work / "set"),
                                trainers.BpeTrainer(vocab_size=4000, end_of_word_suffix="</w>", show_progress=False))
    merges = json.loads(trained.to_str())["model"]["merges"]
    alphabet = sorted(ByteLevel.alphabet())
    tokens = alphabet + [character + "</w>" for character in alphabet]
    tokens += dict.fromkeys(left + right for left, right in merges if left + right not in tokens)
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({text: index for index, text in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
        "model_max_length": ROWS, "tokenizer_class": "CLIPTokenizer"}))
    torch.manual_seed(0)
    CLIPTextModel(CLIPTextConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
                                 vocab_size=len(tokens), bos_token_id=len(tokens) - 2, eos_token_id=len(tokens) - 1,
                                 max_position_embeddings=ROWS)).save_pretrained(folder)


def train_models(args):
    work = args.work
    for name in ("base", "set"):
        kiln(args, "extract", "--data", work / name, "--autoencoder", work / "vae", "--image-size", SIDE, "--batch", 32, "--compute-dtype", "bf16",
             "--out", work / f"{name}-store", "--text-encoder", work / "clip", "--text-name", "clip")
    common = ["--model", "unet2d_condition", "--model-config", json.dumps(UNET), *OBJECTIVE, "--compute-dtype", "bf16",
              "--text-dropout-prob", "0.1", "--no-flip", "--max-grad-norm", "1", "--global-batch", 32, "--log-every", 50,
              "--no-tensorboard"]
    kiln(args, "train", *common, "--data", work / "base-store", "--out", work / "base-run", "--max-steps", args.base_steps,
         "--lr", "1e-3", "--lr-warmup-steps", 100, "--ema-decay", "0.998", "--ema-schedule", "diffusers",
         "--checkpoint-every", 500, "--keep-checkpoints", 1)
    weights = work / "unet.safetensors"
    if not weights.exists():
        kiln(args, "convert", "--in", work / "base-run", "--out", weights)
    kiln(args, "train", *common, "--data", work / "set-store", "--out", work / "lora-run", "--weights", weights,
         "--lora-rank", args.rank, "--max-steps", args.lora_steps, "--lr", "2e-3", "--lr-warmup-steps", 20, "--lr-schedule", "cosine",
         "--ema-decay", "none", "--checkpoint-every", 0)


def draw(args, run, prompts):
    """(N, SIDE, SIDE, 3): two pictures for each prompt."""
    listed, folder = args.work / "prompts.txt", args.work / f"{run}-pictures"
    listed.write_text("\n".join(prompts) + "\n")
    kiln(args, "sample", "--run", args.work / run, "--prompts", listed, "--num-images", 2 * len(prompts), "--cfg-scale", 3,
         "--sampler", "dpmpp_2m", "--num-sampling-steps", 25, "--seed", 1, "--batch", 36, "--out", folder)
    return read_all(sorted(folder.glob("0*.png")))


def share_of_votes(pictures, inside, others, skip_self=False):
    """The mean share of `pictures` of whose NEAREST most lie in `inside`, against as many of `others`."""
    random = np.random.default_rng(0)
    shares = []
    for _ in range(VOTES):
        real = np.concatenate([inside, others[random.choice(len(others), len(inside), replace=False)]]).reshape(2 * len(inside), -1)
        distances = ((pictures.reshape(len(pictures), 1, -1) - real[None]) ** 2).sum(2)
        if skip_self:
            distances[distances == 0] = np.inf
        shares.append((np.argsort(distances, 1)[:, :NEAREST] < len(inside)).sum(1) > NEAREST // 2)
    return float(np.mean(shares))


def save_grid(path, rows):
    """Rows of pictures, each twice as large."""
    side, columns = 2 * SIDE, max(len(row) for row in rows)
    sheet = Image.new("RGB", (columns * (side + 2), len(rows) * (side + 2)), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(Image.fromarray((picture * 255).round().astype(np.uint8)).resize((side, side), Image.NEAREST),
                        (x * (side + 2), y * (side + 2)))
    sheet.save(path, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--work", type=Path, default=Path("demo/lora"))
    parser.add_argument("--category", default="symbols/alphabets/asl", help="folder of Tux Paint's stamps that the base does not see")
    parser.add_argument("--autoencoder-steps", type=int, default=600)
    parser.add_argument("--base-steps", type=int, default=2400)
    parser.add_argument("--lora-steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", help="also write the result to this file")
    parser.add_argument("--grid", type=Path, help="write real pictures, the base's and the adapter's to this PNG")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    make_pictures(args)
    make_autoencoder(args)
    make_text_encoder(args)
    train_models(args)

    inside, others = (read_all(sorted((args.work / name).glob("*.png"))) for name in ("set", "base"))
    prompts = captions_of(args.work / "set")
    drawn = {"the base": draw(args, "base-run", prompts), "the adapter on it": draw(args, "lora-run", prompts)}
    rows = [("real pictures of the set", len(inside), share_of_votes(inside, inside, others, skip_self=True)),
            ("real pictures of the base's data", len(others), share_of_votes(others, inside, others, skip_self=True)),
            *[(f"drawn by {name}", len(pictures), share_of_votes(pictures, inside, others)) for name, pictures in drawn.items()]]
    lines = [f"# LoRA to a set that the base has not seen: Tux Paint's {args.category}", "",
             f"{time.strftime('%Y-%m-%d')}, {processor()}. `python benchmarks/lora_fine_tune.py`: a KL autoencoder of "
             f"{args.autoencoder_steps} steps, a U-Net of {args.base_steps} steps on {len(others)} emoji and stamps of {SIDE} px, an adapter of "
             f"rank {args.rank} trained for {args.lora_steps} steps on the {len(inside)} pictures of the set. Both draw two pictures for each caption of "
             f"the set. A picture is of the set where most of its {NEAREST} nearest real ones are, by squared distance of pixels, among the set and as many "
             f"others; mean of {VOTES} draws of the others.", "", "| | pictures | vote for the set |", "|---|---|---|"]
    lines += [f"| {name} | {count} | {100 * share:.0f} % |" for name, count, share in rows]
    if args.grid:
        shown = range(0, len(inside), max(1, len(inside) // 18))
        save_grid(args.grid, [[pictures[i] for i in shown] for pictures in (inside, *drawn.values())])
        lines += ["", "Rows: real pictures of the set, the base's for their captions, the adapter's.", "", f"![pictures]({args.grid.name})"]
    conclude("\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
