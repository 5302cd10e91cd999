"""What a step costs, counted instead of timed: operators, tensors made, work of the engine itself.

A clock in a test suite measures the machine's neighbours. These counts are the same on every machine, so a change that makes
a step more expensive shows here. A bound that is exceeded for a good reason may be raised, knowingly.
"""
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cpu_kernels
import model
from nano_serve import EMBEDDED_MODEL, LLM, SamplingParams

VIEWS = {"view", "as_strided", "slice", "select", "expand", "permute", "transpose", "t", "unsqueeze", "split", "split_with_sizes",
         "alias", "detach", "_unsafe_view", "unflatten", "squeeze", "unbind", "chunk",
         "flatten"}       # they compute nothing and make no tensor's memory


class Count(TorchDispatchMode):
    """Counts the operators that compute something, by name, and the bytes of the tensors that they make."""

    def __init__(self):
        super().__init__()
        self.ops, self.bytes = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in VIEWS:
            self.ops[name] = self.ops.get(name, 0) + 1
            in_place = name.endswith("_") or "out" in (kwargs or {})
            for out in () if in_place else result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(out, torch.Tensor) and not out.is_mkldnn:
                    self.bytes[name] = self.bytes.get(name, 0) + out.nbytes
        return result


def decode_step(batch, length=20, before_step=lambda: None, **options):
    """The counts of one step in which `batch` requests of equal length decode."""
    with LLM(EMBEDDED_MODEL, enable_prefix_caching=False, **options) as llm:
        for i in range(batch):
            llm.engine.add_request(str(i), list(range(100, 100 + length)), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        for _ in range(3):
            llm.engine.step()
        layers = llm.engine.config.num_hidden_layers
        before_step()
        with Count() as count:
            assert len(llm.engine.step()) == batch
    return count, layers


def test_operators_of_a_decode_step_do_not_depend_on_the_batch():
    """A loop over requests would show here. (The twins have one: they are for reading.)"""
    (few, _), (many, _) = decode_step(2), decode_step(32)
    assert sum(many.ops.values()) == sum(few.ops.values()), (few.ops, many.ops)


def test_operators_of_a_layer(monkeypatch):
    """With cpu_kernels.c a layer is eight calls: four products (silu in one of them), two norms, RoPE with the KV write, and
    attention. PyTorch's own part is memory for their results, and little else."""
    calls = []
    original = cpu_kernels.backend

    def watched(*sizes):
        ops = vars(original(*sizes))
        watch = lambda name, f: lambda *args, **more: calls.append(name) or f(*args, **more)
        return SimpleNamespace(**{name: watch(name, f) if callable(f) and name != "pack" else f for name, f in ops.items()})
    monkeypatch.setattr(cpu_kernels, "backend", watched)
    for batch in (1, 8):
        calls.clear()
        count, layers = decode_step(batch, before_step=calls.clear)
        n = {name: calls.count(name) for name in set(calls)}
        assert n == {"linear": 4 * layers + 1, "rms_norm": 2 * layers + 1, "rope_and_write_kv": layers,
                     "paged_attention": layers}, n                                            # + 1: the head and its norm
        made = sum(n for name, n in count.ops.items() if name.startswith(("empty", "new_empty")))
        assert sum(count.ops.values()) - made < 50, count.ops                                 # in a step, not in a layer


def test_the_last_layer_computes_only_rows_that_make_logits(monkeypatch):
    """Of a prompt of 40 tokens in two chunks the first chunk makes no logits and the second one row of them. Up to its
    attention the last layer needs all rows (it writes their K and V), from there on those alone."""
    rows, linear = [], model.Linear.forward
    monkeypatch.setattr(model.Linear, "forward", lambda proj, x, **more: rows.append(len(x)) or linear(proj, x, **more))
    with LLM(EMBEDDED_MODEL, max_num_batched_tokens=32) as llm:
        llm.engine.add_request("0", list(range(100, 140)), SamplingParams(temperature=0, max_tokens=2))
        layers = llm.engine.config.num_hidden_layers
        for chunk, logits in ((32, 0), (8, 1)):
            rows.clear()
            llm.engine.step()
            assert rows == [chunk] * (4 * layers - 3) + [logits] * 4


def test_no_tensor_of_the_size_of_the_weights_or_the_pool_is_made():
    """A step makes activations only: a few KiB a token and layer, no copy of a matrix, none of the pool."""
    count, layers = decode_step(8)
    assert sum(count.bytes.values()) < 8 * 64 * 1024 * layers, sorted(count.bytes.items(), key=lambda i: -i[1])[:4]


def test_nothing_waits_for_a_value_of_the_device_but_for_the_tokens():
    """Each `.item()` makes a GPU wait. (A `.tolist()` isn't seen here: sampling has some.)"""
    count, _ = decode_step(8)
    assert count.ops.get("item", 0) + count.ops.get("_local_scalar_dense", 0) == 0, count.ops


@pytest.mark.parametrize("waiting", [10, 1000])
def test_python_calls_of_a_step_do_not_grow_with_the_queue(waiting):
    """Function calls of one engine step, with 8 requests running and `waiting` behind them."""
    calls = {}
    for queue in (0, waiting):
        with LLM(EMBEDDED_MODEL, enable_prefix_caching=False, max_num_seqs=8) as llm:
            for i in range(8 + queue):
                llm.engine.add_request(str(i), list(range(100, 120)), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
            for _ in range(3):
                llm.engine.step()
            n = 0

            def profiler(frame, event, arg):
                nonlocal n
                n += event == "call" and "/torch/" not in frame.f_code.co_filename
            sys.setprofile(profiler)
            try:
                llm.engine.step()
            finally:
                sys.setprofile(None)
            calls[queue] = n
    assert calls[waiting] <= calls[0] + 20, calls
