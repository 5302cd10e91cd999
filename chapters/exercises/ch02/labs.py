"""Chapter 2's lab (article §2): the durations of a request, those of RequestMetrics. `make lab CH=2`; 中文版：labs.zh.py

Read first in request.py what a request's times are, then close it. Your function stands in the place of RequestMetrics'
five durations: while the engine streams, when it preempts, when a request ends early or never begins.
"""


def durations(metrics):
    """What the times of one request say, now. Returns a dict, all in seconds, of one clock:

      "queue_time"   from arrival to the first step that computes some of it
      "ttft"         time to first token: from arrival, the queue included
      "itls"         inter-token latencies: every gap between one token and the next, a list
      "tpot"         time per output token: the mean gap after the first
      "e2e"          from arrival to the end

    What can't be said yet is None, and "itls" is then an empty list. You have:
      metrics.arrival_time           always
      metrics.first_scheduled_time   None while it waits
      metrics.token_times            of each output token so far, perhaps none
      metrics.finish_time            None while it runs; a request may end without a token, by an abort

    It is asked after every step, for requests that wait, run, were preempted and run again, or have ended.

    vLLM: v1/metrics/stats.py:452 IterationStats.update_from_finished_request
    """
    raise NotImplementedError("chapter 2, lab: return queue_time, ttft, itls, tpot and e2e")
