"""What is trained for the stations: families of models with random weights, tiny, and what they are trained and drawn with."""

import itertools
import json
from dataclasses import dataclass

import diffusers
from dit_torch import DiT, randomise_
from pipelines import tiny_dc, tiny_kl
from pixart_torch import PixArt
from safetensors.torch import save_file
from test_sana import TINY as SANA
from test_sana import random_sana
from test_unet import TINY as UNET
from test_unet import model_of as random_unet

STATIONS = ["grid in training", "sample --run", "one file", ".pt", "folder", "diffusers", "folder back", "merged", "base + adapter",
            "two ranks, other batch", "the pipeline's own call"]
# (family, station) -> why the pictures differ there. They do: the tests look.
EXCEPTIONS = {
    ("DiT", "the pipeline's own call"): "DiTPipeline has other frequencies of timesteps and takes class 1000 for the null class: the card has "
                                        "its own loop",
}
MAX_TOKENS = 24
INSTRUCTION = "Describe the picture:\n- its colours and its light\nUser Prompt: "
BUCKETS = "64x64,64x96,96x64"
OTHER_SIZE = (64, 96)  # of the pictures of a bucketed run


def class_config():
    return dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=2, num_classes=4)


def pixart_config():
    return dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=4, caption_channels=32,
                model_max_length=MAX_TOKENS, pe_interpolation=1.0)


def pixart_diffusers_config():
    return dict(sample_size=8, patch_size=2, in_channels=4, out_channels=8, num_attention_heads=4, attention_head_dim=16,
                cross_attention_dim=64, num_layers=2, caption_channels=32, interpolation_scale=1.0, use_additional_conditions=False)


def sana_config():
    return SANA | dict(num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64, caption_channels=32,
                       num_cross_attention_heads=2, cross_attention_head_dim=32, in_channels=8, out_channels=8, sample_size=16)


def unet_config():
    return UNET | dict(cross_attention_dim=32, sample_size=8)


@dataclass(frozen=True)
class Family:
    name: str  # of the registry
    config: dict
    make: object  # config -> module
    vae: object
    encoder: str = None  # of pipelines.ENCODERS; None: classes
    has_pt: bool = False


FAMILIES = {
    "DiT": Family("dit", class_config(), lambda c: randomise_(DiT(**c)), tiny_kl, None, True),
    "PixArt": Family("pixart", pixart_config(), lambda c: randomise_(PixArt(**c)), tiny_kl, "t5", True),
    "PixArt, diffusers' keys": Family("pixart_diffusers", pixart_diffusers_config(),
                                      lambda c: randomise_(diffusers.PixArtTransformer2DModel(**c)), tiny_kl, "t5"),
    "Sana": Family("sana", sana_config(), random_sana, tiny_dc, "gemma"),
    "U-Net": Family("unet2d_condition", unet_config(), random_unet, tiny_kl, "clip"),
}


@dataclass(frozen=True)
class Case:
    family: str
    objective: str
    sampler: str
    adapter: bool = False
    bucketed: bool = False
    bf16: bool = False
    two_ranks: bool = False  # train it

    def __str__(self):
        extras = [name for name, on in (("LoRA", self.adapter), ("buckets", self.bucketed), ("bf16", self.bf16),
                                        ("trained on two ranks", self.two_ranks)) if on]
        return ", ".join([self.family, self.objective, self.sampler, *extras])


OBJECTIVES = {
    "iddpm": ["--objective", "iddpm"],
    "epsilon": ["--objective", "epsilon", "--beta-schedule", "scaled_linear", "--beta-start", 0.00085, "--beta-end", 0.012],
    "v": ["--objective", "v_prediction"],
    "flow": ["--objective", "flow", "--flow-shift", 4],
}
# A covering set: every family with every objective that it has, and each of adapter, buckets and bf16 with every family.
QUICK = [
    Case("DiT", "iddpm", "unipc", two_ranks=True),
    Case("DiT", "iddpm", "ddpm", bf16=True),
    Case("DiT", "flow", "flow_euler", adapter=True),
    Case("PixArt", "iddpm", "dpmpp_2m", bucketed=True),
    Case("PixArt", "flow", "flow_euler", bf16=True),
    Case("PixArt", "flow", "dpmpp_2m", adapter=True),
    Case("PixArt, diffusers' keys", "iddpm", "euler_ancestral", adapter=True, bf16=True),
    Case("PixArt, diffusers' keys", "flow", "flow_euler", bucketed=True),
    Case("Sana", "flow", "dpmpp_2m", bucketed=True, bf16=True),
    Case("Sana", "flow", "flow_euler", adapter=True),
    Case("U-Net", "epsilon", "pndm", adapter=True),
    Case("U-Net", "v", "euler", bucketed=True, bf16=True),
]
# Of PEFT, diffusers and kohya, the one that carries the adapter of a family here.
ADAPTER_FORMATS = {"DiT": "peft", "PixArt": "diffusers", "PixArt, diffusers' keys": "kohya", "Sana": "peft", "U-Net": "kohya"}
SAMPLERS = {"iddpm": ["ddim", "dpmpp_2m"], "epsilon": ["ddim", "pndm", "euler", "unipc", "euler_ancestral"],
            "v": ["ddim", "dpmpp_2m", "euler", "euler_ancestral"],
            "flow": ["flow_euler", "dpmpp_2m"]}
OF_FAMILY = {"DiT": ["iddpm", "flow"], "PixArt": ["iddpm", "flow"], "PixArt, diffusers' keys": ["iddpm", "flow"], "Sana": ["flow"],
             "U-Net": ["epsilon", "v", "flow"]}


def whole_matrix():
    """Every combination; DiT is of one size."""
    every = [Case(family, objective, sampler, *flags) for family, objectives in OF_FAMILY.items() for objective in objectives
             for sampler in SAMPLERS[objective] for flags in itertools.product([False, True], repeat=3)]
    return QUICK + [case for case in every if case not in QUICK and not (case.family == "DiT" and case.bucketed)]


def save_base(case, path):
    """Writes random weights, with nothing about them. Returns their config as JSON."""
    family = FAMILIES[case.family]
    config = dict(family.config)
    if case.bucketed and case.family == "PixArt, diffusers' keys":  # it is told the picture's size
        config |= dict(use_additional_conditions=True, attention_head_dim=24, cross_attention_dim=96)
    if case.objective == "flow":  # no sigma is learned
        config |= {"DiT": dict(learn_sigma=False), "PixArt": dict(pred_sigma=False),
                   "PixArt, diffusers' keys": dict(out_channels=4)}.get(case.family, {})
    model = family.make(config)
    weights, trained = model.state_dict(), {name for name, p in model.named_parameters() if p.requires_grad}
    if case.bf16 and case.adapter:  # tables of positions stay as they are computed
        weights = {key: value.bfloat16() if key in trained else value for key, value in weights.items()}
    save_file({key: value.contiguous() for key, value in weights.items()}, path)
    return json.dumps(config)
