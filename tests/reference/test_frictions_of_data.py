"""What stopped new users around data: pictures that are not taken, broken ones, and stores and pictures that were exchanged
under a run."""

import functools
import json
import re
import shutil

import conftest
import numpy as np
import pytest
from conftest import complaints, succeed
from pictures import noise_picture
from run_files import checkpoint, saved, step_lines

SIZE = 32
MODEL = ["--model", "dit", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--patch-size", 4, "--num-classes", 3]
OPTIONS = ["--image-size", SIZE, "--global-batch", 5, "--log-every", 1, "--device", "cpu", "--threads", 1, "--peak-tflops", 1,
           "--ema-decay", 0.5, "--no-preflight", "--no-tensorboard"]


refusal = functools.partial(conftest.refusal, code=None, lines=complaints)


def picture(path, seed, size=(SIZE, SIZE)):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise_picture(np.random.default_rng(seed), *size).save(path)
    return path


def write_pictures(folder, count, cut=(), headless=()):
    """Pictures in three classes. Those in `cut` end in the middle, which only decoding shows; `headless` are no images."""
    for index in range(count):
        path = picture(folder / f"class-{index % 3}" / f"{index:03}.png", index)
        if index in cut:
            path.write_bytes(path.read_bytes()[:1500])
        if index in headless:
            path.write_bytes(b"nothing")
    return folder


def command(out, data, steps, *more):
    pixels = [] if (data / "store.json").exists() else ["--autoencoder", "pixels"]
    return ["train", *MODEL, *OPTIONS, "--data", data, *pixels, "--max-steps", steps, *more, "--out", out]


def train(*arguments):
    return succeed(*command(*arguments))


def extract(data, out, *more):
    return succeed("extract", "--data", data, "--autoencoder", "pixels", "--image-size", SIZE, *more, "--out", out)


def losses(out):
    return {line["step"]: line["loss"] for line in step_lines(out)}


def weights(out, step):
    return saved(out, step, "model.safetensors")


def skipped(folder):
    return {line["picture"]: line["why"] for line in map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())}


def test_friction_23_pictures_without_a_line_and_wrong_keys_are_counted_and_named(tmp_path):
    data = tmp_path / "data"
    lines = [{"text": "one"}, {"Text": "two"}, {"prompt": "three"}, {"text": 4}, {"caption": ["five"]}]
    for index in range(7):
        picture(data / f"{index}.png", index)
    (data / "late.gif").write_bytes(b"GIF89a")
    (data / "metadata.jsonl").write_text("".join(json.dumps({"file_name": f"{i}.png"} | line) + "\n" for i, line in enumerate(lines)))
    extracted = extract(data, tmp_path / "store")
    trained = succeed("train", "--model", "dit", *MODEL[2:-2], *OPTIONS, "--data", data, "--autoencoder", "pixels",
                      "--max-steps", 1, "--out", tmp_path / "run")
    for said in (extracted.stderr, trained.stderr):
        assert "2 of the 7 pictures in" in said and "have no line in metadata.jsonl" in said and "the first: 5.png" in said
        assert "3 of 5 pictures have no caption" in said
        for what in ('a key "Text"', 'a key "prompt"', 'a number under "text"', '"text", "caption", "captions"'):
            assert what in said, what
        assert "1 .gif" in said and "late.gif" in said


def test_friction_25_image_folder_says_that_it_leaves_out_gif(tmp_path):
    data = write_pictures(tmp_path / "data", 6)
    (data / "class-1" / "moving.gif").write_bytes(b"GIF89a")
    said = extract(data, tmp_path / "store").stderr
    assert "1 .gif" in said and "moving.gif" in said


@pytest.mark.slow
def test_friction_25_skipped_pictures_and_reasons_are_recorded(tmp_path):
    data = write_pictures(tmp_path / "data", 14, cut=(4,), headless=(9,))
    assert "skipped.jsonl of" in extract(data, tmp_path / "one", "--batch", 2).stdout
    extract(data, tmp_path / "two", "--batch", 2, "--nproc", 2)
    for out in (tmp_path / "one", tmp_path / "two"):
        found = skipped(out)
        assert set(found) == {"class-1/004.png", "class-0/009.png"} and "004.png" in found["class-1/004.png"]
        inspected = succeed("store", "inspect", out).stdout
        assert "2 pictures, why: skipped.jsonl" in inspected and "009.png" in inspected


@pytest.mark.slow
def test_friction_24_what_headers_show_is_known_before_the_first_step(tmp_path):
    """Training on pictures leaves out what extraction leaves out, and has the samples of the store."""
    data = write_pictures(tmp_path / "data", 14, headless=(2, 9))
    picture(data / "class-0" / "small.png", 50, (8, 40))
    said = train(tmp_path / "run", data, 4).stderr
    assert "3 of the 15 pictures in" in said and "--enlarge" in said
    assert set(skipped(tmp_path / "run")) == {"class-2/002.png", "class-0/009.png", "class-0/small.png"}
    extract(data, tmp_path / "store")
    train(tmp_path / "stored", tmp_path / "store", 4)
    assert losses(tmp_path / "run") == losses(tmp_path / "stored")


