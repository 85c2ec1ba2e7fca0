"""kiln evaluate: pictures of a folder or an .npz against references of every kind, with the protocol of a result."""

import json
import re

import numpy as np
import pytest
import torch
from browser import parts_of
from conftest import assert_fails, assert_refused, matrix, read_json, refusal, succeed
from PIL import Image
from run_files import events as events_of
from run_files import read_plan

SIDE = 24


def pictures(count, seed, brightness=0.0):
    """Smooth random pictures, as uint8 (N, H, W, 3)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear") + brightness
    return (fine.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def as_folder(path, images):
    path.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(path / f"{i:04}.png")
    return path


def two_classes(path):
    path.mkdir()
    for name in "ab":
        as_folder(path / name, pictures(10, ord(name)))
    return path


def as_npz(path, images, compressed=False, **more):
    (np.savez_compressed if compressed else np.savez)(path, images, **more)
    return path


@pytest.fixture
def evaluate(tmp_path):
    def run(samples, reference, *options, net="random"):
        result = succeed("evaluate", samples, "--reference", reference, "--net", net, *options)
        return json.loads(result.stdout) | {"stderr": result.stderr}
    return run


def test_folders_and_archives_give_the_same(evaluate, tmp_path):
    made, real = pictures(40, 1, 0.1), pictures(50, 2)
    results = [evaluate(samples, reference) for samples, reference in [
        (as_folder(tmp_path / "made", made), as_folder(tmp_path / "real", real)),
        (as_npz(tmp_path / "made.npz", made), as_npz(tmp_path / "real.npz", real)),
        (as_npz(tmp_path / "packed.npz", made, compressed=True), tmp_path / "real.npz")]]
    assert set(results[0]["metrics"]) == {"fd_random", "kd_random", "precision", "recall"}
    for result in results[1:]:
        assert result["metrics"] == results[0]["metrics"] and result["stamp"] == results[0]["stamp"]
        assert result["subject"]["pictures"] == results[0]["subject"]["pictures"]
    protocol = results[0]["protocol"]
    assert protocol["num_samples"] == 40 and protocol["reference"]["num_pictures"] == 50
    assert protocol["feature_net"] == {"name": "random", "weights": "random-conv-1", "resize": "none"}


def test_closer_pictures_score_better(evaluate, tmp_path):
    real = as_npz(tmp_path / "real.npz", pictures(200, 3))
    near, far = (evaluate(as_npz(tmp_path / f"{name}.npz", pictures(100, 4, brightness)), real)["metrics"]
                 for name, brightness in (("near", 0.0), ("far", 0.4)))
    assert near["fd_random"] < 0.5 * far["fd_random"] and near["kd_random"] < 0.1 * far["kd_random"]
    assert near["recall"] > far["recall"]


@pytest.mark.slow
def test_batches_and_ranks_change_nothing(evaluate, tmp_path):
    made, real = as_npz(tmp_path / "made.npz", pictures(30, 5)), as_npz(tmp_path / "real.npz", pictures(20, 6))
    whole = evaluate(made, real)
    for options in (["--batch", "7"], ["--nproc", "2", "--batch", "4"]):
        other = evaluate(made, real, *options)
        assert other["stamp"] == whole["stamp"]
        for name, value in whole["metrics"].items():
            assert other["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-7)


def test_new_user_9_a_listed_picture_that_is_missing_is_skipped(evaluate, tmp_path):
    made, real = as_npz(tmp_path / "made.npz", pictures(20, 9)), as_folder(tmp_path / "real", pictures(12, 10))
    whole = evaluate(made, real)
    names = ["gone.png"] + sorted(path.name for path in real.glob("*.png"))
    (real / "metadata.jsonl").write_text("".join(json.dumps({"file_name": name}) + "\n" for name in names))
    listed = evaluate(made, real)
    assert "1 of the 13 pictures" in listed["stderr"] and "gone.png" in listed["stderr"]
    assert listed["protocol"]["reference"]["num_pictures"] == 12
    for name, value in whole["metrics"].items():
        assert listed["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-7)
    assert_fails("gone.png", "evaluate", real, "--reference", made, "--net", "random")


def test_statistics_as_reference(evaluate, tmp_path):
    """Those that are saved give the same distance, and say what they cannot give; a wrong width is refused."""
    made, real = as_npz(tmp_path / "made.npz", pictures(30, 7)), as_npz(tmp_path / "real.npz", pictures(40, 8))
    saved = tmp_path / "statistics.npz"
    by_pictures = evaluate(made, real, "--save-reference", saved)
    with np.load(saved) as file:
        assert sorted(file) == ["mu", "sigma"] and file["sigma"].dtype == np.float64
        mu, sigma = file["mu"], file["sigma"]
    by_statistics = evaluate(made, saved)
    assert by_statistics["metrics"]["fd_random"] == pytest.approx(by_pictures["metrics"]["fd_random"], rel=1e-9)
    assert set(by_statistics["metrics"]) == {"fd_random"}
    assert "holds statistics alone, which give no precision_recall, kid" in by_statistics["stderr"]
    assert by_statistics["stamp"] != by_pictures["stamp"]
    np.savez(tmp_path / "narrow.npz", mu=mu[:10], sigma=sigma[:10, :10])
    assert_fails("features of one width", "evaluate", made, "--reference", tmp_path / "narrow.npz", "--net", "random")


@pytest.mark.slow
def test_inception_from_end_to_end(evaluate, tmp_path):
    """All of ADM's numbers of a few pictures, from the features that the same network gives torch-fidelity."""
    from test_features import random_inception_weights
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    weights = tmp_path / "inception.pth"
    torch.save(random_inception_weights(), weights)
    made, real = pictures(6, 9, 0.1), pictures(5, 10)
    net = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(weights))
    with torch.no_grad():
        a, b = (net(torch.from_numpy(images).permute(0, 3, 1, 2))[0].double().numpy() for images in (made, real))
    np.savez(tmp_path / "adm.npz", real, mu=b.mean(0), sigma=np.cov(b, rowvar=False), mu_s=np.zeros(2023),
             sigma_s=np.eye(2023))
    result = evaluate(as_npz(tmp_path / "made.npz", made), tmp_path / "adm.npz", "--net-weights", weights, "--splits", "2",
                      net="inception")
    assert set(result["metrics"]) == {"fid", "sfid", "inception_score", "inception_score_deviation", "precision", "recall",
                                      "kid"}
    centred_a, centred_b = ((x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b))
    trace = np.linalg.svd(centred_a @ centred_b.T, compute_uv=False).sum()
    want = ((a.mean(0) - b.mean(0)) ** 2).sum() + (centred_a**2).sum() + (centred_b**2).sum() - 2 * trace
    assert result["metrics"]["fid"] == pytest.approx(want, rel=2e-4)
    assert result["protocol"]["feature_net"]["resize"] == "tf1"
    assert result["protocol"]["feature_net"]["weights"].startswith("xxh3:")


