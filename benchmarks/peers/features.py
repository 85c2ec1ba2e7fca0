"""Inception features of pictures, Kiln against torch-fidelity on the same pictures and random weights, in turn in one run;
medians and their ratio. The target on two cores is 1.3.

    python benchmarks/peers/features.py --kiln build/kiln [--rounds 3] [--pictures 96] [--side 256]

Both read the pictures from memory or an .npz. Kiln's time is that of `kiln evaluate` on all pictures less that on a few,
so that loading the program and the distance itself do not count.
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

from measuring import in_turn, processor

BATCH, FEW = 16, 16
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "reference"))


def torch_fidelity_worker(weights, pictures):
    """Runs in a process of its own; prints pictures/s after one batch to warm up."""
    import numpy as np
    import torch
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    net = FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"],
                                      feature_extractor_weights_path=weights)
    images = torch.from_numpy(np.load(pictures)["arr_0"]).permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode():
        net(images[:BATCH])
        begin = time.perf_counter()
        for batch in images.split(BATCH):
            net(batch)
    print(len(images) / (time.perf_counter() - begin))


def measure_torch_fidelity(folder):
    command = [sys.executable, __file__, "--worker", str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_kiln(arguments, folder):
    def seconds(pictures):
        command = [arguments.kiln, "evaluate", folder / pictures, "--reference", folder / "reference.npz", "--net", "inception",
                   "--net-weights", folder / "weights.pth", "--metrics", "fid,inception_score", "--splits", "1", "--batch",
                   str(BATCH)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["seconds"]

    few = seconds("few.npz")
    return (arguments.pictures - FEW) / (seconds("all.npz") - few)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", help="the program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        folder = pathlib.Path(arguments.worker)
        return torch_fidelity_worker(str(folder / "weights.pth"), folder / "all.npz")
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
        measured = in_turn(arguments.rounds, {"torch-fidelity": lambda: measure_torch_fidelity(folder),
                                              "kiln": lambda: measure_kiln(arguments, folder)})
    peer, kiln = (statistics.median(measured[name]) for name in ("torch-fidelity", "kiln"))
    print(f"{processor()}: torch-fidelity {peer:.2f} pictures/s, kiln {kiln:.2f}, ratio {kiln / peer:.2f}")


if __name__ == "__main__":
    main()
