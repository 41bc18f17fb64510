"""A Markdown table and pictures of the records in results.jsonl: `python benchmarks/table.py`.

Of each compared case the newest record counts. Writes compare.md beside it, steps.md of what benchmarks/step.py
measured and, with matplotlib, compare.png; and fp8_curves.png from the newest curves of a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

from benchmarks.cases import CASES
from minitron.planner import style

RESULTS = Path(__file__).parent / "results" / "results.jsonl"
PEERS = {"megatron": "Megatron-core", "huggingface": "Hugging Face", "torchtitan": "torchtitan"}
PACKAGES = {"megatron": "megatron-core", "huggingface": "transformers", "torchtitan": "torchtitan"}
COLORS = dict(zip(("ours", *PEERS), (style.BLUE, style.GREY, style.GOLD, style.GREEN)))
FLOORS = {True: style.INK, False: style.RED}  # colour of the mark, by whether attention is counted
FLOOR_WORDS = {
    True: "floor: the step's products and attention alone",
    False: "floor of packed documents: products alone",
}


def records(path: Path) -> list[dict]:
    """All records of a file, oldest first; none if there is no file. Needs no torch, as record.rows does."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def newest(path: Path) -> list[dict]:
    """The last comparison of each case, peer and GPU, H100's first, else in the order of their first. Raises ValueError
    if there is none."""
    found = {(e["case"], e["peer"], e["gpu"]): e for e in records(path) if e["kind"] == "compare"}
    if not found:
        raise ValueError(f"{path} has no record of kind compare; run benchmarks/compare.py first")
    return sorted(found.values(), key=lambda e: "H100" not in (e["gpu"] or ""))


def markdown(entries: list[dict]) -> str:
    """One row per case, and below it what machine and versions the rows came from."""
    lines = [
        "| case | GPU | minitron MFU | peer MFU | ratio | without the head | minitron GiB | peer GiB | peer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        ours, peer = (_percent(e[f"{who}_mfu"], e.get(f"{who}_mfu_weights")) for who in ("ours", "peer"))
        ratio = _ratio(e["ratio"]) + (f" ± {e['spread']:.3f}" if "spread" in e else "")
        gradients = ", gradients in bf16" if e["ours"].get("gradients") == "bf16" else ""
        cells = [e["case"] + gradients, gpu_of(e), ours, peer if e["peer_figures"] else "out of memory", ratio]
        gib = ["unknown" if e[key] is None else f"{e[key]:.1f}" for key in ("ours_gib", "peer_gib")]
        cells += [_ratio(e.get("ratio_without_head")), *gib, peer_of(e)]
        lines.append(f"| {' | '.join(cells)} |")
    if any("ours_mfu_weights" in e for e in entries):
        lines += ["", "In parentheses: without attention scores, as the documents of fine-tuning count."]
    return "\n".join([*lines, "", *origins(entries)]) + "\n"


def origins(entries: list[dict]) -> list[str]:
    """A line for each machine, day and commit that entries came from."""
    lines = {}
    for e in entries:
        versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items() if version)
        power = f" at {e['power_limit_watts']:g} W" if e["power_limit_watts"] else ""
        commit = (e["commit"] or "unknown")[:10]
        lines[f"{e['gpu'] or 'CPU'}{power}; {versions}; {e['time'][:10]}, commit {commit}"] = None
    return [*lines]


def steps(rows: list[dict]) -> str:
    """A line for each command of benchmarks/step.py and kind of GPU, its newest record, H100's first."""
    found = {(row["command"], row["gpu"], row["world"]): row for row in rows if row["kind"] == "step"}
    mine = sorted(found.values(), key=lambda row: "H100" not in (row["gpu"] or ""))
    lines = [
        "# Steps of minitron alone",
        "",
        "Written by `python benchmarks/table.py`. Models have fewer layers, or run on fewer GPUs, than a job's.",
        "",
        "| command | GPUs | step s | tokens/s a GPU | GiB | commit |",
        "|---|---|---|---|---|---|",
    ]
    for row in mine:
        gib = "unknown" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        cells = [f"`{row['command']}`", f"{row['world']} {gpu_of(row)}", f"{row['step_seconds']:.4f}"]
        cells += [f"{row['tokens_per_second_per_gpu']:,.0f}", gib, (row["commit"] or "unknown")[:10]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *origins(mine)]) + "\n"


def gpu_of(entry: dict) -> str:
    return (entry["gpu"] or "CPU").removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


