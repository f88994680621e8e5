"""Child processes that never outlive the process that started them, even when that one is killed.

The kernel is asked (PR_SET_PDEATHSIG) to send SIGTERM to the child when the *thread* that made it ends: start
children from the main thread. The request is made by a small launcher between fork and exec, in an interpreter
of its own, because `preexec_fn` is not safe in a process that has threads.
"""

import os
import sys
from collections.abc import Sequence

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
