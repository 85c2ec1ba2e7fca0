"""kiln train --validation-data: where its loss is told, that nothing of training changes by it, several ranks."""

import pytest
from browser import parts_of
from conftest import assert_refused, matrix, program, succeed
from run_files import events, losses, read_plan
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_extract import arguments, write_pictures
from test_train_data import MODEL

HELD_OUT = 11


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for name, count in [("data", 18), ("held-out", HELD_OUT)]:
        write_pictures(folder / f"{name}-pictures", count)
        succeed(*arguments(folder / f"{name}-pictures", folder / name))
    return folder


@pytest.fixture(scope="module")
def command(stores):
    def arguments_of(out, steps, *more, validates=True):
        validation = ["--validation-data", stores / "held-out", "--validate-every", 2] if validates else []
        return ["train", *MODEL, "--ema-decay", 0.5, "--data", stores / "data", "--out", out, "--max-steps", steps,
                *validation, *more]

    return arguments_of


@pytest.fixture(scope="module")
def train(command):
    return lambda *arguments, **options: succeed(*command(*arguments, **options))


def validations(out):
    return events(out, "validation")


def validation_losses(out):
    return {line["step"]: line["validation_loss"] for line in validations(out)}


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    result = train(out, 5)
    assert result.stderr == ""
    return out, result.stdout


def test_the_loss_is_told_everywhere(alone):
    out, stdout = alone
    lines = validations(out)
    assert [line["step"] for line in lines] == [2, 4, 5]  # and at the end
    for line in lines:
        assert (line["images"], line["weights"]) == (HELD_OUT, "ema-0.5")
        assert f"step {line['step']:>7}  validation loss {line['validation_loss']:.5f}  {HELD_OUT} images" in stdout
        quartiles = [loss for loss in line["validation_loss_quartiles"] if loss is not None]
        assert len(quartiles) > 1 and min(quartiles) <= line["validation_loss"] <= max(quartiles)
    assert len({line["validation_loss"] for line in lines}) == 3
    written = EventAccumulator(str(out))
    written.Reload()
    scalars = written.Scalars("validation_loss")
    assert [scalar.step for scalar in scalars] == [2, 4, 5]
    assert [scalar.value for scalar in scalars] == pytest.approx([line["validation_loss"] for line in lines], rel=1e-6)
    assert "validation_loss_by_timestep/quartile_4" in written.Tags()["scalars"]
    assert "validation" in [series["name"] for series in parts_of(out / "report.html", "plot")[0]["series"] if series["x"]]
    assert "validation loss, last" in (out / "report.html").read_text()
    phases = read_plan(out)
    predicted, measured = (phases[name]["by_phase"]["validation"] for name in ("predicted", "measured"))
    assert measured == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
def test_training_does_not_notice(alone, train, tmp_path):
    out, _ = alone
    grids = ["--sample-every", 1, "--num-samples", 2, "--num-sampling-steps", 2]
    for dtype in ("f32", "bf16"):
        train(tmp_path / f"plain-{dtype}", 5, "--compute-dtype", dtype, validates=False)
        train(tmp_path / f"drawn-{dtype}", 5, "--compute-dtype", dtype, *grids)
        assert losses(tmp_path / f"drawn-{dtype}") == losses(tmp_path / f"plain-{dtype}")
    assert losses(out) == losses(tmp_path / "plain-f32")
    assert len(list((tmp_path / "drawn-f32" / "samples").iterdir())) == 5


@pytest.mark.slow
def test_a_resumed_run_says_the_same(alone, train, tmp_path):
    out, _ = alone
    for steps in (3, 4, 5):
        train(tmp_path / "cut", steps)
    assert losses(tmp_path / "cut") == losses(out)
    assert {step: loss for step, loss in validation_losses(tmp_path / "cut").items() if step != 3} == validation_losses(out)