def peer_of(entry: dict) -> str:
    """The peer's version and mode, and its number format where it is not ours."""
    in_bf16 = ["in bf16"] if precision_of(entry, "ours") != precision_of(entry, "peer") else []
    version = entry.get("versions", {}).get(PACKAGES[entry["peer"]])
    mode = entry.get("mode") or ("eager" if entry["peer"] == "megatron" else None)
    return ", ".join(filter(None, [f"{PEERS[entry['peer']]} {version or ''}".strip(), mode, *in_bf16]))


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(mfu: float | None, without_scores: float | None) -> str:
    shown = "unknown" if mfu is None else f"{mfu:.1f} %"
    return shown if without_scores is None else f"{shown} ({without_scores:.1f})"


WORDS = (
    (r"8b", "Llama 3 8B"),
    (r"1b", "Llama 3.2 1B"),
    (r"gpt2", "GPT-2 124M"),
    (r"70b", "Llama 3.1 70B"),
    (r"175b", "GPT-3 175B"),
    (r"(\d+)layers", r"\1 layers"),
    (r"s(\d+)", r"sequence \1"),
    (r"lora", "LoRA"),
    (r"sft", "fine-tuning of all weights"),
    (r"full", "one document a sample"),
    (r"uneven", "uneven stages"),
    (r"1f1b|zb-h1", "schedule \\g<0>"),
    (r"fp8head", "our head in FP8"),
    (r"(bf16|fp8|\d+gpu|124m)", ""),
)


def in_words(case: str) -> str:
    """8b-s8192-dp4-fp8 -> "Llama 3 8B, sequence 8192, dp 4"; precision and number of GPUs stand elsewhere."""
    words = []
    for part in re.split(r"-(?!h1)", case):
        for pattern, text in WORDS:
            if match := re.fullmatch(pattern, part):
                words.append(match.expand(text))
                break
        else:
            words.append(" ".join(f"{axis} {size}" for axis, size in re.findall(r"([a-z]+)(\d+)", part)) or part)
    known = CASES.get(re.sub("-(bf16|fp8)$", "", case))
    layers = [key.split("=")[1] for key in known.overrides if key.startswith("model.num_layers=")] if known else []
    words += [f"{count} layers" for count in layers]  # a model with fewer than its name says is no small matter
    models = [word for word in words if word.startswith(("Llama", "GPT"))]
    return ", ".join(dict.fromkeys([*models, *filter(None, words)]))


def precision_of(entry: dict, who: str) -> str:
    """FP8 or bf16, of minitron ("ours") or of the peer: Hugging Face's trains in bf16 whatever we do."""
    fp8 = entry["fp8"] != "none" and (who == "ours" or entry["peer"] == "megatron")
    return "FP8" if fp8 else "bf16"


def floor_share(entry: dict, who: str, entries: list[dict]) -> tuple[float | None, bool]:
    """The share of a side's step that its products and attention take alone, and whether attention is counted in it.

    It is not where documents are packed: the floor (floor.py) takes a sample as one document. Both sides have one
    floor, measured in minitron's run; that of a peer which ran another case, or in bf16 beside FP8, stands in that
    case's record, None without.
    """
    name, found = re.sub("-(bf16|fp8)$", "", entry["case"]), [entry]
    case = CASES.get(name)
    peers = f"{case and case.peer or name}-{precision_of(entry, who).lower()}"
    if who == "peer" and peers != entry["case"]:
        found = [e for e in entries if (e["case"], e["peer"], e["gpu"]) == (peers, entry["peer"], entry["gpu"])]
    packed = case is not None and case.tunes and "data.separate_documents=false" not in case.overrides
    floors = found[0]["ours"] if found else {}
    if "floor_gemm_seconds" not in floors:
        return None, not packed
    seconds = floors["floor_gemm_seconds"] + (0 if packed else floors["floor_attention_seconds"])
    return seconds / entry["ours" if who == "ours" else "peer_figures"]["step_seconds"], not packed


def groups(entries: list[dict]) -> list[tuple[str, list[dict]]]:
    """What is compared alike, under one heading that has the GPU and each side's precision; H100 and then the largest
    lead first. Without peers that were out of memory."""
    found: dict[str, list[dict]] = {}
    both = sorted((e for e in entries if e["peer_figures"]), key=lambda e: (e["fp8"] != "none", -e["ratio"]))
    for e in sorted(both, key=lambda e: ("H100" not in gpu_of(e), gpu_of(e), list(PEERS).index(e["peer"]))):
        sides = f"minitron {precision_of(e, 'ours')}, {PEERS[e['peer']]} {precision_of(e, 'peer')}"
        heading = f"{gpu_of(e)}: {sides}"
        found.setdefault(heading, []).append(e)
    return list(found.items())


