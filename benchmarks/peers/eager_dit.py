"""The operations of an eager training step of DiT-XL/2, as fast-DiT ran it, recorded on meta tensors: no GPU is needed.

Plans price them with the profile of an A100 and compare the sums with what fast-DiT measured: a check of the prices on a
program that is not Kiln's (tests/plan/eager_prices_test.cpp, docs/how_planning_works.md).

    python benchmarks/peers/eager_dit.py --fast-dit FAST_DIT_CHECKOUT [--out tests/plan/eager_dit.json]

fast-DiT's logs are of PyTorch 1.13: attention is composed, AdamW goes tensor by tensor, gradients are zeroed. Mixed precision is
accelerate's fp16 around the model alone, so the autoencoder and the loss stay in f32.
"""
import argparse
import contextlib
import json
import os
import pathlib
import sys
import weakref
from collections import Counter

os.environ["TIMM_FUSED_ATTN"] = "0"
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

BATCH = 128
# Options of fast-DiT's README, each with those before it, and what it measured on one A100.
ROWS = {"original": {"recompute": False, "half": False, "encodes": True},
        "recompute": {"recompute": True, "half": False, "encodes": True},
        "amp": {"recompute": True, "half": True, "encodes": True},
        "features": {"recompute": True, "half": True, "encodes": False}}
OVERWRITING = {"copy_", "zero_", "fill_"}
GATHERING = {"gather", "index", "index_select", "embedding"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "lift_fresh",
        "arange", "_local_scalar_dense"}


def bytes_of(tensors):
    """In memory: an expanded dimension lies once, and so does a tensor that is named twice."""
    total = 0
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        size = tensor.element_size()
        for length, stride in zip(tensor.shape, tensor.stride()):
            size *= length if stride or not length else 1
        total += size
    return total


def product_of(name, inputs, outputs):
    """(class, m, n, k) of what multiplies, as in src/ops/op_recorder.cpp."""
    if name == "mm":
        return "matmul", inputs[0].size(0), inputs[1].size(1), inputs[0].size(1)
    if name == "addmm":
        return "matmul", inputs[1].size(0), inputs[2].size(1), inputs[1].size(1)
    if name == "bmm":
        return "matmul", inputs[0].size(0) * inputs[0].size(1), inputs[1].size(2), inputs[0].size(2)
    if name == "convolution":
        weight = inputs[1]
        return "convolution", outputs[0].numel() // outputs[0].size(1), weight.size(0), weight.numel() // weight.size(0)
    if name == "convolution_backward":
        grad, _, weight = inputs[:3]
        products = sum(tensor.dim() > 1 for tensor in outputs)
        return "convolution", products * grad.numel() // grad.size(1), weight.size(0), weight.numel() // weight.size(0)
    return None


class Recorder(TorchDispatchMode):
    """Counts the operations by their work, and the bytes that live at once."""

    def __init__(self):
        super().__init__()
        self.ops, self.live, self.peak, self.storages = Counter(), 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [value for value in tree_flatten((args, kwargs or {}))[0] if isinstance(value, torch.Tensor)]
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        for tensor in outputs:
            self.watch(tensor)
        name = func._schema.name.split("::")[1]
        results = func._schema.returns
        is_view = bool(results) and all(value.alias_info and not value.alias_info.is_write for value in results)
        if not is_view and name not in FREE and any(tensor.is_meta for tensor in inputs + outputs):
            self.ops[self.described(name, inputs, outputs)] += 1
        return result

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata in self.storages or not tensor.is_meta:
            return
        self.storages.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key, num_bytes):
        self.storages.discard(key)
        self.live -= num_bytes

    @staticmethod
    def described(name, inputs, outputs):
        product = product_of(name, inputs, outputs)
        read = inputs[1:] if name in OVERWRITING | GATHERING else inputs
        moved = bytes_of(read) + bytes_of(outputs) * (2 if name in GATHERING else 1)
        if product:
            kind, m, n, k = product
            return "aten::" + name, kind, str(inputs[-1 if name == "addmm" else 0].dtype), 2 * m * n * k, moved, m, n, k
        most = max((tensor.numel() for tensor in inputs), default=0)
        least = min([most] + [tensor.numel() for tensor in outputs])
        length = most // least if 0 < least < most else 0
        return "aten::" + name, "elementwise", str((outputs or inputs)[0].dtype), 0, moved, 0, 0, length


