"""The dry run against real runs: the same collectives, the same schedule, the same errors, the same memory."""

import dataclasses
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import GPT3, LLAMA, QWEN, config, mesh_of
from minitron.comm.mesh import Mesh
from minitron.config import cli
from minitron.config.schema import FinetuneConfig
from minitron.kernels import kernels, plain
from minitron.pipeline.schedule import Exchange, Forward, Operation, make
from minitron.planner.dryrun import dryrun, repeats
from minitron.planner.dryrun.dryrun import (
    Recorder,
    choose_ranks,
    dry_run,
    fake_world,
    make_mesh,
    prepare,
    recorded,
    run_step,
)
from minitron.planner.dryrun.memory_walk import MemoryWalk
from minitron.planner.memory import Memory
from minitron.planner.simulate import simulate

ROOT = Path(__file__).parents[2]


def settings(base, **sections):
    """Half the layers and the batch of `base`, unless `sections` say otherwise."""
    return config(base, {"model": {"num_layers": 4}, "train": {"global_batch_size": 4}}, sections)


def fp8(kind, **precision):
    return settings(
        LLAMA,
        parallel=dict(tp=2),
        precision=dict(dtype="bf16", fp8=kind, **precision),
        model=dict(hidden_size=64, ffn_hidden_size=96, num_heads=4, num_kv_heads=4),
    )


# ---- collectives ----------------------------------------------------------------------------------------------------


def real_trace(cfg):
    """What one gloo rank communicates in building and in one step, on a CPU."""
    torch.set_num_threads(1)
    recorder, mesh, calls = Recorder(), mesh_of(cfg), Calls()
    with calls:
        trainer = prepare(cfg, recorded(mesh, recorder))
        trainer.gradients.copies_compared = True  # a check of the first real step alone
        run_step(trainer)
    assert calls.count == len(recorder.records)  # nothing goes past the recorder
    return recorder.records


class Calls(TorchDispatchMode):
    """Counts what reaches torch's process groups."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.namespace == "c10d"
        return op(*args, **(kwargs or {}))


READ = dict(dir="unused", numerics_every=1)  # beside train.rerun, what the host reads of a step
LAYOUTS = [
    (2, settings(LLAMA, parallel=dict(tp=2))),
    (2, settings(GPT3, parallel=dict(tp=2, sequence_parallel=False, overlap_tp=False))),
    (2, settings(LLAMA, parallel=dict(overlap_grads=False), precision=dict(dtype="fp16"))),
    (2, fp8("delayed", fp8_backend="torch")),
    (2, fp8("current", fp8_backend="torch")),
    (4, settings(LLAMA, parallel=dict(cp=2, cp_style="ring"), data=dict(separate_documents=True))),
    (4, settings(LLAMA, parallel=dict(cp=2, cp_style="allgather", tp=2, overlap_tp=False))),
    (4, settings(GPT3, parallel=dict(pp=2, vp=2, cp=2, cp_style="ulysses"), train=dict(recompute="full"))),
    (
        4,
        settings(
            GPT3,
            parallel=dict(pp=4, vp=2),
            model=dict(num_layers=8),
            train=dict(global_batch_size=6, rerun="on"),
            log=READ,
        ),
    ),
    (8, settings(GPT3, parallel=dict(tp=2, pp=2, vp=2), train=dict(recompute="selective"))),
    (4, settings(GPT3, parallel=dict(tp=2, pp=2, schedule="zb-h1"))),
    (2, settings(QWEN, parallel=dict(tp=2, sequence_parallel=False))),
]


LAYOUTS.append((2, dataclasses.replace(LAYOUTS[0][1], finetune=FinetuneConfig(kind="lora", base="anywhere"))))


def name_of(value):
    return (
        value
        if isinstance(value, int)
        else "-".join(f"{key}={v}" for key, v in dataclasses.asdict(value.parallel).items() if v not in (1, None))
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world,cfg", LAYOUTS, ids=name_of)
def test_collectives_are_those_of_a_real_run(ranks, world, cfg):
    for rank, real in enumerate(ranks(world, real_trace, cfg)):
        assert dry_run(cfg, world, rank).collectives == real
        assert real


def test_fp8_of_transformer_engine_communicates_as_its_twin_does():
    for kind in ("delayed", "current"):
        assert dry_run(fp8(kind), 2, 1).collectives == dry_run(fp8(kind, fp8_backend="torch"), 2, 1).collectives


def test_ranks_agree_on_what_they_do_together():
    """Of all ranks' dry runs: every message sent is one received, in order, and groups run the same collectives."""
    cfg = settings(GPT3, parallel=dict(tp=2, pp=2, vp=2))
    posted = [dry_run(cfg, 8, rank).collectives for rank in range(8)]

    def messages(rank, kind, peer):
        return [(r.axis, r.num_bytes, r.dtype) for r in posted[rank] if (r.kind, r.ranks) == (kind, (peer,))]

    def together(rank, group):
        return [(r.kind, r.axis, r.num_bytes, r.dtype) for r in posted[rank] if r.ranks == group]

    for rank, records in enumerate(posted):
        for record in records:
            if record.kind == "send":
                (peer,) = record.ranks
                assert messages(rank, "send", peer) == messages(peer, "recv", rank)
            elif record.kind != "recv":
                assert together(rank, record.ranks) == together(record.ranks[0], record.ranks)


