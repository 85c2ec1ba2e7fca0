"""Training of LoRA adapters: steps against peft on diffusers' models, the real program's runs (resumed, divided, planned,
sampled), and the files that they become."""

import functools
import json

import conftest
import numpy as np
import pytest
import torch
from closeness import assert_close, trained_by_torch
from conftest import FULL, matrix, read_json, succeed, without_origins
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, PeftModel, get_peft_model
from run_files import STATE, checkpoint, losses, read_config, read_plan, saved, weights_of
from safetensors.torch import load_file, save_file
from test_lora import adapted
from test_sana import TINY as SANA
from test_sana import random_sana, sana_loss
from test_train import assert_moved_alike
from test_unet import TINY, model_of, unet_batches

ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def lora_state(model):
    """Adapter weights by the keys of PEFT's files."""
    return {name.replace(".default", ""): p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_trained_alike(got, expected, model, start):
    want = lora_state(model)
    assert set(want) == {key.removeprefix("param.") for key in got if key.startswith("param.") and "lora_" in key}
    assert_close(got["losses"], expected, 1e-4)
    assert_moved_alike({key: got[f"param.{key}"] for key in want}, want, start, 1e-2)


@pytest.mark.parametrize("config", [
    dict(r=4, lora_alpha=2, target_modules=ATTENTION),
    dict(r=3, lora_alpha=6, target_modules=["conv1", "conv_in", "proj_in", "ff.net.0.proj", "ff.net.2", "time_emb_proj",
                                            "downsamplers.0.conv", "conv_out", "time_embedding.linear_1"]),
], ids=["attention", "linears and convolutions"])
@pytest.mark.slow
def test_twenty_steps_of_a_unet_equal_peft(conformance, tmp_path, config):
    model, adapter = adapted(config, tmp_path)
    start = lora_state(model)
    steps, micro, batch = 20 if FULL else 8, 2, 2
    batches = unet_batches(steps * micro, batch, torch.Generator().manual_seed(5))
    schedule = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="epsilon")
    got = conformance("train", model="unet2d_condition", model_config=TINY, weights=model_of(TINY).state_dict(), adapter=adapter,
                      batches_file=batches,
                      config=dict(loss=dict(type="ddpm", **schedule), optimizer=dict(type="adamw", **ADAMW), ema_decay=0.9,
                                  grad_accum=micro, grad_clip=1.0))
    scheduler = DDPMScheduler(**schedule)

    def loss_of(row):
        noise, t = batches["noise"][row], batches["t"][row]
        x_t = scheduler.add_noise(batches["x_start"][row], noise, t)
        return (model(x_t, t.float(), batches["encoder_hidden_states"][row]).sample - noise).pow(2).mean()

    expected, _ = trained_by_torch(trained(model), loss_of, steps, micro, clip=1.0, **ADAMW)
    assert_trained_alike(got, expected, model, start)


def test_twenty_steps_of_sana_equal_peft(conformance, tmp_path):
    base = random_sana(SANA, scale=0.7)
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    config = dict(r=4, lora_alpha=8, target_modules=[*ATTENTION, "conv_inverted", "conv_point"])
    generator = torch.Generator().manual_seed(7)
    model, adapter = adapted(config, tmp_path, base, generator)
    start = lora_state(model)
    steps, batch = 20, 3
    shape = (steps, batch, 4, 6, 10)
    lengths = torch.randint(1, 8, (steps, batch), generator=generator)
    batches = dict(x_start=torch.randn(shape, generator=generator), noise=torch.randn(shape, generator=generator),
                   t=torch.randint(0, 1000, shape[:2], generator=generator),
                   caption_embeds=torch.randn(steps, batch, 7, 20, generator=generator),
                   caption_mask=(torch.arange(7) < lengths[..., None]).long())
    got = conformance("train", model="sana", model_config=SANA, weights=weights, adapter=adapter,
                      batches_file=batches,
                      config=dict(loss=dict(type="flow", mode="sana", shift=3.0), optimizer=dict(type="adamw", **ADAMW),
                                  grad_clip=0.1, ema_decay=0.9))
    expected, _ = trained_by_torch(trained(model), lambda step: sana_loss(model, batches, step), steps, clip=0.1,
                                   **ADAMW)
    assert_trained_alike(got, expected, model, start)


# --- runs ---

UNET = dict(block_out_channels=[32, 64], down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"], norm_num_groups=8,
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"], layers_per_block=1, attention_head_dim=4, cross_attention_dim=768,
            sample_size=8, in_channels=4, out_channels=4)
