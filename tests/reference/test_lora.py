"""LoRA adapters in PEFT's format against peft on diffusers' U-Net, live."""

import json

import pytest
import torch
from closeness import FORWARD_BF16, GRADIENT, GRADIENT_BF16, assert_close, assert_equals, gradients_by_name, violation
from conftest import succeed
from diffusers import PixArtTransformer2DModel
from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya
from dit_torch import randomise_
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from test_pixart import DIFFUSERS as PIXART
from test_pixart import diffusers_inputs
from test_sana import CONFIGS as SANA
from test_sana import inputs_of as sana_inputs
from test_sana import random_sana
from test_unet import TINY, inputs_of, model_of

LORAS = {
    "attention": dict(r=4, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]),
    "linears and convolutions": dict(r=3, lora_alpha=6, target_modules=["conv1", "conv_in", "proj_in", "ff.net.0.proj",
                                                                       "ff.net.2", "downsamplers.0.conv",
                                                                       "time_emb_proj", "conv_shortcut"]),
    "regular expression, rank-stabilised": dict(r=5, lora_alpha=3, use_rslora=True,
                                                target_modules=r".*up_blocks.*(attn1|attn2)\.(to_q|to_v)"),
    "patterns": dict(r=4, lora_alpha=4, target_modules=["to_q", "to_v", "conv2"],
                     rank_pattern={"to_v": 2, r".*mid_block.*\.conv2": 3}, alpha_pattern={"attn2.to_q": 16}),
}


def adapted(config, folder, base=None, generator=None):
    """peft's model with random adapters, and the files of it that Kiln is given."""
    model = get_peft_model(base or model_of(TINY), LoraConfig(**config))
    generator = generator or torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return model, folder / "adapter_model.safetensors"


def adapter_gradients(model, loss):
    """By the keys of the file."""
    return {name.replace(".default", ""): gradient for name, gradient in gradients_by_name(model, loss).items()}


@pytest.mark.parametrize("config", LORAS.values(), ids=LORAS.keys())
def test_output_and_adapter_gradients_equal_peft(conformance, tmp_path, config):
    model, adapter = adapted(config, tmp_path)
    inputs = inputs_of(TINY)
    got = conformance("forward", "--backward", model="unet2d_condition", config=TINY,
                      weights=model_of(TINY).state_dict(), inputs=inputs, adapter=adapter)
    output = model(inputs["x"], inputs["t"], inputs["encoder_hidden_states"]).sample
    want = adapter_gradients(model, (output * inputs["grad_output"]).sum())
    assert set(want) == set(get_peft_model_state_dict(model))
    assert_equals(got, (output, want))
    with model.disable_adapter():
        plain = model(inputs["x"], inputs["t"], inputs["encoder_hidden_states"]).sample
    assert violation(plain, output, 1e-2) > 1, "the adapter changes nothing"


def pixart_of(**config):
    return randomise_(PixArtTransformer2DModel(**(PIXART | config))).eval()


PATCHES = ["to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_out", "linear_1", "adaln_single.linear", "proj"]
TRANSFORMERS = {
    "pixart_diffusers": ("pixart_diffusers", pixart_of, diffusers_inputs(PIXART), dict(target_modules=PATCHES)),
    "pixart_diffusers, patches alone": ("pixart_diffusers", lambda: pixart_of(patch_size=4), diffusers_inputs(PIXART),
                                        dict(target_modules=["pos_embed.proj"], use_rslora=True)),
    "sana": ("sana", lambda: random_sana(SANA["positions"]), sana_inputs(SANA["positions"]),
             dict(target_modules=["patch_embed.proj", "to_q", "to_k", "conv_inverted", "conv_point", "proj_out", "time_embed.linear"])),
    "sana, patches of one": ("sana", lambda: random_sana(SANA["tiny"]), sana_inputs(SANA["tiny"]), dict(target_modules=["patch_embed.proj"])),
}


