"""Run commands of minitron one by one, each in a fork of this process, and measure them.

stdin: a JSON list of [module, [argument, ...]]; stdout: a line of JSON for each: [status, stderr, CPU seconds, peak
bytes]. The modules are imported once: a command costs a fork, not the import of torch. status: None if it was killed.
"""

import importlib
import json
import os
import resource
import signal
import sys
import tempfile

PATIENCE = 60  # seconds on the wall, however busy the machine: a command that hangs is killed
CPU_SECONDS = 20


def child(main, arguments: list[str], errors: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.alarm(PATIENCE)
    sys.argv = ["command", *arguments]
    main(arguments)


def run(main, arguments: list[str]) -> tuple[int | None, str, float, int]:
    with tempfile.TemporaryFile() as errors:
        if (pid := os.fork()) == 0:
            try:
                child(main, arguments, errors.fileno())
                status = 0
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 1
                if isinstance(ended.code, str):  # as the interpreter does
                    print(ended.code, file=sys.stderr)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                status = 1
            sys.stderr.flush()
            os._exit(status)
        _, ended, usage = os.wait4(pid, 0)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    status = os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else None
    return status, said, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def entry(module: str):
    """What starts a module: its `main`, under `minitron.config.command.run` if it is a tool."""
    main = importlib.import_module(module).main
    if not module.startswith("tools."):
        return main
    from minitron.config.command import run as tool

    return lambda arguments: tool(main)


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    mains = {module: entry(module) for module in sorted({module for module, _ in commands})}
    for module, arguments in commands:
        print(json.dumps(run(mains[module], arguments)), flush=True)
