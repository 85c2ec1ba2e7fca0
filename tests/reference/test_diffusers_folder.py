"""What kiln convert puts into a diffusers folder and says of it, and which files it replaces."""

import contextlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import run_program, succeed
from dit_torch import DiT, randomise_
from PIL import Image
from pictures import noise_picture
from pipelines import text_encoder, tiny_kl
from pixart_torch import PixArt
from recorded_runs import PIXART, TINY, TRAIN, base, dit_run, draw, lora_run, make_run, pieces, pixart_run, record_of, recorded, refusal  # noqa: F401
from safetensors.torch import load_file, save_file
from test_convert_text import sana, unet


@pytest.fixture(scope="module")
def others(tmp_path_factory, pieces):
    """Pieces of the same form with other weights, and a tokenizer that differs."""
    folder = tmp_path_factory.mktemp("others")
    tiny_kl(folder / "vae", seed=9)
    shutil.copytree(pieces / "t5", folder / "t5")
    changed = load_file(folder / "t5/model.safetensors")
    changed[min(changed)] += 1
    save_file(changed, folder / "t5/model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_other_pieces_do_not_go_into_a_folder_unnoticed(pixart_run, pieces, others, tmp_path):
    right = {"--vae": pieces / "vae", "--text-encoder": pieces / "t5"}
    for option, other in {"--vae": others / "vae", "--text-encoder": others / "t5"}.items():
        given = ["convert", "--in", pixart_run, *[part for pair in (right | {option: other}).items() for part in pair]]
        line = refusal(*given, "--out", tmp_path / "no")
        assert line.count("xxh3:") == 2 and option in line and "--anyway" in line and not (tmp_path / "no").exists(), line
        folder = tmp_path / option
        assert "warning: " in succeed(*given, "--anyway", "--out", folder).stderr
        card = (folder / "README.md").read_text()
        assert re.search(r"^Attention: .* is another .*xxh3:.*xxh3:", card, re.M), card
        assert re.search(r"^    kiln sample .* --anyway", card, re.M) and str(others) not in card


def test_another_piece_beside_the_file_is_named(pixart_run, pieces, others, tmp_path):
    succeed("convert", "--in", pixart_run, "--out", tmp_path / "model.safetensors")
    shutil.copytree(others / "vae", tmp_path / "vae")
    shutil.copytree(pieces / "t5", tmp_path / "t5")
    line = refusal("convert", "--in", tmp_path / "model.safetensors", "--components", "copy", "--out", tmp_path / "folder")
    assert "another autoencoder" in line and not (tmp_path / "folder").exists()


def picture_of_card(folder):
    """Runs the code of a folder's card: its picture and its prompt."""
    card = (folder / "README.md").read_text()
    with contextlib.chdir(folder):
        exec(compile(re.search(r"```python\n(.*?)```", card, re.S)[1], "README.md", "exec"), {"__name__": "card"})
    return np.asarray(Image.open(folder / "picture.png")), re.search(r'^prompt = "(.*)"$', card, re.M)[1]


@pytest.fixture(scope="module")
def bare_pixart(tmp_path_factory):
    path = tmp_path_factory.mktemp("bare") / "pixart.safetensors"
    save_file(randomise_(PixArt(**PIXART)).state_dict(), path)
    return path


def test_the_card_of_captions_without_a_record_runs(bare_pixart, pieces, tmp_path):
    folder = tmp_path / "folder"
    succeed("convert", "--in", bare_pixart, "--num-heads", 4, "--out", folder)
    (folder / "autoencoder").symlink_to(pieces / "vae")  # where its code looks for them
    (folder / "text_encoder").symlink_to(pieces / "t5")
    got, prompt = picture_of_card(folder)
    want, _ = draw(tmp_path, "--weights", folder, "--autoencoder", pieces / "vae", "--text-encoder", pieces / "t5", "--prompt", prompt,
                   count=1, seed=0)
    assert np.abs(got - want[0]).max() <= 1


def test_new_user_2_the_card_of_a_pixart_of_pixels_runs(recorded, tmp_path):
    config = PIXART | dict(input_size=16, in_channels=3)
    info = dict(model="pixart", image_size=16, objective=dict(type="iddpm"), model_config=config, text=recorded[0]["text"],
                autoencoder=dict(name="pixels", path="", fingerprint="none", scaling_factor=1.0, shift_factor=0.0),
                drawing=dict(sampler="dpmpp_2m", num_sampling_steps=4, cfg_scale=1.5, guided_channels="all", unconditional="null_rows"),
                null_rows="trained")
    run, folder = make_run(tmp_path / "run", randomise_(PixArt(**config)).state_dict(), info), tmp_path / "folder"
    succeed("convert", "--in", run, "--components", "copy", "--out", folder)
    card = (folder / "README.md").read_text()
    assert "PixArtSigmaPipeline.from_pretrained(folder, torch_dtype=torch.float32, vae=None)" in card
    got, prompt = picture_of_card(folder)
    want, _ = draw(tmp_path, "--weights", folder, "--prompt", prompt, count=1, seed=0)
    assert want.std() > 8 and np.abs(got - want[0]).max() <= 1


@pytest.mark.parametrize("make, classes", [(sana, "Gemma2Model, GemmaTokenizer"), (unet, "CLIPTextModel, CLIPTokenizer")])
def test_a_family_names_its_published_encoder(make, classes, tmp_path):
    weights, config, *_ = make()
    save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / "w.safetensors",
              {"kiln_model_config": json.dumps(config)})
    succeed("convert", "--in", tmp_path / "w.safetensors", "--out", tmp_path / "folder")
    assert f"from transformers import {classes}\n" in (tmp_path / "folder/README.md").read_text()


