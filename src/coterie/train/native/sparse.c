/* Gradients that visit only the one position per pooling window that has one (no batch norm, or batch norm in
 * evaluation mode): a quarter of the positions, fewer where ReLU is silent. Lanes run along a kernel row here. */

typedef struct { int32_t at; float g; } hit; /* at: an offset in floats */

/* R kernel rows times V vectors of the run of one output channel, summed over the hits of an image. */
INLINE void sparse_weight_tile(const int R, const int V, const float *x, int64_t row, const hit *hits, int64_t n,
                               float *dw, int64_t wrow) {
    ASSUME(n > 0);
    vec sum[TILE];
    for (int i = 0; i < R * V; i++) sum[i] = splat(0);
    for (int64_t i = 0; i < n; i++) {
        const float *p = x + hits[i].at;
        const vec g = splat(hits[i].g);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r * V + v] += g * load(p + r * row + v * LANES);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float *p = dw + r * wrow + v * LANES;
            store(p, load(p) + sum[r * V + v]);
        }
}

#define S(R, V) case R * 16 + V: sparse_weight_tile(R, V, x, row, hits, n, dw, wrow); break;

static void sparse_weight_any(int64_t R, int64_t V, const float *x, int64_t row, const hit *hits, int64_t n, float *dw,
                              int64_t wrow) {
    switch (R * 16 + V) {
        S(5, 1) S(3, 1) S(2, 1) S(1, 1) S(5, 2) S(3, 2) S(2, 2) S(1, 2) S(3, 3) S(2, 3) S(1, 3) S(3, 4) S(2, 4) S(1, 4)
        S(2, 5) S(1, 5) S(2, 6) S(1, 6) S(1, 7) S(1, 8) S(1, 9) S(1, 10) S(1, 11) S(1, 12)
    }
}

/* Adds the gradient of one image and one output channel to dw [k, vecs]. */
static void sparse_weight(const float *x, int64_t row, int64_t k, int64_t vecs, const hit *hits, int64_t n, float *dw) {
    const int64_t wrow = vecs * LANES, blocks = pieces(vecs, TILE);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t v = cut(vecs, blocks, b), V = cut(vecs, blocks, b + 1) - v;
        const int64_t most = V <= 2 ? 5 : V <= 4 ? 3 : V <= 6 ? 2 : 1;
        for (int64_t ky = 0; ky < k;) {
            int64_t R = least(most, k - ky);
            if (R == 4) R = 2;
            sparse_weight_any(R, V, x + ky * row + v * LANES, row, hits, n, dw + ky * wrow + v * LANES, wrow);
            ky += R;
        }
    }
}

/* Two rows times V vectors of the patch of dx that a window can reach, summed over its channels' hits. */
INLINE void sparse_input_tile(const int V, const float *w, int64_t wrow, const hit *hits, int64_t n, float *dx,
                              int64_t row) {
    ASSUME(n > 0);
    vec sum[TILE];
    for (int i = 0; i < 2 * V; i++) sum[i] = splat(0);
    for (int64_t i = 0; i < n; i++) {
        const float *p = w + hits[i].at;
        const vec g = splat(hits[i].g);
        for (int r = 0; r < 2; r++)
            for (int v = 0; v < V; v++) sum[r * V + v] += g * load(p + r * wrow + v * LANES);
    }
    for (int r = 0; r < 2; r++)
        for (int v = 0; v < V; v++) {
            float *p = dx + r * row + v * LANES;
            store(p, load(p) + sum[r * V + v]);
        }
}

#define P(V) case V: sparse_input_tile(V, p, wrow, hits, n, q, row); break;

/* Adds the gradient of one window to dx. w is [oc, k + 2, wrow]: each kernel inside a frame of zeros one pixel wide,
 * so that all four positions of a window are shifts of the same patch of (k + 1) x (k + 1) pixels. */
static void sparse_input(const float *w, int64_t k, int64_t vecs, int64_t wrow, const hit *hits, int64_t n, float *dx,
                         int64_t row) {
    const int64_t blocks = pieces(vecs, TILE / 2);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t v = cut(vecs, blocks, b), V = cut(vecs, blocks, b + 1) - v;
        for (int64_t r = 0; r < k + 1; r += 2) {
            const float *p = w + r * wrow + v * LANES;
            float *q = dx + r * row + v * LANES;
            switch (V) { P(1) P(2) P(3) P(4) P(5) P(6) }
        }
    }
}
