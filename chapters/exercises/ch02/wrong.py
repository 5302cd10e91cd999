"""Wrong answers that a reader of chapter 2 might well give, each with the rule that the grader has to name. Those of a
task share a right answer made of parts; a wrong one changes a part."""
import math
import statistics

from grade import wrong_answer


# -- 1

def interpolated(values, p, order=sorted, rank=lambda n, p: (n - 1) * p / 100,
                 mix=lambda a, b, share: a + (b - a) * share, none=None):
    if not values:
        return none
    ordered = order(values)
    at = min(max(rank(len(ordered), p), 0), len(ordered) - 1)
    low = math.floor(at)
    return mix(ordered[low], ordered[min(low + 1, len(ordered) - 1)], at - low)


@wrong_answer("percentile", "rank")
def of_n_and_not_of_n_less_one(values, p):
    return interpolated(values, p, rank=lambda n, p: n * p / 100)


@wrong_answer("percentile", "rank")
def ranks_from_one(values, p):
    return interpolated(values, p, rank=lambda n, p: n * p / 100 - 1)


@wrong_answer("percentile", "rank")
def p_as_a_share(values, p):
    return interpolated(values, p, rank=lambda n, p: (n - 1) * p)


@wrong_answer("percentile", "rank")
def from_the_top(values, p):
    return interpolated(values, p, rank=lambda n, p: (n - 1) * (100 - p) / 100)


@wrong_answer("percentile", "rank")
def weibulls_ranks(values, p):
    return interpolated(values, p, rank=lambda n, p: (n + 1) * p / 100 - 1)


@wrong_answer("percentile", "rank")
def a_share_of_the_range(values, p):
    return min(values) + (max(values) - min(values)) * p / 200


@wrong_answer("percentile", "sorted")
def as_they_come(values, p):
    return interpolated(values, p, order=list)


@wrong_answer("percentile", "sorted")
def sorted_as_text(values, p):
    return interpolated(values, p, order=lambda values: sorted(values, key=str))


@wrong_answer("percentile", "between")
def the_nearest(values, p):
    return interpolated(values, p, mix=lambda a, b, share: b if share > 0.5 else a)


@wrong_answer("percentile", "between")
def the_lower(values, p):
    return interpolated(values, p, mix=lambda a, b, share: a)


@wrong_answer("percentile", "between")
def the_higher(values, p):
    return interpolated(values, p, mix=lambda a, b, share: b if share else a)


@wrong_answer("percentile", "between")
def the_middle(values, p):
    return interpolated(values, p, mix=lambda a, b, share: (a + b) / 2 if share else a)


@wrong_answer("percentile", "between")
def the_wrong_way_round(values, p):
    return interpolated(values, p, mix=lambda a, b, share: b + (a - b) * share if share else a)


@wrong_answer("percentile", "equal")
def a_set_of_values(values, p):
    return interpolated(values, p, order=lambda values: sorted(set(values)))


@wrong_answer("percentile", "ends")
def beyond_the_last(values, p):
    if not values:
        return None
    ordered, at = sorted(values), (len(values) - 1) * p / 100
    low = int(at)
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (at - low)


@wrong_answer("percentile", "ends")
def zero_taken_for_nothing(values, p):
    return interpolated(values, p or 50)


@wrong_answer("percentile", "one")
def too_few(values, p):
    return interpolated(values, p) if len(values) > 1 else math.inf if values else None


@wrong_answer("percentile", "one")
def by_statistics(values, p):
    if len(values) < 2:
        return 0.0 if values else None
    return interpolated(values, p)


@wrong_answer("percentile", "no values")
def zero_of_nothing(values, p):
    return interpolated(values, p, none=0.0)


@wrong_answer("percentile", "no values")
def of_nothing_it_raises(values, p):
    max(values)
    return interpolated(values, p)


@wrong_answer("percentile", "exact")
def rounded(values, p):
    found = interpolated(values, p)
    return found if found is None else round(found, 2)


@wrong_answer("percentile", "arguments")
def sorted_in_place(values, p):
    values.sort()
    return interpolated(values, p)


