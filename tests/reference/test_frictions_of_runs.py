"""What stopped new users around runs: resuming one, starting from one, reporting one, and folders and weights that are
something else."""

import re
import shutil

import conftest
import pytest
from browser import parts_of
from conftest import complaints, succeed
from pipelines import text_encoder, tiny_kl
from run_files import checkpoint, read_config, step_lines, weights_of

DIT = ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 4, "--num-classes", 4]
OPTIONS = ["--data", "synthetic", "--image-size", 64, "--global-batch", 4, "--threads", 1, "--peak-tflops", 1, "--log-every", 3,
           "--device", "cpu", "--ema-decay", 0.5]


def train(out, steps, *more):
    return succeed("train", *DIT, *OPTIONS, "--max-steps", steps, *more, "--out", out)


def refusal(*arguments):
    line = conftest.refusal(*arguments, lines=complaints)
    assert len(line) < 400
    return line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("frictions") / "run"
    train(out, 4)
    return out


@pytest.mark.slow
def test_train_out_alone_resumes(run, tmp_path):
    train(tmp_path / "cut", 2)
    moved = (tmp_path / "cut").rename(tmp_path / "moved")
    result = succeed("train", "--out", moved, "--max-steps", 4)
    assert "resuming" in result.stdout and weights_of(moved, 4) == weights_of(run, 4)
    assert "finished after step 4" in succeed("train", "--out", moved).stdout
    assert "--data" in refusal("train", "--out", tmp_path / "nothing")


def test_a_changed_rate_names_continue_with(run):
    line = refusal("train", *DIT, *OPTIONS, "--max-steps", 6, "--lr", 3e-4, "--out", run)
    assert "--lr (0.0001 -> 0.0003)" in line and "--continue-with FILE" in line
    line = refusal("train", *DIT, *OPTIONS, "--max-steps", 6, "--lr", 3e-4, "--seed", 9, "--out", run)
    assert "--continue-with" not in line and "another --out" in line, "a seed cannot follow"


@pytest.mark.slow
def test_weights_of_a_run_are_its_newest(run, tmp_path):
    """As kiln sample --run draws with; a run that resumes keeps those that it began with."""
    base = tmp_path / "base"
    train(base, 3)
    said = train(tmp_path / "a", 2, "--weights", base).stderr
    newest = checkpoint(base, 3) / "ema.safetensors"
    assert f"--weights {base} is read as {newest}" in said
    train(tmp_path / "b", 2, "--weights", newest)
    assert weights_of(tmp_path / "a", 2) == weights_of(tmp_path / "b", 2)
    train(base, 4)
    assert "resuming" in train(tmp_path / "a", 3, "--weights", base).stdout
    train(tmp_path / "lora", 1, "--weights", base, "--lora-rank", 2)
    line = refusal("train", *DIT, *OPTIONS, "--weights", tmp_path / "lora", "--out", tmp_path / "c")
    assert "is the run of an adapter" in line and "--lora-weights" in line


def test_a_run_of_four_steps_is_a_run_to_report(run, tmp_path):
    """The last step has a line though it is no multiple of --log-every, and the rows compare it."""
    assert [line["step"] for line in step_lines(run)] == [3, 4]
    train(tmp_path / "other", 1, "--lr", 3e-4)
    succeed("report", run, tmp_path / "other", "--out", tmp_path / "page.html")
    (options,) = [table for table in parts_of(tmp_path / "page.html", "table") if table["columns"][0] == "option"]
    assert ["lr", "0.0001", "0.0003"] in options["rows"]
    assert "is not a run folder" in refusal("report", tmp_path)


def test_weights_of_another_family_are_named(run, tmp_path):
    file = checkpoint(run, 4) / "model.safetensors"
    line = refusal("train", "--model", "pixart", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, *OPTIONS, "--weights", file,
                   "--out", tmp_path / "run")
    assert f"--weights {file} are of dit, not of --model pixart: give --model dit" in line


@pytest.mark.slow
def test_another_piece_of_a_pipeline_is_named(tmp_path):
    tiny_kl(tmp_path / "vae")
    text_encoder("t5", tmp_path / "text_encoder")
    for piece, what, option in [("vae", "an autoencoder (AutoencoderKL)", "--autoencoder"),
                                ("text_encoder", "a text encoder (T5EncoderModel)", "--text-encoder")]:
        for command in (["sample"], ["sample", "--model", "DiT-S/2"], ["train", *DIT, *OPTIONS, "--max-steps", 1]):
            line = refusal(*command, "--weights", tmp_path / piece, "--out", tmp_path / "out")
            assert f"is {what}: expected a denoiser" in line and f"{option} takes this piece" in line


def test_weights_of_another_depth_are_named_in_a_line_that_can_be_read(run, tmp_path):
    file = checkpoint(run, 4) / "model.safetensors"
    line = refusal("train", *[6 if option == 2 else option for option in DIT], *OPTIONS, "--weights", file, "--out", tmp_path / "run")
    assert "missing keys: blocks.2." in line and re.search(r" and \d\d more", line)


@pytest.mark.slow
def test_folders_of_the_wrong_kind_are_named(run, tmp_path):
    options = [str(run) if option == "synthetic" else option for option in OPTIONS]
    assert f"--data {run} is the folder of a run" in refusal("train", *DIT, *options, "--max-steps", 1, "--out", tmp_path / "run")
    (tmp_path / "store.json").write_text("{}")
    assert "is a feature store: give a folder of its own" in refusal("train", *DIT, *OPTIONS, "--max-steps", 1, "--out", tmp_path)


@pytest.mark.slow
def test_an_adapter_goes_on_where_its_base_has_moved(run, tmp_path):
    """The base is compared by its content, and found beside the run."""
    base, out = tmp_path / "base.safetensors", tmp_path / "lora/run"
    shutil.copy(checkpoint(run, 4) / "model.safetensors", base)
    train(out, 1, "--weights", base, "--lora-rank", 2)
    moved = base.rename(tmp_path / "moved.safetensors")
    assert f"{base}, which is not there: say where it is with --weights" in refusal("train", "--out", out, "--max-steps", 2)
    assert "resuming" in succeed("train", "--out", out, "--weights", moved, "--max-steps", 2).stdout
    beside = moved.rename(out.parent / moved.name)
    result = succeed("train", "--out", out, "--max-steps", 3)
    assert "resuming" in result.stdout and f"is read as {beside}" in result.stderr
    assert "resuming" in train(out, 4, "--weights", beside, "--lora-rank", 2).stdout
    other = checkpoint(run, 4) / "ema.safetensors"
    assert "an adapter of other weights" in refusal("train", "--out", out, "--weights", other, "--max-steps", 5)


def test_a_base_that_is_gone_is_named_before_a_model_is_guessed(tmp_path):
    """Without a checkpoint nothing tells which model it was of."""
    gone, out = tmp_path / "gone.safetensors", tmp_path / "run"
    line = refusal("train", *OPTIONS, "--weights", gone, "--lora-rank", 2, "--max-steps", 1, "--out", out)
    assert f"--weights {gone} does not exist: give the path of a weights file" in line and not out.exists()


@pytest.mark.slow
def test_a_run_resumes_as_its_model_where_none_is_named(tmp_path):
    out = tmp_path / "run"
    train(out, 1)
    result = succeed("train", *OPTIONS, "--num-classes", 4, "--max-steps", 2, "--out", out)
    assert "resuming" in result.stdout and read_config(out)["model"] == "dit"
