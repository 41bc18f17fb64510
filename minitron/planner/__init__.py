"""Plan a job before there are GPUs: memory, time, pictures, the fastest layout. No torch, except in dryrun/."""
