"""An alias of `python -m minitron.supervise`, for existing command lines."""

import runpy

runpy.run_module("minitron.supervise", run_name="__main__", alter_sys=True)
