"""How it is computed (chapter 6): every operation of the forward pass that is not a matrix product.

Mirrors   vLLM: v1/attention/ops/triton_unified_attention.py:802 unified_attention
          vLLM: v1/attention/ops/triton_reshape_and_cache_flash.py:363 triton_reshape_and_cache_flash
          vLLM: model_executor/layers/layernorm.py:37 RMSNorm, model_executor/layers/activation.py:118 SiluAndMul
Promises  each operation stands twice: its *twin*, plain PyTorch, the specification and the path on a CPU; under it the Triton
          kernel, same arguments, same results. Both are exact for any mix of prefill chunks and decodes and read no KV
          slot beyond a sequence's length; the kernels give a sequence the same bits alone and in company.
Leaves out quantised caches, sliding windows, soft caps, and autotuning: a tile is chosen by arithmetic, before it is run.
Order     1 rms_norm, 2 apply_rope and rope_and_write_kv, 3 silu_and_mul, 4 paged_attention, 5 select_backend.
Run       `python kernels.py` holds every kernel against its twin, no GPU needed; `python kernels.py --bench` wants one.

Letters in the shapes: T tokens in the batch, S sequences, H query heads, Hkv KV heads, G = H / Hkv, d head size,
D hidden size, I intermediate size, B blocks a sequence, L keys of one sequence, N blocks in the pool, bs block size.

Triton in ten lines. A @jit function is written for one *program*; a launch `kernel[grid](...)` starts one program for each
point of the grid, and each asks `tl.program_id` which piece of the result is its own. Programs share nothing and run in
any order, so each must write what no other writes. Inside, a value is a scalar or a whole *tile*, a small array that the
program's warps (32 threads each) hold in registers; code says what happens to a tile, never to a thread. A tensor arrives
as a pointer to its first element: `tl.load(pointer + offsets, mask, other)` gathers a tile, and where the mask is off
nothing is read and `other` is taken. Sizes of tiles are compile-time constants (`tl.constexpr`, in capitals) and powers
of two, so a head size of 80 travels in a tile of 128 with 48 columns masked. Strides come as arguments: q is a slice of
the QKV product, not a dense tensor. Offsets into a pool are int64: 70,000 blocks of 16 * 8 * 256 pass 2^31 elements.
With TRITON_INTERPRET=1 in the environment the same source runs on the CPU, program after program, in NumPy.
"""
import functools
import os
import sys
from types import SimpleNamespace

