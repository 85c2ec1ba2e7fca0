"""End to end: sampling loops against PyTorch models in diffusers' schedulers, and the kiln sample command."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from closeness import assert_close
from conftest import FULL, assert_fails, program, refusal, succeed
from diffusers import (DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler,
                       FlowMatchEulerDiscreteScheduler, StableDiffusion3Img2ImgPipeline, StableDiffusionImg2ImgPipeline,
                       UniPCMultistepScheduler)
from dit_torch import DiT, randomise_
from interruptions import killed_once, until_interrupted
from PIL import Image
from pipelines import POSTERIOR, START, assert_pictures_of, kiln_normals, read_npz, text_encoder, tiny_kl
from recorded_runs import make_run
from run_files import read_config
from safetensors.torch import save_file
from test_sampler import given_noise, space
from test_unet import TINY as UNET
from test_unet import model_of as unet_of

STEP = 1e-3
TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=2, num_heads=4, mlp_ratio=4.0,
            num_classes=10, class_dropout_prob=0.1, learn_sigma=True)


def tiny_model(**changes):
    config = TINY | changes
    return config, randomise_(DiT(**config), scale=0.5).eval()


def guided(model, x, t, y, scale, sigma):
    """DiT's convention: guidance touches the first three channels, both halves see the same x."""
    labels = torch.cat([y, torch.full_like(y, 10)])
    with torch.no_grad():
        output = model(torch.cat([x, x]), torch.full((len(labels),), float(t)), labels)
    cond, uncond = output.chunk(2)
    output = torch.cat([uncond[:, :3] + scale * (cond[:, :3] - uncond[:, :3]), cond[:, 3:]], dim=1)
    return output if sigma else output[:, : x.shape[1]]


