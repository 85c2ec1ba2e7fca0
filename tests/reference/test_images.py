"""Decoding and cropping against Pillow and torchvision, pixel by pixel, through kiln extract."""

import json
import random

import numpy as np
import pytest
from conftest import succeed
from PIL import Image, ImageFile
from safetensors.numpy import load_file

ImageFile.MAXBLOCK = 1 << 22  # Pillow's own encoder needs it for noisy progressive JPEG


def center_crop(image, size):
    """ADM's and DiT's crop."""
    while min(image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.BOX)
    scale = size / min(image.size)
    image = image.resize(tuple(round(x * scale) for x in image.size), resample=Image.BICUBIC)
    pixels = np.array(image)
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def make_picture(rng, height, width):
    coarse = rng.integers(0, 256, (max(height // 6, 2), max(width // 6, 2), 3), dtype=np.uint8)
    smooth = np.array(Image.fromarray(coarse).resize((width, height), Image.BICUBIC)).astype(int)
    return Image.fromarray(np.clip(smooth + rng.integers(-25, 25, smooth.shape), 0, 255).astype(np.uint8))


def names_of(store):
    offsets, text = store["name_offsets"], store["name_bytes"].tobytes()
    return [text[a:b].decode() for a, b in zip(offsets, offsets[1:])]


def extract_pixels(folder, out, size, *arguments):
    """Name -> (H, W, 3) uint8 of every picture in the store."""
    succeed("extract", "--data", folder, "--autoencoder", "pixels", "--image-size", size, "--out", out, *arguments)
    pixels = {}
    for shard in sorted(out.glob("*.safetensors")):
        store = load_file(shard)
        values = store["mean"][:, 0].transpose(0, 2, 3, 1)
        levels = np.rint((values + 1) * 127.5).astype(np.uint8)
        # The stored numbers are exactly those of ToTensor and Normalize(0.5, 0.5).
        exact = (levels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        np.testing.assert_array_equal(values, exact)
        pixels.update(zip(names_of(store), levels))
    return pixels


@pytest.mark.parametrize("size", [16, 31, 64])
def test_center_crop_is_pillows(tmp_path, size):
    rng, sizes = np.random.default_rng(size), random.Random(size)
    pictures = {}
    (tmp_path / "in").mkdir()
    shapes = [(size, size), (size, 3 * size + 1), (2 * size, 2 * size), (2 * size - 1, 2 * size + 1), (5 * size, size + 1)]
    shapes += [(sizes.randint(size, 8 * size), sizes.randint(size, 8 * size)) for _ in range(40)]
    for index, (height, width) in enumerate(shapes):
        name = f"{index:03}-{width}x{height}.png"
        pictures[name] = make_picture(rng, height, width)
        pictures[name].save(tmp_path / "in" / name)
    found = extract_pixels(tmp_path / "in", tmp_path / "out", size)
    assert set(found) == set(pictures)
    for name, picture in pictures.items():
        np.testing.assert_array_equal(found[name], center_crop(picture, size), err_msg=name)


def test_every_format_decodes_as_in_pillow(tmp_path):
    rng = np.random.default_rng(0)
    picture = make_picture(rng, 103, 117)
    folder = tmp_path / "in"
    folder.mkdir()
    for quality in (40, 90, 100):
        for subsampling in (0, 1, 2):
            for progressive in (False, True):
                name = f"q{quality}-{subsampling}-{int(progressive)}.jpg"
                picture.save(folder / name, quality=quality, subsampling=subsampling, progressive=progressive)
    picture.convert("L").save(folder / "grey.jpg")
    picture.convert("CMYK").save(folder / "cmyk.jpg", quality=92)
    for mode in ("L", "P", "1", "RGB"):
        picture.convert(mode).save(folder / f"{mode}.png")
    picture.quantize(11).save(folder / "palette4.png", bits=4)
    picture.save(folder / "lossless.webp", lossless=True)
    picture.save(folder / "lossy.webp", quality=75)
    found = extract_pixels(folder, tmp_path / "out", 100)
    assert len(found) == 18 + 9
    for name, pixels in found.items():
        expected = center_crop(Image.open(folder / name).convert("RGB"), 100)
        np.testing.assert_array_equal(pixels, expected, err_msg=name)


def test_alpha_is_composed_onto_white_and_16_bits_keep_their_upper_half(tmp_path):
    rng = np.random.default_rng(0)
    rgb = np.array(make_picture(rng, 48, 48))
    folder = tmp_path / "in"
    folder.mkdir()
    rgba = Image.fromarray(np.concatenate([rgb, rng.integers(0, 256, (48, 48, 1), dtype=np.uint8)], 2), "RGBA")
    rgba.save(folder / "rgba.png")
    rgba.save(folder / "rgba.webp", lossless=True, exact=True)
    Image.fromarray(rgb).quantize(9).save(folder / "transparent-entry.png", transparency=3)
    Image.fromarray(rgb[:, :, 0].astype(np.uint16) << 8 | 77).save(folder / "grey16.png")
    found = extract_pixels(folder, tmp_path / "out", 48)
    for name in ("rgba.png", "rgba.webp", "transparent-entry.png"):
        white = Image.new("RGBA", (48, 48), "white")
        white.alpha_composite(Image.open(folder / name).convert("RGBA"))
        np.testing.assert_array_equal(found[name], np.array(white.convert("RGB")), err_msg=name)
    np.testing.assert_array_equal(found["grey16.png"], np.repeat(rgb[:, :, :1], 3, 2))


def test_truncated_files_are_refused_where_pillow_refuses(tmp_path):
    picture = make_picture(np.random.default_rng(0), 40, 50)
    folder = tmp_path / "in"
    folder.mkdir()
    expected = set()
    for name, options in {"a.jpg": {}, "b.jpg": {"progressive": True}, "c.png": {}, "d.webp": {}}.items():
        picture.save(tmp_path / name, **options)
        whole = (tmp_path / name).read_bytes()
        cuts = {*range(0, len(whole), len(whole) // 15), *(len(whole) - n for n in (0, 1, 2, 3, 11, 12, 13, 30))}
        for cut in cuts:
            path = folder / f"{cut:06}-{name}"
            path.write_bytes(whole[:cut])
            try:
                Image.open(path).convert("RGB")
                expected.add(path.name)
            except (OSError, SyntaxError):
                pass
    assert len(expected) >= 4
    assert set(extract_pixels(folder, tmp_path / "out", 40)) == expected


@pytest.mark.slow
def test_class_folders_are_torchvisions(tmp_path):
    from torchvision.datasets import ImageFolder

    folder = tmp_path / "in"
    rng = np.random.default_rng(0)
    names = "B/10.png B/9.png B/sub/1.png B/sub-x/1.png B/sub/deep/1.png a.b/x.y.png a.b/X.PNG c/é.jpeg c/.hidden.png"
    for name in names.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        make_picture(rng, 16, 16).save(path, format="PNG")
    reference = ImageFolder(folder)
    out = tmp_path / "out"
    extract_pixels(folder, out, 16)
    store = load_file(next(out.glob("*.safetensors")))
    assert names_of(store) == [path[len(str(folder)) + 1 :] for path, _ in reference.samples]
    assert store["class_labels"].tolist() == reference.targets
    assert json.loads((out / "store.json").read_text())["class_names"] == reference.classes


def test_webdataset_written_by_tarfile(tmp_path):
    import io
    import tarfile

    rng = np.random.default_rng(0)
    pictures = {}
    for format_name in ("USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"):
        with tarfile.open(tmp_path / f"{format_name}.tar", "w", format=getattr(tarfile, format_name)) as tar:
            for index in range(3):
                stem = ("d" * 60 + "/" + "k" * (35 if format_name == "USTAR_FORMAT" else 130)) + str(index)
                picture = make_picture(rng, 20, 20)
                content = io.BytesIO()
                picture.save(content, format="PNG")
                for extension, data in (("png", content.getvalue()), ("cls", b"%d" % index), ("txt", b"caption")):
                    info = tarfile.TarInfo(f"{stem}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                pictures[f"{format_name}.tar/{stem}.png"] = np.array(picture)
    found = extract_pixels(tmp_path, tmp_path / "out", 20)
    assert set(found) == set(pictures)
    for name, pixels in pictures.items():
        np.testing.assert_array_equal(found[name], pixels)
