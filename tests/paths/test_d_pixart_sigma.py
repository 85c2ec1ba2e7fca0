"""Guide d, why PixArt-Sigma trains slowly: one measure at a time, features of pictures and captions beforehand and while
training, in the 40 buckets of 1024 px, an audit of casts, and the real PixArtSigmaPipeline at the end."""

import json
import shutil

import pytest
from browser import check_report
from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline
from pipelines import START, assert_pictures_of, kiln_normals, read_npz, text_encoder, tiny_dc, tiny_kl
from walks import not_pictures, pictures, steps_of

# PixArt-Sigma-XL/2-1024, narrow and shallow: latents of 128 x 128 and all buckets of their area, captions of up to 300 tokens.
MODEL = ["--model", "PixArt-Sigma-XL/2-1024", "--hidden-size", 64, "--depth", 2, "--num-heads", 1]
RANKS = [1]
PROMPT, SEED, STEPS = "a red circle on a plain wall", 6, 4
HEIGHT, WIDTH = 704, 1408  # a bucket of the table
# PixArt-Sigma's ASPECT_RATIO_1024: wide sizes, the square, and all but one of them turned.
WIDE = [(512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664), (640, 1600), (640, 1536), (704, 1472),
        (704, 1408), (704, 1344), (768, 1344), (768, 1280), (832, 1216), (832, 1152), (896, 1152), (896, 1088), (960, 1088), (960, 1024)]
TABLE = [*WIDE, (1024, 1024), *((width, height) for height, width in WIDE if (height, width) != (704, 1344))]


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """Pictures of about a megapixel in every shape of the table, captions, Stable Diffusion's autoencoder and T5, narrow."""
    folder = tmp_path_factory.mktemp("brought")
    assert len(set(TABLE)) == 40
    pictures(folder / "pictures", 40, TABLE)
    tiny_kl(folder / "vae")
    text_encoder("t5", folder / "t5")
    return folder


def on_pictures(brought):
    return ["--data", brought / "pictures", "--autoencoder", brought / "vae", "--text-encoder", brought / "t5", "--buckets", "pixart",
            "--image-size", 1024, "--enlarge", "--text-max-tokens", 300]


def training(*more):
    return ["train", *MODEL, "--lr", 2e-5, "--log-every", 1, "--threads", 2, "--peak-tflops", 1, *more]


def test_a_plan_says_what_six_minutes_are_not(walk):
    """Batch 20 in fp16 on an A800, everything computed in every step: the guide's case."""
    plan = walk.json("plan", "--model", "PixArt-Sigma-XL/2-1024", "--gpu", "A800-80G", "--compute-dtype", "fp16", "--global-batch", 20,
                     "--recompute", "all", "--autoencoder", "sd-vae-ft-mse", "--text-encoder", "t5-v1_1-xxl-encoder")
    assert plan["options"]["image-size"] == 1024
    seconds = 20 / plan["predicted"]["images_per_s"]
    assert 1 < seconds < 60, seconds


def test_one_measure_at_a_time(walk, brought):
    variants = walk / "variants.toml"
    variants.write_text(f"""
image-size = 1024
enlarge = true
global-batch = 2
data = "{walk.folder}/few"
autoencoder = "{brought}/vae"
text-encoder = "{brought}/t5"
compute-dtype = "f32"
recompute = "all"

[online]

[features]
on = "online"
data = "{walk.folder}/square"
autoencoder = ""
text-encoder = ""

[no-recomputation]
on = "features"
recompute = "none"
""")
    pictures(walk / "few", 4, (1024, 1024))
    walk.kiln("extract", "--data", walk / "few", "--autoencoder", brought / "vae", "--text-encoder", brought / "t5", "--image-size", 1024,
              "--enlarge", "--out", walk / "square")
    rows = walk.json("probe", "--variants", variants, *MODEL, "--steps", 3, "--threads", 2, "--peak-tflops", 1)["variants"]
    assert [row["name"] for row in rows] == ["online", "features", "no-recomputation"]
    assert all(row["step_s"] > 0 for row in rows) and rows[1]["step_s"] < rows[0]["step_s"]


def test_features_beforehand(walk, brought):
    walk.kiln("extract", *on_pictures(brought), "--out", walk / "store")
    info, text = (json.loads(path.read_text()) for path in (walk / "store/store.json", next((walk / "store").glob("text-*/text.json"))))
    assert info["num_samples"] == 40 and text["max_tokens"] == 300
    assert len(info["lanes"]) == 40
    walk.kiln("store", "verify", walk / "store")


