"""What the paths share: a folder in which the program's commands follow each other, and what a reader brings along."""

import gzip
import importlib.util
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
from conftest import program, run_program, succeed
from interruptions import PATIENCE_S, wait_while_running
from PIL import Image, ImageDraw

COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "yellow": (230, 200, 50)}
SHAPES = ["circle", "square"]


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
    def kiln(*arguments):
        return succeed(*arguments)

    @staticmethod
    def json(*arguments):
        return json.loads(succeed(*arguments, "--json").stdout)

    @staticmethod
    def refused(*arguments):
        """The one line of a command that ends at once, before it makes the folder of --out."""
        result = run_program("kiln", *arguments)
        assert result.returncode == 1, result.stdout + result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("kiln: ")]
        assert len(lines) == 1 and len(lines[0]) <= 600 and result.stderr.splitlines()[-1] == lines[0], result.stderr
        words = list(map(str, arguments))
        out = Path(words[words.index("--out") + 1])
        assert not out.exists(), f"{out} was made, for nothing: {lines[0]}"
        return lines[0]

    def interrupted(self, stop, run, *arguments):
        """The exit status of the run into folder `run`, which gets the signal `stop` once it has a checkpoint."""
        command = [str(part) for part in [program("kiln"), *arguments, "--out", run]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.started.append(process)
        has_begun = wait_while_running(process, lambda: any(run.glob("checkpoints/step-*")))
        ranks = ranks_of(process.pid)
        process.send_signal(stop)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert has_begun, f"it ended before it could be interrupted: {said}"
        deadline = time.monotonic() + PATIENCE_S
        while any(os.path.exists(f"/proc/{rank}") for rank in ranks):
            assert time.monotonic() < deadline, "a rank outlives its run"
            time.sleep(0.01)
        assert process.returncode == (0 if stop == signal.SIGTERM else -stop), said
        return said


def ranks_of(launcher):
    return [int(pid) for task in Path(f"/proc/{launcher}/task").glob("*") for pid in (task / "children").read_text().split()]


def steps_of(run):
    """The steps of the log, in its order."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


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
    """Files with the names of pictures that nobody can decode: whoever reads one says so."""
    for name in ("red/0.png", "green/1.png") if classes else ("0.png", "1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"this is not a picture")
    if not classes:
        (folder / "metadata.jsonl").write_text("".join(f'{{"file_name": "{i}.png", "text": "a caption"}}\n' for i in range(2)))
    return folder
