"""Every hint that train and plan print leads to a command that works: options to type, and beside a DeepSpeed file keys to edit."""

import json
import re

import pytest
from conftest import complaints

KEY = re.compile(r'"([a-z_][\w.]*)": (\{"enabled": true\}|"[^"]*"|[-\w.+]+)')
OPTION = re.compile(r"--([a-z][a-z0-9-]*) (-?[\w.,+-]+)")
TWICE = re.compile(r"\b([a-z]+) \1\b|\bwith(out)? with(out)?\b")  # a word that a hint says twice, or "with without"
LEFT_OUT = re.compile(r"without (train_micro_batch_size_per_gpu|gradient_accumulation_steps)")
# Its state is much of what it needs.
HEAVY = ["--model", "dit", "--hidden-size", 256, "--depth", 6, "--num-heads", 4, "--patch-size", 4, "--num-classes", 4,
         "--data", "synthetic", "--image-size", 64, "--gpu", "cpu"]
T4 = ["--model", "DiT-S/8", "--gpu", "T4"]
GPU = ["--model", "DiT-B/2", "--gpu", "A100-80G", "--compute-dtype", "bf16"]
BATCH = {"train_batch_size": 16}
PASSES = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}


class Beside:
    """kiln plan beside a file, which hints may edit; None: without one."""

    def __init__(self, kiln, path, config):
        self.kiln, self.path, self.config = kiln, path, config

    def plan(self, arguments, config=None):
        file = []
        if self.config is not None:
            self.path.write_text(json.dumps(config or self.config))
            file = ["--deepspeed", self.path]
        result = self.kiln("plan", *arguments, *file, "--json", timeout=300)
        lines = complaints(result.stderr)
        plan = json.loads(result.stdout) if result.returncode == 0 else {}
        for hint in [*lines, *(line for row in [plan, *plan.get("best", [])] for line in row.get("advice", []))]:
            assert not TWICE.search(hint), hint
        return result, lines

    def follow(self, hint, arguments):
        """Plans as the hint says, which names nothing of the file as an option."""
        config = json.loads(json.dumps(self.config))
        for key, value in KEY.findall(hint):
            *sections, last = key.split(".")
            place = config
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = json.loads(value)
        for key in LEFT_OUT.findall(hint):
            config.pop(key, None)
        options = {name: value.rstrip(",") for name, value in OPTION.findall(hint)}
        assert options or config != self.config, hint
        kept = list(arguments)
        for name in options:
            if f"--{name}" in kept:
                at = kept.index(f"--{name}")
                del kept[at:at + 2]
        result, _ = self.plan([*kept, *(part for name, value in options.items() for part in (f"--{name}", value))], config)
        assert result.returncode == 0, f"{hint}\n{result.stderr}"
        return json.loads(result.stdout)


@pytest.fixture
def beside(kiln, tmp_path):
    return lambda config: Beside(kiln, tmp_path / "ds_config.json", config)


def refused(place, arguments):
    result, lines = place.plan(arguments)
    assert result.returncode == 1 and len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize("config", [None, {**BATCH, "zero_optimization": {"stage": 2}}, {**PASSES, "zero_optimization": {"stage": 2}}],
                         ids=["typed", "batch", "passes"])
def test_a_stage_on_one_gpu(beside, config):
    place, arguments = beside(config), [*T4, *(["--zero-stage", 2, "--global-batch", 16] if config is None else [])]
    hints = re.search(r": give (.*), or (.*), which takes the same", refused(place, arguments)).groups()
    if config:
        assert "--zero-stage" not in " ".join(hints)
    two, alone = (place.follow(hint, arguments) for hint in hints)
    assert (two["gpus"], two["zero_stage"], alone["gpus"], alone["zero_stage"]) == (2, 2, 1, 0)
    assert two["options"]["global-batch"] == alone["options"]["global-batch"] == 16


@pytest.mark.parametrize("config", [None, {"train_batch_size": 15}], ids=["typed", "file"])
def test_a_batch_that_gpus_do_not_divide(beside, config):
    place, arguments = beside(config), [*T4, "--gpus", 2, *(["--global-batch", 15] if config is None else [])]
    hints = re.search(r": give (.*), or (.*)$", refused(place, arguments)).groups()
    assert [place.follow(hint, arguments)["rank_batch"] for hint in hints] == [7, 8]


@pytest.mark.parametrize("config", [{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2},
                                    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}], ids=["batch", "passes"])
@pytest.mark.slow
def test_the_least_budget_beside_a_file(beside, config):
    place, arguments = beside(config), [*HEAVY, "--memory-budget", "30M"]
    hint = re.search(r"the least that works is (.*); else take", refused(place, arguments))[1]
    plan = place.follow(hint, arguments)
    assert plan["options"]["global-batch"] == 4 and "GiB" not in plan["options"]["memory-budget"]


