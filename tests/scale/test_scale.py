"""A job's cost to what its ranks share grows with the nodes, see table.py for the limits. `-s` prints the table."""

import os
from pathlib import Path

import pytest

import table
from minitron import pretrain
from minitron.checkpoint.save import Checkpointer
from minitron.runtime.log import Log


@pytest.fixture(scope="module")
def counted():
    return table.staged(table.count, table.COUNTED)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


def test_what_ranks_do_to_what_they_share(counted):
    sums = table.with_fit(counted)
    print("\n" + table.counted_table(sums))
    assert not (over := [str(s) for s in sums if s.value > s.limit]), "\n".join(over)


def use_shared_files_on_each_rank():
    """Plant, in each rank: an open at the start, a look at a folder at each save, the whole index read at the load."""
    opened, save, restore = Log.__init__, Checkpointer.save, pretrain.restore

    def open_first(self, cfg, *args, **options):
        opened(self, cfg, *args, **options)
        Path(cfg.log.dir).with_name("notes").open("a").close()

    def look_first(self, *args, **options):
        os.listdir(self.shared.directory)
        return save(self, *args, **options)

    def read_first(start, *args, **options):
        if start.parent_checkpoint is not None:
            start.reader.index.read_bytes()
        return restore(start, *args, **options)

    Log.__init__, Checkpointer.save, pretrain.restore = open_first, look_first, read_first


def test_an_open_by_all_ranks_exceeds_the_limit():
    sums = table.staged(table.count, [128], use_shared_files_on_each_rank)
    assert {(s.phase, s.what) for s in sums if s.value > s.limit} == {
        ("start", "opens"),
        ("restart", "opens"),
        ("save", "folders"),
        ("local save", "folders"),
        ("load", "opens"),
        ("load", "bytes"),
    }


def test_one_rank_reads_the_files_of_fine_tuning():
    """A file has more bytes than ranks may read of their own files. The others read what that one has kept."""
    sums = table.staged(table.count, [128], None, table.SFT)
    assert not (over := [str(s) for s in sums if s.value > s.limit]), "\n".join(over)


@pytest.mark.parametrize(
    "sizes", [(16, 32, 64), pytest.param((32, 64, 128, 256), marks=pytest.mark.slow)], ids=["up to 64", "up to 256"]
)
def test_jobs_of_real_ranks(sizes):
    jobs = table.staged(table.start, [(ranks, "nccl") for ranks in sizes])
    print("\n" + table.started_table(jobs))
    assert not (over := table.beyond(jobs)), "\n".join(over)


@pytest.mark.slow
def test_jobs_on_cpus_connect_all_ranks_to_all():
    """Gloo's groups of a whole axis are a full mesh, so what is measured here limits jobs on CPUs, not on GPUs."""
    jobs = table.staged(table.start, [(ranks, "gloo") for ranks in (16, 32, 64)])
    print("\n" + table.started_table(jobs, parabola=True))
    first, *_, last = jobs
    assert last.descriptors - first.descriptors >= last.ranks - first.ranks
