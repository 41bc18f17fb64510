"""A Markdown table and a picture of the comparisons in results.jsonl: `python benchmarks/table.py`.

Of each case the newest record counts. Writes compare.md beside it and, with matplotlib, compare.png.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "results.jsonl"
COLORS = {"ours_mfu": "#2a6fbb", "megatron": "#b0b7c0", "huggingface": "#d9a441", "torchtitan": "#7fae6e"}


def newest(path: Path) -> list[dict]:
    """The last comparison of each case and peer, in the order of their first. Raises ValueError if there is none."""
    found: dict[tuple[str, str], dict] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["kind"] == "compare":
            found[entry["case"], entry["peer"]] = entry
    if not found:
        raise ValueError(f"{path} has no record of kind compare; run benchmarks/compare.py first")
    return list(found.values())


def markdown(entries: list[dict]) -> str:
    """One row per case, and below it what machine and versions the rows came from."""
    lines = [
        "| case | minitron MFU | peer MFU | ratio | minitron GiB | peer GiB | peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        ours, peer = (_percent(e[f"{who}_mfu"], e.get(f"{who}_mfu_weights")) for who in ("ours", "peer"))
        ratio = f"{e['ratio']:.3f}" + (f" ± {e['spread']:.3f}" if "spread" in e else "")
        name = e["peer"] if e["fp8"] == "none" or e["peer"] == "megatron" else f"{e['peer']}, in bf16"
        lines.append(
            f"| {e['case']} | {ours} | {peer} | {ratio} | {e['ours_gib']:.1f} | {e['peer_gib']:.1f} | {name} |"
        )
    if any("ours_mfu_weights" in e for e in entries):
        lines += ["", "In parentheses: without attention scores, as the documents of fine-tuning count."]
    origins = {}
    for e in entries:
        versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items() if version)
        power = f" at {e['power_limit_watts']:g} W" if e["power_limit_watts"] else ""
        commit = (e["commit"] or "unknown")[:10]
        origins[f"{e['gpu'] or 'CPU'}{power}; {versions}; {e['time'][:10]}, commit {commit}"] = None
    return "\n".join([*lines, "", *origins]) + "\n"


def _percent(mfu: float | None, without_scores: float | None) -> str:
    shown = "unknown" if mfu is None else f"{mfu:.1f} %"
    return shown if without_scores is None else f"{shown} ({without_scores:.1f})"


WORDS = (
    (r"8b", "Llama 3 8B"),
    (r"70b", "Llama 3.1 70B"),
    (r"175b", "GPT-3 175B"),
    (r"(\d+)layers", r"\1 layers"),
    (r"s(\d+)", r"sequence \1"),
    (r"1gpu", "1 GPU"),
    (r"(\d)gpu", r"\1 GPUs"),
    (r"lora", "LoRA"),
    (r"sft", "fine-tuning of all weights"),
    (r"full", "one document a sample"),
    (r"uneven", "uneven stages"),
    (r"(bf16|fp8)", ""),
)


def in_words(case: str) -> str:
    """8b-s8192-dp4-fp8 -> "Llama 3 8B, sequence 8192, dp 4"; the precision stands elsewhere."""
    words = []
    for part in case.split("-"):
        for pattern, text in WORDS:
            if match := re.fullmatch(pattern, part):
                words.append(match.expand(text))
                break
        else:
            words.append(" ".join(f"{axis} {size}" for axis, size in re.findall(r"([a-z]+)(\d+)", part)) or part)
    models = [word for word in words if word in ("Llama 3 8B", "Llama 3.1 70B", "GPT-3 175B")]
    return ", ".join([*models, *(word for word in words if word and word not in models)])


def precision_of(entry: dict, who: str) -> str:
    """FP8 or bf16, of minitron ("ours") or of the peer: Hugging Face's trains in bf16 whatever we do."""
    fp8 = entry["fp8"] != "none" and (who == "ours" or entry["peer"] == "megatron")
    return "FP8" if fp8 else "bf16"


def draw(entries: list[dict], path: Path) -> None:
    """Bars of both MFUs, the precisions apart, in each the largest lead first. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rooms = [
        (name, [e for e in entries if (e["fp8"] != "none") == fp8]) for name, fp8 in (("bf16", False), ("FP8", True))
    ]
    rooms = [(name, sorted(found, key=lambda e: -e["ratio"])) for name, found in rooms if found]
    sizes = [len(found) for _, found in rooms]
    figure, all_axes = pyplot.subplots(
        len(rooms), 1, figsize=(9, 1.6 + 0.5 * len(entries)), height_ratios=sizes, sharex=True, squeeze=False
    )
    for axes, (name, found) in zip(all_axes[:, 0], rooms):
        for row, e in enumerate(found):
            for offset, who in (0.0, "ours"), (0.38, "peer"):
                value = e[f"{who}_mfu"] or 0.0
                axes.barh(row + offset, value, 0.36, color=COLORS["ours_mfu" if who == "ours" else e["peer"]])
                other = f"  {precision_of(e, who)}: of another peak" if precision_of(e, who) != name else ""
                ratio = f"  x {e['ratio']:.3f}" if who == "ours" else ""
                axes.text(value + 0.5, row + offset, f"{value:.1f}{ratio}{other}", va="center", fontsize=7)
        axes.set_yticks([row + 0.19 for row in range(len(found))], [in_words(e["case"]) for e in found], fontsize=8)
        axes.set_ylim(len(found) - 0.4, -0.5)
        axes.set_xlim(0, 80)
        axes.set_title(f"minitron in {name}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    keys = {
        "minitron": "ours_mfu",
        "Megatron-core": "megatron",
        "Hugging Face": "huggingface",
        "torchtitan": "torchtitan",
    }
    shown = {"ours_mfu", *(e["peer"] for e in entries)}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[key]) for key in keys.values() if key in shown]
    all_axes[-1, 0].legend(
        handles, [name for name, key in keys.items() if key in shown], frameon=False, loc="lower right"
    )
    all_axes[-1, 0].set_xlabel("MFU in percent of the precision's dense peak, all attention scores counted")
    gpus = {f"{e['gpu'] or 'CPU'} at {e['power_limit_watts'] or 0:g} W" for e in entries}
    figure.suptitle(
        f"{', '.join(sorted(gpus))}; each pair in turn on the same GPUs; x: how many times as fast", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        entries = newest(args.results)
        text = markdown(entries)
        args.results.with_name("compare.md").write_text(text, encoding="utf-8")
        draw(entries, args.results.with_name("compare.png"))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ImportError:
        print("no picture: pip install matplotlib")
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
