"""The feature networks against torch-fidelity, pytorch-fid and transformers, with the same random weights."""

import functools

import pytest
import torch
from closeness import FORWARD, FORWARD_BF16, assert_close, violation
from dit_torch import randomise_
from pytorch_fid.inception import InceptionV3, fid_inception_v3
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

INCEPTION = 1e-4


@functools.cache
def random_inception_weights():
    """torchvision's keys with every tensor random, at sizes that keep activations near 1. Not to be changed: tests share them."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    with pytest.MonkeyPatch.context() as patch:  # the published weights are not fetched
        patch.setattr("pytorch_fid.inception.load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: None)
        net = fid_inception_v3()
    for key, value in net.state_dict().items():
        if key.endswith("num_batches_tracked"):
            continue
        draw = torch.randn(value.shape, generator=generator)
        if value.dim() > 1:
            weights[key] = draw * (2 / value[0].numel()) ** 0.5
        elif key.endswith("running_var"):
            weights[key] = 0.5 + torch.rand(value.shape, generator=generator)
        else:
            weights[key] = 0.1 * draw + (1 if key.endswith("bn.weight") else 0)
    return weights


@pytest.fixture(scope="module")
def inception_weights():
    return random_inception_weights()


@pytest.fixture(scope="module")
def weights_file(inception_weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(inception_weights, path)
    return path


def pictures(height, width, count=2, seed=1):
    return torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(seed),
                         dtype=torch.uint8)


def inception(conformance, weights, image, resize="tf1", **more):
    return conformance("forward", model="inception", config={"resize": resize}, weights=weights,
                       inputs={"image": image}, **more)


@pytest.mark.parametrize("height, width", [(64, 64), (340, 310)])
@pytest.mark.slow
def test_inception_equals_torch_fidelity(conformance, weights_file, height, width):
    image = pictures(height, width)
    net = FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased", "logits"],
                                      feature_extractor_weights_path=str(weights_file))
    spatial = []
    net.Mixed_6d.branch1x1.register_forward_hook(lambda module, given, made: spatial.append(made))
    with torch.no_grad():
        (pool3, unbiased), logits = net(image)[:2], None
        net.features_list = ["logits"]
        (logits,) = net(image)
    outputs = inception(conformance, weights_file, image)
    assert_close(outputs["pool3"], pool3, INCEPTION)
    assert_close(outputs["logits_unbiased"], unbiased, INCEPTION)
    assert_close(outputs["logits"], logits, INCEPTION)
    assert_close(outputs["spatial"], spatial[0][:, :7].permute(0, 2, 3, 1).flatten(1), INCEPTION)
    assert outputs["spatial"].shape[1] == 2023


@pytest.mark.slow
def test_inception_equals_pytorch_fid(conformance, monkeypatch, inception_weights, weights_file):
    monkeypatch.setattr("pytorch_fid.inception.load_state_dict_from_url", lambda *_, **__: inception_weights)
    original = torch.nn.Module.load_state_dict
    monkeypatch.setattr(torch.nn.Module, "load_state_dict",
                        lambda self, state, strict=True: original(self, state, strict=False))
    net = InceptionV3([InceptionV3.BLOCK_INDEX_BY_DIM[2048]]).eval()
    image = pictures(80, 96)
    with torch.no_grad():
        want = net(image / 255)[0].flatten(1)
    outputs = inception(conformance, weights_file, image, "torch")
    assert_close(outputs["pool3"], want, INCEPTION)
    tf1 = inception(conformance, weights_file, image)
    assert violation(tf1["pool3"], want, 1e-2) > 1, "the two preprocessings are told apart"


TF_BLOCKS = {"Mixed_5b": "mixed", "Mixed_5c": "mixed_1", "Mixed_5d": "mixed_2", "Mixed_6a": "mixed_3",
             "Mixed_6b": "mixed_4", "Mixed_6c": "mixed_5", "Mixed_6d": "mixed_6", "Mixed_6e": "mixed_7",
             "Mixed_7a": "mixed_8", "Mixed_7b": "mixed_9", "Mixed_7c": "mixed_10"}
STEM = ["Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3"]


def tf_unit(key):
    """The node of TensorFlow's graph that holds a unit, as the graph's towers are laid out."""
    if key in STEM:
        index = STEM.index(key)
        return "conv" if index == 0 else f"conv_{index}"
    block, unit = key.split(".")
    first = {"branch1x1": "conv", "branch_pool": "tower_2/conv"}.get(unit)
    if first:
        return f"{TF_BLOCKS[block]}/{first}"
    if block == "Mixed_6a" and unit == "branch3x3":
        return "mixed_3/conv"
    branch, position = unit.rsplit("_", 1)
    tower = {"branch5x5": "tower", "branch7x7": "tower", "branch3x3": "tower", "branch7x7x3": "tower_1",
             "branch7x7dbl": "tower_1", "branch3x3dbl": "tower" if block == "Mixed_6a" else "tower_1"}[branch]
    if position[-1] in "ab":
        return f"{TF_BLOCKS[block]}/{tower}/mixed/conv" + ("_1" if position[-1] == "b" else "")
    index = int(position) - 1
    return f"{TF_BLOCKS[block]}/{tower}/conv" + (f"_{index}" if index else "")


def test_the_graph_of_tensorflow_gives_the_same(conformance, inception_weights, weights_file):
    norms = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    graph = {}
    for key, value in inception_weights.items():
        if key.startswith("fc."):
            graph["softmax/" + ("weights" if key == "fc.weight" else "biases")] = value.t() if value.dim() > 1 else value
            continue
        unit, kind, name = key.rsplit(".", 2)
        if kind == "conv":
            graph[f"{tf_unit(unit)}/conv2d_params"] = value.permute(2, 3, 1, 0)
        else:
            graph[f"{tf_unit(unit)}/batchnorm/{norms[name]}"] = value
    assert len(graph) == len(inception_weights), "two units share a name"
    want, got = (inception(conformance, weights, pictures(32, 32, count=1)) for weights in (weights_file, graph))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_files_with_counters_and_auxiliary_classifier(conformance, inception_weights, weights_file):
    more = {"Conv2d_1a_3x3.bn.num_batches_tracked": torch.tensor(3), "AuxLogits.conv0.bn.weight": torch.ones(128)}
    want, got = (inception(conformance, weights, pictures(32, 32, count=1), "torch")
                 for weights in (weights_file, inception_weights | more))
    assert torch.equal(got["logits"], want["logits"])


@pytest.mark.parametrize("change, config, expected", [
    ({"fc.bias": None}, {"resize": "tf1"}, "missing keys: fc.bias"),
    ({"fc.bias": torch.zeros(1000)}, {"resize": "tf1"}, "fc.bias is (1000), expected (1008)"),
    ({}, {"resize": "bicubic"}, 'torch or tf1, got "bicubic"'),
])
def test_bad_inception_input(conformance, inception_weights, change, config, expected):
    weights = {key: value for key, value in (inception_weights | change).items() if value is not None}
    assert expected in conformance("forward", model="inception", config=config, weights=weights,
                                   inputs={"image": pictures(32, 32)}, expect_error=True)


def test_pictures_must_be_bytes(conformance, weights_file):
    message = inception(conformance, weights_file, torch.zeros(1, 3, 8, 8), expect_error=True)
    assert "(B, 3, H, W) of U8" in message


# 96 wide, so that heads are 16 and 32 wide.
SMALL = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, mlp_ratio=4, image_size=70, patch_size=14)
VARIANTS = {
    "plain": (Dinov2Config(**SMALL), Dinov2Model),
    "swiglu": (Dinov2Config(**SMALL | dict(use_swiglu_ffn=True, num_attention_heads=6)), Dinov2Model),
    "no qkv bias": (Dinov2Config(**SMALL | dict(qkv_bias=False)), Dinov2Model),
    "registers": (Dinov2WithRegistersConfig(**SMALL | dict(num_register_tokens=4)), Dinov2WithRegistersModel),
}
SIZES = [(70, 70), (56, 98), (98, 98), (75, 60)]


def dinov2_of(variant):
    config, kind = VARIANTS[variant]
    model = randomise_(kind(config), 0).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight") or "lambda1" in name:
                parameter.add_(1)
    return config.to_dict(), model


def published(state):
    """transformers 4's keys, which the published files have."""
    renamed = {}
    for key, value in state.items():
        for new, old in (("attention.q_proj", "attention.attention.query"), ("attention.k_proj", "attention.attention.key"),
                         ("attention.v_proj", "attention.attention.value"), ("attention.o_proj", "attention.output.dense"),
                         ("mlp.down_proj", "mlp.weights_out")):
            key = key.replace(new, old)
        if ".mlp.gate_proj." in key:
            renamed[key.replace("gate_proj", "weights_in")] = torch.cat([value, state[key.replace("gate_proj", "up_proj")]])
        elif ".mlp.up_proj." not in key:
            renamed[key] = value
    return renamed