@pytest.mark.parametrize("ranks, stage, more", matrix(
    [(2, 0, []), (2, 3, ["--micro-batch", 1]), (3, 1, []), (2, 2, ["--recompute", "all", "--offload-optimizer", "nvme"])], [(3, 3, [])]))
def test_any_ranks_say_the_same(alone, train, tmp_path, ranks, stage, more):
    out, _ = alone
    if "nvme" in more:
        more = [*more, "--nvme-path", tmp_path]
    train(tmp_path / "ranks", 5, "--nproc", ranks, "--zero-stage", stage, "--sample-every", 4, "--num-samples", 5,
          "--num-sampling-steps", 2, *more)
    assert validation_losses(tmp_path / "ranks") == pytest.approx(validation_losses(out), rel=5e-6)
    assert losses(tmp_path / "ranks") == pytest.approx(losses(out), rel=5e-6)
    assert (tmp_path / "ranks" / "samples" / "step-00000004.png").exists()


def test_part_of_a_store_and_only_at_the_end(train, tmp_path):
    train(tmp_path, 2, "--validate-every", 0, "--validation-images", 4)
    assert [(line["step"], line["images"]) for line in validations(tmp_path)] == [(2, 4)]


@pytest.fixture(scope="module")
def latents(stores, tiny_vae):
    """The same pictures, encoded; with both flips, as images that are encoded on the way have them."""
    for name in ("data", "held-out"):
        succeed(*arguments(stores / f"{name}-pictures", stores / f"{name}-latents", tiny_vae[0], "--flip", "both"))
    return stores


@pytest.mark.slow
def test_images_are_encoded_as_a_store_of_them_is(command, train, latents, tiny_vae, tmp_path):
    """Whatever is trained on, the same loss; the weights are those of a run that does not validate."""
    vae = ["--autoencoder", tiny_vae[0]]
    data, pictures = (["--data", latents / "data-latents"], ["--data", latents / "data-pictures", *vae])
    runs = {"store-store": [*data, "--validation-data", latents / "held-out-latents"],
            "store-images": [*data, *vae, "--validation-data", latents / "held-out-pictures"],
            "images-store": [*pictures, "--validation-data", latents / "held-out-latents"],
            "images-images": [*pictures, "--validation-data", latents / "held-out-pictures"],
            "ranks": [*pictures, "--validation-data", latents / "held-out-pictures", "--nproc", 2, "--zero-stage", 3]}
    for name, options in runs.items():
        result = train(tmp_path / name, 3, *options)
        assert result.stderr == "", result.stderr
        assert [line["images"] for line in validations(tmp_path / name)] == [HELD_OUT] * 2
        assert validation_losses(tmp_path / name) == pytest.approx(validation_losses(tmp_path / "store-store"), rel=5e-4), name
    # The plan knows of the encoding: as of that of --data.
    memory = {name: read_plan(tmp_path / name) for name in runs}
    planned = memory["store-images"]["predicted"]["by_phase"]["validation"]
    assert planned == pytest.approx(memory["images-images"]["predicted"]["by_phase"]["extract"], rel=1e-3)
    measured = memory["store-images"]["measured"]["by_phase"]["validation"]
    assert planned >= measured and planned == pytest.approx(measured, rel=0.02)
    # ... and of its pictures, which wait beside those of the training.
    device = {name: memory[name]["predicted"]["footprints"]["validation"]["device"] for name in ("store-store", "images-store",
                                                                                                 "images-images")}
    assert device["images-images"] > device["images-store"] > device["store-store"]
    train(tmp_path / "plain", 3, *pictures, validates=False)
    assert losses(tmp_path / "images-images") == losses(tmp_path / "plain")
    assert_refused(command(tmp_path / "none", 1, *data, "--validation-data", latents / "held-out-pictures"),
                   "not a feature store", "--autoencoder")


