"""Other trainers on the same model, layout and batch, each a program of its own."""
