"""What is computed (chapters 1 and 10): Llama-3 with grouped-query attention, a layer written out.

Mirrors   vLLM: model_executor/models/llama.py:446 LlamaForCausalLM,
          vLLM: model_executor/models/llama.py:248 LlamaDecoderLayer
Promises  the same logits as transformers' LlamaForCausalLM (fp32: to rounding), whatever the mixture of prefill chunks
          and decodes in the batch, and whatever the number of ranks.
Leaves out LoRA, pipeline parallelism, other architectures. Sizes and weights come from checkpoint.py.
Order     1 ForwardBatch: what goes in.  2 Llama: what a layer holds, then the forward pass.  3 The rotary angles.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import kernels


# -- 1. What goes in --------------------------------------------------------------------------------------------------

@dataclass
class ForwardBatch:
    """One ragged batch: all tokens that the scheduler gave to this step, chunks and decodes alike, laid end to end.

    token_ids, positions, slot_mapping [T] int64 · query_start_loc [S+1] int32 · seq_lens [S] int32, this step's tokens
    counted · block_tables [S, B] int32, rows padded with the null block 0 · logits_indices [S'] int64: the rows that
    are turned into logits: those that end their sequence's known tokens, and those whose prompt_logprobs are wanted.
    Example (block size 4; A decodes its 10th token from blocks 3 5 1, B prefills 3 tokens into block 2):
        positions 9 | 0 1 2      slot_mapping 5 | 8 9 10      query_start_loc 0 1 4      seq_lens 10 3
        block_tables 3 5 1 / 2 0 0                            logits_indices 0 3"""
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor


# -- 2. The model -----------------------------------------------------------------------------------------------------

class Norm(nn.Module):
    """The vector [D] that an RMSNorm scales by."""

    def __init__(self, size, dtype, device):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """A matrix [out, in], with a bias or without; zeros until the checkpoint fills it. gated: it is gate above up, and
    what comes out is silu(gate) * up, [T, out / 2]. `packed`: see pack_weights."""

    def __init__(self, ops, n_in, n_out, bias, dtype, device, gated=False):
        super().__init__()
        zeros = lambda *shape: nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
        self.weight, self.bias = zeros(n_out, n_in), zeros(n_out) if bias else None
        self.ops, self.packed, self.gated = ops, None, gated

    def forward(self, x, with_bias=True):
        """x [T, in]  →  [T, out]."""
        bias = self.bias if with_bias else None
        if self.packed is not None:
            return self.ops.linear(x, self.packed, bias)
        x = F.linear(x, self.weight, bias)
        return self.ops.silu_and_mul(x) if self.gated else x


class LlamaLayer(nn.Module):
    """What one layer holds. Of `size` ranks each has the same fields with a slice of every matrix: qkv and gate_up cut
    by output, o and down by input. H, Hkv, I: this rank's query heads, KV heads, rows of gate (and of up)."""

    def __init__(self, ops, config, H, Hkv, I, dtype, device):
        super().__init__()
        D, d, to = config.hidden_size, config.head_dim, (dtype, device)
        self.input_layernorm = Norm(D, *to)
        self.qkv_proj = Linear(ops, D, (H + 2 * Hkv) * d, config.attention_bias, *to)    # q, k, v one above the other
        self.o_proj = Linear(ops, H * d, D, config.attention_bias, *to)
        self.post_attention_layernorm = Norm(D, *to)
        self.gate_up_proj = Linear(ops, D, 2 * I, config.mlp_bias, *to, gated=True)
        self.down_proj = Linear(ops, I, D, config.mlp_bias, *to)


class Llama(nn.Module):
    """Rank `tp_rank` of the model.  vLLM: model_executor/models/llama.py:446 LlamaForCausalLM

    config: a checkpoint.LlamaConfig; comm: has `all_reduce(x)` (sum over ranks, returns it) and `gather(x)` (on rank 0
    all ranks side by side in the last dimension), None for tp_size 1. Weights are zeros until `load_model` fills them.
    """

    def __init__(self, config, dtype=torch.float32, device="cpu", tp_rank=0, tp_size=1, comm=None,
                 attention_backend="auto"):
        super().__init__()
        config.check_tensor_parallel(tp_size)
        self.config, self.tp_rank, self.tp_size, self.comm = config, tp_rank, tp_size, comm
        self.ops = ops = select_ops(config, attention_backend, dtype, device, tp_size)
        self.num_heads = config.num_attention_heads // tp_size                       # this rank's
        self.num_kv_heads = max(config.num_key_value_heads // tp_size, 1)
        vocab, D, to = config.padded_vocab(tp_size) // tp_size, config.hidden_size, (dtype, device)
        self.embed_tokens = Linear(ops, D, vocab, False, *to)
        self.layers = nn.ModuleList(
            LlamaLayer(ops, config, self.num_heads, self.num_kv_heads, config.intermediate_size // tp_size, *to)
            for _ in range(config.num_hidden_layers))
        self.norm = Norm(D, *to)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else Linear(ops, D, vocab, False, *to)
        self.inv_freq = rope_frequencies(config).to(device)                          # [d/2] fp32

    def forward(self, batch, kv_cache):
        """batch: a ForwardBatch; kv_cache: `kv_cache.KVCache` of this rank, written in place  →  logits [S', V].
        x is what the next block reads, residual what it adds to: keeping them apart lets each norm do the add."""
        ops, eps = self.ops, self.config.rms_norm_eps
        cos, sin = self.rope_cos_sin(batch.positions)                                # [T, d] each
        x, residual = self.embed(batch.token_ids), None                              # [T, D]
        for layer, k_cache, v_cache in zip(self.layers, kv_cache.k, kv_cache.v):
            x, residual = ops.rms_norm(x, layer.input_layernorm.weight, eps, residual)
            qk, v = self.qkv(layer, x)                                               # [T, H + Hkv, d], [T, Hkv, d]
            q = ops.rope_and_write_kv(qk, v, cos, sin, k_cache, v_cache, batch.slot_mapping)     # [T, H, d]
            x = ops.paged_attention(q, k_cache, v_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables,
                                    self.config.head_dim ** -0.5).flatten(1)         # [T, H * d]
            if layer is self.layers[-1]:
                # From here on no token looks at another, and of a chunk of 2,000 tokens one makes logits, as a rule.
                x, residual = x[batch.logits_indices], residual[batch.logits_indices]        # T is S' from here on
            x = self.row_parallel(layer.o_proj, x)                                   # [T, D]
            x, residual = ops.rms_norm(x, layer.post_attention_layernorm.weight, eps, residual)
            x = layer.gate_up_proj(x)                                                # [T, I]
            x = self.row_parallel(layer.down_proj, x)                                # [T, D]
        x, _ = ops.rms_norm(x, self.norm.weight, eps, residual)                      # [S', D]
        return self.logits(x)

    def embed(self, token_ids):
        """Vocabulary-parallel lookup: a rank knows its own rows, gives zeros for the others, and the sum is the row."""
        if self.tp_size == 1:
            return F.embedding(token_ids, self.embed_tokens.weight)                  # [T, D]
        rows = len(self.embed_tokens.weight)
        local = token_ids - rows * self.tp_rank                                      # [T]
        mine = (local >= 0) & (local < rows)                                         # [T]
        x = F.embedding(local.where(mine, 0), self.embed_tokens.weight) * mine[:, None]   # [T, D]
        return self.comm.all_reduce(x)

    def qkv(self, layer, x):
        """x [T, D]  →  q and k side by side [T, H + Hkv, d], v [T, Hkv, d]: one matrix product, since all three read
        the same x."""
        H, Hkv, d = self.num_heads, self.num_kv_heads, self.config.head_dim
        return layer.qkv_proj(x).view(len(x), H + 2 * Hkv, d).split((H + Hkv, Hkv), dim=1)

    def row_parallel(self, proj, x):
        """A matrix cut by input: each rank has a share of every output, so the shares are summed (one all-reduce).
        The bias belongs to the sum: added on every rank, it would count tp_size times."""
        x = proj(x, with_bias=self.tp_rank == 0)                                     # [T, D]
        return x if self.tp_size == 1 else self.comm.all_reduce(x)

    def logits(self, x):
        """x [S', D]  →  [S', V] on rank 0, which samples: its own vocabulary rows beside those of the other ranks."""
        logits = self.lm_head(x)                                                     # [S', V/size]
        return logits if self.tp_size == 1 else self.comm.gather(logits)[:, :self.config.vocab_size]

    def rope_cos_sin(self, positions):
        """positions [T]  →  cos, sin [T, d] as `kernels.apply_rope` takes them, in the weights' dtype. The angles are
        fp32: in bf16 those of positions 1000 and 1001 would be equal."""
        angles = positions[:, None].float() * self.inv_freq                          # [T, d/2]
        cos, sin, dtype = angles.cos(), angles.sin(), self.norm.weight.dtype
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def pack_weights(self):
        """For cpu_kernels.c: lay each matrix out in the order in which its products read it. The plain copy is dropped,
        but for the embedding, from which single rows are read: one that is the head, too, is then held twice."""
        for name, proj in self.named_modules():
            if self.ops.name == "cpu" and isinstance(proj, Linear) and (name != "embed_tokens" or proj is self.lm_head):
                proj.packed = self.ops.pack(proj.weight.detach(), proj.gated)
                if name != "embed_tokens":
                    proj.weight = None


def select_ops(config, attention_backend, dtype, device, tp_size):
    """The operations for a rank's share of the heads."""
    G = config.num_attention_heads // tp_size // max(config.num_key_value_heads // tp_size, 1)
    return kernels.select_backend(attention_backend, torch.device(device), dtype, config.head_dim, G)


# -- 3. The rotary angles ---------------------------------------------------------------------------------------------

def rope_frequencies(config):
    """How far a position turns each pair of dimensions, in radians: theta^(-2i/d), i = 0 … d/2-1  →  [d/2] fp32.

    Llama-3.1 stretches the slow ones so that 128k positions fit the angles learned at 8k: wavelengths over
    original/low_freq_factor turn `factor` times slower, those under original/high_freq_factor stay, a ramp in between.
    vLLM: model_executor/layers/rotary_embedding/llama3_rope.py:11 Llama3RotaryEmbedding"""
    freq = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)    # [d/2] fp32
    if (s := config.rope_scaling) is None:
        return freq
    turns = s["original_max_position_embeddings"] * freq / (2 * math.pi)      # full turns within the original context
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)                         # 0: slow down by factor … 1: leave as is
    return (1 - keep) * freq / s["factor"] + keep * freq                      # [d/2]


if __name__ == "__main__":       # twelve tokens at once, in chunks, one by one: the logits behind the last are the same
    from checkpoint import load_model
    from engine_args import EMBEDDED_MODEL
    from kv_cache import KVCache
    llama, ids, table = load_model(EMBEDDED_MODEL, torch.float32), torch.arange(300, 312), torch.tensor([[3, 5, 1]])
    for chunks in ([12], [5, 4, 3], [1] * 12):
        d, end = llama.config.head_dim, 0
        cache = KVCache(len(llama.layers), 8, 4, llama.num_kv_heads, d, torch.float32, "cpu")
        for n in chunks:         # block size 4, so position 7 lies in block 5 at offset 3: slot 23
            p, end = torch.arange(end, end + n), end + n                                        # [T]
            batch = ForwardBatch(ids[p], p, table[0, p // 4] * 4 + p % 4, torch.tensor([0, n]).int(),
                                 torch.tensor([end]).int(), table.int(), torch.tensor([n - 1]))
            with torch.inference_mode():
                logits = llama(batch, cache)                                                    # [1, V]
        best = zip(*(x[0].tolist() for x in logits.topk(3)))
        print(f"chunks of {str(chunks):40}likeliest: " + "  ".join(f"{i} ({value:.3f})" for value, i in best))
