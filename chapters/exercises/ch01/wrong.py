"""Wrong answers that a reader of chapter 1 might well give, each with the rule that the grader has to name."""
import statistics

from grade import wrong_answer


# -- 1

@wrong_answer("kv_bytes_per_token", "gqa")
def query_heads_are_cached(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "k and v")
def one_vector_a_token(layers, heads, kv_heads, head_dim, dtype_bytes):
    return layers * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "layers")
def one_layer(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * kv_heads * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "head_dim")
def heads_and_not_their_numbers(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * dtype_bytes


@wrong_answer("kv_bytes_per_token", "kv heads")
def one_vector_for_all_heads(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "gqa")
def heads_share_by_their_ratio(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * heads * head_dim * dtype_bytes // (heads // kv_heads) ** 2


@wrong_answer("kv_bytes_per_token", "bytes")
def numbers_and_not_bytes(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim


@wrong_answer("kv_bytes_per_token", "k and v")
def queries_are_kept_too(layers, heads, kv_heads, head_dim, dtype_bytes):
    return layers * (heads + 2 * kv_heads) * head_dim * dtype_bytes


@wrong_answer("kv_bytes_per_token", "bytes")
def half_precision_whatever_is_said(layers, heads, kv_heads, head_dim, dtype_bytes):
    return 2 * layers * kv_heads * head_dim * (2 if dtype_bytes > 1 else 1)


@wrong_answer("kv_bytes_per_token", "k and v")
def printed_and_not_returned(layers, heads, kv_heads, head_dim, dtype_bytes):
    2 * layers * kv_heads * head_dim * dtype_bytes


# -- 2

@wrong_answer("max_concurrency", "growth")
def prompts_only(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // -(-prompt // size)


@wrong_answer("max_concurrency", "whole blocks")
def tokens_and_not_blocks(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) * size // (prompt + output - 1)


@wrong_answer("max_concurrency", "whole blocks")
def last_block_forgotten(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // max(1, (prompt + output - 1) // size)


@wrong_answer("max_concurrency", "null block")
def null_block_handed_out(memory, per_token, size, prompt, output):
    return memory // (per_token * size) // -(-(prompt + output - 1) // size)


@wrong_answer("max_concurrency", "last token")
def last_token_stored(memory, per_token, size, prompt, output):
    return (memory // (per_token * size) - 1) // -(-(prompt + output) // size)


@wrong_answer("max_concurrency", "no part blocks")
def pool_rounded_up(memory, per_token, size, prompt, output):
    return (-(-memory // (per_token * size)) - 1) // -(-(prompt + output - 1) // size)


@wrong_answer("max_concurrency", "last token")
def a_spare_block_each(memory, per_token, size, prompt, output):
    stored = prompt + output - 1
    return (memory // (per_token * size) - 1) // (stored if size == 1 else stored // size + 1)


@wrong_answer("max_concurrency", "pool")
def requests_divided_by_blocks(memory, per_token, size, prompt, output):
    return -(-(prompt + output - 1) // size) // (memory // (per_token * size) - 1)


# -- 3

@wrong_answer("latencies", "ttft")
def from_the_first_step(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - scheduled, "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "itls")
def ttft_among_the_gaps(arrival, scheduled, times):
    gaps = [b - a for a, b in zip([arrival, *times], times)]
    return {"ttft": gaps[0], "itls": gaps, "tpot": sum(gaps[1:]) / len(gaps[1:]) if gaps[1:] else None,
            "e2e": sum(gaps)}


@wrong_answer("latencies", "tpot")
def all_the_time_by_all_tokens(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": (times[-1] - arrival) / len(times),
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "tpot")
def divided_by_all_tokens(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(times) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "tpot")
def the_median_gap(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": statistics.median(gaps) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "single")
def divided_by_no_gap(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(gaps), "e2e": times[-1] - arrival}


@wrong_answer("latencies", "single")
def a_single_token_takes_no_time(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / max(1, len(gaps)),
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "e2e")
def the_answer_without_the_wait(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None,
            "e2e": times[-1] - times[0]}


@wrong_answer("latencies", "ttft")
def the_clock_begins_at_zero(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:])]
    return {"ttft": times[0], "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None, "e2e": times[-1]}


@wrong_answer("latencies", "itls")
def gaps_of_zero_left_out(arrival, scheduled, times):
    gaps = [b - a for a, b in zip(times, times[1:]) if b > a]
    return {"ttft": times[0] - arrival, "itls": gaps, "tpot": sum(gaps) / len(gaps) if gaps else None,
            "e2e": times[-1] - arrival}


@wrong_answer("latencies", "keys")
def another_spelling(arrival, scheduled, times):
    return {"TTFT": times[0] - arrival, "ITL": [], "TPOT": None, "E2E": times[-1] - arrival}


# -- 4

def batches(jobs, seats):
    return [jobs[i:i + seats] for i in range(0, len(jobs), seats)]


def needed(jobs):
    return sum(p + n - 1 for p, n in jobs)


@wrong_answer("static_waste", "pair")
def the_wrong_way_round(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed - needed(jobs), computed


@wrong_answer("static_waste", "last decode")
def the_last_token_is_fed_in(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b)) for b in batches(jobs, seats))
    return computed, computed - sum(p + n for p, n in jobs)


@wrong_answer("static_waste", "last decode")
def the_last_token_is_waste(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b)) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "padding")
def prompts_without_padding(jobs, seats):
    computed = sum(sum(p for p, _ in b) + len(b) * (max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "longest output")
def rows_end_by_themselves(jobs, seats):
    computed = sum(len(b) * max(p for p, _ in b) + sum(n - 1 for _, n in b) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "padding")
def padding_is_no_waste(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, sum(max(n for _, n in b) - n for b in batches(jobs, seats) for _, n in b)


@wrong_answer("static_waste", "own batch")
def one_rectangle_for_all(jobs, seats):
    computed = len(jobs) * (max(p for p, _ in jobs) + max(n for _, n in jobs) - 1)
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "own batch")
def sorted_before_batching(jobs, seats):
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(sorted(jobs), seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "own batch")
def longest_request_and_not_longest_parts(jobs, seats):
    computed = sum(len(b) * max(p + n - 1 for p, n in b) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "fewer rows")
def every_batch_is_full(jobs, seats):
    computed = sum(seats * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in batches(jobs, seats))
    return computed, computed - needed(jobs)


@wrong_answer("static_waste", "fewer rows")
def the_last_batch_is_dropped(jobs, seats):
    full = [b for b in batches(jobs, seats) if len(b) == seats]
    computed = sum(len(b) * (max(p for p, _ in b) + max(n for _, n in b) - 1) for b in full)
    return computed, computed - sum(needed(b) for b in full)


# -- 5

@wrong_answer("continuous_batching", "form")
def how_long_each_one_runs(jobs, seats):
    return {name: output_tokens for name, _, output_tokens in jobs}


@wrong_answer("continuous_batching", "leave")
def still_static(jobs, seats):
    steps, waiting = [], list(jobs)
    while waiting:
        batch = [job for job in waiting if job[1] <= len(steps)][:seats]
        waiting = waiting[len(batch):]
        steps += [[name for name, _, _ in batch] for _ in range(max((n for _, _, n in batch), default=1))]
    return steps


def loop(jobs, seats, admit, leave=lambda left: left < 1, go_on=lambda waiting, left: waiting or left):
    """Continuous batching with exchangeable parts: admit(waiting, left, step) says who joins."""
    steps, waiting, left = [], list(jobs), {}
    while go_on(waiting, left):
        for job in admit(waiting, left, len(steps)):
            waiting.remove(job)
            left[job[0]] = job[2]
        steps.append(list(left))
        left = {name: n - 1 for name, n in left.items() if not leave(n - 1)}
    return steps


def here(waiting, step):
    return [job for job in waiting if job[1] <= step]


@wrong_answer("continuous_batching", "join")
def seats_filled_when_all_are_empty(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: [] if left else here(waiting, step)[:seats])


@wrong_answer("continuous_batching", "leave")
def one_step_too_long(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)], lambda left: left < 0)


@wrong_answer("continuous_batching", "stay")
def leaves_one_step_early(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)], lambda left: left < 2)


@wrong_answer("continuous_batching", "seats")
def seats_without_number(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step))


@wrong_answer("continuous_batching", "seats")
def seat_taken_in_its_owners_last_step(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[
        :seats - sum(n > 1 for n in left.values())])


@wrong_answer("continuous_batching", "fcfs")
def shortest_first(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: sorted(
        here(waiting, step), key=lambda job: job[2])[:seats - len(left)])


@wrong_answer("continuous_batching", "fcfs")
def last_come_first_served(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[::-1][:seats - len(left)])


@wrong_answer("continuous_batching", "arrival")
def arrivals_ignored(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: waiting[:seats - len(left)])


@wrong_answer("continuous_batching", "end")
def stops_when_nobody_waits(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)],
                go_on=lambda waiting, left: waiting)


@wrong_answer("continuous_batching", "join")
def one_newcomer_a_step(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:min(1, seats - len(left))])


@wrong_answer("continuous_batching", "end")
def stops_when_nobody_runs(jobs, seats):
    return loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)],
                go_on=lambda waiting, left: left or len(waiting) == len(jobs))


@wrong_answer("continuous_batching", "arrival")
def idle_steps_left_out(jobs, seats):
    steps = loop(jobs, seats, lambda waiting, left, step: here(waiting, step)[:seats - len(left)])
    return [step for step in steps if step]


@wrong_answer("continuous_batching", "end", ends=False)
def waits_for_an_arrival_without_a_step(jobs, seats):
    steps, waiting, left = [], list(jobs), {}
    while waiting or left:
        while here(waiting, len(steps)) and len(left) < seats:
            name, _, n = waiting.pop(0)
            left[name] = n
        if not left:
            continue
        steps.append(list(left))
        left = {name: n - 1 for name, n in left.items() if n > 1}
    return steps
