"""What the paths share: a folder in which the program's commands follow each other, and what a reader brings along."""

import contextlib
import gzip
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import tomllib
import zlib
from pathlib import Path

import numpy as np
import torch
from browser import check_report
from conftest import complaints, program
from diffusers import AutoencoderKL
from interruptions import PATIENCE_S, wait_until, wait_while_running
from PIL import Image, ImageDraw
from pipelines import START, kiln_normals, read_npz
from run_files import read_config, read_plan, step_lines
from torch.utils.flop_counter import FlopCounterMode

PROMPT, SEED, STEPS = "a red circle on a plain wall", 6, 4  # of what is drawn by diffusers' pipelines too
PEAK_FLOPS = {"A100-80G": 312e12, "A800-80G": 312e12, "RTX-3090": 71e12}  # of half precision, by the data sheets
# fast-DiT's README: 0.84 steps of 128 images in a second on an A100, each four forward passes of 237 GFLOP: a third.
MEASURED_SHARE = 0.84 * 128 * 4 * 237e9 / PEAK_FLOPS["A100-80G"]
COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "yellow": (230, 200, 50)}
SHAPES = ["circle", "square"]


class Spent:
    """What the program's commands took since `commands` was emptied: (ranks, seconds, command). ranks: the number that the test
    walks with; None: the command belongs to the guide on any number. seconds: processor time of one process, so that a command of
    several takes what it takes where each has a processor."""

    ranks, commands = None, []

    @classmethod
    @contextlib.contextmanager
    def by(cls, arguments):
        """Counts what ends inside. Yields a list to add seconds to that no process is left to tell."""
        def seconds():
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            return usage.ru_utime + usage.ru_stime

        before, untold = seconds(), []
        yield untold
        spent = (seconds() - before + sum(untold)) / (cls.ranks if {"--nproc", "--accelerate"} & {*arguments} else 1)
        cls.commands.append((cls.ranks, spent, " ".join(map(str, arguments))[:120]))


def run(*arguments, env=os.environ, **more):
    """kiln's completed process."""
    with Spent.by(arguments):
        return subprocess.run([str(program("kiln")), *map(str, arguments)], capture_output=True, text=True, timeout=600,
                              env=env, **more)


class Walk:
    """`folder`, and how many `ranks` its commands run on: `many` says it to those that take ranks."""

    def __init__(self, folder, ranks):
        self.folder, self.ranks = folder, ranks
        self.many = ["--nproc", ranks] if ranks > 1 else []
        self.started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            if process.poll() is None:
                process.kill()

    def __truediv__(self, name):
        return self.folder / name

    @staticmethod
    def kiln(*arguments, **options):
        result = run(*arguments, **options)
        assert result.returncode == 0, f"kiln {' '.join(map(str, arguments))}\n{result.stderr}"
        return result

    @staticmethod
    def json(*arguments, **options):
        return json.loads(Walk.kiln(*arguments, "--json", **options).stdout)

    @staticmethod
    def refused(command, given, expected, folder, classes=False):
        """A command with options `given` ends before it reads one of the pictures that it gets, which nobody can, and before it
        makes the folder of --out; its one line matches `expected`."""
        data = {"--data": not_pictures(folder / "no-pictures", classes)}
        arguments = [*command, *options(data | given), "--out", folder / "out"]
        result = run(*arguments)
        assert result.returncode == 1, result.stdout + result.stderr
        lines = complaints(result.stderr)
        assert len(lines) == 1 and len(lines[0]) <= 600 and result.stderr.splitlines()[-1] == lines[0], result.stderr
        assert not (folder / "out").exists(), f"--out was made, for nothing: {lines[0]}"
        assert re.search(expected, lines[0]), lines[0]

    def interrupted(self, stop, run, *arguments):
        """What the run into folder `run` says, which gets the signal `stop` once it has a checkpoint."""
        command = [str(part) for part in [program("kiln"), *arguments, "--out", run]]
        with Spent.by(arguments) as untold:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                       env=os.environ | {"OMP_WAIT_POLICY": "passive"})
            self.started.append(process)
            has_begun = wait_while_running(process, lambda: any(run.glob("checkpoints/step-*")))
            ranks = ranks_of(process.pid)
            untold.extend(seconds_of(rank) for rank in ranks if stop == signal.SIGKILL)  # nobody waits for them
            process.send_signal(stop)
            said, _ = process.communicate(timeout=PATIENCE_S)
        assert has_begun, f"it ended before it could be interrupted: {said}"
        wait_until(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks))  # none outlives its run
        assert process.returncode == (0 if stop == signal.SIGTERM else -stop), said
        return said


