"""Programs interrupted in the middle of their work, on machines of any speed."""

import signal
import subprocess
import time

PATIENCE_S = 120  # for what has to come; nothing is measured by it


def wait_while_running(process, condition):
    """True once condition() holds, False when the process ended first."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        if condition():
            return True
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return False


def wait_until(condition, pause_s=0.01, limit_s=PATIENCE_S, running=()):
    """What condition() returns once it holds, which it must while all processes of `running` run."""
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        for process in running:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(pause_s)
    return result


def killed_once(condition, command):
    """Starts a command and kills it with -9 once condition() holds; True if it was still running."""
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    has_come = wait_while_running(process, condition)
    process.kill()
    return process.wait() == -signal.SIGKILL and has_come


def until_interrupted(attempt, tries=8):
    """Calls attempt(n), n = 1, 2, 4, ..: begin afresh, with n times the work where that helps, and tell whether the
    interruption came before the end."""
    assert any(attempt(2**i) for i in range(tries)), "every run ended before it could be interrupted"
