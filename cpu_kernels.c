/* How it is computed on the CPU in front of you (chapter 6): the operations of kernels.py once more, in plain C.
 *
 * Promises  what the twins in kernels.py promise. K and V are read where they lie, through the block table, and never
 *           beyond a sequence's length. A row of a product has the same bits in any batch; so has a sequence's
 *           attention, alone or in company, with any number of threads. (But a query alone, a decode, sums in another
 *           order than the same query within a chunk.)
 * Left out  fp16, AMX, and sizes that vary at run time: cpu_kernels.py compiles this file once for each dtype (-DBF16,
 *           or nothing for fp32), head size -DD and number of query heads a KV head -DG, for the CPU at hand.
 * Order     cpu_tile.h: numbers, and the register tile of all matrix products. Then 1 what goes row by row: norm, RoPE
 *           and KV write, silu, 2 a decode's attention, 3 a chunk's, 4 paged_attention: who does what, 5 linear.
 *
 * Letters: T tokens, S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head size, bs block size, L keys of one
 * sequence.
 *
 * OpenMP shares loops among threads; without it the pragmas mean nothing, and one thread does it all.
 */
#include "cpu_tile.h"

/* -- 1. Row by row ------------------------------------------------------------------------------------------------ */

/* x, residual (or NULL), out, new_residual [T][n], weight [n]: out = weight * (x + residual) / rms(x + residual). */
void rms_norm(long T, long n, const elem *x, const elem *residual, const elem *weight, float eps, elem *out,
              elem *new_residual) {
    #pragma omp parallel for if (T * n > 16384)
    for (long t = 0; t < T; t++) {
        const elem *row = x + t * n, *old = residual + t * n;
        elem *sum = new_residual + t * n, *to = out + t * n;
        if (residual) {
            for (long i = 0; i < n; i++) sum[i] = put(get(old[i]) + get(row[i]));
            row = sum;
        }
        float squares = 0;
        for (long i = 0; i < n; i++) squares += get(row[i]) * get(row[i]);
        float by = 1 / sqrtf(squares / n + eps);
        for (long i = 0; i < n; i++) to[i] = put(get(weight[i]) * get(put(get(row[i]) * by)));
    }
}

/* One head: element i turns with element i + D/2. cos, sin [D] as kernels.apply_rope's, whose second half has no
 * minus. */
static inline void rope(const elem *x, const elem *cos, const elem *sin, elem *out) {
    for (int i = 0; i < D / 2; i++) {
        float a = get(x[i]), b = get(x[i + D / 2]), c = get(cos[i]), s = get(sin[i + D / 2]);
        out[i] = put(a * c - b * s);
        out[i + D / 2] = put(b * c + a * s);
    }
}

/* qk: rows of H + Hkv heads, v: rows of Hkv heads, `stride` elements from one token's to the next's; cos, sin [T][D];
 * caches [slots][Hkv][D], slots [T]  ->  q_out [T][H][D]. Slot -1 writes nothing. */
void rope_and_write_kv(long T, long H, long Hkv, const elem *qk, const elem *v, long stride, const elem *cos,
                       const elem *sin, elem *k_cache, elem *v_cache, const int64_t *slots, elem *q_out) {
    #pragma omp parallel for if (T > 4)
    for (long t = 0; t < T; t++) {
        const elem *x = qk + t * stride;
        for (long h = 0; h < H; h++) rope(x + h * D, cos + t * D, sin + t * D, q_out + (t * H + h) * D);
        if (slots[t] < 0) continue;
        elem *to = k_cache + slots[t] * Hkv * D;
        for (long h = 0; h < Hkv; h++) rope(x + (H + h) * D, cos + t * D, sin + t * D, to + h * D);
        memcpy(v_cache + slots[t] * Hkv * D, v + t * stride, Hkv * D * sizeof(elem));
    }
}

/* gate_up [T][2n], the gate first  ->  out [T][n]. (In a model `linear` does this before it writes gate and up.) */
void silu_and_mul(long T, long n, const elem *gate_up, elem *out) {
    #pragma omp parallel for if (T * n > 4096)
    for (long t = 0; t < T; t++) {
        const elem *gate = gate_up + t * 2 * n, *up = gate + n;
        elem *to = out + t * n;
        for (long i = 0; i < n; i++) to[i] = put(get(put(silu(get(gate[i])))) * get(up[i]));
    }
}

