"""Copies of the source, in which faults are planted."""
import io
import json
import random
import re
import shlex
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.places import KINDS, SWITCH, places

HERE = Path(__file__).resolve().parent
# What no test here can reach: code for a GPU, and what runs before the switch can be read.
NOT_DRAWN = re.compile(r"src/ops/cuda/|src/parallel/device_graph|src/cli/before_main")


def sources_of(copy):
    """{path: text} of the committed sources."""
    archive = subprocess.run(["git", "-C", copy, "archive", "HEAD", "src"], check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return {member.name: files.extractfile(member).read().decode() for member in files
                if member.name.endswith(".cpp") and not NOT_DRAWN.match(member.name)}


def make_copy(root, copy, commit):
    """A clone whose tests and sources can ask for a fault. It shares the libraries and Python's packages."""
    subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", root, copy], check=True)
    subprocess.run(["git", "-C", copy, "checkout", "-q", "--detach", commit], check=True)
    for shared in (".deps", ".venv"):
        (copy / shared).symlink_to(root / shared)
    (copy / "src/core").mkdir(exist_ok=True)
    (copy / "src/core/fault_switch.h").write_text((HERE / "fault_switch.h").read_text())
    (copy / "tests/map_each_test.h").write_text((HERE / "map_each_test.h").read_text())
    main = copy / "tests/main.cpp"
    main.write_text('#include "map_each_test.h"\n' + main.read_text().replace("return RUN_ALL_TESTS();", "return run_mapped_tests();"))
    if (copy / "CMakeLists.txt").exists():
        build = copy / "build"
        subprocess.run(["cmake", "-G", "Ninja", "-S", copy, "-B", build, "-DKILN_TESTS=ON", "-DKILN_BENCHMARKS=OFF"],
                       check=True, stdout=subprocess.DEVNULL)
        # With the precompiled headers a source is checked in a third of the time.
        targets = subprocess.run(["ninja", "-C", build, "-t", "targets", "all"], check=True, stdout=subprocess.PIPE, text=True)
        headers = re.findall(r"^(.*\.gch):", targets.stdout, re.MULTILINE)
        subprocess.run(["ninja", "-C", build, *headers], check=True, stdout=subprocess.DEVNULL)


def commands_of(copy):
    """{source: (folder, arguments)}: how each source is compiled, also where CMake compiles several as one."""
    commands, database = {}, copy / "build/compile_commands.json"
    for entry in json.loads(database.read_text()) if database.exists() else []:
        file, arguments = entry["file"], shlex.split(entry["command"])
        del arguments[arguments.index("-o"):arguments.index("-o") + 2]
        names = re.findall(r'^#include "(.*)"$', Path(file).read_text(), re.MULTILINE) if "/Unity/" in file else [file]
        for name in names:
            commands[name] = entry["directory"], [name if word == file else word for word in arguments]
    return commands


def plant(copy, text, fault, number):
    """Writes the text of a source with a fault; returns it."""
    begin, end = fault["begin"], fault["begin"] + len(fault["original"])
    planted = fault["planted"].replace(SWITCH, f"::kiln::fault({number})")
    text = '#include "core/fault_switch.h"\n' + text[:begin] + planted + text[end:]
    (copy / fault["file"]).write_text(text)
    return text


def compiles(copy, file, commands):
    """Whether a source compiles, and with it its fault: between #if and #endif it may not be there."""
    folder, arguments = commands.get(str(copy / file), (copy, ["g++", "-std=c++20", "-Isrc", file]))
    result = subprocess.run([*arguments, "-fsyntax-only", "-DKILN_FAULT_CHECK"], cwd=folder, stderr=subprocess.PIPE, text=True)
    return result.returncode == 0 and "compiled [-Wdeprecated-declarations]" in result.stderr


def draw(copy, state, wanted, say):
    """Adds faults to the state: wanted[kind] of each kind, in files that have none yet, by the seed alone."""
    texts, commands, order = sources_of(copy), commands_of(copy), {kind: [] for kind in KINDS}
    for file, text in sorted(texts.items()):
        for place in places(text):
            order[place["kind"]].append({"file": file, "line": text.count("\n", 0, place["begin"]) + 1, **place})
    for kind in KINDS:
        random.Random(f"{state['seed']} {kind}").shuffle(order[kind])
    used = {fault["file"] for fault in state["faults"]}
    while sum(wanted.values()):
        trial = []
        for kind in KINDS:
            drawn = 0
            while drawn < wanted[kind] and (at := state["looked_at"].get(kind, 0)) < len(order[kind]):
                state["looked_at"][kind] = at + 1
                fault = order[kind][at]
                if fault["file"] not in used:
                    used.add(fault["file"])
                    trial.append(fault)
                    drawn += 1
        if not trial:
            raise SystemExit(f"plant_faults: no places are left: {dict(wanted)}")
        for fault in trial:
            plant(copy, texts[fault["file"]], fault, 0)
        with ThreadPoolExecutor(2) as pool:
            good = list(pool.map(lambda fault: compiles(copy, fault["file"], commands), trial))
        for fault, is_good in zip(trial, good):
            if is_good:
                state["faults"].append({"id": len(state["faults"]) + 1, **fault})
                plant(copy, texts[fault["file"]], fault, len(state["faults"]))
                wanted[fault["kind"]] -= 1
                say(f"{len(state['faults']):3d}  {fault['kind']:9}  {fault['file']}:{fault['line']}")
            else:
                (copy / fault["file"]).write_text(texts[fault["file"]])
                used.remove(fault["file"])


def flexible(text):
    return r"\s+".join(re.escape(piece) for piece in re.split(r"\s+", text))


def find_again(fault, texts):
    """The fault where its lines are in other texts: in its file, nearest to where they were, or in the only file that has them."""
    before, after = fault["beside"]
    pattern = re.compile(f"{flexible(before.lstrip())}({flexible(fault['original'])}){flexible(after.rstrip())}")
    found = [(file, match) for file, text in texts.items() for match in pattern.finditer(text)]
    here = [(file, match) for file, match in found if file == fault["file"]]
    if not here and len(found) != 1:
        return None
    file, match = min(here or found, key=lambda pair: abs(pair[1].start() - fault["begin"]))
    line = texts[file].count("\n", 0, match.start(1)) + 1
    return {**fault, "file": file, "line": line, "begin": match.start(1), "original": match[1]}


def plant_same(copy, state, say):
    """Plants the faults of another copy, as many as this one's source still has."""
    texts, commands = sources_of(copy), commands_of(copy)
    for index, fault in enumerate(state["faults"]):
        if "equivalent" in fault:
            continue
        again = find_again(fault, texts)
        if again:
            text = plant(copy, texts[again["file"]], again, fault["id"])
            if compiles(copy, again["file"], commands):
                texts[again["file"]], state["faults"][index] = text, again
                continue
            (copy / again["file"]).write_text(texts[again["file"]])
        fault["gone"] = True
        say(f"{fault['id']:3d}  {fault['file']}:{fault['line']} is gone: {' '.join(fault['original'].split())[:100]}")