# ---- schedule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pp,vp,num_microbatches,kind",
    [(pp, vp, m, "1f1b") for pp, vp, m in ((1, 1, 3), (2, 1, 4), (2, 2, 3), (4, 2, 6), (4, 2, 2))]
    + [(4, 1, 6, "zb-h1")],
)
def test_the_schedule_run_is_the_schedule_simulated(pp, vp, num_microbatches, kind):
    cfg = settings(
        LLAMA,
        model=dict(num_layers=8),
        parallel=dict(pp=pp, vp=vp, schedule=kind),
        train=dict(global_batch_size=num_microbatches),
    )
    simulated = simulate(make(pp, vp, num_microbatches, kind), 1.0, 2.0, 0.1)
    for rank in range(pp):
        actions = [action for action, _ in dry_run(cfg, pp, rank).timeline]
        run = [action for action in actions if isinstance(action, Operation | Exchange)]
        assert tuple(run) == simulated.schedule.ranks[rank]
        assert [action for action in run if type(action) is not Exchange] == [
            event.action for event in simulated.events if event.rank == rank
        ]


# ---- microbatches that repeat ----------------------------------------------------------------------------------------


REPEATING = [
    (1, settings(LLAMA, train=dict(global_batch_size=11))),
    (2, settings(GPT3, parallel=dict(pp=2), train=dict(global_batch_size=13, recompute="full"))),
    (4, settings(LLAMA, parallel=dict(pp=2, tp=2), train=dict(global_batch_size=14, recompute="selective"))),
    (2, settings(GPT3, parallel=dict(pp=2, vp=2), train=dict(global_batch_size=12))),
    (3, settings(LLAMA, parallel=dict(pp=3, schedule="zb-h1"), train=dict(global_batch_size=15))),
    (4, settings(LLAMA, parallel=dict(pp=2, overlap_grads=False), train=dict(global_batch_size=28))),
]
REPEATING.append(
    (4, dataclasses.replace(fp8("delayed"), train=dataclasses.replace(LAYOUTS[0][1].train, global_batch_size=24)))
)


