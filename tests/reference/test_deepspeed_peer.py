"""The real DeepSpeed beside Kiln: the same training on two Gloo ranks gives the same losses at stages 1 to 3.

KILN_DEEPSPEED_PYTHON names a Python with torch, timm, safetensors and deepspeed; scripts/test --full makes one.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY, program
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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Start weights, batches, and Kiln's configuration files."""
    folder = tmp_path_factory.mktemp("peer")
    config = CONFIG | dict(learn_sigma=False)
    save_file(randomise_(DiT(**config), scale=0.5).state_dict(), folder / "weights.safetensors")
    save_file(recording(STEPS, BATCH), folder / "batches.safetensors")
    (folder / "model.json").write_text(json.dumps(config))
    return folder


def kiln_losses(files, stage):
    loss = dict(type="ddpm", prediction_type="epsilon", beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
    config = dict(loss=loss, optimizer=dict(type="adamw", **ADAMW), ema_decay=0.9, zero_stage=stage, grad_clip=1.0)
    (files / "train.json").write_text(json.dumps(config))
    # Without label drops, which DeepSpeed's rank does not draw.
    batches = {key: value for key, value in load_file(files / "batches.safetensors").items() if key != "drop"}
    save_file(batches, files / "batches-kiln.safetensors")
    command = [program("kiln-conformance"), "train", "--model", "dit", "--model-config", files / "model.json", "--weights",
               files / "weights.safetensors", "--config", files / "train.json", "--batches-file",
               files / "batches-kiln.safetensors", "--outputs", files / "kiln.safetensors"]
    peer.start_ranks([str(part) for part in command], RANKS)
    return load_file(files / "kiln.safetensors")["losses"]


def deepspeed_losses(files, python, stage, accumulation):
    command = [python, REPOSITORY / "benchmarks" / "peers" / "train_deepspeed.py", "--worker", "--model", "tiny", "--batch", BATCH,
               "--latent-size", CONFIG["input_size"], "--num-classes", CONFIG["num_classes"], "--steps", STEPS, "--warmup", 0,
               "--threads", 1, "--dtype", "f32", "--stage", stage, "--lr", ADAMW["lr"], "--weight-decay",
               ADAMW["weight_decay"], "--accumulation", accumulation, "--weights", files / "weights.safetensors",
               "--batches", files / "batches.safetensors"]
    results = peer.start_ranks([str(part) for part in command], RANKS, DS_ACCELERATOR="cpu")
    return torch.tensor(json.loads(results[0][0].strip().splitlines()[-1])["losses"], dtype=torch.float64).float()


@pytest.mark.parametrize("stage, accumulation", [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_losses_are_those_of_deepspeed(files, deepspeed_python, stage, accumulation):
    want = deepspeed_losses(files, deepspeed_python, stage, accumulation)
    got = kiln_losses(files, stage)  # of any accumulation
    assert len(got) == STEPS and want[0] / want[-1] > 1.02  # it learns: unchanged weights would not do
    torch.testing.assert_close(got, want, rtol=2e-5, atol=0)
