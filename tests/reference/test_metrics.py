"""The metrics from the same features as torch-fidelity's, scipy's and a plain f64 port of ADM's evaluator."""

import json

import numpy as np
import pytest
import scipy.linalg
import torch
from conftest import succeed
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kernel_mmd

TOLERANCE = 1e-6


def features(count, width, seed, shift=0.0, rank=None):
    """Correlated, as those of a network are, with a spectrum over three decades."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(7)) / width**0.5
    scales = torch.logspace(0, -1.5, width)
    if rank:
        scales[rank:] = 0
    return ((torch.randn(count, width, generator=generator) * scales) @ mixing + shift).float()


def f64_statistics(x):
    x = x.double().numpy()
    return x.mean(0), np.cov(x, rowvar=False)


def frechet_by_sqrtm(a, b):
    (mu_a, sigma_a), (mu_b, sigma_b) = f64_statistics(a), f64_statistics(b)
    root = scipy.linalg.sqrtm(sigma_a @ sigma_b).real
    return ((mu_a - mu_b) ** 2).sum() + np.trace(sigma_a + sigma_b - 2 * root)


def close(got, want, tolerance=TOLERANCE):
    return abs(float(got) - want) <= tolerance * max(abs(want), 1e-3)


def test_frechet_equals_torch_fidelity_and_scipy(conformance):
    a, b = features(500, 64, 1), features(300, 64, 2, shift=0.05)
    outputs = conformance("metrics", config={"type": "frechet"}, inputs={"features_a": a, "features_b": b})
    want = fid_statistics_to_metric(fid_features_to_statistics(a.double()), fid_features_to_statistics(b.double()),
                                    False)["frechet_inception_distance"]
    assert close(outputs["fid"], want) and close(outputs["fid"], frechet_by_sqrtm(a, b))
    mu, sigma = f64_statistics(a)
    assert outputs["sigma_a"].dtype == torch.float64
    np.testing.assert_allclose(outputs["mu_a"].numpy(), mu, rtol=0, atol=1e-12)
    np.testing.assert_allclose(outputs["sigma_a"].numpy(), sigma, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count_a, count_b, rank", [(20, 30, None), (200, 20, None), (150, 150, 10)])
def test_frechet_of_singular_covariances(conformance, count_a, count_b, rank):
    """Fewer samples than dimensions. The truth: of centred features A / sqrt(n - 1), B / sqrt(m - 1), the trace of
    the root is the sum of the singular values of A B^T."""
    a, b = features(count_a, 96, 3, rank=rank), features(count_b, 96, 4, shift=0.1, rank=rank)
    outputs = conformance("metrics", config={"type": "frechet"}, inputs={"features_a": a, "features_b": b})
    (mu_a, sigma_a), (mu_b, sigma_b) = f64_statistics(a), f64_statistics(b)
    centred_a = (a.double().numpy() - mu_a) / (count_a - 1) ** 0.5
    centred_b = (b.double().numpy() - mu_b) / (count_b - 1) ** 0.5
    trace = np.linalg.svd(centred_a @ centred_b.T, compute_uv=False).sum()
    want = ((mu_a - mu_b) ** 2).sum() + np.trace(sigma_a) + np.trace(sigma_b) - 2 * trace
    assert close(outputs["fid"], want)


def test_frechet_of_the_same_is_zero(conformance):
    a = features(50, 64, 5)
    outputs = conformance("metrics", config={"type": "frechet"}, inputs={"features_a": a, "features_b": a.clone()})
    assert abs(outputs["fid"].item()) < 1e-9


@pytest.mark.parametrize("count, splits", [(100, 10), (103, 10), (50, 1)])
def test_inception_score_equals_torch_fidelity(conformance, count, splits):
    logits = 3 * torch.randn(count, 37, generator=torch.Generator().manual_seed(6))
    outputs = conformance("metrics", config={"type": "inception_score", "splits": splits}, inputs={"logits": logits})
    want = isc_features_to_metric(logits, splits=splits, shuffle=False)
    assert close(outputs["inception_score_mean"], want["inception_score_mean"])
    assert abs(outputs["inception_score_std"].item() - want["inception_score_std"]) <= 1e-6


def distances(a, b):
    a, b = a.double().numpy(), b.double().numpy()
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1)).astype(np.float32)


def precision_recall(reference, generated, k):
    """Kynkaanniemi et al. 2019, as ADM's evaluator counts: the radius skips the point itself."""
    def radii(points):
        return np.sort(distances(points, points), axis=1)[:, k]  # column 0 is the point itself

    across = distances(generated, reference)
    precision = (across <= radii(reference)[None]).any(1).mean()
    recall = (across <= radii(generated)[:, None]).any(0).mean()
    return precision, recall


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall(conformance, k):
    a, b = features(400, 16, 8), 0.8 * features(300, 16, 9, shift=0.15)
    outputs = conformance("metrics", config={"type": "precision_recall", "k": k},
                          inputs={"features_a": a, "features_b": b})
    want = precision_recall(a, b, k)
    assert 0.05 < want[0] < 0.98 and 0.05 < want[1] < 0.98, want
    assert close(outputs["precision"], want[0]) and close(outputs["recall"], want[1])


