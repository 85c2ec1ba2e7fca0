"""tools/cuda_registers: what ptxas says of the CUDA kernels is printed, and a kernel that spills fails."""

import subprocess

from conftest import REPOSITORY

ENTRY = "ptxas info    : Compiling entry function '{}' for 'sm_{}'\nptxas info    : Function properties for {}\n"
FINE = ENTRY.format("_ZN4kiln3ops4cuda12_GLOBAL__N_112scale_kernelEPKjfPf", 90, "_ZN4kiln3ops4cuda12_GLOBAL__N_112scale_kernelEPKjfPf") + """\
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 12.345 ms
"""
SPILLS = ENTRY.format("_Z11grad_kernelPf", 80, "_Z11grad_kernelPf") + """\
    40 bytes stack frame, 36 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 40 bytes cumulative stack size
"""


def registers(folder, *texts):
    files = []
    for index, text in enumerate(texts):
        files.append(folder / f"{index}.ptxas")
        files[-1].write_text("ptxas info    : 0 bytes gmem\n" + text)
    return subprocess.run([REPOSITORY / "tools" / "cuda_registers", *files, "--build", folder], capture_output=True, text=True)


def test_every_kernel_has_a_line(tmp_path):
    done = registers(tmp_path, FINE + FINE.replace("sm_90", "sm_80"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines[1:3]] == [["22", "0", "0", "sm_90", "scale_kernel"], ["22", "0", "0", "sm_80", "scale_kernel"]]
    assert lines[-1] == "2 kernels, 0 that spill or keep a stack"


def test_a_kernel_that_spills_fails(tmp_path):
    done = registers(tmp_path, FINE, SPILLS)
    assert done.returncode == 1
    assert ["128", "40", "76", "sm_80", "grad_kernel"] in [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.splitlines()[-1] == "2 kernels, 1 that spill or keep a stack"


def test_a_build_without_kernels_is_refused_in_one_line(tmp_path):
    done = registers(tmp_path)
    assert done.returncode == 1 and "no kernel was compiled" in done.stderr and len(done.stderr.splitlines()) == 1