SD = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False)
SCHEDULERS = {
    "iddpm": (8, dict(type="iddpm", steps="8", learn_sigma=True, clip_denoised=False),
              DDPMScheduler(variance_type="learned_range", clip_sample=False)),
    "ddpm": (8, dict(type="ddpm", steps=8), DDPMScheduler(**SD)),
    "ddim": (10, dict(type="ddim", steps=10, eta=0.3), DDIMScheduler(**SD)),
    "dpmpp": (9, dict(type="dpmpp", steps=9), DPMSolverMultistepScheduler(beta_schedule="linear")),
    "flow_euler": (6, dict(type="flow_euler", steps=6), FlowMatchEulerDiscreteScheduler(shift=3.0)),
}


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("steps, sampler, scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_loop_equals_a_pipeline(conformance, steps, sampler, scheduler, scale):
    config, model = tiny_model()
    generator = torch.Generator().manual_seed(4)
    y = torch.tensor([3, 7])
    noise = torch.randn(2, 4, 8, 8, generator=generator)
    rows = torch.randn(steps, 2, 4, 8, 8, generator=generator)
    if sampler["type"] == "iddpm":
        scheduler.set_timesteps(timesteps=space("8")[::-1])
    else:
        scheduler.set_timesteps(steps)
    options = dict(eta=sampler["eta"]) if "eta" in sampler else {}
    x, want = noise, []
    with given_noise(rows) as at_row:
        for row, t in enumerate(scheduler.timesteps):
            at_row(row)
            output = guided(model, x, t, y, scale, sigma=sampler["type"] == "iddpm")
            x = scheduler.step(output, t, x, **options).prev_sample
            want.append(x)
    if sampler["type"] != "iddpm":
        sampler = sampler | dict(scheduler=dict(scheduler.config))
    got = conformance("sample", model="dit", model_config=config, weights=model.state_dict(),
                      config=dict(sampler=sampler, cfg_scale=scale), inputs=dict(noise=noise, step_noise=rows, y=y))
    assert_close(got["timesteps"], scheduler.timesteps.float(), 1e-6)
    for row in range(steps):
        assert_close(got["samples"][row], want[row], STEP)


def test_dropped_labels_are_the_null_class(conformance):
    config, model = tiny_model()
    sampler = dict(type="ddim", steps=3)
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    call = lambda **inputs: conformance("sample", model="dit", model_config=config, weights=model.state_dict(),
                                        config=dict(sampler=sampler, cfg_scale=None), inputs=dict(noise=noise, **inputs))
    dropped = call(y=torch.tensor([3, 7]), drop=torch.tensor([0, 1]))
    assert torch.equal(dropped["samples"], call(y=torch.tensor([3, 10]))["samples"])
    assert not torch.equal(dropped["samples"], call(y=torch.tensor([3, 7]))["samples"])


def test_unconditional_models_are_sampled_without_guidance(conformance):
    config, model = tiny_model(num_classes=0, class_dropout_prob=0.0)
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    call = lambda scale, **options: conformance(
        "sample", model="dit", model_config=config, weights=model.state_dict(),
        config=dict(sampler=dict(type="ddim", steps=2), cfg_scale=scale), inputs=dict(noise=noise), **options)
    assert torch.isfinite(call(1.0)["samples"]).all()
    assert "class or caption dropout" in call(1.5, expect_error=True)


def test_bad_input_is_named(conformance):
    config, model = tiny_model()
    sampler = dict(type="ddim", steps=2)
    inputs = dict(noise=torch.zeros(1, 4, 8, 8), y=torch.tensor([3]))
    call = lambda **changes: conformance("sample", expect_error=True, **dict(
        dict(model="dit", model_config=config, weights=model.state_dict(), config=dict(sampler=sampler, cfg_scale=2),
             inputs=inputs), **changes))
    assert "sampler" in call(config=dict(cfg_scale=2))
    assert "drop of shape (1)" in call(inputs=dict(inputs, drop=torch.tensor([1, 0])))
    assert "cfg_scale" in call(config=dict(sampler=sampler, cfg_scale="high"))
    assert "noise" in call(inputs=dict(inputs, noise=torch.zeros(1, 4, 9, 9)))
    assert "y is missing" in call(inputs=dict(noise=inputs["noise"]))


# --- kiln sample ---

PIXELS = dict(in_channels=3, num_classes=4)
NAMES = ["Cats & dogs", "birds", "fish", "trees"]


@pytest.fixture
def weights(tmp_path):
    """A pixel model in a .pt as DiT's train.py writes it: the EMA is what samples."""
    config, model = tiny_model(**PIXELS)
    path = tmp_path / "model.pt"
    wrong = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    torch.save(dict(model=wrong, ema=model.state_dict(), opt={}), path)
    return path, config, model


@pytest.fixture
def run_folder(tmp_path):
    """A run as kiln train leaves it."""
    config, model = tiny_model(**PIXELS)
    info = dict(model="dit", model_config=config, objective=dict(type="iddpm"), image_size=8,
                autoencoder=dict(name="pixels", path="", fingerprint="none", scaling_factor=1.0, shift_factor=0.0),
                drawing=dict(sampler="ddpm", num_sampling_steps=250, cfg_scale=4.0, guided_channels="model",
                             unconditional="null_class"), class_names=NAMES)
    return make_run(tmp_path / "run", model.state_dict(), info)


def pictures(folder):
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("0*.png"))}


def sample(*arguments):
    return succeed("sample", *arguments).stderr


def refused(*arguments):
    return refusal("sample", *arguments, code=None)


def test_pt_file_gives_png_grid_and_npz(weights, tmp_path):
    path, config, model = weights
    out = tmp_path / "out"
    sample("--weights", path, "--model", "dit", "--model-config", json.dumps(config), "--autoencoder", "pixels",
           "--num-images", 6, "--classes", "2,0", "--sampler", "ddim", "--num-sampling-steps", 5, "--cfg-scale", 1.5,
           "--seed", 3, "--out", out, "--npz", out / "all.npz", "--grid", "--batch", 4)
    images = pictures(out)
    assert list(images) == [f"00000{i}-class-{(2, 0)[i % 2]}.png" for i in range(6)]
    stacked = np.load(out / "all.npz")["arr_0"]
    assert stacked.dtype == np.uint8 and stacked.shape == (6, 8, 8, 3)
    assert np.array_equal(stacked, np.stack(list(images.values())))
    assert Image.open(out / "grid.png").size[0] >= 16
    assert stacked.std() > 10  # the EMA's pictures: the zero model's would be noise of another kind
    # A state dict by itself gives the same pictures.
    save_file(model.state_dict(), tmp_path / "ema.safetensors")
    again = tmp_path / "again"
    sample("--weights", tmp_path / "ema.safetensors", "--model", "dit", "--model-config", json.dumps(config),
           "--autoencoder", "pixels", "--num-images", 6, "--classes", "2,0", "--sampler", "ddim",
           "--num-sampling-steps", 5, "--cfg-scale", 1.5, "--seed", 3, "--out", again, "--batch", 4)
    assert all(np.array_equal(a, b) for a, b in zip(images.values(), pictures(again).values()))