/* -- 2. A decode's attention: one query, its keys in splits ------------------------------------------------------- */

typedef struct {                                 /* the arguments of paged_attention */
    long S, H, Hkv, bs, width;
    const int32_t *starts, *lens, *tables;
    const elem *q, *k, *v;
    elem *out;
    float scale;
} Batch;

/* Where in the pool the K and the V of n tokens, from number `first` on, begin: in elements, one place for each
 * token. */
static inline void find(const Batch *b, long s, long kv_head, long first, long n, long *places) {
    long block = first / b->bs, offset = first % b->bs;
    for (long j = 0; j < n; block++, offset = 0) {
        long slot = b->tables[s * b->width + block] * b->bs + offset;
        for (; offset < b->bs && j < n; offset++, j++) places[j] = (slot++ * b->Hkv + kv_head) * D;
    }
}

enum {
    SPLIT = 128,                                 /* keys that one task takes */
    W = D % (2 * LANES) == 0 ? LANES : D % 16 == 0 ? 8 : D % 8 == 0 ? 4 : 1,   /* floats of a vector here */
    N = D / W,                                   /* vectors of a head */
    PART = D + 2                                 /* floats that a split leaves for a head: m_i, l_i, acc [D] */
};
typedef float wvec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t wbits __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef float four __attribute__((vector_size(16)));

/* A head of D elements as fp32, in an order of its own. Of two neighbours in bf16 one goes to an even vector, one to an
 * odd one: a shift and a mask, where keeping the order would take a shuffle. `unravel` knows the way back. */
static inline void load_head(const elem *from, wvec *to) {
#ifdef BF16
    for (int i = 0; i < N; i += 2) {
        wbits pairs = *(const wbits *)(from + i * W);
        to[i] = (wvec)(pairs << 16), to[i + 1] = (wvec)(pairs & 0xffff0000);
    }
#else
    for (int i = 0; i < N; i++) to[i] = *(const wvec *)(from + i * W);
#endif
}

static inline int unravel(int i) {               /* which element of the head number i of those vectors is */
    return sizeof(elem) == 2 ? i / (2 * W) * (2 * W) + i % W * 2 + i / W % 2 : i;
}

/* SPLIT keys of sequence s, from `first` on, for the G query heads of one KV head  ->  part [G][PART]. A key is read
 * once for all G. next, next_first: the split that this thread is likely to do next. Its keys are asked for
 * meanwhile, for the CPU foresees reads within a block of the pool, but not where the next block lies. */
