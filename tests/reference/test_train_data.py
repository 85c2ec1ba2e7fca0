"""kiln train on stores and on pictures: what fits, what is refused and how, resuming within an epoch, sample grids."""

import shutil

import pytest
import torch
from conftest import assert_refused, succeed
from PIL import Image
from run_files import losses, read_config, read_plan, saved, step_lines
from test_extract import SIZE, arguments, write_pictures

MODEL = ["--model", "dit", "--hidden-size", 48, "--depth", 1, "--num-heads", 3, "--patch-size", 4, "--threads", 1,
         "--objective", "flow", "--global-batch", 7, "--log-every", 1, "--peak-tflops", 1, "--image-size", SIZE]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, 18)
    return folder


@pytest.fixture(scope="module")
def stores(pictures, tiny_vae, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for name, autoencoder in [("pixels", "pixels"), ("latents", tiny_vae[0])]:
        succeed(*arguments(pictures, folder / name, autoencoder, "--flip", "both"))
    return folder


def command(data, out, steps, *more):
    return ["train", *MODEL, "--data", data, "--out", out, "--max-steps", steps, *more]


def train(*arguments):
    return succeed(*command(*arguments))


@pytest.mark.slow
def test_resuming_within_an_epoch_sees_the_same_samples(stores, tmp_path):
    """18 pictures, 7 a step: every epoch ends inside a batch, and the stop falls inside an epoch."""
    train(stores / "pixels", tmp_path / "whole", 12)
    for steps in (4, 5, 12):
        train(stores / "pixels", tmp_path / "cut", steps)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert saved(tmp_path / "cut", 12, "model.safetensors") == saved(tmp_path / "whole", 12, "model.safetensors")


def test_tf32_is_an_option_of_what_computes(pictures, tmp_path):
    """On a CPU it changes nothing, and is said to: neither the store nor the samples tell of it."""
    result = succeed(*arguments(pictures, tmp_path / "store", "pixels", "--tf32", "--device", "cpu"))
    assert "--tf32 has no effect on a CPU" in result.stderr
    assert "tf32" not in (tmp_path / "store" / "store.json").read_text()
    train(tmp_path / "store", tmp_path / "run", 1, "--device", "cpu")
    result = succeed("sample", "--run", tmp_path / "run", "--num-images", 1, "--num-sampling-steps", 1, "--tf32",
                     "--device", "cpu", "--out", tmp_path / "samples")
    assert "--tf32 has no effect on a CPU" in result.stderr
    assert "tf32" not in (tmp_path / "samples" / "sampling.json").read_text()


@pytest.mark.slow
def test_encoding_is_a_phase(pictures, stores, tiny_vae, tmp_path):
    """Of pictures that are encoded on the way, and of nothing else: in the log, the report, the probe and the plan."""
    train(stores / "latents", tmp_path / "store", 2)
    train(pictures, tmp_path / "online", 4, "--autoencoder", tiny_vae[0])
    assert all("encoding" not in line["phase_s"] for line in step_lines(tmp_path / "store"))
    assert all(line["phase_s"]["encoding"] > 0 for line in step_lines(tmp_path / "online"))
    assert "encoding" in (tmp_path / "online" / "report.html").read_text()
    comparison = read_plan(tmp_path / "online")
    assert comparison["measured"]["phase_s"]["encoding"] > 0 and comparison["predicted"]["phase_s"]["encoding"] > 0
    probed = succeed("probe", *MODEL, "--data", pictures, "--autoencoder", tiny_vae[0], "--steps", 4)
    assert "time of encoding" in probed.stdout and "encoding pictures: " in probed.stdout
    share = float(probed.stdout.split("encoding pictures: ")[1].split(" %")[0])
    assert share > 10 and "warning: encoding pictures takes" in probed.stdout and "kiln extract does it once" in probed.stdout


@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_encoding_while_training_is_training_on_the_store(pictures, stores, tiny_vae, tmp_path, kind):
    autoencoder = "pixels" if kind == "pixels" else tiny_vae[0]
    train(stores / kind, tmp_path / "store", 4)
    train(pictures, tmp_path / "online", 4, "--autoencoder", autoencoder)
    assert losses(tmp_path / "online") == pytest.approx(losses(tmp_path / "store"), rel=2e-4)


def test_the_autoencoder_is_part_of_the_plan_and_of_what_is_measured(pictures, tiny_vae, tmp_path):
    """Its weights are on the device in every step: predicted from its own config, measured, and no finding."""
    train(pictures, tmp_path, 3, "--autoencoder", tiny_vae[0], "--micro-batch", 2)
    comparison = read_plan(tmp_path)
    predicted, measured = comparison["predicted"], comparison["measured"]
    weights = sum(4 * weight.numel() for weight in tiny_vae[1].parameters())
    assert predicted["by_kind"]["autoencoder"] == measured["by_kind"]["autoencoder"] == weights
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.03)
    assert measured["by_phase"]["extract"] > 0
    assert not [finding for finding in comparison["findings"] if "memory" in finding]


def test_sample_grids_are_decoded(stores, tiny_vae, tmp_path):
    train(stores / "latents", tmp_path, 2, "--sample-every", 2, "--num-samples", 4, "--num-sampling-steps", 2,
          "--autoencoder", tiny_vae[0])
    grid = Image.open(tmp_path / "samples" / "step-00000002.png")
    assert min(grid.size) >= 2 * SIZE
    report = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in report and "http" not in report.replace("http-equiv", "")


