"""What a CPU user of torch would run today: chunked forms of transformers, and fla's naive chunked GDN-2.

Called by experiments/bench.py with an interpreter that has torch; prints JSON. Each neighbour that cannot be imported
is reported with its reason.
"""

import importlib
import json
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F

NEIGHBOURS = {
    "transformers gated_delta_net": (
        "transformers.models.qwen3_next.modeling_qwen3_next",
        "torch_chunk_gated_delta_rule",
        ("q", "k", "v", "g", "beta"),
    ),
    "transformers kda": (
        "transformers.models.kimi_linear.modeling_kimi_linear",
        "chunk_kimi_delta_attention",
        ("q", "k", "v", "gk", "beta"),
    ),
    "fla naive chunked gated_delta_net2": (
        "fla.ops.gdn2.naive",
        "naive_chunk_gdn2",
        ("q", "k", "v", "gk", "erase", "write"),
    ),
}


def make_inputs(batch, length, heads, key_dim, value_dim, **_):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, d) for d in (key_dim, key_dim, value_dim))
    return {
        "q": F.normalize(q, dim=-1),
        "k": F.normalize(k, dim=-1),
        "v": v,
        "g": -1.5 * torch.rand(batch, length, heads) ** 3,
        "gk": -1.5 * torch.rand(batch, length, heads, key_dim) ** 3,
        "beta": torch.rand(batch, length, heads),
        "erase": torch.rand(batch, length, heads, key_dim),
        "write": torch.rand(batch, length, heads, value_dim),
    }


def timed(function, repeats):
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[1:])


def plain_torch(hidden):
    """Without a GPU driver, transformers must not find triton: it would ask it for one while it is imported."""
    for name in ("fla", "triton"):
        if hidden:
            sys.modules[name] = None
        else:
            sys.modules.pop(name, None)


def measure(module, name, arguments, inputs, repeats):
    plain_torch(hidden=module.startswith("transformers"))
    function = getattr(importlib.import_module(module), name)
    xs = [inputs[a].clone().requires_grad_() for a in arguments]

    def forward():
        out = function(*xs)
        return out[0] if isinstance(out, tuple) else out

    def both():
        forward().square().sum().backward()

    with torch.no_grad():
        forward_ms = timed(forward, repeats)
    return {"forward_ms": forward_ms, "forward_backward_ms": timed(both, repeats)}


def main():
    sizes = json.loads(sys.argv[1])
    torch.set_num_threads(2)
    inputs = make_inputs(**sizes)
    result = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for label, neighbour in NEIGHBOURS.items():
        try:
            result[label] = measure(*neighbour, inputs, max(3, sizes["repeats"] // 3))
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            result[label] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
