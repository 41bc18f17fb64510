"""Pictures of a plan, for `tools/plan.py --draw FOLDER`: the pipeline, memory over a step, where time goes, scaling.

timeline.svg has a box for every forward and backward, with its duration and what waits between them; the others are
PNG and need matplotlib. Scaling starts from the plan's number of GPUs and doubles it up to MOST_GPUS, with the batch in
proportion (as published tables do) and with the batch of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from minitron.config import rules
from minitron.config.installed import pip_install
from minitron.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Forward
from minitron.planning.plan import Plan, Step, plan, room_gib
from tools.draw_pipeline import draw_svg

MOST_GPUS = 4096
COLORS = {
    "gemm": "#2a6fbb",
    "attention": "#5aa0dd",
    "pointwise": "#9cc7ea",
    "tp_exposed": "#e07b39",
    "cp_exposed": "#efa36b",
    "pp_exposed": "#f5c9a4",
    "dp_exposed": "#c94f4f",
    "bubble": "#d9d9d9",
    "stragglers": "#a6a6a6",
    "host": "#c05050",
    "optimizer": "#6b8f5e",
}


def draw(job: Plan, folder: Path) -> Iterator[Path]:
    """Write the pictures and yield their paths. Raises ValueError without matplotlib or a folder to write into."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(f"--draw needs matplotlib: {pip_install('plot')}, or leave it out") from None
    matplotlib.use("Agg")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "timeline.svg"
        path.write_text(draw_svg(job.timeline), encoding="utf-8")
        yield path
        scaled = scaling(job, in_proportion=True)
        for name, picture in (
            ("memory", memory(job)),
            ("time", time_bars(scaled)),
            ("scaling", curves(scaled, scaling(job, in_proportion=False))),
        ):
            path = folder / f"{name}.png"
            picture.savefig(path, dpi=150, bbox_inches="tight")
            yield path
    except OSError as error:
        raise ValueError(f"--draw {folder} cannot be written ({error}); name another folder") from None


def memory_curve(job: Plan) -> list[tuple[float, float]]:
    """(seconds, GiB) of the fullest pipeline rank, a line's corners: what lasts, and activations, of which a forward
    leaves more with every block and a backward frees them again.
    """
    sizes = Step(job.cfg, job.world, job.machine).memory
    live = lasting = job.memory.total() - job.memory["activations"] - job.memory["working"]
    pp, curve = job.cfg.parallel.pp, [(0.0, lasting / 2**30)]
    for event in job.timeline.events:
        if event.rank == job.fullest:
            stage, kind = event.action.chunk * pp + event.rank, type(event.action)
            saved, put_off = sizes.saved(stage), sizes.put_off(stage)
            change = {Forward: saved, Backward: -saved, BackwardInput: put_off - saved, BackwardWeight: -put_off}[kind]
            curve.append((event.start, live / 2**30))
            live += change
            curve.append((event.end, live / 2**30))
    return curve


def scaling(job: Plan, *, in_proportion: bool) -> list[Plan]:
    """Plans from the job's number of GPUs up, doubled each time, as long as the rules allow it."""
    plans, world = [], job.world
    while world <= max(MOST_GPUS, job.world):
        batch = job.cfg.train.global_batch_size * (world // job.world if in_proportion else 1)
        cfg = replace(job.cfg, train=replace(job.cfg.train, global_batch_size=batch))
        try:
            rules.check(cfg, world)
        except ValueError:  # the batch has no sample for every rank
            break
        plans.append(plan(cfg, world, job.machine))
        world *= 2
    return plans


def memory(job: Plan):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    bottom = 0.0
    for part, color in zip(
        ("parameters", "gradients", "optimizer", "fp8 weights", "messages"),
        ("#2a6fbb", "#5aa0dd", "#6b8f5e", "#9cc7ea", "#efa36b"),
    ):
        size = job.memory[part] / 2**30
        if size:
            axes.axhspan(bottom, bottom + size, color=color, label=part, lw=0)
        bottom += size
    times, sizes = zip(*memory_curve(job))
    axes.fill_between(times, bottom, sizes, color="#e07b39", label="activations", lw=0)
    axes.axhline(room_gib(job.machine), color="#c94f4f", ls="--", label="room")
    axes.set(
        xlabel="seconds of a step",
        ylabel="GiB",
        xlim=(0, job.timeline.makespan),
        ylim=(0, None),
        title=f"Memory of pipeline rank {job.fullest}, the fullest",
    )
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return figure


def time_bars(plans: list[Plan]):
    from matplotlib import pyplot

    height = 0.9 + 0.5 * len(plans)
    figure, axes = pyplot.subplots(figsize=(8, height))
    names, left = [f"{p.world} GPUs" for p in plans], [0.0] * len(plans)
    for part, color in COLORS.items():
        widths = [p.seconds[part] for p in plans]
        if max(widths) > 1e-6:  # a difference of sums may be nothing but rounding
            axes.barh(names, widths, 0.7, left, color=color, label=part.replace("_", " "))
        left = [x + width for x, width in zip(left, widths)]
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step, batch in proportion to the GPUs")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.7 / height))
    return figure


def curves(proportional: list[Plan], fixed: list[Plan]):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    first = proportional[0]
    worlds = [p.world for p in proportional]
    linear = [first.tokens_per_second * world / first.world for world in worlds]
    axes.plot(worlds, linear, color="#b0b7c0", lw=5, alpha=0.5, label="linear")
    for plans, color, label, above in (
        (proportional, "#2a6fbb", "batch in proportion", 8),
        (fixed, "#e07b39", "batch as given", -14),
    ):
        axes.plot([p.world for p in plans], [p.tokens_per_second for p in plans], "o-", color=color, label=label)
        for p in plans:
            if p.mfu_percent is not None and (plans is proportional or p is not plans[0]):  # both start as one plan
                axes.annotate(
                    f"{p.mfu_percent:.1f} %",
                    (p.world, p.tokens_per_second),
                    xytext=(0, above),
                    fontsize=8,
                    ha="right" if above > 0 else "left",
                    textcoords="offset points",
                    color=color,
                )
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s", title="Scaling, with MFU")
    axes.margins(0.1, 0.1)
    axes.set_xticks(worlds, worlds)
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure
