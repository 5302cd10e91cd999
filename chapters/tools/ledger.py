"""The ledger (账本): what a step costs, as arithmetic one can follow with a pencil.

Every chapter of the article settles its account (算一笔账) on one example: Llama-3-70B in FP16 on 8 H100s, TP=8, a
2000-token system prompt and a 50-token question, 300 tokens out.  This file computes that account, and the same for any
Llama shape, any TP and a few GPUs.  Nothing here needs torch.

    givens.py   ModelShape, Hardware, Calibration: the givens, each figure with its source
    Ledger      exact: parameters, bytes, blocks, FLOPs, intensity.  Estimated: seconds
    account     the running example

A second is estimated operator by operator.  Constants stand for what no datasheet says: a latency, and the share of a
peak that is reached.  calibrate.py fits them to kernel times that others measured (chapters/data says on which card,
with which version); `--fit` prints them with every error.

    matrix products, norms    latency + ((FLOPs / peak)^p + (bytes / bandwidth)^p)^(1/p) / efficiency
    attention                 latency + tiles * tile + bytes / (memory * bandwidth) + FLOPs / (compute * peak)
    all-reduce                latency + bytes sent / (efficiency * link)

vLLM sums small messages by kernels of its own: in one shot each GPU reads all the others' data; in two each sums its
share, then all collect the sums.  From 8 MiB on, and for a gather, it is NCCL's ring.  So a token's 161 all-reduces
take 5 us each, not the 35 that NCCL starts with.  Where the estimate is wrong, and by how much:

- A layer without attention is within 6 % of the measurement at each of 13 batch sizes from 1 to 4096 tokens, but a
  single operator is not: the QKV GEMM comes out up to 34 % too fast (256, 512 tokens), a norm up to 65 % too slow
  (256), the residual add up to 85 % too slow (512), RoPE up to 37 % too fast (4096).
- Attention is within 6 % at the median of 291 sizes, 17 % at the 90th percentile.  Worst: one or two very long requests
  (131,072 tokens) come out 34 % too fast; a lone chunk of 512 to 2,048 tokens up to 31 %; where K and V just fit the L2
  cache (33 MB) 37 % too slow.  That last was a kernel run alone, again and again: between two layers of a model more
  than 200 MB of weights pass through that cache, so there the estimate may be nearer than the measurement.
- All-reduce is within 11 % at each size from 256 bytes to 64 MiB, on eight GPUs.  Other numbers of GPUs follow from the
  bytes that each has to read; they were not measured.  vLLM can also sum through symmetric memory from 256 KiB on, if
  that is enabled; for want of a measurement it is not in here.
- The host's time is not in it: on a GPU it is taken to run ahead.  `step_overhead` holds it where it was measured:
  calibrated on a busy 2-core CPU with one workload, it predicted another within 11 %
  (`python chapters/tools/calibrate.py`).
- The other GPUs keep the H100's efficiencies and latencies beside their own peaks, an assumption.

vLLM has no such file: it runs the model and looks.
"""
import argparse
import functools
import pathlib
import runpy
import sys
from dataclasses import replace
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from rich.table import Table  # noqa: E402

from givens import (CALIBRATED_H100, HARDWARE, LLAMA_3_8B, LLAMA_3_70B, MODELS, Calibration, Hardware,  # noqa: E402
                    ModelShape, this_machine)
from lang import Say  # noqa: E402
from options import end_quietly, make_console  # noqa: E402


# ----------------------------------------------------------------------------------------------------------------------
# 1  The account


