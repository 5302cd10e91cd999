"""Chapter 2's exercises: one way to solve each. Read it after your own."""


def percentile(values, p):
    """The whole part of the rank says between which two, the rest how far."""
    if not values:
        return None
    ordered, rank = sorted(values), (len(values) - 1) * p / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def goodput(requests, limits, duration):
    """All limits that are given, request by request; a TPOT of None is 0."""
    good = sum(request["success"] and all((request[name] or 0.0) <= limit / 1000 for name, limit in limits.items())
               for request in requests)
    return good / duration


def mean_concurrency(intervals, begin, end):
    """Everybody's time inside, added up, over the time that there was."""
    inside = sum(max(min(end if left is None else left, end) - max(arrived, begin), 0) for arrived, left in intervals)
    return inside / (end - begin)


def response_times(due, seconds, clients):
    """Sent when it is due and the client that is free first is free; what the user waits is from due to the end."""
    free, waited = [0] * clients, []
    for when, busy in zip(due, seconds):
        start = max(when, min(free))
        free[free.index(min(free))] = start + busy
        waited.append(start + busy - when)
    return waited


def read_stream(sent, chunks, num_tokens):
    """Chunks without text tell no time; the number of tokens is not theirs."""
    times = [time for time, text in chunks if text]
    return {"ttft": times[0] - sent, "itls": [b - a for a, b in zip(times, times[1:])],
            "tpot": (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None, "e2el": times[-1] - sent}


def mfu(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    """All FLOPs over all that could have been computed in all the time."""
    flops = seconds = 0
    for chunks, duration in steps:
        for computed, n in chunks:
            flops += n * flops_per_token + (n * computed + n * (n + 1) // 2) * flops_per_pair
        seconds += duration
    return flops / (seconds * peak_flops * num_gpus)
