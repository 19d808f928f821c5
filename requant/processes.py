"""What the environment says about the processes of a run, started by torchrun or `--gpus` (`cli/launching.py`).

Nothing heavy is imported here: the process that starts the others does no more than wait for them.
"""

import os

STORE = "REQUANT_STORE"  # set where `--gpus` started the process: the file by which all of them meet


def started() -> int:
    """How many processes torchrun or `--gpus` started; 1: none but this."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process checks the command, and says what is wrong with it; the others wait for it."""
    return started() == 1 or os.environ["RANK"] == "0"