@wrong_answer("percentile", "number")
def the_percentile_is_printed(values, p):
    print(interpolated(values, p))


# -- 2

def good_ones(requests, limits, keeps=lambda value, limit: value <= limit / 1000, all_of=all, names=None,
              tpot=lambda value: value or 0.0, success=lambda r: r["success"]):
    return [r for r in requests if success(r) and all_of(
        keeps(tpot(r[name]) if name == "tpot" else r[name], limits[name]) for name in names or limits)]


@wrong_answer("goodput", "rate")
def a_count(requests, limits, duration):
    return len(good_ones(requests, limits))


@wrong_answer("goodput", "rate")
def a_share_of_all(requests, limits, duration):
    return len(good_ones(requests, limits)) / max(len(requests), 1)


@wrong_answer("goodput", "rate")
def over_the_latencies(requests, limits, duration):
    return len(good_ones(requests, limits)) / (sum(r["e2el"] for r in requests) or 1)


@wrong_answer("goodput", "rate")
def requests_a_minute(requests, limits, duration):
    return 60 * len(good_ones(requests, limits)) / duration


@wrong_answer("goodput", "ms")
def milliseconds_as_seconds(requests, limits, duration):
    return len(good_ones(requests, limits, keeps=lambda value, limit: value <= limit)) / duration


@wrong_answer("goodput", "ms")
def throughput_again(requests, limits, duration):
    return len(requests) / duration


@wrong_answer("goodput", "by request")
def by_the_mean(requests, limits, duration):
    for name, limit in limits.items():
        if not requests or statistics.fmean(r[name] or 0.0 for r in requests) > limit / 1000:
            return 0.0
    return len(requests) / duration


@wrong_answer("goodput", "by request")
def by_the_median(requests, limits, duration):
    kept = all(statistics.median(r[name] or 0.0 for r in requests) <= limit / 1000 for name, limit in limits.items())
    return len(requests) * kept / duration


@wrong_answer("goodput", "by request")
def by_the_worst(requests, limits, duration):
    return len(requests) * (len(good_ones(requests, limits)) == len(requests)) / duration


@wrong_answer("goodput", "all limits")
def any_limit(requests, limits, duration):
    return len(good_ones(requests, limits, all_of=any)) / duration


@wrong_answer("goodput", "all limits")
def the_first_limit(requests, limits, duration):
    return len(good_ones(requests, limits, names=list(limits)[:1])) / duration


@wrong_answer("goodput", "all limits")
def no_limit_on_the_whole(requests, limits, duration):
    return len(good_ones(requests, limits, names=[name for name in limits if name != "e2el"])) / duration


@wrong_answer("goodput", "all limits")
def a_point_for_each_limit(requests, limits, duration):
    points = sum((r[name] or 0.0) <= limit / 1000 for r in requests for name, limit in limits.items())
    return points / len(limits) / duration


@wrong_answer("goodput", "given")
def always_ttft_and_tpot(requests, limits, duration):
    return len(good_ones(requests, {"ttft": 500, "tpot": 50} | limits)) / duration


@wrong_answer("goodput", "given")
def names_that_must_be_there(requests, limits, duration):
    limits["ttft"]
    return len(good_ones(requests, limits)) / duration


@wrong_answer("goodput", "at the limit")
def below_the_limit(requests, limits, duration):
    return len(good_ones(requests, limits, keeps=lambda value, limit: value < limit / 1000)) / duration


@wrong_answer("goodput", "single")
def no_tpot_no_good(requests, limits, duration):
    return len(good_ones(requests, limits, tpot=lambda value: math.inf if value is None else value)) / duration


@wrong_answer("goodput", "single")
def none_is_compared(requests, limits, duration):
    return len(good_ones(requests, limits, tpot=lambda value: value)) / duration


@wrong_answer("goodput", "failed")
def the_failed_are_quick(requests, limits, duration):
    return len(good_ones(requests, limits, success=lambda r: True)) / duration


@wrong_answer("goodput", "none good")
def at_least_one(requests, limits, duration):
    return max(len(good_ones(requests, limits)), 1) / duration


