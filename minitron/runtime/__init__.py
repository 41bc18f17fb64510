"""Everything around the step: log, figures, profiles, a watch over hangs, signals."""
