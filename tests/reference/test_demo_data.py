"""kiln-demo-data: the demo's pictures, from Debian's emoji font."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import run_program
from PIL import Image

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
pytestmark = pytest.mark.skipif(not FONT.exists(), reason="Debian's fonts-noto-color-emoji is not installed")


def make(out, *arguments):
    return run_program("kiln-demo-data", "--out", out, *arguments)


def test_chosen_classes_as_pictures_with_names(tmp_path):
    out = tmp_path / "emoji"
    result = make(out, "--classes", "hearts=heart,faces=face-smiling+cat-face", "--except", "melting face")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    names = {line["text"]: line for line in lines}
    assert names["red heart"]["label"] == "hearts"
    assert names["grinning face"] == {"file_name": "faces/1f600.png", "text": "grinning face", "label": "faces",
                                      "group": "Smileys & Emotion", "subgroup": "face-smiling"}
    # A sequence of five code points is one picture.
    assert names["mending heart"]["file_name"] == "hearts/2764-200d-1fa79.png"
    assert "melting face" not in names
    assert len({line["file_name"] for line in lines}) == len(lines) == len(list(out.glob("*/*.png"))) > 40
    for line in lines:
        picture = Image.open(out / line["file_name"])
        assert (picture.size, picture.mode) == ((128, 128), "RGB")
    heart = np.array(Image.open(out / names["red heart"]["file_name"])).astype(int)
    assert (heart[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()
    red, green, blue = heart[60, 64]
    assert red > 150 and green < 100 and blue < 100


def test_skin_tones_are_optional_and_no_picture_comes_twice(tmp_path):
    counts = []
    for more in ((), ("--no-skin-tones",)):
        out = tmp_path / f"{len(more)}"
        assert make(out, "--classes", "hands=hand-*", "--size", 64, *more).returncode == 0
        pictures = [path.read_bytes() for path in out.glob("*/*.png")]
        assert len(set(pictures)) == len(pictures)
        counts.append(len(pictures))
    assert counts[0] > 4 * counts[1] > 50


def test_a_second_run_changes_nothing_and_other_pictures_are_refused(tmp_path):
    out = tmp_path / "emoji"
    assert make(out, "--classes", "heart").returncode == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = make(out, "--classes", "heart")
    assert again.returncode == 0 and "already holds these" in again.stdout
    for other in (("--classes", "flags"), ("--classes", "heart", "--size", 64)):
        refused = make(out, *other)
        assert refused.returncode != 0 and "expected a new or empty folder" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("arguments, message", [
    (("--classes", "hart"), "'hart' is no group, subgroup or name"),
    (("--except", "no such"), "'no such' is no group"),
    (("--font", "/no/font.ttf"), "fonts-noto-color-emoji"),
    (("--emoji-list", "/no/list.txt"), "unicode-data"),
    (("--size", "5"), "--size"),
])
def test_impossible_options(tmp_path, arguments, message):
    result = make(tmp_path / "out", *arguments)
    assert result.returncode != 0 and message in result.stderr
    assert not (tmp_path / "out").exists()
