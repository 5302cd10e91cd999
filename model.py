"""What is computed (chapters 3 and 7): Llama-3 with grouped-query attention, from checkpoint folder to sampled token.

Mirrors   vLLM: model_executor/models/llama.py:446 LlamaForCausalLM, v1/sample/sampler.py:20 Sampler,
          vLLM: model_executor/layers/linear.py:419 ColumnParallelLinear
Promises  the same logits as transformers' LlamaForCausalLM (fp32: to rounding), for every dense checkpoint of the
          family: Llama-3/3.1/3.2, TinyLlama, SmolLM2, Mistral without a sliding window. The rest it refuses, by name.
Leaves out quantised weights, LoRA, pipeline parallelism, other architectures.
Order     1 LlamaConfig: what the checkpoint says it is.  2 weight_plan: which piece of which tensor goes where, on
          which rank; the loader, the checks and the shard report all follow that one list.  3 Llama: the forward pass.
          4 load_model.  5 sample: from logits to tokens.

Tensor parallel (TP, 张量并行): rank r of `size` holds a slice of every matrix. QKV and gate+up are cut by output (column
parallel), O and down by input (row parallel), so a layer needs just two all-reduces: after O and after down.
"""
import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

import kernels

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PACKED_FOR_ROWS = 32     # oneDNN picks tiles for so many rows; `bench_peers.py --linears` shows them at 1 to 2,048
GREEDY_BELOW = 1e-5      # as in vLLM: a smaller temperature would overflow the division; its argmax is certain anyway
LARGE = 1e30             # what a larger parameter is taken for: in fp32 it would be inf, and -inf / inf is no logit


# -- 1. The configuration ---------------------------------------------------------------------------------------------

