"""--master-dtype bf16: masters that are rounded stochastically, against runs with masters in f32: the bits that a step leaves, what
resumes and divides, memory and files."""

import numpy as np
import pytest
import torch
from conftest import FULL, assert_refused, matrix, succeed
from PIL import Image
from run_files import checkpoint, losses, read_plan, saved
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MODEL = ["--model", "dit", "--hidden-size", 64, "--depth", 2, "--num-heads", 2, "--patch-size", 4, "--objective", "flow",
         "--global-batch", 4, "--compute-dtype", "bf16", "--threads", 1, "--peak-tflops", 1, "--log-every", 1, "--lr", 1e-3,
         "--ema-decay", 0.9, "--device", "cpu", "--seed", 3, "--no-tensorboard"]  # fmt: skip
ROUNDED = ["--master-dtype", "bf16"]
OPTIMIZERS = ["adamw", "adamw-8bit", "came"]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains on twelve pictures of 16 pixels; returns the run folder."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "pictures").mkdir()
    rng = np.random.default_rng(0)
    for index in range(12):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"pictures/{index}.png")
    succeed("extract", "--data", folder / "pictures", "--autoencoder", "pixels", "--image-size", 16, "--out", folder / "store")

    def run(out, steps, *more):
        succeed("train", *MODEL, "--data", folder / "store", "--out", out, "--max-steps", steps, *more)
        return out

    return run


def assert_same_files(one, other, step):
    assert saved(one, step) == saved(other, step)


@pytest.fixture(scope="module")
def start(train, tmp_path_factory):
    """Weights that are bf16 already."""
    folder = tmp_path_factory.mktemp("start")
    weights = load_file(checkpoint(train(folder / "run", 3), 3) / "model.safetensors")
    save_file({key: value.bfloat16().float() for key, value in weights.items()}, folder / "start.safetensors")
    return folder / "start.safetensors"


