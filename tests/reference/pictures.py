"""Pictures that tests make: of noise or of one colour, alone, in folders of classes or with captions."""

import json

import numpy as np
from PIL import Image


def noise_picture(rng, height, width):
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def captioned_pictures(folder, entries, sizes, seed=0):
    """A picture of one colour for each of `entries`, its line of metadata.jsonl; of `sizes` (height, width) in turn."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with open(folder / "metadata.jsonl", "w") as file:
        for index, entry in enumerate(entries):
            pixels = np.full((*sizes[index % len(sizes)], 3), rng.integers(0, 256, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.png")
            file.write(json.dumps({"file_name": f"{index}.png"} | entry) + "\n")
    return folder


def unequal_caption(index):
    return " ".join(["red", "a green apple", "two birds on a long fence"][: index % 3 + 1]) + f" {index}"
