"""Samplers, step by step on given model outputs, against diffusers' schedulers and (KILN_DIT_REPO) the original DiT."""

import contextlib
import importlib
import os
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from closeness import assert_close
from diffusers import (DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler,
                       EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, PNDMScheduler, UniPCMultistepScheduler)

ROW = 1e-4


def draws(steps, channels=4, out_channels=4, size=6, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, channels, size, size)
    return dict(noise=torch.randn(shape, generator=generator),
                model_outputs=torch.randn(steps, batch, out_channels, size, size, generator=generator),
                step_noise=torch.randn(steps, *shape, generator=generator))


@contextlib.contextmanager
def given_noise(rows):
    """diffusers' schedulers draw row i of `rows` at step i."""
    current = dict(row=None)
    with contextlib.ExitStack() as stack:
        for module in ("ddim", "ddpm", "dpmsolver_multistep", "flow_match_euler_discrete", "euler_discrete",
                       "euler_ancestral_discrete"):
            name = f"diffusers.schedulers.scheduling_{module}.randn_tensor"
            stack.enter_context(mock.patch(name, lambda *_, **__: rows[current["row"]]))
        yield lambda row: current.update(row=row)


def run_scheduler(scheduler, steps, inputs, **step_options):
    scheduler.set_timesteps(steps)
    x, samples = inputs["noise"] * getattr(scheduler, "init_noise_sigma", 1.0), []
    with given_noise(inputs["step_noise"]) as at_row:
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        for row, t in enumerate(scheduler.timesteps):
            at_row(row)
            scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else None
            x = scheduler.step(inputs["model_outputs"][row], t, x, **step_options).prev_sample
            samples.append(x)
    return scheduler.timesteps.float(), torch.stack(samples)


def assert_rows_close(got, timesteps, samples):
    assert torch.equal(got["timesteps"], timesteps)
    for row in range(len(samples)):
        assert_close(got["samples"][row], samples[row], ROW)


def scheduler_config(scheduler):
    """As scheduler_config.json holds it, -Infinity included."""
    return dict(scheduler.config)


SD = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
V = dict(prediction_type="v_prediction")

DDIM = {
    "SD": (50, 0.0, SD | dict(clip_sample=False, set_alpha_to_one=False, steps_offset=1)),
    "stochastic": (20, 0.7, SD | dict(clip_sample=False, set_alpha_to_one=False, steps_offset=1)),
    "eta 1, clipped": (10, 1.0, dict(clip_sample=True, clip_sample_range=1.5)),
    "v, trailing, zero SNR": (7, 0.0, SD | V | dict(clip_sample=False, timestep_spacing="trailing",
                                                   rescale_betas_zero_snr=True)),
    "sample, linspace": (12, 0.3, dict(prediction_type="sample", timestep_spacing="linspace", clip_sample=False)),
    "cosine": (48, 0.0, V | dict(beta_schedule="squaredcos_cap_v2", timestep_spacing="trailing")),
    "all timesteps": (100, 0.0, dict(num_train_timesteps=100, beta_end=0.1)),
    "trained betas": (5, 0.5, dict(trained_betas=np.linspace(1e-3, 0.1, 40).tolist(), num_train_timesteps=40)),
}
DDPM = {
    "default": (20, dict()),
    "SD, no clipping": (50, SD | dict(clip_sample=False)),
    "fixed large, offset": (10, SD | dict(variance_type="fixed_large", steps_offset=1, clip_sample=False)),
    "small log": (10, dict(variance_type="fixed_small_log")),
    "v, trailing, zero SNR": (13, SD | V | dict(timestep_spacing="trailing", rescale_betas_zero_snr=True)),
    "sample, linspace": (9, dict(prediction_type="sample", timestep_spacing="linspace", clip_sample_range=2.0)),
    "learned range": (25, dict(variance_type="learned_range", clip_sample=False)),
    "sigmoid": (6, dict(beta_schedule="sigmoid")),
    "cosine, all": (60, dict(beta_schedule="squaredcos_cap_v2", num_train_timesteps=60)),
}
FLOW = {
    "shift 1": (28, dict()),
    "shift 3": (20, dict(shift=3.0)),
    "one step": (1, dict(shift=3.0)),
    "terminal": (12, dict(shift=2.0, shift_terminal=0.1)),
    "karras": (10, dict(use_karras_sigmas=True)),
    "exponential": (10, dict(shift=3.0, use_exponential_sigmas=True)),
    "stochastic": (8, dict(shift=3.0, stochastic_sampling=True)),
}


