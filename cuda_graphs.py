"""Steps in which everybody decodes, recorded once and replayed: CUDA graphs (chapter 6).

Mirrors   vLLM: v1/worker/gpu/cudagraph_utils.py:108 CudaGraphManager
Promises  the logits that Llama.forward would give, in one call instead of some ten launches a layer.
Leaves out steps with prefill chunks in them, and tensor-parallel ranks.
Order     1 DecodeGraphs: which steps, and what a replay reads.  2 cuda_graph_recorder: the recording itself.
"""
import torch

from model import ForwardBatch


# -- 1. Which steps ---------------------------------------------------------------------------------------------------

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


# -- 2. The recording -----------------------------------------------------------------------------------------------

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
