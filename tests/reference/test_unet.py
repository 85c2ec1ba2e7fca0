"""UNet2DConditionModel against diffusers' own, live: outputs and all parameter gradients, odd sizes, mixed precision,
and training steps."""

import pytest
import torch
from closeness import (FORWARD, FORWARD_BF16, GRADIENT_BF16, assert_close, assert_equals, gradients_by_name,
                       trained_by_torch, violation)
from conftest import FULL, matrix
from diffusers import DDPMScheduler, UNet2DConditionModel
from dit_torch import random_with_norms

TINY = dict(sample_size=16, in_channels=4, out_channels=4, block_out_channels=[16, 24, 32], layers_per_block=2,
            down_block_types=["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"], norm_num_groups=8,
            cross_attention_dim=20, attention_head_dim=4)
CONFIGS = {
    "SD 1.x": TINY,
    "SD 2.x": TINY | dict(attention_head_dim=[2, 3, 4], use_linear_projection=True, upcast_attention=True),
    "two levels, frequencies shifted": dict(
        sample_size=8, block_out_channels=[8, 16], layers_per_block=1, down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
        up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"], norm_num_groups=4, cross_attention_dim=12,
        attention_head_dim=2, freq_shift=1, flip_sin_to_cos=False, time_embedding_dim=24),
    "lists": TINY | dict(layers_per_block=[1, 2, 1], transformer_layers_per_block=[1, 2, 2],
                         attention_head_dim=[2, 2, 8], norm_eps=1e-6),
}


def model_of(config, seed=0):
    return random_with_norms(UNet2DConditionModel(**config), seed)


