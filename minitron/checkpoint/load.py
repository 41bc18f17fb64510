"""Find the checkpoint that a run resumes from, and restore it into a trainer of any layout.

Each rank reads the boxes of its own slices straight into the optimizer's masters and moments. Threads read some blocks
ahead; there is no second copy of the state, so resuming takes no more memory than a fresh start. Parameters are then
the rounded masters, or their FP8 casts, and an all-gather distributes them.

    checkpoint.dir holds a checkpoint                 resume it, with all of its state and its data
    else finetune.base or checkpoint.load is set      start a new run from these weights
    finetune.kind=lora                                in both cases, read the frozen weights from finetune.base. The
                                                      adapters must have been trained with these weights
    checkpoint.local_dir holds a newer, whole save    resume this one instead (destination.py)

A damaged or missing checkpoint, or one of another model, ends the run before its first step. An older checkpoint is
used only if the user asks for it. checkpoint.resume_step=10 goes back only at the first start with this key: saves
store the key, and a restart with the same command resumes the newest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from socket import gethostname
from time import monotonic
from typing import Any, NamedTuple

import torch

from minitron.checkpoint.boxes import Box, TensorShard, row_blocks, to_global, whole_shape
from minitron.checkpoint.checksum import in_order
from minitron.checkpoint.directory import STEP_NAME, checkpoints, foreign_folder, make_writable, newest
from minitron.checkpoint.format import BLOCK_BYTES, CheckpointError
from minitron.checkpoint.reader import Reader
from minitron.checkpoint.state import State, tensor_shards
from minitron.checkpoint.weights import Weights, base_of, best_kind, check_base, config_of, fingerprint
from minitron.comm.activity import listed
from minitron.comm.mesh import Mesh
from minitron.config.files import errors_as
from minitron.config.schema import MAX_STEPS, Config
from minitron.kernels.param import params_of
from minitron.runtime.log import Log

# Keys of `model` that must equal those of any checkpoint, and those that must equal those of a resumed run only.
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "head_dim")
STRUCTURE = ("family", *SIZES, "qkv_bias", "qk_norm", "tie_embeddings")
MEANING = ("vocab_size", "positions", "rope_theta", "rope_scaling", "norm_eps")
READERS = 4  # threads that read ahead
PROGRESS_SECONDS = 60.0
SHOWN = 4  # differences that an error names
OTHER_MODEL = "use its values, or another checkpoint"
SAME_CLASS = "start it with the class that made it, and its keys of `model`"


class ResumePoint(NamedTuple):
    """What a run starts from: nothing, the weights of a checkpoint, or with `resume` all of its state.

    step, consumed_samples: done before this start. data: what identified the saved run's data, empty for a new run.
    base_weights, base_fingerprint: the frozen weights beside which adapters are trained. parent_checkpoint: step and
    index checksum of the checkpoint in checkpoint.dir that is resumed. local: `reader` is a newer save of
    checkpoint.local_dir, and its files are verified.
    """

    reader: Weights | None = None
    resume: bool = False
    step: int = 0
    consumed_samples: int = 0
    data: Mapping[str, Any] = {}
    base_weights: Weights | None = None
    base_fingerprint: str | None = None
    parent_checkpoint: tuple[int, str] | None = None
    local: bool = False

    def resuming(self, reader: Reader, **fields: Any) -> ResumePoint:
        """Return this point with all of the state of a checkpoint, and with these fields."""
        fields |= {"data": reader.state.get("data", {}), "consumed_samples": reader.consumed_samples}
        return self._replace(reader=reader, resume=True, step=reader.iteration, **fields)


# Opens a model: the folder, how a vocabulary is padded, and the key that named the folder, for errors.
OpenWeights = Callable[[str, int, str], Weights]


# ---- where a run starts ----------------------------------------------------------------------------------------------


def agree_on_start(cfg: Config, mesh: Mesh, open_weights: OpenWeights, first_on_node: bool = True) -> ResumePoint:
    """Run `find_resume_point` on rank 0, and open what it found on all ranks. Collective over the world.

    Only rank 0 reads the index of a checkpoint. Every rank opens a Hugging Face folder and merged weights. The first
    rank of each node checks that its node has the same checkpoint.dir. Raises CheckpointError or ValueError, on all
    ranks alike.
    """
    found: list[ResumePoint] = []

    def look(_: list[None]) -> ResumePoint:
        found.append(start := find_resume_point(cfg, open_weights))
        return start._replace(reader=facts(start.reader), base_weights=facts(start.base_weights))

    def facts(weights: Weights | None) -> Any:
        return weights.facts() if isinstance(weights, Reader) else weights is not None

    def opened(facts: Any) -> Weights | None:
        if isinstance(facts, dict):
            return Reader(facts["path"], facts)
        return open_base(cfg, open_weights) if facts else None

    def open_here() -> None:
        if not found:
            found.append(sent._replace(reader=opened(sent.reader), base_weights=opened(sent.base_weights)))
        if first_on_node:
            _check_shared(cfg, found[0])

    decide = partial(mesh.agreement.decide, errors=(CheckpointError, ValueError))
    sent = ResumePoint(*decide(lambda: None, look))
    decide(open_here, lambda _: None)
    return found[0]


def _check_shared(cfg: Config, start: ResumePoint) -> None:
    """Raise CheckpointError unless this node has the checkpoint that rank 0 has found in checkpoint.dir."""
    c = cfg.checkpoint
    if c.dir is not None and c.resume:
        same = newest(Path(c.dir).expanduser()) is None if start.reader is None else start.reader.index.exists()
        if not same:
            why = f"holds other checkpoints on {gethostname()} than where rank 0 would start after step {start.step}"
            raise CheckpointError(f"checkpoint.dir={c.dir} {why}; it must be one directory that all nodes share")


def find_resume_point(cfg: Config, open_weights: OpenWeights) -> ResumePoint:
    """Find where a run of this configuration starts, and check the index of that checkpoint, on this rank alone.

    Raises CheckpointError, also if checkpoint.dir cannot be written, unless the run only saves if a signal ends it.
    """
    c, start = cfg.checkpoint, ResumePoint()
    if cfg.finetune.kind == "lora":
        base = open_base(cfg, open_weights)
        start = ResumePoint(base_weights=base, base_fingerprint=fingerprint(base))
    reader = None if c.dir is None else _newest_checkpoint(cfg, Path(c.dir).expanduser())
    if reader is not None:
        _check_run(reader, cfg)
        if not {"data", "optimizer_steps"} <= reader.state.keys():
            fix = f"start from it with checkpoint.load={reader.path} and another checkpoint.dir"
            raise CheckpointError(f"{reader.path} holds weights only; {fix}")
        if start.base_weights is not None:
            check_base(reader, start.base_weights, start.base_fingerprint)
        return start.resuming(reader, parent_checkpoint=(reader.iteration, reader.index_checksum))
    if start.base_weights is None and (cfg.finetune.kind is not None or c.load is not None):
        return ResumePoint(open_base(cfg, open_weights))
    return start


def _newest_checkpoint(cfg: Config, directory: Path) -> Reader | None:
    """Open the checkpoint in checkpoint.dir that is resumed; None if there is none, or resume is false.

    Raises CheckpointError for a damaged checkpoint, and for a directory in which a run with saves cannot write.
    """
    c, reader = cfg.checkpoint, None
    unwritable = lambda e: f"checkpoint.dir={c.dir} cannot be written: {e}; name another directory, or null for none"
    if c.saves:
        with errors_as(CheckpointError, unwritable, CheckpointError):
            make_writable(directory)
    if c.resume:
        damaged = lambda e: f"{e}; {suggest_other_checkpoint(directory)}"
        with errors_as(CheckpointError, damaged, CheckpointError):
            reader = _open_newest(directory, c.resume_step)
    step = 0 if reader is None else reader.iteration
    last = cfg.train.steps if cfg.train.epochs is None else MAX_STEPS  # known once the data are open
    if c.saves and (foreign := foreign_folder(directory, step, last)):
        why = "is in the way of a save of this run: it holds files that no save wrote"
        raise CheckpointError(f"{foreign} {why}; move it away, or use another checkpoint.dir")
    return reader


def _open_newest(directory: Path, resume_step: int | None) -> Reader | None:
    """Open the newest checkpoint. With resume_step, open that of this step, unless the newest one descends from it.

    Returns None if there is no checkpoint. Raises CheckpointError. If later saves were already made from resume_step, a
    damaged newest checkpoint is an error: going back again would lose these saves. Else it is ignored: the damage may
    be the user's reason for going back.
    """
    try:
        folder = newest(directory)
        reader = None if folder is None else Reader(folder)
        if resume_step is None or (reader is not None and reader.resume_step == resume_step):
            return reader
    except CheckpointError:
        if resume_step is None or any(x.resume_step == resume_step for x in readable_checkpoints(directory)):
            raise
    return Reader(directory / STEP_NAME(resume_step))


def readable_checkpoints(directory: Path) -> Iterator[Reader]:
    """Open the checkpoints whose index is undamaged."""
    for folder in checkpoints(directory).values():
        with suppress(CheckpointError):
            yield Reader(folder)


def suggest_other_checkpoint(directory: Path, bad: Reader | None = None) -> str:
    """Describe how to resume the newest readable checkpoint before the bad one, else the newest after it."""
    others = [reader for reader in readable_checkpoints(directory) if bad is None or reader.path != bad.path]
    best = max(others, key=lambda o: (bad is None or o.iteration < bad.iteration, o.iteration), default=None)
    if best is None:
        return "there is no other checkpoint; checkpoint.resume=false begins anew"
    return f"checkpoint.resume_step={best.iteration} goes back to {best.path.name}"


def newest_local_save(cfg: Config, start: ResumePoint, info: dict[str, Any], state: State, log: Log) -> ResumePoint:
    """Return the newest local save after `start` that is whole; `start` if there is none. Collective over the world.

    info: this run's `Datasets.info`. The log names newer local saves that cannot be used. Each rank reads the indices
    of its node.
    """
    if cfg.checkpoint.local_dir is None or start.parent_checkpoint is None:
        return start
    mesh, directory = state.optimizer.gradients.mesh, Path(cfg.checkpoint.local_dir).expanduser()
    decide = partial(mesh.agreement.decide, errors=(CheckpointError,))
    found: dict[int, Reader] = {}

    def look() -> tuple[list[tuple[int, str]], list[str]]:
        problems = []
        for step, folder in checkpoints(directory).items():
            try:
                if step > start.step and _descends(reader := Reader(folder), start, cfg):
                    _check_run(reader, cfg)
                    check_data(start.resuming(reader), info)
                    found[step] = reader
            except CheckpointError as error:
                problems.append(str(error))
        saves = [(step, reader.state.get("local_save", reader.index_checksum)) for step, reader in found.items()]
        return saves, problems

    def compare(ranks: list[Any]) -> tuple[list[int], list[str]]:
        saves = [dict(seen) for seen, _ in ranks]
        everywhere, problems = [], [problem for _, theirs in ranks for problem in theirs]
        for step in sorted(set().union(*saves), reverse=True):
            first = next(seen[step] for seen in saves if step in seen)
            lacking = [rank for rank, seen in enumerate(saves) if seen.get(step) != first]
            if not lacking:
                everywhere.append(step)
            else:
                problems.append(f"{directory / STEP_NAME(step)} is not the same on all nodes: see {listed(lacking)}")
        return everywhere, sorted(set(problems))

    def check(save: ResumePoint) -> None:
        reader = found[save.step]
        reader.verify(reader.files_of(_wanted(save, state)))

    steps, problems = decide(look, compare)
    for step in steps:
        save = start.resuming(found[step], local=True)
        try:
            decide(partial(check, save), lambda _: None)
            start = save
            break
        except CheckpointError as error:
            problems.append(str(error))
    for problem in problems:
        log.warn(f"{problem}: this local save is not used")
    return start


def _descends(reader: Reader, start: ResumePoint, cfg: Config) -> bool:
    """Tell whether a local save follows the checkpoint of `start`, and was made after the run last went back to it."""
    parent = list(start.parent_checkpoint or ())
    return reader.state.get("root") == parent and reader.resume_step == cfg.checkpoint.resume_step


# ---- what is refused -------------------------------------------------------------------------------------------------


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
        why = f"is in checkpoint.dir={directory}, where this run's saves would delete it"
        raise CheckpointError(f"{key}{path} {why}; use another checkpoint.dir")
    check_model(reader, cfg, STRUCTURE if cfg.finetune.base is None else STRUCTURE + MEANING)
    return reader


def check_data(start: ResumePoint, info: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless samples and their order are the saved run's. info: this run's `Datasets.info`."""
    saved = {name: value for name, value in start.data.items() if name not in ("valid", "valid_samples")}
    if start.reader is not None:
        ours, another_run = {name: info.get(name) for name in saved}, f"checkpoint.load={start.reader.path}"
        fix = f"restore it, or start another run from the weights with {another_run} and another checkpoint.dir"
        _require_equal(start.reader, "was saved with other data", saved, ours, fix)


