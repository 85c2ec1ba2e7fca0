"""AdamW, CAME, clipping and EMA against torch.optim, came-pytorch, torch.nn.utils and diffusers."""

import came_pytorch
import pytest
import torch
from diffusers.training_utils import EMAModel

STEPS = 5
SHAPES = {"blocks.0.attn.qkv.weight": (48, 16), "bias": (7,), "x_embedder.proj.weight": (8, 4, 2, 2), "scalar": ()}


def recording(scale=1.0, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    inputs = {f"param.{key}": torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    for step in range(STEPS):
        for key, shape in shapes.items():
            inputs[f"grad.{step}.{key}"] = scale * torch.randn(shape, generator=generator)
    return inputs


def steps_of(make_optimizer, inputs, before_step=lambda parameters: {}, seen=lambda tensor: tensor):
    """Weights after each step of an optimizer of torch by their names in Kiln's outputs. seen: the shape in which it
    sees a tensor; before_step(parameters) -> further outputs of the step."""
    parameters = {name.removeprefix("param."): torch.nn.Parameter(seen(value.clone())) for name, value in inputs.items()
                  if name.startswith("param.")}
    optimizer, want = make_optimizer(parameters.values()), {}
    for step in range(STEPS):
        for key, parameter in parameters.items():
            parameter.grad = seen(inputs[f"grad.{step}.{key}"].clone())
        want |= {f"{name}.{step}": value for name, value in before_step(parameters.values()).items()}
        optimizer.step()
        want |= {f"param.{step}.{key}": parameter.detach().clone().reshape(inputs[f"param.{key}"].shape)
                 for key, parameter in parameters.items()}
    return want


def torch_adamw(inputs, grad_clip=None, **options):
    def clip(parameters):
        if grad_clip is None:
            return {}
        return {"grad_norm": torch.nn.utils.clip_grad_norm_(parameters, grad_clip).reshape(1)}

    return steps_of(lambda parameters: torch.optim.AdamW(parameters, **options), inputs, clip)


def assert_moved_alike(got, want, inputs, tolerance=1e-4, kind="param"):
    """Displacements from the start agree: a relative check of the weights themselves would hide a wrong update."""
    for name, tensor in want.items():
        if name.startswith("grad_norm"):
            assert torch.allclose(got[name], tensor, rtol=1e-5)
            continue
        origin = inputs[f"{kind}." + name.split(".", 2)[2]]
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
    assert_moved_alike(got, want, inputs)


# Every rank, and every kind that one of the variants factors in its own way.
CAME_SHAPES = SHAPES | {"linear.weight": (33, 40), "row": (1, 24), "column": (24, 1), "table": (1, 6, 16), "cube": (3, 5, 7),
                        "depthwise.weight": (12, 1, 3, 3), "conv.weight": (6, 5, 3, 3), "pointwise.weight": (20, 12, 1, 1),
                        "strip.weight": (4, 3, 1, 5), "volume": (2, 3, 2, 3, 2)}


def as_sana_sees(tensor):
    """The Sana repository's CAME does to a tensor what came-pytorch does to this shape of it."""
    is_matrix = tensor.dim() == 2 or tensor.dim() == 4 and tensor.shape[2:] == (1, 1)
    return tensor.reshape(tensor.shape[:2] if is_matrix else -1)


def came_pytorch_steps(inputs, variant, grad_clip=None, **options):
    def clip(parameters):
        if grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
        return {}

    seen = as_sana_sees if variant == "sana" else lambda tensor: tensor
    return steps_of(lambda parameters: came_pytorch.CAME(parameters, **options), inputs, clip, seen)


CAME = {  # of gradients of some size
    "defaults": (1.0, dict(lr=1e-4)),
    "small gradients": (1e-6, dict(lr=1e-4)),
    "decay": (1.0, dict(lr=1e-2, betas=(0.9, 0.95, 0.99), weight_decay=0.1)),
    "large eps": (1.0, dict(lr=1e-3, betas=(0.5, 0.9, 0.8), eps=(1e-3, 1e-2), clip_threshold=0.3)),
}


@pytest.mark.parametrize("variant", [None, "sana"])
@pytest.mark.parametrize(("scale", "options"), CAME.values(), ids=CAME.keys())
def test_came(conformance, scale, options, variant):
    inputs = recording(scale, shapes=CAME_SHAPES)
    config = dict(type="came", steps=STEPS, **options) | ({"variant": variant} if variant else {})
    got = conformance("optim", config=config, inputs=inputs)
    assert_moved_alike(got, came_pytorch_steps(inputs, variant, **options), inputs, tolerance=2e-5)


def test_came_follows_the_clipped_gradient(conformance):
    inputs = recording(shapes=CAME_SHAPES)
    got = conformance("optim", config=dict(type="came", steps=STEPS, lr=1e-3, eps=[1e-4, 1e-4], grad_clip=0.01),
                      inputs=inputs)
    assert_moved_alike(got, came_pytorch_steps(inputs, None, grad_clip=0.01, lr=1e-3, eps=(1e-4, 1e-4)), inputs)


@pytest.mark.parametrize("options", [dict(lr=1e-3), dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)],
                         ids=["defaults", "decay"])
def test_adamw_8bit(conformance, options, monkeypatch):
    import bitsandbytes  # takes seconds
    import bitsandbytes.backends.cpu.ops as cpu

    def to_nearest(values, code, absmax_out, places_out, blocksize):
        """bitsandbytes finds the nearest value on GPUs; on CPUs by a table of 65536 places, beside it near midpoints."""
        padded = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % blocksize)).view(-1, blocksize)
        absmax_out.copy_(padded.abs().amax(1))
        places = torch.bucketize(padded / absmax_out[:, None], (code[1:] + code[:-1]) / 2).flatten()
        places_out.copy_(places[:values.numel()].view_as(places_out))

    monkeypatch.setattr(cpu, "_quant_blockwise_fp32_direct", to_nearest)
    # Whole blocks of 256, a last one that is shorter, and tensors too small for 8 bits.
    shapes = SHAPES | {"table": (64, 64), "linear.weight": (96, 101), "conv.weight": (20, 31, 3, 3), "small": (63, 65)}
    inputs = recording(shapes=shapes)
    options = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0) | options
    got = conformance("optim", config=dict(type="adamw-8bit", steps=STEPS, **options), inputs=inputs)
    want = steps_of(lambda parameters: bitsandbytes.optim.AdamW8bit(parameters, **options), inputs)
    assert_moved_alike(got, want, inputs, tolerance=2e-5)


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
    assert_moved_alike(got, want, inputs, tolerance=2e-3, kind="ema")


def test_bad_input_is_one_line(conformance):
    inputs = recording()
    for expected, config in (("adamw", dict(type="sgd", lr=1.0, steps=1)), ("lr", dict(type="adamw", steps=1)),
                             ("sana", dict(type="came", variant="adafactor", lr=1.0, steps=1)),
                             ("nesterov", dict(type="adamw", lr=1.0, nesterov=True, steps=1)),
                             ("grad.5", dict(type="adamw", lr=1.0, steps=6))):
        assert expected in conformance("optim", config=config, inputs=inputs, expect_error=True)


def test_null_is_the_default(conformance):
    inputs = recording()
    config = dict(type="adamw", lr=1e-3, steps=STEPS)
    got = conformance("optim", inputs=inputs,
                      config=config | dict(betas=None, eps=None, weight_decay=None, grad_clip=None, _note="any"))
    assert_moved_alike(got, torch_adamw(inputs, lr=1e-3, weight_decay=0), inputs)
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