@pytest.mark.parametrize("world,cfg", REPEATING, ids=name_of)
def test_what_is_walked_once_is_what_all_microbatches_do(monkeypatch, world, cfg):
    """Every action's bytes, every collective in order, the peak: as if each microbatch had been walked."""
    count, stage = cfg.num_microbatches(cfg.dp(world)), world // cfg.parallel.pp
    for rank in range(0, world, stage):
        begun = []
        few = dry_run(cfg, world, rank, begun.append)
        with monkeypatch.context() as patch:
            patch.setattr(repeats, "microbatches_to_walk", lambda pp, vp, num_microbatches: num_microbatches)
            every = dry_run(cfg, world, rank)
        assert repeats.microbatches_to_walk(cfg.parallel.pp, cfg.parallel.vp, count) < count
        assert len(begun) < len(every.timeline) == len(few.timeline)
        ignored = dict(seconds=0.0, timeline=[])  # before the step fewer batches are read
        assert dataclasses.replace(few, **ignored) == dataclasses.replace(every, **ignored)
        steps = [[entry for entry in r.timeline if not isinstance(entry[0], str)] for r in (few, every)]
        assert steps[0] == steps[1] and few.timeline[-1] == every.timeline[-1]


def test_what_does_not_repeat_is_walked_in_full(monkeypatch):
    """Groups of different lengths; and a microbatch that leaves something behind, which no order of actions shows."""
    assert repeats.microbatches_to_walk(2, 2, 13) == 13
    cfg = settings(GPT3, parallel=dict(pp=2), train=dict(global_batch_size=13))
    begun, left = [], []

    def leave(action):
        begun.append(action)
        left.append(torch.empty(1000, device="meta"))

    report = dry_run(cfg, 2, 1, leave)
    sizes = [size for action, size in report.timeline if type(action) is Forward]
    assert len(begun) > len(report.timeline) and len(sizes) == 13 and sizes[-1] > sizes[-2] > sizes[-3]


def test_a_thousand_microbatches_cost_as_much_as_a_few():
    cfg, begun = cli.load([str(ROOT / "configs/gpt3_13b.yaml")]), []

    def begin(action):
        begun.append(action)
        assert len(begun) < 1000

    report = dry_run(cfg, 8, 4, begin)
    assert sum(type(action) is Forward for action, _ in report.timeline) == 1024
    assert sum(type(action) is Forward for action in begun) == 2 * cfg.parallel.pp + 6


# ---- errors ---------------------------------------------------------------------------------------------------------


def failure(cfg, plant_heads=0):
    """How a step fails whose configuration nobody has checked: on a gloo rank or in a dry run."""
    mesh = mesh_of(cfg) if torch.distributed.get_backend() == "gloo" else make_mesh(cfg, 3)
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
        trainer = prepare(cfg, mesh)
        for block in trainer.chunks[0].blocks.values():
            block.attention.heads += plant_heads
        run_step(trainer)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    "cfg,plant,part",
    [
        (settings(LLAMA, parallel=dict(tp=3)), 0, "rows or columns over 3 ranks"),
        (
            settings(
                LLAMA, parallel=dict(tp=3), model=dict(num_heads=6, num_kv_heads=6, hidden_size=48, vocab_size=96)
            ),
            0,
            "is not divisible by the 3 ranks of axis 'tp'",
        ),
        (settings(LLAMA, parallel=dict(cp=3), train=dict(seq_len=31)), 0, "31 positions in 6 equal pieces"),
        (settings(LLAMA, parallel=dict(pp=3, vp=3)), 0, "leaves stages empty"),
        (settings(LLAMA), 1, "split_with_sizes expects split_sizes to sum exactly to"),
    ],
    ids=["heads", "sequence", "chunks", "stages", "bug"],
)
def test_a_layout_error_appears_as_in_the_real_run(ranks, cfg, plant, part):
    with fake_world(3, 1):
        dry = failure(cfg, plant)
    assert part in dry[1] and ranks(3, failure, cfg, plant)[1] == dry


def test_a_configuration_is_checked_first():
    with pytest.raises(ValueError, match="parallel.tp=3 does not divide model.num_kv_heads=4; use 1, 2 or 4"):
        dry_run(settings(LLAMA, parallel=dict(tp=3)), 3)


