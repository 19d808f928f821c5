"""Every format by its name in `config.json`: the class of its packed specs, which knows everything else (`contract.py`)."""

from requant.formats.bands import BandsSpec
from requant.formats.codebook import CodebookSpec
from requant.formats.contract import ContainerSpec
from requant.formats.grid import GridSpec
from requant.formats.semi_structured import SemiStructuredSpec
from requant.formats.trellis import TrellisSpec

FORMATS: dict[str, type[ContainerSpec]] = {
    "grid": GridSpec,
    "codebook": CodebookSpec,
    "trellis": TrellisSpec,
    "semi_structured": SemiStructuredSpec,
    "bands": BandsSpec,
}