if __name__ == "__main__" and "--bench" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"          # the demo interprets; @jit looks at this as it decorates, so now

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:                               # no Triton for this platform (macOS): the twins need none
    triton, tl, jit = None, SimpleNamespace(constexpr=None), lambda function: function


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
def _rms_norm_kernel(x, residual, weight, out, new_residual, stride_x, stride_r, D, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """A program owns one row and keeps it in registers: x and residual are read once, both results written once. Three
    PyTorch operations would carry the row through memory three times, and this operation is nothing but memory."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)                                                              # [BLOCK], BLOCK >= D
    real = i < D
    r = tl.load(x + row * stride_x + i, mask=real, other=0.0)                            # [BLOCK], the lanes past D hold 0
    if HAS_RESIDUAL:
        r += tl.load(residual + row * stride_r + i, mask=real, other=0.0)                # [BLOCK], summed in x's dtype
        tl.store(new_residual + row * D + i, r, mask=real)
    r32 = r.to(tl.float32)                                                               # [BLOCK]
    r32 *= tl.rsqrt(tl.sum(r32 * r32) / D + eps)
    w = tl.load(weight + i, mask=real, other=0.0)                                        # [BLOCK]
    tl.store(out + row * D + i, w * r32.to(r.dtype), mask=real)


def rms_norm_triton(x, weight, eps, residual=None):
    """`rms_norm` as one kernel."""
    T, D = x.shape
    x, weight = _dense_rows(x), weight.contiguous()
    residual = residual if residual is None else _dense_rows(residual)
    out = x.new_empty(T, D)                                                              # [T, D]
    new_residual = x if residual is None else x.new_empty(T, D)                          # [T, D]
    BLOCK = triton.next_power_of_2(D)
    if T:
        _rms_norm_kernel[(T,)](x, x if residual is None else residual, weight, out, new_residual, x.stride(0),
                               0 if residual is None else residual.stride(0), D, eps, HAS_RESIDUAL=residual is not None,
                               BLOCK=BLOCK, num_warps=min(max(BLOCK // 1024, 4), 16))
    return out, new_residual


def _dense_rows(x):
    """x with stride 1 in its last dimension, as the row kernels want it; a copy only where it is not so already."""
    return x if x.stride(-1) == 1 else x.contiguous()


# -- 2. RoPE, and the write into the KV cache -------------------------------------------------------------------------

def apply_rope(x, cos, sin):
    """Turn each head's vector by its position's angles: dimension i is paired with i + d/2 (the "half-split" layout).

    x [T, heads, d], cos and sin [T, d/2] in fp32  →  [T, heads, d], x's dtype.
    Hugging Face checkpoints store Wq and Wk for this layout; Meta's originals pair 2i with 2i+1, and no error would
    show if the two were mixed: the text starts well and falls apart, since position 0 turns by nothing in either.
    """
    x1, x2 = x.chunk(2, dim=-1)                                                          # [T, heads, d/2] each
    cos, sin = cos[:, None, :], sin[:, None, :]                                          # [T, 1, d/2]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)     # [T, heads, d]


def rope_and_write_kv(q, k, v, cos, sin, k_cache, v_cache, slot_mapping):
    """Rotate q and k, put k and v into their slots; the caches change in place.

    q [T, H, d], k and v [T, Hkv, d], caches [N, bs, Hkv, d], slot_mapping [T] int64  →  q rotated [T, H, d].
    Slot = block_id * block_size + offset; a negative slot is padding and writes nothing. Every layer writes the whole
    batch's K/V before it attends, so a chunk's tokens see each other through the cache like any older token.
    """
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)                              # [T, H, d], [T, Hkv, d]
    if int(slot_mapping.min()) < 0:
        real = slot_mapping >= 0                                                         # [T]
        slot_mapping, k, v = slot_mapping[real], k[real], v[real]
    k_cache.flatten(0, 1)[slot_mapping] = k.to(k_cache.dtype)                            # [N*bs, Hkv, d] at T slots
    v_cache.flatten(0, 1)[slot_mapping] = v.to(v_cache.dtype)
    return q


@jit
def _rope_and_write_kv_kernel(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, q_out,
                              q_t, q_h, q_d, k_t, k_h, k_d, v_t, v_h, v_d, cs_t, kc_b, kc_s, kc_h, kc_d, vc_b, vc_s, vc_h, vc_d,
                              H, Hkv, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """A program owns one token and HEADS heads: those query heads, and the KV heads of the same numbers where there are.
    A head travels as two tiles of d/2, since element i turns with element i + d/2. x_t is x's stride along T, and so on."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]                       # [HEADS, 1]
    i = tl.arange(0, BLOCK_HALF)[None, :]                                                # [1, BLOCK_HALF]
    c = tl.load(cos + t * cs_t + i, mask=i < HALF, other=0.0)                            # [1, BLOCK_HALF] fp32
    s = tl.load(sin + t * cs_t + i, mask=i < HALF, other=0.0)

    real = (head < H) & (i < HALF)                                                       # [HEADS, BLOCK_HALF]
    x1, x2 = _load_halves(q + t * q_t + head * q_h, i, q_d, real, HALF)
    at = q_out + (t * H + head) * (2 * HALF) + i
    tl.store(at, (x1 * c - x2 * s).to(q_out.dtype.element_ty), mask=real)
    tl.store(at + HALF, (x2 * c + x1 * s).to(q_out.dtype.element_ty), mask=real)

    slot = tl.load(slot_mapping + t).to(tl.int64)
    real = (head < Hkv) & (i < HALF) & (slot >= 0)                                       # slot -1: nothing is written
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    x1, x2 = _load_halves(k + t * k_t + head * k_h, i, k_d, real, HALF)
    at = k_cache + block * kc_b + offset * kc_s + head * kc_h + i * kc_d                 # [HEADS, BLOCK_HALF] pointers
    # Through k's own dtype on the way to the cache's, so that the cache holds what the twin would have put there.
    tl.store(at, (x1 * c - x2 * s).to(k.dtype.element_ty).to(k_cache.dtype.element_ty), mask=real)
    tl.store(at + HALF * kc_d, (x2 * c + x1 * s).to(k.dtype.element_ty).to(k_cache.dtype.element_ty), mask=real)
    x1, x2 = _load_halves(v + t * v_t + head * v_h, i, v_d, real, HALF)
    at = v_cache + block * vc_b + offset * vc_s + head * vc_h + i * vc_d
    tl.store(at, x1.to(v_cache.dtype.element_ty), mask=real)
    tl.store(at + HALF * vc_d, x2.to(v_cache.dtype.element_ty), mask=real)


@jit
def _load_halves(x, i, stride, real, HALF: tl.constexpr):
    """The two halves of some heads, in fp32: 2 x [HEADS, BLOCK_HALF]."""
    return (tl.load(x + i * stride, mask=real, other=0.0).to(tl.float32),
            tl.load(x + (i + HALF) * stride, mask=real, other=0.0).to(tl.float32))


def rope_and_write_kv_triton(q, k, v, cos, sin, k_cache, v_cache, slot_mapping):
    """`rope_and_write_kv` as one kernel: q, k and v are read once and written once, to where they are needed next."""
    (T, H, d), Hkv = q.shape, k.shape[1]
    q_out = q.new_empty(T, H, d)                                                         # [T, H, d]
    BLOCK_HALF = triton.next_power_of_2(d // 2)
    HEADS = min(triton.next_power_of_2(H), max(2048 // BLOCK_HALF, 1))   # 2048 pairs: 16 a thread in 4 warps of 32
    if T:
        _rope_and_write_kv_kernel[(T, triton.cdiv(H, HEADS))](
            q, k, v, cos.contiguous(), sin.contiguous(), k_cache, v_cache, slot_mapping.contiguous(), q_out,
            *q.stride(), *k.stride(), *v.stride(), d // 2, *k_cache.stride(), *v_cache.stride(), H, Hkv,
            BLOCK_SIZE=k_cache.shape[1], HALF=d // 2, HEADS=HEADS, BLOCK_HALF=BLOCK_HALF)
    return q_out


# -- 3. SwiGLU's element-wise half ------------------------------------------------------------------------------------

def silu_and_mul(gate_up):
    """silu(gate) * up.  gate_up [T, 2I], gate first  →  [T, I].  vLLM: model_executor/layers/activation.py:118 SiluAndMul."""
    gate, up = gate_up.chunk(2, dim=-1)                                                  # [T, I] each
    return F.silu(gate) * up                                                             # [T, I]


@jit
def _silu_and_mul_kernel(gate_up, out, stride, I, BLOCK: tl.constexpr):
    """A program owns BLOCK columns of one row: two tiles in, one out."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)                                   # [BLOCK]
    gate = tl.load(gate_up + row * stride + i, mask=i < I, other=0.0)                    # [BLOCK]
    up = tl.load(gate_up + row * stride + I + i, mask=i < I, other=0.0)                  # [BLOCK]
    gate32 = gate.to(tl.float32)
    tl.store(out + row * I + i, (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype) * up, mask=i < I)


def silu_and_mul_triton(gate_up):
    """`silu_and_mul` as one kernel."""
    gate_up = _dense_rows(gate_up)
    (T, I), BLOCK = (len(gate_up), gate_up.shape[1] // 2), 1024
    out = gate_up.new_empty(T, I)                                                        # [T, I]
    if T:
        _silu_and_mul_kernel[(T, triton.cdiv(I, BLOCK))](gate_up, out, gate_up.stride(0), I, BLOCK=BLOCK)
    return out


# -- 4. Attention over the paged cache --------------------------------------------------------------------------------

def paged_attention(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale, plan=None):
    """Causal attention of a ragged batch: sequence s owns query rows query_start_loc[s] : query_start_loc[s+1], which
    are the *last* positions of its seq_lens[s] tokens; its keys lie in the blocks of block_tables[s].

    q [T, H, d], caches [N, bs, Hkv, d], query_start_loc [S+1], seq_lens [S], block_tables [S, B], scale a float;
    plan: `gather_plan` of this batch, the same for all layers, so the caller makes it once  →  [T, H, d], q's dtype.
    Rows of a sequence of length 0 (padding) come out as zeros.
    """
    T, H, d = q.shape
    Hkv = k_cache.shape[2]
    plan = plan or gather_plan(query_start_loc, seq_lens, block_tables, k_cache.shape[1])
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)                          # [N*bs, Hkv, d]
    out = torch.zeros_like(q)                                                            # [T, H, d]
    for rows, slots, mask in plan:
        n, L = slots.shape                        # n sequences of L keys each; each has q_len query rows
        k = keys[slots.view(-1)].view(n, L, Hkv, d).transpose(1, 2)                      # [n, Hkv, L, d]
        v = values[slots.view(-1)].view(n, L, Hkv, d).transpose(1, 2)                    # [n, Hkv, L, d]
        # G query heads share one KV head (GQA). For decodes they become G query rows of that head, so that each key is
        # read once instead of G times; for a chunk they stay heads, since there the products outweigh the reads.
        if rows.numel() == n:
            x = q[rows].view(n, Hkv, H // Hkv, d).to(k.dtype)                            # [n, Hkv, G, d]
            x = F.scaled_dot_product_attention(x, k, v, mask, scale=scale)               # [n, Hkv, G, d]
            out[rows] = x.reshape(n, H, d).to(q.dtype)
        else:
            x = q[rows].view(-1, Hkv, H // Hkv, d).permute(1, 2, 0, 3).to(k.dtype)       # [Hkv, G, q_len, d]
            k, v = (t.transpose(0, 1).expand(-1, H // Hkv, -1, -1) for t in (k, v))      # [Hkv, G, L, d]
            x = F.scaled_dot_product_attention(x, k, v, mask, is_causal=mask is None, scale=scale)
            out[rows] = x.permute(2, 0, 1, 3).reshape(-1, H, d).to(q.dtype)              # [q_len, H, d]
    return out


def gather_plan(query_start_loc, seq_lens, block_tables, block_size, max_buckets=4, chunk_rows=1024):
    """Which query rows meet which slots, in few and large pieces: a list of (rows [n*q_len], slots [n, L], mask).

    Decodes are sorted by length and cut into up to `max_buckets` pieces, each padded to its longest; a prefill chunk is
    a piece by itself, cut every `chunk_rows` rows so that its mask stays small. The mask is additive, 0 or -inf,
    [n, 1, 1, L] for decodes and [q_len, L] for a chunk; None: nothing to mask (decodes) or plain causal (chunk).
    Padding points at a slot that its sequence does own. A masked key gets weight 0, but 0 * NaN is NaN: masking the
    score alone would let the garbage of a stale slot through, so a stale slot is not even read.
    """
    device = block_tables.device
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    decodes, plan = [], []
    for s, L in enumerate(lens):
        q_len = starts[s + 1] - starts[s]
        if q_len == 1 and L > 0:
            decodes.append((L, s))
        elif L > 0:
            slots = _slots(block_tables[s:s + 1], torch.arange(L, device=device)[None], block_size)   # [1, L]
            for a in range(0, q_len, chunk_rows):
                b = min(a + chunk_rows, q_len)
                first, last = L - q_len + a, L - q_len + b         # positions of these rows: [first, last)
                mask = None
                if first > 0:                                      # row i sees keys 0 … first + i
                    mask = torch.zeros(b - a, last, device=device).masked_fill_(
                        torch.ones(b - a, last, dtype=torch.bool, device=device).triu_(first + 1), -torch.inf)
                plan.append((torch.arange(starts[s] + a, starts[s] + b, device=device), slots[:, :last], mask))
    decodes.sort()
    size = -(-len(decodes) // max_buckets)
    for i in range(0, len(decodes), max(size, 1)):
        bucket = decodes[i:i + size]
        L = bucket[-1][0]
        ids = torch.tensor([s for _, s in bucket], device=device)                        # [n]
        n_keys = torch.tensor([n for n, _ in bucket], device=device)[:, None]            # [n, 1]
        positions = torch.arange(L, device=device)[None]                                 # [1, L]
        # Beyond its own last key a sequence repeats that key's position; the mask removes the repeats.
        slots = _slots(block_tables[ids], torch.minimum(positions, n_keys - 1), block_size)   # [n, L]
        mask = None
        if bucket[0][0] < L:
            mask = torch.zeros(len(bucket), L, device=device).masked_fill_(positions >= n_keys, -torch.inf)[:, None, None]
        plan.append((query_start_loc[ids].long(), slots, mask))
    return plan


def _slots(block_tables, positions, block_size):
    """Position p lives in block p // block_size of its table, at offset p % block_size.

    block_tables [n, B], positions [n, L]  →  slots [n, L] int64.
    Example: block_size 4, table [7, 2], 6 tokens  →  slots 28 29 30 31 | 8 9.
    """
    blocks = block_tables.long().gather(1, positions.expand(len(block_tables), -1) // block_size)     # [n, L]
    return blocks * block_size + positions % block_size                                               # [n, L]


# The same on a GPU.  One program owns a *tile of rows*: BLOCK_Q consecutive queries of one sequence times the G query
# heads of one KV head, row r being query r // G and head r % G.  So each key that it reads serves all G heads.
#
#   decode launch   grid (S, Hkv, splits)     a tile is one query; the keys are shared out in splits of SPLIT keys
#   chunk launch    grid (tiles, Hkv)         a tile is up to 128 rows of a chunk; one program walks all their keys
#   merge launch    grid (S, H)               adds up the splits of a long decode
#
# Every program walks its keys tile by tile with the *online softmax*: for each row it carries the largest score so far m,
# the sum l of exp(score - m), and acc, the sum of exp(score - m) * v. When a tile brings a larger m, the old l and acc are
# scaled by exp(m_old - m_new); at the end acc / l is the attention. So the scores [queries, keys] never exist in memory.
# What a row's sum is made of, and in which order, follows from its own position: tiles and splits have fixed sizes (not a
# fixed number), and a masked key adds an exact 0. That is why a sequence gets the same bits alone and in company.

SPLIT = 512              # keys a program of the decode launch walks; each split of a long context costs d + 2 floats a head

# (rows, keys, warps, stages): the first that fits is taken. `stages` tiles of K and V are under way at once: while one is
# multiplied, the next are being fetched. d = 128 in bf16, (128, 64, 8, 2): q 32 KB, K and V 2 * 2 * 16 KB, weights 16 KB.
CHUNK_TILES = ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))
DECODE_TILES = ((16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1))


def tile_bytes(rows, keys, stages, BLOCK_D, itemsize):
    """Shared memory of one program, at most: q, `stages` tiles of K and of V, and the weights on their way to the product."""
    return itemsize * (rows * BLOCK_D + 2 * stages * keys * BLOCK_D + rows * keys)


@functools.lru_cache(maxsize=None)
def choose_tile(tiles, d, G, itemsize, shared_memory):
    """The first of `tiles` whose bytes fit into `shared_memory`, for head size d and G query heads a KV head.

    →  (rows, keys, warps, stages). ValueError where none does: better here, at the first call, than a launch that fails.
    vLLM: v1/attention/ops/triton_unified_attention.py:784 _get_tile_size, which looks at the dtype and the phase.
    """
    for rows, keys, warps, stages in tiles:
        rows = max(rows, triton.next_power_of_2(G))
        if tile_bytes(rows, keys, stages, max(triton.next_power_of_2(d), 16), itemsize) <= shared_memory:
            return rows, keys, warps, stages
    raise ValueError(f"no attention tile for head size {d}, {G} query heads a KV head and {itemsize}-byte elements fits into "
                     f"{shared_memory} bytes of shared memory; --attention-backend torch runs it")


@functools.lru_cache(maxsize=None)
def shared_memory_limit(device):
    """Bytes a program may take. 99 KiB at most, though a data-centre card has more: then two programs share a multiprocessor."""
    if device.type == "cpu":
        return 99 * 1024
    card = torch.cuda.get_device_properties(device)
    return min(99 * 1024, getattr(card, "shared_memory_per_block_optin", 0) or card.shared_memory_per_block)


@jit
def _find_sequence(query_start_loc, tile, S, BLOCK_Q: tl.constexpr):
    """The sequence that owns `tile`. Tiles are numbered with room to spare, so that the grid is known without asking the
    GPU how long each chunk is: sequence s begins at tile query_start_loc[s] // BLOCK_Q + s, and none begins later than the
    tiles before it need. Example: BLOCK_Q 4, chunks of 6 and 1, query_start_loc 0 6 7: s = 0 has tiles 0 1, s = 1 tile 2."""
    low, high = 0, S
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit
def _attend(q, m, l, acc, k_base, v_base, table, row_position, first, last, scale, kc_b, kc_s, kc_d, vc_b, vc_s, vc_d, bt_b,
            BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """The online softmax over keys first … last-1, TILE of them at a time, for q [M, BLOCK_D]  →  m [M], l [M], acc [M, BLOCK_D].

    MASKED false: every row sees every one of these keys, and TILE divides their number.
    """
    dims = tl.arange(0, BLOCK_D)[None, :]                                                # [1, BLOCK_D]
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)                                            # [TILE]
        real = position < last
        block = tl.load(table + position // BLOCK_SIZE * bt_b, mask=real, other=0).to(tl.int64)      # [TILE]
        # A slot past the end holds whatever its last owner left, a NaN maybe, and 0 * NaN is NaN: it must not be read.
        at = real[:, None] & (dims < D)                                                  # [TILE, BLOCK_D]
        k = tl.load(k_base + (block * kc_b + position % BLOCK_SIZE * kc_s)[:, None] + dims * kc_d, mask=at, other=0.0)
        v = tl.load(v_base + (block * vc_b + position % BLOCK_SIZE * vc_s)[:, None] + dims * vc_d, mask=at, other=0.0)
        # "ieee": fp32 products in fp32. The default on NVIDIA cards, TF32, keeps 10 bits of the fraction.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale                  # [M, TILE] fp32
        if MASKED:
            scores = tl.where(real[None, :] & (position[None, :] <= row_position[:, None]), scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))                                    # [M]
        # A row that has seen no key yet is still at -inf, and (-inf) - (-inf) is NaN. Subtract 0 there: exp2(-inf) = 0.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)                             # [M]
        p = tl.exp2(scores - shift[:, None])                                             # [M, TILE]
        old = tl.exp2(m - shift)                                                         # [M]
        l = l * old + tl.sum(p, axis=1)                                                  # [M]
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")       # [M, BLOCK_D]
        m = m_new
    return m, l, acc


@jit
def _paged_attention_kernel(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, out, part_acc, part_ml,
                            scale, S, H, max_splits, q_t, q_h, q_d, kc_b, kc_s, kc_h, kc_d, vc_b, vc_s, vc_h, vc_d, bt_s, bt_b,
                            o_t, o_h, o_d, DECODE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, G: tl.constexpr,
                            D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr):
    """One tile of rows against its keys: the decode launch (DECODE) and the chunk launch. x_t is x's stride along T, and so on.

    In registers, for d = 128: q and acc [BLOCK_M, 128] and the scores [BLOCK_M, TILE]; of the 128-row tile's 8 warps each
    thread then holds 64 floats of acc, 32 scores and 32 registers of q. K and V pass through shared memory.
    """
    # 1) Whose rows?  A launch leaves alone the sequences of the other kind.
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // G
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
    begin = split * SPLIT                              # a chunk has split 0 only
    if (q_len == 1) != DECODE or first_query >= q_len or begin >= seq_len:
        return

    # 2) The rows, [BLOCK_M, BLOCK_D]. Rows to spare are computed like the others (with q = 0) and not stored.
    r = tl.arange(0, BLOCK_M)                                                            # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)                                                         # [BLOCK_D]
    query, head = first_query + r // G, kv_head * G + r % G                              # [BLOCK_M] each
    real = (r < BLOCK_Q * G) & (query < q_len)                                           # [BLOCK_M]
    at = real[:, None] & (dims < D)[None, :]                                             # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q + ((row0 + query) * q_t + head * q_h)[:, None] + dims[None, :] * q_d, mask=at, other=0.0)
    q_tile = q_tile.to(k_cache.dtype.element_ty)
    row_position = seq_len - q_len + query             # the queries are the last q_len positions of the sequence

    # 3) The keys: up to `clear` they are visible to every row, from there to `end` each row has its own edge.
    if DECODE:
        end = tl.minimum(seq_len, begin + SPLIT)
        clear = begin + (end - begin) // TILE * TILE
    else:
        end = tl.minimum(seq_len, seq_len - q_len + first_query + BLOCK_Q)
        clear = (seq_len - q_len + first_query + 1) // TILE * TILE
    k_base = k_cache + kv_head.to(tl.int64) * kc_h
    v_base = v_cache + kv_head.to(tl.int64) * vc_h
    table = block_tables + s.to(tl.int64) * bt_s
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)                                    # largest score so far
    l = tl.zeros([BLOCK_M], tl.float32)                                                  # sum of exp2(score - m)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)                                       # sum of exp2(score - m) * v
    m, l, acc = _attend(q_tile, m, l, acc, k_base, v_base, table, row_position, begin, clear, scale,
                        kc_b, kc_s, kc_d, vc_b, vc_s, vc_d, bt_b, BLOCK_SIZE, TILE, D, BLOCK_D, False)
    m, l, acc = _attend(q_tile, m, l, acc, k_base, v_base, table, row_position, clear, end, scale,
                        kc_b, kc_s, kc_d, vc_b, vc_s, vc_d, bt_b, BLOCK_SIZE, TILE, D, BLOCK_D, True)

    # 4) The result, or this split's share of it.
    if DECODE and seq_len > SPLIT:
        part = (s.to(tl.int64) * H + head) * max_splits + split                          # [BLOCK_M]
        tl.store(part_acc + part[:, None] * D + dims[None, :], acc, mask=at)
        tl.store(part_ml + part * 2, m, mask=real)
        tl.store(part_ml + part * 2 + 1, l, mask=real)
    else:
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]                                  # a row without keys: 0 / 1
        tl.store(out + ((row0 + query) * o_t + head * o_h)[:, None] + dims[None, :] * o_d,
                 acc.to(out.dtype.element_ty), mask=at)


@jit
def _merge_splits_kernel(query_start_loc, seq_lens, out, part_acc, part_ml, H, max_splits, o_t, o_h, o_d,
                         SPLIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """A program owns one head of one long decode and adds up its splits, WIDTH at a time: the online softmax once more, with
    a split where a key was. Exact, since a split carries all that its keys contribute.
    vLLM: v1/attention/ops/triton_unified_attention.py:685 reduce_segments."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(query_start_loc + s).to(tl.int64)
    splits = tl.cdiv(tl.load(seq_lens + s).to(tl.int32), SPLIT)
    if tl.load(query_start_loc + s + 1) - row != 1 or splits <= 1:
        return
    dims = tl.arange(0, BLOCK_D)                                                         # [BLOCK_D]
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)                                                # [BLOCK_D]
    for first in range(0, splits, WIDTH):
        i = first + tl.arange(0, WIDTH)                                                  # [WIDTH]
        part = (s * H + head) * max_splits + i                                           # [WIDTH]
        part_m = tl.load(part_ml + part * 2, mask=i < splits, other=float("-inf"))       # [WIDTH]
        part_l = tl.load(part_ml + part * 2 + 1, mask=i < splits, other=0.0)             # [WIDTH]
        at = (i < splits)[:, None] & (dims < D)[None, :]                                 # [WIDTH, BLOCK_D]
        share = tl.load(part_acc + part[:, None] * D + dims[None, :], mask=at, other=0.0)
        m_new = tl.maximum(m, tl.max(part_m, axis=0))
        weight = tl.exp2(part_m - m_new)                                                 # [WIDTH]
        old = tl.exp2(m - m_new)
        l = l * old + tl.sum(weight * part_l, axis=0)
        acc = acc * old + tl.sum(weight[:, None] * share, axis=0)                        # [BLOCK_D]
        m = m_new
    tl.store(out + row * o_t + head * o_h + dims * o_d, (acc / l).to(out.dtype.element_ty), mask=dims < D)


def paged_attention_triton(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale, plan=None):
    """`paged_attention` in up to three launches. Nothing waits for the GPU: the grids are upper bounds, made of shapes
    alone (so a CUDA graph can hold them), and a program with nothing to do returns. `plan` is the twin's and unused.
    """
    (T, H, d), S, (_, block_size, Hkv, _) = q.shape, len(seq_lens), k_cache.shape
    G, BLOCK_D = H // Hkv, max(triton.next_power_of_2(d), 16)
    query_start_loc, seq_lens = query_start_loc.contiguous(), seq_lens.contiguous()
    out = torch.zeros_like(q)                                                            # [T, H, d], padding rows stay 0
    max_splits = triton.cdiv(block_tables.shape[1] * block_size, SPLIT)
    part_acc, part_ml = out, out                       # where no sequence can be longer than a split, nothing is split
    if max_splits > 1:
        part_acc = torch.empty(S, H, max_splits, d, dtype=torch.float32, device=q.device)
        part_ml = torch.empty(S, H, max_splits, 2, dtype=torch.float32, device=q.device)
    limit = shared_memory_limit(q.device)

    def launch(decode):
        BLOCK_M, TILE, warps, stages = choose_tile(DECODE_TILES if decode else CHUNK_TILES, d, G, k_cache.element_size(), limit)
        grid = (S, Hkv, max_splits) if decode else (T // (BLOCK_M // G) + S, Hkv, 1)
        _paged_attention_kernel[grid](
            q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, out, part_acc, part_ml, scale * LOG2_E, S, H, max_splits,
            *q.stride(), *k_cache.stride(), *v_cache.stride(), *block_tables.stride(), *out.stride(), DECODE=decode, SPLIT=SPLIT,
            BLOCK_SIZE=block_size, G=G, D=d, BLOCK_D=BLOCK_D, BLOCK_M=BLOCK_M, TILE=TILE, num_warps=warps, num_stages=stages)

    if S and T:
        launch(decode=True)
        if max_splits > 1:
            _merge_splits_kernel[(S, H)](query_start_loc, seq_lens, out, part_acc, part_ml, H, max_splits, *out.stride(),
                                         SPLIT=SPLIT, D=d, BLOCK_D=BLOCK_D, WIDTH=16)
        if T != S:                                     # each sequence has a row at least, so T = S says: decodes all
            launch(decode=False)
    return out


LOG2_E = 1.4426950408889634                            # exp(x) = exp2(x * log2 e); GPUs have an instruction for exp2


# -- 5. Which implementation runs -------------------------------------------------------------------------------------

TORCH = SimpleNamespace(rms_norm=rms_norm, rope_and_write_kv=rope_and_write_kv, silu_and_mul=silu_and_mul,
                        paged_attention=paged_attention, plan=gather_plan, name="torch")
TRITON = SimpleNamespace(rms_norm=rms_norm_triton, rope_and_write_kv=rope_and_write_kv_triton,
                         silu_and_mul=silu_and_mul_triton, paged_attention=paged_attention_triton,
                         plan=lambda *batch: None, name="triton")


def select_backend(name, device):
    """`--attention-backend`: "torch" the twins, "triton" the kernels, "auto" the kernels on a GPU (CUDA or ROCm) that has
    Triton, the twins elsewhere  →  a namespace of the four operations and `plan`. ValueError for what can't run.

    "triton" on a CPU is for tests: it needs TRITON_INTERPRET=1 before this module is imported.
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
        raise ValueError(f"--attention-backend triton: no kernel runs on the device {str(device)!r}; take auto or torch, or set "
                         "TRITON_INTERPRET=1 to have the kernels interpreted, slowly")
    return TRITON
