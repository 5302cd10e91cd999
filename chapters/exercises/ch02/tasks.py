"""Chapter 2's exercises. Each task is a function: replace its `raise` by a body, then run `make grade CH=2`.

At most 15 lines each, plain Python. All of it was shown in chapters/ch02_metrics.py, in the section that a task names.
The examples are true: they run as tests. Leave the lists that come in as they are: they are the caller's.
中文版：tasks.zh.py
"""


def percentile(values, p):
    """Task 1 (article §2; walk-through, section 3). The p-th percentile of some values, as numpy and vLLM have it.

    p is from 0 to 100. The sorted values have the ranks 0 to n - 1, and the percentile stands at rank (n - 1) * p /
    100. Mostly that lies between two values: then it is as far between them as the rank is. Without values it is None.

    >>> percentile([40, 10, 30, 20], 50)        # rank 1.5, in the middle of 20 and 30
    25.0

    vLLM: benchmarks/serve.py:556 calculate_metrics
    """
    raise NotImplementedError("chapter 2, task 1: return the percentile, interpolated between ranks")


def goodput(requests, limits, duration):
    """Task 2 (article §2; walk-through, section 5). Requests a second that kept the SLO.

    requests: dicts with "ttft", "tpot", "e2el" in seconds and "success"; tpot is None for an answer of one token, which
    counts as 0. limits: {"ttft": 300, ...} in milliseconds, of one to three of the names. duration: of the run, in
    seconds. A time that equals its limit has kept it. What failed is never good.

    >>> one = {"ttft": 0.25, "tpot": 0.05, "e2el": 2.75, "success": True}
    >>> goodput([one, {**one, "ttft": 0.5}], {"ttft": 300, "tpot": 60}, 10)
    0.1

    vLLM: benchmarks/serve.py:556 calculate_metrics
    """
    raise NotImplementedError("chapter 2, task 2: return the requests a second that keep all limits")


def mean_concurrency(intervals, begin, end):
    """Task 3 (article §4; walk-through, section 4). How many requests were in the system, in the mean from begin to
    end?

    intervals: [(arrived, left)], in any order; left is None for who is still there. Whoever came earlier or leaves
    later counts for the part that lies in between. This is the L of Little's law, L = λW: the grader's last case has
    you check it on a real schedule.

    >>> mean_concurrency([(0, 4), (1, 3)], 0, 4)        # one, two, two, one
    1.5
    """
    raise NotImplementedError("chapter 2, task 3: return the mean number of requests in the system")


def response_times(due, seconds, clients):
    """Task 4 (article §4; walk-through, section 4). A closed loop that doesn't deceive itself.

    Request i is due at due[i] (in order) and keeps a client busy for seconds[i]. There are `clients` of them; each
    sends one request at a time, in the order in which they are due, as soon as it is due and a client is free. Return
    for each request how long its user waited: from when it was due, not from when it was sent.

    >>> response_times([0, 1, 2], [5, 1, 1], 1)         # the first takes long; the others could only be sent at 5 and 6
    [5, 5, 5]

    vLLM: benchmarks/serve.py:768 benchmark, which measures from sending
    """
    raise NotImplementedError("chapter 2, task 4: return each request's time from when it was due")


def read_stream(sent, chunks, num_tokens):
    """Task 5 (article §4; walk-through, section 2). What a streamed answer says about its times.

    chunks: [(time, text)] as they arrive. A first one may hold the role only, a last one the usage: their text is "".
    A chunk may hold several tokens; num_tokens, from the usage, says how many there were. Return a dict, in seconds:
      "ttft"   until the first chunk with text
      "itls"   the gaps between chunks with text
      "tpot"   from the first to the last chunk with text, for each token after the first; None for a single token
      "e2el"   until the last chunk with text

    >>> read_stream(1.0, [(1.25, ""), (2.0, "A"), (2.5, "B"), (3.5, "C D"), (3.75, "")], 4)
    {'ttft': 1.0, 'itls': [0.5, 1.0], 'tpot': 0.5, 'e2el': 2.5}
    """
    raise NotImplementedError("chapter 2, task 5: return a dict with ttft, itls, tpot and e2el")


def mfu(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    """Task 6 (article §2; walk-through, sections 3 and 5). Which share of their peak did the GPUs compute for the
    model?

    steps: [(chunks, seconds)], and chunks: [(num_computed, num_scheduled)], one a request. Each scheduled token costs
    flops_per_token, and flops_per_pair for each position that it attends to: all those before it, and itself.
    peak_flops: of one GPU, a second.

    >>> mfu([([(0, 2), (3, 1)], 2.0)], 10, 1, 37, 1)    # 3 tokens and 1 + 2 + 4 pairs: 37 FLOPs in 2 s
    0.5
    """
    raise NotImplementedError("chapter 2, task 6: return the model FLOPs utilisation, from 0 to 1")
