"""Which picture format and compression one thread reads fastest: photographs written in each, read by Kiln's own decoders.

    python benchmarks/picture_formats.py --bench build/benchmarks/bench_picture_reading --kiln build/kiln --photos FOLDER [--out FILE]

FOLDER holds photographs of at least 512 x 512 pixels (others are left out); each gives one crop of 512 x 512. The rows end with a
store of what `kiln extract` makes of them: pixels, and latents of random values, which take what real ones take.
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))
from measuring import processor  # noqa: E402

SIDE, SIZE, SECONDS = 512, 256, 1.0
KINDS = {
    **{f"JPEG quality {quality}": ("jpg", {"quality": quality}) for quality in (75, 85, 90, 95)},
    "JPEG quality 90, colour at full resolution": ("jpg", {"quality": 90, "subsampling": 0}),
    "JPEG quality 90, progressive": ("jpg", {"quality": 90, "progressive": True}),
    **{f"PNG level {level}": ("png", {"compress_level": level}) for level in (0, 1, 6, 9)},
    **{f"WebP quality {quality}": ("webp", {"quality": quality}) for quality in (75, 90)},
    "WebP lossless": ("webp", {"lossless": True}),
}


def crops(photos):
    from PIL import Image

    found = []
    for path in sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")):
        picture = Image.open(path)
        if picture.mode != "RGB" or min(picture.size) < SIDE - SIDE // 4:
            continue
        scale = SIDE / min(picture.size)
        picture = picture.resize([max(SIDE, round(side * scale)) for side in picture.size], Image.LANCZOS)
        left, top = ((side - SIDE) // 2 for side in picture.size)
        found.append(picture.crop((left, top, left + SIDE, top + SIDE)))
    return found


def write_latents(folder, count):
    """A store as kiln extract writes it, through the import of fast-DiT's features."""
    import numpy as np

    random = np.random.default_rng(0)
    for name in ("features", "labels"):
        (folder / name).mkdir(parents=True)
    for index in range(count):
        np.save(folder / "features" / f"{index}.npy", random.standard_normal((1, 4, SIZE // 8, SIZE // 8), dtype=np.float32))
        np.save(folder / "labels" / f"{index}.npy", np.array([0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("bench", "kiln", "photos"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pictures = crops(options.photos)
        for kind, (suffix, settings) in KINDS.items():
            (folder / kind).mkdir()
            for index, picture in enumerate(pictures):
                picture.save(folder / kind / f"{index:03d}.{suffix}", **settings)
        store = folder / f"store of pixels, {SIZE} px"
        subprocess.run([options.kiln, "extract", "--data", folder / "PNG level 6", "--autoencoder", "pixels", "--image-size", str(SIZE),
                        "--out", store], check=True, capture_output=True)
        latents = folder / f"store of latents of {SIZE} px, f32"
        write_latents(folder / "fast-dit", len(pictures))
        subprocess.run([options.kiln, "store", "import", folder / "fast-dit" / "features", folder / "fast-dit" / "labels", "--out", latents,
                        "--image-size", str(SIZE)], check=True, capture_output=True)
        rows = subprocess.run([options.bench, str(SIZE), str(SECONDS), *[folder / kind for kind in KINDS], store, latents], check=True,
                              capture_output=True, text=True).stdout
    lines = [f"# Reading pictures by format: {processor()}, {datetime.date.today()}", "",
             f"{len(pictures)} photographs of {SIDE} x {SIDE} px, one thread, files in memory; of each picture the least processor time in {SECONDS:g} s "
             "(`benchmarks/picture_formats.py`). \"To "
             f"{SIZE} px\" resizes and crops; images/s are of both. Stores are read from "
             "the processor's cache here: a disk or the memory limits them, not the thread.", "",
             f"| format | KiB | decode, ms | Mpixel/s | to {SIZE} px, ms | images/s of a thread |", "|---|---|---|---|---|---|"]
    for row in map(json.loads, rows.splitlines()):
        decode_ms, crop_ms = 1e3 * row["decode_s"], 1e3 * row["crop_s"]
        speed = f"{row['pixels'] / row['decode_s'] / 1e6:.0f}" if "pixels" in row else ""
        lines.append(f"| {pathlib.Path(row['folder']).name} | {row['bytes'] / 1024:.0f} | {decode_ms:.3g} | {speed} | "
                     f"{f'{crop_ms:.2f}' if crop_ms else ''} | {1e3 / (decode_ms + crop_ms):.0f} |")
    text = "\n".join(lines) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
