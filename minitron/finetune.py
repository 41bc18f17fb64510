"""Fine-tune a model that exists: all of its weights (finetune.kind=sft), or adapters beside them (lora).

It starts from finetune.base, a Hugging Face folder or a minitron checkpoint. All else is as minitron.pretrain has it:
layouts, checkpoints, logs.
"""

from __future__ import annotations

from minitron import pretrain


def main(argv: list[str] | None = None) -> None:
    pretrain.main(argv, __doc__, finetune=True)


if __name__ == "__main__":
    main()
