#!/usr/bin/env python3
"""Does LoRA move a model's pictures to a style that it has not seen? Everything from nothing, on a CPU.

A KL autoencoder (diffusers) and a CLIP with random weights (transformers) are made from the pictures; all else is done by
Kiln's own commands: features, a small U-Net trained on Noto's coloured emoji and Tux Paint's stamps, an adapter trained on
Symbola's black outlines of some of the emoji under the same names, pictures by both for the same names: those that the
adapter was trained on and as many others. Each picture votes by its five nearest real ones in colour among outlines of which
the adapter has seen none and as many pictures of the base's, drawn again for each of 20 votes.

    .venv/bin/python benchmarks/lora_fine_tune.py [--work demo/lora] [--out benchmarks/results/FILE.md] [--grid FILE.png]

Needs the packages fonts-noto-color-emoji, unicode-data, tuxpaint-stamps-default and fonts-symbola. Running it again goes on.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from measuring import conclude, processor  # noqa: E402

SIDE, ROWS, NEAREST, VOTES = 32, 24, 5, 20
OUTLINES, DRAWN = 300, 60  # in the set and, of other names, for the votes; names of each to draw
STAMPS = Path("/usr/share/tuxpaint/stamps")
SYMBOLA = Path("/usr/share/fonts/truetype/ancient-scripts/Symbola_hint.ttf")
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


def outline(font, character):
    """Symbola's glyph, black on a white square of SIDE pixels; None where it has none."""
    left, top, right, bottom = font.getbbox(character)
    if bytes(font.getmask(character)) == bytes(font.getmask("\U0010ffff")) or right <= left or bottom <= top:
        return None
    side = max(right - left, bottom - top) + font.size // 16
    square = Image.new("L", (side, side), 255)
    ImageDraw.Draw(square).text(((side - left - right) // 2, (side - top - bottom) // 2), character, font=font, fill=0)
    return square.resize((SIDE, SIDE), Image.LANCZOS).convert("RGB")


def stamps():
    """(picture, caption) of Tux Paint's that say in English what they are, but for its alphabet of hands: small, they look alike."""
    for path in sorted(STAMPS.rglob("*.png")):
        words = path.with_suffix(".txt")
        caption = words.read_text().splitlines()[0].strip().rstrip(".!") if words.exists() else ""
        if caption and not path.stem.endswith("_mirror") and path.parent.name != "asl":
            yield on_white(path), caption


def write_pictures(folder, pictures):
    folder.mkdir(parents=True)
    lines = []
    for number, (picture, caption) in enumerate(pictures):
        picture.save(folder / f"{number:05}.png")
        lines.append(json.dumps({"file_name": f"{number:05}.png", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def make_pictures(args):
    """WORK/base, WORK/set and WORK/unseen: outlines that the adapter is not trained on."""
    folders = [args.work / name for name in ("base", "set", "unseen")]
    if all((folder / "metadata.jsonl").exists() for folder in folders):
        return
    emoji = args.work / "emoji"
    for folder in (emoji, *folders):
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([Path(args.kiln).parent / "kiln-demo-data", "--out", emoji, "--no-skin-tones"], check=True)
    font = ImageFont.truetype(SYMBOLA, 4 * SIDE)
    coloured, outlines = [], []
    for line in (emoji / "metadata.jsonl").read_text().splitlines():
        line = json.loads(line)
        coloured.append((on_white(emoji / line["file_name"]), line["text"]))
        points = Path(line["file_name"]).stem.split("-")
        picture = outline(font, chr(int(points[0], 16))) if len(points) == 1 else None
        if picture:
            outlines.append((picture, line["text"]))
    np.random.default_rng(0).shuffle(outlines)
    for folder, pictures in zip(folders, (coloured + list(stamps()), outlines[:OUTLINES], outlines[OUTLINES:2 * OUTLINES])):
        write_pictures(folder, pictures)


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
    trained.train_from_iterator(captions_of(args.work / "base"),
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
         "--lora-rank", args.rank, "--lora-target", ".*", "--max-steps", args.lora_steps, "--lr", "2e-3", "--lr-warmup-steps", 20,
         "--lr-schedule", "cosine", "--ema-decay", "none", "--checkpoint-every", 0)


def draw(args, run, prompts):
    """(N, SIDE, SIDE, 3): a picture for each prompt."""
    listed, folder = args.work / "prompts.txt", args.work / f"{run}-pictures"
    listed.write_text("\n".join(prompts) + "\n")
    kiln(args, "sample", "--run", args.work / run, "--prompts", listed, "--num-images", len(prompts), "--cfg-scale", 3,
         "--sampler", "dpmpp_2m", "--num-sampling-steps", 25, "--seed", 1, "--batch", 40, "--out", folder)
    return read_all(sorted(folder.glob("0*.png")))


def colours(pictures):
    """(N, 2 SIDE SIDE): how bright and how colourful the pixels of each are, both in order of size and so wherever they lie.

    Pixel against pixel a thin line is as far from another a little aside as from a coloured area: of real outlines a quarter
    then votes for outlines.
    """
    pixels = pictures.reshape(len(pictures), -1, 3)
    return np.sort(np.stack([pixels.mean(2), pixels.max(2) - pixels.min(2)], 1), 2).reshape(len(pictures), -1).astype(np.float64)


def share_of_votes(pictures, inside, others, skip_self=False):
    """The mean share of `pictures` of whose NEAREST most lie in `inside`, against as many of `others`."""
    random, asked, shares = np.random.default_rng(0), colours(pictures), []
    for _ in range(VOTES):
        real = colours(np.concatenate([inside, others[random.choice(len(others), len(inside), replace=False)]]))
        distances = (asked ** 2).sum(1, keepdims=True) - 2 * asked @ real.T + (real ** 2).sum(1)
        if skip_self:
            distances[distances < 1e-9] = np.inf
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
    parser.add_argument("--autoencoder-steps", type=int, default=600)
    parser.add_argument("--base-steps", type=int, default=2000)
    parser.add_argument("--lora-steps", type=int, default=600)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", help="also write the result to this file")
    parser.add_argument("--grid", type=Path, help="write real pictures, the base's and the adapter's to this PNG")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    make_pictures(args)
    make_autoencoder(args)
    make_text_encoder(args)
    train_models(args)

    trained_on, inside, others = (read_all(sorted((args.work / name).glob("*.png"))) for name in ("set", "unseen", "base"))
    prompts = captions_of(args.work / "set")[:DRAWN] + captions_of(args.work / "unseen")[:DRAWN]
    drawn = {"the base": draw(args, "base-run", prompts), "the adapter on it": draw(args, "lora-run", prompts)}
    rows = [("real outlines, of names that the adapter has not seen", len(inside), share_of_votes(inside, inside, others, skip_self=True)),
            ("real outlines that the adapter was trained on", len(trained_on), share_of_votes(trained_on, inside, others)),
            ("real pictures of the base's data", len(others), share_of_votes(others, inside, others, skip_self=True))]
    for name, pictures in drawn.items():
        rows += [(f"drawn by {name}, names of the adapter's training", DRAWN, share_of_votes(pictures[:DRAWN], inside, others)),
                 (f"drawn by {name}, other names", DRAWN, share_of_votes(pictures[DRAWN:], inside, others))]
    lines = ["# LoRA to a style that the base has not seen: Symbola's black outlines of emoji", "",
             f"{time.strftime('%Y-%m-%d')}, {processor()}. `python benchmarks/lora_fine_tune.py`: a KL autoencoder of "
             f"{args.autoencoder_steps} steps, a U-Net of {args.base_steps} steps on {len(others)} coloured emoji and stamps of {SIDE} px, an "
             f"adapter of rank {args.rank}, on every layer, trained for {args.lora_steps} steps on the outlines of {len(trained_on)} emoji. Both "
             f"draw a picture for each of {DRAWN} names of those and of {DRAWN} other emoji; all names are in the base's data, with coloured "
             f"pictures. A picture is of the style where most of its {NEAREST} nearest real ones, by the order statistics of its pixels' "
             f"brightness and colourfulness, are among {len(inside)} outlines that the adapter has not seen and as many pictures of the base's "
             f"data; mean of {VOTES} draws of those.", "",
             "| | pictures | vote for the style |", "|---|---|---|"]
    lines += [f"| {name} | {count} | {100 * share:.0f} % |" for name, count, share in rows]
    if args.grid:
        shown = range(0, 2 * DRAWN, 10)
        real = np.concatenate([trained_on[:DRAWN], inside[:DRAWN]])
        save_grid(args.grid, [[pictures[i] for i in shown] for pictures in (real, *drawn.values())])
        lines += ["", "Rows: real outlines, the base's pictures for their names, the adapter's; on the right the names that the adapter was "
                  "not trained on.", "", f"![pictures](../../docs/images/{args.grid.name})"]
    conclude("\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