@pytest.mark.slow
def test_results_of_different_protocols_are_told_apart(kiln, evaluate, tmp_path):
    made, real = as_npz(tmp_path / "made.npz", pictures(30, 11)), as_npz(tmp_path / "real.npz", pictures(40, 12))
    evaluate(made, real, "--out", tmp_path / "a.json")
    evaluate(made, real, "--out", tmp_path / "b.json")
    evaluate(made, real, "--num-pictures", "20", "--out", tmp_path / "c.json")
    same = succeed("evaluate", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert "do not compare" not in same.stdout and "fd_random" in same.stdout
    other = kiln("evaluate", "--compare", tmp_path / "a.json", tmp_path / "c.json")
    assert "do not compare" in other.stdout and "num_samples: 30 | 20" in other.stdout


def test_samples_bring_their_protocol(evaluate, tmp_path):
    folder = as_folder(tmp_path / "samples", pictures(8, 13))
    Image.fromarray(np.zeros((200, 200, 3), np.uint8)).save(folder / "grid.png")  # is no sample
    (folder / "sampling.json").write_text(json.dumps(
        {"sampler": {"type": "iddpm", "steps": "250"}, "cfg_scale": 1.5, "seed": 3, "weights": "xxh3:1", "label_sampling":
         "random", "compute_dtype": "bf16", "autoencoder": "xxh3:2"}))
    result = evaluate(folder, as_npz(tmp_path / "real.npz", pictures(9, 14)))
    samples = result["protocol"]["samples"]
    assert result["protocol"]["num_samples"] == 8
    assert samples["cfg_scale"] == 1.5 and samples["label_sampling"] == "random" and samples["ema"] is True
    assert samples["compute_dtype"] == "bf16" and samples["autoencoder"] == "xxh3:2" and "127.5" in samples["uint8"]
    assert result["subject"]["origin"] == {"weights": "xxh3:1", "model": None, "seed": 3}


def without_progress(text):
    return [line for line in text.splitlines() if not re.fullmatch(r"kiln evaluate: .*: \d+/\d+ pictures", line)]


@pytest.mark.parametrize("options, expected", [
    (["--net", "vgg"], "known are inception, dinov2, random"),
    (["--net", "inception"], "needs its weights"),
    (["--net", "random", "--metrics", "sfid"], "gives no sfid"),
    (["--net", "random", "--metrics", "lpips"], 'unknown metric "lpips"'),
    (["--net", "random", "--resize", "tf1"], 'resizes by none, got "tf1"'),
    (["--net", "random", "--num-pictures", "100"], "at least 100 pictures, got 6"),
    (["--net", "random", "--crop", "8"], "leave out --crop"),
])
def test_mistakes_are_one_line(tmp_path, options, expected):
    made = as_npz(tmp_path / "made.npz", pictures(6, 15))
    assert expected in refusal("evaluate", made, "--reference", made, *options, lines=without_progress)


@pytest.mark.parametrize("content, expected", [
    (b"no archive", "cannot open"),
    (None, "expected arr_0"),
])
def test_damaged_archives(tmp_path, content, expected):
    path = tmp_path / "bad.npz"
    path.write_bytes(content) if content else np.savez(path, np.zeros((3, 4, 4, 3), np.float32))
    assert_refused(["evaluate", path, "--reference", path, "--net", "random"], expected)


TRAIN = ["--model", "dit", "--hidden-size", "32", "--depth", "1", "--num-heads", "2", "--patch-size", "2", "--threads", "1",
         "--objective", "flow", "--global-batch", "8", "--log-every", "2", "--peak-tflops", "1", "--image-size", "8",
         "--autoencoder", "pixels", "--num-sampling-steps", "2"]


@pytest.mark.slow
def test_in_training_and_of_runs(kiln, tmp_path):
    """--evaluate-every: a curve in the log, the same on two ranks as on one; kiln evaluate RUN; kiln report."""
    data = two_classes(tmp_path / "data")
    events = {}
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        succeed("train", *TRAIN, "--data", data, "--out", run, "--max-steps", "4", "--evaluate-every", "2",
                "--checkpoint-every", "2", "--evaluate-images", "12", "--evaluate-reference", data,
                "--nproc", str(ranks if ranks > 1 else 0))
        events[ranks] = events_of(run, "evaluation")
        assert [line["step"] for line in events[ranks]] == [2, 4]
        report = (run / "report.html").read_text()
        assert "fd_random" in report and "feature_net.name" in report
    for one, two in zip(events[1], events[2]):
        assert one["stamp"] == two["stamp"]
        assert one["metrics"]["fd_random"] == pytest.approx(two["metrics"]["fd_random"], rel=1e-2)
    run = tmp_path / "run1"
    result = succeed("evaluate", run, "--reference", data, "--crop", "8", "--net", "random", "--num-pictures", "10",
                     "--sampler", "flow_euler", "--num-sampling-steps", "2", "--random-labels",
                     "--guidance-interval", "0.2:0.8")
    protocol = json.loads(result.stdout)["protocol"]["samples"]
    assert protocol["label_sampling"] == "random" and protocol["guidance_interval"] == "0.2:0.8"
    (weights,) = (run / "checkpoints/step-00000004").glob("ema*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    result = succeed("evaluate", run, "--reference", data, "--crop", "8", "--net", "random", "--num-pictures", "10",
                     "--nproc", "2", "--num-sampling-steps", "2")
    assert "/step-00000002-" in json.loads(result.stdout)["subject"]["samples"]
    assert result.stderr.count("passed over, it is damaged") == 1, "one rank reads the weights to choose them, once"
    page = tmp_path / "both.html"
    succeed("report", tmp_path / "run1", tmp_path / "run2", "--out", page)
    text = page.read_text()
    assert "run1" in text and "run2" in text and "Does not compare with the first table" in text
    judged = [row for table in parts_of(page, "table") if table["columns"][-1] == "step" for row in table["rows"]]
    assert any((row[0], row[-1]) == ("run1", "2") for row in judged), "the step that was judged, not the last one"
    assert kiln("report", tmp_path / "data").returncode == 1


@pytest.mark.parametrize("net", matrix(["random"], ["inception"]))
def test_the_plan_counts_evaluations(tmp_path, net):
    """The net's weights, the reference's statistics, a batch through the net and the metrics: as they are measured. Inception's weights
    are counted in test_protocol.py, too."""
    data = as_npz(tmp_path / "reference.npz", pictures(40, 1)[:, :8, :8])
    options = ["--evaluate-every", "2", "--evaluate-images", "40", "--evaluate-reference", data, "--evaluate-net", net]
    if net == "inception":
        from test_features import random_inception_weights
        torch.save(random_inception_weights(), tmp_path / "inception.pth")
        options += ["--evaluate-net-weights", tmp_path / "inception.pth", "--evaluate-images", "8"]
        del options[2:4]
    options = [*TRAIN, "--data", "synthetic", "--num-classes", "4", *options]
    run = tmp_path / "run"
    succeed("train", *options, "--out", run, "--max-steps", "2", timeout=900)
    predicted, measured = (read_plan(run)[side] for side in ("predicted", "measured"))
    assert measured["by_kind"]["feature net"] == predicted["by_kind"]["feature net"] > 0
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.03)
    assert measured["by_phase"]["evaluation"] == pytest.approx(predicted["by_phase"]["evaluation"], rel=0.2)
    without = read_json("plan", *TRAIN, "--data", "synthetic", "--num-classes", "4", "--gpu", "A100-80G")
    with_it = read_json("plan", *options, "--gpu", "A100-80G")
    assert "evaluation" in with_it["predicted"]["by_phase"] and "evaluation" not in without["predicted"]["by_phase"]
    assert with_it["predicted"]["needed_bytes"] >= without["predicted"]["needed_bytes"]


