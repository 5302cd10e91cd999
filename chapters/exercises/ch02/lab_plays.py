"""What chapter 2's lab plays with the student's `durations`. Runs in the sandbox, with the engine imported; what
happened is returned as plain data, and nothing is judged here."""
import sys

import torch

from nano_serve import EngineArgs, LLMEngine
from request import Request, RequestMetrics, SamplingParams

torch.set_num_threads(1)
NAMES = ("queue_time", "ttft", "itls", "tpot", "e2e")
OWN = {name: vars(RequestMetrics)[name] for name in NAMES}


def put_in_place(name):
    """The student's function in the place of the five properties; without a name the engine's own come back."""
    function = name and getattr(sys.modules["answers"], name, None)
    if name and not callable(function):
        raise LookupError(f"has no function {name}")
    for key, own in OWN.items():
        setattr(RequestMetrics, key, property(lambda metrics, key=key: function(metrics)[key]) if function else own)
    return function


def told(metrics, function):
    """What is said of a request: by the student at once, by the engine's own property by property."""
    return function(metrics) if function else {key: getattr(metrics, key) for key in NAMES}


def moments(target, name, data):
    """data: a list of (arrival, first scheduled, token times, finished). What is said of each."""
    function, found = put_in_place(name), []
    for arrival, scheduled, times, finished in data:
        request = Request("r", [1], SamplingParams(), arrival_time=arrival)
        request.first_scheduled_time, request.token_times, request.finish_time = scheduled, list(times), finished
        found.append(told(RequestMetrics(request), function))
    return found


def make_engine(**options):
    """An engine whose clock goes on by a quarter of a second whenever somebody looks at it."""
    engine, now = LLMEngine(EngineArgs(**{"max_model_len": 512, "num_kv_blocks": 64, **options})), [0.0]

    def clock():
        now[0] += 0.25
        return now[0]
    engine.clock = clock
    return engine


def serve(target, name, data):
    """data: prompts as texts, max_tokens, options of the engine, and in which step whom to abort. After each step: what
    is said of every request. Returns [(step, request, what is said)] and the preemptions."""
    function, engine, said, steps = put_in_place(name), make_engine(**data["options"]), [], 0
    requests = []
    for i, (prompt, n) in enumerate(data["prompts"]):
        engine.add_request(f"r{i}", prompt, SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True))
        requests.append(engine.scheduler.requests[f"r{i}"])
    while engine.has_unfinished_requests() and steps < 400:
        for request_id in data["aborts"].get(str(steps), ()):
            engine.abort_request(request_id)
        engine.step()
        steps += 1
        said += [[steps, request.request_id, told(RequestMetrics(request), function)] for request in requests]
    engine.close()
    return {"said": said, "preemptions": sum(request.num_preemptions for request in requests)}


def five(target, name, data):
    """Five questions at once, each with what its metrics say: [(question, line)], to be read."""
    put_in_place(name)
    engine, done = LLMEngine(EngineArgs(max_model_len=512, num_kv_blocks=64, max_num_seqs=4)), {}
    for question in data["prompts"]:
        engine.add_request(question, {"messages": [{"role": "user", "content": question}]},
                           SamplingParams(max_tokens=data["max_tokens"], temperature=0.0))
    while engine.has_unfinished_requests():
        done |= {result.request_id: result.metrics for result in engine.step() if result.finished}
    engine.close()
    return [(question, f"queue {1e3 * m.queue_time:.1f} ms, TTFT {1e3 * m.ttft:.1f}, TPOT {1e3 * (m.tpot or 0):.2f}, "
                       f"worst ITL {1e3 * max(m.itls, default=0.0):.2f}, E2E {1e3 * m.e2e:.1f}")
            for question, m in sorted(done.items(), key=lambda item: data["prompts"].index(item[0]))]