def test_run_folder_by_class_name(run_folder, tmp_path):
    common = ["--run", run_folder, "--num-images", 4, "--num-sampling-steps", 4]
    sample(*common, "--classes", "birds,cats & dogs", "--out", tmp_path / "a")
    assert list(pictures(tmp_path / "a")) == ["000000-birds.png", "000001-Cats___dogs.png", "000002-birds.png",
                                              "000003-Cats___dogs.png"]
    sample(*common, "--classes", "1,0", "--out", tmp_path / "b", "--batch", 1)
    for a, b in zip(pictures(tmp_path / "a").values(), pictures(tmp_path / "b").values()):
        assert np.abs(a.astype(int) - b.astype(int)).max() <= 1
    sample(*common, "--classes", "1,0", "--out", tmp_path / "c", "--no-ema")
    assert any(np.abs(a.astype(int) - c.astype(int)).max() > 1
               for a, c in zip(pictures(tmp_path / "a").values(), pictures(tmp_path / "c").values()))


@pytest.mark.slow
def test_killed_sampling_goes_on(run_folder, tmp_path):
    count, steps = (40, 100) if FULL else (20, 60)
    common = ["--run", run_folder, "--num-images", count, "--classes", "all", "--num-sampling-steps", steps]
    arguments = [*common, "--batch", 2, "--npz", tmp_path / "all.npz", "--out", tmp_path / "out"]

    def killed(_):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "all.npz").unlink(missing_ok=True)
        drawn = lambda: len(list((tmp_path / "out").glob("0*.png")))
        return killed_once(lambda: drawn() >= 5, [program("kiln"), "sample", *arguments]) and drawn() < count

    until_interrupted(killed)
    done = len(list((tmp_path / "out").glob("0*.png")))
    assert done >= 5
    assert not (tmp_path / "all.npz").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("0*.png")}
    stderr = sample(*arguments)
    assert f"{done} of {count} images are there already" in stderr
    assert f"{count} / {count} images" in stderr
    assert all(path.stat().st_mtime_ns == time_ for path, time_ in before.items())
    images = pictures(tmp_path / "out")
    assert np.array_equal(np.load(tmp_path / "all.npz")["arr_0"], np.stack(list(images.values())))
    # The same as without interruption, whatever the batch was.
    sample(*common, "--batch", 8, "--out", tmp_path / "whole")
    for a, b in zip(images.values(), pictures(tmp_path / "whole").values()):
        assert np.abs(a.astype(int) - b.astype(int)).max() <= 1


def test_other_settings_are_refused_in_the_same_folder(run_folder, tmp_path):
    common = ["--run", run_folder, "--num-images", 2, "--num-sampling-steps", 3, "--out", tmp_path / "out"]
    sample(*common)
    assert "drawn with other settings: seed" in refused(*common, "--seed", 1)


@pytest.mark.parametrize("arguments, message", [
    (["--classes", "brids"], "birds"),
    (["--classes", "4"], "0..3"),
    (["--sampler", "flow_euler"], "ddpm or ddim or dpmpp_2m"),
    (["--sampler", "heun"], "dpmpp_2m"),
    (["--num-sampling-steps", "-1"], "--num-sampling-steps"),
    (["--num-images", "0"], "--num-images"),
    (["--ema-decay", "0.5"], "0.9999"),
    (["--cfg-convention", "both"], "--cfg-convention"),
    (["--no-png"], "--npz"),
    (["--compute-dtype", "f8"], "f8"),
    (["--autoencoder", "nowhere"], "nowhere"),
    (["--weights", "x.pt"], "either --run or --weights"),
    (["--model", "DiT-S/2"], "no effect"),
])
def test_bad_options_are_named(run_folder, tmp_path, arguments, message):
    assert message in refused("--run", run_folder, "--out", tmp_path / "out", *arguments)
    assert not list((tmp_path / "out").glob("*.png"))