@wrong_answer("goodput", "none good")
def something_divided_by_nothing(requests, limits, duration):
    good = good_ones(requests, limits)
    return len(good) / duration * (len(requests) / len(requests))


# -- 3

def inside(intervals, begin, end, first=max, last=min, least=0, stays=lambda end: end):
    return sum(max(last(stays(end) if left is None else left, end) - first(arrived, begin), least)
               for arrived, left in intervals)


@wrong_answer("mean_concurrency", "area")
def the_area_alone(intervals, begin, end):
    return inside(intervals, begin, end)


@wrong_answer("mean_concurrency", "area")
def how_many_there_were(intervals, begin, end):
    return len(intervals)


@wrong_answer("mean_concurrency", "area")
def the_mean_stay(intervals, begin, end):
    return inside(intervals, begin, end) / max(len(intervals), 1)


@wrong_answer("mean_concurrency", "area")
def the_rate_of_arrivals(intervals, begin, end):
    return len(intervals) / (end - begin)


@wrong_answer("mean_concurrency", "side by side")
def the_peak(intervals, begin, end):
    known = [(arrived, end if left is None else left) for arrived, left in intervals]
    return max((sum(a <= t < b for a, b in known) for t, _ in known), default=0)


@wrong_answer("mean_concurrency", "side by side")
def the_share_of_busy_time(intervals, begin, end):
    busy, reached = 0, begin
    for arrived, left in sorted(intervals, key=lambda pair: pair[0]):
        left = min(end if left is None else left, end)
        busy += max(left - max(arrived, reached), 0)
        reached = max(reached, left)
    return busy / (end - begin)


@wrong_answer("mean_concurrency", "side by side")
def the_mean_of_what_newcomers_find(intervals, begin, end):
    known = [(arrived, end if left is None else left) for arrived, left in intervals]
    return statistics.fmean(sum(a <= t < b for a, b in known) for t, _ in known)


@wrong_answer("mean_concurrency", "idle")
def while_somebody_is_there(intervals, begin, end):
    last = max(end if left is None else left for _, left in intervals)
    return inside(intervals, begin, end) / (min(last, end) - max(min(a for a, _ in intervals), begin))


@wrong_answer("mean_concurrency", "idle")
def until_the_last_has_left(intervals, begin, end):
    return inside(intervals, begin, end) / (min(max(end if b is None else b for _, b in intervals), end) - begin)


@wrong_answer("mean_concurrency", "idle")
def nothing_of_nobody(intervals, begin, end):
    return inside(intervals, begin, end) / (end - begin) if intervals else 1.0


@wrong_answer("mean_concurrency", "begin")
def over_the_clock(intervals, begin, end):
    return inside(intervals, begin, end) / end


@wrong_answer("mean_concurrency", "begin")
def from_zero_on(intervals, begin, end):
    return inside(intervals, 0, end) / end


@wrong_answer("mean_concurrency", "before")
def all_of_the_stay(intervals, begin, end):
    return inside(intervals, begin, end, first=lambda arrived, begin: arrived) / (end - begin)


@wrong_answer("mean_concurrency", "before")
def only_who_came_in_time(intervals, begin, end):
    return inside([pair for pair in intervals if pair[0] >= begin], begin, end) / (end - begin)


@wrong_answer("mean_concurrency", "after")
def to_the_end_of_the_stay(intervals, begin, end):
    return inside(intervals, begin, end, last=lambda left, end: left) / (end - begin)


@wrong_answer("mean_concurrency", "after")
def only_who_left_in_time(intervals, begin, end):
    return inside([pair for pair in intervals if pair[1] is None or pair[1] <= end], begin, end) / (end - begin)


@wrong_answer("mean_concurrency", "elsewhere")
def less_than_nothing(intervals, begin, end):
    return inside(intervals, begin, end, least=-math.inf) / (end - begin)


@wrong_answer("mean_concurrency", "elsewhere")
def distances_have_no_sign(intervals, begin, end):
    return sum(abs(min(end if b is None else b, end) - max(a, begin)) for a, b in intervals) / (end - begin)


@wrong_answer("mean_concurrency", "still there")
def who_has_not_left_is_not_there(intervals, begin, end):
    return inside([pair for pair in intervals if pair[1] is not None], begin, end) / (end - begin)


