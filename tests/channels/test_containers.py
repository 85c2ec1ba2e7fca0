"""The Containerfiles, with --full: buildah builds them, with a Debian 12 made by debootstrap as their base image. What comes of it runs as a
user without rights, and trains as the build does."""

import json
import os
import shutil

import pytest
from conftest import BUILD, REPOSITORY, TINY, losses, run

BUILD_S = 1800
CERTIFICATES = os.environ.get("PIP_CERT")  # this machine's way to the packages


@pytest.fixture(scope="module")
def buildah(debian, tmp_path_factory):
    """buildah(command, ...) in a store of its own, which has the base images."""
    if not shutil.which("buildah"):
        pytest.skip("needs buildah")
    folder = tmp_path_factory.mktemp("buildah")
    store = ["--storage-driver", "vfs", "--root", folder / "store", "--runroot", folder / "run"]

    def buildah(command, *words, check=True):
        return run("buildah", *store, command, *words, timeout=BUILD_S, env=dict(os.environ), check=check)

    root = debian(tmp_path_factory.mktemp("base") / "root")
    base = buildah("from", "scratch").stdout.strip()
    if CERTIFICATES:
        shutil.copy(CERTIFICATES, root / "etc/certificates.pem")
        buildah("config", "--env", "PIP_CERT=/etc/certificates.pem", base)
    archive = folder / "debian.tar"
    run("tar", "-C", root, "-cf", archive, ".")
    buildah("add", base, archive, "/")
    for name in ("debian:12.12-slim", "debian:12"):
        buildah("commit", base, name)
    archive.unlink()
    yield buildah
    shutil.rmtree(folder)


class Container:
    """A container of an image that a file makes; `work` is mounted as /work."""

    def __init__(self, buildah, file, context, work):
        buildah("build", "--isolation", "chroot", "--pull-never", "--tag", "kiln", "--file", REPOSITORY / file, context)
        self.config = json.loads(buildah("inspect", "--type", "image", "kiln").stdout)["OCIv1"]["config"]
        self.name = buildah("from", "--pull-never", "kiln").stdout.strip()
        self.buildah, self.work = buildah, work

    def run(self, *command, check=True):
        return self.buildah("run", "--isolation", "chroot", "--volume", f"{self.work}:/work", self.name, "--", *command, check=check)

    def remove(self):
        self.buildah("rm", self.name)
        self.buildah("rmi", "kiln")


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_buildah_makes_an_image_that_trains(name, buildah, built, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    os.chown(work, 1000, 1000)
    image = Container(buildah, name, REPOSITORY, work)
    assert image.config["User"] == "1000" and image.config["WorkingDir"] == "/work"
    kiln = image.config["Entrypoint"]
    assert image.run(*kiln, "--version").stdout.split("+")[0] == built.split("+")[0].strip()
    image.run(*kiln, "plan", "--model", "DiT-XL/2", "--gpu", "A100-80G")
    image.run(*kiln, "train", *TINY, "--out", "run")
    assert (work / "run").stat().st_uid == 1000
    run(BUILD / "kiln", "train", *TINY, "--out", tmp_path / "build")
    assert losses(work / "run") == losses(tmp_path / "build")
    image.run("sh", "-c", "command -v kiln-node")
    assert image.run("sh", "-c", "command -v c++ || command -v python3", check=False).returncode != 0, "what builds stays behind"
    image.remove()


def test_a_devcontainer_sets_a_checkout_up(buildah, tmp_path):
    work = tmp_path / "work"
    run("git", "clone", "-q", REPOSITORY, work)
    settings = json.loads((REPOSITORY / ".devcontainer/devcontainer.json").read_text())
    image = Container(buildah, ".devcontainer/Dockerfile", REPOSITORY / ".devcontainer" / settings["build"]["context"], work)
    assert image.config["User"] == settings["remoteUser"]
    run("chown", "-R", "1000:1000", work)
    image.run("sh", "-c", f"cd /work && {settings['postCreateCommand']} && build/kiln --version")
    assert (work / "compile_commands.json").exists(), "what clangd reads"
    image.remove()
