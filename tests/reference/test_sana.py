"""Sana against diffusers' SanaTransformer2DModel, in diffusers' keys and in those of its repository, and a PyTorch
training loop on ragged captions."""

from unittest import mock

import pytest
import torch
from closeness import (FORWARD_BF16, GRADIENT_BF16, assert_close, assert_equals, assert_gradients_close,
                       assert_guided_samples, gradients_by_name, gradients_of, trained_by_torch)
from diffusers import SanaTransformer2DModel
from dit_torch import randomise_
from test_train import assert_moved_alike

SANA_GRADIENT = 1e-3  # the division of linear attention
TINY = dict(in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=8, num_layers=2,
            num_cross_attention_heads=2, cross_attention_head_dim=10, cross_attention_dim=24, caption_channels=20,
            sample_size=8, patch_size=1)
CONFIGS = {
    "tiny": TINY,
    "head of 32, wide": TINY | dict(num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
                                    num_cross_attention_heads=4, cross_attention_head_dim=16),
    "positions": TINY | dict(interpolation_scale=2.0, patch_size=2),
    "1.5": TINY | dict(qk_norm="rms_norm_across_heads"),
    "Sprint": TINY | dict(qk_norm="rms_norm_across_heads", guidance_embeds=True),
    "biases, odd ratio": TINY | dict(attention_bias=True, mlp_ratio=1.7, out_channels=6),
}


def random_sana(config, seed=0, **options):
    model = randomise_(SanaTransformer2DModel(**config), seed=seed, **options).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.caption_norm.weight.copy_(1 + 0.3 * torch.randn(model.caption_norm.weight.shape, generator=generator))
    return model


def inputs_of(config, batch=3, seed=1, height=6, width=10, mask=True):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    inputs = {"x": randn(batch, config["in_channels"], height, width), "t": torch.tensor([0.0, 17.25, 999.0][:batch]),
              "caption_embeds": randn(batch, 7, config["caption_channels"]),
              "grad_output": randn(batch, config["out_channels"], height, width)}
    if mask:
        inputs["caption_mask"] = torch.tensor([[1, 1, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0], [1] * 7])[:batch]
    if config.get("guidance_embeds"):
        inputs["guidance"] = torch.tensor([4.5, 0.1, 1.0][:batch])
    return inputs


