"""Estimate the seconds of one operation on a GPU or between GPUs: a product, attention, a message.

Problem: a product of [2048, 9216] by [9216, 3072] is far from a data sheet's peak. The idea: a few constants per
device, each measured alone (`benchmarks/ceilings.py --device-file`), and one formula for each kind of operation:

    product      operations / rate + bytes / copy rate * `unhidden`; a weight gradient's rate is `weight_grad` of that:
                 its operands are transposed. A product with fewer tiles than the GPU has processors leaves some idle
    attention    operations / (rate * keys / (keys + half_keys)): short sequences fill the kernel less. A head dim is
                 rounded up to 64, 128 or 256. The rate is cuDNN's, or flash attention 2's
    pointwise    bytes read and written / (copy rate * `pointwise`)
    collective   bytes * (P - 1) / P / bus + latency of the hops; the bus is the slowest link that the ring crosses
    copy         bytes / copy engines' rate + a barrier, between GPUs of a node that read each other's memory

    A weight gradient [n, k] += dy^T x also reads and writes 8 n k bytes of float32, 2e-12 n k seconds at 4 TB/s; with
    m = 2048 rows its 4096 n k operations take 6e-12 n k at 700 TFLOP/s. That is why short sequences train slower.

The partly filled last wave of tiles is ignored: if power is the limit, the other waves run faster. In a step kernels
run a little slower than alone, because of heat, gaps and concurrent kernels: `in_step` is that share.
GPUs of one kind differ, and a step waits for the slowest. Their speeds vary by `spread`, a standard deviation. The
slowest of n is slower by the expected largest of n normal numbers: 2.6 deviations for 128, 4.0 for 16,384.
Ranks of a ring that share a node share its network cards: each has cards / GPUs of one. Nodes are in pods. From pod to
pod, the uplinks carry the share `uplinks` of what the cards of a pod could send, and the rings that leave a pod share
them. A ring crosses a pod's uplinks once, and may use the uplink share of all its ranks in the pod. So a ring with many
ranks per pod is not slowed; one with two is, and so are messages between stages.
`devices.json` holds the constants with their sources. Left out: jobs of others on the same switches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, inf
from pathlib import Path
from statistics import NormalDist
from typing import TypeVar

from minitron.config.files import read_json

DEVICES = Path(__file__).with_name("devices.json")
T = TypeVar("T")
MayBeZero = float  # all other numbers are positive


@dataclass(frozen=True)
class Device:
    """One kind of GPU. Rates are those of kernels alone; `source` names their origin."""

    gpu: str  # as CUDA names it: H100
    fabric: str  # the network that it usually has
    memory_gib: float  # as CUDA reports
    context_gib: MayBeZero  # outside of torch's allocator, without NCCL: CUDA and libraries
    processors: int  # streaming multiprocessors
    gemm_tflops: dict[str, float]  # bf16, fp8: a product without its memory traffic
    weight_grad: dict[str, float]  # share of that rate that weight gradients reach
    unhidden: MayBeZero  # share of a product's memory traffic that its arithmetic does not hide
    attention_tflops: float  # forward and backward, counting pairs under the mask, for endless sequences
    half_keys: MayBeZero  # keys at which attention reaches half of that
    flash_tflops: float  # the same for flash attention 2, which uses no instructions newer than the A100's
    flash_half_keys: MayBeZero
    copy_tb_s: float  # bytes read plus bytes written
    pointwise: float  # share of that rate that fused pointwise kernels reach
    in_step: float  # rate of kernels in a step over their rate alone
    gap_seconds: MayBeZero  # from one kernel to the next, with the time of the shortest kernel
    launch_seconds: MayBeZero  # the host's time for a kernel or copy that it launches eagerly
    spread: MayBeZero  # standard deviation of the speeds of GPUs of this kind, as a share
    source: str


@dataclass(frozen=True)
class Fabric:
    """How GPUs are joined. Rates in GB/s in one direction, of collectives as NCCL's bus bandwidth counts."""

    gpus_per_node: int
    cards_per_node: int  # network cards
    nvlink_gb_s: float  # per GPU, by NCCL
    nvlink_seconds: MayBeZero  # latency of a step of a ring
    copy_gb_s: float  # per GPU, by copy engines from another GPU's memory
    barrier_seconds: MayBeZero  # between GPUs that copy
    network_gb_s: float  # per card
    network_seconds: MayBeZero
    gpus_per_pod: int  # inside a pod the network is as fast as the cards
    uplinks: float  # from pod to pod: share of what the cards of a pod could send
    felt: MayBeZero  # share of NCCL's time by which concurrent kernels take longer: NCCL takes multiprocessors
    copy_felt: MayBeZero  # the same for copies of gradients and parameters in a node
    piece_felt: MayBeZero  # and for those of tensor parallelism, with barriers, sums and products in pieces
    source: str


