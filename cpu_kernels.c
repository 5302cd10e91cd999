/* How it is computed on the CPU in front of you (chapter 6): the operations of kernels.py once more, in plain C.
 *
 * Mirrors   vLLM: csrc/cpu, which is C++ and intrinsics: attention, norms, activations, and oneDNN for the products.
 * Promises  what the twins in kernels.py promise. K and V are read where they lie, through the block table, and nothing
 *           beyond a sequence's length is read. A row of a product has the same bits in any batch, and a sequence's
 *           attention has them alone and in company, however long the block tables are and however many threads run.
 *           (A query by itself is a decode and sums in another order than the same query within a chunk.)
 * Left out  fp16, AMX, and sizes that change at run time: cpu_kernels.py compiles this file once for each dtype (-DBF16
 *           or nothing: fp32), head size -DD and number of query heads a KV head -DG, with -march=native.
 * Order     1 numbers, 2 what goes row by row: norm, RoPE and KV write, silu, 3 the register tile: all matrix products,
 *           4 a decode's attention, 5 a chunk's, 6 paged_attention, who does what, 7 linear: x times a weight.
 *
 * Letters: T tokens, S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head size, bs block size, L keys of one
 * sequence. A *vector* is what one instruction works on: 16 floats with AVX-512, 8 with AVX2, 4 on ARM (NEON).
 *
 * How to get vectors out of a C compiler. A loop over independent elements becomes vector instructions by itself if its
 * body has no branch and no call: hence the ?: instead of if, and an exp of our own. Where values must stay in registers
 * across loops, the type does it: `vec` below is an array of floats that GCC and Clang add and multiply as a whole, with
 * whatever instruction the CPU has. One intrinsic remains, the product of bf16 pairs, with the plain form beside it.
 * OpenMP shares loops among threads; without it the pragmas mean nothing and one thread does it all.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif
#ifdef _OPENMP
int omp_get_num_threads(void);                   /* all that we need of omp.h */
#else
static inline int omp_get_num_threads(void) { return 1; }
#endif

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
static inline long pad(long n, long to) { return (n + to - 1) / to * to; }

/* -- 1. Numbers --------------------------------------------------------------------------------------------------- */

