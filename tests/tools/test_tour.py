"""The tour: what its page shows is what ran, a planted mistake shows on it, and it works in a browser."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from browser import PROGRAM, Browser
from layouts import GPT3, LLAMA, config
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.sizes import bucket_limit
from minitron.kernels.param import Shard
from minitron.optim import buckets
from minitron.optim.scaler import LossScaler
from minitron.pipeline import schedule as schedules
from minitron.pipeline.schedule import Exchange, Forward, Schedule, make
from minitron.planner import page as pages
from minitron.planner.check import check
from minitron.planner.dryrun.dryrun import dry_run, fake_world, make_mesh, prepare
from minitron.planner.dryrun.trace import OPERATIONS, Tracer, described, dry_trace, held, real_trace
from minitron.planner.machine import DEVICES, choose_machine
from minitron.planner.memory import Memory
from minitron.planner.page import Tour, content, html
from minitron.planner.plan import available_gib, plan
from tools import tour as tool

ROOT = Path(__file__).parents[2]
NAME = "<script>alert('a name')</script> --> tp=2 pp=2"
MODEL = dict(num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_hidden_size=96)
CFG = config(LLAMA, dict(model=MODEL, parallel=dict(tp=2, pp=2), data=dict(source="mock")))


@pytest.fixture(scope="module")
def tour(ranks):
    return tool.collect(CFG, 4, None, ranks, NAME)


@pytest.fixture(scope="module")
def page(tour):
    return content(tour)


def verdicts(page):
    return {row["name"]: row["ok"] for row in page["proof"]["rows"]}


# ---- what ran is what the page shows --------------------------------------------------------------------------------


def test_a_small_configuration_is_trained_as_it_is(tour, page):
    assert tour.as_it_is and page["source"] == "run" and page["twin"]["changes"] == []
    assert page["proof"]["ok"] and all(verdicts(page).values())
    (run,) = page["proof"]["runs"]
    assert run["far"] < 1e-5 and 0 < run["worst"]["difference"] < 1e-5
    assert len(run["steps"]) == 3 and len(run["steps"][0]["loss"]) == 1 + 4


@pytest.mark.parametrize("table", ["AXIS_TEXT", "HIDDEN"])
def test_the_page_explains_every_axis_that_communicates(table):
    text = (Path(pages.__file__).parent / "tour.html").read_text(encoding="utf-8")
    (body,) = re.findall(rf"{table} = \{{(.*?)\}};", text, re.DOTALL)
    axes = {field.name for field in fields(Mesh) if field.type == "Axis"} - {"dp"}  # data ranks use dp_cp
    assert set(re.findall(r"\b([a-z_]+): (?:\"|D\.)", body)) == axes


def test_the_shards_are_those_of_the_ranks(page):
    qkv = next(p for p in page["holds"][1]["params"] if p["name"] == "blocks.2.attention.qkv.weight")
    chunks = 64, 32, 32
    for rank in (0, 1):
        axis = mock.Mock(size=2, rank=rank)
        assert [tuple(x) for x in qkv["slices"][rank]] == Shard(0, axis, chunks).slices()
    assert list(qkv["shape"]) == [sum(chunks), 64] and list(qkv["local"]) == [64, 64]


def test_what_all_ranks_report_is_what_one_of_each_stage_knows():
    """The slices that every rank reports equal those computed on each stage's first rank."""
    cfg = config(CFG, dict(train=dict(micro_batch_size=1, global_batch_size=4)))
    traces = []
    for rank in range(8):
        with fake_world(8, rank):
            trainer = prepare(cfg, make_mesh(cfg, 8))
            traces.append(described(trainer, Tracer(), everyone=False))
            place = traces[-1]["place"]
            assert all([*b["owners"]] == [trainer.mesh.dp_cp.rank] for b in traces[-1]["buckets"]) and place["dp"] < 2
            assert all([*x["slices"]] == [place["tp"]] for x in traces[-1]["params"] if x["dim"] is not None)
            for i, bucket in enumerate(traces[-1]["buckets"]):  # one after another
                mine = [x for x in traces[-1]["params"] if x["bucket"] == i]
                spans = sorted((x["start"], x["start"] + math.prod(x["local"])) for x in mine)
                assert spans[0][0] == 0 and spans[-1][1] <= bucket["size"]
                assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
                assert bucket["numel"] == sum(end - start for start, end in spans)
    whole = pages.holdings(traces)
    assert whole == pages.holdings([held(cfg, 8, 0), held(cfg, 8, 4)])
    for x in (x for stage in whole for x in stage["params"] if x["dim"] is not None):
        assert sorted(x["slices"]) == [0, 1] and pages.covered(x)
        assert x["shape"][x["dim"]] == 2 * x["local"][x["dim"]]
    for bucket in (bucket for stage in whole for bucket in stage["buckets"]):
        assert pages.contiguous(sorted(bucket["owners"].values()), bucket["size"]) and len(bucket["owners"]) == 2


def test_each_rank_lists_the_samples_of_its_microbatches(tour, page):
    t, samples = tour.cfg.train, page["samples"]
    assert sorted(samples) == [0, 1, 2, 3] and all(of == samples[0] for of in samples.values())
    assert [len(batch) for batch in samples[0]] == [t.micro_batch_size] * page["microbatches"]
    assert len({number for batch in samples[0] for number in batch}) == t.global_batch_size


