"""The scheduler of an exported folder, as its card sets it up, takes the steps of the record's sampler: the timesteps, and x
after every step from the same model outputs and noise."""

import json
import re

import diffusers
import pytest
import torch
from closeness import assert_close
from conftest import succeed
from dit_torch import DiT, randomise_
from safetensors.torch import save_file
from test_sampler import ROW, SD, V, draws, given_noise

MODEL = dict(input_size=4, patch_size=2, in_channels=4, hidden_size=16, depth=1, num_heads=1, num_classes=3)
LINEAR = dict(num_train_timesteps=1000, beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
FLOW = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=4.0)
PLMS = dict(timestep_spacing="trailing", skip_prk_steps=True, set_alpha_to_one=True)
LINSPACE = dict(timestep_spacing="linspace", clip_sample=False)
IDDPM, EPSILON, VELOCITY = dict(type="iddpm"), dict(type="ddpm", **SD), dict(type="ddpm", **SD, **V)
STRAIGHT = dict(type="flow", shift=4.0)
CASES = [  # objective, --sampler, steps, the type that it stands for (docs/samplers.md)
    (IDDPM, "ddim", 7, dict(type="iddpm_ddim", steps="7")),
    (IDDPM, "ddpm", 9, dict(type="iddpm", steps="9")),
    (IDDPM | dict(learn_sigma=False), "ddpm", 13, dict(type="iddpm", steps="13", learn_sigma=False)),
    (IDDPM, "dpmpp_2m", 8, dict(type="dpmpp", steps=8, scheduler=LINEAR)),
    (IDDPM, "unipc", 8, dict(type="unipc", steps=8, scheduler=LINEAR)),
    (VELOCITY, "ddim", 7, dict(type="ddim", steps=7, eta=0.0, consecutive=True, scheduler=SD | V | LINSPACE)),
    (VELOCITY, "ddpm", 7, dict(type="ddpm", steps=7, scheduler=SD | V | LINSPACE)),
    (EPSILON, "euler", 6, dict(type="euler", steps=6, scheduler=SD | dict(timestep_spacing="trailing"))),
    (EPSILON, "euler_ancestral", 6, dict(type="euler_ancestral", steps=6, scheduler=SD | dict(timestep_spacing="trailing"))),
    (EPSILON, "pndm", 10, dict(type="pndm", steps=10, consecutive=True, scheduler=SD | PLMS)),
    (STRAIGHT, "flow_euler", 6, dict(type="flow_euler", steps=6, sigmas=[1 - i / 6 for i in range(6)], scheduler=dict(shift=4.0))),
    (STRAIGHT, "dpmpp_2m", 6, dict(type="dpmpp", steps=6, scheduler=FLOW)),
    (STRAIGHT, "unipc", 6, dict(type="unipc", steps=6, scheduler=FLOW)),
]


@pytest.mark.parametrize("objective, sampler, steps, config", CASES, ids=[f"{case[0]['type']}-{case[1]}" for case in CASES])
def test_the_folders_scheduler_takes_kilns_steps(conformance, tmp_path, objective, sampler, steps, config):
    learns = objective["type"] == "iddpm" and objective.get("learn_sigma", True)
    model = MODEL | dict(learn_sigma=learns)
    record = dict(model="dit", model_config=model, objective=objective, image_size=32, drawing=dict(
        sampler=sampler, num_sampling_steps=steps, cfg_scale=1.0, guided_channels="model", unconditional="null_class"))
    save_file(randomise_(DiT(**model)).state_dict(), tmp_path / "w.safetensors", {"kiln_record": json.dumps(record)})
    succeed("convert", "--in", tmp_path / "w.safetensors", "--out", tmp_path / "folder")
    card = (tmp_path / "folder/README.md").read_text()
    names = vars(diffusers) | {"folder": str(tmp_path / "folder")}
    setup = re.search(r"^(scheduler = (\w+).*\nscheduler\.set_timesteps\(.*)$", card, re.M)
    names[setup.group(2)] = getattr(diffusers, setup.group(2))
    exec(setup.group(1), names)
    scheduler = names["scheduler"]

    calls = len(scheduler.timesteps)
    inputs = draws(calls, out_channels=8 if learns else 4)
    got = conformance("sampler", inputs=inputs, config=config)
    x = inputs["noise"] * (scheduler.init_noise_sigma if "Euler" in setup.group(2) and "Flow" not in setup.group(2) else 1)
    with given_noise(inputs["step_noise"]) as at_row:
        for row, t in enumerate(scheduler.timesteps):
            at_row(row)
            if hasattr(scheduler, "scale_model_input"):
                scheduler.scale_model_input(x, t)
            output = inputs["model_outputs"][row]
            x = scheduler.step(output if "variance_type=\"learned" in setup.group(1) else output[:, :4], t, x).prev_sample
            assert_close(got["samples"][row], x, ROW)
    assert_close(got["timesteps"], torch.as_tensor(scheduler.timesteps).float(), 1e-6)
