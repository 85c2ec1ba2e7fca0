"""PixArt against diffusers' PixArtTransformer2DModel, a compact PyTorch PixArt for what diffusers lacks, and a PyTorch
training loop on dropped, ragged captions."""

import pytest
import torch
from closeness import (FORWARD, FORWARD_BF16, GRADIENT_BF16, assert_close, assert_equals, assert_guided_samples,
                       gradients_by_name, trained_by_torch, violation)
from diffusers import PixArtTransformer2DModel
from dit_torch import randomise_
from pixart_torch import PixArt
from test_train import IddpmLoss, assert_moved_alike, noised

TINY = dict(variant="PixArtMS", input_size=8, patch_size=2, in_channels=4, hidden_size=48, depth=2, num_heads=3,
            mlp_ratio=4.0, pred_sigma=True, caption_channels=20, pe_interpolation=1.0, model_max_length=6)
COMPRESSED = dict(sampling="conv", scale_factor=2, kv_compress_layer=[1])
CONFIGS = {
    "tiny": TINY,
    "one size, other positions": TINY | dict(variant="PixArt", pe_interpolation=0.5),
    "odd widths": TINY | dict(hidden_size=36, num_heads=2, depth=3, mlp_ratio=2.6, in_channels=3, pe_interpolation=2.0),
    "head of 72, no sigma": TINY | dict(hidden_size=144, num_heads=2, pred_sigma=False),
    "qk norm": TINY | dict(qk_norm=True),
    "compression": TINY | dict(kv_compress_config=COMPRESSED),
    "compression by 3, strided, qk norm": TINY | dict(
        qk_norm=True, kv_compress_config=dict(sampling="uniform", scale_factor=2, kv_compress_layer=[0, 1])),
    "compression by averages": TINY | dict(kv_compress_config=COMPRESSED | dict(sampling="ave")),
    "compression of every second": TINY | dict(kv_compress_config=COMPRESSED | dict(sampling="uniform_every")),
    "micro-conditions": TINY | dict(micro_condition=True),
}


def inputs_of(config, batch=3, seed=1, mask="ragged", height=None, width=None):
    """Pictures that are not square where the model allows it; captions with a gap, one row and all rows."""
    generator = torch.Generator().manual_seed(seed)
    size, rows, channels = config["input_size"], config["model_max_length"], config["in_channels"]
    height, width = (size, size) if config["variant"] == "PixArt" else (height or 12, width or size)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    inputs = {
        "x": randn(batch, channels, height, width),
        "t": torch.tensor([0.0, 17.25, 999.0][:batch]),
        "caption_embeds": randn(batch, rows, config["caption_channels"]),
        "grad_output": randn(batch, channels * (2 if config["pred_sigma"] else 1), height, width),
    }
    if mask == "ragged":
        inputs["caption_mask"] = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0], [1] * 6])[:batch, :rows]
    if config.get("micro_condition"):
        inputs["img_hw"] = torch.tensor([[1024.0, 768.0], [333.0, 2048.0], [512.0, 512.0]])[:batch]
        inputs["aspect_ratio"] = torch.tensor([[1.33], [0.25], [1.0]])[:batch]
    return inputs


def run_torch(model, inputs, autocast=False):
    """Output and the gradient of every trainable parameter."""
    arguments = {key: value for key, value in inputs.items() if key != "grad_output"}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**arguments)
    return output.detach(), gradients_by_name(model, (output * inputs["grad_output"]).sum())


def compare(conformance, config, model, inputs, name="pixart", run=run_torch):
    got = conformance("forward", "--backward", model=name, config=config, weights=model.state_dict(), inputs=inputs)
    assert_equals(got, run(model, inputs))


def random_pixart(config, seed=0):
    model = randomise_(PixArt(**config), seed=seed).eval()
    model.y_embedder.y_embedding.normal_()
    return model


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_output_and_gradients_equal_torch(conformance, config):
    compare(conformance, config, random_pixart(config), inputs_of(config))


