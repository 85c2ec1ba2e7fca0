"""The commands of the fixtures: stores of every kind, runs on each kind of data, what is made of weights, plans.

Runs that show data overflow on purpose: with a fixed loss scale of 1e38, every step in fp16 is skipped. The log then
names its samples and their timesteps; no weight moves, so the files hold what the seed drew. Runs that later programs
resume take two short steps in f32. All commands run in the folder of the fixtures, so no path of the machine is a fact.
"""
import concurrent.futures
import json
import os
import shlex
import shutil
import subprocess
from functools import partial

from facts import Facts, beside, near, plan_facts
from inputs import make_inputs, save_weights
from safetensors.numpy import load_file

ALWAYS = "--seed 7 --threads 1 --device cpu --peak-tflops 1 --log-every 1 --no-tensorboard"
OVERFLOWING = f"{ALWAYS} --global-batch 6 --compute-dtype fp16 --loss-scale 1e38 --ema-decay 0.9"
TRAINED = f"{ALWAYS} --global-batch 4 --max-steps 2 --lr 1e-3 --ema-decay 0.9,0.5"
SHAPE = "--hidden-size 48 --depth 2 --num-heads 3 --patch-size 2"
UNET = {"block_out_channels": [16, 32], "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "norm_num_groups": 8, "layers_per_block": 1,
        "attention_head_dim": 4}
MODELS = {
    "DiT": f"--model dit {SHAPE} --objective iddpm",
    "DiT, flow": f"--model dit {SHAPE} --objective flow",
    "PixArt": f"--model pixart {SHAPE} --objective iddpm",
    "PixArt of diffusers": f"--model pixart_diffusers {SHAPE} --objective epsilon",
    "Sana": f"--model sana {SHAPE} --objective flow",
    "U-Net": f"--model unet2d_condition --model-config {shlex.quote(json.dumps(UNET))} --objective v_prediction",
}
LATENTS, SIZE = "--data synthetic --image-size 64", "--image-size 16"
SHAPES = f"{SIZE} --buckets 16x16,24x12,12x24"
ON_STORED_CAPTIONS = f"--data stores/captioned --text bert {SIZE}"
ON_PICTURES = f"--data inputs/classes --autoencoder inputs/vae {SIZE}"
ON_SHAPES = f"--data inputs/shapes --autoencoder pixels {SHAPES} --text-encoder inputs/clip_text"
FAMILIES = {  # each draws what no other does
    "DiT": f"{LATENTS} --num-classes 5",
    "PixArt": f"{LATENTS} --offset-noise 0.5",
    "PixArt of diffusers": f"{LATENTS} --snr-gamma 5",
    "Sana": "--data synthetic --image-size 128 --timestep-sampling logit_normal --flow-shift 3",
    "U-Net": f"{LATENTS} --input-perturbation 0.5 --zero-terminal-snr",
}
# name -> model, options
ON_DATA = {
    "on a store": ("DiT", f"--data stores/whole {SIZE} --validation-data stores/held-out --validate-every 2"),
    "on posteriors": ("DiT, flow", "--data stores/pixart --image-size 32"),
    "on pictures": ("DiT, flow", f"{ON_PICTURES} --validation-share 0.3 --validate-every 2 --micro-batch 4"),
    "on buckets of a store": ("Sana", f"--data stores/shapes {SIZE}"),
    "on buckets encoded": ("U-Net", f"{ON_SHAPES} --text-dropout-prob 0.3"),
}
# Weights that do not begin at zero: the loss depends on all that the model sees.
FIRST_WEIGHTS = "--weights inputs/text.safetensors"
WITH_WEIGHTS = {
    "on labels": ("DiT", f"--data stores/whole {SIZE} --class-dropout-prob 0.3 --weights 'inputs/on a store.safetensors'"),
    "on captions of a store": ("PixArt", f"{ON_STORED_CAPTIONS} --text-dropout-prob 0.3 {FIRST_WEIGHTS}"),
    "on captions encoded": ("PixArt", f"--data inputs/captioned --autoencoder pixels --text-encoder inputs/bert {SIZE} "
                                      f"--text-dropout-prob 0.3 --caption-prefix 'of ' {FIRST_WEIGHTS}"),
}
OFFLOAD = "--offload-optimizer nvme --nvme-path disk"
OLD = {
    "class": ("DiT", f"{LATENTS} --num-classes 5 --micro-batch 3"),
    "two ranks": ("DiT, flow", f"{LATENTS} --num-classes 5 --nproc 2 --zero-stage 3 --optimizer came"),
    "offload": ("DiT, flow", f"{LATENTS} --num-classes 5 --optimizer adamw-8bit {OFFLOAD}"),
}
OLD_WITH_INPUTS = {
    "text": ("PixArt", f"{ON_STORED_CAPTIONS} --sample-every 2 --num-samples 2 --num-sampling-steps 2 --sampler ddim"),
    "lora": ("U-Net", f"{LATENTS} --lora-rank 2 --lora-alpha 4 --weights inputs/U-Net.safetensors"),
}
STAGES = """
[[stage]]
name = "one"
data = "stores/whole"
steps = 2

[[stage]]
name = "both"
data = ["stores/whole", "stores/grown"]
data-weights = [1, 2]
lr = 5e-5
lr-schedule = "cosine"
steps = 2
"""
EXPORTS = {  # name -> of which run, options
    "DiT.safetensors": ("DiT", ""),
    "DiT-bf16.pt": ("DiT", "--no-ema --dtype bf16"),
    "DiT-folder": ("DiT", ""),
    "PixArt-folder": ("PixArt", ""),
    "Sana-folder": ("Sana", ""),
    "U-Net-folder": ("U-Net", ""),
    "LoRA-PEFT": ("lora", "--adapter-format peft"),
    "LoRA-kohya.safetensors": ("lora", "--adapter-format kohya"),
}
PLANS = {
    "DiT": "--model DiT-S/4 --global-batch 64 --gpus 2 --zero-stage 2",
    "PixArt": "--model PixArt-Sigma-XL/2-512 --depth 2 --global-batch 4 --recompute all",
    "PixArt of diffusers": f"{MODELS['PixArt of diffusers']} --image-size 256 --global-batch 8",
    "Sana": "--model Sana-600M-512 --depth 2 --global-batch 8 --optimizer came-sana --autoencoder dc-ae-f32c32 "
            "--text-encoder gemma-2-2b",
    "U-Net": "--model sd15 --global-batch 2 --lora-rank 4 --autoencoder sd-vae-ft-mse",
}
PLANS_OF_DATA = {
    "on captions of a store": f"{MODELS['PixArt']} {ON_STORED_CAPTIONS} --global-batch 4",
    "on buckets encoded": f"{MODELS['U-Net']} {ON_SHAPES} --global-batch 4",
    "on pictures": f"{MODELS['DiT, flow']} {ON_PICTURES} --global-batch 4",
    "in stages": f"{MODELS['DiT, flow']} {SIZE} --global-batch 6 --recipe inputs/stages.toml",
}