def test_pixels_need_no_autoencoder(train, stores, tmp_path):
    """Of which the store holds one flip, as it was extracted."""
    for name, held_out in (("store", "held-out"), ("images", "held-out-pictures")):
        train(tmp_path / name, 2, "--no-flip", "--validation-data", stores / held_out)
    assert validation_losses(tmp_path / "images") == pytest.approx(validation_losses(tmp_path / "store"), rel=5e-4)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(command, stores, tmp_path):
    out = tmp_path / "run"
    assert_refused(command(out, 1, "--validation-data", stores / "absent"), "--validation-data", "made by kiln extract")
    write_pictures(tmp_path / "pictures", 2)
    assert_refused(command(out, 1, "--validation-data", tmp_path / "pictures"), "has 2 classes, --data has 3")
    assert_refused(command(out, 1, "--validation-images", 12), "--validation-images 12", "11")
    assert_refused(command(out, 1, "--validate-every", -1), "--validate-every")
    assert not out.exists()


@pytest.mark.slow
def test_a_share_of_the_data_is_held_out(stores, tmp_path):
    """Of a store and of the pictures it was made of the same ones; what is left is what a pass takes."""
    def command(name, out, *more):
        data = ["--data", stores / name, "--no-flip", *(["--autoencoder", "pixels"] if name == "data-pictures" else [])]
        return ["train", *MODEL, "--ema-decay", 0.5, "--out", tmp_path / out, *data, "--validate-every", 2,
                *(more if "--validation-share" in more else ["--validation-share", 0.4, *more])]

    batch = int(MODEL[MODEL.index("--global-batch") + 1])
    for name in ("data", "data-pictures"):
        result = succeed(*command(name, name, "--max-steps", 4))
        assert result.stderr == "", result.stderr
        (held_out,) = {line["images"] for line in validations(tmp_path / name)}
        assert 0 < held_out < 18 and f"{18 - held_out} samples" in result.stdout
        succeed(*command(name, f"{name}-epochs", "--epochs", 4))
        assert validations(tmp_path / f"{name}-epochs")[-1]["step"] == -(-4 * (18 - held_out) // batch)
        assert_refused(command(name, name, "--max-steps", 5, "--validation-share", 0.3), "--validation-share")
    assert validation_losses(tmp_path / "data-pictures") == pytest.approx(validation_losses(tmp_path / "data"), rel=5e-4)


def test_a_share_that_cannot_be_is_refused(command, stores, tmp_path):
    out = tmp_path / "run"
    assert_refused(command(out, 1, "--validation-share", 0.1), "leave one out")
    alone = lambda *more: ["train", *MODEL, "--out", out, "--max-steps", 1, *more]
    assert_refused(alone("--data", stores / "data", "--validation-share", 1e-9), "holds none of the 18 samples out")
    assert_refused(alone("--data", stores / "data", "--validation-share", 0.999), "holds out all 18 samples")
    assert_refused(alone("--data", stores / "data", "--validation-share", 1), "--validation-share", "below 1")
    assert_refused(alone("--data", "synthetic", "--validation-share", 0.1), "--validation-share", "synthetic")
    assert not out.exists()


def test_what_makes_no_sense_is_a_warning(train, stores, tmp_path):
    result = train(tmp_path / "same", 1, "--validation-data", stores / "data")
    assert "--validation-data holds the samples of --data" in result.stderr
    result = train(tmp_path / "none", 1, "--validate-every", 3, validates=False)
    assert "--validate-every has no effect without --validation-data" in result.stderr


@pytest.mark.slow
def test_ranks_with_other_held_out_samples_are_named(train, stores, tmp_path):
    from test_ranks import start_by_hand

    write_pictures(tmp_path / "pictures", HELD_OUT + 1)
    succeed(*arguments(tmp_path / "pictures", tmp_path / "other"))
    commands = [[program("kiln"), "train", *map(str, MODEL), "--data", stores / "data", "--out", tmp_path / "run", "--max-steps", "1",
                 "--validation-data", held_out] for held_out in (stores / "held-out", tmp_path / "other")]
    for (_, stderr), code in start_by_hand(commands):
        assert code == 1 and "the content of --validation-data" in stderr, stderr
