"""What a result was measured by: which average, how an .npz was drawn, what a run in training judges by, and reports."""

import json
import shutil

import numpy as np
import pytest
import torch
from browser import read_data
from conftest import succeed
from PIL import Image
from run_files import events, read_config, read_plan
from safetensors.torch import load_file, save_file
from test_evaluate import TRAIN, as_folder, as_npz, pictures, two_classes

DRAW = ["--num-images", "6", "--num-sampling-steps", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that keeps two averages, and its pictures."""
    root = tmp_path_factory.mktemp("protocol")
    succeed("train", *TRAIN, "--data", two_classes(root / "data"), "--out", root / "run", "--max-steps", "3",
            "--lr", "0.05", "--ema-decay", "0.5,0.99")
    return root / "run"


def judged(samples, reference, *options, net="random"):
    result = succeed("evaluate", samples, "--reference", reference, "--net", net, *options)
    return json.loads(result.stdout) | {"stderr": result.stderr}


@pytest.mark.slow
def test_the_average_is_part_of_the_protocol(run, tmp_path):
    data = run.parent / "data"
    names = []
    for name, options in {"first": [], "second": ["--ema-decay", "0.99"], "model": ["--no-ema"]}.items():
        succeed("sample", "--run", run, *DRAW, "--out", tmp_path / name, *options)
        result = judged(tmp_path / name, data, "--crop", "8", "--out", tmp_path / f"{name}.json")
        names.append(result["protocol"]["samples"]["ema"])
    assert names == ["ema-0.5", "ema-0.99", "model"]
    told = succeed("evaluate", "--compare", tmp_path / "first.json", tmp_path / "second.json").stdout
    assert "do not compare" in told and "samples.ema: ema-0.5 | ema-0.99" in told
    of_run = judged(run, data, "--crop", "8", "--num-pictures", "6", "--num-sampling-steps", "2", "--ema-decay", "0.99")
    assert of_run["protocol"]["samples"]["ema"] == "ema-0.99"
    file = run / "checkpoints" / "step-00000003" / "ema.safetensors"
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(file), bare)  # without the record, which names the average
    for weights, average in ((file, "ema-0.5"), (bare, "of the file")):
        succeed("sample", "--weights", weights, "--model", "dit", "--model-config",
                json.dumps(read_config(run)["model_config"]), "--objective", "flow", "--autoencoder", "pixels", *DRAW,
                "--out", tmp_path / weights.stem)
        assert judged(tmp_path / weights.stem, data, "--crop", "8")["protocol"]["samples"]["ema"] == average


def test_folders_of_earlier_versions_go_on(run, tmp_path):
    """Those say whether an average was drawn, not which; an .npz that was begun goes on too."""
    out, npz = tmp_path / "out", tmp_path / "begun.npz"
    draw = ["sample", "--run", run, *DRAW, "--out", out, "--npz", npz]
    succeed(*draw)
    images = {path.name: path.read_bytes() for path in out.glob("0*.png")}
    settings = json.loads((out / "sampling.json").read_text())
    del settings["average"]
    (out / "sampling.json").write_text(json.dumps(settings))
    (tmp_path / "begun.npz.json").unlink()
    data = run.parent / "data"
    assert judged(out, data, "--crop", "8")["protocol"]["samples"]["ema"] is True
    sorted(out.glob("0*.png"))[2].unlink()
    assert "5 of 6 images are there already" in succeed(*draw).stderr
    assert {path.name: path.read_bytes() for path in out.glob("0*.png")} == images
    assert judged(out, data, "--crop", "8")["protocol"]["samples"]["ema"] == "ema-0.5"


@pytest.mark.slow
def test_an_npz_brings_its_protocol(run, tmp_path):
    """As docs/evaluation.md lays it out, the .npz is not in the samples' folder."""
    data, stamps = run.parent / "data", set()
    for scale in ("1", "3"):
        npz = tmp_path / f"guided{scale}.npz"
        succeed("sample", "--run", run, *DRAW, "--cfg-scale", scale, "--npz", npz, "--no-png",
                "--out", tmp_path / f"s{scale}")
        result = judged(npz, data, "--crop", "8")
        assert result["protocol"]["samples"]["cfg_scale"] == float(scale)
        assert result["protocol"]["samples"]["ema"] == "ema-0.5" and "nothing says" not in result["stderr"]
        stamps.add(result["stamp"])
    assert len(stamps) == 2
    alone = tmp_path / "elsewhere" / "samples.npz"
    alone.parent.mkdir()
    shutil.copy(tmp_path / "guided1.npz", alone)
    result = judged(alone, data, "--crop", "8")
    assert result["protocol"]["samples"] is None
    assert sum("nothing says how" in line for line in result["stderr"].splitlines()) == 1


@pytest.mark.slow
def test_statistics_of_a_reference_serve_in_training(run, tmp_path):
    """ADM's file: FID by its mu and sigma, precision, recall and KID by its pictures, as kiln evaluate takes it."""
    from test_features import random_inception_weights
    weights = tmp_path / "inception.pth"
    torch.save(random_inception_weights(), weights)
    small = pictures(8, 2)[:, :8, :8]
    plain = as_npz(tmp_path / "plain.npz", small)
    far = as_npz(tmp_path / "far.npz", small, mu=np.full(2048, 100.0), sigma=np.eye(2048))
    values = {}
    for name, reference in {"plain": plain, "far": far}.items():
        out = tmp_path / name
        succeed("train", *TRAIN, "--data", run.parent / "data", "--out", out, "--max-steps", "2",
                "--evaluate-every", "2", "--evaluate-images", "8", "--evaluate-net", "inception",
                "--evaluate-net-weights", weights, "--evaluate-reference", reference, "--ema-decay", "0.7")
        (values[name],) = events(out, "evaluation")
    plan = read_plan(tmp_path / "plain")
    assert plan["measured"]["by_kind"]["feature net"] == plan["predicted"]["by_kind"]["feature net"] > 0
    assert values["far"]["metrics"]["fid"] > 1e6 > values["plain"]["metrics"]["fid"]
    assert values["far"]["metrics"]["kid"] == pytest.approx(values["plain"]["metrics"]["kid"], rel=1e-6)
    protocol = values["far"]["protocol"]
    assert protocol["k"] == 3 and protocol["splits"] == 1 and protocol["samples"]["ema"] == "ema-0.7"
    fingerprint = judged(as_npz(tmp_path / "made.npz", pictures(8, 3)), far, "--net-weights", weights, "--metrics",
                         "precision_recall,kid", net="inception")["protocol"]["reference"]["fingerprint"]  # FIDs take seconds
    assert protocol["reference"]["fingerprint"] == fingerprint and "statistics:" in fingerprint


def test_tensorboard_has_the_values(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    out = tmp_path / "run"
    succeed("train", *TRAIN, "--data", run.parent / "data", "--out", out, "--max-steps", "2", "--evaluate-every", "1",
            "--evaluate-images", "8", "--evaluate-reference", run.parent / "data")
    accumulator = EventAccumulator(str(out), size_guidance={"scalars": 0})
    accumulator.Reload()
    logged = events(out, "evaluation")
    assert [line["step"] for line in logged] == [1, 2]
    for name in ("fd_random", "kd_random", "precision", "recall"):
        scalars, wanted = accumulator.Scalars(f"evaluation/{name}"), [line["metrics"][name] for line in logged]
        assert [scalar.step for scalar in scalars] == [1, 2]
        assert [scalar.value for scalar in scalars] == pytest.approx(wanted, rel=1e-6)


def test_reports_show_every_result(run, tmp_path):
    """Two runs of one name keep a row each; kiln evaluate's results stand in a run's own report; --out is heeded."""
    folders = []
    for name, steps in (("a", "2"), ("b", "3")):
        folder = tmp_path / name / "run"
        shutil.copytree(run, folder)
        (folder / "evaluations.jsonl").unlink(missing_ok=True)
        judged(folder, run.parent / "data", "--crop", "8", "--num-pictures", "6", "--num-sampling-steps", "2",
               "--seed", steps)
        folders.append(folder)
    other = folders[1] / "evaluations.jsonl"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"metrics": {"fd_random": 123.0}}) + "\n")
    succeed("report", *folders, "--out", tmp_path / "both.html")
    (metrics,) = [section["parts"] for section in read_data(tmp_path / "both.html")["sections"] if section["title"] == "Metrics"]
    values = [row[:2] for row in metrics[0]["rows"]]
    assert [name for name, _ in values] == [str(folder) for folder in folders]
    assert values[0][1] != values[1][1] == "123", "each its own"
    own = tmp_path / "own.html"
    assert succeed("report", folders[0], "--out", own).stdout.strip() == str(own)
    (evaluation,) = [section["parts"] for section in read_data(own)["sections"] if section["title"] == "Evaluation"]
    result = json.loads((folders[0] / "evaluations.jsonl").read_text())
    text, table, protocol = evaluation
    assert text["text"].startswith("By kiln evaluate") and ["feature_net.name", "random"] in protocol["items"]
    assert f"{result['metrics']['fd_random']:.5g}" in table["rows"][0]


