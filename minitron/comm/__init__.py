"""Who talks to whom, and how: the mesh, collectives, memory that GPUs share."""
