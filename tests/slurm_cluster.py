"""A Slurm cluster on this machine for the time of a test: munged, slurmctld and two slurmd with files of their own.

They come from Debian's packages `slurm-wlm` and `munge`, need no root and no set-up, and touch no Slurm that is already
there: configuration, key, state, sockets and ports are the cluster's own. Jobs run as the user who runs the tests.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ports import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "squeue")
PATH = os.pathsep.join(filter(None, (os.environ.get("PATH"), "/usr/sbin", "/sbin")))
# Sending a job back to the queue holds it for as long as a credential lives (cred_expire): two minutes by default.
CONFIG = """
ClusterName=minitron
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 Gres=gpu:1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=batch Nodes=node[1-2] Default=YES MaxTime=60 State=UP
"""


class Cluster:
    """`with Cluster() as cluster`: jobs are submitted by `cluster.run("sbatch", ...)`. Skips where Slurm is missing."""

    def __enter__(self) -> "Cluster":
        missing = [name for name in DAEMONS + COMMANDS if shutil.which(name, path=PATH) is None]
        if missing:
            pytest.skip(f"no Slurm here ({', '.join(missing)} not found); apt install slurm-wlm munge")
        with ExitStack() as stack:
            # Not pytest's folder: the path of a socket has at most 107 bytes.
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            try:
                self._start(stack)
            except pytest.fail.Exception as error:
                pytest.skip(f"Slurm does not start here: {error}")
            self._ended = stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--partition=batch")
        self.run("scancel", "--partition=batch")
        self._ended.close()

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        """A command of Slurm's, with these environment variables."""
        return subprocess.run(command, env=self.environment | variables, capture_output=True, text=True, timeout=600)

    def submit(self, *arguments: str, **variables: str) -> int:
        """The id of a new batch job."""
        done = self.run("sbatch", "--parsable", *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", str(job)).stdout))

    def wait(self, job: int, *states: str, seconds: float = 600) -> dict[str, str]:
        """Until the job is in one of these states, by default any that it ends in."""
        states = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return until(
            lambda: (facts := self.job(job)).get("JobState") in states and facts,
            seconds,
            lambda: f"{self.job(job)}\n{self.logs()}",
        )

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in self.folder.glob("*.log"))

    def _start(self, stack: ExitStack) -> None:
        ports = [free_port() for _ in range(3)]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        configuration = self.folder / "slurm.conf"
        configuration.write_text(
            CONFIG.format(folder=self.folder, user=user, ports=ports, host=socket.gethostname().split(".")[0])
        )
        (self.folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")
        for name in ("state", "spool-node1", "spool-node2"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(configuration)}
        self._daemon(
            stack,
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            *(f"--{what}-file={self.folder}/munge.{what}" for what in ("pid", "seed", "log")),
            f"--socket={self.folder}/munge.socket",
        )
        until((self.folder / "munge.socket").exists, 120, self.logs)
        self._daemon(stack, "slurmctld", "-D", "-c")
        for node in ("node1", "node2"):
            self._daemon(stack, "slurmd", "-D", "-c", "-N", node)
        until(lambda: self.run("sinfo", "--noheader", "--format=%t %D").stdout == "idle 2\n", 120, self.logs)

    def _daemon(self, stack: ExitStack, *command: str) -> None:
        with open(self.folder / f"{command[0]}.{len(list(self.folder.iterdir()))}.log", "w") as output:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        stack.callback(_end, process)


def until(condition: Callable[[], object], seconds: float, explain: Callable[[], str] = str):
    """What `condition` returns once it is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s\n{explain()}")
        time.sleep(0.1)
    return value


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
