"""Will a job fit, and how fast will it be: memory, time and the search for a layout, from formulas and a simulation."""
