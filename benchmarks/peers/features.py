"""Inception features of pictures, Kiln against torch-fidelity and pytorch-fid on the same pictures and random weights, in
turn in one run; medians and their ratios. The target on two cores is 1.3.

    python benchmarks/peers/features.py --kiln build/kiln [--rounds 3] [--pictures 96] [--side 256] [--out FILE.md]

All read the pictures from memory or an .npz. Kiln's time is that of `kiln evaluate` on all pictures less that on a few,
so that loading the program and the distance itself do not count; its statistics and checksums do. Against torch-fidelity it
resizes and scores as that does (TensorFlow's bilinear, features and logits), against pytorch-fid as that (features alone).
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from measuring import conclude, in_turn, processor

BATCH, FEW = 16, 16
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "reference"))


def torch_fidelity_net(weights):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    return FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"],
                                       feature_extractor_weights_path=str(weights))


def pytorch_fid_net(weights):
    import pytorch_fid.inception
    import torch

    pytorch_fid.inception.load_state_dict_from_url = lambda *_, **__: torch.load(weights)
    net = pytorch_fid.inception.InceptionV3().eval()
    return lambda pictures: net(pictures.float() / 255)


NETS = {"torch-fidelity": torch_fidelity_net, "pytorch-fid": pytorch_fid_net}


def work(name, folder):
    """Runs in a process of its own; prints pictures/s after one batch to warm up."""
    import numpy as np
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    net = NETS[name](folder / "weights.pth")
    images = torch.from_numpy(np.load(folder / "all.npz")["arr_0"]).permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode():
        net(images[:BATCH])
        begin = time.perf_counter()
        for batch in images.split(BATCH):
            net(batch)
    print(len(images) / (time.perf_counter() - begin))


def measure_peer(name, folder):
    command = [sys.executable, __file__, "--worker", name, str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_kiln(arguments, folder, *options):
    def seconds(pictures):
        command = [arguments.kiln, "evaluate", folder / pictures, "--reference", folder / "reference.npz", "--net", "inception",
                   "--net-weights", folder / "weights.pth", "--batch", str(BATCH), *options]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["seconds"]

    few = seconds("few.npz")
    return (arguments.pictures - FEW) / (seconds("all.npz") - few)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", help="the program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--out", help="also write the table there")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, folder = arguments.worker
        return work(name, pathlib.Path(folder))
    if not arguments.kiln:
        parser.error("--kiln is missing")

    import numpy as np
    import torch
    from test_features import random_inception_weights

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        torch.save(random_inception_weights(), folder / "weights.pth")
        images = np.random.default_rng(0).integers(0, 256, (arguments.pictures, arguments.side, arguments.side, 3), np.uint8)
        np.savez(folder / "all.npz", images)
        np.savez(folder / "few.npz", images[:FEW])
        np.savez(folder / "reference.npz", mu=np.zeros(2048), sigma=np.eye(2048))
        measured = in_turn(arguments.rounds, {
            "torch-fidelity": lambda: measure_peer("torch-fidelity", folder),
            "kiln as torch-fidelity": lambda: measure_kiln(arguments, folder, "--metrics", "fid,inception_score", "--splits", "1"),
            "pytorch-fid": lambda: measure_peer("pytorch-fid", folder),
            "kiln as pytorch-fid": lambda: measure_kiln(arguments, folder, "--metrics", "fid", "--resize", "torch")})
    rows = [f"# Inception features, {arguments.pictures} pictures of {arguments.side} px, batches of {BATCH}, random weights", "",
            f"{time.strftime('%Y-%m-%d')}, {processor()}, torch {torch.__version__.split('+')[0]}. Medians of {arguments.rounds} "
            f"interleaved rounds: `benchmarks/peers/features.py --rounds {arguments.rounds} --pictures {arguments.pictures}`.", "",
            "| as | its pictures/s (min..max) | Kiln's | ratio |", "|---|---|---|---|"]
    for peer in NETS:
        theirs, ours = measured[peer], measured[f"kiln as {peer}"]
        spread = " | ".join(f"{statistics.median(rates):.2f} ({min(rates):.2f}..{max(rates):.2f})" for rates in (theirs, ours))
        rows.append(f"| {peer} | {spread} | {statistics.median(ours) / statistics.median(theirs):.2f}x |")
    conclude("\n".join(rows) + "\n", arguments.out)


if __name__ == "__main__":
    main()
