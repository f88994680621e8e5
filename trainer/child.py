"""Child processes that never outlive the process that started them, even when that one is killed.

The kernel is asked (PR_SET_PDEATHSIG) to send a signal to the child when the *thread* that made it ends: start
children from the main thread. For a command the request is made by a small launcher between fork and exec, in an
interpreter of its own, because `preexec_fn` is not safe in a process that has threads.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)  # looked up before any fork
_PR_SET_PDEATHSIG = 1

# The parent may die before the request is in force, hence the look at getppid after it.
_LAUNCHER = """
import os, sys
if sys.platform == "linux":
    import ctypes, signal
    if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died first")
os.execv(sys.argv[2], sys.argv[2:])
"""


def bound_to_parent(command: Sequence[str]) -> list[str]:
    """The command (its first word a path) wrapped so that it is ended with this process; costs about 10 ms."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Called in a forked child: from now on it is killed (SIGKILL) with its parent, the process `parent`.

    Raises:
        OSError: the parent died first, or the kernel refuses.
    """
    if sys.platform == "linux" and _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise ProcessLookupError(parent, "the parent died first")