def test_flow_euler_with_given_sigmas(conformance):
    scheduler, inputs = FlowMatchEulerDiscreteScheduler(shift=3.0), draws(5)
    sigmas = np.linspace(1, 0.2, 5).tolist()
    got = conformance("sampler", inputs=inputs, config=dict(type="flow_euler", steps=5, sigmas=sigmas,
                                                            scheduler=scheduler_config(scheduler)))
    scheduler.set_timesteps = mock.Mock(side_effect=lambda n: type(scheduler).set_timesteps(scheduler, n, sigmas=sigmas))
    timesteps, samples = run_scheduler(scheduler, 5, inputs)
    assert_close(got["timesteps"], timesteps, 1e-6)
    assert_close(got["samples"], samples, ROW)


DPM = {
    "PixArt": (20, dict(lower_order_final=True)),
    "SD, few steps": (8, SD | dict(steps_offset=1, timestep_spacing="leading")),
    "order 1": (6, dict(solver_order=1)),
    "order 3": (20, SD | dict(solver_order=3)),
    "order 3, few steps": (9, SD | dict(solver_order=3, final_sigmas_type="sigma_min")),
    "heun": (16, SD | dict(solver_type="heun")),
    "v, trailing": (10, SD | V | dict(timestep_spacing="trailing")),
    "sample": (5, dict(prediction_type="sample", euler_at_final=True)),
    "karras": (25, SD | dict(use_karras_sigmas=True)),
    "karras, cosine": (12, dict(beta_schedule="squaredcos_cap_v2", use_karras_sigmas=True, lambda_min_clipped=-5.1)),
    "lu": (15, SD | dict(use_lu_lambdas=True)),
    "exponential": (15, SD | dict(use_exponential_sigmas=True)),
    "cosine, clipped lambda": (20, dict(beta_schedule="squaredcos_cap_v2", lambda_min_clipped=-5.1)),
    "zero SNR": (10, SD | V | dict(rescale_betas_zero_snr=True)),
    "sigma_min": (20, SD | dict(final_sigmas_type="sigma_min")),
    "Sana": (20, dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)),
    "Sana, few steps, heun": (7, dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
                                     solver_type="heun")),
    "sde": (20, SD | dict(algorithm_type="sde-dpmsolver++")),
    "sde, heun": (16, SD | dict(algorithm_type="sde-dpmsolver++", solver_type="heun")),
    "sde, order 3": (16, SD | dict(algorithm_type="sde-dpmsolver++", solver_order=3)),
}


def test_sana_timesteps_are_truncated(conformance):
    config = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    got = conformance("sampler", inputs=draws(20), config=dict(type="dpmpp", steps=20, scheduler=config))
    assert got["timesteps"][:3].tolist() == [999, 982, 963]


