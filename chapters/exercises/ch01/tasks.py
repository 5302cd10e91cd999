"""Chapter 1's exercises. Each task is a function: write its body in place of the `raise`, then `make grade CH=1`.

None needs more than 15 lines, or anything but plain Python. Every question has been answered before your eyes in
chapters/ch01_paradigm.py; its section is named. The worked examples are true: they are run as tests. Leave the lists
that you are given as they are: they are the caller's. 中文版：tasks.zh.py
"""


def kv_bytes_per_token(num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, dtype_bytes):
    """Task 1 (article §2 and §6; walk-through 6). How many bytes does one token leave in the KV cache (KV 缓存)?

    Look at what the two data flows (数据流) write to the cache, and remember that a model has many layers. The answer is
    the whole model's, however many GPUs share it. dtype_bytes is the size of one number: 2 in FP16. Not every argument
    need be of use.

    >>> kv_bytes_per_token(2, 4, 2, 8, 2)       # 2 layers, 4 query heads that share 2 KV heads, head_dim 8, FP16
    128

    When it passes, ask it for the running example, and for the same model without GQA.
    """
    raise NotImplementedError("chapter 1, task 1: return the bytes that one token takes in the KV cache")


def max_concurrency(kv_cache_bytes, kv_bytes_per_token, block_size, num_prompt_tokens, num_output_tokens):
    """Task 2 (article §4, change two; walk-through 1). How many equal requests fit the KV memory side by side, from
    their prompt to their end, so that nobody must be preempted (抢占)?

    The memory is cut into whole blocks (块) of block_size tokens. Block 0 is the null block (空块): it is never handed
    out. A request owns whole blocks, shares none, and keeps them until it ends. Think of the moment at which all of
    them are largest. Which tokens are in the cache then? The token that is sampled last is never fed in.

    >>> max_concurrency(1000, 10, 4, 6, 3)      # 25 blocks of 40 bytes; 6 + 3 tokens, 8 of them stored, in 2 blocks
    12

    vLLM: v1/core/kv_cache_utils.py:937 get_max_concurrency_for_kv_cache_config, for requests as long as the limit
    """
    raise NotImplementedError("chapter 1, task 2: return how many requests fit without a preemption")


def latencies(arrival_time, first_scheduled_time, token_times):
    """Task 3 (article §3; walk-through 2 and 3). What did the user feel? All times are seconds on one clock.

    token_times says when each output token came; there is at least one. Return a dict of
      "ttft"   time to first token (首 token 时延), as the user who waits for it has it
      "itls"   inter-token latencies (token 间时延): the list of all gaps between one token and the next
      "tpot"   time per output token: the mean gap after the first token; None if there was no gap
      "e2e"    end-to-end latency (端到端时延): how long until the answer was complete

    >>> latencies(0.0, 0.5, [2.0, 2.5, 3.5])    # came at 0, stood in the queue until 0.5
    {'ttft': 2.0, 'itls': [0.5, 1.0], 'tpot': 0.75, 'e2e': 3.5}

    vLLM: benchmarks/serve.py:556 calculate_metrics
    """
    raise NotImplementedError("chapter 1, task 3: return a dict of ttft, itls, tpot and e2e")


def static_batching(jobs, max_num_seqs):
    """Given, for tasks 4 and 5: the traditional loop (静态批处理). No task, but read it.

    jobs: [(name, arrival step, output tokens)], in order of arrival. Returns who takes part in each step. A batch is
    formed of those who are there, at most max_num_seqs, and runs until its longest ends. Somebody who has ended keeps
    the seat, and is computed on for nobody. In a step where nobody is there the engine idles: an empty list.

    >>> static_batching([("a", 0, 3), ("b", 0, 1), ("c", 1, 2)], 2)
    [['a', 'b'], ['a', 'b'], ['a', 'b'], ['c'], ['c']]
    """
    steps, waiting = [], list(jobs)
    while waiting:
        batch = [job for job in waiting if job[1] <= len(steps)][:max_num_seqs]
        waiting = waiting[len(batch):]
        longest = max((output_tokens for _, _, output_tokens in batch), default=1)
        steps += [[name for name, _, _ in batch] for _ in range(longest)]
    return steps


def static_waste(jobs, max_num_seqs):
    """Task 4 (article §4; walk-through 4). What does static batching compute, and how much of it for nobody?

    jobs: [(prompt tokens, output tokens)], all there from the start, taken max_num_seqs at a time in this order; the
    last batch may be smaller. A batch is a rectangle, a row a request. Its first step computes all prompts, padded
    (填充) to the batch's longest, and yields everybody's first token. Each step after it feeds one token into every row,
    until the request with the most output has its last token. That last token is never fed in.

    Return (computed, wasted), in tokens: all that was computed, and the part of it that no request needed. A request
    alone would need its prompt, and each of its output tokens but the last.

    >>> static_waste([(4, 3), (2, 1)], 2)       # 2 x 4 for the prompts, then 2 x 2; needed: 4 + 2 and 2 + 0
    (12, 4)
    """
    raise NotImplementedError("chapter 1, task 4: return (tokens computed, tokens wasted) of static batching")


def continuous_batching(jobs, max_num_seqs):
    """Task 5 (article §4, change one; walk-through 4). Rewrite static_batching as continuous batching (连续批处理).

    jobs and the result are static_batching's. Now who takes part is decided anew in each step:
      - who is there, joins as soon as a seat is free; first come, first served (先来先服务)
      - who is running takes part in each step, until it has had its last token
      - who has ended is gone from the next step on, and the seat is free in that same next step
    A prompt fits one step, which yields the first token; each step after it yields one more. The order of the names
    within a step is up to you. The grader asks the engine's own Scheduler.

    >>> continuous_batching([("a", 0, 3), ("b", 0, 1), ("c", 1, 2)], 2)
    [['a', 'b'], ['a', 'c'], ['a', 'c']]

    vLLM: v1/core/sched/scheduler.py:439 Scheduler.schedule
    """
    raise NotImplementedError("chapter 1, task 5: return who takes part in each step of continuous batching")
