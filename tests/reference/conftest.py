"""Fixtures of the reference tests: the built programs, run on files in a temporary folder.

KILN_BUILD names the build folder (default: build/ of this checkout).
"""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import fork_server
import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"  # for transformers and diffusers, which tests import after this file
torch.set_num_threads(1)  # its operations are small here, and other tests and the program itself need the processors

FULL = os.environ.get("KILN_FULL_TESTS") == "yes"  # scripts/test --full
# Other CPUs only store bf16.
MULTIPLIES_BF16 = "avx512bw" in Path("/proc/cpuinfo").read_text() and os.environ.get("KILN_CPU") != "avx2"
REPOSITORY = Path(__file__).resolve().parents[2]


def pytest_configure(config):
    config.addinivalue_line("markers", "nothing_beside: it times something, or waits for no longer than a busy machine may need")
    config.addinivalue_line("markers", "slow: it takes seconds, and other tests reach what it tests; left out without --ci")


def program(name):
    path = Path(os.environ.get("KILN_BUILD", REPOSITORY / "build")) / name
    if not path.exists():
        pytest.fail(f"{path} is not built; set KILN_BUILD to the build folder")
    return path


def matrix(covering, rest):
    """Values for pytest.mark.parametrize. Every run has those of `covering`: each family, dtype and option at least once, by the
    fewest combinations. scripts/test --full has the rest as well."""
    of_full = pytest.mark.skipif(not FULL, reason="the rest of a matrix: scripts/test --full")
    return [*covering, *(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=of_full) for case in rest)]


def run_command(command, timeout=600, env=None, cwd=None):
    """Runs a command whose first word is a built program; returns the completed process with text output. With --full it is
    started as a user starts it, else it may be forked from one that is loaded (fork_server.py)."""
    command = [str(word) for word in command]
    if FULL:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd)
    return fork_server.run(command, env, cwd, timeout)


def run_program(name, *arguments, timeout=600, **options):
    """Runs a built program; returns the completed process with text output."""
    return run_command([program(name), *arguments], timeout, **options)


def succeed(*arguments, **options):
    """Runs kiln, which must end well."""
    result = run_program("kiln", *arguments, **options)
    assert result.returncode == 0, f"kiln {' '.join(map(str, arguments))}\n{result.stderr}"
    return result


def is_refusal(result, code):
    return result.returncode == code or code is None and result.returncode > 0


def assert_fails(expected, *arguments, code=1, **options):
    """Runs kiln, which must say `expected` among other lines and fail. code: as of refusal()."""
    result = run_program("kiln", *arguments, **options)
    assert is_refusal(result, code) and expected in result.stderr, result.stderr


def read_json(*arguments, **options):
    """What kiln prints with --json."""
    return json.loads(succeed(*arguments, "--json", **options).stdout)


def refusal(*arguments, code=1, lines=str.splitlines, **options):
    """The one line in which kiln refuses. code: the status that it ends with, None for any of a refusal. lines: of the
    text on stderr those that count."""
    result = run_program("kiln", *arguments, **options)
    assert is_refusal(result, code), result.stdout + result.stderr
    found = lines(result.stderr.strip())
    assert len(found) == 1, result.stderr
    return found[0]


def assert_refused(arguments, *parts, **options):
    """A refusal() in whose line all parts stand."""
    line = refusal(*arguments, **options)
    for part in parts:
        assert part in line, line


@pytest.fixture
def kiln():
    """kiln(*arguments) -> completed process; the caller looks at returncode, stdout, stderr."""
    return lambda *arguments, **options: run_program("kiln", *arguments, **options)


@pytest.fixture
def convert(tmp_path):
    """convert(in, out name, options...) -> the path written."""
    def run(source, name, *options):
        succeed("convert", "--in", source, "--out", tmp_path / name, *options)
        return tmp_path / name

    return run


@pytest.fixture(scope="session")
def original_dit():
    """models.py of the original DiT, when KILN_DIT_REPO names a checkout of it."""
    repository = os.environ.get("KILN_DIT_REPO")
    if not repository:
        pytest.skip("KILN_DIT_REPO does not name a checkout of the original DiT")
    spec = importlib.util.spec_from_file_location("original_dit", Path(repository) / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_vae(tmp_path_factory):
    """A small AutoencoderKL that halves its images, as a diffusers folder; and the model."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
                        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=32, sample_size=32,
                        scaling_factor=0.3)
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder)
    return folder, vae


@pytest.fixture
def conformance(tmp_path):
    """conformance(verb, flags..., option=value) -> output tensors.

    A dict of tensors becomes a safetensors file, any other dict a JSON file, and its path is what the program is
    given. With `expect_error` the one line on stderr is returned instead.
    """
    calls = 0

    def as_argument(option, value):
        if not isinstance(value, dict):
            return value
        if value and all(isinstance(item, torch.Tensor) for item in value.values()):
            path = tmp_path / f"{calls}-{option}.safetensors"
            save_file({key: tensor.detach().contiguous() for key, tensor in value.items()}, path)
        else:
            path = tmp_path / f"{calls}-{option}.json"
            path.write_text(json.dumps(value))
        return path

    def run(verb, *flags, expect_error=False, **options):
        nonlocal calls
        calls += 1
        outputs = tmp_path / f"{calls}-outputs.safetensors"
        arguments = [verb, "--outputs", outputs, *flags]
        for option, value in options.items():
            arguments += ["--" + option.replace("_", "-"), as_argument(option, value)]
        result = run_program("kiln-conformance", *arguments)
        if expect_error:
            assert result.returncode != 0, f"{arguments} succeeded"
            assert not outputs.exists(), "a failed run must not write its output"
            lines = result.stderr.strip().splitlines()
            assert len(lines) == 1, result.stderr
            return lines[0]
        assert result.returncode == 0, result.stderr
        return load_file(outputs)

    return run


def complaints(text):
    """The lines in which a command says what is wrong, not what it took as published, chose, counts or writes to."""
    return [line for line in text.splitlines() if re.match(r"kiln( [a-z]+)*: (?!as |chosen: |writing to |\w+: \d+/\d+ pictures)", line)]


def without_warnings(text):
    return [line for line in text.splitlines() if not line.startswith("warning: ")]


def without_origins(text):
    """The lines but those which say what settings are taken from."""
    return [line for line in text.splitlines() if " is published: " not in line and " was begun: " not in line]


def lines_of_errors(text):
    """The lines but that which says that other programs are busy beside the test."""
    return [line for line in text.strip().splitlines() if not line.startswith("this machine: other programs had ")]
