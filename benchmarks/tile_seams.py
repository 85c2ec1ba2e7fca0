"""How far an autoencoder's result in tiles is from the whole one: kiln-conformance, f32, both halves, several overlaps.

Random weights that keep the variance of what passes through them, of the published shapes but narrower (--width: a factor
of all channel counts), on a picture with a photograph's spectrum and on its latents. Published weights, where
they are given, take their place.

    python benchmarks/tile_seams.py [--build build] [--width 0.25] [--kl DIR] [--dc DIR] [--out FILE]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from diffusers import AutoencoderDC, AutoencoderKL
from safetensors.torch import load_file, save_file

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests/reference"))
from tile_seams import picture, seam_errors  # noqa: E402

KL = dict(down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4, layers_per_block=2)
DC = dict(attention_head_dim=32, latent_channels=32, encoder_layers_per_block=[2, 2, 2, 3, 3, 3], upsample_block_type="interpolate",
          decoder_layers_per_block=[3] * 6, encoder_block_types=["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
          decoder_block_types=["ResBlock"] * 3 + ["EfficientViTBlock"] * 3, encoder_qkv_multiscales=[[], [], [], [5], [5], [5]],
          decoder_qkv_multiscales=[[], [], [], [5], [5], [5]], downsample_block_type="conv", decoder_norm_types="rms_norm",
          decoder_act_fns="silu", scaling_factor=0.41407)


def random_model(name, width):
    torch.manual_seed(0)
    widths = [max(32, int(width * channels)) for channels in (128, 256, 512, 512, 1024, 1024)]
    if name == "kl":
        model = AutoencoderKL(**KL, block_out_channels=widths[:4])
    else:
        model = AutoencoderDC(**DC, encoder_block_out_channels=widths, decoder_block_out_channels=widths)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:  # PyTorch draws a third of the variance that keeps an input's
                parameter.mul_(3 ** 0.5)
    return model


class Conformance:
    """One autoencoder in kiln-conformance."""

    def __init__(self, build, folder, name, model):
        self.command = [build / "kiln-conformance", "forward", "--model", f"autoencoder_{name}", "--config", folder / "config.json",
                        "--weights", folder / "model.safetensors"]
        self.folder, self.name = folder, name
        (folder / "config.json").write_text(json.dumps(dict(model.config)))
        save_file({key: value.detach().contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors")

    def __call__(self, inputs, *tiles):
        save_file({key: value.contiguous() for key, value in inputs.items()}, self.folder / "inputs.safetensors")
        subprocess.run(list(map(str, [*self.command, "--inputs", self.folder / "inputs.safetensors", "--outputs",
                                      self.folder / "outputs.safetensors", *tiles])), check=True)
        return load_file(self.folder / "outputs.safetensors")


def rows_of(run, name, downsample, side, tile, overlaps):
    coded = "moments" if name == "kl" else "latent"
    encoded = run({"image": picture(side)})[coded]
    latents = encoded.chunk(2, 1)[0] if name == "kl" else encoded
    decoded = run({"latent": latents / latents.std()})["image"]
    rows = []
    for overlap in overlaps:
        stride = tile - round(tile * overlap)
        tiles = ["--tile", tile, "--tile-stride", stride]
        moments = run({"image": picture(side)}, *tiles)[coded]
        halves = {"encode": (latents, moments.chunk(2, 1)[0] if name == "kl" else moments, downsample),
                  "decode": (decoded, run({"latent": latents / latents.std()}, *tiles)["image"], 1)}
        for half, (whole, tiled, scale) in halves.items():
            error = seam_errors(whole, tiled, stride // scale, (tile - stride) // scale)
            rows.append(f"| {name} | {half} | {overlap:g} | {error['seam_rms']:.3f} | {error['seam_max']:.2f} | "
                        f"{error['inside_rms']:.3f} | {error['inside_max']:.2f} | {error['line']:.2f} |")
            print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=REPOSITORY / "build", help="build folder with kiln-conformance")
    parser.add_argument("--width", type=float, default=0.25, help="factor of the published channel counts")
    parser.add_argument("--kl", help="diffusers folder of an AutoencoderKL")
    parser.add_argument("--dc", help="diffusers folder of an AutoencoderDC")
    parser.add_argument("--out", help="also write the table there")
    arguments = parser.parse_args()
    rows = []
    for name, kind, downsample, side, tile, overlaps in (("kl", AutoencoderKL, 8, 512, 256, (0.125, 0.25, 0.5)),
                                                         ("dc", AutoencoderDC, 32, 1024, 512, (0.125, 0.25, 0.5))):
        given = getattr(arguments, name)
        model = kind.from_pretrained(given) if given else random_model(name, arguments.width)
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(Conformance(arguments.build, pathlib.Path(folder), name, model), name, downsample, side, tile, overlaps)
    text = "\n".join(["| autoencoder | half | overlap | RMS at seams | most at seams | RMS elsewhere | most elsewhere | line |",
                      "|---|---|---|---|---|---|---|---|", *rows, ""])
    if arguments.out:
        pathlib.Path(arguments.out).write_text(text)


if __name__ == "__main__":
    main()