def test_the_step_is_one_in_which_numerics_are_read():
    never, third = (
        dry_run(settings(LLAMA, model=dict(num_layers=1), log=dict(dir="unused", numerics_every=number)), 2).collectives
        for number in (0, 3)
    )
    assert len(third) > len(never)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base,changes",
    [
        (LLAMA, {}),
        (QWEN, {}),
        (GPT3, dict(train=dict(recompute="selective"))),
        (LLAMA, dict(train=dict(recompute="full"))),
    ],
)
def test_memory_is_that_of_a_run_on_a_real_device(monkeypatch, base, changes):
    """The same kernels on a CPU and on meta: every action reaches the same number of bytes."""
    monkeypatch.setattr(dryrun.kernels, "choose", lambda cfg: kernels.choose(cfg, "meta"))
    cfg = config(base, dict(model=dict(attention="reference")), changes)
    real, dry = dryrun.walk_step(cfg, Mesh.offline()), dryrun.walk_step(cfg, make_mesh(cfg, 1))
    assert [action for action, _ in real.timeline] == [action for action, _ in dry.timeline]
    # of a microbatch, whose tensors a CPU takes from the host as they are: six of at most 8 bytes a token, rounded
    batch = 6 * 512 * cfg.num_microbatches(1)
    for (_, on_cpu), (_, on_meta) in zip(real.timeline, dry.timeline, strict=True):
        assert 0 <= on_meta - on_cpu <= batch
    for part in ("parameters", "gradients", "optimizer"):
        assert real.memory[part] == dry.memory[part] > 0
    assert real.peak_action == dry.peak_action


@pytest.mark.parametrize("family,dp", [("llama", 1), ("gpt", 1), ("llama", 4)])
def test_memory_counted_by_hand(family, dp):
    """What a layer adds: 18 bytes a parameter, 12 of them shared by data ranks, and what its backward needs."""
    h, f, n, g, s, b, gated = 256, 1024, 4, 2 if family == "llama" else 4, 128, 2, family == "llama"
    model = dict(
        family=family,
        hidden_size=h,
        ffn_hidden_size=f,
        num_heads=n,
        num_kv_heads=g,
        vocab_size=4096,
        positions="rope" if gated else "learned",
        max_positions=s,
    )
    two, three = (
        dry_run(
            settings(
                LLAMA,
                model=model | dict(num_layers=layers),
                precision=dict(dtype="bf16"),
                train=dict(seq_len=s, micro_batch_size=b, global_batch_size=b * dp),
            ),
            dp,
        )
        for layers in (2, 3)
    )
    added = {part: three.memory[part] - two.memory[part] for part in three.memory}
    d = h // n
    weights = h * (n + 2 * g) * d + h * h + (3 if gated else 2) * h * f
    vectors = 2 * h if gated else 4 * h + (n + 2 * g) * d + h + f + h
    assert added["parameters"] == 2 * (weights + vectors)
    assert added["gradients"] == 2 * added["parameters"] and added["optimizer"] == 6 * added["parameters"] // dp
    # kept of each token: two sums, two norms, q k v, attention's output, the MLP inside; lse; the norms' statistics
    inner = 3 * f if gated else 2 * f
    kept = 2 * (2 * h + 2 * h + (n + 2 * g) * d + h + inner) + 4 * n + 4 * (2 if gated else 4)
    assert added["activations"] == kept * s * b and not added["other"] and not added["fp8 weights"]
    assert two.peak_action == three.peak_action == Forward(0, 0)


