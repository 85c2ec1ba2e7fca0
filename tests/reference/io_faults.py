"""Errors of input and output at every place of the program that can meet one (io_faults.c): which places a command uses, a run
with an error at one of them, and what is expected of it."""

import bisect
import errno
import functools
import os
import re
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import fork_server
from conftest import complaints, program

SOURCE = Path(__file__).with_suffix(".c")
FEWER = 0  # a call that moves fewer bytes than it was asked for
FAULTS = {
    "open": (errno.EMFILE, errno.EIO, errno.EINTR), "create": (errno.EMFILE, errno.ENOSPC, errno.EIO, errno.EINTR),
    "mkdir": (errno.ENOSPC, errno.EIO), "readdir": (errno.EIO,), "read": (errno.EIO, errno.EINTR, FEWER),
    "write": (errno.ENOSPC, errno.EIO, errno.EINTR, FEWER), "map": (errno.EIO, errno.EMFILE), "sync": (errno.EIO, errno.ENOSPC),
    "resize": (errno.ENOSPC, errno.EIO, errno.EINTR), "rename": (errno.EIO, errno.ENOSPC), "link": (errno.EIO, errno.ENOSPC),
    "remove": (errno.EIO,), "socket": (errno.EMFILE,), "connect": (errno.EIO, errno.EINTR), "receive": (errno.EIO, errno.EINTR, FEWER),
    "send": (errno.EIO, errno.EINTR, FEWER), "memory": (errno.ENOMEM,), "ring": (errno.EMFILE, errno.EIO, errno.EINTR),
    "ring-read": (errno.EIO, errno.EINTR, FEWER), "ring-write": (errno.ENOSPC, errno.EIO, errno.EINTR, FEWER),
}  # fmt: skip
NETWORK = ("socket", "connect", "receive", "send")
# What the program calls for input and output: the C library, and the libraries that do it for the program.
CALLS = re.compile(
    r"(f?open(64|at|at64|dir)?|fdopen(dir)?|mkstemp|mkdtemp|mkdir(at)?|readdir(64)?|p?(read|write)(v|64)?|fread|fwrite|fflush|fclose"
    r"|fsync|fdatasync|msync|f?truncate(64)?|fallocate(64)?|rename(at)?|link|symlink|unlink(at)?|rmdir|remove|mmap(64)?|sendfile(64)?|copy_file_range"
    r"|socket|pipe2?|bind|listen|connect|accept4?|(send|recv)(to|from|msg)?|io_uring_(queue_init|get_probe_ring|submit\w*)"
    r"|zip_(fdopen|fopen|fread|stat)|archive_read_(open_fd|next_header|data)|curl_easy_perform"
    r"|_ZNSt13basic_filebufIcSt11char_traitsIcEE4openE\w*"
    r"|_ZNSt10filesystem(4copy|9copy_file|6rename|6remove|10remove_all|11resize_file|16create_directory|18create_directories|14create_symlink"
    r"|16create_hard_link|7__cxx11\d+(recursive_)?directory_iterator(C[12]|pp|9increment))\w*)")  # fmt: skip


@dataclass(frozen=True)
class Place:
    kind: str
    module: str  # "-": the program
    offset: int  # that the call returns to
    rank: str = "-"


@dataclass(frozen=True)
class Trial:
    place: Place
    use: int  # from 1
    fault: int

    def text(self):
        what = "fewer bytes" if self.fault == FEWER else errno.errorcode[self.fault]
        return f"{what} at use {self.use} of {self.place.kind} in {function_of(self.place)}"

    def variable(self):
        place = self.place
        return f"{place.kind} {place.module} {place.offset:x} {self.use} {self.fault} {place.rank}"


@functools.cache
def symbols():
    """(addresses, names) of the program's functions, sorted."""
    lines = subprocess.run(["nm", "-C", "--defined-only", program("kiln")], capture_output=True, text=True, check=True).stdout.splitlines()
    found = sorted((int(address, 16), name) for address, kind, name in (line.split(" ", 2) for line in lines if line[0] != " ") if kind in "tTwWi")
    return [address for address, _ in found], [name for _, name in found]


def short(name):
    """kiln::AtomicFile::write, without parameters and templates."""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = shorter
    return re.sub(r"\[clone.*|\.cold.*|\[abi:\w+\]| const$", "", name).strip().split(" ")[-1].removeprefix("kiln::")


def function_of(place):
    if place.module != "-":
        return f"{place.module}+0x{place.offset:x}"
    addresses, names = symbols()
    index = bisect.bisect_right(addresses, place.offset - 1) - 1
    return f"{short(names[index])}+0x{place.offset - addresses[index]:x}"


def calls_of_program():
    """{address that a call returns to: (function, called)} of every call for input or output in the program's code."""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", program("kiln")], capture_output=True, text=True, check=True).stdout
    found, called = {}, None
    for line in text.splitlines():
        address, _, rest = line.partition(":\t")
        if called and rest:
            offset = int(address, 16)
            found[offset] = called
        named = re.search(r"\bcall\s.*<(\w+)[$@]plt>", rest)
        called = named[1] if named and CALLS.fullmatch(named[1]) else None
    return {offset: (function_of(Place("", "-", offset)), name) for offset, name in found.items()}


