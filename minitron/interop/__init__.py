"""Models of others: Hugging Face folders, PEFT adapters, Megatron checkpoints, tokenizers. Imports the trainer."""
