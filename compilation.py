"""A step of decodes in few calls: recorded on a GPU, compiled on a CPU (chapter 6).

Mirrors   vLLM: v1/worker/gpu/cudagraph_utils.py:108 CudaGraphManager
          vLLM: config/compilation.py:37 CompilationMode
Promises  the logits that Llama.forward would give. A decode does little work in many small operations, and what
          surrounds an operation (the interpreter, a launch, memory for its result) costs as much as the operation.
          DecodeGraphs and CompiledDecode both have `fit(batch)`: is it one of theirs?, and `run(batch)` → logits.
Leaves out steps with prefill chunks in them, and tensor-parallel ranks; on a CPU also decodes in company.
Order     1 DecodeGraphs (on by default, --enforce-eager turns it off).  2 CompiledDecode (--compile).
"""
import types
from typing import NamedTuple

import torch
import torch.nn.functional as F

import kernels
from model import ForwardBatch


# -- 1. Recorded, on a GPU --------------------------------------------------------------------------------------------

CAPTURE_SIZES = 1, 2, 4, *range(8, 257, 8)       # vLLM: config/vllm.py:1778 VllmConfig._set_cudagraph_sizes


class DecodeGraphs:
    """Steps in which everybody decodes, recorded and replayed.

    Such a step launches about ten kernels a layer, and where a small batch keeps the GPU busy for less time than the
    CPU needs to launch them, the GPU waits for the CPU. But for one batch size it is always the same list of kernels
    over the same shapes. A CUDA graph is that list, recorded once; a replay starts all of it with one call. It has
    addresses in it, not tensors: the inputs are copied to where they were at the recording, and the logits come out
    where they came out then.

    A graph serves one batch size and one width of the block tables. A batch takes the next larger of both: the rows to
    spare are padding, of length 0 and slot -1, so they read no key and write none, whatever their block table still
    holds. Example: 3 decodes with tables 5 blocks wide run in the graph for 4 rows and 8 blocks, recorded when it is
    first asked for.
    vLLM: v1/worker/gpu/cudagraph_utils.py:108 CudaGraphManager, which records all sizes at the start, and whose other
    modes also cover mixed batches, all but their attention. Left out, too: graphs of tensor-parallel ranks.
    """

    def __init__(self, forward, logits, record):
        """forward: a ForwardBatch → logits [S', V]; logits [largest size, V]: where all graphs leave theirs, since one
        for each would add up to gigabytes; record: takes a function without arguments, returns what replays it."""
        self.forward, self.logits, self.record = forward, logits, record
        self.graphs = {}                         # (batch size, blocks) → (the batch that it reads, replay)

    @staticmethod
    def fit(batch):
        """Is this batch one token a sequence, with a logit for each, and no larger than the largest graph?"""
        return len(batch.token_ids) == len(batch.seq_lens) == len(batch.logits_indices) <= CAPTURE_SIZES[-1]

    def run(self, batch):
        """A batch that fits  →  logits [S, V], overwritten by the next run."""
        S, B = batch.block_tables.shape
        rows = min(n for n in CAPTURE_SIZES if n >= S)
        blocks = 1 << (B - 1).bit_length()                       # the next power of two
        if (rows, blocks) not in self.graphs:
            static = self.padding(rows, blocks)
            self.graphs[rows, blocks] = static, self.record(lambda: self.logits[:rows].copy_(self.forward(static)))
        static, replay = self.graphs[rows, blocks]
        for name in ("token_ids", "positions", "slot_mapping", "seq_lens"):
            getattr(static, name)[:S] = getattr(batch, name)
        static.slot_mapping[S:], static.seq_lens[S:] = -1, 0
        static.block_tables[:S, :B] = batch.block_tables         # what older batches left in the rest is never read
        replay()         # query_start_loc is 0 … rows and logits_indices 0 … rows-1 in all that fit: one row a sequence
        return self.logits[:S]

    def padding(self, rows, blocks):
        """A batch of rows that are all padding."""
        zeros = lambda *shape, dtype=torch.int64: torch.zeros(*shape, dtype=dtype, device=self.logits.device)
        upwards = lambda n, dtype: torch.arange(n, dtype=dtype, device=self.logits.device)
        return ForwardBatch(token_ids=zeros(rows), positions=zeros(rows), slot_mapping=zeros(rows) - 1,
                            query_start_loc=upwards(rows + 1, torch.int32), seq_lens=zeros(rows, dtype=torch.int32),
                            block_tables=zeros(rows, blocks, dtype=torch.int32),
                            logits_indices=upwards(rows, torch.int64))


