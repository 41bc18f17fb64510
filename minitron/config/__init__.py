"""The configuration of a run: its keys, their rules and the formulas that follow from them; no torch."""