def _check_run(reader: Reader, cfg: Config) -> None:
    """Raise CheckpointError unless the saved run had this model, and trained the same of it."""
    base = config_of(reader).finetune.base
    named = OTHER_MODEL if base is None or base_of(cfg) else f"add finetune.base={base}, as the run had it"
    check_model(reader, cfg, STRUCTURE + MEANING, named)
    saved, ours = map(_trained, (config_of(reader), cfg))
    _require_equal(reader, "is of another run", saved, ours, "use its values, or another checkpoint.dir")


def _trained(cfg: Config) -> dict[str, Any]:
    """Return the keys that determine which parameters are trained."""
    keys: dict[str, Any] = {"finetune.kind": cfg.finetune.kind}
    if cfg.finetune.kind == "lora":
        lora = cfg.lora
        keys |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": sorted(lora.targets)}
    return keys


def check_model(reader: Weights, cfg: Config, names: tuple[str, ...], fix: str = OTHER_MODEL) -> None:
    """Raise CheckpointError, with all differences, unless the saved configuration of the model agrees in these keys."""
    both = (c.model for c in (config_of(reader), cfg))
    models = (asdict(m) | {"num_kv_heads": m.kv_heads, "head_dim": m.head_width} for m in both)
    saved, ours = ({f"model.{name}": model[name] for name in names} for model in models)
    _require_equal(reader, "is of another model", saved, ours, fix, len(names))


