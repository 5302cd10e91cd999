"""The ledger (账本): what a step costs, as arithmetic one can follow with a pencil; then a simulator that lives on it.

Every chapter of the article settles its account (算一笔账) on one example: Llama-3-70B in FP16 on 8 H100s, TP=8, a
2000-token system prompt and a 50-token question, 300 tokens out.  This file computes that account, and the same for any
Llama shape, any TP and a few GPUs.  Read it from the top; only `this_machine` needs torch.

    1  ModelShape, Hardware   the givens, each figure with its source
    2  Ledger                 exact: parameters, bytes, blocks, FLOPs, intensity.  Estimated: seconds
    3  fit, calibrate         where the constants come from: kernel times others measured on that setup, or a run here
    4  SimulatedEngine        the engine's own Scheduler and KVCacheManager, with a virtual clock instead of a model
    5  account, sweep         the running example, and the batch sweep

A second is estimated operator by operator, by a roofline with a rounded corner:

    latency + ((FLOPs / peak)^p + (bytes / bandwidth)^p)^(1/p) / efficiency

`python chapters/ledger.py --fit` prints the constants and every error.  Where it is wrong, and by how much:

- A layer without attention is within 6 % of the measurement at each of 13 batch sizes from 1 to 4096 tokens, but a
  single operator is not: the QKV GEMM comes out up to 34 % too fast (256, 512 tokens), a norm up to 65 % too slow
  (256), the residual add up to 85 % too slow (512), RoPE up to 37 % too fast (4096).
- All-reduce is within 19 % of NCCL's times at each size from 2 KB to 64 MB.  vLLM has an all-reduce of its own for small
  messages, which is not measured here; if it is faster than NCCL's 31 us, decode steps are too.
- Attention was not measured: it gets the GEMMs' efficiency and latency, an assumption.
- The host's time is not in it: on a GPU it is taken to run ahead.  `step_overhead` holds it where it was measured.
- The other GPUs keep the H100's efficiencies and latencies beside their own peaks, an assumption too.

vLLM has no such file.  It runs the model and looks, which is what `kv_cache_blocks` below replaces by arithmetic.
"""
import argparse
import csv
import functools
import json
import math
import pathlib
import sys
import time
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


