"""Throughput against latency (chapters 1 and 2): the running example for batches of 1 to 256, in virtual time.

    python chapters/tools/sweep.py                                                      the table and the curves
    python chapters/tools/sweep.py --no-enable-prefix-caching --slo ttft:5000 tpot:20   other limits
"""
from __future__ import annotations

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from rich import box  # noqa: E402
from rich.console import Group  # noqa: E402
from rich.table import Table  # noqa: E402

import bench  # noqa: E402
import svg  # noqa: E402
from ledger import HARDWARE, MODELS, OUTPUT, QUESTION, SYSTEM, named, title  # noqa: E402
from metrics import parse_goodput, summarize  # noqa: E402
from options import check_folder, end_quietly, make_console, naming  # noqa: E402
from scheduler import SchedulerConfig  # noqa: E402
from show import LineChart, save_svg  # noqa: E402
from simulator import SimulatedEngine  # noqa: E402


def sweep(ledger, batches=(1, 2, 4, 8, 16, 32, 64, 128, 256), enable_prefix_caching=True, max_num_batched_tokens=8192):
    """The article's curve: the example with `--max-concurrency` 1 to 256 in virtual time, three requests a place.

    Equal requests that start together stay together, so ITL is that of decodes alone and TTFT that of a burst.
    Returns one bench result a batch size, with "batch" added."""
    results, vocab_size = [], ledger.model.vocab_size
    for batch in batches:
        config = SchedulerConfig(max(batches), max_num_batched_tokens, max_model_len=8192)
        engine = SimulatedEngine(ledger, config, enable_prefix_caching=enable_prefix_caching, keep_records=False)
        requests = bench.random_requests(3 * batch, QUESTION, OUTPUT, prefix_len=SYSTEM, vocab_size=vocab_size)
        outputs, duration = bench.run(engine, requests, [0.0] * len(requests), max_concurrency=batch)
        results.append({"batch": batch, **summarize(outputs, duration)})
    return results


def feasible(results, slo):
    """The batches whose P99 keeps the SLO: {name: ms}, of ttft, tpot, itl and e2el."""
    return [r["batch"] for r in results if all(r[f"p99_{name}_ms"] <= limit for name, limit in slo.items())]


def sweep_pictures(results, slo):
    """{name: picture}: the table, and throughput, ITL and TTFT over batch size with the region that the SLO leaves.
    What else the SLO limits has a column of its own."""
    good, xs = feasible(results, slo), [r["batch"] for r in results]
    region = (good[0], good[-1], "within the SLO") if good else None
    shown = [(p, name) for name in ("itl", "ttft") for p in (50, 99)]
    shown += [(99, name) for name in slo if name not in ("itl", "ttft")]
    columns = ["batch", "tokens/s", *[f"P{p} {name.upper()} ms" for p, name in shown], "SLO"]
    rows = [[str(r["batch"]), *[f"{r[key]:,.1f}" for key in ("output_throughput", *[f"p{p}_{of}_ms" for p, of in shown])],
             "yes" if r["batch"] in good else "no"] for r in results]
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=0)        # so that 80 columns hold all of them
    for row in rows:
        table.add_row(*row)
    table.svg = lambda: svg.table("Throughput against latency", columns, rows)      # as the other pictures have it

    def chart(title, y_label, series, limit=None):
        return LineChart(title, xs, series, "batch size (--max-concurrency)", y_label,
                         limit and (limit, f"SLO {limit:g} ms"), region, log_x=True)

    pictures = {"sweep": table, "throughput": chart("Throughput (吞吐)", "output tokens/s",
                                                    {"tokens/s": [r["output_throughput"] for r in results]})}
    for name in ("itl", "ttft"):
        series = {f"P{p}": [r[f"p{p}_{name}_ms"] for r in results] for p in (50, 99)}
        pictures[name] = chart(f"{name.upper()} (单请求延迟)", "ms", series, slo.get(name))
    return pictures


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama-3-70b", help=f"{', '.join(MODELS)}, or a checkpoint folder")
    parser.add_argument("--hardware", default="h100", choices=[*HARDWARE, "here"], help="here: measured now [h100]")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=8)
    parser.add_argument("--slo", nargs="+", default=["ttft:500", "itl:25"], metavar="NAME:MS",
                        help="P99 limits, of ttft, itl, tpot, e2el [ttft:500 itl:25]")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", metavar="DIR", help="save the pictures as SVG")
    args, console = parser.parse_args(argv), make_console()
    try:
        ledger = named(args.model, args.hardware, args.tensor_parallel_size)
        if args.save:
            check_folder("--save", args.save)
        slo, caching = parse_goodput(args.slo, ("ttft", "tpot", "itl", "e2el")), args.enable_prefix_caching
        pictures = sweep_pictures(sweep(ledger, enable_prefix_caching=caching), slo)
        console.print(f"{title(ledger, args.model)}, {SYSTEM} + {QUESTION} tokens in, {OUTPUT} out, simulated; "
                      f"prefix cache {'on' if caching else 'off'}", Group(*pictures.values()))
        with naming("--save", args.save):
            for name, picture in pictures.items() if args.save else ():
                save_svg(picture, pathlib.Path(args.save) / f"{name}.svg")
    except (OSError, ValueError) as error:
        print(f"sweep.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_quietly()
    sys.exit(main())
