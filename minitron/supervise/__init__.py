"""Keep a run going: supervisors of nodes, their leader, health, goodput. No torch."""
