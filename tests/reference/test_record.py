"""What weights say of themselves: one record from training through every file to the picture. Each test bears the number
of what trying as a new user had brought to light."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import run_program, succeed
from dit_torch import DiT, randomise_
from PIL import Image
from pipelines import START, kiln_normals, text_encoder, tiny_kl
from pixart_torch import PixArt
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel, T5Tokenizer

NAMES = ["cats & dogs", "birds", "fish", "trees"]
TINY = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=64, depth=2, num_heads=4, num_classes=4, learn_sigma=False)
PIXART = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=4, caption_channels=32,
              model_max_length=12, pe_interpolation=1.0)
PIXART_DIFFUSERS = dict(sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16,
                        cross_attention_dim=64, num_layers=2, caption_channels=32, interpolation_scale=1.0,
                        use_additional_conditions=False)


def make_run(run, weights, info):
    """A run as kiln train leaves it, with an average beside its weights."""
    checkpoint = run / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(dict(ema_decays=[0.9999], class_names=[]) | info))
    for name in ("model", "ema"):
        state = {key: value.contiguous() * (1 if name == "ema" else 0.5) for key, value in weights.items()}
        save_file(state, checkpoint / f"{name}.safetensors")
    (checkpoint / "train_state.json").write_text(json.dumps(dict(
        format_version=1, seed=0, step=10, images_seen=80, updates=10, loss_scale=1.0, scaler_good_steps=0, bad_steps=0,
        train_seconds=1.0, num_threads=1, machine="", config={},
        files={path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")})))
    return run


@pytest.fixture(scope="module")
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
    info = json.loads((folder / "run/config.json").read_text())
    return dict(autoencoder=info["autoencoder"], text=info["text"]), info, folder / "run"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    tiny_kl(folder / "vae")
    text_encoder("t5", folder / "t5")
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, pieces):
    return fingerprints_of(tmp_path_factory, pieces / "vae", pieces / "t5")


@pytest.fixture(scope="module")
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
    result = run_program("kiln", *arguments)
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if " is published: " not in line and not line.startswith("note: ")]
    assert len(lines) == 1 and len(lines[0]) < 700, result.stderr
    return lines[0]


def record_of(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["kiln_record"]), file.metadata()


CLASSES = ["--classes", "birds,fish"]
PROMPTS = ["--prompt", "a red apple", "--prompt", "two birds in a tree"]


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


def test_1_2_7_14_dit_draws_the_same_from_every_file(dit_run, tmp_path):
    want, stderr = draw(tmp_path, "--run", dit_run, *CLASSES)
    assert "published" not in stderr and want.std() > 20
    for name, weights in stations(dit_run, tmp_path).items():
        got, stderr = draw(tmp_path, "--weights", weights, *CLASSES)
        assert np.abs(got - want).max() <= 1, name
        assert "published" not in stderr and "chosen" not in stderr, (name, stderr)


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


def test_1_shift_and_objective_can_be_given(dit_run, tmp_path):
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(dit_run / "checkpoints/step-00000010/ema.safetensors"), bare)
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
    shutil.copy(dit_run / "checkpoints/step-00000010/ema.safetensors", tmp_path / "ema.safetensors")
    shutil.copy(dit_run / "config.json", tmp_path / "config.json")
    got, _ = draw(tmp_path, "--weights", tmp_path / "ema.safetensors", *CLASSES)
    assert np.abs(got - want).max() <= 1


def test_3_what_is_assumed_is_said_in_the_first_line(dit_run, tmp_path):
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(dit_run / "checkpoints/step-00000010/ema.safetensors"), bare)
    _, stderr = draw(tmp_path, "--weights", bare, "--num-sampling-steps", 2, count=1)
    lines = [line for line in stderr.splitlines() if not line.startswith("note: ")]
    assert lines[0].startswith("kiln sample: as dit is published: objective iddpm; sampler ddpm") and "num_heads 1" in lines[1]


def test_3_an_old_run_draws_as_published_and_says_so(dit_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(dit_run, run)
    info = json.loads((run / "config.json").read_text())
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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    model = randomise_(__import__("diffusers").PixArtTransformer2DModel(**PIXART_DIFFUSERS))
    save_file(model.state_dict(), path)
    return path


TRAIN = ["train", "--model", "pixart_diffusers", "--model-config", json.dumps(PIXART_DIFFUSERS), "--data", "synthetic",
         "--image-size", 64, "--objective", "epsilon", "--global-batch", 2, "--threads", 1, "--peak-tflops", 1, "--lr", 0.01,
         "--lora-rank", 2, "--max-steps", 2]


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, base):
    run = tmp_path_factory.mktemp("lora") / "run"
    succeed(*TRAIN, "--weights", base, "--out", run)
    return run


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
    info = json.loads((out / "config.json").read_text())
    assert info["model"] == "dit" and info["model_config"]["num_heads"] == 4 and info["image_size"] == 8


def test_8_convert_takes_a_config_and_a_size(dit_run, tmp_path):
    state = load_file(dit_run / "checkpoints/step-00000010/ema.safetensors")
    torch.save(state, tmp_path / "w.pt")
    succeed("convert", "--in", tmp_path / "w.pt", "--model-config", '{"num_heads": 4}', "--out", tmp_path / "w.safetensors")
    assert record_of(tmp_path / "w.safetensors")[0]["model_config"]["num_heads"] == 4
    model = randomise_(PixArt(**PIXART))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "p.pth")
    succeed("convert", "--in", tmp_path / "p.pth", "--image-size", 64, "--num-heads", 4, "--out", tmp_path / "p.safetensors")
    record, _ = record_of(tmp_path / "p.safetensors")
    assert record["model_config"]["input_size"] == 8 and record["image_size"] == 64 and record["objective"] is None


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


def test_10_a_moved_run_of_an_adapter_finds_its_base(base, lora_run, pieces, tmp_path):
    succeed("convert", "--in", base, "--merge", lora_run, "--out", tmp_path / "merged.safetensors")
    pictures = ["--autoencoder", pieces / "vae", "--text-encoder", pieces / "t5", "--prompt", "a bird", "--num-sampling-steps", 2,
                "--sampler", "ddim", "--cfg-scale", 3, "--anyway"]
    want, _ = draw(tmp_path, "--weights", tmp_path / "merged.safetensors", *pictures)
    moved = tmp_path / "moved/run"
    shutil.copytree(lora_run, moved)
    info = json.loads((moved / "config.json").read_text())
    info["adapter"]["base_path"] = "/gone/base.safetensors"
    (moved / "config.json").write_text(json.dumps(info))
    assert "--base PATH" in refusal("sample", "--run", moved, *pictures, "--num-images", 1, "--out", tmp_path / "no")
    got, _ = draw(tmp_path, "--run", moved, "--base", base, *pictures)
    assert np.abs(got - want).max() <= 1
    shutil.copy(base, tmp_path / "moved/base.safetensors")  # beside the run
    got, _ = draw(tmp_path, "--run", moved, *pictures)
    assert np.abs(got - want).max() <= 1


def test_12_weights_of_another_family_are_named(dit_run, tmp_path):
    weights = dit_run / "checkpoints/step-00000010/ema.safetensors"
    line = refusal("sample", "--weights", weights, "--model", "pixart", "--prompt", "a", "--out", tmp_path / "out")
    assert "holds weights of dit, not of pixart" in line


def test_12_an_adapter_in_the_place_of_weights_is_named(lora_run, tmp_path):
    for name in ("peft", "file.safetensors"):
        succeed("convert", "--in", lora_run, "--out", tmp_path / name)
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tmp_path / "file.safetensors"), bare)
    for adapter in (tmp_path / "peft/adapter_model.safetensors", tmp_path / "file.safetensors", bare):
        assert "holds an adapter" in refusal("sample", "--weights", adapter, "--prompt", "a", "--out", tmp_path / "out")


def test_2_a_folder_with_a_config_and_an_average_is_a_model(dit_run, tmp_path):
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    ship = tmp_path / "ship"
    ship.mkdir()
    shutil.copy(dit_run / "config.json", ship)
    for name in ("ema", "model"):
        shutil.copy(dit_run / f"checkpoints/step-00000010/{name}.safetensors", ship)
    assert np.abs(draw(tmp_path, "--weights", ship, *CLASSES)[0] - want).max() <= 1
    assert np.abs(draw(tmp_path, "--weights", ship, "--no-ema", *CLASSES)[0] - want).max() > 1


def test_8_training_goes_on_with_the_objective_of_the_weights(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    common = ["train", "--weights", tmp_path / "w.safetensors", "--data", "synthetic", "--autoencoder", "pixels", "--num-classes", 4,
              "--global-batch", 2, "--threads", 1, "--peak-tflops", 1, "--max-steps", 1]
    stderr = succeed(*common, "--out", tmp_path / "run").stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["objective"]["shift"] == 4.0
    assert "were trained: " in stderr and "--flow-shift 4" in stderr and "--objective flow" in stderr
    stderr = succeed(*common, "--objective", "flow", "--out", tmp_path / "other").stderr
    assert "this run trains with flow, shift 1, --weights" in stderr and "were trained with flow, shift 4" in stderr


def test_14_a_run_ships_with_its_average_alone(dit_run, tmp_path):
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    run = tmp_path / "run"
    shutil.copytree(dit_run, run)
    checkpoint = run / "checkpoints/step-00000010"
    (checkpoint / "model.safetensors").unlink()
    got, _ = draw(tmp_path, "--run", run, *CLASSES)
    assert np.array_equal(got, want)
    succeed("convert", "--in", run, "--out", tmp_path / "w.safetensors")
    average = checkpoint / "ema.safetensors"
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
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(dit_run / "checkpoints/step-00000010/ema.safetensors"), bare)
    common = ["--weights", bare, "--classes", "1,2", "--objective", "epsilon", "--sampler", "ddpm", "--num-sampling-steps", 4]
    want, _ = draw(tmp_path, *common, "--save-noise", noise)
    assert load_file(noise)["step_noise"].shape == (4, 2, 3, 8, 8)
    got, _ = draw(tmp_path, *common, "--noise", noise, seed=77)
    assert np.array_equal(got, want)


def test_a_run_writes_its_record(recorded, pieces):
    _, info, run = recorded
    assert info["drawing"]["unconditional"] == "null_rows" and info["drawing"]["guided_channels"] == "model"
    assert info["drawing"]["sampler"] == "dpmpp_2m" and info["drawing"]["num_sampling_steps"] == 20
    assert info["trained_on"] == dict(data=["pictures"], samples=1, global_batch=1)
    assert info["null_rows"] == "empty_caption"
    rows = load_file(next(run.glob("checkpoints/*/model.safetensors")))["y_embedder.y_embedding"]
    encoder, tokenizer = (kind.from_pretrained(pieces / "t5") for kind in (T5EncoderModel, T5Tokenizer))
    with torch.no_grad():
        empty = encoder(**tokenizer("", return_tensors="pt")).last_hidden_state[0]
    assert (rows[:len(empty)] - empty).abs().max() < 4e-3 and (rows[len(empty):] == rows[len(empty) - 1]).all()  # and not trained


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
    info = json.loads((run / "config.json").read_text())
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


def test_what_is_drawn_has_the_size_of_training(pieces, tmp_path):
    run = tmp_path / "run"
    succeed("train", "--model", "PixArt-Sigma-XL/2-512", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--data",
            one_picture(tmp_path), "--autoencoder", "pixels", "--text-encoder", pieces / "t5", "--text-max-tokens", 12,
            "--image-size", 16, "--global-batch", 1, "--threads", 1, "--peak-tflops", 1, "--max-steps", 1, "--sample-every", 1,
            "--num-samples", 1, "--num-sampling-steps", 2, "--out", run)
    info = json.loads((run / "config.json").read_text())
    assert info["image_size"] == 16 and info["autoencoder"]["downsample"] == 1
    grid, = (run / "samples").glob("*.png")
    assert Image.open(grid).size == (16 + 4, 16 + 4)  # with its border
    assert draw(tmp_path, "--run", run, *PROMPTS)[0].shape == (2, 16, 16, 3)
    succeed("convert", "--in", run, "--out", tmp_path / "folder")
    assert load_file(next((tmp_path / "folder").glob("*noise*")))["noise"].shape[-1] == 16
    succeed("convert", "--in", run, "--input-size", 32, "--out", tmp_path / "other.safetensors")
    record, _ = record_of(tmp_path / "other.safetensors")
    assert record["image_size"] == 32 and record["model_config"]["input_size"] == 32


def test_no_ema_names_a_source_of_one_set(dit_run, tmp_path):
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    line = refusal("sample", "--weights", tmp_path / "w.safetensors", "--no-ema", "--out", tmp_path / "no")
    assert "holds one set of weights" in line and not (tmp_path / "no").exists()


def test_a_record_beside_completes_the_metadata_of_an_earlier_version(dit_run, tmp_path):
    want, _ = draw(tmp_path, "--run", dit_run, *CLASSES)
    config = json.loads((dit_run / "config.json").read_text())["model_config"]
    save_file(load_file(dit_run / "checkpoints/step-00000010/ema.safetensors"), tmp_path / "ema.safetensors",
              {"kiln_model_config": json.dumps(config)})
    shutil.copy(dit_run / "config.json", tmp_path)
    assert np.abs(draw(tmp_path, "--weights", tmp_path / "ema.safetensors", *CLASSES)[0] - want).max() <= 1


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
            begun[name] = (json.loads((out / "config.json").read_text()), load_file(out / "checkpoints/step-00000001/model.safetensors"))
        want_info, want = begun["file.safetensors"]
        for name, (info, got) in begun.items():
            assert all(info[key] == want_info[key] for key in ("model", "model_config", "objective", "image_size")), name
            assert got.keys() == want.keys() and all(torch.allclose(got[key], want[key], atol=1e-5) for key in want), name
        values = []
        for name in ("file.safetensors", "folder"):
            succeed(*TRAIN_ON, *more, "--weights", ship / name, "--lora-rank", 2, "--out", ship / f"lora-{len(values)}")
            values.append(json.loads((ship / f"lora-{len(values)}/config.json").read_text())["adapter"]["base_values"])
        assert values[0] == values[1]
    folder = tmp_path / pixart_run.parent.name / "folder"
    line = refusal(*TRAIN_ON, "--model", "dit", "--hidden-size", 64, "--depth", 2, "--num-heads", 4, "--image-size", 64, "--weights",
                   folder, "--out", tmp_path / "no")
    assert f"--weights {folder} are of pixart, not of --model dit" in line


def test_weights_of_another_size_than_a_named_model(pixart_run, tmp_path):
    succeed("convert", "--in", pixart_run, "--out", tmp_path / "w.safetensors")
    line = refusal(*TRAIN_ON, "--model", "PixArt-Sigma-XL/2-256", "--weights", tmp_path / "w.safetensors", "--out", tmp_path / "no")
    assert "are of another size than --model PixArt-Sigma-XL/2-256: leave out --model" in line


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


def test_the_same_command_resumes_with_a_part_of_the_models_config(dit_run, tmp_path):
    """The rest of the config came from the record of --weights."""
    succeed("convert", "--in", dit_run, "--out", tmp_path / "w.safetensors")
    command = [*TRAIN_ON, "--autoencoder", "pixels", "--num-classes", 4, "--weights", tmp_path / "w.safetensors", "--out", tmp_path / "run"]
    for _ in range(2):
        succeed(*command, "--model-config", json.dumps(dict(depth=TINY["depth"])))
