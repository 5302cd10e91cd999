"""第 2 章实验（文章第 2 节）：一个请求的各种时长，即 RequestMetrics 的那几个。运行 `make lab CH=2`

先在 request.py 里看懂一个请求有哪些时刻，然后合上它。你的函数会顶替 RequestMetrics 的五个时长：流式输出途中、发生抢占时、请求提前
结束或还没开始时，都会来问它。
"""


def durations(metrics):
    """一个请求的时刻此刻说明了什么？返回一个字典，都以秒计，出自同一个时钟：

      "queue_time"   从到达，到第一次参与计算的那一步
      "ttft"         首 token 时延：从到达算起，包括排队
      "itls"         token 间时延：相邻 token 之间的每个间隔，是列表
      "tpot"         每输出 token 耗时：首个 token 之后的平均间隔
      "e2e"          从到达到结束

    此刻还说不出的为 None，"itls" 则为空列表。可用的有：
      metrics.arrival_time           一定有
      metrics.first_scheduled_time   还在等待时为 None
      metrics.token_times            到目前为止每个输出 token 的时刻，可能一个也没有
      metrics.finish_time            还在运行时为 None；被中止的请求可能一个 token 都没有就结束

    每一步之后都会问到：等待的、运行的、被抢占又重新运行的、已经结束的请求。

    vLLM: v1/metrics/stats.py:452 IterationStats.update_from_finished_request
    """
    raise NotImplementedError("第 2 章实验：返回 queue_time、ttft、itls、tpot 和 e2e")