EULER = {
    "SD": (20, SD | dict(steps_offset=1, timestep_spacing="leading")),
    "linspace, fractional timesteps": (7, SD),
    "v, trailing, zero SNR": (9, SD | V | dict(timestep_spacing="trailing", rescale_betas_zero_snr=True)),
    "cosine": (30, dict(beta_schedule="squaredcos_cap_v2")),
}
EULER_LEVELS = {
    "karras": (12, SD | dict(use_karras_sigmas=True)),
    "exponential, sigma_min": (11, SD | dict(use_exponential_sigmas=True, final_sigmas_type="sigma_min")),
    "sample": (6, dict(prediction_type="sample")),
}
UNIPC = {
    "default": (10, dict()),
    "SD, leading": (20, SD | dict(steps_offset=1, timestep_spacing="leading")),
    "order 1": (6, SD | dict(solver_order=1)),
    "order 3": (12, SD | dict(solver_order=3)),
    "order 3, bh1, trailing": (9, SD | V | dict(solver_order=3, solver_type="bh1", timestep_spacing="trailing",
                                                  final_sigmas_type="sigma_min")),  # to zero it gives NaN there
    "first steps uncorrected": (8, SD | dict(disable_corrector=[0, 1, 4])),
    "karras": (15, SD | dict(use_karras_sigmas=True)),
    "exponential, sigma_min": (15, SD | dict(use_exponential_sigmas=True, final_sigmas_type="sigma_min")),
    "sigma_min": (10, SD | dict(final_sigmas_type="sigma_min", lower_order_final=False)),
    "flow": (11, dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)),
    "flow, order 3": (11, dict(prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=3)),
    "sample": (7, dict(prediction_type="sample")),
    "zero SNR": (10, SD | V | dict(rescale_betas_zero_snr=True)),
}
PNDM = {
    "SD": (20, SD | dict(skip_prk_steps=True, steps_offset=1)),
    "PLMS, v": (7, SD | V | dict(skip_prk_steps=True, set_alpha_to_one=True)),
    "PLMS, linspace": (5, dict(skip_prk_steps=True, timestep_spacing="linspace")),
    "Runge-Kutta first": (10, dict()),
    "Runge-Kutta, v": (4, SD | V),
    "two steps": (2, SD | dict(skip_prk_steps=True)),
}
SAMPLERS = {"ddim": (DDIMScheduler, DDIM), "ddpm": (DDPMScheduler, DDPM), "pndm": (PNDMScheduler, PNDM),
            "flow_euler": (FlowMatchEulerDiscreteScheduler, FLOW), "dpmpp": (DPMSolverMultistepScheduler, DPM),
            "euler": (EulerDiscreteScheduler, EULER | EULER_LEVELS), "unipc": (UniPCMultistepScheduler, UNIPC),
            "euler_ancestral": (EulerAncestralDiscreteScheduler, EULER)}


@pytest.mark.parametrize("sampler, name",
                         [(sampler, name) for sampler, (_, cases) in SAMPLERS.items() for name in cases])
def test_samplers_equal_diffusers(conformance, sampler, name):
    steps, *eta, config = SAMPLERS[sampler][1][name]
    scheduler, options = SAMPLERS[sampler][0](**config), dict(eta=eta[0]) if eta else {}
    calls = steps
    if sampler == "pndm":  # its timesteps are model calls: more than steps
        scheduler.set_timesteps(steps)
        calls = len(scheduler.timesteps)
    inputs = draws(calls, out_channels=8 if config.get("variance_type", "").startswith("learned") else 4)
    got = conformance("sampler", inputs=inputs,
                      config=dict(type=sampler, steps=steps, scheduler=scheduler_config(scheduler), **options))
    timesteps, samples = run_scheduler(scheduler, steps, inputs, **options)
    if sampler in ("flow_euler", "euler"):  # fractions
        assert_close(got["timesteps"], timesteps, 1e-6)
        timesteps = got["timesteps"]
    assert_rows_close(got, timesteps, samples)


