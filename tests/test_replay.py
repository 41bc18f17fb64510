"""A step that is replayed trains as a step that is run: nothing that changes from step to step is baked into it."""

from __future__ import annotations

import gc
import re
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from attention_twin import PACKS, PLAIN_PACKS
from layouts import GPT3, LLAMA, config, dataset_of, lowered, mesh_of
from minitron.comm.activity import Progress
from minitron.comm.mesh import Mesh
from minitron.config.batch import final, trained_after
from minitron.config.sizes import NODES_PER_LAYER
from minitron.data.loader import Loader
from minitron.kernels import attention
from minitron.kernels.fp8_counts import CastCounts
from minitron.pipeline import executor
from minitron.pipeline import replay as graph
from minitron.pipeline.schedule import Backward, Exchange, forward_only, make
from minitron.train import build
from replay import CpuRecorder, Recorded, replayed
from test_invariance import axes
from test_lora import ALL, lora

STEPS = {"train": {"steps": 5, "global_batch_size": 4}}
DROPOUT = {"model": {"hidden_dropout": 0.2}}
APART = {"data": {"separate_documents": True}}
FP16 = {"precision": {"dtype": "fp16", "loss_scale": 2.0**16, "loss_scale_window": 2, "loss_scale_hysteresis": 1}}


def fp8(how: str, **keys) -> dict:
    return {
        "precision": {"dtype": "bf16", "fp8": how, "fp8_backend": "torch", **keys},
        "model": {"hidden_size": 128, "ffn_hidden_size": 128, "num_kv_heads": 8, "max_positions": 128},
        "train": {"seq_len": 128},  # blocks have 128 values
    }


def watched(every: int, recipe: str = "none", **keys) -> dict:
    """The numbers of every so many steps are logged. The third step, number 2, is recorded."""
    precision = {"precision": fp8(recipe, **keys)["precision"]} if recipe != "none" else {}
    return precision | {"log": {"numerics_every": every, "dir": "unused"}}


def run(cfg, again: bool, most_nodes: int = graph.MOST_NODES):
    """Each step's figures, and the weights at the end; with many buckets, and FP8's magnitudes of two steps alone."""
    torch.set_num_threads(1)
    with (
        mock.patch.multiple(graph, WARM_UP=2, MOST_NODES=most_nodes),
        mock.patch.multiple(attention, FLASH_CPU=PACKS, REFERENCE=PLAIN_PACKS),  # documents, as a GPU's kernel has them
    ):
        return lowered(run_steps, cfg, again)


def run_steps(cfg, again: bool):
    trainer, figures = build(cfg, mesh_of(cfg), log=(log := Lines())), []
    if again:
        trainer = replayed(trainer)
    loader, others = (Loader(dataset_of(cfg), keys, trainer.mesh) for keys in (cfg, final(cfg)))
    for step in range(cfg.train.steps):
        batches = loader.step(trained_after(cfg.train, step), step)
        if step >= 2:  # before the one that is recorded and between replays, where it is recorded, too
            figures.append(trainer.evaluate(others.step(step * cfg.train.global_batch_size, step)).tolist())
        trainer.mesh.activity.begin_step(step)
        stats = trainer.step(batches, cfg.optimizer.lr * (1 + step))
        figures.append(stats.read() | {"loss_scale": float(trainer.scaler.scale)})
    loader.close(), others.close()
    if trainer.numerics is not None:
        trainer.numerics.close()
    figures += log.records
    assert not again or trainer.runner.training and trainer.runner.evaluation
    assert not again or bool(trainer.runner.counting) == bool(trainer.kernels.counts.layers)
    assert not again or launched(trainer.runner.training, batches) == trainer.runner.training.nodes
    trainer.gradients.wait_parameters()
    params = [(p.spec.name, p.detach().clone()) for chunk in trainer.chunks for p in chunk.parameters()]
    weights = {name: p if p.itemsize > 1 else p.view(torch.uint8) for name, p in params}  # ranks send no float8
    return figures, weights, len(trainer.runner.training.graphs) if again else 0


