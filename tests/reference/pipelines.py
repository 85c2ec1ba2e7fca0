"""What comparisons of `kiln sample` with diffusers' pipelines share: Kiln's own noise, tiny components, closeness."""

import copy

import numpy as np
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from test_autoencoder_dc import SANA as DC
from test_tokenizers import MAKERS
from transformers import (CLIPTextConfig, CLIPTextModel, CLIPTokenizer, Gemma2Config, Gemma2Model, GemmaTokenizer,
                          T5Config, T5EncoderModel, T5Tokenizer)

START, POSTERIOR = 7, 4  # what a draw is for (src/core/philox.h)
ENCODERS = {  # all of width 32: tokenizer, model
    "clip": (CLIPTokenizer, CLIPTextModel, CLIPTextConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                                          intermediate_size=48, vocab_size=5000, eos_token_id=2)),
    "t5": (T5Tokenizer, T5EncoderModel, T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=4120,
                                                 feed_forward_proj="gated-gelu")),
    "gemma": (GemmaTokenizer, Gemma2Model, Gemma2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                                        num_key_value_heads=2, head_dim=8, intermediate_size=48, vocab_size=5100,
                                                        query_pre_attn_scalar=8, attn_implementation="eager")),
}


def philox_words(seed, draw, index, blocks):
    """Philox4x32-10 of counters (block, draw, index), (4, blocks) u32."""
    c = [np.arange(blocks, dtype=np.uint64), np.full(blocks, draw, np.uint64), np.full(blocks, index & 0xFFFFFFFF, np.uint64),
         np.full(blocks, index >> 32, np.uint64)]
    key0, key1, low = seed & 0xFFFFFFFF, seed >> 32, np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(key0), p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(key1), p0 & low]
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c)


def kiln_normals(seed, draw, indices, shape):
    """The N(0, 1) draws of Kiln's Philox, (len(indices), *shape); src/core/philox.cpp says how words become normals."""
    count, rows = int(np.prod(shape)), []
    for index in indices:
        words = philox_words(seed, draw, index, 16 * -(-count // 64)).reshape(2, 2, -1, 16).astype(np.float64)
        radius = np.sqrt(-2 * np.log((np.floor(words[:, 0] / 2) + 0.5) / 2**31))
        angle = 2 * np.pi * words[:, 1] / 2**32
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)  # (2, 2, groups, 16)
        rows.append(pairs.reshape(4, -1, 16).transpose(1, 0, 2).reshape(-1)[:count].reshape(shape))
    return torch.tensor(np.stack(rows), dtype=torch.float32)


def tiny_kl(folder, seed=4, attends=True):
    torch.manual_seed(seed)
    vae = AutoencoderKL(block_out_channels=[8, 8, 16, 16], layers_per_block=1, norm_num_groups=4, latent_channels=4,
                        scaling_factor=0.18215, down_block_types=["DownEncoderBlock2D"] * 4,
                        up_block_types=["UpDecoderBlock2D"] * 4, mid_block_add_attention=attends).eval()
    with torch.no_grad():  # latents of about one, pictures of contrast
        vae.quant_conv.weight.mul_(8)
        vae.decoder.conv_out.weight.mul_(4)
    vae.save_pretrained(folder)
    return vae


def tiny_dc(folder, seed=4):
    torch.manual_seed(seed)
    vae = AutoencoderDC(**DC).eval()
    vae.save_pretrained(folder)
    return vae


def text_encoder(kind, folder, **changes):
    """(model, tokenizer) of ENCODERS, random, as they lie in `folder`. changes: of the config."""
    tokenizer_class, model_class, config = ENCODERS[kind]
    config = copy.deepcopy(config)
    config.update(changes)
    torch.manual_seed(0)
    folder.mkdir()
    MAKERS[kind](folder)
    model = model_class(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer_class.from_pretrained(folder)


def read_npz(path):
    return torch.tensor(np.load(path)["arr_0"].astype(np.float64)).permute(0, 3, 1, 2)


def assert_pictures_of(got, want, tolerance=1e-3):
    """Bytes (B, 3, H, W) that Kiln wrote are those of pixels within `tolerance` of `want`, in [-1, 1]."""
    exact = (want.double() * 127.5 + 128).clamp(0, 255)
    apart = torch.maximum(got - exact, exact - (got + 1)).clamp(min=0).max().item() / 127.5
    assert got.shape == exact.shape and got.std() > 8, "no picture"
    assert apart <= tolerance, f"{apart:.2e} apart"
