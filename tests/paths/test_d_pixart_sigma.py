"""Guide d, why PixArt-Sigma trains slowly: one measure at a time, features of pictures and captions beforehand and while
training, in the 40 buckets of 1024 px, an audit of casts, and the real PixArtSigmaPipeline at the end."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
from pipelines import assert_pictures_of, text_encoder, tiny_dc, tiny_kl
from run_files import log_lines
from safetensors.torch import load_file
from transformers import T5Config, T5EncoderModel, T5Tokenizer
from walks import (MEASURED_SHARE, PEAK_FLOPS, PROMPT, check_run, drawn_by, drawn_by_kiln, encoding_flops, flops_of, pictures, steps_of,
                   weights_of, without_tokenizer)

# PixArt-Sigma-XL/2-1024, narrow and shallow: latents of 128 x 128 and all buckets of their area, captions of up to 300 tokens.
MODEL = ["--model", "PixArt-Sigma-XL/2-1024", "--hidden-size", 64, "--depth", 2, "--num-heads", 1]
RANKS = [1]
HEIGHT, WIDTH = 704, 1408  # a bucket of the table
# PixArt-Sigma's ASPECT_RATIO_1024: wide sizes, the square, and all but one of them turned.
WIDE = [(512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664), (640, 1600), (640, 1536), (704, 1472),
        (704, 1408), (704, 1344), (768, 1344), (768, 1280), (832, 1216), (832, 1152), (896, 1152), (896, 1088), (960, 1088), (960, 1024)]
TABLE = [*WIDE, (1024, 1024), *((width, height) for height, width in WIDE if (height, width) != (704, 1344))]


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """Pictures of about a megapixel in every shape of the table, Stable Diffusion's autoencoder and T5, narrow, and captions:
    a third of them close to 300 tokens and one longer."""
    folder = tmp_path_factory.mktemp("brought")
    assert len(set(TABLE)) == 40
    tiny_kl(folder / "attending-vae")
    tiny_kl(folder / "vae", attends=False)  # of 16,384 tokens attention takes most of the time: not for all 40 pictures
    _, tokenizer = text_encoder("t5", folder / "t5")
    long = long_caption(tokenizer)
    pictures(folder / "pictures", 40, TABLE)
    lines = [json.loads(line) for line in (folder / "pictures/metadata.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines):
        line["text"] = long + long if index == 39 else f"{index} {long}" if index % 3 == 0 else line["text"]
    (folder / "pictures/metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def long_caption(tokenizer):
    """Of 280 to 296 tokens, so that a few more fit."""
    text = "a photograph of"
    while len(tokenizer(text).input_ids) < 280:
        text += " a red circle beside a yellow square on a plain wall,"
    words = text.split(" ")
    while len(tokenizer(" ".join(words)).input_ids) > 296:
        words.pop()
    return " ".join(words)


def on_pictures(brought, autoencoder="vae"):
    return ["--data", brought / "pictures", "--autoencoder", brought / autoencoder, "--text-encoder", brought / "t5", "--buckets", "pixart",
            "--image-size", 1024, "--enlarge", "--text-max-tokens", 300]


def training(*more):
    return ["train", *MODEL, "--lr", 2e-5, "--log-every", 1, "--threads", 2, "--peak-tflops", 1, *more]


def test_a_plan_says_what_six_minutes_are_not(walk):
    """Batch 20 in fp16 on an A800, everything computed in every step: the guide's case."""
    plan = walk.json("plan", "--model", "PixArt-Sigma-XL/2-1024", "--gpu", "A800-80G", "--compute-dtype", "fp16", "--global-batch", 20,
                     "--recompute", "all", "--autoencoder", "sd-vae-ft-mse", "--text-encoder", "t5-v1_1-xxl-encoder")
    assert plan["options"]["image-size"] == 1024
    model = flops_of(lambda: PixArtTransformer2DModel(sample_size=128, num_layers=28, caption_channels=4096, use_additional_conditions=False)(
        torch.empty(1, 4, 128, 128), encoder_hidden_states=torch.empty(1, 150, 4096), timestep=torch.zeros(1),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None}))
    encoder = encoding_flops(1024)
    captions = flops_of(lambda: T5EncoderModel(T5Config(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
                                                        feed_forward_proj="gated-gelu"))(torch.zeros(1, 150, dtype=torch.long)))
    at_peak = 20 * (4 * model + encoder + captions) / PEAK_FLOPS["A800-80G"]
    seconds = plan["predicted"]["step_s"]
    assert at_peak < seconds < at_peak / MEASURED_SHARE, at_peak
    assert plan["predicted"]["mfu"] == pytest.approx(20 * 3 * model / seconds / PEAK_FLOPS["A800-80G"], rel=0.03)


def test_one_measure_at_a_time(walk, brought):
    """recipes/pixart/variants.toml as it stands, where its data, encoders and features lie; the model is narrow, as its page says."""
    here = walk / "measures"
    pictures(here / "pictures", 4, (512, 512))
    shutil.copytree(brought / "vae", here / "sd-vae-ft-mse")
    shutil.copytree(brought / "t5", here / "t5-v1_1-xxl-encoder")
    walk.kiln("extract", "--data", "pictures", "--autoencoder", "sd-vae-ft-mse", "--image-size", 512, "--enlarge", "--text-encoder",
              "t5-v1_1-xxl-encoder", "--out", "store", cwd=here)
    probe = ["probe", "--variants", REPOSITORY / "recipes/pixart/variants.toml", "--hidden-size", 64, "--depth", 2, "--num-heads", 1,
             "--global-batch", 2, "--steps", 3, "--threads", 2, "--peak-tflops", 1]
    rows = {row["name"]: row for row in walk.json(*probe, cwd=here)["variants"]}
    assert list(rows) == ["online", "features", "loader", "bf16", "budget", "f32"] and not any("problem" in row for row in rows.values())
    assert {name for name, row in rows.items() if row["encoding_share"] > 0} == {"online", "f32"}
    assert all(row["images_per_s"] == pytest.approx(2 / row["step_s"]) for row in rows.values())