def inputs_of(config, height=10, width=14, batch=2, tokens=7, seed=1):
    """Latents of pictures whose sides are odd multiples of 8."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {"x": normal(batch, 4, height, width), "t": torch.tensor([3.0, 981.5, 500.0, 1.0][:batch]),
            "encoder_hidden_states": normal(batch, tokens, config["cross_attention_dim"]),
            "grad_output": normal(batch, 4, height, width)}


def run_diffusers(model, inputs):
    output = model(inputs["x"], inputs["t"], inputs["encoder_hidden_states"]).sample
    return output, gradients_by_name(model, (output * inputs["grad_output"]).sum())


def configs_and_sizes(parity):
    return [(name, height, width) for c, name in enumerate(CONFIGS) for s, (height, width) in enumerate([(10, 14), (9, 13), (5, 3)])
            if (c + s) % 2 == parity]


@pytest.mark.parametrize("name, height, width", matrix(configs_and_sizes(0), configs_and_sizes(1)))
def test_output_and_gradients_equal_diffusers(conformance, name, height, width):
    config = CONFIGS[name]
    model, inputs = model_of(config), inputs_of(config, height, width)
    outputs = conformance("forward", "--backward", model="unet2d_condition",
                          config=config | {"_class_name": "UNet2DConditionModel"}, weights=model.state_dict(),
                          inputs=inputs)
    assert_equals(outputs, run_diffusers(model, inputs))


def test_bf16_is_close_to_f32(conformance):
    model, inputs = model_of(TINY), inputs_of(TINY)
    outputs = conformance("forward", "--backward", model="unet2d_condition", config=TINY, weights=model.state_dict(),
                          inputs=inputs, dtype="bf16")
    want = run_diffusers(model, inputs)
    assert_equals(outputs, want, FORWARD_BF16, GRADIENT_BF16, peak=False)
    assert violation(outputs["output"], want[0], FORWARD) > 1, "it ran in f32"


def test_norm_eps(conformance):
    """A wrong eps must show, in any one of the norms: tried in all of them with --full, else in one of each kind at least."""
    model, inputs = model_of(TINY), inputs_of(TINY)
    with torch.no_grad():  # every norm's input has a size at which eps is a good part of the variance
        for name, parameter in model.named_parameters():
            is_branch = any(part in name for part in ("conv_in", "conv1", "conv2", "to_out", "net.2", "proj_in",
                                                      "time_emb_proj"))
            is_stream = any(part in name for part in ("conv_shortcut", "samplers", "proj_out"))
            if is_branch or is_stream and name.endswith("bias"):
                parameter.mul_(1e-3)
    del inputs["grad_output"]
    got = conformance("forward", model="unet2d_condition", config=TINY, weights=model.state_dict(), inputs=inputs)

    def worst():
        with torch.no_grad():
            return violation(got["output"], model(inputs["x"], inputs["t"], inputs["encoder_hidden_states"]).sample,
                             FORWARD)

    assert worst() <= 1
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, (torch.nn.GroupNorm, torch.nn.LayerNorm))]
    for name, module in norms if FULL else [*norms[::5], norms[-1]]:
        eps, module.eps = module.eps, {1e-5: 1e-6, 1e-6: 1e-5}[module.eps]
        assert worst() > 2, f"a wrong eps of {name} would not be noticed"
        module.eps = eps


@pytest.mark.parametrize("change, expected", [
    (dict(in_channels=9), "an inpainting U-Net"),
    (dict(down_block_types=["AttnDownBlock2D"] * 3), "AttnDownBlock2D; only CrossAttnDownBlock2D"),
    (dict(block_out_channels=[16, 20, 32]), "multiples of norm_num_groups"),
    (dict(attention_head_dim=[3, 3, 3]), "the number of heads"),
    (dict(up_block_types=["UpBlock2D"]), "expected 3 up_block_types"),
    (dict(class_embed_type="timestep"), "class_embed_type"),
    (dict(addition_embed_type="text_time"), "addition_embed_type"),
    (dict(act_fn="mish"), "act_fn"),
    (dict(attention_head_dim=[2, 3]), "expected attention_head_dim to have 3 entries"),
])
def test_configs_that_are_not_built_are_refused(conformance, change, expected):
    assert expected in conformance("forward", model="unet2d_condition", config=TINY | change,
                                   weights={"a": torch.zeros(1)}, inputs=inputs_of(TINY), expect_error=True)


def test_captions_of_unequal_length_are_refused(conformance):
    inputs = inputs_of(TINY)
    inputs["caption_mask"] = torch.ones(2, 7, dtype=torch.int64)
    inputs["caption_mask"][1, 5:] = 0
    message = conformance("forward", model="unet2d_condition", config=TINY, weights=model_of(TINY).state_dict(),
                          inputs=inputs, expect_error=True)
    assert "captions of equal length" in message


def test_init_draws_as_diffusers(conformance):
    """Every tensor has the bound, the spread and the constants of diffusers' own."""
    torch.manual_seed(0)
    want = UNet2DConditionModel(**TINY).state_dict()
    got = conformance("init", model="unet2d_condition", config=TINY, seed=3)
    assert set(got) == set(want)
    pooled = []
    for key, tensor in got.items():
        reference = want[key]
        assert tensor.shape == reference.shape
        if reference.unique().numel() == 1:
            assert torch.equal(tensor, reference), key
            continue
        fan_in = reference[0].numel() if reference.dim() > 1 else want[key.replace("bias", "weight")][0].numel()
        bound = fan_in ** -0.5
        assert tensor.abs().max() <= bound * 1.0001, key
        pooled.append(tensor.flatten() / bound)
    pooled = torch.cat(pooled)
    assert abs(pooled.var().item() - 1 / 3) < 5e-3 and abs(pooled.mean().item()) < 5e-3
    again = conformance("init", model="unet2d_condition", config=TINY, seed=3)
    assert all(torch.equal(got[key], again[key]) for key in got)


def unet_batches(count, batch, generator):
    """`count` recorded micro-batches for TINY."""
    return dict(x_start=torch.randn(count, batch, 4, 10, 6, generator=generator),
                noise=torch.randn(count, batch, 4, 10, 6, generator=generator),
                t=torch.randint(1, 1000, (count, batch), generator=generator),
                encoder_hidden_states=torch.randn(count, batch, 5, 20, generator=generator))


@pytest.mark.parametrize("prediction_type, snr_gamma, offset, perturbation",
                         [("epsilon", None, 0, 0), ("v_prediction", 5.0, 0, 0), ("epsilon", None, 0.1, 0.2)])
