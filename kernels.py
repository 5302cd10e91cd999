"""How it is computed (chapter 6): every operation of the forward pass that is not a matrix product.

Mirrors   vLLM: v1/attention/ops/triton_unified_attention.py:802 unified_attention
          vLLM: v1/attention/ops/triton_reshape_and_cache_flash.py:363 triton_reshape_and_cache_flash
          vLLM: model_executor/layers/layernorm.py:37 RMSNorm, model_executor/layers/activation.py:118 SiluAndMul
Promises  every operation stands twice: its *twin*, plain PyTorch, the specification and the path on a CPU; under it
          the Triton kernel, same arguments, same results. Both are exact for any mix of prefill chunks and decodes and
          read no KV slot beyond a sequence's length; the kernels give a sequence the same bits alone and in company.
Left out  quantised caches, sliding windows, soft caps, and autotuning: tiles are chosen by arithmetic.
Order     1 rms_norm, 2 apply_rope and rope_and_write_kv, 3 silu_and_mul, 4 paged_attention, 5 select_backend.
Run       `python kernels.py` holds every kernel against its twin, no GPU needed; `python kernels.py --bench` wants one.

Letters in the shapes: T tokens in the batch, S sequences, H query heads, Hkv KV heads, G = H / Hkv, d head size,
D hidden size, I intermediate size, B blocks a sequence, L keys of one sequence, N blocks in the pool, bs block size.

Triton in ten lines. A @jit function is written for one *program*; a launch `kernel[grid](...)` starts one for each
point of the grid, and each asks `tl.program_id` which piece of the result is its own. Programs run in any order and
share nothing, so none may write what another writes. Inside, a value is a scalar or a *tile*, a small array that the
program's warps (32 threads each) hold in registers; the code says what happens to a tile, never to a thread. A tensor
arrives as a pointer to its first element: `tl.load(pointer + offsets, mask, other)` gathers a tile; where the mask is
off nothing is read and `other` is taken. Tiles have compile-time sizes (`tl.constexpr`, in capitals), powers of two: a
head size of 80 travels in a tile of 128 with 48 columns masked. Strides are arguments (q_t: q's along T), since q is a
slice of the QKV product, not a dense tensor. Offsets into a pool are int64: 70,000 blocks of 16 * 8 * 256 pass 2^31.
With TRITON_INTERPRET=1 in the environment the same source runs on the CPU, program after program, in NumPy.
"""
import functools
import pathlib
import runpy
from types import SimpleNamespace
from typing import NamedTuple

if __name__ == "__main__":     # up here: the demo wants the kernels interpreted, and @jit asks as it decorates
    bench = pathlib.Path(__file__).resolve().parent / "chapters/tools/bench_kernels.py"
    runpy.run_path(str(bench), run_name="__main__")
    raise SystemExit

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:            # no Triton for this platform (macOS): the twins need none
    triton, tl, jit = None, SimpleNamespace(constexpr=None), lambda function, **options: function


# -- 1. RMSNorm -------------------------------------------------------------------------------------------------------

def rms_norm(x, weight, eps, residual=None):
    """Root-mean-square norm of the rows, with the residual add in front of it.

    x [T, D], weight [D], eps a float, residual [T, D] or None  →  (normed [T, D], new residual [T, D]), x's dtype.
    The sum of squares is taken in fp32: in fp16 a hidden state of 300 already overflows when squared.
    vLLM: model_executor/layers/layernorm.py:37 RMSNorm; left out: variance_size_override, quantised outputs.
    """
    residual = x if residual is None else residual + x                                   # [T, D]
    x32 = residual.float()                                                               # [T, D]
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)                   # [T, D]
    return weight * x32.to(x.dtype), residual                                            # [T, D], [T, D]


