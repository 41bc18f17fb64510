"""Pictures of a plan, for `tools/plan.py --draw FOLDER`: pipeline, every rank's memory, where time goes, scaling, cost.

timeline.svg has boxes for forwards and backwards, with their microbatches and what waits between them; the others are
PNG and need matplotlib. Scaling starts from the plan's number of GPUs and doubles it up to MOST_GPUS, with the batch in
proportion (as published tables do) and with the batch of the plan; what others published of the same job on the same
GPUs (published.json) is drawn beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from minitron.config.files import errors_as
from minitron.config.schema import changed
from minitron.planner import cost, style
from minitron.planner.draw import draw_svg
from minitron.planner.fit import keeps_rules
from minitron.planner.machine import read_machines
from minitron.planner.plan import Plan, plan
from minitron.planner.published import configuration, published_steps
from minitron.planner.style import BLUE, GOLD, GREEN, GREY, ORANGE, PURPLE, RED, tint

MOST_GPUS = 4096
SAME = 1e-3  # of a step: parts whose seconds differ by less are the same in all plans
ENLARGED = 0.5  # of a step: if the parts that differ are less, they have a panel
NOTHING = 1e-6  # seconds: a part that is a difference of sums may be nothing but rounding
NARROW = 0.06  # of the longest bar: a narrower part has no number in it
SECONDS = {  # parts of a step, in the order of tables and bars: their meanings and colours
    "gemm": ("matrix products", BLUE),
    "attention": ("attention", tint(BLUE, 0.7)),
    "pointwise": ("norms, activations, casts, gaps", tint(BLUE, 0.45)),
    "host": ("waiting for the host", PURPLE),
    "tp_exposed": ("tensor parallel", ORANGE),
    "cp_exposed": ("context parallel", tint(ORANGE, 0.7)),
    "pp_exposed": ("between stages", tint(ORANGE, 0.45)),
    "dp_exposed": ("gradients and parameters", RED),
    "bubble": ("waiting for other stages", tint(GREY, 0.6)),
    "stragglers": ("waiting for the slowest GPU", GREY),
    "optimizer": ("optimizer", GREEN),
}
MEANINGS = {part: meaning for part, (meaning, _) in SECONDS.items()}
# Of these, and of bytes by part; the optimizer has one colour in both.
COLORS = {part: color for part, (_, color) in SECONDS.items()} | {
    "parameters": BLUE,
    "gradients": tint(BLUE, 0.6),
    "fp8 weights": tint(BLUE, 0.3),
    "activations": ORANGE,
    "working": tint(ORANGE, 0.5),
    "messages": GOLD,
}


def draw(job: Plan, folder: Path, tokens: float, goodput: Callable[[Plan], float]) -> Iterator[Path]:
    """Write the pictures and yield their paths.

    tokens: of the training whose cost is drawn. goodput: the share of its time that is steps. Raises ValueError without
    matplotlib or a folder to write into.
    """
    unwritable = f"--draw {folder} cannot be written"
    with errors_as(ValueError, lambda error: f"{unwritable} ({error}); name another folder", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "timeline.svg"
        path.write_text(draw_svg(job.timeline, bubble(job)), encoding="utf-8")
        yield path
        scaled = scaling(job, in_proportion=True)
        for name, picture in (
            ("memory", memory(job)),
            ("time", time_bars(scaled)),
            ("scaling", curves(scaled, scaling(job, in_proportion=False), published(job))),
            ("cost", cost.curves(scaled, tokens, goodput)),
        ):
            path = folder / f"{name}.png"
            style.save(picture, path)
            yield path


def bubble(job: Plan) -> str:
    """Describe the bubble as the plan's table does."""
    seconds = job.seconds["bubble"]
    return f"bubble {seconds:.3f} s, {100 * seconds / job.step_seconds:.1f} % of the step: {MEANINGS['bubble']}"


def memory_curve(job: Plan, rank: int) -> list[tuple[float, float]]:
    """Return a line's corners, (seconds, GiB) of a pipeline rank: persistent memory and activations. These grow with
    every block of a forward and shrink in the backward.
    """
    parts = job.sizes.bytes_by_part(rank)
    lasting = parts.total() - parts["activations"] - parts["working"]
    events, curve = [event for event in job.timeline.events if event.rank == rank], [(0.0, lasting / 2**30)]
    actions = (event.action for event in events)
    for event, (_, before, after) in zip(events, job.sizes.activations(rank, actions)):
        curve += [(event.start, (lasting + before) / 2**30), (event.end, (lasting + after) / 2**30)]
    return curve