@pytest.mark.slow
def test_training_steps(conformance, prediction_type, snr_gamma, offset, perturbation):
    """Steps of AdamW against a PyTorch loop, whose noise is that of diffusers' training script."""
    model = model_of(TINY)
    steps, micro, batch = 20 if FULL else 8, 2, 2
    generator = torch.Generator().manual_seed(5)
    batches = unet_batches(steps * micro, batch, generator)
    batches["noise"] += offset * torch.randn(steps * micro, batch, 4, 1, 1, generator=generator)
    if perturbation:
        drawn = torch.randn(batches["noise"].shape, generator=generator)
        batches["input_noise"] = batches["noise"] + perturbation * drawn
    schedule = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type=prediction_type)
    loss = dict(type="ddpm", **schedule) | ({"snr_gamma": snr_gamma} if snr_gamma else {})
    config = dict(loss=loss, optimizer=dict(type="adamw", lr=1e-4, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
                  ema_decay=0.99, grad_accum=micro, grad_clip=1.0, lr_warmup_steps=4)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    got = conformance("train", model="unet2d_condition", model_config=TINY, weights=start, config=config,
                      batches_file=batches)

    scheduler = DDPMScheduler(**schedule)
    alphas = scheduler.alphas_cumprod

    def loss_of(row):
        x_0, noise, t = batches["x_start"][row], batches["noise"][row], batches["t"][row]
        x_t = scheduler.add_noise(x_0, batches["input_noise"][row] if perturbation else noise, t)
        target = noise if prediction_type == "epsilon" else scheduler.get_velocity(x_0, noise, t)
        each = (model(x_t, t.float(), batches["encoder_hidden_states"][row]).sample - target).pow(2).mean((1, 2, 3))
        if snr_gamma:
            snr = alphas[t] / (1 - alphas[t])
            each = each * snr.clamp(max=snr_gamma) / (snr + 1)
        return each.mean()

    losses, _ = trained_by_torch(list(model.parameters()), loss_of, steps, micro, clip=1.0, warmup=4, lr=1e-4,
                                 weight_decay=0.01)
    assert_close(got["losses"], losses, 1e-4)
    moved, apart = 0.0, 0.0
    for key, value in model.state_dict().items():
        moved += (value - start[key]).double().norm().item() ** 2
        apart += (got["param." + key] - value).double().norm().item() ** 2
    assert apart ** 0.5 <= 1e-2 * moved ** 0.5


def test_original_keys_give_the_same(conformance):
    """A single-file checkpoint, by diffusers' own table of keys: conversion gives back what was written."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
    model, inputs = model_of(TINY), inputs_of(TINY)
    original = original_state(model.state_dict(), TINY)
    back = convert_ldm_unet_checkpoint(dict(original), TINY)
    assert set(back) == set(model.state_dict())
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())
    original["first_stage_model.decoder.conv_in.weight"] = torch.zeros(1)
    original["model_ema.decay"] = torch.zeros(1)
    got = conformance("forward", model="unet2d_condition", config=TINY, weights=original, inputs=inputs)
    assert_close(got["output"], run_diffusers(model, inputs)[0])


RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
          "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}


def original_state(state, config):
    """A state dict under the original keys, block by block in the order of the original's lists."""
    layers, levels = config["layers_per_block"], len(config["block_out_channels"])
    blocks = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
              "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
              "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1",
              "mid_block.resnets.1": "middle_block.2"}
    number = 1
    for level in range(levels):
        for layer in range(layers):
            blocks[f"down_blocks.{level}.resnets.{layer}"] = f"input_blocks.{number}.0"
            blocks[f"down_blocks.{level}.attentions.{layer}"] = f"input_blocks.{number}.1"
            number += 1
        blocks[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
        number += 1
    number = 0
    for block in range(levels):
        has_attention = config["up_block_types"][block] == "CrossAttnUpBlock2D"
        for layer in range(layers + 1):
            blocks[f"up_blocks.{block}.resnets.{layer}"] = f"output_blocks.{number}.0"
            blocks[f"up_blocks.{block}.attentions.{layer}"] = f"output_blocks.{number}.1"
            number += 1
        blocks[f"up_blocks.{block}.upsamplers.0.conv"] = f"output_blocks.{number - 1}.{2 if has_attention else 1}.conv"
    original = {}
    for key, value in state.items():
        prefix = next(name for name in blocks if key.startswith(name + "."))
        rest = key.removeprefix(prefix + ".")
        part = rest.rsplit(".", 1)[0]
        if ".resnets." in prefix:
            rest = RESNET[part] + rest.removeprefix(part)
        original["model.diffusion_model." + blocks[prefix] + "." + rest] = value
    return original
