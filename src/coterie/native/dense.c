/* Vectors and the three dense convolution kernels (forward, gradient of the input, gradient of the weight).
 *
 * Inside, images are padded and channels last: a row holds (w + 2 pad) * ic floats, so the taps of one kernel row are
 * `run` = k * ic neighbouring floats, and a convolution is k products of [pixels, run] with [run, oc]. Output channels
 * sit in vector lanes (oc rounded up to whole vectors), sums stay in registers: tiles of at most 12 vectors, which is
 * what 16 registers hold beside the operands. Tile sizes are constants of inlined functions, so loops over them unroll.
 */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define TILE 12

typedef float vec __attribute__((vector_size(32)));
typedef int32_t ivec __attribute__((vector_size(32)));
typedef float loose_vec __attribute__((vector_size(32), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const loose_vec *)p; }
INLINE void store(float *p, vec v) { *(loose_vec *)p = v; }
INLINE vec splat(float s) { return (vec){s, s, s, s, s, s, s, s}; }
INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE float total(vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
/* Where piece i of n things cut into `parts` nearly equal pieces begins. */
INLINE int64_t cut(int64_t n, int64_t parts, int64_t i) { return n * i / parts; }

/* T neighbouring pixels times V vectors of output channels; w is [k, run, V]. */
INLINE void forward_tile(const int T, const int V, const float *x, int64_t step, int64_t row, int64_t k, int64_t run,
                         const float *w, const float *bias, float *z, int64_t zstep) {
    vec sum[TILE];
    for (int i = 0; i < T; i++)
        for (int v = 0; v < V; v++) sum[i * V + v] = load(bias + v * LANES);
    for (int64_t ky = 0; ky < k; ky++, x += row)
        for (int64_t t = 0; t < run; t++, w += V * LANES)
            for (int i = 0; i < T; i++) {
                const vec s = splat(x[i * step + t]);
                for (int v = 0; v < V; v++) sum[i * V + v] += s * load(w + v * LANES);
            }
    for (int i = 0; i < T; i++)
        for (int v = 0; v < V; v++) store(z + i * zstep + v * LANES, sum[i * V + v]);
}

#define F2(T) case T: forward_tile(T, 2, x, ic, row, k, run, w, bias, z, ocp); break;
#define F1(T) case T: forward_tile(T, 1, x, ic, row, k, run, w, bias, z, ocp); break;
#define F1S(T) case T: forward_tile(T, 1, x, 1, row, 5, 5, w, bias, z, ocp); break;

static void forward_pair(int64_t T, const float *x, int64_t ic, int64_t row, int64_t k, int64_t run, const float *w,
                         const float *bias, float *z, int64_t ocp) {
    switch (T) { F2(1) F2(2) F2(3) F2(4) F2(5) F2(6) }
}

static void forward_one(int64_t T, const float *x, int64_t ic, int64_t row, int64_t k, int64_t run, const float *w,
                        const float *bias, float *z, int64_t ocp) {
    if (ic == 1 && k == 5) /* grey images: the first layer of LeNet5 */
        switch (T) { F1S(1) F1S(2) F1S(3) F1S(4) F1S(5) F1S(6) F1S(7) F1S(8) F1S(9) F1S(10) F1S(11) F1S(12) }
    else
        switch (T) { F1(1) F1(2) F1(3) F1(4) F1(5) F1(6) F1(7) F1(8) F1(9) F1(10) F1(11) F1(12) }
}

/* z[oh, ow, ocp] of one image; w holds pairs of vectors of channels first, a single one last. */
static void conv_forward(const float *x, int64_t ic, int64_t row, int64_t k, const float *w, const float *bias,
                         float *z, int64_t oh, int64_t ow, int64_t ocp) {
    const int64_t run = k * ic;
    for (int64_t c = 0; c < ocp; c += 2 * LANES) {
        const int pair = c + LANES < ocp;
        const int64_t parts = pieces(ow, pair ? TILE / 2 : TILE);
        for (int64_t y = 0; y < oh; y++)
            for (int64_t i = 0; i < parts; i++) {
                const int64_t a = cut(ow, parts, i), T = cut(ow, parts, i + 1) - a;
                (pair ? forward_pair : forward_one)(T, x + y * row + a * ic, ic, row, k, run, w + c * k * run, bias + c,
                                                    z + (y * ow + a) * ocp + c, ocp);
            }
    }
}

/* T pixels below each other times V vectors of the run of one kernel row; w is [oc, V]. Pixels below each other reach
 * different rows of dx, and the neighbour's turn comes many cycles later, so no load waits for a fresh store. */
INLINE void input_tile(const int T, const int V, const float *dz, int64_t zrow, int64_t oc, const float *w, float *dx,
                       int64_t row) {
    vec sum[TILE];
    for (int i = 0; i < T * V; i++) sum[i] = splat(0);
    for (int64_t c = 0; c < oc; c++, w += V * LANES)
        for (int i = 0; i < T; i++) {
            const vec s = splat(dz[i * zrow + c]);
            for (int v = 0; v < V; v++) sum[i * V + v] += s * load(w + v * LANES);
        }
    for (int i = 0; i < T; i++)
        for (int v = 0; v < V; v++) {
            float *p = dx + i * row + v * LANES;
            store(p, load(p) + sum[i * V + v]);
        }
}

#define I(T, V) case T * 8 + V: input_tile(T, V, dz, zrow, oc, w, dx, row); break;

static void input_any(int64_t T, int64_t V, const float *dz, int64_t zrow, int64_t oc, const float *w, float *dx,
                      int64_t row) {
    switch (T * 8 + V) {
        I(1, 1) I(2, 1) I(3, 1) I(4, 1) I(5, 1) I(6, 1)
        I(1, 2) I(2, 2) I(3, 2) I(4, 2) I(5, 2) I(6, 2)
        I(1, 3) I(2, 3) I(3, 3) I(4, 3) I(1, 4) I(2, 4) I(3, 4)
    }
}

/* Adds the gradient of one image to dx [rows, row]; w is [k, blocks of at most 4 vectors of the run, oc, block]. */
static void conv_input(const float *dz, int64_t zrow, int64_t ocp, int64_t oh, int64_t ow, int64_t ic, int64_t k,
                       const float *w, int64_t oc, float *dx, int64_t row) {
    const int64_t vecs = pieces(k * ic, LANES), blocks = pieces(vecs, 4);
    for (int64_t ky = 0; ky < k; ky++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t v0 = cut(vecs, blocks, b), V = cut(vecs, blocks, b + 1) - v0;
            const int64_t parts = pieces(oh, V == 1 ? 6 : TILE / V);
            for (int64_t i = 0; i < parts; i++) {
                const int64_t y = cut(oh, parts, i), T = cut(oh, parts, i + 1) - y;
                for (int64_t x = 0; x < ow; x++)
                    input_any(T, V, dz + y * zrow + x * ocp, zrow, oc, w + (ky * vecs + v0) * oc * LANES,
                              dx + (y + ky) * row + x * ic + v0 * LANES, row);
            }
        }
}

/* U taps of each of R kernel rows times V vectors of channels, summed over all pixels of an image. */
INLINE void weight_tile(const int R, const int U, const int V, const float *x, int64_t ic, int64_t row,
                        const float *dz, int64_t zrow, int64_t ocp, int64_t oh, int64_t ow, float *dw, int64_t run) {
    vec sum[TILE];
    for (int i = 0; i < R * U * V; i++) sum[i] = splat(0);
    for (int64_t y = 0; y < oh; y++) {
        const float *p = x + y * row, *q = dz + y * zrow;
        for (int64_t i = 0; i < ow; i++, p += ic, q += ocp)
            for (int r = 0; r < R; r++)
                for (int u = 0; u < U; u++) {
                    const vec s = splat(p[r * row + u]);
                    for (int v = 0; v < V; v++) sum[(r * U + u) * V + v] += s * load(q + v * LANES);
                }
    }
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++)
            for (int v = 0; v < V; v++) {
                float *p = dw + (r * run + u) * ocp + v * LANES;
                store(p, load(p) + sum[(r * U + u) * V + v]);
            }
}