@jit
def _rms_norm_kernel(x, residual, weight, out, new_residual, D, eps, BLOCK: tl.constexpr):
    """A program owns one row and keeps it in registers: x and residual are read once, both results written once. Three
    PyTorch operations would carry the row through memory three times, and this operation is nothing but memory."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)                                                              # [BLOCK], BLOCK >= D
    real = i < D
    r = tl.load(x + row * D + i, mask=real, other=0.0)                                   # [BLOCK], zeros from D on
    if residual is not None:                           # known when the kernel is compiled
        r += tl.load(residual + row * D + i, mask=real, other=0.0)                       # [BLOCK], summed in x's dtype
        tl.store(new_residual + row * D + i, r, mask=real)
    r32 = r.to(tl.float32)                                                               # [BLOCK]
    r32 *= tl.rsqrt(tl.sum(r32 * r32) / D + eps)
    w = tl.load(weight + i, mask=real, other=0.0)                                        # [BLOCK]
    tl.store(out + row * D + i, w * r32.to(r.dtype), mask=real)


def rms_norm_triton(x, weight, eps, residual=None):
    """`rms_norm` as one kernel."""
    T, D = x.shape
    x, weight = x.contiguous(), weight.contiguous()                      # as they are already, in a model: no copy
    residual = None if residual is None else residual.contiguous()
    out = x.new_empty(T, D)                                                              # [T, D]
    new_residual = x if residual is None else x.new_empty(T, D)                          # [T, D]
    BLOCK = triton.next_power_of_2(D)
    _rms_norm_kernel[(T,)](x, residual, weight, out, new_residual, D, eps, BLOCK=BLOCK,
                           num_warps=min(max(BLOCK // 1024, 4), 16))
    return out, new_residual


# -- 2. RoPE, and the write into the KV cache -------------------------------------------------------------------------

def apply_rope(x, cos, sin):
    """Turn each head's vector by its position's angles: dimension i is paired with i + d/2 (the "half-split" layout).

    x [T, heads, d], cos and sin [T, d] of x's dtype  →  [T, heads, d]. Both tables hold each of the d/2 angles twice,
    and sin is negative in its first half: (x1, x2) becomes (x1, x2) * (c, c) + (x2, x1) * (-s, s).
    Hugging Face checkpoints store Wq and Wk for this layout; Meta's originals pair 2i with 2i+1, and no error would
    show if the two were mixed: the text starts well and falls apart, since position 0 turns by nothing in either.
    """
    cos, sin = cos[:, None], sin[:, None]                                                # [T, 1, d]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)                # [T, heads, d]


def rope_and_write_kv(qk, v, cos, sin, k_cache, v_cache, slot_mapping):
    """Rotate q and k, put k and v into their slots; the caches change in place.

    qk [T, H + Hkv, d], the query heads and behind them the key heads, v [T, Hkv, d], cos and sin as in apply_rope,
    caches [N, bs, Hkv, d], slot_mapping [T] int64  →  q rotated [T, H, d].
    Slot = block_id * block_size + offset; a negative slot is padding and writes nothing. Every layer writes the whole
    batch's K/V before it attends, so a chunk's tokens see each other through the cache like any older token.
    """
    q, k = apply_rope(qk, cos, sin).split((qk.shape[1] - v.shape[1], v.shape[1]), dim=1)
    if int(slot_mapping.min()) < 0:
        real = slot_mapping >= 0                                                         # [T]
        slot_mapping, k, v = slot_mapping[real], k[real], v[real]
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k.to(k_cache.dtype))              # [N*bs, Hkv, d] at T slots
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v.to(v_cache.dtype))
    return q


@jit
def _rope_and_write_kv_kernel(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, q_out, q_t, q_h, q_d, k_t, k_h, k_d,
                              c_b, c_s, c_h, c_d, H, Hkv, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr,
                              HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """A program owns one token and HEADS heads of it: query heads, and the KV heads of those numbers, where there are.
    A head travels as two tiles of d/2, since element i turns with element i + d/2."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]                       # [HEADS, 1]
    i = tl.arange(0, BLOCK_HALF)[None, :]                                                # [1, BLOCK_HALF]
    c = tl.load(cos + t * 2 * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)         # [1, BLOCK_HALF]
    s = tl.load(sin + t * 2 * HALF + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)  # the half without the minus

    real = (head < H) & (i < HALF)                                                       # [HEADS, BLOCK_HALF]
    x1, x2 = _load_halves(q + t * q_t + head * q_h, i, q_d, real, HALF)
    at = q_out + (t * H + head) * (2 * HALF) + i
    tl.store(at, (x1 * c - x2 * s).to(q.dtype.element_ty), mask=real)
    tl.store(at + HALF, (x2 * c + x1 * s).to(q.dtype.element_ty), mask=real)

    slot = tl.load(slot_mapping + t).to(tl.int64)
    real = (head < Hkv) & (i < HALF) & (slot >= 0)                                       # slot -1: nothing is written
    at = slot // BLOCK_SIZE * c_b + slot % BLOCK_SIZE * c_s + head * c_h + i * c_d       # [HEADS, BLOCK_HALF]
    x1, x2 = _load_halves(k + t * k_t + head * k_h, i, k_d, real, HALF)
    # Through k's own dtype on the way to the cache's, so that the cache holds what the twin would have put there.
    y1, y2 = (x1 * c - x2 * s).to(k.dtype.element_ty), (x2 * c + x1 * s).to(k.dtype.element_ty)
    tl.store(k_cache + at, y1.to(k_cache.dtype.element_ty), mask=real)
    tl.store(k_cache + at + HALF * c_d, y2.to(k_cache.dtype.element_ty), mask=real)
    x1, x2 = _load_halves(v + t * k_t + head * k_h, i, k_d, real, HALF)
    tl.store(v_cache + at, x1.to(v_cache.dtype.element_ty), mask=real)
    tl.store(v_cache + at + HALF * c_d, x2.to(v_cache.dtype.element_ty), mask=real)


@jit
def _load_halves(x, i, stride, real, HALF: tl.constexpr):
    """The two halves of some heads, in fp32: 2 x [HEADS, BLOCK_HALF]."""
    return (tl.load(x + i * stride, mask=real, other=0.0).to(tl.float32),
            tl.load(x + (i + HALF) * stride, mask=real, other=0.0).to(tl.float32))