def test_weights_of_another_shape_are_listed(kiln, weights, tmp_path):
    path, config, _ = weights
    result = kiln("sample", "--weights", path, "--model", "dit", "--model-config", json.dumps(config | dict(depth=3)),
                  "--autoencoder", "pixels", "--out", tmp_path / "out")
    assert result.returncode != 0 and "blocks.2" in result.stderr and str(path) in result.stderr


def test_weights_tell_what_the_config_leaves_open(tmp_path):
    """Channels and a learned sigma; three channels are pixels. Never the number of classes: it is the null class."""
    config, model = tiny_model(**PIXELS, learn_sigma=False)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    common = ["--weights", tmp_path / "w.safetensors", "--model", "dit", "--num-images", 2, "--num-sampling-steps", 3]
    (tmp_path / "all.json").write_text(json.dumps(config))
    sample(*common, "--model-config", tmp_path / "all.json", "--autoencoder", "pixels", "--out", tmp_path / "told")
    left = {key: value for key, value in config.items() if key not in ("in_channels", "learn_sigma")}
    assert "taken for pixels" in sample(*common, "--model-config", json.dumps(left), "--out", tmp_path / "asked")
    told, asked = pictures(tmp_path / "told"), pictures(tmp_path / "asked")
    assert len(told) == 2 and all(np.array_equal(told[name], asked[name]) for name in told)
    line = refused(*common, "--model-config", json.dumps(left | dict(num_classes=7)), "--out", tmp_path / "no")
    assert """--model-config '{"num_classes": 4}'""" in line


def test_weights_without_a_label_table_are_unconditional(tmp_path):
    config, model = tiny_model(**PIXELS | dict(num_classes=0, class_dropout_prob=0.0))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    left = {key: value for key, value in config.items() if key != "class_dropout_prob"}
    sample("--weights", tmp_path / "w.safetensors", "--model", "dit", "--model-config", json.dumps(left),
           "--autoencoder", "pixels", "--num-images", 1, "--num-sampling-steps", 2, "--out", tmp_path / "out")
    assert len(pictures(tmp_path / "out")) == 1


def test_an_npz_of_other_settings_is_refused(run_folder, tmp_path):
    common = ["--run", run_folder, "--num-images", 2, "--num-sampling-steps", 3, "--npz", tmp_path / "all.npz"]
    sample(*common, "--out", tmp_path / "a")
    before = (tmp_path / "all.npz").read_bytes()
    assert "all.npz holds images drawn with other settings" in refused(*common, "--seed", 1, "--out", tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())
    assert (tmp_path / "all.npz").read_bytes() == before
    sample(*common, "--out", tmp_path / "c")  # the same ones: nothing to add


def test_latents_need_their_autoencoder(run_folder, tmp_path):
    info = read_config(run_folder)
    info["autoencoder"].update(name="autoencoder_kl", scaling_factor=0.18215)
    (run_folder / "config.json").write_text(json.dumps(info))
    common = ["--run", run_folder, "--out", tmp_path / "out"]
    assert_fails("--autoencoder", "sample", *common, code=None)
    assert_fails("0.18215", "sample", *common, "--autoencoder", "pixels", code=None)


# --- starting from a picture ---

