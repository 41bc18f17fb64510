"""From a checkpoint to a trainer, whatever layout either has.

Each rank reads the boxes of its own slices straight into the optimizer's masters and moments: but for some blocks that
threads read ahead there is no second copy of the state, so resuming takes no more memory than a fresh start. Parameters
are then the rounded masters, or their FP8 casts, and an all-gather brings the other ranks' slices.

A checkpoint in checkpoint.dir is resumed, with all of its state and its data; else finetune.base or checkpoint.load
gives the weights of a new run. Where adapters are trained the frozen weights come from there in either case, and must
be the ones that the adapters were first trained with. What is damaged, missing or of another model ends the run before
its first step. An older checkpoint is used when the user says so: checkpoint.resume_step=10 goes back, once. A
checkpoint whose own configuration has that key descends from that step and is resumed in its place, so the same command
may be started again. A newer save on the nodes' own disks (local.py) is preferred where it is whole, and else skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.checkpoint.adapter import Weights, base_of, best_kind, check_base, config_of, fingerprint, open_weights
from minitron.checkpoint.boxes import Box, Piece, to_global, whole_shape
from minitron.checkpoint.directory import STEP_NAME, checkpoints, in_the_way, make_writable, newest
from minitron.checkpoint.format import BLOCK_BYTES, CheckpointError
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.save import State, decide, pieces
from minitron.comm.activity import listed
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.runtime.log import Log

# Of `model`: what a checkpoint must agree in, and what only a run that goes on must.
STRUCTURE = ("family", "num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "tie_embeddings")
MEANING = ("vocab_size", "positions", "rope_theta", "rope_scaling", "norm_eps")
READERS = 4  # threads that read ahead


class Start(NamedTuple):
    """What a run starts from: nothing, the weights of a checkpoint, or with `resume` all of it.

    step, consumed_samples: done already. data: what identified the saved run's data, empty for a new run.
    frozen, mark: the weights beside which adapters are trained, and their fingerprint. root: step and index checksum of
    the checkpoint in checkpoint.dir that is resumed. local: a newer one is, of checkpoint.local_dir, and verified.
    """

    reader: Weights | None = None
    resume: bool = False
    step: int = 0
    consumed_samples: int = 0
    data: Mapping = {}
    frozen: Weights | None = None
    mark: str | None = None
    root: tuple[int, str] | None = None
    local: bool = False


def find(cfg: Config) -> Start:
    """Find where a run of this configuration starts, and check the index of that checkpoint. Needs no process group.

    Raises CheckpointError, also if checkpoint.dir cannot be written.
    """
    c, base, mark = cfg.checkpoint, None, None
    if cfg.finetune.kind == "lora":
        base = open_base(cfg)
        mark = fingerprint(base)
    if c.dir is not None:
        directory = Path(c.dir).expanduser()
        try:
            make_writable(directory)
        except CheckpointError as error:
            if "checkpoint.dir" in str(error):
                raise
            why = f"checkpoint.dir={c.dir} cannot be written: {error}"
            raise CheckpointError(f"{why}; name another directory, or null for none") from error
        reader = None
        with _or_another(directory):
            if c.resume:
                folder = newest(directory) if c.resume_step is None else _back(directory, c.resume_step)
                reader = None if folder is None else Reader(folder)
        if stranger := in_the_way(directory, 0 if reader is None else reader.iteration, cfg.train.steps):
            why = "is in the way of a save of this run: it holds what no save wrote"
            raise CheckpointError(f"{stranger} {why}; move it away, or use another checkpoint.dir")
        if reader is not None:
            _check_run(reader, cfg)
            if not {"data", "optimizer_steps"} <= reader.state.keys():
                fix = f"start from it with checkpoint.load={reader.path} and another checkpoint.dir"
                raise CheckpointError(f"{reader.path} holds weights only; {fix}")
            if base is not None:
                check_base(reader, base, mark)
            root = reader.iteration, reader.mark
            return _resumed(reader)._replace(frozen=base, mark=mark, root=root)
    if base is not None:
        return Start(frozen=base, mark=mark)
    return Start(None if cfg.finetune.kind is None and c.load is None else open_base(cfg))


def prefer_local(cfg: Config, start: Start, info: dict, state: State, log: Log) -> Start:
    """Return a start from the newest local save after `start` that is whole; `start` if none is. Collective over the
    world.

    info: this run's `Datasets.info`. Whatever local save is newer and cannot be used is named in the log.
    """
    if cfg.checkpoint.local_dir is None or start.root is None:
        return start
    mesh, directory = state.optimizer.gradients.mesh, Path(cfg.checkpoint.local_dir).expanduser()
    found: dict[int, Reader] = {}

    def look() -> tuple[dict[int, str], list[str]]:
        problems = []
        for step, folder in checkpoints(directory).items():
            try:
                if step > start.step and _descends(reader := Reader(folder), start, cfg):
                    _check_run(reader, cfg)
                    check_data(_resumed(reader), info)
                    found[step] = reader
            except CheckpointError as error:
                problems.append(str(error))
        return {step: reader.mark for step, reader in found.items()}, problems

    def compare(ranks: list[tuple[dict[int, str], list[str]]]) -> tuple[list[int], list[str]]:
        everywhere, problems = [], [problem for _, problems in ranks for problem in problems]
        for step in sorted({step for marks, _ in ranks for step in marks}, reverse=True):
            lacking = [rank for rank, (marks, _) in enumerate(ranks) if marks.get(step) != ranks[0][0].get(step, "")]
            if not lacking:
                everywhere.append(step)
            else:
                problems.append(f"{directory / STEP_NAME(step)} is not the same on all nodes: see {listed(lacking)}")
        return everywhere, sorted(set(problems))

    steps, problems = decide(look, compare, mesh)
    for step in steps:
        local = _resumed(found[step])._replace(frozen=start.frozen, mark=start.mark, root=start.root, local=True)
        try:
            decide(lambda: found[step].verify(_files(found[step], list(_wanted(local, state)))), lambda _: None, mesh)
            break
        except CheckpointError as error:
            problems.append(str(error))
    else:
        local = start
    for problem in problems:
        log.warn(f"{problem}: this local save is not used")
    return local


def _descends(reader: Reader, start: Start, cfg: Config) -> bool:
    """Tell whether a local save was made after the checkpoint from which the run would start, and not before it went
    back to that."""
    went_back = reader.config.get("checkpoint", {}).get("resume_step")
    return reader.state.get("root") == list(start.root or ()) and went_back == cfg.checkpoint.resume_step


def _resumed(reader: Reader) -> Start:
    return Start(reader, True, reader.iteration, reader.consumed_samples, reader.state.get("data", {}))


def check_data(start: Start, info: dict) -> None:
    """Raise CheckpointError unless samples and their order are the saved run's. info: this run's `Datasets.info`."""
    for name, saved in start.data.items():
        if name not in ("valid", "valid_samples") and saved != info.get(name):
            path, now = start.reader.path, info.get(name)
            fix = f"begin a run of its own from the weights with checkpoint.load={path} and another checkpoint.dir"
            why = f"was saved with other data: {name} was {saved!r} and is {now!r}"
            raise CheckpointError(f"{path}/index.json {why}; restore it, or {fix}")


@torch.no_grad()
def restore(start: Start, state: State) -> None:
    """Fill a fresh trainer. Collective over the world: the CheckpointError of any rank is raised on all."""
    mesh = state.optimizer.gradients.mesh
    decide(lambda: start.step, _check_same, mesh)
    if start.reader is start.frozen is None:
        return
    reader, optimizer = start.reader, state.optimizer

    def fill() -> None:
        if start.frozen is not None:
            _fill(start.frozen, list(_frozen(start.frozen, state)), mesh)
        if reader is not None:
            with _or_another(reader.path.parent, reader) if start.resume and not start.local else nullcontext():
                _fill(reader, list(_wanted(start, state)), mesh, verified=start.local)

    decide(fill, lambda _: None, mesh)
    if start.resume:
        for name, value in state.scalars().items():  # a run in another dtype had no loss scale
            value.fill_(reader.state.get(name, value.item()))
        if state.rerun is not None:
            state.rerun.restore(reader.state.get("rerun", {}))
        for chunk in state.chunks:
            if chunk.fp8_state.scaling is not None and chunk.fp8_state.scaling.history.any():
                chunk.fp8_state.scaling.follow_history()
    optimizer.write_parameters()  # in FP8 with the scales of the histories


def _files(reader: Reader, wanted: list[Piece]) -> list[str]:
    """List the files that hold the pieces."""
    return sorted({file for p in wanted for file in reader.files_of(p.name, p.kind, p.box)})


def _fill(reader: Weights, wanted: list[Piece], mesh: Mesh, verified: bool = False) -> None:
    """Verify the files that hold the pieces, and this rank's share of the others; then read every piece."""
    if not isinstance(reader, Reader):
        if not verified:
            reader.verify()
        for piece in wanted:
            piece.tensor.copy_(reader.read(piece.name, piece.kind, *piece.box))
        return
    if not verified:
        share = list(reader.files)[mesh.rank :: mesh.world.size]
        reader.verify(sorted({*_files(reader, wanted), *share}))
    with ThreadPoolExecutor(READERS, "reader") as pool:  # they read what comes next while this thread fills
        waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
        for piece in chain.from_iterable(map(slabs, wanted)):
            waiting.append((piece.tensor, pool.submit(reader.read, piece.name, piece.kind, *piece.box)))
            if len(waiting) == 2 * READERS:
                tensor, read = waiting.popleft()
                tensor.copy_(read.result())
        for tensor, read in waiting:
            tensor.copy_(read.result())


