"""Random tokens without any files: for speed measurements, tests and a first run on a new machine.

Sample i depends on (seed, i) alone, so it is the same on every rank, in every layout and after a restart. With
`document_length` the sample is cut into documents whose lengths are geometric with that mean, as if drawn from a long
stream of documents; with `longest` their lengths are uniform from 1 to that, as in packed questions and answers.

Left out: anything to learn. The loss of a uniform source stays at ln(vocab_size); use the corpus to see it fall.
"""

from dataclasses import dataclass

import numpy as np

from minitron.data.gpt import Sample


@dataclass(frozen=True)
class MockDataset:
    """`num_samples` samples of seq_len + 1 uniform token ids.

    document_length: mean tokens of a document. longest: most tokens of one. None for both: one document a sample.
    """

    vocab_size: int
    seq_len: int
    num_samples: int
    seed: int
    document_length: float | None = None
    longest: int | None = None

    @property
    def fingerprint(self) -> str:
        longest = f" longest {self.longest}" if self.longest else ""
        return f"mock seed {self.seed} vocab_size {self.vocab_size} seq_len {self.seq_len}{longest}"

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        rng = np.random.default_rng((self.seed, i))
        tokens = rng.integers(self.vocab_size, size=self.seq_len + 1, dtype=np.int64)
        begins = np.zeros(self.seq_len, bool)  # for tokens 1 .. s: whether it is the first of its document
        if self.document_length is not None:
            begins = rng.random(self.seq_len) < 1 / self.document_length  # so lengths are geometric
        if self.longest is not None:
            ends = np.cumsum(rng.integers(1, self.longest + 1, size=self.seq_len))
            begins[ends[ends <= self.seq_len] - 1] = True
        return Sample(tokens, (np.flatnonzero(begins) + 1).astype(np.int32))