@pytest.fixture(scope="module", params=OPTIMIZERS)
def runs(request, train, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, train(folder / "rounded", 6, *ROUNDED, "--optimizer", request.param)


def of_optimizers(*covering):
    """The runs of these optimizers, with --full those of all."""
    values = [matrix([optimizer], []) if optimizer in covering else matrix([], [optimizer]) for optimizer in OPTIMIZERS]
    return pytest.mark.parametrize("runs", sum(values, []), indirect=True, scope="module")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_that_of_f32_masters_rounded_up_or_down(train, start, tmp_path, optimizer):
    """From the same weights both compute the same gradients: what is kept is one of the two neighbours of what f32 masters are, in
    the mean the value itself. tests/ops/stochastic_round_test.cpp compares which one with Philox."""
    more = ["--weights", start, "--optimizer", optimizer, "--accumulate-f32"]
    wide = load_file(checkpoint(train(tmp_path / "wide", 1, *more), 1) / "model.safetensors")
    kept = load_file(checkpoint(train(tmp_path / "kept", 1, *more, *ROUNDED), 1) / "model.safetensors")
    trained = [key for key in wide if kept[key].dtype == torch.bfloat16]
    assert len(trained) > 20
    exact = torch.cat([wide[key].flatten() for key in trained])
    rounded = torch.cat([kept[key].flatten() for key in trained])
    bits = exact.numpy().view(np.uint32)
    places = (rounded.view(torch.int16).numpy().view(np.uint16).astype(np.int64)) - (bits >> 16).astype(np.int64)
    assert set(np.unique(places)) == {0, 1}
    assert (places[(bits & 0xFFFF) == 0] == 0).all()
    shares = (bits & 0xFFFF) / 65536
    moved = (bits & 0xFFFF) != 0
    deviation = np.sqrt((shares * (1 - shares))[moved].sum())
    assert abs((places - shares)[moved].sum()) < 4 * deviation


@of_optimizers("adamw", "came")
@pytest.mark.slow
def test_a_stopped_run_goes_on_bitwise(train, runs, tmp_path):
    optimizer, whole = runs
    for steps in (2, 3, 6):
        train(tmp_path / "parts", steps, *ROUNDED, "--optimizer", optimizer)
    assert losses(tmp_path / "parts") == losses(whole)
    assert_same_files(tmp_path / "parts", whole, 6)


@of_optimizers("adamw-8bit")
def test_memory_choices_threads_and_pictures_change_no_bit(train, runs, tmp_path):
    """Pictures are drawn with the average, for which the weights make room."""
    optimizer, whole = runs
    drawn = ["--sample-every", 2, "--num-samples", 2, "--num-sampling-steps", 2, "--threads", 2]
    train(tmp_path / "drawn", 6, *ROUNDED, "--optimizer", optimizer, *drawn)
    assert_same_files(tmp_path / "drawn", whole, 6)
    choices = ["--recompute", "all", "--offload-optimizer", "nvme", "--nvme-path", tmp_path]
    train(tmp_path / "run", 6, *ROUNDED, "--optimizer", optimizer, *choices, *drawn)
    assert_same_files(tmp_path / "run", whole, 6)


@pytest.mark.slow
def test_ranks(train, runs, tmp_path):
    """Two ranks add gradients up in another order than one, but each weight is rounded as on one rank, whoever holds it."""
    optimizer, whole = runs
    stages = (0, 1, 3) if FULL else {"adamw": (0, 3), "adamw-8bit": (1, 3), "came": (1,)}[optimizer]
    divided = [train(tmp_path / f"stage {stage}", 6, *ROUNDED, "--optimizer", optimizer, "--nproc", 2, "--zero-stage", stage)
               for stage in stages]
    for run in divided:
        np.testing.assert_allclose(losses(run), losses(whole), rtol=0.01)
    if optimizer != "came":  # whose sums go over the slices
        for run in divided[1:]:
            assert_same_files(run, divided[0], 6)


def test_the_loss_is_that_of_f32_masters(train, runs, tmp_path):
    optimizer, whole = runs
    np.testing.assert_allclose(losses(train(tmp_path / "wide", 6, "--optimizer", optimizer)), losses(whole), rtol=0.02)


def test_memory_and_files(train, runs, tmp_path):
    optimizer, whole = runs
    plans = [read_plan(run) for run in (train(tmp_path / "wide", 3, "--optimizer", optimizer), whole)]
    for plan in plans:
        for kind in ("master", "moments", "ema", "gradients"):
            assert plan["predicted"]["by_kind"].get(kind) == plan["measured"]["by_kind"].get(kind), kind
        assert plan["predicted"]["peak_bytes"] == pytest.approx(plan["measured"]["peak_bytes"], rel=0.01)
    wide, rounded = (plan["predicted"]["by_kind"] for plan in plans)
    # The copy in the compute dtype is the master: 2 bytes a weight where there were 6.
    assert rounded["master"] == wide["weights"] and 2 * rounded["master"] == wide["master"] and "weights" not in rounded
    folder = checkpoint(whole, 6)
    with safe_open(folder / "model.safetensors", "pt") as model, safe_open(folder / "ema.safetensors", "pt") as ema:
        assert {model.get_slice(key).get_dtype() for key in model.keys()} == {"BF16", "F32"}  # constants stay
        assert {ema.get_slice(key).get_dtype() for key in ema.keys()} == {"F32"}
    succeed("convert", "--in", whole, "--no-ema", "--out", tmp_path / "weights.safetensors")
    converted, kept = (load_file(path) for path in (tmp_path / "weights.safetensors", folder / "model.safetensors"))
    assert all(torch.equal(converted[key].float(), kept[key].float()) for key in kept)


@pytest.mark.parametrize("options, expected", [(["--compute-dtype", "f32"], "needs --compute-dtype bf16"),
                                               (["--master-dtype", "fp16"], "expects f32 or bf16")])
def test_what_does_not_fit_is_refused(tmp_path, options, expected):
    assert_refused(["train", *MODEL, "--data", "synthetic", *ROUNDED, *options, "--out", tmp_path / "run",
                    "--max-steps", 1], expected)
