"""PEFT: LoRA adapters over quantized layers, by `get_peft_model` and `PeftModel.from_pretrained` alike.

    y = x w~' + s (x A') B',    w~ from the codes, which are frozen; A, B are trained

PEFT chooses a LoRA layer by the class of the layer below, and takes further classes from the config's custom modules, so
every `LoraConfig` is made to name ours (`LoraConfig.__post_init__` is wrapped, since there is no registry). Whatever needs
the weight as floats that can change is refused: merging, DoRA, and initial values from its singular vectors.
"""

import functools
import warnings
from typing import Any

from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.layer import Linear

from requant.errors import InputError
from requant.inference.quant_linear import QuantLinear

PLAIN_STARTS = (True, False, "gaussian", "orthogonal")  # of A and B, without a look at the weight


class QuantLoraLinear(Linear):
    """PEFT's own LoRA layer over a `QuantLinear`, which refuses to be merged."""

    def __init__(self, base_layer: Any, adapter_name: str, **kwargs: Any) -> None:
        with warnings.catch_warnings():  # PEFT warns of any class but those of its list
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(base_layer, adapter_name, **kwargs)

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """A new adapter; raises InputError for one that needs the weight."""
        given = vars(kwargs["config"]) if "config" in kwargs else kwargs  # older versions give its fields
        dora, start = given.get("use_dora", False), given.get("init_lora_weights", True)
        if dora or start not in PLAIN_STARTS:
            what = "use_dora" if dora else f"init_lora_weights={start!r}"
            raise InputError(
                f"{what} needs the weights as floats, which quantized layers do not have; leave it out, or adapt "
                "`model.dequantize()`."
            )
        super().update_layer(adapter_name, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise InputError(
            "an adapter cannot be merged into quantized layers: the sum of codes and floats cannot be stored as codes; keep "
            "it beside the checkpoint, or load it over `model.dequantize()` and merge there."
        )


def register() -> None:
    """Make every LoraConfig know quantized layers; once is enough, more does no harm."""
    if hasattr(LoraConfig.__post_init__, "__wrapped__"):
        return
    before = LoraConfig.__post_init__

    @functools.wraps(before)
    def with_quantized_layers(self: LoraConfig) -> None:
        before(self)
        self._register_custom_module({QuantLinear: QuantLoraLinear})

    LoraConfig.__post_init__ = with_quantized_layers


register()
