"""The named cases in which minitron is held against its peers: a configuration each, which both sides read.

Four-GPU cases and the one-GPU cases are those of the project's targets. Cases that begin with `2gpu-` have fewer layers
and smaller layouts, for a machine with two GPUs: their figures say nothing about the four-GPU targets. Those with
`lora` or `sft` in their names are fine-tuning, on documents of at most 512 tokens packed to 4096, or with `-full` on
one document a sample. With `-fp8head` our product with the vocabulary is in FP8 as well, which no peer's is.
"""

from dataclasses import dataclass

FP8_RECIPES = ("delayed", "current", "block")


# Llama 3.2 1B, as Meta published it, but for the scaling of its positions, which costs no time.
LLAMA_1B = {"num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192, "tie_embeddings": "true"}


@dataclass(frozen=True)
class Case:
    gpus: int
    config: str  # a recipe, relative to the repository
    overrides: tuple[str, ...]
    peer: str | None = None  # the case that the peer runs, where it lacks this one's schedule or number format

    @property
    def tunes(self) -> bool:
        return self.config.endswith(("_sft.yaml", "_lora.yaml"))

    @property
    def needs_fp8(self) -> bool:
        return "precision.fp8_head=true" in self.overrides

    def size(self, axis: str) -> int:
        """The ranks of a case along an axis of `parallel`."""
        return int(dict(key.split("=", 1) for key in self.overrides)[f"parallel.{axis}"])

    def arguments(self, fp8: str) -> list[str]:
        """The command line of a measured program. fp8: "none" (bf16) or one of FP8_RECIPES."""
        return [self.config, *self.overrides, f"precision.fp8={fp8}"]


def _case(gpus: int, config: str, microbatches: int, *, dp: int = 1, peer: str | None = None, **settings) -> Case:
    """Name a recipe's model in a layout of its own, one sample per microbatch.

    settings: keys of `parallel`, of `train` (seq_len), of `model` (num_layers), of `data` and of `precision`.
    """
    sections = {
        "seq_len": "train",
        "num_layers": "model",
        "max_positions": "model",
        "separate_documents": "data",
        "document_length": "data",
        "fp8_head": "precision",
    } | dict.fromkeys(LLAMA_1B, "model")
    layout = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "layers_per_stage": "null"} | settings
    keys = tuple(f"{sections.get(key, 'parallel')}.{key}={value}" for key, value in layout.items())
    rest = (
        "train.recompute=none",
        "train.micro_batch_size=1",
        f"train.global_batch_size={microbatches * dp}",
        "data.source=mock",
    )
    return Case(gpus, f"configs/{config}.yaml", keys + rest, peer)


ONE_DOCUMENT = {"separate_documents": "false", "document_length": "null"}
CASES = {
    "8b-s8192-dp4": _case(4, "llama3_8b", 4, dp=4),
    "8b-s4096-dp4": _case(4, "llama3_8b", 4, dp=4, seq_len=4096),
    "70b-tp4": _case(4, "llama31_70b", 4, num_layers=8, tp=4),
    "175b-tp4": _case(4, "gpt3_175b", 16, num_layers=4, tp=4),
    # The head costs as much as two blocks, so the last stage has two less; by planner/simulate.py's reckoning.
    "8b-pp4": _case(4, "llama3_8b", 16, pp=4, vp=2, layers_per_stage=[4, 3, 4, 5, 5, 5, 4, 2]),
    "8b-pp4-even": _case(4, "llama3_8b", 16, pp=4, vp=2),
    "8b-tp2cp2": _case(4, "llama3_8b", 4, tp=2, cp=2, seq_len=16384, max_positions=16384),
    "8b-1gpu": _case(1, "llama3_8b", 1, num_layers=8),
    "8b-1gpu-fp8head": _case(1, "llama3_8b", 1, num_layers=8, fp8_head="true", peer="8b-1gpu"),
    "1b-1gpu": _case(1, "llama3_8b", 4, **LLAMA_1B),
    "gpt2-124m": _case(1, "gpt2_124m", 32),
    "sft-8b-12layers-1gpu": _case(1, "llama3_8b_sft", 4, num_layers=12),  # 16 need more than 80 GB
    "lora-8b-1gpu": _case(1, "llama3_8b_lora", 4),
    "lora-8b-1gpu-fp8head": _case(1, "llama3_8b_lora", 4, fp8_head="true", peer="lora-8b-1gpu"),
    "lora-8b-1gpu-full": _case(1, "llama3_8b_lora", 4, **ONE_DOCUMENT),
    "sft-8b-4gpu": _case(4, "llama3_8b_sft", 4, dp=4),
    "sft-8b-4gpu-full": _case(4, "llama3_8b_sft", 4, dp=4, **ONE_DOCUMENT),
    "2gpu-8b-16layers-s8192-dp2": _case(2, "llama3_8b", 4, dp=2, num_layers=16),
    "2gpu-8b-16layers-s4096-dp2": _case(2, "llama3_8b", 4, dp=2, num_layers=16, seq_len=4096),
    "2gpu-70b-4layers-tp2": _case(2, "llama31_70b", 4, num_layers=4, tp=2),
    "2gpu-175b-2layers-tp2": _case(2, "gpt3_175b", 16, num_layers=2, tp=2),
    "2gpu-175b-4layers-tp2": _case(2, "gpt3_175b", 16, num_layers=4, tp=2),  # the head is a smaller share
    "2gpu-8b-16layers-pp2": _case(2, "llama3_8b", 8, num_layers=16, pp=2, vp=2),
    "2gpu-8b-16layers-pp2-uneven": _case(2, "llama3_8b", 8, num_layers=16, pp=2, vp=2, layers_per_stage=[4, 5, 5, 2]),
    "2gpu-8b-16layers-pp2-1f1b": _case(2, "llama3_8b", 8, num_layers=16, pp=2, layers_per_stage=[9, 7]),
    "2gpu-8b-16layers-pp2-zb-h1": _case(
        2,
        "llama3_8b",
        8,
        num_layers=16,
        pp=2,
        layers_per_stage=[9, 7],
        schedule="zb-h1",
        peer="2gpu-8b-16layers-pp2-uneven",
    ),
    "2gpu-8b-16layers-s16384-cp2": _case(2, "llama3_8b", 4, num_layers=16, cp=2, seq_len=16384, max_positions=16384),
    "2gpu-sft-8b": _case(2, "llama3_8b_sft", 4, dp=2),
}
