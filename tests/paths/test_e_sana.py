"""Guide e, Sana within a GPU's memory: 1024 px through a DC-AE f32c32, Gemma behind its instruction, AdamW and CAME, bf16,
buckets, first few pictures and then more, grids on the way, and the real SanaPipeline at the end."""

import json
import shlex

import pytest
import torch
from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel
from pipelines import assert_pictures_of, text_encoder, tiny_kl
from safetensors.torch import load_file
from transformers import Gemma2Model, GemmaTokenizer
from walks import PROMPT, check_run, drawn_by, drawn_by_kiln, pictures, steps_of, weights_of, without_tokenizer

# DC-AE f32c32 and Sana-1600M, narrow and shallow: 1024 px are 32 x 32 latents of 32 channels.
BLOCKS = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
WIDTHS = [8, 8, 16, 16, 32, 32]
DC = dict(in_channels=3, latent_channels=32, attention_head_dim=8, encoder_block_types=BLOCKS, decoder_block_types=BLOCKS,
          encoder_block_out_channels=WIDTHS, decoder_block_out_channels=WIDTHS, encoder_layers_per_block=[1] * 6,
          decoder_layers_per_block=[1] * 6, encoder_qkv_multiscales=[[], [], [], [5], [5], [5]],
          decoder_qkv_multiscales=[[], [], [], [5], [5], [5]], upsample_block_type="interpolate", downsample_block_type="conv",
          decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407)
MODEL = ["--model", "Sana-1600M", "--hidden-size", 64, "--depth", 2, "--num-heads", 2]
ADAMW = ["--optimizer", "adamw", "--lr", 1e-4, "--weight-decay", 0.01, "--adam-eps", 1e-8, "--beta1", 0.9, "--beta2", 0.999]
INSTRUCTION = ["Given a prompt, describe every detail of the picture that it asks for:", "- its colours and its light", "User Prompt: "]
RANKS = [1]
SIZES = [(1024, 1024), (1024, 1024), (832, 1216), (1216, 832)]


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """Pictures of 1024 px and wider ones, Sana's autoencoder, Gemma and its instruction, all narrow."""
    folder = tmp_path_factory.mktemp("brought")
    pictures(folder / "pictures", 8, SIZES)
    torch.manual_seed(4)
    vae = AutoencoderDC(**DC).eval()
    with torch.no_grad():  # pictures of contrast
        vae.decoder.conv_out.weight.mul_(8) if hasattr(vae.decoder.conv_out, "weight") else None
    vae.save_pretrained(folder / "dc-ae")
    text_encoder("gemma", folder / "gemma")
    (folder / "instruction.txt").write_text("\n".join(INSTRUCTION) + "\n")
    return folder


def encoded(brought):
    return ["--autoencoder", brought / "dc-ae", "--text-encoder", brought / "gemma", "--caption-instruction", brought / "instruction.txt",
            "--image-size", 1024, "--enlarge", "--text-dtype", "f32"]


def training(*more):
    return ["train", *MODEL, "--objective", "flow", "--flow-shift", 3, "--compute-dtype", "bf16", "--log-every", 1, "--threads", 2, "--peak-tflops", 1, *more]


# Autoencoder and text encoder in the run, as published: 312 million weights, and 2,614 million of which 590 are its table of tokens.
RESIDENT = ["--model", "Sana-1600M", "--gpu", "A40", "--gpus", 1, "--global-batch", 1, "--autoencoder", "dc-ae-f32c32",
            "--text-encoder", "gemma-2-2b"]


