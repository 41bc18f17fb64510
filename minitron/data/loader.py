"""From samples to microbatches on the device: who reads what, in which order.

The order is a function of the number of samples consumed so far and of nothing else. A step takes the next
global_batch_size samples; of each run of micro_batch_size * dp samples, data-parallel rank r takes the r-th part:

    mbs 2, dp 2, 8 samples a step     microbatch 0   rank 0 [0 1]   rank 1 [2 3]
                                      microbatch 1   rank 0 [4 5]   rank 1 [6 7]

so another dp size reads the same samples in the same step. Ranks of one tensor-, context- or pipeline-parallel group
read the same samples; each context rank keeps its part of the sequence. The next step's samples are read while the
current one trains.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.data.batch import Batch, pack
from minitron.data.gpt import Sample
from minitron.parallel.tiles import as_documents, local_positions


class Loader:
    """Microbatches of `dataset` (anything with len and [i] -> Sample) for this rank of the mesh."""

    def __init__(self, dataset, cfg: Config, mesh: Mesh):
        self.dataset, self.mesh = dataset, mesh
        self.micro, self.total = cfg.train.micro_batch_size, cfg.train.global_batch_size
        self.separate = cfg.data.separate_documents
        self.order = local_positions(cfg.train.seq_len, mesh.cp.size, mesh.cp.rank, cfg.parallel.cp_style)
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.ahead: dict[int, Future] = {}  # consumed -> the samples that follow

    def step(self, consumed: int, step: int) -> list[Batch]:
        """Return this rank's microbatches of the step that begins after `consumed` samples."""
        ahead = self.ahead.get(consumed)
        host = self._read(consumed) if ahead is None else ahead.result()
        for batch in host:
            batch.step.fill_(step)
        moved = [batch.to(self.mesh.device) for batch in host]  # before a reader competes for the interpreter
        after = consumed + self.total
        self.ahead = {after: self.reader.submit(self._read, after)} if after + self.total <= len(self.dataset) else {}
        return moved

    def close(self) -> None:
        self.reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, consumed: int) -> list[Batch]:
        dp = self.mesh.dp
        starts = range(consumed + dp.rank * self.micro, consumed + self.total, self.micro * dp.size)
        return [self._microbatch(range(start, start + self.micro)) for start in starts]

    def _microbatch(self, indices: range) -> Batch:
        drawn = [self.dataset[i] for i in indices]
        views = [_view(sample, self.separate) for sample in drawn]
        tokens = np.stack([sample.tokens for sample in drawn], 1)  # [s + 1, b]
        mask = np.stack([mask for mask, _, _ in views], 1)[self.order]
        positions = self.order[:, None]
        if self.separate:
            positions = np.stack([positions for _, positions, _ in views], 1)[self.order]
        arrays = {"tokens": tokens[:-1][self.order], "labels": tokens[1:][self.order]}
        arrays |= {"mask": mask, "positions": positions, "order": self.order}
        arrays |= {"samples": np.asarray(indices), "step": np.zeros((), np.int64)}
        documents = None
        if self.separate:
            documents = as_documents(bounds for _, _, bounds in views)
            arrays["spans"] = documents.spans.numpy()
        tensors = pack(arrays, pinned=self.mesh.device.type == "cuda")
        if documents is not None:
            documents = replace(documents, spans=tensors.pop("spans"))
        return Batch(
            **tensors,
            count=float(mask.sum(dtype=np.float64)),
            documents=documents,
            squared_lengths=sum(squared_lengths(b, sample.padding) for (_, _, b), sample in zip(views, drawn)),
            padding=sum(sample.padding for sample in drawn),
        )


def squared_lengths(bounds: np.ndarray | None, padding: int) -> float:
    """Sum the squares of a sample's document lengths; 0 without bounds. The last document may be padding."""
    return 0.0 if bounds is None else float(np.square(np.diff(bounds)).sum()) - float(padding) ** 2


def _view(sample: Sample, separate: bool) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Make mask [s], positions [s] and document boundaries [0, ..., s] of a sample; without `separate` the mask alone.

    With documents apart, the label after a document's last token belongs to the next one: it does not count.
    """
    s = len(sample.tokens) - 1
    mask = np.ones(s, np.float32) if sample.mask is None else sample.mask
    if not separate:
        return mask, None, None
    inner = sample.starts[sample.starts < s].astype(np.int64)
    bounds = np.concatenate([[0], inner, [s]])
    mask = mask.copy()
    mask[sample.starts - 1] = 0.0
    positions = np.arange(s) - np.repeat(bounds[:-1], np.diff(bounds))
    return mask, positions, bounds