class Op(NamedTuple):
    """One operator on one GPU, run `count` times.  A multiply-add is two FLOPs; bytes cross memory bus or link."""
    name: str
    kind: str        # the field of Calibration: gemm, attention, norm, elementwise, one_shot, two_shot, nccl
    flops: float
    bytes: float
    count: int = 1
    tiles: float = 0.0      # of attention


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
        # The rest of a step is attention, linear in each part of the work: seconds for one of each, in all layers.
        one = [Work(*[int(i == j) for j in range(5)]) for i in range(5)]
        nothing, *each = [self.total_seconds([self.attention_op(w)]) for w in (Work(0, 0, 0, 0, 0), *one)]
        token, _, self.pair_seconds, self.context_seconds, request = [seconds - nothing for seconds in each]
        self._attention_seconds = nothing, token, request

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
        """A message of `elements` that all GPUs sum, or that one of them gathers; nothing on one GPU.

        passes: how often a ring sends the message to sum it, 2 (n-1)/n, or to gather it, (n-1)/n.  vLLM sums below 8
        MiB itself.  In one shot each GPU reads the n-1 others' messages whole, which is quick while they are small; in
        two, 2 (n-1)/n of one as on a ring.  With four GPUs it changes from the one to the other at 512 KiB, with more
        at 256; two always take one shot.
        vLLM: distributed/device_communicators/custom_all_reduce.py:348 CustomAllreduce.should_custom_ar"""
        n, size = self.tp, elements * self.dtype_bytes
        own = self.hardware.nvlink and n in (2, 4, 6, 8) and size < 8 << 20 and passes >= 1
        if n == 1:
            return []
        if own and (n == 2 or size < (512 << 10 if n == 4 else 256 << 10)):
            return [Op(name, "one_shot", 0, (n - 1) * size, count)]
        return [Op(name, "two_shot" if own else "nccl", 0, passes * size, count)]

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
        """QK^T and PV: 4 d FLOPs a pair and query head.  A request's K and V are read once for all heads (GQA).

        The kernel takes the query rows that share a KV head, G = heads / KV heads of them a token, 128 to a tile.  A
        decode's G rows are a tile of their own, a prefill fills its tiles; the last one is half full in the mean."""
        m, heads, kv_heads = self.model, self.model.num_attention_heads // self.tp, self.kv_heads_per_gpu
        elements = 2 * work.context * kv_heads * m.head_dim + 2 * work.tokens * heads * m.head_dim
        return Op("attention", "attention", 4 * work.pairs * heads * m.head_dim, elements * self.dtype_bytes,
                  m.num_hidden_layers, work.requests * kv_heads + work.tokens * heads / 128)

    def step_ops(self, work):
        """Every operator of one engine step on one GPU."""
        return [*self.token_ops(work.tokens), self.attention_op(work), *self.sample_ops(work.sampled)]

    # -- estimated -----------------------------------------------------------------------------------------------------

    def seconds(self, op):
        """One execution of `op`."""
        cost, p, hw = getattr(self.calibration, op.kind), self.calibration.smoothness, self.hardware
        if op.kind in ("one_shot", "two_shot", "nccl"):
            return cost.latency + op.bytes / (cost.efficiency * hw.link)
        compute, memory = op.flops / hw.peak_flops, op.bytes / hw.bandwidth
        if op.kind == "attention":
            return cost.latency + op.tiles * cost.tile + memory / cost.memory + compute / cost.compute
        larger, smaller = max(compute, memory), min(compute, memory)
        roof = larger * (1 + (smaller / larger) ** p) ** (1 / p) if larger else 0.0
        return cost.latency + roof / cost.efficiency

    def total_seconds(self, ops):
        return sum(op.count * self.seconds(op) for op in ops)

    def base_time(self, tokens, sampled, requests):
        """Seconds of a step but for the context that it reads and the pairs that it computes."""
        nothing, token, request = self._attention_seconds
        return (self._token_seconds(tokens) + self._sample_seconds(sampled) + nothing + tokens * token
                + requests * request + self.calibration.step_overhead + requests * self.calibration.request_overhead)

    def step_time(self, work):
        """Seconds of one engine step."""
        return (self.base_time(work.tokens, work.sampled, work.requests)
                + (work.context * self.context_seconds + work.pairs * self.pair_seconds))

    def with_costs(self, **costs):
        """The same ledger with some other constants.  Example: with_costs(step_overhead=2e-3), a host that is slow."""
        return Ledger(self.model, self.hardware, self.tp, replace(self.calibration, **costs), self.dtype_bytes,
                      self.block_size)

    # -- what was used of what there is --------------------------------------------------------------------------------

    def model_flops(self, work):
        """FLOPs of the matrix products and attention for this work, or for the sum of many, on all GPUs together."""
        m = self.model
        q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
        layer = m.hidden_size * (2 * q + 2 * kv + 3 * m.intermediate_size)
        return (2 * work.tokens * m.num_hidden_layers * layer + 4 * work.pairs * q * m.num_hidden_layers
                + 2 * work.sampled * m.hidden_size * m.vocab_size)

    def model_bytes(self, work, num_steps=1):
        """Bytes that cannot be saved, on all GPUs: the weights once a step, K and V once a request and step.  (Of the
        embedding a step reads but a few rows.)"""
        embedding = 0 if self.model.tie_word_embeddings else self.model.vocab_size * self.model.hidden_size
        return (num_steps * (self.weight_bytes_per_gpu * self.tp - embedding * self.dtype_bytes)
                + work.context * self.kv_bytes_per_token)


# ----------------------------------------------------------------------------------------------------------------------
# 2  The running example (贯穿全文的例子)

SYSTEM, QUESTION, OUTPUT = 2000, 50, 300      # tokens


def intensity(ledger, work):
    """FLOP a byte over all matrix products of a step, attention among them."""
    ops = [op for op in ledger.step_ops(work) if op.kind in ("gemm", "attention")]
    return sum(op.count * op.flops for op in ops) / sum(op.count * op.bytes for op in ops)