@pytest.fixture(scope="module")
def with_cut_pictures(tmp_path_factory):
    """A run of 9 steps, three epochs, on pictures of which decoding shows two to be broken."""
    folder = tmp_path_factory.mktemp("cut")
    data = write_pictures(folder / "data", 15, cut=(4, 11), headless=(7,))
    result = train(folder / "run", data, 9)
    assert result.stderr.count("skipped: ") == 2
    return data, folder / "run"


@pytest.mark.slow
def test_friction_24_broken_pictures_are_skipped_and_recorded(with_cut_pictures, tmp_path):
    data, run = with_cut_pictures
    found = skipped(run)
    assert set(found) == {"class-1/004.png", "class-2/011.png", "class-1/007.png"}
    assert all(name in why for name, why in found.items())
    # The same on two ranks, with other numbers of loader threads.
    result = train(tmp_path / "ranks", data, 9, "--nproc", 2, "--loader-threads", 3)
    assert set(skipped(tmp_path / "ranks")) == set(found)
    assert result.stderr.count("skipped: ") == 2, "one rank says it"
    np.testing.assert_allclose(list(losses(tmp_path / "ranks").values()), list(losses(run).values()), rtol=1e-4)
    train(tmp_path / "threads", data, 9, "--loader-threads", 4)
    assert weights(tmp_path / "threads", 9) == weights(run, 9)


@pytest.mark.parametrize("repair", ["nothing", "removed", "whole"])
@pytest.mark.slow
def test_friction_24_a_repaired_folder_resumes(with_cut_pictures, tmp_path, repair):
    data, run = with_cut_pictures
    folder = shutil.copytree(data, tmp_path / "data")
    assert "--continue-with" not in train(tmp_path / "run", folder, 6).stderr
    for index in (4, 11, 7):
        path = folder / f"class-{index % 3}" / f"{index:03}.png"
        if repair == "removed":
            path.unlink()
        if repair == "whole":
            picture(path, index)
    result = train(tmp_path / "run", folder, 9)
    assert "resuming" in result.stdout
    (said,) = [line for line in result.stderr.splitlines() if "are left out" in line]
    assert "warning: 3 of the" in said and "--continue-with FILE" in said
    assert losses(tmp_path / "run") == losses(run) and weights(tmp_path / "run", 9) == weights(run, 9)
    # A further stage takes the pictures as they are.
    more = tmp_path / "more.toml"
    more.write_text("steps = 1\n")
    said = succeed("train", "--out", tmp_path / "run", "--continue-with", more).stdout
    assert {"nothing": "14 samples", "removed": "12 samples", "whole": "15 samples"}[repair] in said


@pytest.mark.slow
def test_friction_24_a_folder_that_is_repaired_after_a_crash_resumes(with_cut_pictures, tmp_path):
    """The newest checkpoint is older than what was left out."""
    data, run = with_cut_pictures
    folder = shutil.copytree(data, tmp_path / "data")
    options = ["--checkpoint-every", 1, "--keep-checkpoints", 20, "--prefetch", 1, "--loader-threads", 1]
    said = train(tmp_path / "run", folder, 8, *options).stderr
    assert said.count("skipped: ") == 2 and len(skipped(tmp_path / "run")) == 3
    for step in range(2, 9):
        shutil.rmtree(checkpoint(tmp_path / "run", step))
    picture(folder / "class-1/004.png", 4)
    (folder / "class-2/011.png").unlink()
    assert "resuming" in train(tmp_path / "run", folder, 9, *options).stdout
    assert losses(tmp_path / "run") == losses(run) and weights(tmp_path / "run", 9) == weights(run, 9)


@pytest.mark.slow
def test_friction_24_broken_pictures_of_validation_are_named_and_recorded(tmp_path):
    data = write_pictures(tmp_path / "data", 12)
    held_out = write_pictures(tmp_path / "validation", 9, cut=(4,), headless=(7,))
    options = ["--validation-data", held_out, "--validate-every", 2]
    said = train(tmp_path / "run", data, 2, *options).stderr
    assert "1 of the 9 pictures in" in said and said.count("skipped: ") == 1 and "004.png" in said
    lines = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert {line["picture"]: line["of"] for line in lines} == dict.fromkeys(["class-1/004.png", "class-1/007.png"], "--validation-data")
    for index in (4, 7):
        picture(held_out / f"class-{index % 3}" / f"{index:03}.png", index)
    assert "skipped: " not in train(tmp_path / "run", data, 4, *options).stderr
    exchanged = picture(tmp_path / "other.png", 77).read_bytes()
    path = held_out / "class-0" / "003.png"
    path.write_bytes(exchanged[: path.stat().st_size].ljust(path.stat().st_size, b"\0"))
    line = refusal(*command(tmp_path / "run", data, 6, *options))
    assert "003.png has changed since this run read it first" in line


