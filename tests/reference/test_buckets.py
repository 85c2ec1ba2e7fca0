"""kiln extract --buckets: PixArt's own rule for sizes and crops, EXIF as Pillow applies it, restarts and ranks."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile

import numpy as np
import pytest
from conftest import FULL, assert_fails, matrix, program, refusal, succeed
from interruptions import until_interrupted, wait_until, wait_while_running
from PIL import Image, ImageOps
from pictures import noise_picture
from safetensors.numpy import load_file
from test_extract import bytes_of
from test_images import center_crop, make_picture, names_of
from test_ranks import is_running, processes_under
from torchvision import transforms as T
from torchvision.transforms.functional import InterpolationMode

# PixArt-Sigma's ASPECT_RATIO_256, as published.
ASPECT_RATIO_256 = {
    "0.25": [128.0, 512.0], "0.26": [128.0, 496.0], "0.27": [128.0, 480.0], "0.28": [128.0, 464.0],
    "0.32": [144.0, 448.0], "0.33": [144.0, 432.0], "0.35": [144.0, 416.0], "0.4": [160.0, 400.0],
    "0.42": [160.0, 384.0], "0.48": [176.0, 368.0], "0.5": [176.0, 352.0], "0.52": [176.0, 336.0],
    "0.57": [192.0, 336.0], "0.6": [192.0, 320.0], "0.68": [208.0, 304.0], "0.72": [208.0, 288.0],
    "0.78": [224.0, 288.0], "0.82": [224.0, 272.0], "0.88": [240.0, 272.0], "0.94": [240.0, 256.0],
    "1.0": [256.0, 256.0], "1.07": [256.0, 240.0], "1.13": [272.0, 240.0], "1.21": [272.0, 224.0],
    "1.29": [288.0, 224.0], "1.38": [288.0, 208.0], "1.46": [304.0, 208.0], "1.67": [320.0, 192.0],
    "1.75": [336.0, 192.0], "2.0": [352.0, 176.0], "2.09": [368.0, 176.0], "2.4": [384.0, 160.0],
    "2.5": [400.0, 160.0], "2.89": [416.0, 144.0], "3.0": [432.0, 144.0], "3.11": [448.0, 144.0],
    "3.62": [464.0, 128.0], "3.75": [480.0, 128.0], "3.88": [496.0, 128.0], "4.0": [512.0, 128.0],
}  # fmt: skip


def pixart_crop(image, ratios, interpolation=InterpolationMode.BICUBIC):
    """get_closest_ratio and the transform of InternalDataMS.getdata: key, pixels (H, W, 3), and data_info's img_hw."""
    h, w = image.height, image.width
    key = min(ratios.keys(), key=lambda ratio: abs(float(ratio) - h / w))
    closest_size = [int(x) for x in ratios[key]]
    if closest_size[0] / h > closest_size[1] / w:
        resize_size = closest_size[0], int(w * closest_size[0] / h)
    else:
        resize_size = int(h * closest_size[1] / w), closest_size[1]
    transform = T.Compose([
        T.Lambda(lambda img: img.convert("RGB")),
        T.Resize(resize_size, interpolation=interpolation),
        T.CenterCrop(closest_size),
    ])
    return float(key), np.array(transform(image)), (h, w)


def read_store(folder):
    """Name -> (the lane's key, pixels (H, W, 3), (height, width) of the original)."""
    info = json.loads((folder / "store.json").read_text())
    assert info["complete"]
    samples = {}
    for shard in info["shards"]:
        tensors = load_file(folder / shard["file"])
        lane = info["lanes"][shard["lane"]]
        pixels = np.rint((tensors["mean"][:, 0].transpose(0, 2, 3, 1) + 1) * 127.5).astype(np.uint8)
        assert pixels.shape[1:3] == (lane["height"], lane["width"])
        for name, of_sample, hw in zip(names_of(tensors), pixels, tensors["image_hw"].tolist()):
            samples[name] = (lane.get("aspect_ratio"), of_sample, tuple(hw))
    return samples, info


def arguments(data, out, *more):
    return [str(a) for a in ["extract", "--data", data, "--autoencoder", "pixels", "--out", out, "--device", "cpu", *more]]


def extract(data, out, *more):
    return succeed(*arguments(data, out, *more))


