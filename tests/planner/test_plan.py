"""tools/plan.py and its pictures; the planner's constants and how far its predictions are off."""

import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm
from benchmarks import calibration, ceilings, record
from benchmarks.cases import CASES
from layouts import DATA_PARALLEL
from minitron.config import cli, flops, rules
from minitron.config.save_interval import best_interval
from minitron.config.schema import changed
from minitron.planner import command as tool
from minitron.planner import cost, fit, pictures
from minitron.planner import failures as constants
from minitron.planner import search as search_module
from minitron.planner.draw import draw_svg
from minitron.planner.failures import (
    COPY_SECONDS,
    NOTICE_SECONDS,
    READ_GB_S,
    SHARED_GB_S,
    SLOWER,
    START_SECONDS,
    WRITE_GB_S,
    failures,
    predict,
    state_bytes,
)
from minitron.planner.fit import memory_options, written
from minitron.planner.machine import choose_machine, read_machines
from minitron.planner.memory import Memory
from minitron.planner.plan import available_gib, plan
from minitron.planner.published import PUBLISHED, configuration, published_steps
from minitron.planner.work import HIDDEN

ROOT = Path(__file__).resolve().parents[2]
LLAMA = [str(ROOT / "configs" / "llama3_8b.yaml"), *DATA_PARALLEL]
KEYS = [*LLAMA, "train.global_batch_size=32", "parallel.tp=2"]
DP8 = [*KEYS, "--world", "8", "--device", "h100"]


def never_fails(job):
    return 1.0


def machine_of(argv):
    options = tool.parse(argv)
    return choose_machine(options.device, options.fabric, options.software, options.devices)


def printed(capsys, *argv):
    tool.main(list(argv))
    return capsys.readouterr().out


# ---- the command -----------------------------------------------------------------------------------------------------


def test_json_and_table_say_the_same(capsys):
    record, table = json.loads(printed(capsys, *DP8, "--json", "--tokens", "2e12")), printed(capsys, *DP8)
    job = plan(cli.load(KEYS), 8, machine_of(DP8))
    assert record["step_seconds"] == job.step_seconds and record["mfu_percent"] == job.mfu_percent
    assert record["memory_gib"] == pytest.approx(sum(record["memory"].values())) == pytest.approx(job.memory_gib)
    assert f"  and {record['graph_gib']:17.2f} GiB more if steps are recorded as CUDA graphs\n" in table
    assert record["fits"] is True and record["room_gib"] == available_gib(job.machine, job.sizes)
    assert record["step_seconds"] == pytest.approx(
        sum(seconds for part, seconds in record["seconds"].items() if part not in HIDDEN)
    )
    assert record["days"] == pytest.approx(2e12 / (32 * 8192 / record["step_seconds"]) / 86400)
    assert record["layout"] == {"tp": 2, "pp": 1, "vp": 1, "cp": 1, "dp": 4, "micro_batch_size": 1, "recompute": "none"}
    for text in (
        f"{record['memory_gib']:.2f} GiB",
        "fits",
        f"{record['step_seconds']:.3f} s",
        f"{record['mfu_percent']:.2f} %",
        f"{record['seconds']['gemm']:.3f} s",
        f" and {record['seconds']['tp_hidden']:.3f} s hidden",
    ):
        assert text in table
    # Every part with its share; of the step's also those that take no time themselves but have a hidden part.
    for part, gib in record["memory"].items():
        line = f"  {part:12} {gib:8.2f} GiB {100 * gib / record['memory_gib']:5.1f} %\n"
        assert (line in table) == (gib > 0)
    for part in pictures.MEANINGS:
        seconds, hidden = record["seconds"][part], record["seconds"].get(part.replace("_exposed", "_hidden"), 0)
        line = f"  {part:12} {seconds:8.3f} s   {100 * seconds / record['step_seconds']:5.1f} %   "
        shown = seconds > 5e-4 * record["step_seconds"] or part.endswith("_exposed") and hidden > 5e-4
        assert (line in table) == shown
    assert f"   {record['days'] / 2:,.1f} days for 1e+12 tokens\n" in table
    assert f"   {record['days']:,.1f} days for 2e+12 tokens\n" in printed(capsys, *DP8, "--tokens", "2e12")
    tuned = [*DP8, "finetune.kind=lora"]  # nobody tunes on so many tokens; if they are given, they cost
    assert "tokens\n" not in printed(capsys, *tuned).replace("tokens/s\n", "")
    assert " days for 1e+09 tokens\ncost " in re.sub(
        r"tokens\n.*\ncost", "tokens\ncost", printed(capsys, *tuned, "--tokens", "1e9"), flags=re.S
    )


@pytest.mark.parametrize(
    "keys, text",
    [
        ([], "tp 1, pp 1, vp 1, cp 1, dp 8, 4 microbatches of 1, recompute none"),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=false", "train.recompute=full"],
            "tp 2, pp 1, vp 1, cp 1, dp 4, 8 microbatches of 1, recompute full, no sequence parallel",
        ),
        (
            ["parallel.pp=4", "parallel.layers_per_stage=[9,8,8,7]", "train.micro_batch_size=2"],
            "tp 1, pp 4, vp 1, cp 1, dp 2, 8 microbatches of 2, recompute none, layers 9, 2 x 8, 7",
        ),
        (
            ["parallel.pp=2", "parallel.schedule=zb-h1"],
            "tp 1, pp 2, zb-h1, vp 1, cp 1, dp 4, 8 microbatches of 1, recompute none",
        ),
        (
            ["parallel.cp=2", "parallel.cp_style=ulysses"],
            "tp 1, pp 1, vp 1, cp 2 ulysses, dp 4, 8 microbatches of 1, recompute none",
        ),
        (["parallel.cp=2"], "tp 1, pp 1, vp 1, cp 2, dp 4, 8 microbatches of 1, recompute none"),
    ],
)
def test_a_layout_in_words(keys, text):
    assert tool.layout(cli.load([*LLAMA, "train.global_batch_size=32", *keys]), 8) == text


def test_the_record_names_what_was_planned():
    """The job's fullest rank is an inner one, and its device and software are not the usual ones."""
    layers = "parallel.layers_per_stage=[4,14,10,4]"
    argv = [*LLAMA, "train.global_batch_size=32", "parallel.pp=4", layers, "train.micro_batch_size=2"]
    command = [*argv, "--world", "8", "--device", "h200", "--software", "megatron"]
    found = tool.record(plan(cli.load(argv), 8, machine_of(command)), 1e12)
    names = ("world", "gpu", "software", "microbatches", "fullest_pipeline_rank", "stays_eager", "fits")
    assert [found[name] for name in names] == [8, "H200", "megatron", 8, 1, False, True]
    layout = {"tp": 1, "pp": 4, "vp": 1, "cp": 1, "dp": 2, "micro_batch_size": 2, "recompute": "none"}
    assert found["layout"] == layout


def test_capitals_of_a_device_do_not_count(capsys):
    text = printed(capsys, *DP8, "--fabric", "ndr400")
    assert printed(capsys, *DP8[:-1], "H100", "--fabric", "NDR400") == text


def test_what_failures_cost_was_measured_or_assumed():
    """The sources are in `SOURCES`; the other tests take these by their names."""
    assert {name: value for name, value in vars(constants).items() if isinstance(value, int | float)} == {
        "SAVED_BYTES": 12,
        "WRITE_GB_S": 0.91,
        "READ_GB_S": 0.95,
        "SHARED_GB_S": 50,
        "COPY_SECONDS": 0.007,
        "SLOWER": 0.004,
        "NOTICE_SECONDS": 60,
        "START_SECONDS": 10,
    }