static void decode(const Batch *b, long s, long kv_head, long first, float *part, long next, long next_first) {
    long n = MIN(b->lens[s] - first, SPLIT), places[SPLIT], asked = 0, next_places[SPLIT];
    long next_n = next < 0 ? 0 : MIN(b->lens[next] - next_first, SPLIT);
    float score[G][SPLIT], quarters[G][SPLIT][4];
    wvec q[G][N], acc[G][N] = {0}, row[N];
    find(b, s, kv_head, first, n, places);
    if (next_n) find(b, next, kv_head, next_first, next_n, next_places);
    for (int g = 0; g < G; g++) {
        load_head(b->q + (b->starts[s] * b->H + kv_head * G + g) * D, q[g]);
        for (int i = 0; i < N; i++) q[g][i] *= b->scale * LOG2_E;
    }
    for (long j = 0; j < n; j++) {               /* q * K, up to four partial sums, which are added up below */
        for (; asked * n < next_n * (j + 1); asked++)
            for (int i = 0; i < D; i += 64 / sizeof(elem))           /* a cache line has 64 bytes */
                __builtin_prefetch(b->k + next_places[asked] + i, 0, 2), __builtin_prefetch(b->v + next_places[asked] + i, 0, 2);
        load_head(b->k + places[j], row);
        for (int g = 0; g < G; g++) {
            wvec sum = q[g][0] * row[0];
            four parts[W / 4 + 1] = {0};
            for (int i = 1; i < N; i++) sum += q[g][i] * row[i];
            memcpy(parts, &sum, sizeof sum);
            for (int i = 1; i < W / 4; i++) parts[0] += parts[i];
            memcpy(quarters[g][j], parts, sizeof *parts);
        }
    }
    for (int g = 0; g < G; g++) {                /* softmax, 64 keys at a time; what is past the last gets weight 0 */
        float m_i = -INFINITY, l_i = 0;
        for (long j = n; j < pad(n, 64); j++) memcpy(quarters[g][j], (float[]){-INFINITY, 0, 0, 0}, 16);
        for (long j = 0; j < n; j += 64) {
            float (*x)[4] = quarters[g] + j;
            for (int u = 0; u < 64; u++) score[g][j + u] = (x[u][0] + x[u][1]) + (x[u][2] + x[u][3]);
            #pragma omp simd reduction(max : m_i)
            for (int u = 0; u < 64; u++) m_i = MAX(m_i, score[g][j + u]);
        }
        for (long j = 0; j < n; j += 64)
            for (int u = 0; u < 64; u++) l_i += score[g][j + u] = exp2_(score[g][j + u] - m_i);
        part[g * PART] = m_i, part[g * PART + 1] = l_i;
    }
    for (long j = 0; j < n; j++) {               /* p * V */
        load_head(b->v + places[j], row);
        for (int g = 0; g < G; g++)
            for (int i = 0; i < N; i++) acc[g][i] += row[i] * score[g][j];
    }
    for (int g = 0; g < G; g++) memcpy(part + g * PART + 2, acc[g], sizeof acc[g]);
}

/* The splits of query head h, one after another: part [splits][H][PART], from this head's first on  ->  out [D]. */
static void merge(const Batch *b, long s, long h, const float *part) {
    long splits = pad(b->lens[s], SPLIT) / SPLIT;
    float m_i = -INFINITY, l_i = 0, acc[D] = {0};
    for (long j = 0; j < splits; j++) m_i = MAX(m_i, part[j * b->H * PART]);
    for (long j = 0; j < splits; j++) {
        const float *from = part + j * b->H * PART;
        float weight = exp2_(from[0] - m_i);
        l_i += weight * from[1];
        for (int i = 0; i < D; i++) acc[i] += weight * from[2 + i];
    }
    elem *to = b->out + (b->starts[s] * b->H + h) * D;
    for (int i = 0; i < D; i++) to[unravel(i)] = put(acc[i] / l_i);
}

/* -- 3. A chunk's attention: tiles of ROWS rows against KEYS keys -------------------------------------------------- */

enum {
    ROWS = 96, KEYS = 256,                       /* a row is one query head of one query */
    WIDE = (D + STEP - 1) / STEP * STEP          /* columns of a packed V */
};

/* KEYS keys from `first` on, packed once for all rows that see them: k [D / PER][KEYS] units, v [KEYS / PER][WIDE].
 * Past the sequence's last key are zeros: weight 0 times what its slot holds, a NaN maybe, would not be 0. */
static void pack_keys(const Batch *b, long s, long kv_head, long first, elem *k, elem *v) {
    long n = MIN(KEYS, b->lens[s] - first), places[KEYS];
    find(b, s, kv_head, first, n, places);
    if (n < KEYS) memset(k, 0, sizeof(elem) * KEYS * D);
    if (n < KEYS || WIDE > D) memset(v, 0, sizeof(elem) * KEYS * WIDE);
    for (long j = 0; j < n; j++) {
        const right_unit *from = (const right_unit *)(b->k + places[j]);
        for (int i = 0; i < D / PER; i++) ((right_unit *)k)[i * KEYS + j] = from[i];
        for (int i = 0; i < D; i++) v[(j / PER * WIDE + i) * PER + j % PER] = b->v[places[j] + i];
    }
}

/* The online softmax of one row over the next keys: their scores x [width], of which it sees `visible`, become
 * weights (0 for those it doesn't see); m_i and l_i are updated  ->  by how much what was summed before shrinks. */
