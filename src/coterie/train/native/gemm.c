/* Products of small matrices, C[rows, cols] = A B, with sums in registers and columns in vector lanes.
 *
 * A is read number by number, with any steps between rows and along the sum; rows of B are read in whole vectors, so
 * memory behind B (and behind a bias) must be readable for one vector. Only real columns are written. Every number of C
 * is one chain of additions in the order of the sum, so it does not depend on the number of rows or on their tiles.
 */
#ifdef ISA_AVX512
#define WIDE 16
#define MOST 24 /* sums that fit into the registers beside the operands */
#else
#define WIDE 8
#define MOST 12
#endif

typedef float wide __attribute__((vector_size(4 * WIDE)));
typedef float loose_wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

INLINE wide get(const float *p) { return *(const loose_wide *)p; }
INLINE void put(float *p, wide v) { *(loose_wide *)p = v; }
#ifdef ISA_AVX512
INLINE wide every(float s) { return (wide){s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}; }
#else
INLINE wide every(float s) { return splat(s); }
#endif
#define UNROLL _Pragma("GCC unroll 12")

enum { SET, ADD, STEP }; /* C = AB; C += AB; C = keep C - rate AB */

typedef struct {
    int64_t rows, cols, sum;
    const float *a;
    int64_t arow, astep; /* floats between the rows of A, and along the sum */
    const float *b;
    int64_t brow;
    float *c;
    int64_t crow;
    const float *bias;    /* one per column, or NULL */
    const float *rowbias; /* one per row, or NULL */
    int mode;
    float keep, rate;
} product;

/* T rows times V vectors of columns; the last vector has `last` columns. */
INLINE void product_tile(const int T, const int V, const product *p, int64_t i, int64_t j, int64_t last) {
    wide sum[MOST];
    const int64_t arow = p->arow, astep = p->astep, brow = p->brow;
    const float *b = p->b + j, *a[4]; /* row t is a[t / 3] + t % 3 rows: addresses of few registers */
    UNROLL
    for (int q = 0; q < 4; q++) a[q] = p->a + (i + 3 * q) * arow;
    UNROLL
    for (int t = 0; t < T; t++)
        UNROLL
        for (int v = 0; v < V; v++)
            sum[t * V + v] = p->bias ? get(p->bias + j + v * WIDE) : every(p->rowbias ? p->rowbias[i + t] : 0);
    ASSUME(p->sum > 0);
    for (int64_t k = p->sum; k > 0; k--, b += brow) {
        wide u[3];
        UNROLL
        for (int v = 0; v < V; v++) {
            u[v] = get(b + v * WIDE);
#if defined(ISA_AVX512) || defined(ISA_AVX2)
            __asm__("" : "+v"(u[v]));
#endif
        }
        UNROLL
        for (int t = 0; t < T; t++) {
            const wide s = every(a[t / 3][t % 3 * arow]);
            UNROLL
            for (int v = 0; v < V; v++) sum[t * V + v] += s * u[v];
        }
        UNROLL
        for (int q = 0; q < 4; q++) a[q] += astep;
    }
    UNROLL
    for (int t = 0; t < T; t++)
        UNROLL
        for (int v = 0; v < V; v++) {
            float *c = p->c + (i + t) * p->crow + j + v * WIDE;
            wide s = sum[t * V + v];
            if (v == V - 1 && last < WIDE) {
                float old[WIDE], new[WIDE];
                memcpy(new, &s, sizeof new);
                memset(old, 0, sizeof old);
                if (p->mode != SET) memcpy(old, c, sizeof(float) * last);
                if (p->mode == ADD) put(new, get(old) + s);
                if (p->mode == STEP) put(new, every(p->keep) * get(old) - every(p->rate) * s);
                memcpy(c, new, sizeof(float) * last);
                continue;
            }
            if (p->mode == ADD) s += get(c);
            if (p->mode == STEP) s = every(p->keep) * get(c) - every(p->rate) * s;
            put(c, s);
        }
}

#define G(T, V) case T * 4 + V: product_tile(T, V, p, i, j, last); break;

static void product_any(int64_t T, int64_t V, const product *p, int64_t i, int64_t j, int64_t last) {
    switch (T * 4 + V) {
        G(1, 1) G(2, 1) G(3, 1) G(4, 1) G(5, 1) G(6, 1) G(7, 1) G(8, 1) G(9, 1) G(10, 1) G(11, 1) G(12, 1)
        G(1, 2) G(2, 2) G(3, 2) G(4, 2) G(5, 2) G(6, 2)
#ifdef ISA_AVX512
        G(7, 2) G(8, 2) G(9, 2) G(10, 2) G(11, 2) G(12, 2)
        G(1, 3) G(2, 3) G(3, 3) G(4, 3) G(5, 3) G(6, 3) G(7, 3) G(8, 3)
#endif
    }
}

static void multiply(const product *p) {
    const int64_t vecs = pieces(p->cols, WIDE), broad = MOST == 24 && p->rows > 12 ? 3 : 2;
    const int64_t panels = pieces(vecs, broad);
    for (int64_t q = 0; q < panels; q++) {
        const int64_t v = cut(vecs, panels, q), V = cut(vecs, panels, q + 1) - v;
        const int64_t last = q + 1 < panels ? WIDE : p->cols - (vecs - 1) * WIDE;
        const int64_t parts = pieces(p->rows, V == 1 ? 12 : MOST / V);
        for (int64_t r = 0; r < parts; r++) {
            const int64_t i = cut(p->rows, parts, r), T = cut(p->rows, parts, r + 1) - i;
            product_any(T, V, p, i, v * WIDE, last);
        }
    }
}

/* out[j, i] = in[i, j] */
static void transpose(const float *in, int64_t rows, int64_t cols, int64_t step, float *out, int64_t out_step) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < cols; j += LANES) {
            if (rows < LANES || cols < LANES) {
                for (int64_t a = i; a < least(i + LANES, rows); a++)
                    for (int64_t b = j; b < least(j + LANES, cols); b++) out[b * out_step + a] = in[a * step + b];
                continue;
            }
            const int64_t a = least(i, rows - LANES), b = least(j, cols - LANES); /* the last blocks overlap */
            vec r[LANES];
            for (int l = 0; l < LANES; l++) r[l] = load(in + (a + l) * step + b);
            transpose8(r);
            for (int l = 0; l < LANES; l++) store(out + (b + l) * out_step + a, r[l]);
        }
}

/* Sum of n numbers minus `from`, or of their squares; sum of products. Four sums hide the time of an addition. */
static float add(const float *p, int64_t n, float from, int square) {
    vec s[4] = {splat(0), splat(0), splat(0), splat(0)};
    const vec f = splat(from);
    float rest = 0;
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const vec d = load(p + i + j * LANES) - f;
            s[j] += square ? d * d : d;
        }
    for (; i < n; i++) rest += square ? (p[i] - from) * (p[i] - from) : p[i] - from;
    return total((s[0] + s[1]) + (s[2] + s[3])) + rest;
}

static float dot(const float *p, const float *q, int64_t n, float from) {
    vec s[4] = {splat(0), splat(0), splat(0), splat(0)};
    const vec f = splat(from);
    float rest = 0;
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) s[j] += load(p + i + j * LANES) * (load(q + i + j * LANES) - f);
    for (; i < n; i++) rest += p[i] * (q[i] - from);
    return total((s[0] + s[1]) + (s[2] + s[3])) + rest;
}