@pytest.mark.slow
def test_model_settings_may_lie_in_a_file(stores, tmp_path):
    settings = tmp_path / "settings.json"
    settings.write_text('{\n  "mlp_ratio": 2\n}')
    train(stores / "pixels", tmp_path / "run", 1, "--model-config", settings)
    assert read_config(tmp_path / "run")["model_config"]["mlp_ratio"] == 2
    settings.unlink()  # the run keeps what was in it
    train(stores / "pixels", tmp_path / "run", 2, "--model-config", '{"mlp_ratio": 2}')
    assert_refused(command(stores / "pixels", tmp_path / "new", 1, "--model-config", settings),
                   "--model-config", "file")


def write_other_vae(folder, like):
    from diffusers import AutoencoderKL

    torch.manual_seed(5)
    AutoencoderKL.from_config(AutoencoderKL.load_config(like)).save_pretrained(folder)


@pytest.mark.slow
def test_a_store_knows_where_its_autoencoder_lies(pictures, tiny_vae, tmp_path):
    """Extract, train and sample with the fewest options; the run says what it misses when the autoencoder moved."""
    vae = tmp_path / "vae"
    shutil.copytree(tiny_vae[0], vae)
    succeed(*arguments(pictures, tmp_path / "store", vae))
    grids = ["--sample-every", 2, "--num-samples", 2, "--num-sampling-steps", 2]
    train(tmp_path / "store", tmp_path / "run", 2, *grids)
    assert (tmp_path / "run" / "samples" / "step-00000002.png").exists()
    draw = lambda out, *more: ["sample", "--run", tmp_path / "run", "--num-images", 2, "--num-sampling-steps", 2,
                               "--out", tmp_path / out, *more]
    succeed(*draw("a"))
    assert len(list((tmp_path / "a").glob("0*.png"))) == 2

    vae.rename(tmp_path / "moved")
    assert_refused(draw("b"), f"{vae} does not exist", "--autoencoder")
    succeed(*draw("b", "--autoencoder", tmp_path / "moved"))
    assert_refused(command(tmp_path / "store", tmp_path / "new", 2, *grids), f"{vae} does not exist any more",
                   "--autoencoder")
    train(tmp_path / "store", tmp_path / "new", 2)  # without grids nothing is decoded
    # The hint is no setting: the same autoencoder elsewhere continues, and finds the store complete.
    succeed(*arguments(pictures, tmp_path / "store", tmp_path / "moved"))

    write_other_vae(vae, tiny_vae[0])
    assert_refused(draw("c"), f"{vae} is another autoencoder", "--autoencoder", "--anyway")
    assert_refused(command(tmp_path / "store", tmp_path / "other", 2, *grids), "another autoencoder", str(vae))


@pytest.mark.slow
def test_a_store_that_does_not_fit_is_refused_with_the_remedy(pictures, stores, tiny_vae, tmp_path):
    out = tmp_path / "run"
    assert_refused(command(stores / "pixels", out, 1, "--image-size", 64), "--image-size 64", "--image-size 32")
    assert_refused(command(stores / "pixels", out, 1, "--num-classes", 2), "--num-classes 2", "3 classes")
    assert_refused(command(stores / "pixels", out, 1, "--autoencoder", tiny_vae[0]), "pixels", "--autoencoder")
    write_other_vae(tmp_path / "other", tiny_vae[0])
    assert_refused(command(stores / "latents", out, 1, "--autoencoder", tmp_path / "other"), "another autoencoder",
                   "extract again")
    assert_refused(command(stores / "pixels", out, 1, "--sample-every", 1, "--sample-classes", 3), "--sample-classes")
    assert_refused(command(pictures, out, 1), "kiln extract", "--autoencoder")
    assert not list(out.glob("checkpoints/*"))


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_data_only(stores, tmp_path):
    train(stores / "pixels", tmp_path / "run", 2)
    write_pictures(tmp_path / "more", 19)
    succeed(*arguments(tmp_path / "more", tmp_path / "store", "pixels", "--flip", "both"))
    assert_refused(command(tmp_path / "store", tmp_path / "run", 4), "other data", "--out")
    # The same store may move.
    (stores / "pixels").rename(stores / "moved")
    try:
        train(stores / "moved", tmp_path / "run", 4)
    finally:
        (stores / "moved").rename(stores / "pixels")


def test_a_model_with_more_classes_may_train_on_a_store(stores, tmp_path):
    train(stores / "pixels", tmp_path, 1, "--num-classes", 10)
    assert read_config(tmp_path)["model_config"]["num_classes"] == 10


def test_fp8_trains_as_bf16_does(tmp_path):
    """Where the hardware lacks it, by its rounding alone: the state is bf16's."""
    model = ["--model", "dit", "--hidden-size", 256, "--depth", 1, "--num-heads", 4, "--patch-size", 4, "--data", "synthetic",
             "--global-batch", 8, "--max-steps", 3, "--log-every", 1, "--peak-tflops", 1]
    for name, dtype in (("bf16", ["bf16"]), ("fp8", ["fp8", "--emulate-fp8"])):
        succeed("train", *model, "--compute-dtype", *dtype, "--out", tmp_path / name)
    fp8, bf16 = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=0.02)
