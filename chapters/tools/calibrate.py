"""Where the ledger's constants come from: kernel times that others measured, or a run on this machine.

    fit            the H100's constants from chapters/data (`python chapters/tools/ledger.py --fit` prints every error)
    calibrate      the constants of this machine and one model, from the StepRecords of the real engine
    reality_check  the simulator against the engine here, on a workload that it was not calibrated with
                   (`python chapters/tools/calibrate.py`)

Both search for the numbers that bring the ledger's estimate nearest to what was measured.  ledger.py itself never looks
at a measurement, so that the reader can follow it with a pencil.
"""
import argparse
import csv
import functools
import math
import os
import pathlib
import sys
import time
from dataclasses import replace

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import bench  # noqa: E402
from ledger import (CALIBRATED_H100, Calibration, Cost, Hardware, Ledger, ModelShape,  # noqa: E402
                    SimulatedEngine, work_of)
from options import end_quietly  # noqa: E402

# The measurement's name -> ours.
MEASURED = {"attn_pre_proj": "qkv_proj", "attn_post_proj": "o_proj", "mlp_up_proj": "gate_up_proj",
            "mlp_down_proj": "down_proj", "input_layernorm": "norm", "post_attention_layernorm": "norm",
            "attn_rope": "rope", "mlp_act": "silu_and_mul", "add": "residual_add"}


@functools.cache
def read_csv(name):
    with open(HERE.parent / "data" / name) as file:
        return list(csv.DictReader(file))


def measured_ops():
    """{(measured name, tokens): seconds} of one layer of the 70B on one of eight H100s."""
    return {(row["op"], int(row["num_tokens"])): float(row["median_us"]) / 1e6
            for row in read_csv("h100_llama70b_tp8_ops.csv") if row["op"] in MEASURED}


def estimated_ops(calibration, keys):
    """The same table, estimated."""
    ledger = Ledger(calibration=calibration)
    ops = {T: {op.name: ledger.seconds(op) for op in ledger.layer_ops(T)} for T in {T for _, T in keys}}
    return {(name, T): ops[T][MEASURED[name]] for name, T in keys}


def layer_seconds(table):
    """{tokens: seconds of the whole layer}; a layer adds to the residual twice, the measurement names it once."""
    total = dict.fromkeys([T for _, T in table], 0.0)
    for (name, T), seconds in table.items():
        total[T] += seconds * (2 if name == "add" else 1)
    return total


def all_reduce_errors(cost):
    """{bytes: estimated / measured} for eight GPUs."""
    ledger = Ledger(calibration=replace(CALIBRATED_H100, all_reduce=Cost(*cost)))
    return {int(row["bytes"]): ledger.seconds(*ledger.all_reduce("", int(row["bytes"]) / 2, 2 * 7 / 8))
            / (float(row["median_us"]) / 1e6) for row in read_csv("h100_dgx_allreduce_8gpu.csv")}


def pattern_search(loss, start):
    """Positive numbers at a minimum of `loss`: each one a step up or down, the step halved when nothing helps."""
    x, best, step = [math.log(value) for value in start], loss(start), 0.3
    while step > 1e-5:
        for i, delta in [(i, sign * step) for i in range(len(x)) for sign in (1, -1)]:
            trial = [value + delta * (i == j) for j, value in enumerate(x)]
            value = loss([math.exp(v) for v in trial])
            if value < best - 1e-12:
                x, best = trial, value
                break
        else:
            step /= 2
    return [float(f"{math.exp(v):.3g}") for v in x]


def fit():
    """The Calibration that chapters/data asks for: seven numbers for the operators, two for all-reduce.

    It minimises the squared log errors of each operator at each size, plus 50 times the whole layer's, since the layer
    is what a step adds up.  Small operators count a tenth: some take 1 us, measured in whole microseconds."""
    measured = measured_ops()
    layers = layer_seconds(measured)

    def calibration(x):
        # Attention was not measured: it gets what the other matrix products get.
        return Calibration(Cost(*x[0:2]), Cost(*x[0:2]), Cost(*x[2:4]), Cost(*x[4:6]), x[6], CALIBRATED_H100.all_reduce)

    def loss(x):
        table = estimated_ops(calibration(x), measured)
        return (sum(math.log(table[key] / measured[key]) ** 2 * (1 if "proj" in key[0] else 0.1) for key in measured)
                + 50 * sum(math.log(seconds / layers[T]) ** 2 for T, seconds in layer_seconds(table).items()))

    all_reduce = pattern_search(lambda x: sum(math.log(e) ** 2 for e in all_reduce_errors(x).values()), [2e-5, 0.8])
    operators = pattern_search(loss, [5e-6, 0.7, 4e-6, 0.4, 1e-6, 0.6, 3])
    return replace(calibration(operators), all_reduce=Cost(*all_reduce))


def this_machine(clock=time.perf_counter):
    """The Hardware under our feet: fp32 matrix product and memory copy, the best of several runs of PyTorch."""
    import torch

    def best(function, *arguments):
        def once():
            begin = clock()
            function(*arguments)
            return clock() - begin
        return min(once() for _ in range(8))

    a, b = torch.randn(1024, 1024), torch.empty(1 << 25)
    copied = 2 * b.nbytes / best(b.copy_, torch.ones_like(b))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware("this machine", 2 * 1024 ** 3 / best(torch.mm, a, a), copied, memory, copied, "measured here, fp32")


def work_of_record(record):
    """The Work of a StepRecord."""
    chunks = [(request.computed, request.scheduled) for request in record.requests]
    return work_of(chunks, sum(request.sampled is not None for request in record.requests))


