"""Guide a, planning the training of DiT: which model on which cards, a probe, a batch that leaves room, training that is
interrupted and goes on with fewer ranks, and a picture from diffusers' DiTPipeline at the end."""

import re
import signal

import pytest
import torch
from dit_pictures import assert_diffusers_draws_the_same
from dit_torch import DiT
from pipelines import tiny_kl
from walks import MEASURED_SHARE, PEAK_FLOPS, Walk, check_run, encoding_flops, flops_of, pictures, steps_of

SIZES = ["DiT-S/8", "DiT-B/4", "DiT-L/2", "DiT-XL/2"]
# The guide's DiT-B/4, narrow and shallow: pictures of 256 px are latents of 32 x 32, in 8 x 8 patches.
MODEL = ["--model", "DiT-B/4", "--hidden-size", 64, "--depth", 2, "--num-heads", 1, "--image-size", 256]


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """Pictures in a folder for each class, and an autoencoder of Stable Diffusion's shape."""
    folder = tmp_path_factory.mktemp("brought")
    pictures(folder / "pictures", 24, [(256, 256), (300, 280)], classes=True)
    tiny_kl(folder / "vae")
    return folder


def data(brought):
    """As --data-path in the guide: pictures, encoded in every step."""
    return ["--data", brought / "pictures", "--autoencoder", brought / "vae"]


def training(walk, brought, *more):
    return ["train", *MODEL, *data(brought), "--global-batch", 16, "--micro-batch", 8, "--log-every", 1, "--checkpoint-every", 2,
            "--threads", 1, "--peak-tflops", 1, *more]


def test_a_model_is_chosen_for_the_cards():
    found = Walk.json("plan", "--search", "--model", ",".join(SIZES), "--gpu", "RTX-3090", "--gpus", 4, "--deadline-days", 5)
    assert {row["model"] for row in found["ranked"]} == set(SIZES)
    assert all(row["days"] <= 5 for row in found["ranked"] if row["meets"])


def test_a_table_says_what_each_model_takes():
    said = Walk.kiln("plan", "--table", "sizes", "--gpu", "RTX-4060", "--global-batch", 64, "--compute-dtype", "fp16").stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| DiT")]
    assert {row[0] for row in rows} > set(SIZES) and all(cell for row in rows for cell in row[:8]), "the last column is a published FID, where there is one"


def test_the_plan_says_how_many_days():
    """400,000 steps of DiT-B/4 on four cards with the guide's 32 pictures each, encoded in every step: it says three days."""
    plan = Walk.json("plan", "--model", "DiT-B/4", "--gpu", "RTX-3090", "--gpus", 4, "--global-batch", 128, "--compute-dtype", "fp16",
                     "--autoencoder", "sd-vae-ft-mse", "--steps", 400_000)["predicted"]
    dit = flops_of(lambda: DiT(input_size=32, patch_size=4, in_channels=4, hidden_size=768, depth=12, num_heads=12)(
        torch.empty(1, 4, 32, 32), torch.empty(1), torch.zeros(1, dtype=torch.long)))
    encoder = encoding_flops(256)
    at_peak = 32 * (3 * dit + encoder) / PEAK_FLOPS["RTX-3090"]
    assert at_peak < plan["step_s"] < at_peak / MEASURED_SHARE, at_peak
    assert plan["mfu"] == pytest.approx(3 * dit * 32 / plan["step_s"] / PEAK_FLOPS["RTX-3090"], rel=0.03)
    assert plan["fits"] and plan["days"] == pytest.approx(400_000 * plan["step_s"] / 86400)


def test_a_probe_measures_memory_and_speed(walk, brought):
    probe = walk.json("probe", *MODEL, *data(brought), "--global-batch", 16, "--micro-batch", 8, "--threads", 1, "--steps", 6,
                      "--no-checkpoint", *walk.many)
    measured, predicted = probe["measured"], probe["predicted"]
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.05)
    assert measured["images_per_s"] > 0 and measured["phase_s"]["encoding"] > 0


def test_a_smaller_batch_is_advised_above_85_percent():
    """On a card of which 64 pictures at once take 92 %."""
    plan = ["plan", "--model", "DiT-B/4", "--global-batch", 256, "--compute-dtype", "fp16"]
    needed = Walk.json(*plan, "--gpu", "RTX-3090", "--micro-batch", 64)["predicted"]["needed_bytes"]
    card = ["--gpu-memory", int(needed / 0.92)]

    def share(batch):
        planned = Walk.json(*plan, *card, "--micro-batch", batch)
        return planned["predicted"]["needed_bytes"] / planned["machine"]["memory_bytes"], "\n".join(planned["advice"])

    used, advice = share(64)
    assert used > 0.85, used
    used, advice = share(int(re.search(r"% of the memory is used.*--micro-batch (\d+)", advice)[1]))
    assert used <= 0.85 and "% of the memory is used" not in advice


def test_training_is_interrupted_and_goes_on_with_fewer_ranks(walk, brought):
    said = walk.interrupted(signal.SIGTERM, walk / "run", *training(walk, brought, "--max-steps", 400, *walk.many))
    done = max(steps_of(walk / "run"))
    assert "stopped by a signal" in said and done < 400
    evaluation = ["--evaluate-every", done + 4, "--evaluate-images", 8, "--evaluate-reference", brought / "pictures"]
    said = walk.kiln(*training(walk, brought, "--max-steps", done + 8, "--sample-every", done + 8, "--num-samples", 4, "--sampler", "ddim",
                               "--num-sampling-steps", 4, *evaluation), "--out", walk / "run")
    assert "resuming" in said.stdout and steps_of(walk / "run") == list(range(1, done + 9))


def test_diffusers_draws_from_it(walk, brought):
    walk.kiln("convert", "--in", walk / "run", "--out", walk / "pipeline", "--vae", brought / "vae")
    # Its guidance knows ImageNet's thousand classes only.
    assert_diffusers_draws_the_same(walk, walk / "pipeline", 2, 1.0, "--run", walk / "run")


def test_the_report_is_whole(walk, browser):
    check_run(browser.open(walk / "run/report.html"), walk / "run", headings=["Evaluation", "Samples over time"],
              plots=["fd_random", "kd_random", "precision", "recall"], pictures=[(518, 518)],
              rows={"model": "DiT-B/4", "image-size": "256", "nproc": "0", "feature_net.name": "random", "num_samples": "8",
                    "reference.num_pictures": "24", "samples.sampler.steps": "4"})


@pytest.mark.parametrize("option, value, expected", [
    ("--autoencoder", "encoder", r"the autoencoder is of class CLIPTextModel"),
    ("--autoencoder", "nowhere", r"nowhere"),
    ("--image-size", 252, r"expected --image-size to be a multiple of 8, got 252"),
])
def test_what_does_not_fit_is_named_before_a_picture_is_read(tmp_path, brought, option, value, expected):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/config.json").write_text('{"_class_name": "CLIPTextModel"}')
    given = dict(zip(MODEL[::2], MODEL[1::2])) | {"--autoencoder": brought / "vae", "--max-steps": 1}
    given[option] = tmp_path / value if option == "--autoencoder" else value
    Walk.refused(["train"], given, expected, tmp_path, classes=True)
