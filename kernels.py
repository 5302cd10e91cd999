"""How it is computed (chapter 6): every operation of the forward pass that is not a matrix product.

Mirrors   vLLM: v1/attention/ops/triton_unified_attention.py:802 unified_attention
          vLLM: v1/attention/ops/triton_reshape_and_cache_flash.py:363 triton_reshape_and_cache_flash
          vLLM: model_executor/layers/layernorm.py:37 RMSNorm, model_executor/layers/activation.py:118 SiluAndMul
Promises  each function below is a *twin*: plain PyTorch, the specification of the operation and its path on a CPU.
          The twins are exact for any mix of prefill chunks and decodes, and read no KV slot beyond a sequence's length.
Order     1 rms_norm, 2 apply_rope and rope_and_write_kv, 3 silu_and_mul, 4 paged_attention, 5 select_backend.

Letters in the shapes: T tokens in the batch, S sequences, H query heads, Hkv KV heads, G = H / Hkv, d head size,
D hidden size, I intermediate size, B blocks a sequence, L keys of one sequence, N blocks in the pool, bs block size.
"""
from types import SimpleNamespace

import torch
import torch.nn.functional as F


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


# -- 3. SwiGLU's element-wise half ------------------------------------------------------------------------------------

def silu_and_mul(gate_up):
    """silu(gate) * up.  gate_up [T, 2I], gate first  →  [T, I].  vLLM: model_executor/layers/activation.py:118 SiluAndMul."""
    gate, up = gate_up.chunk(2, dim=-1)                                                  # [T, I] each
    return F.silu(gate) * up                                                             # [T, I]


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


# -- 5. Which implementation runs -------------------------------------------------------------------------------------

TORCH = SimpleNamespace(rms_norm=rms_norm, rope_and_write_kv=rope_and_write_kv, silu_and_mul=silu_and_mul,
                        paged_attention=paged_attention, plan=gather_plan, name="torch")


def select_backend(name, device):
    """`--attention-backend`: the twins ("torch"); "auto" takes what the device is best served by."""
    if name not in ("auto", "torch"):
        raise ValueError(f"attention backend {name!r} is unknown; --attention-backend takes auto or torch")
    return TORCH
