"""Run by `test_vllm_model.py` in a process of its own: vLLM's Llama, made and filled by vLLM's own loader, on a CPU.

    python vllm_model.py CHECKPOINT [RANK RANKS]

Prints the largest relative error of any quantized layer against the floats of the checkpoint. What needs vLLM's compiled
operators (its embedding on a CPU) or an accelerator is replaced by nothing; the plugin calls none of it.
"""

import sys
from typing import Any

import torch

try:  # modules ask for its operators while they are made
    import vllm._C_stable_libtorch
except ImportError:  # built for CUDA, which is not here: names suffice
    operators = torch.library.Library("_C", "FRAGMENT")
    for name in ("silu_and_mul", "gelu_and_mul", "rms_norm", "fused_add_rms_norm"):
        operators.define(f"{name}(Tensor x) -> Tensor")
import vllm.model_executor.layers.utils
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

torch.accelerator.empty_cache = lambda: None
vllm.platforms._current_platform = CpuPlatform()
vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = lambda *_, **__: None

from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.model_loader import get_model  # noqa: E402

from requant.checkpoint.read import load_weights  # noqa: E402
from requant.integrations.vllm import RequantConfig, register  # noqa: E402

PARTS = {
    "self_attn.qkv_proj": [f"self_attn.{name}_proj" for name in "qkv"],
    "self_attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}


def load(path: str, rank: int = 0, ranks: int = 1, dtype: str = "bfloat16") -> tuple[Any, VllmConfig]:
    """The rank's model, and vLLM's config of it."""
    register()
    model_config = ModelConfig(
        model=path,
        tokenizer=path,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=64,
    )
    config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format="safetensors"),
    )
    with set_current_vllm_config(config):
        rendezvous = f"file://{path}/rendezvous"
        init_distributed_environment(ranks, rank, rendezvous, rank, "gloo")
        initialize_model_parallel(ranks)
        return get_model(vllm_config=config), config


def main(path: str, rank: int, ranks: int) -> None:
    model, config = load(path, rank, ranks)
    assert isinstance(config.quant_config, RequantConfig)
    weights = dict(load_weights(path))
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for index, block in enumerate(model.model.layers):
        for name, parts in PARTS.items():
            layer = block.get_submodule(name)
            matrices = [weights[f"model.layers.{index}.{part}"].dequantize() for part in parts]
            x = torch.randn(3, matrices[0].shape[1], generator=generator, dtype=torch.float32)
            if len(parts) > 1:  # column-parallel: the rank's outputs
                y = layer.quant_method.apply(layer, x, None)
                expected = x @ torch.cat([matrix.chunk(ranks)[rank] for matrix in matrices]).T
            else:  # row-parallel: what the ranks have together
                y = layer.quant_method.apply(layer, x.chunk(ranks, 1)[rank], None)
                torch.distributed.all_reduce(y)
                expected = x @ matrices[0].T
            worst = max(worst, float((y - expected).norm() / expected.norm()))
    embedding = model.model.embed_tokens
    indices = embedding.shard_indices
    own = torch.arange(indices.org_vocab_end_index - indices.org_vocab_start_index)
    table = embedding.quant_method.embedding(embedding, own)
    sys.stdout.write(f"worst {worst:.3g} embedding {table.float().norm().item():.6g}\n")
    if ranks == 1:
        trace(model.model, config)


def trace(model: Any, config: VllmConfig) -> None:
    """As vLLM compiles it: in one graph for every number of tokens. Attention needs a GPU, so the graph does not run."""
    operators: set[str] = set()

    def traced(graph: Any, _inputs: Any) -> Any:
        operators.update(str(node.target) for node in graph.graph.nodes if "requant" in str(node.target))
        results = graph.graph.output_node().args[0]
        return lambda *_: tuple(torch.zeros(5, 1) for _ in results)

    for module in model.modules():  # norms and RoPE in torch
        if hasattr(module, "forward_native"):
            module._forward_method = module.forward_native
    compiled = torch.compile(type(model).forward, fullgraph=True, backend=traced)
    given = torch.arange(5), torch.arange(5)
    for tensor in given:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config):
        compiled(model, *given, None, None)
    sys.stdout.write(f"traced {sorted(operators)}\n")


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:] or (0, 1)))