def test_failures_make_days_longer(capsys):
    """By the formula, with the bytes of the state counted by hand; what is given replaces an estimate."""
    argv = [*DP8, "--tokens", "2e12", "--mtbf-hours", "2"]
    record, table = json.loads(printed(capsys, *argv, "--json")), printed(capsys, *argv)
    found, state = record["failures"], 12 * 8_030_261_248 / 1e9  # Llama 3 8B
    assert found["mtbf_seconds"] == 7200 and found["save_seconds"] == pytest.approx(state / (8 * WRITE_GB_S), rel=1e-6)
    assert found["save_cost_seconds"] == pytest.approx(COPY_SECONDS + SLOWER * found["save_seconds"])
    assert found["recovery_seconds"] == pytest.approx(
        NOTICE_SECONDS + START_SECONDS + state / (8 * READ_GB_S), rel=1e-6
    )
    costs = found["save_cost_seconds"], found["save_seconds"]
    assert found["interval_seconds"] == best_interval(*costs, 7200.0)
    assert found["goodput"] == predict(found["interval_seconds"], *costs, found["recovery_seconds"], 7200.0)
    assert found["days"] == pytest.approx(record["days"] / found["goodput"])
    assert f"failures every 2 h: {100 * found['goodput']:.2f} % of the time counts, {found['days']:,.1f} days" in table
    steps = round(found["interval_seconds"] / record["step_seconds"])
    configured = predict(100 * record["step_seconds"], *costs, found["recovery_seconds"], 7200.0)
    assert f"   checkpoint.every=100: {100 * configured:.2f} %\n" in table
    assert f"checkpoint.every={steps}, or auto" in table
    assert table.count("benchmarks/checkpoint.py on an H200") == 3
    assert found["gpu_hours"] == pytest.approx(8 * 24 * found["days"])
    assert f"cost   {found['gpu_hours']:,.0f} GPU-hours with failures; " in table
    given = ["--recovery-seconds", "60", "--save-cost-seconds", "8", "--save-seconds", "10"]
    found = json.loads(printed(capsys, *argv, *given, "--json"))["failures"]
    # Young's sqrt(2 * 8 * 7200) = 339.4 s; Daly's terms add 8.5 s and take the 8 s off.
    assert found["interval_seconds"] == pytest.approx(339.4 - 8 + 2.7, abs=0.2)
    assert (found["recovery_seconds"], found["save_cost_seconds"], found["save_seconds"]) == (60, 8, 10)
    assert printed(capsys, *argv, *given).count("as given") == 3
    cheap = ["--mtbf-hours", "0.001", "--save-cost-seconds", "0.001", "--save-seconds", "0.01", "--json"]
    found = json.loads(printed(capsys, *DP8, *cheap))["failures"]
    assert found["interval_seconds"] < record["step_seconds"] / 2 and found["interval_steps"] == 1


@pytest.mark.parametrize(
    "keys",
    [["parallel.pp=4", "parallel.layers_per_stage=[9,8,8,7]"], ["parallel.pp=4", "parallel.vp=2"], ["parallel.cp=4"]],
)
def test_no_layout_changes_what_is_saved(keys):
    assert state_bytes(cli.load([*KEYS, *keys])) == state_bytes(cli.load(LLAMA)) == 12 * 8_030_261_248
    adapters = ["finetune.kind=lora", "lora.rank=8", "lora.targets=[q,down]"]
    assert state_bytes(cli.load([*KEYS, *keys, *adapters])) == 12 * 32 * 8 * (4096 + 4096 + 14336 + 4096)


@pytest.mark.parametrize("world", [8, 1024])
@pytest.mark.parametrize("save", [None, 100.0])
def test_the_times_of_failures_that_are_not_given_follow_from_those_that_are(world, save):
    """A save costs by its own seconds; what all GPUs read and write is at most what the shared disk gives."""
    found, state = failures(cli.load(LLAMA), world, 7200.0, None, None, save), 12 * 8_030_261_248 / 1e9
    saved, read = save or state / min(world * WRITE_GB_S, SHARED_GB_S), state / min(world * READ_GB_S, SHARED_GB_S)
    assert found.save_seconds == pytest.approx(saved)
    assert found.save_cost_seconds == pytest.approx(COPY_SECONDS + SLOWER * saved)
    assert found.recovery_seconds == pytest.approx(NOTICE_SECONDS + START_SECONDS + read)


def test_jobs_of_other_sizes_fail_in_proportion_to_their_gpus(capsys):
    argv = [*DP8, "--mtbf-hours", "2", "--sweep", "world=8,32"]
    small, large = json.loads(printed(capsys, *argv, "--json"))
    assert (small["failures"]["mtbf_seconds"], large["failures"]["mtbf_seconds"]) == (7200, 1800)
    assert large["gpu_hours"] / large["failures"]["gpu_hours"] == pytest.approx(large["failures"]["goodput"])
    table = printed(capsys, *argv)
    assert "days and GPU-hours with failures" in table and f"{large['failures']['gpu_hours']:,.0f}  world=32" in table
    assert "no end" in printed(capsys, *argv, "--recovery-seconds", "1e9")
    assert f"{small['gpu_hours']:,.0f}  world=8" in printed(capsys, *DP8, "--sweep", "world=8,32")


def test_a_large_job_writes_at_the_shared_disk_s_rate(capsys):
    job = [str(ROOT / "configs" / "gpt3_175b.yaml"), "train.global_batch_size=4096", "--world", "2048"]
    argv = [*job, "--device", "h100", "--mtbf-hours", "4", "--json"]
    found = json.loads(printed(capsys, *argv))["failures"]
    assert found["save_seconds"] == pytest.approx(2095.4 / SHARED_GB_S, rel=1e-3)  # launch/check.sh counts 2,095.4 GB
    assert 0.9 < found["goodput"] < 1 and found["interval_seconds"] == pytest.approx(2 * found["save_seconds"])


def test_lora_and_documents_are_faster_and_their_mfu_counts_what_they_do(capsys):
    documents = ["data.source=mock", "data.separate_documents=true", "data.document_length=512"]
    plain, packed, lora = (
        json.loads(printed(capsys, *DP8, "--json", *extra))
        for extra in ([], documents, [*documents, "finetune.kind=lora"])
    )
    assert plain["step_seconds"] > packed["step_seconds"] > 1.3 * lora["step_seconds"]
    assert plain["memory_gib"] == packed["memory_gib"] > 2 * lora["memory_gib"]
    work = [job["mfu_percent"] * job["step_seconds"] for job in (plain, packed, lora)]
    assert work[0] > work[1] == pytest.approx(work[2] / flops.FROZEN)


def test_search_ranks_says_what_it_changes_and_why_others_fell(capsys):
    record = json.loads(printed(capsys, *DP8, "--search", "--json", "--count", "3"))
    text = printed(capsys, *DP8, "--search", "--count", "3")
    steps = [best["step_seconds"] for best in record["best"]]
    assert len(steps) == 3 and steps == sorted(steps) and steps[0] < record["given"]["step_seconds"]
    assert " ".join(written(record["changes"][0])) in text
    for best, keys in zip(record["best"], record["changes"]):
        job = plan(cli.load([*KEYS, *written(keys)]), 8, machine_of(DP8))
        figures = f"{best['step_seconds']:8.3f} {best['mfu_percent']:.2f} %".replace(" ", "")
        assert (
            sum(
                line.replace(" ", "").startswith(figures) and line.endswith(tool.layout(job.cfg, 8))
                for line in text.splitlines()
            )
            == 1
        )
    for reason, count in record["reasons"].items():
        assert f"{count:6} layouts: {reason}" in text
    assert f"{100 * (record['given']['step_seconds'] / steps[0] - 1):.1f} % faster" in text
    assert f"{record['others_that_fit']} other layouts fit; the next one takes " in text


def test_a_search_needs_no_layout_that_fits_or_is_possible(capsys):
    """From one that cannot be for this world, and from one that has no room."""
    given = [*LLAMA, "train.global_batch_size=48", "parallel.tp=4"]
    argv = [*given, "--world", "6", "--device", "h100", "--search"]
    tool.main([*argv, "--count", "1"])
    out, err = capsys.readouterr()
    assert "the given layout breaks a rule: parallel.tp*pp*cp=4*1*1=4 does not divide the world of 6 ranks" in err
    assert out.startswith("given: tp 1, pp 1, vp 1, cp 1, dp 6,") and "does not fit" in out.splitlines()[0]
    assert "% slower, but it fits (" in out or "% faster (" in out
    record = json.loads(printed(capsys, *argv, "--json", "--count", "1"))
    assert record["given"]["fits"] is False and record["best"][0]["fits"] is True
    # What it would change is of the configuration as it was given, not of the layout in its place.
    followed = [*given, *(f"{key}={value}" for key, value in record["changes"][0].items()), *argv[len(given) : -1]]
    assert json.loads(printed(capsys, *followed, "--json"))["layout"] == record["best"][0]["layout"]


