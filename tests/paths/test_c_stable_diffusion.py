"""Guide c, Stable Diffusion under DeepSpeed's ZeRO: its ds_config.json as it stands and at other stages, 512 px, CLIP's own
tokenizer, offload to host and disk, kill -9, an adapter, and the real StableDiffusionPipeline at the end."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from pipelines import assert_pictures_of, text_encoder, tiny_kl
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from walks import PEAK_FLOPS, PROMPT, Walk, check_run, clip_tokenizer, drawn_by, drawn_by_kiln, flops_of, pictures, steps_of

GUIDES_FILE = Path(__file__).parent / "ds_config.json"
UNET = dict(block_out_channels=[8, 16, 16, 16], layers_per_block=1, attention_head_dim=1, norm_num_groups=4, cross_attention_dim=32)
TEXT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=49408, eos_token_id=2)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as Stable Diffusion 1.5 is published in, with narrow networks."""
    folder = tmp_path_factory.mktemp("published") / "stable-diffusion-v1-5"
    torch.manual_seed(0)
    CLIPTextModel(CLIPTextConfig(**TEXT)).save_pretrained(folder / "text_encoder")
    tiny_kl(folder / "vae")
    UNet2DConditionModel(sample_size=64, **UNET).save_pretrained(folder / "unet")
    PNDMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, set_alpha_to_one=False,
                  steps_offset=1).save_pretrained(folder / "scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(clip_tokenizer(folder / "tokenizer"))
    assert len(tokenizer) == 49408 and tokenizer(PROMPT).input_ids[:4] == [49406, 320, 736, 7117]
    parts = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "text_encoder": CLIPTextModel, "tokenizer": CLIPTokenizer,
             "scheduler": PNDMScheduler}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"} | {
        name: [kind.__module__.split(".")[0], kind.__name__] for name, kind in parts.items()}))
    return folder


def training(walk, published, deepspeed, *more):
    """The guide's command: its batch is one picture for each rank and pass, four passes a step."""
    return ["train", "--model", "sd15", "--model-config", json.dumps(UNET), "--weights",
            published / "unet/diffusion_pytorch_model.safetensors", "--data", walk / "store", "--deepspeed", deepspeed,
            "--global-batch", 4 * walk.ranks, "--checkpoint-every", 1, "--log-every", 1, "--threads", 1, "--peak-tflops", 1,
            *walk.many, *more]


def at_stage(walk, stage, **more):
    """The guide's file with another stage, and keys of zero_optimization more."""
    text = GUIDES_FILE.read_text().replace('"stage": 2', f'"stage": {stage}')
    for key, value in more.items():
        text = text.replace('"contiguous_gradients"', f'"{key}": {json.dumps(value)},\n"contiguous_gradients"')
    path = walk / f"ds_config-{stage}.json"
    path.write_text(text)
    return path


def test_the_plan_of_eight_gpus():
    plan = Walk.json("plan", "--model", "sd15", "--deepspeed", GUIDES_FILE, "--gpu", "A100-80G", "--gpus", 8, "--global-batch", 32)
    assert plan["options"]["image-size"] == 512 and plan["options"]["objective"] == "epsilon"
    assert plan["options"]["beta-schedule"] == "scaled_linear"
    assert (plan["zero_stage"], plan["rank_batch"], plan["micro_batch"], plan["offload_optimizer"]) == (2, 4, 1, "cpu")
    predicted = plan["predicted"]
    unet = flops_of(lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=768)(
        torch.empty(1, 4, 64, 64), torch.zeros(1), torch.empty(1, 77, 768)))
    assert predicted["mfu"] == pytest.approx(3 * unet * 4 / predicted["step_s"] / PEAK_FLOPS["A100-80G"], rel=0.03)
    assert 3 * unet * 4 / PEAK_FLOPS["A100-80G"] < predicted["phase_s"]["forward"] + predicted["phase_s"]["backward"]
    assert predicted["fits"] and predicted["days"] == pytest.approx(400_000 * predicted["step_s"] / 86400)


