"""A Markdown table and a picture of the comparisons in results.jsonl: `python benchmarks/table.py`.

Of each case the newest record counts. Writes compare.md beside it and, with matplotlib, compare.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "results.jsonl"
COLORS = {"ours_mfu": "#2a6fbb", "peer_mfu": "#b0b7c0"}


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


def draw(entries: list[dict], path: Path) -> None:
    """Horizontal bars of both MFUs. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.55 * len(entries)))
    peers = " / ".join(sorted({e["peer"] for e in entries}))
    for offset, (key, label) in enumerate((("ours_mfu", "minitron"), ("peer_mfu", peers))):
        values = [e[key] or 0.0 for e in entries]
        bars = axes.barh([i + 0.38 * offset for i in range(len(entries))], values, 0.36, color=COLORS[key], label=label)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_yticks([i + 0.19 for i in range(len(entries))], [f"{e['case']} ({e['peer']})" for e in entries])
    axes.invert_yaxis()
    axes.set_xlabel("MFU in percent of the dense peak, all attention scores counted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
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