class Runner:
    """Runs of the program in a folder, each with its places counted, and none or one of them at fault. Not for two threads."""

    def __init__(self, logs):
        self.log = logs / "log"
        logs.mkdir()
        self.library = fork_server.library(program("kiln").parent, SOURCE)
        self.loaded = fork_server.LoadedProgram(str(program("kiln")), self.library)

    def run(self, arguments, folder, environment=None, trial=None, counted=True, timeout=60):
        """Returns the completed process, with a negative return code for a signal; one that takes longer raises TimeoutExpired."""
        for old in self.log.parent.iterdir():
            old.unlink()
        command = [str(program("kiln")), *map(str, arguments)]
        names = os.environ | (environment or {})
        if counted:
            names |= {"KILN_IO_LOG": str(self.log)}
        if trial:
            names |= {"KILN_IO_FAULT": trial.variable()}
        if "--nproc" in command:  # its ranks are programs that it starts, each of which loads the library
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=folder, env=names | {"LD_PRELOAD": str(self.library)})
        return self.loaded.run(command, names, str(folder), timeout)

    def places(self):
        """{place: uses} of the last run."""
        found = {}
        for path in self.log.parent.glob("log.[0-9]*"):
            content = path.read_bytes()
            rank, count = struct.unpack_from("<16sQ", content)
            for i in range(count):
                kind, module, offset, uses, _ = struct.unpack_from("<16s72sQII", content, 24 + 104 * i)
                kind, module, by = (text.split(b"\0")[0].decode() for text in (kind, module, rank))
                place = Place(kind, module, offset, by)
                found[place] = found.get(place, 0) + uses
        return found

    def fired(self):
        """The paths of the call that failed in the last run; None if it did not come."""
        path = Path(f"{self.log}.fired")
        return path.read_text().splitlines()[0].split("\t")[2:] if path.exists() else None


def names_of(path):
    """What a message may call a file: its name, that under which it was to be known, or its folder."""
    path = Path(path.removesuffix(" (deleted)"))
    names = {path.name, path.parent.name}
    finals = {re.sub(r"(\.kiln(-\d+)?)?\.partial$|\.incomplete(\.etag)?$|^\.partial-|\.etag$", "", name) for name in names}
    return (names | finals) - {"", "work"}


def unclear(stderr, kind, paths):
    """What is wrong with the message of a command that ended; empty if it is clear."""
    lines = complaints(stderr)
    if not 1 <= len(lines) <= 3:
        return f"{len(lines)} lines say what is wrong"
    if any(word in stderr for word in ("terminate called", "json.exception", "\x1b", "Traceback", "std::bad_alloc")):
        return "the message is not one for users"
    if kind == "memory":
        expected = {"memory"}
    elif kind.startswith("ring"):
        expected = {"--nvme-path"}
    elif kind in NETWORK or not any(paths) or paths[0].startswith(("socket:", "pipe:", "anon_inode:")):
        expected = {"rank", "127.0.0.1", "http", "localhost", "the output"}
    else:
        expected = {name for path in paths if path for name in names_of(path)} | {"--nvme-path"}
    return "" if any(name in stderr for name in expected) else f"the message names none of {', '.join(sorted(expected))}"


@dataclass
class Outcome:
    trial: Trial
    ending: str  # "refused": a line and status 1, "went on": status 0, "did not come"
    problem: str = ""
    seconds: float = 0


def try_fault(runner, command, trial, folder):
    """Runs a command (test_io_faults.py) with a fault, then again without if it ended, and compares what it leaves."""
    begin = time.monotonic()
    command.prepare(folder)
    run = functools.partial(runner.run, command.arguments, folder, command.environment)

    def outcome(ending, problem=""):
        return Outcome(trial, ending, problem, time.monotonic() - begin)

    try:
        result = run(trial=trial)
    except subprocess.TimeoutExpired:
        return outcome("hung", "it did not end")
    fired = runner.fired()
    if fired is None:
        return outcome("did not come", "" if result.returncode == 0 else result.stderr[-500:])
    said = f"\n{result.stderr[-700:]}"
    if result.returncode not in (0, 1):
        return outcome("signal" if result.returncode < 0 else "refused", f"status {result.returncode}{said}")
    ending = "refused" if result.returncode else "went on"
    if result.returncode:
        if problem := unclear(result.stderr, trial.place.kind, fired):
            return outcome(ending, f"{problem} (failed: {' '.join(fired)}){said}")
        again = run(counted=False)
        if again.returncode != 0:
            return outcome(ending, f"the same command ends with status {again.returncode} afterwards:\n{again.stderr[-500:]}\nafter{said}")
    if any(path.startswith(("/proc/", "/sys/")) for path in fired):  # libraries take the processor for another
        return outcome(ending)
    found = command.result(folder)
    different = sorted(name for name in {*found, *command.expected} if found.get(name) != command.expected.get(name))
    return outcome(ending, f"other bytes than undisturbed: {', '.join(different[:5])}{said}" if different else "")
