"""How it is computed (chapter 6): every operation of the forward pass that is not a matrix product.

Mirrors   vLLM: v1/attention/ops/triton_unified_attention.py:802 unified_attention
          vLLM: v1/attention/ops/triton_reshape_and_cache_flash.py:363 triton_reshape_and_cache_flash
          vLLM: model_executor/layers/layernorm.py:37 RMSNorm, model_executor/layers/activation.py:118 SiluAndMul
Promises  every operation stands twice: its *twin*, plain PyTorch, the specification, with nothing in it for speed;
          under it the Triton kernel, same arguments, same results. (A third time, for CPUs, in cpu_kernels.c.) All are
          exact for any mix of prefill chunks and decodes and read no KV slot beyond a sequence's length; the kernels
          give a sequence the same bits alone and in company.
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
import sys
from types import SimpleNamespace

if __name__ == "__main__":     # up here: the demo wants the kernels interpreted, and @jit asks as it decorates
    bench = pathlib.Path(__file__).resolve().parent / "chapters/tools/bench_kernels.py"
    runpy.run_path(str(bench), run_name="__main__")
    raise SystemExit

import torch
import torch.nn.functional as F

import cpu_kernels

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
    real = slot_mapping >= 0                                                             # [T]
    slots, bs = slot_mapping[real], k_cache.shape[1]
    k_cache[slots // bs, slots % bs] = k[real].to(k_cache.dtype)                         # [Hkv, d] at each slot
    v_cache[slots // bs, slots % bs] = v[real].to(v_cache.dtype)
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

def paged_attention(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale):
    """Causal attention of a ragged batch: sequence s owns query rows query_start_loc[s] : query_start_loc[s+1], which
    are the *last* positions of its seq_lens[s] tokens; its keys lie in the blocks of block_tables[s]. S, T >= 1, and
    every sequence has at least one row.

    q [T, H, d], caches [N, bs, Hkv, d], query_start_loc [S+1], seq_lens [S], block_tables [S, B], scale a float
    →  [T, H, d], q's dtype. Rows of a sequence of length 0 (padding) come out as zeros. All arithmetic is fp32.
    """
    bs, Hkv = k_cache.shape[1:3]
    out, starts = torch.zeros_like(q), query_start_loc.tolist()                          # [T, H, d]
    for s, L in enumerate(seq_lens.tolist()):
        if L == 0:
            continue
        # Position p lives in block p // bs of the table, at offset p % bs. Example: bs 4, table [7, 2], 6 tokens:
        # blocks 7 7 7 7 2 2, offsets 0 1 2 3 0 1. No other slot is read: it may hold a NaN, and 0 * NaN is NaN.
        p = torch.arange(L, device=q.device)                                             # [L]
        where = block_tables[s, p // bs].long(), p % bs                                  # [L] twice
        k, v = k_cache[where].float(), v_cache[where].float()                            # [L, Hkv, d] each
        # This step's own K and V are already there: every layer writes before it attends. So L counts this step's
        # tokens, but not the one that it is about to sample. G = H / Hkv query heads share a KV head (GQA).
        rows = slice(starts[s], starts[s + 1])
        x = q[rows].float().unflatten(1, (Hkv, -1))                                      # [m, Hkv, G, d]
        scores = torch.einsum("mhgd,lhd->hgml", x, k) * scale                            # [Hkv, G, m, L]
        later = p > p[L - len(x):, None]         # a query, the m last positions, sees no key of a later one      [m, L]
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), -1)               # [Hkv, G, m, L]
        out[rows] = torch.einsum("hgml,lhd->mhgd", weights, v).flatten(1, 2).to(q.dtype)                 # [m, H, d]
    return out


# The same on a GPU.  One program owns a *tile of rows*: BLOCK_Q consecutive queries of one sequence times the G query
# heads of one KV head, row r being query r // G and head r % G. So each key that it reads serves all G heads.
#
#   decode launch   grid (S, Hkv, splits)     a tile is one query; its keys are shared out in splits of SPLIT keys
#   merge launch    grid (S, H)               adds up the splits of a long decode
#   chunk launch    grid (tiles, Hkv)         a tile is up to 128 rows of a chunk; one program walks all their keys
#
# A program walks its keys tile by tile with the *online softmax*: for each row it carries the largest score so far, m,
# the sum l of exp(score - m), and acc, the sum of exp(score - m) * v. When a tile brings a larger m, the old l and acc
# are scaled by exp(m_old - m_new); at the end acc / l is the attention. The scores [queries, keys] never reach memory.
# What a row sums, and in which order, follows from its own position: tiles and splits have a fixed size (not a fixed
# number), and a masked key adds an exact 0. That is why a sequence gets the same bits alone and in company.

SPLIT = 512                        # keys a program of the decode launch walks; a split leaves d + 2 floats a head
LOG2_E = 1.4426950408889634        # exp(x) = exp2(x * log2 e), and exp2 is one instruction of a GPU

# (rows, keys, warps, stages), the first that fits. Of `stages` Triton makes a pipeline: while a tile of keys is in use,
# later ones are on their way. A key's address needs its block number, itself a load, so a tile takes two stages: 3 have
# one tile of K and V under way, 5 have two. Decodes wait for memory alone and want more of it under way.
CHUNK_TILES = ((128, 64, 8, 3), (64, 32, 8, 3), (32, 32, 4, 3), (16, 16, 4, 3))
DECODE_TILES = ((16, 64, 4, 5), (16, 32, 4, 5), (16, 16, 4, 3))
FP32_TILES = ((16, 16, 4, 3),)     # exact fp32 products are not for the tensor cores, and larger ones spill registers


def tile_bytes(rows, keys, stages, BLOCK_D, itemsize):
    """Shared memory of a program on an NVIDIA card, at most.
    Example: (128, 64, 8, 3) in bf16 at d = 128: q 32 KiB, K and V 2 * (16 + 16) KiB, and 3 KiB: 99 KiB.
    The second K and V are Hopper's: from 64 rows on its tensor cores read shared memory themselves and let go of a tile
    one step later. The last 3 KiB are block numbers, and what the warps tell each other for the softmax."""
    tiles = (stages - 1) // 2 + (rows >= 64)
    return itemsize * BLOCK_D * (rows + 2 * tiles * keys) + 3 * 1024


@functools.lru_cache(maxsize=None)
def choose_tile(tiles, d, G, itemsize, shared_memory):
    """The first of `tiles` that fits into `shared_memory` bytes, for head size d and G query heads a KV head
    →  (rows, keys, warps, stages). ValueError where none does: at the first call, not as a launch that fails elsewhere.
    vLLM: v1/attention/ops/triton_unified_attention.py:784 _get_tile_size."""
    for rows, keys, warps, stages in FP32_TILES if itemsize == 4 else tiles:
        rows = max(rows, triton.next_power_of_2(G))
        if tile_bytes(rows, keys, stages, max(triton.next_power_of_2(d), 16), itemsize) <= shared_memory:
            return rows, keys, warps, stages
    raise ValueError(f"no attention tile for head size {d}, {G} query heads a KV head and {itemsize}-byte elements fits"
                     f" into {shared_memory} bytes of shared memory; --attention-backend torch can run it")


@functools.lru_cache(maxsize=None)
def shared_memory_limit(device):
    """Bytes a program may take: what the card has, 99 KiB at most, so that on a large one two programs run abreast."""
    if device.type == "cpu":
        return 99 * 1024
    card = torch.cuda.get_device_properties(device)
    return min(99 * 1024, getattr(card, "shared_memory_per_block_optin", 0) or card.shared_memory_per_block)


@jit
def _find_sequence(query_start_loc, tile, S, BLOCK_Q: tl.constexpr):
    """The sequence that owns `tile`, by bisection. Sequence s begins at tile query_start_loc[s] // BLOCK_Q + s: the + s
    leaves each earlier one a tile to round up with, so no two overlap, and T // BLOCK_Q + S tiles are enough: a grid
    made without asking the GPU for chunk lengths.
    Example: BLOCK_Q 4, chunks of 6 and 1 tokens, query_start_loc 0 6 7: s = 0 owns tiles 0 and 1, s = 1 tile 2."""
    low, high = 0, S
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit
def _attend(q, m, l, acc, k_base, v_base, table, row_position, first, last, scale, c_b, c_s, c_d, bt_b,
            BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """The online softmax over keys first … last-1, TILE at a time, for q [M, BLOCK_D]  →  m, l [M], acc [M, BLOCK_D].
    MASKED false: every row sees every one of these keys, and TILE divides their number."""
    dims = tl.arange(0, BLOCK_D)[None, :]                                                # [1, BLOCK_D]
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)                                            # [TILE]
        real = position < last
        block = tl.load(table + position // BLOCK_SIZE * bt_b, mask=real, other=0)       # [TILE]
        slot = block.to(tl.int64) * c_b + position % BLOCK_SIZE * c_s                    # [TILE]
        # A slot past the end holds what its last owner left there, a NaN maybe, and 0 * NaN is NaN: it is not read.
        at = real[:, None] & (dims < D)                                                  # [TILE, BLOCK_D]
        k = tl.load(k_base + slot[:, None] + dims * c_d, mask=at, other=0.0)             # [TILE, BLOCK_D]
        v = tl.load(v_base + slot[:, None] + dims * c_d, mask=at, other=0.0)             # [TILE, BLOCK_D]
        # "ieee": fp32 products in fp32. The default on NVIDIA cards, TF32, keeps 10 bits of each fraction.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale                  # [M, TILE] fp32
        if MASKED:
            visible = real[None, :] & (position[None, :] <= row_position[:, None])       # [M, TILE]
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))                                    # [M]
        # A row that has seen no key yet is still at -inf, and -inf - -inf is NaN. Less 0 instead: exp2(-inf) is 0.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)                             # [M]
        p = tl.exp2(scores - shift[:, None])                                             # [M, TILE]
        old = tl.exp2(m - shift)                                                         # [M]
        l = l * old + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        m = m_new
    return m, l, acc


# Triton compiles a kernel anew where an argument becomes 1 or divisible by 16, to make use of it: a pause of a second
# while serving. Not so for the arguments that change from step to step.
@functools.partial(jit, do_not_specialize=("S", "max_splits", "bt_s"))
def _paged_attention_kernel(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, out, part_acc, part_ml,
                            scale, S, H, max_splits, q_t, q_h, q_d, c_b, c_s, c_h, c_d, bt_s, bt_b,
                            DECODE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, G: tl.constexpr,
                            D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr):
    """One tile of rows against its keys, in the decode launch (DECODE) or the chunk launch.

    In registers: acc [BLOCK_M, BLOCK_D] and the scores [BLOCK_M, TILE], fp32. For 128 rows, d = 128 and 64 keys that is
    96 KiB, for each thread of 8 warps 64 + 32 registers of its 255. K and V pass through shared memory.
    """
    # 1) Whose rows?  Each launch leaves alone the sequences of the other kind.
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // G
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)                           # a chunk has split 0 only
    if DECODE:
        s = tile
    else:
        tile = tl.num_programs(0) - 1 - tile           # late tiles have the most keys to walk: they start first
        s = _find_sequence(query_start_loc, tile, S, BLOCK_Q)
    row0 = tl.load(query_start_loc + s).to(tl.int64)
    q_len = (tl.load(query_start_loc + s + 1) - row0).to(tl.int32)
    seq_len = tl.load(seq_lens + s).to(tl.int32)
    first_query = 0
    if not DECODE:
        first_query = ((tile - row0 // BLOCK_Q - s) * BLOCK_Q).to(tl.int32)
    begin = split * SPLIT
    if (q_len == 1) != DECODE or first_query >= q_len or begin >= seq_len:
        return

    # 2) The rows. Rows to spare are computed like the others, with q = 0, and not stored.
    r = tl.arange(0, BLOCK_M)                                                            # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)                                                         # [BLOCK_D]
    query, head = first_query + r // G, kv_head * G + r % G                              # [BLOCK_M] each
    real = (r < BLOCK_Q * G) & (query < q_len)                                           # [BLOCK_M]
    at = real[:, None] & (dims < D)[None, :]                                             # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q + ((row0 + query) * q_t + head * q_h)[:, None] + dims[None, :] * q_d, mask=at, other=0.0)
    q_tile = q_tile.to(k_cache.dtype.element_ty)                                         # [BLOCK_M, BLOCK_D]
    row_position = seq_len - q_len + query             # the queries are the last q_len positions of the sequence

    # 3) The keys: up to `clear` they are visible to every row; from there to `end` each row has its own edge.
    if DECODE:
        end = tl.minimum(seq_len, begin + SPLIT)
        clear = begin + (end - begin) // TILE * TILE
    else:
        end = tl.minimum(seq_len, seq_len - q_len + first_query + BLOCK_Q)
        clear = tl.maximum(seq_len - q_len + first_query + 1, 0) // TILE * TILE
    k_base, v_base = k_cache + kv_head.to(tl.int64) * c_h, v_cache + kv_head.to(tl.int64) * c_h
    table = block_tables + s.to(tl.int64) * bt_s
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m, l, acc = _attend(q_tile, m, l, acc, k_base, v_base, table, row_position, begin, clear, scale,
                        c_b, c_s, c_d, bt_b, BLOCK_SIZE, TILE, D, BLOCK_D, MASKED=False)
    m, l, acc = _attend(q_tile, m, l, acc, k_base, v_base, table, row_position, clear, end, scale,
                        c_b, c_s, c_d, bt_b, BLOCK_SIZE, TILE, D, BLOCK_D, MASKED=True)

    # 4) The result, or this split's share of it.
    if DECODE and seq_len > SPLIT:
        part = (s.to(tl.int64) * H + head) * max_splits + split                          # [BLOCK_M]
        tl.store(part_acc + part[:, None] * D + dims[None, :], acc, mask=at)
        tl.store(part_ml + part * 2, m, mask=real)
        tl.store(part_ml + part * 2 + 1, l, mask=real)
    else:
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]                                  # a row without keys: 0 / 1
        tl.store(out + ((row0 + query) * H + head)[:, None] * D + dims[None, :], acc.to(out.dtype.element_ty), mask=at)


@functools.partial(jit, do_not_specialize=("max_splits",))
def _merge_splits_kernel(query_start_loc, seq_lens, out, part_acc, part_ml, H, max_splits,
                         SPLIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """A program owns one head of one long decode and adds up its splits, WIDTH at a time: the online softmax once more,
    with a split where a key was. Nothing is lost by splitting: m, l and acc are all that the keys left behind.
    vLLM: v1/attention/ops/triton_unified_attention.py:685 reduce_segments"""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(query_start_loc + s).to(tl.int64)
    splits = tl.cdiv(tl.load(seq_lens + s).to(tl.int32), SPLIT)
    if tl.load(query_start_loc + s + 1) - row != 1 or splits <= 1:
        return
    dims = tl.arange(0, BLOCK_D)                                                         # [BLOCK_D]
    m, l, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)                      # scalars, [BLOCK_D]
    for first in range(0, splits, WIDTH):
        i = first + tl.arange(0, WIDTH)                                                  # [WIDTH]
        part = (s * H + head) * max_splits + i                                           # [WIDTH]
        at = (i < splits)[:, None] & (dims < D)[None, :]                                 # [WIDTH, BLOCK_D]
        part_m = tl.load(part_ml + part * 2, mask=i < splits, other=float("-inf"))       # [WIDTH]
        part_l = tl.load(part_ml + part * 2 + 1, mask=i < splits, other=0.0)             # [WIDTH]
        share = tl.load(part_acc + part[:, None] * D + dims[None, :], mask=at, other=0.0)
        m_new = tl.maximum(m, tl.max(part_m, axis=0))
        weight, old = tl.exp2(part_m - m_new), tl.exp2(m - m_new)                        # [WIDTH], scalar
        l = l * old + tl.sum(weight * part_l, axis=0)
        acc = acc * old + tl.sum(weight[:, None] * share, axis=0)                        # [BLOCK_D]
        m = m_new
    tl.store(out + (row * H + head) * D + dims, (acc / l).to(out.dtype.element_ty), mask=dims < D)


def paged_attention_triton(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale):
    """`paged_attention` in up to three launches. Nothing waits for the GPU: the grids are upper bounds, made of shapes
    alone (so a CUDA graph can hold them), and a program with nothing to do returns."""
    (T, H, d), S, (_, block_size, Hkv, _) = q.shape, len(seq_lens), k_cache.shape
    assert k_cache.stride() == v_cache.stride(), "K and V are laid out alike"
    G, BLOCK_D, limit = H // Hkv, max(triton.next_power_of_2(d), 16), shared_memory_limit(q.device)
    query_start_loc, seq_lens = query_start_loc.contiguous(), seq_lens.contiguous()
    out = torch.zeros(T, H, d, dtype=q.dtype, device=q.device)                           # padding rows stay 0
    max_splits = triton.cdiv(block_tables.shape[1] * block_size, SPLIT)
    part_acc, part_ml = out, out                       # where no sequence can be longer than a split, nothing is split
    if max_splits > 1:
        part_acc = torch.empty(S, H, max_splits, d, dtype=torch.float32, device=q.device)
        part_ml = torch.empty(S, H, max_splits, 2, dtype=torch.float32, device=q.device)

    def launch(tiles, decode):
        BLOCK_M, TILE, warps, stages = choose_tile(tiles, d, G, k_cache.element_size(), limit)
        grid = (S, Hkv, max_splits) if decode else (T // (BLOCK_M // G) + S, Hkv, 1)
        _paged_attention_kernel[grid](
            q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, out, part_acc, part_ml, scale * LOG2_E,
            S, H, max_splits, *q.stride(), *k_cache.stride(), *block_tables.stride(), DECODE=decode, SPLIT=SPLIT,
            BLOCK_SIZE=block_size, G=G, D=d, BLOCK_D=BLOCK_D, BLOCK_M=BLOCK_M, TILE=TILE,
            num_warps=warps, num_stages=stages)

    launch(DECODE_TILES, decode=True)
    if max_splits > 1:
        _merge_splits_kernel[(S, H)](query_start_loc, seq_lens, out, part_acc, part_ml, H, max_splits,
                                     SPLIT=SPLIT, D=d, BLOCK_D=BLOCK_D, WIDTH=16)
    if T != S:                                         # every sequence has a row at least: T = S says, decodes only
        launch(CHUNK_TILES, decode=False)
    return out


# -- 5. Which implementation runs -------------------------------------------------------------------------------------

TORCH = SimpleNamespace(rms_norm=rms_norm, rope_and_write_kv=rope_and_write_kv, silu_and_mul=silu_and_mul,
                        paged_attention=paged_attention, name="torch")
TRITON = SimpleNamespace(rms_norm=rms_norm_triton, rope_and_write_kv=rope_and_write_kv_triton,
                         silu_and_mul=silu_and_mul_triton, paged_attention=paged_attention_triton, name="triton")


def select_backend(name, device, dtype, head_size, G):
    """`--attention-backend`: "torch" the twins, "triton" the kernels above, "cpu" those of cpu_kernels.c, compiled for
    this dtype, head size and G if they weren't before; "auto" Triton on a GPU (CUDA, ROCm), C on a CPU, and the twins
    where that can't be, with a line that says so  →  a namespace of the operations; cpu's multiplies matrices, too.
    ValueError for what can't run. ("triton" on a CPU is for tests alone, with TRITON_INTERPRET=1 set beforehand.)
    vLLM: v1/attention/selector.py:101 get_attn_backend, which has a dozen to choose from.
    """
    if name not in ("auto", "torch", "triton", "cpu"):
        raise ValueError(f"attention backend {name!r} is unknown; --attention-backend takes auto, torch, triton or cpu")
    on_gpu = torch.device(device).type == "cuda"       # what PyTorch calls a ROCm device, too
    if name == "cpu" and on_gpu:
        raise ValueError(f"--attention-backend cpu: its kernels read no memory of device {str(device)!r}; take auto")
    if name == "cpu" or name == "auto" and torch.device(device).type == "cpu":
        try:
            return cpu_kernels.backend(dtype, head_size, G)
        except cpu_kernels.NotAvailable as reason:
            if name == "cpu":
                raise ValueError(f"--attention-backend cpu: {reason}; take auto or torch") from reason
            say_once(f"nano-serve: plain PyTorch computes, several times slower than cpu_kernels.c would: {reason}")
    if name == "torch" or not on_gpu and name == "auto" or name == "auto" and not triton:
        return TORCH
    if triton is None:
        raise ValueError("--attention-backend triton: Triton is not installed (pip install triton; Linux only)")
    if not on_gpu and isinstance(_rms_norm_kernel, triton.JITFunction):
        raise ValueError(f"--attention-backend triton: no kernel runs on device {str(device)!r}; take auto or "
                         "torch, or set TRITON_INTERPRET=1 to have the kernels interpreted, slowly")
    return TRITON


@functools.lru_cache(maxsize=None)
def say_once(line):
    print(line, file=sys.stderr)
