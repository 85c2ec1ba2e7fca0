"""kiln convert of PixArt and Sana: repository checkpoints, safetensors and pipelines that diffusers itself loads."""

import json

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from closeness import assert_close
from conftest import assert_fails, matrix, succeed
from dit_torch import DiT, randomise_
from pipelines import START, assert_pictures_of, kiln_normals, read_npz, text_encoder, tiny_dc, tiny_kl
from pixart_torch import PixArt
from test_sana import TINY as SANA, inputs_of, native, random_sana, run_diffusers
from test_unet import TINY as UNET
from test_unet import model_of as unet_of

CONFIG = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=1, caption_channels=20,
              model_max_length=7, pe_interpolation=1.0)


@pytest.fixture
def repository_checkpoint(tmp_path):
    model = randomise_(PixArt(**CONFIG)).eval()
    path = tmp_path / "epoch_1_step_10.pth"
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, path)
    return path, model


def pixart_inputs():
    generator = torch.Generator().manual_seed(2)
    return dict(x=torch.randn(2, 4, 8, 12, generator=generator), t=torch.tensor([3.0, 998.0]),
                caption_embeds=torch.randn(2, 7, 20, generator=generator),
                caption_mask=torch.tensor([[1, 1, 0, 0, 0, 0, 0], [1] * 7]))


def test_pixart_to_a_pipeline_that_diffusers_loads(convert, repository_checkpoint):
    path, model = repository_checkpoint
    folder = convert(path, "pipeline")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "PixArtSigmaPipeline" and index["text_encoder"] == [None, None]
    transformer = diffusers.PixArtTransformer2DModel.from_pretrained(folder / "transformer").eval()
    inputs = pixart_inputs()
    with torch.no_grad():
        got = transformer(inputs["x"], encoder_hidden_states=inputs["caption_embeds"], timestep=inputs["t"],
                          added_cond_kwargs=dict(resolution=None, aspect_ratio=None),
                          encoder_attention_mask=inputs["caption_mask"]).sample
        assert_close(got, model(**inputs))


def test_pixart_pipeline_back_to_the_repositorys_keys(convert, repository_checkpoint):
    path, model = repository_checkpoint
    again, same = (load_file(convert(source, f"{name}.safetensors"))
                   for name, source in (("again", convert(path, "pipeline")), ("same", path)))
    want = model.state_dict()
    assert set(again) == set(same) == set(want) - {"pos_embed"}, "new user, 15: a model of many sizes computes its table"
    for key in set(again) - {"y_embedder.y_embedding"}:
        assert torch.equal(again[key], want[key]), key
    assert all(torch.equal(same[key], want[key]) for key in same)


def test_what_diffusers_has_no_class_for_is_refused(tmp_path):
    config = CONFIG | dict(qk_norm=True)
    save_file(randomise_(PixArt(**config)).state_dict(), tmp_path / "model.safetensors")
    assert_fails("qk_norm: diffusers has no class for it", "convert", "--in", tmp_path / "model.safetensors",
                 "--out", tmp_path / "pipeline")
    assert not (tmp_path / "pipeline").exists()


@pytest.mark.parametrize("keys", ["diffusers", "repository"])
def test_sana_to_a_pipeline_that_diffusers_loads(convert, tmp_path, keys):
    config = SANA | dict(num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
                         num_cross_attention_heads=1, cross_attention_head_dim=64)
    model = random_sana(config)
    weights = model.state_dict() if keys == "diffusers" else native(model.state_dict()) | {
        "y_embedder.y_embedding": torch.zeros(300, 20)}
    path = tmp_path / "sana.safetensors"
    save_file({key: value.contiguous() for key, value in weights.items()}, path,
              {"kiln_model_config": json.dumps(config)})
    folder = convert(path, "pipeline")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "SanaPipeline"
    assert index["scheduler"] == ["diffusers", "DPMSolverMultistepScheduler"]  # as Sana is published
    loaded = diffusers.SanaTransformer2DModel.from_pretrained(folder / "transformer").eval()
    inputs = inputs_of(config)
    assert_close(run_diffusers(loaded, inputs)[0], run_diffusers(model, inputs)[0], 1e-6)
    again = load_file(convert(folder, "again.safetensors"))
    assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())


# --- exported folders in diffusers' own pipelines ---

PROMPTS, SEED, STEPS = ["a red apple", "two birds on a fence"], 6, 10


def pixart(max_tokens):
    config = CONFIG | dict(caption_channels=32, model_max_length=max_tokens)
    if max_tokens == 120:  # PixArt-Alpha at 1024 pixels is told the picture's size
        config |= dict(micro_condition=True, input_size=128, pe_interpolation=2.0, hidden_size=96, num_heads=2)
    model = randomise_(PixArt(**config)).eval()
    call = dict(clean_caption=False, use_resolution_binning=False, max_sequence_length=max_tokens)
    return model.state_dict(), config, "pixart", call


