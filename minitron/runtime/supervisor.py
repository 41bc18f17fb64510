"""The name that python -m minitron.supervise had before; command lines keep working."""

import runpy

runpy.run_module("minitron.supervise", run_name="__main__", alter_sys=True)