@pytest.mark.parametrize(
    "keys",
    [
        ["parallel.pp=4", "parallel.layers_per_stage=[8,8,8,8]"],
        ["parallel.pp=4", "parallel.vp=2"],
        ["parallel.pp=4", "parallel.schedule=zb-h1"],
        ["parallel.cp=4"],
        ["train.micro_batch_size=5"],
    ],
)
def test_a_search_begins_with_any_layout(keys):
    """Every key of one that this world cannot have is dropped for it."""
    found = tool.searchable(cli.load([*LLAMA, "train.global_batch_size=48", *keys]), 6, quiet=True)
    rules.check(found, 6)
    assert found.parallel == replace(found.parallel, tp=1, pp=1, vp=1, cp=1, schedule="1f1b", layers_per_stage=None)


def test_a_given_layout_that_is_the_fastest_is_said_to_be(capsys):
    best = json.loads(printed(capsys, *DP8, "--search", "--json", "--count", "1"))["changes"][0]
    keys = [f"{key}={value}" for key, value in best.items()]
    text = printed(capsys, *KEYS, *keys, *DP8[len(KEYS) :], "--search", "--count", "1")
    assert "the given layout is the fastest that fits" in text


def test_a_job_that_does_not_fit_is_one_line_and_status_1():
    command = [ROOT / "tools/plan.py", *LLAMA, "train.global_batch_size=16", "--world", "4", "--device", "h100"]
    done = warm.run(*command)
    assert done.returncode == 1 and "does not fit" in done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "; use " in done.stderr
    remedies = done.stderr.strip().split("; use ")[1].split(", or ")
    assert remedies and all(warm.run(*command, *remedy.split(" and ")).returncode == 0 for remedy in remedies)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--world", "0", "--device", "h100"], "argument --world: 0 is not a whole number of 1 or more"),
        (
            ["--world", "8", "--device", "v100"],
            "--device v100 is not in .*devices.json; use h200, h100, a100, a100-40gb",
        ),
        (["--world", "8", "--device", "h100", "--fabric", "x"], "--fabric x is not in .*; use ndr400, a3-mega, "),
        (["--world", "8", "--device", "h100", "--tokens", "inf"], "--tokens: inf is not a positive number"),
        (["--world", "many", "--device", "h100"], "argument --world: many is not a whole number of 1 or more"),
        (["--world", "8", "--device", "h100", "--tokens", "many"], "--tokens: many is not a positive number"),
        (["--world", "5", "--device", "h100", "--search"], "train.global_batch_size=48 is not a multiple of"),
        (["--world", "8", "--device", "h100", "--search", "--draw", "x"], "--draw shows one plan; leave --search and"),
        (["--world", "6", "--device", "h100", "parallel.tp=4"], "does not divide the world of 6 ranks"),
        (["--world", "8", "--device", "h100", "--devices", "none.json"], "none.json is not a table of devices"),
        (["--world", "8", "--device", "h100", "--save-seconds", "9"], "--save-seconds needs the time between failures"),
        (["--world", "8", "--device", "h100", "--search", "--mtbf-hours", "2"], "--mtbf-hours is of one plan; leave"),
        (["--world", "8", "--device", "h100", "--sweep", "world=8", "--draw", "x"], "--draw shows one plan; leave "),
        (["--world", "8", "--device", "h100", "--sweep", "world=8,"], "world=8, is not KEY=VALUE,VALUE"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises(ValueError, match=message):
        tool.main([*LLAMA, "train.global_batch_size=48", *argv])


def test_a_search_that_finds_nothing_names_the_nearest_change(capsys):
    """Of the configuration as it was given, whose layout cannot be on so few GPUs."""
    job = [str(ROOT / "configs" / "llama31_70b.yaml"), "train.global_batch_size=64", "--device", "a100"]
    with pytest.raises(ValueError, match="GiB do not fit into .* GPUs") as caught:
        tool.main([*job, "--world", "4", "--search"])
    gpus, *keys = str(caught.value).split("; use ")[1].split(" and ")
    world = gpus.removesuffix(" GPUs")
    assert json.loads(printed(capsys, *keys, *job, "--world", world, "--json"))["fits"]


# ---- whose software, and what makes a job lighter --------------------------------------------------------------------


def test_software_is_named_and_an_eager_step_is_told_what_it_waits_for(capsys):
    argv = [*DP8, "precision.fp8=delayed"]
    ours, theirs = (json.loads(printed(capsys, *argv, "--json", "--software", x)) for x in ("minitron", "megatron"))
    assert (ours["software"], theirs["software"]) == ("minitron", "megatron")
    assert ours["seconds"]["pointwise"] < theirs["seconds"]["pointwise"] and ours["seconds"]["host"] == 0
    few = [*LLAMA, "train.global_batch_size=8", "parallel.tp=8", "train.seq_len=1024", "--world", "8"]
    argv = [*few, "--device", "h100"]
    off, eager = printed(capsys, *argv, "train.cuda_graph=off"), printed(capsys, *argv, "--software", "minitron-eager")
    assert "record steps as CUDA graphs, train.cuda_graph=auto" in off and " waiting for the host\n" in off
    assert "use larger microbatches, less tensor parallelism, or a faster CPU" in eager
    assert "bound by the host" not in printed(capsys, *argv)


def test_a_step_whose_graphs_find_no_room_is_planned_eager_and_told_what_makes_room(capsys, tmp_path):
    keys = [*LLAMA, "parallel.tp=4", "parallel.pp=2", "parallel.vp=1", "precision.fp8=delayed"]
    argv = [*keys, "train.global_batch_size=128", "--world", "8", "--device", "h100"]
    roomy, table = json.loads(printed(capsys, *argv, "--json")), json.loads(tool.DEVICES.read_text())
    outside = table["devices"]["h100"]["memory_gib"] - roomy["room_gib"]
    table["devices"]["h100"]["memory_gib"] = roomy["memory_gib"] + 0.5 * roomy["graph_gib"] + outside
    (tmp_path / "devices.json").write_text(json.dumps(table))
    argv += ["--devices", str(tmp_path / "devices.json")]
    crowded, off = (json.loads(printed(capsys, *argv, *more, "--json")) for more in ([], ["train.cuda_graph=off"]))
    assert crowded["fits"] and crowded["stays_eager"] and not roomy["stays_eager"] and not off["stays_eager"]
    assert crowded["step_seconds"] == off["step_seconds"] > roomy["step_seconds"] and crowded["seconds"]["host"] > 0
    text = printed(capsys, *argv)
    assert "GiB more if steps are recorded as CUDA graphs: no room for that, so they stay eager\n" in text
    assert "launches kernels too slowly: make room for CUDA graphs, by keys below, " in text
    lighter = re.search(r"(\S+=\S+): recorded\n", text)[1]
    recorded = json.loads(printed(capsys, *argv, lighter, "--json"))
    assert not recorded["stays_eager"] and recorded["step_seconds"] < crowded["step_seconds"]
    eager = json.loads(printed(capsys, *argv, "--json", "--software", "minitron-eager"))
    assert eager["graph_gib"] == 0 and not eager["stays_eager"]


def test_a_job_that_does_not_fit_is_told_what_each_key_would_save(capsys):
    job = [*LLAMA, "train.global_batch_size=16", "train.micro_batch_size=2", "parallel.tp=2", "--world", "4"]
    first = plan(cli.load(job[:-2]), 4, machine_of([*job, "--device", "h100"]))
    plans = memory_options(first)
    with pytest.raises(ValueError, match="do not fit") as caught:
        tool.main([*job, "--device", "h100"])
    text = capsys.readouterr().out
    assert any(other.fits for _, other in plans)
    for keys, other in plans:  # as the trainer and this tool take them
        again = plan(cli.load([*job[:-2], *keys]), 4, other.machine)
        assert again.memory_gib == other.memory_gib and again.step_seconds == other.step_seconds
        cost = f"{100 * (other.step_seconds / first.step_seconds - 1):+.1f} %"
        saved = first.memory_gib - other.memory_gib
        line = f"{other.memory_gib:8.2f} {saved:7.2f} {other.step_seconds:9.3f} {cost:>8}   {' '.join(keys)}"
        assert f"{line}{': fits' if other.fits else ''}\n" in text + "\n"
    assert saved > 0 and plans == sorted(plans, key=lambda pair: pair[1].step_seconds)
    fastest = next(keys for keys, other in plans if other.fits)  # the last line names it, as the table does
    assert str(caught.value).split("; use ")[1].split(", or ")[0] == " and ".join(fastest)
    names = {keys[0] for keys, _ in plans}
    assert {"model.head_piece=2048", "train.micro_batch_size=1", "train.recompute=full"} <= names
    assert not names & {"train.recompute=none", "optimizer.grad_dtype=bf16"}  # two data ranks: a slice is as large


def test_keys_are_added_up_where_none_alone_is_enough(monkeypatch):
    job = [*LLAMA, "train.global_batch_size=16", "train.micro_batch_size=2", "precision.fp8=delayed", "parallel.tp=4"]
    machine = machine_of(DP8)
    first = plan(cli.load(job), 4, machine)
    least = min(other.memory_gib for _, other in memory_options(first))
    nccl = first.sizes.communicators() / 2**30
    small = replace(machine, device=replace(machine.device, memory_gib=least - 0.5 + nccl, context_gib=0.0))
    found = memory_options(replace(first, machine=small))
    assert not any(other.fits for keys, other in found if len(keys) == 1)
    keys, last = found[-1]
    assert len(keys) > 1 and last.fits and len({key.split("=")[0] for key in keys}) == len(keys)
    assert last.memory_gib == plan(cli.load([*job, *keys]), 4, small).memory_gib
    # Where less than all of them is enough, the later ones are left out.
    monkeypatch.setattr(fit, "KEYS", fit.KEYS[:-1])
    least = min(other.memory_gib for _, other in memory_options(first))
    small = replace(small, device=replace(small.device, memory_gib=least - 0.2 + nccl))
    keys, last = memory_options(replace(first, machine=small))[-1]
    assert keys == ["model.head_piece=2048", "train.recompute=selective", "train.micro_batch_size=1"] and last.fits
    assert not plan(cli.load([*job, *keys[:-1]]), 4, small).fits


def test_what_a_search_found_in_words_and_numbers():
    """The given layout breaks a rule, so another one is planned in its place."""
    given = cli.load([*KEYS, "parallel.tp=4", "train.micro_batch_size=4"])
    layouts = "tp=1", "sequence_parallel=false", "pp=2"
    job, best, less = (plan(cli.load([*KEYS, f"parallel.{key}"]), 8, machine_of(DP8)) for key in layouts)
    best = replace(best, stays_eager=True)
    others = [(cli.load([*KEYS, f"parallel.tp={tp}"]), seconds) for tp, seconds in ((8, 7.125), (1, 8.25))]
    found = search_module.Found([best, less], [best, less], others, Counter({"few": 2, "many": 30}))
    record, text = tool.search_record(found, job, given, 2e12), tool.ranking(found, job, given)
    of_best = {"parallel.tp": 2, "parallel.sequence_parallel": False, "train.micro_batch_size": 1}
    of_less = {"parallel.tp": 2, "parallel.pp": 2, "train.micro_batch_size": 1}
    assert record["given"] == tool.record(job, 2e12) and record["others_that_fit"] == 2
    assert record["best"] == [tool.record(best, 2e12), tool.record(less, 2e12)]
    assert record["changes"] == [of_best, of_less] and less.fits
    assert record["smaller"] == [tool.record(less, 2e12) | {"changes": of_less}]
    assert record["reasons"] == {"few": 2, "many": 30}
    lines = text.splitlines()
    assert lines[0].startswith(f"given: {tool.layout(job.cfg, 8)}: {job.step_seconds:.3f} s, MFU {job.mfu_percent:.2f}")
    assert lines[0].endswith(f" {job.memory_gib:.1f} GiB" + ", does not fit" * (not job.fits))
    assert [line.split()[:4] for line in lines[3:5]] == [
        [f"{p.step_seconds:.3f}", f"{p.mfu_percent:.2f}", "%", f"{p.memory_gib:.1f}"] for p in (best, less)
    ]
    assert lines[3].endswith(tool.layout(best.cfg, 8) + ", eager") and lines[4].endswith(tool.layout(less.cfg, 8))
    slower = 100 * (less.step_seconds / best.step_seconds - 1)
    keys = "parallel.tp=2 parallel.pp=2 train.micro_batch_size=1"
    assert lines[6].startswith("parallel.tp=2 parallel.sequence_parallel=false train.micro_batch_size=1: ")
    assert lines[7] == f"with {less.memory_gib:.1f} GiB, {slower:.1f} % slower: {keys}"
    assert lines[8] == f"2 other layouts fit; the next one takes 7.125 s or more: {tool.layout(others[0][0], 8)}"
    assert lines[9:] == ["    30 layouts: many", "     2 layouts: few"]


def test_every_key_that_makes_another_layout_is_named_and_no_other():
    before, after = (
        cli.load(KEYS),
        dict(cp_style="ulysses", sequence_parallel=False, schedule="zb-h1", vp=2, pp=4, cp=2),
    )
    after = dict(
        parallel=after | dict(tp=4, layers_per_stage=(9, 8, 8, 7)), train=dict(micro_batch_size=2, recompute="full")
    )
    for section, values in after.items():
        for key, value in values.items():
            assert fit.changes(before, changed(before, **{section: {key: value}})) == {f"{section}.{key}": value}
    every = {f"{section}.{key}": value for section, values in after.items() for key, value in values.items()}
    others = dict(train=after["train"] | dict(seq_len=1024, cuda_graph="off"), precision=dict(fp8="delayed"))
    assert fit.changes(before, changed(before, parallel=after["parallel"], **others)) == every
    assert fit.changes(cli.load([*KEYS, *written(every)]), changed(before, **after)) == {}
    assert written({"a": None, "b": False, "c": (1, 2), "d": "full"}) == ["a=null", "b=false", "c=[1,2]", "d=full"]


@pytest.mark.parametrize(
    "seconds, verdict",
    [
        (dict(gemm=2.0, bubble=1.0, optimizer=1.0), "25.0 % faster (gemm -2.000 s, bubble +1.000 s)"),
        (dict(gemm=5.25, bubble=0.0, optimizer=1.0), "20.0 % slower, but it fits (gemm +1.250 s)"),
    ],
)
def test_what_another_layout_gains_by_part(seconds, verdict):
    given = SimpleNamespace(seconds=Counter(gemm=4.0, optimizer=1.0), step_seconds=5.0)
    best = SimpleNamespace(seconds=Counter(seconds), step_seconds=sum(seconds.values()))
    assert tool.difference(given, best, {"parallel.tp": 2}) == f"parallel.tp=2: {verdict}"


def test_a_sweep_s_rows_in_a_table_and_without_a_layout_that_fits(capsys):
    row = dict(step_seconds=2.5, mfu_percent=None, memory_gib=70.25, tokens_per_second=1e6, days=3.5, gpu_hours=100.0)
    rows = [row | dict(sweep={"world": world}, fits=fits, says="x") for world, fits in (("8", True), ("4", False))]
    lines = tool.sweep_table(rows, 1e12).splitlines()[2:]
    said = [
        ["2.500", "?", "70.2" + mark, "1,000,000", "3.5", "100", f"world={n}:", "x"] for n, mark in ((8, ""), (4, "*"))
    ]
    assert [line.split() for line in lines] == said
    # Without a world among the values it is the given one; a search that finds nothing shows the given layout.
    argv = [*LLAMA, "--world", "1", "--device", "a100-40gb", "--search", "--sweep", "train.global_batch_size=1,2"]
    found = json.loads(printed(capsys, *argv, "--json"))
    assert [(row["world"], row["fits"], row["changes"]) for row in found] == [(1, False, {})] * 2


def test_less_memory_is_shown_with_its_cost(capsys):
    record = json.loads(printed(capsys, *DP8, "--search", "--json", "--count", "1"))
    text = printed(capsys, *DP8, "--search", "--count", "1")
    assert record["smaller"]
    for less in record["smaller"]:
        slower = 100 * (less["step_seconds"] / record["best"][0]["step_seconds"] - 1)
        assert f"with {less['memory_gib']:.1f} GiB, {slower:.1f} % slower: " in text
        keys = " ".join(written(less["changes"]))
        followed = json.loads(printed(capsys, *KEYS, *keys.split(), *DP8[len(KEYS) :], "--json"))
        assert followed["step_seconds"] == less["step_seconds"] and followed["memory_gib"] == less["memory_gib"]


def test_a_sweep_plans_every_combination(capsys):
    argv = [*DP8, "--sweep", "world=8,7,16", "--sweep", "train.global_batch_size=56,112"]
    rows, text = json.loads(printed(capsys, *argv, "--json")), printed(capsys, *argv)
    assert [(row["sweep"]["world"], row["sweep"]["train.global_batch_size"]) for row in rows] == [
        (world, batch) for world in ("8", "7", "16") for batch in ("56", "112")
    ]
    failing, rows = rows[2:4], rows[:2] + rows[4:]
    for row in rows:
        job = plan(
            cli.load([*KEYS, f"train.global_batch_size={row['sweep']['train.global_batch_size']}"]),
            row["world"],
            machine_of(DP8),
        )
        assert row["step_seconds"] == job.step_seconds
        assert row["gpu_hours"] == pytest.approx(row["days"] * 24 * row["world"])
        assert f"{row['gpu_hours']:12,.0f}" in text
    for row in failing:
        assert "does not divide the world of 7 ranks" in row["error"]
        assert f"world=7 train.global_batch_size={row['sweep']['train.global_batch_size']}: {row['error']}\n" in text
    assert "with failures" not in text
    searched = json.loads(printed(capsys, *argv, "--search", "--json"))
    for best in searched[2:4]:  # a search finds layouts of a world that has not the given one
        assert (best["world"], best["layout"]["tp"]) == (7, 1) and best["fits"]
        assert best["changes"]["parallel.tp"] == 1  # of what was given, not of the layout in its place
    del searched[2:4]
    assert all(best["step_seconds"] <= row["step_seconds"] for best, row in zip(searched, rows, strict=True))
    with pytest.raises(ValueError, match="world is not KEY=VALUE,VALUE"):
        tool.main([*DP8, "--sweep", "world"])


def test_a_search_shows_a_terminal_that_it_goes_on(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    argv = [*DP8, "model.num_layers=4", "--search"]
    text = printed(capsys, *argv)
    for stderr, shown in (Terminal(), True), (io.StringIO(), False):
        monkeypatch.setattr("sys.stderr", stderr)
        assert printed(capsys, *argv) == text
        assert bool(re.search(r"searching: \d+ layouts", stderr.getvalue())) == shown


def test_the_cost_has_the_range_of_the_held_out_errors(capsys, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"h100": [0.90, 0.95, 1.0, 1.0, 1.05, 1.1, 1.2], "a100": [3.0]}))
    off = cost.error_range("H100", path)
    assert (off.low, off.high, off.rows) == (pytest.approx(0.93), pytest.approx(1.14), 7)
    assert cost.error_range("A100", path).rows == 8  # one row is no range
    assert cost.error_range("H100", tmp_path / "none.json") is None
    text, off = printed(capsys, *DP8), cost.error_range("H100")
    job = plan(cli.load(KEYS), 8, machine_of(DP8))
    hours = 1e12 / job.tokens_per_second / 3600 * 8
    assert f"cost   {hours:,.0f} GPU-hours; {hours * off.low:,.0f} to {hours * off.high:,.0f}, or " in text
    assert off.low < 1 < off.high and off.rows > 20
    for name in "h100", "h200", "a100":  # the cost lies inside its own range
        off = cost.error_range(name)
        assert off.low <= 1 <= off.high and off.low < off.high
    path.write_text(json.dumps({"h200": [1.01, 1.02, 1.03, 1.04, 1.05]}))
    assert cost.error_range("H200", path)[:2] == (1.0, pytest.approx(1.046))
    path.write_text(json.dumps({"h200": [0.99, 0.98, 0.97, 0.96, 0.95]}))
    assert cost.error_range("H200", path)[:2] == (pytest.approx(0.954), 1.0)
    figure = cost.curves(pictures.scaling(job, in_proportion=True)[:3], 1e12, never_fails)
    assert figure.axes[0].lines[0].get_ydata()[0] == pytest.approx(hours)
    scaled = pictures.scaling(job, in_proportion=True)[:3]
    # the third has no end
    figure = cost.curves(scaled, 1e12, lambda job: {8: 0.5, 16: 0.25, 32: 0.005}[job.world])
    assert list(figure.axes[0].lines[0].get_xdata()) == [8, 16] and "with failures" in figure.axes[0].get_title("left")
    assert figure.axes[0].lines[0].get_ydata()[0] == pytest.approx(2 * hours)
    never = cost.curves(scaled, 1e12, lambda job: 0.001)  # 1e45 days were drawn of such a job
    assert [axis.texts[0].get_text() for axis in never.axes] == ["no end at any size"] * 2


