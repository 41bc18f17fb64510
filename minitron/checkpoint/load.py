"""From a checkpoint to a trainer, whatever layout either has.

Each rank reads the boxes of its own slices straight into the optimizer's masters and moments: but for some blocks that
threads read ahead there is no second copy of the state, so resuming takes no more memory than a fresh start. Parameters
are then the rounded masters, or their FP8 casts, and an all-gather brings the other ranks' slices.

A checkpoint in checkpoint.dir is resumed, with all of its state and its data; else finetune.base or checkpoint.load
gives the weights of a new run. Where adapters are trained the frozen weights come from there in either case, and must
be the ones that the adapters were first trained with. What is damaged, missing or of another model ends the run before
its first step. An older checkpoint is used when the user says so: checkpoint.resume_step=10 goes back, once. A
checkpoint saved with this resume_step is resumed instead, so the same command may be started again. A newer save on the
nodes' own disks (local.py) is preferred where it is whole, and else skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from socket import gethostname
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from minitron.checkpoint.boxes import Box, Piece, to_global, whole_shape
from minitron.checkpoint.directory import STEP_NAME, checkpoints, in_the_way, make_writable, newest
from minitron.checkpoint.format import BLOCK_BYTES, CheckpointError
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.save import State, pieces
from minitron.checkpoint.weights import Weights, base_of, best_kind, check_base, config_of, fingerprint
from minitron.comm.activity import listed
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.runtime.log import Log

# Of `model`: what a checkpoint must agree in, and what only a run that goes on must.
STRUCTURE = ("family", "num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "tie_embeddings")
MEANING = ("vocab_size", "positions", "rope_theta", "rope_scaling", "norm_eps")
READERS = 4  # threads that read ahead
PROGRESS_SECONDS = 60.0
SHOWN = 4  # tensors that an error names


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


def open_checkpoint(path: str, vocab_multiple: int, key: str) -> Weights:
    """Open a whole model that minitron has saved. Raises CheckpointError. The parameters: see OpenWeights."""
    reader = Reader(path)
    if reader.config.get("finetune", {}).get("kind") == "lora":
        raise CheckpointError(f"{key}{path} holds an adapter; name the folder of a whole model")
    return reader


# open_weights(path, vocab_multiple, key): how a vocabulary is padded, and the key that named the folder, for errors.
OpenWeights = Callable[[str, int, str], Weights]


def agree(cfg: Config, mesh: Mesh, first_on_node: bool = True, open_weights: OpenWeights = open_checkpoint) -> Start:
    """Let rank 0 `find` the start, and open it on all ranks. Collective over the world.

    The other ranks read no index of a checkpoint; a Hugging Face folder and merged weights are opened by each of them.
    The first rank of each node looks whether its node sees the same checkpoint.dir. Raises CheckpointError or
    ValueError, on all ranks alike.
    """
    found: list[Start] = []

    def look(_: list) -> Start:
        found.append(start := find(cfg, open_weights))
        reader, frozen = (w.facts() if isinstance(w, Reader) else w is not None for w in (start.reader, start.frozen))
        return start._replace(reader=reader, frozen=frozen)

    def opened(facts: dict | bool) -> Weights | None:
        if isinstance(facts, dict):
            return Reader(facts["path"], facts)
        return open_base(cfg, open_weights) if facts else None

    def open_here() -> None:
        if not found:
            found.append(told._replace(reader=opened(told.reader), frozen=opened(told.frozen)))
        if first_on_node:
            _check_shared(cfg, found[0])

    decide = partial(mesh.agreement.decide, errors=(CheckpointError, ValueError))
    told = Start(*decide(lambda: None, look))
    decide(open_here, lambda _: None)
    return found[0]


def _check_shared(cfg: Config, start: Start) -> None:
    """Raise CheckpointError unless this node sees what rank 0 has found in checkpoint.dir."""
    c = cfg.checkpoint
    if c.dir is not None and c.resume:
        directory = Path(c.dir).expanduser()
        if not (start.reader.index.exists() if start.resume else newest(directory) is None):
            why = f"holds other checkpoints on {gethostname()} than where rank 0 would start after step {start.step}"
            raise CheckpointError(f"checkpoint.dir={c.dir} {why}; it must be one directory that all nodes share")


def find(cfg: Config, open_weights: OpenWeights = open_checkpoint) -> Start:
    """Find where a run of this configuration starts, and check the index of that checkpoint, on this rank alone.

    Raises CheckpointError, also if checkpoint.dir cannot be written.
    """
    c, base, mark = cfg.checkpoint, None, None
    if cfg.finetune.kind == "lora":
        base = open_base(cfg, open_weights)
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
        try:
            if c.resume:
                folder = newest(directory) if c.resume_step is None else _back(directory, c.resume_step)
                reader = None if folder is None else Reader(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_another(directory)}") from error
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
    return Start(None if cfg.finetune.kind is None and c.load is None else open_base(cfg, open_weights))


def prefer_local(cfg: Config, start: Start, info: dict, state: State, log: Log, first_on_node: bool = True) -> Start:
    """Return a start from the newest local save after `start` that is whole; `start` if none is. Collective over the
    world.

    info: this run's `Datasets.info`. A newer local save that cannot be used is named in the log. Each rank reads the
    indices of its node, and the first rank of the node reports them.
    """
    if cfg.checkpoint.local_dir is None or start.root is None:
        return start
    mesh, directory = state.optimizer.gradients.mesh, Path(cfg.checkpoint.local_dir).expanduser()
    decide = partial(mesh.agreement.decide, errors=(CheckpointError,))
    found: dict[int, Reader] = {}

    def look() -> tuple[list[tuple[int, str]], list[str]] | None:
        problems = []
        for step, folder in checkpoints(directory).items():
            try:
                if step > start.step and _descends(reader := Reader(folder), start, cfg):
                    _check_run(reader, cfg)
                    check_data(_resumed(reader), info)
                    found[step] = reader
            except CheckpointError as error:
                problems.append(str(error))
        saves = [(step, reader.state.get("local_save", reader.mark)) for step, reader in found.items()]
        return (saves, problems) if first_on_node else None

    def compare(ranks: list) -> tuple[list[int], list[str]]:
        nodes = {rank: dict(seen[0]) for rank, seen in enumerate(ranks) if seen is not None}
        everywhere, problems = [], [problem for seen in ranks if seen is not None for problem in seen[1]]
        for step in sorted({step for saves in nodes.values() for step in saves}, reverse=True):
            lacking = [rank for rank, saves in nodes.items() if saves.get(step) != nodes[0].get(step, "")]
            if not lacking:
                everywhere.append(step)
            else:
                problems.append(f"{directory / STEP_NAME(step)} is not the same on all nodes: see {listed(lacking)}")
        return everywhere, sorted(set(problems))

    steps, problems = decide(look, compare)
    for step in steps:

        def check(step: int = step) -> None:
            reader = found[step]
            reader.verify(_files(reader, list(_wanted(_resumed(reader), state))))

        try:
            decide(check, lambda _: None)
            resumed = _resumed(found[step])
            local = resumed._replace(frozen=start.frozen, mark=start.mark, root=start.root, local=True)
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
def restore(start: Start, state: State, log: Log | None = None) -> None:
    """Fill a fresh trainer. Collective over the world: the CheckpointError of any rank is raised on all.

    log: where a slow disk's progress is written.
    """
    reader, optimizer = start.reader, state.optimizer
    mesh = optimizer.gradients.mesh
    _check_tensors(start, state)  # of a fresh start, too: where another rank has died, this one ends here
    if reader is start.frozen is None:
        return
    decide = partial(mesh.agreement.decide, errors=(CheckpointError,))
    if start.frozen is not None:
        decide(lambda: _fill(start.frozen, list(_frozen(start.frozen, state)), mesh, log), lambda _: None)
    if reader is not None:
        try:
            decide(lambda: _fill(reader, list(_wanted(start, state)), mesh, log, start.local), lambda _: None)
        except CheckpointError as error:
            if start.local or not start.resume:
                raise
            fix = decide(lambda: None, lambda _: _another(reader.path.parent, reader))
            raise CheckpointError(f"{error}; {fix}") from error
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


class _Progress:
    """Writes a line to the log each minute: how many of its bytes this rank has read."""

    def __init__(self, log: Log | None, total: int):
        self.log, self.total, self.done, self.since = log, total, 0, monotonic()

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.log is not None and monotonic() - self.since >= PROGRESS_SECONDS:
            self.since = monotonic()
            self.log.info(f"loading: read {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB of this rank")


def _fill(reader: Weights, wanted: list[Piece], mesh: Mesh, log: Log | None = None, verified: bool = False) -> None:
    """Verify the files that hold the pieces, and this rank's share of the others; then read every piece."""
    progress = _Progress(log, sum(piece.tensor.nbytes for piece in wanted))
    if not isinstance(reader, Reader):
        if not verified:
            reader.verify()
        for piece in wanted:
            piece.tensor.copy_(reader.read(piece.name, piece.kind, *piece.box))
            progress.add(piece.tensor.nbytes)
        return
    if not verified:
        files = sorted({*_files(reader, wanted), *list(reader.files)[mesh.rank :: mesh.world.size]})
        progress.total += sum(reader.files[file]["bytes"] for file in files)
        for file in files:
            reader.verify([file])
            progress.add(reader.files[file]["bytes"])
    with ThreadPoolExecutor(READERS, "reader") as pool:  # they read what comes next while this thread fills
        waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
        for piece in chain.from_iterable(map(slabs, wanted)):
            waiting.append((piece.tensor, pool.submit(reader.read, piece.name, piece.kind, *piece.box)))
            if len(waiting) == 2 * READERS:
                tensor, read = waiting.popleft()
                tensor.copy_(read.result())
                progress.add(tensor.nbytes)
        for tensor, read in waiting:
            tensor.copy_(read.result())


