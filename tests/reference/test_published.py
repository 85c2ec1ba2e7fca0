"""What a model's family brings: its published objective, schedule, sampler, steps and guidance, and its name in --help."""

import json
import shutil

import diffusers
import pytest
import torch
from conftest import assert_fails, read_json, succeed
from run_files import losses, read_config
from test_loss import sana_table

UNET = {"block_out_channels": [32, 64], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "norm_num_groups": 8,
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "layers_per_block": 1, "attention_head_dim": 4, "cross_attention_dim": 32}
TRANSFORMER = ["--hidden-size", 48, "--num-heads", 3, "--depth", 1, "--patch-size", 2]
MODELS = {
    "unet2d_condition": ["--model", "unet2d_condition", "--model-config", json.dumps(UNET)],
    "pixart": ["--model", "pixart", *TRANSFORMER],
    "sana": ["--model", "sana", *TRANSFORMER],
    "dit": ["--model", "dit", *TRANSFORMER],
}
RUN = ["--data", "synthetic", "--image-size", 64, "--global-batch", 2, "--threads", 1, "--log-every", 1, "--peak-tflops", 1, "--seed", 3,
       "--no-tensorboard", "--ema-decay", "none"]
SCALED = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)


def train(out, model, *options, steps=1):
    result = succeed("train", *MODELS[model], *RUN, *options, "--max-steps", steps, "--out", out)
    return read_config(out)["objective"], result.stderr


def published_lines(text):
    return [line for line in text.splitlines() if " is published: " in line or " was begun: " in line]


@pytest.mark.parametrize("model, options, expected, said", [
    ("unet2d_condition", [], dict(type="ddpm", prediction_type="epsilon", **SCALED),
     "as unet2d_condition is published: --beta-end 0.012 --beta-schedule scaled_linear --beta-start 0.00085 --objective epsilon"),
    ("unet2d_condition", ["--objective", "epsilon"], dict(type="ddpm", prediction_type="epsilon", **SCALED),
     "as unet2d_condition is published: --beta-end 0.012 --beta-schedule scaled_linear --beta-start 0.00085"),
    ("unet2d_condition", ["--objective", "epsilon", "--beta-schedule", "linear", "--beta-start", 0.0001, "--beta-end", 0.02],
     dict(type="ddpm", beta_schedule="linear", beta_start=0.0001, beta_end=0.02), None),
    ("sana", [], dict(type="flow", shift=3.0, mode="continuous", timestep_sampling="logit_normal"),
     "as sana is published: --flow-shift 3.0 --objective flow --timestep-sampling logit_normal"),
    ("pixart", [], dict(type="iddpm", beta_schedule="linear", learn_sigma=True), None),
    ("dit", [], dict(type="iddpm", beta_schedule="linear", learn_sigma=True), None),
])
def test_a_model_alone_trains_as_published(tmp_path, model, options, expected, said):
    objective, errors = train(tmp_path / "run", model, *options)
    assert {key: objective[key] for key in expected} == expected
    assert published_lines(errors) == ([said] if said else [])


def test_the_schedule_is_that_of_stable_diffusion(tmp_path):
    """The betas of the run are those of the scheduler that the published pipeline has."""
    objective, _ = train(tmp_path / "run", "unet2d_condition")
    ours = diffusers.DDPMScheduler(**{key: objective[key] for key in ("beta_schedule", "beta_start", "beta_end", "num_train_timesteps")})
    theirs = diffusers.PNDMScheduler(num_train_timesteps=1000, **SCALED)
    assert torch.equal(ours.alphas_cumprod, theirs.alphas_cumprod)


@pytest.mark.slow
def test_a_resume_keeps_its_objective_and_schedule(tmp_path):
    """Of a run that began before its family brought a schedule: the same command goes on with what is recorded."""
    linear = ["--beta-schedule", "linear", "--beta-start", 0.0001, "--beta-end", 0.02]
    before, _ = train(tmp_path / "run", "unet2d_condition", "--objective", "v_prediction", *linear)
    whole, _ = train(tmp_path / "whole", "unet2d_condition", "--objective", "v_prediction", *linear, steps=2)
    after, errors = train(tmp_path / "run", "unet2d_condition", steps=2)
    assert after == before == whole
    assert published_lines(errors) == [f"as {tmp_path / 'run'} was begun: --objective v_prediction"]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_fails("--objective", "train", *MODELS["unet2d_condition"], *RUN, "--objective", "epsilon", "--max-steps", 3,
                 "--out", tmp_path / "run", code=None)


