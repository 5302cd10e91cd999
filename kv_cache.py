"""Where K and V live (chapter 5, "KV Cache": 分页, 前缀缓存, 淘汰): block bookkeeping first, then the tensors themselves.

vLLM files mirrored: v1/core/kv_cache_utils.py (block, free list, block hash), v1/core/block_pool.py,
v1/core/kv_cache_manager.py, v1/core/single_type_kv_cache_manager.py (the full-attention case) and
v1/worker/gpu_model_runner.py (allocation of the tensors).

KV memory is cut into equal blocks (块) of `block_size` token slots. A sequence owns a list of block ids, its block table
(块表), and the token at position p lives in block `table[p // block_size]` at offset `p % block_size`. With block size 4
and ten tokens:

    table [1, 2, 3]     block 1: tokens 0-3 (full)   block 2: tokens 4-7 (full)   block 3: tokens 8, 9 + two empty slots

Blocks need not be neighbours, so memory never fragments, and a sequence wastes less than one block. A full block is
also *cached*: the prefix cache (前缀缓存) knows it by a hash of everything up to its end, and a later sequence that starts
with the same tokens finds it there and shares it. Only full blocks are shared, and nobody ever writes into a full block
again, so sharing needs no copy.

Promises: what vLLM does in O(1) is O(1) here; block ids, free-list order and hits are vLLM's, decision for decision;
free + used + null = pool, as `check_invariants` proves. The bookkeeping is plain Python: it moves numbers, no tensors.
Leaves out: several KV groups (sliding window, Mamba, cross attention), LoRA and multimodal keys in the hash,
speculative lookahead slots, the watermark, KV events, connectors and partial-block hits.

Read in this order: KVCacheBlock and the free list; hash_block_tokens; BlockPool (which block is free, which is cached);
KVCacheManager (which request holds which block); KVCache (the tensors behind the numbers).
"""
from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Iterable, Sequence

if TYPE_CHECKING:
    import torch

    from request import Request

# The parent of a sequence's first block, unless it has a cache_salt. vLLM draws it at random, so that nobody can guess
# another user's hashes; fixed, as here, it keeps runs repeatable.
NONE_HASH = bytes(32)


class KVCacheBlock:
    """One block of KV memory: an id, who uses it, its hash if it is cached, and its two neighbours while it is free.

    `ref_cnt` counts the block tables that hold it. `block_hash` is what the prefix cache knows it by, None while it is
    not cached. The links live inside the block, so that a block can leave the middle of the free list without a search.
    vLLM: v1/core/kv_cache_utils.py:118 KVCacheBlock
    """

    __slots__ = ("block_id", "ref_cnt", "block_hash", "prev_free_block", "next_free_block")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeKVCacheBlockQueue:
    """All blocks with ref_cnt 0 in the order in which they will be reused: the free list *is* the LRU (最近最少使用) list.

    A cached block in it still holds valid KV: until it reaches the front it can be hit and taken back out. Being a
    doubly linked list, it pops the front, adds at either end and unlinks from the middle in O(1) each.

    Example, blocks 1..4:   head ⇄ 1 ⇄ 2 ⇄ 3 ⇄ 4 ⇄ tail
      popleft() → 1         head ⇄ 2 ⇄ 3 ⇄ 4 ⇄ tail
      remove(3), a hit      head ⇄ 2 ⇄ 4 ⇄ tail
      append(1)             head ⇄ 2 ⇄ 4 ⇄ 1 ⇄ tail
    vLLM: v1/core/kv_cache_utils.py:184 FreeKVCacheBlockQueue
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]):
        self.num_free_blocks = 0
        # Two blocks that are never handed out close the list: no operation has to ask whether a neighbour exists.
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free_block, self._tail.prev_free_block = self._tail, self._head
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Take the block that has been free the longest. Raises IndexError when none is left."""
        if self.num_free_blocks == 0:
            raise IndexError("no free KV block")
        block = self._head.next_free_block
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Unlink a block from wherever it stands."""
        before, after = block.prev_free_block, block.next_free_block
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back: it will be reused last."""
        self._insert(self._tail.prev_free_block, block)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks at the front, in the order given: the first of them will be reused next."""
        for block in reversed(blocks):
            self._insert(self._head, block)

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        after = before.next_free_block
        block.prev_free_block, block.next_free_block = before, after
        before.next_free_block = after.prev_free_block = block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The whole list, front first. O(free blocks): for tests, pictures and the invariant check."""
        blocks, block = [], self._head.next_free_block
        while block is not self._tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks


