"""Run a command that dies with its parent: `python -I -S leash.py PARENT_PID COMMAND [ARGUMENT …]`.

The kernel keeps the promise (PR_SET_PDEATHSIG), so it holds even when the parent is killed with SIGKILL. Done in a
process of its own, not in a `preexec_fn`: no Python runs between fork and exec of the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before the leash held
        raise SystemExit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    main(sys.argv[1:])
