"""Send the figures of a run to TensorBoard, Weights & Biases and Prometheus, beside its own files.

    log.tensorboard=true     event files in log.dir/tensorboard, or in the given directory
    log.wandb=PROJECT        a run of W&B in that project; WANDB_MODE=offline writes it to log.dir/wandb alone
    log.prometheus=9400      http://HOST:9400/metrics of rank 0's node, as gauges minitron_step_loss, minitron_step_mfu
                             whose label `run` is the name of log.dir; 127.0.0.1:9400: only at this address

Each gets the rows of metrics.jsonl, as `step/loss`, `step/tflops/full`, `eval/loss`, `numerics/grad_norm/blocks.3`;
the first two also get the configuration. Only rank 0 has them. Their packages are extras, imported if a key needs them.

A run that resumes from a checkpoint also resumes its W&B run: the id is in log.dir/wandb.id. If it goes back, its steps
are drawn over the old ones: `step` is a figure like the others, and not W&B's own count, which cannot fall.

Left out: histograms and pictures; alerts, which Prometheus has; MLflow, which reads TensorBoard's files.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from minitron.config.files import errors_as
from minitron.config.installed import pip_install
from minitron.config.schema import Config
from minitron.config.text import to_yaml

# A full or failing disk, a mount that is away for a moment, too many open files: not a mistake of the user.
FULL = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE


def append_to(path: Path) -> io.FileIO:
    """Open a file to append to it, and make its folder if it is missing. Raises OSError, also for an unread pipe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))


