"""python -m minitron.supervise: see supervisor.py."""

from minitron.supervise.supervisor import main

main()
