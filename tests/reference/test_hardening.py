"""Findings of a hostile reading, each on the real program: files of strangers, full disks, names that command a terminal."""

import fcntl
import io
import json
import os
import re
import shutil
import struct
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest
import torch
from browser import parts_of
from conftest import assert_fails, complaints, program, run_program, succeed
from PIL import Image
from safetensors.torch import save_file
from test_evaluate import as_folder, as_npz, pictures
from test_lora import adapted, model_of
from test_text_store import command, encoders, extract, write_metadata  # noqa: F401 (a fixture)
from test_unet import TINY as UNET

TESTS = Path(__file__).resolve().parents[1]
TINY = ["--model", "dit", "--hidden-size", 32, "--depth", 1, "--num-heads", 2, "--patch-size", 4, "--num-classes", 3]
RUN = [*TINY, "--autoencoder", "pixels", "--image-size", 16, "--global-batch", 4, "--objective", "flow", "--device", "cpu", "--threads", 1,
       "--peak-tflops", 1, "--log-every", 1, "--no-preflight"]
DEEP = "[" * 300_000
OVERRIDE = b"a\x1b]52;c;aGk=\x07\xe2\x80\xaeb"  # sets the clipboard, and turns what follows


def refusal(*arguments, timeout=120):
    """The one line of a command that ends with status 1; it neither commands a terminal nor fills it."""
    result = run_program("kiln", *arguments, timeout=timeout)
    assert result.returncode == 1, (result.returncode, result.stdout, result.stderr)
    assert "\x1b" not in result.stderr and len(result.stderr) < 6000 and "json.exception" not in result.stderr
    (line,) = complaints(result.stderr)
    return line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hardening") / "run"
    succeed("train", *RUN, "--data", "synthetic", "--max-steps", 2, "--out", folder)
    return folder


@pytest.fixture
def own_run(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "own", symlinks=True))


def test_every_finding_has_a_test():
    """Here, beside what it is about, or where only C++ can."""
    named = re.compile(r"(?:finding_?0*(\d+)|hardening_?high_?(\d+))(?!\d)", re.IGNORECASE)
    found = {int(number) for path in [*TESTS.rglob("*.py"), *TESTS.rglob("*.cpp")] for pair in named.findall(path.read_text(errors="replace"))
             for number in pair if number}
    assert found >= set(range(1, 23))


def test_finding_05_a_strangers_folder_beside_the_output_stays(run, tmp_path):
    (tmp_path / "out.partial").mkdir()
    kept = [tmp_path / "out.partial" / "work", tmp_path / "out.kiln.partial", tmp_path / "victim"]
    for file in kept:
        file.write_text("mine")
    (tmp_path / "weights.safetensors.kiln.partial").symlink_to(tmp_path / "victim")
    succeed("convert", "--in", run, "--out", tmp_path / "weights.safetensors")
    succeed("convert", "--in", run, "--out", tmp_path / "out")
    assert [file.read_text() for file in kept] == ["mine"] * 3


@pytest.mark.parametrize("content", ["{}", "[]", DEEP[:1000], '{"measured": null, "predicted": null}', "nothing"])
def test_finding_06_a_broken_plan_is_left_out_of_the_report(own_run, content):
    (own_run / "plan.json").write_text(content)
    result = run_program("kiln", "report", own_run)
    assert result.returncode == 0 or len(complaints(result.stderr)) == 1


def test_finding_07_every_value_of_a_protocol_is_on_the_page(own_run, tmp_path):
    succeed("evaluate", own_run, "--reference", as_folder(tmp_path / "real", pictures(12, 1)), "--crop", 16, "--net", "random",
            "--num-pictures", 6, "--num-sampling-steps", 2)
    succeed("report", own_run)
    rows = {name: value for part in parts_of(own_run / "report.html", "rows") for name, value in part["items"]}
    assert rows["num_samples"] == "6" and rows["feature_net.weights"] == "random-conv-1"
    assert "null" not in rows.values() and not any("<" in name for name in rows)


