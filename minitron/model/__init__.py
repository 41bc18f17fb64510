"""The networks: GPT-3 and Llama."""