@pytest.mark.parametrize("variant", VARIANTS)
def test_dinov2_equals_transformers(conformance, variant):
    config, model = dinov2_of(variant)
    for height, width in SIZES:
        image = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            want = model(image)
        outputs = conformance("forward", model="dinov2", config=config, weights=published(model.state_dict()),
                              inputs={"image": image})
        assert_close(outputs["last_hidden_state"], want.last_hidden_state)
        assert_close(outputs["pooler_output"], want.pooler_output)


@pytest.mark.parametrize("variant", ["plain", "swiglu"])
def test_newer_and_original_keys_give_the_same(conformance, variant):
    config, model = dinov2_of(variant)
    old = published(model.state_dict())
    original = {}
    for key, value in old.items():
        if ".attention.attention." in key:
            query = key.replace(".key.", ".query.").replace(".value.", ".query.")
            value = torch.cat([old[query.replace("query", part)] for part in ("query", "key", "value")])
            key = query.replace("attention.attention.query", "attn.qkv")
        for new, first in (("encoder.layer.", "blocks."), ("attention.output.dense", "attn.proj"), ("layernorm.", "norm."),
                           ("layer_scale1.lambda1", "ls1.gamma"), ("layer_scale2.lambda1", "ls2.gamma"),
                           ("mlp.weights_in", "mlp.w12"), ("mlp.weights_out", "mlp.w3"),
                           ("embeddings.position_embeddings", "pos_embed"),
                           ("embeddings.patch_embeddings.projection", "patch_embed.proj"), ("embeddings.", "")):
            key = key.replace(new, first)
        original[key] = value
    image = torch.randn(1, 3, 70, 70, generator=torch.Generator().manual_seed(4))
    outputs = [conformance("forward", model="dinov2", config=config, weights=weights, inputs={"image": image})
               for weights in (old, model.state_dict(), {"dinov2." + key: value for key, value in old.items()}, original)]
    for output in outputs[1:]:
        assert torch.equal(output["last_hidden_state"], outputs[0]["last_hidden_state"])


def test_dinov2_in_bf16_is_close(conformance):
    config, model = dinov2_of("plain")
    image = torch.randn(2, 3, 70, 70, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        want = model(image).last_hidden_state
    outputs = conformance("forward", model="dinov2", config=config, weights=published(model.state_dict()),
                          inputs={"image": image}, dtype="bf16")
    assert_close(outputs["last_hidden_state"], want, FORWARD_BF16)
    assert violation(outputs["last_hidden_state"], want, FORWARD) > 1, "it ran in f32"


@pytest.mark.parametrize("change, expected", [
    (dict(hidden_act="relu"), "hidden_act"), (dict(num_attention_heads=5), "a multiple of num_attention_heads"),
    (dict(num_channels=4), "num_channels"), (dict(image_size=8), "at least one patch of 14, got 8"),
])
def test_bad_dinov2_configs(conformance, change, expected):
    config, model = dinov2_of("plain")
    assert expected in conformance("forward", model="dinov2", config=config | change,
                                   weights=published(model.state_dict()), inputs={"image": torch.zeros(1, 3, 70, 70)},
                                   expect_error=True)