static inline float softmax(float *x, long visible, long width, float scale, float *m_i, float *l_i) {
    long seen = pad(visible, STEP);              /* whole vectors */
    float m_new = *m_i, sum = 0;
    for (long j = visible; j < seen; j++) x[j] = -INFINITY;
    #pragma omp simd reduction(max : m_new)      /* a NaN may go unseen here; its weight will be NaN */
    for (long j = 0; j < seen; j++) m_new = MAX(m_new, x[j]);
    for (long j = 0; j < seen; j++) sum += x[j] = exp2_((x[j] - m_new) * scale);
    if (seen < width) memset(x + seen, 0, (width - seen) * sizeof(float));
    float shrink = exp2_((*m_i - m_new) * scale);
    *l_i = *l_i * shrink + sum, *m_i = m_new;
    return shrink;
}

static inline void to_left(long n, const float *from, left *to) {      /* n is a multiple of STEP */
#if defined(BF16) && defined(__AVX512BF16__)
    for (long i = 0; i < n; i += 32)             /* put() of 32 at once */
        *(__m512i_u *)(to + i) = (__m512i)_mm512_cvtne2ps_pbh(*(__m512_u *)(from + i + 16), *(__m512_u *)(from + i));
#else
    for (long i = 0; i < n; i++) to[i] = PER == 2 ? put(from[i]) : from[i];
#endif
}

/* ROWS / G queries of sequence s, from its query number `first` on, for one KV head; k and v as pack_keys left them. */
static void chunk(const Batch *b, long s, long kv_head, long first, const elem *k, const elem *v) {
    long q_len = b->starts[s + 1] - b->starts[s], queries = MIN(ROWS / G, q_len - first), rows = queries * G;
    long position = b->lens[s] - q_len + first, row0 = (b->starts[s] + first) * b->H + kv_head * G;
    _Alignas(64) left q[ROWS * D], p[ROWS * KEYS];
    _Alignas(64) float scores[ROWS * KEYS], acc[ROWS * WIDE];
    float m_i[ROWS], l_i[ROWS], scale = b->scale * LOG2_E;
    memset(acc, 0, rows * WIDE * sizeof(float));
    for (long r = 0; r < rows; r++) {
        const elem *from = b->q + (row0 + r / G * b->H + r % G) * D;
        for (int i = 0; i < D; i++) q[r * D + i] = PER == 2 ? from[i] : get(from[i]);
        m_i[r] = -INFINITY, l_i[r] = 0;
    }
    for (long key = 0; key < position + queries; key += KEYS, k += KEYS * D, v += KEYS * WIDE) {
        long n = MIN(KEYS, position + queries - key), width = pad(n, STEP);      /* keys that any of the rows sees */
        product(rows, width, D / PER, (left_unit *)q, D / PER, (right_unit *)k, KEYS, scores, KEYS, 0);
        for (long r = 0; r < rows; r++) {
            long visible = MIN(MAX(position + r / G + 1 - key, 0), n);
            float shrink = softmax(scores + r * KEYS, visible, width, scale, &m_i[r], &l_i[r]);
            to_left(width, scores + r * KEYS, p + r * KEYS);
            for (int i = 0; i < WIDE; i++) acc[r * WIDE + i] *= shrink;
        }
        product(rows, WIDE, pad(n, PER) / PER, (left_unit *)p, KEYS / PER, (right_unit *)v, WIDE, acc, WIDE, 1);
    }
    for (long r = 0; r < rows; r++)
        for (int i = 0; i < D; i++) b->out[(row0 + r / G * b->H + r % G) * D + i] = put(acc[r * WIDE + i] / l_i[r]);
}

/* -- 4. paged_attention: who does what ---------------------------------------------------------------------------- */

/* Two lists of tasks; the second waits for the first. First: a split of a decode, or the packing of KEYS keys for a
 * chunk, for all KV heads, since theirs lie side by side. Then: the merging of a decode, or a tile of a chunk's
 * queries. */
typedef struct { long s, first, kv_head; char *memory; } Task;       /* memory: for what first tasks leave */

static inline long queries_of(const Batch *b, long s) { return b->starts[s + 1] - b->starts[s]; }

