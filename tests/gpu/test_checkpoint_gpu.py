"""A save beside the training, on one GPU: what it holds, what it costs, what resuming it costs."""

import gc
import statistics
from pathlib import Path

import pytest
import torch

from layouts import LLAMA, config
from minitron.checkpoint.load import find_resume_point, restore
from minitron.checkpoint.save import Checkpointer
from minitron.comm.mesh import Mesh
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.data.mock import MockDataset
from minitron.pretrain import open_weights
from minitron.runtime.log import Log
from minitron.train import Trainer, build
from test_checkpoint import assert_same, contents, saving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FP8 = {"precision": {"dtype": "bf16", "fp8": "delayed", "fp8_backend": "torch"}}
FP16 = {"precision": {"dtype": "fp16", "loss_scale": 256.0, "loss_scale_window": 1}}  # doubles at every step
# 0.1 billion parameters and 33,000 tokens: a step takes longer than the copy, as that of any real batch does.
LARGE = {
    "model": dict(
        num_layers=8,
        hidden_size=1024,
        ffn_hidden_size=2816,
        num_heads=8,
        num_kv_heads=8,
        init_std=0.02,
        max_positions=2048,
    ),
    "train": dict(seq_len=2048, micro_batch_size=4, global_batch_size=16),
    "precision": {"dtype": "bf16"},
}
WAIT_CYCLES = 1 << 31  # a second or so


class Run:
    """A trainer with its data, as far as it has come; what is in checkpoint.dir is resumed."""

    def __init__(self, cfg: Config):
        self.cfg, start = cfg, find_resume_point(cfg, open_weights)
        self.trainer: Trainer = build(cfg, Mesh.offline(device="cuda"))
        restore(start, self.trainer.state)
        self.done = start.step
        self.log = Log(cfg, 0, 1)
        self.saves = Checkpointer(cfg, self.trainer.state, {}, self.log, step=-1)
        t = cfg.train
        self.loader = Loader(
            MockDataset(cfg.model.vocab_size, t.seq_len, 64 * t.global_batch_size, t.seed), cfg, self.trainer.mesh
        )

    def step(self):
        batches = self.loader.step(self.done * self.cfg.train.global_batch_size, self.done)
        self.done += 1
        return self.trainer.step(batches, 1e-3)

    def save(self):
        self.saves.save(self.done, self.done * self.cfg.train.global_batch_size)

    def close(self):
        self.trainer.runner.close()
        self.saves.wait()
        self.loader.close()
        self.log.close()


def wait_on(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(WAIT_CYCLES)


@pytest.mark.parametrize("change", [FP8, FP16, {}], ids=["fp8", "fp16", "fp32"])
def test_a_late_copy_holds_what_was_there_and_the_run_goes_on_from_it(tmp_path, change):
    """The stream of the copy is held up for longer than the host needs to queue the next steps.

    One microbatch and two layers: what waits is to fit into CUDA's queue of about 1,000 launches.
    """
    small = {
        "model": dict(num_layers=2, hidden_size=512, ffn_hidden_size=512, num_heads=8, num_kv_heads=8),
        "train": dict(global_batch_size=1, cuda_graph="off"),  # a recording waits for the device
    }
    cfg = config(LLAMA, small, change)
    now, late = (Run(saving(cfg, tmp_path / name, keep=0)) for name in ("now", "late"))
    for run in now, late:
        for _ in range(2):
            run.step()
    now.save()
    now.saves.wait()
    wait_on(late.saves.stream)
    late.save()
    expected = [late.step() for _ in range(2)]
    assert not late.trainer.optimizer.copied.result.query(), "the host waited for the copy"
    late.saves.wait()
    torch.cuda.synchronize()
    late_seconds, seconds = ([end.seconds_since(begin) for begin, end in run.saves.stalls()] for run in (late, now))
    assert sum(late_seconds) > 0.5 * WAIT_CYCLES / 2e9  # an update waited so long
    assert all(x < 0.2 for x in seconds)
    assert_same(contents(tmp_path / "late"), contents(tmp_path / "now"))
    resumed = Run(saving(cfg, tmp_path / "late"))
    assert resumed.done == 2
    for stats in expected:  # the backward's atomic additions come in any order
        assert resumed.step().read()["loss"] == pytest.approx(stats.read()["loss"], rel=1e-4)
    for run in now, late, resumed:
        run.close()


def timed(work) -> float:
    """Milliseconds of the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_a_save_costs_little_time_and_no_memory(tmp_path):
    """Steps with a save between them take hardly longer than without one, and less than if they waited for its copy.

    The host is a step ahead of the GPU when it begins the save, as it is in a run.
    """
    run = Run(saving(config(LLAMA, LARGE, {"train": {"cuda_graph": "on"}}), tmp_path))  # no host sets the pace

    def steps(save=lambda: None) -> float:
        def work():
            run.step()
            save()
            run.step()
            run.step()

        run.saves.wait()
        return timed(work)

    def save_and_wait():
        run.save()
        run.trainer.optimizer.copied.wait()

    steps(run.save)
    torch.cuda.reset_peak_memory_stats()
    steps()
    peak, times = torch.cuda.max_memory_allocated(), []
    for _ in range(5):  # in turn: clocks change
        times.append([steps(), steps(run.save), steps(save_and_wait)])
    plain, beside, after = map(statistics.median, zip(*times))
    print(f"three steps {plain:.1f} ms, with a save {beside:.1f} ms, waiting for its copy {after:.1f} ms")
    assert torch.cuda.max_memory_allocated() <= peak
    assert all(host.is_pinned() for parts in run.saves.host.values() for host in parts)
    assert beside - plain < (after - plain) / 2, "the copy does not run beside the steps"
    run.close()


def peak_of_a_start(cfg: Config) -> int:
    """Bytes, until the first step is done."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = Run(cfg)
    run.step().read()
    peak = torch.cuda.max_memory_allocated() - before
    run.save()
    run.close()
    return peak


def test_resuming_takes_no_more_memory_than_a_fresh_start(tmp_path: Path):
    cfg = saving(config(LLAMA, LARGE), tmp_path)
    assert find_resume_point(cfg, open_weights).reader is None
    fresh = peak_of_a_start(cfg)
    assert find_resume_point(cfg, open_weights).resume
    assert peak_of_a_start(cfg) <= fresh