@wrong_answer("mean_concurrency", "still there")
def none_is_subtracted(intervals, begin, end):
    return sum(max(min(b, end) - max(a, begin), 0) for a, b in intervals) / (end - begin)


# -- 4

def sent_in_order(due, seconds, clients, start=lambda when, free: max(when, free),
                  next_one=lambda free, i: free.index(min(free)),
                  waited=lambda when, start, busy: start + busy - when):
    free, found = [0] * clients, []
    for i, (when, busy) in enumerate(zip(due, seconds)):
        client = next_one(free, i)
        begin = start(when, free[client])
        free[client] = begin + busy
        found.append(waited(when, begin, busy))
    return found


@wrong_answer("response_times", "service")
def only_the_wait(due, seconds, clients):
    return sent_in_order(due, seconds, clients, waited=lambda when, start, busy: start - when)


@wrong_answer("response_times", "service")
def when_it_ended(due, seconds, clients):
    return sent_in_order(due, seconds, clients, waited=lambda when, start, busy: start + busy)


@wrong_answer("response_times", "service")
def when_it_was_sent(due, seconds, clients):
    return sent_in_order(due, seconds, clients, waited=lambda when, start, busy: start)


@wrong_answer("response_times", "not before due")
def sent_at_once_while_idle(due, seconds, clients):
    late = due[0] > 0 if due else False
    return sent_in_order(due, seconds, clients, start=lambda when, free: free if late and not free else max(when, free))


@wrong_answer("response_times", "not before due")
def the_clock_starts_with_the_first(due, seconds, clients):
    return sent_in_order(due, seconds, clients, start=lambda when, free: max(when - due[0], free))


@wrong_answer("response_times", "from due")
def from_sending(due, seconds, clients):
    return sent_in_order(due, seconds, clients, waited=lambda when, start, busy: busy)


@wrong_answer("response_times", "from due")
def an_open_loop(due, seconds, clients):
    return list(seconds)


@wrong_answer("response_times", "from due")
def the_longer_of_the_two(due, seconds, clients):
    return sent_in_order(due, seconds, clients, waited=lambda when, start, busy: max(start - when, busy))


@wrong_answer("response_times", "from due")
def half_of_the_wait(due, seconds, clients):
    return sent_in_order(due, seconds, clients, waited=lambda when, start, busy: (start - when) / 2 + busy)


@wrong_answer("response_times", "queue")
def behind_the_one_before_only(due, seconds, clients):
    found = []
    for i, (when, busy) in enumerate(zip(due, seconds)):
        free = due[i - 1] + seconds[i - 1] if i and clients == 1 else 0
        found.append(max(when, free) + busy - when)
    return found


@wrong_answer("response_times", "queue")
def the_rest_of_the_longest(due, seconds, clients):
    ends = [when + busy for when, busy in zip(due, seconds)]
    return [max([when] + ends[:i] * (clients == 1)) + busy - when for i, (when, busy) in enumerate(zip(due, seconds))]


@wrong_answer("response_times", "clients")
def one_client_for_all(due, seconds, clients):
    return sent_in_order(due, seconds, 1)


@wrong_answer("response_times", "clients")
def one_client_sits_idle(due, seconds, clients):
    return sent_in_order(due, seconds, max(clients - 1, 1))


@wrong_answer("response_times", "first free")
def round_in_turn(due, seconds, clients):
    return sent_in_order(due, seconds, clients, next_one=lambda free, i: i % len(free))


@wrong_answer("response_times", "first free")
def the_last_one_free(due, seconds, clients):
    return sent_in_order(due, seconds, clients,
                         next_one=lambda free, i: free.index(min(free)) if 0 in free else free.index(max(free)))


@wrong_answer("response_times", "first free")
def a_batch_at_a_time(due, seconds, clients):
    found, free = [], 0
    for first in range(0, len(due), clients):
        batch = list(zip(due, seconds))[first:first + clients]
        ends = [max(when, free) + busy for when, busy in batch]
        found += [end - when for end, (when, _) in zip(ends, batch)]
        free = max(ends)
    return found