def test_features_beforehand(walk, brought):
    walk.kiln("extract", *on_pictures(brought), "--out", walk / "store")
    info, text = (json.loads(path.read_text()) for path in (walk / "store/store.json", next((walk / "store").glob("text-*/text.json"))))
    assert info["num_samples"] == 40 and text["max_tokens"] == 300 and text["num_truncated"] == 1
    assert len(info["lanes"]) == 40
    lines = (brought / "pictures/metadata.jsonl").read_text().splitlines()
    tokenizer = T5Tokenizer.from_pretrained(brought / "t5")
    tokens = [min(300, len(tokenizer(json.loads(line)["text"]).input_ids)) for line in lines]
    offsets = load_file(next((walk / "store").glob("text-*/features-00000.safetensors")))["row_offsets"]
    assert sum(280 <= count <= 300 for count in tokens) > 12 and sorted(np.diff(offsets)) == sorted([1, *tokens]), "1: of no caption"
    walk.kiln("store", "verify", walk / "store")


def test_casts_are_audited(walk):
    audit = walk.json("probe", *MODEL, "--data", walk / "store", "--global-batch", 1, "--steps", 3, "--compute-dtype", "bf16",
                      "--audit-precision", "--no-checkpoint", "--threads", 2, "--peak-tflops", 1)["precision"]
    assert audit["compute_dtype"] == "bf16" and audit["casts"] and not audit["overflows"]


def test_training_in_buckets(walk, brought):
    walk.kiln(*training("--data", walk / "store", "--global-batch", 1, "--max-steps", 6, "--sample-every", 6, "--num-samples", 1,
                        "--num-sampling-steps", 2, "--sample-prompts", PROMPT, "--autoencoder", brought / "vae"), "--out", walk / "run")
    assert steps_of(walk / "run") == list(range(1, 7))


def test_features_while_training(walk, brought):
    walk.kiln(*training(*on_pictures(brought, "attending-vae"), "--global-batch", 1, "--max-steps", 2), "--out", walk / "online")
    assert steps_of(walk / "online") == [1, 2]
    assert any("caption encoding" in json.dumps(line) for line in log_lines(walk / "online"))


def test_diffusers_draws_what_was_trained(walk, brought):
    """From a prompt of almost 300 tokens, guided away from one of a few."""
    walk.kiln("convert", "--in", walk / "run", "--out", walk / "pipeline", "--vae", brought / "vae")
    tokenizer = T5Tokenizer.from_pretrained(brought / "t5")
    prompt = long_caption(tokenizer)
    pipeline = PixArtSigmaPipeline.from_pretrained(walk / "pipeline", text_encoder=T5EncoderModel.from_pretrained(brought / "t5"),
                                                   tokenizer=tokenizer)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    wanted = drawn_by(pipeline, (4, HEIGHT // 8, WIDTH // 8), prompt, height=HEIGHT, width=WIDTH, clean_caption=False,
                      use_resolution_binning=False, max_sequence_length=300)
    got = drawn_by_kiln(walk, "drawn", "--run", walk / "run", prompt=prompt, **{
        "--cfg-convention": "plain", "--sampler": "dpmpp_2m", "--height": HEIGHT, "--width": WIDTH, "--autoencoder": brought / "vae"})
    assert_pictures_of(got, wanted)


def test_the_reports_are_whole(walk, browser):
    check_run(browser.open(walk / "run/report.html"), walk / "run", headings=["Samples over time"], plots=["Loss by bucket"],
              pictures=[(1028, 1028)], rows={"model": "PixArt-Sigma-XL/2-1024", "image-size": "1024", "objective": "iddpm"})
    check_run(browser.open(walk / "online/report.html"), walk / "online", plots=["Loss by bucket"], pictures=[],
              rows={"text-max-tokens": "300", "buckets": "pixart"})


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, brought):
    """Parts that the weights do not go with, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    tiny_dc(folder / "dc")
    text_encoder("clip", folder / "clip", hidden_size=64)
    without_tokenizer(brought / "t5", folder / "no-tokenizer")
    return folder


@pytest.mark.parametrize("option, value, expected", [
    ("--autoencoder", "dc", r"--autoencoder \S+dc gives latents of 8 channels, and --weights \S+ take 4"),
    ("--text-encoder", "clip", r"--text-encoder \S+clip gives captions of width 64, and --weights \S+ take 32"),
    ("--text-encoder", "no-tokenizer", r"no-tokenizer holds no tokenizer"),
    ("--image-size", 1000, r"tables are for --image-size 256, 512, 1024, 2048 and 2880, not 1000"),
])
def test_what_does_not_fit_is_named_before_a_picture_is_read(tmp_path, walk, brought, wrong, option, value, expected):
    given = {"--autoencoder": brought / "vae", "--text-encoder": brought / "t5", "--image-size": 1024, "--buckets": "pixart",
             "--weights": weights_of(walk / "run")}
    given[option] = wrong / value if isinstance(value, str) else value
    walk.refused(training("--global-batch", 1, "--max-steps", 1), given, expected, tmp_path)
