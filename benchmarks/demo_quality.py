"""Are the demo's samples recognisable, and are they new?

Compares sampled pictures with the real ones in pixel space: a 5-nearest-neighbour vote over the real pictures (at the
samples' resolution) says which class a sample looks like, and the distance to the nearest real
picture, against the same distance of real pictures among themselves, says whether it is a copy.

    python benchmarks/demo_quality.py --real demo/pictures --samples demo/samples [--min-accuracy 0.6] [--out FILE.md]

Real pictures: one folder per class. Samples: PNG files whose names contain the class as kiln sample writes them.
"""
import argparse
import pathlib
import sys

import numpy as np
from PIL import Image


def load(path, size):
    image = Image.open(path).convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.BICUBIC)
    return np.asarray(image, dtype=np.float32).reshape(-1) / 255


def root_mean_square_distances(a, b):
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.sqrt(np.maximum(squared, 0) / a.shape[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--real", type=pathlib.Path, required=True)
    parser.add_argument("--samples", type=pathlib.Path, required=True)
    parser.add_argument("--neighbours", type=int, default=5)
    parser.add_argument("--copy-distance", type=float, default=0.03, help="RMS distance in [0, 1] below which a sample is a near-copy")
    parser.add_argument("--min-accuracy", type=float, default=0.0)
    parser.add_argument("--max-copies", type=int, default=10**9)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()

    classes = sorted(folder.name for folder in args.real.iterdir() if folder.is_dir())
    sample_files = sorted(file for file in args.samples.glob("*.png") if "grid" not in file.name)
    if not sample_files or not classes:
        sys.exit(f"no samples in {args.samples} or no class folders in {args.real}")
    size = Image.open(sample_files[0]).size[0]
    real, real_class = [], []
    for index, name in enumerate(classes):
        files = sorted((args.real / name).glob("*.png"))
        real += [load(file, size) for file in files]
        real_class += [index] * len(files)
    real, real_class = np.stack(real), np.array(real_class)
    samples = np.stack([load(file, size) for file in sample_files])
    # The longest class name that the file name holds: names may be prefixes of one another.
    sample_class = np.array([max((len(name), index) for index, name in enumerate(classes) if name in file.name)[1]
                             for file in sample_files])

    distance = root_mean_square_distances(samples, real)
    votes = np.zeros((len(samples), len(classes)))
    for row, nearest in enumerate(np.argsort(distance, axis=1)[:, : args.neighbours]):
        np.add.at(votes[row], real_class[nearest], 1)
    right = votes.argmax(1) == sample_class
    among_real = root_mean_square_distances(real, real)
    np.fill_diagonal(among_real, np.inf)
    nearest_sample, nearest_real = distance.min(1), among_real.min(1)
    copies = int((nearest_sample < args.copy_distance).sum())

    lines = [f"{len(samples)} samples at {size} px against {len(real)} real pictures of {len(classes)} classes.", "",
             "| class | samples | recognised by 5 nearest neighbours |", "|---|---|---|"]
    for index, name in enumerate(classes):
        of_class = sample_class == index
        if of_class.any():
            lines.append(f"| {name} | {of_class.sum()} | {right[of_class].mean():.0%} |")
    lines += [f"| all | {len(samples)} | {right.mean():.0%} |", "",
              f"RMS distance (colours in [0, 1]) to the nearest real picture, median (min): samples {np.median(nearest_sample):.3f} "
              f"({nearest_sample.min():.3f}), real pictures among themselves {np.median(nearest_real):.3f} ({nearest_real.min():.3f}).",
              f"Near-copies (distance under {args.copy_distance}): {copies} of {len(samples)} samples; "
              f"{int((nearest_real < args.copy_distance).sum())} of {len(real)} real pictures."]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)
    if right.mean() < args.min_accuracy or copies > args.max_copies:
        sys.exit(f"expected at least {args.min_accuracy:.0%} recognised and at most {args.max_copies} near-copies")


if __name__ == "__main__":
    main()