@wrong_answer("response_times", "one each")
def the_mean_of_them(due, seconds, clients):
    return statistics.fmean(sent_in_order(due, seconds, clients))


@wrong_answer("response_times", "one each")
def sorted_by_length(due, seconds, clients):
    return sorted(sent_in_order(due, seconds, clients), reverse=True)


@wrong_answer("response_times", "one each")
def by_the_end(due, seconds, clients):
    return dict(enumerate(sent_in_order(due, seconds, clients)))


@wrong_answer("response_times", "one each")
def nobody_and_none(due, seconds, clients):
    return sent_in_order(due, seconds, clients) or None


# -- 5

def read(sent, chunks, num_tokens, counts=lambda i, chunks: chunks[i][1], **other):
    times = [time for i, (time, _) in enumerate(chunks) if counts(i, chunks)]
    right = {"ttft": times[0] - sent, "itls": [b - a for a, b in zip(times, times[1:])],
             "tpot": (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None, "e2el": times[-1] - sent}
    return right | {key: change(times, sent, num_tokens) for key, change in other.items()}


@wrong_answer("read_stream", "keys")
def a_tuple(sent, chunks, num_tokens):
    return tuple(read(sent, chunks, num_tokens).values())


@wrong_answer("read_stream", "keys")
def other_names(sent, chunks, num_tokens):
    return {key.upper(): value for key, value in read(sent, chunks, num_tokens).items()}


@wrong_answer("read_stream", "from sending")
def a_moment_and_no_time(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, ttft=lambda times, sent, n: times[0])


@wrong_answer("read_stream", "from sending")
def the_end_by_the_clock(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, e2el=lambda times, sent, n: times[-1])


@wrong_answer("read_stream", "role")
def every_chunk_is_a_token(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, counts=lambda i, chunks: True)


@wrong_answer("read_stream", "role")
def the_first_chunk_as_vllm_has_it(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, counts=lambda i, chunks: i < len(chunks) - 1 or chunks[i][1])


@wrong_answer("read_stream", "role")
def a_ttft_of_the_role(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, ttft=lambda times, sent, n: chunks[0][0] - sent)


@wrong_answer("read_stream", "usage")
def only_the_role_is_left_out(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, counts=lambda i, chunks: i > 0 or chunks[i][1])


@wrong_answer("read_stream", "usage")
def to_the_end_of_the_stream(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, e2el=lambda times, sent, n: chunks[-1][0] - sent)


@wrong_answer("read_stream", "silent")
def only_the_ends_are_left_out(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, counts=lambda i, chunks: 0 < i < len(chunks) - 1 or chunks[i][1])


@wrong_answer("read_stream", "gaps")
def the_first_gap_is_the_ttft(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, itls=lambda times, sent, n: [b - a for a, b in zip([sent] + times, times)])


@wrong_answer("read_stream", "gaps")
def the_gaps_sorted(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, itls=lambda times, sent, n: sorted(
        [b - a for a, b in zip(times, times[1:])], reverse=True))


@wrong_answer("read_stream", "gaps")
def times_since_the_first(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, itls=lambda times, sent, n: [t - times[0] for t in times[1:]])


@wrong_answer("read_stream", "gaps")
def tpot_with_the_ttft(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, tpot=lambda times, sent, n: (times[-1] - sent) / n)


@wrong_answer("read_stream", "gaps")
def tpot_by_n(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, tpot=lambda times, sent, n: (times[-1] - times[0]) / n)


@wrong_answer("read_stream", "merged")
def a_mean_of_chunks(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, tpot=lambda times, sent, n: (times[-1] - times[0]) / (
        len(times) - 1 if "é" not in str(chunks) else n - 1) if len(times) > 1 else None)


@wrong_answer("read_stream", "merged")
def words_are_counted(sent, chunks, num_tokens):
    gaps = sum(bool(text) for _, text in chunks) - 1
    return read(sent, chunks, num_tokens, tpot=lambda times, sent, n: (times[-1] - times[0]) / (
        n - 1 if n - 1 - gaps in (0, 1) else n - 2) if n > 1 else None)


@wrong_answer("read_stream", "merged")
def a_chunk_is_cut_into_its_tokens(sent, chunks, num_tokens):
    found = read(sent, chunks, num_tokens)
    return found | {"itls": found["itls"] + [0.0] * sum(text.count(" ") for _, text in chunks)}


@wrong_answer("read_stream", "one token")
def a_tpot_of_zero(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, tpot=lambda times, sent, n: (times[-1] - times[0]) / max(n - 1, 1))


@wrong_answer("read_stream", "one token")
def a_division_by_zero(sent, chunks, num_tokens):
    return read(sent, chunks, num_tokens, tpot=lambda times, sent, n: (times[-1] - times[0]) / (n - 1))


# -- 6

def pairs_of(computed, n):
    return n * computed + n * (n + 1) // 2


def used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus, tokens=lambda computed, n: n, pairs=pairs_of,
         time=lambda steps: sum(seconds for _, seconds in steps)):
    flops = sum(tokens(*chunk) * flops_per_token + pairs(*chunk) * flops_per_pair
                for chunks, _ in steps for chunk in chunks)
    return flops / (time(steps) * peak_flops * num_gpus)