def rope_and_write_kv_triton(qk, v, cos, sin, k_cache, v_cache, slot_mapping):
    """`rope_and_write_kv` as one kernel: q, k and v are read once and written once, to where they are needed next."""
    q, k = qk.split((qk.shape[1] - v.shape[1], v.shape[1]), dim=1)
    (T, H, d), Hkv = q.shape, k.shape[1]
    assert k.stride() == v.stride() and k_cache.stride() == v_cache.stride(), "K and V are laid out alike"
    q_out = q.new_empty(T, H, d)                                                         # [T, H, d]
    BLOCK_HALF = triton.next_power_of_2(d // 2)
    HEADS = min(triton.next_power_of_2(H), max(2048 // BLOCK_HALF, 1))   # 2048 pairs: 16 a thread in 4 warps of 32
    _rope_and_write_kv_kernel[(T, triton.cdiv(H, HEADS))](
        q, k, v, cos.contiguous(), sin.contiguous(), k_cache, v_cache, slot_mapping.contiguous(), q_out,
        *q.stride(), *k.stride(), *k_cache.stride(), H, Hkv,
        BLOCK_SIZE=k_cache.shape[1], HALF=d // 2, HEADS=HEADS, BLOCK_HALF=BLOCK_HALF)
    return q_out


# -- 3. SwiGLU's element-wise half ------------------------------------------------------------------------------------

def silu_and_mul(gate_up):
    """silu(gate) * up.  gate_up [T, 2I], gate first  →  [T, I].
    vLLM: model_executor/layers/activation.py:118 SiluAndMul."""
    gate, up = gate_up.chunk(2, dim=-1)                                                  # [T, I] each
    return F.silu(gate).mul_(up)                                                         # [T, I]


@jit
def _silu_and_mul_kernel(gate_up, out, I, BLOCK: tl.constexpr):
    """A program owns BLOCK columns of one row: two tiles in, one out."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)                                   # [BLOCK]
    gate = tl.load(gate_up + row * 2 * I + i, mask=i < I, other=0.0)                     # [BLOCK]
    up = tl.load(gate_up + row * 2 * I + I + i, mask=i < I, other=0.0)                   # [BLOCK]
    gate32 = gate.to(tl.float32)
    tl.store(out + row * I + i, (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype) * up, mask=i < I)


def silu_and_mul_triton(gate_up):
    """`silu_and_mul` as one kernel."""
    gate_up = gate_up.contiguous()
    T, I, BLOCK = len(gate_up), gate_up.shape[1] // 2, 1024
    out = gate_up.new_empty(T, I)                                                        # [T, I]
    _silu_and_mul_kernel[(T, triton.cdiv(I, BLOCK))](gate_up, out, I, BLOCK=BLOCK)
    return out


# -- 4. Attention over the paged cache --------------------------------------------------------------------------------

class RowTile(NamedTuple):
    """m query rows of each of a Gather's n sequences. Every row sees the keys 0 … clear-1, and of clear … n_keys-1 what
    `mask` leaves."""
    rows: slice | torch.Tensor       # which rows of q, n * m of them
    m: int
    n_keys: int
    clear: int
    mask: torch.Tensor | None        # 0 or -inf; [n, 1, 1, 1, n_keys - clear] of decodes, [m, 1, m] of a chunk; or None


class Gather(NamedTuple):
    """n sequences with L keys each, and the rows that see them: n decodes, or (n = 1) one decode or one chunk."""
    n: int
    index: torch.Tensor              # [n * Hkv * L], rows of the pool seen as [N * bs * Hkv, d]: slot * Hkv + head
    bags: torch.Tensor | None        # [n * H, L] int32, the same rows once for each query head; None where n is 1
    # Memory for what is gathered: a fresh tensor in each layer would cost a page fault for every 4 KiB of it.
    k: torch.Tensor                  # [n * Hkv * L, d]
    v: torch.Tensor | None           # the same; None where n > 1: there `bags` tell where the values lie
    scores: torch.Tensor             # of the largest tile, [n * H * m * n_keys]
    tiles: list[RowTile]


SCORE_BYTES = 4 << 20                # of a chunk's tile: larger ones no longer stay in a CPU's caches
GATHER_BYTES = 64 << 20              # of the keys of several decodes


def paged_attention(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale, plan=None):
    """Causal attention of a ragged batch: sequence s owns query rows query_start_loc[s] : query_start_loc[s+1], which
    are the *last* positions of its seq_lens[s] tokens; its keys lie in the blocks of block_tables[s]. S, T >= 1, and
    every sequence has at least one row.

    q [T, H, d], caches [N, bs, Hkv, d], query_start_loc [S+1], seq_lens [S], block_tables [S, B], scale a float;
    plan: `gather_plan` of this batch, the same for all layers, so the caller makes it once  →  [T, H, d], q's dtype.
    Rows of a sequence of length 0 (padding) come out as zeros. Scores have the cache's dtype, as in transformers' eager
    attention, or fp32 for a row alone (the fused call's way); the kernels, which keep them in registers, have fp32.
    """
    (T, H, d), Hkv = q.shape, k_cache.shape[2]
    if plan is None:
        plan = gather_plan(query_start_loc, seq_lens, block_tables, k_cache, H)
    keys, values = k_cache.view(-1, d), v_cache.view(-1, d)                              # [N*bs*Hkv, d]
    out = q.new_zeros(T, H, d)
    for n, index, bags, k, v, room, tiles in plan:
        k = torch.index_select(keys, 0, index, out=k).view(n * Hkv, -1, d)               # [n*Hkv, L, d]
        if bags is None:
            v = torch.index_select(values, 0, index, out=v).view(n * Hkv, -1, d)         # [n*Hkv, L, d]
        for rows, m, n_keys, clear, mask in tiles:
            # The G = H / Hkv query heads that share a KV head (GQA) are rows of it: each key is read once for all G.
            x = (q[rows] * scale).to(k.dtype).view(n, m, Hkv, H // Hkv, d)               # [n, m, Hkv, G, d]
            x = x.transpose(1, 2).reshape(n * Hkv, -1, d)                                # [n*Hkv, m*G, d]
            if n * m == 1:          # nothing is hidden from a row alone, and for so little one fused call is faster
                x = F.scaled_dot_product_attention(x[None], k[None, :, :n_keys], v[None, :, :n_keys], scale=1.0)
            else:                   # one piece of memory in turn for the scores, the masked ones and their softmax
                scores = room[:n * H * m * n_keys].view(n * Hkv, -1, n_keys)             # [n*Hkv, m*G, n_keys]
                torch.bmm(x, k[:, :n_keys].transpose(1, 2), out=scores)
                if mask is not None:
                    scores.view(n, Hkv, m, -1, n_keys)[..., clear:] += mask             # [n, Hkv, m, G, n_keys-clear]
                p = torch.softmax(scores, -1, out=scores)                                # [n*Hkv, m*G, n_keys]
                if bags is None:
                    x = torch.bmm(p, v[:, :n_keys])                                      # [n*Hkv, m*G, d]
                else:               # sums of a table's rows by weight, read where they lie: v need not be gathered
                    x = F.embedding_bag(bags, values, per_sample_weights=p.view(bags.shape), mode="sum")    # [n*H, d]
            out[rows] = x.view(n, Hkv, m, -1, d).transpose(1, 2).reshape(-1, H, d).to(q.dtype)           # [n*m, H, d]
    return out


def gather_plan(query_start_loc, seq_lens, block_tables, k_cache, num_heads, waste=0.25, slack=1500, tile_rows=128):
    """Which query rows meet which keys, in few and large products: a list of Gather, the same for all layers.
    k_cache: any layer's, for its sizes and dtype.

    A prefill chunk is gathered by itself and cut into tiles of `tile_rows` rows, or down to 16 if their scores would
    outgrow SCORE_BYTES: a tile leaves out the keys behind its last row, and only its own triangle needs a mask.
    Decodes are sorted by length and padded to the longest of their gather. It takes the next one as long as the padding
    is then at most `slack` keys, or at most the share `waste` of the keys it has: few products for short sequences,
    little padding for long ones. Chunks come first in the plan.
    Example (block size 4, one KV head; A decodes its 10th token from blocks 3 5 1, B prefills 3 tokens into block 2):
        index 8 9 10                        a tile: rows 1:4, m 3, n_keys 3, clear 0, mask 3 x 3
        index 12 13 14 15 20 21 22 23 4 5   a tile: rows 0:1, m 1, n_keys 10, clear 10, mask None
    Padding points at a slot that its sequence does own. A masked key gets weight 0, but 0 * NaN is NaN: masking the
    score alone would let the garbage of a stale slot through, so a stale slot is not even read.
    """
    device, (_, block_size, Hkv, d), dtype = block_tables.device, k_cache.shape, k_cache.dtype
    heads, plan, decodes = torch.arange(Hkv, device=device)[:, None], [], []             # [Hkv, 1]
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()

    def add(block_tables, positions, tiles):
        """block_tables [n, B] and positions [n, L] of n sequences, and the tiles of their rows."""
        n = len(block_tables)
        index = (slots_of(block_tables, positions, block_size)[:, None] * Hkv + heads).flatten()     # [n * Hkv * L]
        k = k_cache.new_empty(len(index), d)
        scores = k_cache.new_empty(n * num_heads * max(tile.m * tile.n_keys for tile in tiles))
        bags = v = None
        if n == 1:
            v = torch.empty_like(k)
        else:
            bags = index.view(n, Hkv, 1, -1).expand(-1, -1, num_heads // Hkv, -1).reshape(n * num_heads, -1).int()
        plan.append(Gather(n, index, bags, k, v, scores, tiles))

    for s, L in enumerate(lens):
        start, q_len = starts[s], starts[s + 1] - starts[s]
        if q_len == 1 and L > 0:
            decodes.append((L, s))
        elif L > 0:
            most = min(tile_rows, q_len, max(SCORE_BYTES // (num_heads * L * dtype.itemsize), 16))
            triangle = torch.full((most, most), -torch.inf, dtype=dtype, device=device).triu_(1)
            tiles = []
            for a in range(0, q_len, most):
                m, clear = min(most, q_len - a), L - q_len + a     # rows, and the position of the first of them
                tiles.append(RowTile(slice(start + a, start + a + m), m, clear + m, clear, triangle[:m, None, :m]))
            add(block_tables[s:s + 1], torch.arange(L, device=device)[None], tiles)
    decodes.sort()
    while decodes:
        shortest, n, keys = decodes[0][0], 1, decodes[0][0]        # `keys` of the n sequences, without padding
        for L, _ in decodes[1:]:
            padding = L * n - keys                                 # if this one comes in, the others are padded to L
            if padding > max(waste * keys, slack) or L * (n + 1) * Hkv * d * dtype.itemsize > GATHER_BYTES:
                break
            n, keys = n + 1, keys + L
        bucket, L, decodes = sorted((s, length) for length, s in decodes[:n]), decodes[n - 1][0], decodes[n:]
        # In the batch's order again: if they are neighbours there, their rows are one slice.
        ids = torch.tensor([s for s, _ in bucket], device=device)                        # [n]
        lengths = torch.tensor([length for _, length in bucket], device=device)[:, None]    # [n, 1]
        positions, mask = torch.arange(L, device=device)[None], None                     # [1, L]
        if shortest < L:
            mask = torch.zeros(n, L - shortest, dtype=dtype, device=device)
            mask = mask.masked_fill_(positions[:, shortest:] >= lengths, -torch.inf)[:, None, None, None]
        a, b = starts[bucket[0][0]], starts[bucket[-1][0]] + 1
        rows = slice(a, b) if b - a == n else query_start_loc[ids].long()
        # Beyond its own last key a sequence repeats that key's position; the mask removes the repeats.
        add(block_tables[ids], torch.minimum(positions, lengths - 1), [RowTile(rows, 1, L, shortest, mask)])
    return plan


def slots_of(block_tables, positions, block_size):
    """Position p lives in block p // block_size of its table, at offset p % block_size.

    block_tables [n, B], positions [n, L]  →  slots [n, L] int64.
    Example: block_size 4, table [7, 2], 6 tokens  →  slots 28 29 30 31 | 8 9.
    """
    blocks = block_tables.long().gather(1, positions // block_size)                      # [n, L]
    return blocks * block_size + positions % block_size                                               # [n, L]


# The same on a GPU. First a rung below: one head of one sequence, K and V dense, every row sees every key.
# The *online softmax* walks the keys tile by tile and carries for each row m_i, its largest score so far, l_i, the sum
# of exp(score - m_i), and acc, the sum of exp(score - m_i) * v. When a tile brings a larger m_i, the old l_i and acc
# are scaled by exp(old - new); at the end acc / l_i is the attention. The scores [queries, keys] never reach memory.
# A GPU has an instruction for exp2, not exp. So scores, and m_i, are in *log2 units*: times log2 e beforehand.

LOG2_E = 1.4426950408889634


def dense_attention(q, k, v, scale):
    """q [M, d], k and v [L, d]  →  [M, d]."""
    return torch.softmax(q @ k.T * scale, dim=-1) @ v                                    # [M, L] @ [L, d]


@jit
def _dense_attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, scale, M, L, D: tl.constexpr, BLOCK_M: tl.constexpr,
                            TILE: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]                   # [BLOCK_M, 1]
    dims = tl.arange(0, D)[None, :]                                                      # [1, D]
    q = tl.load(q_ptr + rows * D + dims, mask=rows < M, other=0.0)                       # [BLOCK_M, D]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, L, TILE):
        keys = start + tl.arange(0, TILE)                                                # [TILE]
        at = keys[:, None] * D + dims                                                    # [TILE, D]
        k = tl.load(k_ptr + at, mask=keys[:, None] < L, other=0.0)                       # [TILE, D]
        v = tl.load(v_ptr + at, mask=keys[:, None] < L, other=0.0)                       # [TILE, D]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale                  # [BLOCK_M, TILE], log2 units
        scores = tl.where(keys[None, :] < L, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))                                  # [BLOCK_M]
        p, old = tl.exp2(scores - m_new[:, None]), tl.exp2(m_i - m_new)                  # [BLOCK_M, TILE], [BLOCK_M]
        l_i = l_i * old + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        m_i = m_new
    tl.store(out_ptr + rows * D + dims, (acc / l_i[:, None]).to(q.dtype), mask=rows < M)


def dense_attention_triton(q, k, v, scale):
    """`dense_attention` of contiguous tensors, d a power of two, at least 16."""
    (M, d), out = q.shape, q.new_empty(q.shape)
    _dense_attention_kernel[(triton.cdiv(M, 16),)](q, k, v, out, scale * LOG2_E, M, len(k), D=d, BLOCK_M=16, TILE=32)
    return out


# Now paged and ragged. A program owns a *tile of rows*: BLOCK_Q consecutive queries of one sequence times the G query
# heads of one KV head, row r being query r // G and head r % G. So each key that it reads serves all G heads.
#
#   decode launch   grid (programs, Hkv)   a tile is one query: G rows of the 16 that tl.dot multiplies at least. Its
#                                          keys are cut into splits, and as many programs as the card holds stride over
#                                          the splits of all sequences: a long one among short ones is shared out
#   chunk launch    grid (tiles, Hkv)      a tile is up to 128 rows of a chunk; one program walks all their keys
#   merge launch    grid (S, H)            adds up the splits of each decode
#
# What a row sums, and in which order, follows from its position and its sequence's length alone, and a masked key adds
# an exact 0. That is why a sequence gets the same bits alone and in company.

# A split has 64 keys, and more of them (in steps of 32) only where there would be over 128 splits. So of 132
# multiprocessors eight sequences with one KV head (70B at TP 8) busy all from 1,025 keys on, one 86 from 5,441 on.
SPLIT_STEP, MAX_SPLITS = 32, 128
# A split leaves d + 2 fp32 numbers a head; SCRATCH has room for 256 sequences of 8 heads of 128: 130 MiB. A batch that
# needs more takes several passes, also one of more than SEQUENCES: so many does a program look at to find its work.
SEQUENCES, SCRATCH = 256, 256 * MAX_SPLITS * 8 * (128 + 2)

# (rows, keys, warps, stages), the first that fits: while a tile of keys is in use, stages - 2 are on their way. Prefill
# wants a large tile, for each key then serves more rows. A decode waits for memory alone: three programs take turns.
CHUNK_TILES = ((128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 8, 3), (64, 32, 8, 3), (64, 32, 8, 2),
               (32, 32, 4, 3), (32, 32, 4, 2), (16, 16, 4, 2))
DECODE_TILES = ((16, 32, 4, 4), (16, 32, 4, 3), (16, 16, 4, 3), (16, 16, 4, 2))
FP32_TILES = ((16, 16, 4, 3), (16, 16, 4, 2))          # exact fp32 is not for the tensor cores; larger ones spill


def tile_bytes(rows, keys, stages, BLOCK_D, itemsize):
    """Shared memory of a program on an NVIDIA card, at most.
    Example: (128, 128, 8, 3) in bf16 at d = 128: q 32 KiB, K and V 3 * (32 + 32) KiB: 224 of an H100's 227.
    The third K and V are Hopper's: from 64 rows on its tensor cores read shared memory themselves and let go of a tile
    one step later. With fewer rows, up to 2 KiB are what the warps tell each other for the softmax."""
    return itemsize * BLOCK_D * (rows + 2 * (stages - 1 + (rows >= 64)) * keys) + 2048 * (rows < 64)


@functools.lru_cache(maxsize=None)
def choose_tile(decode, d, G, itemsize, card):
    """The first tile of which 3 programs (decodes; 2 beyond d = 128, for their registers) fit on a multiprocessor, or 1
    →  (rows, keys, warps, stages), programs. ValueError where none does: now, not as a launch that fails elsewhere.
    vLLM: v1/attention/ops/triton_unified_attention.py:784 _get_tile_size."""
    (_, shared, shared_sm), BLOCK_D = card, max(triton.next_power_of_2(d), 16)
    for programs in (3 if BLOCK_D <= 128 else 2, 1) if decode else (1,):
        for tile in FP32_TILES if itemsize == 4 else DECODE_TILES if decode else CHUNK_TILES:
            rows, (keys, warps, stages) = max(tile[0], triton.next_power_of_2(G)), tile[1:]
            need, floats = tile_bytes(rows, keys, stages, BLOCK_D, itemsize), rows * (BLOCK_D + keys) // (32 * warps)
            # 1 KiB of a multiprocessor goes with each program. acc and scores may fill half a thread's 255 registers.
            if need <= min(shared, shared_sm // programs - 1024) and (floats <= 128 or tile[0] == 16):
                return (rows, keys, warps, stages), programs
    raise ValueError(f"no attention tile for head size {d}, {G} query heads a KV head and {itemsize}-byte elements fits"
                     f" into {shared} bytes of shared memory; --attention-backend torch can run it")


@functools.lru_cache(maxsize=None)
def card_of(device):
    """(multiprocessors, bytes of shared memory a program may take, bytes a multiprocessor has for all of its programs).
    For the interpreter: so few multiprocessors that programs must stride."""
    if device.type == "cpu":
        return 2, 227 << 10, 228 << 10
    card = torch.cuda.get_device_properties(device)
    shared = getattr(card, "shared_memory_per_block_optin", 0) or card.shared_memory_per_block
    return card.multi_processor_count, shared, getattr(card, "shared_memory_per_multiprocessor", shared + 1024)


@jit
def _load_blocks(table_ptr, start, last, bt_b, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of each of TILE keys, [TILE], or where all lie in one block, that block, a scalar."""
    position = start
    if BLOCK_SIZE % TILE != 0:
        position += tl.arange(0, TILE)
    return tl.load(table_ptr + position // BLOCK_SIZE * bt_b, mask=position < last, other=0)


@jit
def _attend(q, k_ptr, v_ptr, table_ptr, row_position, first, clear, end, scale, c_b, c_s, c_d, bt_b,
            BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The online softmax over keys first … end-1, for q [M, BLOCK_D]  →  m_i, l_i [M], acc [M, BLOCK_D]. In two loops:
    the keys before `clear` are whole tiles and visible to every row; from there on each row has its own edge.
    In registers: acc [M, BLOCK_D] and the scores [M, TILE], fp32. For 128 rows, d = 128 and 128 keys that is 128 KiB,
    for each thread of 8 warps 64 + 64 registers of its 255. K and V pass through shared memory."""
    dims = tl.arange(0, BLOCK_D)[None, :]                                                # [1, BLOCK_D]
    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        begin, last = (clear, end) if MASKED else (first, clear)
        # A key's address needs its block number, itself a load. It is fetched one tile ahead of the copies of K and V,
        # or those could not be under way while the tile before them is in use.
        block_next = _load_blocks(table_ptr, begin, last, bt_b, BLOCK_SIZE, TILE)        # [TILE] or a scalar
        for start in range(begin, last, TILE):
            block, block_next = block_next, _load_blocks(table_ptr, start + TILE, last, bt_b, BLOCK_SIZE, TILE)
            position = start + tl.arange(0, TILE)                                        # [TILE]
            slot = block.to(tl.int64) * c_b + position % BLOCK_SIZE * c_s                # [TILE]
            mask = dims < D
            if MASKED:   # a slot past the end holds what its last owner left, NaN maybe, and 0 * NaN is NaN: not read
                mask = mask & (position < last)[:, None]                                 # [TILE, BLOCK_D]
            k = tl.load(k_ptr + slot[:, None] + dims * c_d, mask=mask, other=0.0)        # [TILE, BLOCK_D]
            v = tl.load(v_ptr + slot[:, None] + dims * c_d, mask=mask, other=0.0)        # [TILE, BLOCK_D]
            # "ieee": fp32 products in fp32. The default on NVIDIA cards, TF32, keeps 10 bits of each fraction.
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")                      # [M, TILE] fp32
            if MASKED:
                visible = (position < last)[None, :] & (position[None, :] <= row_position[:, None])
                scores = tl.where(visible, scores, float("-inf"))                        # [M, TILE]
            m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale)                      # [M]
            # A row that has seen no key is still at -inf, and -inf - -inf is NaN. Less 0 instead: exp2(-inf) is 0.
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)                         # [M]
            p = tl.exp2(scores * scale - shift[:, None])         # [M, TILE]; scaled here: one multiply-add a score
            old = tl.exp2(m_i - shift)                                                   # [M]
            l_i = l_i * old + tl.sum(p, axis=1)
            acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
            m_i = m_new
    return m_i, l_i, acc


@jit
def _split_keys(seq_len, STEP: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """How many keys a split of a sequence has: from its length alone, whatever else runs."""
    return tl.maximum(tl.cdiv(seq_len, STEP * MAX_SPLITS), 2) * STEP


# Triton compiles a kernel anew where an argument becomes 1 or divisible by 16, to make use of it: a pause of a second
# while serving. Not so for the arguments that change from step to step.
@functools.partial(jit, do_not_specialize=("S", "most_splits", "bt_s"))
def _paged_attention_kernel(q_ptr, k_ptr, v_ptr, query_start_loc, seq_lens, block_tables, out_ptr, part_ptr, scale,
                            S, H, most_splits, q_t, q_h, q_d, c_b, c_s, c_h, c_d, bt_s, bt_b, DECODE: tl.constexpr,
                            STEP: tl.constexpr, MAX_SPLITS: tl.constexpr, SEQUENCES: tl.constexpr,
                            BLOCK_SIZE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                            BLOCK_M: tl.constexpr, TILE: tl.constexpr):
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // G
    kv_head, i = tl.program_id(1), tl.arange(0, SEQUENCES)                               # scalar, [SEQUENCES]
    # 1) What is there to do?  The splits of all decodes in a row, or the tiles of all chunks; the others have none.
    #    Example: decodes of 130, 0 and 64 keys in splits of 64: 3 + 1 + 1 pieces, ends 3 4 5, and piece 4 is s = 2's
    #    first. (A length of 0 is padding; it has a split all the same, which stores zeros.)
    lens = tl.load(seq_lens + i, mask=i < S, other=0).to(tl.int32)                       # [SEQUENCES] each
    rows = tl.load(query_start_loc + i + 1, mask=i < S, other=0) - tl.load(query_start_loc + i, mask=i < S, other=0)
    if DECODE:
        pieces = tl.where(rows == 1, tl.maximum(tl.cdiv(lens, _split_keys(lens, STEP, MAX_SPLITS)), 1), 0)
    else:
        pieces = tl.where(rows > 1, tl.cdiv(rows, BLOCK_Q), 0)
    ends, total = tl.cumsum(pieces), tl.sum(pieces)                                      # [SEQUENCES], scalar
    r, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]                      # [BLOCK_M], [1, BLOCK_D]
    for turn in range(tl.program_id(0), total, tl.num_programs(0)):
        piece = total - 1 - turn                       # late tiles of a chunk have the most keys to walk: they go first
        s = tl.sum((ends <= piece).to(tl.int32))
        piece -= tl.sum(tl.where(i < s, pieces, 0))    # now counted within its sequence

        # 2) Its rows. Rows to spare are computed like the others, with q = 0, and not stored.
        row0 = tl.load(query_start_loc + s).to(tl.int64)
        q_len = (tl.load(query_start_loc + s + 1) - row0).to(tl.int32)
        seq_len = tl.load(seq_lens + s).to(tl.int32)
        first_query = 0 if DECODE else piece * BLOCK_Q
        query, head = first_query + r // G, kv_head * G + r % G                          # [BLOCK_M] each
        real = (r < BLOCK_Q * G) & (query < q_len)                                       # [BLOCK_M]
        mask = real[:, None] & (dims < D)                                                # [BLOCK_M, BLOCK_D]
        q = tl.load(q_ptr + ((row0 + query) * q_t + head * q_h)[:, None] + dims * q_d, mask=mask, other=0.0)

        # 3) Its keys: before `clear` all rows see all of them. The queries are the sequence's last q_len positions.
        keys = _split_keys(seq_len, STEP, MAX_SPLITS)
        if DECODE:
            first, end = piece * keys, tl.minimum(seq_len, (piece + 1) * keys)
            clear = first + (end - first) // TILE * TILE
        else:
            first, end = 0, tl.minimum(seq_len, seq_len - q_len + first_query + BLOCK_Q)
            clear = tl.maximum(seq_len - q_len + first_query + 1, 0) // TILE * TILE
        m_i, l_i, acc = _attend(q.to(k_ptr.dtype.element_ty), k_ptr + kv_head.to(tl.int64) * c_h,
                                v_ptr + kv_head.to(tl.int64) * c_h, block_tables + s.to(tl.int64) * bt_s,
                                seq_len - q_len + query, first, clear, end, scale, c_b, c_s, c_d, bt_b,
                                BLOCK_SIZE, TILE, D, BLOCK_M, BLOCK_D)

        # 4) The result, or this split's share of it.
        if DECODE and seq_len > keys:
            at = part_ptr + ((s.to(tl.int64) * H + head) * most_splits + piece) * (D + 2)    # [BLOCK_M]
            tl.store(at[:, None] + dims, acc, mask=mask)
            tl.store(at + D, m_i, mask=real)
            tl.store(at + D + 1, l_i, mask=real)
        else:
            acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]                          # a row without keys: 0 / 1
            tl.store(out_ptr + ((row0 + query) * H + head)[:, None] * D + dims, acc.to(out_ptr.dtype.element_ty), mask)


@functools.partial(jit, do_not_specialize=("most_splits",))
def _merge_kernel(query_start_loc, seq_lens, out_ptr, part_ptr, H, most_splits, STEP: tl.constexpr,
                  MAX_SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """A program owns one head of one decode and adds up its splits, WIDTH at a time: the online softmax once more, with
    a split where a key was. Nothing is lost by splitting: m_i, l_i and acc are all that the keys left behind.
    vLLM: v1/attention/ops/triton_unified_attention.py:685 reduce_segments"""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(query_start_loc + s).to(tl.int64)
    seq_len = tl.load(seq_lens + s).to(tl.int32)
    splits = tl.cdiv(seq_len, _split_keys(seq_len, STEP, MAX_SPLITS))
    if tl.load(query_start_loc + s + 1) - row != 1 or splits <= 1:
        return
    dims = tl.arange(0, BLOCK_D)                                                         # [BLOCK_D]
    m_i, l_i, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)                  # scalars, [BLOCK_D]
    for first in range(0, splits, WIDTH):
        i = first + tl.arange(0, WIDTH)                                                  # [WIDTH]
        at = part_ptr + ((s * H + head) * most_splits + i) * (D + 2)                     # [WIDTH]
        mask = (i < splits)[:, None] & (dims < D)[None, :]                               # [WIDTH, BLOCK_D]
        share = tl.load(at[:, None] + dims[None, :], mask=mask, other=0.0)               # [WIDTH, BLOCK_D]
        part_m = tl.load(at + D, mask=i < splits, other=float("-inf"))                   # [WIDTH]
        part_l = tl.load(at + D + 1, mask=i < splits, other=0.0)                         # [WIDTH]
        m_new = tl.maximum(m_i, tl.max(part_m, axis=0))
        weight, old = tl.exp2(part_m - m_new), tl.exp2(m_i - m_new)                      # [WIDTH], scalar
        l_i = l_i * old + tl.sum(weight * part_l, axis=0)
        acc = acc * old + tl.sum(weight[:, None] * share, axis=0)                        # [BLOCK_D]
        m_i = m_new
    tl.store(out_ptr + (row * H + head) * D + dims, (acc / l_i).to(out_ptr.dtype.element_ty), mask=dims < D)


def paged_attention_triton(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale, plan=None,
                           scratch=None):
    """`paged_attention`, scale > 0; rows that no sequence owns are left unwritten. Nothing waits for the GPU: the grids
    are upper bounds, made of shapes alone (so a CUDA graph can hold them), and a program with nothing to do returns.
    scratch: SCRATCH fp32 numbers that all calls share, or None: made for this call. `plan` is the twin's and unused."""
    (T, H, d), S, (_, block_size, Hkv, _) = q.shape, len(seq_lens), k_cache.shape
    assert k_cache.stride() == v_cache.stride(), "K and V are laid out alike"
    G, BLOCK_D, card = H // Hkv, max(triton.next_power_of_2(d), 16), card_of(q.device)
    query_start_loc, seq_lens, out = query_start_loc.contiguous(), seq_lens.contiguous(), q.new_empty(T, H, d)
    most_splits = max(min(triton.cdiv(block_tables.shape[1] * block_size, 2 * SPLIT_STEP), MAX_SPLITS), 1)
    a_pass = min(SCRATCH // (H * most_splits * (d + 2)), SEQUENCES) // 4 * 4     # slices of int32: aligned to 16 bytes
    sizes = dict(STEP=SPLIT_STEP, MAX_SPLITS=MAX_SPLITS, D=d, BLOCK_D=BLOCK_D)
    for first in range(0, S, a_pass):
        starts, lens, tables = query_start_loc[first:], seq_lens[first:first + a_pass], block_tables[first:]
        n = len(lens)
        parts = scratch if scratch is not None else out.new_empty(n * H * most_splits * (d + 2), dtype=torch.float32)
        for decode in (True, False)[:1 + (T != S)]:    # every sequence has a row at least: T = S says, decodes only
            (BLOCK_M, TILE, warps, stages), programs = choose_tile(decode, d, G, k_cache.element_size(), card)
            pieces = min(n * most_splits, -(-card[0] * programs // Hkv)) if decode else T // (BLOCK_M // G) + n
            _paged_attention_kernel[pieces, Hkv](
                q, k_cache, v_cache, starts, lens, tables, out, parts, scale * LOG2_E, n, H, most_splits, *q.stride(),
                *k_cache.stride(), *tables.stride(), DECODE=decode, SEQUENCES=SEQUENCES, BLOCK_SIZE=block_size, G=G,
                BLOCK_M=BLOCK_M, TILE=TILE, num_warps=warps, num_stages=stages, **sizes)
        if most_splits > 1:
            _merge_kernel[n, H](starts, lens, out, parts, H, most_splits, WIDTH=32, **sizes)
    return out


# -- 5. Which implementation runs -------------------------------------------------------------------------------------

TORCH = SimpleNamespace(rms_norm=rms_norm, rope_and_write_kv=rope_and_write_kv, silu_and_mul=silu_and_mul,
                        paged_attention=paged_attention, plan=gather_plan, name="torch")
TRITON = SimpleNamespace(rms_norm=rms_norm_triton, rope_and_write_kv=rope_and_write_kv_triton,
                         silu_and_mul=silu_and_mul_triton, paged_attention=paged_attention_triton,
                         plan=lambda *batch: None, name="triton")


def select_backend(name, device):
    """`--attention-backend`: "torch" the twins, "triton" the kernels, "auto" the kernels on a GPU (CUDA, ROCm) and the
    twins elsewhere  →  a namespace of the four operations and `plan`. ValueError for what can't run: "triton" on a
    CPU is for tests alone, and needs TRITON_INTERPRET=1 to be set before this module is imported.
    vLLM: v1/attention/selector.py:101 get_attn_backend, which has a dozen to choose from.
    """
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f"attention backend {name!r} is unknown; --attention-backend takes auto, torch or triton")
    on_gpu = torch.device(device).type == "cuda"       # what PyTorch calls a ROCm device, too
    if name == "torch" or name == "auto" and not (on_gpu and triton):
        return TORCH
    if triton is None:
        raise ValueError("--attention-backend triton: Triton is not installed (pip install triton; Linux only)")
    if not on_gpu and isinstance(_rms_norm_kernel, triton.JITFunction):
        raise ValueError(f"--attention-backend triton: no kernel runs on device {str(device)!r}; take auto or "
                         "torch, or set TRITON_INTERPRET=1 to have the kernels interpreted, slowly")
    # The memory for splits is made once, with the model and so before the KV pool takes what is left of the card.
    scratch = torch.empty(SCRATCH, device=device)
    attention = functools.partial(paged_attention_triton, scratch=scratch)
    return SimpleNamespace(**vars(TRITON) | {"paged_attention": attention})
