"""One step of a rank, written down: what it holds, what it computes and communicates, and what it keeps.

Problem: a picture of a layout is only worth as much as its source. The idea: run the trainer itself, and list what it
does for one microbatch. Nothing in the trainer is made for this:

    collectives, actions    the rank's Activity, which every collective and every action already reports to
    pointwise operations    the functions of `Kernels`, wrapped
    products and casts      the `Gemm` of each linear layer, wrapped
    kept for the backward   torch's hooks for saved tensors

`real_trace` runs three steps on a gloo rank, of which it lists the second; `dry_trace` runs one on the meta device, for
any size. tools/tour.py runs both, and planner/page.py makes a page of the traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minitron.checkpoint.boxes import whole_shape
from minitron.comm.mesh import AXES, Axis, Mesh
from minitron.config.schema import Config
from minitron.data.build import build_datasets
from minitron.data.loader import Loader
from minitron.kernels import kernels
from minitron.kernels.gemm import Gemm, Payload, Product
from minitron.kernels.kernels import Kernels
from minitron.kernels.param import Param, Shard, params_of
from minitron.parallel.linear import LinearOp
from minitron.parallel.tiles import local_positions
from minitron.pipeline.executor import MakeSchedule
from minitron.pipeline.schedule import Exchange, Forward, Operation
from minitron.planner.dryrun import kernels as dry_kernels
from minitron.planner.dryrun.dryrun import PARTS, Recorder, fake_world, label, make_mesh, prepare, recorded, run_step
from minitron.planner.dryrun.memory_walk import MemoryWalk
from minitron.train import Trainer, build

OPERATIONS = {
    "add_norm": "add to the residual stream, norm",
    "add_norm_backward": "gradients of norm and residual",
    "split_heads": "split q, k, v; rotate q and k",
    "split_heads_backward": "join the gradients of q, k, v",
    "swiglu_forward": "SwiGLU",
    "swiglu_backward": "gradient of SwiGLU",
    "gelu_forward": "GELU",
    "gelu_backward": "gradient of GELU",
    "merge_": "merge attention over blocks of keys",
    "drop_elements": "dropout",
}
CASTS = {"quantize": "cast of the input", "quantize_activation": "cast of the activation"}
CASTS |= dict.fromkeys(("quantize_grad", "quantize_activation_grad"), "cast of the gradient")
BACKWARD = {"add_norm_backward", "split_heads_backward", "swiglu_backward", "gelu_backward"}
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "FP8 bytes"}
FORMATS |= {torch.float8_e4m3fn: "FP8 e4m3", torch.float8_e5m2: "FP8 e5m2"}
STEPS, LISTED = 3, 2


class Tracer(Recorder):
    """A Recorder that also lists the operations of microbatch 0 in the rank's first chunk, as dictionaries.

    phase: the class of the action that is listed, None in all others. layer: the last layer that computed. on: whether
    this step is listed.
    """

    __slots__ = ("phase", "layer", "on", "events", "actions", "_fresh", "_under_way", "_kept")

    def __init__(self, begun: Callable[[object], None] = lambda action: None):
        super().__init__(begun)
        self.on, self._fresh, self._under_way = True, [], {}
        self.clear()

    def clear(self) -> None:
        """Forget what was listed so far."""
        self.phase, self.layer, self.events, self.actions, self.records, self._kept = None, "", [], [], [], set()

    def begin(self, action: object) -> None:
        super().begin(action)
        listed = isinstance(action, Operation) and (action.mb, action.chunk) == (0, 0)
        self.phase = type(action).__name__ if listed and self.on else None
        if isinstance(action, Operation | Exchange):
            self.actions.append(action)

    # ---- collectives

    def record(self, kind: str, axis: Axis, x: Tensor, ranks: tuple[int, ...]) -> None:
        super().record(kind, axis, x, ranks)
        if self.phase is not None:
            self.note("comm", kind, None, x, axis=axis.name, ranks=list(ranks), bytes=x.nbytes, until=None)
            self._fresh.append(self.events[-1])

    def enter(self, kind: str, axis: Any, num_bytes: int, waits: bool = True) -> None:
        """Note where a collective ends: at once, or in the first later wait for one of its kind and axis."""
        super().enter(kind, axis, num_bytes, waits)
        queue = self._under_way.setdefault((kind, axis.name), deque())
        if self._fresh:
            if waits:
                self._end(self._fresh)
            else:
                queue.append(self._fresh)
            self._fresh = []
        elif waits and queue:
            self._end(queue.popleft())

    def _end(self, events: list[dict]) -> None:
        for event in events:
            event["until"] = len(self.events)

    # ---- operations

    def note(self, kind: str, name: str, x: Any, y: Any, **more: Any) -> None:
        """List an operation from x to y: tensors, payloads, or tuples of them."""
        if self.phase is not None:
            shapes = {"in": shapes_of(x), "out": shapes_of(y)}
            self.events.append({"kind": kind, "name": name, "layer": self.layer, "phase": self.phase, **shapes, **more})

    def kernels(self, chosen: Kernels) -> Kernels:
        """Return the same kernels, listed."""
        functions, attend = vars(chosen.ops), chosen.attention
        ops = SimpleNamespace(**functions | {name: self._operation(name, functions[name]) for name in OPERATIONS})
        forward = self._attention("attention", attend.forward, 1)
        backward = self._attention("gradient of attention", attend.backward, 2.5)
        return replace(chosen, ops=ops, attention=replace(attend, forward=forward, backward=backward))

    def _operation(self, name: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            for param in args:
                if isinstance(param, Param) and hasattr(param, "spec") and "norm" in param.spec.name:
                    self.layer = param.spec.name.rpartition(".")[0]
            y = function(*args, **kwargs)
            self._inside_layer("pointwise", OPERATIONS[name], args[0], y, again=self._again(name not in BACKWARD))
            return y

        return run

    def _attention(self, name: str, function: Callable, times: float) -> Callable:
        def run(*args: Any) -> Any:
            result = function(*args)
            q, k, v = args[:3] if times == 1 else args[1:4]
            causal = 0.5 if args[-1].causal else 1.0
            flops = times * causal * 4 * q.numel() * k.shape[2]
            out = result[0] if times == 1 else result
            self._inside_layer("attention", name, (q, k, v), out, flops=flops, again=self._again(times == 1))
            return result

        return run

    def _inside_layer(self, kind: str, name: str, x: Any, y: Any, **more: Any) -> None:
        """List an operation between two linear layers: it belongs to the attention or the MLP that holds both."""
        layer = self.layer
        if ".attention." in layer or ".mlp." in layer:
            self.layer = layer.rpartition(".")[0]
        self.note(kind, name, x, y, **more)
        self.layer = layer

    def _again(self, forward: bool) -> bool:
        """Return whether an operation of the forward pass runs in a backward: it is recomputed."""
        return forward and self.phase != Forward.__name__

    def attach(self, trainer: Trainer) -> None:
        """List the products and casts of all linear layers, and the inputs of blocks that are recomputed whole."""
        for chunk in trainer.chunks:
            for name, module in chunk.named_modules():
                if isinstance(op := getattr(module, "op", None), LinearOp):
                    module.op = replace(op, gemm=TracedGemm(op.gemm, name, self))  # type: ignore[assignment]
            for number, block in chunk.blocks.items():
                if trainer.cfg.train.recompute == "full":
                    block.register_forward_pre_hook(lambda _, args, number=number: self._keep_input(number, args[0].x))

    def _keep_input(self, block: str, x: Tensor) -> None:
        if self.phase == Forward.__name__:
            self.layer = f"blocks.{block}.input"
            self.note("keep", "kept for the backward pass", None, x, bytes=x.nbytes)

    @contextmanager
    def listing(self, on: bool = True) -> Iterator[None]:
        """List the step within the block, and what autograd saves in it."""
        self.on = on
        self.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda x: x):
            yield
        self.on = False

    def _keep(self, x: Tensor) -> Tensor:
        place = x.untyped_storage()._cdata, x.storage_offset(), x.numel()
        if self.phase == Forward.__name__ and not isinstance(x, Param) and place not in self._kept:
            self._kept.add(place)
            self.note("keep", "kept for the backward pass", None, x, bytes=x.nbytes)
        return x.detach()  # an output that saves itself would be a cycle


class TracedGemm:
    """A Gemm whose casts and products are listed under the name of its layer."""

    def __init__(self, gemm: Gemm, name: str, tracer: Tracer):
        self.gemm, self.name, self.tracer = gemm, name, tracer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.gemm, name)
        return partial(self._cast, CASTS[name], method) if name in CASTS else method

    def forward(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        return self._product("y = x W^T", weight, self.gemm.forward, weight, bias)

    def input_grad(self, weight: Tensor) -> Product:
        return self._product("dx = dy W", weight, self.gemm.input_grad, weight)

    def weight_grad(self, weight: Param, dy: Payload, x: Payload) -> Tensor | None:
        self.tracer.layer = self.name
        rows = dy.rowwise.shape[0] if dy.rowwise is not None else dy.columnwise.shape[1]
        result = self.gemm.weight_grad(weight, dy, x)
        into = result if weight.slot is None else weight.slot.main_grad
        self.tracer.note("product", "dW += dy^T x", (dy, x), into, flops=2 * rows * weight.numel(), again=False)
        return result

    def _cast(self, name: str, method: Callable, x: Tensor, *args: Any, **options: Any) -> Any:
        """Cast x, and list it, unless the operation before has made the cast."""
        result = method(x, *args, **options)
        payload = result if isinstance(result, Payload) else result[0]
        self.tracer.layer = self.name
        y = payload.rowwise
        last = self.tracer.events[-1]["out"] if self.tracer.events else ()
        if y.itemsize == 1 and shapes_of(y)[0] not in last:
            self.tracer.note("cast", name, x, y, again=self.tracer._again(name != "cast of the gradient"))
        return result

    def _product(self, name: str, weight: Tensor, make: Callable, *args: Any) -> Product:
        self.tracer.layer, uncast = self.name, getattr(self.gemm, "_weight", self) is None
        product = make(*args)
        if uncast and weight.itemsize > 1:
            self.tracer.note("cast", "cast of the weight, once a step", weight, self.gemm._weight, again=False)

        def run(x: Payload, *out: Tensor) -> Tensor:
            y = product(x, *out)
            self.tracer.layer = self.name
            flops, again = 2 * y.numel() * x.rowwise.shape[-1], self.tracer._again(name.startswith("y"))
            read = getattr(self.gemm, "_weight", None) or weight  # the cast, in FP8
            self.tracer.note("product", name, (x, read), y, flops=flops, again=again)
            return y

        return run


def shapes_of(x: Any) -> list[str]:
    """Describe tensors: "[256, 2, 128] fp32"."""
    if isinstance(x, Tensor):
        return [f"{list(x.shape)} {FORMATS.get(x.dtype, str(x.dtype).rpartition('.')[2])}"] if x.dim() else []
    if isinstance(x, Payload):
        return shapes_of(x.rowwise if x.rowwise is not None else x.columnwise)
    return [text for part in x for text in shapes_of(part)] if isinstance(x, tuple | list) else []


# ---- runs -----------------------------------------------------------------------------------------------------------


def real_trace(cfg: Config, schedule: MakeSchedule | None = None) -> dict:
    """Train STEPS steps as this rank of the default process group; return its trace. Collective over the world.

    schedule: see `build`.
    """
    p, t = cfg.parallel, cfg.train
    alone = 1 if cfg.optimizer.reduces_in == "bf16" else None
    mesh = Mesh.create(tp=p.tp, pp=p.pp, cp=p.cp, tied=cfg.model.tie_embeddings, node_ranks=alone)
    tracer = Tracer()
    chosen = tracer.kernels(kernels.choose(cfg, mesh.device))
    trainer = build(cfg, recorded(mesh, tracer), chosen, schedule=schedule)
    tracer.attach(trainer)
    samples, vocab = t.global_batch_size * STEPS, cfg.model.vocab_size
    sizes = dict(vocab_size=vocab, seq_len=t.seq_len, train_samples=samples, valid_samples=0)
    loader = Loader(build_datasets(cfg.data, **sizes, seed=t.seed).train, cfg, trainer.mesh)
    figures, gradients, trace = [], [], {}
    for step in range(1, STEPS + 1):
        batches = loader.step((step - 1) * t.global_batch_size, step)
        tracer.begin_step(step)
        with tracer.listing(step == LISTED):
            figures.append(trainer.step(batches, cfg.optimizer.lr).read())
        if not gradients and not figures[-1]["skipped"]:  # moments are the gradients now, clipped, times 1 - beta
            moments = trainer.optimizer.exp_avg
            gradients = [(p.name, p.offset, p.of(moments).clone()) for p in trainer.gradients.owned()]
        if step == LISTED:
            tokens = {mesh.cp.rank: ranges(batches[0].order.tolist())}
            trace = described(trainer, tracer, everyone=False) | {"tokens": tokens}
            trace["samples"] = [batch.samples.tolist() for batch in batches]
    loader.close()
    return trace | {"figures": figures, "gradients": gradients}


def dry_trace(cfg: Config, world: int, rank: int) -> dict:
    """Run one step of a rank of a world that does not exist; return its trace with the memory of the step."""
    walk, p = MemoryWalk(casts=cfg.precision.fp8 != "none"), cfg.parallel
    with fake_world(world, rank):
        tracer, mesh = Tracer(walk.begin), make_mesh(cfg, world)
        with walk:
            trainer = prepare(cfg, recorded(mesh, tracer), chosen=tracer.kernels(dry_kernels.choose(cfg)))
            tracer.attach(trainer)
            label(walk, trainer)
            with tracer.listing():
                run_step(trainer)
        trace = described(trainer, tracer, everyone=True)
    peak, action = walk.peak()
    order = {r: local_positions(cfg.train.seq_len, p.cp, r, p.cp_style).tolist() for r in range(p.cp)}
    trace |= {"tokens": {r: ranges(places) for r, places in order.items()}, "peak_action": action}
    return trace | {"memory": {part: peak.get(part, 0) for part in PARTS}, "timeline": walk.timeline()}


def held(cfg: Config, world: int, rank: int) -> dict:
    """Build a rank of a world that does not exist; return what it holds."""
    with fake_world(world, rank):
        return described(prepare(cfg, make_mesh(cfg, world)), Tracer(), everyone=True)


def block_events(events: list[dict]) -> list[dict]:
    """Return the events of the first block, with `until` counted among them.

    A collective has the layer of what needs it: of the next product if it gathers, of attention if it is over cp.
    """
    mine = [i for i, event in enumerate(events) if event["layer"].startswith("blocks.")]
    first = events[mine[0]]["layer"].split(".")[1] if mine else ""
    mine = [i for i in mine if events[i]["layer"].split(".")[1] == first]
    while mine and events[mine[-1]]["kind"] == "comm":  # of the embedding, which follows the first block's backward
        mine.pop()
    found, layer = [], ""
    for event in (events[i] for i in reversed(mine)):
        layer = event["layer"] if event["kind"] == "product" else layer
        more = {}
        if event["kind"] == "comm":
            more["until"] = event["until"] and sum(i < event["until"] for i in mine)
            if event["axis"] == "cp":
                more["layer"] = f"blocks.{first}.attention"
            elif event["name"] == "all-gather":
                more["layer"] = layer
        found.append(event | more)
    return found[::-1]


# ---- what a rank holds ----------------------------------------------------------------------------------------------


def described(trainer: Trainer, tracer: Tracer, everyone: bool) -> dict:
    """Return a rank's place, what it holds, and what the tracer has listed.

    everyone: also what the other tp and dp_cp ranks of its stage hold, by the same rules; else only its own parts.
    """
    mesh, buckets = trainer.mesh, trainer.gradients.buckets
    spans = {s.name: (i, s.start) for i, bucket in enumerate(buckets) for s in bucket.plan.spans}
    params = []
    for chunk in trainer.chunks:
        for param in params_of(chunk):
            spec, shard, local = param.spec, param.spec.shard, tuple(param.shape)
            bucket, start = spans.get(spec.name, (None, 0))
            facts = dict(name=spec.name, shape=whole_shape(local, shard), local=local)
            cut = dict(dim=None if shard is None else shard.dim, slices=parts_of(shard, mesh.tp, everyone))
            params.append(facts | cut | dict(bucket=bucket, start=start, sum=spec.sum_over_tp, tied=spec.tied))
    data = range(mesh.dp_cp.size) if everyone else [mesh.dp_cp.rank]
    flat = []
    for bucket in buckets:
        plan = bucket.plan
        sizes = dict(size=plan.size, numel=sum(span.numel for span in plan.spans))
        kind = dict(format=FORMATS.get(bucket.grad.dtype), replicated=plan.key.replicated, tied=plan.key.tied)
        owners = {r: (plan.slice_of(r).start, plan.slice_of(r).stop) for r in data}
        flat.append(sizes | kind | dict(owners=owners))
    return {
        "rank": mesh.rank,
        "place": {name: getattr(mesh, name).rank for name in AXES},
        "groups": {name: list(getattr(mesh, name).ranks) for name in (*AXES, "dp_cp")},
        "params": params,
        "buckets": flat,
        "events": block_events(tracer.events),
        "actions": tracer.actions,
        "records": tracer.records,
    }


def parts_of(shard: Shard | None, axis: Axis, everyone: bool) -> dict[int, list[tuple[int, int, int]]]:
    """Map tp ranks to the (local, full, length) of their slices along the shard's dim."""
    if shard is None:
        return {}
    ranks = range(axis.size) if everyone else [axis.rank]
    return {r: replace(shard, axis=replace(shard.axis, rank=r)).slices() for r in ranks}


def ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """[0, 1, 2, 5, 6] -> [(0, 2), (5, 6)]."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return [(run[0][1], run[-1][1]) for run in runs]
