"""`--push-to-hub OWNER/NAME`: uploads a finished folder to a repository of the Hugging Face hub, which is private if it is
new.

Whatever can be checked is checked before the run: the name, the token, the network. If the upload fails afterwards, the
folder is complete, and the error gives the command that uploads it.
"""

import shlex
from pathlib import Path

from requant.errors import InputError, RequantError, first_line


def check_hub(repo: str) -> None:
    """Raise InputError for a name that is none, or where nobody is logged in or the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(
            f"--push-to-hub {repo} is no name of a repository ({first_line(error)}); give OWNER/NAME."
        ) from error
    if repo.count("/") != 1:
        raise InputError(f"--push-to-hub {repo} has no owner; give OWNER/NAME.")
    try:
        HfApi().whoami()
    except Exception as error:  # the library passes on whatever its network layer raises
        raise InputError(
            f"the hub does not know who you are ({first_line(error)}); run `hf auth login`, or leave --push-to-hub out."
        ) from error


def push_to_hub(folder: Path, repo: str) -> str:
    """Upload a folder in one commit; the repository's address. Raises RequantError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{folder.name}, by requant")
    except Exception as error:
        raise RequantError(
            f"{folder} is finished, but did not reach the hub ({first_line(error)}); send it again by `hf upload "
            f"{repo} {shlex.quote(str(folder))}`."
        ) from error
    return str(made)