def test_pictures_and_captions_become_a_store(walk, published):
    pictures(walk / "pictures", 12, [(512, 512), (512, 640)])
    walk.kiln("extract", "--data", walk / "pictures", "--autoencoder", published / "vae", "--text-encoder", published, "--image-size", 512,
              "--out", walk / "store", *walk.many)
    info, text = (json.loads(path.read_text()) for path in (walk / "store/store.json", next((walk / "store").glob("text-*/text.json"))))
    assert info["num_samples"] == 12 and text["max_tokens"] == 77
    walk.kiln("store", "verify", walk / "store")


def test_the_guides_file_trains_is_killed_and_goes_on(walk, published):
    walk.interrupted(signal.SIGKILL, walk / "run", *training(walk, published, GUIDES_FILE, "--max-steps", 40))
    saved = max(int(path.name.removeprefix("step-")) for path in (walk / "run/checkpoints").glob("step-*"))
    yaml = walk / "default_config.yaml"
    yaml.write_text(f"compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: {walk.ranks}\ndeepspeed_config:\n"
                    f"  deepspeed_config_file: {GUIDES_FILE}\n")
    command = [word for word in training(walk, published, yaml, "--max-steps", saved + 1) if word not in walk.many]
    command[command.index("--deepspeed")] = "--accelerate"
    said = walk.kiln(*command, "--out", walk / "run")
    assert "resuming" in said.stdout and steps_of(walk / "run") == list(range(1, saved + 2))
    config = (walk / "run/config.toml").read_text().splitlines()
    for line in ("zero-stage = 2", "lr = 1e-05", 'compute-dtype = "fp16"', 'offload-optimizer = "cpu"', 'offload-activations = "all"',
                 "micro-batch = 1", 'beta-schedule = "scaled_linear"'):
        assert line in config, line


@pytest.mark.parametrize("turn", [0, 1])
def test_the_run_goes_on_at_other_stages(walk, published, turn):
    on_host, on_disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(walk.folder)}
    stage, offload = {1: [(3, {"offload_param": on_host}), (3, {"offload_param": on_disk})],
                      2: [(1, {}), (3, {"offload_param": on_disk})]}[walk.ranks][turn]
    done = max(steps_of(walk / "run"))
    more = ["--sample-every", 1, "--num-samples", 2, "--num-sampling-steps", 2, "--sample-prompts", PROMPT] if turn else []
    walk.kiln(*training(walk, published, at_stage(walk, stage, **offload), "--max-steps", done + 1, *more), "--out", walk / "run")
    assert steps_of(walk / "run") == list(range(1, done + 2))
    config = (walk / "run/config.toml").read_text().splitlines()
    assert f"zero-stage = {stage}" in config
    assert not offload or f'offload-params = "{offload["offload_param"]["device"]}"' in config


def exported(folder, published, source):
    """The pipeline of a folder that kiln convert writes, with the published parts that it does not carry."""
    Walk.kiln("convert", "--in", source, "--out", folder, "--vae", published / "vae")
    pipeline = StableDiffusionPipeline.from_pretrained(
        folder, text_encoder=CLIPTextModel.from_pretrained(published / "text_encoder"), safety_checker=None,
        feature_extractor=None, tokenizer=CLIPTokenizer.from_pretrained(published / "tokenizer"))
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config, timestep_spacing="linspace")
    return pipeline


def draw(pipeline):
    return drawn_by(pipeline, (4, 64, 64))


def sample(walk, name, *source):
    return drawn_by_kiln(walk, name, *source, **{"--sampler": "dpmpp_2m"})


def test_diffusers_draws_what_was_trained(walk, published):
    pipeline = exported(walk / "pipeline", published, walk / "run")
    assert_pictures_of(sample(walk, "drawn", "--run", walk / "run"), draw(pipeline))