def test_precision_and_recall_of_duplicates(conformance):
    """A point that is there twice has radius 0 for k = 1, and covers exactly itself."""
    a = features(60, 8, 10)
    a = torch.cat([a, a + 50, a[:20]])
    b = torch.cat([a[:30], features(40, 8, 11) + 0.5])
    for k in (1, 2):
        outputs = conformance("metrics", config={"type": "precision_recall", "k": k},
                              inputs={"features_a": a, "features_b": b})
        want = precision_recall(a, b, k)
        assert close(outputs["precision"], want[0]) and close(outputs["recall"], want[1])


def test_precision_and_recall_cross_blocks(conformance):
    """More points than are compared at a time."""
    a, b = features(2100, 4, 12), features(1500, 4, 13, shift=0.3)
    outputs = conformance("metrics", config={"type": "precision_recall"}, inputs={"features_a": a, "features_b": b})
    want = precision_recall(a, b, 3)
    assert close(outputs["precision"], want[0]) and close(outputs["recall"], want[1])


@pytest.mark.parametrize("count_a, count_b", [(80, 80), (1500, 70)])
def test_kid(conformance, count_a, count_b):
    a, b = features(count_a, 32, 14), features(count_b, 32, 15, shift=0.1)
    outputs = conformance("metrics", config={"type": "kid"}, inputs={"features_a": a, "features_b": b})
    x, y = a.double().numpy(), b.double().numpy()

    def kernel(left, right):
        return (left @ right.T / 32 + 1) ** 3

    def among(points):
        values = kernel(points, points)
        return (values.sum() - np.trace(values)) / (len(points) * (len(points) - 1))

    want = among(x) + among(y) - 2 * kernel(x, y).mean()
    assert abs(outputs["kid"].item() - want) <= 1e-6 * max(abs(want), 1e-3)
    if count_a == count_b:
        theirs = kernel_mmd(x, y, kid_kernel="poly", kid_kernel_poly_degree=3, kid_kernel_poly_gamma=None,
                            kid_kernel_poly_coef0=1)
        assert abs(outputs["kid"].item() - theirs) <= 1e-6 * max(abs(theirs), 1e-3)


def adm_numbers(reference, generated, k, splits):
    """ADM's evaluator as it is described: FID on pool3, sFID on the spatial features, the Inception Score of logits
    without bias, precision and recall on pool3. The root's trace is that of centred features, in f64."""
    def distance(a, b):
        a, b = a.double().numpy(), b.double().numpy()
        centred_a, centred_b = ((x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b))
        root = np.linalg.svd(centred_a @ centred_b.T, compute_uv=False).sum()
        return ((a.mean(0) - b.mean(0)) ** 2).sum() + (centred_a**2).sum() + (centred_b**2).sum() - 2 * root

    logits = generated["logits_unbiased"].double().numpy()
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    scores = [np.exp((part * (np.log(part) - np.log(part.mean(0)))).sum(1).mean()) for part in np.split(p, splits)]
    precision, recall = precision_recall(reference["pool3"], generated["pool3"], k)
    return {"fid": distance(generated["pool3"], reference["pool3"]),
            "sfid": distance(generated["spatial"], reference["spatial"]), "inception_score": np.mean(scores),
            "precision": precision, "recall": recall}


@pytest.mark.slow
def test_adms_five_numbers(conformance, tmp_path):
    """kiln evaluate from pictures to numbers, against a plain port from the features of the same network."""
    from test_evaluate import as_npz, pictures
    from test_features import random_inception_weights
    weights = tmp_path / "inception.pth"
    torch.save(random_inception_weights(), weights)
    images = {"reference": pictures(8, 31), "generated": np.concatenate([pictures(4, 32), pictures(4, 31, 0.02)])}
    made = {name: conformance("forward", model="inception", config={"resize": "tf1"}, weights=weights,
                              inputs={"image": torch.from_numpy(some).permute(0, 3, 1, 2).contiguous()})
            for name, some in images.items()}
    result = succeed("evaluate", as_npz(tmp_path / "made.npz", images["generated"]), "--reference",
                     as_npz(tmp_path / "real.npz", images["reference"]), "--net", "inception", "--net-weights", weights,
                     "--splits", "2")
    got = json.loads(result.stdout)["metrics"]
    want = adm_numbers(made["reference"], made["generated"], k=3, splits=2)
    for name, value in want.items():
        assert close(got[name], value), (name, got[name], value)
    assert 0 < want["precision"] and 0 < want["recall"] and want["sfid"] > 1e-3


@pytest.mark.parametrize("config, inputs, expected", [
    ({"type": "fid"}, {"features_a": (4, 2), "features_b": (4, 2)}, 'got "fid"'),
    ({"type": "frechet"}, {"features_a": (4, 2), "features_b": (4, 3)}, "one width, got 2 and 3"),
    ({"type": "frechet"}, {"features_a": (1, 2), "features_b": (4, 2)}, "at least 2 pictures, got 1"),
    ({"type": "kid"}, {"features_a": (1, 2), "features_b": (4, 2)}, "at least 2 pictures on each side"),
    ({"type": "precision_recall"}, {"features_a": (3, 2), "features_b": (4, 2)}, "more than 3 pictures, got 3"),
    ({"type": "inception_score", "splits": 5}, {"logits": (4, 2)}, "expected 1 to 4 splits"),
    ({"type": "frechet"}, {"features_a": (4, 2)}, "features_b is missing"),
])
def test_bad_input_is_one_line(conformance, config, inputs, expected):
    tensors = {name: torch.ones(shape) for name, shape in inputs.items()}
    assert expected in conformance("metrics", config=config, inputs=tensors, expect_error=True)
