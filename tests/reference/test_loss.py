"""Objectives against their equations in float64, and (KILN_DIT_REPO) against the original's diffusion package."""

import importlib
import math
import os
import sys

import numpy as np
import pytest
import torch
from closeness import assert_close
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

LOSS = 2e-5
GRADIENT = 5e-5


def batch(t, channels=4, out_channels=8, size=8, seed=0, error=0.3, scale=0.6):
    """A model output that is off by `error`: a likelihood far in the tail would compare rounding errors."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.as_tensor(t)
    shape = (len(t), channels, size, size)
    x_start = scale * torch.randn(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    output = torch.randn(len(t), out_channels, size, size, generator=generator)
    output[:, :channels] = noise + error * output[:, :channels]
    return dict(x_start=x_start, noise=noise, model_output=output, t=t)


def column(table, t):
    return torch.as_tensor(np.asarray(table, dtype=np.float64))[t].view(-1, 1, 1, 1)


def images_mean(values):
    return values.flatten(1).mean(1)


# --- iddpm, written from Nichol & Dhariwal 2021 ---

def iddpm_betas(schedule, steps):
    if schedule == "linear":
        return np.linspace(0.1 / steps, 20 / steps, steps)
    alpha_bar = lambda s: math.cos((s / steps + 0.008) / 1.008 * math.pi / 2) ** 2
    return np.array([min(0.999, 1 - alpha_bar(i + 1) / alpha_bar(i)) for i in range(steps)])


def normal_cdf(x):
    return (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def iddpm_loss(inputs, schedule, steps, learn_sigma, rescale):
    x_0, noise, output = (inputs[k].double() for k in ("x_start", "noise", "model_output"))
    output.requires_grad_(True)
    t, channels = inputs["t"], x_0.shape[1]
    beta = iddpm_betas(schedule, steps)
    bar = np.cumprod(1 - beta)
    previous = np.concatenate([[1.0], bar[:-1]])
    x_t = column(np.sqrt(bar), t) * x_0 + column(np.sqrt(1 - bar), t) * noise
    epsilon = output[:, :channels]
    result = dict(x_t=x_t, mse=images_mean((epsilon - noise) ** 2))
    result["loss"] = result["mse"]
    if learn_sigma:
        posterior = beta * (1 - previous) / (1 - bar)
        log_posterior = np.log(np.concatenate([posterior[1:2], posterior[1:]]))
        fraction = (output[:, channels:] + 1) / 2
        log_variance = fraction * column(np.log(beta), t) + (1 - fraction) * column(log_posterior, t)
        mean_of = lambda x: (column(np.sqrt(previous) * beta / (1 - bar), t) * x
                             + column(np.sqrt(1 - beta) * (1 - previous) / (1 - bar), t) * x_t)
        x_0_hat = (x_t - column(np.sqrt(1 - bar), t) * epsilon.detach()) / column(np.sqrt(bar), t)
        mean, mean_hat, log_true = mean_of(x_0), mean_of(x_0_hat), column(log_posterior, t)
        kl = (log_variance - log_true - 1 + torch.exp(log_true - log_variance)
              + (mean - mean_hat) ** 2 * torch.exp(-log_variance)) / 2
        scale = torch.exp(-log_variance / 2)
        upper, lower = normal_cdf((x_0 - mean_hat + 1 / 255) * scale), normal_cdf((x_0 - mean_hat - 1 / 255) * scale)
        mass = torch.where(x_0 < -0.999, upper, torch.where(x_0 > 0.999, 1 - lower, upper - lower))
        nll = -torch.log(mass.clamp(min=1e-12))
        bits = torch.where(t == 0, images_mean(nll), images_mean(kl)) / math.log(2)
        result["vb"] = bits * (steps / 1000 if rescale else 1)
        result["loss"] = result["mse"] + result["vb"]
    result["grad_model_output"], = torch.autograd.grad(result["loss"].mean(), output)
    return result


IDDPM = {
    "DiT": dict(beta_schedule="linear", learn_sigma=True, rescale_learned_sigmas=False, num_train_timesteps=1000),
    "cosine, rescaled": dict(beta_schedule="squaredcos_cap_v2", learn_sigma=True, rescale_learned_sigmas=True,
                             num_train_timesteps=400),
    "fixed sigma": dict(beta_schedule="linear", learn_sigma=False, rescale_learned_sigmas=False,
                        num_train_timesteps=1000),
    "short": dict(beta_schedule="linear", learn_sigma=True, rescale_learned_sigmas=True, num_train_timesteps=50),
}


@pytest.mark.parametrize("config", IDDPM.values(), ids=IDDPM.keys())
def test_iddpm(conformance, config):
    last = config["num_train_timesteps"] - 1
    inputs = batch([0, 1, 2, last // 3, last // 2, last], out_channels=8 if config["learn_sigma"] else 4)
    # x_0 beyond both edges of the picture range, where the outer bins reach to infinity.
    inputs["x_start"][0, 0, 0] = torch.linspace(-1.3, 1.3, 8)
    got = conformance("loss", config=dict(type="iddpm", **config), inputs=inputs)
    want = iddpm_loss(inputs, config["beta_schedule"], config["num_train_timesteps"], config["learn_sigma"],
                      config["rescale_learned_sigmas"])
    if not config["learn_sigma"]:
        want["vb"] = torch.zeros(len(inputs["t"]))  # no part of the loss, but one of the outputs
    for name in ("x_t", "mse", "vb", "loss"):
        assert_close(got[name], want[name], LOSS)
    for row in range(len(inputs["t"])):  # one by one: the row of t = 0 is far larger than the others
        assert_close(got["grad_model_output"][row], want["grad_model_output"][row], GRADIENT)
    assert torch.equal(got["model_t"], inputs["t"].float())


def test_iddpm_bound_trains_the_variance_alone(conformance):
    """The gradient by epsilon is that of the mse: the bound's mean is a constant."""
    inputs = batch([0, 5, 700])
    got = conformance("loss", config=dict(type="iddpm", learn_sigma=True), inputs=inputs)
    epsilon, noise = inputs["model_output"][:, :4], inputs["noise"]
    assert_close(got["grad_model_output"][:, :4], 2 * (epsilon - noise) / noise.numel(), GRADIENT)
    assert got["grad_model_output"][:, 4:].abs().max() > 0


