"""Chapter 2's lab: the durations of RequestMetrics as one function. Read it after your own."""


def durations(metrics):
    sent, times = metrics.arrival_time, metrics.token_times
    scheduled, ended = metrics.first_scheduled_time, metrics.finish_time
    return {"queue_time": None if scheduled is None else scheduled - sent, "ttft": times[0] - sent if times else None,
            "itls": [b - a for a, b in zip(times, times[1:])],
            "tpot": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            "e2e": None if ended is None else ended - sent}
