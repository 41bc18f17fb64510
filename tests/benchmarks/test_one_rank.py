"""One rank alone: its partners' values are finite, its job is the schedule of what was measured, and every recipe's
rows come one after another."""

import json
import math
import multiprocessing
import re
import time
from argparse import Namespace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import measure, nccl_memory, one_rank, partners, recipes, record, whole_job, workers
from benchmarks.calibration import DEVICES
from minitron import train
from minitron.comm import collectives
from minitron.comm.activity import Progress
from minitron.comm.mesh import Axis, Mesh
from minitron.config import cli, rules
from minitron.config.schema import changed
from minitron.kernels import plain
from minitron.kernels.gemm import Payload
from minitron.parallel.overlap import SymmetricMemoryComm
from minitron.pipeline.schedule import Backward, Exchange, Forward, Transfer
from minitron.planner.dryrun.dryrun import fake_world
from minitron.planner.machine import Machine, read_machines
from minitron.planner.plan import Step
from replay import replayed

TOY = [
    "configs/quickstart.yaml",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.vocab_size=200",
    "train.seq_len=32",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
    "precision.dtype=bf16",
]
PIPELINE = [*TOY, "parallel.tp=2", "parallel.pp=2", "parallel.vp=2"]
GPT = ["model.family=gpt", "model.num_kv_heads=null", "model.positions=learned", "model.tie_embeddings=true"]
CPU = torch.device("cpu")


def axis(size, rank, action=None, name="tp"):
    made = Axis(name, rank, size, tuple(range(size)), activity=one_rank.Clock(CPU))
    made.activity.action = action
    return made


# ---- a whole rank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys, world, rank, last",
    [
        (PIPELINE, 8, 0, False),
        ([*PIPELINE, *GPT], 8, 7, True),
        ([*TOY, "parallel.tp=2", "parallel.cp=2"], 8, 5, True),
        ([*TOY, "parallel.cp=2", "parallel.cp_style=ulysses"], 2, 1, True),
        ([*TOY, "parallel.cp=2", "parallel.cp_style=allgather"], 4, 2, True),
        ([*TOY, "precision.dtype=fp16"], 1, 0, True),
    ],
)
def test_a_rank_trains_alone_on_finite_values(keys, world, rank, last, capsys):
    row = one_rank.main([*keys, "--world", str(world), "--rank", str(rank), "--steps", "4", "--alone"])
    assert 0 < row["grad_norm"] < 100 and (row["loss"] is not None) == last
    assert not last or abs(row["loss"] - math.log(200)) < 1.5  # of a part of the vocabulary under tp
    assert row["step_seconds"] > sum(row["forward_seconds"] + row["backward_seconds"]) > 0 < row["update_host_seconds"]
    assert (row["replayed"], row["busy_seconds"], row["device_gib"], row["job_step_seconds"]) == (
        False,
        None,
        None,
        None,
    )
    assert one_rank.LEFT_OUT in capsys.readouterr().out
    assert collectives._start.__module__ == collectives.__name__ and not torch.distributed.is_initialized()


def test_the_job_is_simulated_with_rows_of_the_same_commit(tmp_path):
    results = tmp_path / "results.jsonl"
    options = ["--world", "8", "--steps", "4", "--results", str(results), "--commit"]
    with mock.patch.object(one_rank, "launch", side_effect=AssertionError("there is a row")):
        first = one_rank.main([*PIPELINE, "--rank", "first", "--alone", *options, "abc"])
        row = one_rank.main([*PIPELINE, "--rank", "last", *options, "abc-dirty"])
    cfg, (devices, fabrics) = cli.load(PIPELINE), read_machines(DEVICES)
    step = Step(cfg, 8, Machine(devices["h200"], fabrics["ndr400"]))
    assert one_rank.job_seconds(step, 8, {"first": first, "last": row})[0] == row["job_step_seconds"]
    assert [entry["rank"] for entry in record.rows(results)] == [0, 7]
    with mock.patch.object(one_rank, "launch", return_value=first) as launch:  # of another commit: measured again
        one_rank.main([*PIPELINE, "--rank", "last", *options, "def"])
    command = " ".join(launch.call_args.args[0])
    assert "--rank 0" in command and command.endswith("--alone") and "--commit def" in command


