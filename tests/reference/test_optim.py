"""AdamW, clipping and EMA against torch.optim, torch.nn.utils and diffusers."""

import pytest
import torch
from diffusers.training_utils import EMAModel

STEPS = 5
SHAPES = {"blocks.0.attn.qkv.weight": (48, 16), "bias": (7,), "x_embedder.proj.weight": (8, 4, 2, 2), "scalar": ()}


def recording(scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = {f"param.{key}": torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    for step in range(STEPS):
        for key, shape in SHAPES.items():
            inputs[f"grad.{step}.{key}"] = scale * torch.randn(shape, generator=generator)
    return inputs


def torch_adamw(inputs, grad_clip=None, **options):
    parameters = {key: torch.nn.Parameter(inputs[f"param.{key}"].clone()) for key in SHAPES}
    optimizer = torch.optim.AdamW(parameters.values(), **options)
    want = {}
    for step in range(STEPS):
        for key, parameter in parameters.items():
            parameter.grad = inputs[f"grad.{step}.{key}"].clone()
        if grad_clip is not None:
            want[f"grad_norm.{step}"] = torch.nn.utils.clip_grad_norm_(parameters.values(), grad_clip).reshape(1)
        optimizer.step()
        want |= {f"param.{step}.{key}": parameter.detach().clone() for key, parameter in parameters.items()}
    return want


def assert_moved_alike(got, want, start, tolerance=1e-4):
    """Displacements from the start agree: a relative check of the weights themselves would hide a wrong update."""
    for name, tensor in want.items():
        if name.startswith("grad_norm"):
            assert torch.allclose(got[name], tensor, rtol=1e-5)
            continue
        origin = start(name)
        moved = (tensor - origin).norm()
        assert moved > 0, name
        assert (got[name] - tensor).norm() <= tolerance * moved, name


ADAMW = {
    "DiT": dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
    "decay": dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1),
    "large eps": dict(lr=1e-3, betas=(0.5, 0.9), eps=1.0, weight_decay=0.01),
}


@pytest.mark.parametrize("grad_clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("options", ADAMW.values(), ids=ADAMW.keys())
def test_adamw(conformance, options, grad_clip):
    inputs = recording()
    config = dict(type="adamw", steps=STEPS, **options)
    if grad_clip is not None:
        config["grad_clip"] = grad_clip
    got = conformance("optim", config=config, inputs=inputs)
    want = torch_adamw(inputs, grad_clip, **options)
    assert set(want) <= set(got)
    assert_moved_alike(got, want, lambda name: inputs["param." + name.split(".", 2)[2]])


@pytest.mark.parametrize("schedule", [None, "diffusers"])
@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_ema(conformance, decay, schedule):
    generator = torch.Generator().manual_seed(1)
    inputs = {f"ema.{key}": torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    for step in range(STEPS):
        inputs |= {f"param.{step}.{key}": torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    config = dict(type="ema", decay=decay, steps=STEPS) | ({"schedule": schedule} if schedule else {})
    got = conformance("optim", config=config, inputs=inputs)

    average = [torch.nn.Parameter(inputs[f"ema.{key}"].clone()) for key in SHAPES]
    model = EMAModel(average, decay=decay)
    want = {}
    for step in range(STEPS):
        weights = [torch.nn.Parameter(inputs[f"param.{step}.{key}"]) for key in SHAPES]
        if schedule == "diffusers":
            model.step(weights)
        else:
            for shadow, weight in zip(model.shadow_params, weights):
                shadow.mul_(decay).add_(weight.detach(), alpha=1 - decay)
        want |= {f"ema.{step}.{key}": shadow.clone() for key, shadow in zip(SHAPES, model.shadow_params)}
    assert_moved_alike(got, want, lambda name: inputs["ema." + name.split(".", 2)[2]], tolerance=2e-3)


def test_bad_input_is_one_line(conformance):
    inputs = recording()
    assert "adamw" in conformance("optim", config=dict(type="sgd", lr=1.0, steps=1), inputs=inputs, expect_error=True)
    assert "came" in conformance("optim", config=dict(type="came", lr=1.0, steps=1), inputs=inputs, expect_error=True)
    assert "lr" in conformance("optim", config=dict(type="adamw", steps=1), inputs=inputs, expect_error=True)
    assert "nesterov" in conformance("optim", config=dict(type="adamw", lr=1.0, nesterov=True, steps=1), inputs=inputs,
                                     expect_error=True)
    assert "grad.5" in conformance("optim", config=dict(type="adamw", lr=1.0, steps=6), inputs=inputs,
                                   expect_error=True)


def test_null_is_the_default(conformance):
    inputs = recording()
    config = dict(type="adamw", lr=1e-3, steps=STEPS)
    got = conformance("optim", inputs=inputs,
                      config=config | dict(betas=None, eps=None, weight_decay=None, grad_clip=None, _note="any"))
    assert_moved_alike(got, torch_adamw(inputs, lr=1e-3, weight_decay=0),
                       lambda name: inputs["param." + name.split(".", 2)[2]])
    assert not any(name.startswith("grad_norm") for name in got)


@pytest.mark.parametrize("config, expected", [
    (dict(type="adamw", lr=1.0), "expected steps to be an integer, got none"),
    (dict(type="adamw", lr=1.0, steps="3"), "expected steps to be an integer, got \"3\""),
    (dict(type="adamw", lr=1.0, steps=2.5), "expected steps to be an integer"),
    (dict(type="adamw", lr=1.0, steps=0), "steps of at least 1"),
    (dict(type="adamw", lr=None, steps=1), "expected lr to be a number, got none"),
    (dict(type="adamw", lr=1.0, steps=1, grad_clip="x"), "expected grad_clip to be a number"),
    (dict(type="adamw", lr=1.0, steps=1, grad_clip=-1), "expected grad_clip above 0"),
    (dict(type="adamw", lr=1.0, steps=1, betas=[0.9]), "betas expects 2 numbers"),
    (dict(type="adamw", lr=1.0, steps=1, betas=["a", "b"]), "expected betas to be a list of numbers"),
    (dict(type="adamw", lr=1.0, steps=1, eps="tiny"), "expected eps to be a number"),
    (dict(type="adamw", lr=1.0, steps=1, weight_decay=True), "expected weight_decay to be a number"),
    (dict(type=["adamw"], lr=1.0, steps=1), "expected type to be a string"),
    (dict(type="ema", steps=1), "expected decay to be a number, got none"),
    (dict(type="ema", decay="0.9", steps=1), "expected decay to be a number"),
    (dict(type="ema", decay=2, steps=1), "expected decay in [0, 1]"),
    (dict(type="ema", decay=0.9, schedule="cosine", steps=1), "constant, diffusers"),
])
def test_wrong_configs_name_key_and_file(conformance, config, expected):
    inputs = recording() | {"ema.a": torch.zeros(1), "param.0.a": torch.zeros(1)}
    message = conformance("optim", config=config, inputs=inputs, expect_error=True)
    assert expected in message and "-config.json)" in message, message


def test_a_gradient_of_another_shape_is_named(conformance):
    inputs = recording() | {"grad.0.bias": torch.zeros(8)}
    message = conformance("optim", config=dict(type="adamw", lr=1.0, steps=1), inputs=inputs, expect_error=True)
    assert "bias expects shape [7], got [8]" in message