def test_a_resume_keeps_its_size_of_pictures(tmp_path):
    """Of a run whose size was neither the model's own nor is given again."""
    train(tmp_path / "run", "sana")
    at = RUN.index("--image-size")
    succeed("train", *MODELS["sana"], *RUN[:at], *RUN[at + 2:], "--max-steps", 2, "--out", tmp_path / "run")
    assert read_config(tmp_path / "run")["image_size"] == 64


def test_a_resume_keeps_another_times_table(tmp_path):
    before, _ = train(tmp_path / "run", "sana", "--flow-times", "sana", "--flow-shift", 4)
    after, _ = train(tmp_path / "run", "sana", steps=2)
    assert after == before and after["mode"] == "sana" and after["shift"] == 4
    assert_fails("--flow-times", "train", *MODELS["sana"], *RUN, "--flow-times", "continuous", "--max-steps", 3,
                 "--out", tmp_path / "run", code=None)


def test_flow_times_are_sanas(tmp_path, conformance):
    """The objective of a run with --flow-times sana has the levels and the integer timesteps of Sana's table."""
    objective, _ = train(tmp_path / "run", "sana", "--flow-times", "sana")
    inputs = dict(x_start=torch.zeros(1000, 1, 1, 1), noise=torch.ones(1000, 1, 1, 1), model_output=torch.zeros(1000, 1, 1, 1),
                  t=torch.arange(1000))
    got = conformance("loss", config=objective, inputs=inputs)
    sigma, timesteps = sana_table(3.0)
    assert torch.equal(got["model_t"], torch.as_tensor(timesteps).float())
    assert torch.allclose(got["x_t"].flatten(), torch.as_tensor(sigma).float(), atol=1e-6)


@pytest.mark.parametrize("model, options, expected", [
    ("dit", [], ("ddpm", 250, 4)), ("dit", ["--sampler", "ddim"], ("ddim", 50, 4)), ("dit", ["--objective", "flow"], ("flow_euler", 50, 4)),
    ("dit", ["--num-sampling-steps", 7, "--cfg-scale", 2], ("ddpm", 7, 2)),
])
def test_grids_are_drawn_as_published(tmp_path, model, options, expected):
    """The options of the run say how its grids are drawn."""
    succeed("train", *MODELS[model], *RUN, "--autoencoder", "pixels", "--image-size", 8, "--sample-every", 100, "--num-samples", 1, *options,
            "--max-steps", 1, "--out", tmp_path / "run")
    lines = dict(line.split(" = ", 1) for line in (tmp_path / "run/config.toml").read_text().splitlines() if " = " in line)
    assert (json.loads(lines["sampler"]), int(lines["num-sampling-steps"]), float(lines["cfg-scale"])) == expected


def test_weights_are_drawn_as_published(tmp_path):
    """A weights file says neither objective nor sampler: those of its family are taken, and said."""
    succeed("train", *MODELS["dit"], *RUN, "--autoencoder", "pixels", "--image-size", 8, "--num-classes", 3, "--max-steps", 1, "--out", tmp_path / "run")
    weights = tmp_path / "model.safetensors"
    shutil.copy(tmp_path / "run/checkpoints/step-00000001/model.safetensors", weights)
    config = read_config(tmp_path / "run")["model_config"]
    drawn = succeed("sample", "--weights", weights, "--model", "dit", "--model-config", json.dumps(config), "--autoencoder", "pixels",
                    "--num-images", 1, "--out", tmp_path / "out", "--num-sampling-steps", 2)
    assert "kiln sample: as dit is published: objective iddpm; sampler ddpm; guidance 4" in drawn.stderr


def test_deepspeeds_file_needs_no_objective(tmp_path):
    """guide c's command: a model, its size and DeepSpeed's file."""
    (tmp_path / "ds_config.json").write_text(json.dumps({
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    planned = read_json("plan", "--model", "sd15", "--image-size", 512, "--gpu", "A100-80G", "--gpus", 8,
                        "--deepspeed", tmp_path / "ds_config.json")
    assert planned["options"]["objective"] == "epsilon" and planned["options"]["beta-schedule"] == "scaled_linear"


@pytest.mark.parametrize("command", ["train", "plan", "sample"])
def test_help_names_every_family(command):
    text = " ".join(succeed(command, "--help").stdout.split())
    for name in ("dit", "pixart", "pixart_diffusers", "sana", "unet2d_condition", "DiT-XL/2", "PixArt-Sigma-XL/2-1024", "Sana-1600M", "sd15"):
        assert name in text, name