def check_tensors(reader: Weights, ours: dict[str, list[int]], fix: str = SAME_CLASS) -> None:
    """Raise CheckpointError, with this fix, unless `reader` has exactly these tensors, of these global shapes."""
    saved = {name: list(reader.shape(name)) for name in reader.names() if best_kind(reader, name)}
    _require_equal(reader, "is of another model", saved, ours, fix)


def _require_equal(
    reader: Weights, what: str, saved: Mapping[str, Any], ours: Mapping[str, Any], fix: str, most: int = SHOWN
) -> None:
    """Raise CheckpointError, with this fix and the first differences, unless a checkpoint's values are this run's."""
    pairs = {name: (saved.get(name, "missing"), ours.get(name, "missing")) for name in sorted({**saved, **ours})}
    if differ := [f"{name} was {old} and is {new}" for name, (old, new) in pairs.items() if old != new]:
        more = f" and {len(differ) - most} more" * (len(differ) > most)
        raise CheckpointError(f"{reader.index} {what}: {', '.join(differ[:most])}{more}; {fix}")


# ---- from a checkpoint to a trainer ----------------------------------------------------------------------------------


@torch.no_grad()
def restore(start: ResumePoint, state: State, log: Log | None = None) -> None:
    """Fill a fresh trainer. Collective over the world: the CheckpointError of any rank is raised on all.

    log: where a slow disk's progress is written.
    """
    reader, base, optimizer = start.reader, start.base_weights, state.optimizer
    mesh = optimizer.gradients.mesh
    _compare_tensors(start, state)  # also for a fresh start: if another rank has died, this one ends here
    if reader is base is None:
        return
    decide = partial(mesh.agreement.decide, errors=(CheckpointError,))
    if base is not None:
        decide(lambda: _fill(base, list(_base_shards(base, state)), mesh, log), lambda _: None)
    if reader is not None:
        try:
            decide(lambda: _fill(reader, list(_wanted(start, state)), mesh, log, start.local), lambda _: None)
        except CheckpointError as error:
            if start.local or not (start.resume and isinstance(reader, Reader)):
                raise
            fix = decide(lambda: None, lambda _: suggest_other_checkpoint(reader.path.parent, reader))
            raise CheckpointError(f"{error}; {fix}") from error
    if isinstance(reader, Reader) and start.resume:
        for name, value in state.scalars().items():  # a run in another dtype had no loss scale
            value.fill_(reader.state.get(name, value.item()))
        if state.rerun is not None:
            state.rerun.restore(reader.state.get("rerun", {}))
        for chunk in state.chunks:
            if chunk.fp8_state.scaling is not None and chunk.fp8_state.scaling.history.any():
                chunk.fp8_state.scaling.follow_history()
    optimizer.write_parameters()  # in FP8 with the scales of the histories