# ---- pictures --------------------------------------------------------------------------------------------------------


PP2 = [*LLAMA, "train.global_batch_size=32", "parallel.pp=2", "parallel.vp=2"]


def job_of(keys, world, device):
    return plan(cli.load(keys), world, machine_of([*keys, "--world", str(world), "--device", device]))


def test_pictures(capsys, tmp_path):
    tool.main([*PP2, "--world", "8", "--device", "h200", "--draw", str(tmp_path / "plan")])
    out, err = capsys.readouterr()
    names = [Path(line).name for line in err.split()]
    assert names == ["timeline.svg", "memory.png", "time.png", "scaling.png", "cost.png"]
    assert all((tmp_path / "plan" / name).stat().st_size > 1000 for name in names)
    timeline = (tmp_path / "plan" / "timeline.svg").read_text()
    assert timeline == draw_svg(job_of(PP2, 8, "h200").timeline, pictures.bubble(job_of(PP2, 8, "h200")))
    # The bubble of the picture is that of the table, seconds and share; it was another measure.
    seconds, share = re.search(r"bubble +([\d.]+) s +([\d.]+) %", out).groups()
    assert f">bubble {seconds} s, {share} % of the step: waiting for other stages<" in timeline
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--draw .*file cannot be written"):
        list(pictures.draw(job_of(PP2, 8, "h200"), tmp_path / "file", 1e12, never_fails))