@dataclass(frozen=True)
class Software:
    """How a trainer does the same work. Its memory is assumed to be minitron's."""

    name: str
    eager: bool = False  # the host launches every kernel, in every step; else only with train.cuda_graph=off
    # Whether norms, residual sums, casts and adapters are fused, unlike Transformer Engine's and Megatron's.
    fused: bool = True
    # Pieces of a product whose operand or result is sent: minitron's have the rows of 1, 1, 2, 4, ... ranks, those of
    # user buffers the rows of one rank each.
    ring: bool = False


SOFTWARE = {
    one.name: one
    for one in (
        Software("minitron"),
        Software("minitron-eager", eager=True),
        Software("megatron", eager=True, fused=False, ring=True),
        # With CUDA graphs of whole iterations. The optimizer's step is outside: a few kernels of the host.
        Software("megatron-graph", fused=False, ring=True),
    )
}


def read_machines(path: Path = DEVICES) -> tuple[dict[str, Device], dict[str, Fabric]]:
    """Read devices and fabrics by name. Raises ValueError for a missing or unknown key, and for a bad number."""
    try:
        content = read_json(path)
        if any("reserved_gib" in values for values in content["devices"].values()):
            raise ValueError("reserved_gib has become context_gib, without NCCL's memory: write 0.5")
        devices = {name: Device(**values) for name, values in content["devices"].items()}
        fabrics = {name: Fabric(**values) for name, values in content["fabrics"].items()}
        for one in (*devices.values(), *fabrics.values()):
            _check_numbers(one)
        return devices, fabrics
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        needs = f"`devices` with {', '.join(f.name for f in fields(Device))}, and `fabrics`"
        fix = f"it needs {needs}; minitron/planner/devices.json is one"
        raise ValueError(f"{path} is not a table of devices ({error}); {fix}") from None


def _check_numbers(one: Device | Fabric) -> None:
    """Raise ValueError, KeyError or TypeError for a value that the formulas cannot take."""
    for f in fields(one):
        value = getattr(one, f.name)
        numbers = [value[kind] for kind in ("bf16", *one.gemm_tflops)] if f.type.startswith("dict") else [value]
        if f.type != "str" and not all(0 < x < inf or x == 0 and f.type == "MayBeZero" for x in numbers):
            raise ValueError(f"{f.name}={value} is out of range")


