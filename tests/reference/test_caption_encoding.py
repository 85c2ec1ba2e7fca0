"""Captions that are encoded while training: the run is that on a text store made ahead, and what it costs is a phase."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import read_json
from PIL import Image
from pictures import captioned_pictures, noise_picture
from run_files import losses, read_config, read_plan, saved, step_lines, validation_losses, weights_of
from test_text_store import encoder_folder
from test_text_streaming import TINY, WIDE
from test_text_streaming import encoder_folder as t5_folder
from test_text_training import FAMILIES, OPTIONS, SIZE, encoders, refusal, succeed  # noqa: F401

COUNT = 12


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """With several captions of unequal weight, with equal ones, and one without."""
    entries = [{"captions": [{"text": "a green apple", "weight": 3}, f"two birds on a long fence {i}"][: 1 + i % 2]}
               for i in range(COUNT)]
    entries[5] = {"captions": []}
    return captioned_pictures(tmp_path_factory.mktemp("data") / "pictures", entries, [(SIZE, SIZE)])


@pytest.fixture(scope="module")
def store(tmp_path_factory, pictures, encoders):
    """What kiln extract makes of them ahead, one caption at a time: so its features do not depend on their neighbours."""
    folder = tmp_path_factory.mktemp("store") / "store"
    for encoder in encoders.values():
        succeed("extract", "--data", pictures, "--autoencoder", "pixels", "--image-size", SIZE, "--out", folder,
                "--text-encoder", encoder, "--caption-prefix", "picture of ", "--text-batch", 1)
    return folder


def train(data, family, out, steps, *extra):
    return succeed("train", "--data", data, "--model", family, *FAMILIES[family][1], *OPTIONS, *extra, "--out", out, "--max-steps", steps)


def on_the_way(pictures, encoder):
    return [pictures, "--autoencoder", "pixels", "--text-encoder", encoder, "--caption-prefix", "picture of "]


def train_on_the_way(pictures, encoders, family, out, steps, *extra):
    data, *options = on_the_way(pictures, encoders[FAMILIES[family][0]])
    return train(data, family, out, steps, *options, *extra)


def random_t5(folder, config):
    folder.mkdir()
    return t5_folder(folder, config)


@pytest.mark.parametrize("family", ["pixart", "unet2d_condition"])  # learned null rows and ragged captions; neither
@pytest.mark.slow
def test_it_is_training_on_the_store(tmp_path, pictures, store, encoders, family):
    train(store, family, tmp_path / "store", 4, "--text", FAMILIES[family][0], "--max-steps", 4)
    train_on_the_way(pictures, encoders, family, tmp_path / "alone", 4, "--text-batch", 1)
    assert losses(tmp_path / "alone") == losses(tmp_path / "store")
    assert weights_of(tmp_path / "alone", 4) == weights_of(tmp_path / "store", 4)
    train_on_the_way(pictures, encoders, family, tmp_path / "batched", 4)
    np.testing.assert_allclose(losses(tmp_path / "batched"), losses(tmp_path / "store"), rtol=1e-5)
    assert read_config(tmp_path / "alone")["text"] == read_config(tmp_path / "store")["text"]


@pytest.mark.slow
def test_it_resumes_bitwise_and_with_its_own_encoder_alone(tmp_path, pictures, encoders):
    train_on_the_way(pictures, encoders, "pixart", tmp_path / "whole", 5)
    train_on_the_way(pictures, encoders, "pixart", tmp_path / "parts", 2)
    train_on_the_way(pictures, encoders, "pixart", tmp_path / "parts", 5, "--loader-threads", 3)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert saved(tmp_path / "parts", 5, "model.safetensors") == saved(tmp_path / "whole", 5, "model.safetensors")

    other = encoder_folder("bert", tmp_path / "other", seed=1)
    again = ["--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, "--out", tmp_path / "parts", "--max-steps", 6]
    data, *options = on_the_way(pictures, other)
    assert "was trained on other data" in refusal("train", "--data", data, *options, *again)
    data, *options = on_the_way(pictures, encoders["bert"])
    assert "--text-max-tokens" in refusal("train", "--data", data, *options, *again, "--text-max-tokens", 9)


@pytest.mark.parametrize("ranks, stage", [(2, 3)])
@pytest.mark.slow
def test_each_rank_encodes_its_own(tmp_path, pictures, encoders, ranks, stage):
    validated = ["--validation-data", pictures, "--validate-every", 3]
    train_on_the_way(pictures, encoders, "sana", tmp_path / "alone", 3, *validated)
    train_on_the_way(pictures, encoders, "sana", tmp_path / "ranks", 3, "--nproc", ranks, "--zero-stage", stage, *validated)
    np.testing.assert_allclose(losses(tmp_path / "ranks"), losses(tmp_path / "alone"), rtol=1e-5)
    found = [validation_losses(tmp_path / run) for run in ("alone", "ranks")]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert len(found[0]) == 1


@pytest.mark.slow
def test_grids_show_captions_or_prompts(tmp_path, pictures, encoders):
    grids = ["--sample-every", 2, "--num-samples", 2, "--num-sampling-steps", 2]
    train_on_the_way(pictures, encoders, "pixart", tmp_path / "captions", 2, *grids)
    train_on_the_way(pictures, encoders, "pixart", tmp_path / "prompts", 2, *grids, "--sample-prompts", "red, green", "two birds")
    for run in ("captions", "prompts"):
        assert (tmp_path / run / "samples/step-00000002.png").exists()
    succeed("sample", "--run", tmp_path / "captions", "--prompt", "red", "--num-images", 1, "--num-sampling-steps", 2, "--out",
            tmp_path / "drawn")


@pytest.mark.slow
def test_it_is_a_phase_and_the_plan_counts_it(tmp_path, pictures, encoders):
    train_on_the_way(pictures, encoders, "pixart", tmp_path / "run", 3, "--memory-budget", "auto")
    steps = step_lines(tmp_path / "run")
    assert all(line["phase_s"]["caption encoding"] > 0 and "encoding" not in line["phase_s"] for line in steps)
    plan = read_plan(tmp_path / "run")
    predicted, measured = plan["predicted"], plan["measured"]
    weights_bytes = measured["by_kind"]["text encoder"]
    assert weights_bytes > 0 and predicted["by_kind"]["text encoder"] == weights_bytes
    assert predicted["phase_s"]["caption encoding"] > 0 and measured["phase_s"]["caption encoding"] > 0
    assert predicted["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.03)
    data, *options = on_the_way(pictures, encoders["bert"])
    probed = succeed("probe", "--data", data, *options, "--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, "--steps", 3)
    assert "encoding captions: " in probed.stdout and "time of caption encoding" in probed.stdout


@pytest.mark.slow
def test_an_encoder_larger_than_its_memory_is_streamed(tmp_path, pictures):
    encoder = random_t5(tmp_path / "wide", WIDE | {"num_layers": 5})  # 350 MB in f32
    options = ["--autoencoder", "pixels", "--text-encoder", encoder, "--text-max-tokens", 16]
    train(pictures, "sana", tmp_path / "resident", 2, *options)
    common = ["--model", "sana", *FAMILIES["sana"][1], *OPTIONS, "--out", tmp_path / "streamed", "--max-steps", 2]
    line = refusal("train", "--data", pictures, *options, *common, "--text-encoder-memory", "1M")
    taken = float(re.search(r"--text-encoder-memory 1M is less than the (\S+) GiB", line).group(1))
    streamed = train(pictures, "sana", tmp_path / "streamed", 2, *options, "--text-encoder-memory", f"{taken + 0.3:.2f}GiB")
    assert "segment by segment" in streamed.stderr and "in every step" in streamed.stderr
    assert saved(tmp_path / "streamed", 2, "model.safetensors") == saved(tmp_path / "resident", 2, "model.safetensors")


def test_plans_of_published_encoders_need_no_weights(tmp_path):
    def plan(*options):
        return read_json("plan", "--gpu", "A100-80G", "--model", "PixArt-Sigma-XL/2-512", "--image-size", 512,
                         "--compute-dtype", "bf16", "--global-batch", 16, "--autoencoder", "sd-vae-ft-mse",
                         *options)["predicted"]

    without, t5 = plan(), plan("--text-encoder", "t5-v1_1-xxl-encoder")
    assert "text encoder" not in without["by_kind"]
    assert t5["by_kind"]["text encoder"] == pytest.approx(2 * 4.762e9 + 2 * 32128 * 4096, rel=1e-3)  # the token table is f32
    assert t5["needed_bytes"] > without["needed_bytes"] + 9e9 and t5["phase_s"]["caption encoding"] > 0
    assert plan("--text-encoder", "elsewhere")["by_kind"] == t5["by_kind"]  # of the width that the model takes
    assert "no folder" in refusal("plan", "--model", "PixArt-Sigma-XL/2-512", "--model-config", '{"caption_channels": 40}', "--autoencoder",
                                  "sd-vae-ft-mse", "--text-encoder", "elsewhere")


@pytest.mark.slow
def test_bad_input_is_one_line(tmp_path, pictures, store, encoders):
    common = ["--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, "--out", tmp_path / "run", "--max-steps", 1]

    def line(data, *options):
        text = refusal("train", "--data", data, *options, *common)
        assert text.count("\n") == 0
        return text

    pixels = ["--autoencoder", "pixels"]
    assert "give --text-encoder DIR" in line(pictures, *pixels)
    assert "is no folder" in line(pictures, *pixels, "--text-encoder", tmp_path / "none")
    bare = tmp_path / "bare"
    shutil.copytree(pictures, bare)
    (bare / "metadata.jsonl").unlink()
    assert "none of the" in line(bare, *pixels, "--text-encoder", encoders["bert"])
    assert "--captions" in line(pictures, *pixels, "--text-encoder", encoders["bert"], "--captions", "nowhere")
    assert "--text-max-tokens" in line(pictures, *pixels, "--text-encoder", encoders["bert"], "--text-max-tokens", -1)
    assert "--text-encoder-memory" in line(pictures, *pixels, "--text-encoder", encoders["bert"], "--text-encoder-memory", "1M")
    assert "run kiln extract" in line(store, "--text", "bert", "--validation-data", pictures)
    padded = ["--model", "unet2d_condition", *FAMILIES["unet2d_condition"][1], *OPTIONS, "--out", tmp_path / "run", "--max-steps", 1]
    assert "attends to padding" in refusal("train", "--data", pictures, *pixels, "--text-encoder", encoders["bert"], *padded)
    assert not (tmp_path / "run").exists()
    # A fresh model has the width of its captions; weights have their own.
    train_on_the_way(pictures, encoders, "pixart", tmp_path / "first", 1)
    wider = random_t5(tmp_path / "wider", TINY | {"d_model": 40})
    found = refusal("train", "--data", pictures, *pixels, "--text-encoder", wider, "--text-max-tokens", 64, "--weights",
                    tmp_path / "first/checkpoints/step-00000001/model.safetensors", *common)
    assert found.rstrip().endswith("take 32: give the text encoder of the weights") and "gives captions of width 40" in found


def test_file_names_are_captions_too(tmp_path, pictures, encoders):
    named = tmp_path / "named"
    named.mkdir()
    for index, name in enumerate(["red_apple", "two-birds", "a.fence"]):
        shutil.copy(pictures / f"{index}.png", named / f"{name}.png")
    train(named, "pixart", tmp_path / "run", 2, "--autoencoder", "pixels", "--text-encoder", encoders["bert"], "--captions", "file-names")
    assert np.isfinite(losses(tmp_path / "run")).all()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Captioned pictures of three aspect ratios, some turned by their EXIF tag, one too small for its bucket."""
    folder = tmp_path_factory.mktemp("shapes") / "pictures"
    folder.mkdir()
    random = np.random.default_rng(1)
    with open(folder / "metadata.jsonl", "w") as file:
        for index in range(27):
            height, width = [(16, 17), (40, 20), (13, 26)][index % 3] if index < 26 else (8, 8)
            exif = Image.Exif()
            if index % 4 == 1:
                exif[0x0112] = 6
            noise_picture(random, height, width).save(folder / f"{index:02}.png", exif=exif)
            file.write(json.dumps({"file_name": f"{index:02}.png", "text": "bird " * (1 + index % 4)}) + "\n")
    return folder


