/* linear and paged_attention against sums in double, as a program: for CPUs that only an emulator has here. Prints the
 * two largest differences. Compiled by test_cpu_kernels.py with cpu_kernels.c beside it and the same -D options. */
#include "../cpu_kernels.c"
#include <stdio.h>

static elem *numbers(long n, float scale) {
    elem *x = malloc(n * sizeof(elem));
    for (long i = 0; i < n; i++) x[i] = put(scale * (2 * (float)rand() / RAND_MAX - 1));
    return x;
}

static double test_linear(long T, long n_out, long n_in, int gated) {
    elem *w = numbers(n_out * n_in, 1), *bias = numbers(n_out, 1), *x = numbers(T * n_in, 1);
    elem *packed = aligned_alloc(64, pad(packed_size(n_out, n_in, gated), 64)), *y = malloc(T * n_out * sizeof(elem));
    left *a = malloc(T * n_in * sizeof(left));
    for (long i = 0; i < T * n_in; i++) a[i] = PER == 2 ? x[i] : get(x[i]);
    pack_weight(n_out, n_in, gated, w, packed);
    linear(T, n_out, n_in, gated, packed, bias, a, y);
    long columns = gated ? n_out / 2 : n_out;
    double worst = 0;
    for (long t = 0; t < T; t++)
        for (long c = 0; c < columns; c++) {
            double gate = get(bias[c]), up = gated ? get(bias[c + columns]) : 0;
            for (long i = 0; i < n_in; i++) gate += (double)get(x[t * n_in + i]) * get(w[c * n_in + i]);
            for (long i = 0; gated && i < n_in; i++) up += (double)get(x[t * n_in + i]) * get(w[(c + columns) * n_in + i]);
            double want = gated ? gate / (1 + exp(-gate)) * up : gate, e = fabs(get(y[t * columns + c]) - want) / (1 + fabs(want));
            worst = e <= worst ? worst : e;          /* a NaN becomes the worst */
        }
    return worst;
}

static double test_attention(void) {
    enum { S = 4, Hkv = 2, H = Hkv * G, BS = 5, WIDTH = 60, BLOCKS = 120 };
    int32_t lens[S] = {300, 1, 77, 0}, starts[S + 1] = {0, 1, 2, 42, 43}, tables[S * WIDTH] = {0}, next = 1;
    elem *k = malloc(BLOCKS * BS * Hkv * D * sizeof(elem)), *v = malloc(BLOCKS * BS * Hkv * D * sizeof(elem));
    elem *q = numbers(43 * H * D, 3), *out = malloc(43 * H * D * sizeof(elem));
    for (long i = 0; i < BLOCKS * BS * Hkv * D; i++) k[i] = v[i] = put(NAN);
    for (int s = 0; s < S; s++)
        for (int p = 0; p < lens[s]; p++) {
            if (p % BS == 0) tables[s * WIDTH + p / BS] = next++;
            long at = (tables[s * WIDTH + p / BS] * BS + p % BS) * Hkv * D;
            memcpy(k + at, numbers(Hkv * D, 1), Hkv * D * sizeof(elem)), memcpy(v + at, numbers(Hkv * D, 1), Hkv * D * sizeof(elem));
        }
    paged_attention(S, H, Hkv, BS, WIDTH, starts, lens, tables, q, k, v, out, 1 / sqrtf(D));
    double worst = 0;
    for (int s = 0; s < S; s++)
        for (long row = starts[s]; row < starts[s + 1]; row++)
            for (long h = 0; h < H; h++) {
                int visible = lens[s] - (starts[s + 1] - row) + 1;
                double sum = 0, acc[D] = {0};
                for (int p = 0; p < visible; p++) {
                    long at = ((tables[s * WIDTH + p / BS] * BS + p % BS) * Hkv + h / G) * D;
                    double score = 0;
                    for (int i = 0; i < D; i++) score += (double)get(q[(row * H + h) * D + i]) * get(k[at + i]);
                    double weight = exp(score / sqrt(D));
                    sum += weight;
                    for (int i = 0; i < D; i++) acc[i] += weight * get(v[at + i]);
                }
                for (int i = 0; i < D; i++) {
                    double e = fabs(get(out[(row * H + h) * D + i]) - (visible > 0 ? acc[i] / sum : 0));
                    worst = e <= worst ? worst : e;
                }
            }
    return worst;
}

int main(void) {
    double worst = 0;
    for (int T = 1; T < 14; T += 4)
        for (int gated = 0; gated < 2; gated++) {
            double e = test_linear(T, 70, 52, gated);
            worst = e <= worst ? worst : e;
        }
    printf("%g %g\n", worst, test_attention());
    return 0;
}
