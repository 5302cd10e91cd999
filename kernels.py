"""How it is computed (chapter 6): every operation of a layer that is not one of its four projections.

Mirrors   vLLM: v1/attention/ops/triton_unified_attention.py:802 unified_attention
          vLLM: v1/attention/ops/triton_reshape_and_cache_flash.py:363 triton_reshape_and_cache_flash
          vLLM: model_executor/layers/layernorm.py:37 RMSNorm, model_executor/layers/activation.py:118 SiluAndMul
Promises  every operation stands twice: its *twin*, plain PyTorch, the specification, with nothing in it for speed;
          under it the Triton kernel, same arguments, same results. (A third time, for CPUs, in cpu_kernels.c.) All are
          exact for any mix of prefill chunks and decodes and read no KV slot beyond a sequence's length; the kernels
          give a sequence the same bits alone and in company, cut alike.
Left out  quantised caches, sliding windows, soft caps, and autotuning: tiles are chosen by arithmetic.
Order     1 rms_norm, 2 apply_rope and rope_and_write_kv, 3 silu_and_mul, 4 select_backend. Attention: attention.py.
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
from attention import SCRATCH, jit, paged_attention, paged_attention_triton, tl, triton


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
    out_ptr = q_out + (t * H + head) * (2 * HALF) + i
    tl.store(out_ptr, (x1 * c - x2 * s).to(q.dtype.element_ty), mask=real)
    tl.store(out_ptr + HALF, (x2 * c + x1 * s).to(q.dtype.element_ty), mask=real)

    slot = tl.load(slot_mapping + t).to(tl.int64)
    real = (head < Hkv) & (i < HALF) & (slot >= 0)                                       # slot -1: nothing is written
    offset = slot // BLOCK_SIZE * c_b + slot % BLOCK_SIZE * c_s + head * c_h + i * c_d       # [HEADS, BLOCK_HALF]
    x1, x2 = _load_halves(k + t * k_t + head * k_h, i, k_d, real, HALF)
    # Through k's own dtype on the way to the cache's, so that the cache holds what the twin would have put there.
    y1, y2 = (x1 * c - x2 * s).to(k.dtype.element_ty), (x2 * c + x1 * s).to(k.dtype.element_ty)
    tl.store(k_cache + offset, y1.to(k_cache.dtype.element_ty), mask=real)
    tl.store(k_cache + offset + HALF * c_d, y2.to(k_cache.dtype.element_ty), mask=real)
    x1, x2 = _load_halves(v + t * k_t + head * k_h, i, k_d, real, HALF)
    tl.store(v_cache + offset, x1.to(v_cache.dtype.element_ty), mask=real)
    tl.store(v_cache + offset + HALF * c_d, x2.to(v_cache.dtype.element_ty), mask=real)


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
    return F.silu(gate) * up                                                         # [T, I]


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


# -- 4. Which implementation runs -------------------------------------------------------------------------------------

TORCH = SimpleNamespace(rms_norm=rms_norm, rope_and_write_kv=rope_and_write_kv, silu_and_mul=silu_and_mul,
                        paged_attention=paged_attention, name="torch")
TRITON = SimpleNamespace(rms_norm=rms_norm_triton, rope_and_write_kv=rope_and_write_kv_triton,
                         silu_and_mul=silu_and_mul_triton, paged_attention=paged_attention_triton, name="triton")


def select_backend(name, device, dtype, head_size, G):
    """`--attention-backend`  →  a namespace of the operations; cpu's multiplies matrices, too.

    "torch": the twins.  "triton": the kernels above.  "cpu": those of cpu_kernels.c, compiled now for this dtype, head
    size and G, if they weren't before.  "auto": Triton on a GPU (CUDA, ROCm), C on a CPU; where that can't be, the
    twins, and a line on stderr says so.
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
    if name == "auto" and on_gpu and not triton:
        say_once("nano-serve: plain PyTorch computes, several times slower than Triton would, which is not installed")
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


@functools.lru_cache(maxsize=None)
def say_once(line):
    print(line, file=sys.stderr)