static inline long left_by(const Batch *b, long s) {                    /* bytes that a sequence's first tasks leave */
    return pad(queries_of(b, s) == 1 ? pad(b->lens[s], SPLIT) / SPLIT * b->H * PART * sizeof(float)
                                     : pad(b->lens[s], KEYS) * (D + WIDE) * b->Hkv * sizeof(elem), 64);
}

static inline long draw(long *next) {            /* the number of a task that nobody else gets */
    long mine;
    #pragma omp atomic capture
    mine = (*next)++;
    return mine;
}

static void first_task(const Batch *b, const Task *t, const Task *next) {
    long L = pad(b->lens[t->s], KEYS), next_s = next && queries_of(b, next->s) == 1 ? next->s : -1;
    for (long kv_head = 0; kv_head < b->Hkv; kv_head++)
        if (queries_of(b, t->s) == 1) {
            float *part = (float *)t->memory + (t->first / SPLIT * b->H + kv_head * G) * PART;
            decode(b, t->s, kv_head, t->first, part, next_s, next_s < 0 ? 0 : next->first);
        } else {
            elem *to = (elem *)t->memory + kv_head * L * (D + WIDE);
            pack_keys(b, t->s, kv_head, t->first, to + t->first * D, to + L * D + t->first * WIDE);
        }
}

static void second_task(const Batch *b, const Task *t) {
    long L = pad(b->lens[t->s], KEYS);
    elem *packed = (elem *)t->memory + t->kv_head * L * (D + WIDE);
    if (L == 0)                                  /* padding: zeros */
        memset(b->out + b->starts[t->s] * b->H * D, 0, queries_of(b, t->s) * b->H * D * sizeof(elem));
    else if (queries_of(b, t->s) == 1)
        for (long h = 0; h < b->H; h++) merge(b, t->s, h, (float *)t->memory + h * PART);
    else
        chunk(b, t->s, t->kv_head, t->first, packed, packed + L * D);
}

/* q, out [T][H][D], caches [blocks][bs][Hkv][D], starts [S + 1], lens [S], tables [S][width]:
 * kernels.paged_attention's. Returns 0, or -1 if there is no memory for what the first tasks leave. */
int paged_attention(long S, long H, long Hkv, long bs, long width, const int32_t *starts, const int32_t *lens,
                    const int32_t *tables, const elem *q, const elem *k, const elem *v, elem *out, float scale) {
    Batch batch = {S, H, Hkv, bs, width, starts, lens, tables, q, k, v, out, scale}, *b = &batch;
    long tasks = S, bytes = 0, n_first = 0, n_second = 0, step = ROWS / G;
    for (long s = 0; s < S; s++) {               /* at most so many tasks, and just so many bytes */
        tasks += lens[s] / SPLIT + 1 + (queries_of(b, s) / step + 1) * Hkv;
        bytes += left_by(b, s);
    }
    char *memory = aligned_alloc(64, pad(bytes + 2 * tasks * sizeof(Task), 64)), *at = memory;
    if (!memory) return -1;
    Task *firsts = (Task *)(memory + bytes), *seconds = firsts + tasks;
    for (long s = 0; s < S; at += left_by(b, s), s++) {
        long decodes = queries_of(b, s) == 1;
        for (long first = 0; first < lens[s]; first += decodes ? SPLIT : KEYS)
            firsts[n_first++] = (Task){s, first, 0, at};
        if (decodes || lens[s] == 0)
            seconds[n_second++] = (Task){s, 0, 0, at};
        else                                     /* the last queries see the most keys: the longest tasks start first */
            for (long first = (queries_of(b, s) - 1) / step * step; first >= 0; first -= step)
                for (long kv_head = 0; kv_head < Hkv; kv_head++) seconds[n_second++] = (Task){s, first, kv_head, at};
    }
    long drawn = 0;
    #pragma omp parallel if (n_first + n_second > 2)
    {
        /* Who is free draws a task. One ahead, so that a thread knows what it will do next. */
        for (long now = draw(&drawn), next; now < n_first; now = next) {
            next = draw(&drawn);
            first_task(b, firsts + now, next < n_first ? firsts + next : 0);
        }
        #pragma omp barrier
        #pragma omp for schedule(dynamic)
        for (long i = 0; i < n_second; i++) second_task(b, seconds + i);
    }
    free(memory);
    return 0;
}

