"""kiln --recipe with the configs of Sana (YAML) and PixArt (Python), written here in their repositories' shape."""

import json

import pytest
import yaml
from conftest import run_program, succeed

SANA = {
    "data": {"data_dir": ["data/toy_data"], "image_size": 1024, "caption_proportion": {"prompt": 1}, "load_text_feat": False,
             "load_vae_feat": False, "transform": "default_train", "type": "SanaWebDatasetMS", "sort_dataset": False},
    "model": {"model": "SanaMS_1600M_P1_D20", "image_size": 1024, "mixed_precision": "bf16", "fp32_attention": True, "load_from": None,
              "resume_from": None, "aspect_ratio_type": "ASPECT_RATIO_1024", "multi_scale": True, "attn_type": "linear", "ffn_type": "glumbconv",
              "mlp_acts": ["silu", "silu", None], "mlp_ratio": 2.5, "use_pe": False, "qk_norm": False, "class_dropout_prob": 0.1},
    "vae": {"vae_type": "dc-ae", "vae_pretrained": "org/dc-ae", "scale_factor": 0.41407, "vae_latent_dim": 32, "vae_downsample_rate": 32},
    "text_encoder": {"text_encoder_name": "gemma-2-2b-it", "y_norm": True, "y_norm_scale_factor": 0.01, "model_max_length": 300,
                     "chi_prompt": ["Given a user prompt: ", "- User Prompt: A cat -> Enhanced: A small cat."]},
    "scheduler": {"predict_flow_v": True, "noise_schedule": "linear_flow", "pred_sigma": False, "flow_shift": 3.0,
                  "weighting_scheme": "logit_normal", "logit_mean": 0.0, "logit_std": 1.0, "vis_sampler": "flow_dpm-solver"},
    "train": {"num_workers": 10, "seed": 1, "train_batch_size": 4, "num_epochs": 100, "gradient_accumulation_steps": 1, "grad_checkpointing": True,
              "gradient_clip": 0.1, "optimizer": {"lr": 1e-4, "type": "AdamW", "weight_decay": 0.01, "eps": 1e-8, "betas": [0.9, 0.999]},
              "lr_schedule": "constant", "lr_schedule_args": {"num_warmup_steps": 2000}, "visualize": False, "log_interval": 20,
              "save_model_epochs": 5, "save_model_steps": 500, "work_dir": "output/debug"},
}
PIXART = """_base_ = ['../PixArt_base.py']
data_root = 'toy'
image_list_json = ['data_info.json']
data = dict(type='InternalDataMSSigma', root='InternData', image_list_json=image_list_json, transform='default_train',
            load_vae_feat=True, load_t5_feat=True)
image_size = 512
model = 'PixArtMS_XL_2'  # for many shapes
mixed_precision = 'fp16'
aspect_ratio_type = 'ASPECT_RATIO_512'
multi_scale = True
pe_interpolation = 1.0
train_batch_size = 8
num_epochs = 10
grad_checkpointing = True
gradient_clip = 0.01
optimizer = dict(type='CAMEWrapper', lr=2e-5, weight_decay=0.0, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16))
lr_schedule_args = dict(num_warmup_steps=1000)
work_dir = 'output/debug'
scale_factor = 0.13025
model_max_length = 300
class_dropout_prob = 0.1
"""
BASE = "_base_ = 'PixArt_far.py'\nema_rate = 0.999\nlog_interval = 50\noptimizer = dict(lr=1e-4, eps=1e-10)\n"
FAR = "log_interval = 20\nseed = 7\nauto_lr = dict(rule='sqrt')\n"


def sana(folder, **changes):
    config = json.loads(json.dumps(SANA))
    for section, keys in changes.items():
        config[section].update(keys)
    path = folder / "Sana.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def pixart(folder):
    (folder / "configs").mkdir()
    (folder / "PixArt_base.py").write_text(BASE)
    (folder / "PixArt_far.py").write_text(FAR)
    (folder / "configs/PixArt.py").write_text(PIXART)
    return folder / "configs/PixArt.py"


def planned(*arguments):
    return json.loads(succeed("plan", *arguments, "--json").stdout)["options"]