@pytest.mark.parametrize("case", TRANSFORMERS.values(), ids=TRANSFORMERS.keys())
def test_patch_adapters_equal_peft(conformance, tmp_path, case):
    name, make, inputs, config = case
    model, adapter = adapted(dict(r=4, lora_alpha=6) | config, tmp_path, base=make())
    base = make()
    assert any(".proj.lora_A.weight" in key for key in load_file(adapter)), "the patches carry one"
    got = conformance("forward", "--backward", model=name, config=dict(base.config), weights=base.state_dict(), inputs=inputs,
                      adapter=adapter)
    run = lambda model: model(inputs["x"], encoder_hidden_states=inputs["caption_embeds"], timestep=inputs["t"],
                              encoder_attention_mask=inputs.get("caption_mask"),
                              **({"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}} if name != "sana" else {})).sample
    output = run(model)
    want = adapter_gradients(model, (output * inputs["grad_output"]).sum())
    assert_equals(got, (output, want), gradient_rtol=1e-3 if name == "sana" else GRADIENT)
    with model.disable_adapter():
        assert violation(run(model), output, 1e-2) > 1, "the adapter changes nothing"


def test_bf16(conformance, tmp_path):
    model, adapter = adapted(LORAS["attention"], tmp_path)
    inputs = inputs_of(TINY)
    got = conformance("forward", "--backward", model="unet2d_condition", config=TINY,
                      weights=model_of(TINY).state_dict(), inputs=inputs, adapter=adapter, dtype="bf16")
    output = model(inputs["x"], inputs["t"], inputs["encoder_hidden_states"]).sample
    want = adapter_gradients(model, (output * inputs["grad_output"]).sum())
    assert_equals(got, (output, want), FORWARD_BF16, GRADIENT_BF16, peak=False)


@pytest.mark.parametrize("damage, expected", [
    (dict(base=TINY | dict(block_out_channels=[24, 24, 32])), "the adapter is of another base"),
    (dict(config=dict(use_dora=True)), "use_dora"),
    (dict(config=dict(r=8)), "of rank 4 in the weights, of rank 8 in adapter_config.json"),
    (dict(config=dict(peft_type="LOHA")), "of type LOHA"),
    (dict(missing=True), "adapter_config.json is missing"),
])
def test_adapters_that_do_not_fit_are_refused(conformance, tmp_path, damage, expected):
    _, adapter = adapted(LORAS["attention"], tmp_path)
    config_path = tmp_path / "adapter_config.json"
    if "config" in damage:
        config_path.write_text(json.dumps(json.loads(config_path.read_text()) | damage["config"]))
    if "missing" in damage:
        config_path.unlink()
    base = damage.get("base", TINY)
    assert expected in conformance("forward", model="unet2d_condition", config=base,
                                   weights=model_of(base).state_dict(), inputs=inputs_of(base), adapter=adapter,
                                   expect_error=True)


def kohya_file(model, folder):
    """As kohya's own trainer and diffusers' converter write it, alphas included."""
    state = convert_state_dict_to_kohya(get_peft_model_state_dict(model))
    scaled = {key.replace("base_model_model_", "lora_unet_"): value.clone() for key, value in state.items()}
    alpha = torch.tensor(float(model.peft_config["default"].lora_alpha))
    scaled |= {key.replace(".lora_down.weight", ".alpha"): alpha.clone()
               for key in scaled if key.endswith(".lora_down.weight")}
    save_file(scaled, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


def diffusers_file(model, folder):
    """diffusers' keys hold no alpha: its files are of alpha = r."""
    state = convert_state_dict_to_diffusers(get_peft_model_state_dict(model))
    state = {"unet." + key.removeprefix("base_model.model."): value.contiguous() for key, value in state.items()}
    save_file(state, folder / "pytorch_lora_weights.safetensors")
    return folder / "pytorch_lora_weights.safetensors"


def merged_by_both(tmp_path, model, folder, base, out, format):
    """Weights that Kiln merges the adapter in `folder` into, as a file of `format`, and those of peft."""
    adapter = {"peft": lambda *_: folder, "kohya": kohya_file, "diffusers": diffusers_file}[format](model, tmp_path)
    succeed("convert", "--in", base, "--out", out, "--merge", adapter)
    merged = load_file(out if out.is_file() else out / "transformer/diffusion_pytorch_model.safetensors")
    want = model.merge_and_unload().state_dict()
    assert set(merged) == set(want)
    return merged, want


@pytest.mark.parametrize("format", ["peft", "kohya", "diffusers"])
def test_merge(tmp_path, format):
    alpha = 4 if format == "diffusers" else 2
    model, _ = adapted(dict(r=4, lora_alpha=alpha, target_modules=["to_q", "to_out.0", "conv1", "proj_in"]),
                       tmp_path / "peft")
    save_file(model_of(TINY).state_dict(), tmp_path / "base.safetensors")
    merged, want = merged_by_both(tmp_path, model, tmp_path / "peft", tmp_path / "base.safetensors",
                                  tmp_path / "merged.safetensors", format)
    for key, value in want.items():
        assert_close(merged[key], value, 1e-6, 1e-7)


MERGES = {f"{name}-{format}": (TRANSFORMERS[key], format, torch.float32)
          for name, key in (("pixart", "pixart_diffusers"), ("sana", "sana")) for format in ("peft", "kohya", "diffusers")}
MERGES["pixart-peft-bf16"] = (TRANSFORMERS["pixart_diffusers"], "peft", torch.bfloat16)


@pytest.mark.parametrize("case, format, dtype", MERGES.values(), ids=MERGES.keys())
def test_merge_into_a_transformers_folder(tmp_path, case, format, dtype):
    """Names of diffusers' class, whatever Kiln calls the layers: PixArt's projections are one weight here. In f32, rounded once."""
    _, make, _, config = case
    config = config | dict(r=4, lora_alpha=4 if format == "diffusers" else 6)
    model, _ = adapted(config, tmp_path / "peft", base=make().to(dtype).float())
    make().to(dtype).save_pretrained(tmp_path / "base")
    merged, want = merged_by_both(tmp_path, model, tmp_path / "peft", tmp_path / "base", tmp_path / "merged", format)
    for key, value in want.items():
        assert merged[key].dtype == dtype, key
        if dtype == torch.float32:
            assert_close(merged[key], value, 1e-6, 1e-7)
        else:  # a sum beside the middle of two numbers may become either; a sum of rounded parts is five times as far
            assert violation(merged[key], value.to(dtype), 5e-4, 1e-7, peak=False) <= 1, key