def account(ledger, say=Say("en")):
    """The example's account as [(what, value, how)]; what is estimated has a "~" and says so."""
    m, hw, size, MiB = ledger.model, ledger.hardware, ledger.block_size, 1 << 20
    prompt, total, hits = SYSTEM + QUESTION, SYSTEM + QUESTION + OUTPUT, SYSTEM // size
    kv, left = ledger.kv_bytes_per_token, prompt - hits * size
    prefill, cached, decode = work_of([(0, prompt)]), work_of([(hits * size, left)]), work_of([(prompt, 1)])
    blocks = ledger.kv_cache_blocks() - 1
    return [
        (say("parameters"), f"{ledger.num_parameters:,}", say("embedding, layers, last norm, LM head")),
        (say("weights"), f"{ledger.weight_bytes / 1e9:.1f} GB", say("{n} bytes each", n=ledger.dtype_bytes)),
        (say("weights a GPU"), f"{ledger.weight_bytes_per_gpu / 1e9:.1f} GB",
         say("TP={tp}, norms on each", tp=ledger.tp)),
        (say("KV a token"), f"{kv / 1024:g} KiB", say(
            "2 x {layers} layers x {heads} KV heads x {d} x {n} bytes", layers=m.num_hidden_layers,
            heads=ledger.tp * ledger.kv_heads_per_gpu, d=m.head_dim, n=ledger.dtype_bytes)),
        (say("KV a token and GPU"), f"{kv / ledger.tp / 1024:g} KiB",
         say("{n} KV heads each", n=ledger.kv_heads_per_gpu)),
        (say("KV of the prompt, {n} tokens", n=prompt), f"{prompt * kv / MiB:.1f} MiB",
         say("{n} blocks of {size}", n=ledger.num_blocks(prompt), size=size)),
        (say("KV at the end, {n} tokens", n=total), f"{total * kv / MiB:.1f} MiB",
         say("{n} blocks", n=ledger.num_blocks(total))),
        (say("system prompt"), say("{n} blocks", n=hits),
         say("a second request hits them and computes {n} tokens", n=left)),
        (say("FLOP a byte, prefill"), f"{intensity(ledger, prefill):.0f}",
         say("more than the ridge, {ridge:.0f}, is bound by compute", ridge=hw.peak_flops / hw.bandwidth)),
        (say("FLOP a byte, decode"), f"{intensity(ledger, decode):.2f}", say("each weight is read for one token")),
        (say("prefill alone"), f"~{1e3 * ledger.step_time(prefill):.1f} ms", say("estimated: the least TTFT")),
        (say("prefill after the hit"), f"~{1e3 * ledger.step_time(cached):.1f} ms",
         say("estimated: the least TTFT then")),
        (say("decode alone"), f"~{1e3 * ledger.step_time(decode):.1f} ms", say("estimated: the least ITL")),
        (say("KV pool"), say("~{n:,} tokens", n=blocks * size),
         say("estimated: {share} of {memory:.0f} GB, less weights and activations", share="92 %",
             memory=hw.memory / 1e9)),
        (say("requests at once"), f"~{blocks // ledger.num_blocks(total)}",
         say("estimated: that fit whole, sharing nothing")),
    ]


def named(model, hardware, tp, **options):
    """A Ledger by names, as commands take them.  ValueError, OSError: what is not known or cannot be."""
    if hardware != "here" and hardware not in HARDWARE:
        raise ValueError(f"--hardware knows {', '.join([*HARDWARE, 'here'])}, not {hardware!r}")
    return Ledger(MODELS.get(model) or ModelShape.from_config(model),
                  this_machine() if hardware == "here" else HARDWARE[hardware], tp, **options)


def title(ledger, model):
    guess = "" if ledger.hardware.name == "h100" else "; efficiencies of an H100, an assumption"
    return f"{model} on {ledger.tp} x {ledger.hardware.name} ({ledger.hardware.source}{guess})"


def main(argv=None):
    parser = argparse.ArgumentParser(description="What a step costs.  Without options: the running example's account.")
    parser.add_argument("--model", default="llama-3-70b", help=f"{', '.join(MODELS)}, or a checkpoint folder")
    parser.add_argument("--hardware", default="h100", choices=[*HARDWARE, "here"], help="here: measured now [h100]")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=8)
    parser.add_argument("--fit", action="store_true", help="fit the constants to chapters/data; print every error "
                                                           "(calibrate.py --fit)")
    args, console = parser.parse_args(argv), make_console()
    try:
        if args.fit:            # calibrate.py stands on this file, so it is not imported here
            sys.argv = ["calibrate.py", "--fit"]
            runpy.run_path(str(HERE / "calibrate.py"), run_name="__main__")
            return 0
        ledger = named(args.model, args.hardware, args.tensor_parallel_size)
        table = Table("what", "value", "how", title=title(ledger, args.model))
        for row in account(ledger):
            table.add_row(*row)
        console.print(table)
    except (OSError, ValueError) as error:
        print(f"ledger.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_quietly()
    sys.exit(main())