@pytest.mark.slow
def test_guidance_interval_changes_pictures_where_it_guides(tmp_path):
    """All of the schedule is no interval; none of the steps in it is no guidance."""
    data = tmp_path / "data"
    for name in "ab":
        folder = data / name
        folder.mkdir(parents=True)
        for i, image in enumerate(pictures(4, ord(name))):
            Image.fromarray(image).save(folder / f"{i}.png")
    run = tmp_path / "run"
    succeed("train", *TRAIN, "--data", data, "--out", run, "--max-steps", "3", "--lr", "0.05", "--ema-decay", "0")

    def draw(name, *options, count=4):
        out = tmp_path / name
        succeed("sample", "--run", run, "--num-images", str(count), "--num-sampling-steps", "4", "--out", out, *options)
        # Pixels: the files also say how they were drawn.
        return [Image.open(path).tobytes() for path in sorted(out.glob("0*.png"))]

    guided, free = draw("guided", "--cfg-scale", "4"), draw("free", "--cfg-scale", "1")
    assert guided != free
    assert draw("all", "--cfg-scale", "4", "--guidance-interval", "0:1") == guided
    assert draw("none", "--cfg-scale", "4", "--guidance-interval", "0.001:0.002") == free
    assert draw("some", "--cfg-scale", "4", "--guidance-interval", "0.3:0.8") not in (guided, free)
    assert_fails("0 <= LO < HI <= 1", "sample", "--run", run, "--out", tmp_path / "x", "--guidance-interval", "0.8:0.3")
    names = {}
    for seed in (1, 2):
        draw(f"labels{seed}", "--random-labels", "--seed", str(seed), count=16)
        names[seed] = [path.name for path in sorted((tmp_path / f"labels{seed}").glob("0*.png"))]
    assert names[1] != names[2] and {name.split("-")[1] for name in names[1]} == {"a.png", "b.png"}
