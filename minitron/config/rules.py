"""The rules that keys must keep together: dividing sizes, enough ranks, a GPU that has the number format.

Each `_check_*` raises ValueError at the first broken rule, in one line: the value, the rule, the fix. The fix of a size
that does not divide is computed from every size that it has to divide, so that the fix does not break another rule:

    heads 8, key and value heads 4, ffn 390     parallel.tp=8 does not divide model.num_kv_heads=4; use 1 or 2

The schema declares beside a key which values of other keys it needs, and no rule here repeats that. Files and kernels
are checked where they are opened or chosen.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain, pairwise
from typing import Any

from minitron.config.batch import batch_size, batch_stages, trained_after
from minitron.config.schema import MAX_STEPS, Config, ModelConfig, TrainConfig, keys
from minitron.config.sizes import stage_layers
from minitron.config.text import shown

MAX_INCREMENTS = 10_000  # in a ramp: each step searches them
MAX_OFFSET = (1 << 31) - 1  # elements of a tensor that a kernel with 32-bit offsets can take


def check(cfg: Config, world: int, capability: tuple[int, int] | None = None) -> None:
    """Check every rule, for `world` ranks on GPUs of that CUDA capability (None: on CPU). Raises ValueError."""
    _check_keys(cfg)
    _check_model(cfg.model)
    _check_layout(cfg, world)
    _check_sequence(cfg)
    _check_attention(cfg)
    _check_precision(cfg, capability)
    _check_batches(cfg.train)
    _check_optimizer(cfg)
    _check_data(cfg)
    _check_finetune(cfg)
    if cfg.checkpoint.export == "hf":
        check_exportable(cfg.model)
    _check_saves(cfg)
    _check_log(cfg, world)


def _check_keys(cfg: Config) -> None:
    """Check what the schema declares beside each key: the interval of its numbers, and the keys that it needs.

    A key that has its default needs no others. Every `~NAME` must be a user's home directory.
    """
    tree = asdict(cfg)

    def value_of(name: str) -> Any:
        return functools.reduce(lambda section, part: section and section[part], name.split("."), tree)

    for key in keys():
        value, within = value_of(key.name), key.field.metadata["within"]
        values = value if isinstance(value, tuple) else (value,)
        for x in chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in values):
            if isinstance(x, str):
                _check_home(f"{key.name}={x}", x)
            elif within is not None and x is not None:
                what = x if x is value else f"{shown(value)}: {x}"
                _check_range(f"{key.name}={what}", x, within)
        for other, needed in key.field.metadata["needs"].items():
            given = value_of(other)
            if value != key.field.default and given not in needed and (needed or given is None):
                fix = f"{other}={_either(map(shown, needed))}" if needed else other
                why = f"does not go with {other}={shown(given)}; drop it, or set {fix}"
                raise ValueError(f"{key.name}={shown(value)} {why} ({key.name}=null drops what a file has set)")


def _check_range(what: str, x: int | float, within: str) -> None:
    low, high = map(float, within[1:-1].split(","))
    above = x >= low if within[0] == "[" else x > low
    below = x <= high if within[-1] == "]" else x < high
    if not (above and below):  # a NaN is neither
        raise ValueError(f"{what} is outside {within}; use {_inside(within)}")


def _check_home(what: str, path: str) -> None:
    path = path.split(":", 1)[-1]  # data.tokenizer has a kind before the path
    if path.startswith("~") and os.path.expanduser(path).startswith("~"):
        raise ValueError(f"{what}: no user has the home directory {path.split('/')[0]}; write the whole path")


def _check_model(m: ModelConfig) -> None:
    if m.head_dim is None:
        _check_divides("model.num_heads", m.num_heads, {"model.hidden_size": m.hidden_size})
    _check_divides("model.num_kv_heads", m.kv_heads, {"model.num_heads": m.num_heads})
    if m.positions == "rope" and m.head_width % 2:
        width = f"model.head_dim={m.head_width}{'' if m.head_dim else ' (null: hidden_size/num_heads)'}"
        rule = "is odd, and rotary positions turn pairs of channels"
        raise ValueError(f"{width} {rule}; make it even, or set model.positions=learned")
    if m.rope_scaling is not None and m.rope_scaling.low_freq_factor >= (high := m.rope_scaling.high_freq_factor):
        low = f"model.rope_scaling.low_freq_factor={m.rope_scaling.low_freq_factor}"
        raise ValueError(f"{low} must be below high_freq_factor={high}; Llama 3.1 has 1 and 4")


def _check_layout(cfg: Config, world: int) -> None:
    m, p, t = cfg.model, cfg.parallel, cfg.train
    ranks = p.tp * p.pp * p.cp
    product = f"parallel.tp*pp*cp={p.tp}*{p.pp}*{p.cp}={ranks}"
    if world < ranks:
        raise ValueError(f"{product} needs {ranks} ranks, but there are {world}; start {ranks}, or lower tp, pp or cp")
    if world % ranks:
        fit = _either(_multiples(ranks, world))
        raise ValueError(f"{product} does not divide the world of {world} ranks; start {fit}, or change tp, pp or cp")
    heads = {"model.num_heads" if m.num_kv_heads is None else "model.num_kv_heads": m.kv_heads}
    padded = f"the padded vocabulary (model.vocab_size={m.vocab_size}, vocab_multiple={m.vocab_multiple})"
    others = {"model.ffn_hidden_size": m.ffn_hidden_size, padded: m.padded_vocab_size}
    _check_divides("parallel.tp", p.tp, heads | others)
    if p.cp > 1 and p.cp_style == "ulysses":
        _check_divides("parallel.tp*cp (ulysses)", p.tp * p.cp, heads)
    if p.schedule == "zb-h1" and p.pp == 1:
        why = "fills the bubble of a pipeline, and parallel.pp=1 has none"
        raise ValueError(f"parallel.schedule=zb-h1 {why}; use parallel.pp=2 or more, or parallel.schedule=1f1b")
    stage_layers(m.num_layers, p.pp, p.vp, p.layers_per_stage)
    dp = cfg.dp(world)
    samples = f"train.micro_batch_size*dp={t.micro_batch_size}*{dp}"
    _check_multiple("train.global_batch_size", t.global_batch_size, samples, t.micro_batch_size * dp)


def _check_sequence(cfg: Config) -> None:
    p, s, most = cfg.parallel, cfg.train.seq_len, cfg.model.max_positions
    if s > most:
        raise ValueError(f"train.seq_len={s} exceeds model.max_positions={most}; use at most {most}, or raise that")
    parts = {}
    if p.cp > 1:
        parts |= {"parallel.cp (ulysses)": p.cp} if p.cp_style == "ulysses" else {"2*parallel.cp (zigzag)": 2 * p.cp}
    if p.sequence_parallel and p.tp > 1:
        parts["parallel.cp*tp (sequence parallel)"] = p.cp * p.tp
        if cfg.model.head_piece is not None:
            _check_multiple("model.head_piece", cfg.model.head_piece, "parallel.tp (sequence parallel)", p.tp)
    for name, part in parts.items():
        _check_multiple("train.seq_len", s, name, part, choices=math.lcm(*parts.values()))


def _check_attention(cfg: Config) -> None:
    m, cp, batch = cfg.model, cfg.parallel.cp, cfg.train.micro_batch_size
    # Kernels of all backends have 32-bit offsets, ours within a block of 128 positions.
    width = (m.num_heads + 2 * m.kv_heads) // cfg.parallel.tp * m.head_width
    most = MAX_OFFSET // (width * max(cfg.train.seq_len // cp, 128))
    if batch > most:
        why = f"gives attention more than {MAX_OFFSET} elements of queries, keys and values a rank"
        fix = f"use at most {most}" if most else "shorten train.seq_len, or raise parallel.cp or parallel.tp"
        raise ValueError(f"train.micro_batch_size={batch} {why}; {fix}")


def _check_precision(cfg: Config, capability: tuple[int, int] | None) -> None:
    p = cfg.precision
    if p.dtype == "bf16" and capability is not None and capability < (8, 0):
        needs = "precision.dtype=bf16 needs a GPU of sm_80 (Ampere) or later"
        raise ValueError(f"{needs}, this one is {_sm(capability)}; use precision.dtype=fp16 or fp32")
    if p.fp8 != "none":
        _check_fp8(cfg, capability)


def _check_fp8(cfg: Config, capability: tuple[int, int] | None) -> None:
    m, p, t, fp8 = cfg.model, cfg.parallel, cfg.train, cfg.precision.fp8
    oldest, name = ((9, 0), "Hopper") if fp8 == "block" else ((8, 9), "Ada, Hopper")
    if capability is not None and capability < oldest:
        needs = f"precision.fp8={fp8} needs a GPU of {_sm(oldest)} ({name} or later)"
        fix = f"use precision.fp8={'current' if capability >= (8, 9) else 'none'}"
        raise ValueError(f"{needs}, this one is {_sm(capability)}; {fix}")
    kept = cfg.precision.fp8_bf16_layers
    if 2 * kept >= m.num_layers:
        why = f"at both ends leave none of model.num_layers={m.num_layers} in FP8"
        fix = f"use at most {(m.num_layers - 1) // 2}, or precision.fp8=none"
        raise ValueError(f"precision.fp8_bf16_layers={kept} {why}; {fix}")
    # Of the three products (forward, input gradient, weight gradient) each sums over another dim of the GEMM.
    unit, whose = (128, "blocks of FP8 values") if fp8 == "block" else (16, "FP8 GEMMs")
    per_rank, split = "", 1
    if fp8 == "block" and p.sequence_parallel:  # a rank casts its part before the gather
        per_rank, split = "/tp", p.tp
    sizes = {
        "model.hidden_size/tp": m.hidden_size // p.tp,
        "model.ffn_hidden_size/tp": m.ffn_hidden_size // p.tp,
        "the width of all heads / tp": m.num_heads * m.head_width // p.tp,
        "the rows of the q, k, v matrix / tp": (m.num_heads + 2 * m.kv_heads) * m.head_width // p.tp,
        f"train.seq_len*micro_batch_size/cp{per_rank}": t.seq_len * t.micro_batch_size // (p.cp * split),
    }
    if cfg.precision.fp8_head and m.head_piece is not None:
        sizes[f"model.head_piece{per_rank}"] = m.head_piece // split
    why = f"is not a multiple of {unit}, which {whose} need"
    for name, size in sizes.items():
        if size % unit:
            raise ValueError(f"{name}={size} {why}; change it, or set precision.fp8=none")
    columns = m.padded_vocab_size // p.tp
    if cfg.precision.fp8_head and columns % unit:
        fix = f"set model.vocab_multiple={unit * p.tp}, or precision.fp8_head=false"
        raise ValueError(f"model.vocab_size, padded, /tp={columns} {why}; {fix}")


def _check_batches(t: TrainConfig) -> None:
    final = f"train.global_batch_size={t.global_batch_size}"
    if t.batch_ramp is not None:
        start, increment, _ = t.batch_ramp
        rest = t.global_batch_size - start
        if not (0 < rest <= MAX_INCREMENTS * increment and rest % increment == 0):
            fix = f"choose an increment that divides {rest}" if rest > 0 else f"start below {t.global_batch_size}"
            rule = f"does not reach {final} in 1 to {MAX_INCREMENTS} increments"
            raise ValueError(f"train.batch_ramp={shown(t.batch_ramp)} {rule}; {fix}")
    if t.batch_schedule:
        samples, sizes = zip(*t.batch_schedule)
        fits = samples[0] == 0 and min(sizes) > 0 and all(a < b for a, b in pairwise(samples))
        if not fits or sizes[-1] != t.global_batch_size:
            rule = f"must begin at 0 samples, rise in them, and end with the size {final}"
            raise ValueError(f"train.batch_schedule={shown(t.batch_schedule)} {rule}; correct it or {final}")


def check_batch_sizes(cfg: Config, world: int, trained: int = 0) -> None:
    """Check that the steps after `trained` samples divide among the data ranks. Raises ValueError.

    A run that resumes on more ranks may have passed its smallest steps.
    """
    t, dp = cfg.train, cfg.dp(world)
    name = "train.batch_schedule" if t.batch_ramp is None else "train.batch_ramp"
    for at in (trained, *(first for first, _ in batch_stages(t) if first > trained)):
        samples = f"train.micro_batch_size*dp={t.micro_batch_size}*{dp}"
        _check_multiple(f"{name}: the size", batch_size(t, at), samples, t.micro_batch_size * dp)


def _check_optimizer(cfg: Config) -> None:
    o, dtype = cfg.optimizer, cfg.precision.dtype
    for name in ("accumulate_dtype", "reduce_dtype"):
        if getattr(o, name) == "bf16" != dtype:
            why = f"does not go with precision.dtype={dtype}; drop it, or set precision.dtype=bf16"
            raise ValueError(f"optimizer.{name}=bf16 {why}")
    steps = cfg.train.steps if cfg.train.epochs is None else MAX_STEPS  # checked again when they are known
    if o.constant_steps >= steps:
        constant = f"optimizer.constant_steps={o.constant_steps}"
        raise ValueError(f"{constant} must be below train.steps={steps}; use at most {steps - 1}")
    if o.lr_schedule != "constant" and o.min_lr > o.lr:
        raise ValueError(f"optimizer.min_lr={o.min_lr} exceeds optimizer.lr={o.lr}; use at most {o.lr}")
    last = steps - o.constant_steps if o.decay_steps is None else o.decay_steps
    if o.wsd_decay_steps is not None and o.wsd_decay_steps > last:
        why = f"is longer than the {last} steps to its end; use at most {last}"
        raise ValueError(f"optimizer.wsd_decay_steps={o.wsd_decay_steps} {why}")
    # Without decay_steps or decay_samples the decay ends with the run, and a short run may end within its warm-up.
    warmup = trained_after(cfg.train, o.warmup_steps) if o.warmup_samples is None else o.warmup_samples
    end = o.decay_samples if o.decay_steps is None else trained_after(cfg.train, o.decay_steps)
    if end is not None and warmup >= end:
        decay = f"decay_samples={end}" if o.decay_steps is None else f"decay_steps={o.decay_steps}"
        why = f"ends the decay after {end} samples, within the warm-up of {warmup}"
        raise ValueError(f"optimizer.{decay} {why}; use a longer decay or a shorter warm-up")


def _check_data(cfg: Config) -> None:
    d = cfg.data
    what = {"indexed": "[PREFIX], or [WEIGHT,PREFIX,WEIGHT,PREFIX,...]", "sft": "[FILE.jsonl,...], or [docstrings]"}
    if d.source in what and not d.paths:
        raise ValueError(f"data.source={d.source} has nothing to read; set data.paths={what[d.source]}")
    bounds = list(chain(*d.skip_samples))
    if bounds != sorted(set(bounds)):
        why = "must be ranges [first, end] in order, with first < end, that do not touch"
        raise ValueError(f"data.skip_samples={shown(d.skip_samples)} {why}; use for example [[1000, 1200]]")
    if (t := cfg.train).epochs is not None and t.steps != TrainConfig.steps:
        why = f"contradicts train.steps={t.steps}, which follows from it"
        raise ValueError(f"train.epochs={t.epochs:g} {why}; drop one of them: train.steps=null or train.epochs=null")


TARGETS = ("qkv", "q", "k", "v", "o", "gate", "up", "down")


def _check_finetune(cfg: Config) -> None:
    lora = cfg.lora
    if cfg.finetune.kind != "lora":
        return
    known = [t for t in TARGETS if t != "gate" or cfg.model.family == "llama"]
    given, targets = f"lora.targets=[{','.join(lora.targets)}]", set(lora.targets)
    if unknown := [t for t in lora.targets if t not in known]:
        raise ValueError(f"{given}: a {cfg.model.family} model has no {unknown[0]}; use some of {', '.join(known)}")
    if not targets or len(targets) < len(lora.targets) or ("qkv" in targets and {"q", "k", "v"} & targets):
        rule = "must name each layer once, of qkv and its parts q, k, v one or the other"
        raise ValueError(f"{given} {rule}; use for example [qkv]")


def check_exportable(m: ModelConfig) -> None:
    """Check that transformers has this model: it does not mix the families."""
    gpt = m.family == "gpt"
    for key, value, wanted in (
        ("positions", m.positions, "learned" if gpt else "rope"),
        ("num_kv_heads", m.kv_heads, m.num_heads if gpt else m.kv_heads),
        ("head_dim", m.head_width, m.hidden_size // m.num_heads if gpt else m.head_width),
        ("qk_norm", m.qk_norm, m.qk_norm and not m.biased_qkv),
    ):
        if value != wanted:
            kind = f"{m.family} with qkv_bias" if m.qkv_bias else m.family
            why = f"cannot be exported: transformers' {kind} has {shown(wanted)}"
            raise ValueError(f"model.{key}={shown(value)} {why}; export another model, or set checkpoint.export=none")


def _check_saves(cfg: Config) -> None:
    c = cfg.checkpoint
    if auto := [f"checkpoint.{name}=auto" for name in ("every", "local_every") if getattr(c, name) == "auto"]:
        if c.dir is not None and c.mtbf_hours is None:
            fix = "set it, for example to the hours between the last failures, or set a number of steps"
            raise ValueError(f"{auto[0]} needs checkpoint.mtbf_hours, the mean time between failures; {fix}")
    elif c.mtbf_hours is not None:
        why = "has no effect without checkpoint.every=auto or checkpoint.local_every=auto"
        raise ValueError(f"checkpoint.mtbf_hours={c.mtbf_hours} {why}; drop it, or set one of them")
    if c.local_dir is not None and c.dir is not None:
        home = [os.path.realpath(os.path.expanduser(place)) for place in (c.local_dir, c.dir)]
        if home[0] == home[1]:
            fix = "name a folder on each node's own disk, or drop it"
            raise ValueError(f"checkpoint.local_dir={c.local_dir} is checkpoint.dir, which all nodes share; {fix}")


def _check_log(cfg: Config, world: int) -> None:
    p, steps = cfg.profile, cfg.train.steps
    board = ["log.tensorboard=true"] if cfg.log.tensorboard is True else []
    profile = [f"profile.kind={p.kind}"] if p.kind in ("torch", "memory") else []
    if cfg.log.dir is None and (writers := board + profile):
        raise ValueError(f"{writers[0]} writes into log.dir, which is null; set log.dir, or drop {writers[0]}")
    if (at := cfg.log.prometheus) is not None:
        port = re.fullmatch(r"(?:.+:)?([0-9]{1,5})", str(at))
        if port is None or not 0 < int(port[1]) < 1 << 16:
            raise ValueError(f"log.prometheus={at} is not PORT or ADDRESS:PORT; use for example 127.0.0.1:9400")
    if p.kind == "none":
        return
    if not p.start_step <= p.end_step <= steps and cfg.train.epochs is None:
        both = f"profile.start_step={p.start_step} and profile.end_step={p.end_step}"
        raise ValueError(f"{both} are not steps, in order, of train.steps={steps}; use 1 to {steps}")
    ranks = f"profile.ranks={list(p.ranks)}"
    if not p.ranks or max(p.ranks) >= world or len(set(p.ranks)) < len(p.ranks):
        raise ValueError(f"{ranks} must name ranks of the world of {world}, each once; use 0 to {world - 1}")


# ---- the fixes ----------------------------------------------------------------------------------------------------


def _check_divides(name: str, value: int, wholes: dict[str, int]) -> None:
    """Check that `value` divides every whole; the error lists the values that divide all of them."""
    for whole, size in wholes.items():
        if size % value:
            common = math.gcd(*wholes.values())
            small = [d for d in range(1, math.isqrt(common) + 1) if common % d == 0]
            valid = {*small, *(common // d for d in small)}
            nearest = sorted(sorted(valid, key=lambda d: (abs(d - value), d))[:6])
            raise ValueError(f"{name}={value} does not divide {whole}={size}; use {_either(nearest)}")


def _check_multiple(name: str, value: int, part: str, size: int, choices: int | None = None) -> None:
    """Check that `value` is a multiple of `size`; the error offers multiples of `choices` (of `size` if not given)."""
    if value % size:
        fit = _either(_multiples(choices or size, value))
        raise ValueError(f"{name}={value} is not a multiple of {part}={size}; use {fit}")


def _multiples(size: int, near: int) -> list[int]:
    """Return the multiples of `size` next to `near`, 0 left out."""
    below = near // size * size
    return [n for n in (below, below + size) if n > 0]


def _inside(within: str) -> str:
    """Write "[0, 1)" as "at least 0 and less than 1"."""
    low, high = within[1:-1].split(", ")
    above, below = "at least" if within[0] == "[" else "more than", "at most" if within[-1] == "]" else "less than"
    return f"{above} {low} and {below} {high}"


def _either(values: Iterable[object]) -> str:
    """Write the values as "1, 2 or 4"."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last


def _sm(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)