class File:
    """A file to which any thread appends whole records. lost: how many have failed since the last success.

    now: whether to open it, and so to create it, before the first record.
    After a failure each record opens the file again, since a mount that comes back has no open files.
    Raises OSError if the file cannot be opened. If the disk is full or fails, `write` raises it instead.
    """

    def __init__(self, path: Path, now: bool = True):
        self.path, self.lost, self._lock = path, 0, threading.Lock()
        self._torn: int | None = None  # where a half-written record begins that could not be cut off yet
        self._file: io.FileIO | None = None
        try:
            self._file = append_to(path) if now else None
        except OSError as error:
            if error.errno not in FULL:
                raise

    def write(self, record: str | bytes) -> None:
        """Append a record, wholly or not at all. Raises OSError."""
        record, written = record.encode() if isinstance(record, str) else record, 0
        with self._lock:
            try:
                self._file = self._file or append_to(self.path)
                self._cut(self._file)
                while written < len(record):
                    written += self._file.write(record[written:])
                self.lost = 0
            except OSError:
                self.lost += 1
                with suppress(OSError):
                    if written and self._file is not None:
                        self._torn = self._file.tell() - written
                        self._cut(self._file)
                self._close()
                raise

    def close(self) -> None:
        with self._lock:
            self._close()

    def _cut(self, file: io.FileIO) -> None:
        """Cut off a half-written record."""
        if self._torn is not None:
            if self._torn < file.seek(0, os.SEEK_END):
                file.truncate(self._torn)
            self._torn = None

    def _close(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()


class Board(File):
    """An event file for TensorBoard. TensorBoard's own writer dies with a traceback in a thread if the disk is full."""

    def __init__(self, cfg: Config):
        wanted = cfg.log.tensorboard
        with _installed("tensorboard", f"log.tensorboard={wanted}", "TensorBoard", "false"):
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        self._event, self._summary, self._frame = event_pb2.Event, summary_pb2.Summary, RecordWriter
        folder, now = Path(f"{cfg.log.dir}/tensorboard" if wanted is True else str(wanted)), datetime.now().timestamp()
        file = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}"
        text = self._summary.Value(tag="config")
        text.tensor.dtype, text.metadata.plugin_data.plugin_name = 7, "text"  # DT_STRING
        text.tensor.string_val.append("\n".join(f"    {line}" for line in to_yaml(cfg).splitlines()).encode())
        fix = "name another directory, or set it to false"
        line = lambda error: f"log.tensorboard={wanted} cannot be written: {error.strerror}; {fix}"
        with errors_as(ValueError, line, OSError):
            super().__init__(folder.expanduser() / file)
            self._add(wall_time=now, file_version="brain.Event:2")
            self._add(wall_time=now, summary=self._summary(value=[text]))

    def record(self, step: int, scalars: dict[str, float]) -> None:
        """Write a step's scalars. Raises OSError."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(wall_time=datetime.now().timestamp(), step=step, summary=self._summary(value=values))

    def _add(self, **event: object) -> None:
        self._frame(framed := io.BytesIO()).write(self._event(**event).SerializeToString())
        self.write(framed.getvalue())


class Wandb:
    """A run of Weights & Biases. A separate process sends it. Raises ValueError if it cannot be begun."""

    def __init__(self, cfg: Config):
        where, self.path = f"log.wandb={cfg.log.wandb}", "Weights & Biases"
        with _installed("wandb", where, "the package wandb", "null"):
            import wandb
        folder = None if cfg.log.dir is None else Path(cfg.log.dir).expanduser()
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        fix = "run `wandb login`, set WANDB_MODE=offline, or log.wandb=null"
        line = lambda error: f"{where} cannot be begun ({' '.join(str(error).split())}); {fix}"
        with errors_as(ValueError, line, wandb.Error, OSError):
            options = {} if folder is None else {"dir": str(folder), "name": folder.name, "id": _run_id(folder)}
            self._run = wandb.init(project=cfg.log.wandb, config=asdict(cfg), resume="allow", settings=quiet, **options)
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, scalars: dict[str, float]) -> None:
        """Give a step's scalars to the process that sends them."""
        self._run.log(scalars | {"step": step})

    def close(self) -> None:
        """Wait until everything is sent, or written. In an exception the run is marked as failed."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


class Prometheus:
    """Gauges of the last step and evaluation, which Prometheus reads. Raises ValueError if the port is in use."""

    def __init__(self, cfg: Config):
        where, self.path = f"log.prometheus={cfg.log.prometheus}", "Prometheus"
        with _installed("prometheus", where, "the package prometheus-client", "null"):
            import prometheus_client
        self._registry, self._gauges = prometheus_client.CollectorRegistry(), dict[str, Any]()
        self._gauge = partial(prometheus_client.Gauge, labelnames=["run"], registry=self._registry)
        self._run = "" if cfg.log.dir is None else Path(cfg.log.dir).expanduser().resolve().name
        host, _, port = str(cfg.log.prometheus).rpartition(":")
        page = lambda: prometheus_client.generate_latest(self._registry)
        fix = "use another port or an address of this node, or null"
        with errors_as(ValueError, lambda error: f"{where} cannot be served: {error.strerror}; {fix}", OSError):
            self._server = _Server((host.strip("[]"), int(port)), page)
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def record(self, step: int, scalars: dict[str, float]) -> None:
        """Set the gauges to a step's scalars."""
        seconds = {"step/seconds": x for name, x in scalars.items() if name == "step/step_seconds"}  # a better name
        for name, value in (scalars | seconds | {f"{next(iter(scalars)).split('/')[0]}/step": step}).items():
            if name not in self._gauges:
                gauge = self._gauge(f"minitron_{re.sub('[^a-zA-Z0-9]', '_', name)}", f"{name} of metrics.jsonl")
                self._gauges[name] = gauge.labels(self._run)
            self._gauges[name].set(value)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.TCPServer):
    """Serve a page over HTTP, one connection at a time: a client costs one descriptor and ANSWER_SECONDS."""

    allow_reuse_address, request_queue_size, ANSWER_SECONDS = True, 8, 1.0

    def __init__(self, address: tuple[str, int], page: Callable[[], bytes]):
        self.page, self.address_family = page, socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Answer)


class _Answer(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Send the page to any request that is complete in time."""
        deadline, request = monotonic() + self.server.ANSWER_SECONDS, b""
        with suppress(OSError):  # the client is late, or has disconnected
            while b"\r\n\r\n" not in request:
                self.request.settimeout(max(deadline - monotonic(), 0.001))
                part = self.request.recv(4096)
                if not part or monotonic() > deadline:
                    return
                request = request[-3:] + part
            page = self.server.page()
            kind = "text/plain; version=0.0.4; charset=utf-8"
            head = f"HTTP/1.0 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(page)}\r\n\r\n"
            self.request.sendall(head.encode() + page)  # within the time of the last settimeout


def _installed(extra: str, where: str, package: str, off: str) -> AbstractContextManager[None]:
    """Raise a ValueError that gives the command to install a package if an import inside fails. off: a value."""
    fix = f"{pip_install(extra)}, or set it to {off}"
    return errors_as(ValueError, lambda _: f"{where} needs {package}, which is not installed; {fix}", ImportError)


def _run_id(folder: Path) -> str:
    """Return the id of this folder's W&B run; make one the first time. Raises OSError."""
    path = folder / "wandb.id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


Sink = Board | Wandb | Prometheus
SINKS = {"tensorboard": Board, "wandb": Wandb, "prometheus": Prometheus}  # by the keys of `log`