def deep_tar(folder):
    with tarfile.open(folder / "0.tar", "w") as archive:
        for name, content in (("a.png", b"x"), ("a.json", b'{"text":' + DEEP.encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def deep_autoencoder(folder):
    as_folder(folder / "data", pictures(1, 1))
    (folder / "config.json").write_text('{"_class_name": ' + DEEP)


def deep_header(folder):
    header = b'{"a":' + DEEP.encode()
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def deep_record(folder):
    save_file({"w": torch.zeros(2)}, folder / "x.safetensors", {"kiln_record": DEEP})


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


EXTRACT = ["extract", "--data", "{}", "--autoencoder", "pixels", "--image-size", 16, "--out", "{}/store"]
NESTED = "has more than 64 nested levels"
# What lies in a folder {}, and who reads it.
DEEP_FILES = {
    "tar": (deep_tar, EXTRACT, NESTED),
    "metadata": (text("metadata.jsonl", '{"file_name": "a.png", "text": ' + DEEP + "\n"), EXTRACT, NESTED),
    "list": (text("data_info.json", DEEP), EXTRACT, NESTED),
    "autoencoder": (deep_autoencoder, ["extract", "--data", "{}/data", "--autoencoder", "{}", *EXTRACT[5:]], NESTED),
    "header": (deep_header, ["inspect", "{}/x.safetensors"], NESTED),
    "record": (deep_record, ["inspect", "{}/x.safetensors"], NESTED),
    "store": (text("store.json", '{"format": ' + DEEP), ["store", "inspect", "{}"], NESTED),
    "deepspeed": (text("ds.json", '{"fp16": ' + DEEP), ["train", *RUN, "--data", "synthetic", "--max-steps", 1, "--out", "{}/run",
                                                        "--deepspeed", "{}/ds.json"], NESTED),
    "result": (text("a.json", DEEP), ["evaluate", "--compare", "{}/a.json", "{}/a.json"], NESTED),
    "option": (text("config.json", '{"depth": ' + DEEP), ["inspect", "--model", "dit", "--config", "{}/config.json"], ""),
    "yaml": (text("sana.yaml", "model: " + DEEP), ["train", "--recipe", "{}/sana.yaml", "--out", "{}/run"], ""),
}


@pytest.mark.parametrize("write, command, expected", DEEP_FILES.values(), ids=DEEP_FILES)
def test_finding_08_nested_files_are_one_line(tmp_path, write, command, expected):
    write(tmp_path)
    assert expected in refusal(*(str(word).replace("{}", str(tmp_path)) for word in command))


@pytest.mark.parametrize("file", ["config.json", "checkpoints/step-00000002/train_state.json"])
def test_finding_08_nested_files_of_a_run(own_run, tmp_path, file):
    path = own_run / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "HERE"}).replace('"HERE"', DEEP + "]" * len(DEEP)))
    refusal("sample", "--run", own_run, "--out", tmp_path / "out", "--num-images", 1, "--num-sampling-steps", 1)


@pytest.mark.parametrize("pattern", ["(" * 50_000, "(a*)*b" * 20, "((((x{1000}){1000}){1000}){1000}){1000}"])
def test_finding_09_a_pattern_of_an_adapter_ends(tmp_path, pattern):
    (tmp_path / "peft").mkdir()
    adapted(dict(r=4, lora_alpha=2, target_modules=["to_q"]), tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": {pattern: 4}}))
    save_file(model_of(UNET).state_dict(), tmp_path / "base.safetensors")
    merge = ["convert", "--in", tmp_path / "base.safetensors", "--out", tmp_path / "merged.safetensors", "--merge", tmp_path / "peft"]
    if pattern.startswith("(a"):
        succeed(*merge)
    else:
        assert "rank_pattern" in refusal(*merge)


@pytest.mark.parametrize("damage, expected", [("rank", "has no rank"), ("nan", "not finite")])
def test_finding_09_factors_without_rank_or_value_are_refused(tmp_path, damage, expected):
    rank = 0 if damage == "rank" else 2
    weight = torch.zeros(4, 4)
    save_file({"layer.weight": weight}, tmp_path / "base.safetensors")
    value = float("nan") if damage == "nan" else 1.0
    save_file({"layer.lora_down.weight": torch.full((rank, 4), value), "layer.lora_up.weight": torch.ones(4, rank),
               "layer.alpha": torch.tensor(1.0)}, tmp_path / "lora.safetensors")
    line = refusal("convert", "--in", tmp_path / "base.safetensors", "--out", tmp_path / "out.safetensors", "--merge", tmp_path / "lora.safetensors")
    assert expected in line and not (tmp_path / "out.safetensors").exists()


def test_finding_10_members_that_overlap_are_refused(tmp_path):
    """Many names of the same packed bytes, each as large as the format can pack."""
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    content = b"\0" * (1 << 20)
    data = packed.compress(content) + packed.flush()
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 8, 0, 0, zlib.crc32(content), len(data), len(content), 0, 0) + data
    directory = b""
    for index in range(1000):
        name = b"a/data.pkl" if index == 0 else b"a/data/%d" % index
        directory += struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 8, 0, 0, zlib.crc32(content), len(data), len(content), len(name), 0,
                                 0, 0, 0, 0, 0) + name
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1000, 1000, len(directory), len(local), 0)
    (tmp_path / "x.pt").write_bytes(local + directory + end)
    assert "overlap" in refusal("inspect", tmp_path / "x.pt")