@dataclass(frozen=True)
class Machine:
    """A device in a fabric: seconds of operations on it."""

    device: Device
    fabric: Fabric
    software: Software = SOFTWARE["minitron"]

    TILE = 128  # rows and columns of the output that one multiprocessor makes at a time, at least

    def product(
        self, m: int, n: int, k: int, *, fp8: bool, weight_grad: bool = False, grad_bytes: int = 4, pieces: int = 1
    ) -> float:
        """Time y [m, n] = x [m, k] W [k, n], or the gradient [n, k] += dy [n, m] x [m, k] of its weight.

        grad_bytes: bytes of an element of the gradient, which is read and written. pieces: the number of pieces of x;
        each reads all of W, or adds to all of its gradient.
        """
        rows, columns = (n, k) if weight_grad else (m, n)
        d, item, kind = self.device, 1 if fp8 else 2, "fp8" if fp8 else "bf16"
        idle = max(1.0, d.processors / (ceil(rows / self.TILE) * ceil(columns / self.TILE)))
        rate = d.gemm_tflops[kind] * (d.weight_grad[kind] if weight_grad else 1) * 1e12
        traffic = item * (m * k + m * n) + pieces * 2 * grad_bytes * n * k
        if not weight_grad:
            traffic = item * (m * k + pieces * n * k) + 2 * m * n
        return (idle * 2 * m * n * k / rate + d.unhidden * traffic / (d.copy_tb_s * 1e12)) / d.in_step

    def attention(self, operations: float, keys: float, head_dim: int, *, flash: bool = False) -> float:
        """Time a call of `operations` under the mask, over `keys` positions, of cuDNN or of flash attention 2."""
        d = self.device
        size = next((size for size in (64, 128, 256) if size >= head_dim), head_dim)
        best, half = (d.flash_tflops, d.flash_half_keys) if flash else (d.attention_tflops, d.half_keys)
        rate = best * keys / (keys + half) * head_dim / size * 1e12
        return operations / rate / d.in_step

    def moved(self, num_bytes: float) -> float:
        """Time pointwise kernels that read and write num_bytes together."""
        return num_bytes / (self.device.copy_tb_s * 1e12 * self.device.pointwise)

    def copied(self, num_bytes: float) -> float:
        """Time one long pass over memory, such as the optimizer's."""
        return num_bytes / (self.device.copy_tb_s * 1e12)

    def inside(self, ranks: int, stride: int) -> bool:
        """Return whether `ranks` of an axis, every `stride`-th rank of the world, are in one node."""
        return ranks * stride <= self.fabric.gpus_per_node

    def collective(self, num_bytes: float, ranks: int, stride: int) -> float:
        """Time an all-gather or reduce-scatter of a whole buffer of `num_bytes`."""
        f = self.fabric
        if ranks == 1:
            return 0.0
        together = min(ranks, max(1, f.gpus_per_node // stride))  # ranks of the ring in a node, each with its share
        nodes = ceil(ranks / together)
        bus = f.nvlink_gb_s if nodes == 1 else min(f.nvlink_gb_s, together * self.network_gb_s)
        if ranks * stride > f.gpus_per_pod:
            bus = min(bus, self.uplink_gb_s(stride))
        latency = (ranks - nodes) * f.nvlink_seconds + (nodes - 1) * f.network_seconds
        return num_bytes * (ranks - 1) / ranks / (bus * 1e9) + latency

    @property
    def network_gb_s(self) -> float:
        """A GPU's share of the node's cards; a GPU alone cannot use two."""
        f = self.fabric
        return f.network_gb_s * min(1.0, f.cards_per_node / f.gpus_per_node)

    def uplink_gb_s(self, stride: int) -> float:
        """Return the GB/s of a pod's uplinks that a ring of every `stride`-th rank, or a message along it, gets."""
        f = self.fabric
        return max(1, f.gpus_per_pod // stride) * f.uplinks * self.network_gb_s

    def copy(self, num_bytes: float) -> float:
        """Time the bytes that a GPU reads from others of its node, and the barrier before."""
        return num_bytes / (self.fabric.copy_gb_s * 1e9) + self.fabric.barrier_seconds

    def message(self, num_bytes: float, ranks: int, stride: int) -> float:
        """Time a message from a rank to the next one of the axis."""
        f, near = self.fabric, self.inside(ranks, stride)
        rate, latency = (f.nvlink_gb_s, f.nvlink_seconds) if near else (self.network_gb_s, f.network_seconds)
        if ranks * stride > f.gpus_per_pod:
            rate = min(rate, self.uplink_gb_s(stride))
        return num_bytes / (rate * 1e9) + latency if ranks > 1 else 0.0

    def slowest(self, world: int) -> float:
        """Return the share by which the slowest of `world` GPUs is expected to be slower than the average."""
        return self.device.spread * NormalDist().inv_cdf((world - 0.375) / (world + 0.25)) if world > 1 else 0.0


def choose_machine(device: str, fabric: str | None, software: str = "minitron", path: Path = DEVICES) -> Machine:
    """Return a device of the table in `path`, in a fabric of it (None: its usual one). Raises ValueError.

    Capitals do not count, as in H100.
    """
    devices, fabrics = read_machines(path)
    chosen = _named("device", device, devices, path)
    return Machine(chosen, _named("fabric", fabric or chosen.fabric, fabrics, path), SOFTWARE[software])


def _named(option: str, name: str, table: dict[str, T], path: Path) -> T:
    for key, one in table.items():
        if key.lower() == name.lower():
            return one
    raise ValueError(f"--{option} {name} is not in {path}; use {', '.join(table)}")
