"""Pipeline parallelism: the schedule as data, and the executor that runs it."""