class Autocast(TorchFunctionMode):
    """torch.autocast("cuda", torch.float16), which does nothing on meta tensors: its lists as far as DiT uses them."""

    HALF = {F.linear, F.conv2d, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
    FULL = {F.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax, torch.exp, torch.Tensor.exp}

    def __init__(self):
        super().__init__()
        self.cast = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        dtype = torch.float16 if func in self.HALF else torch.float32 if func in self.FULL else None
        if dtype:
            args = tuple(self.to(value, dtype) for value in args)
            kwargs = {key: self.to(value, dtype) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def to(self, value, dtype):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not value.is_leaf or not value.requires_grad:
            return value.to(dtype)
        if id(value) not in self.cast:  # weights are cast once in a context
            self.cast[id(value)] = value.to(dtype)
        return self.cast[id(value)]


def adamw(weights, state):
    """torch 1.13's _single_tensor_adamw."""
    for weight, (mean, square) in zip(weights, state):
        weight.mul_(1.0)
        mean.mul_(0.9).add_(weight.grad, alpha=0.1)
        square.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
        weight.addcdiv_(mean, (square.sqrt() / 0.5).add_(1e-8), value=-1e-4)


def autoencoder():
    """sd-vae-ft's architecture, with composed attention."""
    from diffusers import AutoencoderKL
    from diffusers.models.attention_processor import AttnProcessor

    model = AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                          block_out_channels=(128, 256, 512, 512), layers_per_block=2)
    model.set_attn_processor(AttnProcessor())
    return model.eval()


def record(recompute, half, encodes):
    """The second step of training, after which nothing is new: {"peak_bytes", "ops"}."""
    import models
    from diffusion import create_diffusion

    def context():
        return Autocast() if half else contextlib.nullcontext()

    def wrapped(module):
        def forward(*inputs):
            with context():
                return module(*inputs)
        return forward

    torch.utils.checkpoint.checkpoint = checkpoint if recompute else lambda function, *inputs: function(*inputs)
    recorder = Recorder()
    with recorder, torch.device("meta"):
        model, ema = (models.DiT_models["DiT-XL/2"](input_size=32, num_classes=1000) for _ in range(2))
        model.ckpt_wrapper = wrapped
        vae = autoencoder() if encodes else None
        diffusion = create_diffusion(timestep_respacing="")
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        averages = list(ema.parameters())
        state = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
        for _ in range(2):
            recorder.ops.clear()
            labels = torch.zeros(BATCH, dtype=torch.long)
            if vae:
                with torch.no_grad():
                    x = vae.encode(torch.empty(BATCH, 3, 256, 256)).latent_dist.sample().mul_(0.18215)
            else:
                x = torch.empty(BATCH, 4, 32, 32)
            t = torch.randint(0, diffusion.num_timesteps, (BATCH,))

            def denoise(*args, **kwargs):
                with context():
                    out = model(*args, **kwargs)
                return out.float()

            loss = diffusion.training_losses(denoise, x, t, dict(y=labels))["loss"].mean()
            with torch.no_grad():
                for weight in weights:
                    if weight.grad is not None:
                        weight.grad.zero_()
            (loss * 1024 if half else loss).backward()
            with torch.no_grad():
                if half:
                    for weight in weights:
                        weight.grad.mul_(1 / 1024)
                adamw(weights, state)
                for average, weight in zip(averages, model.parameters()):
                    average.mul_(0.9999).add_(weight.detach(), alpha=0.0001)
            del loss, x, t, labels
    names = {"torch.float32": "f32", "torch.float16": "fp16", "torch.int64": "i64", "torch.bool": "bool", "torch.float64": "f64"}
    ops = [[*key[:2], names.get(key[2], key[2]), *key[3:], times] for key, times in recorder.ops.items()]
    return {"peak_bytes": recorder.peak, "ops": sorted(ops)}


def checkpoint(function, *inputs):
    return original_checkpoint(function, *inputs, use_reentrant=True, preserve_rng_state=False)


original_checkpoint = torch.utils.checkpoint.checkpoint


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fast-dit", required=True, help="checkout of chuanyangjin/fast-DiT")
    parser.add_argument("--out", default="tests/plan/eager_dit.json", type=pathlib.Path)
    args = parser.parse_args()
    sys.path.insert(0, args.fast_dit)
    rows = {name: record(**options) for name, options in ROWS.items()}
    head = {"of": "DiT-XL/2 at 256 px, 128 images a step, by fast-DiT's code (benchmarks/peers/eager_dit.py)",
            "op": ["name", "class", "dtype", "flops", "bytes", "m", "n", "k", "times"]}
    lines = [f'"{name}": {{"peak_bytes": {row["peak_bytes"]}, "ops": [\n' + ",\n".join(map(json.dumps, row["ops"])) + "\n]}"
             for name, row in rows.items()]
    args.out.write_text(json.dumps(head)[:-1] + ',\n"rows": {\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
