"""kiln --recipe with the configs of Sana (YAML) and PixArt (Python), written here in their repositories' shape."""

import json

import pytest
import yaml
from conftest import assert_refused, succeed
from run_files import read_config

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


PLAN = ["--dataset-size", 10000, "--gpu", "A100-80G", "--gpus", 2]


def planned(*arguments):
    """The options of the plan, and what is said beside it."""
    result = succeed("plan", *arguments, *PLAN, "--json")
    return json.loads(result.stdout)["options"], result.stderr


def test_sanas_keys_become_options(tmp_path):
    """Its size, and the learning rate that goes with the batch of two ranks. Planned with one block, here and below: all take long."""
    path = sana(tmp_path, train={"optimizer": {"lr": 1e-4, "type": "CAMEWrapper", "weight_decay": 0.0, "betas": [0.9, 0.999, 0.9999],
                                               "eps": [1e-30, 1e-16]}, "gradient_accumulation_steps": 2, "gradient_clp": 1})
    options, said = planned("--recipe", path, "--depth", 1)
    expected = {"model": "Sana-1600M", "image-size": 1024, "compute-dtype": "bf16", "buckets": "pixart", "text-dropout-prob": 0.1,
                "text-max-tokens": 300, "objective": "flow", "flow-times": "sana", "flow-shift": 3.0, "timestep-sampling": "logit_normal",
                "logit-mean": 0.0, "logit-std": 1.0, "seed": 1, "global-batch": 16, "micro-batch": 4, "max-steps": 100 * 10000 // 16, "recompute": "all",
                "max-grad-norm": 0.1, "optimizer": "came-sana", "weight-decay": 0.0, "beta1": 0.9, "beta2": 0.999, "beta3": 0.9999,
                "came-eps": [1e-30, 1e-16], "lr-schedule": "constant", "lr-warmup-steps": 2000, "log-every": 20, "checkpoint-every": 500,
                "lr": 1e-4 / 4, "caption-instruction": "\n".join(SANA["text_encoder"]["chi_prompt"])}
    assert {name: options[name] for name in expected} == expected
    for note in ("vae_pretrained org/dc-ae", 'data_dir ["data/toy_data"]: give --data', "auto_lr: 0.0001 becomes 2.5e-05 at a global batch of 16",
                 "unknown key gradient_clp is left out (the nearest known one is gradient_clip)"):
        assert note in said, note


@pytest.mark.parametrize("changes, more, expected", [
    ({}, ["--depth", 1, "--global-batch", 4], {"lr": 1e-4 / 8, "optimizer": "adamw"}),
    ({"train": {"auto_lr": None}}, ["--depth", 1], {"lr": 1e-4}),
    ({"model": {"model": "SanaMS_600M_P1_D28", "image_size": 512, "aspect_ratio_type": "ASPECT_RATIO_512"}, "data": {"image_size": 512}},
     ["--depth", 1], {"model": "Sana-600M-512", "image-size": 512}),
    ({"model": {"model": "SanaMS_3200M_P1_D40", "qk_norm": True, "cross_norm": True}}, [], {"model": "Sana-1.5-1600M", "depth": 40}),
])
def test_what_follows_from_sanas_keys(tmp_path, changes, more, expected):
    options, _ = planned("--recipe", sana(tmp_path, **changes), *more)
    assert {name: options[name] for name in expected} == expected


def test_pixarts_keys_become_options_with_those_of_its_bases(tmp_path):
    path = pixart(tmp_path)
    options, said = planned("--recipe", path, "--depth", 1)
    expected = {"model": "PixArt-Sigma-XL/2-512", "image-size": 512, "compute-dtype": "fp16", "buckets": "pixart", "position-scale": 1.0,
                "objective": "iddpm", "global-batch": 16, "micro-batch": 8, "max-steps": 10 * 10000 // 16, "recompute": "all", "max-grad-norm": 0.01,
                "optimizer": "came", "lr-warmup-steps": 1000, "text-max-tokens": 300, "log-every": 50, "seed": 7, "lr": 2e-5 / 4}
    assert {name: options[name] for name in expected} == expected
    assert "unknown" not in said, said
    path.write_text(PIXART.replace("model_max_length = 300", "micro_condition = True"))
    assert planned("--recipe", path, "--depth", 1)[0]["model"] == "PixArt-Alpha-XL/2-512"


