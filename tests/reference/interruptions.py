"""Programs interrupted in the middle of their work, on machines of any speed."""

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


def until_interrupted(attempt, tries=8):
    """Calls attempt(n), n = 1, 2, 4, ..: begin afresh, with n times the work where that helps, and tell whether the
    interruption came before the end."""
    assert any(attempt(2**i) for i in range(tries)), "every run ended before it could be interrupted"