def test_mistakes_are_known_before_the_measurement(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv, message in [
        ([*TOY, "--world", "4", "--rank", "4"], "--rank"),
        ([*TOY, "--world", "3"], "global_batch_size"),
        ([*TOY, "--world", "1", "--fabric", "none"], "ndr400"),
        ([*TOY, "precision.dtype=fp32", "--world", "1"], "has no rate"),
        ([*TOY, "--world", "1", "--profile"], "--profile"),
    ]:
        with pytest.raises(SystemExit):
            one_rank.main(argv)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("keys, world", [(PIPELINE, 8), (TOY, 1)])
def test_a_replayed_step_is_measured(keys, world, capsys):
    def build(*args, log):
        return replayed(original(*args), log=log)

    original, argv = train.build, [*keys, "--world", str(world), "--rank", "last", "--steps", "4", "--alone"]
    with mock.patch.object(train, "build", build), mock.patch.object(one_rank.Clock, "captures", lambda clock: True):
        row = one_rank.main([*argv, "--microbatches", "4"])
    assert row["replayed"] and 0 < row["grad_norm"] < 100 and row["microbatches"] == 4 and row["capture_seconds"] > 0
    recorded = int(re.search("recorded ([0-9,]+) kernels", capsys.readouterr().out)[1].replace(",", ""))
    assert recorded - row["nodes"] == 2 * 2 * 4 * len(row["forward_seconds"])  # events of a forward and a backward


# ---- partners -------------------------------------------------------------------------------------------------------


def test_what_collectives_leave_open_is_this_ranks_part():
    with partners.partners(8):
        x, out = torch.arange(6.0), torch.full((18,), math.nan)
        collectives.all_gather_into(out, x, axis(3, 1), wait=False).wait()
        assert torch.equal(out, x.repeat(3))
        out = torch.full((2,), math.nan)
        collectives.reduce_scatter_into(out, x, axis(3, 1))
        assert torch.equal(out, x[2:4])
        whole = torch.arange(6.0)
        collectives.all_gather_into(whole, whole[2:4], axis(3, 1))  # parameters of other ranks stay
        collectives.reduce_scatter_into(whole[2:4], whole, axis(3, 1))
        collectives.all_reduce_(whole, axis(3, 1))
        assert torch.equal(whole, x)
        assert collectives._trade(torch.ones(4, 6), axis(2, 0), 1, 0).isfinite().all()


@pytest.mark.parametrize("rank", [0, 7])
def test_every_token_has_a_row_in_the_embedding_of_each_rank(rank):
    """Seven eighths were zeros; behind them, norms made gradients of 1e13."""
    cfg = cli.load(
        ["configs/gpt3_175b_jube.yaml", "model.num_layers=8", "model.hidden_size=64", "model.num_heads=8"]
        + ["model.vocab_size=1000", "model.vocab_multiple=128", "model.max_positions=16", "train.seq_len=16"]
    )
    ids = torch.arange(1000 // 8).reshape(-1, 1)[:112]
    with fake_world(64, rank, "cpu"), partners.partners(8):
        trainer = train.build(cfg, Mesh.create(tp=8, pp=8, device=torch.device("cpu")))
        rows = trainer.chunks[0].embedding.words(ids)
    assert len(rows) == len(ids) // 8 and rows.any(-1).all()


@pytest.mark.parametrize("rank", [0, 5])
def test_fp8_weights_of_other_data_ranks_are_numbers_of_a_right_size(rank):
    """Seven eighths of them were zeros, whose products are fast; with a scale of 1 they would be hundreds."""
    keys = "dtype=bf16", "fp8=delayed", "fp8_params=true", "fp8_backend=torch"
    cfg = cli.load(
        ["configs/quickstart.yaml", *(f"precision.{key}" for key in keys)]
        + ["data.source=mock", "model.hidden_size=64", "model.num_heads=4", "train.global_batch_size=32"]
    )
    with fake_world(8, rank, "cpu"), partners.partners(8):
        trainer = train.build(cfg, Mesh.create(device=torch.device("cpu")))
    weights = [p.float() * p.spec.fp8_scale.scale_inv for p in trainer.chunks[0].parameters() if p.dtype.itemsize == 1]
    assert weights and all((w != 0).float().mean() > 0.9 for w in weights)
    assert all(0.1 < w.std() / cfg.model.init_std < 5 for w in weights)


def test_messages_between_stages_have_magnitudes_and_those_of_a_ring_are_the_own():
    values = [torch.full((64, 64), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    transfers = Transfer("gradient", 0, 1, 2), Transfer("activation", 3, 2, 0)
    partners.exchange(axis(3, 1, Exchange((), transfers), "pp"), [], list(zip((2, 0), values))).wait()
    assert [x.float().std().item() for x in values] == pytest.approx([0.01, 1.0], rel=0.05)
    sent, there = torch.randn(5), torch.full((5,), math.nan)
    partners.exchange(axis(2, 1, Forward(0, 0), "cp"), [(0, sent)], [(0, there)]).wait()
    assert torch.equal(sent, there)


@pytest.mark.parametrize("size, rank", [(2, 1), (4, 2), (8, 5)])
def test_products_in_pieces_add_up_what_was_made_for_each_rank(size, rank):
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None, wait_event=lambda event: None)
    cuda = SimpleNamespace(
        synchronize=lambda: None,
        Stream=lambda priority=0: stream,
        Event=lambda: SimpleNamespace(record=lambda stream: None),
        current_stream=lambda device=None: stream,
        set_stream=lambda stream: None,
    )

    def product(x, out=None):
        y = x.rowwise @ weight
        return y if out is None else out.copy_(y)

    weight, x = torch.randn(3, 6), torch.randn(2 * size, 3)
    barrier = mock.patch.object(torch.distributed, "barrier")
    with partners.partners(8), barrier, mock.patch.object(torch, "cuda", cuda):
        comm = SymmetricMemoryComm(axis(size, rank), CPU, torch.float32, plain.sum_parts)
        for _ in range(3):
            payload = Payload(x, None)
            expected = (x @ weight).unflatten(0, (size, 2)).sum(0)
            torch.testing.assert_close(comm.matmul_scatter(payload, product, 6), expected)
            torch.testing.assert_close(comm.start_matmul_scatter(payload, product, 6).wait(), expected)
            y, kept = comm.gather_matmul(payload, product, 6, keep=True)
            assert torch.equal(kept.rowwise, x.repeat(size, 1))
            torch.testing.assert_close(y, (x @ weight).repeat(size, 1))


def test_gpus_of_a_node_see_each_other():
    with partners.partners(8):
        from minitron.parallel import layer_context

        see, cuda = layer_context.can_access_peers, torch.device("cuda")
        for ranks, expected in ((0, 7), True), ((8, 12), True), ((4, 8), False), ((0, 64), False):
            assert see(Axis("dp", 0, len(ranks), ranks), cuda) == expected
        assert not see(Axis("tp", 0, 2, (0, 1)), CPU) and not see(Axis("tp", 0, 1, (0,)), cuda)


# ---- the clock and the job ------------------------------------------------------------------------------------------


def test_a_replays_times_are_those_of_the_captured_events():
    cuda = SimpleNamespace(Event=lambda **options: one_rank.HostEvent(), is_current_stream_capturing=lambda: captures)
    now = iter(range(100))
    with mock.patch.object(Progress, "of", return_value=None):
        clock = one_rank.Clock(torch.device("cuda"))
    with mock.patch.object(torch, "cuda", cuda), mock.patch.object(one_rank.time, "perf_counter", lambda: next(now)):
        for captures in (False, True, False):
            for action in (Forward(0, 0), Forward(1, 0), Exchange((), ()), Backward(0, 0, False), Backward(1, 0, True)):
                clock.begin(action)
                next(now) if captures else None
                clock.ended()
        for captured, event in clock.captured.items():  # what a replay does
            event[1].at += captured[0] is Backward
        (end := clock.event()).record()
    assert len(clock.captured) == len(clock.eager) == 4
    assert clock.seconds(True, end)["forward_seconds"] == [2] and clock.seconds(True, end)["backward_seconds"] == [3]
    parts = {"forward_seconds": [1], "backward_seconds": [1], "ends_seconds": 0, "update_seconds": 1}
    assert clock.seconds(False, end) == parts


def test_the_first_and_the_last_microbatch_count_once_however_many_there_are():
    clock, end = one_rank.Clock(CPU), one_rank.HostEvent()
    for kind, seconds in (Forward, (5, 2, 4, 2)), (Backward, (6, 7, 9, 12)):
        for mb, length in enumerate(seconds):
            events = one_rank.HostEvent(), one_rank.HostEvent()
            events[0].at, events[1].at = 0, length
            clock.eager[kind, 0, mb] = events
    end.at = 12.5
    parts = {"forward_seconds": [3], "backward_seconds": [8], "ends_seconds": 5 + 2 - 6 + 6 + 12 - 16}
    assert clock.seconds(False, end) == parts | {"update_seconds": 0.5}


def planted(rank, forward, backward, update=0.5):
    times = {"forward_seconds": forward, "backward_seconds": backward, "update_seconds": update - 0.25}
    return times | {"rank": rank, "ends_seconds": 0.25}


def plan_of(*keys, world):
    devices, fabrics = read_machines(DEVICES)
    cfg = cli.load([*TOY, *keys])
    rules.check(cfg, world)
    return Step(cfg, world, Machine(devices["h200"], fabrics["ndr400"]))


def test_a_job_lasts_as_its_schedule_by_hand():
    """rank 0: F0 0-1, F1 1-2, B0 6-8, B1 11-13; rank 1: F0 1-3, B0 3-6, F1 6-8, B1 8-11; the longest update.

    The first activation and the last gradient have nothing to hide behind.
    """
    step = plan_of("parallel.pp=2", "train.global_batch_size=2", world=2)
    rows = {"first": planted(0, [1.0], [2.0]), "last": planted(1, [2.0], [3.0], 0.75)}
    with_traffic, quiet = one_rank.job_seconds(step, 2, rows)
    assert quiet == pytest.approx(13.75)
    message = step.transfer_seconds
    assert with_traffic == pytest.approx(13.75 + 2 * message, abs=message / 2) and message > 1e-6


def test_ranks_that_were_not_measured_take_the_middle_ones_seconds_by_their_layers():
    keys = ["parallel.pp=4", "model.num_layers=6", "parallel.layers_per_stage=[1,1,2,2]", "train.global_batch_size=1"]
    rows = {
        "first": planted(0, [10.0], [20.0]),
        "middle": planted(2, [4.0], [6.0]),
        "last": planted(3, [100.0], [200.0]),
    }
    _, quiet = one_rank.job_seconds(plan_of(*keys, world=4), 4, rows)
    assert quiet == pytest.approx(10 + 2 + 4 + 100 + 200 + 6 + 3 + 20 + 0.5)


def test_the_planners_exposed_traffic_is_added():
    step = plan_of("parallel.tp=2", "train.global_batch_size=4", "parallel.overlap_grads=false", world=4)
    exposed = sum(part["tp_exposed"] for pair in step.parts for part in pair)
    dp, hidden = step.data_parallel(step.timeline(0.0))
    with_traffic, quiet = one_rank.job_seconds(step, 4, {"first": planted(0, [1.0], [2.0])})
    assert quiet == pytest.approx(6.5) and dp > 0 == hidden and exposed > 0
    assert with_traffic == pytest.approx(6.5 + 2 * exposed + dp)


# ---- all recipes ----------------------------------------------------------------------------------------------------


def test_every_recipe_can_be_measured():
    for job in recipes.jobs("H100"):
        cfg = recipes.configuration(job.main.recipe, job.main.keys)
        few = one_rank.fewer(cfg, job.main.world, Namespace(microbatches=None, graph="off"))
        rules.check(few, job.main.world)
        pp, stages = cfg.parallel.pp, {run.rank * cfg.parallel.pp // run.world for run in (*job.support, job.main)}
        assert stages == {0, pp // 2, pp - 1} and job.main.rank * pp // job.main.world == pp // 2
    named = {job.main.recipe for job in recipes.jobs("H100")}
    assert named == {
        path.stem
        for path in (record.ROOT / "configs").glob("*.yaml")
        # Not small models on one GPU, and no recipes that follow no published job.
        if "quick" not in path.stem and path.stem != "gpt2_124m" and not path.stem.startswith("qwen")
    }


def fake_measurements(monkeypatch, tmp_path, **times):
    """Replace the measurements by rows that are made up; return what reads (rank, graph) of those that were begun.

    times: what the measured jobs' rows say of them.
    """
    begun = tmp_path / "begun.txt"

    def main(argv):
        cfg, args = one_rank.measure.arguments("", argv, one_rank.add_options)
        with begun.open("a") as file:
            file.write(json.dumps([int(args.rank), args.graph]) + "\n")
        if (tmp_path / f"fails {args.rank} {args.graph}").exists():
            raise SystemExit("error: out of memory")
        while (tmp_path / f"hangs {args.rank} {args.graph}").exists():
            time.sleep(0.01)
        chunks = cfg.parallel.vp
        row = one_rank.identity(args, int(args.rank)) | {
            "dtype": "bf16",
            "fp8": "none",
            "gradients": cfg.optimizer.accumulates_in,
            "replayed": args.graph == "on",
            "microbatches": 16,
            "layers": 12,
            "step_seconds": 1.04,
            "busy_seconds": 1.0,
            "host_seconds": 0.1,
            "nodes": 192 * 140 if args.graph == "on" else None,
            "device_gib": 70.0,
            "job_step_seconds": None,
            "job_quiet_seconds": None,
            "forward_seconds": [0.002] * chunks,
            "backward_seconds": [0.004] * chunks,
            "ends_seconds": 0.1,
            "update_seconds": 0.1,
        }
        one_rank.measure.report(record.append(args, "one_rank", row))

    def read():
        lines = [tuple(json.loads(line)) for line in begun.read_text().splitlines()] if begun.exists() else []
        begun.unlink(missing_ok=True)
        return lines

    environment = {"time": "2026-11-22T00:00:00", "gpu": "H200", "power_limit_watts": 700.0, "versions": {"torch": "2"}}
    monkeypatch.setattr(record, "environment", lambda: environment)
    monkeypatch.setattr(one_rank, "main", main)
    monkeypatch.setattr(workers, "load", lambda: None)
    return read


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_missing_rows_are_run_until_the_time_is_over_and_shown(tmp_path, monkeypatch, capsys, count):
    monkeypatch.setattr(recipes, "RECIPES", recipes.RECIPES[:1])
    monkeypatch.setattr(recipes, "FASTEST", ())
    begun, results = fake_measurements(monkeypatch, tmp_path), tmp_path / "results.jsonl"
    call = ["--results", str(results), "--commit", "abc", "--workers", str(count)]
    missing = [*call, "--missing", "--seconds", "1000"]
    assert recipes.main([*call, "--missing", "--seconds", "10"]) == 0 and not begun()  # no time for one
    (fails := tmp_path / "fails 0 on").touch()
    assert recipes.main(missing) == 1 and "out of memory" in (
        output := capsys.readouterr().out
    )  # the two formats of rank 0
    assert sorted(begun()) == sorted([(0, "on"), (127, "on"), (64, "on"), (16, "on"), (64, "off")] * 2), output
    assert "| 140 | 70.0 |  |" in (tmp_path / "recipes.md").read_text()  # without the job's time
    fails.unlink()
    assert recipes.main(missing) == 0 and begun() == [(0, "on")] * 2
    assert recipes.main(missing) == 0 and not begun()
    text = (tmp_path / "recipes.md").read_text()
    seconds, quiet = recipes.job_times(next(recipes.jobs("H200")), record.rows(results), "H200")
    first = "| gpt3_175b grad_dtype=bf16 | 128 | bf16 | 64 (pp 4 of 8) | on | 16 | 1.040 | 1.000 | 1.040 | 0.100 |"
    assert (
        f"{first} 140 | 70.0 | {seconds:.2f} | {quiet:.2f} |" in text
        and 64 * 12 * 0.006 < quiet < seconds < 64 * 12 * 0.012
    )
    assert len(record.rows(results)) == 10
    assert "8.91, best 8.31 (h100) |" in text and "5.92, best 5.63 (h100) |" in text and "without traffic" in text
    assert "Not yet measured" not in text and "H200 at 700 W; torch 2; 2026-11-22, commit abc" in text


ROW = {"config": ["toy.yaml", "parallel.pp=2"], "world": 8, "rank": 1, "graph": "on", "commit": "abc", "gpu": "H200"}


@pytest.mark.parametrize(
    "change",
    [
        {"config": ["other.yaml", "parallel.pp=2"]},
        {"config": ["toy.yaml", "parallel.pp=4"]},
        {"config": ["toy.yaml"]},
        {"world": 16},
        {"rank": 2},
        {"graph": "off"},
        {"commit": "abd"},
        {"gpu": "H100"},
    ],
    ids=str,
)
def test_an_earlier_row_stands_in_only_for_the_same_rank_of_the_same_job_on_the_same_gpu(tmp_path, monkeypatch, change):
    results = tmp_path / "results.jsonl"
    args = Namespace(**ROW, results=results)
    written = one_rank.identity(args, args.rank) | {"commit": args.commit, "gpu": args.gpu}
    record.write(results, written)

    def found(row):
        monkeypatch.setattr(record, "environment", lambda: {"gpu": row["gpu"]})
        return one_rank.earlier(Namespace(**row, results=results), row["rank"])

    assert found(ROW) == found(ROW | {"config": ROW["config"][::-1], "commit": "abc-dirty"}) == written
    assert found(ROW | change) is None


def test_rows_of_another_gpu_are_missing_here_and_have_a_table_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "RECIPES", [("llama3_8b", 8, "ndr400", ((),))])  # in bf16
    monkeypatch.setattr(recipes, "FASTEST", ())
    row = {"dtype": "bf16", "fp8": "none", "replayed": True, "microbatches": 4, "layers": 16, "step_seconds": 1.0}
    row["gradients"] = recipes.configuration("llama3_8b", ()).optimizer.accumulates_in
    row |= dict.fromkeys(("busy_seconds", "host_seconds", "nodes"), None) | {"device_gib": 70.0}
    (job,), rows = recipes.jobs(None), []
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        identity = one_rank.identity(Namespace(config=job.main.config, world=8, graph="on"), job.main.rank)
        origin = {"gpu": gpu, "power_limit_watts": 700.0, "versions": {}, "time": "2026", "commit": "abc"}
        rows.append(identity | row | origin)
    results = tmp_path / "results.jsonl"
    record.write(results, rows[0])
    left = {
        gpu: recipes.todo(Namespace(results=results, two_gpus=False), gpu, set()) for gpu in ("NVIDIA H200", "A100")
    }
    assert job.main in left["A100"] and job.main not in left["NVIDIA H200"]
    page = recipes.markdown(rows)
    assert 0 < page.index("## NVIDIA H100") < page.index("## NVIDIA H200") and "modelled" in page
    machines = [one_rank.machine_of(row["gpu"], "ndr400").device.gpu for row in (*rows, {"gpu": None})]
    assert machines == ["H200", "H100", "H200"]


def test_a_recipe_whose_gradients_change_format_is_measured_again(monkeypatch):
    (run,) = (job.main for job in recipes.jobs(None) if job.main.recipe == "llama3_8b_lora" and not job.main.keys)
    row = one_rank.identity(Namespace(config=run.config, world=run.world, graph="on"), run.rank)
    assert run.row([row]) is row and run.row([row | {"gradients": "bf16"}]) is None
    changed_to = changed(recipes.configuration(run.recipe, ()), optimizer=dict(grad_dtype="bf16"))
    monkeypatch.setattr(recipes, "configuration", lambda *_: changed_to)
    assert run.row([row]) is None and run.row([newer := row | {"gradients": "bf16"}]) is newer


def test_a_measurement_that_hangs_is_ended_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RECIPES", [(*recipes.RECIPES[0][:3], ((),))])
    monkeypatch.setattr(recipes, "FASTEST", ())
    monkeypatch.setattr(recipes, "MOST_SECONDS", 3)
    begun = fake_measurements(monkeypatch, tmp_path)
    (tmp_path / "hangs 0 on").touch()
    call = ["--missing", "--results", str(tmp_path / "results.jsonl"), "--workers", "2", "--seconds", "1000"]
    assert recipes.main(call) == 1 and len(begun()) == 5
    assert "rank 0 of 128" in (output := capsys.readouterr().out) and re.search(r"took longer than \d+ s", output)
    assert not [child for child in multiprocessing.active_children() if isinstance(child, workers.FORK.Process)]


def test_rows_of_several_processes_are_whole_lines(tmp_path):
    def write(number):
        for _ in range(20):
            record.write(path, {"number": number, "text": "x" * 20_000})

    path = tmp_path / "new" / "results.jsonl"
    processes = [workers.FORK.Process(target=write, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(row["number"] for row in record.rows(path)) == sorted([0, 1, 2, 3] * 20)


def test_workers_have_a_gpu_each_and_load_by_themselves_if_forks_get_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    monkeypatch.setattr(workers, "load", lambda: None)
    monkeypatch.setattr(workers, "forks_get_gpus", lambda gpu: gpu != "5")
    program = "minitron/runtime/environment.py"  # can be run as a file and says nothing
    with workers.Workers() as ours:
        assert ours.fresh and ours.free == ["5", "3"] and "by itself" in capsys.readouterr().out
        ours.start("first", program, [], 1, 60)
        ours.start("second", program, [], 1, 60)
        ended = [ours.next() for _ in range(2)]
        assert {child.task: child.gpus for child, _ in ended} == {"first": ["5"], "second": ["3"]}
        assert [str(error)[:13] for _, error in ended] == ["exit status 0"] * 2, ended
        assert sorted(ours.free) == ["3", "5"]
    assert workers.Workers(1).free == ["5"]


def test_the_page_is_what_the_records_say():
    page = record.RESULTS.with_name("recipes.md")
    assert page.read_text(encoding="utf-8") == recipes.markdown(record.rows(record.RESULTS))


def test_jobs_of_two_gpus_are_held_against_the_real_ones(tmp_path, monkeypatch, capsys):
    """Measured here: toys on CPUs, the last of them by two processes that meet over gloo."""
    keys = (*TOY[1:], "parallel.pp=2", "data.source=mock")
    job = recipes.job_of("quickstart", keys, 2, "ndr400")
    real = recipes.Real(tuple(job.main.config))
    monkeypatch.setattr(recipes, "checks", lambda: [("toy", job, real)])
    results = tmp_path / "results.jsonl"
    call = ["--results", str(results), "--missing", "--two-gpus", "--workers"]
    assert recipes.main([*call, "1"]) == 1 and "needs 2 GPUs; there are 1" in capsys.readouterr().out
    assert recipes.main([*call, "2"]) == 0, capsys.readouterr().out
    first, second, both = record.rows(results)
    assert (first["rank"], second["rank"], both["kind"], both["world"]) == (0, 1, "step", 2)
    (said, quiet), took = recipes.job_times(job, [first, second], None), both["step_seconds"]
    assert recipes.job_times(job, [first], None) is None
    line = f"| toy | {took:.4f} | {said:.4f} | {100 * (said / took - 1):+.1f} % | {quiet:.4f} |"
    assert line in (tmp_path / "recipes.md").read_text()
    named = [name for name, _, _ in original()]
    assert named == [f"{name}, {format}" for name in recipes.CHECKED for format in ("bf16", "FP8")]


original = recipes.checks


# ---- whole jobs -----------------------------------------------------------------------------------------------------


def test_whole_jobs_are_the_documents_as_they_stand_and_fit_into_eight_gpus():
    jobs = list(recipes.whole_jobs(8))
    assert len(jobs) == len({str(job) for job in jobs}) == len(recipes.WHOLE) * 2 * 2
    for job in jobs:
        cfg = recipes.configuration(job.recipe, job.keys)
        rules.check(cfg, 8)
        stands = cli.load([str(record.ROOT / "configs" / f"{job.recipe}.yaml"), f"precision.fp8={cfg.precision.fp8}"])
        expected = changed(stands, train=dict(steps=20)) if not job.corpus else cfg
        assert cfg == expected and job.plan("NVIDIA H100 80GB HBM3").fits
        assert job.corpus or job.recipe == "llama3_8b_lora" or recipes.published(cfg, job)


def test_figures_of_a_run_are_those_of_steps_after_the_recording():
    rows = [
        {
            "step_seconds": 9.0 if step < 5 else 2.0 + step % 3,
            "tflops": {"full": 100.0},
            "mfu": None,
            "loss": 50.0 - step,
        }
        | {"memory_gib": None if step == 0 else 60.0 + step}
        for step in range(20)
    ]
    found = whole_job.figures_of_steps(rows)
    assert (found["steps"], found["step_seconds"], found["memory_gib"], found["mfu"]) == (20, 3.0, 79.0, None)
    assert (found["first_loss"], found["last_loss"]) == (50.0, sum(50.0 - step for step in range(10, 20)) / 10)


def test_the_corpus_of_a_whole_job_is_kept_in_the_folder_of_a_run(monkeypatch):
    def build(cache, vocab_size):
        raise ValueError(f"asked for {vocab_size} tokens in {cache[0]}")

    monkeypatch.setattr(whole_job, "build_corpus", build)
    monkeypatch.setenv("HOME", "/somewhere")
    with pytest.raises(SystemExit), mock.patch("sys.stderr") as stderr:
        whole_job.main([*TOY, "--corpus"])
    assert "4096 tokens in /somewhere/.cache/minitron" in str(stderr.mock_calls)


def test_a_whole_job_of_adapters_needs_no_base(tmp_path, monkeypatch):
    """Its recipe names none. Weights are then those of a new model."""
    monkeypatch.delenv("RANK", raising=False)
    adapters = "finetune.kind=lora", "data.source=mock", "train.steps=3", "train.eval_every=0"
    assert whole_job.main([*TOY, *adapters])["steps"] == 3


def test_whole_jobs_run_once_and_have_a_table(tmp_path, monkeypatch, capsys):
    use = (("train.steps=3", "data.source=mock", "train.eval_every=0"), False)
    monkeypatch.setattr(recipes, "WHOLE", ("quickstart",))
    monkeypatch.setattr(recipes, "BOTH", (tuple(TOY[1:]),))
    monkeypatch.setattr(recipes, "USES", (use,))
    monkeypatch.setattr(workers, "load", lambda: None)
    results = tmp_path / "results.jsonl"
    call = ["--results", str(results), "--commit", "abc", "--workers", "2", "--whole"]
    assert recipes.main(call) == 1  # eight GPUs
    assert recipes.main([*call, "--gpus", "2", "--seconds", "10"]) == 0 and not results.exists()
    assert "10 s are left" in capsys.readouterr().out
    for _ in range(2):
        assert recipes.main([*call, "--gpus", "2"]) == 0, capsys.readouterr().out
        (row,) = record.rows(results)
    (line,) = [line for line in (tmp_path / "recipes.md").read_text().splitlines() if line.startswith("| quickstart")]
    assert f"| {row['step_seconds']:.3f} |" in line and line.endswith("| no |") and row["steps"] == 3
    assert abs(row["first_loss"] - math.log(200)) < 1 and str(tmp_path) not in row["command"]


def test_memory_outside_of_torch_is_what_is_taken_and_not_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    assert measure.outside(torch.device("cuda", 0)) == 10
    assert measure.outside(torch.device("cpu")) == 0


def test_transports_are_read_from_the_log_of_nccl(tmp_path):
    log = tmp_path / "nccl"
    assert nccl_memory.transports(log) == []
    lines = "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0", "Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM"
    log.write_text("\n".join(f"host:1:2 [0] NCCL INFO {line}" for line in (*lines, lines[0])))
    assert nccl_memory.transports(log) == ["NET/Socket", "P2P/CUMEM"]
