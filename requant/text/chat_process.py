"""The process that renders chat templates for `chat.py`: requests and answers are JSON, sent through a pipe.

    python chat_process.py FILE_DESCRIPTOR MAX_CHARACTERS MEMORY

It imports nothing of requant, so that it starts in half a second.
"""

import json
import sys
from multiprocessing.connection import Connection

from transformers.utils.chat_template_utils import render_jinja_template


def limit_memory(more: int) -> None:
    """At most `more` bytes of address space beyond what is used now; no core dumps, no files."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # not Linux: the time limit alone holds
        return
    for what, most in (
        (resource.RLIMIT_AS, used + more),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(what, (most, most))


def answer(request: bytes, max_characters: int) -> tuple[str, str]:
    """`("text", prompt)` or `("error", reason)`."""
    template, messages, special_tokens = json.loads(request)
    try:
        rendered, _ = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True, **special_tokens
        )
        if len(rendered[0]) > max_characters:
            return "error", f"it wrote more than {max_characters:,} characters"
        return "text", rendered[0]
    except MemoryError:
        return "error", "it takes too much memory"
    except Exception as error:  # the template is a stranger's program, and may also refuse a role on purpose
        return "error", (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def main() -> None:
    """Answer requests on the connection that the arguments name, until the parent closes it."""
    descriptor, max_characters, memory = map(int, sys.argv[1:])
    connection = Connection(descriptor)
    limit_memory(memory)
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:  # the parent has ended
            return
        connection.send_bytes(json.dumps(answer(request, max_characters)).encode())


if __name__ == "__main__":
    main()
