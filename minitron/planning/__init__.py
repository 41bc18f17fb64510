"""The job before the job: dry run, planner, simulation."""
