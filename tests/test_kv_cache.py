"""kv_cache.py: the free list and its order, names and hits, block tables, and the tensors. Everything that needs a scheduler to go
wrong is in test_scheduler.py."""
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

import kv_cache
from kv_cache import (NONE_HASH, BlockPool, FreeKVCacheBlockQueue, KVCache, KVCacheBlock, KVCacheManager, hash_block_tokens)
from request import Request, SamplingParams
from test_scheduler import ROOT, count_calls


def ids(queue_or_blocks):
    blocks = queue_or_blocks.get_all_free_blocks() if hasattr(queue_or_blocks, "get_all_free_blocks") else queue_or_blocks
    return [block.block_id for block in blocks]


def make_request(manager, request_id, token_ids):
    request = Request(request_id, token_ids, SamplingParams())
    manager.update_block_hashes(request)
    return request


def allocate(manager, request, n, *others):
    """One chunk, as the scheduler asks for it, counted as computed. `others` hold blocks too."""
    hits = manager.get_computed_blocks(request) if request.num_computed_tokens == 0 else []
    if not manager.allocate_slots(request, n, hits):
        return False
    request.num_computed_tokens += len(hits) * manager.block_size + n
    manager.check_invariants({r.request_id: r for r in (request, *others)})
    return True


# --- the free list ---