def hash_block_tokens(parent_block_hash: bytes, token_ids: list[int]) -> bytes:
    """The 32-byte hash of a full block: of its own tokens *and*, through the parent's hash, all tokens before it.

    K and V of a token depend on every earlier token and on the position. Equal tokens at another place are therefore
    another block: with block size 2, [3, 4] after [1, 2] and [3, 4] at the start of a sequence must not be mistaken for
    each other.

    Example, block size 4, ten tokens t0..t9: h0 = H(NONE_HASH, t0..t3), h1 = H(h0, t4..t7); t8, t9 fill no block.
    vLLM: v1/core/kv_cache_utils.py:596 hash_block_tokens (there also LoRA and multimodal keys; a salt is here the
    first block's parent, see update_block_hashes)
    """
    return hashlib.sha256(parent_block_hash + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


class BlockPool:
    """Every block of the KV memory: the free ones in order of reuse, and the cached ones by hash.

    Block 0 is the null block (空块): taken out at the start, never handed out, never cached. It fills up the
    shorter rows of a batch's block_tables, and nothing reads or writes it.

    Example (block size 4, 9 blocks; front of the free list at the left), the life of two sequences:
      A takes 1 2 3 4, its first three full; B takes 5 6, the first full      free: 7 8
      A ends: 4 isn't cached → front; 3 2 1 are → back, tail first            free: 4 7 8 3 2 1
      B ends: 6 → front, 5 → back                                             free: 6 4 7 8 3 2 1 5
      C starts like A, hits 1 2 (they leave the list) and takes 6             free: 4 7 8 3 5
      D takes three: 4 7 8. A's block 3 and B's block 5 are still cached      free: 3 5
    vLLM: v1/core/block_pool.py:143 BlockPool
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True):
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has no room: block 0 is the null block, so at least 2 are "
                             "needed (--num-kv-blocks, --kv-cache-memory, --gpu-memory-utilization)")
        self.num_blocks, self.enable_caching = num_blocks, enable_caching
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()
        # hash → the blocks cached under it, oldest first. Two requests that compute the same text side by side fill two
        # blocks with one hash. Neither is thrown away: a running request already points at its own, and block tables
        # only ever grow.
        self.cached_block_hash_to_block: dict[bytes, dict[int, KVCacheBlock]] = {}

    num_free_blocks = property(lambda self: self.free_block_queue.num_free_blocks,
                               doc="Blocks that could be handed out now, cached ones included.")

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block cached under this hash, the oldest if there are several, or None.
        vLLM: v1/core/block_pool.py:198 BlockPool.get_cached_block"""
        same_hash = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(same_hash.values())) if same_hash else None

    def cache_full_block(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Put a full block into the prefix cache. vLLM: v1/core/block_pool.py:225 BlockPool.cache_full_blocks"""
        assert block.block_hash is None, f"{block} is cached already"
        block.block_hash = block_hash
        self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Take a block out of the prefix cache: nobody finds it any more.
        vLLM: v1/core/block_pool.py:679 BlockPool._maybe_evict_cached_block"""
        if block.block_hash is None:
            return
        same_hash = self.cached_block_hash_to_block[block.block_hash]
        del same_hash[block.block_id]
        if not same_hash:
            del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks for new content from the front. This, and not an earlier moment, is eviction (淘汰): the old hash
        goes with it, or a later request would be given another text's KV.
        vLLM: v1/core/block_pool.py:647 BlockPool.get_new_blocks"""
        blocks = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self.uncache_block(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, block: KVCacheBlock) -> None:
        """One more table holds this block. Was it free, it leaves the list.
        vLLM: v1/core/block_pool.py:702 BlockPool.touch"""
        if block.ref_cnt == 0:
            self.free_block_queue.remove(block)
        block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One table fewer holds each block; those that nobody holds return to the free list. Freeing twice is an error.

        A block that isn't cached can never be hit, so nothing is lost by reusing it at once: front. A cached one may
        still be: back. A pool that caches nothing has no reason to choose, and appends all.
        vLLM: v1/core/block_pool.py:719 BlockPool.free_blocks
        """
        not_cached = []
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"{block} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if self.enable_caching and block.block_hash is None:
                not_cached.append(block)
            else:
                self.free_block_queue.append(block)
        self.free_block_queue.prepend_n(not_cached)


class KVCacheManager:
    """Which request holds which blocks: what the scheduler asks before it promises anybody a step.

    `num_blocks` counts the null block. A request is known by its `request_id`, and only while it holds blocks.

    Example, block size 4, a prompt of ten tokens in an empty pool, then one output token a step:
      allocate_slots(request, 10)   table [1, 2, 3], blocks 1 and 2 cached; positions 10 and 11 are still empty
      allocate_slots(request, 1)    position 10 fits                          table [1, 2, 3]
      allocate_slots(request, 1)    position 11 fits and fills block 3        table [1, 2, 3], block 3 cached
      allocate_slots(request, 1)    position 12 crosses the boundary          table [1, 2, 3, 4]
    vLLM: v1/core/kv_cache_manager.py:117 KVCacheManager
    """

    def __init__(self, num_blocks: int, block_size: int = 16, enable_prefix_caching: bool = True):
        if block_size < 1:
            raise ValueError(f"block size {block_size} is below 1 (--block-size)")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_pool = BlockPool(num_blocks, enable_prefix_caching)
        self.req_to_block_ids: dict[str, list[int]] = {}  # block tables; entry i holds positions i*block_size onwards
        self.num_hit_blocks: dict[str, int] = {}          # how many at its table's start were hits
        self.num_cached_blocks: dict[str, int] = {}       # how many are cached: hits, then its own full ones

    num_free_blocks = property(lambda self: self.block_pool.num_free_blocks, doc="Blocks that could be handed out now.")
    num_usable_blocks = property(lambda self: self.block_pool.num_blocks - 1, doc="The pool without the null block.")

    @property
    def usage(self) -> float:
        """Share of the usable blocks that some request holds, 0.0 to 1.0.
        vLLM: v1/core/block_pool.py:807 BlockPool.get_usage"""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_block_ids(self, request_id: str) -> list[int]:
        """The request's block table, empty if it holds none.
        vLLM: v1/core/kv_cache_manager.py:707 KVCacheManager.get_block_ids"""
        return list(self.req_to_block_ids.get(request_id, ()))

    def update_block_hashes(self, request: Request) -> None:
        """Hash the blocks that the request's known tokens have filled since the last call. The hashes stay with the
        request, through preemption too, so each token is hashed once in its life.
        vLLM: v1/request.py:262 Request.update_block_hashes"""
        if not self.enable_prefix_caching:
            return
        hashes, tokens, size = request.block_hashes, request.all_token_ids, self.block_size
        salt = (request.cache_salt or "").encode(errors="surrogatepass")         # another salt, other hashes: no hits
        first = hashlib.sha256(salt).digest() if salt else NONE_HASH
        for end in range((len(hashes) + 1) * size, len(tokens) + 1, size):
            hashes.append(hash_block_tokens(hashes[-1] if hashes else first, tokens[end - size:end]))

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest chain of cached blocks, from the start, that this request may skip computing. Takes nothing yet.

        At least the last known token is always computed anew: its logits are what the request came for, and a cache
        holds K and V, not logits. Hits come in whole blocks, so a length that is a multiple of block_size gives up its
        whole last block: 12 tokens at block size 4 hit at most 2 blocks, 13 tokens at most 3.
        vLLM: v1/core/kv_cache_manager.py:229 KVCacheManager.get_computed_blocks
        """
        blocks: list[KVCacheBlock] = []
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return blocks
        for block_hash in request.block_hashes[:(request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:  # the first miss ends it: later blocks, cached or not, attend to this one
                break
            blocks.append(block)
        return blocks

    def allocate_slots(self, request: Request, num_new_tokens: int, new_computed_blocks: Sequence[KVCacheBlock] = (),
                       full_sequence_must_fit: bool = False) -> bool:
        """Give the request slots for its next `num_new_tokens` tokens, behind the hits it brings. False: nothing taken.

        `full_sequence_must_fit` asks that *all* its known tokens would fit the blocks free now, not only this chunk. It
        is a check, not a reservation: the blocks of later chunks stay free, so two long prompts may still collide, and
        one is then preempted.
        vLLM: v1/core/kv_cache_manager.py:344 KVCacheManager.allocate_slots
        """
        request_id, size = request.request_id, self.block_size
        table = self.req_to_block_ids.get(request_id)
        num_held = len(table) if table else 0
        num_computed = request.num_computed_tokens + len(new_computed_blocks) * size
        num_tokens = num_computed + num_new_tokens
        if num_tokens > num_held * size:  # most decodes stay within their last block and skip all this
            num_to_fit = request.num_tokens if full_sequence_must_fit else num_tokens
            # A hit that lies in the free list costs a free block, as a new one does; a hit that others hold costs none.
            num_free_hits = sum(block.ref_cnt == 0 for block in new_computed_blocks)
            num_held += len(new_computed_blocks)
            if -(-num_to_fit // size) - num_held + num_free_hits > self.num_free_blocks:
                return False
            if table is None:
                table = self.req_to_block_ids[request_id] = []
                self.num_hit_blocks[request_id] = self.num_cached_blocks[request_id] = len(new_computed_blocks)
            for block in new_computed_blocks:  # before taking new blocks, or those might be the hits themselves
                self.block_pool.touch(block)
                table.append(block.block_id)
            table += [block.block_id for block in self.block_pool.get_new_blocks(-(-num_tokens // size) - num_held)]
        if self.enable_prefix_caching and num_tokens // size > self.num_cached_blocks[request_id]:
            self._cache_full_blocks(request, table, num_tokens // size)
        return True

    def _cache_full_blocks(self, request: Request, table: list[int], num_full: int) -> None:
        """Cache the blocks that this step will fill, before it has: who is admitted later in this step may hit them.

        That is safe because a step is one batch and every layer writes the K/V of the whole batch before it attends.
        What must hold is that a planned step is run. Where it is not, because a request is preempted after it was
        scheduled, `free` takes them out again.
        vLLM: v1/core/single_type_kv_cache_manager.py:427 SingleTypeKVCacheManager.cache_blocks
        """
        for i in range(self.num_cached_blocks[request.request_id], num_full):
            self.block_pool.cache_full_block(self.block_pool.blocks[table[i]], request.block_hashes[i])
        self.num_cached_blocks[request.request_id] = num_full

    def free(self, request: Request, forget: bool = False) -> None:
        """Let go of all blocks of a request that ended or is preempted; without blocks, do nothing. forget: its K/V are
        wrong (NaN), so nobody may find them; what it hit leaves the cache too, unless a neighbour still holds it.

        In reverse: the tail of a sequence is worth least (a hit needs everything before it), so the tail must be reused
        first and the head, perhaps a system prompt that everybody shares, last.
        vLLM: v1/core/kv_cache_manager.py:567 KVCacheManager.free
        """
        blocks = [self.block_pool.blocks[i] for i in self.req_to_block_ids.pop(request.request_id, ())]
        num_cached = self.num_cached_blocks.pop(request.request_id, 0)
        num_hits = self.num_hit_blocks.pop(request.request_id, 0)
        for i, block in enumerate(blocks if forget else ()):
            if i >= num_hits or block.ref_cnt == 1:
                self.block_pool.uncache_block(block)
        self.block_pool.free_blocks(reversed(blocks))
        # Preempted in a step that had already scheduled it? That step was to fill these blocks: they are cached, and
        # now nobody will write them. Nobody has hit them yet, as a step that preempts admits no one, so it is in time
        # to take them out of the cache; they stay at the back, where vLLM puts them. At any other moment all that is
        # cached is written, and the slice is empty.
        for block in blocks[request.num_computed_tokens // self.block_size:num_cached]:
            self.block_pool.uncache_block(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, as after a change of the weights. Refused (False) while any request holds a block.
        vLLM: v1/core/kv_cache_manager.py:627 KVCacheManager.reset_prefix_cache"""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self.block_pool.blocks:
            self.block_pool.uncache_block(block)
        return True

    def check_invariants(self, requests: dict[str, Request]) -> None:
        """Prove the accounts of the pool and of the alive `requests`, or raise AssertionError saying which is off.
        O(pool + tables), so for tests and --check-invariants."""
        pool, tables = self.block_pool, self.req_to_block_ids
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        free_ids, held = set(free), [0] * pool.num_blocks
        assert tables.keys() <= requests.keys(), "a request that has ended still holds blocks"
        assert tables.keys() == self.num_cached_blocks.keys(), "block tables and cached counts know different requests"
        for request_id, request in requests.items():
            table, num_computed = tables.get(request_id, []), request.num_computed_tokens
            assert num_computed <= request.num_tokens, f"{request} computed tokens that it doesn't have"
            assert len(table) == -(-num_computed // self.block_size), f"{request} holds {len(table)} blocks"
            assert len(set(table)) == len(table), f"{request} holds a block twice: {table}"
            for i, block_id in enumerate(table):
                held[block_id] += 1
                block_hash = pool.blocks[block_id].block_hash
                # A hit may have left the cache since: who wrote it turned out to write NaN.
                assert (block_hash is not None) == (i < self.num_cached_blocks[request_id]) or (
                    block_hash is None and i < self.num_hit_blocks[request_id]), f"{request}: is block {i} cached?"
                assert block_hash in (None, *request.block_hashes[i:i + 1]), f"{request}: block {i} has another's hash"
        assert len(free) == len(free_ids) == pool.num_free_blocks, "the free list holds a block twice, or miscounts"
        assert 0 not in free_ids and held[0] == 0 and not pool.null_block.block_hash, "the null block was handed out"
        for block in pool.blocks[1:]:
            assert block.ref_cnt == held[block.block_id], f"{block}: {held[block.block_id]} tables hold it"
            assert (block.ref_cnt == 0) == (block.block_id in free_ids), f"{block} is neither free nor used, or both"
            same_hash = pool.cached_block_hash_to_block.get(block.block_hash, {})
            assert block.block_hash is None or same_hash.get(block.block_id) is block, f"{block} is not in the cache"
        num_cached = sum(len(same_hash) for same_hash in pool.cached_block_hash_to_block.values())
        assert num_cached == sum(b.block_hash is not None for b in pool.blocks), "the prefix cache holds a block twice"


class KVCache:
    """The tensors behind the block ids: `k`, `v` `[L, num_blocks, block_size, Hkv, d]`; layer i reads `k[i]`, `v[i]`.

    Slot s = block_id * block_size + offset is row s of `k[i].flatten(0, 1)`. Block size 4, table [7, 2], position 5 →
    block 2, offset 1 → slot 9. One tensor holds all layers, so that handing a block over is one slice, `k[:,
    block_id]`. Under tensor parallelism each rank holds its own KV heads of every block; the block ids are the same
    everywhere.
    vLLM: v1/worker/gpu_model_runner.py:7312 GPUModelRunner._allocate_kv_cache_tensors (there one tensor a layer,
    several layouts)
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device | str):
        import torch  # here and not at the top: the bookkeeping above must work without it

        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Not zeroed: a slot is always written before it is read, so zeros would only delay the start.
        self.k = torch.empty(shape, dtype=dtype, device=device)  # [L, num_blocks, block_size, Hkv, d]
        self.v = torch.empty(shape, dtype=dtype, device=device)  # [L, num_blocks, block_size, Hkv, d]

    nbytes = property(lambda self: self.k.nbytes + self.v.nbytes, doc="Memory of both tensors, in bytes.")

    def fill_(self, value: float) -> None:
        """Overwrite every slot. Filled with NaN, a cache shows whether anything reads a slot that nobody wrote."""
        self.k.fill_(value)
        self.v.fill_(value)

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """K and V of one block over all layers, in bytes. Llama-3-70B, FP16: 2 * 80 * 8 * 128 * 2 B = 320 KiB a
        token."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


if __name__ == "__main__":       # the life of three sequences, as in BlockPool's docstring
    from request import Request, SamplingParams
    manager, tokens = KVCacheManager(9, block_size=4), {"A": range(14), "B": range(50, 56), "C": [*range(8), 99]}
    requests = {name: Request(name, ids, SamplingParams()) for name, ids in tokens.items()}
    for event in "A starts", "B starts", "A ends", "B ends", "C starts":
        if event.endswith("ends"):
            manager.free(requests[event[0]])
        else:
            manager.update_block_hashes(request := requests[event[0]])
            hits = manager.get_computed_blocks(request)
            manager.allocate_slots(request, request.num_tokens - 4 * len(hits), hits)
            request.num_computed_tokens = request.num_tokens
        free = manager.block_pool.free_block_queue.get_all_free_blocks()
        shown = " ".join(f"{b.block_id}{'*' if b.block_hash else ''}" for b in free)         # *: cached, can be hit
        print(f"{event:10}free: {shown:24}tables: {manager.req_to_block_ids}")
