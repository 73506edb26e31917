"""The peer's models: flash-linear-attention's (torch, Triton, transformers), trained as its users would.

bfloat16 autocast over float32 parameters, its own fused layers and loss, and torch's fused AdamW. "full" is gradient
checkpointing of each block. Nothing here is needed where torch isn't installed.
"""

import functools
import gc
import importlib
import importlib.util
import math
import subprocess
import sys
import time
from typing import Any

from experiments import bench_peer
from experiments.bench import time_steps
from experiments.bench_peer import profiler_time
from experiments.device_time import cheap_repeats
from qdelta_jax.models import ModelConfig
from qdelta_jax.training.config import OptimizerConfig

PEERS = {
    "gated_delta_net": ("GatedDeltaNetConfig", "GatedDeltaNetForCausalLM"),
    "kda": ("KDAConfig", "KDAForCausalLM"),
}
"""By rule: names in fla.models of a configuration and its model."""

POLICIES = ("none", "full")
"""Of `ModelConfig.remat`, those that the peer has."""

NEEDED = ("torch", "triton", "fla", "transformers")

RATE = 1e-5
"""Of learning, constant: no step takes longer for it, and none diverges."""


def in_own_process(options: list[str]) -> None:
    """Measures the peer with these options of `experiments.bench_training`; says why not if it isn't installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"without the peer: {', '.join(missing)} not installed", flush=True)
        return
    command = [sys.executable, "-m", "experiments.bench_training", *options]
    code = subprocess.run(command, check=False).returncode
    if code:
        print(f"the peer's process ended with {code}", flush=True)


@functools.cache
def versions() -> dict[str, str]:
    """Of torch, triton, fla and transformers.

    Raises:
        ImportError: one of them is missing, or torch sees no GPU.
    """
    found = bench_peer.versions()
    return {**found, "transformers": importlib.import_module("transformers").__version__}


@functools.cache
def can_run() -> bool:
    """Whether the peer's models can be imported and find a GPU; says once why not."""
    try:
        versions()
        module = importlib.import_module("fla.models")
        for names in PEERS.values():
            for name in names:
                getattr(module, name)
    except Exception as error:  # It may fail to import in many ways.
        print(f"without the peer: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def peer_options(config: ModelConfig) -> dict[str, Any]:
    """The sizes of our model under the peer's names.

    Raises:
        ValueError: ours has something that the peer hasn't.
    """
    if config.value_heads not in (None, config.heads) or not config.conv_width or config.pattern != ("rule",):
        raise ValueError("config: want one rule in all layers, with convolutions and as many value heads as heads")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "intermediate_size": config.mlp_hidden,
        "num_heads": config.heads,
        "head_dim": config.key_dim,
        "expand_v": config.value_dim / config.key_dim,
        "conv_size": config.conv_width,
        "allow_neg_eigval": config.allow_negative_eigenvalues,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": False,
    }


def run(config: ModelConfig, cell: dict[str, Any], steps: int) -> dict[str, Any]:
    """Times and memory of one step of the peer's model with the sizes of `config`."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    module = importlib.import_module("fla.models")
    config_class, model_class = (getattr(module, name) for name in PEERS[config.rule])
    with torch.device("cuda"):
        model = model_class(config_class(**peer_options(config)))
    model.train()
    if config.remat == "full":
        model.gradient_checkpointing_enable()
    shape = (cell["tokens"] // cell["length"], cell["length"])
    tokens = torch.randint(config.vocab_size, shape, device="cuda")
    options = OptimizerConfig()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, options.weight_decay), RATE, (options.b1, options.b2), options.eps, fused=True
    )

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss  # It shifts the labels itself.
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    start = time.perf_counter()
    wait(step())  # Compiles and tunes; what it takes beyond a step is the peer's time of compilation.
    first = time.perf_counter() - start
    # Tuning takes memory of its own.
    torch.cuda.reset_peak_memory_stats()
    step_ms, loss = time_steps(step, wait, steps)
    if not math.isfinite(float(loss)):
        raise FloatingPointError(f"the loss is {float(loss)}")
    memory = torch.cuda.max_memory_allocated()
    repeats = cheap_repeats(step_ms)
    return {
        "step_ms": step_ms,
        "device_ms": profiler_time(step, repeats) if repeats else None,
        "memory_bytes": memory,
        "compile_s": first - step_ms / 1e3,
        "parameters": sum(x.numel() for x in model.parameters()),
        "loss": float(loss),
    }


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors don't, as in our optimizer."""
    parameters = list(model.parameters())
    return [
        {"params": [x for x in parameters if x.ndim >= 2], "weight_decay": weight_decay},
        {"params": [x for x in parameters if x.ndim < 2], "weight_decay": 0.0},
    ]
