"""Kernels of other shapes, compiled on the machine with the GPU and timed beside those that were built."""
import contextlib
import shutil

from .kernels import bench
from .session import BESIDE, Failed, NotRun, scratch, side_by_side

FORWARD = ("adaln.cu", "gated_residual.cu")
# {name: [(file, what stands there, what is tried)]}: other shapes of the kernels on rows.
VARIANTS = {
    "as built": [],
    "blocks of 8 rows forward": [(name, "kRowsPerBlock = 16;", "kRowsPerBlock = 8;") for name in FORWARD],
    "2 rows at once forward": [(name, "constexpr int kRows = 4;", "constexpr int kRows = 2;") for name in FORWARD],
    "1 row at once backward": [("adaln.cu", "kRows = 2, kMostThreads = 192, kLeastBlocks = 2;",
                                "kRows = 1, kMostThreads = 192, kLeastBlocks = 3;")],
    "gelu in blocks of 512": [("gelu.cu", "constexpr int kThreads = 256;", "constexpr int kThreads = 512;")],
}
KERNELS = "libkiln_cuda_kernels.so"  # what the packed programs load


def changed_sources(folder, changes):
    """Copies what nvcc needs to compile the kernels, with some text replaced. Returns the files that differ."""
    source = BESIDE / "src" if (BESIDE / "src").exists() else BESIDE.parent / "src"
    for name in ("ops/cuda", "ops/kernel_args.h", "core/dtype.h"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source / name, target) if (source / name).is_dir() else shutil.copy(source / name, target)
    for name, old, new in changes:
        path = folder / "ops" / "cuda" / name
        text = path.read_text()
        if text.count(old) != 1:
            raise Failed(f"{name} has {text.count(old)} times: {old}")
        path.write_text(text.replace(old, new))
    return {name for name, _, _ in changes}


def variants(session):
    """The kernels' times with other shapes. Only what changed is compiled, and nothing else is linked again."""
    nvcc, times = session.tool("nvcc"), {}
    if nvcc and KERNELS not in session.run("ldd", session.program("bench_cuda_kernels")).stdout:
        raise NotRun("bench_cuda_kernels holds its kernels itself, as -DKILN_CUDA=ON builds it")
    with scratch() as folder:
        objects = {}

        def compiled(name, changes):
            own = folder / name.replace(" ", "-")
            changed = changed_sources(own, changes)
            if session.rehearses:
                return None
            files = sorted((own / "ops" / "cuda").glob("*.cu"))
            flags = ["-std=c++17", "-O3", "-arch=native", f"-I{own}", "-Xcompiler", "-fPIC"]
            made = side_by_side({file.name: lambda file=file: session.run(nvcc, *flags, "-c", file, "-o", own / f"{file.name}.o")
                                 for file in files if file.name in changed or not objects}, 16)
            for file, done in made.items():
                if isinstance(done, Exception):
                    raise Failed(f"{name}: {done}", getattr(done, "details", None))
            own_objects = {**objects, **{file: own / f"{file}.o" for file in made}}
            if not objects:
                objects.update(own_objects)
            session.run(nvcc, "-shared", "--cudart", "none", "-Xlinker", f"-soname={KERNELS}", "-o", own / KERNELS,
                        *own_objects.values())
            return {"LD_PRELOAD": str(own / KERNELS)}  # the program's own path comes before LD_LIBRARY_PATH

        failed = {}
        for name, changes in VARIANTS.items():
            try:
                times[name] = bench(session, 32, env=compiled(name, changes))
            except Failed as failure:
                failed[name] = str(failure)
    details = {"times": times, "failed": failed}
    if failed or not times:
        raise Failed("; ".join(f"{name}: {why}" for name, why in failed.items()), details)
    best = {}
    for name, rows in times.items():
        for row in rows[1:]:
            with contextlib.suppress(ValueError, IndexError):
                best[row[0]] = min(best.get(row[0], (float("inf"), "")), (float(row[1]), name))
    gains = [f"{operation}: {name}" for operation, (_, name) in best.items() if name != "as built"]
    return f"{len(times)} variants; faster than as built: {', '.join(gains[:6]) or 'none'}", details