@style.styled
def draw(entries: list[dict]):
    """Bars of both sides' TFLOP/s, each with its floor; MFU, the floor's share and the speeds' ratio beside them.

    FP8 and bf16 have one scale so: their MFU is of different peaks.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rooms = groups(entries)
    sizes = [len(found) for _, found in rooms]
    figure, all_axes = style.new(
        1.2 + 0.5 * len(rooms) + 0.3 * len(entries), len(rooms), height_ratios=sizes, sharex=True, squeeze=False
    )
    lines = [
        (axes, row + shift, e, who)
        for axes, (_, found) in zip(all_axes[:, 0], rooms)
        for row, e in enumerate(found)
        for shift, who in ((-0.19, "ours"), (0.19, "peer"))
    ]
    speeds = [e["ours" if who == "ours" else "peer_figures"]["tflops"] for _, _, e, who in lines]
    shares = [floor_share(e, who, entries) for _, _, e, who in lines]
    right = 1.05 * max(speed / (share or 1) for speed, (share, _) in zip(speeds, shares))
    for (axes, at, e, who), speed, (share, whole) in zip(lines, speeds, shares):
        axes.barh(at, speed, 0.36, color=COLORS["ours" if who == "ours" else e["peer"]])
        if share:
            axes.plot([speed / share] * 2, [at - 0.18, at + 0.18], color=FLOORS[whole], lw=1.5)
        mfu = e[f"{who}_mfu"]
        _cells(axes, at, right, "" if mfu is None else f"{mfu:.1f} %", f"{100 * share:.0f} %" if share else "")
    for axes, (heading, found) in zip(all_axes[:, 0], rooms):
        for row, e in enumerate(found):
            _cells(axes, row, right, "", "", f"{e['ratio']:.3f}" + (f"\n± {e['spread']:.3f}" if "spread" in e else ""))
        axes.set_yticks(range(len(found)), [f"{in_words(e['case'])}, {e['ours']['world']} {gpu_of(e)}" for e in found])
        axes.set(xlim=(0, 1.5 * right), ylim=(len(found) - 0.5, -0.5))
        axes.set_title(heading)
        axes.tick_params(axis="y", length=0)
        axes.set_xticks([x for x in axes.get_xticks() if x <= right])
        axes.spines["bottom"].set_bounds(0, right)
    _cells(all_axes[0, 0], -0.75, right, "MFU", "of floor", "× peer")
    all_axes[-1, 0].set_xlabel("TFLOP/s per GPU, all attention scores counted", x=0.33)
    gpus = [f"{gpu_of(e)} at {e['power_limit_watts'] or 0:g} W".removesuffix(" at 0 W") for e in entries]
    figure.suptitle(f"Training speed on {', '.join(sorted(set(gpus)))}, both sides in turn on one machine")
    peers = {e["peer"] for e in entries}
    handles = [Patch(color=COLORS["ours"], label="minitron")]
    handles += [Patch(color=COLORS[peer], label=name) for peer, name in PEERS.items() if peer in peers]
    tick = {"marker": "|", "ls": "", "ms": 9, "mew": 1.5}
    marked = {whole for share, whole in shares if share}
    handles += [Line2D([], [], color=FLOORS[w], label=FLOOR_WORDS[w], **tick) for w in (True, False) if w in marked]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _cells(axes, row: float, right: float, *texts: str) -> None:
    """Write a row of the columns beside the bars, which end at `right`."""
    for share, text in zip((1.12, 1.27, 1.48), texts):
        axes.text(share * right, row, text, ha="right", va="center", fontsize=style.SMALL)


@style.styled
def draw_curves(entry: dict):
    """The mean loss of every tenth of runs in bf16 and otherwise, and how far from bf16 they are."""
    curves, steps = entry["curves"], entry["steps"]
    middles = [steps * (i + 0.5) / len(curves["bf16"]) for i in range(len(curves["bf16"]))]
    figure, (above, below) = style.new(4.2, 2, sharex=True, height_ratios=(3, 2))
    for name, curve in curves.items():
        above.plot(middles, curve, "o-", ms=3, label=name if "bf16" in name else f"FP8, {name}")
        below.plot(middles, [100 * (loss / base - 1) for loss, base in zip(curve, curves["bf16"])], "o-", ms=3)
    where = entry.get("gpu") or "a CPU"
    above.set(ylabel="loss (nats per token)", title=f"Training loss by number format, mean of each tenth, on {where}")
    above.legend()
    below.set(xlabel="step", ylabel="distance from bf16, %", xlim=(0, steps))
    for axes in (above, below):
        axes.grid()
    figure.align_ylabels()
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        entries = newest(args.results)
        text = markdown(entries)
        args.results.with_name("compare.md").write_text(text, encoding="utf-8")
        print(text, end="")
        args.results.with_name("steps.md").write_text(steps(records(args.results)), encoding="utf-8")
        style.save(draw(entries), args.results.with_name("compare.png"))
        if curves := [r for r in records(args.results) if r["kind"] == "fp8_curves" and r["gpu"]]:
            style.save(draw_curves(curves[-1]), args.results.with_name("fp8_curves.png"))
    except style.NoMatplotlib as error:
        print(error)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