def slabs(piece: Piece) -> Iterator[Piece]:
    """Cut a piece, of at least one dim, along its first one into pieces of at most BLOCK_BYTES, or of one row."""
    rows = max(1, BLOCK_BYTES * len(piece.tensor) // max(1, piece.tensor.nbytes))
    for first in range(0, len(piece.tensor), rows):
        start = (piece.start[0] + first, *piece.start[1:])
        yield piece._replace(start=start, tensor=piece.tensor[first : first + rows])


def _wanted(start: Start, state: State) -> Iterator[Piece]:
    """Yield this rank's state as boxes to fill, under the kind that they are stored as. Raises CheckpointError."""
    reader, slices = start.reader, state.slices()
    for piece in pieces(state.optimizer.gradients, slices if start.resume else {"master": slices["master"]}):
        _check_shape(reader, piece.name, piece.whole)
        yield piece if start.resume or piece.kind in reader.kinds(piece.name) else piece._replace(kind="param")
    for chunk in state.chunks if start.resume else ():
        histories = list(state.histories(chunk))
        if all(piece.kind in reader.kinds(piece.name) for piece in histories):  # else it looks first, as a fresh run
            yield from histories


def _frozen(reader: Weights, state: State) -> Iterator[Piece]:
    """Yield the frozen parameters of this rank as boxes to fill. Raises CheckpointError."""
    for param in (p for chunk in state.chunks for p in chunk.parameters() if not p.requires_grad):
        spec = param.spec
        name, shape = spec.name, whole_shape(param.shape, spec.shard)
        _check_shape(reader, name, shape)
        local = Box((0,) * param.dim(), tuple(param.shape))
        for cut, start in to_global(local, spec.shard):
            yield Piece(name, best_kind(reader, name), shape, start, param[cut.within(local)])


def _check_shape(reader: Weights, name: str, shape: tuple[int, ...]) -> None:
    found = reader.shape(name) if reader.kinds(name) else None
    if found != shape:
        shapes = f"{name} has shape {found and list(found)} there and {list(shape)} here"
        raise CheckpointError(f"{reader.index} is of another model: {shapes}")


def open_base(cfg: Config) -> Weights:
    """Open the weights that a run starts from. Raises CheckpointError if they are of another model."""
    path = base_of(cfg)
    if path is None:
        fix = "set finetune.base to a Hugging Face folder or a minitron checkpoint"
        raise CheckpointError(f"finetune.kind={cfg.finetune.kind} has no weights to start from; {fix}")
    key = "checkpoint.load=" if cfg.finetune.base is None else "finetune.base="
    reader = open_weights(path, vocab_multiple=cfg.model.vocab_multiple, key=key)
    directory = cfg.checkpoint.dir
    if directory is not None and reader.path.resolve() in checkpoints(Path(directory).expanduser().resolve()).values():
        why = f"lies in checkpoint.dir={directory}, where this run's saves would delete it"
        raise CheckpointError(f"{key}{path} {why}; use another checkpoint.dir")
    _check_model(reader, cfg, STRUCTURE if cfg.finetune.base is None else STRUCTURE + MEANING)
    return reader


def _back(directory: Path, step: int) -> Path:
    """Return the newest checkpoint if it descends from that of `step`, else the one of `step`.

    A damaged newest one may be why the user goes back. Once others descend from `step`, it is an error: to begin there
    again would lose what followed.
    """

    def descends(reader: Reader) -> bool:
        return reader.config.get("checkpoint", {}).get("resume_step") == step

    try:
        folder = newest(directory)
        if folder is not None and descends(Reader(folder)):
            return folder
    except CheckpointError:
        if any(map(descends, _sound(directory))):
            raise
    return directory / STEP_NAME(step)


def _sound(directory: Path) -> Iterator[Reader]:
    """Open the checkpoints whose index is good."""
    for folder in checkpoints(directory).values():
        with suppress(CheckpointError):
            yield Reader(folder)


@contextmanager
def _or_another(directory: Path, bad: Reader | None = None) -> Iterator[None]:
    """Add to an error where to go back to: the newest good checkpoint before the bad one, else the newest after it."""
    try:
        yield
    except CheckpointError as error:
        others = [reader for reader in _sound(directory) if bad is None or reader.path != bad.path]
        best = max(others, key=lambda o: (bad is None or o.iteration < bad.iteration, o.iteration), default=None)
        fix = "there is no other checkpoint; checkpoint.resume=false begins anew"
        if best is not None:
            fix = f"checkpoint.resume_step={best.iteration} goes back to {best.path.name}"
        raise CheckpointError(f"{error}; {fix}") from error


def _check_keys(reader: Weights, what: str, saved: Mapping, ours: Mapping, other: str) -> None:
    """Raise CheckpointError unless all of our keys were the same in the saved configuration."""
    for key, now in ours.items():
        if saved.get(key) != now:
            why = f"is of another {what}: {key} was {saved.get(key)} and is {now}"
            raise CheckpointError(f"{reader.index} {why}; set it to that, or use another {other}")


def _trained(cfg: Config) -> dict:
    """Return the keys that say which parameters are trained."""
    keys, lora = {"finetune.kind": cfg.finetune.kind}, cfg.lora
    if cfg.finetune.kind == "lora":
        keys |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": sorted(lora.targets)}
    return keys


def _check_run(reader: Reader, cfg: Config) -> None:
    """Raise CheckpointError unless the saved run had this model, and trained the same of it."""
    _check_model(reader, cfg, STRUCTURE + MEANING)
    _check_keys(reader, "run", _trained(config_of(reader)), _trained(cfg), "checkpoint.dir")


def _check_model(reader: Weights, cfg: Config, names: tuple[str, ...]) -> None:
    """Raise CheckpointError unless the saved configuration of the model agrees in these keys."""
    models = (asdict(c.model) | {"num_kv_heads": c.model.kv_heads} for c in (config_of(reader), cfg))
    saved, ours = ({f"model.{name}": model[name] for name in names} for model in models)
    _check_keys(reader, "model", saved, ours, "checkpoint")


def _check_same(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        fix = "checkpoint.dir must be one directory that all nodes share"
        raise CheckpointError(f"ranks would start after steps {sorted(set(steps))}; {fix}")
