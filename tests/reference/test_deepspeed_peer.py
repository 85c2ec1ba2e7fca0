"""The real DeepSpeed beside Kiln: the same training on two Gloo ranks gives the same losses at stages 1 to 3,
also those of a U-Net whose optimizer is DeepSpeed's own in host memory.

KILN_DEEPSPEED_PYTHON names a Python with torch, timm, safetensors and deepspeed; scripts/test --full makes one.
"""

import json
import os
import sys

import pytest
import torch
from conftest import REPOSITORY, program
from diffusers import UNet2DConditionModel
from dit_torch import DiT, randomise_
from safetensors.torch import load_file, save_file
from test_train import CONFIG, recording

RANKS, STEPS, BATCH = 2, 12, 8
ADAMW = dict(lr=1e-3, weight_decay=0.01)

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "peers"))
import train_deepspeed as peer  # noqa: E402


@pytest.fixture(scope="module")
def deepspeed_python():
    path = os.environ.get("KILN_DEEPSPEED_PYTHON")
    if not path:
        pytest.skip("KILN_DEEPSPEED_PYTHON does not name a Python with deepspeed")
    return path


def save_inputs(folder, model, config, batches):
    save_file(model.state_dict(), folder / "weights.safetensors")
    save_file(batches, folder / "batches.safetensors")
    (folder / "model.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Start weights, batches, and Kiln's configuration files."""
    config = CONFIG | dict(learn_sigma=False)
    return save_inputs(tmp_path_factory.mktemp("peer"), randomise_(DiT(**config), scale=0.5), config, recording(STEPS, BATCH))


def kiln_losses(files, stage, model="dit"):
    loss = dict(type="ddpm", prediction_type="epsilon", beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    config = dict(loss=loss, optimizer=dict(type="adamw", **ADAMW), ema_decay=0.9, zero_stage=stage, grad_clip=1.0)
    (files / "train.json").write_text(json.dumps(config))
    # Without label drops, which DeepSpeed's rank does not draw.
    batches = {key: value for key, value in load_file(files / "batches.safetensors").items() if key != "drop"}
    save_file(batches, files / "batches-kiln.safetensors")
    command = [program("kiln-conformance"), "train", "--model", model, "--model-config", files / "model.json", "--weights",
               files / "weights.safetensors", "--config", files / "train.json", "--batches-file",
               files / "batches-kiln.safetensors", "--outputs", files / "kiln.safetensors"]
    peer.start_ranks([str(part) for part in command], RANKS)
    return load_file(files / "kiln.safetensors")["losses"]


def deepspeed_losses(files, python, stage, accumulation, *more, model="tiny"):
    command = [python, REPOSITORY / "benchmarks" / "peers" / "train_deepspeed.py", "--worker", "--model", model, "--batch", BATCH,
               "--latent-size", CONFIG["input_size"], "--num-classes", CONFIG["num_classes"], "--steps", STEPS, "--warmup", 0,
               "--threads", 1, "--dtype", "f32", "--stage", stage, "--lr", ADAMW["lr"], "--weight-decay",
               ADAMW["weight_decay"], "--accumulation", accumulation, "--weights", files / "weights.safetensors",
               "--batches", files / "batches.safetensors", *more]
    results = peer.start_ranks([str(part) for part in command], RANKS, DS_ACCELERATOR="cpu")
    return torch.tensor(json.loads(results[0][0].strip().splitlines()[-1])["losses"], dtype=torch.float64).float()


@pytest.mark.parametrize("stage, accumulation", [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_losses_are_those_of_deepspeed(files, deepspeed_python, stage, accumulation):
    want = deepspeed_losses(files, deepspeed_python, stage, accumulation)
    got = kiln_losses(files, stage)  # of any accumulation
    assert len(got) == STEPS and want[0] / want[-1] > 1.02  # it learns: unchanged weights would not do
    torch.testing.assert_close(got, want, rtol=2e-5, atol=0)


def test_losses_of_a_unet_are_those_of_deepspeed_with_its_optimizer_in_host_memory(tmp_path, deepspeed_python):
    config = peer.UNETS["unet-tiny"] | dict(sample_size=CONFIG["input_size"])
    torch.manual_seed(0)
    batches = {key: value for key, value in recording(STEPS, BATCH).items() if key not in ("y", "drop")}
    batches["encoder_hidden_states"] = torch.randn(STEPS, BATCH, 5, config["cross_attention_dim"])
    files = save_inputs(tmp_path, UNet2DConditionModel(**config), config, batches)
    want = deepspeed_losses(files, deepspeed_python, 2, 1, "--offload", model="unet-tiny")
    got = kiln_losses(files, 2, "unet2d_condition")
    assert len(got) == STEPS and want[0] / want[-1] > 1.02
    torch.testing.assert_close(got, want, rtol=2e-5, atol=0)
