"""examples/two_nodes: their command lines, run as two nodes of one rank each on this machine; and what the Containerfiles say."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import REPOSITORY, program, run_command
from interruptions import wait_until
from test_ranks import command, free_port, losses

NODES = REPOSITORY / "examples/two_nodes"
SECRET = "0123456789abcdef0123456789abcdef"
STEPS = 4
CONTAINERS = ["Containerfile", "Containerfile.cuda"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    assert run_command(command(out, STEPS)).returncode == 0
    return losses(out)


@pytest.fixture
def tools(tmp_path):
    """A folder of programs that the examples call, before others in PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()

    def add(name, text):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    add("kiln", f'#!/bin/sh\nexec {program("kiln")} "$@"\n')
    add("torchrun", f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    # Two tasks on two nodes, as a step of Slurm describes them.
    add("srun", """#!/bin/sh
shift
for node in 0 1; do
  SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE='1(x2)' \\
    SLURM_STEP_NODELIST=127.0.0.1,127.0.0.2 "$@" &
  all="$all $!"
done
for one in $all; do wait "$one" || exit 1; done
""")
    (folder / "kiln-node").symlink_to(NODES / "start_ranks.sh")
    return folder


def run_all(commands, environments, tools):
    processes = [subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "KILN_JOB_SECRET": SECRET} | environment)
                 for words, environment in zip(commands, environments)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def options_of(out):
    return command(out, STEPS, "--zero-stage", 2)[2:]  # without `kiln train`


@pytest.mark.slow
def test_torchrun(tmp_path, tools, expected):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANKS_PER_NODE": "1"}
    run_all([[NODES / "torchrun.sh", *options_of(tmp_path / "run")]] * 2, [shared | {"NODE_RANK": str(node)} for node in range(2)], tools)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=5e-6)
    result = subprocess.run([NODES / "torchrun.sh"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert result.returncode != 0 and "MASTER_ADDR: expected the name or address of the first node" in result.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.slow
def test_slurm(tmp_path, tools, expected):
    run_all([[NODES / "slurm.sh", *options_of(tmp_path / "run")]], [{"MASTER_PORT": str(free_port())}], tools)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=5e-6)
    header = re.findall(r"^#SBATCH (--[\w-]+)=(\S+)$", (NODES / "slurm.sh").read_text(), re.MULTILINE)
    asked = dict(header)
    assert len(asked) == (NODES / "slurm.sh").read_text().count("#SBATCH") and asked["--nodes"] == "2"
    assert asked["--ntasks-per-node"] == asked["--gpus-per-node"] and asked["--signal"].startswith("TERM@")


def test_kubernetes(tmp_path, tools, expected):
    """The pod's command and environment, with this machine's address and one rank."""
    service, job = yaml.safe_load_all((NODES / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, int(environment["NODES"]))
    # Pod 0 of the job is JOB-0.SUBDOMAIN, a name of the service.
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert int(environment["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    recipe = container["command"][container["command"].index("--recipe") + 1]
    assert (REPOSITORY / recipe.removeprefix("/opt/kiln/")).exists()
    words = [*container["command"][:2], *options_of(tmp_path / "run")]
    own = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANKS_PER_NODE": "1", "KILN_JOB_SECRET": SECRET}
    run_all([words] * 2, [own | {"NODE_RANK": str(node)} for node in range(2)], tools)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=5e-6)


def test_start_ranks_ends_as_its_ranks_end(tmp_path):
    fake = tmp_path / "kiln"
    fake.write_text('#!/bin/sh\n[ "$1" = wait ] && { sleep 60 & trap "kill $!; exit 0" TERM; touch "$0.$RANK"; wait; }\nexit "$RANK"\n')
    fake.chmod(0o755)
    environment = os.environ | {"NODES": "2", "NODE_RANK": "1", "RANKS_PER_NODE": "2", "MASTER_ADDR": "a", "KILN": str(fake)}
    assert subprocess.run([NODES / "start_ranks.sh", "train"], env=environment).returncode == 3
    with subprocess.Popen([NODES / "start_ranks.sh", "wait"], env=environment) as started:
        wait_until(lambda: all((tmp_path / f"kiln.{rank}").exists() for rank in (2, 3)))
        started.terminate()
        assert started.wait(30) == 0


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name):
    text = (REPOSITORY / name).read_text()
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(stages) == 2 and all(re.fullmatch(r"debian:\d+\.\d+-slim", stage) for stage in stages)
    last = text[text.rindex("FROM "):]
    assert re.search(r"^USER 1000$", last, re.MULTILINE) and 'ENTRYPOINT ["kiln"]' in last and "useradd --uid 1000" in last
    for path in ("scripts/setup", "examples/two_nodes/start_ranks.sh", "recipes", "LICENSE", "NOTICE"):
        assert path in text and (REPOSITORY / path).exists()
    assert (REPOSITORY / ".dockerignore").read_text() == (REPOSITORY / ".containerignore").read_text()


@pytest.mark.slow
def test_containers_install_the_libraries_that_the_program_needs():
    """Those that it is linked with by itself; they bring their own."""
    if "VERSION_CODENAME=bookworm" not in open("/etc/os-release").read() or not shutil.which("objdump"):
        pytest.skip("the packages are those of Debian 12")
    needed = re.findall(r"NEEDED +(\S+)", subprocess.run(["objdump", "-p", program("kiln")], capture_output=True, text=True, check=True).stdout)
    places = dict(re.findall(r"(\S+) => (/\S+)", subprocess.run(["ldd", program("kiln")], capture_output=True, text=True, check=True).stdout))
    packages = set()
    for library in needed:
        path = os.path.realpath(places.get(library, ""))
        if path.startswith(("/usr/lib/", "/lib/")):
            found = subprocess.run(["dpkg", "-S", path], capture_output=True, text=True).stdout or \
                subprocess.run(["dpkg", "-S", path.removeprefix("/usr")], capture_output=True, text=True).stdout
            packages.add(found.split(":")[0])
    packages -= {"libc6", "libgcc-s1"}  # of every Debian
    assert len(packages) > 10
    for name in CONTAINERS:
        last = (REPOSITORY / name).read_text().split("\nFROM ")[-1]
        assert packages <= set(last.split()), name
