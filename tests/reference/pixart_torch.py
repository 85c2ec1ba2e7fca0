"""A compact PixArt in PyTorch under the repository's keys, for what diffusers has no class for: key and value
compression, qk norm, micro-conditions, dropped captions. Captions are padded and masked here, never ragged."""

import math

import numpy as np
import torch
from dit_torch import sinusoids
from torch import nn
from torch.nn import functional as F


def position_table(width, height, columns, base, interpolation):
    """First half of the width: the column; each half [sin | cos]; coordinates in f32, angles in f64."""
    def axis(count):
        return np.arange(count, dtype=np.float32) / (count / base) / interpolation

    omega = 10000.0 ** -(np.arange(width // 4) / (width / 4))
    grid_y, grid_x = np.meshgrid(axis(height), axis(columns), indexing="ij")
    parts = []
    for grid in (grid_x, grid_y):
        angles = grid.reshape(-1, 1).astype(np.float64) * omega
        parts += [np.sin(angles), np.cos(angles)]
    return torch.from_numpy(np.concatenate(parts, 1)).float()[None]


class Mlp(nn.Module):
    def __init__(self, width, hidden, out):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class ScalarEmbedder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, scalars):  # (B, n) -> (B, n * width)
        return self.mlp(sinusoids(scalars.flatten())).reshape(len(scalars), -1)


class SelfAttention(nn.Module):
    def __init__(self, width, heads, qk_norm, sampling, factor):
        super().__init__()
        self.heads, self.sampling, self.factor = heads, sampling, factor
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if qk_norm:
            self.q_norm, self.k_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        if factor > 1 and sampling == "conv":
            self.sr = nn.Conv2d(width, width, factor, factor, groups=width)
            self.norm = nn.LayerNorm(width)

    def thin(self, x, height, columns):
        if self.factor == 1:
            return x
        if self.sampling == "uniform_every":
            return x[:, ::self.factor]
        pixels = x.unflatten(1, (height, columns)).permute(0, 3, 1, 2)
        if self.sampling == "conv":
            return self.norm(self.sr(pixels).flatten(2).transpose(1, 2))
        if self.sampling == "ave":
            pixels = F.interpolate(pixels, scale_factor=1 / self.factor, mode="nearest")
        else:
            pixels = pixels[:, :, ::self.factor, ::self.factor]
        return pixels.flatten(2).transpose(1, 2)

    def forward(self, x, height, columns):
        q, k, v = self.qkv(x).chunk(3, -1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = self.thin(k, height, columns), self.thin(v, height, columns)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_linear, self.kv_linear = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, text, mask):
        q, (k, v) = self.q_linear(x), self.kv_linear(text).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = scores.float().masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
        weights = torch.where(mask.any(1)[:, None, None, None], weights, 0)  # no caption: nothing is attended to
        return self.proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config, factor):
        super().__init__()
        width, heads = config["hidden_size"], config["num_heads"]
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width ** 0.5)
        self.attn = SelfAttention(width, heads, config["qk_norm"], config["kv_compress_config"].get("sampling"), factor)
        self.cross_attn = CrossAttention(width, heads)
        self.mlp = Mlp(width, int(width * config["mlp_ratio"]), width)

    def forward(self, x, text, mask, t0, height, columns):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.scale_shift_table + t0.unflatten(1, (6, -1))).chunk(6, 1)
        norm = lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-6)
        x = x + gate1 * self.attn(norm(x) * (1 + scale1) + shift1, height, columns)
        x = x + self.cross_attn(x, text, mask)
        return x + gate2 * self.mlp(norm(x) * (1 + scale2) + shift2)


class Holder(nn.Module):
    """Only a name for what is inside."""


DEFAULTS = dict(variant="PixArtMS", patch_size=2, in_channels=4, mlp_ratio=4.0, pred_sigma=True, pe_interpolation=1.0,
                micro_condition=False, qk_norm=False, kv_compress_config={})


class PixArt(nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = config = DEFAULTS | config
        width, patch = config["hidden_size"], config["patch_size"]
        self.out_channels = config["in_channels"] * (2 if config["pred_sigma"] else 1)
        self.grid = config["input_size"] // patch
        self.register_buffer("pos_embed", position_table(width, self.grid, self.grid, self.grid,
                                                         config["pe_interpolation"]))
        self.x_embedder = Holder()
        self.x_embedder.proj = nn.Conv2d(config["in_channels"], width, patch, patch)
        self.t_embedder = ScalarEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = Holder()
        self.y_embedder.y_proj = Mlp(config["caption_channels"], width, width)
        self.y_embedder.register_buffer("y_embedding", torch.randn(config["model_max_length"],
                                                                   config["caption_channels"]))
        if config["micro_condition"]:
            self.csize_embedder, self.ar_embedder = ScalarEmbedder(width // 3), ScalarEmbedder(width // 3)
        compression = config["kv_compress_config"]
        layers = compression.get("kv_compress_layer", [])
        self.blocks = nn.ModuleList(Block(config, compression["scale_factor"] if i in layers else 1)
                                    for i in range(config["depth"]))
        self.final_layer = Holder()
        self.final_layer.linear = nn.Linear(width, patch * patch * self.out_channels)
        self.final_layer.scale_shift_table = nn.Parameter(torch.randn(2, width) / width ** 0.5)

    def forward(self, x, t, caption_embeds, caption_mask=None, drop=None, img_hw=None, aspect_ratio=None):
        patch = self.config["patch_size"]
        height, columns = x.shape[2] // patch, x.shape[3] // patch
        positions = self.pos_embed if self.config["variant"] == "PixArt" else position_table(
            self.config["hidden_size"], height, columns, self.grid, self.config["pe_interpolation"])
        x = self.x_embedder.proj(x).flatten(2).transpose(1, 2) + positions
        t = self.t_embedder(t[:, None])
        if self.config["micro_condition"]:
            t = t + torch.cat([self.csize_embedder(img_hw), self.ar_embedder(aspect_ratio)], 1)
        t0 = self.t_block(t)
        mask = torch.ones(caption_embeds.shape[:2]) if caption_mask is None else caption_mask
        if drop is not None:
            caption_embeds = torch.where(drop[:, None, None] == 1, self.y_embedder.y_embedding, caption_embeds)
        text = self.y_embedder.y_proj(caption_embeds)
        for block in self.blocks:
            x = block(x, text, mask != 0, t0, height, columns)
        shift, scale = (self.final_layer.scale_shift_table + t[:, None]).chunk(2, 1)
        x = self.final_layer.linear(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)
        x = x.unflatten(1, (height, columns)).unflatten(-1, (patch, patch, self.out_channels))
        return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), self.out_channels, height * patch, columns * patch)
