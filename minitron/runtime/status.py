"""Exit statuses of ranks and supervisors. They tell the cause of a failure from its consequences."""

HUNG = 124  # as of timeout(1)
LOST = 125  # a collective failed, or the ranks could not meet: another rank or torchrun has died
BROKEN = 17  # the rank's own device computes wrongly, see optim/rerun.py: a restart does without the node
TAKEN = 18  # another run saves in checkpoint.dir now, see checkpoint/directory.py: a restart would take it back
REQUEUE = 75  # of a supervisor (EX_TEMPFAIL): what is saved is good, but there are not enough nodes to go on here