def test_frozen_weights_have_neither_gradients_nor_an_optimizer():
    cfg = settings(LLAMA, finetune=dict(kind="lora", base="anywhere"), lora=dict(rank=16, targets=("qkv",)))
    m, memory = cfg.model, dry_run(cfg, 1).memory
    adapters = m.num_layers * 16 * (m.hidden_size + m.head_width * (m.num_heads + 2 * m.kv_heads))
    whole = dry_run(settings(LLAMA), 1).memory
    assert memory["gradients"] == 4 * adapters
    assert memory["optimizer"] == 2 * memory["gradients"]  # in float32 the parameters are their own masters
    padding = 512 * 9 * m.num_layers + 512 * 3  # frozen weights are tensors of their own, in blocks of 512 bytes
    assert 0 <= memory["parameters"] - whole["parameters"] - 4 * adapters <= padding


def test_fp8_is_counted_as_transformer_engine_keeps_it():
    """Weights are cast twice, to 1 byte; of what a layer keeps, the GEMMs' inputs are casts."""
    h, f, n, s, b = 256, 1024, 4, 128, 2
    model = dict(hidden_size=h, ffn_hidden_size=f, num_heads=n, num_kv_heads=n, vocab_size=4096, max_positions=s)
    train = dict(seq_len=s, micro_batch_size=b, global_batch_size=b)
    two, three = (
        dry_run(
            settings(
                LLAMA, model=model | dict(num_layers=layers), train=train, precision=dict(dtype="bf16", fp8="delayed")
            ),
            1,
        )
        for layers in (2, 3)
    )
    scales = 4 * 512  # of the four casts: one number each takes 512 bytes
    assert three.memory["fp8 weights"] - two.memory["fp8 weights"] == 2 * (4 * h * h + 3 * h * f) + scales
    kept = 2 * (2 * h + 3 * h + h + 2 * f) + (2 * h + h + f) + 4 * n + 4 * 2
    assert three.memory["activations"] - two.memory["activations"] == kept * s * b + scales


def test_the_walk_sees_births_deaths_and_parts():
    walk = MemoryWalk()
    with walk:
        a = torch.empty(500, dtype=torch.uint8, device="meta")  # in whole blocks 512
        walk.label("first", [a])
        walk.begin("one")
        b = a.view(50, 10).t().contiguous()  # as much again
        b += 1  # in place
        walk.begin("two")
        del a  # its view's source goes with it
        c = torch.cat([b, b])  # 1000 bytes, in whole blocks 1024
        walk.begin("three")
        del b, c
    assert walk.timeline() == [("build", 512), ("one", 1024), ("two", 1536), ("three", 1536)]
    assert walk.peak() == ({"activations": 1536, "first": 0}, "two") and not walk.alive


def test_a_kernel_shows_its_results_and_runs_once_a_shape():
    calls = []

    def kernel(x, y, *, scale):
        calls.append(x.shape)
        return (x.float() * scale).sum(0).to(x.dtype), None, y.add_(1)

    seen, walk = dryrun.kernels.unobserved(kernel), MemoryWalk()
    with walk:
        x, y = torch.empty(8, 512, device="meta", dtype=torch.bfloat16), torch.empty(3, device="meta")
        for _ in range(2):
            z, none, same = seen(x, y, scale=2)
            assert z.shape == (512,) and z.dtype == x.dtype and none is None and same is y
            del z
        seen(x, y, scale=2.0)  # a number of another type is another call
        seen(x[:2], y, scale=2)
        with pytest.raises(RuntimeError):
            seen(x, y, scale=y)  # float() of x, [8, 512], times [3]
    assert [size for _, size in walk.log if size > 0] == [8192, 512] + [1024] * 4
    assert calls == [(8, 512), (8, 512), (2, 512), (8, 512)]  # the last one failed
    view = dryrun.kernels.cached_by_shape(torch.ops.aten.select.int)
    for row in (0, 1, 0):
        assert view(x, 0, row).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_every_kernel_has_a_twin():
    kernels = {
        name
        for name, f in vars(plain).items()
        if inspect.isfunction(f) and f.__module__.startswith("minitron.") and not name.startswith("_")
    }
    assert kernels - {"rotate", "sum_rows"} <= vars(dryrun.kernels).keys()  # these are parts of others


