"""The givens of the account: a model's sizes, a card's data sheet, and the constants that only measuring tells.

    ModelShape    the sizes of a Llama, by their names in config.json
    Hardware      an accelerator as its data sheet has it; this_machine: the one under our feet
    Calibration   what an operator pays besides: calibrate.py fits these to chapters/data, the ledger computes with them
"""
import json
import os
import pathlib
import time
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama, under the names of its config.json.  head_dim 0 stands for hidden_size / heads."""
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    head_dim: int = 0

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @classmethod
    def from_config(cls, path):
        """From a checkpoint folder or its config.json.  ValueError: a size that the file lacks."""
        path = pathlib.Path(path)
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        sizes = {field.name: config[field.name] for field in fields(cls) if config.get(field.name) is not None}
        missing = [field.name for field in fields(cls)[:6] if field.name not in sizes]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}")
        return cls(**sizes)


# Source: config.json of meta-llama/Meta-Llama-3-70B and Meta-Llama-3-8B.
LLAMA_3_70B = ModelShape(80, 8192, 64, 8, 28672, 128256)
LLAMA_3_8B = ModelShape(32, 4096, 32, 8, 14336, 128256)
MODELS = {"llama-3-70b": LLAMA_3_70B, "llama-3-8b": LLAMA_3_8B}


@dataclass(frozen=True)
class Hardware:
    """One accelerator.  peak_flops: dense FP16, FLOP/s.  bandwidth: of its memory, bytes/s.  memory: bytes.
    link: what it can send to its peers, one direction, bytes/s.  nvlink: each reaches each directly."""
    name: str
    peak_flops: float
    bandwidth: float
    memory: float
    link: float
    source: str
    nvlink: bool = True


# Datasheets quote tensor peaks "with sparsity", twice the dense figure, and links as the sum of both directions.
HARDWARE = {h.name: h for h in [
    Hardware("h100", 989.4e12, 3.35e12, 80e9, 450e9, "H100 SXM datasheet: 1979 TFLOPS sparse, NVLink 900 GB/s"),
    Hardware("h200", 989.4e12, 4.8e12, 141e9, 450e9, "H200 SXM datasheet: 1979 TFLOPS sparse, NVLink 900 GB/s"),
    Hardware("a100", 312e12, 2.039e12, 80e9, 300e9, "A100 80GB SXM datasheet: 312 TFLOPS dense, NVLink 600 GB/s"),
    Hardware("l4", 121e12, 0.3e12, 24e9, 32e9, "L4 datasheet: 242 TFLOPS sparse, PCIe 4.0 x16 64 GB/s", False),
    Hardware("b200", 2250e12, 8e12, 180e9, 900e9, "HGX B200, one of eight: 4500 TFLOPS sparse, NVLink 1.8 TB/s"),
]}


class Cost(NamedTuple):
    """What an operator pays besides its roofline: seconds before it starts, and the share of the peak it reaches."""
    latency: float
    efficiency: float


class AttentionCost(NamedTuple):
    """What attention pays: seconds before it starts, seconds of the whole card for each tile of 128 query rows, and the
    shares of bandwidth and peak that it reaches."""
    latency: float
    tile: float
    memory: float
    compute: float


@dataclass(frozen=True)
class Calibration:
    """The constants of the estimate: a cost for each kind of operator, and what no operator explains."""
    gemm: Cost
    norm: Cost
    elementwise: Cost
    attention: AttentionCost
    one_shot: Cost                  # vLLM's own all-reduce, the two ways
    two_shot: Cost
    nccl: Cost
    smoothness: float               # p: 1 adds the two roofs, infinity takes the larger
    step_overhead: float = 0.0      # seconds a step
    request_overhead: float = 0.0   # seconds for each request in it


# What calibrate.fit() computes from chapters/data; a test holds the two together.
CALIBRATED_H100 = Calibration(
    gemm=Cost(3.03e-06, 0.792), norm=Cost(4.09e-06, 0.431), elementwise=Cost(1.54e-06, 0.657),
    attention=AttentionCost(1.2e-05, 2.41e-08, 0.951, 0.685),
    one_shot=Cost(4.82e-06, 0.651), two_shot=Cost(9.45e-06, 0.778), nccl=Cost(3.55e-05, 0.844),
    smoothness=3.01)


def this_machine(clock=time.perf_counter):
    """The Hardware under our feet: fp32 matrix product and memory copy, the best of several runs of PyTorch."""
    import torch

    def best(function, *arguments):
        def once():
            begin = clock()
            function(*arguments)
            return clock() - begin
        return min(once() for _ in range(8))

    a, b = torch.randn(1024, 1024), torch.empty(1 << 25)
    copied = 2 * b.nbytes / best(b.copy_, torch.ones_like(b))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware("this machine", 2 * 1024 ** 3 / best(torch.mm, a, a), copied, memory, copied,
                    "measured here, fp32", False)
