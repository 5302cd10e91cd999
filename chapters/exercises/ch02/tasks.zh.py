"""第 2 章练习。每道题是一个函数：把 `raise` 换成函数体，然后运行 `make grade CH=2`（中文环境下批改的就是这个文件）。

每题不超过 15 行，只用普通 Python。问题的答案都在 chapters/ch02_metrics.py 里当面演示过，题目注明了是哪一节。
示例都是真的：它们会作为测试运行。传进来的列表请保持原样，它们属于调用者。
"""


def percentile(values, p):
    """第 1 题（文章第 2 节；演示第 3 节）。一组值的第 p 百分位，与 numpy 和 vLLM 的算法相同。

    p 从 0 到 100。排好序的值名次为 0 到 n - 1，百分位在名次 (n - 1) * p / 100 处。多数情况下它落在两个值之间：名次走到哪里，
    百分位就在两个值之间走到哪里。没有值时返回 None。

    >>> percentile([40, 10, 30, 20], 50)        # 名次 1.5，在 20 和 30 的正中
    25.0

    vLLM: benchmarks/serve.py:556 calculate_metrics
    """
    raise NotImplementedError("第 2 章第 1 题：返回按名次插值的百分位")


def goodput(requests, limits, duration):
    """第 2 题（文章第 2 节；演示第 5 节）。每秒有多少请求遵守了 SLO？

    requests：字典的列表，"ttft"、"tpot"、"e2el" 以秒计，另有 "success"；只有一个 token 的回答 tpot 为 None，当作 0。
    limits：{"ttft": 300, ...}，以毫秒计，含三个名字中的一到三个。duration：整次运行的秒数。恰好等于限额算达标。失败的请求
    永远不算达标。

    >>> one = {"ttft": 0.25, "tpot": 0.05, "e2el": 2.75, "success": True}
    >>> goodput([one, {**one, "ttft": 0.5}], {"ttft": 300, "tpot": 60}, 10)
    0.1

    vLLM: benchmarks/serve.py:556 calculate_metrics
    """
    raise NotImplementedError("第 2 章第 2 题：返回每秒达标的请求数")


def mean_concurrency(intervals, begin, end):
    """第 3 题（文章第 4 节；演示第 4 节）。从 begin 到 end，系统里平均有多少个请求？

    intervals：[(到达, 离开)]，顺序不定；还没离开的，离开为 None。来得早或走得晚的，只算落在这段时间里的部分。这就是 Little
    定律 L = λW 里的 L：批改的最后一例，会用一次真实的调度来对它。

    >>> mean_concurrency([(0, 4), (1, 3)], 0, 4)        # 一个、两个、两个、一个
    1.5
    """
    raise NotImplementedError("第 2 章第 3 题：返回系统里的平均请求数")


def response_times(due, seconds, clients):
    """第 4 题（文章第 4 节；演示第 4 节）。不自欺的闭环。

    请求 i 应在 due[i] 发出（已按先后排好），占用一个客户端 seconds[i] 秒。共有 `clients` 个客户端，每个一次只发一个请求：
    按应发的先后，到点且有客户端空闲就发。返回每个请求的用户等了多久：从应发的时刻算起，而不是从实际发出算起。

    >>> response_times([0, 1, 2], [5, 1, 1], 1)         # 第一个很久；后两个到 5 和 6 才发得出去
    [5, 5, 5]

    vLLM: benchmarks/serve.py:768 benchmark，那里从实际发出算起
    """
    raise NotImplementedError("第 2 章第 4 题：返回每个请求从应发时刻算起的时间")


def read_stream(sent, chunks, num_tokens):
    """第 5 题（文章第 4 节；演示第 2 节）。从一个流式回答能读出哪些时间？

    chunks：[(时刻, 文字)]，按到达顺序。第一个可能只有 role，最后一个可能是 usage：它们的文字是 ""。一个 chunk 可以有多个
    token；num_tokens 取自 usage，说明一共有多少个。返回一个字典，以秒计：
      "ttft"   到第一个有文字的 chunk
      "itls"   有文字的 chunk 之间的间隔
      "tpot"   从第一个到最后一个有文字的 chunk，平摊给首个之后的每个 token；只有一个 token 时为 None
      "e2el"   到最后一个有文字的 chunk

    >>> read_stream(1.0, [(1.25, ""), (2.0, "A"), (2.5, "B"), (3.5, "C D"), (3.75, "")], 4)
    {'ttft': 1.0, 'itls': [0.5, 1.0], 'tpot': 0.5, 'e2el': 2.5}
    """
    raise NotImplementedError("第 2 章第 5 题：返回含 ttft、itls、tpot、e2el 的字典")


def mfu(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    """第 6 题（文章第 2 节；演示第 3、5 节）。这些 GPU 为模型算出的，占峰值的几成？

    steps：[(chunks, 秒)]；chunks：[(已算, 本步算)]，每个请求一项。本步的每个 token 花 flops_per_token，它每关注一个位置再花
    flops_per_pair：在它之前的所有位置，加上它自己。peak_flops：一张 GPU 每秒的峰值。

    >>> mfu([([(0, 2), (3, 1)], 2.0)], 10, 1, 37, 1)    # 3 个 token，1 + 2 + 4 对：2 秒 37 FLOP
    0.5
    """
    raise NotImplementedError("第 2 章第 6 题：返回模型 FLOPs 利用率，从 0 到 1")
