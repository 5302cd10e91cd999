"""The kernels against their twins, and against the card: what `python kernels.py` runs (chapter 6).

    python kernels.py            every kernel, interpreted on the CPU, beside its twin: results and largest difference
    python kernels.py --bench    on a GPU: achieved TB/s and TFLOP/s, as a share of what the card was just measured to
                                 do, with torch.nn.functional.scaled_dot_product_attention on dense K and V beside it

A kernel of this engine is bound by memory (norms, KV write, decodes) or by the tensor cores (prefill). So there are two
yardsticks, both measured first, on the card at hand: a large copy, and a large bf16 matrix product.
"""
import argparse
import os
import pathlib
import statistics
import sys
import time
from types import SimpleNamespace

if __name__ == "__main__" and "--bench" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"               # before kernels is imported: @jit looks as it decorates
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import torch
import torch.nn.functional as F

import attention as attention_module
import kernels
from options import end_quietly

GOALS = {"decode": 0.80, "prefill": 0.60, "norm": 0.85}          # shares of the yardstick; the others have none


# -- 1. A batch as the engine makes it --------------------------------------------------------------------------------

def example_batch(seq_lens, q_lens, H=8, Hkv=2, d=64, block_size=16, dtype=torch.float32, device="cpu", seed=0,
                  fill=torch.nan):
    """S sequences of seq_lens[s] tokens, the last q_lens[s] of them in this step  →  a namespace of what the operations
    take: q, k, qk (both), v, which are slices of one QKV product, cos, sin, k_cache, v_cache, slot_mapping,
    query_start_loc, seq_lens, block_tables, scale. Blocks come from a shuffled pool. A slot that no sequence owns holds
    `fill`: NaN, so that a result shows if one was read. A sequence of length 0 is padding: its slots are -1.
    """
    random = torch.Generator(device).manual_seed(seed)
    n_blocks = [-(-n // block_size) for n in seq_lens]
    pool = torch.randperm(sum(n_blocks), generator=random, device=device) + 1            # block 0 is the null block
    tables = torch.nn.utils.rnn.pad_sequence(pool.split(n_blocks), batch_first=True)     # [S, B]
    cache = torch.randn(2, len(pool) + 2, block_size, Hkv, d, generator=random, device=device, dtype=dtype)
    cache[:, [0, -1]] = fill                                                             # [K and V, N, bs, Hkv, d]
    slots, positions = [], []
    for table, n, q_len, blocks in zip(tables, seq_lens, q_lens, n_blocks):
        if n % block_size:
            cache[:, table[blocks - 1], n % block_size:] = fill
        p = torch.arange(n - q_len, n, device=device) if n else torch.zeros(q_len, dtype=torch.long, device=device)
        slots.append(table[p // block_size] * block_size + p % block_size if n else p - 1)
        positions.append(p)
    positions = torch.cat(positions)                                                     # [T]
    angles = positions[:, None] * 10000.0 ** -torch.linspace(0, 1, d // 2, device=device)    # [T, d/2]
    qkv = torch.randn(len(positions), H + 2 * Hkv, d, generator=random, device=device, dtype=dtype)
    q, k, v = qkv.split((H, Hkv, Hkv), dim=1)                                            # [T, H, d], [T, Hkv, d] twice
    cos, sin = (torch.cat((sign * table, table), dim=-1).to(dtype)                       # [T, d] each, see apply_rope
                for sign, table in ((1, angles.cos()), (-1, angles.sin())))
    return SimpleNamespace(
        q=q, k=k, qk=qkv[:, :H + Hkv], v=v, cos=cos, sin=sin, k_cache=cache[0], v_cache=cache[1],
        slot_mapping=torch.cat(slots), query_start_loc=torch.tensor([0, *q_lens], device=device).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, device=device).int(), block_tables=tables.int(), scale=d ** -0.5)


def attend(ops, b):
    return ops.paged_attention(b.q, b.k_cache, b.v_cache, b.query_start_loc, b.seq_lens, b.block_tables, b.scale)


def rope_and_write(ops, b):
    return ops.rope_and_write_kv(b.qk, b.v, b.cos, b.sin, b.k_cache, b.v_cache, b.slot_mapping)


# -- 2. The demo ------------------------------------------------------------------------------------------------------

def demo():
    """Every kernel, interpreted, beside its twin. Ends with an error if any of them differs by more than rounding."""
    wrong = []
    print("Each Triton kernel, interpreted on the CPU, beside its PyTorch twin\n")
    print(f"{'operation':18} {'batch':42} {'dtype':8} {'largest difference':>18} {'twin':>10} {'interpreted':>12}")
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(4, 5, 96, generator=torch.Generator().manual_seed(0)).to(dtype)  # [4, 5, 96]
        mixed = example_batch([9, 700, 33, 40], [1, 1, 33, 7], dtype=dtype)
        cases = [("rms_norm", "5 rows of 96, residual added", lambda ops: ops.rms_norm(x[0], x[1, 0], 1e-5, x[2])[0]),
                 ("silu_and_mul", "5 rows of 2 x 48", lambda ops: ops.silu_and_mul(x[3])),
                 ("rope_and_write_kv", "42 tokens, 8 + 2 heads of 64", lambda ops: rope_and_write(ops, mixed))]
        head = torch.randn(3, 70, 64, generator=torch.Generator().manual_seed(1)).to(dtype)           # q, k, v [70, 64]
        cases.append(("dense_attention", "one head, 70 queries, 70 keys", lambda ops: (
            attention_module.dense_attention if ops is kernels.TORCH else attention_module.dense_attention_triton)(*head, 0.125)))
        for what, seq_lens, q_lens, d in (
                ("decodes of 1, 15, 16, 17 and 200 keys", [1, 15, 16, 17, 200], [1] * 5, 64),
                ("a decode of 1300 keys: 21 splits, merged", [1300], [1], 64),
                ("prefill of 50 tokens, head size 80", [50], [50], 80),
                ("2 decodes, a prefill, a chunk's last 7", [9, 700, 33, 40], [1, 1, 33, 7], 64)):
            batch = example_batch(seq_lens, q_lens, d=d, dtype=dtype)
            cases.append(("paged_attention", what, lambda ops, batch=batch: attend(ops, batch)))
        for name, what, operation in cases:
            want, twin_ms = timed(operation, kernels.TORCH)
            got, kernel_ms = timed(operation, kernels.TRITON)
            difference = (want.float() - got.float()).abs().max()
            print(f"{name:18} {what:42} {str(dtype)[6:]:8} {difference:18.1e} {twin_ms:7.1f} ms {kernel_ms:9.1f} ms")
            if not difference < (1e-5 if dtype == torch.float32 else 4e-3):              # "not <": NaN is wrong, too
                wrong.append(f"{name}, {what}, {dtype}")
    print("\nSlots that no sequence owns hold NaN: a kernel that read one would show nan.")
    print("On a GPU: python kernels.py --bench")
    if wrong:
        sys.exit("kernel and twin differ: " + "; ".join(wrong))


def timed(operation, ops):
    start = time.perf_counter()
    return operation(ops), (time.perf_counter() - start) * 1e3


# -- 3. The bench -----------------------------------------------------------------------------------------------------

LLAMA_8B = dict(name="8B", H=32, Hkv=8, d=128, D=4096, I=14336)
LLAMA_70B_TP8 = dict(name="70B/TP8", H=8, Hkv=1, d=128, D=8192, I=28672 // 8)
BATCHES, CONTEXTS = (1, 4, 8, 16, 64, 256), (1024, 4096, 8192, 32768)
SKEWED = (131072, *[1024] * 255)                                          # a decode each: one long, many short
CHUNKS = ((2048, 2048), (4096, 4096), (8192, 8192), (2048, 8192))         # (queries, keys)
ROWS = (1, 64, 1024, 8192)


def cases(device, dtype, shapes=(LLAMA_8B, LLAMA_70B_TP8), batches=BATCHES, contexts=CONTEXTS, skewed=SKEWED,
          chunks=CHUNKS, rows=ROWS, max_kv_bytes=16 << 30):
    """(group, label, bytes, flops, our operation, PyTorch's or None), one at a time: each holds its tensors.

    bytes is what must cross the memory bus at least once; flops counts 2 for a multiply-add and only what causality
    leaves: 4 * H * d for each pair of a query and a key that it sees.
    """
    one = shapes[0]
    ops, size = kernels.select_backend("triton", device, dtype, one["d"], one["H"] // one["Hkv"]), dtype.itemsize
    for m in shapes:
        H, Hkv, d, D, I = (m[key] for key in ("H", "Hkv", "d", "D", "I"))
        for S in batches:
            for L in contexts:
                kv = 2 * S * L * Hkv * d * size
                if kv <= max_kv_bytes:
                    b = example_batch([L] * S, [1] * S, H, Hkv, d, dtype=dtype, device=device)
                    yield ("decode", f"{m['name']} batch {S}, {L} keys", kv + 2 * S * H * d * size, 4 * S * H * d * L,
                           lambda: attend(ops, b), dense_attention(b))
        b, S = example_batch(skewed, [1] * len(skewed), H, Hkv, d, dtype=dtype, device=device), len(skewed)
        yield ("decode", f"{m['name']} {S} sequences, {skewed[0]} keys and {skewed[-1]} each",
               2 * sum(skewed) * Hkv * d * size + 2 * S * H * d * size, 4 * H * d * sum(skewed),
               lambda: attend(ops, b), None)
        for q_len, L in chunks:
            b = example_batch([L], [q_len], H, Hkv, d, dtype=dtype, device=device)
            pairs = sum(range(L - q_len + 1, L + 1))
            yield ("prefill", f"{m['name']} {q_len} queries, {L} keys", 2 * (L * Hkv + q_len * H) * d * size,
                   4 * H * d * pairs, lambda: attend(ops, b), dense_attention(b))
        for T in rows:
            x, r, w = (torch.randn(*shape, D, dtype=dtype, device=device) for shape in ((T,), (T,), ()))
            yield ("norm", f"{m['name']} rms_norm, {T} rows of {D}", 4 * T * D * size, 0,
                   lambda: ops.rms_norm(x, w, 1e-5, r)[0], lambda: F.rms_norm(x + r, (D,), w, 1e-5))
            b = example_batch([T], [T], H, Hkv, d, dtype=dtype, device=device)
            yield ("KV write", f"{m['name']} rope_and_write_kv, {T} tokens", T * d * size * (2 * (H + 2 * Hkv) + 1), 0,
                   lambda: rope_and_write(ops, b), None)
            g = torch.randn(T, 2 * I, dtype=dtype, device=device)
            yield ("SwiGLU", f"{m['name']} silu_and_mul, {T} rows of 2 x {I}", 3 * T * I * size, 0,
                   lambda: ops.silu_and_mul(g), lambda: F.silu(g[:, :I]) * g[:, I:])


def dense_attention(b):
    """PyTorch's attention for a batch of equal lengths, on K and V gathered out of their blocks beforehand, so without
    paging to pay for  →  a function that returns [T, H, d]."""
    S, L, (T, H, d) = len(b.seq_lens), int(b.seq_lens[0]), b.q.shape
    k, v = (c[b.block_tables.long()].flatten(1, 2)[:, :L].transpose(1, 2).contiguous() for c in (b.k_cache, b.v_cache))
    q = b.q.unflatten(0, (S, T // S)).transpose(1, 2).contiguous()                       # [S, H, q_len, d]
    first = L - T // S                                                                   # the first query's position
    mask = None
    if T // S > 1 and first:
        mask = torch.ones(T // S, L, dtype=torch.bool, device=q.device).tril(first)      # [q_len, L]
    causal = T // S > 1 and not first
    return lambda: F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=b.scale, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def gpu_seconds(operation, repeats=20):
    """Median time of one call on the GPU: replayed from a CUDA graph, so that Python's share is not in it, and with the
    L2 cache overwritten in between, so that it does not serve what memory should."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):                      # compiles, before the capture
        for _ in range(3):
            operation()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def yardsticks(dtype):
    """(bytes/s of a copy, counting read and write; FLOP/s of a matrix product), measured on the card."""
    a, b = (torch.empty(1 << 29, dtype=dtype, device="cuda").normal_() for _ in range(2))            # 1 GiB each
    copy = 2 * a.nbytes / gpu_seconds(lambda: b.copy_(a))
    x, y = a[:1 << 26].view(8192, 8192), b[:1 << 26].view(8192, 8192)
    return copy, 2 * 8192**3 / gpu_seconds(lambda: x @ y)


def bench(dtype=torch.bfloat16):
    """The table, on the GPU at hand. Exits with a message where there is none."""
    if not torch.cuda.is_available():
        sys.exit("python kernels.py --bench: PyTorch finds no GPU here (CUDA or ROCm), so there is nothing to measure; "
                 "without --bench the kernels run interpreted, on the CPU")
    copy, matmul = yardsticks(dtype)
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, {str(dtype)[6:]} matrix product "
          f"{matmul / 1e12:.0f} TFLOP/s, both measured. 'share' is of the first, for prefill of the second.")
    print(f"{'':9} {'':47} {'MB':>8} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'share':>6} {'goal':>11} {'PyTorch us':>11} "
          f"{'difference':>10}")
    for group, label, n_bytes, flops, ours, theirs in cases("cuda", dtype):
        difference = (ours().float() - theirs().float()).abs().max().item() if theirs else float("nan")
        seconds, rival = gpu_seconds(ours), gpu_seconds(theirs) if theirs else float("nan")
        share = flops / seconds / matmul if group == "prefill" else n_bytes / seconds / copy
        # Below 64 MB there is too little work to fill the card, and what is measured is the launch.
        goal = GOALS.get(group) if group == "prefill" or n_bytes >= 64e6 else None
        verdict = "" if goal is None else f"{goal:.0%} {'reached' if share >= goal else 'missed'}"
        print(f"{group:9} {label:47} {n_bytes / 1e6:8.1f} {seconds * 1e6:9.1f} {n_bytes / seconds / 1e12:6.2f} "
              f"{flops / seconds / 1e12:8.1f} {share:6.0%} {verdict:>11} {rival * 1e6:11.1f} {difference:10.1e}",
              flush=True)


if __name__ == "__main__":
    end_quietly()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--bench", action="store_true", help="measure on a GPU instead of comparing on the CPU")
    args = parser.parse_args()
    if kernels.triton is None:
        parser.error("Triton can't be imported. On Linux: pip install triton numpy (its interpreter needs the latter)")
    bench() if args.bench else demo()