def launched(recording: graph.Recording, batches) -> int:
    """Count the kernels of a replay, without running them."""
    counted = []
    with mock.patch.object(Recorded, "replay", lambda of: counted.append(of.nodes)):
        recording.replay(batches)
    return sum(counted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, base, change, layout",
    [
        (1, LLAMA, {}, ""),
        (1, GPT3, DROPOUT, ""),
        (1, GPT3, {"model": {"attention_dropout": 0.2}}, ""),
        (1, LLAMA, FP16, ""),
        (1, LLAMA, lora(*ALL, dropout=0.1), ""),
        (1, LLAMA, fp8("delayed"), ""),
        (1, LLAMA, fp8("current"), ""),
        (1, LLAMA, fp8("block"), ""),
        (1, LLAMA, {"train": {"recompute": "selective"}}, ""),
        (1, GPT3, DROPOUT | {"train": {"recompute": "full"}}, ""),
        (2, LLAMA, {}, ""),
        (2, LLAMA, {}, "overlap_grads=off"),
        (2, GPT3, DROPOUT, "tp=2"),
        (2, LLAMA, {}, "tp=2 sequence_parallel=off"),
        (2, LLAMA, fp8("delayed"), "tp=2"),
        (1, LLAMA, fp8("delayed", fp8_params=True), ""),
        (2, LLAMA, fp8("current", fp8_params=True), ""),
        (2, LLAMA, fp8("delayed", fp8_params=True), "tp=2"),
        (2, LLAMA, fp8("delayed", fp8_head=True), "tp=2"),
        (2, LLAMA, fp8("delayed", fp8_params=True), "pp=2 vp=2"),
        (2, LLAMA, {}, "cp=2"),
        (2, LLAMA, {}, "cp=2 cp_style=allgather"),
        (2, LLAMA, {}, "cp=2 cp_style=ulysses"),
        (2, GPT3, DROPOUT, "pp=2"),
        (2, LLAMA, FP16, "pp=2 vp=2"),
        (2, LLAMA, {"model": {"num_layers": 6}, "parallel": {"layers_per_stage": (1, 2, 2, 1)}}, "pp=2 vp=2"),
        (4, LLAMA, {}, "tp=2 pp=2"),
        (4, GPT3, {}, "tp=2 pp=2 schedule=zb-h1"),
        (4, GPT3, {}, "pp=2 vp=2"),
        (1, LLAMA, watched(1, "current"), ""),
        (1, LLAMA, watched(2, "delayed", fp8_head=True), ""),
        (2, LLAMA, watched(2, "delayed", fp8_params=True), "pp=2 vp=2"),
        (2, LLAMA, watched(3, "delayed", fp8_head=True), "tp=2"),
        (1, GPT3, {"model": {"head_piece": 12}}, ""),
        (1, LLAMA, FP16 | {"model": {"head_piece": 12}}, ""),
        (2, LLAMA, {"model": {"head_piece": 12}}, "tp=2"),
        (4, LLAMA, {"model": {"head_piece": 12}}, "tp=2 pp=2 schedule=zb-h1"),
    ],
)
def test_a_replayed_step_is_a_step(ranks, world, base, change, layout):
    steps_are_the_same(ranks, world, base, change, layout)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world, base, change, layout",
    [
        (1, GPT3, {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}, ""),
        (1, LLAMA, {"train": {"recompute": "full", "micro_batch_size": 2}}, ""),
        (2, LLAMA, {}, ""),
        (2, LLAMA, {}, "tp=2"),
        (2, GPT3, {}, "pp=2 vp=2"),
        (2, LLAMA, {}, "cp=2 cp_style=ulysses"),
    ],
)
def test_a_replayed_step_keeps_its_own_documents_apart(ranks, world, base, change, layout):
    steps_are_the_same(ranks, world, base, change | APART, layout)


def steps_are_the_same(ranks, world, base, change, layout):
    steps = {section: values | change.get(section, {}) for section, values in STEPS.items()}
    layers = {"model": {"num_layers": 4 if "vp" in layout else 2}}
    same(ranks, world, config(base, layers, change, axes(layout), steps), graph.MOST_NODES)