@pytest.mark.skipif("KILN_DIT_REPO" not in os.environ, reason="KILN_DIT_REPO names no checkout of the original DiT")
@pytest.mark.parametrize("config", IDDPM.values(), ids=IDDPM.keys())
def test_iddpm_equals_the_original(conformance, config):
    sys.path.insert(0, os.environ["KILN_DIT_REPO"])
    create_diffusion = importlib.import_module("diffusion").create_diffusion
    last = config["num_train_timesteps"] - 1
    inputs = batch([0, 1, 2, last // 3, last // 2, last], out_channels=8 if config["learn_sigma"] else 4)
    diffusion = create_diffusion("", noise_schedule=config["beta_schedule"], learn_sigma=config["learn_sigma"],
                                 rescale_learned_sigmas=config["rescale_learned_sigmas"],
                                 diffusion_steps=config["num_train_timesteps"])
    x, noise, output = (inputs[k].double() for k in ("x_start", "noise", "model_output"))
    output.requires_grad_(True)
    want = diffusion.training_losses(lambda *_: output, x, inputs["t"], noise=noise)
    gradient, = torch.autograd.grad(want["loss"].mean(), output)
    got = conformance("loss", config=dict(type="iddpm", **config), inputs=inputs)
    for name in set(want):
        assert_close(got[name], want[name], LOSS)
    assert_close(got["grad_model_output"], gradient, GRADIENT)


# --- ddpm, against diffusers' scheduler ---

SD = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
DDPM = {
    "SD epsilon": SD | dict(prediction_type="epsilon"),
    "SD v": SD | dict(prediction_type="v_prediction"),
    "x_0": dict(beta_schedule="linear", beta_start=1e-4, beta_end=0.02, prediction_type="sample"),
    "min-SNR epsilon": SD | dict(prediction_type="epsilon", snr_gamma=5.0),
    "min-SNR v": SD | dict(prediction_type="v_prediction", snr_gamma=5.0),
    "min-SNR x_0": SD | dict(prediction_type="sample", snr_gamma=1.5),
    "cosine": dict(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", snr_gamma=None),
    "zero terminal SNR": SD | dict(prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_gamma=5.0),
}


@pytest.mark.parametrize("out_channels", [4, 8])
@pytest.mark.parametrize("config", DDPM.values(), ids=DDPM.keys())
def test_ddpm(conformance, config, out_channels):
    inputs = batch([0, 1, 250, 700, 999], out_channels=out_channels)
    scheduler = DDPMScheduler(**{k: v for k, v in config.items() if k != "snr_gamma"})
    x, noise, t = inputs["x_start"], inputs["noise"], inputs["t"]
    output = inputs["model_output"].double().requires_grad_(True)
    kind, gamma = config["prediction_type"], config.get("snr_gamma")
    target = {"epsilon": noise, "sample": x, "v_prediction": scheduler.get_velocity(x, noise, t)}[kind]
    mse = images_mean((output[:, :4] - target.double()) ** 2)
    weight = torch.ones(len(t))
    if gamma is not None:
        snr = compute_snr(scheduler, t).double()
        divisor = {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones_like(snr)}[kind]
        weight = torch.minimum(snr, torch.full_like(snr, gamma)) / divisor
    loss = weight * mse
    gradient, = torch.autograd.grad(loss.mean(), output)
    got = conformance("loss", config=dict(type="ddpm", **config), inputs=inputs)
    want = dict(x_t=scheduler.add_noise(x, noise, t), target=target, mse=mse, loss=loss)
    for name, value in want.items():
        assert_close(got[name], value, LOSS)
    for row in range(len(t)):
        if gradient[row].abs().max() > 0:
            assert_close(got["grad_model_output"][row], gradient[row], GRADIENT)
        else:
            assert got["grad_model_output"][row].abs().max() == 0
    assert torch.equal(got["model_t"], t.float())


# --- flow ---

def sana_table(shift):
    """Sana's own: 1 minus a ramp from 1 to 0.001, shifted; the model is given truncated timesteps."""
    sigma = 1 - np.linspace(1.0, 0.001, 1000)
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    return sigma, torch.tensor(sigma * 1000, dtype=torch.int64).numpy()


def flow_levels(config, inputs):
    shift = config.get("shift", 1.0)
    if config["mode"] == "sana":
        sigma, timesteps = sana_table(shift)
        return sigma[inputs["t"]], timesteps[inputs["t"]]
    if config["mode"] == "diffusers":
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        return scheduler.sigmas[inputs["t"]].numpy(), scheduler.timesteps[inputs["t"]].numpy()
    u = inputs["u"].double().numpy()
    sigma = shift * u / (1 + (shift - 1) * u)
    return sigma, sigma * 1000


FLOW = {
    "continuous": dict(mode="continuous", shift=1.0),
    "continuous, shifted": dict(mode="continuous", shift=3.0, weighting="cosmap"),
    "sana": dict(mode="sana", shift=3.0, weighting="none"),
    "sana, cosmap": dict(mode="sana", shift=4.5, weighting="cosmap"),
    "diffusers": dict(mode="diffusers", shift=3.0, weighting="cosmap"),
}


@pytest.mark.parametrize("out_channels", [4, 8])
@pytest.mark.parametrize("config", FLOW.values(), ids=FLOW.keys())
def test_flow(conformance, config, out_channels):
    inputs = batch([0, 1, 2, 100, 250, 500, 998, 999], out_channels=out_channels)
    inputs["u"] = torch.tensor([0.0, 1e-4, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
    sigma, timesteps = flow_levels(config, inputs)
    level = torch.as_tensor(sigma).double().view(-1, 1, 1, 1)
    x, noise = inputs["x_start"].double(), inputs["noise"].double()
    output = inputs["model_output"].double().requires_grad_(True)
    mse = images_mean((output[:, :4] - (noise - x)) ** 2)
    weighting = config.get("weighting", "none")
    weight = compute_loss_weighting_for_sd3(weighting, torch.as_tensor(sigma).double()).view(-1)
    gradient, = torch.autograd.grad((weight * mse).mean(), output)
    got = conformance("loss", config=dict(type="flow", **config), inputs=inputs)
    assert_close(got["x_t"], (1 - level) * x + level * noise, LOSS)
    assert_close(got["target"], noise - x, LOSS)
    assert_close(got["loss"], weight * mse, LOSS)
    assert_close(got["grad_model_output"], gradient, GRADIENT)
    want_t = torch.as_tensor(timesteps).float()
    if config["mode"] == "continuous":
        assert_close(got["model_t"], want_t, 1e-6)
    else:
        assert torch.equal(got["model_t"], want_t)


@pytest.mark.parametrize("negative", [None, [2, 0, 3, 3]], ids=["the sample before", "named samples"])
@pytest.mark.parametrize("weighting", ["none", "cosmap"])
def test_contrastive_flow(conformance, weighting, negative):
    """Stoica et al. 2025: a sample's distance from its own target, less lambda times that from another's."""
    inputs = batch([0, 1, 2, 3], out_channels=4)
    inputs["u"] = torch.tensor([0.05, 0.3, 0.6, 0.95])
    if negative:
        inputs["negative"] = torch.tensor(negative)
    output = inputs["model_output"].double().requires_grad_(True)
    target = (inputs["noise"] - inputs["x_start"]).double()
    other = target[negative] if negative else target.roll(1, 0)
    mse, contrastive = images_mean((output - target) ** 2), images_mean((output - other) ** 2)
    loss = (mse - 0.3 * contrastive) * compute_loss_weighting_for_sd3(weighting, inputs["u"].double())
    gradient, = torch.autograd.grad(loss.mean(), output)
    got = conformance("loss", config=dict(type="flow", weighting=weighting, contrastive_lambda=0.3), inputs=inputs)
    for name, want in dict(mse=mse, contrastive=contrastive, loss=loss, grad_model_output=gradient).items():
        assert_close(got[name], want, GRADIENT if name.startswith("grad") else LOSS)
    plain = conformance("loss", config=dict(type="flow", contrastive_lambda=0), inputs=inputs)
    assert "contrastive" not in plain and torch.equal(plain["loss"], got["mse"])


@pytest.mark.parametrize("shift", [1.0, 2.0, 3.0, 4.5])
def test_sana_table_truncates_as_sana_does(conformance, shift):
    """Every timestep: some levels are whole timesteps up to one rounding error."""
    t = torch.arange(1000)
    inputs = dict(x_start=torch.zeros(1000, 1, 1, 1), noise=torch.ones(1000, 1, 1, 1),
                  model_output=torch.zeros(1000, 1, 1, 1), t=t)
    got = conformance("loss", config=dict(type="flow", mode="sana", shift=shift), inputs=inputs)
    sigma, timesteps = sana_table(shift)
    assert torch.equal(got["model_t"], torch.as_tensor(timesteps).float())
    assert_close(got["x_t"].flatten(), torch.as_tensor(sigma), 1e-6)


# --- bad input ---

@pytest.mark.parametrize("config, message", [
    (dict(type="vlb"), "iddpm, ddpm, flow"),
    (dict(type="iddpm", beta_schedule="quad"), "beta_schedule"),
    (dict(type="iddpm", num_train_timesteps=0), "num_train_timesteps"),
    (dict(type="iddpm", num_train_timesteps=10), "num_train_timesteps"),
    (dict(type="iddpm", learn_sigma="yes"), "learn_sigma"),
    (dict(type="ddpm", prediction_type="score"), "prediction_type"),
    (dict(type="ddpm", snr_gamma=-1), "snr_gamma"),
    (dict(type="flow", mode="rectified"), "mode"),
    (dict(type="flow", shift=0), "shift"),
    (dict(type="flow", contrastive_lambda=1), "contrastive_lambda"),
    (dict(type="ddpm", trained_betas="linear"), "expected trained_betas to be a list of numbers"),
])
def test_bad_configs_are_named(conformance, config, message):
    assert message in conformance("loss", config=config, inputs=batch([1, 2]), expect_error=True)


@pytest.mark.slow
def test_bad_inputs_are_named(conformance):
    config = dict(type="iddpm", learn_sigma=True)
    missing = batch([1, 2])
    del missing["noise"]
    for expected, inputs in (("0..999", batch([1, 1000])), ("8", batch([1, 2], out_channels=4)),
                             ("fractions", batch([1.0, 2.5])), ("noise", missing),
                             ("at least one sample", batch(torch.zeros(0, dtype=torch.int64)))):
        assert expected in conformance("loss", config=config, inputs=inputs, expect_error=True)
    far = batch([1, 2], out_channels=4) | dict(u=torch.rand(2), negative=torch.tensor([0, 2]))
    contrastive = dict(type="flow", contrastive_lambda=0.1)
    assert "negative in 0..1" in conformance("loss", config=contrastive, inputs=far, expect_error=True)