#ifdef BF16                                      /* the upper half of an fp32's 32 bits */
typedef uint16_t elem;
static inline float get(elem e) {
    uint32_t bits = (uint32_t)e << 16;
    float f;
    memcpy(&f, &bits, 4);                        /* the same bits under another type: costs nothing */
    return f;
}
static inline elem put(float f) {                /* to the nearest bf16, of two as near to the even one; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (elem)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
typedef float elem;
static inline float get(elem e) { return e; }
static inline elem put(float f) { return f; }
#endif

#define LOG2_E 1.44269504f                       /* exp(x) = 2^(x * log2 e) */

/* 2^x for x <= 127, to 2e-7: n, the nearest whole number, goes into the exponent bits; 2^(x - n) is a polynomial. Below
 * -126.5 it is exactly 0, since n + 127 is then 0 and so are all bits. Of a NaN it is NaN. */
static inline float exp2_(float x) {
    x = x < -127.0f ? -127.0f : x;
    float n = floorf(x + 0.5f), r = x - n, p = 1.326472e-3f, two_n;
    p = p * r + 9.671513e-3f, p = p * r + 5.5507336e-2f, p = p * r + 0.24022242f, p = p * r + 0.693147f, p = p * r + 1;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    memcpy(&two_n, &bits, 4);
    return p * two_n;
}

static inline float silu(float x) {              /* x / (1 + exp(-x)) */
    float power = -x * LOG2_E;
    return x / (1 + exp2_(power > 126 ? 126 : power));
}

/* -- 2. Row by row ------------------------------------------------------------------------------------------------ */

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

/* One head: element i turns with element i + D/2. cos and sin [D] as kernels.apply_rope's: their second half is plain. */
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

/* gate_up [T][2n], the gate first  ->  out [T][n]. A step's products do this themselves: see linear. */
void silu_and_mul(long T, long n, const elem *gate_up, elem *out) {
    #pragma omp parallel for if (T * n > 4096)
    for (long t = 0; t < T; t++) {
        const elem *gate = gate_up + t * 2 * n, *up = gate + n;
        elem *to = out + t * n;
        for (long i = 0; i < n; i++) to[i] = put(get(put(silu(get(gate[i])))) * get(up[i]));
    }
}

/* -- 3. The register tile ----------------------------------------------------------------------------------------- */

/* c [rows][cols] = a [rows][depth] * b [depth][cols] is all of a transformer's arithmetic: q * K, p * V, x * W. It is fast
 * if a number, once in a register, is used often. A tile of HEIGHT rows and VECTORS vectors of c stays in registers for
 * the whole depth; each turn loads VECTORS vectors of b and HEIGHT single numbers of a for HEIGHT * VECTORS multiply-adds.
 * (6 * 4 sums, 4 of b and one of a are 29 of the 32 vector registers of AVX-512 and NEON; 6 * 2 + 3 are 15 of AVX2's 16.)
 *
 * b must lie as it is read: STEP columns side by side, row under row. *Packing* is bringing it into that order.
 * In bf16 some CPUs multiply pairs: one instruction adds a0 * b0 + a1 * b1 to each fp32 sum. There two rows of b are
 * interleaved, and depth counts pairs. Other CPUs widen b to fp32 as they load it, and want a in fp32. */
#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4, HEIGHT = 6 };
#elif defined(__AVX__)
enum { LANES = 8, VECTORS = 2, HEIGHT = 6 };
#else
enum { LANES = 4, VECTORS = 4, HEIGHT = 6 };
#endif
enum { STEP = LANES * VECTORS };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if defined(BF16) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
enum { PER = 2 };                                /* elements that one multiply-add takes from a and from b */
typedef elem left;                               /* what a is made of */
typedef uint32_t left_unit __attribute__((may_alias)), right_unit __attribute__((may_alias));
static inline left left_of(float f) { return put(f); }
ALWAYS_INLINE bits load_right(const right_unit *b) { return *(const bits *)b; }
ALWAYS_INLINE bits spread(left_unit a) { return a - (bits){0}; }     /* the same in every lane */
#ifdef __AVX512BF16__
ALWAYS_INLINE vec multiply_add(vec sum, bits a, bits b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
ALWAYS_INLINE vec multiply_add(vec sum, bits a, bits b) {
    return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif
#else
enum { PER = 1 };
typedef float left, left_unit;
typedef elem right_unit;
static inline left left_of(float f) { return f; }
#ifdef BF16
ALWAYS_INLINE vec load_right(const elem *b) { return (vec)(__builtin_convertvector(*(const halves *)b, bits) << 16); }
#else
ALWAYS_INLINE vec load_right(const elem *b) { return *(const vec *)b; }
#endif
ALWAYS_INLINE vec spread(left_unit a) { return a - (vec){0}; }
ALWAYS_INLINE vec multiply_add(vec sum, vec a, vec b) { return sum + a * b; }
#endif

static inline void to_left(long n, const float *from, left *to) {      /* n is a multiple of STEP */
#ifdef __AVX512BF16__
#ifdef BF16
    for (long i = 0; i < n; i += 32)
        *(__m512i_u *)(to + i) = (__m512i)_mm512_cvtne2ps_pbh(*(__m512_u *)(from + i + 16), *(__m512_u *)(from + i));
    return;
#endif
#endif
    for (long i = 0; i < n; i += STEP)
        for (int u = 0; u < STEP; u++) to[i + u] = left_of(from[i + u]);
}

/* One tile; it is inlined for each height, which the compiler thus knows. add: to what c holds, else to 0. */
ALWAYS_INLINE void tile(int height, long depth, const left_unit *a, long a_row, const right_unit *b, long b_row, float *c,
                        long c_row, int add) {
    vec sum[HEIGHT][VECTORS];
    UNROLL
    for (int m = 0; m < height; m++)
        UNROLL
        for (int n = 0; n < VECTORS; n++) sum[m][n] = add ? *(vec *)(c + m * c_row + n * LANES) : (vec){0};
    for (long k = 0; k < depth; k++) {
        typeof(load_right(b)) right[VECTORS];
        UNROLL
        for (int n = 0; n < VECTORS; n++) right[n] = load_right(b + k * b_row + n * LANES);
        UNROLL
        for (int m = 0; m < height; m++)
            UNROLL
            for (int n = 0; n < VECTORS; n++)
                sum[m][n] = multiply_add(sum[m][n], spread(a[m * a_row + k]), right[n]);
    }
    UNROLL
    for (int m = 0; m < height; m++)
        UNROLL
        for (int n = 0; n < VECTORS; n++) *(vec *)(c + m * c_row + n * LANES) = sum[m][n];
}

/* Any number of rows; cols is a multiple of STEP, and x_row is how far apart two rows of x begin. An element of c is one
 * sum along the depth, front to back, whatever the tile's height: its bits don't depend on the other rows. */
static __attribute__((noinline)) void product(long rows, long cols, long depth, const left_unit *a, long a_row, const right_unit *b, long b_row,
                    float *c, long c_row, int add) {
    for (long j = 0; j < cols; j += STEP)
        for (long i = 0; i < rows; i += HEIGHT)
            switch (MIN(rows - i, HEIGHT)) {
            #define CASE(height) case height: \
                tile(height, depth, a + i * a_row, a_row, b + j, b_row, c + i * c_row + j, c_row, add); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
            }
}

/* -- 4. A decode's attention: one query, its keys in splits ------------------------------------------------------- */

typedef struct {                                 /* the arguments of paged_attention */
    long S, H, Hkv, bs, width;
    const int32_t *starts, *lens, *tables;
    const elem *q, *k, *v;
    elem *out;
    float scale;
} Batch;

/* Where in the pool the K and the V of n tokens from number `first` on begin: slots of one block follow one another. */
static inline void find(const Batch *b, long s, long kv_head, long first, long n, long *places) {
    long block = first / b->bs, offset = first % b->bs;
    for (long j = 0; j < n; block++, offset = 0) {
        long slot = b->tables[s * b->width + block] * b->bs + offset;
        for (; offset < b->bs && j < n; offset++, j++) places[j] = (slot++ * b->Hkv + kv_head) * D;
    }
}

enum {
    SPLIT = 128,                                 /* keys that one task takes */
    W = D % (2 * LANES) == 0 ? LANES : D % 16 == 0 ? 8 : D % 8 == 0 ? 4 : 1,   /* floats of a vector that D divides by */
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

static inline void prefetch(const elem *head) {
    for (int i = 0; i < D; i += 64 / sizeof(elem)) __builtin_prefetch(head + i, 0, 2);
}

/* Keys `first` … first + SPLIT - 1 of sequence s for the G query heads of one KV head  ->  part [G][PART]. A key is read
 * once for all G. next, first_next: the split that this thread is likely to do next, whose keys are asked for meanwhile:
 * the CPU itself foresees reads within a block of the pool, but not where the next block lies. */
static void decode(const Batch *b, long s, long kv_head, long first, float *part, long next, long first_next) {
    long n = MIN(b->lens[s] - first, SPLIT), places[SPLIT], n_next = 0, asked = 0, places_next[SPLIT];
    float score[G][SPLIT], quarters[G][SPLIT][4];
    wvec q[G][N], acc[G][N] = {0}, row[N];
    find(b, s, kv_head, first, n, places);
    if (next >= 0) {
        n_next = MIN(b->lens[next] - first_next, SPLIT);
        find(b, next, kv_head, first_next, n_next, places_next);
    }
    for (int g = 0; g < G; g++) {
        load_head(b->q + (b->starts[s] * b->H + kv_head * G + g) * D, q[g]);
        for (int i = 0; i < N; i++) q[g][i] *= b->scale * LOG2_E;
    }
    for (long j = 0; j < n; j++) {
        for (; asked * n < n_next * (j + 1); asked++) prefetch(b->k + places_next[asked]), prefetch(b->v + places_next[asked]);
        load_head(b->k + places[j], row);
        for (int g = 0; g < G; g++) {            /* to four partial sums; they are added up below, many keys at a time */
            wvec sum = q[g][0] * row[0];
            four parts[W / 4 + 1] = {0};
            for (int i = 1; i < N; i++) sum += q[g][i] * row[i];
            memcpy(parts, &sum, sizeof sum);
            for (int i = 1; i < W / 4; i++) parts[0] += parts[i];
            memcpy(quarters[g][j], parts, sizeof *parts);
        }
    }
    for (int g = 0; g < G; g++) {
        float m_i = -INFINITY, l_i = 0;
        for (long j = n; j < pad(n, 64); j++)    /* past the last key: score -inf, weight 0 */
            quarters[g][j][0] = -INFINITY, quarters[g][j][1] = quarters[g][j][2] = quarters[g][j][3] = 0;
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
    for (long j = 0; j < n; j++) {
        load_head(b->v + places[j], row);
        for (int g = 0; g < G; g++)
            for (int i = 0; i < N; i++) acc[g][i] += row[i] * score[g][j];
    }
    for (int g = 0; g < G; g++) memcpy(part + g * PART + 2, acc[g], sizeof acc[g]);
}

/* The splits of query head h, one after another: part [splits][H][PART], from this head's first on. */
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

/* -- 5. A chunk's attention: tiles of ROWS rows against KEYS keys -------------------------------------------------- */

#ifndef ROWS
enum { ROWS = 96, KEYS = 256 };                  /* a row is one query head of one query */
#endif
enum { WIDE = (D + STEP - 1) / STEP * STEP };    /* columns of a packed V */

/* KEYS keys from `first` on, packed once for all rows that see them: k [D / PER][KEYS] units, v [KEYS / PER][WIDE]. Past
 * the sequence's last key are zeros: weight 0 times what its slot holds, a NaN maybe, would not be 0. */
static void pack_keys(const Batch *b, long s, long kv_head, long first, elem *k, elem *v) {
    long n = MIN(KEYS, b->lens[s] - first), places[KEYS];
    find(b, s, kv_head, first, n, places);
    if (n < KEYS) memset(k, 0, sizeof(elem) * KEYS * D);
    if (n < KEYS || WIDE > D) memset(v, 0, sizeof(elem) * KEYS * WIDE);
    for (long j = 0; j < n; j++) {
        const right_unit *from = (const right_unit *)(b->k + places[j]);
        for (int i = 0; i < D / PER; i++) ((right_unit *)k)[i * KEYS + j] = from[i];
    }
    for (long j = 0; j < n; j++)
        for (int i = 0; i < D; i++) v[(j / PER * WIDE + i) * PER + j % PER] = b->v[places[j] + i];
}

/* The online softmax of one row: scores x [width], of which it sees `visible`; m_i and l_i as they were before these keys
 *  ->  x the weights, width of them (0 for what it doesn't see); returns by how much the older sums shrink. */
static inline float softmax(float *x, long visible, long width, float scale, float *m_i, float *l_i) {
    long seen = pad(visible, STEP);              /* full vectors only: a loop over STEP needs no remainder */
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

/* ROWS / G queries of sequence s from its query number `first` on, for one KV head; k and v as pack_keys left them. */
static void chunk(const Batch *b, long s, long kv_head, long first, const elem *k, const elem *v) {
    long q_len = b->starts[s + 1] - b->starts[s], queries = MIN(ROWS / G, q_len - first), rows = queries * G;
    long position = b->lens[s] - q_len + first, row0 = (b->starts[s] + first) * b->H + kv_head * G;
    _Alignas(64) left q[ROWS * D], p[ROWS * KEYS];
    _Alignas(64) float scores[ROWS * KEYS], acc[ROWS * WIDE];
    float m_i[ROWS], l_i[ROWS], scale = b->scale * LOG2_E;
    memset(acc, 0, rows * WIDE * sizeof(float));
    for (long r = 0; r < rows; r++) {
        for (int i = 0; i < D; i++) q[r * D + i] = left_of(get(b->q[(row0 + r / G * b->H + r % G) * D + i]));
        m_i[r] = -INFINITY, l_i[r] = 0;
    }
    for (long key = 0; key < position + queries; key += KEYS, k += KEYS * D, v += KEYS * WIDE) {
        long n = MIN(KEYS, position + queries - key), width = pad(n, STEP);      /* keys that any of the rows sees */
        product(rows, width, D / PER, (left_unit *)q, D / PER, (right_unit *)k, KEYS, scores, KEYS, 0);
        for (long r = 0; r < rows; r++) {
            long visible = MIN(MAX(position + r / G + 1 - key, 0), n);
            float *x = scores + r * KEYS, shrink = softmax(x, visible, width, scale, &m_i[r], &l_i[r]);
            to_left(width, x, p + r * KEYS);
            for (int i = 0; i < WIDE; i++) acc[r * WIDE + i] *= shrink;
        }
        product(rows, WIDE, pad(n, PER) / PER, (left_unit *)p, KEYS / PER, (right_unit *)v, WIDE, acc, WIDE, 1);
    }
    for (long r = 0; r < rows; r++)
        for (int i = 0; i < D; i++) b->out[(row0 + r / G * b->H + r % G) * D + i] = put(acc[r * WIDE + i] / l_i[r]);
}

/* -- 6. paged_attention: who does what ---------------------------------------------------------------------------- */

/* Two lists of tasks, and the second waits for the first. First: a split of a decode, or KEYS keys of a chunk to be packed;
 * of all KV heads, since theirs lie side by side. Then: the merging of a decode, or a tile of a chunk's queries. */
typedef struct { long s, first, kv_head; char *memory; } Task;

static inline long room(long q_len, long L, long H, long Hkv) {        /* bytes that a sequence's first tasks leave */
    return q_len == 1 ? pad(L, SPLIT) / SPLIT * H * PART * sizeof(float)
                      : pad(L, KEYS) * (D + WIDE) * Hkv * sizeof(elem);
}

static void first_task(const Batch *b, const Task *t, const Task *next) {
    long decodes = b->starts[t->s + 1] - b->starts[t->s] == 1, L = pad(b->lens[t->s], KEYS);
    long s_next = next && b->starts[next->s + 1] - b->starts[next->s] == 1 ? next->s : -1;
    for (long kv_head = 0; kv_head < b->Hkv; kv_head++)
        if (decodes) {
            float *part = (float *)t->memory + (t->first / SPLIT * b->H + kv_head * G) * PART;
            decode(b, t->s, kv_head, t->first, part, s_next, s_next < 0 ? 0 : next->first);
        } else {
            elem *to = (elem *)t->memory + kv_head * L * (D + WIDE);
            pack_keys(b, t->s, kv_head, t->first, to + t->first * D, to + L * D + t->first * WIDE);
        }
}

static void second_task(const Batch *b, const Task *t) {
    long q_len = b->starts[t->s + 1] - b->starts[t->s], L = pad(b->lens[t->s], KEYS);
    if (b->lens[t->s] == 0)                      /* padding: zeros */
        memset(b->out + b->starts[t->s] * b->H * D, 0, q_len * b->H * D * sizeof(elem));
    else if (q_len == 1)
        for (long h = 0; h < b->H; h++) merge(b, t->s, h, (float *)t->memory + h * PART);
    else {
        elem *from = (elem *)t->memory + t->kv_head * L * (D + WIDE);
        chunk(b, t->s, t->kv_head, t->first, from, from + L * D);
    }
}

/* q, out [T][H][D], caches [blocks][bs][Hkv][D], starts [S + 1], lens [S], tables [S][width]: see kernels.paged_attention.
 * Returns 0, or -1 if there is no memory for what the first tasks leave. */
int paged_attention(long S, long H, long Hkv, long bs, long width, const int32_t *starts, const int32_t *lens,
                    const int32_t *tables, const elem *q, const elem *k, const elem *v, elem *out, float scale) {
    Batch batch = {S, H, Hkv, bs, width, starts, lens, tables, q, k, v, out, scale}, *b = &batch;
    long queries = ROWS / G, n_first = 0, n_second = 0, bytes = 0;
    for (long s = 0; s < S; s++) {
        long q_len = starts[s + 1] - starts[s], keys = q_len == 1 ? SPLIT : KEYS;
        n_first += pad(lens[s], keys) / keys;
        n_second += q_len == 1 || lens[s] == 0 ? 1 : pad(q_len, queries) / queries * Hkv;
        bytes += pad(room(q_len, lens[s], H, Hkv), 64);
    }
    char *memory = aligned_alloc(64, pad(bytes + (n_first + n_second) * sizeof(Task), 64));
    if (!memory) return -1;
    Task *firsts = (Task *)(memory + bytes), *seconds = firsts + n_first, *f = firsts, *t = seconds;
    char *at = memory;
    for (long s = 0; s < S; s++) {
        long q_len = starts[s + 1] - starts[s], keys = q_len == 1 ? SPLIT : KEYS;
        for (long first = 0; first < lens[s]; first += keys) *f++ = (Task){s, first, 0, at};
        if (q_len == 1 || lens[s] == 0)
            *t++ = (Task){s, 0, 0, at};
        else                                     /* the last queries see the most keys: the longest tasks start first */
            for (long first = (q_len - 1) / queries * queries; first >= 0; first -= queries)
                for (long kv_head = 0; kv_head < Hkv; kv_head++) *t++ = (Task){s, first, kv_head, at};
        at += pad(room(q_len, lens[s], H, Hkv), 64);
    }
    #pragma omp parallel if (n_first + n_second > 2)
    {
        long threads = omp_get_num_threads();    /* all take tasks in turn, so a thread's next is about that far ahead */
        #pragma omp for schedule(dynamic)
        for (long i = 0; i < n_first; i++) first_task(b, firsts + i, i + threads < n_first ? firsts + i + threads : 0);
        #pragma omp for schedule(dynamic)
        for (long i = 0; i < n_second; i++) second_task(b, seconds + i);
    }
    free(memory);
    return 0;
}

/* -- 7. linear: y [T][n_out] = x [T][n_in] * weight [n_out][n_in] transposed, + bias ------------------------------- */

/* A weight is packed once, when it is loaded: [panels][n_in / PER][STEP] units, a panel being STEP outputs. With `gated` it
 * is gate and up, one above the other, and a panel holds STEP/2 outputs of each: what comes out of a tile is then
 * gate and up of the same numbers, and silu(gate) * up is taken before anything is written. n_in is a multiple of PER. */
static inline long panels_of(long n_out, int gated) {
    return gated ? pad(n_out / 2, STEP / 2) / (STEP / 2) : pad(n_out, STEP) / STEP;
}

long packed_size(long n_out, long n_in, int gated) { return panels_of(n_out, gated) * STEP * n_in * sizeof(elem); }

long left_size(void) { return sizeof(left); }    /* bytes of an element of x: bf16 on a CPU that can't multiply it is 4 */

void pack_weight(long n_out, long n_in, int gated, const elem *weight, elem *to) {
    #pragma omp parallel for
    for (long panel = 0; panel < panels_of(n_out, gated); panel++)
        for (long c = 0; c < STEP; c++) {
            long row = panel * STEP + c, half = STEP / 2, real = row < n_out;
            if (gated) row = panel * half + c % half, real = row < n_out / 2, row += c / half * (n_out / 2);
            for (long i = 0; i < n_in; i++)
                to[((panel * n_in + i / PER * PER) * STEP) + c * PER + i % PER] = real ? weight[row * n_in + i] : put(0);
        }
}

/* One panel's outputs for `rows` rows of x: its tile's sums, then bias, silu, rounding. y, bias: from its outputs on. */
static void panel_times(long rows, long n_in, long y_row, long n, int gated, const elem *panel, const elem *bias,
                        const elem *bias_up, const left *x, elem *y) {
    _Alignas(64) float sums[ROWS * STEP];
    product(rows, STEP, n_in / PER, (left_unit *)x, n_in / PER, (right_unit *)panel, STEP, sums, STEP, 0);
    for (long r = 0; r < rows; r++, y += y_row) {
        float *from = sums + r * STEP;
        if (bias)
            for (long i = 0; i < n; i++) from[i] += get(bias[i]);
        if (bias && gated)
            for (long i = 0; i < n; i++) from[STEP / 2 + i] += get(bias_up[i]);
        if (gated)
            for (long i = 0; i < STEP / 2; i++) from[i] = silu(from[i]) * from[STEP / 2 + i];
        for (long i = 0; i < n; i++) y[i] = put(from[i]);
    }
}

/* The threads share T in blocks of up to ROWS rows, and panels. gated: y is [T][n_out / 2]. */
void linear(long T, long n_out, long n_in, int gated, const elem *weight, const elem *bias, const left *x, elem *y) {
    if (T == 0) return;                          /* a step of chunks that make no logits */
    long blocks = pad(T, ROWS) / ROWS, height = pad((T + blocks - 1) / blocks, HEIGHT), panels = panels_of(n_out, gated);
    long columns = gated ? n_out / 2 : n_out, step = gated ? STEP / 2 : STEP;
    #pragma omp parallel for collapse(2) schedule(dynamic)
    for (long block = 0; block < blocks; block++)
        for (long panel = 0; panel < panels; panel++) {
            long t = block * height, i = panel * step;
            panel_times(MIN(height, T - t), n_in, columns, MIN(step, columns - i), gated, weight + panel * STEP * n_in,
                        bias ? bias + i : 0, bias ? bias + n_out / 2 + i : 0, x + t * n_in, y + t * columns + i);
        }
}
