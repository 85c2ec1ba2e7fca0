"""What shells complete and what man shows come from the same options as --help; kiln models lists what the registries have."""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import program, run_program, succeed


def commands():
    return re.findall(r"^  ([a-z][a-z-]*)  ", succeed("--help").stdout, re.MULTILINE)


def options_of(*command):
    return set(re.findall(r"^  (?:-h,)?(--[a-z][\w-]*)", succeed(*command, "--help", "all").stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """complete(words...) -> what bash offers for the last word."""
    script = tmp_path_factory.mktemp("completion") / "kiln.bash"
    script.write_text(succeed("completion", "bash").stdout)

    def offered(*words):
        line = " ".join(shlex.quote(word) for word in ("kiln", *words))
        text = f"set -u; source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _kiln; printf '%s\\n' \"${{COMPREPLY[@]-}}\""
        result = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
        assert result.stderr == ""
        return set(result.stdout.split())

    return offered


@pytest.mark.slow
def test_bash_completes_commands_options_and_values(complete):
    assert complete("") == set(commands()) and len(commands()) > 13
    assert complete("ex") == {"extract"}
    assert complete("store", "") == {"import", "inspect", "verify"}
    assert complete("store", "inspect", "--") == options_of("store", "inspect")
    for command in ("train", "extract", "sample"):
        assert options_of(command) <= complete(command, "--")
    assert {"f32", "bf16", "fp16"} <= complete("train", "--compute-dtype", "")
    assert complete("train", "--data", "a", "--compute-dtype", "b") == {"bf16"}
    assert complete("completion", "") == {"bash", "zsh", "fish"}
    assert complete("train", "--data", "") == set()  # files, which bash itself offers then
    assert "--no-tf32" in complete("train", "--no-")


@pytest.mark.parametrize("shell, checks", [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])])
def test_each_script_has_every_option(shell, checks, tmp_path):
    script = tmp_path / "script"
    script.write_text(succeed("completion", shell).stdout)
    text = script.read_text()
    for command in ("train", "extract"):
        for option in options_of(command):
            assert re.search((r"-l " + option[2:] if shell == "fish" else re.escape(option)) + r"\b", text), option
    if shutil.which(checks[0]):
        result = subprocess.run([*checks, str(script)], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")


def test_fish_offers_what_bash_does(tmp_path):
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    script = tmp_path / "kiln.fish"
    script.write_text(succeed("completion", "fish").stdout)
    for line, expected in [("kiln store ", {"import", "inspect", "verify"}), ("kiln train --compute-dtype b", {"bf16"})]:
        result = subprocess.run(["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"], capture_output=True, text=True)
        assert {row.split("\t")[0] for row in result.stdout.splitlines()} == expected, result.stderr


@pytest.mark.slow
def test_another_shell_is_refused(kiln):
    result = kiln("completion", "tcsh")
    assert result.returncode == 1 and result.stderr == 'kiln completion: expected bash, zsh or fish, got "tcsh"\n'


@pytest.mark.parametrize("command", [["man"], ["--help"], ["models", "--json"]])
@pytest.mark.slow
def test_a_text_that_cannot_be_written_is_an_error(command):
    with open("/dev/full", "w") as full:
        result = subprocess.run([program("kiln"), *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1 and re.fullmatch(r"kiln.*: cannot write the output.*\n", result.stderr), result.stderr


@pytest.mark.slow
def test_the_page_for_man_has_every_option(tmp_path):
    page = tmp_path / "kiln.1"
    page.write_text(succeed("man").stdout)
    text = page.read_text().replace("\\-", "-")
    for command in set(commands()) - {"store"}:  # it has commands of its own
        section = re.search(rf"^\.SS kiln {command}\n(.*?)(?=^\.S)", text, re.MULTILINE | re.DOTALL)[1]
        missing = [option for option in options_of(command) - {"--help"} if not re.search(option + r"\b", section)]
        assert missing == [], command
    if shutil.which("groff"):
        result = subprocess.run(["groff", "-man", "-Tutf8", "-ww", page], capture_output=True, text=True,
                                env=os.environ | {"LC_ALL": "C.UTF-8"})
        assert (result.returncode, result.stderr) == (0, "")
        assert "--compute-dtype" in re.sub(r"\x1b\[[0-9;]*m|.\x08", "", result.stdout).replace("‐", "-").replace("−", "-")


def test_models_are_those_of_the_registries(tmp_path):
    cache = {"KILN_CACHE": str(tmp_path / "own"), "HF_HOME": str(tmp_path / "hub")}

    def listed(*options):
        result = run_program("kiln", "models", *options, env=os.environ | cache)
        assert result.returncode == 0, result.stderr
        return result.stdout

    models = json.loads(listed("--json"))
    by_name = {row["model"]: row for row in models["denoisers"]}
    assert by_name["DiT-XL/2"] == {"model": "DiT-XL/2", "parameters": by_name["DiT-XL/2"]["parameters"], "image_size": 256,
                                   "takes": "classes", "autoencoder": "AutoencoderKL", "weights": "DiT-XL-2-256x256,DiT-XL-2-512x512"}
    assert 670e6 < by_name["DiT-XL/2"]["parameters"] < 680e6 and by_name["Sana-1600M"]["takes"] == "captions"
    summary = succeed("inspect", "--model", "sd15").stderr
    assert f"{by_name['sd15']['parameters']} trainable parameters" in summary
    names = [row["name"] for row in models["downloads"]]
    assert names == re.findall(r"^([\w-]+) ", succeed("download", "--list").stdout, re.MULTILINE)
    assert not any(row["is_here"] for row in models["downloads"]) and all(row["licence"] for row in models["downloads"])

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "DiT-XL-2-512x512.pt").write_bytes(bytes(3000))
    (fetched,) = [row for row in json.loads(listed("--json"))["downloads"] if row["is_here"]]
    assert (fetched["name"], fetched["bytes"]) == ("DiT-XL-2-512x512", 3000)
    text = listed()
    assert re.search(r"^  DiT-XL/2 +67\d M +256  classes +AutoencoderKL +DiT-XL-2-256x256,", text, re.MULTILINE)
    assert re.search(r"^  DiT-XL-2-512x512 .* fetched  CC BY-NC 4.0; ", text, re.MULTILINE)
