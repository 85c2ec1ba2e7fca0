"""AutoencoderKL against diffusers' own, live: moments, images and all parameter gradients, for both generations of
keys."""

import pytest
import torch
from closeness import (FORWARD, FORWARD_BF16, GRADIENT_BF16, assert_close, assert_equals, assert_gradients_close,
                       gradients_by_name, gradients_of, violation)
from conftest import MULTIPLIES_BF16
from diffusers import AutoencoderKL
from dit_torch import random_with_norms
from tile_seams import picture, seam_errors

TINY = dict(in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 3,
            up_block_types=["UpDecoderBlock2D"] * 3, block_out_channels=[16, 32, 32], layers_per_block=2, act_fn="silu",
            latent_channels=4, norm_num_groups=8, sample_size=32, scaling_factor=0.18215)
CONFIGS = {
    "tiny": TINY,
    "one level": TINY | dict(block_out_channels=[24], down_block_types=["DownEncoderBlock2D"],
                             up_block_types=["UpDecoderBlock2D"], layers_per_block=1),
    "16 channels, no quant_conv": TINY | dict(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False,
                                              shift_factor=0.1159),
    "no attention": TINY | dict(mid_block_add_attention=False, norm_num_groups=16),
}
OLD_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def model_of(config, seed=0):
    return random_with_norms(AutoencoderKL(**config), seed)