@pytest.mark.sampled(2, "1-7--1-3")
@pytest.mark.parametrize(
    "world, batch, layout, most_nodes, graphs",
    [
        (1, 1, "", 1, 1),
        (1, 2, "", 1, 2),
        (1, 3, "", 1, 3),
        (1, 7, "", 1, 3),  # the second one runs for five microbatches
        (2, 4, "tp=2", 1, 3),
        (2, 4, "pp=2 vp=2", 1e9, 1),
        (2, 4, "pp=2 schedule=zb-h1", 900, 3),  # the first ends between the halves of a backward
        (2, 4, "pp=2 vp=2", 800, 3),  # 4 * 150 * 4 kernels in some 30 actions: 10 of these in a graph
    ],
)
def test_a_step_in_several_graphs_is_a_step(ranks, world, batch, layout, most_nodes, graphs):
    batches = {"train": {"micro_batch_size": 1, "global_batch_size": batch, "steps": 5}}
    layers = {"model": {"num_layers": 4 if "pp" in layout else 2}}
    cfg = config(GPT3, DROPOUT, layers, axes(layout), batches)
    assert same(ranks, world, cfg, most_nodes) == [graphs] * world


@pytest.mark.parametrize(
    "world, change, layout",
    [(1, DROPOUT, ""), (2, DROPOUT, "pp=2 vp=2"), (1, fp8("delayed") | watched(2, "delayed"), "")],
    ids=["", "stages", "counted"],
)
def test_steps_of_another_size_are_recorded_anew(ranks, world, change, layout):
    """Steps 1 to 4 have 2 samples, 5 to 8 have 3, or 4: of each two are eager, and two replayed."""
    size = 4 if world > 1 else 3
    sizes = {"global_batch_size": size, "batch_schedule": ((0, 2), (8, size)), "steps": 8}
    cfg = config(GPT3, change, {"model": {"num_layers": 4 if layout else 2}, "train": sizes}, axes(layout))
    assert same(ranks, world, cfg, graph.MOST_NODES) == [1 if world > 1 else 3] * world


def same(ranks, world, cfg, most_nodes) -> list[int]:
    """Assert that eager and replayed steps are the same; return how many graphs each rank has recorded."""
    rerun = ranks(world, run, cfg, True, most_nodes)
    for eager, again in zip(ranks(world, run, cfg, False), rerun, strict=True):
        assert again[0] == eager[0]
        assert eager[1].keys() == again[1].keys()
        assert all(torch.equal(again[1][name], weight) for name, weight in eager[1].items())
        losses = [figures["loss"] for figures in eager[0] if "loss" in figures]
        assert len(set(losses)) == len(losses), "every step has a batch of its own"
    return [graphs for *_, graphs in rerun]


@pytest.mark.parametrize(
    "layout, packs, says",
    [
        ("", True, None),
        ("", False, "this attention takes one document after another, by boundaries on the host"),
        ("cp=2 cp_style=ulysses", True, None),
        ("cp=2 cp_style=ring", True, "parallel.cp_style=ring keeps boundaries of documents on the host; parallel.cp_s"),
        ("cp=2 cp_style=allgather", True, "parallel.cp_style=allgather keeps boundaries"),
    ],
)
def test_where_documents_are_known_to_the_host_alone_steps_stay_eager(layout, packs, says):
    cfg, cuda = config(LLAMA, axes(layout)), torch.device("cuda")
    reason = graph.why_eager(config(LLAMA, APART, axes(layout)), cuda, packs)
    assert reason is None if says is None else says in reason
    assert graph.why_eager(cfg, cuda, packs) is None
    chosen = graph.why_eager(config(LLAMA, APART, {"model": {"attention": "flash"}}), cuda, False)
    assert chosen.endswith("one document after another, by boundaries on the host; model.attention=auto does not")
    assert graph.why_eager(cfg, torch.device("cpu"), packs) == "there is no GPU"


class Broken(CpuRecorder):
    """Fails on the last rank, alone in the middle of a backward; on the others, as on a GPU, nothing runs."""

    def record(self, work):
        if self.trainer.mesh.rank + 1 < self.trainer.mesh.world.size:
            return SimpleNamespace(nodes=0)
        if self.trainer.mesh.world.size == 1:
            slot = next(p.slot for p in self.trainer.chunks[0].blocks["0"].parameters())
            with mock.patch.object(slot, "report", side_effect=RuntimeError("operation not permitted")):
                work()
        raise RuntimeError("operation not permitted")


