"""Who computes (chapter 7): a worker is weights + its KV shard + "receive a ForwardBatch, run it".

Mirrors   vLLM: v1/worker/gpu_worker.py, v1/executor/multiproc_executor.py
Promises  one `execute(batch) -> logits`, whatever the tensor-parallel size.
"""
import torch

from kv_cache import KVCache
from model import load_model


class Worker:
    """Rank `rank` of `size`: its slice of the weights and of the KV cache."""

    def __init__(self, folder, dtype, device="cpu", attention_backend="auto", rank=0, size=1, comm=None):
        self.device = device
        self.model = load_model(folder, dtype, device, rank, size, comm, attention_backend)
        self.kv_cache = None

    def init_kv_cache(self, num_blocks, block_size):
        """num_blocks counts the null block; the dtype is the weights'."""
        m = self.model
        self.kv_cache = KVCache(m.config.num_hidden_layers, num_blocks, block_size, m.num_kv_heads, m.config.head_dim,
                                m.norm.weight.dtype, self.device)

    @torch.inference_mode()
    def execute(self, batch):
        """batch: a ForwardBatch on this worker's device  →  logits [S', V]."""
        return self.model(batch, self.kv_cache)

    def close(self):
        self.model = self.kv_cache = None


def make_executor(folder, dtype, device, attention_backend, tensor_parallel_size):
    if tensor_parallel_size != 1:
        raise NotImplementedError
    return Worker(folder, dtype, device, attention_backend)
