"""What weights say of themselves: one record from training through every file to the picture. Each test bears the number
of what trying as a new user had brought to light."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import assert_fails, succeed
from dit_torch import randomise_
from pipelines import START, kiln_normals, tiny_kl
from pixart_torch import PixArt
from recorded_runs import (  # noqa: F401
    CLASSES, PIXART, PROMPTS, bare_weights, dit_run, draw, pieces, pixart_run, record_of, recorded, refusal,
)
from run_files import checkpoint, read_config
from safetensors.torch import load_file, save_file


def stations(run, folder):
    """The files that a run becomes: name -> what --weights takes, the last two after a way back from diffusers."""
    for name in ("alone.safetensors", "weights.pt", "pipeline"):
        succeed("convert", "--in", run, "--out", folder / name)
    succeed("convert", "--in", folder / "pipeline", "--out", folder / "back.safetensors")
    said = succeed("convert", "--in", folder / "weights.pt", "--out", folder / "other.pt").stdout
    assert "other.pt.json" in said and "keep the two files together" in said, "new user, 14"
    succeed("convert", "--in", folder / "weights.pt", "--out", folder / "from_pt.safetensors")
    (folder / "elsewhere").mkdir()
    shutil.move(folder / "alone.safetensors", folder / "elsewhere/alone.safetensors")
    return {"one file": folder / "elsewhere/alone.safetensors", ".pt": folder / "weights.pt", "folder": folder / "pipeline",
            "folder back": folder / "back.safetensors", ".pt back": folder / "from_pt.safetensors",
            "run": run, "checkpoint": run / "checkpoints/step-00000010"}


@pytest.mark.slow
def test_1_2_7_14_dit_draws_the_same_from_every_file(dit_run, tmp_path):
    want, stderr = draw(tmp_path, "--run", dit_run, *CLASSES)
    assert "published" not in stderr and want.std() > 20
    for name, weights in stations(dit_run, tmp_path).items():
        got, stderr = draw(tmp_path, "--weights", weights, *CLASSES)
        assert np.abs(got - want).max() <= 1, name
        assert "published" not in stderr and "chosen" not in stderr, (name, stderr)


@pytest.mark.slow
def test_1_5_7_pixart_draws_the_same_from_every_file(pixart_run, pieces, tmp_path):
    want, _ = draw(tmp_path, "--run", pixart_run, *PROMPTS)
    assert want.shape == (2, 64, 64, 3)
    lie = ["--autoencoder", pieces / "vae", "--text-encoder", pieces / "t5"]
    for name, weights in stations(pixart_run, tmp_path).items():
        got, stderr = draw(tmp_path, "--weights", weights, *PROMPTS, *lie)
        assert np.abs(got - want).max() <= 1, name
        assert "published" not in stderr, (name, stderr)
    rows = load_file(tmp_path / "back.safetensors")["y_embedder.y_embedding"]
    assert torch.equal(rows, load_file(tmp_path / "from_pt.safetensors")["y_embedder.y_embedding"]) and rows.abs().sum() > 0


def test_1_pieces_that_lie_beside_the_file_are_found(pixart_run, pieces, tmp_path):
    want, _ = draw(tmp_path, "--run", pixart_run, *PROMPTS)
    ship = tmp_path / "ship"
    ship.mkdir()
    succeed("convert", "--in", pixart_run, "--out", ship / "model.safetensors")
    for piece in ("vae", "t5"):
        shutil.copytree(pieces / piece, ship / piece)
    record, metadata = record_of(ship / "model.safetensors")
    assert str(pieces) not in json.dumps(metadata)
    got, _ = draw(tmp_path, "--weights", ship / "model.safetensors", *PROMPTS)
    assert np.abs(got - want).max() <= 1


def test_1_files_say_all_of_it_with_the_same_bytes(pixart_run, tmp_path):
    for name in ("a", "b"):
        succeed("convert", "--in", pixart_run, "--out", tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    record, metadata = record_of(tmp_path / "a.safetensors")
    assert record["objective"] == dict(type="flow", shift=4.0) and record["average"] == "ema-0.9999"
    assert record["trained_on"]["steps"] == 10 and record["text"]["tokenizer_fingerprint"]
    assert metadata["modelspec.sai_model_spec"] == "1.0.1" and metadata["modelspec.resolution"] == "64x64"
    succeed("convert", "--in", pixart_run, "--no-ema", "--out", tmp_path / "model.safetensors")
    assert record_of(tmp_path / "model.safetensors")[0]["average"] == "model"


def test_new_user_15_a_folder_becomes_the_file_it_was_made_beside(pixart_run, tmp_path):
    succeed("convert", "--in", pixart_run, "--out", tmp_path / "alone.safetensors")
    succeed("convert", "--in", pixart_run, "--out", tmp_path / "pix_folder", "--components", "copy")
    succeed("convert", "--in", tmp_path / "pix_folder", "--out", tmp_path / "back.safetensors")
    alone, back = (load_file(tmp_path / f"{name}.safetensors") for name in ("alone", "back"))
    assert set(back) == set(alone) and all(torch.equal(back[key], alone[key]) for key in alone)
    record, _ = record_of(tmp_path / "back.safetensors")
    assert record["text"]["path"] == "t5" and record["autoencoder"]["path"] == "vae"


@pytest.mark.slow
def test_1_shift_and_objective_can_be_given(dit_run, tmp_path):
    bare = bare_weights(dit_run, tmp_path)
    want, _ = draw(tmp_path, "--run", dit_run, "--classes", "1,2")
    told = ["--weights", bare, "--model-config", '{"num_heads": 4}', "--classes", "1,2", "--objective", "flow", "--flow-shift", 4,
            "--num-sampling-steps", 5, "--cfg-scale", 2.5]
    got, _ = draw(tmp_path, *told)
    assert np.abs(got - want).max() <= 1
    succeed("convert", "--in", bare, "--objective", "flow", "--flow-shift", 4, "--model-config", '{"num_heads": 4}', "--out",
            tmp_path / "told.safetensors")
    got, _ = draw(tmp_path, "--weights", tmp_path / "told.safetensors", *told[4:6], *told[10:])
    assert np.abs(got - want).max() <= 1
    assert "--flow-shift is for --objective flow" in refusal(
        "sample", *told[:6], "--objective", "iddpm", "--flow-shift", 4, "--num-images", 1, "--out", tmp_path / "no")


def test_2_a_config_beside_the_weights_is_read(dit_run, tmp_path):
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    shutil.copy(checkpoint(dit_run, 10) / "ema.safetensors", tmp_path / "ema.safetensors")
    shutil.copy(dit_run / "config.json", tmp_path / "config.json")
    got, _ = draw(tmp_path, "--weights", tmp_path / "ema.safetensors", *CLASSES)
    assert np.abs(got - want).max() <= 1


def test_3_what_is_assumed_is_said_in_the_first_line(dit_run, tmp_path):
    bare = bare_weights(dit_run, tmp_path)
    _, stderr = draw(tmp_path, "--weights", bare, "--num-sampling-steps", 2, count=1)
    lines = [line for line in stderr.splitlines() if not line.startswith("note: ")]
    assert lines[0].startswith("kiln sample: as dit is published: objective iddpm; sampler ddpm") and "num_heads 1" in lines[1]


def test_3_an_old_run_draws_as_published_and_says_so(dit_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(dit_run, run)
    info = read_config(run)
    del info["drawing"]
    (run / "config.json").write_text(json.dumps(info))
    _, stderr = draw(tmp_path, "--run", run, *CLASSES)
    assert "guidance 4" in stderr and "objective" not in stderr


def test_3_a_schedule_that_contradicts_the_record_is_named(dit_run, tmp_path):
    folder = tmp_path / "pipeline"
    succeed("convert", "--in", dit_run, "--out", folder)
    scheduler = folder / "scheduler/scheduler_config.json"
    config = json.loads(scheduler.read_text())
    shift = next(key for key in ("shift", "flow_shift") if key in config)
    scheduler.write_text(json.dumps(config | {shift: 1.0}))
    common = ["sample", "--weights", folder, "--num-images", 1, "--threads", 1, "--out", tmp_path / "out"]
    line = refusal(*common)
    assert "flow, shift 4" in line and "flow, shift 1" in line and "--anyway" in line
    assert "warning: " in succeed(*common, "--anyway").stderr


def test_7_a_folder_of_another_program_draws_by_its_scheduler(dit_run, tmp_path):
    folder = tmp_path / "pipeline"
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    succeed("convert", "--in", dit_run, "--out", folder)
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    save_file(load_file(weights), weights)  # as diffusers writes it, without the record
    got, stderr = draw(tmp_path, "--weights", folder, *CLASSES, "--autoencoder", "pixels", "--cfg-scale", 2.5, "--sampler",
                       "flow_euler", "--num-sampling-steps", 5)
    assert np.abs(got - want).max() <= 1 and "objective" not in stderr


@pytest.mark.slow
def test_a_mismatched_piece_is_named_before_the_first_picture(pixart_run, pieces, tmp_path):
    succeed("convert", "--in", pixart_run, "--out", tmp_path / "w.safetensors")
    tiny_kl(tmp_path / "vae", seed=9)
    _, metadata = record_of(tmp_path / "w.safetensors")
    common = ["sample", "--weights", tmp_path / "w.safetensors", "--prompt", "a", "--num-images", 1, "--threads", 1]
    right = {"--autoencoder": pieces / "vae", "--text-encoder": pieces / "t5"}
    shutil.copytree(pieces / "t5", tmp_path / "t5")
    weights = tmp_path / "t5/model.safetensors"
    changed = load_file(weights)
    changed[min(changed)] += 1
    save_file(changed, weights, {"format": "pt"})
    for option, other in {"--autoencoder": tmp_path / "vae", "--text-encoder": tmp_path / "t5"}.items():
        given = [str(part) for pair in (right | {option: other}).items() for part in pair]
        line = refusal(*common, *given, "--out", tmp_path / "none")
        assert line.count("xxh3:") == 2 and "--anyway" in line and not (tmp_path / "none").exists(), line
        assert "warning: " in succeed(*common, *given, "--anyway", "--out", tmp_path / option).stderr


def test_8_convert_takes_a_config_and_a_size(dit_run, tmp_path):
    state = load_file(checkpoint(dit_run, 10) / "ema.safetensors")
    torch.save(state, tmp_path / "w.pt")
    succeed("convert", "--in", tmp_path / "w.pt", "--model-config", '{"num_heads": 4}', "--out", tmp_path / "w.safetensors")
    assert record_of(tmp_path / "w.safetensors")[0]["model_config"]["num_heads"] == 4
    model = randomise_(PixArt(**PIXART))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "p.pth")
    succeed("convert", "--in", tmp_path / "p.pth", "--image-size", 64, "--num-heads", 4, "--out", tmp_path / "p.safetensors")
    record, _ = record_of(tmp_path / "p.safetensors")
    assert record["model_config"]["input_size"] == 8 and record["image_size"] == 64 and record["objective"] is None


def test_12_weights_of_another_family_are_named(dit_run, tmp_path):
    weights = checkpoint(dit_run, 10) / "ema.safetensors"
    line = refusal("sample", "--weights", weights, "--model", "pixart", "--prompt", "a", "--out", tmp_path / "out")
    assert "holds weights of dit, not of pixart" in line


def test_2_a_folder_with_a_config_and_an_average_is_a_model(dit_run, tmp_path):
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    ship = tmp_path / "ship"
    ship.mkdir()
    shutil.copy(dit_run / "config.json", ship)
    for name in ("ema", "model"):
        shutil.copy(dit_run / f"checkpoints/step-00000010/{name}.safetensors", ship)
    assert np.abs(draw(tmp_path, "--weights", ship, *CLASSES)[0] - want).max() <= 1
    assert np.abs(draw(tmp_path, "--weights", ship, "--no-ema", *CLASSES)[0] - want).max() > 1


def test_14_a_run_ships_with_its_average_alone(dit_run, tmp_path):
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    run = tmp_path / "run"
    shutil.copytree(dit_run, run)
    (checkpoint(run, 10) / "model.safetensors").unlink()
    got, _ = draw(tmp_path, "--run", run, *CLASSES)
    assert np.array_equal(got, want)
    succeed("convert", "--in", run, "--out", tmp_path / "w.safetensors")
    average = checkpoint(run, 10) / "ema.safetensors"
    average.write_bytes(average.read_bytes()[:-4])  # cut: not whole
    assert "checkpoint" in refusal("sample", "--run", run, *CLASSES, "--num-images", 1, "--out", tmp_path / "no")


def test_14_files_of_others_are_not_overwritten(dit_run, tmp_path):
    mine = tmp_path / "mine.safetensors"
    save_file({"a": torch.ones(3)}, mine)
    assert "--overwrite" in refusal("convert", "--in", dit_run, "--out", mine)
    assert load_file(mine)["a"].sum() == 3
    succeed("convert", "--in", dit_run, "--out", mine, "--overwrite")
    succeed("convert", "--in", dit_run, "--out", mine)  # its own


def test_14_noise_is_saved_and_given(dit_run, tmp_path):
    noise = tmp_path / "noise.safetensors"
    common = ["--run", dit_run, *CLASSES]
    want, _ = draw(tmp_path, *common, "--save-noise", noise)
    assert torch.allclose(load_file(noise)["noise"], kiln_normals(3, START, range(2), (3, 8, 8)), atol=1e-6)
    got, _ = draw(tmp_path, *common, "--noise", noise, seed=77)
    assert np.array_equal(got, want)
    swapped = {"noise": load_file(noise)["noise"].flip(0)}
    save_file(swapped, tmp_path / "swapped.safetensors")
    other, _ = draw(tmp_path, "--run", dit_run, "--classes", "fish,birds", "--noise", tmp_path / "swapped.safetensors")
    assert np.array_equal(other, want[::-1])
    save_file({"noise": torch.zeros(1, 3, 8, 8)}, tmp_path / "short.safetensors")
    assert "expected \"noise\" of 2 pictures or more" in refusal(
        "sample", *common, "--noise", tmp_path / "short.safetensors", "--num-images", 2, "--out", tmp_path / "no")


def test_14_noise_of_the_steps_too(dit_run, tmp_path):
    noise = tmp_path / "noise.safetensors"
    bare = bare_weights(dit_run, tmp_path)
    common = ["--weights", bare, "--classes", "1,2", "--objective", "epsilon", "--sampler", "ddpm", "--num-sampling-steps", 4]
    want, _ = draw(tmp_path, *common, "--save-noise", noise)
    assert load_file(noise)["step_noise"].shape == (4, 2, 3, 8, 8)
    got, _ = draw(tmp_path, *common, "--noise", noise, seed=77)
    assert np.array_equal(got, want)
    tensors = load_file(noise)
    save_file(tensors | {"step_noise": tensors["step_noise"][:2].clone()}, noise)
    assert_fails("noise for 2 steps, the sampler takes more", "sample", *common, "--num-images", 2, "--noise", noise,
                 "--out", tmp_path / "fewer")


def test_null_rows_are_found_from_any_folder(pixart_run, pieces, tmp_path, monkeypatch):
    lie = [*PROMPTS, "--autoencoder", pieces / "vae", "--text-encoder", pieces / "t5"]
    want, _ = draw(tmp_path, "--run", pixart_run, *lie)
    succeed("convert", "--in", pixart_run, "--out", tmp_path / "pipe")
    file = tmp_path / "pipe/transformer/diffusion_pytorch_model.safetensors"
    assert np.abs(draw(tmp_path, "--weights", file, *lie)[0] - want).max() <= 1
    shutil.copy(file, tmp_path / "alone.safetensors")  # without the null rows
    assert "guidance away from the empty caption" in draw(tmp_path, "--weights", tmp_path / "alone.safetensors", *lie)[1]
    monkeypatch.chdir(tmp_path / "pipe/transformer")
    assert np.abs(draw(tmp_path, "--weights", ".", *lie)[0] - want).max() <= 1


def test_no_ema_names_a_source_of_one_set(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    line = refusal("sample", "--weights", tmp_path / "w.safetensors", "--no-ema", "--out", tmp_path / "no")
    assert "holds one set of weights" in line and not (tmp_path / "no").exists()


def test_a_record_beside_completes_the_metadata_of_an_earlier_version(dit_run, tmp_path):
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    config = read_config(dit_run)["model_config"]
    save_file(load_file(checkpoint(dit_run, 10) / "ema.safetensors"), tmp_path / "ema.safetensors",
              {"kiln_model_config": json.dumps(config)})
    shutil.copy(dit_run / "config.json", tmp_path)
    assert np.abs(draw(tmp_path, "--weights", tmp_path / "ema.safetensors", *CLASSES)[0] - want).max() <= 1


def test_what_the_command_changes_of_the_record_is_said(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    common = ["--weights", tmp_path / "w.safetensors", *CLASSES]
    stderr = draw(tmp_path, *common, "--model-config", '{"num_heads": 2}')[1]
    assert "was trained with num_heads 4, and is drawn with 2 as asked" in stderr
    assert "warning" not in draw(tmp_path, *common, "--model-config", '{"num_heads": 4}')[1]
    # The model predicts no sigma, which the objective's default would expect.
    stderr = draw(tmp_path, *common, "--objective", "iddpm", "--num-sampling-steps", 4)[1]
    assert "was trained with flow, shift 4, and is drawn with iddpm as asked" in stderr
    line = refusal("sample", *common, "--image-size", 16, "--num-images", 1, "--out", tmp_path / "no")
    assert "draws pictures of 8 px only" in line and "leave out --image-size" in line
