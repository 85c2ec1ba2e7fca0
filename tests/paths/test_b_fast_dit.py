"""Guide b, fast-DiT: pictures or the features that it extracted, training on them, its 50K command (shortened), the .npz,
FID, grids, published weights from a server, and diffusers' DiTPipeline at the end."""

import json
import os

import numpy as np
import pytest
import torch
from browser import check_report
from conftest import REPOSITORY
from dit_pictures import assert_diffusers_draws_the_same
from dit_torch import DiT, randomise_
from pipelines import tiny_kl
from safetensors.torch import save, save_file
from test_download import OWN, Server, serve_hub
from test_store import write_fast_dit
from walks import Walk, check_run, pictures, steps_of

# fast-DiT's DiT-XL/2 at 256 px, narrow and shallow: 256 tokens, ImageNet's thousand classes.
NARROW = dict(hidden_size=64, depth=2, num_heads=1)
MODEL = ["--hidden-size", 64, "--depth", 2, "--num-heads", 1, "--num-classes", 1000]
CLASSIC = [207, 360, 387, 974, 88, 979, 417, 279]


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """Pictures in a folder for each class, an autoencoder, and what fast-DiT's extract_features.py leaves."""
    folder = tmp_path_factory.mktemp("brought")
    pictures(folder / "imagenet/train", 16, [(256, 256), (200, 320)], classes=True)
    tiny_kl(folder / "vae")
    write_fast_dit(folder / "features", 16)
    return folder


def training(walk, store, *more):
    """accelerate launch --mixed_precision fp16 train.py --model DiT-XL/2 --features-path features"""
    return ["train", "--recipe", REPOSITORY / "recipes/fast-dit/features.toml", *MODEL, "--data", store, "--compute-dtype", "fp16",
            "--global-batch", 16, "--ema-decay", 0.9, "--log-every", 1, "--threads", 1, "--peak-tflops", 1, *walk.many, *more]


def test_pictures_are_extracted(walk, brought):
    walk.kiln("extract", "--data", brought / "imagenet/train", "--autoencoder", brought / "vae", "--image-size", 256, "--flip", "both",
              "--enlarge", "--out", walk / "store", *walk.many)
    assert json.loads((walk / "store/store.json").read_text())["num_samples"] == 16


def test_its_own_features_are_imported_and_trained_on(walk, brought):
    walk.kiln("store", "import", "--from", "fast-dit", brought / "features/imagenet256_features", brought / "features/imagenet256_labels",
              "--out", walk / "imported", "--image-size", 256, "--num-classes", 1000)
    walk.kiln(*training(walk, walk / "imported", "--max-steps", 2), "--out", walk / "on-its-features")
    assert steps_of(walk / "on-its-features") == [1, 2]


def test_training_on_the_store(walk, brought):
    walk.kiln(*training(walk, walk / "store", "--max-steps", 8, "--sample-every", 4, "--num-samples", 4, "--num-sampling-steps", 4),
              "--out", walk / "run")
    assert steps_of(walk / "run") == list(range(1, 9))


def test_fifty_thousand_samples_shortened(walk, brought):
    walk.kiln("sample", "--run", walk / "run", "--num-images", 24, "--batch", 8, "--random-labels", "--cfg-scale", 1.5,
              "--num-sampling-steps", 10, "--threads", 1, "--no-png", "--npz", walk / "samples.npz", "--out", walk / "samples", *walk.many)
    samples = np.load(walk / "samples.npz")["arr_0"]
    assert samples.shape == (24, 256, 256, 3) and samples.dtype == np.uint8 and len(np.unique(samples.reshape(24, -1), axis=0)) == 24


def test_they_are_judged_against_a_reference(walk, brought):
    """Of pictures, and of the statistics that are left of them, as ADM publishes ImageNet's."""
    evaluate = ["evaluate", walk / "samples.npz", "--net", "random", "--threads", 1, *walk.many]
    results = [json.loads(walk.kiln(*evaluate, *options).stdout) for options in (
        ["--reference", brought / "imagenet/train", "--crop", 256, "--save-reference", walk / "reference.npz"],
        ["--reference", walk / "reference.npz"])]
    distances = [result["metrics"]["fd_random"] for result in results]
    assert distances[0] > 0 and distances[1] == pytest.approx(distances[0], rel=1e-4)
    walk.kiln("evaluate", walk / "run", "--net", "random", "--reference", brought / "imagenet/train", "--crop", 256, "--num-pictures", 16,
              "--num-sampling-steps", 4, "--cfg-scale", 1.5, "--random-labels", "--threads", 1, *walk.many)


