"""Does FP8 learn as bf16 does? `python benchmarks/fp8_curves.py [CONFIG.yaml | section.key=value ...] [--plot FILE]`.

Trains the same model from the same weights on the same text (the quickstart's corpus, unless told otherwise) in bf16
and with each FP8 recipe, and prints the mean training loss of every tenth of the run, with its distance from bf16's.
`--recipes bf16-gradients` is bf16 with optimizer.grad_dtype=bf16, beside the float32 gradients of all others;
`--recipes delayed delayed-params current current-params` holds precision.fp8_params against a run without it, and
`--recipes delayed delayed-head` precision.fp8_head.
The backend is Transformer Engine on a GPU, and plain torch, the same numbers, on a CPU. Appends a record of kind
"fp8_curves".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import torch

from benchmarks import measure, record
from benchmarks.cases import FP8_RECIPES
from benchmarks.table import draw_curves
from minitron.comm.mesh import Mesh
from minitron.config import cli, rules
from minitron.config.schema import Config
from minitron.data.loader import Loader
from minitron.kernels import kernels
from minitron.optim.lr import learning_rate
from minitron.planner import style
from minitron.pretrain import build_data
from minitron.train import build

PARTS = 10
GRADIENTS = "bf16-gradients"
# name: the scaling, and a key that is true
WITH_KEY = {
    "delayed-params": ("delayed", "precision.fp8_params"),
    "current-params": ("current", "precision.fp8_params"),
    "delayed-head": ("delayed", "precision.fp8_head"),
}


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", nargs="*", metavar="CONFIG.yaml | section.key=value")
    parser.add_argument("--recipes", nargs="+", choices=(*FP8_RECIPES, *WITH_KEY, GRADIENTS), default=list(FP8_RECIPES))
    parser.add_argument("--plot", help="draw the curves to this file")
    record.add_options(parser)
    args = parser.parse_intermixed_args(argv)
    device, capability = measure.choose_device()
    backend, configs = "te" if capability else "torch", {}
    with cli.user_errors():
        # bf16 last: Transformer Engine cannot load behind torch's own cuDNN
        for name in sorted((*args.recipes, "bf16"), key=lambda name: name in ("bf16", GRADIENTS)):
            recipe, with_key = WITH_KEY.get(name, (name, None))
            keys = [f"precision.fp8={recipe}", f"precision.fp8_backend={backend}"]
            if name in ("bf16", GRADIENTS):  # whatever the configuration has
                keys = ["precision.fp8=none", "precision.fp8_backend=te", "precision.fp8_bf16_layers=0"]
            keys += [f"{key}={'true' if key == with_key else 'false'}" for _, key in WITH_KEY.values()]
            keys.append(f"optimizer.grad_dtype={'bf16' if name == GRADIENTS else 'fp32'}")
            cfg = cli.load([str(record.ROOT / "configs/quickstart.yaml"), *args.config, "precision.dtype=bf16", *keys])
            rules.check(cfg, 1, capability)
            kernels.choose(cfg, device)
            configs[name] = cfg
    curves = {name: losses(configs[name], device) for name in ("bf16", *args.recipes)}
    result = {"steps": cfg.train.steps, "backend": backend, "curves": {k: means(v) for k, v in curves.items()}}
    result["last"] = {k: v[-1] / result["curves"]["bf16"][-1] - 1 for k, v in result["curves"].items() if k != "bf16"}
    print(table(result["curves"]))
    record.append(args, "fp8_curves", result)
    if args.plot:
        style.save(draw_curves(result), Path(args.plot))
    return result


def losses(cfg: Config, device: torch.device) -> list[float]:
    """The training loss of every step of a run in this process."""
    data, mesh, t = build_data(cfg), Mesh.offline(device=device), cfg.train
    trainer, loader, figures = build(cfg, mesh), Loader(data.train, cfg, mesh), []
    for step in range(1, t.steps + 1):
        consumed = step * t.global_batch_size
        lr = learning_rate(cfg.optimizer, t, consumed)
        figures.append(trainer.step(loader.step(consumed - t.global_batch_size, step), lr).values[0])
    loader.close()
    return torch.stack(figures).tolist()


def means(curve: list[float]) -> list[float]:
    """Of each tenth of the steps."""
    return [float(part.mean()) for part in torch.tensor(curve, dtype=torch.float64).tensor_split(PARTS)]


def table(curves: dict[str, list[float]]) -> str:
    """A line per tenth: bf16's mean loss, and each recipe's with its distance in percent."""
    recipes = [name for name in curves if name != "bf16"]
    lines = ["tenth    bf16   " + "".join(f"{name:>18}" for name in recipes)]
    for i, base in enumerate(curves["bf16"]):
        lines.append(
            f"{i + 1:5d} {base:8.4f}  "
            + "".join(f"{curves[name][i]:9.4f} {100 * (curves[name][i] / base - 1):+6.2f} %" for name in recipes)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
