"""Event files, read by TensorBoard itself, hold what log.jsonl holds."""

import io
import shutil

import numpy as np
import pytest
from browser import parts_of
from conftest import succeed
from PIL import Image
from run_files import checkpoint, log_lines, step_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

OPTIONS = ["--model", "dit", "--hidden-size", 48, "--depth", 1, "--num-heads", 3, "--patch-size", 4, "--num-classes", 4,
           "--data", "synthetic", "--autoencoder", "pixels", "--image-size", 16, "--global-batch", 8, "--objective", "flow",
           "--log-every", 2, "--sample-every", 5, "--num-samples", 4, "--num-sampling-steps", 3, "--peak-tflops", 1]


def train(out, steps, *extra):
    succeed("train", *OPTIONS, "--out", out, "--max-steps", steps, *extra)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run to step 6 that went on to step 10: two event files."""
    out = tmp_path_factory.mktemp("run")
    train(out, 6)
    train(out, 10)
    return out


@pytest.fixture(scope="module")
def events(run):
    accumulator = EventAccumulator(str(run), size_guidance={"images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_scalars_equal_the_log(run, events):
    lines = step_lines(run)
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    for tag in ("loss", "lr", "grad_norm", "images_per_s", "tflops", "host_bytes"):
        scalars = events.Scalars(tag)
        assert [event.step for event in scalars] == [2, 4, 6, 8, 10]
        assert np.allclose([event.value for event in scalars], [line[tag] for line in lines], rtol=1e-6)
    for quartile in range(4):
        logged = {line["step"]: line["loss_quartiles"][quartile] for line in lines}
        for event in events.Scalars(f"loss_by_timestep/quartile_{quartile + 1}"):
            assert np.isclose(event.value, logged[event.step], rtol=1e-6)


def test_terms_of_the_loss(run, tmp_path):
    """Those of DiT's loss stand in the log, in TensorBoard and in the report. A loss of one term has no others."""
    assert "loss_by_term" not in (run / "log.jsonl").read_text()
    train(tmp_path, 4, "--objective", "iddpm", "--sample-every", 0)
    lines = log_lines(tmp_path)
    assert [line["step"] for line in lines] == [2, 4]
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    for term in ("mse", "vb"):
        logged = [line["loss_by_term"][term] for line in lines]
        assert np.allclose([event.value for event in accumulator.Scalars(f"loss_by_term/{term}")], logged, rtol=1e-6)
    assert np.allclose([sum(line["loss_by_term"].values()) for line in lines], [line["loss"] for line in lines], rtol=1e-6)
    plot, = [plot for plot in parts_of(tmp_path / "report.html", "plot") if plot["title"] == "Terms of the loss"]
    assert [series["name"] for series in plot["series"]] == ["mse", "vb"]


def test_sample_grids_are_the_png_files(run, events):
    images = events.Images("samples")
    assert [image.step for image in images] == [5, 6, 10]  # each run also ends with one
    for image in images:
        file = run / "samples" / f"step-{image.step:08}.png"
        assert image.encoded_image_string == file.read_bytes()
        assert Image.open(io.BytesIO(image.encoded_image_string)).size == (image.width, image.height)


def test_every_record_has_right_checksums(run):
    files = sorted(run.glob("events.out.tfevents.*"))
    assert len(files) == 2
    for file in files:
        reader = PyRecordReader_New(str(file))
        records = 0
        with pytest.raises(errors.OutOfRangeError):  # DataLossError for a wrong checksum
            while True:
                reader.GetNext()
                records += 1
        assert records > 10


def test_steps_after_the_checkpoint_are_dropped(tmp_path):
    """A resumed run's file takes the place of what its checkpoint had not seen."""
    train(tmp_path, 8, "--checkpoint-every", 4, "--sample-every", 0)
    shutil.rmtree(checkpoint(tmp_path, 8))
    train(tmp_path, 12, "--sample-every", 0)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == [2, 4, 6, 8, 10, 12]