def test_an_adapter_is_trained_and_loaded(walk, published):
    one_pass = walk / "ds_config-adapter.json"
    one_pass.write_text(GUIDES_FILE.read_text().replace('"gradient_accumulation_steps": 4', '"gradient_accumulation_steps": 1'))
    command = training(walk, published, one_pass, "--max-steps", 2, "--lora-rank", 4, "--ema-decay", "none")
    command[command.index("--global-batch") + 1] = walk.ranks
    walk.kiln(*command, "--out", walk / "adapter")
    (walk / "lora").mkdir()
    walk.kiln("convert", "--in", walk / "adapter", "--out", walk / "lora/pytorch_lora_weights.safetensors")
    pipeline = exported(walk / "base", published, published / "unet")
    without = draw(pipeline)
    pipeline.load_lora_weights(walk / "lora")
    picture = draw(pipeline)
    assert_pictures_of(sample(walk, "adapted", "--run", walk / "adapter"), picture)
    assert not torch.equal(picture, without)


def test_the_reports_are_whole(walk, browser):
    check_run(browser.open(walk / "run/report.html"), walk / "run", headings=["Samples over time", "Events"], pictures=[(1030, 516)],
              rows={"model": "sd15", "image-size": "512", "zero-stage": "3", "offload-params": "nvme", "compute-dtype": "fp16",
                    "beta-schedule": "scaled_linear", "objective": "epsilon"})
    check_run(browser.open(walk / "adapter/report.html"), walk / "adapter", rows={"lora-rank": "4", "ema-decay": "none"}, pictures=[])


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, published):
    """Parts that do not belong to the published folder, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    AutoencoderKL(block_out_channels=[8] * 4, layers_per_block=1, norm_num_groups=4, latent_channels=16,
                  down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4).save_pretrained(folder / "vae16")
    text_encoder("t5", folder / "t5")
    for name, changes in {"wide": {"hidden_size": 64}, "few-tokens": {"vocab_size": 5000, "bos_token_id": 0}}.items():
        shutil.copytree(published / "tokenizer", folder / name)
        CLIPTextModel(CLIPTextConfig(**TEXT | changes)).save_pretrained(folder / name)
    shutil.copytree(published / "text_encoder", folder / "no-tokenizer")
    return folder


@pytest.mark.parametrize("command, option, value, expected", [
    ("train", "--autoencoder", "vae16", r"--autoencoder \S+vae16 gives latents of 16 channels, and --weights \S+ take 4"),
    ("train", "--text-encoder", "wide", r"--text-encoder \S+wide gives captions of width 64, and --weights \S+ take 32"),
    ("train", "--text-encoder", "t5", r"sd15 attends to padding, but the captions of \S+t5 \(t5_encoder\) have none"),
    ("train", "--text-encoder", "no-tokenizer", r"no-tokenizer holds no tokenizer"),
    ("train", "--image-size", 500, r"expected --image-size to be a multiple of 8, got 500"),
    ("extract", "--text-encoder", "few-tokens", r"the tokenizer of \S+few-tokens has 49408 tokens, its encoder 5000"),
    ("extract", "--text-encoder", "no-tokenizer", r"no-tokenizer holds no tokenizer"),
    ("extract", "--image-size", 500, r"expected --image-size to be a multiple of 8, got 500"),
])
def test_what_does_not_fit_is_named_before_a_picture_is_read(tmp_path, published, wrong, command, option, value, expected):
    given = {"--autoencoder": published / "vae", "--text-encoder": published, "--image-size": 512}
    given[option] = wrong / value if isinstance(value, str) else value
    model = ["--model", "sd15", "--model-config", json.dumps(UNET), "--weights", published / "unet/diffusion_pytorch_model.safetensors",
             "--global-batch", 2, "--max-steps", 1] if command == "train" else []
    Walk.refused([command, *model], given, expected, tmp_path)
