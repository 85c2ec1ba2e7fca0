"""Fresh weights: each tensor has the distribution that the reference's own initialisation gives it."""

import math

import pytest
import torch
from dit_torch import DiT

CONFIG = dict(input_size=16, patch_size=2, in_channels=4, hidden_size=96, depth=3, num_heads=4, mlp_ratio=4.0,
              num_classes=40, class_dropout_prob=0.1, learn_sigma=True)


def xavier_bound(shape):
    fan_in, fan_out = math.prod(shape[1:]), shape[0]
    return math.sqrt(6 / (fan_in + fan_out))


def expected_distribution(key, shape):
    """(kind, scale) of a DiT weight. adaLN-zero: modulations and the head start at zero; biases too."""
    if key.endswith("bias") or "adaLN" in key or "final_layer" in key:
        return "zero", 0
    if "embedding_table" in key or "t_embedder" in key:
        return "normal", 0.02
    return "uniform", xavier_bound(shape)


@pytest.fixture
def weights(conformance):
    return conformance("init", model="dit", config=CONFIG, seed=7)


def test_keys_and_shapes(weights):
    want = DiT(**CONFIG).state_dict()
    assert {key: value.shape for key, value in weights.items()} == {key: value.shape for key, value in want.items()}
    assert torch.equal(weights["pos_embed"], want["pos_embed"]) or \
        (weights["pos_embed"] - want["pos_embed"]).abs().max() < 1e-7


def kolmogorov_distance(sample, cdf):
    values = sample.flatten().double().sort().values
    steps = torch.arange(1, len(values) + 1) / len(values)
    return (cdf(values) - steps).abs().max().item()


def test_distributions(weights):
    kinds = {"zero": 0, "normal": 0, "uniform": 0}
    for key, value in weights.items():
        if key == "pos_embed":
            continue
        kind, scale = expected_distribution(key, value.shape)
        kinds[kind] += 1
        if kind == "zero":
            assert not value.any(), key
            continue
        critical = 1.95 / math.sqrt(value.numel())  # Kolmogorov-Smirnov, one in a thousand
        if kind == "normal":
            assert abs(value.std().item() / scale - 1) < 4 / math.sqrt(2 * value.numel()), key
            distance = kolmogorov_distance(value, lambda x: torch.special.ndtr(x / scale))
        else:
            assert value.abs().max() <= scale, key
            distance = kolmogorov_distance(value, lambda x: (x / scale + 1) / 2)
        assert distance < critical, (key, distance, critical)
    assert kinds == {"zero": 25, "normal": 3, "uniform": 13}


def test_spread_equals_the_original(weights, original_dit):
    for key, value in original_dit.DiT(**CONFIG).state_dict().items():
        got, want = weights[key].std().item(), value.std().item()
        if want == 0:
            assert not value.any() and not weights[key].any(), key
        else:
            assert abs(got / want - 1) < 6 / math.sqrt(value.numel()), (key, got, want)


def test_weights_are_independent(weights):
    """No two tensors share a stream: their correlation is that of chance."""
    random = [value.flatten()[:3840].double() for key, value in weights.items()
              if key != "pos_embed" and value.any() and value.numel() >= 3840]
    matrix = torch.corrcoef(torch.stack(random)) - torch.eye(len(random))
    assert matrix.abs().max() < 6 / math.sqrt(3840)


def test_seed_and_key_alone_decide(conformance, weights):
    again = conformance("init", model="dit", config=CONFIG, seed=7)
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    deeper = conformance("init", model="dit", config=CONFIG | dict(depth=4), seed=7)
    assert all(torch.equal(weights[key], deeper[key]) for key in weights)
    other = conformance("init", model="dit", config=CONFIG, seed=8)
    assert not torch.equal(weights["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_a_fresh_model_predicts_zero(conformance, weights):
    inputs = {"x": torch.randn(2, 4, 16, 16), "t": torch.tensor([1.0, 500.0]), "y": torch.tensor([0, 40])}
    output = conformance("forward", model="dit", config=CONFIG, weights=weights, inputs=inputs)["output"]
    assert not output.any()