class Runs:
    """Runs the program in `folder`: inputs/, stores/, runs/, exports/."""

    def __init__(self, folder, program):
        self.folder, self.program = folder, program
        self.facts_of = Facts(folder)
        self.facts = {}

    def kiln(self, command, *more):
        arguments = [*shlex.split(command), *map(str, more)]
        environment = os.environ | {"KILN_PROFILES": str(self.folder / "no profiles"), "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True, env=environment,
                              cwd=self.folder)
        if done.returncode:
            raise RuntimeError(f"kiln {shlex.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout

    # --- stores

    def extract(self, name, command):
        self.kiln(f"extract --autoencoder pixels --device cpu --out stores/{name} {command}")

    def store_of_classes(self):
        for name in ("whole", "held-out"):
            self.extract(name, f"--data inputs/{name} {SIZE} --flip both")
        self.store_facts("whole")

    def store_that_grew(self):
        grows = f"--data inputs/grown {SIZE} --flip both --shard-size 5"
        self.extract("grown", grows)
        for path in (self.folder / "inputs/held-out").rglob("*.png"):
            shutil.copy(path, self.folder / "inputs/grown" / path.parent.name)
        self.extract("grown", f"{grows} --append")
        self.store_facts("grown")

    def store_with_captions(self):
        for family in ("bert", "clip_text"):
            text = f"--text-encoder inputs/{family} --caption-prefix 'of '"
            self.extract("captioned", f"--data inputs/captioned {SIZE} {text}")
        self.store_facts("captioned")

    def store_in_buckets(self):
        self.extract("shapes", f"--data inputs/shapes {SHAPES} --text-encoder inputs/bert")
        self.store_facts("shapes")

    def imported(self):
        cache = "inputs/fast-dit/cache_features inputs/fast-dit/cache_labels"
        self.kiln(f"store import --from fast-dit {cache} --image-size 32 --out stores/fast-dit")
        self.kiln("store import --from pixart inputs/pixart --image-size 32 --scaling-factor 0.5 --out stores/pixart")
        self.store_facts("fast-dit")
        self.store_facts("pixart")

    def store_facts(self, name):
        self.facts[f"store {name}"] = self.facts_of.store(self.folder / "stores" / name)

    # --- runs

    def run(self, name, exact, command):
        out = self.folder / "runs" / name
        self.kiln(f"train {command}", "--out", out.relative_to(self.folder))
        self.facts[f"run {name}"] = self.facts_of.run(out, exact)

    def overflowing(self, name, model, options):
        self.run(name, True, f"{MODELS[model]} {OVERFLOWING} --max-steps 3 {options}")

    def old(self, name, model, options):
        self.run(name, False, f"{MODELS[model]} {TRAINED} {options}")

    def stages(self):
        self.run("in stages", True, f"{MODELS['DiT, flow']} {OVERFLOWING} {SIZE} --recipe inputs/stages.toml")

    def first_noise(self):
        """One token: the gradient of the last bias is what was to be predicted, number by number. Nothing is summed."""
        self.run("first noise", False, f"{MODELS['DiT, flow']} {ALWAYS} --data synthetic {SIZE} --num-classes 5 "
                                       "--global-batch 1 --max-steps 1 --beta1 0 --lr 1e-30")
        moments = load_file(self.newest("first noise", "train_state-00000-of-00001.safetensors"))
        wanted = -moments["exp_avg.final_layer.linear.bias"][:16] * 16 / 2  # of the mean over 16 squares
        self.facts["run first noise"]["target"] = near(*wanted.tolist())

    # --- what is made of weights, and plans

    def newest(self, run, name="model.safetensors"):
        return max((self.folder / "runs" / run).glob("checkpoints/step-*")) / name

    def weights_like(self, run):
        """An input: weights of a run's keys."""
        save_weights(self.newest(run), self.folder / f"inputs/{run}.safetensors")

    def export(self, name, run, options):
        self.kiln(f"convert {options} --in", f"runs/{run}", "--out", f"exports/{name}")
        self.facts[f"export {name}"] = self.facts_of.export(self.folder / "exports" / name, exact=run != "lora")

    def drawn_noise(self):
        self.kiln("sample --sampler ddpm --num-sampling-steps 2 --num-images 2 --seed 5 --threads 1 --device cpu "
                  "--save-noise exports/noise.safetensors --out exports/drawn --run", "runs/on a store")
        self.facts["noise of a drawing"] = self.facts_of.file(self.folder / "exports/noise.safetensors")

    def plan(self, name, command):
        plan = json.loads(self.kiln(f"plan --gpu A100-80G --compute-dtype bf16 {command} --json"))
        self.facts[f"plan {name}"] = plan_facts(plan)

    def all(self):
        """Facts by what they are of. Those of a run are told beside the first one's, which are whole."""
        for name in ("inputs", "disk", "exports"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        make_inputs(self.folder / "inputs", self.program)
        (self.folder / "inputs/stages.toml").write_text(STAGES)
        self.together([self.store_of_classes, self.store_that_grew, self.store_with_captions, self.store_in_buckets,
                       self.imported, self.first_noise,
                       *(partial(self.overflowing, name, name, options) for name, options in FAMILIES.items()),
                       *(partial(self.old, name, *given) for name, given in OLD.items()),
                       *(partial(self.plan, name, command) for name, command in PLANS.items())])
        self.weights_like("U-Net")
        self.together([self.stages,
                       *(partial(self.old, name, *given) for name, given in OLD_WITH_INPUTS.items()),
                       *(partial(self.overflowing, name, *given) for name, given in ON_DATA.items()),
                       *(partial(self.plan, name, command) for name, command in PLANS_OF_DATA.items())])
        self.weights_like("text")
        self.weights_like("on a store")
        self.together([self.drawn_noise,
                       *(partial(self.overflowing, name, *given) for name, given in WITH_WEIGHTS.items()),
                       *(partial(self.export, name, *given) for name, given in EXPORTS.items())])
        whole = self.facts["run DiT"]
        return {name: beside(whole, facts) if name.startswith("run ") and facts is not whole else facts
                for name, facts in self.facts.items()}

    @staticmethod
    def together(tasks):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            done = [pool.submit(task) for task in tasks]
        failures = [str(task.exception()) for task in done if task.exception()]
        if failures:
            raise SystemExit("\n".join(failures))