def test_a_missing_base_is_said(tmp_path):
    path = pixart(tmp_path)
    (tmp_path / "PixArt_far.py").unlink()
    result = succeed("plan", "--recipe", path, "--depth", 1, "--dataset-size", 10000, "--gpu", "A100-80G")
    assert "PixArt_far.py (_base_) is not there" in result.stderr, result.stderr


def test_a_base_that_is_no_name_is_refused(tmp_path):
    (tmp_path / "recipe.py").write_text("_base_ = ['PixArt_base.py', 7]\n")
    assert_refused(["plan", "--recipe", tmp_path / "recipe.py"], "recipe.py: _base_ expects names of files, got [")


def test_a_run_from_sanas_config_trains_and_resumes(tmp_path):
    """A narrow model of the command line instead of the file's; everything else is the file's."""
    recipe = sana(tmp_path, train={"save_model_steps": 1})
    command = ["train", "--recipe", recipe, "--model", "sana", "--hidden-size", 48, "--num-heads", 3, "--depth", 1, "--patch-size", 2, "--data", "synthetic",
               "--image-size", 64, "--peak-tflops", 1, "--threads", 1, "--no-tensorboard", "--ema-decay", "none", "--out", tmp_path / "run"]
    result = succeed(*command, "--max-steps", 1)
    assert "--global-batch 4  (train_batch_size x gradient_accumulation_steps x ranks)" in result.stderr
    assert "auto_lr: 0.0001 becomes 1.25e-05 at a global batch of 4" in result.stderr and "vae_pretrained org/dc-ae" in result.stderr
    run = read_config(tmp_path / "run")
    assert run["model"] == "sana" and run["objective"]["mode"] == "sana" and run["objective"]["shift"] == 3
    text = (tmp_path / "run/config.toml").read_text()
    for line in ("lr-warmup-steps = 2000", "weight-decay = 0.01", "max-grad-norm = 0.1", 'compute-dtype = "bf16"', "seed = 1"):
        assert line in text, line
    succeed(*command, "--max-steps", 2)
    assert (tmp_path / "run/checkpoints/step-00000002").exists()


@pytest.mark.parametrize("name, text, expected", [
    ("Sana.yaml", "model: [1\n", "line 2"), ("Sana.yaml", "model:\n  model: SanaMS_600M_P1_D28\nmodel:\n  x: 1\n", "line 3 gives model a second time"),
    ("Sana.yaml", "model: 3\n", "model expects keys below it, got 3"), ("Sana.yaml", "model:\n  model: DiT_XL_2\n", "model DiT_XL_2: Kiln trains"),
    ("Sana.yaml", "train:\n  optimizer: {type: CAME8BitWrapper}\n", 'optimizer.type "CAME8BitWrapper"'), ("Sana.yaml", "a: &a [*a]\n", "line 1"),
    ("Sana.yaml", "model:\n  model: SanaMSCM_600M_P1_D28\n", "Sana.yaml: model SanaMSCM_600M_P1_D28"),
    ("Sana.yaml", "train:\n  lr_schedule: cosine_decay_to_constant\n", "lr_schedule"),
    ("Sana.yaml", "scheduler:\n  predict_flow_v: false\n", "predict_flow_v false"),
    ("Sana.yaml", "model:\n  multi_scale: true\n  aspect_ratio_type: ASPECT_RATIO_1024\n", "aspect_ratio_type ASPECT_RATIO_1024"),
    ("Sana.yaml", "data: {image_size: 512}\nmodel: {image_size: 1024}\n", "image_size of data and of model differ: 512 and 1024"),
    ("Sana.yaml", "train:\n  num_epochs: many\n", 'num_epochs expects a number, got "many"'),
    ("PixArt.py", "import os\n", "line 1 is no plain"), ("PixArt.py", "model = 'PixArt_L_2'\n", "write PixArt_XL_2 or PixArtMS_XL_2"),
    ("PixArt.py", "image_size = 300\n", "the published sizes are"), ("PixArt.py", "optimizer = 3\n", "optimizer expects type"),
])
def test_what_cannot_be_read_is_one_line(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    assert_refused(["plan", "--recipe", tmp_path / name, "--gpu", "A100-80G"], expected, code=None)