@pytest.mark.parametrize("change", [dict(drop=torch.tensor([1, 0, 1])), dict(caption_mask=None),
                                    dict(caption_mask=torch.tensor([[1] * 6, [0] * 6, [1, 0, 0, 0, 0, 0]])),
                                    dict(drop=torch.tensor([1, 1, 1]), caption_mask=None)],
                         ids=["dropped", "no mask", "a caption without tokens", "all dropped, no mask"])
def test_captions(conformance, change):
    inputs = {key: value for key, value in (inputs_of(TINY) | change).items() if value is not None}
    compare(conformance, TINY, random_pixart(TINY), inputs)


@pytest.mark.parametrize("name", ["tiny", "compression", "qk norm", "micro-conditions"])
def test_bf16_errs_no_more_than_autocast(conformance, name):
    config = CONFIGS[name] | dict(depth=4)
    model, inputs = random_pixart(config), inputs_of(config)
    outputs = conformance("forward", "--backward", model="pixart", config=config, weights=model.state_dict(),
                          inputs=inputs, dtype="bf16")
    want, want_gradients = run_torch(model, inputs)
    theirs, _ = run_torch(model, inputs, autocast=True)
    assert_equals(outputs, (want, want_gradients), FORWARD_BF16, GRADIENT_BF16, peak=False)
    error = lambda got: ((got.float() - want).norm() / want.norm()).item()
    assert 0.1 * error(theirs) < error(outputs["output"]) <= 1.5 * error(theirs)


def test_weights_of_another_size_of_picture_fit(conformance):
    """A multi-size model computes its positions: the table of the file is of no consequence."""
    model, inputs = random_pixart(TINY), inputs_of(TINY)
    weights = dict(model.state_dict()) | {"pos_embed": torch.randn(1, 64, 48)}
    output = conformance("forward", model="pixart", config=TINY, weights=weights, inputs=inputs)["output"]
    assert_close(output, run_torch(model, inputs)[0])
    one_size = TINY | dict(variant="PixArt")
    message = conformance("forward", model="pixart", config=one_size, weights=weights, inputs=inputs_of(one_size),
                          expect_error=True)
    assert "pos_embed is (1, 64, 48), expected (1, 16, 48)" in message


def test_training_checkpoint_nests_its_weights(conformance, tmp_path):
    model, inputs = random_pixart(TINY), inputs_of(TINY)
    path = tmp_path / "epoch_1_step_10.pth"
    torch.save({"state_dict": model.state_dict(), "epoch": 1, "step": 10}, path)
    output = conformance("forward", model="pixart", config=TINY, weights=path, inputs=inputs)["output"]
    assert_close(output, run_torch(model, inputs)[0])


# --- diffusers ---

DIFFUSERS = dict(num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
                 cross_attention_dim=48, sample_size=8, patch_size=2, caption_channels=20,
                 use_additional_conditions=False)
DIFFUSERS_CONFIGS = {
    "sigma": DIFFUSERS,
    "interpolated positions": DIFFUSERS | dict(interpolation_scale=2, out_channels=4),
    "additional conditions": DIFFUSERS | dict(use_additional_conditions=True),
    "head of 72": DIFFUSERS | dict(num_attention_heads=2, attention_head_dim=72, cross_attention_dim=144),
    "captions as they come": DIFFUSERS | dict(caption_channels=None),
    "norm eps": DIFFUSERS | dict(norm_eps=1e-5),
}


def run_diffusers(model, inputs):
    conditions = dict(resolution=None, aspect_ratio=None)
    if "img_hw" in inputs:
        conditions = dict(resolution=inputs["img_hw"], aspect_ratio=inputs["aspect_ratio"])
    output = model(inputs["x"], encoder_hidden_states=inputs["caption_embeds"], timestep=inputs["t"],
                   added_cond_kwargs=conditions, encoder_attention_mask=inputs.get("caption_mask")).sample
    return output.detach(), gradients_by_name(model, (output * inputs["grad_output"]).sum())