def options(given):
    """{option: value} as words; None: a flag."""
    return [word for option, value in given.items() for word in ([option] if value is None else [option, value])]


def ranks_of(launcher):
    return [int(pid) for task in Path(f"/proc/{launcher}/task").glob("*") for pid in (task / "children").read_text().split()]


def seconds_of(process):
    """What a process has taken of the processors."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps_of(run):
    return [line["step"] for line in step_lines(run)]


CURVES = ["Loss", "Loss by timestep", "Throughput, images/s", "Memory, GB", "Time of a step, ms", "Waiting for data", "Batches ready",
          "Learning rate", "Gradient norm", "Memory over a step"]


def check_run(page, run, headings=(), plots=(), rows={}, tables=(), **more):
    """The report of `run` is whole (check_report) and holds all that the run's files say: the newest figures, the usual
    curves, every figure of the plan and of what was measured, and every option, with its value where `rows` has no other."""
    values = {}
    for name, value in tomllib.loads((run / "config.toml").read_text()).items():
        if value != "" and name not in ("stage", "model-config"):  # shown as a table and in words
            text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
            values[name] = None if isinstance(value, list) else re.escape(text)
    drawing = read_config(run)["drawing"]  # the record's: options that draw nothing do not count
    values |= {name: re.escape(str(drawing[name.replace("-", "_")])) for name in ("sampler", "num-sampling-steps", "cfg-scale")}
    predicted, measured = (read_plan(run)[side] for side in ("predicted", "measured"))
    figures = ["peak memory", "step"]
    for prefix, key in (("memory of ", "by_kind"), ("memory in ", "by_phase"), ("time of ", "phase_s")):
        names = measured[key].keys() | (predicted[key].keys() if key != "by_phase" else set())
        if "rehearsal" in names:  # of the planned, largest batch: it is the peak, and these steps' batches were smaller
            names -= {"rehearsal", "first step", "steady step"}
        figures += [prefix + name for name in names if measured[key].get(name, 0) > 0 or predicted[key].get(name, 0) > 0]
    last = step_lines(run)[-1]
    cards = {"loss, smoothed": r"\d+\.\d{4}", "steps": str(last["step"]), "images seen": str(last["images_seen"]),
             "training time": r"\d+m \d\ds", "images/s, median": r"\d+\.\d", "host memory, highest": r"\d+\.\d\d GB"}
    check_report(page, headings=["Plan against measurement", "Settings", *headings], plots=[*CURVES, *plots], rows=values | rows, cards=cards,
                 tables=[(["predicted", "measured"], len(figures)), *tables], **more)
    assert sorted(cells[0] for head, *body in page.tables if "predicted" in head for cells in body) == sorted(figures)
    assert any(re.fullmatch(r"TFLOP/s, \d+ % of peak", name) for name in page.cards), page.cards


def plain(seed, size):
    """A smooth picture with some grain, (height, width, 3) bytes."""
    rng, (height, width) = np.random.default_rng(seed), size
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    base = rng.uniform(60, 190, 3) + (rng.uniform(-60, 60, 3) * x[..., None] + rng.uniform(-60, 60, 3) * y[..., None])
    return (base + rng.normal(0, 4, (height, width, 3))).clip(0, 255).astype(np.uint8)


def pictures(folder, count, size, classes=False):
    """JPEG and PNG files of `size` (height, width), or of sizes in turn, drawn with a shape; with metadata.jsonl, or in a
    folder for each class."""
    folder.mkdir(parents=True)
    sizes, lines = size if isinstance(size, list) else [size], []
    for index in range(count):
        height, width = sizes[index % len(sizes)]
        colour, shape = list(COLOURS)[index % 4], SHAPES[index // 4 % 2]
        picture = Image.fromarray(plain(index, (height, width)))
        box = [width // 4, height // 4, width * 3 // 4, height * 3 // 4]
        draw = ImageDraw.Draw(picture)
        (draw.ellipse if shape == "circle" else draw.rectangle)(box, COLOURS[colour])
        name = f"{colour + '/' if classes else ''}{index:03}.{'jpg' if index % 2 else 'png'}"
        (folder / name).parent.mkdir(exist_ok=True)
        picture.save(folder / name, quality=90)
        lines.append(json.dumps({"file_name": name, "text": f"a {colour} {shape} on a plain wall, photograph number {index}"}))
    if not classes:
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def clip_tokenizer(folder):
    """The published one, from the vocabulary that open_clip_torch carries (which is not imported): 49,408 tokens."""
    package = Path(importlib.util.find_spec("open_clip").submodule_search_locations[0])
    merges = gzip.open(package / "bpe_simple_vocab_16e6.txt.gz", "rt", encoding="utf-8").read().split("\n")[1:49152 - 256 - 2 + 1]
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet), *(line.replace(" ", "") for line in merges), "<|startoftext|>",
              "<|endoftext|>"]
    def added(text):
        return {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}

    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "add_prefix_space": False, "bos_token": added("<|startoftext|>"), "do_lower_case": True, "eos_token": added("<|endoftext|>"),
        "errors": "replace", "model_max_length": 77, "pad_token": "<|endoftext|>", "tokenizer_class": "CLIPTokenizer",
        "unk_token": added("<|endoftext|>")}))
    return folder


def not_pictures(folder, classes=False):
    """PNG files that end behind their header: their size can be read, and whoever reads more says that they are broken."""
    header = b"IHDR" + struct.pack(">2I5B", 1024, 1024, 8, 2, 0, 0, 0)
    for name in ("red/0.png", "green/1.png") if classes else ("0.png", "1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)))
    if not classes:
        (folder / "metadata.jsonl").write_text("".join(f'{{"file_name": "{i}.png", "text": "a caption"}}\n' for i in range(2)))
    return folder


def flops_of(forward):
    """Operations that torch counts in forward(), whose modules and tensors are on meta: nothing is computed."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward()
    return counter.get_total_flops()