def test_one_layer_has_the_collectives_of_the_dry_run(page):
    """In order, with their bytes: the other recorder of them knows nothing of layers."""
    records = dry_run(CFG, 4, 3).collectives
    for phase in ("Forward", "Backward"):
        mine = [e for e in page["layers"][3]["events"] if e["kind"] == "comm" and e["phase"] == phase]
        action = next(r.action for r in records if type(r.action).__name__ == phase and r.action.mb == 0)
        all_of_stage = [(r.kind, r.num_bytes) for r in records if r.action == action and r.axis == "tp"]
        found = [(e["name"], e["bytes"]) for e in mine]
        assert any(all_of_stage[i : i + len(found)] == found for i in range(len(all_of_stage))) and len(found) > 3


@pytest.mark.parametrize("base", [LLAMA, GPT3], ids=("llama", "gpt"))
def test_all_that_a_block_computes_is_listed_in_its_layer(base):
    """Products and norms by their own names, what is between two products by that of attention or the MLP."""
    cfg = config(base, dict(model=MODEL | dict(num_layers=2), parallel=dict(tp=2), train=dict(global_batch_size=1)))
    cfg = config(cfg, dict(model=dict(num_kv_heads=None)) if base is GPT3 else {})
    act, rotated = ("gelu", []) if base is GPT3 else ("swiglu", ["split_heads"])

    def product(layer, *names):
        return [("product", name, layer) for name in names]

    def between(layer, *names):
        return [("pointwise", OPERATIONS[name], layer) for name in names]

    forward = [
        *between("norm1", "add_norm"),
        *product("attention.qkv", "y = x W^T"),
        *between("attention", *rotated),
        ("attention", "attention", "attention"),
        *product("attention.out", "y = x W^T"),
        *between("norm2", "add_norm"),
        *product("mlp.up", "y = x W^T"),
        *between("mlp", f"{act}_forward"),
        *product("mlp.down", "y = x W^T"),
    ]
    grads = "dx = dy W", "dW += dy^T x"
    backward = [
        *product("mlp.down", *grads),
        *between("mlp", f"{act}_backward"),
        *product("mlp.up", *grads),
        *between("norm2", "add_norm_backward"),
        *product("attention.out", *grads),
        ("attention", "gradient of attention", "attention"),
        *between("attention", *(f"{name}_backward" for name in rotated)),
        *product("attention.qkv", *grads),
        *between("norm1", "add_norm_backward"),
    ]
    events = dry_trace(cfg, 2, 0)["events"]
    tokens, m = cfg.train.micro_batch_size * cfg.train.seq_len, cfg.model
    h, f, heads, groups = 64, 96, m.num_heads * m.head_width, 2 * m.kv_heads * m.head_width
    weights = {"qkv": h * (heads + groups), "out": heads * h, "up": h * f * (1 if base is GPT3 else 2), "down": f * h}
    pairs = 4 * cfg.train.micro_batch_size * heads * cfg.train.seq_len**2 / 2  # of the two products, under the mask
    for event in events:
        if event["kind"] == "product":
            assert event["flops"] == 2 * tokens * weights[event["layer"].rpartition(".")[2]] / 2  # one of two tp ranks
        elif event["kind"] == "attention":
            assert event["flops"] == pairs / 2 * (1 if event["phase"] == "Forward" else 2.5)
    for phase, expected in (("Forward", forward), ("Backward", backward)):
        mine = [e for e in events if e["phase"] == phase and e["kind"] not in ("keep", "comm")]
        assert [(e["kind"], e["name"], e["layer"].removeprefix("blocks.0.")) for e in mine] == expected


def skipping_the_first(cfg):
    """Train with a first step that overflows, and others that do not."""
    with mock.patch.object(LossScaler, "update", lambda scaler, overflow: scaler.scale.fill_(1024.0)):
        return real_trace(cfg)


@pytest.mark.parametrize("skipped", [0, 1])
def test_gradients_are_those_of_the_first_step_that_updates(ranks, skipped):
    """The first moments after it: all gradients, clipped, times 1 - beta."""
    one = config(CFG, dict(parallel=dict(tp=1, pp=1), train=dict(global_batch_size=2)))
    fp16 = dict(precision=dict(dtype="fp16", loss_scale=1e38))
    (trace,) = ranks(1, skipping_the_first, config(one, fp16)) if skipped else ranks(1, real_trace, one)
    assert [bool(step["skipped"]) for step in trace["figures"]] == [step < skipped for step in range(3)]
    norm, o = trace["figures"][skipped]["grad_norm"], one.optimizer
    whole = math.sqrt(sum(part.double().square().sum() for *_, part in trace["gradients"]))
    assert whole == pytest.approx((1 - o.betas[0]) * min(norm, o.clip_grad), rel=1e-4)


def test_what_runs_beside_a_collective_hides_it(page):
    """The backward of a column-parallel layer gathers its input beside dx, and scatters dx beside dW."""
    events = page["layers"][0]["events"]
    beside = {}
    for i, e in enumerate(events):
        if e["kind"] == "comm" and e["phase"] == "Backward":
            names = [x["name"] for x in events[i + 1 : e["until"]] if x["kind"] == "product"]
            beside[e["layer"].split(".", 2)[2], e["name"]] = names
    assert beside["mlp.up", "all-gather"] == ["dx = dy W"] and beside["mlp.up", "reduce-scatter"] == ["dW += dy^T x"]
    assert beside["mlp.down", "all-gather"] == []