def diffusers_scheduler(name, **changes):
    """The scheduler whose steps --sampler `name` makes on a linear schedule."""
    linear = dict(beta_schedule="linear", beta_start=0.0001, beta_end=0.02) | changes
    return {"ddim": lambda: DDIMScheduler(**linear, clip_sample=False, timestep_spacing="linspace"),
            "dpmpp_2m": lambda: DPMSolverMultistepScheduler(**linear),
            "unipc": lambda: UniPCMultistepScheduler(**linear),
            "euler": lambda: EulerDiscreteScheduler(**linear, timestep_spacing="trailing")}[name]()


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    """A U-Net with an autoencoder and a text encoder, all random: the pipeline's arguments and Kiln's."""
    folder = tmp_path_factory.mktemp("sd")
    config = UNET | dict(cross_attention_dim=32, block_out_channels=[16, 16, 16])
    unet = unet_of(config)
    vae, (encoder, tokenizer) = tiny_kl(folder / "vae"), text_encoder("clip", folder / "clip")
    save_file(unet.state_dict(), folder / "unet.safetensors")
    noise = np.random.default_rng(3).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((112, 80), Image.BICUBIC).save(folder / "picture.png")
    parts = dict(vae=vae, text_encoder=encoder, tokenizer=tokenizer, unet=unet, safety_checker=None, feature_extractor=None,
                 requires_safety_checker=False)
    common = ["--weights", folder / "unet.safetensors", "--model", "unet2d_condition", "--autoencoder", folder / "vae",
              "--model-config", json.dumps(config),
              "--text-encoder", folder / "clip", "--prompt", "a red apple", "--prompt", "two birds", "--negative-prompt",
              "ugly", "--num-images", 2, "--threads", 1]
    return folder, parts, common


@pytest.mark.parametrize("sampler, steps, strength, objective", [
    ("ddim", 10, 0.6, "epsilon"), ("dpmpp_2m", 12, 0.72, "epsilon"), ("dpmpp_2m", 20, 1.0, "v_prediction"),
    ("euler", 9, 0.35, "epsilon"), ("unipc", 10, 0.5, "epsilon")])
@pytest.mark.slow
def test_starting_from_a_picture_equals_the_pipeline(stable_diffusion, tmp_path, sampler, steps, strength, objective):
    folder, parts, common = stable_diffusion
    sample(*common, "--image", folder / "picture.png", "--strength", strength, "--sampler", sampler, "--objective",
           objective, "--num-sampling-steps", steps, "--cfg-scale", 3, "--seed", 5, "--out", tmp_path / "out", "--npz",
           tmp_path / "all.npz")
    scheduler = diffusers_scheduler(sampler, prediction_type=objective, beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    pipeline = StableDiffusionImg2ImgPipeline(**parts, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    if sampler == "ddim":  # Kiln steps to the next timestep, diffusers T / steps further down
        scheduler.step = consecutive_ddim(scheduler)
    given = lambda draw: lambda shape, **_: kiln_normals(5, draw, range(2), shape[1:])
    with mock.patch("diffusers.models.autoencoders.vae.randn_tensor", given(POSTERIOR)), \
            mock.patch("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img.randn_tensor", given(START)):
        picture = Image.open(folder / "picture.png")
        want = pipeline(["a red apple", "two birds"], image=[picture, picture], strength=strength, num_inference_steps=steps,
                        guidance_scale=3, negative_prompt=["ugly", "ugly"], output_type="pt").images
    assert_pictures_of(read_npz(tmp_path / "all.npz"), want * 2 - 1)


def consecutive_ddim(scheduler):
    """DDIM's step to the next timestep of the list (Song et al. 2021, eq. 12)."""
    def step(output, t, x, **_):
        row = scheduler.timesteps.tolist().index(int(t))
        bar = scheduler.alphas_cumprod[int(t)]
        last = row + 1 == len(scheduler.timesteps)
        previous = scheduler.final_alpha_cumprod if last else scheduler.alphas_cumprod[int(scheduler.timesteps[row + 1])]
        x_0 = (x - (1 - bar).sqrt() * output) / bar.sqrt()
        return (previous.sqrt() * x_0 + (1 - previous).sqrt() * output,)
    return step


def test_starting_from_a_picture_with_a_flow_model(run_folder, tmp_path):
    """Where steps x strength is no whole number, as the pipelines of flow models round: SD3's own timesteps."""
    config, model = tiny_model(**PIXELS, learn_sigma=False)
    info = read_config(run_folder) | dict(model_config=config, objective=dict(type="flow", shift=3.0))
    make_run(tmp_path / "flow", model.state_dict(), info)
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "p.png")
    sample("--run", tmp_path / "flow", "--num-images", 2, "--classes", "1,3", "--num-sampling-steps", 10,
           "--cfg-scale", 2, "--cfg-convention", "plain", "--image", tmp_path / "p.png", "--strength", 0.55,
           "--seed", 8, "--out", tmp_path / "out", "--npz", tmp_path / "all.npz")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=np.linspace(1, 0.1, 10))
    timesteps, left = StableDiffusion3Img2ImgPipeline.get_timesteps(mock.Mock(scheduler=scheduler), 10, 0.55, "cpu")
    assert left == 6  # 5.5 rounded up; the other pipelines round down
    x_0 = torch.tensor(picture).permute(2, 0, 1)[None].float().repeat(2, 1, 1, 1) / 127.5 - 1
    x = scheduler.scale_noise(x_0, timesteps[:1].repeat(2), kiln_normals(8, START, range(2), (3, 8, 8)))
    y = torch.tensor([1, 3, 4, 4])
    with torch.no_grad():
        for t in timesteps:
            cond, uncond = model(torch.cat([x, x]), torch.full((4,), float(t)), y).chunk(2)
            x = scheduler.step(uncond + 2 * (cond - uncond), t, x).prev_sample
    assert_pictures_of(read_npz(tmp_path / "all.npz"), x)