def test_a_grid_of_the_classic_classes(walk, brought):
    """sample.py --model DiT-L/4 --image-size 256 --ckpt model.pt, on what was trained."""
    walk.kiln("convert", "--in", walk / "run", "--out", walk / "model.pt")
    assert "blocks.1.attn.qkv.weight" in torch.load(walk / "model.pt", weights_only=True)
    walk.kiln("sample", "--weights", walk / "model.pt", "--model", "DiT-XL/2", "--model-config", json.dumps(NARROW), "--image-size", 256,
              "--autoencoder", brought / "vae", "--classes", ",".join(map(str, CLASSIC)), "--num-images", 8, "--num-sampling-steps", 4,
              "--grid", "--threads", 1, "--out", walk / "grid", *walk.many)
    assert (walk / "grid/grid.png").exists() and len(list((walk / "grid").glob("0*.png"))) == 8


def test_published_weights_come_by_themselves(walk):
    """sample.py --image-size 512 --seed 1, with narrow weights on a server of this machine."""
    server = Server()
    try:
        serve_hub(server, weights=save(tiny_kl(walk / "served-vae").state_dict()), config=(walk / "served-vae/config.json").read_bytes())
        torch.save(randomise_(DiT(input_size=64, patch_size=2, in_channels=4, **NARROW)).state_dict(), walk / OWN)
        server.files["/" + OWN] = (walk / OWN).read_bytes()
        names = {"HF_HOME": str(walk / "hf"), "KILN_CACHE": str(walk / "own"), "HF_ENDPOINT": server.url, "KILN_MIRROR": server.url,
                 "https_proxy": "http://127.0.0.1:9"}
        walk.kiln("sample", "--model", "DiT-XL/2-512", "--seed", 1, "--num-sampling-steps", 2, "--model-config", json.dumps(NARROW), *walk.many,
                  env=os.environ | names, cwd=walk.folder)
        names = sorted(path.name for path in (walk / "DiT-XL-2-512-seed1").glob("0*.png"))
        assert names == [f"{index:06}-class-{label}.png" for index, label in enumerate(CLASSIC)]
    finally:
        server.close()


def test_diffusers_draws_from_it(walk, brought):
    walk.kiln("convert", "--in", walk / "run", "--out", walk / "pipeline", "--vae", brought / "vae")
    assert_diffusers_draws_the_same(walk, walk / "pipeline", 207, 4.0, "--run", walk / "run")


def test_the_reports_are_whole(walk, browser):
    walk.kiln("report", walk / "run")
    metrics = ["fd_random", "kd_random", "precision", "recall"]
    check_run(browser.open(walk / "run/report.html"), walk / "run", headings=["Evaluation", "Samples over time"],
              tables=[(["samples", *metrics], 1)], pictures=[(518, 518)] * 2, may_be_empty=["step"],  # kiln evaluate knows none
              rows={"model": "DiT-XL/2", "image-size": "256", "compute-dtype": "fp16", "nproc": str(walk.ranks if walk.many else 0),
                    "num_samples": "16", "reference.num_pictures": "16", "samples.cfg_scale": "1.5", "samples.label_sampling": "random"})
    walk.kiln("report", walk / "run", walk / "on-its-features", "--out", walk / "runs.html")
    check_report(browser.open(walk / "runs.html"), headings=["2 runs", "Speed and memory", "Options that differ", "Metrics", "Newest samples"],
                 plots=["Loss", "Throughput", "Host memory", "Learning rate"], pictures=[(518, 518)], may_be_empty=["step"],
                 tables=[(["run", "time", "steps", "images", "loss, last", "images/s, median", "host GB, highest"], 2), ([*metrics, "step"], 1)])


@pytest.mark.parametrize("option, value, expected", [
    ("--autoencoder", "nowhere", r"nowhere"),
    ("--image-size", 252, r"expected --image-size to be a multiple of 8, got 252"),
])
def test_what_does_not_fit_is_named_before_a_picture_is_read(tmp_path, brought, option, value, expected):
    Walk.refused(["extract"], {"--autoencoder": brought / "vae", "--image-size": 256, option: value}, expected, tmp_path, classes=True)


def test_weights_of_other_latents_name_the_store(tmp_path, brought):
    """--ckpt of a model for 16 channels, on features of 4."""
    save_file(randomise_(DiT(input_size=32, patch_size=2, in_channels=16, **NARROW)).state_dict(), tmp_path / "w.safetensors")
    Walk.kiln("store", "import", "--from", "fast-dit", brought / "features/imagenet256_features", brought / "features/imagenet256_labels",
              "--out", tmp_path / "store", "--image-size", 256, "--num-classes", 1000)
    Walk.refused(["train", "--recipe", REPOSITORY / "recipes/fast-dit/features.toml", *MODEL, "--global-batch", 16, "--max-steps", 1],
                 {"--data": tmp_path / "store", "--weights": tmp_path / "w.safetensors"},
                 r"--data \S+store gives latents of 4 channels, and --weights \S+ take 16", tmp_path)
