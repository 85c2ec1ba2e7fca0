"""Runs of every family that takes captions, each with the memory that its plan predicts and the memory that it measures."""

import json
import random
from pathlib import Path

from conftest import succeed
from pictures import captioned_pictures
from test_text_store import encoder_folder

COUNT = 24
WORDS = ["a", "red", "green", "apple", "two", "birds", "on", "the", "long", "fence"]
SIZES = {"buckets": [(32, 32), (48, 24), (24, 48)], "square": [(32, 32)]}
STATE = ("weights", "gradients", "master", "moments", "ema", "constants")
OPTIMIZERS = ("adamw", "adamw-8bit", "came", "came-sana")


def make_stores(folder):
    """Captioned pictures with the features of small text encoders: "buckets" of three shapes and "square". Returns their paths."""
    random_text = random.Random(0)
    stores = {}
    for name, encoder in (("buckets", "bert"), ("square", "clip_text")):
        texts = ({"text": " ".join(random_text.choices(WORDS, k=random_text.randint(1, 40)))} for _ in range(COUNT))
        captioned_pictures(folder / name / "pictures", texts, SIZES[name])
        buckets = ["--buckets", ",".join(f"{height}x{width}" for height, width in SIZES[name])] if name == "buckets" else []
        succeed("extract", "--data", folder / name / "pictures", "--autoencoder", "pixels", "--image-size", 32, *buckets, "--out",
                folder / name / "store", "--text-encoder", encoder_folder(encoder, folder / name / "encoder"))
        stores[name] = folder / name / "store"
    return stores


def base_weights(configuration, stores, folder):
    """Weights for an adapter to train beside: those of a run of one step with the same model."""
    run(configuration | {"lora-rank": None, "lora-target": None, "recompute": "none"}, stores, folder / "base", steps=1)
    return next((folder / "base/checkpoints").glob("*/model.safetensors"))


def run(configuration, stores, out, steps=2, weights=None):
    """Trains `configuration`, options by name and which "store", on a CPU. Returns what its plan.json says."""
    options = []
    for name, value in configuration.items():
        if name == "store" or value is None:
            continue
        if isinstance(value, dict):
            value = json.dumps(value)
        options += [f"--{name}"] if value is True else [f"--{name}", *(value if isinstance(value, list) else [value])]
    if configuration.get("offload-optimizer") == "nvme":
        options += ["--nvme-path", out.parent]
    if weights:
        options += ["--weights", weights]
    succeed("train", "--data", stores[configuration["store"]], "--image-size", 32, "--device", "cpu", "--out", out, "--max-steps", steps,
            "--log-every", 1, "--peak-tflops", 1, "--no-tensorboard", "--checkpoint-every", 0, *options)
    return json.loads((Path(out) / "plan.json").read_text())


def planned_and_measured(configuration, stores, folder, steps=2):
    """plan.json of a run in the empty `folder`, of an adapter too."""
    weights = base_weights(configuration, stores, folder) if configuration.get("lora-rank") else None
    return run(configuration, stores, folder / "run", steps, weights)


def relative_error(plan):
    """How much more the plan says than the run took, at the peak of a step."""
    return plan["predicted"]["peak_bytes"] / plan["measured"]["peak_bytes"] - 1


def state_bytes(figures):
    return {kind: figures["by_kind"].get(kind, 0) for kind in STATE}


def draw_common(draw, some_segments):
    """Options that every family has. `some_segments`: choices for --recompute."""
    batch = draw.choice([2, 3, 4, 6])
    options = {
        "compute-dtype": draw.choice(["f32", "bf16"]),
        "optimizer": draw.choice(OPTIMIZERS),
        "global-batch": batch,
        "micro-batch": draw.choice([0, 0, 1, 2]),
        "recompute": draw.choice(["none", "none", "all", *some_segments]),
        "ema-decay": draw.choice(["none", "0.999", "0.99,0.999"]),
        "threads": draw.choice([1, 2]),
        "seed": draw.randrange(100),
    }
    if draw.random() < 0.25:
        options["offload-optimizer"] = draw.choice(["cpu", "nvme"])
    if draw.random() < 0.2:
        options |= {"lora-rank": draw.choice([2, 8])}
        del options["recompute"]
    if draw.random() < 0.2:
        options["accumulate-f32"] = True
    return options


def draw_pixart(draw):
    heads, depth = draw.choice([2, 3, 6, 12]), draw.choice([1, 2, 4])
    if draw.random() < 0.3:
        model = {"model": "pixart_diffusers", "objective": "epsilon"}
        config = {}
    else:
        model = {"model": "pixart", "objective": "iddpm"}
        config = {"qk_norm": draw.random() < 0.5, "micro_condition": draw.random() < 0.5}
        if draw.random() < 0.4:
            config["kv_compress_config"] = {"sampling": draw.choice(["conv", "uniform", "ave"]), "scale_factor": 2,
                                            "kv_compress_layer": [depth - 1]}
    shape = {"hidden-size": heads * draw.choice([24, 48, 72]), "num-heads": heads, "depth": depth, "patch-size": 2}
    return {"store": "buckets", **model, **shape, "model-config": config, **draw_common(draw, ["0", f"0-{depth - 1}"])}


def draw_sana(draw):
    """Up to the blocks of Sana-1600M, of which there are few."""
    heads, head_dim, cross_heads, depth = draw.choice([(3, 16, 3, 2), (4, 32, 2, 3), (12, 32, 4, 4), (36, 32, 16, 2), (70, 32, 20, 1)])
    config = {"num_attention_heads": heads, "attention_head_dim": head_dim, "num_cross_attention_heads": cross_heads,
              "cross_attention_head_dim": heads * head_dim // cross_heads, "cross_attention_dim": heads * head_dim,
              "num_layers": depth, "patch_size": 2, "attention_bias": draw.random() < 0.3}
    if draw.random() < 0.4:
        config["qk_norm"] = "rms_norm_across_heads"
    return {"store": "buckets", "model": "sana", "objective": "flow", "model-config": config, **draw_common(draw, ["0", f"0-{depth - 1}"])}


def draw_unet(draw):
    """Up to half of Stable Diffusion's widths."""
    widths = draw.choice([[32, 64], [32, 64, 64], [64, 128, 128, 128], [96, 192], [160, 320, 640, 640]])
    levels = len(widths)
    config = {"block_out_channels": widths, "norm_num_groups": draw.choice([8, 16, 32]), "layers_per_block": draw.choice([1, 2]),
              "down_block_types": ["CrossAttnDownBlock2D"] * (levels - 1) + ["DownBlock2D"],
              "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (levels - 1), "attention_head_dim": draw.choice([4, 8]),
              "use_linear_projection": draw.random() < 0.5, "upcast_attention": draw.random() < 0.3}
    objective = draw.choice(["epsilon", "v_prediction"])
    return {"store": "square", "model": "unet2d_condition", "objective": objective, "model-config": config, **draw_common(draw, ["down.0.0,mid", "up.0.0,up.1.1,final"])}


DRAWN = {"pixart": draw_pixart, "sana": draw_sana, "unet": draw_unet}