def test_sanas_config_is_planned_at_its_own_size(tmp_path):
    options = planned("--recipe", sana(tmp_path), "--dataset-size", 10000, "--gpu", "A100-80G", "--gpus", 2)
    assert (options["model"], options["image-size"], options["global-batch"], options["micro-batch"]) == ("Sana-1600M", 1024, 8, 4)
    assert options["optimizer"] == "adamw" and options["lr"] == pytest.approx(1e-4 * (8 / 256) ** 0.5)
    assert (options["flow-times"], options["flow-shift"], options["recompute"]) == ("sana", 3.0, "all")
    assert options["caption-instruction"] == "\n".join(SANA["text_encoder"]["chi_prompt"])


def test_pixarts_config_is_planned_with_its_base(tmp_path):
    options = planned("--recipe", pixart(tmp_path), "--dataset-size", 10000, "--gpu", "A100-80G")
    assert (options["model"], options["image-size"], options["log-every"]) == ("PixArt-Sigma-XL/2-512", 512, 50)
    assert options["seed"] == 7
    assert options["optimizer"] == "came" and options["lr"] == pytest.approx(2e-5 * (8 / 256) ** 0.5)


def test_a_missing_base_is_said(tmp_path):
    path = pixart(tmp_path)
    (tmp_path / "PixArt_far.py").unlink()
    result = succeed("plan", "--recipe", path, "--dataset-size", 10000, "--gpu", "A100-80G")
    assert "PixArt_far.py (_base_) is not there" in result.stderr, result.stderr


def test_a_run_from_sanas_config_trains_and_resumes(tmp_path):
    """A narrow model of the command line instead of the file's; everything else is the file's."""
    recipe = sana(tmp_path, train={"save_model_steps": 1})
    command = ["train", "--recipe", recipe, "--model", "sana", "--hidden-size", 48, "--num-heads", 3, "--depth", 1, "--patch-size", 2, "--data", "synthetic",
               "--image-size", 64, "--peak-tflops", 1, "--threads", 1, "--no-tensorboard", "--ema-decay", "none", "--out", tmp_path / "run"]
    result = succeed(*command, "--max-steps", 1)
    assert "--global-batch 4  (train_batch_size x gradient_accumulation_steps x ranks)" in result.stderr
    assert "auto_lr: 0.0001 becomes 1.25e-05 at a global batch of 4" in result.stderr and "vae_pretrained org/dc-ae" in result.stderr
    run = json.loads((tmp_path / "run/config.json").read_text())
    assert run["model"] == "sana" and run["objective"]["mode"] == "sana" and run["objective"]["shift"] == 3
    text = (tmp_path / "run/config.toml").read_text()
    for line in ("lr-warmup-steps = 2000", "weight-decay = 0.01", "max-grad-norm = 0.1", 'compute-dtype = "bf16"', "seed = 1"):
        assert line in text, line
    succeed(*command, "--max-steps", 2)
    assert (tmp_path / "run/checkpoints/step-00000002").exists()


@pytest.mark.parametrize("name, text, expected", [
    ("Sana.yaml", "model: [1\n", "line 2"), ("Sana.yaml", "model:\n  model: SanaMS_600M_P1_D28\nmodel:\n  x: 1\n", "line 3 gives model a second time"),
    ("Sana.yaml", "model: 3\n", "model expects keys below it, got 3"), ("Sana.yaml", "model:\n  model: DiT_XL_2\n", "model DiT_XL_2: Kiln trains"),
    ("Sana.yaml", "train:\n  optimizer: {type: Lion}\n", 'optimizer.type "Lion"'), ("Sana.yaml", "a: &a [*a]\n", "line 1"),
    ("PixArt.py", "import os\n", "line 1 is no plain"), ("PixArt.py", "model = 'PixArt_L_2'\n", "write PixArt_XL_2 or PixArtMS_XL_2"),
    ("PixArt.py", "image_size = 300\n", "the published sizes are"), ("PixArt.py", "optimizer = 3\n", "optimizer expects type"),
])
def test_what_cannot_be_read_is_one_line(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    result = run_program("kiln", "plan", "--recipe", tmp_path / name, "--gpu", "A100-80G")
    assert result.returncode != 0 and expected in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
