"""Fine-tune an existing model: train all weights (finetune.kind=sft), or adapters beside frozen weights (lora).

The model is finetune.base, a Hugging Face folder or a minitron checkpoint. Layouts, checkpoints and logs are those of
minitron.pretrain.
"""

from __future__ import annotations

import os

from minitron.runtime.environment import set_defaults
from minitron.runtime.signals import Listener

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    set_defaults(os.environ)
    listener = Listener(os.environ).open()

from minitron import pretrain


def main(argv: list[str] | None = None, listener: Listener | None = None) -> None:
    pretrain.main(argv, __doc__, finetune=True, listener=listener)


if __name__ == "__main__":
    main(listener=listener)
