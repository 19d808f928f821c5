"""Windows of tokens hold one text each, so transformers need not check that in every forward pass.

When it is given no mask it compares all positions, since several texts may be packed into one row, and reads the answer from
the GPU: in every pass Python then waits until the GPU has finished everything before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import masking_utils

LOOKS = "find_packed_sequence_indices"  # positions [b, t] -> the text of every token, None: one a row


@contextmanager
def one_text_a_row() -> Iterator[None]:
    """Keep transformers from looking for packed texts while the context lasts: there are none. Where a version has no such
    function, nothing changes."""
    before = getattr(masking_utils, LOOKS, None)
    if before is None:
        yield
        return
    setattr(masking_utils, LOOKS, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, LOOKS, before)
