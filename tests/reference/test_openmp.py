"""The program brings the part of OpenMP that LibTorch calls (src/cli/openmp.cpp): its regions run on the program's threads."""

import re
import subprocess

from conftest import program

# Of libgomp: they know no teams of threads.
LEFT = {"GOMP_atomic_start", "GOMP_atomic_end", "GOMP_critical_start", "GOMP_critical_end", "GOMP_critical_name_start", "GOMP_critical_name_end",
        "omp_get_num_procs"}  # fmt: skip


def names(which, path):
    """Of a program's or library's dynamic symbols, those of OpenMP."""
    lines = subprocess.run(["nm", "-D", which, path], check=True, capture_output=True, text=True).stdout.splitlines()
    symbols = [line.split()[-1].split("@")[0] for line in lines]
    return {symbol for symbol in symbols if re.match("(GOMP|omp)_", symbol)}


def libraries_of(path):
    linked = subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout
    return re.findall(r"=> (\S*/libtorch\S*\.so)", linked)


def test_whatever_libtorch_calls_is_the_programs():
    kiln = program("kiln")
    libraries = libraries_of(kiln)
    assert libraries
    for library in libraries:
        assert names("--undefined-only", library) - LEFT <= names("--defined-only", kiln), library
