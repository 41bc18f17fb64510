"""What a run is: its keys, their rules and the formulas that follow from them; no torch."""
