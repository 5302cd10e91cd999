"""Wrong durations, each with the rule that the lab has to name. They are made of parts; a wrong one changes one."""


def make(**parts):
    """The right function, but for the parts that are given: name → function(sent, scheduled, times, ended)."""
    right = {"queue_time": lambda sent, scheduled, times, ended: None if scheduled is None else scheduled - sent,
             "ttft": lambda sent, scheduled, times, ended: times[0] - sent if times else None,
             "itls": lambda sent, scheduled, times, ended: [b - a for a, b in zip(times, times[1:])],
             "tpot": lambda sent, scheduled, times, ended: (
                 (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None),
             "e2e": lambda sent, scheduled, times, ended: None if ended is None else ended - sent}

    def durations(metrics):
        known = metrics.arrival_time, metrics.first_scheduled_time, metrics.token_times, metrics.finish_time
        return {name: part(*known) for name, part in (right | parts).items()}
    return durations


def remembering():
    """The first answer, for ever."""
    known = {}

    def durations(metrics):
        return known.setdefault(metrics.arrival_time, make()(metrics))
    return durations


def forgetting():
    """A preemption makes it a new request, it seems."""
    def durations(metrics):
        return make()(metrics) | ({"queue_time": None} if metrics.num_preemptions else {})
    return durations


WRONG = {
    "a queue of zero while it waits": (make(queue_time=lambda s, a, t, e: (a or s) - s), "waiting"),
    "a queue up to the first token": (make(queue_time=lambda s, a, t, e: t[0] - s if t else None), "queue"),
    "the queue by the clock": (make(queue_time=lambda s, a, t, e: a), "queue"),
    "ttft from the first step": (make(ttft=lambda s, a, t, e: t[0] - a if t else None), "ttft"),
    "ttft by the clock": (make(ttft=lambda s, a, t, e: t[0] if t else None), "ttft"),
    "ttft of the last token": (make(ttft=lambda s, a, t, e: t[-1] - s if t else None), "ttft"),
    "ttft of nothing is zero": (make(ttft=lambda s, a, t, e: t[0] - s if t else 0.0), "waiting"),
    "ttft of nothing raises": (make(ttft=lambda s, a, t, e: t[0] - s), "waiting"),
    "ttft among the gaps": (make(itls=lambda s, a, t, e: [y - x for x, y in zip([s] + t, t)]), "itls"),
    "the gaps sorted": (make(itls=lambda s, a, t, e: sorted(y - x for x, y in zip(t, t[1:]))), "itls"),
    "without the last gap": (make(itls=lambda s, a, t, e: [y - x for x, y in zip(t, t[1:-1])]), "itls"),
    "gaps of nothing are none": (make(itls=lambda s, a, t, e: [y - x for x, y in zip(t, t[1:])] or None), "single"),
    "tpot by n": (make(tpot=lambda s, a, t, e: (t[-1] - t[0]) / len(t) if len(t) > 1 else None), "tpot"),
    "tpot with the ttft": (make(tpot=lambda s, a, t, e: (t[-1] - s) / len(t) if len(t) > 1 else None), "tpot"),
    "tpot of one token is 0": (make(tpot=lambda s, a, t, e: (t[-1] - t[0]) / (len(t) - 1 or 1) if t else None), "single"),
    "tpot of one token raises": (make(tpot=lambda s, a, t, e: (t[-1] - t[0]) / (len(t) - 1) if t else None), "single"),
    "e2e to the last token so far": (make(e2e=lambda s, a, t, e: t[-1] - s if t else None), "e2e"),
    "e2e from the first step": (make(e2e=lambda s, a, t, e: None if e is None else e - (a or s)), "e2e"),
    "e2e only with a token": (make(e2e=lambda s, a, t, e: e - s if t and e is not None else None), "aborted"),
    "e2e by the last token": (make(e2e=lambda s, a, t, e: None if e is None else t[-1] - s), "e2e"),
    "e2e before the end": (make(e2e=lambda s, a, t, e: (e or t[-1]) - s if e or t else None), "running"),
    "no gaps before the end": (make(itls=lambda s, a, t, e: [y - x for x, y in zip(t, t[1:])] if e else []), "running"),
    "no queue once preempted": (forgetting(), "preempted"),
    "the first answer for ever": (remembering(), "running"),
    "other keys": (lambda metrics: {"TTFT": 0.0}, "keys"),
    "a tuple": (lambda metrics: tuple(make()(metrics).values()), "keys"),
    "milliseconds": (lambda metrics: {key: value if value is None or isinstance(value, list) else 1000 * value
                                      for key, value in make()(metrics).items()}, "queue"),
}
