"""From samples to microbatches on the device, and which rank reads which samples.

The order depends only on the number of samples trained so far. A step takes the next samples, and config/batch.py gives
their number. Of each micro_batch_size * dp samples in a row, data-parallel rank r takes the r-th part:

    mbs 2, dp 2, 8 samples a step     microbatch 0   rank 0 [0 1]   rank 1 [2 3]
                                      microbatch 1   rank 0 [4 5]   rank 1 [6 7]

So another dp size reads the same samples in the same step. Ranks of one tensor-, context- or pipeline-parallel group
read the same samples; each context rank keeps its part of the sequence. The next step's samples are read while the
current one trains.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from minitron.comm.mesh import Mesh
from minitron.config.batch import batch_size, consumed_of
from minitron.config.schema import Config
from minitron.data.batch import Batch
from minitron.data.build import Dataset
from minitron.data.gpt import Sample
from minitron.parallel.tiles import as_documents, local_positions


class Loader:
    """Microbatches of `dataset` for this rank of the mesh."""

    def __init__(self, dataset: Dataset, cfg: Config, mesh: Mesh):
        self.dataset, self.mesh = dataset, mesh
        self.train, self.skipped = cfg.train, cfg.data.skip_samples
        self.separate = cfg.data.separates
        self.order = local_positions(cfg.train.seq_len, mesh.cp.size, mesh.cp.rank, cfg.parallel.cp_style)
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.ahead: dict[int, Future[list[Batch]]] = {}  # trained -> the samples that follow

    def step(self, trained: int, step: int) -> list[Batch]:
        """Return this rank's microbatches of the step that begins after `trained` samples."""
        ahead = self.ahead.get(trained)
        host = self._read(trained) if ahead is None else ahead.result()
        for batch in host:
            assert isinstance(batch.step, Tensor)
            batch.step.fill_(step)
        moved = [batch.to(self.mesh.device) for batch in host]  # before a reader competes for the interpreter
        after = trained + batch_size(self.train, trained)
        more = consumed_of(self.skipped, after + batch_size(self.train, after) - 1) < len(self.dataset)
        self.ahead = {after: self.reader.submit(self._read, after)} if more else {}
        return moved

    def close(self) -> None:
        self.reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, trained: int) -> list[Batch]:
        dp, size = self.mesh.dp, self.train.micro_batch_size
        starts = range(trained + dp.rank * size, trained + batch_size(self.train, trained), size * dp.size)
        return [self._microbatch([consumed_of(self.skipped, start + i) for i in range(size)]) for start in starts]

    def _microbatch(self, indices: list[int]) -> Batch:
        drawn = [self.dataset[i] for i in indices]
        tokens = np.stack([sample.tokens for sample in drawn], 1)  # [s + 1, b]
        masks = [np.ones(len(tokens) - 1, np.float32) if x.mask is None else x.mask for x in drawn]
        positions, documents, squares = self.order[:, None], None, 0.0
        if self.separate:
            views = [separate(sample, mask) for sample, mask in zip(drawn, masks)]
            masks, bounds = [mask for mask, _, _ in views], [bounds for _, _, bounds in views]
            positions = np.stack([positions for _, positions, _ in views], 1)[self.order]
            documents = as_documents(bounds)
            squares = sum(np.square(np.diff(b)).sum() - sample.padding**2 for b, sample in zip(bounds, drawn))
        mask = np.stack(masks, 1)[self.order]
        arrays = {"tokens": tokens[:-1][self.order], "labels": tokens[1:][self.order], "mask": mask}
        arrays |= {"positions": positions, "order": self.order, "samples": np.asarray(indices)}
        batch = Batch(
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            step=torch.zeros((), dtype=torch.int64),
            count=float(mask.sum(dtype=np.float64)),
            documents=documents,
            squared_lengths=float(squares),
            padding=sum(sample.padding for sample in drawn),
        )
        return batch.pack(pinned=self.mesh.device.type == "cuda")


def separate(sample: Sample, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep the documents of a sample apart: mask [s], positions [s], document boundaries [0, ..., s].

    The label of a document's last token belongs to the next document, so it does not count.
    """
    s = len(mask)
    inner = sample.starts[sample.starts < s].astype(np.int64)
    bounds = np.concatenate([[0], inner, [s]])
    mask = mask.copy()
    mask[sample.starts - 1] = 0.0
    return mask, np.arange(s) - np.repeat(bounds[:-1], np.diff(bounds)), bounds