# ----------------------------------------------------------------------------------------------------------------------
# 1  The givens


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama, under the names of its config.json.  `head_dim` defaults to hidden_size / heads."""
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
        """From a checkpoint folder or its config.json.  KeyError: a size that the file lacks."""
        path = pathlib.Path(path)
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        needed = [field.name for field in fields(cls)][:6]
        return cls(**{name: config[name] for name in needed}, head_dim=config.get("head_dim") or 0,
                   tie_word_embeddings=config.get("tie_word_embeddings", False))


# Source: config.json of meta-llama/Meta-Llama-3-70B and Meta-Llama-3-8B.
LLAMA_3_70B = ModelShape(80, 8192, 64, 8, 28672, 128256)
LLAMA_3_8B = ModelShape(32, 4096, 32, 8, 14336, 128256)
MODELS = {"llama-3-70b": LLAMA_3_70B, "llama-3-8b": LLAMA_3_8B}


@dataclass(frozen=True)
class Hardware:
    """One accelerator.  peak_flops: dense FP16, FLOP/s.  bandwidth: of its memory, bytes/s.  memory: bytes.
    link: what it can send to its peers, one direction, bytes/s."""
    name: str
    peak_flops: float
    bandwidth: float
    memory: float
    link: float
    source: str


# Datasheets quote tensor peaks "with sparsity", twice the dense figure, and links as the sum of both directions.
HARDWARE = {h.name: h for h in [
    Hardware("h100", 989.4e12, 3.35e12, 80e9, 450e9, "H100 SXM datasheet: 1979 TFLOPS sparse, NVLink 900 GB/s"),
    Hardware("h200", 989.4e12, 4.8e12, 141e9, 450e9, "H200 SXM datasheet: 1979 TFLOPS sparse, NVLink 900 GB/s"),
    Hardware("a100", 312e12, 2.039e12, 80e9, 300e9, "A100 80GB SXM datasheet: 312 TFLOPS dense, NVLink 600 GB/s"),
    Hardware("l4", 121e12, 0.3e12, 24e9, 32e9, "L4 datasheet: 242 TFLOPS sparse, PCIe 4.0 x16 64 GB/s"),
    Hardware("b200", 2250e12, 8e12, 180e9, 900e9, "DGX B200 datasheet / 8: 36 PFLOPS sparse, NVLink 1.8 TB/s"),
]}


class Cost(NamedTuple):
    """What an operator pays besides its roofline: seconds before it starts, and the share of the peak it reaches."""
    latency: float
    efficiency: float


@dataclass(frozen=True)
class Calibration:
    """The constants of the estimate: a Cost for each kind of operator, and what no operator explains."""
    gemm: Cost
    norm: Cost
    elementwise: Cost
    smoothness: float               # p: 1 adds the two roofs, infinity takes the larger
    all_reduce: Cost
    step_overhead: float = 0.0      # seconds a step
    request_overhead: float = 0.0   # seconds for each request in it


# What fit() computes from chapters/data; a test holds the two together.
CALIBRATED_H100 = Calibration(gemm=Cost(3.03e-06, 0.792), norm=Cost(4.09e-06, 0.431), elementwise=Cost(1.54e-06, 0.657),
                              smoothness=3.01, all_reduce=Cost(3.14e-05, 0.824))

# ----------------------------------------------------------------------------------------------------------------------
# 2  The account


class Op(NamedTuple):
    """One operator on one GPU, run `count` times.  A multiply-add is two FLOPs; bytes cross memory bus or link."""
    name: str
    kind: str        # gemm, norm, elementwise, all_reduce: the field of Calibration
    flops: float
    bytes: float
    count: int = 1


class Work(NamedTuple):
    """All that a batch's cost depends on.  Example: a 2050-token prefill beside a decode at position 2050 is
    [(0, 2050), (2050, 1)]: 2051 tokens, 2 sampled, 2050 * 2051 / 2 + 2051 pairs, 2050 + 2051 positions of context."""
    tokens: int      # T, through every linear layer
    sampled: int     # rows of logits
    pairs: int       # (query, key) pairs that the causal mask lets through
    context: int     # KV positions read, each once a request
    requests: int    # S


def work_of(chunks, sampled=None):
    """The Work of [(num_computed_tokens, num_scheduled_tokens), ...], one pair a request.

    `sampled` defaults to one a request; an unfinished prefill has none.  A ForwardBatch's chunks are
    zip(seq_lens - query_lens, query_lens), with query_lens the differences of its query_start_loc."""
    tokens = pairs = context = 0
    for computed, n in chunks:
        tokens += n
        pairs += n * computed + n * (n + 1) // 2     # the i-th new token sees all the old ones and i new ones
        context += computed + n
    return Work(tokens, len(chunks) if sampled is None else sampled, pairs, context, len(chunks))


class Ledger:
    """The account of one model on `tp` GPUs.  Bytes and FLOPs are exact, seconds are estimates.

    vLLM: v1/worker/gpu_worker.py Worker.determine_available_memory (for kv_cache_blocks; vLLM measures it)"""

    def __init__(self, model=LLAMA_3_70B, hardware=HARDWARE["h100"], tp=8, calibration=CALIBRATED_H100,
                 dtype_bytes=2, block_size=16):
        kv_heads = model.num_key_value_heads
        if model.num_attention_heads % tp or model.intermediate_size % tp or (kv_heads % tp and tp % kv_heads):
            raise ValueError(f"--tensor-parallel-size {tp} divides not all of {model.num_attention_heads} heads, "
                             f"{kv_heads} KV heads (or is a multiple) and intermediate size {model.intermediate_size}")
        self.model, self.hardware, self.tp, self.calibration = model, hardware, tp, calibration
        self.dtype_bytes, self.block_size = dtype_bytes, block_size
        self.kv_heads_per_gpu = max(1, kv_heads // tp)      # more GPUs than KV heads: several keep a copy of one
        # T and S repeat from step to step, so what depends on them alone is added up once a value.
        self._token_seconds = functools.lru_cache(None)(lambda T: self.total_seconds(self.token_ops(T)))
        self._sample_seconds = functools.lru_cache(None)(lambda S: self.total_seconds(self.sample_ops(S)))

    # -- exact ---------------------------------------------------------------------------------------------------------

    @property
    def num_parameters(self):
        m = self.model
        q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
        layer = m.hidden_size * (2 * q + 2 * kv + 3 * m.intermediate_size + 2)      # q o, k v, gate up down, two norms
        embeddings = m.vocab_size * m.hidden_size * (1 if m.tie_word_embeddings else 2)
        return m.num_hidden_layers * layer + embeddings + m.hidden_size             # the last norm

    @property
    def weight_bytes(self):
        return self.num_parameters * self.dtype_bytes

    @property
    def weight_bytes_per_gpu(self):
        """Matrices and embeddings are split `tp` ways; norms are whole, and so is at least one KV head."""
        m = self.model
        norms = (2 * m.num_hidden_layers + 1) * m.hidden_size
        kv_head = 2 * m.num_hidden_layers * m.hidden_size * m.head_dim
        split = self.num_parameters - norms - kv_head * m.num_key_value_heads
        return (norms + kv_head * self.kv_heads_per_gpu + split // self.tp) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self):
        """K and V of one token in every layer, over all GPUs (copies of a KV head count)."""
        return self.kv_bytes_per_token_per_gpu * self.tp

    @property
    def kv_bytes_per_token_per_gpu(self):
        return 2 * self.model.num_hidden_layers * self.kv_heads_per_gpu * self.model.head_dim * self.dtype_bytes

    def num_blocks(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def kv_cache_blocks(self, gpu_memory_utilization=0.92, max_num_batched_tokens=8192, max_num_seqs=256):
        """Blocks that fit beside the weights, the null block among them (estimated: the activations at their largest
        are taken to be gate_up's output, two hidden states and fp32 logits).  ValueError: no room for any."""
        m = self.model
        activations = (max_num_batched_tokens * (2 * m.intermediate_size / self.tp + 2 * m.hidden_size)
                       * self.dtype_bytes + max_num_seqs * m.vocab_size * 4)
        free = self.hardware.memory * gpu_memory_utilization - self.weight_bytes_per_gpu - activations
        blocks = int(free // (self.kv_bytes_per_token_per_gpu * self.block_size))
        if blocks < 2:
            raise ValueError(f"{self.weight_bytes_per_gpu / 1e9:.1f} GB of weights a GPU leave no room for KV in "
                             f"{gpu_memory_utilization:g} of {self.hardware.memory / 1e9:.0f} GB: raise "
                             "--tensor-parallel-size or --gpu-memory-utilization")
        return blocks

    # -- a batch, operator by operator ---------------------------------------------------------------------------------

    def gemm(self, name, rows, k, n):
        """[rows, k] x [k, n]: both are read, [rows, n] is written."""
        return Op(name, "gemm", 2 * rows * k * n, self.dtype_bytes * (rows * k + k * n + rows * n))

    def layer_ops(self, T):
        """One decoder layer for T tokens on one GPU, without attention."""
        m, b = self.model, self.dtype_bytes
        D, I, d = m.hidden_size, m.intermediate_size // self.tp, m.head_dim
        H, Hkv = m.num_attention_heads // self.tp, self.kv_heads_per_gpu
        ops = [Op("norm", "norm", 4 * T * D, 2 * b * T * D, 2),                       # [T, D] in and out
               self.gemm("qkv_proj", T, D, (H + 2 * Hkv) * d),
               Op("rope", "elementwise", 3 * T * (H + Hkv) * d, 2 * b * T * (H + Hkv) * d),
               self.gemm("o_proj", T, H * d, D),
               self.gemm("gate_up_proj", T, D, 2 * I),
               Op("silu_and_mul", "elementwise", 4 * T * I, 3 * b * T * I),           # [T, 2I] in, [T, I] out
               self.gemm("down_proj", T, I, D),
               Op("residual_add", "elementwise", T * D, 3 * b * T * D, 2)]            # vLLM fuses it into the norm
        return ops + self.all_reduce("all_reduce", T * D, 2 * (self.tp - 1) / self.tp, 2)

    def all_reduce(self, name, elements, passes, count=1):
        """On a ring each GPU sends its data 2 (n-1)/n times to sum it, (n-1)/n times to gather it."""
        return [Op(name, "all_reduce", 0, passes * elements * self.dtype_bytes, count)] if self.tp > 1 else []

    def token_ops(self, T):
        """All that depends on T alone: the embedding, every layer without its attention, the last norm."""
        m, hidden = self.model, T * self.model.hidden_size
        return [Op("embedding", "elementwise", 0, 2 * self.dtype_bytes * hidden),
                *self.all_reduce("embedding_all_reduce", hidden, 2 * (self.tp - 1) / self.tp),
                *[op._replace(count=op.count * m.num_hidden_layers) for op in self.layer_ops(T)],
                Op("last_norm", "norm", 4 * hidden, 2 * self.dtype_bytes * hidden)]

    def sample_ops(self, S):
        """S rows of logits, gathered on rank 0, and a token drawn from each."""
        if not S:
            return []
        logits = S * self.model.vocab_size
        return [self.gemm("lm_head", S, self.model.hidden_size, self.model.vocab_size // self.tp),
                *self.all_reduce("gather_logits", logits, (self.tp - 1) / self.tp),
                Op("sample", "elementwise", logits, 4 * logits)]

    def attention_op(self, work):
        """QK^T and PV: 4 d FLOPs a pair and query head.  A request's K and V are read once for all heads (GQA)."""
        m, heads = self.model, self.model.num_attention_heads // self.tp
        elements = 2 * work.context * self.kv_heads_per_gpu * m.head_dim + 2 * work.tokens * heads * m.head_dim
        return Op("attention", "gemm", 4 * work.pairs * heads * m.head_dim, elements * self.dtype_bytes,
                  m.num_hidden_layers)

    def step_ops(self, work):
        """Every operator of one engine step on one GPU."""
        return [*self.token_ops(work.tokens), self.attention_op(work), *self.sample_ops(work.sampled)]

    # -- estimated -----------------------------------------------------------------------------------------------------

    def seconds(self, op):
        """One execution of `op`."""
        cost, p = getattr(self.calibration, op.kind), self.calibration.smoothness
        compute = op.flops / self.hardware.peak_flops
        memory = op.bytes / (self.hardware.link if op.kind == "all_reduce" else self.hardware.bandwidth)
        larger, smaller = max(compute, memory), min(compute, memory)
        roof = larger * (1 + (smaller / larger) ** p) ** (1 / p) if larger else 0.0
        return cost.latency + roof / cost.efficiency

    def total_seconds(self, ops):
        return sum(op.count * self.seconds(op) for op in ops)

    def step_time(self, work):
        """Seconds of one engine step."""
        attention = self.attention_op(work)
        return (self._token_seconds(work.tokens) + attention.count * self.seconds(attention)
                + self._sample_seconds(work.sampled)
                + self.calibration.step_overhead + work.requests * self.calibration.request_overhead)


# ----------------------------------------------------------------------------------------------------------------------
# 3  Where the constants come from

# The measurement's name -> ours.
MEASURED = {"attn_pre_proj": "qkv_proj", "attn_post_proj": "o_proj", "mlp_up_proj": "gate_up_proj",
            "mlp_down_proj": "down_proj", "input_layernorm": "norm", "post_attention_layernorm": "norm",
            "attn_rope": "rope", "mlp_act": "silu_and_mul", "add": "residual_add"}


def read_csv(name):
    with open(HERE / "data" / name) as file:
        return list(csv.DictReader(file))


def measured_ops():
    """{(measured name, tokens): seconds} of one layer of the 70B on one of eight H100s."""
    return {(row["op"], int(row["num_tokens"])): float(row["median_us"]) / 1e6
            for row in read_csv("h100_llama70b_tp8_ops.csv") if row["op"] in MEASURED}


def estimated_ops(calibration, keys):
    """The same table, estimated."""
    ledger = Ledger(calibration=calibration)
    ops = {T: {op.name: ledger.seconds(op) for op in ledger.layer_ops(T)} for _, T in keys}
    return {(name, T): ops[T][MEASURED[name]] for name, T in keys}


def layer_seconds(table):
    """{tokens: seconds of the whole layer}; a layer adds to the residual twice, the measurement names it once."""
    total = dict.fromkeys([T for _, T in table], 0.0)
    for (name, T), seconds in table.items():
        total[T] += seconds * (2 if name == "add" else 1)
    return total


def all_reduce_errors(cost):
    """{bytes: estimated / measured} for eight GPUs."""
    ledger = Ledger(calibration=replace(CALIBRATED_H100, all_reduce=Cost(*cost)))
    return {int(row["bytes"]): ledger.seconds(*ledger.all_reduce("", int(row["bytes"]) / 2, 2 * 7 / 8))
            / (float(row["median_us"]) / 1e6) for row in read_csv("h100_dgx_allreduce_8gpu.csv")}


def pattern_search(loss, start):
    """Positive numbers at a minimum of `loss`: each one a step up or down, the step halved when nothing helps."""
    x, best, step = [math.log(value) for value in start], loss(start), 0.3
    while step > 1e-5:
        for i, delta in [(i, sign * step) for i in range(len(x)) for sign in (1, -1)]:
            trial = [value + delta * (i == j) for j, value in enumerate(x)]
            value = loss([math.exp(v) for v in trial])
            if value < best - 1e-12:
                x, best = trial, value
                break
        else:
            step /= 2
    return [float(f"{math.exp(v):.3g}") for v in x]


def fit():
    """The Calibration that chapters/data asks for: seven numbers for the operators, two for all-reduce.

    It minimises the squared log errors of each operator at each size, plus 50 times the whole layer's, since the layer
    is what a step adds up.  Small operators count a tenth: some take 1 us, measured in whole microseconds."""
    measured = measured_ops()
    layers = layer_seconds(measured)

    def calibration(x):
        return Calibration(Cost(*x[0:2]), Cost(*x[2:4]), Cost(*x[4:6]), x[6], CALIBRATED_H100.all_reduce)

    def loss(x):
        table = estimated_ops(calibration(x), measured)
        return (sum(math.log(table[key] / measured[key]) ** 2 * (1 if "proj" in key[0] else 0.1) for key in measured)
                + 50 * sum(math.log(seconds / layers[T]) ** 2 for T, seconds in layer_seconds(table).items()))

    all_reduce = pattern_search(lambda x: sum(math.log(e) ** 2 for e in all_reduce_errors(x).values()), [2e-5, 0.8])
    operators = pattern_search(loss, [5e-6, 0.7, 4e-6, 0.4, 1e-6, 0.6, 3])
    return replace(calibration(operators), all_reduce=Cost(*all_reduce))


def print_fit():
    """The constants and the error of every estimate, in percent."""
    fitted, measured = fit(), measured_ops()
    table = estimated_ops(fitted, measured)
    print(fitted, "\nestimated / measured - 1, in %:")
    sizes, layers, wanted = sorted({T for _, T in measured}), layer_seconds(table), layer_seconds(measured)
    rows = {name: [table[name, T] / measured[name, T] for T in sizes] for name in MEASURED}
    print(f"{'tokens':26}" + "".join(f"{T:6}" for T in sizes))
    for name, ratios in {**rows, "layer": [layers[T] / wanted[T] for T in sizes]}.items():
        print(f"{name:26}" + "".join(f"{100 * (ratio - 1):+6.0f}" for ratio in ratios))
    print("all_reduce, by bytes: " + "  ".join(f"{size}: {100 * (ratio - 1):+.0f}"
                                               for size, ratio in all_reduce_errors(fitted.all_reduce).items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="print the constants that chapters/data gives, and every error")
    if parser.parse_args().fit:
        print_fit()
