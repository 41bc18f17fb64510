"""Communication between ranks: the mesh, collectives, handles of what is under way, symmetric memory."""
