"""kiln train on stores and on pictures: what fits, what is refused and how, resuming within an epoch, sample grids."""

import json
import shutil

import pytest
import torch
from PIL import Image
from test_extract import SIZE, arguments, tiny_vae, write_pictures  # noqa: F401 (a fixture)

MODEL = ["--model", "dit", "--hidden-size", 48, "--depth", 1, "--num-heads", 3, "--patch-size", 4, "--threads", 1,
         "--objective", "flow", "--global-batch", 7, "--log-every", 1, "--peak-tflops", 1, "--image-size", SIZE]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, 18)
    return folder


@pytest.fixture(scope="module")
def stores(pictures, tiny_vae, tmp_path_factory):
    from conftest import run_program

    folder = tmp_path_factory.mktemp("stores")
    for name, autoencoder in [("pixels", "pixels"), ("latents", tiny_vae[0])]:
        result = run_program("kiln", *arguments(pictures, folder / name, autoencoder, "--flip", "both"))
        assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def train(kiln):
    def run(data, out, steps, *more):
        return kiln("train", *MODEL, "--data", data, "--out", out, "--max-steps", steps, *more)

    return run


def losses(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_resuming_within_an_epoch_sees_the_same_samples(train, stores, tmp_path):
    """18 pictures, 7 a step: every epoch ends inside a batch, and the stop falls inside an epoch."""
    assert train(stores / "pixels", tmp_path / "whole", 12).returncode == 0
    for steps in (4, 5, 12):
        assert train(stores / "pixels", tmp_path / "cut", steps).returncode == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    weights = [tmp_path / run / "checkpoints" / "step-00000012" / "model.safetensors" for run in ("whole", "cut")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_tf32_is_an_option_of_what_computes(kiln, train, pictures, tmp_path):
    """On a CPU it changes nothing, and is said to: neither the store nor the samples tell of it."""
    result = kiln(*arguments(pictures, tmp_path / "store", "pixels", "--tf32", "--device", "cpu"))
    assert result.returncode == 0 and "--tf32 has no effect on a CPU" in result.stderr
    assert "tf32" not in (tmp_path / "store" / "store.json").read_text()
    assert train(tmp_path / "store", tmp_path / "run", 1, "--device", "cpu").returncode == 0
    result = kiln("sample", "--run", tmp_path / "run", "--num-images", 1, "--num-sampling-steps", 1, "--tf32", "--device", "cpu",
                  "--out", tmp_path / "samples")
    assert result.returncode == 0 and "--tf32 has no effect on a CPU" in result.stderr
    assert "tf32" not in (tmp_path / "samples" / "sampling.json").read_text()


def test_encoding_is_a_phase(kiln, train, pictures, stores, tiny_vae, tmp_path):
    """Of pictures that are encoded on the way, and of nothing else: in the log, the report, the probe and the plan."""
    assert train(stores / "latents", tmp_path / "store", 2).returncode == 0
    assert train(pictures, tmp_path / "online", 4, "--autoencoder", tiny_vae[0]).returncode == 0
    steps = {name: [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
             for name in ("store", "online")}
    assert all("encoding" not in line["phase_s"] for line in steps["store"] if "loss" in line)
    lines = [line for line in steps["online"] if "loss" in line]
    assert all(line["phase_s"]["encoding"] > 0 for line in lines)
    assert "encoding" in (tmp_path / "online" / "report.html").read_text()
    comparison = json.loads((tmp_path / "online" / "plan.json").read_text())
    assert comparison["measured"]["phase_s"]["encoding"] > 0 and comparison["predicted"]["phase_s"]["encoding"] > 0
    options = [*MODEL, "--data", pictures, "--autoencoder", tiny_vae[0], "--steps", 4]
    probed = kiln("probe", *options)
    assert probed.returncode == 0, probed.stderr
    assert "time of encoding" in probed.stdout and "encoding pictures: " in probed.stdout
    share = float(probed.stdout.split("encoding pictures: ")[1].split(" %")[0])
    assert share > 10 and "warning: encoding pictures takes" in probed.stdout and "kiln extract does it once" in probed.stdout


@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_encoding_while_training_is_training_on_the_store(train, pictures, stores, tiny_vae, tmp_path, kind):
    autoencoder = "pixels" if kind == "pixels" else tiny_vae[0]
    assert train(stores / kind, tmp_path / "store", 4).returncode == 0
    result = train(pictures, tmp_path / "online", 4, "--autoencoder", autoencoder)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "online") == pytest.approx(losses(tmp_path / "store"), rel=2e-4)


def test_the_autoencoder_is_part_of_the_plan_and_of_what_is_measured(train, pictures, tiny_vae, tmp_path):
    """Its weights are on the device in every step: predicted from its own config, measured, and no finding."""
    result = train(pictures, tmp_path, 3, "--autoencoder", tiny_vae[0], "--micro-batch", 2)
    assert result.returncode == 0, result.stderr
    comparison = json.loads((tmp_path / "plan.json").read_text())
    predicted, measured = comparison["predicted"], comparison["measured"]
    weights = sum(4 * weight.numel() for weight in tiny_vae[1].parameters())
    assert predicted["by_kind"]["autoencoder"] == measured["by_kind"]["autoencoder"] == weights
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.03)
    assert measured["by_phase"]["extract"] > 0
    assert not [finding for finding in comparison["findings"] if "memory" in finding]


def test_sample_grids_are_decoded(train, stores, tiny_vae, tmp_path):
    result = train(stores / "latents", tmp_path, 2, "--sample-every", 2, "--num-samples", 4, "--num-sampling-steps", 2,
                   "--autoencoder", tiny_vae[0])
    assert result.returncode == 0, result.stderr
    grid = Image.open(tmp_path / "samples" / "step-00000002.png")
    assert min(grid.size) >= 2 * SIZE
    report = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in report and "http" not in report.replace("http-equiv", "")


def test_model_settings_may_lie_in_a_file(train, stores, tmp_path):
    settings = tmp_path / "settings.json"
    settings.write_text('{\n  "mlp_ratio": 2\n}')
    result = train(stores / "pixels", tmp_path / "run", 1, "--model-config", settings)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model_config"]["mlp_ratio"] == 2
    settings.unlink()  # the run keeps what was in it
    result = train(stores / "pixels", tmp_path / "run", 2, "--model-config", '{"mlp_ratio": 2}')
    assert result.returncode == 0, result.stderr
    assert_refused(train(stores / "pixels", tmp_path / "new", 1, "--model-config", settings), "--model-config", "file")


def write_other_vae(folder, like):
    from diffusers import AutoencoderKL

    torch.manual_seed(5)
    AutoencoderKL.from_config(AutoencoderKL.load_config(like)).save_pretrained(folder)


def assert_refused(result, *parts):
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def test_a_store_knows_where_its_autoencoder_lies(kiln, train, pictures, tiny_vae, tmp_path):
    """Extract, train and sample with the fewest options; the run says what it misses when the autoencoder moved."""
    vae = tmp_path / "vae"
    shutil.copytree(tiny_vae[0], vae)
    result = kiln(*arguments(pictures, tmp_path / "store", vae))
    assert result.returncode == 0, result.stderr
    grids = ["--sample-every", 2, "--num-samples", 2, "--num-sampling-steps", 2]
    result = train(tmp_path / "store", tmp_path / "run", 2, *grids)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "samples" / "step-00000002.png").exists()
    sample = lambda out, *more: kiln("sample", "--run", tmp_path / "run", "--num-images", 2, "--num-sampling-steps", 2,
                                     "--out", tmp_path / out, *more)
    result = sample("a")
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "a").glob("0*.png"))) == 2

    vae.rename(tmp_path / "moved")
    assert_refused(sample("b"), f"{vae} does not exist", "--autoencoder")
    assert sample("b", "--autoencoder", tmp_path / "moved").returncode == 0
    assert_refused(train(tmp_path / "store", tmp_path / "new", 2, *grids), f"{vae} does not exist any more",
                   "--autoencoder")
    assert train(tmp_path / "store", tmp_path / "new", 2).returncode == 0  # without grids nothing is decoded
    # The hint is no setting: the same autoencoder elsewhere continues, and finds the store complete.
    assert kiln(*arguments(pictures, tmp_path / "store", tmp_path / "moved")).returncode == 0

    write_other_vae(vae, tiny_vae[0])
    assert_refused(sample("c"), f"{vae} is another autoencoder", "--autoencoder", "--anyway")
    assert_refused(train(tmp_path / "store", tmp_path / "other", 2, *grids), "another autoencoder", str(vae))