def sana():
    config = SANA | dict(num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64, caption_channels=32,
                         num_cross_attention_heads=1, cross_attention_head_dim=64, in_channels=8, out_channels=8)
    call = dict(use_resolution_binning=False, complex_human_instruction=None)
    return random_sana(config).state_dict(), config, "sana", call


def unet():
    config = UNET | dict(cross_attention_dim=32)
    return unet_of(config).state_dict(), config, "unet2d_condition", {}


@pytest.mark.parametrize("make, encoder, vae, pipeline_class, sampler", matrix([
    (unet, "clip", tiny_kl, "StableDiffusionPipeline", "euler"),
    (lambda: pixart(24), "t5", tiny_kl, "PixArtSigmaPipeline", "dpmpp_2m"),
    (lambda: pixart(120), "t5", tiny_kl, "PixArtAlphaPipeline", "dpmpp_2m"),
    (sana, "gemma", tiny_dc, "SanaPipeline", "flow_euler"),
], [
    (unet, "clip", tiny_kl, "StableDiffusionPipeline", "dpmpp_2m"),
    (sana, "gemma", tiny_dc, "SanaPipeline", "dpmpp_2m"),
]))
@pytest.mark.slow
def test_exported_folders_draw_what_kiln_draws(convert, tmp_path, make, encoder, vae, pipeline_class, sampler):
    """The folder of kiln convert in the real pipeline, from Kiln's noise: its pictures are those of kiln sample."""
    weights, config, model, call = make()
    save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / "w.safetensors",
              {"kiln_model_config": json.dumps(config)})
    model_of_text, tokenizer = text_encoder(encoder, tmp_path / "encoder")
    autoencoder = vae(tmp_path / "vae")
    objective = {"sana": "flow", "pixart": "iddpm"}.get(model, "epsilon")
    height, width, downsample = 64, 96, 4 if model == "sana" else 8
    succeed("sample", "--weights", tmp_path / "w.safetensors", "--model", model, "--model-config", json.dumps(config),
            "--autoencoder", tmp_path / "vae", "--text-encoder", tmp_path / "encoder", "--objective", objective,
            "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--negative-prompt", "ugly", "--cfg-scale", 3,
            "--cfg-convention", "plain", "--sampler", sampler, "--num-sampling-steps", STEPS, "--num-images", 2,
            "--height", height, "--width", width, "--seed", SEED, "--threads", 1, "--out", tmp_path / "out",
            "--npz", tmp_path / "all.npz")
    folder = convert(tmp_path / "w.safetensors", "pipeline", "--objective", objective, "--vae", tmp_path / "vae")
    parts = dict(safety_checker=None, feature_extractor=None) if model == "unet2d_condition" else {}
    pipeline = getattr(diffusers, pipeline_class).from_pretrained(folder, text_encoder=model_of_text, tokenizer=tokenizer, **parts)
    pipeline.set_progress_bar_config(disable=True)
    given = pipeline.scheduler.config
    if sampler == "dpmpp_2m":
        pipeline.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(given, timestep_spacing="linspace")
    elif sampler == "euler":
        pipeline.scheduler = diffusers.EulerDiscreteScheduler.from_config(given, timestep_spacing="trailing")
    else:
        pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=given["flow_shift"])
        call = call | dict(sigmas=[1 - step / STEPS for step in range(STEPS)])
    shape = (autoencoder.config.latent_channels, height // downsample, width // downsample)
    want = pipeline(prompt=PROMPTS, negative_prompt=["ugly"] * 2, guidance_scale=3.0, num_inference_steps=STEPS, height=height,
                    width=width, latents=kiln_normals(SEED, START, range(2), shape), output_type="pt", **call).images
    assert_pictures_of(read_npz(tmp_path / "all.npz"), want * 2 - 1)


# --- what a folder is put together of ---


def recorded(path, model, config, weights, **record):
    """A weights file with a record."""
    drawing = dict(sampler="flow_euler", num_sampling_steps=2, cfg_scale=3.0, guided_channels="model", unconditional="null_rows")
    record = dict(model=model, model_config=config, objective=dict(type="flow", shift=4.0), image_size=64, drawing=drawing) | record
    save_file({key: value.contiguous() for key, value in weights.items()}, path, {"kiln_record": json.dumps(record)})
    return path


def pixart_flow(path, **record):
    config = CONFIG | dict(caption_channels=32, model_max_length=24, pred_sigma=False)
    return recorded(path, "pixart", config, randomise_(PixArt(**config)).state_dict(), **record)


def test_shipping_4_a_pixart_of_flow_runs_in_the_pipeline_of_its_folder(kiln, tmp_path):
    weights = pixart_flow(tmp_path / "w.safetensors")
    said = kiln("convert", "--in", weights, "--out", tmp_path / "pipeline", "--vae", tiny_kl_folder(tmp_path)).stdout
    assert "PixArtSigmaPipeline draws other pictures than Kiln (its loop does not run FlowMatchEulerDiscreteScheduler)" in said
    pipeline = diffusers.PixArtSigmaPipeline.from_pretrained(tmp_path / "pipeline")
    assert pipeline.scheduler.config.flow_shift == 4
    rows, mask = torch.randn(1, 24, 32), torch.ones(1, 24)
    image = pipeline(prompt_embeds=rows, prompt_attention_mask=mask, negative_prompt=None, negative_prompt_embeds=rows * 0,
                     negative_prompt_attention_mask=mask, num_inference_steps=2, use_resolution_binning=False, output_type="pt").images
    assert image.shape == (1, 3, 64, 64) and image.isfinite().all()


def tiny_kl_folder(tmp_path):
    tiny_kl(tmp_path / "vae")
    return tmp_path / "vae"


def test_shipping_5_null_rows_lie_beside_and_come_back(convert, tmp_path):
    weights = pixart_flow(tmp_path / "w.safetensors")
    folder = convert(weights, "pipeline")
    rows = load_file(weights)["y_embedder.y_embedding"]
    assert torch.equal(load_file(folder / "null_caption.safetensors")["null_caption"], rows) and rows.abs().max() > 0
    assert torch.equal(load_file(convert(folder, "again.safetensors"))["y_embedder.y_embedding"], rows)


def test_shipping_11_a_model_of_pixels_asks_for_no_autoencoder_and_takes_none_of_other_channels(tmp_path):
    config = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=16, depth=1, num_heads=1, num_classes=3, learn_sigma=False)
    drawing = dict(sampler="flow_euler", num_sampling_steps=2, cfg_scale=1.0, guided_channels="all", unconditional="null_class")
    weights = recorded(tmp_path / "w.safetensors", "dit", config, randomise_(DiT(**config)).state_dict(), image_size=8, drawing=drawing,
                       autoencoder=dict(name="pixels", path="", fingerprint="none", scaling_factor=1.0, shift_factor=0.0))
    result = succeed("convert", "--in", weights, "--out", tmp_path / "pipeline")
    assert "autoencoder" not in result.stdout
    assert json.loads((tmp_path / "pipeline/model_index.json").read_text())["vae"] == [None, None]
    assert "the model makes pixels" in (tmp_path / "pipeline/README.md").read_text()
    assert_fails("makes latents of 4 channels, and the model takes 3", "convert", "--in", weights,
                 "--out", tmp_path / "other", "--vae", tiny_kl_folder(tmp_path))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("how", ["copy", "link"])