MODEL = ["--model", "unet2d_condition", "--model-config", json.dumps(UNET)]
RUN = ["train", *MODEL, "--data", "synthetic", "--image-size", 64, "--objective", "epsilon", "--global-batch", 4, "--micro-batch", 2,
       "--lr", 1e-2, "--threads", 1, "--ema-decay", 0.5, "--log-every", 1, "--peak-tflops", 1, "--seed", 3]
LORA = ["--lora-rank", 3, "--lora-alpha", 6]


refusal = functools.partial(conftest.refusal, code=None, lines=without_origins)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(model_of(UNET).state_dict(), path)
    return path


def train(base, out, steps, *extra, lora=LORA):
    return succeed(*RUN, *lora, "--weights", base, *extra, "--out", out, "--max-steps", steps)


@pytest.fixture(scope="module")
def run(tmp_path_factory, base):
    out = tmp_path_factory.mktemp("run") / "run"
    train(base, out, 6)
    return out


def test_a_checkpoint_holds_the_adapter_alone(run):
    trained = load_file(checkpoint(run, 6) / "model.safetensors")
    assert trained and all(".lora_" in key for key in trained)
    assert all("attn" in key for key in trained)
    moments = load_file(checkpoint(run, 6) / STATE[2])
    assert len(moments) == 2 * len(trained)
    first, *_, last = losses(run)
    assert len(losses(run)) == 6 and last != first


@pytest.mark.parametrize("dropout", [0, 0.4])
@pytest.mark.slow
def test_a_stopped_run_goes_on_bitwise(tmp_path, base, run, dropout):
    extra = ["--lora-dropout", dropout] if dropout else []
    whole = run
    if dropout:
        whole = tmp_path / "whole"
        train(base, whole, 6, *extra, "--recompute", "all")
        assert losses(whole) != losses(run)
    train(base, tmp_path / "parts", 2, *extra)
    record = tmp_path / "parts/config.json"
    known = read_config(tmp_path / "parts")
    assert known["adapter"]["base_values"] == read_config(run)["adapter"]["base_values"]
    known["adapter"]["base_values"] = "xxh3:kept"
    record.write_text(json.dumps(known))
    train(base, tmp_path / "parts", 6, *extra)
    known = read_config(tmp_path / "parts")
    assert known["adapter"]["base_values"] == "xxh3:kept", "the base is not loaded again to describe it"
    assert losses(tmp_path / "parts") == losses(whole)
    assert weights_of(tmp_path / "parts", 6) == weights_of(whole, 6)


@pytest.mark.parametrize("extra", [["--recompute", "all"], ["--recompute", "embed,down.0.0,mid"], ["--offload-activations", "all"]])
def test_memory_choices_do_not_change_a_bit(tmp_path, base, run, extra):
    train(base, tmp_path / "run", 6, *extra)
    assert saved(tmp_path / "run", 6, "model.safetensors") == saved(run, 6, "model.safetensors")


@pytest.mark.slow
def test_dropout_of_captions_knows_their_rows(tmp_path):
    """Of ragged captions, whatever the size of a pass: their rows are filled up behind the last."""
    model = ["--model", "pixart", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--image-size", 64, "--data", "synthetic",
             "--global-batch", 4, "--threads", 1, "--peak-tflops", 1]
    succeed("train", *model, "--out", tmp_path / "base", "--max-steps", 1)
    lora = ["--weights", checkpoint(tmp_path / "base", 1) / "model.safetensors", "--lora-rank", 2,
            "--lora-dropout", 0.5, "--lora-target", ".*cross_attn.*", "--lr", 0.05, "--max-steps", 3]
    for rows in (0, 1, 3):
        succeed("train", *model, *lora, "--micro-batch", rows, "--out", tmp_path / f"rows-{rows}")
        np.testing.assert_allclose(losses(tmp_path / f"rows-{rows}"), losses(tmp_path / "rows-0"), rtol=1e-6)


@pytest.mark.parametrize("ranks, stage", matrix([(2, 0), (2, 2), (2, 3)], [(3, 3)]))
def test_ranks_train_the_same_adapter(tmp_path, base, run, ranks, stage):
    train(base, tmp_path / "run", 6, "--nproc", ranks, "--zero-stage", stage)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(run), rtol=5e-6)


