"""Peak memory and time of `kiln extract --text-encoder` with T5-XXL-shaped random weights (9.5 GB in bf16), streamed
within limits and resident. Usage: text_streaming.py FOLDER [--captions N] [--limits 3G 2G] [--no-resident]

FOLDER takes 10 GB and keeps the weights for the next run. Needs KILN_BUILD.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "reference"))
from test_text_store import write_metadata  # noqa: E402
from test_text_streaming import XXL, encoder_folder, extract, features_of  # noqa: E402

WORDS = ["a", "red", "green", "apple", "house", "by", "the", "sea"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--limits", nargs="*", default=["3G"])
    parser.add_argument("--no-resident", action="store_true")
    options = parser.parse_args()
    weights, data = options.folder / "t5-xxl", options.folder / f"data-{options.captions}"
    if not weights.exists():
        weights.mkdir(parents=True)
        encoder_folder(weights, XXL)
    if not data.exists():
        data.mkdir()
        write_metadata(data, [" ".join(WORDS[(i + k) % 8] for k in range(2 + i % 23)) for i in range(options.captions)])
    wanted = None
    for limit in [*options.limits, *([] if options.no_resident else [None])]:
        out = options.folder / f"store-{time.time_ns()}"
        start = time.monotonic()
        peak, said = extract(data, out, weights, *(["--text-encoder-memory", limit] if limit else []), "--text-batch", 32)
        seconds, features = time.monotonic() - start, features_of(out)
        wanted = wanted or features
        rows = sum(len(part) for part in features.values())
        print(f"{limit or 'resident'}: peak {peak / 2**30:.2f} GiB (VmHWM), {seconds:.1f} s, {rows} bytes of features, "
              f"{'the same bits' if features == wanted else 'OTHER BITS'}")
        print("\n".join("  " + line for line in said.splitlines() if line.startswith("text encoder:")), flush=True)


if __name__ == "__main__":
    main()