def test_components_come_from_where_the_record_says(convert, tmp_path, how):
    text_encoder("t5", tmp_path / "t5")
    tiny_kl(tmp_path / "vae")
    weights = pixart_flow(
        tmp_path / "w.safetensors", autoencoder=dict(name="autoencoder_kl", path="vae", fingerprint="", scaling_factor=0.18215,
                                                     shift_factor=0.0),
        text=dict(encoder="t5_encoder", path="t5", fingerprint="", tokenizer_fingerprint="", max_tokens=24, prefix="", suffix="",
                  instruction="", dtype="F32"))
    folder = convert(weights, "pipeline", "--components", how)
    files = {path.relative_to(folder).as_posix(): path.is_symlink() for path in folder.rglob("*") if path.is_file()}
    large = {"vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"}
    assert large | {"vae/config.json", "text_encoder/config.json", "tokenizer/spiece.model"} <= set(files)
    assert {name for name, is_link in files.items() if is_link} == (large if how == "link" else set())
    pipeline = diffusers.PixArtSigmaPipeline.from_pretrained(folder)
    assert type(pipeline.text_encoder).__name__ == "T5EncoderModel" and pipeline.tokenizer("a").input_ids
    assert "text_encoder =" not in (folder / "README.md").read_text()
    again = convert(folder, "again") / "transformer/diffusion_pytorch_model.safetensors"
    with safe_open(again, "np") as file:
        record = json.loads(file.metadata()["kiln_record"])
    assert (record["autoencoder"]["path"], record["text"]["path"]) == ("vae", "t5")  # not the folder's name
    (tmp_path / "t5").rename(tmp_path / "elsewhere")
    assert_fails("--text-encoder PATH", "convert", "--in", weights, "--out", tmp_path / "other", "--components", how)