@pytest.mark.slow
def test_what_fits_a_budget_beside_a_file(beside):
    """The keys to edit, and how much it takes then."""
    place = beside({"train_micro_batch_size_per_gpu": 128, "gradient_accumulation_steps": 2})
    arguments = [*GPU, "--depth", 4, "--memory-budget", "2200M"]
    gib, hint = re.search(r"this fits, ([\d.]+) GiB: (.*)$", refused(place, arguments)).groups()
    assert '"train_micro_batch_size_per_gpu": ' in hint and float(gib) * 1024 <= 2200
    edited = place.follow(hint, arguments)
    assert edited["predicted"]["needed_bytes"] / 2**30 == pytest.approx(float(gib), abs=0.01)


def advice(place, arguments, about):
    result, _ = place.plan(arguments)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    return plan, next(line for line in plan["advice"] if about in line)


@pytest.mark.parametrize("config", [None, {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 2}],
                         ids=["typed", "file"])
@pytest.mark.slow
def test_much_memory(beside, config):
    typed = ["--global-batch", 64, "--micro-batch", 32] if config is None else []
    place, arguments = beside(config), [*GPU, *typed]
    needed = json.loads(place.plan(arguments)[0].stdout)["predicted"]["needed_bytes"]
    arguments += ["--gpu-memory", int(needed / 0.9)]
    before, line = advice(place, arguments, "% of the memory is used")
    for hint in line.split("fragmentation: ")[1].split(" or "):
        after = place.follow(hint, arguments)
        assert after["predicted"]["needed_bytes"] < before["predicted"]["needed_bytes"], hint
        assert after["options"]["global-batch"] == 64


def test_a_rate_that_two_keys_set(beside):
    place = beside({"train_batch_size": 256, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}})
    _, line = advice(place, GPU, "learning rate 0.01 does not suit")
    hint = line.split("): ")[1]
    assert "--lr" not in hint
    assert place.follow(hint, GPU)["options"]["lr"] == 1e-4


@pytest.mark.slow
def test_precision_and_batch_in_the_file(beside):
    place = beside({"train_batch_size": 512, "bf16": {"enabled": False}})
    arguments = ["--model", "DiT-B/4", "--gpu", "A100-80G"]
    _, line = advice(place, arguments, "f32 multiplies at")
    assert place.follow(re.search(r"activations: (.*?),? or", line)[1], arguments)["options"]["compute-dtype"] == "bf16"
    _, line = advice(place, arguments, "global batch 512 is outside")
    assert place.follow(line.split("same steps): ")[1], arguments)["options"]["global-batch"] == 256


@pytest.mark.slow
def test_links_and_offloaded_updates(beside):
    """Advice on speed: each change is planned and does what it is for."""
    place = beside({"train_batch_size": 64, "zero_optimization": {"stage": 3}})
    arguments = [*GPU[:2], "--gpu", "RTX-4090", "--gpus", 16, "--compute-dtype", "bf16"]
    before, line = advice(place, arguments, "of the step waits for the link")
    for hint in re.split(", or ", line.split("GPU and step ")[1]):
        after = place.follow(hint, arguments)
        assert after["predicted"]["images_per_s"] > before["predicted"]["images_per_s"], hint
    place = beside({"train_batch_size": 8, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}})
    before, line = advice(place, GPU, "the offloaded optimizer's update takes")
    hints = re.split(", or |, where that fits|, (?=--gpus)", line.split("larger steps ")[1])
    assert len([hint for hint in hints if hint]) == 3
    for hint in filter(None, hints):
        after = place.follow(hint, GPU)
        assert after["predicted"]["images_per_s"] > before["predicted"]["images_per_s"], hint


def test_weights_are_offloaded_at_stage_three(beside):
    config = {"train_batch_size": 16, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    place, arguments = beside(config), [*T4, "--gpus", 2]
    hint = re.search(r"needs (.*), got 2", refused(place, arguments))[1]
    assert place.follow(hint, arguments)["offload_params"] == "cpu"


@pytest.mark.parametrize("config", [BATCH, PASSES], ids=["batch", "passes"])
def test_a_search_hints_in_the_files_keys(beside, config):
    result, _ = beside(config).plan(["--search", *T4, "--gpus", 2])
    assert result.returncode == 0, result.stderr
    hints = [hint for row in json.loads(result.stdout)["best"] for hint in row["advice"]]
    assert any('"train_batch_size": ' in hint for hint in hints) and not any("--global-batch" in hint for hint in hints), hints