def test_finding_10_a_class_of_any_number_is_refused(tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "label": 1 << 34}) + "\n")
    assert "expected a class from 0 to" in refusal("extract", "--data", tmp_path, "--autoencoder", "pixels", "--image-size", 16, "--out",
                                                   tmp_path / "store")


def test_finding_10_ticks_end_at_any_step(own_run):
    """Beyond 2 ** 53 a whole number does not grow by 1, so the loop is bounded by its count."""
    page = (Path(__file__).resolve().parents[2] / "src/core/page/page.html").read_text()
    assert "i <= count + 1" in page[page.index("function nice_ticks"):][:500]
    log = own_run / "log.jsonl"
    log.write_text(log.read_text() + "".join(json.dumps({"step": 10**17 + step, "loss": 1.0}) + "\n" for step in range(20)))
    succeed("report", own_run)


def test_finding_11_the_checksum_of_an_archive_is_compared(tmp_path):
    made, real = as_npz(tmp_path / "made.npz", pictures(20, 1)), as_npz(tmp_path / "real.npz", pictures(20, 2))
    evaluate = ["evaluate", made, "--reference", real, "--net", "random"]
    succeed(*evaluate)
    content = bytearray(made.read_bytes())
    content[5000:6000] = bytes(1000)
    made.write_bytes(content)
    assert "checksum is another" in refusal(*evaluate)


# Finding 12, a mapped file that is cut: tests/core/input_file_test.cpp


@pytest.mark.slow
def test_finding_13_names_command_no_terminal(tmp_path):
    name = OVERRIDE.decode()
    save_file({name: torch.zeros(2)}, tmp_path / "x.safetensors", {name: name})
    result = run_program("kiln", "inspect", tmp_path / "x.safetensors")
    assert "\\x1b]52" in result.stdout + result.stderr
    for text in (result.stdout, result.stderr, refusal("inspect", tmp_path / f"{name}.safetensors")):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
    data = tmp_path / "data"
    for label in (name, "b"):
        (data / label).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(data / label / "a.png")
    succeed("extract", "--data", data, "--autoencoder", "pixels", "--image-size", 16, "--out", tmp_path / "store")
    shown = succeed("store", "inspect", tmp_path / "store").stdout
    assert "\\x1b]52" in shown and not set(shown) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.slow
def test_finding_14_what_was_measured_is_printed(tmp_path):
    """From a folder of any name, and before what cannot be saved."""
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.rename(as_folder(tmp_path / "made", pictures(12, 1)), odd)
    real = as_npz(tmp_path / "real.npz", pictures(12, 2))
    for option in (b"--out", b"--save-reference"):
        result = subprocess.run([bytes(program("kiln")), b"evaluate", odd, b"--reference", bytes(real), b"--net", b"random", option,
                                 bytes(tmp_path / "absent" / "result")], capture_output=True)
        assert "fd_random" in json.loads(result.stdout.decode())["metrics"]
        assert result.returncode == 1 and b"cannot write" in result.stderr, result.stderr


