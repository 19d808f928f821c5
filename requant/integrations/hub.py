"""`--push-to-hub OWNER/NAME`: uploads a finished folder to a repository of the Hugging Face hub, which is private if it is
new.

Whatever can be checked is checked before the run: the name, the token, the network; by a dry run, what needs no network. If
the upload fails afterwards, the folder is complete, and the error gives the command that uploads it.
"""

import shlex
from pathlib import Path

from requant.errors import InputError, RequantError, first_line


def check_hub(repo: str, *, ask: bool = True) -> None:
    """Raise InputError where nothing could be uploaded: a name that is none, nobody logged in, a hub that may not be asked.

    With `ask`, the hub is asked too, whether it answers, knows the token and lets it write.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(
            f"--push-to-hub {repo} is not the name of a repository ({first_line(error)}); give OWNER/NAME."
        ) from error
    if repo.count("/") != 1:
        raise InputError(f"--push-to-hub {repo} has no owner; give OWNER/NAME.")
    if constants.HF_HUB_OFFLINE:
        raise InputError(
            "--push-to-hub needs the hub, which HF_HUB_OFFLINE switches off; unset that, or leave --push-to-hub out."
        )
    if get_token() is None:
        raise InputError(
            "--push-to-hub needs a token, and nobody is logged in here; run `hf auth login`, set HF_TOKEN, or leave "
            "--push-to-hub out."
        )
    if not ask:
        return
    try:
        found = HfApi().whoami()
    except Exception as error:  # the library passes on whatever its network layer raises
        raise InputError(
            f"the hub does not know who you are ({first_line(error)}); run `hf auth login`, or leave --push-to-hub out."
        ) from error
    if found.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise InputError(
            f"the token of {found.get('name')} may only read, so nothing can be pushed to {repo}; log in with one that may "
            "write, by `hf auth login`."
        )


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