def diffusers_inputs(config):
    return inputs_of(dict(variant="PixArtMS", input_size=8, model_max_length=6, in_channels=4,
                          caption_channels=config["caption_channels"] or config["cross_attention_dim"],
                          pred_sigma=config["out_channels"] == 8,
                          micro_condition=config["use_additional_conditions"]))


@pytest.mark.parametrize("config", DIFFUSERS_CONFIGS.values(), ids=DIFFUSERS_CONFIGS.keys())
def test_output_and_gradients_equal_diffusers(conformance, config):
    model = randomise_(PixArtTransformer2DModel(**config)).eval()
    compare(conformance, dict(model.config), model, diffusers_inputs(config), "pixart_diffusers", run_diffusers)


@pytest.mark.parametrize("norm_eps", [1e-6, 1e-3])
def test_norm_eps_shows_when_activations_are_small(conformance, norm_eps):
    """A picture of one patch, whose bias cancels the corner's position but for 1e-3."""
    model = randomise_(PixArtTransformer2DModel(**(DIFFUSERS | dict(norm_eps=norm_eps)))).eval()
    inputs = diffusers_inputs(DIFFUSERS)
    with torch.no_grad():
        table = torch.zeros(1, 48)
        table[:, 12:24] = table[:, 36:] = 1  # the corner's: sin 0, cos 0
        model.pos_embed.proj.bias.copy_(-table[0] * (1 - 1e-3))
        inputs |= {"x": torch.zeros(3, 4, 2, 2), "grad_output": torch.randn(3, 8, 2, 2)}
    outputs = conformance("forward", model="pixart_diffusers", config=dict(model.config),
                          weights=model.state_dict(), inputs=inputs)
    assert_close(outputs["output"], run_diffusers(model, inputs)[0])
    other = PixArtTransformer2DModel(**(DIFFUSERS | dict(norm_eps=2 * norm_eps))).eval()
    other.load_state_dict(model.state_dict())
    assert violation(outputs["output"], run_diffusers(other, inputs)[0], FORWARD) > 10


def test_drop_needs_a_null_caption(conformance):
    model = randomise_(PixArtTransformer2DModel(**DIFFUSERS)).eval()
    message = conformance("forward", model="pixart_diffusers", config=dict(model.config), weights=model.state_dict(),
                          inputs=diffusers_inputs(DIFFUSERS) | {"drop": torch.tensor([1, 0, 0])}, expect_error=True)
    assert "null caption" in message


@pytest.mark.parametrize("change, expected", [
    (dict(norm_type="ada_norm"), "norm_type"),
    (dict(cross_attention_dim=50), "expected cross_attention_dim 48"),
    (dict(out_channels=5), "expected out_channels 4 or 8, got 5"),
    (dict(activation="relu"), "activation"),
])
def test_bad_diffusers_configs_name_the_key(conformance, change, expected):
    assert expected in conformance("forward", model="pixart_diffusers", config=DIFFUSERS | change,
                                   weights={"a": torch.zeros(1)}, inputs=diffusers_inputs(DIFFUSERS), expect_error=True)


# --- init ---