BUCKETS = ["--buckets", "16x16,24x12,12x24,48x8", "--bucket-min", 3]


@pytest.mark.slow
def test_buckets_on_the_way_are_those_of_a_store(tmp_path, shapes, encoders):
    micro = ["--model-config", '{"micro_condition": true}']
    succeed("extract", "--data", shapes, "--autoencoder", "pixels", "--image-size", SIZE, *BUCKETS, "--out", tmp_path / "features",
            "--text-encoder", encoders["bert"], "--text-batch", 1)
    train(tmp_path / "features", "pixart", tmp_path / "store", 9, *micro)
    options = ["--autoencoder", "pixels", "--text-encoder", encoders["bert"], "--text-batch", 1, *BUCKETS, *micro]
    told = train(shapes, "pixart", tmp_path / "whole", 9, *options)
    assert "26 samples" in told.stdout and "16x16" in told.stdout and "without pictures, and left out: 48x8" in told.stdout
    assert "1 of the 27 pictures" in told.stderr and "26.png is too small" in told.stderr
    assert losses(tmp_path / "whole") == losses(tmp_path / "store")
    assert weights_of(tmp_path / "whole", 9) == weights_of(tmp_path / "store", 9)
    train(shapes, "pixart", tmp_path / "parts", 4, *options)
    train(shapes, "pixart", tmp_path / "parts", 9, *options, "--loader-threads", 3)
    assert saved(tmp_path / "parts", 9, "model.safetensors") == saved(tmp_path / "whole", 9, "model.safetensors")
    again = ["--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, *options, "--out", tmp_path / "parts", "--max-steps", 10]
    assert "--bucket-min" in refusal("train", "--data", shapes, *again, "--bucket-min", 4)


@pytest.mark.slow
def test_an_encoder_in_buckets_is_planned_and_divided(tmp_path, shapes, encoders, tiny_vae):
    folder, _ = tiny_vae
    options = ["--autoencoder", folder, "--text-encoder", encoders["bert"], *BUCKETS, "--enlarge"]
    checked = ["--validation-share", 0.2, "--validate-every", 4]
    succeed("extract", "--data", shapes, *options, "--image-size", SIZE, "--flip", "both", "--out", tmp_path / "features")
    train(tmp_path / "features", "pixart", tmp_path / "store", 4, *checked)
    train(shapes, "pixart", tmp_path / "way", 4, *options, *checked, "--memory-budget", "auto")
    train(shapes, "pixart", tmp_path / "ranks", 4, *options, *checked, "--nproc", 2)
    for run in ("way", "ranks"):
        np.testing.assert_allclose(losses(tmp_path / run), losses(tmp_path / "store"), rtol=1e-4)
        np.testing.assert_allclose(validation_losses(tmp_path / run), validation_losses(tmp_path / "store"), rtol=1e-4)
    plan = read_plan(tmp_path / "way")
    assert plan["predicted"]["peak_bytes"] == pytest.approx(plan["measured"]["peak_bytes"], rel=0.03)
    predicted, measured = plan["predicted"], plan["measured"]
    # Both count the pages of the encoder's file, which are no tensor's allocation.
    assert predicted["by_phase"]["extract"] == pytest.approx(measured["by_phase"]["extract"], rel=0.05)
    assert min(measured["by_phase"].values()) > measured["by_kind"]["text encoder"] > 0
    probed = succeed("probe", "--data", shapes, *options, "--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, "--steps", 3)
    assert "encoding pictures and captions: " in probed.stdout


@pytest.mark.slow
def test_impossible_buckets_are_one_line(tmp_path, shapes, pictures, encoders):
    common = ["--autoencoder", "pixels", "--text-encoder", encoders["bert"], "--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS]
    common += ["--out", tmp_path / "run", "--max-steps", 1]

    def line(*options, data=shapes):
        return refusal("train", "--data", data, *common, *options).splitlines()[-1]

    assert "none of the 27 pictures" in line("--buckets", "64x16,16x64") and "--enlarge" in line("--buckets", "64x16,16x64")
    assert "--bucket-min 1000 is more than the" in line("--buckets", "16x16,24x12,12x24", "--bucket-min", 1000)
    assert "give --image-size 63" in line("--buckets", "64x64,48x80")
    assert '"pixart" or sizes' in line("--buckets", "sdxl")
    assert "has no effect without --buckets" in line("--bucket-min", 3)
    assert not (tmp_path / "run").exists()


def test_a_plan_prints_the_encoders_residence_and_each_lanes_speed(shapes, encoders):
    data, *options = on_the_way(shapes, encoders["bert"])
    command = ["plan", "--data", data, *options, *BUCKETS, "--model", "pixart", *FAMILIES["pixart"][1], *OPTIONS, "--device", "cpu"]
    planned = read_json(*command)["predicted"]
    lanes = [(lane["height"], lane["width"]) for lane in planned["lanes"]]
    assert lanes == [(16, 16), (24, 12), (12, 24)]
    square, tall, wide = (lane["step_s"] for lane in planned["lanes"])
    assert tall == wide != square and all(lane["images_per_s"] == pytest.approx(5 / lane["step_s"]) for lane in planned["lanes"])
    assert planned["by_kind"]["text encoder"] > 0 and planned["by_phase"]["extract"] > 0
    text = succeed(*command).stdout
    assert re.search(r"text encoder +\d", text) and re.search(r"extract +\d", text)
    for height, width in lanes:
        assert re.search(rf"\n +{height} x {width} +[\d.e-]+ +[\d.e+]+\n", text)
