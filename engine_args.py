"""Every option of the engine once (chapter 3): its name, default, type, limits and help.

Mirrors   vLLM: engine/arg_utils.py EngineArgs
Promises  a keyword of `LLM` and a `--with-dashes` of the command line are one thing, checked in one place, before
          anything is loaded. No torch here, so that `--help` is there at once.
Order     1 EngineArgs: the table.  2 check: what an option may be.  3 The same table as a command line.
"""
import argparse
import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from request import show, whole

EMBEDDED_MODEL = str(Path(__file__).resolve().parent / "models" / "tiny-llama3")


def option(default, help, kind=None, low=None, high=math.inf, choices=None, short=None):
    """A field of EngineArgs. kind: int, float, bool or str, the default's if not given; low and high: its limits,
    included; choices: the words that it may be. A default of None means that the engine chooses."""
    return field(default=default, metadata=dict(help=help, kind=kind or type(default), low=low, high=high,
                                                choices=choices, short=short))


@dataclass
class EngineArgs:
    """Each option, under vLLM's name where vLLM has it. Raises ValueError for a value of the wrong type or beyond its
    limits. vLLM: engine/arg_utils.py EngineArgs"""
    model: str = option(EMBEDDED_MODEL, "checkpoint folder, or a hub id")
    tensor_parallel_size: int = option(1, "ranks that share the model (TP)", short="-tp")   # its limits are the model's
    dtype: str = option("auto", "auto, float32 (float), float16 (half), bfloat16; auto on a CPU: float32 up to "
                               "2 billion parameters")
    device: str = option("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(None, "limit for prompt + output; default: the model's, or what the pool holds",
                                       int, low=1)
    max_num_seqs: int | None = option(None, "requests that may run at once; default: 256, or the budget if it is less",
                                      int, low=1)
    max_num_batched_tokens: int = option(2048, "token budget (Token 预算) of a step", low=1)
    block_size: int = option(16, "tokens a KV block", low=1)
    num_kv_blocks: int | None = option(None, "size of the KV pool in blocks, the null block counted", int, low=1)
    threads: int | None = option(None, "CPU threads (with -tp, each rank has one); default: torch's choice, but 1 for "
                                       "models under 20M parameters", int, low=1, high=os.cpu_count() or 1)
    kv_cache_memory: int = option(1 << 30, "bytes of the KV pool of a rank on a CPU, if --num-kv-blocks is not given",
                                  low=1)
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory for weights and KV pool", low=0.01, high=1)
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")
    enable_chunked_prefill: bool = option(True, "let a prompt be cut where the budget ends")
    scheduling_policy: str = option("fcfs", "fcfs or priority", choices=("fcfs", "priority"))
    long_prefill_token_threshold: int = option(0, "most prompt tokens of one request in a step (0: no limit)", low=0)
    max_num_waiting: int | None = option(None, "length of the waiting queue, beyond which requests are refused",
                                         int, low=1)
    seed: int = option(0, "where requests without a seed of their own get theirs from")
    attention_backend: str = option("auto", "torch (plain PyTorch), cpu (cpu_kernels.c), triton; auto: what suits",
                                    choices=("auto", "torch", "cpu", "triton"))
    enforce_eager: bool = option(False, "on a GPU: launch each kernel of each step, record no CUDA graphs of decodes")
    max_records: int = option(10_000, "step records kept, the newest", low=1)
    max_n: int = option(1024, "most answers that one request may ask for (n)", low=1)
    max_stop_strings: int = option(64, "most stop strings of one request", low=0)
    check_invariants: bool = option(False, "check the scheduler's and the pool's accounts after every step (slow)")

    def __post_init__(self):
        for f in dataclasses.fields(self):
            setattr(self, f.name, check(f, getattr(self, f.name)))

    @classmethod
    def from_cli_args(cls, args):
        """From what a parser with add_cli_args' options returned. vLLM: engine/arg_utils.py EngineArgs.from_cli_args"""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls)})

    @classmethod
    def add_cli_args(cls, parser):
        """Add each option to an argparse parser or group of one; returns it. What is wrong with a number is said by
        `check`, in the same words as to a caller in Python. vLLM: engine/arg_utils.py EngineArgs.add_cli_args"""
        for f in dataclasses.fields(cls):
            names = [flag(f.name)] + ([f.metadata["short"]] if f.metadata["short"] else [])
            default = "" if f.default is None else " [the embedded model]" if f.name == "model" else f" [{f.default}]"
            text, kind = f.metadata["help"] + default, f.metadata["kind"]
            if kind is bool:
                argument = parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=f.default)
                argument.help = text             # set here, or else Pythons before 3.13 add the default a second time
            else:
                parser.add_argument(*names, type=kind, default=f.default, help=text, metavar=kind.__name__.upper())
        return parser


def flag(name):
    return "--" + name.replace("_", "-")


def check(f, value):
    """The value of the option `f` as its type. A whole number stands for itself in any type that has __index__, NumPy's
    too; True is none, nor is 2.0. Raises ValueError naming option, limits and value."""
    kind, low, high, choices = (f.metadata[key] for key in ("kind", "low", "high", "choices"))
    if value is None and f.default is None:
        return None
    if kind is bool or kind is str:
        good = (isinstance(value, kind) or f.name == "model" and isinstance(value, Path)
                or f.name == "dtype")            # a torch.dtype: who reads it checks
        what = "True or False" if kind is bool else "text"
    else:
        value = whole(value)
        good = isinstance(value, int) and not isinstance(value, bool) or kind is float and isinstance(value, float)
        what = "a whole number" if kind is int else "a number"
        if low is not None:
            good = good and bool(low <= value <= high)
            what += f" of at least {low}" if high == math.inf else f" from {low} to {high}"
    if choices:
        good, what = good and value in choices, "one of " + ", ".join(choices)
    if not good:
        raise ValueError(f"{flag(f.name)} must be {what}, got {show(value)}")
    return value
