"""The ledger (账本): what a step costs, as arithmetic one can follow with a pencil; then a simulator that lives on it.

Every chapter of the article settles its account (算一笔账) on one example: Llama-3-70B in FP16 on 8 H100s, TP=8, a
2000-token system prompt and a 50-token question, 300 tokens out.  This file computes that account, and the same for any
Llama shape, any TP and a few GPUs.  Nothing here needs torch.

    1  ModelShape, Hardware   the givens, each figure with its source
    2  Ledger                 exact: parameters, bytes, blocks, FLOPs, intensity.  Estimated: seconds
    3  SimulatedEngine        the engine's own Scheduler and KVCacheManager, with a virtual clock instead of a model
    4  account, sweep         the running example; throughput against latency for batches of 1 to 256 (--sweep)

A second is estimated operator by operator, by a roofline with a rounded corner:

    latency + ((FLOPs / peak)^p + (bytes / bandwidth)^p)^(1/p) / efficiency

with constants that calibrate.py fits to kernel times measured on that very setup (chapters/data).  `--fit` prints them
and every error.  Where the estimate is wrong, and by how much:

- A layer without attention is within 6 % of the measurement at each of 13 batch sizes from 1 to 4096 tokens, but a
  single operator is not: the QKV GEMM comes out up to 34 % too fast (256, 512 tokens), a norm up to 65 % too slow
  (256), the residual add up to 85 % too slow (512), RoPE up to 37 % too fast (4096).
- All-reduce is within 19 % of NCCL's times at each size from 2 KB to 64 MB.  vLLM has an all-reduce of its own for
  small messages, which is not measured here; if it is faster than NCCL's 31 us, decode steps are too.
- Attention was not measured: it gets the GEMMs' efficiency and latency, an assumption.
- The host's time is not in it: on a GPU it is taken to run ahead.  `step_overhead` holds it where it was measured:
  calibrated on a busy 2-core CPU with one workload, it predicted another within 11 %
  (`python chapters/tools/calibrate.py`).
- The other GPUs keep the H100's efficiencies and latencies beside their own peaks, an assumption too.

vLLM has no such file: it runs the model and looks.
"""
import argparse
import functools
import json
import math
import pathlib
import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from rich import box  # noqa: E402
from rich.console import Group  # noqa: E402
from rich.table import Table  # noqa: E402

import bench  # noqa: E402
from kv_cache import KVCacheManager  # noqa: E402
from metrics import parse_goodput, summarize  # noqa: E402
from options import check_folder, end_quietly, make_console, naming  # noqa: E402
from request import Request  # noqa: E402
from scheduler import Scheduler, SchedulerConfig  # noqa: E402
from show import LineChart, save_svg  # noqa: E402


# ----------------------------------------------------------------------------------------------------------------------
# 1  The givens


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
    Hardware("b200", 2250e12, 8e12, 180e9, 900e9, "HGX B200, one of eight: 4500 TFLOPS sparse, NVLink 1.8 TB/s"),
]}


class Cost(NamedTuple):
    """What an operator pays besides its roofline: seconds before it starts, and the share of the peak it reaches."""
    latency: float
    efficiency: float


@dataclass(frozen=True)
class Calibration:
    """The constants of the estimate: a Cost for each kind of operator, and what no operator explains."""
    gemm: Cost
    attention: Cost
    norm: Cost
    elementwise: Cost
    smoothness: float               # p: 1 adds the two roofs, infinity takes the larger
    all_reduce: Cost
    step_overhead: float = 0.0      # seconds a step
    request_overhead: float = 0.0   # seconds for each request in it


# What calibrate.fit() computes from chapters/data; a test holds the two together.
CALIBRATED_H100 = Calibration(
    gemm=Cost(3.03e-06, 0.792), attention=Cost(3.03e-06, 0.792), norm=Cost(4.09e-06, 0.431),
    elementwise=Cost(1.54e-06, 0.657), smoothness=3.01, all_reduce=Cost(3.14e-05, 0.824))

# ----------------------------------------------------------------------------------------------------------------------
# 2  The account