def test_recomputation_keeps_less_and_computes_more(page):
    none, selective, full = page["recompute"]
    assert none["kept"] > selective["kept"] > full["kept"] and none["again"] == selective["again"] == 0
    s, h = CFG.train.seq_len, CFG.model.hidden_size
    # float32 of a row: two sums, two norms, q k v, attention's output as made and as read, three of the MLP; statistics
    numbers = 2 * h + 2 * h + (64 + 2 * 32) + 2 * h + 3 * 96 + 4 + 2
    assert none["kept"] == CFG.train.micro_batch_size * 4 * s // 2 * numbers
    assert full["kept"] == 4 * s // 2 * h and 0.3 < full["again"] < 0.34  # the input alone; forward is a third
    cfg = config(CFG, dict(train=dict(recompute="full", global_batch_size=2)))
    events = dry_trace(cfg, 4, 0)["events"]
    again = [e["name"] for e in events if e.get("again") and e["kind"] != "keep"]
    assert again == [e["name"] for e in events if e["phase"] == "Forward" and e["kind"] not in ("keep", "comm")]


@pytest.mark.parametrize("fp8", ["delayed", "current"])
def test_fp8_casts_are_listed_where_they_happen(fp8):
    cfg = config(CFG, dict(precision=dict(dtype="bf16", fp8=fp8), train=dict(global_batch_size=2)))
    events = dry_trace(cfg, 4, 0)["events"]
    made = [
        (e["layer"].split(".")[2], e["phase"]) for e in events if any("FP8" in x for x in e["out"]) and "again" in e
    ]
    products = [e for e in events if e["kind"] == "product"]
    assert all("FP8" in e["in"][0] for e in products) and len(products) == 12
    assert all("FP8" in x for e in products for x in e["in"])  # the weight's cast is read, too
    assert all(e["out"][0].endswith("fp32") for e in products if e["name"].startswith("dW"))  # it adds into the bucket
    weights = [e for e in events if "weight, once" in e["name"]]
    assert len(weights) == 4 and {phase for _, phase in made} == {"Forward", "Backward"}
    assert not any("FP8" in x for e in events if e["kind"] == "attention" for x in e["in"])


def test_schedules_to_choose_from(page):
    own, interleaved, zero_bubble = page["schedules"]
    assert own["own"] and own["name"] == "1F1B" and interleaved["vp"] == 2 and zero_bubble["name"] == "ZB-H1"
    m = page["microbatches"]
    assert own["bubble"] == pytest.approx(1 / m) and interleaved["bubble"] == pytest.approx(1 / 2 / m)
    assert zero_bubble["bubble"] == pytest.approx(1 / 3 / m)
    assert len(own["events"]) == 2 * 2 * m and {e[1] for e in zero_bubble["events"]} == set("FBbw")
    routes = {(rank, code): peers for rank, code, *_, to, at in own["events"] for peers in [(to, at)]}
    assert routes == {(0, "F"): (-1, 1), (1, "F"): (0, -1), (1, "B"): (-1, 0), (0, "B"): (1, -1)}


def test_times_are_the_planners():
    machine = choose_machine("h100", None, path=DEVICES)
    cfg = config(CFG, dict(parallel=dict(schedule="zb-h1"), precision=dict(dtype="bf16"), train=dict(seq_len=512)))
    tour = Tour("", cfg, 4, machine, cfg, 4, True, [], {}, [], [], [])
    found = {x["name"]: x["whole"] for x in pages.schedules(tour, make(2, 1, cfg.num_microbatches(1), "zb-h1"))}
    for name, kind in (("ZB-H1", "zb-h1"), ("1F1B", "1f1b")):
        expected = plan(config(cfg, dict(parallel=dict(schedule=kind))), 4, machine)
        assert found[name] == pytest.approx(expected.timeline.makespan)


def test_beside_uneven_stages_the_other_schedules_have_even_ones():
    """Layers whose activations ranks hold: 3 and 1 for two microbatches and one, then 2 each."""
    cfg = config(CFG, dict(parallel=dict(layers_per_stage=(3, 1))))
    tour = Tour("", cfg, 4, None, cfg, 4, True, [], {}, [], [], [])
    own, interleaved, zero_bubble = pages.schedules(tour, make(2, 1, cfg.num_microbatches(1), "1f1b"))
    assert own["held"] == (3 * 2, 1) and zero_bubble["held"][0] == 2 * 2 and interleaved["vp"] == 2
    assert not any("error" in schedule for schedule in (own, interleaved, zero_bubble))