def test_friction_25_a_broken_reference_picture_is_skipped(tmp_path):
    data = write_pictures(tmp_path / "reference", 12, cut=(4,), headless=(6,))
    samples = tmp_path / "samples"
    for index in range(10):
        picture(samples / f"{index}.png", 100 + index)
    result = succeed("evaluate", samples, "--reference", data, "--net", "random", "--device", "cpu", "--batch", 4)
    assert "2 of the 12 pictures in" in result.stderr and "were skipped" in result.stderr and "004.png" in result.stderr


def test_friction_25_append_keeps_the_lanes_of_the_store(tmp_path):
    data, store = tmp_path / "data", tmp_path / "store"
    for index in range(8):
        picture(data / f"a{index}.png", index, (48, 96) if index % 2 else (64, 64))
    extraction = ["extract", "--data", data, "--autoencoder", "pixels", "--buckets", "64x64,48x96,56x80",
                  "--bucket-min", 3, "--out", store]
    succeed(*extraction)
    lanes = json.loads((store / "store.json").read_text())["lanes"]
    assert [(lane["height"], lane["width"]) for lane in lanes] == [(64, 64), (48, 96)]
    picture(data / "b0.png", 50, (48, 96))
    picture(data / "b1.png", 51, (56, 80))
    picture(data / "b2.png", 52, (56, 82))
    succeed(*extraction, "--append", "--enlarge")
    added = json.loads((store / "appended-00001" / "store.json").read_text())["lanes"]
    assert all(lane in lanes for lane in added), added
    inspected = succeed("store", "inspect", store).stdout
    assert "11 samples in 2 parts" in inspected and inspected.count("first sample") == 2


@pytest.mark.slow
def test_hardening_high_2_pictures_exchanged_under_a_run_are_named(tmp_path):
    data = write_pictures(tmp_path / "data", 12)
    train(tmp_path / "run", data, 3)
    copied = shutil.copytree(data, tmp_path / "copied", copy_function=shutil.copyfile)  # with new times
    path = copied / "class-1" / "004.png"
    content = bytearray(path.read_bytes())
    # Another picture whose file has the same size: one byte of its compressed pixels and its checksums.
    other = picture(tmp_path / "other.png", 99).read_bytes()
    again = command(tmp_path / "run", copied, 6)
    path.write_bytes(other[: len(content)].ljust(len(content), b"\0"))
    line = refusal(*again)
    assert "004.png has changed since this run read it first" in line and "--continue-with" in line
    path.write_bytes(other + b"\0" * 7)
    line = refusal(*again)
    assert "other data" in line and "004.png is new or has another size" in line and "--continue-with" in line
    path.write_bytes(content)
    assert "resuming" in succeed(*again).stdout


@pytest.mark.slow
def test_hardening_high_2_a_run_of_an_earlier_version_resumes(tmp_path):
    data = write_pictures(tmp_path / "data", 12)
    train(tmp_path / "whole", data, 6)
    train(tmp_path / "run", data, 3)
    for record in (tmp_path / "run").glob("pictures-*.xxh3"):
        record.unlink()
    path = checkpoint(tmp_path / "run", 3) / "train_state.json"
    state = json.loads(path.read_text())
    del state["xxh3"]
    state["config"]["data"] = re.sub(" of sizes [0-9a-f]{16}", "", state["config"]["data"])
    path.write_text(json.dumps(state))
    result = train(tmp_path / "run", data, 6)
    assert "an earlier version began" in result.stderr
    assert weights(tmp_path / "run", 6) == weights(tmp_path / "whole", 6)


@pytest.mark.slow
def test_hardening_high_2_exchanged_labels_are_named(tmp_path):
    data = write_pictures(tmp_path / "data", 12)
    extract(data, tmp_path / "store")
    train(tmp_path / "run", tmp_path / "store", 2)
    shard = tmp_path / "store" / "shard-00000.safetensors"
    content = shard.read_bytes()
    labels = np.repeat(np.arange(3, dtype=np.int64), 4).tobytes()
    assert content.count(labels) == 1
    shard.write_bytes(content.replace(labels, np.repeat(np.arange(3, dtype=np.int64)[::-1], 4).tobytes()))
    line = refusal(*command(tmp_path / "run", tmp_path / "store", 4))
    assert "shard-00000.safetensors is not the shard that store.json names" in line
    assert "checksum" in refusal("store", "verify", tmp_path / "store")


def test_friction_33_a_batch_larger_than_the_data_is_said(tmp_path):
    data = write_pictures(tmp_path / "data", 3)
    result = succeed("train", *MODEL, *OPTIONS, "--data", data, "--autoencoder", "pixels", "--epochs", 1, "--out", tmp_path / "run")
    assert "--global-batch 5 is more than the 3 samples" in result.stderr and "1.7 epochs" in result.stderr