def run_diffusers(model, inputs, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(inputs["x"], encoder_hidden_states=inputs["caption_embeds"], timestep=inputs["t"],
                       guidance=inputs.get("guidance"), encoder_attention_mask=inputs.get("caption_mask")).sample
    return output.detach(), gradients_by_name(model, (output * inputs["grad_output"]).sum())


def run_diffusers_in_f64(model, inputs):
    """Its linear attention calls .float(), which would round to f32."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return run_diffusers(model.double(), wide)


def terms_of_weight(norm, terms):
    """Adds up in `terms`, at backward, the absolute terms of the sum over tokens that is the gradient of a norm's weight."""
    def forward(module, _, output):
        normed = output.detach() / module.weight.detach()
        output.register_hook(lambda gradient: terms.append((gradient * normed).abs().flatten(0, -2).sum(0)))
    norm.register_forward_hook(forward)


def compare(conformance, config, model, inputs, run=run_diffusers):
    got = conformance("forward", "--backward", model="sana", config=config, weights=model.state_dict(), inputs=inputs)
    assert_equals(got, run(model, inputs), gradient_rtol=SANA_GRADIENT)


@pytest.mark.parametrize("mask", [True, False], ids=["ragged", "no mask"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_output_and_gradients_equal_diffusers(conformance, config, mask):
    model = random_sana(config)
    compare(conformance, dict(model.config), model, inputs_of(config, mask=mask))


@pytest.mark.parametrize("height, width", [(1, 1), (1, 9), (7, 2)])
def test_odd_pictures(conformance, height, width):
    """Against f64: of one token attention gives v whatever q is, and diffusers' own gradient of q is noise in f32."""
    compare(conformance, TINY, random_sana(TINY), inputs_of(TINY, height=height, width=width), run_diffusers_in_f64)


@pytest.mark.parametrize("head_dim", [1, 8, 20, 72])
def test_qk_norm_with_heads_of_any_size(conformance, head_dim):
    """Of self attention and of cross attention. Against f64, as small heads ask for: see the next test. Linear attention of
    one feature depends neither on the query nor on the keys' scale: the gradients of queries are zero, that of the keys' norm is
    what rounding leaves of terms that cancel."""
    config = TINY | dict(qk_norm="rms_norm_across_heads", attention_head_dim=head_dim, cross_attention_dim=3 * head_dim,
                         cross_attention_head_dim=head_dim)
    model, inputs = random_sana(config), inputs_of(config)
    outputs = conformance("forward", "--backward", model="sana", config=config, weights=model.state_dict(), inputs=inputs)
    terms = {}
    if head_dim == 1:
        for index, block in enumerate(model.transformer_blocks):
            terms_of_weight(block.attn1.norm_k, terms.setdefault(f"transformer_blocks.{index}.attn1.norm_k.weight", []))
    want, want_gradients = run_diffusers_in_f64(model, inputs)
    gradients = gradients_of(outputs)
    for key, (sums,) in terms.items():
        assert (gradients.pop(key).abs() <= 16 * torch.finfo(torch.float32).eps * sums).all(), key
        assert want_gradients.pop(key).abs().max() < 1e-6 * sums.max(), key
        assert not gradients.pop(key.replace("norm_k", "to_q")).any() and not gradients.pop(key.replace("norm_k", "norm_q")).any()
        del want_gradients[key.replace("norm_k", "to_q")], want_gradients[key.replace("norm_k", "norm_q")]
    assert_close(outputs["output"], want)
    assert_gradients_close(gradients, want_gradients, SANA_GRADIENT)


@pytest.mark.parametrize("heads, qk_norm", [("tiny", None), ("tiny", "rms_norm_across_heads"), ("head of 32, wide", None),
                                            ("head of 32, wide", "rms_norm_across_heads")])
def test_bf16_errs_no_more_than_autocast(conformance, heads, qk_norm):
    """In small heads all features of a token may be negative but for one that is nearly zero: its gradient, divided by
    it, is noise, here as under autocast."""
    config = CONFIGS[heads] | dict(num_layers=4, qk_norm=qk_norm)
    model, inputs = random_sana(config), inputs_of(config)
    outputs = conformance("forward", "--backward", model="sana", config=config, weights=model.state_dict(),
                          inputs=inputs, dtype="bf16")
    want, want_gradients = run_diffusers(model, inputs)
    theirs, their_gradients = run_diffusers(model, inputs, autocast=True)
    assert_close(outputs["output"], want, FORWARD_BF16)
    gradients = gradients_of(outputs)
    if heads != "tiny":
        assert_gradients_close(gradients, want_gradients, GRADIENT_BF16, peak=False)
    error = lambda got, want: ((got.float() - want).norm() / want.norm()).item()
    large = [key for key in want_gradients if want_gradients[key].abs().max() > 1e-3]  # others are zero in theory
    mean = lambda given: sum(error(given[key], want_gradients[key]) ** 2 for key in large) ** 0.5
    assert 0.1 * error(theirs, want) < error(outputs["output"], want) <= 1.5 * error(theirs, want)
    assert 0.1 * mean(their_gradients) < mean(gradients) <= 1.5 * mean(their_gradients)


def native(state):
    """The repository's keys of a diffusers state dict, or of gradients."""
    names = {"patch_embed.proj": "x_embedder.proj", "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
             "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2", "time_embed.linear": "t_block.1",
             "time_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
             "time_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
             "time_embed.guidance_embedder.linear_1": "cfg_embedder.mlp.0",
             "time_embed.guidance_embedder.linear_2": "cfg_embedder.mlp.2",
             "caption_projection.linear_1": "y_embedder.y_proj.fc1", "caption_projection.linear_2": "y_embedder.y_proj.fc2",
             "caption_norm": "attention_y_norm", "proj_out": "final_layer.linear",
             "attn1.to_out.0": "attn.proj", "attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj",
             "attn1.norm_q": "attn.q_norm", "attn1.norm_k": "attn.k_norm", "attn2.norm_q": "cross_attn.q_norm",
             "attn2.norm_k": "cross_attn.k_norm", "ff.conv_inverted": "mlp.inverted_conv.conv",
             "ff.conv_depth": "mlp.depth_conv.conv", "ff.conv_point": "mlp.point_conv.conv"}
    fused = {"attn1.to_q": "attn.qkv", "attn1.to_k": "attn.qkv", "attn1.to_v": "attn.qkv",
             "attn2.to_k": "cross_attn.kv_linear", "attn2.to_v": "cross_attn.kv_linear"}
    result = {}
    for key, tensor in state.items():
        block = ""
        if key.startswith("transformer_blocks."):
            index, key = key.removeprefix("transformer_blocks.").split(".", 1)
            block = f"blocks.{index}."
        if key == "scale_shift_table":
            result[(block or "final_layer.") + key] = tensor
            continue
        layer, suffix = key.rsplit(".", 1)
        if layer in fused:
            name = f"{block}{fused[layer]}.{suffix}"
            result[name] = torch.cat([result[name], tensor]) if name in result else tensor
        else:
            result[f"{block}{names[layer]}.{suffix}"] = tensor
    return result


@pytest.mark.parametrize("name", ["tiny", "Sprint"])
def test_the_repositorys_keys(conformance, name):
    config = CONFIGS[name]
    model, inputs = random_sana(config), inputs_of(config)
    weights = native(model.state_dict()) | {
        "y_embedder.y_embedding": torch.randn(300, 20), "pos_embed": torch.zeros(1, 64, 24),
        "logvar_linear.weight": torch.zeros(1, 24), "logvar_linear.bias": torch.zeros(1)}
    outputs = conformance("forward", "--backward", model="sana", config=config, weights=weights, inputs=inputs)
    want, want_gradients = run_diffusers(model, inputs)
    assert_equals(outputs, (want, native(want_gradients)), gradient_rtol=SANA_GRADIENT)


def test_missing_weights_are_named_in_the_files_keys(conformance):
    weights = native(random_sana(TINY).state_dict())
    del weights["blocks.1.attn.qkv.weight"]
    weights["blocks.0.attn.qkv.bias"] = torch.zeros(3)
    message = conformance("forward", model="sana", config=TINY, weights=weights, inputs=inputs_of(TINY),
                          expect_error=True)
    assert "missing keys: blocks.1.attn.qkv.weight" in message and "unknown keys: blocks.0.attn.qkv.bias" in message


def test_guidance_must_be_given(conformance):
    config = CONFIGS["Sprint"]
    inputs = inputs_of(config)
    del inputs["guidance"]
    message = conformance("forward", model="sana", config=config, weights=random_sana(config).state_dict(),
                          inputs=inputs, expect_error=True)
    assert "guidance" in message


def test_init_has_the_distribution_of_the_repository(conformance):
    config = TINY | dict(num_attention_heads=8, cross_attention_dim=64, guidance_embeds=True,
                         qk_norm="rms_norm_across_heads", num_cross_attention_heads=4, cross_attention_head_dim=16)
    weights = conformance("init", model="sana", config=config, seed=3)
    want = SanaTransformer2DModel(**config).state_dict()
    assert {key: value.shape for key, value in weights.items()} == {key: value.shape for key, value in want.items()}
    for key, value in weights.items():
        fan_in = value[0].numel() if value.dim() > 1 else 0
        if key == "caption_norm.weight":
            assert torch.equal(value, torch.full_like(value, 0.01))
        elif "norm_" in key:
            assert torch.equal(value, torch.ones_like(value))
        elif "guidance_embedder.linear_2" in key:
            assert not value.any()
        elif key.endswith("bias"):
            is_convolution = "conv" in key or "patch_embed" in key
            assert bool(value.any()) == is_convolution, key
        else:
            if "scale_shift_table" in key:
                std = 64 ** -0.5
            elif "time_embed" in key or "caption_projection" in key:
                std = 0.02
            elif "ff.conv" in key:
                std = (1 / fan_in) ** 0.5 / 3 ** 0.5
            else:  # xavier, of the fused projection where the repository has one
                rows = value.shape[0] * (3 if "attn1.to_" in key and "out" not in key else
                                         2 if "attn2.to_k" in key or "attn2.to_v" in key else 1)
                std = (6 / (rows + fan_in)) ** 0.5 / 3 ** 0.5
            assert abs(value.std().item() / std - 1) < 6 / value.numel() ** 0.5, key


def sana_levels(t, shift=3.0):
    plain = torch.linspace(0, 0.999, 1000, dtype=torch.float64)
    sigmas = shift * plain / (1 + (shift - 1) * plain)
    return sigmas[t].float(), (sigmas * 1000).long()[t].float()


def sana_loss(model, batches, step):
    """The squared error of the predicted velocity."""
    row = {key: value[step] for key, value in batches.items()}
    sigma, timestep = sana_levels(row["t"])
    level = sigma.view(-1, 1, 1, 1)
    output = model((1 - level) * row["x_start"] + level * row["noise"], encoder_hidden_states=row["caption_embeds"],
                   timestep=timestep, encoder_attention_mask=row["caption_mask"]).sample
    return (output - (row["noise"] - row["x_start"])).square().mean()


def test_twenty_steps_on_ragged_captions_equal_torch(conformance):
    steps, batch, adamw = 20, 4, dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.03)
    model = random_sana(TINY, scale=0.7)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    shape = (steps, batch, 4, 6, 10)
    lengths = torch.randint(1, 8, (steps, batch), generator=generator)
    t = ((torch.randn(shape[:2], generator=generator)).sigmoid() * 1000).long()  # logit-normal
    batches = dict(x_start=torch.randn(shape, generator=generator), noise=torch.randn(shape, generator=generator), t=t,
                   caption_embeds=torch.randn(steps, batch, 7, 20, generator=generator),
                   caption_mask=(torch.arange(7) < lengths[..., None]).long())
    got = conformance("train", model="sana", model_config=TINY, weights=start, batches_file=batches,
                      config=dict(loss=dict(type="flow", mode="sana", shift=3.0),
                                  optimizer=dict(type="adamw", **adamw), grad_clip=0.1, ema_decay=0.9))
    losses, _ = trained_by_torch(list(model.parameters()), lambda step: sana_loss(model, batches, step), steps,
                                 clip=0.1, **adamw)
    assert_close(got["losses"], losses, 1e-4)
    keys = [key for key, _ in model.named_parameters() if not key.endswith("attn2.to_k.bias")]
    trained = {key: value.detach() for key, value in model.named_parameters() if key in keys}
    assert_moved_alike({key: got[f"param.{key}"] for key in keys}, trained, {key: start[key] for key in keys}, 1e-2)


@pytest.mark.parametrize("sampler", ["flow_euler", "dpmpp"])
def test_samples_with_guidance_equal_torch(conformance, sampler):
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
    model = random_sana(TINY)
    if sampler == "flow_euler":
        settings = dict(shift=3.0)
        scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    else:
        settings = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
        scheduler = DPMSolverMultistepScheduler(**settings)
    halves = [inputs_of(TINY, batch=2, seed=seed) for seed in (4, 5)]
    predict = lambda x, t, captions, mask: model(x, encoder_hidden_states=captions, timestep=t,
                                                 encoder_attention_mask=mask).sample
    assert_guided_samples(conformance, "sana", TINY, model, halves, sampler, scheduler, settings, predict, steps=6)