def test_the_page_has_the_sizes_of_the_job_and_who_has_which_tokens():
    """Traces are read without a run: two data ranks, each with two parts of a sequence."""
    cfg = config(CFG, dict(parallel=dict(cp=2, pp=2), train=dict(micro_batch_size=2), precision=dict(dtype="bf16")))
    cfg = config(cfg, dict(parallel=dict(layers_per_stage=(1, 3)), train=dict(global_batch_size=16, seq_len=32)))
    few = pages.few_microbatches(cfg, 16)
    tour = Tour("", cfg, 16, None, CFG, 4, False, [], {r: dry_trace(few, 16, 8 * r) for r in (0, 1)}, [], [], [])
    tour = replace(tour, holds=list(tour.dry.values()))
    with mock.patch.object(pages, "proof", lambda tour: {}):
        found = content(tour)
    assert tour.recordings[-1][2:] == (list(tour.dry.values()), tour.holds)
    assert replace(tour, holds=[]).recordings[-1][3] == []
    s, h = cfg.train.seq_len, cfg.model.hidden_size
    assert found["sizes"] == {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "vp": 1} and found["world"] == 16
    assert (found["microbatches"], found["source"], found["per_node"]) == (4, "dry", 8)
    assert found["message"] == [s // 2 // 2, 2, h] and found["stages"] == [[0, 1], [1, 4]]
    assert found["accumulates_in"] == cfg.optimizer.accumulates_in and found["samples"] == {}
    assert {rank: groups["tp"] for rank, groups in found["groups"].items()} == {0: [0, 1], 8: [8, 9]}
    halves = [sorted(x for first, last in places for x in range(first, last + 1)) for places in found["tokens"]]
    assert sorted(sum(halves, [])) == list(range(s)) and halves[0] == [*range(s // 4), *range(s * 3 // 4, s)]
    wide = replace(tour, cfg=config(cfg, dict(parallel=dict(tp=1))), world=1024)  # a bucket is of dp and cp
    with mock.patch.multiple(pages, proof=mock.DEFAULT, schedules=mock.DEFAULT, memory=mock.DEFAULT):
        assert content(wide)["bucket_bytes"] == bucket_limit(512) != bucket_limit(256)


def test_the_rows_of_a_proof_make_its_verdict(tour):
    """A difference in FP8 has no limit, so it does not fail."""
    for ok, whole in ((True, True), (None, True), (False, False)):
        found = pages.proof(replace(tour, proofs=[{"rows": [pages.judged("x", ok, "")]}]))
        assert found["ok"] is whole and found["rows"][0] == pages.judged("x", ok, "") | {"run": "4 trained ranks"}


@pytest.mark.parametrize("same", [True, False])
def test_replicas_that_hold_other_parts_show(tour, same):
    other = tour.real[1] | {"rank": 5, "params": tour.real[1 if same else 3]["params"]}
    rows = {row["name"]: row for row in pages.checks(CFG, *[[*tour.real, other]] * 2)}
    row = rows["ranks that should hold the same parts do"]
    assert row["ok"] is same and row["text"] == ("5 ranks" if same else "ranks 1 and 5")


def test_one_forward_too_early_on_any_rank_shows():
    """The last of four ranks holds two microbatches, which the first may."""
    ops = [schedules.operations(4, 1, 8, r) for r in range(4)]
    for rank in range(1, 4):
        early = [list(of) for of in ops]
        at = 2 * (3 - rank) // 2 + 1  # its first backward
        assert isinstance(early[rank][at - 1], Forward) and isinstance(early[rank][at + 1], Forward)
        early[rank][at : at + 2] = early[rank][at + 1], early[rank][at]
        own = Schedule(4, 1, 8, schedules._with_exchanges(4, 1, 8, early))
        held = {row["name"]: row for row in pages.schedule_rules(own)}[
            "ranks hold no more activations than their schedule needs"
        ]
        assert held["ok"] is False and held["text"] == f"rank {rank} holds {5 - rank}, not {4 - rank}"


@pytest.mark.parametrize("pp, vp, m, kind, rule", [(2, 1, 4, "1f1b", "25.00%"), (4, 2, 8, "1f1b", "18.75%"),
                                                   (4, 1, 8, "zb-h1", "12.50%"), (4, 2, 6, "1f1b", None)])  # fmt: skip
def test_the_bubble_is_held_against_its_formula(pp, vp, m, kind, rule):
    rows = {row["name"]: row for row in pages.schedule_rules(make(pp, vp, m, kind))}
    row = rows.get("the bubble is that of its schedule")
    assert row is None if rule is None else row["ok"] and row["text"].endswith(f"by the formula {rule}")


def test_a_few_microbatches_are_drawn_and_all_are_timed():
    machine = choose_machine("h100", None, path=DEVICES)
    cfg = config(CFG, dict(precision=dict(dtype="bf16"), train=dict(seq_len=512, global_batch_size=40)))
    tour = Tour("", cfg, 4, machine, cfg, 4, True, [], {}, [], [], [])
    for row, kind in zip(pages.schedules(tour, make(2, 1, 8)), ("1f1b", None, "zb-h1")):
        if kind is not None:
            whole, few = (plan(config(cfg, dict(parallel=dict(schedule=kind), train=dict(global_batch_size=n))), 4,
                               machine).timeline for n in (40, 8))  # fmt: skip
            assert (row["microbatches"], row["of"]) == (8, 40) and len(row["events"]) == len(few.events)
            assert (row["makespan"], row["whole"]) == pytest.approx((few.makespan, whole.makespan))
            assert row["bubble"] == pytest.approx(whole.bubble)
            assert row["idle"] == pytest.approx(whole.bubble / (1 + whole.bubble))


def test_a_twin_is_described_by_what_it_has_less_of():
    twin = config(CFG, dict(model=dict(num_layers=2), train=dict(seq_len=16), parallel=dict(pp=1)))
    tour = Tour("", CFG, 8, None, twin, 2, False, [], {}, [], [], [])
    t = CFG.train
    rows = [["layers", 4, 2], ["sequence", t.seq_len, 16], ["ranks", 8, 2], ["pp", 2, 1], ["dp", 2, 1]]
    assert pages.twin_in_words(tour) == {"world": 2, "changes": rows}


@pytest.mark.parametrize(
    "pp, count, few", [(1, 20, 8), (2, 20, 8), (3, 20, 6), (4, 20, 8), (5, 20, 10), (8, 20, 16), (8, 12, 12), (1, 3, 3)]
)
def test_few_microbatches_fill_each_pipeline_rank_twice(pp, count, few):
    """And are a multiple of pp, so that an interleaved schedule has equal groups; or all, if they are fewer."""
    cfg = config(
        CFG, dict(model=dict(num_layers=8), parallel=dict(tp=1, pp=pp), train=dict(global_batch_size=2 * count))
    )
    assert pages.few_microbatches(cfg, 2 * pp).num_microbatches(2) == few


def test_traffic_is_that_of_all_microbatches_and_sums_of_gradients_are_listed():
    """As if all had been recorded. A tied table is summed over data ranks, then over the stages that have it."""
    cfg = config(GPT3, dict(model=MODEL | dict(num_kv_heads=None), parallel=dict(tp=2, pp=2)))
    split = config(cfg, dict(parallel=dict(tp=1, cp=2), train=dict(global_batch_size=24)))
    of_split = Tour("", split, 8, None, split, 8, True, [], {}, [], [], [])
    few, whole = (pages.traffic(of_split, dry_trace(x, 8, 0), 2) for x in (pages.few_microbatches(split, 8), split))
    near = {row["axis"]: (row["inside"], row["members"]) for row in few}  # in nodes of two GPUs
    expected = {"cp": (True, [1]), "dp_cp": (False, [0, 1, 2, 3]), "pp": (False, [4])}
    assert few == whole and near | expected == near
    cfg = config(cfg, dict(train=dict(global_batch_size=24)))
    tour = Tour("", cfg, 8, None, cfg, 8, True, [], {}, [], [], [])
    for rank in (0, 4):
        whole, few = dry_trace(cfg, 8, rank), dry_trace(pages.few_microbatches(cfg, 8), 8, rank)
        assert len(few["actions"]) < len(whole["actions"])
        assert pages.traffic(tour, few, 8) == pages.traffic(tour, whole, 8)
        tied = {param["bucket"] for param in few["params"] if param["tied"]}
        assert [i for i, bucket in enumerate(few["buckets"]) if bucket["tied"]] == sorted(tied) != []
        sums, sizes = pages.reductions(few), [4 * bucket["size"] for bucket in few["buckets"]]
        within = [row for row in sums if row["axis"] == "dp_cp"]
        assert sorted(row["bytes"] for row in within) == sorted(sizes)
        assert {row["action"] for row in within} == {"backward of microbatch 7, chunk 0"}
        table = {"axis": "tied_stages", "kind": "all-reduce", "bytes": sizes[min(tied)] // 2, "action": "update"}
        assert [row for row in sums if row not in within] == [table]


def test_actions_have_names():
    assert pages.action_text(Exchange((), ())) == "messages" and pages.action_text("update") == "update"
    assert pages.action_text(Forward(3, 1)) == "forward of microbatch 3, chunk 1"


def test_memory_is_that_of_the_dry_run_or_of_the_plan(tour, page):
    for machine, dry in ((None, tour.dry), (choose_machine("h100", None), {1: tour.dry[1]})):
        found = pages.memory(replace(tour, machine=machine, dry=dry), 8)
        sizes = Memory(tour.cfg, tour.world, gpus_per_node=8)
        limit = (available_gib(machine, sizes) * 2**30, "H100") if machine else (None, None)
        assert (found["limit"], found["device"]) == limit
        for rank, row in enumerate(found["rows"]):
            if rank in dry:
                trace, timeline = dry[rank], row["timeline"]
                assert row["parts"] == trace["memory"] and not row["planned"]
                sizes = [size for action, size in trace["timeline"] if action != "build"]
                assert [size for _, size in timeline] == sizes
                assert dict(timeline)[row["peak"]] == max(sizes) == sum(row["parts"].values())
                names = [name for name, _ in timeline if "microbatch" in name]
                assert len(names) == len(set(names)) == 2 * page["microbatches"] and timeline[-1][0] == "update"
            else:
                planned = Memory(tour.cfg, 4, gpus_per_node=8).bytes_by_part(rank)
                assert row == {"parts": planned, "planned": True}


# ---- a planted mistake changes the page -----------------------------------------------------------------------------


def wrong_shard(cfg):
    slices = Shard.slices
    first = lambda shard: slices(replace(shard, axis=replace(shard.axis, rank=0)))
    with mock.patch.object(Shard, "slices", first):
        return real_trace(cfg)


def missing_all_reduce(cfg):
    with mock.patch.object(buckets, "_sum_all", lambda tensors, axis: None):
        return real_trace(cfg)


def all_forwards_first(pp, vp, m):
    ranks = [sorted(schedules.operations(pp, vp, m, r), key=lambda op: not isinstance(op, Forward)) for r in range(pp)]
    return Schedule(pp, vp, m, schedules._with_exchanges(pp, vp, m, ranks))


def swapped_schedule(cfg):
    return real_trace(cfg, all_forwards_first)


def planted(tour, ranks, mistake, cfg=CFG):
    """Train the layout with a mistake, and one process without it."""
    traces, proofs = tool.prove(cfg, 4, lambda world, run, cfg: ranks(world, mistake if world > 1 else run, cfg))
    return replace(tour, cfg=cfg, twin=cfg, real=traces, proofs=proofs)


@pytest.fixture(scope="module")
def wrong(tour, ranks):
    return planted(tour, ranks, wrong_shard)


def test_a_wrong_shard_shows(wrong):
    page = content(wrong)
    qkv = next(p for p in page["holds"][0]["params"] if p["name"].endswith("qkv.weight"))
    assert qkv["slices"][0] == qkv["slices"][1]
    wrong = [name for name, ok in verdicts(page).items() if not ok]
    assert (
        not page["proof"]["ok"]
        and any("shards" in name for name in wrong)
        and any("gradients" in name for name in wrong)
    )


def test_a_missing_all_reduce_shows(tour, page, ranks):
    found = content(planted(tour, ranks, missing_all_reduce))
    kinds = lambda page: {(row["axis"], row["kind"]) for row in page["traffic"][0]["rows"]}
    assert kinds(page) - kinds(found) == {("tp", "all-reduce")}
    (run,) = found["proof"]["runs"]
    assert not found["proof"]["ok"] and "norm" in run["worst"]["name"] and run["worst"]["difference"] > 0.1


def test_a_swapped_schedule_shows(tour, ranks):
    page = content(planted(tour, ranks, swapped_schedule))
    wrong = [name for name, ok in verdicts(page).items() if not ok]
    assert any("order" in name for name in wrong) and any("activations" in name for name in wrong)
    layers = MODEL["num_layers"] // 2
    assert page["schedules"][0]["held"] == (layers * page["microbatches"],) * 2  # losses are right, memory is not
    assert page["proof"]["runs"][0]["far"] < 1e-5 and not page["proof"]["ok"]


def test_a_schedule_of_another_kind_shows(tour, ranks):
    """Even if `make` itself is wrong: the bubble is that of a formula, not of `make`."""
    zero = config(CFG, dict(parallel=dict(schedule="zb-h1")))
    own = planted(tour, ranks, as_1f1b, zero)
    with mock.patch("minitron.planner.page.checked_schedule", as_wrong):
        wrong = [name for name, ok in verdicts(content(own)).items() if not ok]
    assert any("bubble" in name for name in wrong)


def as_wrong(pp, vp, m, kind):
    schedule = make(pp, vp, m)
    return replace(schedule, kind=kind), check(schedule)


def as_1f1b(cfg):
    return real_trace(cfg, lambda pp, vp, m: make(pp, vp, m))


def test_what_a_rank_receives_is_not_counted_as_sent(tour, page):
    trace, row = tour.real[0], next(r for r in page["traffic"][0]["rows"] if r["axis"] == "pp")
    sent = [r for r in trace["records"] if r.axis == "pp" and r.kind == "send"]
    assert {r["kind"] for r in page["traffic"][0]["rows"]}.isdisjoint({"recv"})
    assert row["bytes"] == sum(r.num_bytes for r in sent) and row["members"] == sorted(
        {x for r in sent for x in r.ranks}
    )


def test_a_loss_that_is_no_number_shows(tour):
    """On any rank and step, of a loss or a norm; and it travels to the page as text."""
    gradients = tour.proofs[0]["gradients"]
    for key, name in (("loss", "losses"), ("grad_norm", "gradients")):
        for bad in (math.nan, math.inf):
            ranks = [[dict(loss=4.0, grad_norm=1.0) for _ in range(3)] for _ in range(4)]
            ranks[3][2][key] = bad
            found = tool.compared("fp32", ranks, ranks[0], gradients)
            assert [row["name"].split()[0] for row in found["rows"] if not row["ok"]] == [name]
    text = html(replace(tour, proofs=[found]))
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    data = json.loads(data, parse_constant=lambda name: pytest.fail(name))
    assert data["proof"]["runs"][0]["steps"][2]["grad_norm"][4] == "Infinity"


def test_a_gradient_that_no_rank_owns_shows(tour):
    """Or that the other side lacks, as after a skipped step; FP8 has no limit, but needs each gradient."""
    alone = tour.real[0] | {"params": [p | {"local": p["shape"], "dim": None} for p in tour.real[0]["params"]]}
    alone["gradients"] = [(p["name"], 0, torch.ones(math.prod(p["shape"]))) for p in alone["params"]]
    alone["place"] = {"pp": 0, "tp": 0}
    steps = [dict(loss=4.0, grad_norm=1.0)]
    for name, limited in (("fp32", True), ("FP8 (delayed)", None)):
        judge = lambda mine, other: tool.compared(name, [steps], steps, tool.differences([mine], other))["rows"][1][
            "ok"
        ]
        assert judge(alone, alone) is limited
        for fewer in (alone["gradients"][1:], [], [(n, 1, g[1:]) for n, _, g in alone["gradients"]]):
            assert judge(alone | {"gradients": fewer}, alone) is False
            assert judge(alone, alone | {"gradients": fewer}) is False


def test_a_wrong_slice_on_any_tp_rank_shows(tour):
    real = [dict(trace) for trace in tour.real]
    real[1]["buckets"] = [bucket | {"owners": {0: (0, 1)}} for bucket in real[1]["buckets"]]
    assert real[1]["place"]["tp"] == 1
    wrong = [name for name, ok in verdicts(content(replace(tour, real=real))).items() if not ok]
    assert len(wrong) == 1 and "slices" in wrong[0]


@pytest.mark.parametrize("rank, axis", [(1, "tp"), (2, "pp")])
def test_a_collective_that_a_rank_of_a_group_lacks_shows(tour, rank, axis):
    real = [dict(trace) for trace in tour.real]
    records = real[rank]["records"]
    lost = next(i for i, r in enumerate(records) if r.axis == axis)
    real[rank]["records"] = records[:lost] + records[lost + 1 :]
    wrong = [name for name, ok in verdicts(content(replace(tour, real=real))).items() if not ok]
    # Messages have two ends, of which only one sends.
    assert [name.startswith("ranks of a group") for name in wrong] == [True] * (axis == "tp")


def test_a_schedule_that_lacks_an_operation_shows():
    """Of the last one, which no other operation waits for."""
    own = make(2, 1, 4)
    assert all(row["ok"] for row in pages.schedule_rules(own))
    (row,) = pages.schedule_rules(replace(own, ranks=(own.ranks[0][:-1], own.ranks[1])))
    assert row["ok"] is False and row["text"].startswith("rank 0, action ")


def test_above_eight_ranks_the_twin_itself_is_checked(tour, ranks):
    """A mistake that only the trained twin has shows, though the dry run of the job has none."""
    dry = {rank: tour.dry[rank] for rank in (0,)}
    big = replace(planted(tour, ranks, swapped_schedule), as_it_is=False, dry=dry)
    rows = content(big)["proof"]["rows"]
    assert {row["run"] for row in rows if not row["ok"]} == {big.recordings[0][0]} and len(
        {r["run"] for r in rows}
    ) == 2


def test_a_batch_that_grows_has_its_last_size():
    cfg = config(CFG, dict(parallel=dict(tp=1, pp=1), train=dict(batch_ramp=(2, 2, 8))))
    with mock.patch.object(tool, "prove", return_value=([], [])):
        tour = tool.collect(cfg, 1, None, None)
    assert tour.twin.train.batch_ramp is None and tour.dry[0]["events"]


# ---- the file -------------------------------------------------------------------------------------------------------


def test_text_of_a_configuration_stays_text(tour, page):
    text = html(tour)
    assert "alert('a name')" in text and "<script>alert" not in text and len(text) < 5_000_000
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["name"] == NAME
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\((?!#)""", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--output", "x.html", "--device", "h999"], ["h999", "h100"]),
        (["parallel.tp=2"], ["--output"]),
        (["parallel.tp=3", "--output", "x.html"], ["parallel.tp=3"]),
        (["parallel.tp=2", "--world", "3", "--output", "x.html"], ["3"]),
        (["nothing.yaml", "--output", "x.html"], ["nothing.yaml"]),
        (["--output", "no/such/folder/x.html"], ["no/such/folder"]),
        (["--output", "."], ["--output ."]),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(tool, "RankPool", side_effect=AssertionError("ranks were started")):
        with pytest.raises(ValueError) as caught:
            tool.main(arguments)
    assert "\n" not in str(caught.value) and all(part in str(caught.value) for part in parts)
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_leaves_no_page(tmp_path):
    with mock.patch.object(tool, "RankPool", side_effect=RuntimeError("a rank has died")):
        with pytest.raises(RuntimeError):
            tool.main(["--output", str(tmp_path / "x.html")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "recipe, world, changes",
    [
        ("gpt3_175b", 128, []),
        ("gpt3_175b", 1024, ["precision.fp8=delayed", "parallel.tp=8"]),
        ("llama31_405b", 512, []),
        ("llama31_70b", 64, ["parallel.cp_style=ulysses"]),
        ("llama3_8b", 8, ["precision.fp8=block", "parallel.tp=2", "parallel.sequence_parallel=false"]),
        ("llama3_8b", 4, ["parallel.pp=4", "parallel.vp=2", "train.global_batch_size=64"]),
        ("gpt2_124m", 4, ["parallel.tp=2", "model.head_piece=256"]),
        ("quickstart", 2, []),
    ],
)
def test_a_twin_keeps_rules_layout_and_switches(recipe, world, changes):
    cfg = cli.load([str(ROOT / f"configs/{recipe}.yaml"), "train.global_batch_size=4096", *changes])
    twin, ranks = tool.small_twin(cfg, world)
    rules.check(twin, ranks)
    assert ranks <= 8 and (ranks == world or world > 8)
    p, q = cfg.parallel, twin.parallel
    for axis in ("tp", "pp", "cp"):
        assert getattr(q, axis) == getattr(p, axis) if world <= 8 else getattr(q, axis) <= 2
    assert (q.cp_style, q.sequence_parallel, q.overlap_grads) == (p.cp_style, p.sequence_parallel, p.overlap_grads)
    assert (twin.train.recompute, twin.precision.fp8) == (cfg.train.recompute, cfg.precision.fp8)
    assert twin.model.num_layers * twin.model.hidden_size**2 <= 1 << 20


# ---- in a browser ---------------------------------------------------------------------------------------------------

PICTURES = ["holds", "layer", "schedule", "traffic", "memory", "proof"]


@pytest.fixture(scope="module")
def file(tour, tmp_path_factory):
    path = tmp_path_factory.mktemp("tour") / "tour.html"
    path.write_text(html(tour))
    return path


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_the_page_works_in_a_browser(file, page):
    with Browser() as browser:
        text = lambda place: browser.run(f"document.querySelector('{place}').textContent")
        for width, dark in ((1400, False), (400, True)):
            browser.open(file, width, dark=dark)
            assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
            assert browser.run("document.documentElement.scrollWidth") <= width
            for name in PICTURES:
                size = (
                    f"(r => [r.width, r.height])(document.querySelector('#{name}-picture svg').getBoundingClientRect())"
                )
                wide, tall = browser.run(size)
                assert 200 < wide and 25 < tall < 700, name
                assert (
                    len(browser.run(f"document.querySelector('#{name}-picture svg').getAttribute('aria-label')")) > 20
                )
            assert browser.run("document.querySelectorAll('#tokens-picture svg').length") == 0  # cp is 1
            assert browser.run("document.querySelectorAll('.rank').length") == 4
            assert f" {page['schedules'][0]['held'][0]} layers" in text("#recompute-text")
            assert "NVLink" in text("#traffic-legend")
            assert "fp32" in text("#format-table tbody") and "FP8" not in text("#format-table tbody")
            assert browser.run("document.title").count("<script>") == 1  # the name is text
            assert browser.run("document.querySelectorAll('#proof-table tr[data-ok=true]').length") >= 8
            assert "✓" in text("#verdict")
        browser.click("[aria-label^='rank 3:']")
        assert "Rank 3" in text("#ranks-panel") and "layers 2–3" in text("#ranks-panel")
        assert browser.run("[...document.querySelectorAll('.rank i')].length") == 2  # its tp and its pp neighbour
        browser.click("#schedule-picture [data-i='3']")
        first = text("#schedule-panel")
        assert "Waits for" in first and "Sends" in first
        browser.press("ArrowRight")
        second = text("#schedule-panel")
        assert second != first
        browser.press("ArrowLeft")
        assert text("#schedule-panel") == first
        for kind in ("interleaved 1F1B, 2 chunks", "ZB-H1"):
            before = browser.run("document.querySelectorAll('#schedule-picture [data-i]').length")
            browser.click(f"[data-kind='{kind}']")
            assert browser.run("document.querySelectorAll('#schedule-picture [data-i]').length") != before
        for name in ("layer", "traffic", "memory", "proof"):
            before = text(f"#{name}-panel")
            browser.run(f"document.querySelector('#{name}-picture svg').focus()")
            browser.press("Home")
            browser.press("ArrowRight")
            assert text(f"#{name}-panel") != before or name == "memory"
        fill = "(e => { e.value = %r; e.dispatchEvent(new Event('input')); })(document.getElementById('row'))"
        browser.run(fill % "10")
        assert "Row 10 " in text("#holds-panel") and "held by rank 2." in text("#holds-panel")
        browser.run(fill % "40")
        assert "held by rank 3." in text("#holds-panel") and "rank_00003.safetensors" in text("#holds-panel")
        browser.click("#theme")
        assert browser.run("document.documentElement.dataset.theme") == "light"
        browser.resize(900)
        browser.resize(400)
        assert browser.run("document.documentElement.scrollWidth") <= 400 and browser.errors == []


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_a_failing_proof_is_what_a_reader_sees_first(wrong, tmp_path):
    (tmp_path / "wrong.html").write_text(html(wrong))
    with Browser() as browser:
        browser.open(tmp_path / "wrong.html", 1400)
        assert "✗" in browser.run("document.getElementById('verdict').textContent")
        assert browser.run("document.querySelectorAll('#proof-table tr[data-ok=false]').length") >= 2
        assert browser.run("document.querySelectorAll('#proof-picture path').length") > 3 and browser.errors == []


# ---- larger ones ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, arguments",
    [
        (128, ["gpt3_175b", "--device", "h100"]),
        (8, ["gpt3_13b", "parallel.tp=2", "parallel.pp=2", "precision.fp8=delayed", "train.recompute=selective"]),
        (4, ["quickstart", "parallel.cp=2", "parallel.tp=2", "precision.dtype=bf16"]),
        (4, ["quickstart", "parallel.pp=2", "parallel.schedule=zb-h1", "train.recompute=full", "--device", "a100"]),
        (8, ["quickstart", "parallel.cp=2", "parallel.cp_style=ulysses", "parallel.pp=2", "parallel.vp=2"]),
        (1, ["gpt2_124m", "train.global_batch_size=8"]),
    ],
)
def test_tours_of_other_layouts(tmp_path, world, arguments):
    path = tmp_path / "tour.html"
    tool.main([*arguments, "--world", str(world), "--output", str(path)])
    (data,) = re.findall(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    page = json.loads(data)
    assert page["proof"]["ok"], [row for row in page["proof"]["rows"] if not row["ok"]]
    assert path.stat().st_size < 5_000_000
    if PROGRAM is not None:
        with Browser() as browser:
            for width in (1400, 400):
                browser.open(path, width)
                assert browser.errors == [] and browser.run("document.documentElement.scrollWidth") <= width
                count = browser.run("document.querySelectorAll('#tokens-picture svg').length")
                assert count == (page["sizes"]["cp"] > 1)
                rows = browser.run("[...document.querySelectorAll('#format-table tbody tr')].map(x => x.textContent)")
                assert len(rows) == 4 and all(("e5m2" in row) == (page["precision"]["fp8"] != "none") for row in rows)
