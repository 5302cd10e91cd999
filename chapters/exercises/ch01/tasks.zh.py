"""第 1 章练习。每道题是一个函数：把 `raise` 换成函数体，然后运行 `make grade CH=1`（中文环境下批改的就是这个文件）。

每题不超过 15 行，只用普通 Python。问题的答案都在 chapters/ch01_paradigm.py 里当面演示过，题目注明了是哪一节。
示例都是真的：它们会作为测试运行。传进来的列表请保持原样，它们属于调用者。
"""


def kv_bytes_per_token(num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, dtype_bytes):
    """第 1 题（文章第 2、6 节；演示第 6 节）。一个 token 在 KV 缓存（KV cache）里留下多少字节？

    看看两种数据流各往缓存里写了什么，别忘了模型有很多层。答案针对整个模型，不管由几张 GPU 分担。dtype_bytes 是一个
    数占的字节数：FP16 为 2。不一定每个参数都用得上。

    >>> kv_bytes_per_token(2, 4, 2, 8, 2)       # 2 层，4 个 Q 头共用 2 个 KV 头，head_dim 为 8，FP16
    128

    通过以后，用它算算贯穿全文的例子，再算算同一个模型没有 GQA 时是多少。
    """
    raise NotImplementedError("第 1 章第 1 题：返回一个 token 在 KV 缓存里占的字节数")


def max_concurrency(kv_cache_bytes, kv_bytes_per_token, block_size, num_prompt_tokens, num_output_tokens):
    """第 2 题（文章第 4 节，变化二；演示第 1 节）。KV 显存里能同时放下多少个相同的请求，让它们从 prompt 一直跑到结束，
    谁也不必被抢占（preemption）？

    显存切成整块，每块放 block_size 个 token。0 号块是空块（null block），从不分配。请求独占整块，不与别人共用，直到
    结束才归还。想想所有请求都最大的那一刻：那时缓存里有哪些 token？最后采样出的那个 token 不会再输入模型。

    >>> max_concurrency(1000, 10, 4, 6, 3)      # 25 块，每块 40 字节；6 + 3 个 token，存 8 个，占 2 块
    12

    vLLM: v1/core/kv_cache_utils.py:937 get_max_concurrency_for_kv_cache_config，那里的请求长度取上限
    """
    raise NotImplementedError("第 1 章第 2 题：返回不发生抢占时能放下的请求数")


def latencies(arrival_time, first_scheduled_time, token_times):
    """第 3 题（文章第 3 节；演示第 2、3 节）。用户感受到了什么？所有时间都以秒计，出自同一个时钟。

    token_times 是每个输出 token 出现的时刻，至少有一个。返回一个字典：
      "ttft"   首 token 时延：等着看结果的用户所经历的
      "itls"   token 间时延：相邻 token 之间所有间隔的列表
      "tpot"   每输出 token 耗时：首个 token 之后的平均间隔；没有间隔则为 None
      "e2e"    端到端时延：过了多久回答才完整

    >>> latencies(0.0, 0.5, [2.0, 2.5, 3.5])    # 0 时刻到达，排队到 0.5
    {'ttft': 2.0, 'itls': [0.5, 1.0], 'tpot': 0.75, 'e2e': 3.5}

    vLLM: benchmarks/serve.py:556 calculate_metrics
    """
    raise NotImplementedError("第 1 章第 3 题：返回含 ttft、itls、tpot、e2e 的字典")


def static_batching(jobs, max_num_seqs):
    """供第 4、5 题参考：传统的循环（静态批处理）。这不是题目，但请读一读。

    jobs：[(名字, 到达的步, 输出 token 数)]，按到达顺序。返回每一步有谁参加。批次由已到达的请求组成，最多
    max_num_seqs 个，一直跑到其中最长的结束。提前结束的仍占着座位，白白陪跑。没有请求的那一步引擎空转：空列表。

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
    """第 4 题（文章第 4 节；演示第 4 节）。静态批处理算了多少，其中多少是白算的？

    jobs：[(prompt token 数, 输出 token 数)]，一开始就都在，按这个顺序每次取 max_num_seqs 个；最后一个批次可以更小。
    批次是一个矩形，一行一个请求。第一步计算所有 prompt，填充（padding）到批次里最长的那个，并给出每个请求的第一个
    token。之后每一步给每一行输入一个 token，直到输出最多的请求拿到最后一个。最后那个 token 不再输入。

    返回 (computed, wasted)，单位是 token：总共计算了多少，其中多少没有任何请求需要。单独一个请求需要的是它的 prompt，
    以及除最后一个之外的每个输出 token。

    >>> static_waste([(4, 3), (2, 1)], 2)       # prompt 2 x 4，再加 2 x 2；需要的是 4 + 2 和 2 + 0
    (12, 4)
    """
    raise NotImplementedError("第 1 章第 4 题：返回静态批处理 (计算的 token 数, 浪费的 token 数)")


def continuous_batching(jobs, max_num_seqs):
    """第 5 题（文章第 4 节，变化一；演示第 4 节）。把 static_batching 改写成连续批处理（continuous batching）。

    jobs 和返回值的形式与 static_batching 相同。现在每一步都重新决定谁参加：
      - 只要有空位，已到达的请求就加入；先来先服务
      - 正在运行的请求每一步都参加，直到拿到最后一个 token
      - 结束的请求从下一步起离开，座位在那一步就空出来
    prompt 一步就能算完，并产出第一个 token；之后每一步再产出一个。一步之内名字的顺序随意。批改时问的是引擎自己的
    Scheduler。

    >>> continuous_batching([("a", 0, 3), ("b", 0, 1), ("c", 1, 2)], 2)
    [['a', 'b'], ['a', 'c'], ['a', 'c']]

    vLLM: v1/core/sched/scheduler.py:439 Scheduler.schedule
    """
    raise NotImplementedError("第 1 章第 5 题：返回连续批处理每一步有谁参加")