def without_published(text):
    return [line for line in text.splitlines() if not line.startswith("kiln sample: as unet2d_condition is published")]


def test_a_picture_is_cropped_and_images_do_not_depend_on_the_batch(stable_diffusion, tmp_path):
    folder, _, common = stable_diffusion
    common = [*common, "--sampler", "dpmpp_2m", "--num-sampling-steps", 4, "--seed", 1, "--image"]
    wide = Image.open(folder / "picture.png")
    wide.crop((16, 0, 96, 80)).save(tmp_path / "square.png")
    sides = ["--height", 80, "--width", 80]
    sample(*common, folder / "picture.png", *sides, "--out", tmp_path / "a")
    sample(*common, tmp_path / "square.png", "--strength", 0.8, "--batch", 1, "--out", tmp_path / "b")
    for a, b in zip(pictures(tmp_path / "a").values(), pictures(tmp_path / "b").values(), strict=True):
        assert a.shape == (80, 80, 3) and np.abs(a.astype(int) - b.astype(int)).max() <= 1
    line = refusal("sample", *common, tmp_path / "square.png", *sides, "--strength", 0.5, "--out", tmp_path / "a",
                   code=None, lines=without_published)
    assert "drawn with other settings: image, sampler" in line


@pytest.mark.parametrize("arguments, message", [
    (["--strength", "0"], "--strength to be above 0 and at most 1, got 0"),
    (["--strength", "1.5"], "at most 1, got 1.5"),
    (["--strength", "nan"], "at most 1, got nan"),
    (["--strength", "0.2", "--num-sampling-steps", "4"], "leaves none of 4 steps"),
    (["--image", "nowhere.png"], "--image nowhere.png"),
    (["--image", "{text}"], "no picture.png"),
    (["--image", "{odd}"], "odd.png to be a multiple of 8, got 75; with --height and --width"),
    (["--autoencoder", "{decoder}"], "has no encoder"),
])
def test_bad_pictures_and_strengths_are_named(stable_diffusion, tmp_path, arguments, message):
    folder, parts, common = stable_diffusion
    (tmp_path / "no picture.png").write_text("not a picture")
    Image.new("RGB", (96, 75)).save(tmp_path / "odd.png")
    shutil.copytree(folder / "vae", tmp_path / "decoder")
    weights = {key: value for key, value in parts["vae"].state_dict().items() if not key.startswith(("encoder.", "quant_"))}
    save_file(weights, tmp_path / "decoder/diffusion_pytorch_model.safetensors")
    files = dict(text=tmp_path / "no picture.png", odd=tmp_path / "odd.png", decoder=tmp_path / "decoder")
    given = [argument.format(**files) for argument in arguments]
    given = dict(zip(common[::2], common[1::2])) | {"--image": folder / "picture.png"} | dict(zip(given[::2], given[1::2]))
    assert message in refused(*sum(given.items(), ()), "--out", tmp_path / "out")
