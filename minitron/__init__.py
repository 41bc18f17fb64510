"""minitron: GPT-3 and Llama trained over every parallel axis, in code short enough to read in a weekend."""