def _fill(
    reader: Weights, wanted: list[TensorShard], mesh: Mesh, log: Log | None = None, verified: bool = False
) -> None:
    """Verify the files that hold the shards, and this rank's part of the other files; then read every shard."""
    progress = _LoadProgress(log, sum(shard.tensor.nbytes for shard in wanted))
    if isinstance(reader, Reader) and not verified:
        files = sorted({*reader.files_of(wanted), *list(reader.files)[mesh.rank :: mesh.world.size]})
        progress.total += sum(reader.files[file]["bytes"] for file in files)
        for file in files:
            reader.verify([file])
            progress.add(reader.files[file]["bytes"])
    elif not verified:
        reader.verify()
    blocks = list(chain.from_iterable(map(_blocks, wanted)))
    reads = (partial(reader.read, block.name, block.kind, *block.box) for block in blocks)
    for block, values in zip(blocks, in_order(reads, READERS, "reader")):
        block.tensor.copy_(values)
        progress.add(block.tensor.nbytes)


def _blocks(shard: TensorShard) -> Iterator[TensorShard]:
    """Cut a shard into blocks of rows of at most BLOCK_BYTES, or of one row."""
    for box in row_blocks(shard.box.shape, BLOCK_BYTES // shard.tensor.element_size()):
        rows = slice(box.start[0], box.start[0] + box.shape[0])
        yield shard._replace(start=(shard.start[0] + rows.start, *shard.start[1:]), tensor=shard.tensor[rows])


class _LoadProgress:
    """Writes a line to the log each minute: how many of its bytes this rank has read."""

    def __init__(self, log: Log | None, total: int):
        self.log, self.total, self.done, self.since = log, total, 0, monotonic()

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.log is not None and monotonic() - self.since >= PROGRESS_SECONDS:
            self.since = monotonic()
            self.log.info(f"loading: read {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB of this rank")


def _wanted(start: ResumePoint, state: State) -> Iterator[TensorShard]:
    """Yield this rank's state as boxes to fill, under the kind that they are stored as."""
    reader, slices = start.reader, state.slices()
    assert reader is not None
    for shard in tensor_shards(state.optimizer.gradients, slices if start.resume else {"master": slices["master"]}):
        yield shard if start.resume or shard.kind in reader.kinds(shard.name) else shard._replace(kind="param")
    for chunk in state.chunks if start.resume else ():
        histories = list(state.histories(chunk))
        if all(shard.kind in reader.kinds(shard.name) for shard in histories):  # else they begin empty
            yield from histories


def _base_shards(base: Weights, state: State) -> Iterator[TensorShard]:
    """Yield the frozen parameters of this rank as boxes to fill."""
    for param in (p for chunk in state.chunks for p in params_of(chunk) if not p.requires_grad):
        spec = param.spec
        shape, local = whole_shape(param.shape, spec.shard), Box((0,) * param.dim(), tuple(param.shape))
        for cut, start in to_global(local, spec.shard):
            yield TensorShard(spec.name, best_kind(base, spec.name), shape, start, param[cut.within(local)])


def _compare_tensors(start: ResumePoint, state: State) -> None:
    """Raise CheckpointError, on all ranks, unless the weights to start from are those of the model. Collective.

    One rank of each stage sends its names and shapes, and rank 0 compares.
    """
    mesh = state.optimizer.gradients.mesh

    def shapes() -> list[tuple[str, tuple[int, ...], bool]]:
        params = (p for chunk in state.chunks for p in params_of(chunk) if mesh.dp_cp.rank == mesh.tp.rank == 0)
        return [(p.spec.name, whole_shape(p.shape, p.spec.shard), p.requires_grad) for p in params]

    def compare(stages: list[Any]) -> None:
        # The index of a local save lists the tensors of one node only, and it was checked to be of this run.
        for reader, trained in (start.base_weights, False), (None if start.local else start.reader, True):
            ours = {name: list(shape) for name, shape, trains in chain(*stages) if trains == trained}
            if reader is not None:
                check_tensors(reader, ours)

    mesh.agreement.decide(shapes, compare, errors=(CheckpointError,))