class BrokenEvaluation(CpuRecorder):
    """Fails in the middle of an evaluation."""

    def record(self, work):
        forward = executor.Pass.forward

        def stops(run, op):
            if run.loss_grad is None:
                raise RuntimeError("operation not permitted")
            return forward(run, op)

        with mock.patch.object(executor.Pass, "forward", stops):
            return super().record(work)


class Lines:
    """Stands in for a Log."""

    def __init__(self):
        self.lines, self.records = [], []
        self.info = self.lines.append
        self.alarm = lambda text, traceback: self.lines.append(text)
        self.record = lambda kind, **values: self.records.append(values)


def run_and_tell(cfg, recorder_of):
    """Figures of each step, what the log says, and whether steps are replayed at the end."""
    torch.set_num_threads(1)
    with mock.patch.object(graph, "WARM_UP", 2):
        trainer, figures = build(cfg, mesh_of(cfg)), []
        log = Lines()
        trainer = replayed(trainer, partial(recorder_of, trainer), log)
        loader, batch = Loader(dataset_of(cfg), cfg, trainer.mesh), cfg.train.global_batch_size
        for step in range(cfg.train.steps):
            trainer.mesh.activity.begin_step(step)
            figures.append(trainer.step(loader.step(step * batch, step), cfg.optimizer.lr * (1 + step)).read())
        loader.close()
        return figures, log.lines, trainer.runner.replaying


@pytest.mark.parametrize("steps", [2, 3])
def test_the_first_steps_are_eager_and_the_log_says_what_is_recorded(ranks, steps):
    cfg = config(LLAMA, {"model": {"num_layers": 2}, "train": {"steps": steps, "global_batch_size": 4}}, axes(""))
    for figures, lines, replaying in ranks(2, run_and_tell, cfg, CpuRecorder):
        assert replaying == (steps > 2) and len(figures) == steps
        kinds = [
            re.match(r"train.cuda_graph: recorded [\d,]+ kernels and copies of (a step|an evaluation)", x)[1]
            for x in lines
        ]
        assert kinds == ["a step", "an evaluation"] * replaying


@pytest.mark.parametrize("world, layout", [(1, ""), (2, ""), (2, "tp=2"), (2, "pp=2")])
def test_a_rank_that_cannot_record_leaves_all_ranks_eager(ranks, world, layout):
    cfg = config(LLAMA, {"model": {"num_layers": 2}, "train": {"steps": 5, "global_batch_size": 4}}, axes(layout))
    eager = ranks(world, run, cfg, False)
    told = ranks(world, run_and_tell, cfg, Broken)
    for (expected, *_), (figures, _, replaying) in zip(eager, told, strict=True):
        assert not replaying and [step["loss"] for step in figures] == [
            step["loss"] for step in expected if isinstance(step, dict)
        ]
    warning = "train.cuda_graph: steps stay eager on all ranks: "
    assert told[-1][1] == [f"warning: {warning}RuntimeError: operation not permitted"]
    assert world == 1 or told[0][1][-1] == f"{warning}another rank could not record them"


def test_an_evaluation_that_cannot_be_recorded_leaves_training_as_it_was(ranks):
    """Replayed steps still drop the same elements."""
    train = {"steps": 6, "global_batch_size": 4}
    cfg = config(GPT3, DROPOUT, {"model": {"num_layers": 2}, "train": train}, axes(""))
    ((expected, *_),) = ranks(1, run, cfg, False)
    ((figures, lines, replaying),) = ranks(1, run_and_tell, cfg, BrokenEvaluation)
    assert replaying and lines[1].startswith("warning: train.cuda_graph: evaluations stay eager on all ranks: Runt")
    assert [step["loss"] for step in figures] == [step["loss"] for step in expected if isinstance(step, dict)]


class BrokenCounts(CpuRecorder):
    """Fails in a step that counts casts."""

    def record(self, work):
        if self.trainer.kernels.counts.on:
            raise RuntimeError("operation not permitted")
        return super().record(work)