@wrong_answer("mfu", "tokens")
def a_token_a_request(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus, tokens=lambda computed, n: 1)


@wrong_answer("mfu", "tokens")
def only_prefills(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus, tokens=lambda computed, n: n * (n > 1))


@wrong_answer("mfu", "tokens")
def the_whole_context_again(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus, tokens=lambda computed, n: computed + n)


@wrong_answer("mfu", "tokens")
def only_decodes(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus, tokens=lambda computed, n: n == 1)


@wrong_answer("mfu", "tokens")
def in_percent(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return 100 * used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus)


@wrong_answer("mfu", "peak")
def of_one_gpu(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, 1)


@wrong_answer("mfu", "peak")
def each_gpu_computes_all(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, 1 / num_gpus)


@wrong_answer("mfu", "peak")
def a_step_is_a_second(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus, time=len)


@wrong_answer("mfu", "peak")
def times_the_seconds(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                time=lambda steps: 1 / sum(seconds for _, seconds in steps))


@wrong_answer("mfu", "history")
def no_attention(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus, pairs=lambda computed, n: 0)


@wrong_answer("mfu", "history")
def only_the_new(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                pairs=lambda computed, n: n * (n + 1) // 2)


@wrong_answer("mfu", "history")
def the_history_once_a_request(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                pairs=lambda computed, n: computed + n * (n + 1) // 2)


@wrong_answer("mfu", "causal")
def everybody_sees_everybody(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                pairs=lambda computed, n: n * (computed + n))


@wrong_answer("mfu", "history")
def not_itself(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                pairs=lambda computed, n: n * computed + n * (n - 1) // 2)


@wrong_answer("mfu", "causal")
def half_of_the_square(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                pairs=lambda computed, n: n * computed + (n * n / 2 if n > 1 else 1))


@wrong_answer("mfu", "causal")
def a_pair_a_new_token(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                pairs=lambda computed, n: n * computed + n)


@wrong_answer("mfu", "whole run")
def the_mean_of_the_steps(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return sum(used([step], flops_per_token, flops_per_pair, peak_flops, num_gpus) for step in steps) / len(steps)


@wrong_answer("mfu", "whole run")
def the_best_step(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return max(used([step], flops_per_token, flops_per_pair, peak_flops, num_gpus) for step in steps)


@wrong_answer("mfu", "whole run")
def the_sum_of_the_steps(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return sum(used([step], flops_per_token, flops_per_pair, peak_flops, num_gpus) for step in steps)


@wrong_answer("mfu", "empty step")
def time_only_with_work(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    return used(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus,
                time=lambda steps: sum(seconds for chunks, seconds in steps if chunks))


@wrong_answer("mfu", "empty step")
def until_the_first_empty_step(steps, flops_per_token, flops_per_pair, peak_flops, num_gpus):
    busy = [step for step in steps if step[0]]
    return used(busy, flops_per_token, flops_per_pair, peak_flops, num_gpus)