@pytest.mark.parametrize("keys", [["parallel.vp=2"], ["parallel.vp=1", "parallel.schedule=zb-h1"]])
def test_the_picture_of_memory_has_every_part_of_every_rank(keys):
    job = job_of([*PP2, *keys], 8, "h200")
    sizes = Memory(job.cfg, 8, gpus_per_node=job.machine.fabric.gpus_per_node)
    bars, lines = pictures.memory(job).axes
    assert bars.yaxis_inverted()  # rank 0 is at the top
    assert bars.get_title(loc="left") == "Memory of all ranks: 2 pipeline ranks of 4 GPUs each"
    assert [label.get_text() for label in bars.get_yticklabels()] == ["rank 0", "rank 1"]
    for container in bars.containers:
        part = container.get_label()
        if part.startswith("CUDA graphs"):
            expected = [sizes.graph(rank) / 2**30 for rank in range(2)]
        else:
            expected = [sizes.bytes_by_part(rank)[part] / 2**30 for rank in range(2)]
        assert [bar.get_width() for bar in container] == pytest.approx(expected) and max(expected) > 0
    parts = {container.get_label() for container in bars.containers}
    assert parts >= {part for rank in range(2) for part, size in sizes.bytes_by_part(rank).items() if size}
    totals = [f"{sizes.bytes_by_part(rank).total() / 2**30:.1f}" for rank in range(2)]
    assert [text.get_text() for text in bars.texts] == totals
    assert [text.get_weight() == "bold" for text in bars.texts] == [rank == job.fullest for rank in range(2)]
    assert set(bars.lines[0].get_xdata()) == {job.room_gib}
    # Each rank's line is its curve, which reaches the peak but for what an operation works with, and comes back.
    for rank, line in enumerate(lines.lines):
        curve = pictures.memory_curve(job, rank)
        assert [tuple(pair) for pair in line.get_xydata()] == curve
        assert line.get_label() == f"rank {rank}" + ", the fullest" * (rank == job.fullest)
        assert curve[-1][1] == pytest.approx(curve[0][1])
        peak = (sizes.bytes_by_part(rank).total() - sizes.bytes_by_part(rank)["working"]) / 2**30
        assert max(gib for _, gib in curve) == pytest.approx(peak)
        (first, before), (last, after) = curve[1:3]  # of the first forward: it leaves what its blocks save, one by one
        event = next(event for event in job.timeline.events if event.rank == rank)
        assert (first, last, before) == (event.start, event.end, curve[0][1]) and after > before