def encoding_flops(side):
    """Of a picture by Stable Diffusion's autoencoder."""
    def encode():
        published = AutoencoderKL(block_out_channels=[128, 256, 512, 512], layers_per_block=2,
                                  down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)
        published.encode(torch.empty(1, 3, side, side))

    return flops_of(encode)


def drawn_by_kiln(walk, name, *source, prompt=PROMPT, **given):
    """Pixels (1, 3, H, W) of one picture, as pipelines draw it."""
    walk.kiln("sample", *source, "--prompt", prompt, "--negative-prompt", "ugly", "--cfg-scale", 3, "--num-sampling-steps", STEPS,
              "--num-images", 1, "--seed", SEED, *options(given), "--out", walk / name, "--npz", walk / f"{name}.npz")
    return read_npz(walk / f"{name}.npz")


def drawn_by(pipeline, latent, prompt=PROMPT, **more):
    """The same by a pipeline of diffusers, from latents of shape `latent` (C, H, W)."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(prompt, negative_prompt="ugly", guidance_scale=3.0, num_inference_steps=STEPS, output_type="pt",
                    latents=kiln_normals(SEED, START, [0], latent), **more).images * 2 - 1


def weights_of(run):
    """The newest that a run has."""
    return max(run.glob("checkpoints/step-*")) / "model.safetensors"


def without_tokenizer(encoder, folder):
    """A copy of an encoder's folder."""
    shutil.copytree(encoder, folder, ignore=shutil.ignore_patterns("*token*", "spiece.model", "vocab.*", "merges.txt"))
