"""How a process ends: its exit status, which separates a cause from its consequences, and one line with the reason.

    raised                                 ends in                     with
    ValueError: a mistake of the user      config.cli.user_errors      one line on stderr, status 1
    RunError: a run cannot go on           config.cli.user_errors      one line on stderr, its own status
    a main thread that cannot end          signals.Listener.exit_now   one line on stderr and in the logs, a status
    any other error: a mistake of ours     Python                      a traceback

`Log` writes each of these lines to errors.log. The supervisor's agent sends them to the supervisor.
"""

from __future__ import annotations

from minitron.config.installed import typed
from minitron.config.text import short

HUNG = 124  # as timeout(1)
LOST = 125  # a collective failed, or the ranks could not meet: another rank or torchrun has died
BROKEN = 17  # this rank's device computes wrong results, see optim/rerun.py: a restart leaves its node out
TAKEN = 18  # another run saves in checkpoint.dir now, see checkpoint/directory.py: a restart would take it back
REQUEUE = 75  # a supervisor's (EX_TEMPFAIL): the saves are good, but too few nodes are left to continue here
MOST = 2000  # characters of a line


class RunError(ValueError):
    """An error that ends a run with one line and an exit status, and without a traceback.

    quiet    None     all ranks raise the error, and rank 0 prints its line
             False    this rank prints its line
             True     this rank prints nothing: another rank's line gives the reason
    """

    status: int = 1
    quiet: bool | None = None


class RanksLost(RunError):
    """A collective failed, or the ranks could not meet: most likely another rank has died."""

    status, quiet = LOST, False


def why_it_ended(error: BaseException) -> str:
    """Return one line that gives the reason for a process's end; "" if its exit status alone does."""
    if isinstance(error, SystemExit):
        known = error.__context__  # what cli.user_errors has caught
        return f"error: {typed(short(known, MOST))}" if isinstance(known, ValueError) else ""
    return f"{type(error).__name__}: {short(error, MOST)}"