def test_steps_that_count_casts_and_cannot_be_recorded_stay_eager(ranks):
    """Between others that are replayed, which have as many kernels as without them."""
    train = {"steps": 6, "global_batch_size": 4}
    never, often = (
        config(LLAMA, watched(every, "delayed"), {"model": {"num_layers": 2}, "train": train}) for every in (0, 2)
    )
    ((expected, lines, _),) = ranks(1, run_and_tell, never, CpuRecorder)
    ((same, *_),) = ranks(1, run_and_tell, often, CpuRecorder)
    ((figures, more, replaying),) = ranks(1, run_and_tell, often, BrokenCounts)
    assert replaying and figures == same == expected
    assert more[2].startswith("warning: train.cuda_graph: steps that count casts stay eager on all ranks: RuntimeError")
    assert [re.sub("in [^,]*s;", "", line) for line in more[:2]] == [re.sub("in [^,]*s;", "", line) for line in lines]


@pytest.mark.parametrize("due", [False, True])
def test_what_is_recorded_and_what_is_counted_meanwhile(monkeypatch, due):
    """Eager passes come first, to compile the kernels of each recording. Then casts are counted as before."""
    counts, done, m, mesh, log = CastCounts(["a layer"]), [], 4, Mesh.offline(1), Lines()
    mesh.activity.progress = Progress(*torch.zeros(2, 2, dtype=torch.int64))  # as on a GPU
    eager = SimpleNamespace(counts=counts, reset=lambda: done.append("reset"), finish=None)
    eager.evaluate = lambda batches: done.append(("eager evaluation", counts.on))
    eager.forward_backward = lambda batches: done.append(("eager step", counts.on))
    actions = lambda m, training: (make if training else forward_only)(2, 1, m).ranks[0]
    eager.executor = SimpleNamespace(pp=SimpleNamespace(size=2), actions=actions)

    def record(recorder, planned, batches, start, end):
        mesh.activity.ended()  # of an action that does not run yet
        done.append((len(planned), len(batches), counts.on))
        return SimpleNamespace(nodes=0, seconds=0.0)

    monkeypatch.setattr(graph, "Recording", record)
    monkeypatch.setattr(graph, "MOST_NODES", m * NODES_PER_LAYER)  # half of a step of two layers
    used = iter(2**30 * n for n in (9, 2, 3, 9, 3, 5, 9, 5, 9))  # before each reset, behind it and behind the recording
    recorder = SimpleNamespace(used=lambda: next(used))
    runner = graph.Replay(eager, mesh, 2, evaluates=3, log=log, recorder=lambda: recorder)
    counts.count(due)
    runner._record_all(["batch"] * m)
    (graphs, *counting) = done.pop()
    assert graphs > 2 and counting == [m, True] and counts.on == due
    recorded = ["reset", (2, m, False), "reset", (2, 3, False), "reset"]
    assert done == [("eager evaluation", due), ("eager step", True), *recorded]
    assert not mesh.activity.progress.queued[-1][1]
    assert [re.search(r"([-\d.]+) GiB more", line)[1] for line in log.lines] == ["1.00", "2.00", "4.00"]


def test_replays_are_noted_and_a_recording_that_fails_is_forgotten():
    mesh, log, resets = Mesh.offline(), Lines(), []
    activity = mesh.activity
    activity.progress = Progress(*torch.zeros(2, 2, dtype=torch.int64))  # as on a GPU
    eager = SimpleNamespace(counts=CastCounts([]), reset=lambda: resets.append(activity.action))
    runner = graph.Replay(eager, mesh, 2, evaluates=0, log=log)
    replayed = lambda batches: (batches, activity.action)
    runner.training = runner.evaluation = SimpleNamespace(actions=["forward", "backward"], replay=replayed)
    runner._microbatches, runner._calls = 1, 1
    assert runner.forward_backward(["batch"]) == ((["batch"], "replay"), False) and activity.action == "update"
    assert runner.evaluate(["others"]) == (["others"], "replay")
    assert activity.progress.queued[-1][1] == ["forward", "backward"] * 2 and not resets
    assert runner._on_all("steps", mock.Mock(side_effect=RuntimeError("not permitted"))) is None
    assert len(resets) == len(log.lines) == 1 and "RuntimeError: not permitted" in log.lines[0]
    assert runner._on_all("steps", lambda: "a recording") == "a recording" and len(resets) == 1


