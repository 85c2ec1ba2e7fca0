"""The folder with the program's own LibTorch: it runs where nothing of the build is found. With --full its tarball is unpacked
and run in a Debian 12 made by debootstrap, which has nothing else."""

import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import BUILD, REPOSITORY, TINY, libraries_outside, losses, pack, run, run_inside

SYSTEM = re.compile(r"(libc|libm|libdl|librt|libutil|libpthread|libresolv|libstdc\+\+|libgcc_s)\.so\.\d+")
DEBIAN_12 = {"GLIBC": "2.36", "GLIBCXX": "3.4.30", "CXXABI": "1.3.13", "GCC": "12.0.0"}


def numbers(version):
    return [int(part) for part in version.split(".")]


@pytest.fixture(scope="module")
def tree(built, tmp_path_factory):
    """The folder, moved away from where it was made."""
    made = pack("tree")
    moved = tmp_path_factory.mktemp("tree") / "elsewhere"
    shutil.move(made, moved)
    yield moved
    shutil.rmtree(moved)


def test_it_needs_of_the_system_what_debian_12_has(tree):
    needs = json.loads((tree / "needs.json").read_text())
    assert set(needs) <= set(DEBIAN_12)
    for kind, version in needs.items():
        assert numbers(version) <= numbers(DEBIAN_12[kind]), (kind, version)
    for program in (tree / "bin").iterdir():
        outside = libraries_outside(program, tree.resolve())
        assert not [name for name in outside if not SYSTEM.fullmatch(name)], program.name
    assert not list(tree.rglob("libstdc++*")) and not list(tree.rglob("libtorch_cuda*"))
    assert (tree / "LICENSE").exists() and list((tree / "licenses").rglob("*torch*"))


def test_it_trains_as_the_build_does(tree, built, tmp_path):
    assert run(tree / "bin/kiln", "--version").stdout == built
    for name, program in (("tree", tree / "bin/kiln"), ("build", BUILD / "kiln")):
        run(program, "train", *TINY, "--out", tmp_path / name)
    assert len(losses(tmp_path / "tree")) == 4 and losses(tmp_path / "tree") == losses(tmp_path / "build")


def test_it_runs_in_a_bare_debian_12(debian, built, tmp_path):
    root = debian(tmp_path / "root")
    run("tar", "-C", root / "opt", "-xf", pack("tarball"))
    program = f"/{next((root / 'opt').glob('kiln-*/bin/kiln')).relative_to(root)}"
    assert run_inside(root, program, "--version").stdout == built
    run_inside(root, program, "doctor", "--no-peak", "--folder", "/srv")
    run_inside(root, program, "plan", "--model", "DiT-XL/2", "--gpu", "H100")
    run_inside(root, program, "train", *TINY, "--out", "/srv/run")
    run(BUILD / "kiln", "train", *TINY, "--out", tmp_path / "build")
    assert losses(root / "srv/run") == losses(tmp_path / "build")
    installed = subprocess.run(["chroot", root, "dpkg-query", "-W", "-f", "${Package}\n"], capture_output=True, text=True).stdout.split()
    assert "libcurl4" not in installed and "libjpeg62-turbo" not in installed and "python3" not in installed


def test_the_pack_refuses_what_is_not_built(tmp_path):
    done = run(REPOSITORY / "scripts/pack", "tree", "--no-build", check=False,
               env={**os.environ, "KILN_BUILD": str(tmp_path), "KILN_SKIP_APT": "1"})  # fmt: skip
    assert done.returncode == 1 and "kiln is not built" in done.stderr.splitlines()[-1]