# ---- the command ----------------------------------------------------------------------------------------------------


def pretrain(*argv):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "minitron.pretrain", *argv],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )


def run(argv):
    options, rest = dryrun.split(argv)
    dryrun.command(cli.load(rest), options)


@pytest.mark.slow
def test_a_rank_of_2048_in_seconds_and_little_memory():
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    job = str(ROOT / "configs/gpt3_175b.yaml"), "train.global_batch_size=4096"
    done = pretrain(*job, "--dry-run", "--world", "2048", "--rank", "2047", "--json")
    assert done.returncode == 0 and not done.stderr
    (report,) = json.loads(done.stdout)
    assert report["cell"] == "rank 2047 (pp 7, dp 63, cp 0, tp 3)" and report["seconds"] > 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60  # of one core, also on a busy machine
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20  # KiB
    assert sum(report["memory"].values()) == report["peak_bytes"] == max(size for _, size in report["timeline"])
    total = sum(count for count, _ in report["traffic"].values())
    assert total == sum(action != "start" for *_, action in report["collectives"]) > 0
    assert "attention by cudnn: its formulas" in report["replaced"]


def test_a_reader_that_has_seen_enough_ends_it_quietly():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "minitron.pretrain",
        "--dry-run",
        "--world",
        "2",
        "model.num_layers=2",
        "train.global_batch_size=512",
        "parallel.pp=2",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.read(10)
        process.stdout.close()  # with more to come than a pipe holds
        assert process.stderr.read() == b"" and process.wait() == 128 + signal.SIGPIPE