def test_an_encoder_that_nobody_recorded_goes_into_the_folder(bare_pixart, pieces, tmp_path):
    common = ["convert", "--in", bare_pixart, "--num-heads", 4, "--vae", pieces / "vae"]
    succeed(*common, "--text-encoder", pieces / "t5", "--out", tmp_path / "folder")
    index = json.loads((tmp_path / "folder/model_index.json").read_text())
    assert index["text_encoder"] == ["transformers", "T5EncoderModel"] and index["tokenizer"] == ["transformers", "T5Tokenizer"]
    got, _ = draw(tmp_path, "--weights", tmp_path / "folder", "--prompt", "a bird", count=1)
    want, _ = draw(tmp_path, "--weights", bare_pixart, "--model-config", '{"num_heads": 4}', "--autoencoder", pieces / "vae",
                   "--text-encoder", pieces / "t5", "--prompt", "a bird", count=1)
    assert np.abs(got - want).max() <= 1
    text_encoder("t5", tmp_path / "wide", d_model=48)
    assert "makes captions of width 48, and the model takes 32" in refusal(
        *common, "--text-encoder", tmp_path / "wide", "--out", tmp_path / "no")


def test_a_guess_does_not_come_back_as_knowledge(tmp_path):
    config = TINY | dict(learn_sigma=True)
    save_file(randomise_(DiT(**config)).state_dict(), tmp_path / "bare.safetensors")
    succeed("convert", "--in", tmp_path / "bare.safetensors", "--out", tmp_path / "folder")
    result = succeed("convert", "--in", tmp_path / "folder", "--out", tmp_path / "back.safetensors")
    assert "num_heads 1 is assumed" in result.stdout
    for file in ("folder/transformer/diffusion_pytorch_model.safetensors", "back.safetensors"):
        record, _ = record_of(tmp_path / file)
        assert record["objective"] is None and not (record.get("drawing") or {}).get("sampler"), record
        assert "num_heads" not in record["model_config"]
    assert "Trained with Kiln" not in (tmp_path / "folder/README.md").read_text()
    scheduler = __import__("diffusers").DDPMScheduler.from_pretrained(tmp_path / "folder", subfolder="scheduler")
    assert scheduler.config.beta_schedule == "linear"
    drawn = [draw(tmp_path, "--weights", tmp_path / name, "--autoencoder", "pixels", "--num-sampling-steps", 3, "--classes", "1")
             for name in ("bare.safetensors", "folder")]
    assert np.abs(drawn[0][0] - drawn[1][0]).max() <= 1 and "objective iddpm" in drawn[1][1]


def test_the_card_says_who_trained(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "folder")
    assert "Trained with Kiln" in (tmp_path / "folder/README.md").read_text()


@pytest.mark.slow
def test_adapters_of_others_are_not_replaced(lora_run, tmp_path):
    names = ("adapter_model.safetensors", "adapter_config.json")
    for present in (names, names[:1], names[1:]):
        folder = tmp_path / f"foreign-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if names[0] in present:
            save_file({"a": torch.ones(3)}, folder / names[0])
        if names[1] in present:
            (folder / names[1]).write_text('{"r": 8}')
        before = {name: (folder / name).read_bytes() for name in present}
        assert "--overwrite" in refusal("convert", "--in", lora_run, "--out", folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        succeed("convert", "--in", lora_run, "--out", folder, "--overwrite")
        succeed("convert", "--in", lora_run, "--out", folder)  # its own


def test_a_pt_file_with_another_json_is_not_replaced(dit_run, tmp_path):
    beside = tmp_path / "my.pt.json"
    beside.write_text('{"notes": 1}')
    assert "my.pt.json exists" in refusal("convert", "--in", dit_run, "--out", tmp_path / "my.pt")
    torch.save({"a": torch.ones(3)}, tmp_path / "my.pt")
    assert "my.pt exists" in refusal("convert", "--in", dit_run, "--out", tmp_path / "my.pt")
    assert beside.read_text() == '{"notes": 1}' and torch.load(tmp_path / "my.pt")["a"].sum() == 3
    succeed("convert", "--in", dit_run, "--out", tmp_path / "my.pt", "--overwrite")
    succeed("convert", "--in", dit_run, "--out", tmp_path / "my.pt")


def test_evaluation_goes_on_with_another_piece(pixart_run, others, tmp_path):
    (tmp_path / "reference").mkdir()
    for index in range(4):
        noise_picture(np.random.default_rng(index), 64, 64).save(tmp_path / f"reference/{index}.png")
    run = shutil.copytree(pixart_run, tmp_path / "run")
    common = ["evaluate", run, "--reference", tmp_path / "reference", "--net", "random", "--metrics", "kid", "--num-pictures", 4,
              "--prompt", "a bird", "--threads", 1, "--text-encoder", others / "t5"]
    result = run_program("kiln", *common)
    assert result.returncode == 1 and "another text encoder" in result.stderr and "--anyway" in result.stderr
    assert "warning: " in succeed(*common, "--anyway").stderr