def test_casts_are_audited(walk):
    audit = walk.json("probe", *MODEL, "--data", walk / "store", "--global-batch", 1, "--steps", 3, "--compute-dtype", "bf16",
                      "--audit-precision", "--no-checkpoint", "--threads", 2, "--peak-tflops", 1)["precision"]
    assert audit["compute_dtype"] == "bf16" and audit["casts"] and not audit["overflows"]


def test_training_in_buckets(walk, brought):
    walk.kiln(*training("--data", walk / "store", "--global-batch", 1, "--max-steps", 8, "--sample-every", 8, "--num-samples", 1,
                        "--num-sampling-steps", 2, "--sample-prompts", PROMPT, "--autoencoder", brought / "vae"), "--out", walk / "run")
    assert steps_of(walk / "run") == list(range(1, 9))


def test_features_while_training(walk, brought):
    walk.kiln(*training(*on_pictures(brought), "--global-batch", 1, "--max-steps", 2), "--out", walk / "online")
    lines = [json.loads(line) for line in (walk / "online/log.jsonl").read_text().splitlines()]
    assert steps_of(walk / "online") == [1, 2] and any("caption encoding" in json.dumps(line) for line in lines)


def test_diffusers_draws_what_was_trained(walk, brought):
    walk.kiln("convert", "--in", walk / "run", "--out", walk / "pipeline", "--vae", brought / "vae")
    from transformers import T5EncoderModel, T5Tokenizer
    pipeline = PixArtSigmaPipeline.from_pretrained(walk / "pipeline", text_encoder=T5EncoderModel.from_pretrained(brought / "t5"),
                                                   tokenizer=T5Tokenizer.from_pretrained(brought / "t5"))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    wanted = pipeline(PROMPT, negative_prompt="ugly", guidance_scale=3.0, num_inference_steps=STEPS, output_type="pt", height=HEIGHT, width=WIDTH,
                      latents=kiln_normals(SEED, START, [0], (4, HEIGHT // 8, WIDTH // 8)), clean_caption=False,
                      use_resolution_binning=False, max_sequence_length=300).images * 2 - 1
    walk.kiln("sample", "--run", walk / "run", "--prompt", PROMPT, "--negative-prompt", "ugly", "--cfg-scale", 3, "--cfg-convention", "plain",
              "--sampler", "dpmpp_2m", "--num-sampling-steps", STEPS, "--num-images", 1, "--height", HEIGHT, "--width", WIDTH, "--seed", SEED,
              "--autoencoder", brought / "vae", "--out", walk / "drawn", "--npz", walk / "drawn.npz")
    assert_pictures_of(read_npz(walk / "drawn.npz"), wanted)


def test_the_reports_are_whole(walk, browser):
    check_report(browser.open(walk / "run/report.html"), headings=["Samples over time", "Plan against measurement", "Settings"],
                 plots=["Loss"], rows={"model": "PixArt-Sigma-XL/2-1024", "image-size": "1024"}, num_pictures=1)
    check_report(browser.open(walk / "online/report.html"), rows={"text-max-tokens": "300", "buckets": "pixart"})


@pytest.mark.parametrize("what, expected", [
    ("autoencoder", "gives latents of"),
    ("encoder", "32"),
    ("tokenizer", "tokenizer"),
    ("size", "1000"),
])
def test_what_does_not_fit_is_named_before_a_picture_is_read(tmp_path, walk, brought, what, expected):
    given = {"--autoencoder": brought / "vae", "--text-encoder": brought / "t5", "--image-size": 1024}
    weights = []
    if what in ("autoencoder", "encoder"):  # weights say what they are for
        walk.kiln("convert", "--in", walk / "run", "--out", tmp_path / "w.safetensors")
        weights = ["--weights", tmp_path / "w.safetensors"]
    if what == "autoencoder":
        tiny_dc(tmp_path / "dc")
        given["--autoencoder"] = tmp_path / "dc"
    elif what == "encoder":
        text_encoder("clip", tmp_path / "clip")
        given["--text-encoder"] = tmp_path / "clip"
    elif what == "tokenizer":
        shutil.copytree(brought / "t5", tmp_path / "t5")
        (tmp_path / "t5/spiece.model").unlink()
        (tmp_path / "t5/tokenizer_config.json").unlink(missing_ok=True)
        given["--text-encoder"] = tmp_path / "t5"
    else:
        given |= {"--image-size": 1000, "--buckets": "pixart"}
    line = walk.refused(*training("--data", not_pictures(tmp_path / "data"), *(part for pair in given.items() for part in pair), *weights,
                                  "--global-batch", 1, "--max-steps", 1), "--out", tmp_path / "run")
    assert expected in line
