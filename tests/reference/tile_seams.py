"""What tiles change in an autoencoder's result, and a picture to see it on; benchmarks/tile_seams.py measures with it too."""

import torch


def picture(side, channels=3, seed=0):
    """(1, channels, side, side) in [-1, 1] with a photograph's spectrum, 1 / frequency, and an edge."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.fft.fftfreq(side)
    distance = (frequency[:, None] ** 2 + frequency ** 2).sqrt().clamp(min=1 / side)
    noise = torch.fft.fft2(torch.randn(1, channels, side, side, generator=generator))
    image = torch.fft.ifft2(noise / distance).real
    image = 0.4 * image / image.std()
    image[..., side // 3:] -= 0.3
    return image.clamp(-1, 1)


def blended(size, stride, overlap):
    """(size) bool: whether two tiles are blended there."""
    at = torch.arange(size)
    return (at >= stride) & (at % stride < overlap)


def seam_errors(whole, tiled, stride, overlap):
    """Of `tiled` (B, C, H, W) against `whole`, in standard deviations of `whole`; `stride` and `overlap` in their pixels.

    rms and max where tiles are blended ("seam") and elsewhere ("inside"); "line", how much more the error changes from one
    pixel to the next across the edges of blended strips than it does anywhere (1: no line is to be seen).
    """
    error = (tiled - whole).double() / whole.double().std()
    height, width = whole.shape[2:]
    seam = blended(height, stride, overlap)[:, None] | blended(width, stride, overlap)
    steps = (error[..., 1:] - error[..., :-1]).square().mean((0, 1, 2)).sqrt()  # by column
    edges = [edge for k in range(1, width // stride + 1) for edge in (k * stride - 1, k * stride + overlap - 1) if edge < len(steps)]
    return {"seam_rms": error[..., seam].square().mean().sqrt().item(), "seam_max": error[..., seam].abs().max().item(),
            "inside_rms": error[..., ~seam].square().mean().sqrt().item(), "inside_max": error[..., ~seam].abs().max().item(),
            "line": (steps[edges].mean() / steps.mean()).item()}
