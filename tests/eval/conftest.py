"""A study of a tiny model: its texts in the folder of data under the names that studies read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eval.common import CALIBRATION, SECOND, TEST, Study, open_study
from requant.recipe.schema import Finetune


@pytest.fixture
def tiny_study(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> Callable[[Finetune], Study]:
    def opened(finetune: Finetune) -> Study:
        for name in (CALIBRATION, TEST, SECOND):
            (tmp_path / name).write_text(tiny_text_file.read_text())
        return open_study(
            Path(tiny_folder("llama")),
            tmp_path,
            num_samples=4,
            seq_len=32,
            windows=4,
            device="cpu",
            finetune=finetune,
        )

    return opened
