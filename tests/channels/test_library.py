"""What cmake --install makes: headers that compile alone and without torch but for one, and the two examples, built by
find_package(kiln) from the installed tree and run."""

import json
import os
import re
import subprocess

import pytest
from conftest import BUILD, REPOSITORY, run

CXX = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-xc++"]
TOOLS = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


@pytest.fixture(scope="module")
def prefix(built, tmp_path_factory):
    if not list(BUILD.glob("libkiln.so.*")):
        pytest.skip("libkiln is not built: ninja -C build libkiln")
    folder = tmp_path_factory.mktemp("library") / "prefix"
    run("cmake", "--install", BUILD, "--prefix", folder, env=TOOLS)
    return folder


@pytest.fixture(scope="module")
def examples(prefix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    run("cmake", "-S", REPOSITORY / "examples/library", "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", env=TOOLS)
    run("cmake", "--build", folder, env=TOOLS)
    return folder


def headers(prefix):
    return sorted(path.name for path in (prefix / "include/kiln").glob("*.h"))


def test_headers_show_torch_where_they_must(prefix, site):
    assert headers(prefix) == ["model.h", "options.h", "plan.h", "sample.h", "step.h", "store.h", "version.h"]
    for name in headers(prefix):
        torch = ["-isystem", site / "torch/include"] if name == "model.h" else []
        done = subprocess.run([*CXX, "-I", prefix / "include", *map(str, torch), "-"], input=f"#include <kiln/{name}>\n",
                              capture_output=True, text=True, env=TOOLS)  # fmt: skip
        assert done.returncode == 0, f"{name}\n{done.stderr}"
        assert bool(re.search(r"#include <(ATen|c10|torch)/", (prefix / "include/kiln" / name).read_text())) == bool(torch)


def test_the_version_is_that_of_the_program(prefix, built):
    version = re.search(r'KILN_VERSION "([\d.]+)"', (prefix / "include/kiln/version.h").read_text())[1]
    assert built.startswith(f"kiln {version}+") and run(prefix / "bin/kiln", "--version").stdout == built


def test_another_version_is_refused(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES CXX)\nfind_package(kiln 0.9 REQUIRED)\n")
    done = run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}", env=TOOLS, check=False)
    assert done.returncode != 0 and "0.9" in done.stderr


def test_the_example_plans(examples):
    text = run(examples / "plan_memory", "DiT-XL/2", "H100").stdout
    assert "DiT-XL/2 on H100 fits" in text and re.search(r"activations +\d+\.\d\d GiB", text)
    printed = run(BUILD / "kiln", "plan", "--model", "DiT-XL/2", "--gpu", "H100", "--global-batch", "64", "--compute-dtype", "bf16",
                  "--json").stdout  # fmt: skip
    peak = json.loads(printed)["predicted"]["peak_bytes"]
    assert f"tensors at the peak {peak / 2**30:.2f} GiB" in text
    refused = run(examples / "plan_memory", "DiT-Z/2", check=False)
    assert refused.returncode == 1 and refused.stderr.startswith('plan_memory: unknown model "DiT-Z/2"')


def test_the_example_trains_ten_steps(examples, prefix, tmp_path):
    text = run(examples / "train_ten_steps", tmp_path / "w.safetensors").stdout
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", text)]
    assert len(losses) == 10 and all(0 < loss < 3 for loss in losses)
    assert run(examples / "train_ten_steps", tmp_path / "again.safetensors").stdout.replace("again", "w") == text
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "w.safetensors").read_bytes()
    assert "blocks.0.attn.qkv.weight" in run(prefix / "bin/kiln", "inspect", tmp_path / "w.safetensors").stdout