def recalibrated(ledger, calibration):
    """The same ledger with other constants."""
    return Ledger(ledger.model, ledger.hardware, ledger.tp, calibration, ledger.dtype_bytes, ledger.block_size)


def calibrate(ledger, *runs):
    """A Calibration for `ledger` from StepRecords of the real engine: a small model's step is mostly on no datasheet.

    Four numbers: the share of the peaks that attention reaches, and all else; seconds a step, and a request.  With
    nothing else in it a step's time is linear in (1/share, 1/share, seconds, seconds), so least squares of the relative
    error finds them, none below 0.  `runs` repeat one workload: of each step the fastest counts, as noise only adds.
    The workload should have few long requests and many short ones, or the four cannot be told apart."""
    ideal = recalibrated(ledger, Calibration(*[Cost(0, 1)] * 4, smoothness=1, all_reduce=Cost(0, 1)))
    rows = []
    for steps in zip(*runs):
        work, seconds = work_of_record(steps[0]), min(step.duration for step in steps)
        attention = ideal.total_seconds([ideal.attention_op(work)])
        parts = (ideal.step_time(work) - attention, attention, 1.0, work.requests)
        rows.append([part / seconds for part in parts])
    rest, attention, step, request = non_negative_least_squares(rows)
    rest, attention = Cost(0, 1 / rest if rest else math.inf), Cost(0, 1 / attention if attention else math.inf)
    return Calibration(rest, attention, rest, rest, 1, rest, step_overhead=step, request_overhead=request)


def non_negative_least_squares(rows):
    """x >= 0 with the least sum of (row . x - 1)^2, one number at a time, each to its best value given the others."""
    size = range(len(rows[0]))
    square = [[sum(row[i] * row[j] for row in rows) for j in size] for i in size]
    linear, x = [sum(row[i] for row in rows) for i in size], [0.0 for _ in size]
    for _ in range(20_000):
        for i in size:
            others = sum(square[i][j] * x[j] for j in size if j != i)
            x[i] = max(0.0, (linear[i] - others) / square[i][i])
    return x


def reality_check(model=None, repetitions=3):
    """The engine on this CPU with one thread, and the simulator calibrated to it, on requests that are new to it.

    Returns (measured, simulated) seconds over all steps and the two numbers of steps.  Seconds are CPU seconds of this
    process, and the two workloads take turns, so that what else the machine does disturbs both alike and little."""
    import torch

    from nano_serve import EMBEDDED_MODEL, EngineArgs, LLMEngine
    model, threads = model or EMBEDDED_MODEL, torch.get_num_threads()
    torch.set_num_threads(1)
    engine = LLMEngine(EngineArgs(model, device="cpu", dtype="float32", max_num_seqs=16, max_num_batched_tokens=512,
                                  num_kv_blocks=1000), clock=time.process_time)
    vocab = engine.config.vocab_size
    few_long = bench.random_requests(4, 700, 24, 0.3, vocab_size=vocab, seed=1)
    many_short = bench.random_requests(24, 40, 24, 0.5, vocab_size=vocab, seed=2)
    workload = bench.random_requests(24, 250, 50, 0.5, prefix_len=64, vocab_size=vocab, seed=3)
    calibration_runs, measured_runs = [], []
    try:
        for _ in range(repetitions):
            for requests, runs in ((few_long + many_short, calibration_runs), (workload, measured_runs)):
                bench.warm_up(engine, requests[0], 1)
                bench.run(engine, requests, [0.0] * len(requests))
                runs.append(list(engine.records))
    finally:
        engine.close()
        torch.set_num_threads(threads)
    ledger = Ledger(ModelShape.from_config(model), this_machine(time.process_time), tp=1, dtype_bytes=4)
    ledger = recalibrated(ledger, calibrate(ledger, *calibration_runs))
    simulated = SimulatedEngine(ledger, engine.scheduler.config, num_kv_blocks=1000)
    _, seconds = bench.run(simulated, workload, [0.0] * len(workload))
    measured = sum(min(step.duration for step in steps) for steps in zip(*measured_runs))
    return measured, seconds, len(measured_runs[0]), simulated.num_steps


def print_fit():
    """The constants, and the error of every estimate in percent."""
    fitted, measured = fit(), measured_ops()
    table = estimated_ops(fitted, measured)
    print(f"{fitted}\n\nestimated / measured - 1, in %, by tokens in the batch:")
    sizes, layers, wanted = sorted({T for _, T in measured}), layer_seconds(table), layer_seconds(measured)
    ratios = {name: [table[name, T] / measured[name, T] for T in sizes] for name in MEASURED}
    print(" " * 26 + "".join(f"{T:6}" for T in sizes))
    for name, row in {**ratios, "the whole layer": [layers[T] / wanted[T] for T in sizes]}.items():
        print(f"{name:26}" + "".join(f"{100 * (ratio - 1):+6.0f}" for ratio in row))
    print("\nall_reduce, by bytes a rank: " + "  ".join(
        f"{size}: {100 * (ratio - 1):+.0f}" for size, ratio in all_reduce_errors(fitted.all_reduce).items()))


if __name__ == "__main__":
    end_quietly()
    argparse.ArgumentParser(description=reality_check.__doc__.split("\n")[0]).parse_args()      # it has no options
    measured, simulated, steps, simulated_steps = reality_check()
    print(f"measured {measured:.3f} s of CPU in {steps} steps, simulated {simulated:.3f} s in {simulated_steps}: "
          f"{simulated / measured - 1:+.1%}")
