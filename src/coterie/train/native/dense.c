/* Vectors and the three dense convolution kernels (forward, gradient of the input, gradient of the weight).
 *
 * Inside, images are padded and channels last: a row holds (w + 2 pad) * ic floats, so the taps of one kernel row are
 * `run` = k * ic neighbouring floats, and a convolution is k products of [pixels, run] with [run, oc]. Output channels
 * sit in vector lanes (oc rounded up to whole vectors), sums stay in registers: tiles of at most 12 vectors, which is
 * what 16 registers hold beside the operands. Tile sizes are constants of inlined functions, so loops over them unroll.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define ASSUME(x) if (!(x)) __builtin_unreachable() /* spares the sums a way round the loop through memory */
#define LANES 8
#define TILE 12

typedef float vec __attribute__((vector_size(32)));
typedef int32_t ivec __attribute__((vector_size(32)));
typedef float loose_vec __attribute__((vector_size(32), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const loose_vec *)p; }
INLINE void store(float *p, vec v) { *(loose_vec *)p = v; }
/* A load that stays in a register: compilers like to repeat it as an operand of every use, and loads are scarce. */
INLINE vec hold(const float *p) {
    vec v = load(p);
#ifdef __AVX__
    __asm__("" : "+x"(v));
#endif
    return v;
}
INLINE vec splat(float s) { return (vec){s, s, s, s, s, s, s, s}; }
INLINE vec pick(ivec mask, vec yes, vec no) {
#ifdef __AVX__
    return _mm256_blendv_ps(no, yes, (vec)mask);
#else
    return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask));