#define W(R, U, V) weight_tile(R, U, V, x, ic, row, dz, zrow, ocp, oh, ow, dw, run)
#define W2(U) case U: W(1, U, 2); break;
#define W1(U) case U: W(1, U, 1); break;

static void weight_taps(int64_t R, int64_t U, int pair, const float *x, int64_t ic, int64_t row, const float *dz,
                        int64_t zrow, int64_t ocp, int64_t oh, int64_t ow, float *dw, int64_t run) {
    if (R == 2) W(2, 5, 1);
    else if (R == 3) W(3, 3, 1);
    else if (pair) switch (U) { W2(1) W2(2) W2(3) W2(4) W2(5) W2(6) }
    else switch (U) { W1(1) W1(2) W1(3) W1(4) W1(5) W1(6) W1(7) W1(8) W1(9) W1(10) W1(11) W1(12) }
}

/* Adds the gradient of one image to dw [k, run, ocp]. */
static void conv_weight(const float *x, int64_t ic, int64_t row, const float *dz, int64_t zrow, int64_t ocp,
                        int64_t oh, int64_t ow, int64_t k, float *dw) {
    const int64_t run = k * ic;
    for (int64_t c = 0; c < ocp; c += 2 * LANES) {
        const int pair = c + LANES < ocp;
        const int64_t parts = pieces(run, pair ? TILE / 2 : TILE);
        for (int64_t ky = 0; ky < k;) {
            int64_t R = 1; /* a run of 5 or 3 taps alone would leave most registers idle: take rows together */
            if (!pair && run == 5 && ky + 2 <= k) R = 2;
            if (!pair && run == 3 && k == 3) R = 3;
            for (int64_t i = 0; i < parts; i++) {
                const int64_t u = cut(run, parts, i), U = cut(run, parts, i + 1) - u;
                weight_taps(R, U, pair, x + ky * row + u, ic, row, dz + c, zrow, ocp, oh, ow,
                            dw + (ky * run + u) * ocp + c, run);
            }
            ky += R;
        }
    }
}
