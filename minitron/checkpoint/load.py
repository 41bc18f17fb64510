"""From a checkpoint to a trainer, whatever layout either has.

Each rank reads the boxes of its own slices straight into the optimizer's masters and moments: there is no second copy
of the state, so resuming takes no more memory than a fresh start. Parameters are then the rounded masters, and an
all-gather brings the other ranks' slices.

A checkpoint in checkpoint.dir is resumed, with all of its state and its data; else checkpoint.load gives the weights
of a new run. What is damaged, missing or of another model ends the run before its first step. An older checkpoint is
used when the user says so: checkpoint.resume_step=10 goes back, once. A checkpoint whose own configuration has that key
descends from that step and is resumed in its place, so the same command may be started again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from minitron.checkpoint.boxes import Piece
from minitron.checkpoint.format import STEP_NAME, CheckpointError, Reader, checkpoints, make_writable, newest
from minitron.checkpoint.save import State, decide, pieces
from minitron.config import Config

# Of `model`: what a checkpoint must agree in, and what only a run that goes on must.
STRUCTURE = ("family", "num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "tie_embeddings")
MEANING = ("vocab_size", "positions", "rope_theta", "rope_scaling", "norm_eps")


class Start(NamedTuple):
    """What a run starts from: nothing, the weights of a checkpoint, or with `resume` all of it.

    step, consumed_samples: done already. data: what identified the saved run's data, empty for a run of its own.
    """

    reader: Reader | None = None
    resume: bool = False
    step: int = 0
    consumed_samples: int = 0
    data: Mapping = {}


def find(cfg: Config) -> Start:
    """Where a run of this configuration starts; the index of that checkpoint is checked. Needs no process group.

    Raises CheckpointError, also if checkpoint.dir cannot be written.
    """
    c = cfg.checkpoint
    if c.dir is not None:
        directory = Path(c.dir).expanduser()
        make_writable(directory)
        reader = None
        try:
            if c.resume:
                folder = newest(directory) if c.resume_step is None else _back(directory, c.resume_step)
                reader = None if folder is None else Reader(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_other(directory)}") from error
        if reader is not None:
            _check_model(reader, cfg, STRUCTURE + MEANING)
            if not {"data", "optimizer_steps"} <= reader.state.keys():
                raise CheckpointError(f"{reader.path} holds weights only; start from it with checkpoint.load="
                                      f"{reader.path} and another checkpoint.dir")
            return Start(reader, True, reader.iteration, reader.consumed_samples, reader.state["data"])
    if c.load is None:
        return Start()
    reader = Reader(c.load)
    _check_model(reader, cfg, STRUCTURE)
    return Start(reader)


def check_data(start: Start, info: dict) -> None:
    """Raises CheckpointError unless the samples and their order are the saved run's. info: `Datasets.info` of now."""
    for name, saved in start.data.items():
        if name not in ("valid", "valid_samples") and saved != info.get(name):
            path = start.reader.path
            raise CheckpointError(f"{path}/index.json was saved with other data: {name} was {saved!r} and is "
                                  f"{info.get(name)!r}; restore it, or begin a run of its own from the weights with "
                                  f"checkpoint.load={path} and another checkpoint.dir")


@torch.no_grad()
def restore(start: Start, state: State) -> None:
    """Fill a fresh trainer. Collective over the world: the CheckpointError of any rank is raised on all."""
    mesh = state.mesh
    decide(start.step, _check_same, mesh)
    if start.reader is None:
        return
    reader, optimizer = start.reader, state.optimizer
    failure = None
    try:
        wanted = list(_wanted(start, state))
        files = {file for p in wanted for file in reader.files_of(p.name, p.kind, p.box)}
        reader.verify(sorted(files.union(list(reader.files)[mesh.rank::mesh.world.size])))
        for piece in wanted:
            piece.tensor.copy_(reader.read(piece.name, piece.kind, *piece.box))
    except CheckpointError as error:
        other = f"; {_other(reader.path.parent, reader.path)}" if start.resume else ""
        failure = CheckpointError(f"{error}{other}")
    decide(failure, lambda _: None, mesh)  # raised by all, so that none waits for another in a collective
    for bucket, master in zip(optimizer.gradients.buckets, optimizer.masters, strict=True):
        bucket.data_slice.copy_(master)
    optimizer.gradients.gather_parameters()
    optimizer.gradients.wait_parameters()
    if start.resume:
        for name, value in state.scalars().items():  # a run in another dtype had no loss scale
            value.fill_(reader.state["optimizer_steps"] if name == "optimizer_steps" else
                        reader.state.get(name, value.item()))
        for chunk in state.chunks:
            if chunk.formats.scaling is not None and chunk.formats.scaling.history.any():
                chunk.formats.scaling.follow_history()


def _wanted(start: Start, state: State) -> Iterator[Piece]:
    """Where this rank's state lies, as boxes under the kind that they are stored as. Raises CheckpointError."""
    reader, slices = start.reader, state.slices()
    for piece in pieces(state.optimizer.gradients, slices if start.resume else {"master": slices["master"]}):
        kinds = reader.kinds(piece.name)
        if not kinds or reader.shape(piece.name) != piece.whole:
            raise CheckpointError(f"{reader.path}/index.json is of another model: {piece.name} has shape "
                                  f"{list(reader.shape(piece.name)) if kinds else None} there and {list(piece.whole)} "
                                  "here")
        yield piece if start.resume or piece.kind in kinds else piece._replace(kind="param")
    for chunk in state.chunks if start.resume else ():
        histories = list(state.histories(chunk))
        if all(piece.kind in reader.kinds(piece.name) for piece in histories):  # else it looks first, as a fresh run
            yield from histories


def _back(directory: Path, step: int) -> Path:
    """The newest checkpoint if it descends from that of `step`, else that one.

    A damaged newest one may be why the user goes back. Once others descend from `step`, it is an error: to begin there
    again would lose what followed.
    """
    try:
        folder = newest(directory)
        if folder is not None and _descends(folder, step):
            return folder
    except CheckpointError:
        for folder in checkpoints(directory).values():
            descends = False
            with suppress(CheckpointError):
                descends = _descends(folder, step)
            if descends:
                raise
    return directory / STEP_NAME(step)


def _descends(folder: Path, step: int) -> bool:
    return Reader(folder).config.get("checkpoint", {}).get("resume_step") == step


def _other(directory: Path, bad: Path | None = None) -> str:
    """What the user can do instead: the newest checkpoint before the bad one, else after it, that has a good index."""
    found = checkpoints(directory)
    limit = max((step for step, folder in found.items() if folder == bad), default=max(found, default=0))
    for step in sorted(found, key=lambda step: (step > limit, -step)):
        with suppress(CheckpointError):
            folder = found[step]
            if folder != bad and Reader(folder):
                return f"checkpoint.resume_step={step} goes back to {folder.name}"
    return "there is no other checkpoint; checkpoint.resume=false begins anew"


def _check_model(reader: Reader, cfg: Config, names: tuple[str, ...]) -> None:
    """Raises CheckpointError unless the saved configuration of the model agrees in these keys."""
    ours, saved = ({**m, "num_kv_heads": m["num_kv_heads"] or m["num_heads"]}
                   for m in (asdict(cfg.model), reader.config["model"]))
    for name in names:
        if ours[name] != saved[name]:
            raise CheckpointError(f"{reader.path}/index.json is of another model: model.{name} was {saved[name]} and "
                                  f"is {ours[name]}; set it to that, or use another checkpoint")


def _check_same(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise CheckpointError(f"ranks would start after steps {sorted(set(steps))}; checkpoint.dir must be one "
                              "directory that all nodes share")