/* -- 5. linear: y [T][n_out] = x [T][n_in] * weight [n_out][n_in] transposed, + bias ------------------------------- */

/* A weight is packed once, when it is loaded: [panels][n_in / PER][STEP] units; a panel is STEP outputs. `gated`: it is
 * gate above up, and a panel holds STEP/2 outputs of each, so that a tile yields gate and up of the same numbers, and
 * silu(gate) * up is taken before anything is written. n_in is a multiple of PER. */
static inline long panels_of(long n_out, int gated) {
    return gated ? pad(n_out / 2, STEP / 2) / (STEP / 2) : pad(n_out, STEP) / STEP;
}

long packed_size(long n_out, long n_in, int gated) { return panels_of(n_out, gated) * STEP * n_in * sizeof(elem); }

long left_size(void) { return sizeof(left); }    /* bytes of an element of x: 4 on a CPU that can't multiply bf16 */

void pack_weight(long n_out, long n_in, int gated, const elem *weight, elem *to) {
    #pragma omp parallel for
    for (long panel = 0; panel < panels_of(n_out, gated); panel++)
        for (long c = 0; c < STEP; c++) {        /* the weight's row that column c of the panel holds; zeros if none */
            long row = panel * STEP + c, half = STEP / 2, real = row < n_out;
            if (gated) row = panel * half + c % half, real = row < n_out / 2, row += c / half * (n_out / 2);
            for (long i = 0; i < n_in; i++)
                to[(panel * n_in + i / PER * PER) * STEP + c * PER + i % PER] = real ? weight[row * n_in + i] : put(0);
        }
}

/* One panel's n outputs for some rows of x [rows][n_in]: the tile's sums, then bias, silu, rounding. */
static void panel_times(long rows, long n_in, long n, int gated, const elem *panel, const elem *bias,
                        const elem *up_bias, const left *x, elem *y, long y_row) {
    _Alignas(64) float sums[ROWS * STEP];
    product(rows, STEP, n_in / PER, (left_unit *)x, n_in / PER, (right_unit *)panel, STEP, sums, STEP, 0);
    for (long r = 0; r < rows; r++, y += y_row) {
        float *from = sums + r * STEP;
        for (long i = 0; bias && i < n; i++) {
            from[i] += get(bias[i]);
            if (gated) from[STEP / 2 + i] += get(up_bias[i]);
        }
        for (long i = 0; gated && i < STEP / 2; i++) from[i] = silu(from[i]) * from[STEP / 2 + i];
        for (long i = 0; i < n; i++) y[i] = put(from[i]);
    }
}

/* Threads share blocks of up to ROWS rows, and panels. bias [n_out] or NULL; gated: y is [T][n_out / 2]. */
void linear(long T, long n_out, long n_in, int gated, const elem *weight, const elem *bias, const left *x, elem *y) {
    if (T == 0) return;                          /* a step of chunks that make no logits */
    long blocks = pad(T, ROWS) / ROWS, height = pad((T + blocks - 1) / blocks, HEIGHT), panels = panels_of(n_out, gated);
    long columns = gated ? n_out / 2 : n_out, step = gated ? STEP / 2 : STEP;
    #define PANEL(t, rows, panel) panel_times(rows, n_in, MIN(step, columns - (panel) * step), gated, \
        weight + (panel) * STEP * n_in, bias ? bias + (panel) * step : 0, bias ? bias + n_out / 2 + (panel) * step : 0, \
        x + (t) * n_in, y + (t) * columns + (panel) * step, columns)
    if (T < 16) {                                /* memory takes the time, and is quickest read in order: a part each */
        #pragma omp parallel for
        for (long panel = 0; panel < panels; panel++) PANEL(0, T, panel);
    } else {
        #pragma omp parallel for collapse(2) schedule(dynamic)
        for (long block = 0; block < blocks; block++)
            for (long panel = 0; panel < panels; panel++) PANEL(block * height, MIN(height, T - block * height), panel);
    }
}