def dpms(steps, noise, outputs, prediction):
    """PixArt's DPM-Solver++ (2M) from Lu et al. 2022, algorithm 2, in f64: log alpha is linear between the training
    timesteps n, which stand at times (n + 1) / 1000."""
    log_alphas = np.cumsum(np.log(1 - np.linspace(1e-4, 0.02, 1000))) / 2
    times = np.linspace(1, 1e-3, steps + 1)
    log_alpha = np.interp(times, np.arange(1, 1001) / 1000, log_alphas)
    alpha, sigma = np.exp(log_alpha), np.sqrt(1 - np.exp(2 * log_alpha))
    levels = np.log(alpha / sigma)
    x, previous, rows = noise.double(), None, []
    for i in range(steps):
        output = outputs[i, :, :noise.shape[1]].double()
        x_0 = (x - sigma[i] * output) / alpha[i] if prediction == "epsilon" else alpha[i] * x - sigma[i] * output
        slope = 0
        if 0 < i < steps - 1:
            slope = (x_0 - previous) * (levels[i + 1] - levels[i]) / (levels[i] - levels[i - 1]) / 2
        x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * np.expm1(levels[i] - levels[i + 1]) * (x_0 + slope)
        previous = x_0
        rows.append(x)
    return torch.tensor((times[:-1] - 1e-3) * 1000), torch.stack(rows)


@pytest.mark.parametrize("steps, prediction", [(2, "epsilon"), (14, "epsilon"), (20, "v_prediction")])
def test_pixart_dpms(conformance, steps, prediction):
    inputs = draws(steps)
    inputs["model_outputs"] = torch.cat([inputs["model_outputs"], inputs["model_outputs"].flip(0)], 2)  # with a sigma
    got = conformance("sampler", inputs=inputs, config=dict(type="pixart_dpms", steps=steps, prediction_type=prediction))
    times, rows = dpms(steps, inputs["noise"], inputs["model_outputs"], prediction)
    assert_close(got["timesteps"], times, 1e-6)
    for mine, theirs in zip(got["samples"], rows):
        assert_close(mine, theirs, 1e-4)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "flow_euler", "dpmpp", "euler", "unipc", "pndm", "pixart_dpms"])
def test_a_predicted_sigma_is_dropped(conformance, sampler):
    """PixArt predicts 2C channels; only IDDPM and variance_type learned look at the second half."""
    inputs = draws(15, out_channels=8)  # pndm calls the model more often than it steps
    config = dict(type=sampler, steps=6, scheduler={})
    got = conformance("sampler", inputs=inputs, config=config)
    inputs["model_outputs"] = inputs["model_outputs"][:, :, :4].clone()
    want = conformance("sampler", inputs=inputs, config=config)
    assert torch.equal(got["samples"], want["samples"])


# --- iddpm ---