def test_init_has_the_distribution_of_the_repository(conformance):
    config = TINY | dict(hidden_size=96, micro_condition=True, qk_norm=True, kv_compress_config=COMPRESSED)
    weights = conformance("init", model="pixart", config=config, seed=3)
    want = PixArt(**config).state_dict()
    assert {key: value.shape for key, value in weights.items()} == {key: value.shape for key, value in want.items()}
    assert_close(weights["pos_embed"], want["pos_embed"], 1e-6)
    for key, value in weights.items():
        shape, count = value.shape, value.numel()
        if key == "pos_embed":
            continue
        if key == "x_embedder.proj.bias":
            assert value.abs().max() <= 0.25 and value.any()  # U(+-1 / sqrt(16))
        elif key == "blocks.1.attn.sr.weight":
            assert torch.equal(value, torch.full_like(value, 0.25))
        elif "norm.weight" in key:
            assert torch.equal(value, torch.ones_like(value))
        elif key.endswith("bias") or "cross_attn.proj" in key or key == "final_layer.linear.weight":
            assert not value.any(), key
        else:
            if "scale_shift_table" in key:
                std = 96 ** -0.5
            elif "y_embedding" in key:
                std = 20 ** -0.5
            elif "embedder" in key and "x_embedder" not in key or "t_block" in key:
                std = 0.02
            else:
                fan_in = value[0].numel()
                bound = (6 / (shape[0] + fan_in)) ** 0.5
                assert value.abs().max() <= bound, key
                std = bound / 3 ** 0.5
            assert abs(value.std().item() / std - 1) < 6 / count ** 0.5, key


# --- training ---

def comparable(key, tensor):
    """Without the key biases, whose gradients are zero in theory: Adam makes full-size steps of their noise."""
    if key.endswith("attn.qkv.bias"):
        q, _, v = tensor.chunk(3)
        return torch.cat([q, v])
    return tensor.chunk(2)[1] if key.endswith("kv_linear.bias") else tensor


def test_twenty_steps_on_dropped_ragged_captions_equal_torch(conformance):
    steps, batch, adamw = 20, 4, dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.03)
    config = TINY | dict(qk_norm=True)
    model = randomise_(PixArt(**config), scale=0.5)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    shape = (steps, batch, 4, 8, 12)
    lengths = torch.randint(0, 7, (steps, batch), generator=generator)
    batches = dict(x_start=torch.randn(shape, generator=generator), noise=torch.randn(shape, generator=generator),
                   t=torch.randint(1, 1000, shape[:2], generator=generator),
                   caption_embeds=torch.randn(steps, batch, 6, 20, generator=generator),
                   caption_mask=(torch.arange(6) < lengths[..., None]).long(),
                   drop=(torch.rand(shape[:2], generator=generator) < 0.3).long())
    loss = dict(type="iddpm", beta_schedule="linear", learn_sigma=True, rescale_learned_sigmas=False,
                num_train_timesteps=1000)
    got = conformance("train", model="pixart", model_config=config, weights=start,
                      config=dict(loss=loss, optimizer=dict(type="adamw", **adamw), grad_clip=0.5, ema_decay=0.9),
                      batches_file=batches)

    def loss_of(step):
        row = {key: value[step] for key, value in batches.items()}
        output = model(noised(row["x_start"], row["noise"], row["t"]), row["t"].float(), row["caption_embeds"],
                       row["caption_mask"], row["drop"])
        return IddpmLoss.apply(output, row["x_start"], row["noise"], row["t"])

    losses, _ = trained_by_torch(list(model.parameters()), loss_of, steps, clip=0.5, **adamw)
    assert_close(got["losses"], losses, 1e-4)
    trained = {key: comparable(key, value.detach()) for key, value in model.named_parameters()}
    moved = {key: comparable(key, got[f"param.{key}"]) for key in trained}
    assert_moved_alike(moved, trained, {key: comparable(key, start[key]) for key in trained}, 1e-2)


# --- sampling ---

def test_samples_with_guidance_equal_torch(conformance):
    """The conditional and the unconditional half have captions and masks of their own; sigma is dropped first."""
    from diffusers import DDIMScheduler
    model, settings = random_pixart(TINY), dict(clip_sample=False)
    halves = [inputs_of(TINY, batch=2, seed=seed) for seed in (4, 5)]
    assert_guided_samples(conformance, "pixart", TINY, model, halves, "ddim", DDIMScheduler(**settings), settings,
                          lambda x, t, *captions: model(x, t, *captions)[:, :4], steps=5)