@pytest.mark.slow
def test_files_open_in_peft_and_diffusers_and_merge(tmp_path, base, run):
    """What the run has trained gives the same output as PEFT's, diffusers' and kohya's files, and merged."""
    for name, options in {"peft": [], "file.safetensors": [], "kohya.safetensors": ["--adapter-format", "kohya"]}.items():
        succeed("convert", "--in", run, "--no-ema", "--out", tmp_path / name, *options)
    for name, adapter in {"run": run, "peft": tmp_path / "peft", "diffusers": tmp_path / "file.safetensors",
                          "kohya": tmp_path / "kohya.safetensors"}.items():
        succeed("convert", "--in", base, "--no-ema", "--merge", adapter, "--out", tmp_path / f"merged-{name}.safetensors")
    generator = torch.Generator().manual_seed(1)
    inputs = (torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([7, 801]), torch.randn(2, 9, 768, generator=generator))
    plain = model_of(UNET)
    with torch.no_grad():
        before = plain(*inputs).sample
        model = PeftModel.from_pretrained(model_of(UNET), tmp_path / "peft").eval()
        want = model(*inputs).sample
        assert (want - before).norm() > 1e-3 * before.norm(), "the adapter changes nothing"
        pipeline = StableDiffusionPipeline(vae=None, text_encoder=None, tokenizer=None, unet=model_of(UNET), scheduler=DDPMScheduler(),
                                           safety_checker=None, feature_extractor=None, requires_safety_checker=False)
        for file in ("file.safetensors", "kohya.safetensors"):
            pipeline.load_lora_weights(tmp_path, weight_name=file, adapter_name=file.split(".")[0])
            assert_close(pipeline.unet(*inputs).sample, want, 1e-5)
            pipeline.unload_lora_weights()
    merged = model.merge_and_unload().state_dict()
    for name in ("run", "peft", "diffusers", "kohya"):
        got = load_file(tmp_path / f"merged-{name}.safetensors")
        for key, value in merged.items():
            assert_close(got[key], value, 1e-6, 1e-7)


def test_training_goes_on_from_an_adapter(tmp_path, base, run):
    succeed("convert", "--in", run, "--no-ema", "--out", tmp_path / "kohya.safetensors", "--adapter-format", "kohya")
    train(base, tmp_path / "run", 1, "--lr", 1e-30, lora=["--lora-weights", tmp_path / "kohya.safetensors"])
    first, last = (load_file(checkpoint(*at) / "model.safetensors") for at in ((tmp_path / "run", 1), (run, 6)))
    assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in last)


def test_samples_of_a_run_are_those_of_its_merged_weights(tmp_path, base, run):
    succeed("convert", "--in", base, "--no-ema", "--merge", run, "--out", tmp_path / "merged.safetensors")
    assert "base.safetensors" in (run / "config.json").read_text()
    moved = tmp_path / "moved"
    base.rename(moved)
    try:
        line = refusal("sample", "--run", run, "--num-images", 1, "--out", tmp_path / "none", "--autoencoder", "pixels")
        assert "which is not there: say where they are with --base PATH" in line
    finally:
        moved.rename(base)


@pytest.mark.parametrize("extra", [[], ["--recompute", "all"]])
def test_the_plan_knows_one_copy_of_the_base(tmp_path, base, extra):
    train(base, tmp_path / "run", 3, "--memory-budget", "auto", *extra)
    plan = read_plan(tmp_path / "run")
    assert plan["predicted"]["peak_bytes"] == pytest.approx(plan["measured"]["peak_bytes"], rel=0.01)
    assert plan["predicted"]["by_kind"]["constants"] == plan["measured"]["by_kind"]["constants"]
    command = ["plan", *MODEL, "--image-size", 64, "--objective", "epsilon", "--global-batch", 4, "--gpu", "A100-80G", *LORA,
               "--compute-dtype", "bf16"]
    planned = read_json(*command)
    num_base = sum(value.numel() for value in load_file(base).values())
    assert planned["predicted"]["by_kind"]["constants"] == pytest.approx(2 * num_base, rel=0.01)
    assert planned["predicted"]["by_kind"]["master"] < 0.05 * 4 * num_base
    assert f"{num_base / 1e6:.0f} M weights, adapter of {planned['num_weights'] / 1e6:.1f} M, 64 px" in succeed(*command).stdout


@pytest.mark.parametrize("lora, expected", [
    (["--lora-rank", 2, "--lora-target", "to_x"], "--lora-target to_x matches none of the model's"),
    (["--lora-rank", 2, "--lora-target", "to_q("], 'holds "to_q(", which is no regular expression'),
    (["--lora-alpha", 2], "have no effect without --lora-rank"),
    (["--lora-rank", -1], "--lora-rank"),
    (["--lora-rank", 2, "--lora-dropout", 1], "--lora-dropout expects"),
    (["--lora-rank", 2, "--lora-weights", "x"], "--lora-weights holds rank, alpha and layers"),
])
def test_what_does_not_go_together_is_one_line(tmp_path, base, lora, expected):
    assert expected in refusal(*RUN, *lora, "--weights", base, "--out", tmp_path / "run", "--max-steps", 1)