def test_the_table(capsys):
    run([str(ROOT / "configs/quickstart.yaml"), "train.micro_batch_size=4", "parallel.pp=2", "--world=4", "--dry-run"])
    text = capsys.readouterr().out
    assert "one step on 4 ranks: tp 1 pp 2 vp 1 cp 1 dp 2, 2 microbatches of 4" in text
    assert "rank 0 (pp 0)" in text and "rank 2 (pp 1)" in text and "rank 3 (pp 1)" in text
    for word in (
        "peak memory",
        "parameters",
        "first reached in",
        "CUDA graphs, about",
        "pp send",
        "collectives: how many",
        "replaced: Triton",
        "left out: ",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120 and "first steps" not in text
    job = [str(ROOT / "configs/quickstart.yaml"), "train.micro_batch_size=4", "--dry-run", "--rank=0"]
    run([*job, "train.batch_ramp=[8,8,64]", "train.global_batch_size=32"])
    assert ", 8 microbatches of 4 (the first steps have 2)\n" in capsys.readouterr().out


def test_the_table_and_the_json_have_the_figures_of_the_reports():
    """Columns are bytes by part, graphs of the pipeline rank, and collectives of the step, not of the build."""
    cfg = settings(LLAMA, parallel=dict(tp=2, pp=2, layers_per_stage=(3, 1)), train=dict(global_batch_size=8))
    gib, places = 2**30, {0: "rank 0 (pp 0, dp 0, cp 0, tp 0)", 6: "rank 6 (pp 1, dp 1, cp 0, tp 0)"}

    def record(kind, axis, num_bytes, action):
        return dryrun.Record(kind, axis, num_bytes, torch.float32, (0, 1), action)

    calls = [record("all-gather", "tp", 3 * gib, Forward(0, 0)), record("all-gather", "dp_cp", 9 * gib, "start")]
    calls += [record("all-gather", "tp", gib, "update"), record("send", "pp", gib // 2, Forward(0, 0))]
    reports = []
    for rank, place in places.items():
        memory = {part: (i + rank) * gib for i, part in enumerate(dryrun.PARTS)}
        timeline = [("build", 1), ("update", 2)]
        reports.append(dryrun.Report(rank, place, memory, Forward(2, 0), timeline, calls[rank // 3 :], ["x: y"], 1.25))
    traffic = (
        {"pp send": [1, gib // 2], "tp all-gather": [2, 4 * gib]},
        {"pp send": [1, gib // 2], "tp all-gather": [1, gib]},
    )
    assert [dryrun.traffic(report) for report in reports] == [*traffic]
    rows = {line[:24].strip(): line[24:].split() for line in dryrun.table(cfg, 8, reports, 1)}
    assert rows["peak memory"] == [
        f"{sum(r.memory.values()) / gib:.2f}" if i == 0 else "GiB" for r in reports for i in (0, 1)
    ]
    for part in dryrun.PARTS:
        assert rows[part][::2] == [f"{report.memory[part] / gib:.2f}" for report in reports]
    planned = Memory(cfg, 8, gpus_per_node=1)
    assert rows["CUDA graphs, about"][::2] == [f"{planned.graph(rank) / gib:.2f}" for rank in (0, 1)]
    assert rows["tp all-gather"] == "2 x, 4.00 GiB 1 x, 1.00 GiB".split() and "dp_cp all-gather" not in rows
    assert rows["pp send"] == "1 x, 0.50 GiB 1 x, 0.50 GiB".split() and rows["seconds for this"] == ["1.2", "1.2"]
    assert rows[""] == "rank 0 (pp 0) rank 6 (pp 1), fullest".split()
    for found, report, sums in zip(json.loads(dryrun.as_json(reports)), reports, traffic):
        assert found["peak_bytes"] == report.peak_bytes == sum(report.memory.values())
        assert found["traffic"] == sums and found["rank"] == report.rank
        assert [kind for kind, *_ in found["collectives"]] == [kind for kind, *_ in report.collectives]
    later = config(cfg, dict(train=dict(batch_ramp=(4, 4, 64))))
    (first, *_) = dryrun.table(later, 8, reports, 1)
    assert first.endswith("4 microbatches of 1 (the first steps have 2)")


def test_a_pipeline_that_a_batch_just_fills_is_not_doubted(capsys):
    for batch, doubted in ((4, False), (3, True)):
        dryrun.warn_of_bubble(settings(LLAMA, parallel=dict(pp=4), train=dict(global_batch_size=batch)), 4)
        assert bool(capsys.readouterr().err) == doubted


def test_the_report_names_each_kernel_that_was_replaced():
    plain = settings(LLAMA, model=dict(num_layers=1, attention="reference"))
    fused = config(fp8("delayed"), dict(model=dict(num_layers=1, attention="auto")))
    names = [
        [line.partition(":")[0] for line in dry_run(cfg, world).replaced] for cfg, world in ((plain, 1), (fused, 2))
    ]
    assert names == [
        ["Triton"],
        ["Triton", "attention by cudnn", "FP8 by te", "NCCL, and memory that a node's GPUs share"],
    ]


def test_a_run_that_is_not_dry_keeps_all_of_its_arguments():
    assert dryrun.split(["train.steps=3", "--resume", "--world=4"]) == (
        None,
        ["train.steps=3", "--resume", "--world=4"],
    )


@pytest.mark.parametrize("between", ["fp32", "bf16"])
def test_the_report_says_that_each_rank_is_a_node(between):
    cfg = settings(LLAMA, precision=dict(dtype="bf16"), optimizer=dict(reduce_dtype=between))
    assert any("nodes" in line for line in dry_run(cfg, 2).replaced) == (between == "bf16")


def test_the_fullest_rank_is_among_the_default_ones(capsys):
    """Of stages written by hand as 405B's, but fewer, it is neither the first nor the last one."""
    job = [str(ROOT / "configs/llama31_405b.yaml"), "train.global_batch_size=1024", "parallel.vp=1"]
    job += ["model.num_layers=6", "parallel.pp=4", "parallel.layers_per_stage=[1,2,2,1]", "--world=128", "--dry-run"]
    options, rest = dryrun.split(job)
    fullest, _ = Memory(cli.load(rest), 128, gpus_per_node=1).peak()
    assert fullest == 1
    run(job)
    out, err = capsys.readouterr()
    assert "rank 32 (pp 1), fullest" in out and "rank 0 (pp 0) " in out and "rank 127 (pp 3)" in out and not err


def test_a_batch_too_small_for_the_pipeline_is_doubted(capsys):
    run(
        [
            str(ROOT / "configs/quickstart.yaml"),
            "train.micro_batch_size=4",
            "parallel.pp=4",
            "--world=8",
            "--dry-run",
            "--rank=0",
        ]
    )
    assert capsys.readouterr().err == (
        "warning: train.global_batch_size=16 gives each of 2 data ranks 2 microbatches for a pipeline of "
        "parallel.pp=4, which they do not fill; give the batch of the whole job, such as "
        "train.global_batch_size=16, two samples a GPU\n"
    )


def test_progress_is_told_on_a_terminal_alone(capsys, monkeypatch):
    job = [str(ROOT / "configs/quickstart.yaml"), "--world=2", "--dry-run"]
    run(job)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(job)
    told = capsys.readouterr().err.split("\r\033[K")
    assert told[1].startswith("rank 0, 1 of 1: action 1, ") and told[-1] == "" and "\n" not in told[1]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--world", "many"], "argument --world: many is not a whole number"),
        (["--world", "4", "--ranks", "first,4"], "--ranks=first,4 does not name ranks of --world=4; use first, middle"),
        (["--world", "2", "parallel.tp=4"], "needs 4 ranks, but there are 2"),
        (["--wurld", "2"], "unknown option --wurld"),
    ],
)
def test_mistakes_are_one_line(argv, message):
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        run(["--dry-run", *argv])
    assert message in str(caught.value)


def test_ranks_by_name():
    assert choose_ranks("first,middle,last", pp=8, world=64) == [0, 32, 63]
    assert choose_ranks("first,middle,last", pp=1, world=64) == [0]
    assert choose_ranks("5,first,5", pp=1, world=6) == [5, 0]
    assert choose_ranks("first,middle,last,fullest", pp=8, world=64, fullest=1) == [0, 32, 63, 8]
    assert choose_ranks("first,middle,last,fullest", pp=8, world=64, fullest=7) == [0, 32, 63]


@pytest.mark.parametrize(
    "recipe,world,options",
    [
        ("llama31_405b", 256, ["precision.fp8=current"]),
        ("llama31_70b", 64, ["precision.fp8=block", "parallel.cp_style=allgather"]),
        ("gpt3_13b", 32, ["train.kernels=apex", "train.deterministic=true"]),
        ("gpt3_175b_gke", 256, ["train.recompute=full"]),
        ("gpt3_175b_jube", 384, []),
    ],
)
def test_recipes(recipe, world, options):
    """Large jobs, with two microbatches. A parameter is 2 bytes, its optimizer state 12 / (dp cp), its gradient
    4, or 2 and a float32 slice."""
    cfg = cli.load([str(ROOT / f"configs/{recipe}.yaml"), *options])
    batch = 2 * cfg.dp(world) * cfg.train.micro_batch_size
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, global_batch_size=batch))
    report = dry_run(cfg, world, world - 1)
    owners = cfg.dp(world) * cfg.parallel.cp
    numbers = report.memory["parameters"] // 2
    slices = 4 * numbers / owners if cfg.optimizer.accumulates_in == "bf16" else 2 * numbers
    assert report.memory["gradients"] == pytest.approx(2 * numbers + slices, rel=1e-3)
    assert report.memory["optimizer"] == pytest.approx(12 * numbers / owners, rel=1e-3)
    assert report.memory["activations"] > 0 and report.timeline[-1][0] == "update"