def test_the_bars_of_one_plan_have_all_parts_with_their_values():
    job = job_of(PP2, 8, "h200")
    axes = pictures.time_bars([job]).axes[0]
    bars = axes.patches  # a part that is small leaves no gap
    assert sum(bar.get_width() for bar in bars) == pytest.approx(job.step_seconds, rel=1e-6)
    assert all(a.get_x() + a.get_width() == pytest.approx(b.get_x(), abs=2e-6) for a, b in zip(bars, bars[1:]))
    assert axes.get_title(loc="left") == "Where the time of a step goes" and axes.get_xlabel() == "s"
    texts = " ".join(text.get_text() for text in axes.texts)
    assert f"{job.step_seconds:.3f} s" in texts and axes.get_xlim()[1] > job.step_seconds
    assert all(f"{job.seconds[part]:.3g}" in texts for part in pictures.MEANINGS if job.seconds[part] > 1e-6)


def test_the_bars_of_several_plans_have_all_parts_and_enlarged_those_that_change():
    """The longest part of a step was a number in a label, since it was the same for all."""
    plans = pictures.scaling(job_of(PP2, 8, "h200"), in_proportion=True)[:3]
    figure = pictures.time_bars(plans)
    whole, enlarged = figure.axes
    assert figure.get_figheight() > pictures.time_bars(plans[:1]).get_figheight()  # room for six bars
    shown = {axes: {c.get_label(): [bar.get_width() for bar in c] for c in axes.containers} for axes in figure.axes}
    values = {name: [job.seconds[part] for job in plans] for part, name in pictures.MEANINGS.items()}
    assert shown[whole] == {name: pytest.approx(x) for name, x in values.items() if max(x) > 1e-6}
    assert "matrix products" in shown[whole] and whole.get_xlabel() == "s" and enlarged.get_xlabel() == "ms"
    apart = {name: x for name, x in values.items() if max(x) - min(x) > 1e-3 * plans[0].step_seconds}
    assert shown[enlarged] == {name: pytest.approx([1e3 * y for y in x]) for name, x in apart.items()}
    assert {"optimizer"} <= set(apart) < set(shown[whole])
    for axes, totals in (whole, [job.step_seconds for job in plans]), (enlarged, map(sum, zip(*apart.values()))):
        ends = [sum(widths) for widths in zip(*shown[axes].values())]
        assert max(ends) < axes.get_xlim()[1] < 1.3 * max(ends)
        unit, digits, scale = (" s", 3, 1) if axes is whole else (" ms", 1, 1e3)
        texts = [text.get_text() for text in axes.texts]
        assert [f"{scale * total:.{digits}f}{unit}" for total in totals] == [x for x in texts if x.endswith("s")]
        wide = [x for widths in shown[axes].values() for x in widths if x >= pictures.NARROW * max(ends)]
        assert sorted(f"{x:.3g}" for x in wide) == sorted(x for x in texts if not x.endswith("s"))
        assert [label.get_text() for label in axes.get_yticklabels()] == ["8 GPUs", "16 GPUs", "32 GPUs"]
        assert axes.get_title(loc="left")
    assert {text.get_text() for text in figure.legends[0].texts} == set(shown[whole])
    seconds = {part: (part != "optimizer") * plans[0].seconds[part] for part in pictures.MEANINGS}
    legend = pictures.time_bars([replace(plans[0], seconds=seconds), *plans[1:]]).legends[0]  # others have all parts
    assert {text.get_text() for text in legend.texts} == set(shown[whole])
    # Where nothing changes, or most of the step does, there is nothing to enlarge.
    assert len(pictures.time_bars([plans[0], plans[0]]).axes) == 1
    slower = {part: (1 + (part != "optimizer")) * plans[0].seconds[part] for part in pictures.MEANINGS}
    assert len(pictures.time_bars([plans[0], replace(plans[0], seconds=slower)]).axes) == 1


def test_what_others_published_of_the_same_job_is_drawn_beside_it():
    batch = next(row for row in published_steps() if "gpt3_175b" in str(row.arguments) and row.gpus == 128)
    cfg, device = configuration(batch.arguments), batch.device
    job = replace(job_of(PP2, 8, "h100"), cfg=cfg, world=128, machine=choose_machine(device, batch.fabric))
    points = pictures.published(job)
    assert (128, cfg.train.global_batch_size * cfg.train.seq_len / batch.seconds) in points
    double = replace(
        job, world=256, cfg=replace(cfg, train=replace(cfg.train, global_batch_size=2 * cfg.train.global_batch_size))
    )
    assert points[0] in pictures.published(double)  # with as many samples a GPU
    for other in dict(num_layers=48), dict(hidden_size=64):
        assert not pictures.published(replace(job, cfg=replace(cfg, model=replace(cfg.model, **other))))
    assert not pictures.published(replace(job, machine=choose_machine("h200", None)))
    plans = [replace(job_of(PP2, 8, "h100"), world=8), job_of(PP2, 16, "h100")]
    axes = pictures.curves(plans, plans[:1], points).axes[0]
    drawn = {line.get_label(): list(zip(*line.get_data())) for line in axes.lines}
    rate = plans[0].tokens_per_second
    assert drawn["linear"] == [(8, rate), (16, 2 * rate)] and drawn["published by others"] == points
    assert drawn["planned, batch in proportion"] == [(p.world, p.tokens_per_second) for p in plans]
    assert drawn["planned, batch as given"] == [(8, rate)]


def test_only_the_same_job_is_what_others_published():
    """The rows are of one model: bf16 with another batch for each number of GPUs, and FP8."""
    bf16, fp8 = (
        next(row for row in published_steps() if row.name == f"GPT-3 175B {kind}" and row.gpus == 256)
        for kind in ("bf16", "FP8")
    )

    def found(row=bf16, fabric=None, **sections):
        cfg = changed(configuration(row.arguments), **sections)
        job = SimpleNamespace(cfg=cfg, world=row.gpus, machine=choose_machine(row.device, fabric))
        return set(pictures.published(job))

    def point(row):
        t = configuration(row.arguments).train
        return row.gpus, t.global_batch_size * t.seq_len / row.seconds

    assert point(bf16) in found() and point(fp8) in found(fp8) and not found() & found(fp8)
    assert found() == found(model=dict(hidden_dropout=0.0, attention_dropout=0.0, attention="auto"))
    assert found() == found(parallel=dict(tp=8), train=dict(micro_batch_size=4))
    assert found(fp8) == found(fp8, precision=dict(fp8="current"))
    assert found(fabric="ndr400") == found() and not found(fabric="a3-mega")
    for other in dict(train=dict(seq_len=1024)), dict(finetune=dict(kind="sft")), dict(model=dict(num_layers=48)):
        assert not found(**other)
    # With the batch of a run of more GPUs, and of half as many samples each.
    half = next(row for row in published_steps() if row.name == "GPT-3 175B FP8, MLPerf 4.1" and row.gpus == 512)
    assert found(half) >= {point(row) for row in published_steps() if row.name == half.name}


def test_published_steps_are_read_by_scale_and_kind_of_figure(tmp_path):
    one = dict(config="configs/llama3_8b.yaml", device="h100", seq_len=8192)
    tables = [one | dict(name="a", samples_per_gpu=3, overrides=["parallel.cp=1"],
                         cells=dict(gpus=["8", "16"], step_seconds=["1.5", "2"]))]  # fmt: skip
    scales = dict(gpus=[8, 16], global_batch_size=[64, 96], step_seconds=["3", "4"])
    content = dict(
        tables=tables,
        reports=[one | dict(name="b", gpus=8, global_batch_size=16, tokens_per_second="1024", overrides=[])],
        single=[one | dict(name="c", gpus=4, global_batch_size=8, tflops="500", overrides=[], fabric="a3-mega")],
        sourced=[one | scales | dict(name="d", overrides=["parallel.tp=2"], source="there")],
    )
    path = tmp_path / "published.json"
    path.write_text(json.dumps(content))
    recipe = str(ROOT / one["config"])

    def arguments(batch, *keys):
        return recipe, *keys, f"train.global_batch_size={batch}"

    operations = 8 * flops.full(cli.load([recipe]).model, 8192)
    assert published_steps(path) == [
        ("a", 8, arguments(24, "parallel.cp=1"), "h100", 1.5, None, ""),
        ("a", 16, arguments(48, "parallel.cp=1"), "h100", 2.0, None, ""),
        ("b", 8, arguments(16), "h100", 16 * 8192 / 1024, None, ""),
        ("c", 4, arguments(8), "h100", pytest.approx(operations / (4 * 500e12)), "a3-mega", ""),
        ("d", 8, arguments(64, "parallel.tp=2"), "h100", 3.0, None, "there"),
        ("d", 16, arguments(96, "parallel.tp=2"), "h100", 4.0, None, "there"),
    ]
    assert configuration(arguments(16)) == configuration(("configs/llama3_8b.yaml", "train.global_batch_size=16"))


