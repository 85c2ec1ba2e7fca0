"""Text encoders in bf16 on a CPU, Kiln against transformers, in turn; medians and their ratio.

Random weights of the published shapes, written once by transformers and read by both; the time does not depend on the
values. MiniLM and CLIP-L are whole; T5 is v1.1-base's encoder; Gemma 2 has the width of its 2B model and two of its
layers. "ragged" are captions of 30 tokens where 300 is the most: transformers' pipelines pad them to 300, Kiln does not.
"instruction" are captions of 30 tokens after 200 that all share: Kiln keeps the keys and values of these.

    python benchmarks/peers/text_encoders.py --bench build/benchmarks/bench_text_encoders [--rounds 5] [--only gemma] [--out FILE]
"""
import argparse
import dataclasses
import datetime
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from measuring import conclude, in_turn, processor

SHAPES = {
    "minilm": ("BertModel", "BertConfig", dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
                                               vocab_size=30522)),
    "t5": ("T5EncoderModel", "T5Config", dict(d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12, vocab_size=32128,
                                              feed_forward_proj="gated-gelu")),
    "clip": ("CLIPTextModel", "CLIPTextConfig", dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
                                                     intermediate_size=3072, hidden_act="quick_gelu")),
    "gemma": ("Gemma2Model", "Gemma2Config", dict(hidden_size=2304, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
                                                  head_dim=256, intermediate_size=9216, vocab_size=8000)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shape: str
    texts: int
    tokens: int  # of each text, without padding
    padded: int  # that transformers computes
    shared: int  # that Kiln has computed before
    target: float


CASES = [
    Case("MiniLM, 64 tokens", "minilm", 32, 64, 64, 0, 1.5),
    Case("T5, 300 tokens", "t5", 4, 300, 300, 0, 1.2),
    Case("T5, ragged: 30 of 300", "t5", 4, 30, 300, 0, 3.0),
    Case("CLIP-L, 77 tokens", "clip", 8, 77, 77, 0, 1.3),
    Case("Gemma 2, 230 tokens", "gemma", 4, 230, 230, 0, 1.2),
    Case("Gemma 2, instruction: 200 of 230", "gemma", 4, 230, 230, 200, 2.0),
]


def write_folder(shape, folder):
    import torch
    import transformers

    model_class, config_class, config = SHAPES[shape]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config)).to(torch.bfloat16)
    model.save_pretrained(folder)


def transformers_worker(folder, case):
    """Runs in a process of its own; prints the median seconds of passes after one to warm up."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kind = dict(attn_implementation="eager") if case.shape == "gemma" else {}  # what caps Gemma 2's scores
    model = getattr(transformers, SHAPES[case.shape][0]).from_pretrained(folder, dtype=torch.bfloat16, **kind).eval()
    ids = torch.randint(5, 4000, (case.texts, case.padded))
    mask = torch.zeros_like(ids)
    mask[:, :case.tokens] = 1
    seconds = []
    with torch.inference_mode():
        for _ in range(6):
            started = time.perf_counter()
            model(input_ids=ids, attention_mask=mask)
            seconds.append(time.perf_counter() - started)
    print(statistics.median(seconds[1:]))


def output_of(command):
    return float(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


def measure(bench, folders, case, rounds):
    folder, number = folders / case.shape, CASES.index(case)
    measured = in_turn(rounds, {
        f"transformers: {case.name}": lambda: output_of([sys.executable, __file__, "--worker", number, "--folder", folder]),
        f"kiln: {case.name}": lambda: output_of([bench, folder, case.texts, case.tokens, case.shared])})
    theirs, ours = (statistics.median(results) for results in measured.values())
    return f"| {case.name} | {case.texts} | {1e3 * theirs:.1f} | {1e3 * ours:.1f} | {theirs / ours:.2f} | {case.target} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", help="Kiln's bench_text_encoders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SHAPES, help="cases of this encoder")
    parser.add_argument("--out", help="also write the report there")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return transformers_worker(arguments.folder, CASES[arguments.worker])
    if not arguments.bench:
        parser.error("--bench is missing")
    cases = [case for case in CASES if arguments.only in (None, case.shape)]
    with tempfile.TemporaryDirectory() as folder:
        for shape in {case.shape for case in cases}:
            write_folder(shape, pathlib.Path(folder) / shape)
        rows = [measure(arguments.bench, pathlib.Path(folder), case, arguments.rounds) for case in cases]
    conclude("\n".join([
        f"# Text encoders, {processor()}, {datetime.date.today()}", "",
        f"bf16; medians of {arguments.rounds} processes in turn, each the median of five passes "
        "(`benchmarks/peers/text_encoders.py`). The load at the end was "
        f"{os.getloadavg()[1]:.1f}.", "",
        "| texts | at once | transformers, ms | kiln, ms | ratio | target |", "|---|---|---|---|---|---|", *rows, ""]), arguments.out)


if __name__ == "__main__":
    main()