def space(respacing):
    """The respacings' values, from the papers' definition."""
    if not respacing:
        return list(range(1000))
    if respacing.startswith("ddim"):
        count = int(respacing[4:])
        return next(list(range(0, 1000, s)) for s in range(1, 1000) if len(range(0, 1000, s)) == count)
    counts = [int(part) for part in respacing.split(",")]
    sizes = [1000 // len(counts) + (i < 1000 % len(counts)) for i in range(len(counts))]
    kept, start = [], 0
    for count, size in zip(counts, sizes):
        position, stride = 0.0, (size - 1) / (count - 1) if count > 1 else 1
        for _ in range(count):
            kept.append(start + round(position))
            position += stride
        start += size
    return kept


@pytest.mark.parametrize("respacing", ["1", "2", "10", "27", "250", "1000", "3,5,8", "10,10,10", "1,1", "ddim25",
                                       "ddim50", "ddim1000", ""])
def test_iddpm_respacing(conformance, respacing):
    want = space(respacing)[::-1]
    inputs = draws(len(want), channels=1, out_channels=2, size=1, batch=1)
    got = conformance("sampler", inputs=inputs, config=dict(type="iddpm", steps=respacing, learn_sigma=True))
    assert got["timesteps"].tolist() == want


@pytest.mark.parametrize("steps", [10, 25, 40])
def test_iddpm_equals_diffusers_on_its_timesteps(conformance, steps):
    """DDPMScheduler with a learned range, on the respaced timesteps."""
    kept = space(str(steps))[::-1]
    scheduler = DDPMScheduler(variance_type="learned_range", clip_sample=False)
    inputs = draws(steps, out_channels=8)
    set_timesteps = scheduler.set_timesteps
    scheduler.set_timesteps = lambda n: set_timesteps(timesteps=kept)
    timesteps, samples = run_scheduler(scheduler, steps, inputs)
    got = conformance("sampler", inputs=inputs, config=dict(type="iddpm", steps=str(steps), learn_sigma=True))
    assert_rows_close(got, timesteps, samples)


IDDPM = {
    "DiT": dict(steps="10", learn_sigma=True, clip_denoised=False),
    "clipped": dict(steps="3,5,8", learn_sigma=True, clip_denoised=True),
    "sigma small": dict(steps="20", learn_sigma=False, sigma_small=True, clip_denoised=False),
    "sigma large": dict(steps="20", learn_sigma=False, sigma_small=False, clip_denoised=True),
    "ddim strides": dict(steps="ddim25", learn_sigma=True, clip_denoised=False),
    "cosine": dict(steps="12", learn_sigma=True, clip_denoised=False, beta_schedule="squaredcos_cap_v2"),
}
IDDPM_DDIM = {
    "deterministic": dict(steps="ddim25", learn_sigma=True, clip_denoised=False, eta=0.0),
    "eta": dict(steps="10", learn_sigma=True, clip_denoised=False, eta=0.6),
    "eta 1, clipped": dict(steps="8", learn_sigma=False, clip_denoised=True, eta=1.0),
}


def original_samples(config, inputs, ddim):
    """The original's loops in float64, each step drawing its own row."""
    sys.path.insert(0, os.environ["KILN_DIT_REPO"])
    create_diffusion = importlib.import_module("diffusion").create_diffusion
    diffusion = create_diffusion(config["steps"], noise_schedule=config.get("beta_schedule", "linear"),
                                 learn_sigma=config["learn_sigma"], sigma_small=config.get("sigma_small", False))
    rows, seen = iter(inputs["step_noise"].double()), []

    def model(x, t):
        seen.append(t[0].item())
        return inputs["model_outputs"][len(seen) - 1].double()

    options = dict(clip_denoised=config["clip_denoised"])
    loop = diffusion.p_sample_loop_progressive
    if ddim:
        loop, options["eta"] = diffusion.ddim_sample_loop_progressive, config["eta"]
    samples = []
    with mock.patch("torch.randn_like", lambda x: next(rows)):
        for out in loop(model, inputs["noise"].shape, inputs["noise"].double(), device="cpu", **options):
            samples.append(out["sample"])
    return torch.tensor(seen).float(), torch.stack(samples)


@pytest.mark.skipif("KILN_DIT_REPO" not in os.environ, reason="KILN_DIT_REPO names no checkout of the original DiT")
@pytest.mark.parametrize("kind, config", [("iddpm", c) for c in IDDPM.values()] +
                         [("iddpm_ddim", c) for c in IDDPM_DDIM.values()])
def test_iddpm_equals_the_original(conformance, kind, config):
    inputs = draws(len(space(config["steps"])), out_channels=8 if config["learn_sigma"] else 4)
    got = conformance("sampler", inputs=inputs, config=dict(type=kind, **config))
    assert_rows_close(got, *original_samples(config, inputs, ddim=kind == "iddpm_ddim"))


@pytest.mark.parametrize("config", IDDPM_DDIM.values(), ids=IDDPM_DDIM.keys())
def test_iddpm_ddim_equation(conformance, config):
    """Song et al. 2021, eq. 12, in float64."""
    kept = space(config["steps"])
    inputs = draws(len(kept), out_channels=8 if config["learn_sigma"] else 4)
    bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[kept]
    x, want = inputs["noise"].double(), []
    for row, i in enumerate(reversed(range(len(kept)))):
        now, previous = bar[i], bar[i - 1] if i else 1.0
        epsilon = inputs["model_outputs"][row, :, :4].double()
        x_0 = (x - (1 - now) ** 0.5 * epsilon) / now**0.5
        if config["clip_denoised"]:
            x_0 = x_0.clamp(-1, 1)
        epsilon = (x - now**0.5 * x_0) / (1 - now) ** 0.5
        sigma = config["eta"] * ((1 - previous) / (1 - now) * (1 - now / previous)) ** 0.5
        x = previous**0.5 * x_0 + (1 - previous - sigma**2) ** 0.5 * epsilon + sigma * inputs["step_noise"][row]
        want.append(x)
    got = conformance("sampler", inputs=inputs, config=dict(type="iddpm_ddim", **config))
    for row in range(len(kept)):
        assert_close(got["samples"][row], want[row], ROW)


# --- bad input ---

@pytest.mark.parametrize("config, message", [
    (dict(type="heun"), "iddpm_ddim"),
    (dict(type="iddpm", steps="ddim900"), "no integer stride"),
    (dict(type="iddpm", steps="1001"), "1001"),
    (dict(type="iddpm", steps="ten"), "ten"),
    (dict(type="iddpm", steps="3,,5"), "steps"),
    (dict(type="iddpm"), "steps"),
    (dict(type="ddim", steps=0), "steps"),
    (dict(type="ddim", steps=2000), "1000"),
    (dict(type="ddim", steps=5, scheduler=dict(thresholding=True)), "thresholding"),
    (dict(type="ddim", steps=5, scheduler=dict(beta_schedule="quadratic")), "beta_schedule"),
    (dict(type="ddim", steps=5, scheduler=dict(prediction_type="score")), "prediction_type"),
    (dict(type="ddim", steps=1000, scheduler=dict(steps_offset=1)), "steps_offset"),
    (dict(type="ddpm", steps=5, scheduler=dict(variance_type="fixed_large_log")), "variance_type"),
    (dict(type="flow_euler", steps=5, scheduler=dict(use_dynamic_shifting=True)), "use_dynamic_shifting"),
    (dict(type="dpmpp", steps=5, scheduler=dict(algorithm_type="dpmsolver")), "algorithm_type"),
    (dict(type="dpmpp", steps=5, scheduler=dict(solver_order=4)), "solver_order"),
    (dict(type="dpmpp", steps=5, scheduler=[]), "object"),
    (dict(type="ddim", steps="5"), "expected steps to be an integer, got \"5\""),
    (dict(type="ddim", steps=5, eta="0"), "expected eta to be a number"),
    (dict(type="ddim", steps=5, scheduler=dict(trained_betas=[0.1, "x"])), "expected trained_betas to be a list of numbers"),
    (dict(type="flow_euler", steps=5, sigmas="linear"), "expected sigmas to be a list of numbers"),
    (dict(type="pixart_dpms", steps=5, prediction_type="flow_prediction"), "flow_prediction needs flow_euler or dpmpp"),
    (dict(type="unipc", steps=5, scheduler=dict(final_sigmas_type="zero", lower_order_final=False)), "needs lower_order_final"),
    (dict(type=None), "iddpm_ddim"),
])
def test_bad_configs_are_named(conformance, config, message):
    error = conformance("sampler", config=config, inputs=draws(5), expect_error=True)
    assert message in error and "-config.json)" in error


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "flow_euler", "dpmpp", "euler", "unipc", "pndm"])
def test_no_scheduler_is_the_default_one(conformance, sampler):
    results = [conformance("sampler", inputs=draws(15), config=dict(type=sampler, steps=6) | scheduler)
               for scheduler in ({}, dict(scheduler=None), dict(scheduler={}))]
    assert all(torch.equal(results[0]["samples"], other["samples"]) for other in results[1:])


def test_bad_inputs_are_named(conformance):
    config = dict(type="ddpm", steps=5, scheduler={})
    assert "model_outputs" in conformance("sampler", config=config, inputs=draws(4), expect_error=True)
    inputs = draws(5)
    del inputs["step_noise"]
    assert "step_noise" in conformance("sampler", config=config, inputs=inputs, expect_error=True)
    assert "channels" in conformance("sampler", config=config, inputs=draws(5, out_channels=3), expect_error=True)
