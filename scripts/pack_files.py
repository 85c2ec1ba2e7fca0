"""Lays out built programs with the libraries that another machine may lack, for scripts/pack and scripts/gpu.

    pack_files.py wheel|tarball|tree BUILD
    pack_files.py gpu BUILD PROGRAM...

Libraries of LibTorch and CUDA are found by a path relative to the program; libc, its parts and the compiler's runtime are
the machine's own. Everything else lies in lib/ beside bin/.
"""
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "pack"
MOST_WHEEL_MIB = 30
# Those of every system with glibc (the list of manylinux, which auditwheel checks), and of the compiler.
SYSTEM = re.compile(r"(libc|libm|libdl|librt|libutil|libpthread|libresolv|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so\.\d+")
# What libtorch_cpu.so needs on a CPU.
TORCH_ON_CPUS = ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp.so.1", "nvidia/cu13/lib/libcupti.so.13",
                 "nvidia/cu13/lib/libcudart.so.13")  # fmt: skip
HEADERS = ("libcli11-dev", "nlohmann-json3-dev")  # packages whose code the programs hold
TORCH_LICENSES = ("torch-*.dist-info", "nvidia_cuda_cupti-*.dist-info", "nvidia_cuda_runtime-*.dist-info")


def run(*command):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def say(text):
    print(f"==> {text}", file=sys.stderr)


def refuse(text):
    sys.exit(f"error: {text}")


