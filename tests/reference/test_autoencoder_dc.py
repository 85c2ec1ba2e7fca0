"""AutoencoderDC against diffusers' own, live: latents, images and all parameter gradients of its three variants."""

import pytest
import torch
from closeness import FORWARD_BF16, GRADIENT_BF16, assert_close, assert_equals, gradients_by_name, violation
from conftest import MULTIPLIES_BF16
from diffusers import AutoencoderDC
from dit_torch import random_with_norms
from tile_seams import picture, seam_errors

DC = 1e-4
WIDTHS = [16, 16, 32]
BLOCKS = ["ResBlock", "ResBlock", "EfficientViTBlock"]
SANA = dict(in_channels=3, latent_channels=8, attention_head_dim=8, encoder_block_types=BLOCKS, decoder_block_types=BLOCKS,
            encoder_block_out_channels=WIDTHS, decoder_block_out_channels=WIDTHS, encoder_layers_per_block=[1, 2, 1],
            decoder_layers_per_block=[2, 1, 2], encoder_qkv_multiscales=[[], [], [5]],
            decoder_qkv_multiscales=[[], [], [5]], upsample_block_type="interpolate", downsample_block_type="conv",
            decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407)
IN = SANA | dict(encoder_layers_per_block=[0, 1, 1], decoder_layers_per_block=[0, 1, 1],
                 encoder_qkv_multiscales=[[], [], []], decoder_qkv_multiscales=[[], [], []],
                 upsample_block_type="pixel_shuffle", downsample_block_type="pixel_unshuffle",
                 decoder_norm_types=["batch_norm", "batch_norm", "rms_norm"], decoder_act_fns=["relu", "relu", "silu"])
CONFIGS = {
    "sana": SANA,
    "in": IN,
    "mix": IN | dict(decoder_norm_types="rms_norm", decoder_act_fns="silu"),
    "two further scales, no shortcuts": SANA | dict(encoder_qkv_multiscales=[[], [], [3, 5]], encoder_out_shortcut=False,
                                                    decoder_in_shortcut=False, decoder_conv_act_fn="silu"),
}


def model_of(config, seed=0):
    model = random_with_norms(AutoencoderDC(**config), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model


def inputs_of(config, height=20, width=28, seed=1):
    """20 x 28 divided by 4 leaves odd sides; both attention forms of the reference are met on smaller ones."""
    generator = torch.Generator().manual_seed(seed)
    factor, z = 2 ** (len(config["encoder_block_out_channels"]) - 1), config["latent_channels"]

    def normal(channels, factor):
        return torch.randn(2, channels, height // factor, width // factor, generator=generator)

    return {"image": normal(3, 1), "latent": normal(z, factor), "grad_latent": normal(z, factor),
            "grad_image": normal(3, 1)}


def run_diffusers(model, inputs):
    latent = model.encode(inputs["image"]).latent
    image = model.decode(inputs["latent"]).sample
    loss = (latent * inputs["grad_latent"]).sum() + (image * inputs["grad_image"]).sum()
    return dict(latent=latent, image=image), gradients_by_name(model, loss)


@pytest.mark.parametrize("height, width", [(20, 28), (8, 4)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_outputs_and_gradients_equal_diffusers(conformance, config, height, width):
    model, inputs = model_of(config), inputs_of(config, height, width)
    outputs = conformance("forward", "--backward", model="autoencoder_dc",
                          config=config | {"_class_name": "AutoencoderDC"}, weights=model.state_dict(), inputs=inputs)
    assert_equals(outputs, run_diffusers(model, inputs), DC)


def test_bf16_is_close_to_f32(conformance):
    """With heads of the published size: of few features, a sum that the attention divides by may be nearly zero."""
    config = SANA | dict(attention_head_dim=32)
    model, inputs = model_of(config), inputs_of(config)
    outputs = conformance("forward", "--backward", model="autoencoder_dc", config=config, weights=model.state_dict(),
                          inputs=inputs, dtype="bf16")
    want = run_diffusers(model, inputs)
    assert_equals(outputs, want, FORWARD_BF16, GRADIENT_BF16, peak=False)
    if MULTIPLIES_BF16:
        assert violation(outputs["image"], want[0]["image"], DC) > 1, "it ran in f32"


@pytest.mark.parametrize("change, expected", [
    (dict(encoder_block_types="MBConv"), "MBConv; only EfficientViTBlock and ResBlock"),
    (dict(decoder_norm_types="layer_norm"), "decoder_norm_types holds layer_norm"),
    (dict(encoder_layers_per_block=[1, 1]), "encoder_layers_per_block to have 3 entries"),
    (dict(latent_channels=7), "expected 32 channels to be a multiple of 7"),
    (dict(scaling_factor=0.0), "scaling_factor > 0"),
])
def test_configs_that_are_not_built_are_refused(conformance, change, expected):
    assert expected in conformance("forward", model="autoencoder_dc", config=SANA | change,
                                   weights={"a": torch.zeros(1)}, inputs=inputs_of(SANA), expect_error=True)


@pytest.mark.parametrize("inputs, expected", [
    ({"image": torch.zeros(1, 3, 18, 16)}, "sides that are multiples of 4, got (1, 3, 18, 16)"),
    ({"latent": torch.zeros(1, 3, 4, 4)}, "expected latents (B, 8, h, w), got (1, 3, 4, 4)"),
    ({"x": torch.zeros(1)}, "needs an image or a latent"),
])
def test_bad_inputs_are_one_line(conformance, inputs, expected):
    assert expected in conformance("forward", model="autoencoder_dc", config=SANA, weights=model_of(SANA).state_dict(),
                                   inputs=inputs, expect_error=True)


@pytest.mark.parametrize("height, width", [(64, 64), (92, 72), (36, 124)])
@pytest.mark.parametrize("config", ["sana", "in"])
def test_tiles_equal_diffusers(conformance, config, height, width):
    """Tiles of 32 pixels that overlap by an eighth, as those of 512 do by default; the last ones are narrower."""
    config = CONFIGS[config]
    model, inputs = model_of(config), inputs_of(config, height, width)
    model.enable_tiling(32, 32, 28, 28)
    outputs = conformance("forward", model="autoencoder_dc", config=config | {"_class_name": "AutoencoderDC"}, weights=model.state_dict(),
                          inputs=inputs, tile=32, tile_stride=28)
    with torch.no_grad():
        assert_close(outputs["latent"], model.encode(inputs["image"]).latent, DC)
        assert_close(outputs["image"], model.decode(inputs["latent"]).sample, DC)


@torch.no_grad()
def test_no_line_is_seen_where_tiles_meet(conformance):
    model, image = model_of(SANA), picture(160)
    latent = model.encode(image).latent
    run = lambda **tiles: conformance("forward", model="autoencoder_dc", config=SANA | {"_class_name": "AutoencoderDC"},
                                      weights=model.state_dict(), inputs={"image": image, "latent": latent / latent.std()}, **tiles)
    whole, tiled = run(), run(tile=64, tile_stride=56)
    for name, scale in (("latent", 4), ("image", 1)):
        error = seam_errors(whole[name], tiled[name], 56 // scale, 8 // scale)
        assert 0.05 < error["seam_rms"] < 0.9 and error["line"] < 2.0, error