def test_a_store_that_does_not_fit_is_refused_with_the_remedy(train, pictures, stores, tiny_vae, tmp_path):
    out = tmp_path / "run"
    assert_refused(train(stores / "pixels", out, 1, "--image-size", 64), "--image-size 64", "--image-size 32")
    assert_refused(train(stores / "pixels", out, 1, "--num-classes", 2), "--num-classes 2", "3 classes")
    assert_refused(train(stores / "pixels", out, 1, "--autoencoder", tiny_vae[0]), "pixels", "--autoencoder")
    write_other_vae(tmp_path / "other", tiny_vae[0])
    assert_refused(train(stores / "latents", out, 1, "--autoencoder", tmp_path / "other"), "another autoencoder",
                   "extract again")
    assert_refused(train(stores / "pixels", out, 1, "--sample-every", 1, "--sample-classes", 3), "--sample-classes")
    assert_refused(train(pictures, out, 1), "kiln extract", "--autoencoder")
    assert not list(out.glob("checkpoints/*"))


def test_a_run_goes_on_with_its_own_data_only(kiln, train, stores, tmp_path):
    assert train(stores / "pixels", tmp_path / "run", 2).returncode == 0
    write_pictures(tmp_path / "more", 19)
    assert kiln(*arguments(tmp_path / "more", tmp_path / "store", "pixels", "--flip", "both")).returncode == 0
    assert_refused(train(tmp_path / "store", tmp_path / "run", 4), "other data", "--out")
    # The same store may move.
    (stores / "pixels").rename(stores / "moved")
    try:
        assert train(stores / "moved", tmp_path / "run", 4).returncode == 0
    finally:
        (stores / "moved").rename(stores / "pixels")


def test_a_model_with_more_classes_may_train_on_a_store(train, stores, tmp_path):
    result = train(stores / "pixels", tmp_path, 1, "--num-classes", 10)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "config.json").read_text())["model_config"]["num_classes"] == 10


def test_fp8_trains_as_bf16_does(kiln, tmp_path):
    """Where the hardware lacks it, by its rounding alone: the state is bf16's."""
    model = ["--model", "dit", "--hidden-size", 256, "--depth", 1, "--num-heads", 4, "--patch-size", 4, "--data", "synthetic",
             "--global-batch", 8, "--max-steps", 3, "--log-every", 1, "--peak-tflops", 1]
    for name, dtype in (("bf16", ["bf16"]), ("fp8", ["fp8", "--emulate-fp8"])):
        result = kiln("train", *model, "--compute-dtype", *dtype, "--out", tmp_path / name)
        assert result.returncode == 0, result.stderr
    fp8, bf16 = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=0.02)
