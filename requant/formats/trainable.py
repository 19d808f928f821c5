"""What a quantized matrix can still learn once its codes are fixed: the floats that a checkpoint stores beside them.

| container | theta | weight as a function of it |
| --- | --- | --- |
| `Grid` | scales | unit grid x scale of its group |
| `Codebook` | levels | levels picked by the codes |
| `Trellis` | output scales | output scale x rotated values; its input scales stay signs, which cost one bit a column |
| `Sparse` | residuals | added at their places |

What was learned is rounded as it will be stored: levels and output scales that began on a grid of 8 bits (`requant.int8`;
signs are on one) return to one. Above WIDEST_CODE bits a code, output scales become float16: the rounding to 8 bits adds
1e-5 of the squared weight, nothing to the 4e-3 that codes of 4 bits leave, but a third to the 3e-5 of 8 bits.
`weight_function(w)(learnable(w))` equals `w.dequantize()`, and `with_trainable_params(w, learnable(w))` is w again.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from requant.formats.containers import Codebook, Grid, QuantizedWeight, Trellis
from requant.formats.int8 import WIDEST_CODE, fake_quantize_int8, fits

TrainableParams = dict[str, Tensor]  # float32 leaves of one matrix, by field


def trainable_params(weight: QuantizedWeight) -> TrainableParams:
    """The float fields of a matrix as float32 copies."""
    match weight.dense:
        case Grid(scales=scales):
            params = {"scales": scales}
        case Codebook(levels=levels):
            params = {"levels": levels}
        case Trellis(output_scales=outputs):
            params = {"output_scales": outputs}
    if weight.sparse is not None:
        params |= {"values": weight.sparse.floats()}
    return {name: value.detach().float().clone() for name, value in params.items()}


def with_trainable_params(weight: QuantizedWeight, params: Mapping[str, Tensor]) -> QuantizedWeight:
    """The matrix with learned fields, rounded to the 8 or 16 bits in which they are stored."""
    fields = {name: value.detach().half() for name, value in params.items() if name != "values"}
    match weight.dense:
        case Codebook(levels=levels) if fits(levels):
            fields["levels"] = fake_quantize_int8(params["levels"].detach())
        case Trellis(output_scales=scales, bits=bits) if bits <= WIDEST_CODE and fits(scales):
            fields["output_scales"] = fake_quantize_int8(params["output_scales"].detach(), nonzero=True)
    sparse = weight.sparse
    if sparse is not None and sparse.row_scales is None:
        sparse = replace(sparse, values=params["values"].detach().half())
    elif sparse is not None and sparse.row_scales is not None:
        values, scales = params["values"].detach(), sparse.row_scales
        if (scales == scales[0]).all():  # one scale, which grows with what was learned
            scales = torch.maximum(scales, (values.abs().amax() / 127).half())
        steps = (values / scales.float()[sparse.rows]).round().clamp(-127, 127)
        sparse = replace(sparse, values=steps.to(torch.int8), row_scales=scales)
    return QuantizedWeight(dense=replace(weight.dense, **fields), sparse=sparse)


def weight_function(weight: QuantizedWeight) -> Callable[[Mapping[str, Tensor]], Float[Tensor, "n k"]]:
    """theta -> float weight, differentiable; what does not depend on theta is computed once."""
    dense, sparse = weight.dense, weight.sparse
    match dense:
        case Grid():
            unit = replace(dense, scales=torch.ones_like(dense.scales)).dequantize()
            groups = torch.arange(dense.shape[1], device=unit.device) // dense.group_size

            def floats(params: Mapping[str, Tensor]) -> Tensor:
                return unit * params["scales"][:, groups]

        case Codebook():
            codes = dense.codes

            def floats(params: Mapping[str, Tensor]) -> Tensor:
                return params["levels"].gather(1, codes.long())

        case Trellis():
            turned = replace(dense, output_scales=torch.ones_like(dense.output_scales)).dequantize()

            def floats(params: Mapping[str, Tensor]) -> Tensor:
                return params["output_scales"][:, None] * turned

    if sparse is None:
        return floats
    rows, columns = sparse.rows, sparse.indices.long()
    return lambda params: floats(params).index_put((rows, columns), params["values"], accumulate=True)