@pytest.mark.slow
def test_pictures_go_where_pixart_takes_them_pixel_by_pixel(kiln, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    pictures = {}
    for index in range(40):
        ratio = float(np.exp(rng.uniform(np.log(0.2), np.log(5))))
        height = int(rng.integers(130, 500))
        name = f"{index:03}.{['png', 'webp'][index % 2]}"
        make_picture(rng, height, max(int(height / ratio), 60)).save(tmp_path / "in" / name, lossless=True)
        pictures[name] = Image.open(tmp_path / "in" / name)
    result = extract(tmp_path / "in", tmp_path / "out", "--buckets", "pixart", "--image-size", 256, "--enlarge")
    samples, info = read_store(tmp_path / "out")
    assert samples.keys() == pictures.keys()
    assert info["image_size"] == 256 and info["has_image_size"] and info["source"]["buckets"] == "pixart"
    for name, picture in pictures.items():
        key, pixels, hw = pixart_crop(picture, ASPECT_RATIO_256)
        assert samples[name][0] == key and samples[name][2] == hw, name
        np.testing.assert_array_equal(samples[name][1], pixels, err_msg=name)
    counts = {lane["aspect_ratio"]: 0 for lane in info["lanes"]}
    for key, *_ in samples.values():
        counts[key] += 1
    for lane in info["lanes"]:
        line = f"{lane['height']}x{lane['width']}"
        assert any(row.split()[0] == line and int(row.split()[2]) == counts[lane["aspect_ratio"]]
                   for row in result.stdout.splitlines() if "%" in row), line  # fmt: skip
    assert f"{40 - len(info['lanes'])} buckets of the table are without pictures, and left out" in result.stdout
    inspected = kiln("store", "inspect", tmp_path / "out").stdout
    assert sum(row.startswith("bucket") for row in inspected.splitlines()) == len(info["lanes"])


def test_large_tables_use_lanczos(tmp_path):
    (tmp_path / "in").mkdir()
    picture = make_picture(np.random.default_rng(0), 300, 310)
    picture.save(tmp_path / "in" / "a.png")
    extract(tmp_path / "in", tmp_path / "out", "--buckets", "pixart", "--image-size", 2048, "--enlarge")
    ratios = {key: [8 * height, 8 * width] for key, (height, width) in ASPECT_RATIO_256.items()}
    np.testing.assert_array_equal(read_store(tmp_path / "out")[0]["a.png"][1],
                                  pixart_crop(picture, ratios, InterpolationMode.LANCZOS)[1])


@pytest.mark.parametrize("layout", ["folder", "square", "tar"])
def test_exif_orientation_is_pillows(tmp_path, layout):
    """All eight, in JPEG, PNG (before and behind the pixels) and WebP; ignored when asked for."""
    (tmp_path / "in").mkdir()
    picture = make_picture(np.random.default_rng(0), 40, 90)
    for orientation in range(9):
        exif = Image.Exif()
        exif[0x010F] = "A camera"
        if orientation:
            exif[0x0112] = orientation
        for suffix in ("jpg", "png", "webp"):
            path = tmp_path / "in" / f"{orientation}.{suffix}"
            picture.save(path, exif=exif, lossless=True)
            if suffix == "png":
                content = path.read_bytes()
                at = content.index(b"eXIf") - 4
                length = int.from_bytes(content[at : at + 4], "big") + 12
                behind = content[:at] + content[at + length : -12] + content[at : at + length] + content[-12:]
                (tmp_path / "in" / f"{orientation}-behind.png").write_bytes(behind)
    files = {path.name: path for path in (tmp_path / "in").iterdir()}
    prefix = ""
    data = tmp_path / "in"
    if layout == "tar":
        data, prefix = tmp_path / "0.tar", "0.tar/"
        with tarfile.open(data, "w") as tar:
            for name, path in sorted(files.items()):
                tar.add(path, name.replace(".", "-", 1) + "." + name.rsplit(".", 1)[1])
        files = {name.replace(".", "-", 1) + "." + name.rsplit(".", 1)[1]: path for name, path in files.items()}
    size = ["--image-size", 32] if layout == "square" else ["--buckets", "32x64,64x32"]
    for option, view in (("apply", ImageOps.exif_transpose), ("ignore", lambda image: image)):
        out = tmp_path / option
        extract(data, out, *size, *([] if option == "apply" else ["--exif-orientation", option]))
        samples, info = read_store(out)
        assert info["source"]["exif_orientation"] == option
        assert samples.keys() == {prefix + name for name in files}
        for name, path in files.items():
            image = view(Image.open(path))
            key, pixels, hw = samples[prefix + name]
            if layout == "square":
                np.testing.assert_array_equal(pixels, center_crop(image.convert("RGB"), 32), err_msg=name)
                continue
            expected = pixart_crop(image, {"0.5": [32, 64], "2.0": [64, 32]})
            assert (key, hw) == (expected[0], expected[2])
            np.testing.assert_array_equal(pixels, expected[1], err_msg=name)
    assert_fails('source exif_orientation ("apply" there, "ignore" asked for)',
                 *arguments(data, tmp_path / "apply", *size, "--exif-orientation", "ignore"), code=None)


def write_many(folder):
    rng = np.random.default_rng(1)
    folder.mkdir()
    for index in range(90):
        height, width = ((40, 40), (33, 65), (66, 40), (34, 100))[index % 4]
        path = folder / f"{index:03}.png"
        noise_picture(rng, height + index % 5, width + index % 3).save(path)
        if index in (5, 6, 17, 60, 88):
            path.write_bytes(path.read_bytes()[: 10 if index == 17 else 400])


BUCKETS = ["--buckets", "32x32,24x48,48x24,16x64", "--bucket-min", "20", "--flip", "both"]


@pytest.mark.parametrize("number", range(5 if FULL else 1))
@pytest.mark.parametrize("ranks", matrix([2], [0]))
@pytest.mark.slow
def test_killed_and_continued_gives_the_same_bytes(tmp_path, ranks, number):
    write_many(tmp_path / "in")
    more = [*BUCKETS, "--batch", 7, "--shard-size", 9, *(["--nproc", ranks] if ranks else [])]
    whole = extract(tmp_path / "in", tmp_path / "whole", *more)
    assert "5 of 90 pictures are broken or smaller than their bucket" in whole.stdout
    assert "skipped: " in whole.stderr and "skipped: [" not in whole.stderr
    command = arguments(tmp_path / "in", tmp_path / "cut", *more)
    rng = np.random.default_rng([ranks, number])

    def num_bytes():
        return sum(path.stat().st_size for path in (tmp_path / "cut").rglob("*") if path.is_file())

    def killed(_):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        most = int(rng.integers(1, 20)) * 50_000
        process = subprocess.Popen([program("kiln"), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def has_written():
            try:
                return num_bytes() > most
            except FileNotFoundError:  # a partial file that has got its name
                return False

        interrupted = wait_while_running(process, has_written)
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
            started = [process.pid, *processes_under(process.pid).values()]  # a rank without its launcher may yet come to the end
            for each in started:
                os.kill(each, signal.SIGKILL)
            wait_until(lambda: not any(map(is_running, started)))
        info = tmp_path / "cut/store.json"
        is_complete = info.exists() and json.loads(info.read_text())["complete"]  # nothing was left but to end
        return process.wait() == -signal.SIGKILL and interrupted and not is_complete

    until_interrupted(killed)
    assert "5 of 90 pictures are broken or smaller than their bucket" in succeed(*command).stdout
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    assert "nothing to do" in extract(tmp_path / "in", tmp_path / "cut", *more).stdout


def test_errors_are_one_line(tmp_path):
    write_many(tmp_path / "in")
    for more, expected in (
        (["--buckets", "pixart", "--image-size", "300"], "PixArt's tables are for --image-size 256, 512, 1024, 2048 and 2880"),
        (["--buckets", "pixart"], "--image-size 256, 512, 1024, 2048 and 2880, not 0"),
        (["--buckets", "sdxl", "--image-size", "512"], 'expected --buckets to be "pixart" or sizes'),
        (["--buckets", "32x32", "--bucket-min", "1000"], "--bucket-min 1000 is more than the 89 pictures"),
        (["--image-size", "32", "--bucket-min", "3"], "--bucket-min 3 has no effect without --buckets"),
        (["--image-size", "32", "--exif-orientation", "yes"], "--exif-orientation: expected apply or ignore, got yes"),
    ):
        assert expected in refusal(*arguments(tmp_path / "in", tmp_path / "out", *more), code=None,
                                   lines=lambda text: text.splitlines()[-1:])
        assert not (tmp_path / "out").exists()
