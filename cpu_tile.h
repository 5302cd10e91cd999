/* What cpu_kernels.c is made of (chapter 6): bf16 and exp, and the register tile in which all matrix products are done.
 *
 * A *vector* is what one instruction works on: 16 floats with AVX-512, 8 with AVX2, 4 on ARM (NEON) or old x86. How to
 * get vectors out of a C compiler: a loop over independent elements becomes vector instructions by itself if its body
 * has no branch and no call: hence ?: instead of if, and an exp of our own. Where values must stay in registers across
 * loops, their type says so: `vec` below is an array of floats that GCC and Clang add and multiply as a whole, with
 * whatever the CPU has. What no compiler finds by itself, products of bf16 pairs, stands beside its plain form.
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
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
static inline long pad(long n, long to) { return (n + to - 1) / to * to; }

/* -- 1. Numbers --------------------------------------------------------------------------------------------------- */

#ifdef BF16                                      /* the upper half of an fp32's 32 bits */
typedef uint16_t elem;
static inline float get(elem e) {
    uint32_t u = (uint32_t)e << 16;
    float f;
    memcpy(&f, &u, 4);                           /* the same bits under another type: costs nothing */
    return f;
}
static inline elem put(float f) {                /* to the nearest bf16, of two to the even one; a NaN as arithmetic makes it stays one */
    uint32_t u;
    memcpy(&u, &f, 4);
    return (elem)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
#else
typedef float elem;
static inline float get(elem e) { return e; }
static inline elem put(float f) { return f; }
#endif

#define LOG2_E 1.44269504f                       /* exp(x) = 2^(x * log2 e) */

/* 2^x for x <= 127, to 2e-7: n, the nearest whole number, goes into the exponent bits; 2^(x - n) is a polynomial. Below
 * -126.5 it is exactly 0, since n + 127 and so all bits are 0 then. Of a NaN it is NaN. */
static inline float exp2_(float x) {
    x = x < -127.0f ? -127.0f : x;
    float n = floorf(x + 0.5f), r = x - n, p = 1.326472e-3f, two_n;
    p = p * r + 9.671513e-3f, p = p * r + 5.5507336e-2f, p = p * r + 0.24022242f, p = p * r + 0.693147f, p = p * r + 1;
    uint32_t u = (uint32_t)((int32_t)n + 127) << 23;
    memcpy(&two_n, &u, 4);
    return p * two_n;
}

static inline float silu(float x) {              /* x / (1 + exp(-x)) */
    float power = -x * LOG2_E;
    return x / (1 + exp2_(power > 126 ? 126 : power));
}

/* -- 2. The register tile ----------------------------------------------------------------------------------------- */

/* c [rows][cols] = a [rows][depth] * b [depth][cols] is all of a transformer's arithmetic: q * K, p * V, x * W. It is
 * fast if a number, once in a register, is used often. A tile of HEIGHT rows and VECTORS vectors of c stays in
 * registers for the whole depth; each turn loads VECTORS vectors of b and HEIGHT numbers of a for HEIGHT * VECTORS
 * multiply-adds. (24 sums, 4 of b, one of a: 29 of the 32 vector registers of AVX-512 and NEON. With AVX2 12 + 2 + 1
 * of 16; what is older spills.)
 *
 * b is *packed*, laid out as it is read: row under row, STEP columns side by side. In bf16 some CPUs multiply pairs,
 * one instruction adding a0 * b0 + a1 * b1 to each fp32 sum: two rows of b are interleaved then, a *unit* is a pair,
 * and depth counts units. Other CPUs widen b to fp32 as they load it, and want a in fp32. */
enum {
#if defined(__AVX512F__)
    LANES = 16, VECTORS = 4,
#elif defined(__AVX__)
    LANES = 8, VECTORS = 2,
#else
    LANES = 4, VECTORS = 4,
#endif
    HEIGHT = 6, STEP = LANES * VECTORS
};
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if defined(BF16) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
enum { PER = 2 };                                /* elements of a unit */
typedef elem left;                               /* what a is made of */
typedef uint32_t left_unit __attribute__((may_alias)), right_unit __attribute__((may_alias));
typedef bits operand;
INLINE operand load(const right_unit *b) { return *(const bits *)b; }
#ifdef __AVX512BF16__
INLINE vec multiply_add(vec sum, bits a, bits b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
INLINE vec multiply_add(vec sum, bits a, bits b) {
    return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif
#else
enum { PER = 1 };
typedef float left, left_unit;
typedef elem right_unit;
typedef vec operand;
#ifdef BF16
INLINE operand load(const elem *b) { return (vec)(__builtin_convertvector(*(const halves *)b, bits) << 16); }
#else
INLINE operand load(const elem *b) { return *(const vec *)b; }
#endif
INLINE vec multiply_add(vec sum, vec a, vec b) { return sum + a * b; }
#endif

/* One tile; inlined for each height, which the compiler thus knows. add: to what c holds, else to 0. */
INLINE void tile(int height, long depth, const left_unit *a, long a_row, const right_unit *b, long b_row, float *c,
                 long c_row, int add) {
    vec sum[HEIGHT][VECTORS];
    UNROLL
    for (int m = 0; m < height; m++)
        UNROLL
        for (int n = 0; n < VECTORS; n++) sum[m][n] = add ? *(vec *)(c + m * c_row + n * LANES) : (vec){0};
    for (long k = 0; k < depth; k++) {
        operand right[VECTORS];
        UNROLL
        for (int n = 0; n < VECTORS; n++) right[n] = load(b + k * b_row + n * LANES);
        UNROLL
        for (int m = 0; m < height; m++) {
            operand same = a[m * a_row + k] - (operand){0};          /* in every lane */
            UNROLL
            for (int n = 0; n < VECTORS; n++) sum[m][n] = multiply_add(sum[m][n], same, right[n]);
        }
    }
    UNROLL
    for (int m = 0; m < height; m++)
        UNROLL
        for (int n = 0; n < VECTORS; n++) *(vec *)(c + m * c_row + n * LANES) = sum[m][n];
}

/* Any number of rows; cols is a multiple of STEP, and a_row is from one row of a to the next. An element of c is one
 * sum along the depth, front to back, whatever the tile's height: its bits don't depend on the other rows. */
static __attribute__((noinline)) void product(long rows, long cols, long depth, const left_unit *a, long a_row,
                                              const right_unit *b, long b_row, float *c, long c_row, int add) {
    #define TILE(height) case height: \
        tile(height, depth, a + i * a_row, a_row, b + j, b_row, c + i * c_row + j, c_row, add); break;
    for (long j = 0; j < cols; j += STEP)
        for (long i = 0; i < rows; i += HEIGHT)
            switch (MIN(rows - i, HEIGHT)) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
}