def test_the_curves_are_of_growing_batches_and_cost_the_given_tokens_with_failures(monkeypatch, tmp_path, capsys):
    drawn = {}
    monkeypatch.setattr(pictures, "MOST_GPUS", 16)
    monkeypatch.setattr(pictures.style, "save", lambda *args: None)
    monkeypatch.setattr(pictures, "curves", lambda *args: drawn.update(scaling=args))
    monkeypatch.setattr(pictures, "time_bars", lambda plans: drawn.update(time=plans))
    monkeypatch.setattr(cost, "curves", lambda *args: drawn.update(cost=args))
    argv = [*PP2, "--world", "8", "--device", "h100", "--tokens", "3e12", "--mtbf-hours", "2"]
    tool.main([*argv, "--draw", str(tmp_path)])
    capsys.readouterr()
    growing, fixed, _ = drawn["scaling"]
    plans, tokens, share = drawn["cost"]
    assert tokens == 3e12 and plans == growing == drawn["time"]
    sizes = [[(job.world, job.cfg.train.global_batch_size) for job in some] for some in (growing, fixed)]
    assert sizes == [[(8, 32), (16, 64)], [(8, 32), (16, 32)]]
    for job in plans:  # of which more GPUs fail more often
        expected = failures(job.cfg, job.world, 7200 * 8 / job.world, None, None, None).goodput()
        assert share(job) == expected < 1
    monkeypatch.setattr(pictures, "MOST_GPUS", 4)  # a job of more has one plan
    assert [job.world for job in pictures.scaling(plans[0], in_proportion=True)] == [8]


@pytest.mark.slow
def test_scaling_stands_beside_what_others_published_of_the_same_job():
    tables = json.loads(PUBLISHED.read_text())["tables"]
    for name, keys in (("GPT-3 175B bf16", []), ("GPT-3 175B FP8", ["precision.fp8=delayed"])):
        cells = next(t["cells"] for t in tables if t["name"] == name)
        job = job_of(["gpt3_175b", "train.global_batch_size=256", *keys], 128, "h100")
        points = pictures.published(job)
        for gpus, tokens in zip(cells["gpus"], cells["tokens_per_second"]):  # the document's own, from rounded seconds
            assert any(at == int(gpus) and rate == pytest.approx(float(tokens), rel=2e-3) for at, rate in points)
        scaled = pictures.scaling(job, in_proportion=True)
        axes = pictures.curves(scaled, [job], points).axes[0]
        drawn = {line.get_label(): list(zip(*line.get_data())) for line in axes.lines}
        assert drawn["published by others"] == points
        assert drawn["planned, batch in proportion"] == [(p.world, p.tokens_per_second) for p in scaled]
        assert [text.get_text() for text in axes.texts] == [f"{p.mfu_percent:.1f} %" for p in scaled]
        assert axes.get_title(loc="left") == "Scaling on H100, with MFU"
    for other in (["train.global_batch_size=384"], ["train.global_batch_size=256", "model.num_layers=48"]):
        assert not pictures.published(job_of(["gpt3_175b", *other, "parallel.vp=1"], 128, "h100"))
    assert not pictures.published(job_of(["gpt3_175b", "train.global_batch_size=256"], 128, "h200"))


def test_scaling_doubles_as_long_as_every_rank_has_a_sample():
    job = plan(cli.load(KEYS), 8, machine_of(DP8))
    for in_proportion, worlds in ((True, [8 << i for i in range(10)]), (False, [8, 16, 32, 64])):
        assert [p.world for p in pictures.scaling(job, in_proportion=in_proportion)] == worlds


# ---- calibration -----------------------------------------------------------------------------------------------------

MACHINES = read_machines(calibration.DEVICES)


def of_configurations(device):
    """The mean error of each published configuration over all its scales."""
    errors = {}
    for row in calibration.published_rows():
        if row.device.startswith(device) and calibration.depth(row) < 5_000:  # larger ones take seconds each
            error = calibration.predict(row, MACHINES).step_seconds / row.seconds - 1
            errors.setdefault(calibration.of_configuration(row), []).append((error, row.name))
    return {mine[0][1]: sum(error for error, _ in mine) / len(mine) for mine in errors.values()}


# What is missed, and why, is in calibration.md: these hold what is reached.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("device, mean, worst", [("h100", 0.04, 0.14), ("a100", 0.06, 0.11)])
def test_published_configurations_are_met_and_none_is_fitted(device, mean, worst):
    errors = of_configurations(device)
    assert {name: f"{error:+.3f}" for name, error in errors.items() if abs(error) > worst} == {}
    assert sum(map(abs, errors.values())) / len(errors) < mean
    rows = calibration.published_rows()
    assert not any(row.fitted for row in rows)
    assert all(row.source for row in rows if row.name.startswith(("Llama 2", "Llama 3.1 405B", "GPT ")))


def test_own_runs_are_met_within_4_percent_and_their_memory_within_1():
    """And without a bias of more than 1.5 %."""
    errors = []
    for row in calibration.own_rows(calibration.RESULTS):
        if row.fitted:
            job = calibration.predict(row, MACHINES)
            errors.append(job.step_seconds / row.seconds - 1)
            assert abs(errors[-1]) < 0.042, row.name  # one misses it by 0.1
            assert job.memory_gib == pytest.approx(row.gib, rel=0.01), row.name
    assert len(errors) >= 15 and abs(sum(errors) / len(errors)) < 0.015


def test_recorded_single_ranks_are_met_within_20_percent():
    """Eager ones wait for their host, and one launches twice as fast as another."""
    ranks = [one for one in calibration.single_ranks(record.rows(calibration.RESULTS)) if one["replayed"]]
    errors = [calibration.rank_seconds(one, MACHINES) / one["step_seconds"] - 1 for one in ranks]
    assert ranks and max(map(abs, errors)) < 0.20 and abs(sum(errors) / len(errors)) < 0.04


def test_a_single_rank_is_planned_on_its_own_gpu():
    one = next(one for one in calibration.single_ranks(record.rows(calibration.RESULTS)) if one["replayed"])
    gpus = "NVIDIA H200", "NVIDIA H100 80GB HBM3", None
    slower, faster = calibration.single_ranks([one | {"gpu": gpu} for gpu in (*gpus, gpus[0])])
    assert [calibration.device_of(rank) for rank in (slower, faster)] == ["h100", "h200"]
    assert calibration.rank_seconds(slower, MACHINES) > calibration.rank_seconds(faster, MACHINES)
    less = calibration.rank_seconds(slower | {"gradients": "bf16"}, MACHINES)
    assert less < calibration.rank_seconds(slower, MACHINES)
    with pytest.raises(ValueError, match="ran on b200, .* add its constants"):
        calibration.rank_seconds(one | {"gpu": "NVIDIA B200"}, MACHINES)


def test_all_other_runs_are_met_within_15_percent_and_their_memory_within_7():
    rows = calibration.own_rows(calibration.RESULTS)
    assert rows
    for row in rows:
        job = calibration.predict(row, MACHINES)
        if row.host_bound:  # the plan says what the GPUs need
            assert row.floor_share * row.seconds < job.step_seconds < row.seconds, row.name
        else:
            assert job.step_seconds == pytest.approx(row.seconds, rel=0.2 if row.short_kernels else 0.15), row.name
        # Workspaces of libraries, which are not planned, count in a small model. Peers are taken to keep what we keep;
        # this one took as much with gradients in bf16 as with float32.
        within = 0.12 if row.name == "Megatron-core, 2gpu-70b-4layers-tp2-fp8" else 0.07
        assert job.memory_gib == pytest.approx(row.gib, rel=within, abs=0.25), row.name
        held_out = row.host_bound or row.short_kernels
        assert bool(row.fitted) == (row.software == "minitron" and row.device == "h200" and not held_out)