def inputs_of(config, height=16, width=24, seed=1):
    generator = torch.Generator().manual_seed(seed)
    factor, z = 2 ** (len(config["block_out_channels"]) - 1), config["latent_channels"]

    def normal(channels, factor):
        return torch.randn(2, channels, height // factor, width // factor, generator=generator)

    return {"image": normal(3, 1), "latent": normal(z, factor), "grad_moments": normal(2 * z, factor),
            "grad_image": normal(3, 1)}


def run_diffusers(model, inputs):
    moments = model.encode(inputs["image"]).latent_dist.parameters
    image = model.decode(inputs["latent"]).sample
    loss = (moments * inputs["grad_moments"]).sum() + (image * inputs["grad_image"]).sum()
    return dict(moments=moments, image=image), gradients_by_name(model, loss)


def forward(conformance, model, inputs, *flags, config=TINY, **more):
    return conformance("forward", *flags, model="autoencoder_kl", config=config,
                       **dict(weights=model.state_dict()) | more, inputs=inputs)


def old_generation(state, as_convolutions=False):
    """A state dict with the attention names (and optionally the shapes) of the first generation of files."""
    old = {}
    for key, value in state.items():
        for name, old_name in OLD_NAMES.items():
            if f".{name}." in key:
                key = key.replace(f".{name}.", f".{old_name}.")
                if as_convolutions and value.dim() == 2:
                    value = value[:, :, None, None]
        old[key] = value
    return old


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_outputs_and_gradients_equal_diffusers(conformance, config):
    model, inputs = model_of(config), inputs_of(config)
    outputs = forward(conformance, model, inputs, "--backward", config=config | {"_class_name": "AutoencoderKL"})
    assert_equals(outputs, run_diffusers(model, inputs))


@pytest.mark.parametrize("as_convolutions", [False, True])
def test_old_keys_give_the_same(conformance, as_convolutions):
    model, inputs = model_of(TINY), inputs_of(TINY)
    weights = old_generation(model.state_dict(), as_convolutions)
    assert "encoder.mid_block.attentions.0.proj_attn.weight" in weights
    outputs = forward(conformance, model, inputs, "--backward", weights=weights)
    want, gradients = run_diffusers(model, inputs)
    assert_equals(outputs, (want, old_generation(gradients, as_convolutions)))


def test_image_or_latent_alone(conformance):
    model, inputs = model_of(TINY), inputs_of(TINY)
    want, _ = run_diffusers(model, inputs)
    for given, made in (("image", "moments"), ("latent", "image")):
        outputs = forward(conformance, model, {given: inputs[given]})
        assert set(outputs) == {made}
        assert_close(outputs[made], want[made])


def test_bf16_is_close_to_f32(conformance):
    model, inputs = model_of(TINY), inputs_of(TINY)
    outputs = forward(conformance, model, inputs, "--backward", dtype="bf16")
    want = run_diffusers(model, inputs)
    assert_equals(outputs, want, FORWARD_BF16, GRADIENT_BF16, peak=False)
    if MULTIPLIES_BF16:
        assert violation(outputs["image"], want[0]["image"], FORWARD) > 1, "it ran in f32"


def shrink_activations_(model):
    """Keeps the input of every norm at a size at which eps is a good part of the variance."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_branch = any(part in name for part in ("conv_in", "conv1", "conv2", "to_out"))
            is_stream = any(part in name for part in ("conv_shortcut", "samplers"))
            if is_branch or is_stream and name.endswith("bias"):
                parameter.mul_(1e-3)
    return model


def test_norm_eps(conformance):
    """1e-5 for 1e-6 must show, in any one of the norms."""
    model, inputs = shrink_activations_(model_of(TINY)), inputs_of(TINY)
    inputs = {name: inputs[name] for name in ("image", "latent")}
    outputs = forward(conformance, model, inputs)

    def violation_of(part):
        if part == "encoder":
            return violation(outputs["moments"], model.encode(inputs["image"]).latent_dist.parameters, FORWARD)
        return violation(outputs["image"], model.decode(inputs["latent"]).sample, FORWARD)

    assert violation_of("encoder") <= 1 and violation_of("decoder") <= 1
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.eps = 1e-5
            assert violation_of(name.split(".")[0]) > 2, f"a wrong eps of {name} would not be noticed"
            module.eps = 1e-6


@pytest.mark.parametrize("change, expected", [
    (dict(down_block_types=["AttnDownEncoderBlock2D"] * 3), "AttnDownEncoderBlock2D; only DownEncoderBlock2D"),
    (dict(act_fn="mish"), "act_fn is mish"),
    (dict(block_out_channels=[16, 20]), "multiples of norm_num_groups"),
    (dict(latents_mean=[0.0]), "latents_mean"),
    (dict(scaling_factor=0), "scaling_factor > 0"),
    (dict(layers_per_block="2"), "expected layers_per_block to be an integer"),
    (dict(up_block_types=["UpDecoderBlock2D"]), "expected 3 up_block_types"),
])
def test_configs_that_are_not_built_are_refused(conformance, change, expected):
    assert expected in conformance("forward", model="autoencoder_kl", config=TINY | change,
                                   weights={"a": torch.zeros(1)}, inputs=inputs_of(TINY), expect_error=True)


def test_bad_weights_are_all_listed(conformance):
    weights = model_of(TINY).state_dict()
    del weights["encoder.conv_in.weight"], weights["quant_conv.bias"]
    weights["decoder.conv_in.bias"] = torch.zeros(3)
    message = conformance("forward", model="autoencoder_kl", config=TINY, weights=weights, inputs=inputs_of(TINY),
                          expect_error=True)
    for part in ("encoder.conv_in.weight", "quant_conv.bias", "decoder.conv_in.bias is (3), expected (32)"):
        assert part in message


@pytest.mark.parametrize("inputs, expected", [
    ({"image": torch.zeros(1, 3, 3, 16)}, "expected images (B, 3, H, W) with sides of at least 4, got (1, 3, 3, 16)"),
    ({"image": torch.zeros(1, 4, 16, 16)}, "expected images (B, 3, H, W)"),
    ({"image": torch.zeros(3, 16, 16)}, "expected image of shape (-1, -1, -1, -1)"),
    ({"image": torch.zeros(0, 3, 16, 16)}, "at least one sample"),
    ({"latent": torch.zeros(1, 3, 4, 4)}, "expected latents (B, 4, h, w), got (1, 3, 4, 4)"),
    ({"x": torch.zeros(1)}, "needs an image or a latent"),
])
def test_bad_inputs_are_one_line(conformance, inputs, expected):
    assert expected in conformance("forward", model="autoencoder_kl", config=TINY, weights=model_of(TINY).state_dict(),
                                   inputs=inputs, expect_error=True)


def assert_only_half_has_gradients(got, want, half):
    """`half` of the model against `want`; every other gradient is zero."""
    other = {"encoder": ("decoder.", "post_quant_conv."), "decoder": ("encoder.", "quant_conv.")}[half]
    assert all(gradient.abs().max() == 0 for key, gradient in got.items() if key.startswith(other))
    assert_gradients_close({key: gradient for key, gradient in got.items() if not key.startswith(other)},
                           {key: gradient for key, gradient in want.items() if not key.startswith(other)})


@pytest.mark.parametrize("height, width", [(18, 27), (4, 5), (7, 31)])
def test_odd_sizes(conformance, height, width):
    """Sizes that the factor does not divide are rounded down, as diffusers' convolutions do it."""
    model = model_of(TINY)
    image = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(4))
    moments = model.encode(image).latent_dist.parameters
    grad = torch.randn_like(moments)
    outputs = forward(conformance, model, {"image": image, "grad_moments": grad}, "--backward")
    assert_close(outputs["moments"], moments)
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad((moments * grad).sum(), parameters, allow_unused=True)
    assert_only_half_has_gradients(gradients_of(outputs), dict(zip(names, gradients)), "encoder")