@pytest.mark.parametrize("pp, m", [(1, 1), (1, 2), (1, 5), (2, 4)])
def test_a_recording_is_one_pass_whose_graphs_take_their_own_batches(monkeypatch, pp, m):
    """Each graph ends with all its messages, the last one also with the pass. Replays compute the batches in order."""
    happened, batches = [], [torch.tensor([mb]) for mb in range(m)]

    def batch(packed):
        return SimpleNamespace(packed=packed, static_copy=lambda: batch(packed.clone()))

    class OnePass:
        executor = SimpleNamespace(pp=SimpleNamespace(activity=SimpleNamespace(begin=lambda what: None)))
        run_actions = lambda self, actions: happened.append(actions)
        join = lambda self: happened.append("join")
        finish = lambda self: happened.append("finish") or "the loss"

    def start(static):
        happened.append("start")
        return OnePass()

    class Recorder:
        def record(self, work):
            work(), happened.append("recorded")
            shown = lambda: happened.append([int(x.packed) for x in made.static.values()])
            return SimpleNamespace(nodes=10, replay=shown)

    monkeypatch.setattr(graph, "MOST_NODES", 10)
    planned = graph.segments(make(pp, 1, m).ranks[0], pp, m, 1)
    made = graph.Recording(Recorder(), planned, list(map(batch, batches)), start, lambda: happened.append("end"))
    ends = [["recorded"]] * (len(planned) - 1) + [["finish", "end", "recorded"]]
    assert happened == ["start"] + [x for cut, end in zip(planned, ends) for x in (cut.actions, "join", *end)]
    happened.clear()
    assert made.replay([batch(x + 10) for x in batches]) == "the loss"
    replays, static = [], {mb: mb for mb in made.static}
    for segment in planned:
        for microbatches in segment.launches:
            static |= {mb if mb in static else 1: mb + 10 for mb in microbatches}
            replays.append([*static.values()])
    assert happened == replays and made.nodes == 10 * len(replays)


class FakeCuda:
    """Stands in for torch.cuda where graphs are recorded."""

    def __init__(self):
        self.stream, self.pools = "main", []
        self.graph_pool_handle = object
        self.synchronize = self.empty_cache = lambda: None
        self.mem_get_info = lambda: (30, 100)
        self.current_stream = lambda: self.stream
        self.set_stream = lambda stream: setattr(self, "stream", stream)

    def CUDAGraph(self, keep_graph):
        return SimpleNamespace(instantiate=lambda: None, replay="replay", raw_cuda_graph=lambda: 0)

    @contextmanager
    def graph(self, graph, pool, capture_error_mode):
        assert capture_error_mode == "thread_local" and not gc.isenabled()
        self.pools.append(pool)
        self.stream = "recorded"
        yield
        self.stream = "main"


@pytest.mark.parametrize("collects", [True, False])
def test_all_graphs_share_memory_and_one_that_fails_leaves_the_stream_as_it_was(monkeypatch, collects):
    monkeypatch.setattr(torch, "cuda", cuda := FakeCuda())
    recorder, was = graph.CudaRecorder(), gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert recorder.used() == 70
        assert recorder.record(lambda: None).replay == "replay" and gc.isenabled() == collects
        with pytest.raises(RuntimeError, match="not permitted"):
            recorder.record(mock.Mock(side_effect=RuntimeError("not permitted")))
        assert cuda.stream == "main" and cuda.pools == [recorder.pool] * 2 and gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("make", [forward_only, make], ids=["evaluation", "step"])
def test_graphs_compute_a_pass_once_in_its_order(make):
    for pp, m, most in (*((1, m, 1) for m in range(1, 7)), (2, 4, 1e9), (2, 4, 300), (4, 8, 100)):
        with mock.patch.object(graph, "MOST_NODES", most):
            for actions in make(pp, 2 if pp > 1 else 1, m).ranks:
                cut = graph.segments(actions, pp, m, 50)
                done = [action for segment in cut for _ in segment.launches for action in segment.actions]
                assert len(done) == len(actions) and (pp == 1 or done == list(actions))
                computed = [action for action in actions if not isinstance(action, Exchange)]
                assert list(graph._launched(cut)) == computed
                begun = (i for i, action in enumerate(actions) if isinstance(action, Backward) and action.last)
                assert pp == 1 or len(actions) - len(cut[-1].actions) <= next(begun, len(actions)), (
                    "sums are cut in two"
                )