def test_the_table_has_a_line_a_row_and_no_figure_of_its_own(tmp_path, capsys, monkeypatch):
    few = [row for row in calibration.published_rows() if row.name == "Llama 3 8B SFT bf16"]
    monkeypatch.setattr(calibration, "published_rows", lambda: few)
    path = tmp_path / "results.jsonl"
    path.write_text(calibration.RESULTS.read_text())
    assert calibration.main(["--results", str(path)]) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "calibration.md").read_text()
    held, fitted = text.split("## Fitted")
    for row in few + calibration.own_rows(path):
        job = calibration.predict(row, MACHINES)
        name = f"{row.name}, bound by the host" if row.host_bound else row.name
        line = (
            f"| {name} | {row.device} | {row.gpus} | {job.step_seconds:.3f} | {row.seconds:.3f} | "
            f"{100 * (job.step_seconds / row.seconds - 1):+.1f} % | {job.memory_gib:.1f} |"
        )
        assert line in (fitted if row.fitted else held)
        if row.software == "minitron" and row.products and job.cfg.parallel.pp == 1:
            alone = job.seconds["gemm"] * job.machine.device.in_step
            assert f"| {row.name} | {alone:.3f} | {row.products:.3f} |" in fitted.split("## Products alone")[1]
    rows = few + [row for row in calibration.own_rows(path) if not row.fitted and not row.host_bound]
    ratios = [round(row.seconds / calibration.predict(row, MACHINES).step_seconds, 4) for row in rows]
    assert sorted(sum(json.loads((tmp_path / "calibration.json").read_text()).values(), [])) == sorted(ratios)
    assert any(row.host_bound for row in calibration.own_rows(path)) == (", bound by the host" in text)
    errors = [calibration.predict(row, MACHINES).step_seconds / row.seconds - 1 for row in few]
    assert f"Published, step times: largest error {100 * max(errors, key=abs):+.1f} %" in held
    # A configuration counts once, however many scales it has.
    mean = f"largest error {100 * sum(errors) / len(errors):+.1f} %"
    assert f"H100, configurations: {mean}" in fitted and ", 1 rows." in fitted
    assert f"| tp: tp 1 | {len(few)} |" in fitted and f"| task: fine-tuning | {len(few)} |" in fitted
    one = next(iter(calibration.single_ranks(record.rows(path))))
    predicted = calibration.rank_seconds(one, MACHINES)
    sent = next(one for one in record.rows(path) if one["kind"] == "validate")
    line = f"| {sent['case']} | H200 | 1 | {sent['predicted_seconds']:.3f} | {sent['measured_seconds']:.3f} |"
    assert line in fitted.split("## By `benchmarks/validate.sh`")[1]
    assert f"| {predicted:.3f} | {one['step_seconds']:.3f} |" in fitted.split("## One rank alone")[1]
    for name in ("in_step*", "copy_felt*", "piece_felt*", "spread", "felt", "launch_seconds"):
        assert f"| {name} |" in fitted.split("## What each constant weighs")[1]
    monkeypatch.setattr(calibration, "DEVICES", tmp_path / "devices.json")
    (tmp_path / "devices.json").write_text(tool.DEVICES.read_text())
    path.write_text("")
    assert calibration.main(["--fit", "--results", str(path)]) == 1
    assert "error: there is no row to fit the constants of a device on" in capsys.readouterr().err
    assert calibration.main(["--results", str(tmp_path / "none" / "results.jsonl")]) == 1
    assert "error: [Errno 2] No such file" in capsys.readouterr().err


def test_of_a_case_the_newest_record_counts_and_a_fit_needs_rows(tmp_path):
    record = next(json.loads(line) for line in calibration.RESULTS.read_text().splitlines() if "ours_gib" in line)
    path = tmp_path / "results.jsonl"
    records = [{**record, "ours_gib": gib} for gib in (1.0, 2.0)]
    records += [{**record, "gpu": None}, {**record, "case": "forgotten-bf16"}]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    ours, megatrons = calibration.own_rows(path)
    assert (ours.gib, ours.software, megatrons.software) == (2.0, "minitron", "megatron")
    assert (megatrons.seconds, megatrons.fitted) == (record["peer_figures"]["step_seconds"], "")
    assert calibration.own_rows(tmp_path / "none.jsonl") == []
    path.write_text(json.dumps({**record, "mode": "graph+tp-overlap"}))
    assert [row.software for row in calibration.own_rows(path)] == ["minitron", "megatron-graph"]
    with pytest.raises(ValueError, match="2gpu.* ran on b200, of which devices.json knows nothing; add its constants"):
        calibration.predict(replace(calibration.own_rows(path)[0], device="b200"), MACHINES)
    with pytest.raises(ValueError, match="no row to fit the constants of a device on; run benchmarks/compare.py"):
        calibration.fit([], MACHINES)


def test_a_fit_finds_the_constants_that_made_the_rows(tmp_path):
    """Rows that the model itself predicts, with constants on the grid."""
    cases = [("8b-1gpu", "device"), ("70b-tp4", "fabric"), ("8b-s4096-dp4", "fabric")]
    made = calibration._with(
        calibration._with(MACHINES, 0, {"in_step": 0.915}), 1, {"copy_felt": 0.25, "piece_felt": 0.4}
    )
    rows = [
        calibration.Row(
            name, CASES[name].gpus, tuple(CASES[name].arguments("none")), "h200", 0.0, fitted=kind, software="minitron"
        )
        for name, kind in cases
    ]
    rows = [replace(row, seconds=calibration.predict(row, made).step_seconds) for row in rows]
    found = calibration.fit(rows, MACHINES)
    path = tmp_path / "devices.json"
    path.write_text(calibration.DEVICES.read_text())
    calibration.store(found, path)
    for devices, fabrics in (found, read_machines(path)):
        assert {one.in_step for one in devices.values()} == {0.915}
        assert {(one.copy_felt, one.piece_felt) for one in fabrics.values()} == {(0.25, 0.4)}


def test_ceilings_write_a_device_whose_formulas_give_what_was_measured(tmp_path):
    """Rows that the formulas themselves make, with constants of their own."""
    like = MACHINES[0]["h200"]
    copy, unhidden, best, half = 3.1, 0.7, 550.0, 1300
    rates, grads = {"bf16": 640.0, "fp8": 1210.0}, {"bf16": 0.7, "fp8": 0.9}
    made = replace(like, copy_tb_s=copy, unhidden=unhidden)
    rows = [
        (
            f"GEMM {kind} {grad}, x",
            str(list(shape)),
            ceilings._predicted(made, kind, grad == "weight_grad", rate, list(shape)),
            "TFLOP/s",
        )
        for shapes in ceilings.GEMMS.values()
        for shape in shapes
        for kind in rates
        for grad in ceilings.KINDS
        for rate in [rates[kind] * (grads[kind] if grad == "weight_grad" else 1)]
    ]
    rows += [("attention (cudnn), x", f"s {s}", best * s / (s + half), "TFLOP/s") for s in (2048, 4096, 16384)]
    rows += [("flash attention 2, both", f"s {s}", 300 * s / (s + 800), "TFLOP/s") for s in (2048, 4096, 16384)]
    rows += [("flash attention 2, forward", "s 2048", 999.0, "TFLOP/s")]
    rows += [("copy", "1024 MiB", copy, "TB/s"), ("all-gather, 4 ranks", "64 MiB", 111.0, "GB/s")]
    path = tmp_path / "here.json"
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, multi_processor_count=132)
    rows.append(("spread of speeds, 8 ranks", "[8192, 8192, 8192]", 2.5, "%"))
    ceilings.write_device(rows, gpu, path, world=4)
    assert read_machines(path)[0]["here"].spread == like.spread  # four GPUs tell too little
    ceilings.write_device(rows, gpu, path, world=8)
    assert read_machines(path)[0]["here"].spread == 0.025
    ceilings.write_device(rows[:-1], gpu, path)
    devices, fabrics = read_machines(path)
    here = devices["here"]
    assert (here.copy_tb_s, here.unhidden, here.memory_gib, here.fabric) == (copy, unhidden, 140.0, "here")
    assert here.gemm_tflops == pytest.approx(rates, rel=1e-3) and here.weight_grad == pytest.approx(grads, rel=1e-3)
    assert (here.attention_tflops, here.half_keys) == pytest.approx((best, half), rel=1e-3)
    assert (here.flash_tflops, here.flash_half_keys) == pytest.approx((300, 800), rel=1e-3)
    assert (here.in_step, fabrics["here"].nvlink_gb_s) == (like.in_step, 111.0)
    assert set(devices) == {*MACHINES[0], "here"}