def slabs(piece: Piece) -> Iterator[Piece]:
    """Cut a piece, of at least one dim, along its first one into pieces of at most BLOCK_BYTES, or of one row."""
    rows = max(1, BLOCK_BYTES * len(piece.tensor) // max(1, piece.tensor.nbytes))
    for first in range(0, len(piece.tensor), rows):
        start = (piece.start[0] + first, *piece.start[1:])
        yield piece._replace(start=start, tensor=piece.tensor[first : first + rows])


def _wanted(start: Start, state: State) -> Iterator[Piece]:
    """Yield this rank's state as boxes to fill, under the kind that they are stored as."""
    reader, slices = start.reader, state.slices()
    for piece in pieces(state.optimizer.gradients, slices if start.resume else {"master": slices["master"]}):
        yield piece if start.resume or piece.kind in reader.kinds(piece.name) else piece._replace(kind="param")
    for chunk in state.chunks if start.resume else ():
        histories = list(state.histories(chunk))
        if all(piece.kind in reader.kinds(piece.name) for piece in histories):  # else it looks first, as a fresh run
            yield from histories


def _frozen(reader: Weights, state: State) -> Iterator[Piece]:
    """Yield the frozen parameters of this rank as boxes to fill."""
    for param in (p for chunk in state.chunks for p in chunk.parameters() if not p.requires_grad):
        spec = param.spec
        name, shape = spec.name, whole_shape(param.shape, spec.shard)
        local = Box((0,) * param.dim(), tuple(param.shape))
        for cut, start in to_global(local, spec.shard):
            yield Piece(name, best_kind(reader, name), shape, start, param[cut.within(local)])


def _check_tensors(start: Start, state: State) -> None:
    """Raise CheckpointError, on all ranks, unless the weights to start from are those of the model. Collective.

    One rank of each stage sends its names and shapes, and rank 0 compares.
    """
    mesh = state.optimizer.gradients.mesh

    def shapes() -> list[tuple]:
        params = (p for chunk in state.chunks for p in chunk.parameters() if mesh.dp_cp.rank == mesh.tp.rank == 0)
        return [(p.spec.name, whole_shape(p.shape, p.spec.shard), p.requires_grad) for p in params]

    def compare(stages: list[list[tuple]]) -> None:
        # The index of a local save lists the tensors of a node only; it is of the same run.
        for reader, trained in (start.frozen, False), (None if start.local else start.reader, True):
            ours = {name: list(shape) for name, shape, trains in chain(*stages) if trains == trained}
            if reader is not None:
                check_tensors(reader, ours)

    mesh.agreement.decide(shapes, compare, errors=(CheckpointError,))


def check_tensors(
    reader: Weights,
    ours: Mapping[str, list[int]],
    fix: str = "start it with the class that made it, and its keys of `model`",
) -> None:
    """Raise CheckpointError, with this fix, unless `reader` has exactly these tensors, of these whole shapes."""
    there = {name: list(reader.shape(name)) for name in reader.names() if best_kind(reader, name)}
    if differ := sorted(name for name in there | ours if there.get(name) != ours.get(name)):
        shapes = [f"{name} has shape {there.get(name)} there and {ours.get(name)} here" for name in differ[:SHOWN]]
        more = f" and {len(differ) - SHOWN} more" * (len(differ) > SHOWN)
        raise CheckpointError(f"{reader.index} is of another model: {', '.join(shapes)}{more}; {fix}")


def open_base(cfg: Config, open_weights: OpenWeights) -> Weights:
    """Open the weights that a run starts from. Raises CheckpointError if they are of another model."""
    path = base_of(cfg)
    if path is None:
        fix = "set finetune.base to a Hugging Face folder or a minitron checkpoint"
        raise CheckpointError(f"finetune.kind={cfg.finetune.kind} has no weights to start from; {fix}")
    key = "checkpoint.load=" if cfg.finetune.base is None else "finetune.base="
    reader = open_weights(path, cfg.model.vocab_multiple, key)
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


def _another(directory: Path, bad: Reader | None = None) -> str:
    """Return where to go back to: the newest good checkpoint before the bad one, else the newest after it."""
    others = [reader for reader in _sound(directory) if bad is None or reader.path != bad.path]
    best = max(others, key=lambda o: (bad is None or o.iteration < bad.iteration, o.iteration), default=None)
    if best is None:
        return "there is no other checkpoint; checkpoint.resume=false begins anew"
    return f"checkpoint.resume_step={best.iteration} goes back to {best.path.name}"


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
