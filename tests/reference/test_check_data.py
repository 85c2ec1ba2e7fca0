"""kiln check-data finds what extraction would meet: compared with what kiln extract then leaves out, Pillow and transformers."""

import io
import json
import shutil
import tarfile
import time

import numpy as np
import pytest
from browser import parts_of
from conftest import lines_of_errors, succeed
from PIL import Image, ImageCms, ImageDraw, ImageFilter
from test_extract import SIZE, arguments, write_pictures
from test_text_store import FAMILIES, encoders, write_metadata  # noqa: F401


def drawing(seed, side=300):
    """Discs of random greys: sharp, and unlike those of another seed."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (side, side), "lightgrey")
    for _ in range(12):
        x, y, radius = rng.integers(0, side, 2).tolist() + [int(rng.integers(side // 12, side // 4))]
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(int(c) for c in rng.integers(0, 256, 3)))
    return image


def checked(data, *options):
    return json.loads(succeed("check-data", data, "--json", *options).stdout)


def found(result, finding):
    return {row["picture"]: row for row in result["found"] if row["finding"] == finding}


@pytest.mark.parametrize("more", [[], ["--enlarge"], ["--buckets", "32x32,48x24,24x48"], ["--buckets", "32x32,48x24,24x48", "--bucket-min", 3]],
                         ids=["square", "enlarge", "buckets", "bucket-min"])
def test_extraction_leaves_out_what_is_found(kiln, tmp_path, more):
    data = tmp_path / "in"
    write_pictures(data, 14, broken={2, 7}, small={4, 9})
    rng = np.random.default_rng(1)
    for index, (height, width) in enumerate([(60, 30), (31, 70), (26, 50), (50, 26)]):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(data / "class-0" / f"wide-{index}.png")
    upright = Image.fromarray(rng.integers(0, 256, (24, 48, 3), dtype=np.uint8))
    exif = upright.getexif()
    exif[0x0112] = 6  # a viewer shows it as 48 high
    upright.save(data / "class-0" / "turned.jpg", exif=exif, quality=95)
    jpeg = (data / "class-0" / "turned.jpg").read_bytes()
    (data / "class-1" / "cut.jpg").write_bytes(jpeg[:-40])
    (data / "class-1" / "text.jpg").write_text("no picture")
    (data / "class-1" / "empty.png").write_bytes(b"")
    result = checked(data, "--image-size", SIZE, *more)
    extraction = kiln(*arguments(data, tmp_path / "out", "pixels", *more))
    assert extraction.returncode == 0, extraction.stderr
    left_out = {line["picture"]: line["why"] for line in map(json.loads, (tmp_path / "out" / "skipped.jsonl").read_text().splitlines())}
    ours = {name: row["why"] for name, row in (found(result, "broken") | found(result, "small")).items()}
    assert ours == left_out and len(left_out) >= 5
    info = json.loads((tmp_path / "out" / "store.json").read_text())
    assert result["taken"] == info["num_samples"] == result["pictures"] - len(left_out)
    assert result["verdict"] == f"kiln extract takes {result['taken']} of {result['pictures']} pictures"
    assert sum(row["taken"] for row in result["buckets"]) == result["taken"]
    assert sum(row["small"] for row in result["buckets"]) == len(found(result, "small"))


def test_what_a_bucket_loses(tmp_path):
    for index, (height, width) in enumerate([(64, 64), (64, 128), (32, 32), (20, 20)]):
        drawing(index, 128).resize((width, height)).save(tmp_path / f"{index}.png")
    (row,) = checked(tmp_path, "--image-size", 32, "--enlarge")["buckets"]
    assert (row["taken"], row["enlarged"], row["small"]) == (4, 1, 0)
    assert row["cut_share"] == pytest.approx(0.5 / 4)  # half of the second
    result = succeed("check-data", tmp_path, "--buckets", "512x512")
    assert "takes 0 of 4 pictures" in result.stdout


def test_copies_pictures_that_look_alike_and_blurred_ones(tmp_path):
    for index in range(6):
        drawing(index).save(tmp_path / f"{index}.png")
    shutil.copy(tmp_path / "1.png", tmp_path / "again.png")
    drawing(2).resize((200, 200), Image.BICUBIC).save(tmp_path / "resized.png")
    drawing(3).save(tmp_path / "saved.jpg", quality=85)
    drawing(3).save(tmp_path / "saved.webp", quality=85)
    drawing(4).filter(ImageFilter.GaussianBlur(4)).rotate(180).save(tmp_path / "soft.png")
    for index in range(2):
        Image.new("RGB", (64, 64), (250, 250, 250 - index)).save(tmp_path / f"white-{index}.png")
    result = checked(tmp_path, "--image-size", 32)
    assert {name: row["like"] for name, row in found(result, "copy").items()} == {"again.png": "1.png"}
    assert {name: row["like"] for name, row in found(result, "similar").items()} == \
        {"resized.png": "2.png", "saved.jpg": "3.png", "saved.webp": "3.png"}
    assert set(found(result, "blurred")) == {"soft.png", "white-0.png", "white-1.png"}
    assert found(checked(tmp_path, "--image-size", 32, "--blurred-below", 0), "blurred") == {}


def test_names_and_colors(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    wide = srgb.replace("sRGB".encode("utf-16-be"), "P3 a".encode("utf-16-be"))
    assert wide != srgb
    for ending in ("jpg", "png", "webp"):
        drawing(0).save(tmp_path / f"srgb.{ending}", icc_profile=srgb)
        drawing(1).save(tmp_path / f"wide.{ending}", icc_profile=wide)
    drawing(2).convert("CMYK").save(tmp_path / "print.jpg")
    ghost = drawing(3)
    ghost.putalpha(100)
    ghost.save(tmp_path / "alpha.png")
    ghost.save(tmp_path / "alpha.webp", lossless=True)
    Image.fromarray(np.arange(300 * 300, dtype=np.uint16).reshape(300, 300)).save(tmp_path / "deep.png")
    buffer = io.BytesIO()
    drawing(4).save(buffer, "PNG")
    (tmp_path / "really-png.JPG").write_bytes(buffer.getvalue())
    drawing(5).save(tmp_path / "UPPER.JPG", "JPEG")
    result = checked(tmp_path)
    colors = {name: row["why"].split(": ", 1)[1] for name, row in found(result, "colors").items()}
    assert colors.pop("print.jpg") == "CMYK, converted without a profile"
    assert colors.pop("deep.png") == "16 bits a channel, of which 8 are kept"
    assert {colors.pop(f"alpha.{ending}") for ending in ("png", "webp")} == {"transparent parts become white"}
    assert set(colors) == {"wide.jpg", "wide.png", "wide.webp"} and all("P3 a" in why for why in colors.values())
    assert {name: row["why"] for name, row in found(result, "extension").items()} == {"really-png.JPG": "really-png.JPG is a PNG"}


@pytest.mark.parametrize("family", ["bert", "clip_text"])
@pytest.mark.slow
def test_captions_are_cut_as_the_encoder_cuts_them(encoders, tmp_path, family):  # noqa: F811
    captions = ["a red fish", "", "two birds on a long fence " * 6, "the a " * 40]
    write_metadata(tmp_path, captions)
    tokenizer = FAMILIES[family][1].from_pretrained(encoders[family])
    result = checked(tmp_path, "--image-size", 16, "--text-encoder", encoders[family], "--text-max-tokens", 20)
    lengths = [len(tokenizer(caption)["input_ids"]) for caption in captions if caption]
    lost = [length - 20 for length in lengths if length > 20]
    assert len(lost) == 2
    assert result["captions"] == {"count": 3, "max_tokens": 20, "cut": 2, "tokens": sum(lengths), "lost_tokens": sum(lost)}
    assert {name: row["why"] for name, row in found(result, "cut-caption").items()} == \
        {f"{index}.png": f"{index}.png: {lengths[index - 1] - 20} of {lengths[index - 1]} tokens are cut" for index in (2, 3)}
    assert found(result, "no-caption") == {"1.png": {"picture": "1.png", "finding": "no-caption", "why": "1.png has no caption"}}


def test_pictures_without_any_caption_are_not_listed_for_it(tmp_path):
    write_pictures(tmp_path, 3)
    assert found(checked(tmp_path), "no-caption") == {}
    (tmp_path / "class-0" / "0000.txt").write_bytes(b"\xff\xfe")
    captions = found(checked(tmp_path), "no-caption")
    assert "is no UTF-8" in captions["class-0/0000.png"]["why"]


def test_the_page_shows_some_of_each_finding(tmp_path):
    data = tmp_path / "in"
    write_pictures(data, 4, broken={1})
    for index in range(20):
        drawing(index).filter(ImageFilter.GaussianBlur(6)).save(data / "class-0" / f"soft-{index:02}.png")
    text = succeed("check-data", data, "--image-size", SIZE, "--html", tmp_path / "page.html").stdout
    assert "        1  broken, extraction leaves them out: cannot decode class-1/0001.png" in text
    assert " and 17 more\n" in text and "kiln extract takes 23 of 24 pictures" in text
    pictures = [item for part in parts_of(tmp_path / "page.html", "pictures") for item in part["items"]]
    assert len(pictures) == 12 and all(item[0].startswith("data:image/png;base64,") for item in pictures)
    (broken,) = parts_of(tmp_path / "page.html", "list")
    assert "class-1/0001.png" in broken["items"][0]
    (table,) = parts_of(tmp_path / "page.html", "table")
    assert table["rows"] == [["32x32", "23", "0", "0.0 %", "0", "1"]]


def names_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_bad_is_moved_with_its_caption(tmp_path):
    data, bad = tmp_path / "in", tmp_path / "bad"
    data.mkdir()
    for index in range(4):
        drawing(index).save(data / f"{index}.png")
        (data / f"{index}.txt").write_text(f"discs {index}")
    (data / "1.png").write_bytes((data / "1.png").read_bytes()[:100])
    drawing(2).resize((20, 20)).save(data / "2.png")
    shutil.copy(data / "3.png", data / "3.jpg")  # its caption is that of 3.png too, and stays
    before = names_in(data)
    result = succeed("check-data", data, "--image-size", 64, "--move-to", bad)
    assert "moved 3 pictures to" in result.stderr
    assert names_in(bad) == {"1.png", "1.txt", "2.png", "2.txt", "3.png"} and names_in(data) == before - names_in(bad)
    assert {row["finding"] for row in checked(data, "--image-size", 64)["found"]} == {"extension"}
    succeed("check-data", data, "--image-size", 64, "--move-to", tmp_path / "named", "--move", "extension")
    assert names_in(tmp_path / "named") == {"3.jpg", "3.txt"}


def test_lines_of_moved_pictures_go_with_them(kiln, tmp_path):
    data, bad = tmp_path / "in", tmp_path / "bad"
    data.mkdir()
    lines = []
    for index in range(4):
        drawing(index).save(data / f"{index}.png")
        lines.append(json.dumps({"file_name": f"{index}.png", "text": f"discs {index}"}))
    lines.append(json.dumps({"file_name": "absent.png", "text": "nothing"}))
    (data / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    (data / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    succeed("check-data", data, "--image-size", 64, "--move-to", bad)
    assert (data / "metadata.jsonl").read_text().splitlines() == [lines[0], lines[1], lines[3]]
    assert (bad / "metadata.jsonl").read_text().splitlines() == [lines[2], lines[4]]
    assert names_in(bad) == {"2.png", "metadata.jsonl"}
    extraction = kiln("extract", "--data", data, "--autoencoder", "pixels", "--image-size", 64, "--out", tmp_path / "out")
    assert extraction.returncode == 0 and "skipped" not in extraction.stderr


def test_nothing_is_moved_where_a_name_is_taken(kiln, tmp_path):
    data, bad = tmp_path / "in", tmp_path / "bad"
    for folder in (data, bad):
        folder.mkdir()
    for index in range(3):
        drawing(index, 20).save(data / f"{index}.png")
    (data / "metadata.jsonl").write_text("".join(json.dumps({"file_name": f"{index}.png"}) + "\n" for index in range(3)))
    (bad / "1.png").write_bytes(b"another")
    before = {path: path.read_bytes() for path in [*data.iterdir(), *bad.iterdir()]}
    result = kiln("check-data", data, "--image-size", 64, "--move-to", bad)
    assert result.returncode == 1 and "1.png is there already: give another --move-to" in result.stderr
    assert {path: path.read_bytes() for path in [*data.iterdir(), *bad.iterdir()]} == before


@pytest.mark.parametrize("options, expected", [
    (["--move-to", "in/class-0"], "lies in in, whose pictures are read: give a folder outside"),
    (["--move-to", "bad", "--move", "ugly"], "--move expects one of broken, small, copy, "),
    (["--similar-bits", 8], "--similar-bits expects 0 to 7, got 8"),
    (["--image-size", 0], "expected --image-size to be 1 to 65536, got 0"),
    (["--buckets", "64x"], "--buckets"),
    (["--captions", "sidecar"], "--captions: expected data, png-text or file-names"),
    (["--text-encoder", "in"], "in"),
])
def test_refused(kiln, tmp_path, options, expected):
    write_pictures(tmp_path / "in", 3)
    before = names_in(tmp_path)
    result = kiln("check-data", "in", *options, cwd=tmp_path)
    lines = lines_of_errors(result.stderr)
    assert result.returncode == 1 and len(lines) == 1 and lines[0].startswith("kiln check-data: ") and expected in lines[0], result.stderr
    assert names_in(tmp_path) == before


def test_tars_are_checked_but_not_changed(kiln, tmp_path):
    drawing(0).save(tmp_path / "0.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "0.png", "0.png")
        info = tarfile.TarInfo("1.png")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"none"))
    assert set(found(checked(tmp_path / "a.tar", "--image-size", 64), "broken")) == {"a.tar/1.png"}
    result = kiln("check-data", tmp_path / "a.tar", "--move-to", tmp_path / "bad")
    assert result.returncode == 1 and "--move-to cannot change a tar" in result.stderr


@pytest.mark.nothing_beside
def test_a_thousand_pictures_take_ten_seconds_of_a_core(tmp_path):
    """Photographs of 512 pixels are some 60 KB of JPEG; bytes behind a file's end make it another one."""
    rng = np.random.default_rng(0)
    for index in range(20):
        noise = Image.fromarray(rng.integers(0, 256, (512, 512, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        Image.blend(drawing(index, 512), noise, 0.1).save(buffer, "JPEG", quality=90)
        for copy in range(50):
            (tmp_path / f"{index}-{copy}.jpg").write_bytes(buffer.getvalue() + bytes([copy]))
    begin = time.monotonic()
    result = checked(tmp_path, "--workers", 1)
    assert time.monotonic() - begin < 10
    assert result["taken"] == 1000 and len(found(result, "similar")) == 980