def test_dinov2_from_end_to_end(tmp_path):
    """Pillow's bicubic to bytes, transformers' network, the distance in f64."""
    from test_features import dinov2_of
    config, model = dinov2_of("plain")
    folder = tmp_path / "dinov2"
    model.save_pretrained(folder)
    mean, deviation = ([torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])

    def features(images):
        rows = []
        for image in images:
            sized = np.asarray(Image.fromarray(image).resize((224, 224), Image.BICUBIC))
            rows.append((torch.from_numpy(sized.copy()).permute(2, 0, 1).float() / 255 - mean) / deviation)
        with torch.no_grad():
            return model(torch.stack(rows)).pooler_output.double().numpy()

    made, real = pictures(8, 21, 0.1), pictures(10, 22)
    large = np.random.default_rng(0).integers(0, 256, (6, 260, 300, 3), dtype=np.uint8)  # shrunk, with edges to clamp
    for name, a, b in (("grown", made, real), ("shrunk", large, large[::-1, ::-1] // 2 + 90)):
        x, y = features(a), features(b)
        centred_x, centred_y = ((rows - rows.mean(0)) / (len(rows) - 1) ** 0.5 for rows in (x, y))
        trace = np.linalg.svd(centred_x @ centred_y.T, compute_uv=False).sum()
        want = ((x.mean(0) - y.mean(0)) ** 2).sum() + (centred_x**2).sum() + (centred_y**2).sum() - 2 * trace
        result = judged(as_npz(tmp_path / f"{name}-a.npz", a), as_folder(tmp_path / f"{name}-b", b),
                        "--net-weights", folder, "--metrics", "fid", net="dinov2")
        assert result["metrics"]["fd_dinov2"] == pytest.approx(want, rel=2e-5), name
        assert result["protocol"]["feature_net"]["resize"] == "pillow"