#endif
}
INLINE float total(vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Rows become columns of a block of 8 x 8. */
INLINE void transpose8(vec *r) {
    vec a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int h = 0; h < 8; h += 4)
        for (int i = 0; i < 2; i++) {
            b[h + 2 * i] = SHUFFLE(a[h + i], a[h + i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[h + 2 * i + 1] = SHUFFLE(a[h + i], a[h + i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        r[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
/* Where piece i of n things cut into `parts` nearly equal pieces begins. */
INLINE int64_t cut(int64_t n, int64_t parts, int64_t i) { return n * i / parts; }

/* T pixels times V vectors of output channels; w is [k, run, V]. x holds the pixels' first taps. */
INLINE void forward_tile(const int T, const int V, const float *const *x, int64_t row, int64_t k, int64_t run,
                         const float *w, const float *bias, float *z, int64_t zstep) {
    ASSUME(k > 0 && run > 0);
    vec sum[TILE];
    const float *p[TILE];
    for (int i = 0; i < T; i++) {
        p[i] = x[i];
        for (int v = 0; v < V; v++) sum[i * V + v] = load(bias + v * LANES);
    }
    for (int64_t ky = 0; ky < k; ky++) {
        for (int64_t t = 0; t < run; t++, w += V * LANES) {
            vec u[2];
            for (int v = 0; v < V; v++) u[v] = hold(w + v * LANES);
            for (int i = 0; i < T; i++) {
                const vec s = splat(p[i][t]);
                for (int v = 0; v < V; v++) sum[i * V + v] += s * u[v];
            }
        }
        for (int i = 0; i < T; i++) p[i] += row;
    }
    for (int i = 0; i < T; i++)
        for (int v = 0; v < V; v++) store(z + i * zstep + v * LANES, sum[i * V + v]);
}

#define PAIR(T) case T: forward_tile(T, 2, x, row, k, run, w, bias, z, ocp); break;
#define ONE(T) case T: forward_tile(T, 1, x, row, k, run, w, bias, z, ocp); break;
static void forward_pair(int64_t T, const float *const *x, int64_t row, int64_t k, int64_t run, const float *w,
                         const float *bias, float *z, int64_t ocp) {
    switch (T) { PAIR(1) PAIR(2) PAIR(3) PAIR(4) PAIR(5) PAIR(6) }
}

static void forward_one(int64_t T, const float *const *x, int64_t row, int64_t k, int64_t run, const float *w,
                        const float *bias, float *z, int64_t ocp) {
    switch (T) { ONE(1) ONE(2) ONE(3) ONE(4) ONE(5) ONE(6) ONE(7) ONE(8) ONE(9) ONE(10) }
}

/* z[oh, ow, ocp] of one image; w holds pairs of vectors of channels first, a single one last. */
static void conv_forward(const float *x, int64_t ic, int64_t row, int64_t k, const float *w, const float *bias,
                         float *z, int64_t oh, int64_t ow, int64_t ocp) {
    const int64_t run = k * ic, pixels = oh * ow;
    for (int64_t c = 0; c < ocp; c += 2 * LANES, w += 2 * LANES * k * run) {
        const int pair = c + LANES < ocp;
        const int64_t parts = pieces(pixels, pair ? 6 : 10); /* as many as there are registers for sums or pointers */
        const float *at = x;
        int64_t column = 0;
        for (int64_t i = 0; i < parts; i++) {
            const int64_t a = cut(pixels, parts, i), T = cut(pixels, parts, i + 1) - a;
            const float *first[TILE];
            for (int64_t j = 0; j < T; j++) {
                first[j] = at, at += ic;
                if (++column == ow) column = 0, at += (k - 1) * ic;
            }
            (pair ? forward_pair : forward_one)(T, first, row, k, run, w, bias + c, z + a * ocp + c, ocp);
        }
    }
}

/* Up to six output channels would waste lanes: here lanes are neighbouring pixels of an unpadded channels-first image.
 * Two vectors of them, each times C channels; w is [ic, k, k, C]. */
INLINE void narrow_tile(const int C, const float *const *x, int64_t ic, int64_t h, int64_t w, int64_t k,
                        const float *weight, const float *bias, float *const *z) {
    ASSUME(ic > 0 && k > 0);
    vec a[LANES], b[LANES];
    const float *p = x[0], *q = x[1];
    for (int c = 0; c < LANES; c++) a[c] = b[c] = splat(c < C ? bias[c] : 0);
    for (int64_t i = 0; i < ic; i++, p += (h - k) * w, q += (h - k) * w)
        for (int64_t ky = 0; ky < k; ky++, p += w, q += w)
            for (int64_t kx = 0; kx < k; kx++, weight += C) {
                const vec s = hold(p + kx), t = hold(q + kx);
                for (int c = 0; c < C; c++) {
                    const vec u = splat(weight[c]);
                    a[c] += u * s, b[c] += u * t;
                }
            }
    transpose8(a), transpose8(b);
    for (int i = 0; i < LANES; i++) store(z[0] + i * LANES, a[i]);
    for (int i = 0; i < LANES; i++) store(z[1] + i * LANES, b[i]);
}

#define NARROW(C) case C: narrow_tile(C, from, ic, h, w, k, weight, bias, to); break;

INLINE int narrow(int64_t oc, int64_t pad, int64_t ow) { return oc <= TILE / 2 && pad == 0 && ow >= LANES; }

/* The same as conv_forward where narrow() holds. The last vector of a row overlaps the one before. */
static void conv_narrow(const float *x, int64_t ic, int64_t h, int64_t w, int64_t k, const float *weight, int64_t oc,
                        const float *bias, float *z, int64_t oh, int64_t ow) {
    const int64_t vecs = pieces(ow, LANES), all = oh * vecs;
    for (int64_t i = 0; i < all; i += 2) {
        const float *from[2];
        float *to[2];
        for (int j = 0; j < 2; j++) {
            const int64_t at = least(i + j, all - 1), y = at / vecs, first = least(at % vecs * LANES, ow - LANES);
            from[j] = x + y * w + first, to[j] = z + (y * ow + first) * LANES;
        }
        switch (oc) { NARROW(1) NARROW(2) NARROW(3) NARROW(4) NARROW(5) NARROW(6) }
    }
}

/* T pixels below each other times V vectors of the run of one kernel row; w is [oc, V]. Pixels below each other reach
 * different rows of dx, and the neighbour's turn comes many cycles later, so no load waits for a fresh store. */
INLINE void input_tile(const int T, const int V, const float *dz, int64_t zrow, int64_t oc, const float *w, float *dx,
                       int64_t row) {
    ASSUME(oc > 0);
    vec sum[TILE];
    for (int i = 0; i < T * V; i++) sum[i] = splat(0);
    for (int64_t c = 0; c < oc; c++, dz++, w += V * LANES) {
        vec s[TILE];
        for (int i = 0; i < T; i++) s[i] = splat(dz[i * zrow]);
        for (int v = 0; v < V; v++) {
            const vec u = hold(w + v * LANES);
            for (int i = 0; i < T; i++) sum[i * V + v] += s[i] * u;
        }
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
    ASSUME(oh > 0 && ow > 0);
    vec sum[TILE];
    for (int i = 0; i < R * U * V; i++) sum[i] = splat(0);
    for (int64_t y = 0; y < oh; y++) {
        const float *p = x + y * row, *q = dz + y * zrow;
        for (int64_t i = 0; i < ow; i++, p += ic, q += ocp) {
            vec g[2];
            for (int v = 0; v < V; v++) g[v] = hold(q + v * LANES);
            for (int r = 0; r < R; r++)
                for (int u = 0; u < U; u++) {
                    const vec s = splat(p[r * row + u]);
                    for (int v = 0; v < V; v++) sum[(r * U + u) * V + v] += s * g[v];
                }
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
