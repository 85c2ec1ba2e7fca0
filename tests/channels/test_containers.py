"""The Containerfiles, with --full: their steps are run by this test in roots of Debian 12 made by debootstrap, as an engine for containers
would in its images. What comes of it runs as a user without rights, and trains as the build does."""

import os
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import BARE, BUILD, REPOSITORY, TINY, losses, run, run_inside

BUILD_S = 1800


def steps_of(text):
    """(instruction, its words or its command) of a Containerfile."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [line.split(maxsplit=1) for line in lines.splitlines() if line.strip()]


class Image:
    """A root that steps change."""

    def __init__(self, root):
        self.root, self.env, self.folder, self.user, self.entry = root, {**BARE, "HOME": "/root"}, "/", "0:0", []
        for name in ("resolv.conf", "hosts"):
            (root / "etc" / name).write_bytes(open(f"/etc/{name}", "rb").read())
        if certificates := os.environ.get("PIP_CERT"):  # this machine's way to the packages
            (root / "etc/certificates.pem").write_bytes(open(certificates, "rb").read())
            self.env["PIP_CERT"] = "/etc/certificates.pem"

    def inside(self, *command, timeout=300):
        return run_inside(self.root, *command, env=self.env, user=self.user, folder=self.folder, timeout=timeout)

    def take(self, step, rest, sources):
        if step == "RUN":
            self.inside("sh", "-c", rest, timeout=BUILD_S)
        elif step == "COPY":
            words = shlex.split(rest)
            origin = sources[words.pop(0).removeprefix("--from=")] if words[0].startswith("--from=") else sources[""]
            (source,), target = words[:-1], self.root / self.folder.lstrip("/") / words[-1].lstrip("/")
            target = self.root if words[-1] == "/" else target
            target.mkdir(parents=True, exist_ok=True)
            run("cp", "-aT", origin / source.strip("/"), target)
        elif step == "ENV":
            name, value = rest.split("=", 1)
            self.env[name] = value.replace("$PATH", self.env["PATH"])
        elif step == "WORKDIR":
            self.folder = rest
            path = self.root / rest.lstrip("/")
            path.mkdir(parents=True, exist_ok=True)
            user, _ = map(int, self.user.split(":"))
            os.chown(path, user, user)  # as the folder that a user mounts there
        elif step == "USER":
            self.user = f"{rest}:{rest}"
        else:
            assert step == "ENTRYPOINT", step
            self.entry = re.findall(r'"([^"]+)"', rest)


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_its_steps_make_an_image_that_trains(name, debian, built, tmp_path):
    context = tmp_path / "context"
    for file in run("git", "ls-files", "-co", "--exclude-standard", cwd=REPOSITORY).stdout.splitlines():
        if (REPOSITORY / file).exists():
            (context / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, context / file)
    images, sources = [], {"": context}
    for step, rest in steps_of((REPOSITORY / name).read_text()):
        if step == "FROM":
            images.append(Image(debian(tmp_path / f"image{len(images)}")))
            if " AS " in rest:
                sources[rest.split(" AS ")[1]] = images[-1].root
        else:
            images[-1].take(step, rest, sources)
    image = images[-1]
    assert image.user == "1000:1000" and image.folder == "/work"
    assert image.inside(*image.entry, "--version").stdout.split("+")[0] == built.split("+")[0].strip()
    image.inside(*image.entry, "plan", "--model", "DiT-XL/2", "--gpu", "A100-80G")
    image.inside(*image.entry, "train", *TINY, "--out", "run")
    run(BUILD / "kiln", "train", *TINY, "--out", tmp_path / "build")
    assert losses(image.root / "work/run") == losses(tmp_path / "build")
    image.inside("sh", "-c", "command -v kiln-node")
    compiler = subprocess.run(["chroot", image.root, "sh", "-c", "command -v c++ || command -v python3"], capture_output=True)
    assert compiler.returncode != 0, "what builds stays behind"