def cuda_graph_recorder():
    """DecodeGraphs' `record` on a GPU. All graphs take turns in one pool of memory, since no two run at a time."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(function):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()                           # the first time compiles kernels and sets up libraries: not recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, stream):
            function()
        return graph.replay
    return record


# -- 2. Compiled, on a CPU ---------------------------------------------------------------------------------------------

COLUMNS = 32             # with AVX-512: two vector registers of 16 fp32 sums each


class Matrix(NamedTuple):
    """A matrix [out, in] in the layout that suits a product with one row: groups of COLUMNS outputs, and in each, for
    every input, its COLUMNS weights next to each other. A CPU then adds up a group's outputs side by side in vector
    registers, reading memory from front to back; in the stored layout each output would end in a sum across a register.
    """
    groups: torch.Tensor             # [out / COLUMNS rounded up, in, COLUMNS]; outputs to spare are zeros
    bias: torch.Tensor | None        # [out]
    out: int

    @classmethod
    def of(cls, weights):
        """weights: a model.Linear, before its matrix is packed away."""
        out, n_in = weights.weight.shape
        padded = F.pad(weights.weight, (0, 0, 0, -out % COLUMNS))
        return cls(padded.view(-1, COLUMNS, n_in).transpose(1, 2).contiguous(), weights.bias, out)

    def times(self, x):
        """x [1, in]  →  [1, out]. As it stands this would write every product of two numbers to memory before it sums
        them. Compiled, both become one loop, and a product is fp32, in a register, and gone."""
        y = (self.groups * x.view(1, -1, 1)).sum(1, dtype=torch.float32).view(1, -1)[:, :self.out]     # [1, out] fp32
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Layer(NamedTuple):
    """What one layer reads: the norms' vectors [D] and its four matrices."""
    input_layernorm: torch.Tensor
    qkv_proj: Matrix
    o_proj: Matrix
    post_attention_layernorm: torch.Tensor
    gate_up_proj: Matrix
    down_proj: Matrix


def forward_one(token_id, cos, sin, slots, k_cache, v_cache, embedding, layers, norm, lm_head, num_heads, eps):
    """`Llama.forward` for a lone decode: the same operations in the same order.

    token_id [1], cos and sin [1, d], slots [L] of the sequence's tokens, this step's the last, caches [layers, N, bs,
    Hkv, d], embedding [V, D], norm [D]  →  logits [1, V]. This is never run. PyTorch follows it once with tensors that
    have shapes and no data, and writes C++ for what lies between two attentions: a function for each layer, one more
    for the end. Within one, what stood in memory between two operations often stays in a register: norm and residual
    add, or gate, silu and up, become one loop.
    """
    Hkv, d = k_cache.shape[3:]
    x = F.embedding(token_id, embedding)                                                 # [1, D]
    residual = None
    for i, layer in enumerate(layers):
        x, residual = kernels.rms_norm(x, layer.input_layernorm, eps, residual)
        qk, v = layer.qkv_proj.times(x).view(1, -1, d).split((num_heads + Hkv, Hkv), dim=1)
        q, k = kernels.apply_rope(qk, cos, sin).split((num_heads, Hkv), dim=1)           # [1, H, d], [1, Hkv, d]
        x = torch.ops.nano_serve.attend(q, k, v, k_cache[i], v_cache[i], slots).flatten(1)                # [1, H * d]
        x, residual = kernels.rms_norm(layer.o_proj.times(x), layer.post_attention_layernorm, eps, residual)
        x = layer.down_proj.times(kernels.silu_and_mul(layer.gate_up_proj.times(x)))     # [1, D]
    x, _ = kernels.rms_norm(x, norm, eps, residual)
    return lm_head.times(x)                                                              # [1, V]