def test_finding_16_sizes_of_a_file_are_multiplied_with_care(tmp_path):
    for config in ({"train_micro_batch_size_per_gpu": 1 << 62, "gradient_accumulation_steps": 4},
                   {"gradient_accumulation_steps": 1 << 62, "train_micro_batch_size_per_gpu": 1 << 62},
                   {"train_batch_size": 1 << 62, "gradient_accumulation_steps": 1 << 62}):
        (tmp_path / "ds.json").write_text(json.dumps(config))
        refusal("train", *RUN, "--data", "synthetic", "--max-steps", 1, "--out", tmp_path / "run", "--deepspeed", tmp_path / "ds.json")


def test_finding_17_pipes_are_not_waited_for(tmp_path):
    data = as_folder(tmp_path / "data", pictures(3, 1))
    os.mkfifo(data / "pipe.png")
    extracted = run_program("kiln", "extract", "--data", data, "--autoencoder", "pixels", "--image-size", 16, "--out", tmp_path / "store", timeout=60)
    assert extracted.returncode in (0, 1)
    for name in ("x.safetensors", "x.npz"):
        os.mkfifo(tmp_path / name)
    refusal("inspect", tmp_path / "x.safetensors", timeout=60)
    refusal("evaluate", tmp_path / "x.npz", "--reference", tmp_path / "x.npz", "--net", "random", timeout=60)


@pytest.mark.slow
def test_finding_18_one_process_writes_a_text_store(kiln, encoders, tmp_path):  # noqa: F811
    data, store = write_metadata(tmp_path / "data", ["a", "b"]), tmp_path / "store"
    extract(data, store, encoders["bert"])
    held = os.open(store / "text-bert", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    beside = kiln(*command(data, store, "--text-encoder", encoders["bert"]))
    assert "another process is writing" in beside.stderr
    os.close(held)
    extract(data, store, encoders["bert"])


@pytest.mark.parametrize("key", ["model", "model_config", "objective", "class_names", "drawing"])
@pytest.mark.parametrize("value", [7, [1], {"a": [None]}, "x" * 100_000])
def test_finding_19_values_of_other_kinds_are_one_line(own_run, tmp_path, key, value):
    path = own_run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    result = run_program("kiln", "sample", "--run", own_run, "--out", tmp_path / "out", "--num-images", 1, "--num-sampling-steps", 1)
    assert result.returncode in (0, 1) and "json.exception" not in result.stderr and len(result.stderr) < 6000


def test_finding_20_counts_of_a_text_store_are_bounded(encoders, tmp_path):  # noqa: F811
    data, store = write_metadata(tmp_path / "data", ["a", "b"]), tmp_path / "store"
    extract(data, store, encoders["bert"])
    path = store / "text-bert" / "text.json"
    whole = path.read_text()
    for key in ("num_samples", "num_entries"):
        path.write_text(json.dumps(json.loads(whole) | {key: (1 << 63) - 1}))
        assert_fails(key, "store", "verify", store)
        path.write_text(whole)


# Finding 21, parts that are copied where no second name can be given: tests/data/store_parts_test.cpp


def test_finding_22_every_reader_of_strangers_has_a_fuzzer():
    names = {path.stem for path in (TESTS / "fuzz").glob("fuzz_*.cpp")}
    assert names >= {f"fuzz_{name}" for name in ("image", "npy", "npz", "pt", "safetensors", "store", "toml", "json", "yaml", "tar", "text_store",
                                                 "tokenizer", "name_pattern", "tokenizer_folder", "adapter", "run_folder", "http")}


def test_finding_22_every_fuzzer_begins_with_files_of_its_format(tmp_path):
    subprocess.run(["python3", TESTS / "fuzz" / "make_reader_seeds.py", tmp_path], check=True)
    for source in (TESTS / "fuzz").glob("fuzz_*.cpp"):
        assert any(any(folder.glob(f"{source.stem}/*")) for folder in (tmp_path, TESTS / "fuzz" / "seeds")), source.stem
