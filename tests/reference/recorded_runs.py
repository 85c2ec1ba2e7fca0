"""Small runs with all of their record, as kiln train leaves them, and what the tests of records ask of their files."""

import functools
import json

import conftest
import diffusers
import numpy as np
import pytest
from conftest import succeed
from dit_torch import DiT, randomise_
from PIL import Image
from pipelines import text_encoder, tiny_kl
from pixart_torch import PixArt
from run_files import checkpoint, read_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

NAMES = ["cats & dogs", "birds", "fish", "trees"]
TINY = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=64, depth=2, num_heads=4, num_classes=4, learn_sigma=False)
PIXART = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=4, caption_channels=32,
              model_max_length=12, pe_interpolation=1.0)
PIXART_DIFFUSERS = dict(sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16,
                        cross_attention_dim=64, num_layers=2, caption_channels=32, interpolation_scale=1.0,
                        use_additional_conditions=False)


def once(make):
    """A fixture that several files import, made once for all of them that a process runs. Tests leave it as it is."""
    made = []

    @functools.wraps(make)
    def fixture(**others):
        if not made:
            made.append(make(**others))
        return made[0]

    return pytest.fixture(scope="module")(fixture)


def make_run(run, weights, info):
    """A run as kiln train leaves it, with an average beside its weights."""
    folder = checkpoint(run, 10)
    folder.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(dict(ema_decays=[0.9999], class_names=[]) | info))
    for name in ("model", "ema"):
        state = {key: value.contiguous() * (1 if name == "ema" else 0.5) for key, value in weights.items()}
        save_file(state, folder / f"{name}.safetensors")
    (folder / "train_state.json").write_text(json.dumps(dict(
        format_version=1, seed=0, step=10, images_seen=80, updates=10, loss_scale=1.0, scaler_good_steps=0, bad_steps=0,
        train_seconds=1.0, num_threads=1, machine="", config={},
        files={path.name: path.stat().st_size for path in folder.glob("*.safetensors")})))
    return run


@once
def dit_run(tmp_path_factory):
    info = dict(model="dit", model_config=TINY | dict(mlp_ratio=4.0, class_dropout_prob=0.1), image_size=8, class_names=NAMES,
                objective=dict(type="flow", shift=4.0),
                autoencoder=dict(name="pixels", path="", fingerprint="none", scaling_factor=1.0, shift_factor=0.0),
                drawing=dict(sampler="flow_euler", num_sampling_steps=5, cfg_scale=2.5, guided_channels="all",
                             unconditional="null_class"))
    return make_run(tmp_path_factory.mktemp("dit") / "run", randomise_(DiT(**TINY)).state_dict(), info)


def one_picture(folder):
    """A folder of one picture with its caption."""
    pictures = folder / "pictures"
    pictures.mkdir()
    Image.new("RGB", (64, 64), (200, 30, 40)).save(pictures / "0.png")
    (pictures / "metadata.jsonl").write_text(json.dumps(dict(file_name="0.png", text="a red square")) + "\n")
    return pictures


def fingerprints_of(tmp_path_factory, vae, encoder):
    """What kiln records of the two: it is asked by training a step on a picture with them."""
    folder = tmp_path_factory.mktemp("asked")
    one_picture(folder)
    succeed("train", "--model", "pixart", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--data", folder / "pictures",
            "--autoencoder", vae, "--text-encoder", encoder, "--text-max-tokens", 12, "--image-size", 64, "--global-batch", 1,
            "--max-steps", 1, "--lr", 0.05, "--threads", 1, "--peak-tflops", 1, "--out", folder / "run")
    info = read_config(folder / "run")
    return dict(autoencoder=info["autoencoder"], text=info["text"]), info, folder / "run"


@once
def pieces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    tiny_kl(folder / "vae")
    text_encoder("t5", folder / "t5")
    return folder


@once
def recorded(tmp_path_factory, pieces):
    return fingerprints_of(tmp_path_factory, pieces / "vae", pieces / "t5")


@once
def pixart_run(tmp_path_factory, recorded):
    """PixArt trained with flow matching, shift 4, at 64 px, with null rows of its own."""
    model = randomise_(PixArt(**PIXART | dict(pred_sigma=False)))
    info = dict(model="pixart", image_size=64, objective=dict(type="flow", shift=4.0),
                model_config=PIXART | dict(pred_sigma=False),
                drawing=dict(sampler="flow_euler", num_sampling_steps=4, cfg_scale=3.0, guided_channels="all",
                             unconditional="null_rows"), null_rows="trained") | recorded[0]
    return make_run(tmp_path_factory.mktemp("pixart") / "run", model.state_dict(), info)


def draw(tmp_path, *arguments, count=2, seed=3):
    """(pictures (N, H, W, 3), stderr) of kiln sample."""
    out = tmp_path / f"drawn-{len(list(tmp_path.glob('drawn-*')))}"
    result = succeed("sample", *arguments, "--num-images", count, "--threads", 1, "--seed", seed, "--out", out)
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(out.glob("0*.png"))]), result.stderr


def refusal(*arguments):
    line = conftest.refusal(*arguments, lines=lambda text: [
        line for line in text.splitlines() if " is published: " not in line and not line.startswith("note: ")])
    assert len(line) < 700, line
    return line


def bare_weights(run, folder):
    """The average of dit_run without anything about it."""
    save_file(load_file(checkpoint(run, 10) / "ema.safetensors"), folder / "bare.safetensors")
    return folder / "bare.safetensors"


def record_of(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["kiln_record"]), file.metadata()


CLASSES = ["--classes", "birds,fish"]
PROMPTS = ["--prompt", "a red apple", "--prompt", "two birds in a tree"]


@once
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    model = randomise_(diffusers.PixArtTransformer2DModel(**PIXART_DIFFUSERS))
    save_file(model.state_dict(), path)
    return path


TRAIN = ["train", "--model", "pixart_diffusers", "--model-config", json.dumps(PIXART_DIFFUSERS), "--data", "synthetic",
         "--image-size", 64, "--objective", "epsilon", "--global-batch", 2, "--threads", 1, "--peak-tflops", 1, "--lr", 0.01,
         "--lora-rank", 2, "--max-steps", 2]


@once
def lora_run(tmp_path_factory, base):
    run = tmp_path_factory.mktemp("lora") / "run"
    succeed(*TRAIN, "--weights", base, "--out", run)
    return run