def test_free_list_operations():
    blocks = [KVCacheBlock(i) for i in range(1, 5)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert queue.popleft() is blocks[0] and ids(queue) == [2, 3, 4]
    queue.remove(blocks[2])
    assert ids(queue) == [2, 4]
    queue.append(blocks[0])
    assert ids(queue) == [2, 4, 1]
    queue.prepend_n([blocks[2]])
    assert ids(queue) == [3, 2, 4, 1] and queue.num_free_blocks == 4
    assert [queue.popleft().block_id for _ in range(4)] == [3, 2, 4, 1] and queue.num_free_blocks == 0
    with pytest.raises(IndexError, match="no free KV block"):
        queue.popleft()


@given(st.lists(st.tuples(st.sampled_from("pop remove append prepend".split()), st.integers(0, 5)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_free_list_behaves_like_a_list(operations):
    blocks = [KVCacheBlock(i) for i in range(6)]
    queue, model = FreeKVCacheBlockQueue(blocks), list(blocks)
    for what, i in operations:
        out = [block for block in blocks if block not in model]
        if what == "pop" and model:
            assert queue.popleft() is model.pop(0)
        elif what == "remove" and blocks[i] in model:
            queue.remove(blocks[i])
            model.remove(blocks[i])
        elif what == "append" and out:
            queue.append(out[0])
            model.append(out[0])
        elif what == "prepend":
            queue.prepend_n(out)
            model[:0] = out
        assert queue.get_all_free_blocks() == model and queue.num_free_blocks == len(model)


def count_lines(function):
    """Lines of kv_cache.py executed, loops included."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line" and frame.f_code.co_filename == kv_cache.__file__
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


def test_pool_operations_cost_the_same_in_any_pool():
    costs = []
    for num_blocks in (100, 10_000):
        pool = BlockPool(num_blocks)
        block = pool.blocks[num_blocks // 2]  # in the middle of the free list

        def life():
            pool.touch(block)
            pool.cache_full_block(block, b"name")
            pool.free_blocks([block])
            pool.get_cached_block(b"name")
            pool.free_blocks(pool.get_new_blocks(3))
            pool.uncache_block(block)

        life()
        costs.append((count_lines(life), count_calls(life)))
    assert costs[0] == costs[1]


# --- the golden trace of vLLM's BlockPool: 9 blocks of size 4 ---

def test_golden_trace():
    manager = KVCacheManager(9, 4)
    queue = manager.block_pool.free_block_queue
    a, b = make_request(manager, "a", range(14)), make_request(manager, "b", range(100, 107))
    assert allocate(manager, a, 14) and manager.get_block_ids("a") == [1, 2, 3, 4]
    assert allocate(manager, b, 7, a) and manager.get_block_ids("b") == [5, 6]
    assert ids(queue) == [7, 8]
    manager.free(a)
    assert ids(queue) == [4, 7, 8, 3, 2, 1]
    manager.free(b)
    assert ids(queue) == [6, 4, 7, 8, 3, 2, 1, 5]
    c = make_request(manager, "c", list(range(8)) + [77])
    hits = manager.get_computed_blocks(c)
    assert ids(hits) == [1, 2]
    for block in hits:
        manager.block_pool.touch(block)
    assert ids(queue) == [6, 4, 7, 8, 3, 5]
    assert ids(manager.block_pool.get_new_blocks(4)) == [6, 4, 7, 8]
    assert [b.block_id for b in manager.block_pool.blocks if b.block_hash] == [1, 2, 3, 5]  # a's third, b's first: still there
    assert ids(queue) == [3, 5]


def test_uncached_blocks_return_to_the_front_only_if_the_pool_caches():
    for caching, order in [(True, [3, 2, 1, 4, 5]), (False, [4, 5, 3, 2, 1])]:
        pool = BlockPool(6, enable_caching=caching)
        pool.free_blocks(reversed(pool.get_new_blocks(3)))
        assert ids(pool.free_block_queue) == order


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.null_block.block_id == 0 and ids(pool.get_new_blocks(4)) == [1, 2, 3, 4] and pool.num_free_blocks == 0
    with pytest.raises(IndexError):
        pool.get_new_blocks(1)
    for num_blocks in (1, 0, -3):
        with pytest.raises(ValueError, match=f"{num_blocks} blocks.*--num-kv-blocks"):
            KVCacheManager(num_blocks)
    with pytest.raises(ValueError, match="block size 0.*--block-size"):
        KVCacheManager(5, 0)


def test_freeing_twice_is_an_error():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks(blocks[:1])
    assert pool.num_free_blocks == 3
    manager = KVCacheManager(4, 2)
    request = make_request(manager, "a", range(3))
    allocate(manager, request, 3)
    for _ in range(2):  # a request, though, may be let go of twice: it holds nothing the second time
        manager.free(request)
    assert manager.num_free_blocks == 3 and manager.get_block_ids("a") == []


# --- cached blocks ---

def test_hashes_chain():
    h0 = hash_block_tokens(NONE_HASH, [1, 2])
    assert len(h0) == 32 and h0 == hash_block_tokens(NONE_HASH, [1, 2])
    assert len({h0, hash_block_tokens(h0, [1, 2]), hash_block_tokens(NONE_HASH, [2, 1]), hash_block_tokens(NONE_HASH, [1]),
                hash_block_tokens(NONE_HASH, [1, 2, 0]), hash_block_tokens(h0, [2, 1])}) == 6
    assert hash_block_tokens(NONE_HASH, [2**40]) != hash_block_tokens(NONE_HASH, [0])


def test_hashes_do_not_depend_on_the_process():
    code = "import kv_cache; print(kv_cache.hash_block_tokens(kv_cache.NONE_HASH, [1, 2, 128000]).hex())"
    out = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True,
                          timeout=60).stdout.strip() for seed in ("1", "2")}
    assert out == {hash_block_tokens(NONE_HASH, [1, 2, 128000]).hex()}


def test_hashes_are_extended_as_blocks_fill():
    manager = KVCacheManager(9, 4)
    request = make_request(manager, "a", range(10))
    first = list(request.block_hashes)
    assert len(first) == 2
    for token in (10, 11):
        request.append_output_token_id(token)
        manager.update_block_hashes(request)
    assert len(request.block_hashes) == 3 and request.block_hashes[:2] == first
    assert request.block_hashes == make_request(manager, "b", range(12)).block_hashes
    off = KVCacheManager(9, 4, enable_prefix_caching=False)
    assert make_request(off, "c", range(10)).block_hashes == []


def test_two_blocks_of_one_hash():
    pool = BlockPool(6)
    a, b = pool.get_new_blocks(2)
    for block in (a, b):
        pool.cache_full_block(block, b"x")
    assert pool.get_cached_block(b"x") is a and list(pool.cached_block_hash_to_block[b"x"]) == [1, 2]
    pool.uncache_block(a)
    assert pool.get_cached_block(b"x") is b
    pool.uncache_block(b)
    assert pool.get_cached_block(b"x") is None and pool.cached_block_hash_to_block == {}
    pool.uncache_block(b)  # not cached, nothing to do
    pool.cache_full_block(a, b"x")
    with pytest.raises(AssertionError, match="is cached already"):
        pool.cache_full_block(a, b"y")


def test_a_block_taken_for_new_content_leaves_the_cache():
    manager = KVCacheManager(4, 2)
    a = make_request(manager, "a", [1, 2, 3, 4, 5])
    allocate(manager, a, 5)
    manager.free(a)
    b = make_request(manager, "b", [9, 9, 9, 9, 9])
    allocate(manager, b, 5)  # takes all three
    manager.free(b)
    assert manager.get_computed_blocks(make_request(manager, "c", [1, 2, 3, 4, 5])) == []
    assert len(manager.get_computed_blocks(make_request(manager, "d", [9, 9, 9, 9, 9]))) == 2


# --- block tables ---

def test_the_worked_example_of_ten_tokens():
    manager = KVCacheManager(9, 4)
    request = make_request(manager, "a", range(10))
    cached = lambda: [b.block_id for b in manager.block_pool.blocks if b.block_hash]  # noqa: E731
    assert allocate(manager, request, 10) and manager.get_block_ids("a") == [1, 2, 3] and cached() == [1, 2]
    for token, table, names in [(10, [1, 2, 3], [1, 2]), (11, [1, 2, 3], [1, 2, 3]), (12, [1, 2, 3, 4], [1, 2, 3])]:
        request.append_output_token_id(token)
        manager.update_block_hashes(request)
        assert allocate(manager, request, 1) and (manager.get_block_ids("a"), cached()) == (table, names)
    assert manager.usage == 4 / 8 and manager.num_free_blocks == 4
    manager.get_block_ids("a").append(99)  # the caller's copy
    assert manager.get_block_ids("a") == [1, 2, 3, 4] and manager.get_block_ids("nobody") == []


def test_a_hit_in_the_free_list_costs_a_block_and_a_shared_one_does_not():
    manager = KVCacheManager(5, 4)
    a = make_request(manager, "a", range(9))
    assert allocate(manager, a, 9)                     # holds 1, 2, 3; block 4 is free
    b = make_request(manager, "b", list(range(8)) + [50])
    assert allocate(manager, b, 1, a) and manager.get_block_ids("b") == [1, 2, 4] and manager.num_free_blocks == 0
    manager.free(b)
    manager.free(a)
    assert manager.num_free_blocks == 4
    c = make_request(manager, "c", list(range(8)) + list(range(60, 69)))   # 17 tokens, 5 blocks: two hits, but both are free
    hits = manager.get_computed_blocks(c)
    assert len(hits) == 2 and not manager.allocate_slots(c, 9, hits)
    assert manager.num_free_blocks == 4 and manager.get_block_ids("c") == [] and all(b.ref_cnt == 0 for b in hits)
    assert manager.allocate_slots(c, 8, hits) and len(manager.get_block_ids("c")) == 4


def test_full_sequence_must_fit_is_a_check_and_no_reservation():
    manager = KVCacheManager(5, 4)
    long = make_request(manager, "long", range(17))
    assert not manager.allocate_slots(long, 4, (), full_sequence_must_fit=True)
    fits = make_request(manager, "fits", range(16))
    assert manager.allocate_slots(fits, 4, (), full_sequence_must_fit=True)
    assert manager.num_free_blocks == 3
    assert manager.allocate_slots(long, 4)             # without the check a first chunk is enough


def test_the_chain_ends_at_the_first_miss():
    manager = KVCacheManager(9, 4)
    a = make_request(manager, "a", range(13))
    allocate(manager, a, 13)
    manager.block_pool.uncache_block(manager.block_pool.blocks[2])
    assert ids(manager.get_computed_blocks(make_request(manager, "b", range(13)))) == [1]


def test_reset_prefix_cache():
    manager = KVCacheManager(9, 4)
    request = make_request(manager, "a", range(9))
    allocate(manager, request, 9)
    assert manager.reset_prefix_cache() is False and len(manager.block_pool.cached_block_hash_to_block) == 2
    manager.free(request)
    assert manager.reset_prefix_cache() is True and manager.block_pool.cached_block_hash_to_block == {}
    assert manager.get_computed_blocks(request) == []
    manager.check_invariants({})


# --- the tensors ---

def test_kv_cache_tensors():
    cache = KVCache(num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu")
    assert cache.k.shape == cache.v.shape == (3, 5, 4, 2, 8) and cache.k[1].shape == (5, 4, 2, 8)
    assert cache.nbytes == 2 * 3 * 5 * 4 * 2 * 8 * 4 == 5 * KVCache.bytes_per_block(3, 4, 2, 8, torch.float32)
    cache.fill_(0.0)
    cache.k[1].flatten(0, 1)[9] = 7.0                  # table [4, 2], position 5 → block 2, offset 1 → slot 9
    assert bool((cache.k[1, 2, 1] == 7.0).all()) and float(cache.k.sum()) == 7.0 * 2 * 8
    cache.fill_(float("nan"))
    assert bool(cache.k.isnan().all()) and bool(cache.v.isnan().all())


def test_bytes_of_the_running_example():
    def bytes_of(tokens, heads=8):  # Llama-3-70B: 80 layers, 8 KV heads of 128, FP16
        return tokens * KVCache.bytes_per_block(80, 1, heads, 128, torch.float16)

    assert bytes_of(1) == 327_680 == 320 * 1024 and bytes_of(1, heads=1) == 40 * 1024
    assert round(bytes_of(2050) / 2**20, 1) == 640.6 and round(bytes_of(2350) / 2**20, 1) == 734.4


def test_blocks_of_the_running_example():
    """A 2000-token system prompt and a 50-token question, 300 tokens out; then a second question behind the same system prompt."""
    manager = KVCacheManager(400)
    first = make_request(manager, "first", range(2050))
    assert manager.allocate_slots(first, 2050) and len(manager.get_block_ids("first")) == 129
    first.num_computed_tokens = 2050
    for token in range(299):  # the last of the 300 tokens is sampled and needs no slot any more
        first.append_output_token_id(token)
        manager.update_block_hashes(first)
        assert allocate(manager, first, 1)
    assert len(manager.get_block_ids("first")) == 147
    second = make_request(manager, "second", [*range(2000), *range(5000, 5050)])
    hits = manager.get_computed_blocks(second)
    assert len(hits) == 125 and second.num_tokens - len(hits) * 16 == 50


# --- holes that a fault once slipped through ---

def test_a_block_that_a_dropped_step_would_have_filled_is_no_hit():
    """Preempted after it was scheduled: 3 of 4 slots are written, the step that was to fill the block never runs."""
    manager = KVCacheManager(9, 4)
    request = make_request(manager, "first", range(5))
    assert manager.allocate_slots(request, 3)
    request.num_computed_tokens = 3
    assert manager.allocate_slots(request, 1)                # caches block 1 before the step, as it does
    manager.free(request)
    again = make_request(manager, "again", range(5))
    assert manager.get_computed_blocks(again) == []


def test_what_a_failed_request_wrote_is_no_hit_and_what_it_hit_still_is():
    manager = KVCacheManager(20, 4)
    good, bad = make_request(manager, "good", range(8)), make_request(manager, "bad", [*range(8), *range(50, 59)])
    for request in (good, bad):
        hits = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, request.num_tokens - 4 * len(hits), hits)
        request.num_computed_tokens = request.num_tokens
    sharer = make_request(manager, "sharer", [*range(8), *range(50, 59)])      # hits what the bad one wrote, too
    hits = manager.get_computed_blocks(sharer)
    assert len(hits) == 4 and manager.allocate_slots(sharer, 1, hits)
    sharer.num_computed_tokens = 17
    manager.free(bad, forget=True)
    manager.check_invariants({"good": good, "sharer": sharer})
    again = make_request(manager, "again", [*range(8), *range(50, 59)])
    assert len(manager.get_computed_blocks(again)) == 2
