"""What a process is told of the others of its run, by torchrun or `--gpus`: environment variables, read without torch."""

import os

# of processes that `--gpus` started: the number of the open socket at which rank 0 listens to the others
LAUNCHED = "REQUANT_LAUNCHED"


def started() -> int:
    """How many processes torchrun or `--gpus` started; 1: none but this."""
    return int(os.environ.get("WORLD_SIZE", "1"))
