"""Guide e, Sana within a GPU's memory: 1024 px through a DC-AE f32c32, Gemma behind its instruction, AdamW and CAME, bf16,
buckets, first few pictures and then more, grids on the way, and the real SanaPipeline at the end."""

import json
import shutil

import pytest
import torch
from browser import check_report
from diffusers import AutoencoderDC, SanaPipeline
from pipelines import START, assert_pictures_of, kiln_normals, read_npz, text_encoder, tiny_kl
from transformers import Gemma2Model, GemmaTokenizer
from walks import not_pictures, pictures, steps_of

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
PROMPT, SEED, STEPS = "a red circle on a plain wall", 6, 4
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


def test_the_guides_case_does_not_fit_and_the_plan_says_why(walk):
    """Batch 1 on an A40 of 48 GB with autoencoder and text encoder in the run."""
    case = ["--model", "Sana-1600M", "--gpu", "A40", "--compute-dtype", "bf16", "--global-batch", 1, "--recompute", "all",
            "--autoencoder", "dc-ae-f32c32", "--text-encoder", "gemma-2-2b", *ADAMW]
    plan = walk.json("plan", *case)
    assert plan["options"]["image-size"] == 1024 and plan["options"]["objective"] == "flow"
    assert 0 < plan["predicted"]["needed_bytes"]
    found = walk.json("plan", "--search", "--model", "Sana-1600M", "--gpu", "A40", "--gpus", 1, "--global-batch", 1)
    assert any(row.get("fits", True) for row in found["best"])


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
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline(PROMPT, negative_prompt="ugly", guidance_scale=3.0, num_inference_steps=STEPS, height=1024, width=1024, output_type="pt",
                      sigmas=[1 - step / STEPS for step in range(STEPS)], latents=kiln_normals(SEED, START, [0], (32, 32, 32)),
                      use_resolution_binning=False, complex_human_instruction=INSTRUCTION).images * 2 - 1
    walk.kiln("sample", "--run", walk / "run", "--prompt", PROMPT, "--negative-prompt", "ugly", "--cfg-scale", 3, "--cfg-convention", "plain",
              "--sampler", "flow_euler", "--num-sampling-steps", STEPS, "--num-images", 1, "--height", 1024, "--width", 1024, "--seed", SEED,
              "--out", walk / "drawn", "--npz", walk / "drawn.npz")
    assert_pictures_of(read_npz(walk / "drawn.npz"), wanted)


def test_the_reports_are_whole(walk, browser):
    check_report(browser.open(walk / "run/report.html"), headings=["Samples over time", "Stages", "Plan against measurement", "Settings"],
                 plots=["Loss"], rows={"model": "Sana-1600M", "image-size": "1024"}, may_be_empty=["samples"])  # stage 1 logged none
    check_report(browser.open(walk / "came/report.html"), rows={"optimizer": "came-sana", "caption-instruction": None})


@pytest.mark.parametrize("what, expected", [
    ("autoencoder", "gives latents of"),
    ("encoder", "--caption-prefix"),
    ("tokenizer", "tokenizer"),
    ("size", "1000"),
])
def test_what_does_not_fit_is_named_before_a_picture_is_read(tmp_path, walk, brought, what, expected):
    given = dict(zip(encoded(brought)[:8:2], encoded(brought)[1:8:2]))
    weights = []
    if what == "autoencoder":  # of other latents than the weights have
        walk.kiln("convert", "--in", walk / "run", "--out", tmp_path / "w.safetensors")
        weights = ["--weights", tmp_path / "w.safetensors"]
        tiny_kl(tmp_path / "kl")
        given["--autoencoder"] = tmp_path / "kl"
    elif what == "encoder":
        text_encoder("t5", tmp_path / "t5")
        given["--text-encoder"] = tmp_path / "t5"
    elif what == "tokenizer":
        shutil.copytree(brought / "gemma", tmp_path / "gemma")
        (tmp_path / "gemma/tokenizer.model").unlink()
        given["--text-encoder"] = tmp_path / "gemma"
    else:
        given["--image-size"] = 1000
    line = walk.refused(*training("--data", not_pictures(tmp_path / "data"), *(part for pair in given.items() for part in pair), *weights,
                                  "--global-batch", 1, "--max-steps", 1), "--out", tmp_path / "run")
    assert expected in line
