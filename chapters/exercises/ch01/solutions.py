"""Chapter 1's exercises: one way to solve each. Read it after your own."""


def kv_bytes_per_token(num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, dtype_bytes):
    """K and V, in each layer, for each KV head. The query heads are gone once the step is over."""
    return 2 * num_hidden_layers * num_key_value_heads * head_dim * dtype_bytes


def max_concurrency(kv_cache_bytes, kv_bytes_per_token, block_size, num_prompt_tokens, num_output_tokens):
    """Whole blocks on both sides: rounded down for the pool, which loses the null block, rounded up for a request."""
    usable_blocks = kv_cache_bytes // (kv_bytes_per_token * block_size) - 1
    stored_tokens = num_prompt_tokens + num_output_tokens - 1
    blocks_each = -(-stored_tokens // block_size)
    return max(usable_blocks, 0) // blocks_each


def latencies(arrival_time, first_scheduled_time, token_times):
    """The queue is part of what the user waits for, so first_scheduled_time plays no part."""
    itls = [later - earlier for earlier, later in zip(token_times, token_times[1:])]
    return {"ttft": token_times[0] - arrival_time, "itls": itls,
            "tpot": sum(itls) / len(itls) if itls else None, "e2e": token_times[-1] - arrival_time}


def static_waste(jobs, max_num_seqs):
    """A batch is rows x (longest prompt + longest output - 1)."""
    computed = 0
    for first in range(0, len(jobs), max_num_seqs):
        batch = jobs[first:first + max_num_seqs]
        longest_prompt, longest_output = max(p for p, _ in batch), max(n for _, n in batch)
        computed += len(batch) * (longest_prompt + longest_output - 1)
    return computed, computed - sum(p + n - 1 for p, n in jobs)


def continuous_batching(jobs, max_num_seqs):
    """Between two steps: the ended have left, those who are there join while seats are free."""
    steps, waiting, tokens_left = [], list(jobs), {}
    while waiting or tokens_left:
        while waiting and waiting[0][1] <= len(steps) and len(tokens_left) < max_num_seqs:
            name, _, output_tokens = waiting.pop(0)
            tokens_left[name] = output_tokens
        steps.append(list(tokens_left))
        tokens_left = {name: left - 1 for name, left in tokens_left.items() if left > 1}
    return steps
