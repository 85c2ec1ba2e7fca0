"""What Kiln keeps of its speed beside another program: images/s of training alone, beside a busy loop of one thread per
processor, and beside the same loop with the lowest priority. Prints Markdown.

    python benchmarks/beside_other_work.py [--kiln build/kiln] [--before OTHER_KILN] [--rounds 5] [--dtype bf16]
                                           [--model small DiT-S/2 PixArt U-Net extraction] [--only-alone]

With --before, both programs take turns, so that the machine is the same for both; --only-alone tells then whether a change made
training slower. Losses say whether all runs computed the same bits. "extraction" is `kiln extract` of pictures of 1024 px by an
autoencoder of Stable Diffusion's shape with random weights, whole: it starts, decodes, encodes and writes; its bits are the
latents'. Nothing else should run on the machine.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

BESIDE = {"alone": None, "beside a niced loop": ["nice", "-n", "19"], "beside an equal loop": []}
GOALS = {"alone": 1.0, "beside a niced loop": 0.60, "beside an equal loop": 0.45}
MODELS = {
    "small": "--model dit --hidden-size 192 --depth 4 --num-heads 4 --patch-size 2 --image-size 128 --global-batch 16 --max-steps 60",
    "DiT-S/2": "--model DiT-S/2 --image-size 256 --global-batch 16 --max-steps 10",
    "PixArt": """--model pixart --model-config '{"caption_channels": 384, "model_max_length": 120}' --objective epsilon --patch-size 2
                 --hidden-size 384 --depth 12 --num-heads 6 --image-size 512 --global-batch 8 --max-steps 8""",
    "U-Net": """--model unet2d_condition --model-config '{"block_out_channels": [160, 320, 640, 640], "cross_attention_dim": 768,
                "attention_head_dim": 8}' --objective epsilon --image-size 256 --global-batch 4 --max-steps 8""",
}
WARM_UP = 3  # steps
EXTRACTED = 40  # pictures


@contextlib.contextmanager
def busy_loops(words):
    """Runs a loop per processor, started with these words; none for None."""
    count = 0 if words is None else len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([*words, "sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def train(kiln, model, dtype):
    """Images/s over all steps after the warm-up, and the losses."""
    with tempfile.TemporaryDirectory() as out:
        command = [kiln, "train", *shlex.split(MODELS[model]), "--data", "synthetic", "--compute-dtype", dtype, "--device", "cpu", "--log-every", "1",
                   "--no-tensorboard", "--no-preflight", "--peak-tflops", "1", "--checkpoint-every", "0", "--out", out]
        subprocess.run(command, check=True, capture_output=True)
        steps = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss" in step]
    speeds = [step["images_per_s"] for step in steps[WARM_UP:]]
    return statistics.harmonic_mean(speeds), tuple(step["loss"] for step in steps)


def make_pictures_and_autoencoder(folder):
    import numpy
    from diffusers import AutoencoderKL
    from PIL import Image

    (folder / "pictures").mkdir()
    noise = numpy.random.default_rng(0)
    for i in range(EXTRACTED):
        coarse = Image.fromarray(noise.integers(0, 256, (64, 64, 3), dtype=numpy.uint8))
        coarse.resize((1024, 1024), Image.BICUBIC).save(folder / "pictures" / f"{i}.jpg")
    AutoencoderKL(in_channels=3, out_channels=3, latent_channels=4, layers_per_block=2, block_out_channels=[128, 256, 512, 512],
                  down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4).save_pretrained(folder / "autoencoder")


def extract(kiln, folder, dtype):
    """Images/s of a whole extraction, and a hash of the latents."""
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        subprocess.run([kiln, "extract", "--data", folder / "pictures", "--autoencoder", folder / "autoencoder", "--image-size", "256",
                        "--compute-dtype", dtype, "--device", "cpu", "--out", f"{out}/store"], check=True, capture_output=True)
        rate = EXTRACTED / (time.perf_counter() - started)
        latents = hashlib.sha256()
        for path in sorted(Path(out, "store").glob("*.safetensors")):
            latents.update(path.read_bytes())
    return rate, latents.hexdigest()


def measure(programs, model, arguments, folder):
    run = partial(extract, folder=folder) if model == "extraction" else partial(train, model=model)
    states = {name: words for name, words in BESIDE.items() if name == "alone" or not arguments.only_alone}
    speeds = {(name, beside): [] for name in programs for beside in states}
    losses = {name: set() for name in programs}
    for _ in range(arguments.rounds):
        for beside, words in states.items():
            for name, kiln in programs.items():
                with busy_loops(words):
                    speed, loss = run(kiln, dtype=arguments.dtype)
                speeds[name, beside].append(speed)
                losses[name].add(loss)
    medians = {key: statistics.median(of) for key, of in speeds.items()}
    print(f"\n{model}, {arguments.dtype}, {len(os.sched_getaffinity(0))} processors; medians of {arguments.rounds} rounds\n")
    print(f"| | {' | '.join(f'{name}, images/s | of its speed alone' for name in programs)} | goal |")
    print("|---|" + "---|---|" * len(programs) + "---|")
    for beside in states:
        cells = [f"{medians[name, beside]:.1f} | {medians[name, beside] / medians[name, 'alone']:.2f}" for name in programs]
        print(f"| {beside} | {' | '.join(cells)} | {GOALS[beside]:.2f} |")
    same = [f"{name}: {'the same' if len(of) == 1 else f'{len(of)} kinds of'} bits in all runs" for name, of in losses.items()]
    print(f"\n{'; '.join(same)}.", end="")
    if len(programs) > 1:
        now, before = programs
        print(f" {'The same' if losses[now] == losses[before] else 'Other'} bits as before; alone {medians[now, 'alone'] / medians[before, 'alone']:.3f} "
              "times as fast.", end="")
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--before", help="a program to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", nargs="+", default=[*MODELS, "extraction"], choices=[*MODELS, "extraction"])
    parser.add_argument("--only-alone", action="store_true", help="leave out the busy loops")
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"])
    arguments = parser.parse_args()
    programs = {"Kiln": arguments.kiln} | ({"before": arguments.before} if arguments.before else {})
    with tempfile.TemporaryDirectory() as folder:
        if "extraction" in arguments.model:
            make_pictures_and_autoencoder(Path(folder))
        for model in arguments.model:
            measure(programs, model, arguments, Path(folder))


main()
