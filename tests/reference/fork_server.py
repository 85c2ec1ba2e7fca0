"""Programs that are loaded once for many runs: each run is a process of its own, forked from one that waits before main()
(fork_server.c). Its arguments, folder, environment and output are its own, and it ends as it would by itself."""

import atexit
import functools
import io
import os
import signal
import socket
import struct
import subprocess
import threading
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
# Variables that a program or its libraries read before main(): a run with others is started.
READ_AT_START = ("ASAN_", "ATEN_", "DNNL_", "GLIBC_", "GOMP_", "KILN_FAULT", "KMP_", "LD_", "LSAN_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_",
                 "PYTORCH_", "TORCH_", "TSAN_", "UBSAN_")  # fmt: skip
MOST_WORDS, MOST_BYTES, COMMAND_BYTES = 8000, 1 << 17, 1 << 15  # fork_server.c has room for these


@functools.cache
def library(folder, source=SOURCE):
    """fork_server.c, or another source, compiled in the folder of the programs."""
    path = folder / f"{source.stem}.so"
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        mine = folder / f"{source.stem}-{os.getpid()}.so"  # another process may make it, too
        subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", mine, source, "-ldl"], check=True)
        mine.replace(path)
    return path


def read_at_start(environment):
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


class LoadedProgram:
    """One at a time, and for runs whose environment at their start is that of this process now. `before`: further libraries
    that are loaded before the program's own."""

    def __init__(self, path, *before):
        self.path, self.environment, self.lock = path, read_at_start(os.environ), threading.Lock()
        self.socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = "x" * COMMAND_BYTES  # for the command line of each run
        with its_end:
            self.process = subprocess.Popen([path, room], stdin=its_end, stdout=subprocess.DEVNULL,
                                            env=os.environ | {"LD_PRELOAD": ":".join(map(str, [*before, library(Path(path).parent)]))})
        atexit.register(self.end)

    def end(self):
        self.socket.close()
        self.process.wait()

    def receive(self, timeout=None):
        self.socket.settimeout(timeout)
        answer = self.socket.recv(4)
        assert len(answer) == 4, f"{self.path}, loaded for many runs, has ended"
        return struct.unpack("i", answer)[0]

    def ask(self, command, environment, folder, output, errors):
        """Starts a run; returns its process id."""
        parts = [folder, str(len(command)), *command, *(f"{name}={value}" for name, value in environment.items()), ""]
        socket.send_fds(self.socket, [os.fsencode("\0".join(parts))], [0, output, errors])
        child = self.receive()
        assert child > 0, "it cannot fork"
        return child

    def run(self, command, environment, folder, timeout):
        """As subprocess.run() with text output; None where only a start of its own will do."""
        sizes = [len(os.fsencode(part)) + 1 for part in [*command, *(f"{name}={value}" for name, value in environment.items())]]
        fits = len(sizes) < MOST_WORDS and sum(sizes) < MOST_BYTES - 8192 and sum(sizes[:len(command)]) < COMMAND_BYTES
        if not fits or read_at_start(environment) != self.environment or not self.lock.acquire(blocking=False):
            return None
        try:
            pipes = [os.pipe(), os.pipe()]
            texts = [b"", b""]

            def drain(index):
                with open(pipes[index][0], "rb") as file:
                    texts[index] = file.read()

            readers = [threading.Thread(target=drain, args=(index,), daemon=True) for index in range(2)]
            try:
                child = self.ask(command, environment, folder, pipes[0][1], pipes[1][1])
            finally:
                for _, end in pipes:
                    os.close(end)
                for reader in readers:
                    reader.start()
            try:
                status = self.receive(timeout)
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                self.receive()
                raise subprocess.TimeoutExpired(command, timeout) from None
            for reader in readers:  # to the end of what it has started and left behind, too
                reader.join(timeout)
            if any(reader.is_alive() for reader in readers):
                raise subprocess.TimeoutExpired(command, timeout)
            output, errors = (io.TextIOWrapper(io.BytesIO(text)).read() for text in texts)
            return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), output, errors)
        finally:
            self.lock.release()


loaded = functools.cache(LoadedProgram)


def run(command, environment=None, folder=None, timeout=None):
    """As subprocess.run() with text output, of a program in a file, from the one that is loaded where that is the same."""
    command = [str(word) for word in command]
    environment = dict(os.environ if environment is None else environment)
    folder = os.path.abspath(folder or ".")
    found = None
    if "LD_PRELOAD" not in os.environ:
        found = loaded(os.path.abspath(command[0])).run([os.path.abspath(command[0]), *command[1:]], environment, folder, timeout)
    return found or subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=folder)