@pytest.mark.slow
def test_a_base_is_needed_and_stays_the_same(tmp_path, base, run):
    assert "give them with --weights" in refusal(*RUN, *LORA, "--out", tmp_path / "run", "--max-steps", 1)
    other = model_of(UNET, seed=4)
    kept = base.read_bytes()
    try:
        save_file(other.state_dict(), base)
        assert "trains an adapter of other weights" in refusal(*RUN, *LORA, "--weights", base, "--out", run, "--max-steps", 9)
    finally:
        base.write_bytes(kept)
    model = get_peft_model(UNet2DConditionModel(**TINY), LoraConfig(r=2, target_modules=["to_q"]))
    model.save_pretrained(tmp_path / "other")
    assert "the adapter is of another base" in refusal(*RUN, "--lora-weights", tmp_path / "other", "--weights", base, "--out",
                                                       tmp_path / "run", "--max-steps", 1)


@pytest.mark.parametrize("model", [
    ["--model", "dit", "--hidden-size", 48, "--depth", 2, "--num-heads", 3, "--patch-size", 2, "--num-classes", 5, "--objective", "iddpm"],
    ["--model", "pixart_diffusers", "--hidden-size", 48, "--num-heads", 3, "--depth", 2, "--patch-size", 2, "--objective", "epsilon"],
    ["--model", "sana", "--hidden-size", 48, "--num-heads", 3, "--depth", 2, "--patch-size", 2, "--objective", "flow"],
], ids=["dit", "pixart", "sana"])
@pytest.mark.slow
def test_every_family(tmp_path, model):
    options = [*model, "--data", "synthetic", "--image-size", 64 if "sana" not in model else 256, "--global-batch", 2, "--threads", 1,
               "--log-every", 1, "--peak-tflops", 1, "--lr", 1e-2]
    # A fresh DiT's gates are zero: it takes two steps until gradients reach the attention.
    succeed("train", *options, "--out", tmp_path / "base", "--max-steps", 3)
    base = checkpoint(tmp_path / "base", 3) / "model.safetensors"
    out = tmp_path / "lora"
    succeed("train", *options, "--weights", base, "--lora-rank", 2, "--out", out, "--max-steps", 2)
    adapter = load_file(checkpoint(out, 2) / "model.safetensors")
    names = {key.split("base_model.model.")[1].rsplit(".lora_", 1)[0] for key in adapter}
    assert names and all("attn" in name for name in names)
    succeed("convert", "--in", base, "--merge", out, "--out", tmp_path / "merged.safetensors")
    merged, plain = load_file(tmp_path / "merged.safetensors"), load_file(base)
    changed = {key.removesuffix(".weight") for key in plain if not torch.equal(merged[key], plain[key])}
    assert changed == names
    # The convolution of the patches, which is no layer of the default.
    patches = next(key.removesuffix(".weight") for key in plain if key.endswith(("_embed.proj.weight", "x_embedder.proj.weight")))
    out = tmp_path / "patches"
    succeed("train", *options, "--weights", base, "--lora-rank", 2, "--lora-target", patches, "--out", out, "--max-steps", 2)
    for name, format in {"peft": [], "file.safetensors": [], "kohya.safetensors": ["--adapter-format", "kohya"]}.items():
        succeed("convert", "--in", out, "--out", tmp_path / name, *format)
        succeed("convert", "--in", base, "--merge", tmp_path / name, "--out", tmp_path / f"merged-{name}.safetensors")
        merged = load_file(tmp_path / f"merged-{name}.safetensors")
        assert {key for key in plain if not torch.equal(merged[key], plain[key])} == {patches + ".weight"}


@pytest.mark.slow
def test_null_rows_beside_a_base_are_part_of_it(tmp_path):
    model = ["--model", "pixart", "--hidden-size", 48, "--num-heads", 3, "--depth", 1, "--patch-size", 2]
    options = ["--data", "synthetic", "--image-size", 64, "--objective", "epsilon", "--global-batch", 2, "--threads", 1, "--peak-tflops", 1]
    succeed("train", *model, *options, "--out", tmp_path / "base", "--max-steps", 1)
    folder, out = tmp_path / "pipeline", tmp_path / "lora"
    succeed("convert", "--in", tmp_path / "base", "--out", folder)
    command = ["train", *options, "--weights", folder, "--lora-rank", 2, "--out", out]
    succeed(*command, "--max-steps", 1)
    succeed(*command, "--max-steps", 2)
    rows = load_file(folder / "null_caption.safetensors")
    save_file({key: value + 1 for key, value in rows.items()}, folder / "null_caption.safetensors")
    assert "an adapter of other weights" in refusal(*command, "--max-steps", 3)