def scaling(job: Plan, *, in_proportion: bool) -> list[Plan]:
    """Plan the job at its number of GPUs, then at twice as many each time, as long as the rules allow it."""
    plans, world = [], job.world
    while world <= max(MOST_GPUS, job.world):
        batch = job.cfg.train.global_batch_size * (world // job.world if in_proportion else 1)
        cfg = changed(job.cfg, train=dict(global_batch_size=batch))
        if not keeps_rules(cfg, world):  # the batch has no sample for every rank
            break
        plans.append(plan(cfg, world, job.machine))
        world *= 2
    return plans


def published(job: Plan) -> list[tuple[int, float]]:
    """Return (GPUs, tokens/s) that others published of this model, sequence, number format, GPU and network. The batch
    is that of the plan or the same for each GPU; dropout and the kernel of attention may differ.
    """
    devices, fabrics = read_machines()

    def kind(cfg):
        model = replace(cfg.model, hidden_dropout=0.0, attention_dropout=0.0, attention="auto")
        return model, cfg.train.seq_len, cfg.finetune.kind, cfg.precision.fp8 != "none"

    found, batch = [], job.cfg.train.global_batch_size
    for row in published_steps():
        cfg, device = configuration(row.arguments), devices[row.device]
        samples, fabric = cfg.train.global_batch_size, fabrics[row.fabric or device.fabric]
        same_machine = (device.gpu, fabric.network_gb_s) == (job.machine.device.gpu, job.machine.fabric.network_gb_s)
        if same_machine and kind(cfg) == kind(job.cfg) and samples in (batch, batch * row.gpus / job.world):
            found.append((row.gpus, samples * cfg.train.seq_len / row.seconds))
    return found


@style.styled
def memory(job: Plan):
    """Draw bars of every pipeline rank's peak by part, and its memory during a step."""
    pp, sizes = job.cfg.parallel.pp, job.sizes
    ranks = [sizes.bytes_by_part(rank) for rank in range(pp)]
    names = [f"rank {rank}" for rank in range(pp)]
    figure, (bars, lines) = style.new(3.2 + 0.2 * pp, 2, height_ratios=(0.6 + 0.2 * pp, 2.2))
    left: list[float] = [0.0] * pp
    for part in (part for part in ranks[0] if any(of[part] for of in ranks)):
        widths = [of[part] / 2**30 for of in ranks]
        bars.barh(names, widths, 0.75, left, color=COLORS[part], label=part)
        left = [x + width for x, width in zip(left, widths)]
    graphs = [sizes.graph(rank) / 2**30 for rank in range(pp)]
    if any(graphs):
        hatched = {"color": "white", "edgecolor": style.FAINT, "hatch": "//////", "lw": 0.5}
        bars.barh(names, graphs, 0.75, left, label="CUDA graphs, if there is room", **hatched)
    room, full = job.room_gib, [total + graph for total, graph in zip(left, graphs)]
    bars.axvline(room, color=RED, ls="--", label=f"room: {room:.1f} GiB")
    for rank, (total, end) in enumerate(zip(left, full)):
        at = room if 0.93 * room < end < room else end  # the number would lie on the line
        bars.text(at + 0.01 * room, rank, f"{total:.1f}", va="center", weight="bold" if rank == job.fullest else None)
    bars.invert_yaxis()
    bars.set(xlim=(0, 1.1 * max(room, *full)), xlabel="GiB of a GPU, at its peak")
    each = job.world // pp
    bars.set_title(f"Memory of all ranks: {pp} pipeline rank{'s' * (pp > 1)} of {each} GPU{'s' * (each > 1)} each")
    for rank in range(pp):
        fullest = rank == job.fullest
        times, sizes_gib = zip(*memory_curve(job, rank))
        label = f"rank {rank}, the fullest" if fullest else f"rank {rank}"
        shade = BLUE if fullest else tint(style.INK, 0.2 + 0.5 * rank / pp)
        lines.plot(times, sizes_gib, color=shade, lw=1.2 if fullest else 0.7, zorder=3 if fullest else 2, label=label)
    lines.set(xlabel="seconds of a step", ylabel="GiB", xlim=(0, job.timeline.makespan))
    lines.set_title("During a step: what lasts, and activations")
    if pp > 1:
        low, high = lines.get_ylim()
        lines.set_ylim(low - 0.08 * (pp // 4 + 1) * (high - low))  # room for the names
        lines.legend(loc="lower center", ncols=4)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@style.styled
def time_bars(plans: list[Plan]):
    """Draw the step of each plan as a bar of its parts; below, enlarged, the parts that differ, if they are small."""
    parts = [part for part in MEANINGS if max(p.seconds[part] for p in plans) > NOTHING]
    seconds = {part: [p.seconds[part] for p in plans] for part in parts}
    spread = {part: max(values) - min(values) for part, values in seconds.items()}
    differ = [part for part in parts if spread[part] >= SAME * plans[0].step_seconds]
    longest, growing = (max(sum(p.seconds[part] for part in some) for p in plans) for some in (parts, differ))
    batch = ", batch in proportion to the GPUs" if len(plans) > 1 else ""
    shown = {f"Where the time of a step goes{batch}": parts}
    if 0 < growing < ENLARGED * longest:
        shown["Enlarged: the parts that change with the number of GPUs"] = differ
    figure, panels = style.new(1.0 + len(shown) * max(1.0, 0.4 + 0.2 * len(plans)), len(shown), squeeze=False)
    for axes, (title, some) in zip(panels.flat, shown.items()):
        draw_bars(axes, plans, {part: seconds[part] for part in some})
        axes.set_title(title)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_bars(axes, plans: list[Plan], seconds: dict[str, list[float]]) -> None:
    """Draw a bar of these parts for each plan. Numbers are in the parts, of one plan's narrow parts beside the bar."""
    totals = [sum(values) for values in zip(*seconds.values())]
    longest, left = max(totals), [0.0] * len(plans)
    unit, scale, digits = ("ms", 1e3, 1) if longest < 1 else ("s", 1, 3)
    texts = [[f"{scale * total:.{digits}f} {unit}"] for total in totals]
    for part, values in seconds.items():
        widths = [scale * x for x in values]
        axes.barh(range(len(plans)), widths, 0.75, left, color=COLORS[part], label=MEANINGS[part])
        ink = "white" if COLORS[part] in (BLUE, ORANGE, RED, GREEN, PURPLE) else style.INK
        for row, width in enumerate(widths):
            if width >= NARROW * scale * longest:
                middle = left[row] + width / 2
                axes.text(middle, row, f"{width:.3g}", color=ink, ha="center", va="center", fontsize=style.SMALL)
            elif len(plans) == 1:
                texts[row].append(f"{MEANINGS[part]} {width:.3g}")
        left = [x + width for x, width in zip(left, widths)]
    for row, lines in enumerate(texts):
        axes.text(left[row] + 0.01 * scale * longest, row, "\n".join(lines), va="center", fontsize=style.SMALL)
    axes.set_yticks(range(len(plans)), [f"{p.world} GPUs" for p in plans])
    axes.set(xlim=(0, (1.5 if len(plans) == 1 else 1.15) * scale * longest), ylim=(len(plans) - 0.5, -0.5), xlabel=unit)


@style.styled
def curves(proportional: list[Plan], fixed: list[Plan], points: list[tuple[int, float]] = ()):
    """Draw tokens per second over GPUs, with MFU. points: (GPUs, tokens/s) that others published."""
    figure, axes = style.new(4.2)
    first = proportional[0]
    worlds = [p.world for p in proportional]
    linear = [first.tokens_per_second * world / first.world for world in worlds]
    axes.plot(worlds, linear, color=tint(GREY, 0.6), lw=5, label="linear")
    for plans, color, label, above in (
        (proportional, BLUE, "planned, batch in proportion", 8),
        (fixed, ORANGE, "planned, batch as given", -12),
    ):
        axes.plot([p.world for p in plans], [p.tokens_per_second for p in plans], "o-", ms=4, color=color, label=label)
        place = {"xytext": (0, above), "textcoords": "offset points", "ha": "right" if above > 0 else "left"}
        for p in plans:
            if p.mfu_percent is not None and (plans is proportional or p is not plans[0]):  # both start as one plan
                at = p.world, p.tokens_per_second
                axes.annotate(f"{p.mfu_percent:.1f} %", at, fontsize=style.SMALL, color=color, **place)
    if points:
        axes.plot(*zip(*points), "D", ms=6, mfc="none", mec=RED, mew=1.2, ls="", label="published by others")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s")
    axes.set_title(f"Scaling on {first.machine.device.gpu}, with MFU")
    axes.margins(0.1, 0.1)
    ticks = sorted({*worlds, *(gpus for gpus, _ in points)})
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.grid()
    axes.legend()
    return figure