def test_the_guides_case_does_not_fit_and_the_plan_says_why(walk):
    """One picture on an A40 of 48 GB: f32 fails by what every step keeps, bf16 with recomputation fits."""
    plan = walk.json("plan", *RESIDENT, *ADAMW, "--compute-dtype", "f32")
    assert plan["options"]["image-size"] == 1024 and plan["options"]["objective"] == "flow"
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in SanaTransformer2DModel().parameters())
    kept = {"master": weights, "moments": 2 * weights, "ema": weights, "gradients": weights, "autoencoder": 312.25e6, "text encoder": 2614.34e6}
    assert {kind: plan["predicted"]["by_kind"][kind] / 4 for kind in kept} == pytest.approx(kept, rel=1e-3)
    assert not plan["predicted"]["fits"] and plan["predicted"]["needed_bytes"] > plan["machine"]["memory_bytes"]
    plan = walk.json("plan", *RESIDENT, *ADAMW, "--compute-dtype", "bf16", "--recompute", "all")
    assert plan["predicted"]["fits"] and 20 * weights < plan["predicted"]["needed_bytes"] < plan["machine"]["memory_bytes"]


def test_a_search_with_the_autoencoder_resident(walk):
    """Its commands are planned again: they fit as it says, with both encoders in memory."""
    best = walk.json("plan", "--search", *RESIDENT)["best"]
    assert best
    for row in best:
        command = shlex.split(row["command"])[2:]
        for place in [command.index(option) for option in ("--out", "--data")]:
            del command[place:place + 2]
        plan = walk.json("plan", *command, "--gpu", "A40", "--gpus", 1)["predicted"]
        assert row["fits"] and plan["fits"] and plan["needed_bytes"] == row["needed_bytes"]
        assert plan["by_kind"]["autoencoder"] == pytest.approx(2 * 312.25e6, rel=0.01) and plan["by_kind"]["text encoder"] > 2 * 2614e6


def test_a_plan_of_the_readers_own_encoders(walk, brought):
    """On a GPU: bf16, but for Gemma's table of tokens."""
    plan = walk.json("plan", *MODEL, "--data", brought / "pictures", *encoded(brought), "--compute-dtype", "bf16", "--global-batch", 2,
                     "--gpu", "A40")["predicted"]["by_kind"]
    sizes = {name: {key: tensor.numel() for key, tensor in load_file(next((brought / name).glob("*.safetensors"))).items()}
             for name in ("dc-ae", "gemma")}
    assert plan["autoencoder"] == 2 * sum(sizes["dc-ae"].values())
    table = next(count for key, count in sizes["gemma"].items() if "embed_tokens" in key)
    assert plan["text encoder"] == pytest.approx(2 * sum(sizes["gemma"].values()) + 2 * table, rel=0.01)


def test_pictures_and_captions_become_features(walk, brought):
    walk.kiln("extract", "--data", brought / "pictures", *encoded(brought), "--buckets", "pixart", "--out", walk / "store")
    info, text = (json.loads(path.read_text()) for path in (walk / "store/store.json", next((walk / "store").glob("text-*/text.json"))))
    assert info["num_samples"] == 8 and text["max_tokens"] == 300 and text["instruction"] == "\n".join(INSTRUCTION)
    walk.kiln("store", "verify", walk / "store")


def test_first_few_pictures_then_more_at_another_rate(walk, brought):
    """Four passes, a look at the grids, more pictures, four passes more."""
    walk.kiln(*training(*ADAMW, "--data", walk / "store", "--global-batch", 2, "--epochs", 2, "--sample-every", 4, "--num-samples", 2,
                        "--num-sampling-steps", 2, "--sample-prompts", PROMPT), "--out", walk / "run")
    first = max(steps_of(walk / "run"))
    assert list((walk / "run/samples").glob("step-*.png"))
    for index, picture in enumerate(sorted(pictures(walk / "more", 4, SIZES).glob("0*"))):
        picture.rename(brought / f"pictures/more-{index}{picture.suffix}")
    with open(brought / "pictures/metadata.jsonl", "a") as file:
        for path in sorted((brought / "pictures").glob("more-*")):
            file.write(json.dumps({"file_name": path.name, "text": "a yellow square"}) + "\n")
    walk.kiln("extract", "--append", "--data", brought / "pictures", *encoded(brought), "--buckets", "pixart", "--out", walk / "store")
    (walk / "more.toml").write_text("epochs = 1\nlr = 5e-5\n")
    walk.kiln("train", "--out", walk / "run", "--continue-with", walk / "more.toml")
    assert steps_of(walk / "run") == list(range(1, max(steps_of(walk / "run")) + 1)) and max(steps_of(walk / "run")) > first


def test_came_and_encoding_while_training(walk, brought):
    walk.kiln(*training("--optimizer", "came-sana", "--lr", 1e-4, "--data", brought / "pictures", *encoded(brought), "--global-batch", 2,
                        "--max-steps", 2), "--out", walk / "came")
    assert steps_of(walk / "came") == [1, 2]


def test_diffusers_draws_what_was_trained(walk, brought):
    walk.kiln("convert", "--in", walk / "run", "--out", walk / "pipeline", "--vae", brought / "dc-ae")
    pipeline = SanaPipeline.from_pretrained(walk / "pipeline", text_encoder=Gemma2Model.from_pretrained(brought / "gemma"),
                                            tokenizer=GemmaTokenizer.from_pretrained(brought / "gemma"))
    wanted = drawn_by(pipeline, (32, 32, 32), height=1024, width=1024, use_resolution_binning=False, complex_human_instruction=INSTRUCTION)
    got = drawn_by_kiln(walk, "drawn", "--run", walk / "run", **{"--height": 1024, "--width": 1024})  # by the published sampler, both
    assert_pictures_of(got, wanted)


def test_the_reports_are_whole(walk, browser):
    page = browser.open(walk / "run/report.html")
    check_run(page, walk / "run", headings=["Samples over time", "Stages", "Events"], plots=["Loss by stage", "Loss by bucket"],
              tables=[(["stage", "from step", "steps", "samples", "px", "learning rate"], 2)], pictures=[(2054, 1028)] * 4,
              rows={"model": "Sana-1600M", "image-size": "1024", "lr": "5e-05"})
    stages = [(row["from step"], row["px"], row["learning rate"]) for row in page.table("stage", "px")]
    assert stages == [("1", "1024", "0.0001"), ("9", "1024", "5e-05")]
    check_run(browser.open(walk / "came/report.html"), walk / "came", pictures=[], rows={"optimizer": "came-sana", "caption-instruction": None})


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, brought):
    """Parts that the weights do not go with, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    tiny_kl(folder / "kl")
    text_encoder("t5", folder / "t5", d_model=64)
    without_tokenizer(brought / "gemma", folder / "no-tokenizer")
    return folder


@pytest.mark.parametrize("changes, expected", [
    ({"--autoencoder": "kl"}, r"--autoencoder \S+kl gives latents of 4 channels, and --weights \S+ take 32"),
    ({"--text-encoder": "t5", "--caption-instruction": ""}, r"--text-encoder \S+t5 gives captions of width 64, and --weights \S+ take 32"),
    ({"--text-encoder": "t5"}, r"--caption-instruction: the texts of t5\S* do not begin with a token of their own"),
    ({"--text-encoder": "no-tokenizer"}, r"no-tokenizer holds no tokenizer"),
    ({"--image-size": 1000}, r"expected --image-size to be a multiple of 32, got 1000"),
])
def test_what_does_not_fit_is_named_before_a_picture_is_read(tmp_path, walk, brought, wrong, changes, expected):
    given = {"--autoencoder": brought / "dc-ae", "--text-encoder": brought / "gemma", "--caption-instruction": brought / "instruction.txt",
             "--image-size": 1024, "--weights": weights_of(walk / "run")}
    given |= {option: wrong / value if value and isinstance(value, str) else value for option, value in changes.items()}
    walk.refused(training("--global-batch", 1, "--max-steps", 1), given, expected, tmp_path)
