#!/usr/bin/env python3
"""How well the model of scripts/demo --text draws what it is told.

Of captions that it was trained on: whether the picture's own emoji is among the five real ones nearest to the drawing.
Of the 40 that it has not seen: whether a colour's hue is within 30 degrees, and whether the real emoji nearest to the
drawing, among its five skin tones, is of the one asked for. Each also with the prompts shuffled, which is chance.

    .venv/bin/python benchmarks/demo_text_quality.py [--run demo/text/run] [--pictures DIR] [--each 8]

`--pictures`: all emoji with their names, of kiln-demo-data without --except; made beside the run when it is not there.
"""

import argparse
import colorsys
import json
import random
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 32
HUES = {"red": 0, "orange": 30, "yellow": 50, "brown": 20, "green": 120, "blue": 210, "purple": 285}
TONES = ["light", "medium-light", "medium", "medium-dark", "dark"]


def name_of(line):
    text = line["text"]
    return text if isinstance(text, str) else text[0]["text"]


def read(path):
    image = Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.BICUBIC)
    return np.asarray(image, dtype=np.float32) / 255


def hue_of(picture):
    """Of the pixels that are not near white, grey or black, in degrees; None without any."""
    hsv = np.array([colorsys.rgb_to_hsv(*pixel) for pixel in picture.reshape(-1, 3)])
    coloured = hsv[(hsv[:, 1] > 0.3) & (hsv[:, 2] > 0.2)]
    if len(coloured) < SIDE:
        return None
    angle = np.exp(2j * np.pi * coloured[:, 0]).mean()
    return float(np.degrees(np.angle(angle)) % 360)


def draw(arguments, prompts, folder):
    listed = folder.with_suffix(".txt")
    listed.write_text("\n".join(prompts) + "\n")
    subprocess.run([arguments.kiln, "sample", "--run", arguments.run, "--prompts", listed, "--num-images", str(len(prompts) * arguments.each),
                    "--cfg-scale", "3", "--sampler", "flow_euler", "--num-sampling-steps", "50", "--seed", "1", "--compute-dtype", "f32",
                    "--batch", "40", "--out", folder], check=True)
    drawn = [read(path) for path in sorted(folder.glob("0*.png"))]
    return [(prompts[i % len(prompts)], picture) for i, picture in enumerate(drawn)]


def share(judgements):
    known = [one for one in judgements if one is not None]
    return f"{100 * sum(known) / max(len(known), 1):.0f} % of {len(known)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default="build/kiln")
    parser.add_argument("--run", default="demo/text/run")
    parser.add_argument("--pictures", type=Path, default=Path("demo/text/all"))
    parser.add_argument("--unseen", type=Path, default=Path("recipes/demo-text-unseen.txt"))
    parser.add_argument("--each", type=int, default=8, help="pictures of each prompt")
    parser.add_argument("--out", type=Path, default=Path("demo/text/quality"))
    arguments = parser.parse_args()
    if not arguments.pictures.exists():
        subprocess.run([str(Path(arguments.kiln).parent / "kiln-demo-data"), "--out", str(arguments.pictures)], check=True)
    arguments.out.mkdir(parents=True, exist_ok=True)

    lines = [json.loads(line) for line in (arguments.pictures / "metadata.jsonl").read_text().splitlines()]
    real = {name_of(line): read(arguments.pictures / line["file_name"]) for line in lines}
    names = list(real)
    matrix = np.stack([real[name].ravel() for name in names])
    unseen = arguments.unseen.read_text().split("\n")[:-1]

    def nearest(picture, candidates):
        rows = matrix if candidates is None else np.stack([real[name].ravel() for name in candidates])
        order = np.argsort(((rows - picture.ravel()) ** 2).sum(1))
        return [(names if candidates is None else candidates)[i] for i in order]

    def retrieved(prompt, picture):
        return prompt in nearest(picture, None)[:5]

    def right_hue(prompt, picture):
        wanted = HUES.get(prompt.split()[0])
        if wanted is None or ":" in prompt:
            return None
        hue = hue_of(picture)
        return hue is not None and min(abs(hue - wanted), 360 - abs(hue - wanted)) <= 30

    def right_tone(prompt, picture):
        if not prompt.endswith(" skin tone"):
            return None
        who = prompt.split(": ")[0]
        return nearest(picture, [f"{who}: {tone} skin tone" for tone in TONES])[0] == prompt

    seen = random.Random(1).sample([name for name in names if name not in unseen], 40)
    rows = []
    for title, prompts, judge in (("seen captions among the 5 nearest", seen, retrieved), ("unseen colours within 30 degrees", unseen, right_hue),
                                  ("unseen skin tones", unseen, right_tone)):
        drawn = draw(arguments, prompts, arguments.out / ("seen" if prompts is seen else "unseen"))
        asked = [prompt for prompt, _ in drawn if judge(prompt, real[prompt]) is not None]
        shuffled = iter(random.Random(2).sample(asked, len(asked)))
        rows.append((title, share([judge(prompt, picture) for prompt, picture in drawn]),
                     share([judge(next(shuffled), picture) for prompt, picture in drawn if judge(prompt, real[prompt]) is not None])))
    print("\n| | drawn as asked | prompts shuffled |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