def test_an_output_without_a_gradient_is_no_part_of_the_loss(conformance):
    model, inputs = model_of(TINY), inputs_of(TINY)
    for absent, half in (("grad_moments", "decoder"), ("grad_image", "encoder")):
        given = {name: tensor for name, tensor in inputs.items() if name != absent}
        outputs = forward(conformance, model, given, "--backward")
        zeroed = inputs | {absent: torch.zeros_like(inputs[absent])}
        want, gradients = run_diffusers(model, zeroed)
        for name, output in want.items():
            assert_close(outputs[name], output)
        assert_only_half_has_gradients(gradients_of(outputs), gradients, half)
    message = forward(conformance, model, {"image": inputs["image"]}, "--backward", expect_error=True)
    assert "grad_moments" in message


def test_absent_keys_are_diffusers_defaults(conformance):
    model = model_of({}, seed=2)
    image = torch.randn(1, 3, 8, 8)
    outputs = forward(conformance, model, {"image": image}, config={"_class_name": "AutoencoderKL"})
    assert_close(outputs["moments"], model.encode(image).latent_dist.parameters)
    nulls = {key: None for key in ("shift_factor", "latents_mean", "latents_std", "layers_per_block", "act_fn")}
    again = forward(conformance, model, {"image": image}, config=nulls)
    assert torch.equal(outputs["moments"], again["moments"])


def worst(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("height, width", [(64, 64), (100, 72), (44, 132)])
@pytest.mark.parametrize("config", ["tiny", "16 channels, no quant_conv"])
def test_tiles_equal_diffusers(conformance, config, height, width):
    """Tiles of 32 pixels that overlap by a quarter; the last ones are narrower, some than the overlap."""
    config = CONFIGS[config]
    model, inputs = model_of(config), inputs_of(config, height, width)
    model.enable_tiling()
    assert (model.tile_sample_min_size, model.tile_latent_min_size) == (32, 8)
    outputs = forward(conformance, model, inputs, config=config, tile=32, tile_stride=24)
    with torch.no_grad():
        moments, image = model.encode(inputs["image"]).latent_dist.parameters, model.decode(inputs["latent"]).sample
        model.disable_tiling()
        assert worst(model.decode(inputs["latent"]).sample, image) > 1e-2, "tiled and whole are to differ"
    assert_close(outputs["moments"], moments, 1e-4)
    assert_close(outputs["image"], image, 1e-4)


@torch.no_grad()
def test_no_line_is_seen_where_tiles_meet(conformance):
    """What a tile does not see changes its values, by as much at a seam as within; from pixel to pixel no more than anywhere."""
    model, image = model_of(TINY), picture(160)
    latent = model.encode(image).latent_dist.mode()
    run = lambda **tiles: forward(conformance, model, {"image": image, "latent": latent / latent.std()}, **tiles)
    whole, tiled = run(), run(tile=64, tile_stride=48)
    for name, scale, channels in (("moments", 4, 4), ("image", 1, 3)):
        error = seam_errors(whole[name][:, :channels], tiled[name][:, :channels], 48 // scale, 16 // scale)
        assert 0.05 < error["seam_rms"] < 0.6 and error["seam_rms"] < 1.6 * error["inside_rms"] and error["line"] < 1.3, error


def test_tiles_are_for_autoencoders_without_gradients(conformance):
    model, inputs = model_of(TINY), inputs_of(TINY)
    message = forward(conformance, model, inputs, "--backward", expect_error=True, tile=32, tile_stride=24)
    assert "--tile is not for autoencoder_kl" in message
