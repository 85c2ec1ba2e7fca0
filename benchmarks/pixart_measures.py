"""What each measure of a guide on PixArt-Sigma's speed gains: recipes/pixart/variants.toml run on a small PixArt on this machine.

Captioned pictures of random colours, an autoencoder of Stable Diffusion's published shape with random weights, and a text
encoder from a folder: the time does not depend on the values. The variants are the recipe's; only the two encoders are exchanged.

    python benchmarks/pixart_measures.py --kiln build/kiln --text-encoder MINILM [--steps 6] [--out FILE]
"""
import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))
from measuring import conclude, processor  # noqa: E402

RECIPE = pathlib.Path(__file__).parents[1] / "recipes/pixart/variants.toml"
SIDE, PICTURES, BATCH = 256, 16, 8
MODEL = ["--model", "pixart", "--hidden-size", 384, "--depth", 12, "--num-heads", 6, "--patch-size", 2, "--image-size", SIDE,
         "--global-batch", BATCH, "--device", "cpu"]
WORDS = "a small red house beside the river under two tall trees while birds fly over an old wooden bridge at dusk".split()


def write_pictures(folder):
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    folder.mkdir()
    with open(folder / "metadata.jsonl", "w") as file:
        for index in range(PICTURES):
            coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
            coarse.resize((SIDE, SIDE)).save(folder / f"{index}.png")
            caption = " ".join(random.choice(WORDS, int(random.integers(5, 40))))
            file.write(json.dumps({"file_name": f"{index}.png", "text": caption}) + "\n")


def write_autoencoder(folder):
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(in_channels=3, out_channels=3, latent_channels=4, layers_per_block=2, block_out_channels=[128, 256, 512, 512],
                  down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4).save_pretrained(folder)


def row_of(variant):
    def cell(key, form):
        return form.format(variant[key]) if key in variant else ""

    encoding = variant["encoding_share"]
    changes = ", ".join(f"`{change}`" if not change.endswith(" ") else f"no `{change.strip()}`" for change in variant["changes"])
    return (f"| {variant['name']} | {changes} | {variant['step_s']:.2f} | "
            f"{variant['images_per_s']:.2f} | {cell('gain', '{:.2f}x')} | {variant['gain_in_all']:.2f}x | "
            f"{f'{encoding:.0%}' if encoding else ''} | {variant['memory_bytes'] / 2**30:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", required=True)
    parser.add_argument("--text-encoder", required=True, help="folder with its weights and tokenizer")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", help="also write the report there")
    arguments = parser.parse_args()
    kiln, encoder = os.path.abspath(arguments.kiln), os.path.abspath(arguments.text_encoder)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_pictures(folder / "pictures")
        write_autoencoder(folder / "autoencoder")
        recipe = RECIPE.read_text().replace('"sd-vae-ft-mse"', '"autoencoder"').replace('"t5-v1_1-xxl-encoder"', json.dumps(encoder))
        (folder / "variants.toml").write_text(recipe)

        def run(*command):
            done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(done.stderr)
            return done.stdout

        run(kiln, "extract", "--data", "pictures", "--autoencoder", "autoencoder", "--image-size", SIDE, "--text-encoder", encoder,
            "--out", "store", "--compute-dtype", "bf16", "--device", "cpu")
        table = json.loads(run(kiln, "probe", "--variants", "variants.toml", *MODEL, "--steps", arguments.steps, "--no-checkpoint",
                               "--json"))
    failed = [variant for variant in table["variants"] if "problem" in variant]
    if failed:
        sys.exit("\n".join(f"{variant['name']}: {variant['problem']}" for variant in failed))
    conclude("\n".join([
        f"# PixArt, one measure at a time: {processor()}, {datetime.date.today()}", "",
        f"`kiln probe --variants` on `recipes/pixart/variants.toml` with a PixArt of width 384 and depth 12, {SIDE} px, {BATCH} images a "
        f"step, AdamW and EMA, {arguments.steps} steps each (`benchmarks/pixart_measures.py`). The autoencoder has Stable Diffusion's published "
        "shape; captions have 5 to 39 words. \"On it\" is the gain over the row above, memory that of tensors. The load at the end was "
        f"{os.getloadavg()[1]:.1f}.", "",
        "| variant | what it changes | s a step | images/s | on it | in all | encoding | GiB |", "|---|---|---|---|---|---|---|---|",
        *map(row_of, table["variants"]), ""]), arguments.out)


if __name__ == "__main__":
    main()