class CheckpointError(ValueError):
    """The folder can't be served; the message names the file, the tensor or the field, and what would be right."""


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of config.json that change what is computed, under Hugging Face's names.

    Two spellings exist: the old one (`rope_theta` beside `rope_scaling`, `torch_dtype`) and that of transformers 5 (all
    of RoPE in `rope_parameters`, `dtype`). Either is read; where a file has both, they must agree."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None           # None, or the `llama3` block
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: frozenset = frozenset()

    @classmethod
    def from_folder(cls, folder):
        """Read config.json, and generation_config.json's EOS ids where there are any: the instruct models of Llama-3
        name <|eot_id|> only there, and run on past it if that file is not read. Raises CheckpointError."""
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            hint = " (a Meta-format checkpoint: use the Hugging Face one)" if (folder / "params.json").exists() else ""
            raise CheckpointError(f"{folder} holds no config.json, so it is no checkpoint folder{hint}")
        more_eos = frozenset()
        if (folder / "generation_config.json").is_file():
            more_eos = _id_set(_read_json(folder / "generation_config.json").get("eos_token_id"))
        try:
            return cls.from_dict(_read_json(folder / "config.json"), more_eos)
        except (TypeError, AttributeError, OverflowError) as error:      # a list where a number belongs, and the like
            raise CheckpointError(f"{folder / 'config.json'} has a field of an impossible type: {error}") from None

    @classmethod
    def from_dict(cls, raw, more_eos=frozenset()):
        """raw: the content of a config.json; more_eos: ids that end a sequence besides the config's own."""
        names = raw.get("architectures") or ["LlamaForCausalLM"]
        for name in names if isinstance(names, list) else [names]:
            if name not in ARCHITECTURES:
                raise CheckpointError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
        for key, plain in (("quantization_config", None), ("sliding_window", None), ("hidden_act", "silu")):
            if raw.get(key, plain) != plain:
                raise CheckpointError(f"config.json: {key} = {raw[key]!r} is not supported (only {plain})")
        new, old = (raw.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
        rope = {key: _agree(key, new.get(key), old.get(key)) for key in {**new, **old}}
        theta = _agree("rope_theta", raw.get("rope_theta"), rope.pop("rope_theta", None), 10000.0)
        rope_type = _agree("rope_type", rope.pop("rope_type", None), rope.pop("type", None), "default")
        if rope_type not in ("default", "llama3"):
            raise CheckpointError(f"rope type {rope_type!r} is not supported; supported: default, llama3")
        if rope_type == "llama3":
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                rope[key] = _positive(f"rope type llama3: {key}", rope.get(key))
            if rope["low_freq_factor"] >= rope["high_freq_factor"]:
                raise CheckpointError(f"config.json: rope type llama3: low_freq_factor {rope['low_freq_factor']} must "
                                      f"be below high_freq_factor {rope['high_freq_factor']}")
        if raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise CheckpointError("config.json: partial_rotary_factor is not supported (only 1.0)")
        size = {key: raw.get(key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                              "num_attention_heads", "max_position_embeddings")}
        size["max_position_embeddings"] = size["max_position_embeddings"] or 2048
        size["num_key_value_heads"] = raw.get("num_key_value_heads") or size["num_attention_heads"]
        for key, value in size.items():
            _positive(key, value, int)
        H, Hkv = size["num_attention_heads"], size["num_key_value_heads"]
        d = size["head_dim"] = _positive("head_dim", raw.get("head_dim") or size["hidden_size"] // H, int)
        if H % Hkv or d % 2:
            raise CheckpointError(f"config.json: {H} query heads over {Hkv} KV heads of size {d}: heads must divide, "
                                  "the size must be even")
        dtype, eps = _agree("dtype", raw.get("dtype"), raw.get("torch_dtype"), "float32"), raw.get("rms_norm_eps", 1e-6)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(f"config.json: dtype = {dtype!r} is not one of {', '.join(DTYPES)}")
        eos = _id_set(raw.get("eos_token_id")) | more_eos            # one outside the vocabulary can't be met
        flags = {key: bool(raw.get(key, False)) for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")}
        return cls(**size, **flags, dtype=dtype, rms_norm_eps=_positive("rms_norm_eps", eps),
                   rope_theta=_positive("rope_theta", theta),
                   rope_scaling=rope if rope_type == "llama3" else None,
                   eos_token_ids=frozenset(i for i in eos if 0 <= i < size["vocab_size"]))

    def check_tensor_parallel(self, size):
        """Raise ValueError unless the model can be cut into `size` ranks, naming the sizes that would work."""
        H, Hkv, I = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        fits = lambda n: H % n == 0 and I % n == 0 and (Hkv % n == 0 or n % Hkv == 0)   # n > Hkv: n / Hkv ranks a head
        if size < 1 or not fits(size):
            possible = ", ".join(str(n) for n in range(1, H + 1) if fits(n))
            raise ValueError(f"--tensor-parallel-size {size} doesn't divide this model's {H} query heads, "
                             f"{Hkv} KV heads and intermediate size {I}; possible: {possible}")


def _agree(key, a, b, default=None):
    """The value of a field that a config may spell in two places."""
    if a is not None and b is not None and a != b:
        raise CheckpointError(f"config.json gives {key} twice, as {a!r} and as {b!r}")
    return a if a is not None else b if b is not None else default


def _positive(key, value, kind=(int, float)):
    """A field's value, if it is a finite number above 0: NaN in a config makes fluent nonsense, not an error."""
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
        what = "whole number" if kind is int else "number"
        raise CheckpointError(f"config.json: {key} = {value!r}; a positive {what} is needed")
    return value


def _id_set(value):
    """eos_token_id as a set: it may be missing, one id, or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"eos_token_id = {value!r}; a token id or a list of token ids is needed")
    return frozenset(ids)


def _read_json(path):
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"not an object, but {content!r:.40}")
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from None


# -- 2. The weight plan -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Piece:
    """One cut: rows (dim 0) or columns (dim 1) start:stop of the checkpoint's tensor `name`, whose whole shape is
    `shape`, become the rows or columns from `offset` on of the model's parameter `param`.

    Example (4 query heads, 2 KV heads, head size 16, hidden 64; rank 1 of 2): the rank's QKV matrix [64, 64] is made of
    q_proj rows 32:64 at offset 0, k_proj rows 16:32 at 32, v_proj rows 16:32 at 48."""
    param: str
    name: str
    shape: tuple
    dim: int
    start: int
    stop: int
    offset: int


def weight_plan(config, rank=0, size=1):
    """Every piece that rank `rank` of `size` needs, layer by layer. KV heads are replicated as in vLLM, where a layer
    class has a weight_loader instead of this list.  vLLM: model_executor/layers/linear.py:1022 QKVParallelLinear"""
    c, D, I, d = config, config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = c.num_attention_heads * d, c.num_key_value_heads * d
    cut = lambda n: (n * rank // size, n * (rank + 1) // size)
    # More ranks than KV heads: 2 heads over 8 ranks → ranks 0-3 hold head 0, ranks 4-7 head 1. Their query heads are
    # just those of that KV head, so nothing else changes.
    head = c.num_key_value_heads * rank // size
    kv = cut(kv_rows) if size <= c.num_key_value_heads else (d * head, d * (head + 1))
    rows = padded_vocab(c, size) // size
    vocab = min(rows * rank, c.vocab_size), min(rows * (rank + 1), c.vocab_size)
    plan = [Piece("embed_tokens.weight", "model.embed_tokens.weight", (c.vocab_size, D), 0, *vocab, 0)]

    def fused(param, base, parts, n_in, bias):
        """Output-cut matrices that are one parameter here: `parts` is [(checkpoint name, rows, (start, stop))]."""
        offset = 0
        for part, n_out, (start, stop) in parts:
            plan.append(Piece(param + ".weight", f"{base}.{part}.weight", (n_out, n_in), 0, start, stop, offset))
            if bias:
                plan.append(Piece(param + ".bias", f"{base}.{part}.bias", (n_out,), 0, start, stop, offset))
            offset += stop - start

    def input_cut(param, name, n_in, bias):
        plan.append(Piece(param + ".weight", name + ".weight", (D, n_in), 1, *cut(n_in), 0))
        if bias:                                                     # whole on every rank, added by rank 0 alone
            plan.append(Piece(param + ".bias", name + ".bias", (D,), 0, 0, D, 0))

    for i in range(c.num_hidden_layers):
        at, hf = f"layers.{i}", f"model.layers.{i}"
        plan.append(Piece(f"{at}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (D,), 0, 0, D, 0))
        qkv = [("q_proj", q_rows, cut(q_rows)), ("k_proj", kv_rows, kv), ("v_proj", kv_rows, kv)]
        fused(f"{at}.qkv_proj", f"{hf}.self_attn", qkv, D, c.attention_bias)
        input_cut(f"{at}.o_proj", f"{hf}.self_attn.o_proj", q_rows, c.attention_bias)
        norm = "post_attention_layernorm.weight"
        plan.append(Piece(f"{at}.{norm}", f"{hf}.{norm}", (D,), 0, 0, D, 0))
        fused(f"{at}.gate_up_proj", f"{hf}.mlp", [("gate_proj", I, cut(I)), ("up_proj", I, cut(I))], D, c.mlp_bias)
        input_cut(f"{at}.down_proj", f"{hf}.mlp.down_proj", I, c.mlp_bias)
    plan.append(Piece("norm.weight", "model.norm.weight", (D,), 0, 0, D, 0))
    if not c.tie_word_embeddings:
        plan.append(Piece("lm_head.weight", "lm_head.weight", (c.vocab_size, D), 0, *vocab, 0))
    return plan


def padded_vocab(config, size):
    """The vocabulary rounded up to a multiple of `size`; the logits of the padding are cut off before sampling."""
    return -(-config.vocab_size // size) * size


def param_shapes(config, rank=0, size=1):
    """{parameter: its shape on this rank}, read off the plan: the last of a parameter's pieces ends where it does."""
    shapes = {}
    for p in weight_plan(config, rank, size):
        shape = list(p.shape)
        shape[p.dim] = p.offset + p.stop - p.start
        if p.param in ("embed_tokens.weight", "lm_head.weight"):
            shape[0] = padded_vocab(config, size) // size
        shapes[p.param] = tuple(shape)
    return shapes


# -- 3. The forward pass ----------------------------------------------------------------------------------------------

@dataclass
class ForwardBatch:
    """One ragged batch: all tokens that the scheduler gave to this step, chunks and decodes alike, laid end to end.

    token_ids, positions, slot_mapping [T] int64 · query_start_loc [S+1] int32 · seq_lens [S] int32, this step's tokens
    counted · block_tables [S, B] int32, rows padded with the null block 0 · logits_indices [S'] int64: the rows that
    end their sequence's known tokens; only they are turned into logits.
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


class Weights(nn.Module):
    """One place for a matrix [out, in] or a norm's vector, with a bias or without; `packed`: see pack_weights."""

    def __init__(self):
        super().__init__()
        self.register_parameter("bias", None)
        self.packed = None


class Llama(nn.Module):
    """Rank `tp_rank` of the model.  vLLM: model_executor/models/llama.py:446 LlamaForCausalLM

    comm: has `all_reduce(x)` (sum over ranks, returns it) and `gather(x)` (on rank 0 all ranks side by side in the last
    dimension); None for tp_size 1. The parameters are those of `param_shapes`, zeros until `load_model` fills them."""

    def __init__(self, config, dtype=torch.float32, device="cpu", tp_rank=0, tp_size=1, comm=None,
                 attention_backend="auto"):
        super().__init__()
        config.check_tensor_parallel(tp_size)
        self.config, self.tp_rank, self.tp_size, self.comm = config, tp_rank, tp_size, comm
        self.ops = kernels.select_backend(attention_backend, torch.device(device))
        self.num_heads = config.num_attention_heads // tp_size                       # this rank's
        self.num_kv_heads = max(config.num_key_value_heads // tp_size, 1)
        # One parameter for each name of param_shapes: "layers.0.qkv_proj.weight" is self.layers[0].qkv_proj.weight.
        self.layers = nn.ModuleList(nn.Module() for _ in range(config.num_hidden_layers))
        for path, shape in param_shapes(config, tp_rank, tp_size).items():
            *owner, leaf = path.split(".")
            module = self
            for name in owner:
                if not hasattr(module, name):
                    module.add_module(name, Weights())
                module = getattr(module, name)
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            module.register_parameter(leaf, nn.Parameter(zeros, requires_grad=False))
        if config.tie_word_embeddings:
            self.lm_head = self.embed_tokens
        self.inv_freq = rope_frequencies(config).to(device)                          # [d/2] fp32

    def forward(self, batch, kv_cache):
        """batch: a ForwardBatch; kv_cache: `kv_cache.KVCache` of this rank, written in place  →  logits [S', V].
        x is what the next block reads, residual what it adds to: keeping them apart lets each norm do the add."""
        ops, eps = self.ops, self.config.rms_norm_eps
        cos, sin = self.rope_cos_sin(batch.positions)                                # [T, d] each
        plan = ops.plan(batch.query_start_loc, batch.seq_lens, batch.block_tables, kv_cache.k[0], self.num_heads)
        x, residual = self.embed(batch.token_ids), None                              # [T, D]
        for layer, k_cache, v_cache in zip(self.layers, kv_cache.k, kv_cache.v):
            x, residual = ops.rms_norm(x, layer.input_layernorm.weight, eps, residual)
            qk, v = self.qkv(layer, x)                                               # [T, H + Hkv, d], [T, Hkv, d]
            q = ops.rope_and_write_kv(qk, v, cos, sin, k_cache, v_cache, batch.slot_mapping)     # [T, H, d]
            x = ops.paged_attention(q, k_cache, v_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables,
                                    self.config.head_dim ** -0.5, plan).flatten(1)   # [T, H * d]
            if layer is self.layers[-1]:
                # From here on no token looks at another, and of a chunk of 2,000 tokens only the last makes a logit.
                x, residual = x[batch.logits_indices], residual[batch.logits_indices]        # T is S' from here on
            x = self.row_parallel(layer.o_proj, x)                                   # [T, D]
            x, residual = ops.rms_norm(x, layer.post_attention_layernorm.weight, eps, residual)
            x = ops.silu_and_mul(linear(layer.gate_up_proj, x))                      # [T, I]
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
        return linear(layer.qkv_proj, x).view(len(x), H + 2 * Hkv, d).split((H + Hkv, Hkv), dim=1)

    def row_parallel(self, proj, x):
        """A matrix cut by input: each rank has a share of every output, so the shares are summed (one all-reduce).
        The bias belongs to the sum: added on every rank, it would count tp_size times."""
        x = linear(proj, x, with_bias=self.tp_rank == 0)                             # [T, D]
        return x if self.tp_size == 1 else self.comm.all_reduce(x)

    def logits(self, x):
        """x [S', D]  →  [S', V] on rank 0, which samples: its own vocabulary rows beside those of the other ranks."""
        logits = linear(self.lm_head, x)                                             # [S', V/size]
        return logits if self.tp_size == 1 else self.comm.gather(logits)[:, :self.config.vocab_size]

    def rope_cos_sin(self, positions):
        """positions [T]  →  cos, sin [T, d] as `kernels.apply_rope` takes them, in the weights' dtype. The angles are
        fp32: in bf16 those of positions 1000 and 1001 would be equal."""
        angles = positions[:, None].float() * self.inv_freq                          # [T, d/2]
        cos, sin, dtype = angles.cos(), angles.sin(), self.norm.weight.dtype
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def pack_weights(self):
        """On a CPU: lay each matrix out in the tiles that oneDNN's products walk through, once, not in each product.
        For 1 to 32 rows of a 135M model that takes 30 to 53 % off their time (`bench_peers.py --linears`).

        The plain copy is dropped, but for the embedding, from which single rows are read: a tied model then holds it
        twice. Nothing happens where this build of PyTorch or the dtype has no such layout."""
        mkldnn, dtype = torch.ops.mkldnn, self.norm.weight.dtype
        if not torch.backends.mkldnn.is_available() or not hasattr(mkldnn, "_reorder_linear_weight"):
            return
        supported = {torch.float16: mkldnn._is_mkldnn_fp16_supported, torch.bfloat16: mkldnn._is_mkldnn_bf16_supported}
        if dtype in supported and not supported[dtype]():
            return
        for name, weights in self.named_modules():
            embedding = name == "embed_tokens"
            if isinstance(weights, Weights) and weights.weight.ndim == 2 and (not embedding or self.lm_head is weights):
                weights.packed = mkldnn._reorder_linear_weight(weights.weight.detach(), PACKED_FOR_ROWS)
                if not embedding:
                    weights.weight = None


def linear(proj, x, with_bias=True):
    """x [T, in] times a matrix [out, in]  →  [T, out]."""
    bias = proj.bias if with_bias else None
    if proj.packed is not None:
        return torch.ops.mkldnn._linear_pointwise(x, proj.packed, bias, "none", [], "")      # no activation fused
    return F.linear(x, proj.weight, bias)


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


# -- 4. Loading -------------------------------------------------------------------------------------------------------

def find_checkpoint(model):
    """A folder's path, or a hub id like "meta-llama/Llama-3.2-1B", looked up in (or fetched into) the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    if Path(model).exists() or str(model).count("/") != 1 or str(model)[0] in "./~":
        raise CheckpointError(f"{model} is no folder with a checkpoint, and no hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                                      ignore_patterns=["original/*"]))
    except Exception as error:          # offline, gated, misspelt: the hub has a class for each, the remedy is the same
        raise CheckpointError(f"{model} is neither a folder here nor to be had from the hub ({type(error).__name__}). "
                              f"With a connection: `hf download {model}`, then name it again") from error


def checkpoint_tensors(folder):
    """{tensor name: (file, shape)} of a checkpoint, from the index where there is one and the files' headers.
    The index decides: a file it doesn't name is ignored. A safetensors file opens with 8 bytes (the header's length),
    then JSON with each tensor's place; one that ends before its last tensor does was cut off in a download."""
    folder = Path(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        wanted = _read_json(index).get("weight_map")
        inside = lambda file: isinstance(file, str) and file == Path(file).name     # no path out of the folder
        if not wanted or not isinstance(wanted, dict) or not all(map(inside, wanted.values())):
            raise CheckpointError(f"{index} holds no weight_map that tells for each tensor a file of this folder")
    elif single.is_file():
        wanted = None
    else:
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pth", ".safetensors", ".gguf"))
        raise CheckpointError(f"{folder} holds neither model.safetensors nor its index (weight files found: "
                              f"{', '.join(found) or 'none'})")
    tensors = {}
    for file in sorted(set(wanted.values())) if wanted else [single.name]:
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"{index} names {file}, which is missing")
        with open(path, "rb") as f:
            try:
                (length,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(length)) if length < path.stat().st_size else None
                header = {name: (info["dtype"], tuple(info["shape"]), 8 + length + info["data_offsets"][1])
                          for name, info in header.items() if name != "__metadata__"}
            except (struct.error, ValueError, AttributeError, TypeError, KeyError, IndexError):
                raise CheckpointError(f"{path} is not a safetensors file, or is truncated within its header") from None
        for name, (dtype, shape, end) in header.items():
            if wanted is not None and wanted.get(name) != file:
                continue
            if end > path.stat().st_size:
                raise CheckpointError(f"{path} is truncated: tensor {name} ends beyond the end of the file")
            if dtype not in ("F32", "F16", "BF16", "F64"):
                raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}; only float weights are supported")
            tensors[name] = path, shape
    for name in wanted or ():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing from {wanted[name]}, where the index says it is")
    return tensors


def load_model(folder, dtype, device="cpu", tp_rank=0, tp_size=1, comm=None, attention_backend="auto"):
    """A Llama with its weights: each piece goes from the mapped file straight to its place, converted on the way, so
    that at most one tensor exists twice. Names and shapes are checked first. Raises CheckpointError naming the tensor.
    vLLM: model_executor/models/llama.py:441 LlamaModel.load_weights"""
    config, tensors = LlamaConfig.from_folder(folder), checkpoint_tensors(folder)
    config.check_tensor_parallel(tp_size)
    plan = weight_plan(config, tp_rank, tp_size)
    for piece in plan:
        if piece.name not in tensors:
            raise CheckpointError(f"tensor {piece.name} {list(piece.shape)} is missing from {folder}")
        if (shape := tensors[piece.name][1]) != piece.shape:
            raise CheckpointError(f"tensor {piece.name} is {list(shape)}; the config asks for {list(piece.shape)}")
    unused = set(tensors) - {p.name for p in plan}
    unused -= {name for name in unused if name.endswith("rotary_emb.inv_freq")}      # old files store it; computed here
    if config.tie_word_embeddings:
        unused.discard("lm_head.weight")                                             # some tools save the tied head too
    if unused:
        raise CheckpointError(f"{len(unused)} tensors of {folder} have no place in this model; first: {min(unused)}")
    model = Llama(config, dtype, device, tp_rank, tp_size, comm, attention_backend)
    params = dict(model.named_parameters())
    for file in sorted({path for path, _ in tensors.values()}):
        try:
            with safe_open(file, framework="pt") as f:
                for p in plan:
                    if tensors[p.name][0] == file:
                        rows = f.get_slice(p.name)
                        rows = rows[p.start:p.stop] if p.dim == 0 else rows[:, p.start:p.stop]
                        params[p.param].narrow(p.dim, p.offset, p.stop - p.start).copy_(rows)
        except SafetensorError as error:                                             # places that don't fit the shapes
            raise CheckpointError(f"{file} can't be read: {error}") from None
    return model


def auto_dtype(config, device):
    """`--dtype auto`: the file's own on a GPU. On a CPU fp32 up to 2 billion parameters: it is exact, and the faster
    one on CPUs without bf16 instructions; with them (avx512_bf16, amx) `--dtype bfloat16` is faster. Larger models keep
    the file's dtype, for they would not fit."""
    n = sum(math.prod(shape) for shape in param_shapes(config).values())
    return torch.float32 if device == "cpu" and n <= 2e9 else DTYPES[config.dtype]


# -- 5. Sampling ------------------------------------------------------------------------------------------------------

def sample(logits, requests):
    """One token for each row.  logits [S', V], the rows' requests  →  list of ids, None where logits aren't finite.

    temperature 0 is argmax, in any mixture with sampled rows. A draw is one uniform number that depends on the
    request's seed and the index of the output token, nothing else: not on the neighbours, the chunks, or a preemption.
    vLLM: v1/sample/sampler.py:20 Sampler, which draws per-request generators' exponentials instead."""
    logits = logits.float()                                                          # [S', V]
    if any(adjusts_logits(r) for r in requests):
        logits = logits.clone()                  # the caller still wants the raw ones, for the log-probabilities
        for row, request in zip(logits, requests):
            adjust_logits(row, request)
    best, ids = likeliest(logits)                                                    # [S'] each
    token_ids = [i if ok else None for i, ok in zip(ids.tolist(), best.isfinite().tolist())]
    rows = [i for i, r in enumerate(requests)
            if r.sampling_params.temperature >= GREEDY_BELOW and token_ids[i] is not None]
    if rows:
        for i, token_id in zip(rows, draw(logits[rows], [requests[i] for i in rows])):
            token_ids[i] = token_id
    return token_ids


def likeliest(logits):
    """The largest logit of each row and the first id that has it; a NaN counts as largest.  [n, V]  →  [n], [n].

    PyTorch finds a maximum several elements at a time, but its index one by one. So take the maxima of stretches of K
    first, and look for the index in one stretch a row. K divides V and is 256 at most; an odd V gains nothing."""
    K = math.gcd(logits.shape[1], 256)
    stretches = logits.reshape(len(logits), logits.shape[1] // K, K)                 # [n, V/K, K]
    maxima = stretches.amax(-1)                                                      # [n, V/K]
    first = maxima.argmax(-1)                                                        # [n]
    within = stretches[torch.arange(len(logits), device=logits.device), first].argmax(-1)               # [n]
    return maxima.amax(-1), first * K + within


def draw(logits, requests):
    """Temperature, then top_k and min_p (which commute), then top_p, then the draw.  logits [n, V] fp32  →  n ids.

    Walk down the sorted probabilities until the uniform number is used up. The sort is stable, so that of equal
    probabilities the lower id comes first and a cut between them is the same every time."""
    column = lambda name: logits.new_tensor([[float(min(getattr(r.sampling_params, name), LARGE))] for r in requests])
    probs, ids = (logits / column("temperature")).softmax(-1).sort(dim=-1, descending=True, stable=True)   # [n, V] each
    top_k, top_p, min_p = column("top_k"), column("top_p"), column("min_p")          # [n, 1]
    rank = torch.arange(probs.shape[1], device=logits.device)                        # [V]
    probs = probs.where((rank < top_k) | (top_k <= 0), 0.0)                          # top_k 0 and -1: off
    probs = probs.where(probs >= min_p * probs[:, :1], 0.0)
    total = probs.cumsum(-1, dtype=torch.float64)                                    # [n, V] fp64: 1e5 tiny ones add up
    # Keep a token while the mass of the likelier ones is below top_p of what is left, as in vLLM; the likeliest always.
    probs = probs.where((total - probs < top_p * total[:, -1:]) | (rank == 0), 0.0)
    cumulative = probs.cumsum(-1, dtype=torch.float64)                               # [n, V]
    u = cumulative.new_tensor([[uniform(r.sampling_params.seed, len(r.output_token_ids))] for r in requests])   # [n, 1]
    index = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)       # [n, 1]
    index = index.minimum((probs > 0).sum(-1, keepdim=True) - 1)                     # u < 1; the product may round up
    return ids.gather(1, index).flatten().tolist()


def uniform(seed, index):
    """A number in [0, 1) from (seed, output index): 53 bits of a hash, so no generator has a state to carry along."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2 ** 53


def adjusts_logits(request):
    p = request.sampling_params
    return (p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
            or len(request.output_token_ids) < p.min_tokens)


def adjust_logits(row, request):
    """What changes even a greedy choice; row [V], in place.  vLLM: v1/sample/ops/penalties.py:10 apply_all_penalties"""
    p, outputs = request.sampling_params, request.output_token_ids
    if len(outputs) < p.min_tokens:              # not yet allowed to end: no EOS, no stop token
        row[sorted({*p.stop_token_ids, *request.eos_token_ids})] = -torch.inf        # the latter: empty if ignore_eos
    if p.repetition_penalty != 1:                # over prompt and output; the sign decides which way is "less likely"
        seen = torch.tensor(sorted(set(request.all_token_ids)), device=row.device)
        penalty = min(p.repetition_penalty, LARGE)
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if outputs and (p.presence_penalty or p.frequency_penalty):     # over the output alone
        seen, count = torch.tensor(outputs, device=row.device).unique(return_counts=True)
        row[seen] -= p.presence_penalty + p.frequency_penalty * count


def top_logprobs(logits, token_ids, n):
    """Log-probabilities of the raw logits (before temperature, penalties and cuts, vLLM's default `raw_logprobs`).

    logits [m, V], token_ids m chosen ids, n how many of the likeliest  →  for each row [(id, logprob, rank)]: the
    chosen one first, then the n likeliest in order; rank 1 is the likeliest."""
    logprobs = logits.float().log_softmax(-1)                                        # [m, V]
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])     # [m, 1]
    ranks = (logprobs > chosen).sum(-1) + 1                                          # [m]
    values, ids = logprobs.topk(min(n, logprobs.shape[1]), dim=-1)                   # [m, n] each
    columns = token_ids, chosen.flatten().tolist(), ranks.tolist(), ids.tolist(), values.tolist()
    return [[(t, c, r)] + [(i, v, k + 1) for k, (i, v) in enumerate(zip(row_ids, row_values))]
            for t, c, r, row_ids, row_values in zip(*columns)]