def version():
    return re.search(r"project\(kiln VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def needed(binary):
    """The names of the libraries that a program or library asks for itself."""
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", run("readelf", "-dW", binary))


def found_here(program):
    """{name: path} of all libraries that the loader finds for a program on this machine."""
    lines = run("ldd", program).splitlines()
    missing = [line.split()[0] for line in lines if "not found" in line and ".so" in line]
    if missing:
        refuse(f"{program.name} does not find {', '.join(missing[:3])}: build it here first")
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", "\n".join(lines), re.MULTILINE))


def readers_of_archives(programs, paths, folder):
    """libarchive with what the programs call of it alone, made of its static library: the shared one needs glibc 2.36 for
    random numbers and libxml2 for formats that Kiln does not read. None where there is no static library."""
    name = "libarchive.so.13"
    static = Path(paths.get(name, "")).parent / "libarchive.a"
    if not static.exists():
        return {}
    called = {symbol for program in programs for symbol in re.findall(r"U (archive_\w+)", run("nm", "-D", "--undefined-only", program))}
    parts = [path for needs in needed(paths[name]) for path in [paths.get(needs)] if path and not SYSTEM.fullmatch(needs)]
    made = folder / name
    run("cc", "-shared", "-o", made, f"-Wl,-soname,{name}", "-Wl,-z,defs", *(f"-Wl,-u,{symbol}" for symbol in sorted(called)), static,
        "-Wl,--as-needed", *parts)
    return {name: made}


def no_tables_of_icu(paths, folder):
    """A library in place of ICU's 31 MB of tables: what Kiln asks of characters and of the forms NFC and NFD is in libicuuc
    itself. Whatever else were asked would end as an error."""
    made = {}
    for name, path in paths.items():
        if name.startswith("libicudata.so."):
            symbol = re.search(r"\b(icudt\d+_dat)\b", run("nm", "-D", path))[1]
            source = folder / "icudata.c"
            source.write_text(f"const long {symbol}[4] = {{0}};\n")
            made[name] = folder / name
            run("cc", "-shared", "-fPIC", "-o", made[name], source, f"-Wl,-soname,{name}")
    return made


def libraries(programs, scratch):
    """{name: path} of what lies in lib/."""
    paths = {name: path for program in programs for name, path in found_here(program).items()}
    made = {**readers_of_archives(programs, paths, scratch), **no_tables_of_icu(paths, scratch)}
    carried, todo = {}, list(programs)
    while todo:
        for name in needed(todo.pop()):
            path = Path(made.get(name) or paths.get(name, name))
            if name in carried or SYSTEM.fullmatch(name) or "/torch/lib/" in str(path) or "/nvidia/" in str(path):
                continue
            carried[name] = path
            todo.append(path)
    return carried, set(made)


def licenses_of(carried, made, folder):
    """The texts of the packages that the libraries come from. dpkg knows them; on other systems they are to be added by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    if not shutil.which("dpkg-query"):
        say("no dpkg here: add the licences of the libraries in lib/ by hand")
        return
    packages = set(HEADERS)
    for name, path in carried.items():
        real = path.resolve() if name not in made else Path(found_licensed(name)).resolve()
        owner = subprocess.run(["dpkg-query", "-S", f"*/{real.name}"], capture_output=True, text=True).stdout
        packages |= set(re.findall(r"^([\w.+-]+)(?::\w+)?: ", owner, re.MULTILINE))
    for package in sorted(packages):
        text = Path("/usr/share/doc") / package / "copyright"
        if text.exists():
            shutil.copy(text, folder / f"{package}.txt")


def found_licensed(name):
    """The system's library that one of ours stands for."""
    return next(iter(Path("/usr/lib").glob(f"*/{name}")), Path(name))


def lay_out(folder, programs, rpath, suffix=""):
    """bin/ and lib/ in `folder`. `rpath`: where a program of bin/ finds LibTorch, besides lib/. Programs lose `suffix` in their names."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    scratch = OUT / "made"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    carried, made = libraries(programs, scratch)
    for name, path in carried.items():
        copy(path, folder / "lib" / name, "$ORIGIN")
    for program in programs:
        copy(program, folder / "bin" / program.name.removesuffix(suffix), ":".join(["$ORIGIN/../lib", *rpath]))
    return carried, made


def copy(binary, target, rpath):
    """Stripped first: what patchelf has moved must not be stripped. An RPATH, not a RUNPATH: that of a program also serves
    what its libraries need and open by name."""
    shutil.copyfile(binary, target)
    target.chmod(0o755)
    run("strip", target)
    run("patchelf", "--force-rpath", "--set-rpath", rpath, target)


def newest_symbols(folder):
    """{"GLIBC": "2.34", ...}: the newest versions that the packed files ask of the machine."""
    newest = {}
    for binary in [*(folder / "bin").iterdir(), *(folder / "lib").iterdir()]:
        for kind, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", run("readelf", "-VW", binary)):
            newest[kind] = max(newest.get(kind, "0"), number, key=lambda text: [int(part) for part in text.split(".")])
    return newest


def programs_of(build, with_cuda):
    names = ["kiln", "kiln-conformance"] + (["kiln-cuda"] if with_cuda and (build / "kiln-cuda").exists() else [])
    missing = [name for name in names if not (build / name).exists()]
    if missing:
        refuse(f"{build / missing[0]} is not built: run scripts/pack without --no-build")
    return [build / name for name in names]


def pack_wheel(build):
    stage, raw = OUT / "wheel", OUT / "raw"
    for folder in (stage, raw):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "python", stage, ignore=shutil.ignore_patterns("__pycache__"))
    programs = programs_of(build, with_cuda=True)
    carried, made = lay_out(stage / "kiln", programs, ["$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/cu13/lib", "$ORIGIN/../../nvidia/cudnn/lib"])
    licenses_of(carried, made, stage / "licenses")
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, stage / name)
    (stage / "VERSION").write_text(version() + "\n")
    say(f"a wheel of {', '.join(program.name for program in programs)} and {len(carried)} libraries, which need {newest_symbols(stage / 'kiln')}")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", raw, stage)
    for old in OUT.glob("kiln_diffusion-*.whl"):
        old.unlink()
    # Chooses the tag by the symbols, and refuses a wheel that needs other libraries than those left out.
    left_out = [word for name in ("libtorch*", "libc10*", "libgomp.so.1", "libcudart.so.*", "libcublasLt.so.*", "libcudnn.so.*") for word in ("--exclude", name)]
    run("auditwheel", "repair", "--plat", "auto", *left_out, "-w", OUT, next(raw.glob("*.whl")))
    wheel = next(OUT.glob("kiln_diffusion-*.whl"))
    mib = wheel.stat().st_size / 2**20
    if mib > MOST_WHEEL_MIB:
        refuse(f"{wheel} has {mib:.1f} MiB, more than {MOST_WHEEL_MIB}: compile for fewer KILN_CUDA_ARCHITECTURES")
    with zipfile.ZipFile(wheel) as archive:
        if any("libstdc++" in name for name in archive.namelist()):
            refuse(f"{wheel} holds libstdc++, which would differ from torch's")
    print(f"{wheel.relative_to(ROOT)}: {mib:.1f} MiB")


def site_of(build):
    """The folder of the torch wheel that a build folder is configured for."""
    return Path(re.search(r"^KILN_SITE:PATH=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE)[1])


def lay_out_tree(build):
    tree = OUT / f"kiln-{version()}-linux-x86_64"
    shutil.rmtree(tree, ignore_errors=True)
    carried, made = lay_out(tree, programs_of(build, with_cuda=False), [])
    site = site_of(build)
    for name in TORCH_ON_CPUS:
        copy(site / name, tree / "lib" / Path(name).name, "$ORIGIN")
    licenses_of(carried, made, tree / "licenses")
    for pattern in TORCH_LICENSES:
        for folder in site.glob(pattern):
            texts = [path for path in folder.rglob("*") if path.is_file() and re.search("licen[cs]e|notice", str(path.relative_to(folder)), re.IGNORECASE)]
            for text in texts:
                target = tree / "licenses" / folder.name.removesuffix(".dist-info") / text.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(text, target)
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree / name)
    symbols = newest_symbols(tree)
    (tree / "needs.json").write_text(json.dumps(symbols, indent=1, sort_keys=True) + "\n")
    say(f"{tree.relative_to(ROOT)} needs {symbols}")
    return tree


def pack_tarball(build):
    tree = lay_out_tree(build)
    packed = tree.with_name(tree.name + ".tar.xz")
    say("packing")
    subprocess.run(["tar", "-C", OUT, "-cJf", packed, "--owner=0", "--group=0", "--sort=name", tree.name], check=True,
                   env={"PATH": "/usr/bin:/bin", "XZ_OPT": "-2 -T0"})
    unpacked = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    print(f"{packed.relative_to(ROOT)}: {packed.stat().st_size / 2**20:.0f} MiB, {unpacked / 2**20:.0f} MiB unpacked")


def lay_out_for_gpu(build, names):
    """bin/ and lib/ of scripts/gpu's pack. gpu_checks/machine.py makes site/ beside them, a link to the other machine's packages."""
    site = "$ORIGIN/../site"
    lay_out(build / "kiln-gpu", [build / name for name in names], [f"{site}/torch/lib", f"{site}/nvidia/cu13/lib", f"{site}/nvidia/cudnn/lib"],
            suffix="-cuda")


def main():
    what, build = sys.argv[1], (ROOT / sys.argv[2]).resolve()
    OUT.mkdir(parents=True, exist_ok=True)
    if what == "tree":
        print(lay_out_tree(build).relative_to(ROOT))
    elif what == "gpu":
        lay_out_for_gpu(build, sys.argv[3:])
    else:
        {"wheel": pack_wheel, "tarball": pack_tarball}[what](build)


if __name__ == "__main__":
    main()
