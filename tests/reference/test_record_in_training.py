"""The record of weights in training: runs that begin with them, adapters that change them, and what a run writes of itself. Some
tests bear the number of what trying as a new user had brought to light."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import succeed
from dit_torch import randomise_
from PIL import Image
from pixart_torch import PixArt
from recorded_runs import (  # noqa: F401
    PIXART, PROMPTS, TINY, base, dit_run, draw, lora_run, one_picture, pieces, pixart_run, record_of, recorded,
    refusal,
)
from run_files import read_config
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel, T5Tokenizer


@pytest.mark.slow
def test_6_an_adapter_of_diffusers_keys_merges_into_its_base_in_any_form(base, lora_run, tmp_path):
    succeed("convert", "--in", base, "--out", tmp_path / "folder")
    succeed("convert", "--in", base, "--out", tmp_path / "base.pt")
    for name in ("peft", "diffusers.safetensors"):
        succeed("convert", "--in", lora_run, "--out", tmp_path / name)
    merged = {}
    for source in (base, tmp_path / "folder", tmp_path / "base.pt"):
        for adapter in (lora_run, tmp_path / "peft", tmp_path / "diffusers.safetensors"):
            out = tmp_path / f"{source.name}-{adapter.stem}"
            succeed("convert", "--in", source, "--merge", adapter, "--out", out)
            merged[out.name] = load_file(out / "transformer/diffusion_pytorch_model.safetensors")
    first, *others = merged.values()
    plain = load_file(base)
    assert any(not torch.equal(first[key], plain[key]) for key in first)
    for other in others:
        assert all(torch.allclose(first[key], other[key], atol=1e-6) for key in first)


def test_8_training_takes_the_model_from_the_record(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    out = tmp_path / "run"
    succeed("train", "--weights", tmp_path / "w.safetensors", "--lora-rank", 2, "--data", "synthetic", "--autoencoder", "pixels",
            "--num-classes", 4, "--objective", "flow", "--global-batch", 2, "--threads", 1, "--peak-tflops", 1, "--max-steps", 1,
            "--out", out)
    info = read_config(out)
    assert info["model"] == "dit" and info["model_config"]["num_heads"] == 4 and info["image_size"] == 8


@pytest.mark.slow
def test_9_an_adapter_of_another_base_of_the_same_shape_is_named(base, lora_run, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({key: value + 1 for key, value in load_file(base).items()}, other)
    for name in ("peft", "file.safetensors"):
        succeed("convert", "--in", lora_run, "--out", tmp_path / name)
    for adapter in (lora_run, tmp_path / "peft", tmp_path / "file.safetensors"):
        line = refusal("convert", "--in", other, "--merge", adapter, "--out", tmp_path / "no.safetensors")
        assert line.count("xxh3:") == 2 and "--anyway" in line
        assert base.name in line and f"{other} holds other values" in line
        assert not (tmp_path / "no.safetensors").exists()
    succeed("convert", "--in", other, "--merge", lora_run, "--anyway", "--out", tmp_path / "yes.safetensors")
    half = tmp_path / "half.safetensors"
    succeed("convert", "--in", base, "--dtype", "bf16", "--out", half)
    succeed("convert", "--in", half, "--merge", tmp_path / "peft", "--out", tmp_path / "half_merged.safetensors")


@pytest.mark.slow
def test_10_a_moved_run_of_an_adapter_finds_its_base(base, lora_run, pieces, tmp_path):
    succeed("convert", "--in", base, "--merge", lora_run, "--out", tmp_path / "merged.safetensors")
    pictures = ["--autoencoder", pieces / "vae", "--text-encoder", pieces / "t5", "--prompt", "a bird", "--num-sampling-steps", 2,
                "--sampler", "ddim", "--cfg-scale", 3, "--anyway"]
    want, _ = draw(tmp_path, "--weights", tmp_path / "merged.safetensors", *pictures)
    moved = tmp_path / "moved/run"
    shutil.copytree(lora_run, moved)
    info = read_config(moved)
    info["adapter"]["base_path"] = "/gone/base.safetensors"
    (moved / "config.json").write_text(json.dumps(info))
    assert "--base PATH" in refusal("sample", "--run", moved, *pictures, "--num-images", 1, "--out", tmp_path / "no")
    got, _ = draw(tmp_path, "--run", moved, "--base", base, *pictures)
    assert np.abs(got - want).max() <= 1
    # A base in a checkpoint is called as the adapter's own file.
    at = "before/checkpoints/step-00000001/model.safetensors"
    info["adapter"]["base_path"] = f"/gone/{at}"
    (moved / "config.json").write_text(json.dumps(info))
    assert f"/gone/{at}, which is not there" in refusal("sample", "--run", moved, *pictures, "--out", tmp_path / "no")
    assert "is an adapter itself" in refusal("sample", "--run", moved, "--base", lora_run, *pictures, "--out", tmp_path / "no")
    (tmp_path / "moved" / at).parent.mkdir(parents=True)
    shutil.copy(base, tmp_path / "moved" / at)  # beside the run
    got, _ = draw(tmp_path, "--run", moved, *pictures)
    assert np.abs(got - want).max() <= 1
    shutil.rmtree(tmp_path / "moved/before")
    shutil.copy(base, tmp_path / "moved/model.safetensors")
    got, _ = draw(tmp_path, "--run", moved, *pictures)
    assert np.abs(got - want).max() <= 1


@pytest.mark.slow
def test_12_an_adapter_in_the_place_of_weights_is_named(lora_run, tmp_path):
    for name in ("peft", "file.safetensors"):
        succeed("convert", "--in", lora_run, "--out", tmp_path / name)
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tmp_path / "file.safetensors"), bare)
    for adapter in (tmp_path / "peft/adapter_model.safetensors", tmp_path / "file.safetensors", bare):
        assert "holds an adapter" in refusal("sample", "--weights", adapter, "--prompt", "a", "--out", tmp_path / "out")


@pytest.mark.slow
def test_8_training_goes_on_with_the_objective_of_the_weights(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    common = ["train", "--weights", tmp_path / "w.safetensors", "--data", "synthetic", "--autoencoder", "pixels", "--num-classes", 4,
              "--global-batch", 2, "--threads", 1, "--peak-tflops", 1, "--max-steps", 1]
    stderr = succeed(*common, "--out", tmp_path / "run").stderr
    assert read_config(tmp_path / "run")["objective"]["shift"] == 4.0
    assert "were trained: " in stderr and "--flow-shift 4" in stderr and "--objective flow" in stderr
    stderr = succeed(*common, "--objective", "flow", "--out", tmp_path / "other").stderr
    assert "this run trains with flow, shift 1, --weights" in stderr and "were trained with flow, shift 4" in stderr


def test_a_run_writes_its_record(recorded, pieces):
    _, info, run = recorded
    assert info["drawing"]["unconditional"] == "null_rows" and info["drawing"]["guided_channels"] == "model"
    assert info["drawing"]["sampler"] == "dpmpp_2m" and info["drawing"]["num_sampling_steps"] == 20
    assert info["trained_on"] == dict(data=["pictures"], samples=1, global_batch=1)
    assert not info.get("class_names")  # of the folders, which a model of captions does not know
    assert info["null_rows"] == "empty_caption"
    rows = load_file(next(run.glob("checkpoints/*/model.safetensors")))["y_embedder.y_embedding"]
    encoder, tokenizer = (kind.from_pretrained(pieces / "t5") for kind in (T5EncoderModel, T5Tokenizer))
    with torch.no_grad():
        empty = encoder(**tokenizer("", return_tensors="pt")).last_hidden_state[0]
    assert (rows[:len(empty)] - empty).abs().max() < 4e-3 and (rows[len(empty):] == rows[len(empty) - 1]).all()  # and not trained


@pytest.mark.slow
def test_null_rows_f16_and_old_records_in_the_comparison_of_a_base(tmp_path):
    state = randomise_(PixArt(**PIXART | dict(pred_sigma=False))).state_dict()
    base, other, half = (tmp_path / f"{name}.safetensors" for name in ("base", "other", "half"))
    save_file(state, base)
    save_file(state | {"y_embedder.y_embedding": state["y_embedder.y_embedding"] + 1}, other)
    save_file({key: value.half() for key, value in state.items()}, half)
    run = tmp_path / "run"
    succeed("train", "--model", "pixart", "--model-config", json.dumps(PIXART | dict(pred_sigma=False)), "--weights", base,
            "--data", "synthetic", "--image-size", 64, "--objective", "epsilon", "--global-batch", 2, "--threads", 1,
            "--peak-tflops", 1, "--lora-rank", 2, "--max-steps", 1, "--out", run)
    line = refusal("convert", "--in", other, "--merge", run, "--out", tmp_path / "no.safetensors")
    assert line.count("xxh3:") == 2 and "--anyway" in line
    told = ["--model", "pixart", "--model-config", json.dumps(PIXART | dict(pred_sigma=False))]
    succeed("convert", "--in", base, *told, "--out", tmp_path / "folder")
    for source in (half, tmp_path / "folder"):
        succeed("convert", "--in", source, "--merge", run, "--out", tmp_path / f"merged-{source.stem}.safetensors")
    info = read_config(run)
    assert info["autoencoder"]["name"] == "" and "scaling_factor" not in info["autoencoder"]
    del info["adapter"]["base_values"]  # as an earlier version leaves it
    (run / "config.json").write_text(json.dumps(info))
    state_file = run / "checkpoints/step-00000001/train_state.json"
    saved = json.loads(state_file.read_text())
    del saved["config"]["record"], saved["xxh3"]
    state_file.write_text(json.dumps(saved))
    succeed("convert", "--in", base, "--merge", run, "--out", tmp_path / "old.safetensors")
    line = refusal("convert", "--in", other, "--merge", run, "--out", tmp_path / "no.safetensors")
    assert "whether it holds the same values cannot be told" in line and "--anyway" in line


@pytest.mark.slow
def test_each_checkpoint_has_the_record_of_its_stage(tmp_path):
    run, more = tmp_path / "run", tmp_path / "more.toml"
    succeed("train", "--model", "pixart", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--data", "synthetic",
            "--autoencoder", "pixels", "--image-size", 8, "--objective", "flow", "--global-batch", 2, "--threads", 1,
            "--peak-tflops", 1, "--max-steps", 1, "--out", run)
    more.write_text("image-size = 16\nsteps = 1\n")
    succeed("train", "--out", run, "--continue-with", more)
    for step in (1, 2):
        succeed("convert", "--in", run / f"checkpoints/step-{step:08}", "--out", tmp_path / f"{step}.safetensors")
    first, last = (record_of(tmp_path / f"{step}.safetensors")[0] for step in (1, 2))
    assert first["image_size"] == 8 and first["trained_on"]["steps"] == 1 and "earlier" not in first["trained_on"]
    assert last["image_size"] == 16 and last["trained_on"]["first_step"] == 1
    assert [stage["steps"] for stage in last["trained_on"]["earlier"]] == [1]


@pytest.mark.slow
def test_what_is_drawn_has_the_size_of_training(pieces, tmp_path):
    run = tmp_path / "run"
    succeed("train", "--model", "PixArt-Sigma-XL/2-512", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--data",
            one_picture(tmp_path), "--autoencoder", "pixels", "--text-encoder", pieces / "t5", "--text-max-tokens", 12,
            "--image-size", 16, "--global-batch", 1, "--threads", 1, "--peak-tflops", 1, "--max-steps", 1, "--sample-every", 1,
            "--num-samples", 1, "--num-sampling-steps", 2, "--out", run)
    info = read_config(run)
    assert info["image_size"] == 16 and info["autoencoder"]["downsample"] == 1
    grid, = (run / "samples").glob("*.png")
    assert Image.open(grid).size == (16 + 4, 16 + 4)  # with its border
    assert draw(tmp_path, "--run", run, *PROMPTS)[0].shape == (2, 16, 16, 3)
    succeed("convert", "--in", run, "--out", tmp_path / "folder")
    assert load_file(next((tmp_path / "folder").glob("*noise*")))["noise"].shape[-1] == 16
    succeed("convert", "--in", run, "--input-size", 32, "--out", tmp_path / "other.safetensors")
    record, _ = record_of(tmp_path / "other.safetensors")
    assert record["image_size"] == 32 and record["model_config"]["input_size"] == 32


def test_an_adapter_goes_on_top_of_a_runs(lora_run, pieces, tmp_path):
    pictures = ["--run", lora_run, "--autoencoder", pieces / "vae", "--text-encoder", pieces / "t5", "--prompt", "a bird",
                "--num-sampling-steps", 2, "--sampler", "ddim", "--cfg-scale", 3, "--anyway"]
    succeed("convert", "--in", lora_run, "--out", tmp_path / "peft")
    once, _ = draw(tmp_path, *pictures, count=1)
    twice, _ = draw(tmp_path, *pictures, "--adapter", tmp_path / "peft", count=1)
    assert not np.array_equal(once, twice)


def test_a_merged_adapter_is_in_the_record(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    state = load_file(tmp_path / "w.safetensors")
    layer = "blocks.0.attn.qkv"
    rows, columns = state[f"{layer}.weight"].shape
    save_file({f"{layer}.lora_A.weight": torch.ones(1, columns), f"{layer}.lora_B.weight": torch.ones(rows, 1)},
              tmp_path / "foreign.safetensors")
    succeed("convert", "--in", tmp_path / "w.safetensors", "--merge", tmp_path / "foreign.safetensors", "--out",
            tmp_path / "merged.safetensors")
    record, _ = record_of(tmp_path / "merged.safetensors")
    assert record["trained_on"]["adapters"] == ["foreign.safetensors"] and "average" not in record


TRAIN_ON = ["train", "--data", "synthetic", "--global-batch", 2, "--threads", 1, "--peak-tflops", 1, "--max-steps", 1, "--lr", 1e-30]


@pytest.mark.slow
def test_training_begins_from_kilns_own_folder(dit_run, pixart_run, tmp_path):
    """As from the file with the same record."""
    for run, more in ((dit_run, ["--autoencoder", "pixels", "--num-classes", 4]), (pixart_run, [])):
        ship = tmp_path / run.parent.name
        ship.mkdir()
        succeed("convert", "--in", run, "--out", ship / "file.safetensors")
        succeed("convert", "--in", run, "--out", ship / "folder")
        begun = {}
        for name in ("file.safetensors", "folder", "folder/transformer"):
            out = ship / f"run-{len(begun)}"
            succeed(*TRAIN_ON, *more, "--weights", ship / name, "--out", out)
            begun[name] = (read_config(out), load_file(out / "checkpoints/step-00000001/model.safetensors"))
        want_info, want = begun["file.safetensors"]
        for name, (info, got) in begun.items():
            assert all(info[key] == want_info[key] for key in ("model", "model_config", "objective", "image_size")), name
            assert got.keys() == want.keys() and all(torch.allclose(got[key], want[key], atol=1e-5) for key in want), name
        values = []
        for name in ("file.safetensors", "folder"):
            succeed(*TRAIN_ON, *more, "--weights", ship / name, "--lora-rank", 2, "--out", ship / f"lora-{len(values)}")
            values.append(read_config(ship / f"lora-{len(values)}")["adapter"]["base_values"])
        assert values[0] == values[1]
    folder = tmp_path / pixart_run.parent.name / "folder"
    line = refusal(*TRAIN_ON, "--model", "dit", "--hidden-size", 64, "--depth", 2, "--num-heads", 4, "--image-size", 64, "--weights",
                   folder, "--out", tmp_path / "no")
    assert f"--weights {folder} are of pixart, not of --model dit" in line


def test_weights_of_another_size_than_a_named_model(pixart_run, tmp_path):
    succeed("convert", "--in", pixart_run, "--out", tmp_path / "w.safetensors")
    line = refusal(*TRAIN_ON, "--model", "PixArt-Sigma-XL/2-256", "--weights", tmp_path / "w.safetensors", "--out", tmp_path / "no")
    assert "are of another size than --model PixArt-Sigma-XL/2-256: leave out --model" in line


def test_the_same_command_resumes_with_a_part_of_the_models_config(dit_run, tmp_path):
    """The rest of the config came from the record of --weights."""
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    command = [*TRAIN_ON, "--autoencoder", "pixels", "--num-classes", 4, "--weights", tmp_path / "w.safetensors", "--out", tmp_path / "run"]
    for _ in range(2):
        succeed(*command, "--model-config", json.dumps(dict(depth=TINY["depth"])))