def attend(q, k, v, k_cache, v_cache, slots):
    """Write this token's k and v [1, Hkv, d] into the last of `slots` [L], then attend: q [1, H, d]  →  [1, H, d].

    To the compiler this is an *operator*: it calls it and doesn't look into it, for of such a gather it would make
    slower code. vLLM: model_executor/layers/attention/attention.py:819 unified_attention_with_output
    """
    H, (_, _, Hkv, d) = q.shape[1], k_cache.shape
    keys, values = k_cache.view(-1, Hkv * d), v_cache.view(-1, Hkv * d)                  # [N*bs, Hkv*d]
    keys[slots[-1]], values[slots[-1]] = k.view(-1), v.view(-1)
    keys = keys.index_select(0, slots).view(1, -1, Hkv, d).transpose(1, 2)               # [1, Hkv, L, d]
    values = values.index_select(0, slots).view(1, -1, Hkv, d).transpose(1, 2)           # [1, Hkv, L, d]
    # The query heads that share a KV head go in as its rows; all are of the newest token, so they see every key.
    return F.scaled_dot_product_attention(q.view(1, Hkv, -1, d), keys, values).view(1, H, d)


# How PyTorch learns of an operator: its signature, what runs on a CPU, and a fake that tells the compiler the shape of
# the result. An argument that it writes to would be marked, as "Tensor(a!) k_cache", and the compiler would copy it,
# the whole pool, lest somebody see the change too early. We leave the mark out: within a step only this operator looks
# at the caches.
_library = torch.library.Library("nano_serve", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots) -> Tensor")
_library.impl("attend", attend, "CPU")
torch.library.register_fake("nano_serve::attend", lambda q, *others: torch.empty_like(q), lib=_library)


class CompiledDecode:
    """Steps of one decode alone, the usual case of a chat on a laptop, compiled by torch.compile.

    The weights are held twice: as Matrix, and as pack_weights lays them out for several rows. What is compiled is for
    the sizes of this model and its pool; only L may vary. At each call PyTorch checks its *guards* (the arguments'
    shapes, dtypes, constants, and the number of threads) and would compile anew if one failed. It keeps the result on
    disk for the next start.
    vLLM: config/compilation.py:37 CompilationMode; it compiles the whole forward, for any number of tokens."""

    def __init__(self, model):
        m = self.model = model
        self.weights = m.embed_tokens.weight, [Layer(
            layer.input_layernorm.weight, Matrix.of(layer.qkv_proj), Matrix.of(layer.o_proj),
            layer.post_attention_layernorm.weight, Matrix.of(layer.gate_up_proj), Matrix.of(layer.down_proj))
            for layer in m.layers], m.norm.weight, Matrix.of(m.lm_head)

    def compile(self, kv_cache):
        """torch.compile compiles at the first call: make it here, in the null block, so that no request waits for it.
        ValueError where PyTorch can't compile."""
        self.kv_cache, zero = kv_cache, torch.zeros(1, dtype=torch.int64)
        # PyTorch keeps what it compiled with the function's code. A copy of that, and engines never meet one another's.
        own = types.FunctionType(forward_one.__code__.replace(), globals())
        try:
            self.compiled = torch.compile(own, fullgraph=True)   # fullgraph: an error where PyTorch can't follow
            # Nor are another engine's sizes, which it remembers by the function's name, a reason to make ours variable.
            with torch.inference_mode(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                slots = torch.zeros(5, dtype=torch.int64)
                torch._dynamo.mark_dynamic(slots, 0)             # the 5 stands for any L
                self._forward(zero, zero, slots)
        except Exception as error:               # each stage has errors of its own
            reason = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]:.200}"
            raise ValueError(f"--compile: PyTorch could not compile the decode step ({reason}). It needs a C++ compiler,"
                             " g++ or what CXX names, and a folder to write to (TORCHINDUCTOR_CACHE_DIR)") from error

    @staticmethod
    def fit(batch):
        """Is this batch one token of a sequence of two or more? (PyTorch takes a size of 1 for a constant, always.)"""
        return len(batch.token_ids) == len(batch.logits_indices) == 1 and int(batch.seq_lens) > 1

    def run(self, batch):
        """A batch that fits  →  logits [1, V]."""
        positions = torch.arange(int(batch.seq_lens))[None]                              # [1, L]
        slots = kernels.slots_of(batch.block_tables, positions, self.kv_cache.block_size)                 # [1, L] int64
        return self._forward(batch.token_ids, batch.positions, slots[0])

    def _forward(self, token_id, positions, slots):
        cos, sin = self.model.rope_cos_sin(positions)                                    # [1, d] each
        token_id = token_id.clone()              # made in inference mode, as are the others: a guard looks at that, too
        return self.compiled(token_id, cos, sin, slots, self.kv_cache.k, self.kv_cache.v, *self.weights,
                             self.model.num_heads, self.model.config.rms_norm_eps)
