"""Attention over the paged cache (chapter 6): the twin in PyTorch, a dense kernel to begin with, the paged one.

Mirrors   vLLM: v1/attention/ops/triton_unified_attention.py:802 unified_attention
Promises  what kernels.py does, which takes these operations in: twin and kernel agree for any mix of prefill chunks and
          decodes, no KV slot beyond a sequence's length is read, a sequence cut alike
          gets the same bits alone and in company.
Order     1 paged_attention, the specification.  2 dense_attention: the online softmax in twenty lines of Triton.
          3 The paged kernel: tiles and splits, how K and V stay under way, the launches.
Letters and Triton in ten lines: see kernels.py. In the kernels D is the head size d, as a constant.
"""
import functools
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:            # no Triton for this platform (macOS): the twins need none
    triton, tl, jit = None, SimpleNamespace(constexpr=None), lambda function, **options: function


# -- 1. The specification ---------------------------------------------------------------------------------------------

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


# -- 2. A rung below: dense attention ---------------------------------------------------------------------------------

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
        offset = keys[:, None] * D + dims                                                    # [TILE, D]
        k = tl.load(k_ptr + offset, mask=keys[:, None] < L, other=0.0)                       # [TILE, D]
        v = tl.load(v_ptr + offset, mask=keys[:, None] < L, other=0.0)                       # [TILE, D]
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


# -- 3. Paged and ragged ----------------------------------------------------------------------------------------------

# Now paged and ragged. A program owns a *tile of rows*: BLOCK_Q consecutive queries of one sequence times the G query
# heads of one KV head, row r being query r // G and head r % G. So each key that it reads serves all G heads.
#
#   decode launch   grid (programs, Hkv)   a tile is one query: G rows of the 16 that tl.dot multiplies at least. Its
#                                          keys are cut into splits, and as many programs as the card holds stride over
#                                          the splits of all sequences: a long one among short ones is shared out
#   chunk launch    grid (tiles, Hkv)      a tile is up to 128 rows of a chunk; one program walks all their keys
#   merge launch    grid (S, H)            adds up the splits of each decode
#
# What a row sums, and in which order, follows from its position, its sequence's length, and whether it is a decode,
# whose keys are split, or in a chunk; a masked key adds an exact 0. So a sequence that is cut into the same pieces gets
# the same bits alone and in company.

# A split has 64 keys, and more of them (in steps of 32) only where there would be over 128 splits. So of 132
# multiprocessors eight sequences with one KV head (70B at TP 8) busy all from 1,025 keys
# on, one alone 86 to 128 of them from 8,129 on.
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
    """Both launches, by DECODE. A program takes pieces of work (a split of a decode, a tile of a chunk) until none is
    left: finds whose it is, loads its rows, walks its keys, stores the result or the split's share of it."""
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
            to_ptr = part_ptr + ((s.to(tl.int64) * H + head) * most_splits + piece) * (D + 2)    # [BLOCK_M]
            tl.store(to_ptr[:, None] + dims, acc, mask=mask)
            tl.store(to_ptr + D, m_i, mask=real)
            tl.store(to_ptr + D + 1, l_i, mask=real)
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
        from_ptr = part_ptr + ((s * H + head) * most_splits + i) * (D + 2)                     # [WIDTH]
        mask = (i < splits)[:, None] & (dims < D)[None, :]                               # [WIDTH, BLOCK_D]
        share = tl.load(from_ptr[:, None] + dims[None, :], mask=mask, other=0.0)               # [WIDTH, BLOCK_D]
        part_m = tl.load(from_ptr + D, mask=i < splits, other=float("-inf"))                   # [WIDTH]
        part_l = tl.load(from_ptr + D + 1, mask=i < splits, other=0.0)                         # [WIDTH]
        m_new = tl.maximum(m_i, tl.max(part_m, axis=0))
        weight, old = tl.exp2(part_m - m_new), tl.exp2(m_i - m_new)                      # [WIDTH], scalar
        l_i = l_i * old + tl.sum(weight * part_l, axis=0)
        acc = acc * old + tl.sum(weight[:, None] * share, axis=0)                        # [BLOCK_D]
        m_i = m_new
    tl.store(out_ptr + (row * H + head) * D + dims, (acc / l_i).to(out_ptr.dtype.element_ty), mask=dims < D)


def paged_attention_triton(q, k_cache, v_cache, query_start_loc, seq_lens, block_tables, scale,
                           scratch=None):
    """`paged_attention`, scale > 0; rows that no sequence owns are left unwritten. Nothing waits for the GPU: the grids
    are upper bounds, made of shapes alone (so a CUDA graph can hold them), and a program with nothing to do returns.
    scratch: SCRATCH fp32 numbers that all calls share, or None: made for this call."""
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
            programs_x = min(n * most_splits, -(-card[0] * programs // Hkv)) if decode else T // (BLOCK_M // G) + n
            _paged_attention_kernel[programs_x, Hkv](
                q, k_cache, v_cache, starts, lens, tables, out, parts, scale * LOG2_E, n, H, most_splits, *q.stride(),
                *k_cache.stride(), *tables.stride(), DECODE=decode, SEQUENCES=SEQUENCES, BLOCK_SIZE=block_size, G=G,
                BLOCK_M=BLOCK_M, TILE=TILE, num_warps=warps, num_stages=stages, **sizes)
        if most_splits > 1:
            _merge_kernel[n, H](starts, lens, out, parts, H, most_splits, WIDTH=32, **sizes)
    return out