class Op(NamedTuple):
    """One operator on one GPU, run `count` times.  A multiply-add is two FLOPs; bytes cross memory bus or link."""
    name: str
    kind: str        # the field of Calibration: gemm, attention, norm, elementwise, all_reduce
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
    """The account of one model on `tp` GPUs.  Bytes and FLOPs are exact, seconds are estimates."""

    def __init__(self, model=LLAMA_3_70B, hardware=HARDWARE["h100"], tp=8, calibration=CALIBRATED_H100,
                 dtype_bytes=2, block_size=16):
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        if tp < 1 or heads % tp or model.intermediate_size % tp or (kv_heads % tp and tp % kv_heads):
            raise ValueError(f"--tensor-parallel-size is {tp}, must be at least 1 and divide {heads} heads, {kv_heads} "
                             f"KV heads (or be a multiple) and intermediate size {model.intermediate_size}")
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

    weight_bytes = property(lambda self: self.num_parameters * self.dtype_bytes)

    @property
    def weight_bytes_per_gpu(self):
        """Matrices and embeddings are split `tp` ways; norms are whole, and so is at least one KV head."""
        m = self.model
        norms = (2 * m.num_hidden_layers + 1) * m.hidden_size
        kv_head = 2 * m.num_hidden_layers * m.hidden_size * m.head_dim
        split = self.num_parameters - norms - kv_head * m.num_key_value_heads
        return (norms + kv_head * self.kv_heads_per_gpu + split // self.tp) * self.dtype_bytes

    # K and V of one token in every layer, over all GPUs; copies of a KV head count.
    kv_bytes_per_token = property(lambda self: self.kv_bytes_per_token_per_gpu * self.tp)

    @property
    def kv_bytes_per_token_per_gpu(self):
        return 2 * self.model.num_hidden_layers * self.kv_heads_per_gpu * self.model.head_dim * self.dtype_bytes

    def num_blocks(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def kv_cache_blocks(self, gpu_memory_utilization=0.92, max_num_batched_tokens=8192, max_num_seqs=256):
        """Blocks that fit beside the weights, the null block among them (estimated: the activations at their largest
        are taken to be gate_up's output, two hidden states and fp32 logits).  ValueError: no room for any.
        vLLM: v1/worker/gpu_worker.py Worker.determine_available_memory, which runs the model and measures"""
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"--gpu-memory-utilization is {gpu_memory_utilization}, must be above 0 and at most 1")
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
        return Op("attention", "attention", 4 * work.pairs * heads * m.head_dim, elements * self.dtype_bytes,
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
# 3  The simulator


class SimulatedEngine:
    """An LLMEngine whose model is a Ledger and whose clock is virtual: same scheduler, same pool, same StepRecords.

    It answers to what bench.run needs of an engine, so workloads and metrics serve both.  A step takes `step_time`
    seconds of a clock that nobody waits for, and every sampled token is 0: requests end by max_tokens.
    vLLM: v1/engine/core.py:584 EngineCore.step"""

    def __init__(self, ledger, config, num_kv_blocks=None, enable_prefix_caching=True, gpu_memory_utilization=0.92,
                 keep_records=True):
        blocks = num_kv_blocks or ledger.kv_cache_blocks(gpu_memory_utilization, config.max_num_batched_tokens,
                                                         config.max_num_seqs)
        self.ledger, self.now, self.keep_records = ledger, 0.0, keep_records
        self.scheduler = Scheduler(config, KVCacheManager(blocks, ledger.block_size, enable_prefix_caching))
        self.records, self.num_steps, self.num_request_steps = [], 0, 0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def add_request(self, request_id, prompt_token_ids, sampling_params, arrival_time=None, priority=0):
        self.scheduler.add_request(Request(request_id, prompt_token_ids, sampling_params,
                                           self.now if arrival_time is None else arrival_time, priority))

    def abort_request(self, request_id):
        self.scheduler.abort_request(request_id)

    def has_unfinished_requests(self):
        return self.scheduler.has_unfinished_requests()

    def step(self):
        """Plan a step, let its time pass, hand out the tokens; returns the requests that ended, as bench reads them."""
        output, start = self.scheduler.schedule(), self.now
        chunks, sampling = [], []
        for request, scheduled in zip(output.scheduled_requests, output.num_scheduled_tokens.values()):
            chunks.append((request.num_computed_tokens - scheduled, scheduled))     # this step's are counted already
            if request.num_computed_tokens == len(request.all_token_ids):
                sampling.append(request)
            if request.first_scheduled_time is None:
                request.first_scheduled_time = start
        duration = self.ledger.step_time(work_of(chunks, len(sampling)))
        self.now += duration
        for request in sampling:
            request.token_times.append(self.now)
        sampled = {request.request_id: 0 for request in sampling}
        finished = self.scheduler.update_from_output(output, sampled)
        if self.keep_records:
            self.records.append(self.scheduler.make_record(self.num_steps, output, sampled, start, duration,
                                                           [request.request_id for request in finished]))
        self.num_steps += 1
        self.num_request_steps += len(chunks)
        for request in finished:
            request.finish_time = self.now
        return [SimpleNamespace(request_id=r.request_id, finished=True, metrics=r, error=None, outputs=[SimpleNamespace(
            text="", token_ids=r.output_token_ids, finish_reason=r.finish_reason)]) for r in finished]


# ----------------------------------------------------------------------------------------------------------------------
# 4  The running example (贯穿全文的例子) and the batch sweep

SYSTEM, QUESTION, OUTPUT = 2000, 50, 300      # tokens


def intensity(ledger, work):
    """FLOP a byte over all matrix products of a step, attention among them."""
    ops = [op for op in ledger.step_ops(work) if op.kind in ("gemm", "attention")]
    return sum(op.count * op.flops for op in ops) / sum(op.count * op.bytes for op in ops)


def account(ledger):
    """The example's account as [(what, value, how)]; what is estimated has a "~" and says so."""
    m, hw, size, MiB = ledger.model, ledger.hardware, ledger.block_size, 1 << 20
    prompt, total, hits = SYSTEM + QUESTION, SYSTEM + QUESTION + OUTPUT, SYSTEM // size
    kv, left = ledger.kv_bytes_per_token, prompt - hits * size
    prefill, cached, decode = work_of([(0, prompt)]), work_of([(hits * size, left)]), work_of([(prompt, 1)])
    blocks = ledger.kv_cache_blocks() - 1
    return [
        ("parameters", f"{ledger.num_parameters:,}", "embedding, layers, last norm, LM head"),
        ("weights", f"{ledger.weight_bytes / 1e9:.1f} GB", f"{ledger.dtype_bytes} bytes each"),
        ("weights a GPU", f"{ledger.weight_bytes_per_gpu / 1e9:.1f} GB", f"TP={ledger.tp}, norms on each"),
        ("KV a token", f"{kv / 1024:g} KiB", f"2 x {m.num_hidden_layers} layers x "
         f"{ledger.tp * ledger.kv_heads_per_gpu} KV heads x {m.head_dim} x {ledger.dtype_bytes} bytes"),
        ("KV a token and GPU", f"{kv / ledger.tp / 1024:g} KiB", f"{ledger.kv_heads_per_gpu} KV heads each"),
        (f"KV of the prompt, {prompt} tokens", f"{prompt * kv / MiB:.1f} MiB",
         f"{ledger.num_blocks(prompt)} blocks of {size}"),
        (f"KV at the end, {total} tokens", f"{total * kv / MiB:.1f} MiB", f"{ledger.num_blocks(total)} blocks"),
        ("system prompt", f"{hits} blocks", f"a second request hits them and computes {left} tokens"),
        ("FLOP a byte, prefill", f"{intensity(ledger, prefill):.0f}",
         f"more than the ridge, {hw.peak_flops / hw.bandwidth:.0f}, is bound by compute"),
        ("FLOP a byte, decode", f"{intensity(ledger, decode):.2f}", "each weight is read for one token"),
        ("prefill alone", f"~{1e3 * ledger.step_time(prefill):.1f} ms", "estimated: the least TTFT"),
        ("prefill after the hit", f"~{1e3 * ledger.step_time(cached):.1f} ms", "estimated: the least TTFT then"),
        ("decode alone", f"~{1e3 * ledger.step_time(decode):.1f} ms", "estimated: the least ITL"),
        ("KV pool", f"~{blocks * size:,} tokens",
         f"estimated: 92 % of {hw.memory / 1e9:.0f} GB, less weights and activations"),
        ("requests at once", f"~{blocks // ledger.num_blocks(total)}", "estimated: that fit whole, sharing nothing"),
    ]


def sweep(ledger, batches=(1, 2, 4, 8, 16, 32, 64, 128, 256), enable_prefix_caching=True, max_num_batched_tokens=8192):
    """The article's curve: the example with `--max-concurrency` 1 to 256 in virtual time, three requests a place.

    Equal requests that start together stay together, so ITL is that of decodes alone and TTFT that of a burst.
    Returns one bench result a batch size, with "batch" added."""
    results, vocab_size = [], ledger.model.vocab_size
    for batch in batches:
        config = SchedulerConfig(max(batches), max_num_batched_tokens, max_model_len=8192)
        engine = SimulatedEngine(ledger, config, enable_prefix_caching=enable_prefix_caching, keep_records=False)
        requests = bench.random_requests(3 * batch, QUESTION, OUTPUT, prefix_len=SYSTEM, vocab_size=vocab_size)
        outputs, duration = bench.run(engine, requests, [0.0] * len(requests), max_concurrency=batch)
        results.append({"batch": batch, **summarize(outputs, duration)})
    return results


def feasible(results, slo):
    """The batches whose P99 keeps the SLO: {name: ms}, of ttft, tpot, itl and e2el."""
    return [r["batch"] for r in results if all(r[f"p99_{name}_ms"] <= limit for name, limit in slo.items())]


def sweep_pictures(results, slo):
    """{name: picture}: the table, and throughput, ITL and TTFT over batch size with the region that the SLO leaves.
    What else the SLO limits has a column of its own."""
    good, xs = feasible(results, slo), [r["batch"] for r in results]
    region = (good[0], good[-1], "within the SLO") if good else None
    shown = [(p, name) for name in ("itl", "ttft") for p in (50, 99)]
    shown += [(99, name) for name in slo if name not in ("itl", "ttft")]
    table = Table("batch", "tokens/s", *[f"P{p} {name.upper()} ms" for p, name in shown], "SLO",
                  box=box.SIMPLE_HEAD, show_edge=False, padding=0)          # so that 80 columns hold all of them
    for r in results:
        figures = [r["output_throughput"], *(r[f"p{p}_{name}_ms"] for p, name in shown)]
        table.add_row(str(r["batch"]), *[f"{figure:,.1f}" for figure in figures], "yes" if r["batch"] in good else "no")

    def chart(title, y_label, series, limit=None):
        return LineChart(title, xs, series, "batch size (--max-concurrency)", y_label,
                         limit and (limit, f"SLO {limit:g} ms"), region, log_x=True)

    pictures = {"sweep": table, "throughput": chart("Throughput (吞吐)", "output tokens/s",
                                                    {"tokens/s": [r["output_throughput"] for r in results]})}
    for name in ("itl", "ttft"):
        series = {f"P{p}": [r[f"p{p}_{name}_ms"] for r in results] for p in (50, 99)}
        pictures[name] = chart(f"{name.upper()} (单请求延迟)", "ms", series, slo.get(name))
    return pictures


def main(argv=None):
    parser = argparse.ArgumentParser(description="What a step costs.  Without options: the running example's account.")
    parser.add_argument("--model", default="llama-3-70b", help=f"{', '.join(MODELS)}, or a checkpoint folder")
    parser.add_argument("--hardware", default="h100", choices=[*HARDWARE, "here"], help="here: measured now [h100]")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=8)
    parser.add_argument("--fit", action="store_true", help="fit the constants to chapters/data; print every error")
    parser.add_argument("--sweep", action="store_true", help="throughput and latency for batches of 1 to 256")
    parser.add_argument("--slo", nargs="+", default=["ttft:500", "itl:25"], metavar="NAME:MS",
                        help="P99 limits for --sweep, of ttft, itl, tpot, e2el [ttft:500 itl:25]")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", metavar="DIR", help="save the pictures of --sweep as SVG")
    args, console = parser.parse_args(argv), make_console()
    try:
        if args.fit or args.hardware == "here":
            import calibrate
        if args.fit:
            calibrate.print_fit()
            return 0
        hardware = calibrate.this_machine() if args.hardware == "here" else HARDWARE[args.hardware]
        model = MODELS.get(args.model) or ModelShape.from_config(args.model)
        ledger = Ledger(model, hardware, args.tensor_parallel_size)
        guess = "" if hardware.name == "h100" else "; efficiencies of an H100, an assumption"
        title = f"{args.model} on {ledger.tp} x {hardware.name} ({hardware.source}{guess})"
        if not args.sweep:
            table = Table("what", "value", "how", title=title)
            for row in account(ledger):
                table.add_row(*row)
            console.print(table)
            return 0
        if args.save:
            check_folder("--save", args.save)
        slo, caching = parse_goodput(args.slo, ("ttft", "tpot", "itl", "e2el")), args.enable_prefix_caching
        pictures = sweep_pictures(sweep(ledger, enable_prefix_caching=caching), slo)
        console.print(f"{title}, {SYSTEM} + {QUESTION} tokens in, {OUTPUT} out, simulated; "
                      f"prefix cache {'on' if caching else 'off'}", Group(*pictures.values()))
        with naming("--save", args.save):
            for name, picture in pictures.items() if args.save else ():
                save_svg(picture, pathlib.Path(args.save) / f"{name}.svg")
    except (OSError, ValueError) as error:
        print(f"ledger.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # calibrate.py imports this file as "ledger"; run that copy, so that there is one of each class.
    from ledger import main
    end_quietly()
    sys.exit(main())
