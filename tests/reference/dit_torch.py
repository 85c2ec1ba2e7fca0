"""DiT in a few lines of PyTorch, written from Peebles & Xie 2023 on timm's layers; the oracle of Kiln's DiT.

Parameter names are the published ones. `norm_eps` and `gelu` exist so that tests can show that they would notice a
wrong one.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention, Mlp
from torch import nn


def sinusoids(t, width=256):
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 2, dtype=torch.float32) / (width // 2))
    angles = t.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def position_table(width, side):
    rates = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    along = torch.arange(side, dtype=torch.float64)[:, None] * rates
    along = torch.cat([along.sin(), along.cos()], dim=1)  # (side, width / 2)
    column, row = along[None, :, :].expand(side, -1, -1), along[:, None, :].expand(-1, side, -1)
    return torch.cat([column, row], dim=2).reshape(1, side * side, width).float()


def activation(width_in, width_out):
    return nn.Sequential(nn.SiLU(), nn.Linear(width_in, width_out))


class TimestepEmbedder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))


class LabelEmbedder(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.embedding_table = nn.Embedding(rows, width)


class Block(nn.Module):
    def __init__(self, width, num_heads, mlp_ratio, norm_eps, gelu):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=norm_eps)
        self.attn = Attention(width, num_heads=num_heads, qkv_bias=True)
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=lambda: nn.GELU(approximate=gelu))
        self.adaLN_modulation = activation(width, 6 * width)

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, dim=2)
        x = x + gate1 * self.attn(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class FinalLayer(nn.Module):
    def __init__(self, width, out, norm_eps):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=norm_eps)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = activation(width, 2 * width)

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=2)
        return self.linear(self.norm(x) * (1 + scale) + shift)


class DiT(nn.Module):
    def __init__(self, input_size, patch_size, in_channels, hidden_size, depth, num_heads, mlp_ratio=4.0,
                 num_classes=1000, class_dropout_prob=0.1, learn_sigma=True, norm_eps=1e-6, gelu="tanh"):
        super().__init__()
        self.patch_size, self.side = patch_size, input_size // patch_size
        out = in_channels * (2 if learn_sigma else 1) * patch_size**2
        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        rows = num_classes + (class_dropout_prob > 0)
        self.y_embedder = LabelEmbedder(rows, hidden_size) if rows else None
        self.pos_embed = nn.Parameter(position_table(hidden_size, self.side), requires_grad=False)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, mlp_ratio, norm_eps, gelu) for _ in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, out, norm_eps)

    def forward(self, x, t, y=None):
        c = self.t_embedder.mlp(sinusoids(t))
        if self.y_embedder is not None:
            c = c + self.y_embedder.embedding_table(y)
        tokens = self.x_embedder(x) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens, c)
        patches = self.final_layer(tokens, c).transpose(1, 2)  # (B, p * p * C, N)
        # F.fold wants (C, p, p); the published head emits (p, p, C).
        p = self.patch_size
        patches = patches.unflatten(1, (p * p, -1)).transpose(1, 2).flatten(1, 2)
        return F.fold(patches, (self.side * p, self.side * p), p, stride=p)


def randomise_(model, seed=0, scale=1.0):
    """Gives every trainable weight a size at which all paths matter, zero-initialised ones included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 25
            std = 1.0 if "embedding_table" in name else fan_in**-0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std * scale)
    return model


def random_with_norms(model, seed=0):
    """randomise_(), with norms whose weights are around 1."""
    randomise_(model, seed).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model
