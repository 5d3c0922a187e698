/* The layers of a chain, forward and backward, on batches of items that follow each other in memory.
 *
 * An item is [channels, height, width]; behind a linear layer it is [features] and takes up whole vectors.
 */

enum { BLOCK, CONV, NORM, GROUP, RELU, MAX_POOL, MEAN_POOL, LINEAR };

typedef struct { /* mirrored by library.Layer */
    int64_t kind, ic, h, w, oc, oh, ow; /* shapes of an item before and after */
    int64_t kh, kw, sh, sw, ph, pw, dh, dw, groups;
    int64_t mode; /* norms: PLAIN, EVAL or TRAIN; mean pool: 1 if padding counts, 2 if adaptive */
    int64_t weight, bias, gamma, beta, mean, var; /* numbers of entries, -1: none */
    double eps, momentum;
} layer;

typedef struct {
    const layer *o;
    float *x, *y;     /* the same memory for ReLU */
    int64_t xs, ys;   /* floats from one item to the next */
    float *save;      /* what backward needs: of a block, or statistics of a norm */
    int32_t *at;      /* places of maxima */
    float *weight, *bias, *gamma, *beta, *mean, *var;       /* NULL: none */
    float *dweight, *dbias, *dgamma, *dbeta;                /* NULL: not wanted */
    int needs_dx;
    int step;         /* move the weight at once instead of writing its gradient */
    float keep, rate;
} stage;

INLINE int64_t whole(int64_t n) { return pieces(n, WIDE) * WIDE; }
INLINE int64_t area_in(const layer *o) { return o->h * o->w; }
INLINE int64_t area_out(const layer *o) { return o->oh * o->ow; }

static call block_call(const stage *s, int64_t n, int keep, float *scratch) {
    const layer *o = s->o;
    call c = {.n = n, .ic = o->ic, .h = o->h, .w = o->w, .oc = o->oc, .k = o->kh, .pad = o->ph, .mode = o->mode,
              .keep = keep, .eps = o->eps, .momentum = o->momentum, .x = s->x, .weight = s->weight, .bias = s->bias,
              .gamma = s->gamma, .beta = s->beta, .running_mean = s->mean, .running_var = s->var, .y = s->y,
              .save = s->save, .scratch = scratch};
    return c;
}

/* ---- convolution ------------------------------------------------------------------------------------------------ */
INLINE int64_t taps(const layer *o) { return o->ic / o->groups * o->kh * o->kw; }

/* col[tap, pixel] of one group of one item; columns fill whole vectors */
static void unfold(const layer *o, const float *x, float *col) {
    const int64_t step = whole(area_out(o));
    for (int64_t c = 0; c < o->ic / o->groups; c++, x += area_in(o))
        for (int64_t ky = 0; ky < o->kh; ky++)
            for (int64_t kx = 0; kx < o->kw; kx++, col += step)
                for (int64_t y = 0; y < o->oh; y++) {
                    const int64_t from = y * o->sh - o->ph + ky * o->dh;
                    float *to = col + y * o->ow;
                    for (int64_t i = 0; i < o->ow; i++) {
                        const int64_t at = i * o->sw - o->pw + kx * o->dw;
                        to[i] = from < 0 || from >= o->h || at < 0 || at >= o->w ? 0 : x[from * o->w + at];
                    }
                }
}

/* Adds col to where its numbers came from. */
static void fold(const layer *o, const float *col, float *dx) {
    const int64_t step = whole(area_out(o));
    for (int64_t c = 0; c < o->ic / o->groups; c++, dx += area_in(o))
        for (int64_t ky = 0; ky < o->kh; ky++)
            for (int64_t kx = 0; kx < o->kw; kx++, col += step)
                for (int64_t y = 0; y < o->oh; y++) {
                    const int64_t to = y * o->sh - o->ph + ky * o->dh;
                    if (to < 0 || to >= o->h) continue;
                    for (int64_t i = 0; i < o->ow; i++) {
                        const int64_t at = i * o->sw - o->pw + kx * o->dw;
                        if (at >= 0 && at < o->w) dx[to * o->w + at] += col[y * o->ow + i];
                    }
                }
}

static void conv_layer(const stage *s, int64_t n, float *scratch) {
    const layer *o = s->o;
    const int64_t K = taps(o), p = area_out(o), oc = o->oc / o->groups, ic = o->ic / o->groups;
    for (int64_t i = 0; i < n; i++)
        for (int64_t g = 0; g < o->groups; g++) {
            unfold(o, s->x + i * s->xs + g * ic * area_in(o), scratch);
            const product y = {.rows = oc, .cols = p, .sum = K, .a = s->weight + g * oc * K, .arow = K, .astep = 1,
                               .b = scratch, .brow = whole(p), .c = s->y + i * s->ys + g * oc * p, .crow = p,
                               .rowbias = s->bias ? s->bias + g * oc : 0};
            multiply(&y);
        }
}

static void conv_back(const stage *s, int64_t n, const float *dy, float *dx, float *scratch) {
    const layer *o = s->o;
    const int64_t K = taps(o), p = area_out(o), oc = o->oc / o->groups, ic = o->ic / o->groups;
    float *col = scratch, *row = col + K * whole(p) + WIDE;
    if (s->dbias) memset(s->dbias, 0, sizeof(float) * o->oc);
    if (dx) memset(dx, 0, sizeof(float) * n * s->xs);
    for (int64_t i = 0; i < n; i++) {
        const float *d = dy + i * s->ys;
        for (int64_t c = 0; s->dbias && c < o->oc; c++) s->dbias[c] += add(d + c * p, p, 0, 0);
        for (int64_t g = 0; g < o->groups; g++) {
            if (s->dweight) {
                unfold(o, s->x + i * s->xs + g * ic * area_in(o), col);
                transpose(col, K, p, whole(p), row, whole(K));
                const product w = {.rows = oc, .cols = K, .sum = p, .a = d + g * oc * p, .arow = p, .astep = 1, .b = row,
                                   .brow = whole(K), .c = s->dweight + g * oc * K, .crow = K, .mode = i ? ADD : SET};
                multiply(&w);
            }
            if (!dx) continue;
            const product x = {.rows = K, .cols = p, .sum = oc, .a = s->weight + g * oc * K, .arow = 1, .astep = K,
                               .b = d + g * oc * p, .brow = p, .c = col, .crow = whole(p)};
            multiply(&x);
            fold(o, col, dx + i * s->xs + g * ic * area_in(o));
        }
    }
}

/* ---- linear: the weight is kept as [inputs, outputs in whole vectors] -------------------------------------------- */
static void linear_layer(const stage *s, int64_t n) {
    const layer *o = s->o;
    const int64_t in = o->ic * area_in(o);
    const product y = {.rows = n, .cols = o->oc, .sum = in, .a = s->x, .arow = s->xs, .astep = 1, .b = s->weight,
                       .brow = whole(o->oc), .c = s->y, .crow = s->ys, .bias = s->bias};
    multiply(&y);
}

static void linear_back(const stage *s, int64_t n, const float *dy, float *dx, float *scratch) {
    const layer *o = s->o;
    const int64_t in = o->ic * area_in(o), out = whole(o->oc), np = whole(n);
    if (s->dbias) {
        memcpy(s->dbias, dy, sizeof(float) * o->oc);
        for (int64_t i = 1; i < n; i++)
            for (int64_t j = 0; j < o->oc; j++) s->dbias[j] += dy[i * s->ys + j];
    }
    if (dx) { /* items in the lanes, so that the weight is read as it is */
        float *dyt = scratch, *dxt = dyt + o->oc * np + WIDE;
        transpose(dy, n, o->oc, s->ys, dyt, np);
        const product x = {.rows = in, .cols = n, .sum = o->oc, .a = s->weight, .arow = out, .astep = 1, .b = dyt,
                           .brow = np, .c = dxt, .crow = np};
        multiply(&x);
        transpose(dxt, in, n, np, dx, s->xs);
    }
    if (s->dweight) {
        const product w = {.rows = in, .cols = o->oc, .sum = n, .a = s->x, .arow = 1, .astep = s->xs, .b = dy,
                           .brow = s->ys, .c = s->step ? s->weight : s->dweight, .crow = out,
                           .mode = s->step ? STEP : SET, .keep = s->keep, .rate = s->rate};
        multiply(&w);
    }
}

/* ---- batch norm: save is [mean, 1 / std] ------------------------------------------------------------------------- */
static void norm_layer(const stage *s, int64_t n, double *work) {
    const layer *o = s->o;
    const int64_t C = o->oc, p = area_out(o);
    const double m = (double)n * p;
    float *mean = s->save, *inv = mean + whole(C);
    for (int64_t c = 0; c < C && o->mode != TRAIN; c++)
        mean[c] = s->mean[c], inv[c] = (float)(1 / sqrt((double)s->var[c] + o->eps));
    if (o->mode == TRAIN) {
        double *sum = work, *squares = work + C;
        for (int64_t c = 0; c < 2 * C; c++) sum[c] = 0;
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < C; c++)
                sum[c] += p == 1 ? s->x[i * s->xs + c] : add(s->x + i * s->xs + c * p, p, 0, 0);
        for (int64_t c = 0; c < C; c++) mean[c] = (float)(sum[c] /= m);
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < C; c++) {
                const double d = s->x[i * s->xs + c] - sum[c];
                squares[c] += p == 1 ? d * d : add(s->x + i * s->xs + c * p, p, mean[c], 1);
            }
        for (int64_t c = 0; c < C; c++) {
            inv[c] = (float)(1 / sqrt(squares[c] / m + o->eps));
            if (!s->mean) continue;
            s->mean[c] = (float)((1 - o->momentum) * s->mean[c] + o->momentum * sum[c]);
            s->var[c] = (float)((1 - o->momentum) * s->var[c] + o->momentum * squares[c] / (m - 1));
        }
    }
    float *scale = (float *)(work + 2 * C), *shift = scale + C;
    for (int64_t c = 0; c < C; c++) {
        scale[c] = inv[c] * (s->gamma ? s->gamma[c] : 1);
        shift[c] = (s->beta ? s->beta[c] : 0) - mean[c] * scale[c];
    }
    for (int64_t i = 0; i < n; i++) {
        const float *x = s->x + i * s->xs;
        float *y = s->y + i * s->ys;
        if (p == 1)
            for (int64_t c = 0; c < C; c++) y[c] = x[c] * scale[c] + shift[c];
        else
            for (int64_t c = 0; c < C; c++)
                for (int64_t j = 0; j < p; j++) y[c * p + j] = x[c * p + j] * scale[c] + shift[c];
    }
}

static void norm_back(const stage *s, int64_t n, const float *dy, float *dx, double *work) {
    const layer *o = s->o;
    const int64_t C = o->oc, p = area_out(o);
    const double m = (double)n * p;
    const float *mean = s->save, *inv = mean + whole(C);
    double *sum = work, *along = work + C; /* of dy, and of dy times the deviation */
    for (int64_t c = 0; c < 2 * C; c++) sum[c] = 0;
    for (int64_t i = 0; i < n; i++) {
        const float *d = dy + i * s->ys, *x = s->x + i * s->xs;
        if (p == 1)
            for (int64_t c = 0; c < C; c++) sum[c] += d[c], along[c] += (double)d[c] * (x[c] - mean[c]);
        else
            for (int64_t c = 0; c < C; c++)
                sum[c] += add(d + c * p, p, 0, 0), along[c] += dot(d + c * p, x + c * p, p, mean[c]);
    }
    for (int64_t c = 0; s->dgamma && c < C; c++) s->dgamma[c] = (float)(along[c] * inv[c]);
    for (int64_t c = 0; s->dbeta && c < C; c++) s->dbeta[c] = (float)sum[c];
    if (!dx) return;
    float *scale = (float *)(work + 2 * C), *slope = scale + C, *level = slope + C;
    for (int64_t c = 0; c < C; c++) {
        scale[c] = inv[c] * (s->gamma ? s->gamma[c] : 1);
        slope[c] = o->mode == TRAIN ? (float)(-scale[c] * (double)inv[c] * inv[c] * along[c] / m) : 0;
        level[c] = o->mode == TRAIN ? (float)(-scale[c] * sum[c] / m) : 0;
    }
    for (int64_t i = 0; i < n; i++) {
        const float *d = dy + i * s->ys, *x = s->x + i * s->xs;
        float *to = dx + i * s->xs;
        if (p == 1)
            for (int64_t c = 0; c < C; c++) to[c] = scale[c] * d[c] + slope[c] * (x[c] - mean[c]) + level[c];
        else
            for (int64_t c = 0; c < C; c++)
                for (int64_t j = c * p; j < c * p + p; j++)
                    to[j] = scale[c] * d[j] + slope[c] * (x[j] - mean[c]) + level[c];
    }
}

/* ---- group norm: save is [items, groups, (mean, 1 / std)] -------------------------------------------------------- */
static void group_layer(const stage *s, int64_t n) {
    const layer *o = s->o;
    const int64_t p = area_out(o), each = o->oc / o->groups, m = each * p;
    for (int64_t i = 0; i < n; i++)
        for (int64_t g = 0; g < o->groups; g++) {
            const float *x = s->x + i * s->xs + g * m;
            float *y = s->y + i * s->ys + g * m, *stats = s->save + 2 * (i * o->groups + g);
            const float mean = add(x, m, 0, 0) / m;
            const float inv = (float)(1 / sqrt(add(x, m, mean, 1) / (double)m + o->eps));
            stats[0] = mean, stats[1] = inv;
            for (int64_t c = 0; c < each; c++) {
                const float scale = inv * (s->gamma ? s->gamma[g * each + c] : 1);
                const float shift = (s->beta ? s->beta[g * each + c] : 0) - mean * scale;
                for (int64_t j = c * p; j < c * p + p; j++) y[j] = x[j] * scale + shift;
            }
        }
}

static void group_back(const stage *s, int64_t n, const float *dy, float *dx) {
    const layer *o = s->o;
    const int64_t p = area_out(o), each = o->oc / o->groups, m = each * p;
    if (s->dgamma) memset(s->dgamma, 0, sizeof(float) * o->oc);
    if (s->dbeta) memset(s->dbeta, 0, sizeof(float) * o->oc);
    for (int64_t i = 0; i < n; i++)
        for (int64_t g = 0; g < o->groups; g++) {
            const float *x = s->x + i * s->xs + g * m, *d = dy + i * s->ys + g * m;
            const float *stats = s->save + 2 * (i * o->groups + g), mean = stats[0], inv = stats[1];
            double sum = 0, along = 0; /* of dy gamma, and of it times the deviation */
            for (int64_t c = 0; c < each; c++) {
                const float one = add(d + c * p, p, 0, 0), two = dot(d + c * p, x + c * p, p, mean);
                const float gamma = s->gamma ? s->gamma[g * each + c] : 1;
                sum += (double)gamma * one, along += (double)gamma * two;
                if (s->dgamma) s->dgamma[g * each + c] += two * inv;
                if (s->dbeta) s->dbeta[g * each + c] += one;
            }
            const float slope = (float)(-along * inv * inv * inv / m), level = (float)(-sum * inv / m);
            for (int64_t c = 0; dx && c < each; c++) {
                const float scale = inv * (s->gamma ? s->gamma[g * each + c] : 1);
                float *to = dx + i * s->xs + g * m;
                for (int64_t j = c * p; j < c * p + p; j++) to[j] = scale * d[j] + slope * (x[j] - mean) + level;
            }
        }
}

/* ---- pooling ----------------------------------------------------------------------------------------------------- */
/* First row or column of window i and the one behind its last; *full is the size by which a mean divides. */
INLINE void window(const layer *o, int64_t i, int64_t size, int64_t out, int64_t k, int64_t step, int64_t pad,
                   int64_t *first, int64_t *end, int64_t *full) {
    if (o->kind == MEAN_POOL && o->mode == 2) {
        *first = i * size / out, *end = ((i + 1) * size + out - 1) / out, *full = *end - *first;
        return;
    }
    const int64_t a = i * step - pad, b = a + k;
    *first = a < 0 ? 0 : a, *end = least(b, size);
    *full = o->kind == MEAN_POOL && o->mode == 1 ? least(b, size + pad) - a : *end - *first;
}

static void max_layer(const stage *s, int64_t n) {
    const layer *o = s->o;
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < o->oc; c++) {
            const float *x = s->x + i * s->xs + c * area_in(o);
            for (int64_t y = 0; y < o->oh; y++)
                for (int64_t q = 0; q < o->ow; q++) {
                    int64_t y0, y1, x0, x1, full;
                    window(o, y, o->h, o->oh, o->kh, o->sh, o->ph, &y0, &y1, &full);
                    window(o, q, o->w, o->ow, o->kw, o->sw, o->pw, &x0, &x1, &full);
                    int64_t best = y0 * o->w + x0;
                    for (int64_t a = y0; a < y1; a++)
                        for (int64_t b = x0; b < x1; b++) { /* like PyTorch the first maximum wins and NaN spreads */
                            const float v = x[a * o->w + b];
                            if (v > x[best] || v != v) best = a * o->w + b;
                        }
                    const int64_t to = c * area_out(o) + y * o->ow + q;
                    s->y[i * s->ys + to] = x[best];
                    if (s->at) s->at[i * s->ys + to] = (int32_t)best;
                }
        }
}

static void max_back(const stage *s, int64_t n, const float *dy, float *dx) {
    const layer *o = s->o;
    memset(dx, 0, sizeof(float) * n * s->xs);
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < o->oc; c++)
            for (int64_t j = c * area_out(o); j < (c + 1) * area_out(o); j++)
                dx[i * s->xs + c * area_in(o) + s->at[i * s->ys + j]] += dy[i * s->ys + j];
}

/* Forward if y is given, otherwise backward. */
static void mean_pool(const stage *s, int64_t n, const float *dy, float *dx) {
    const layer *o = s->o;
    if (dx) memset(dx, 0, sizeof(float) * n * s->xs);
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < o->oc; c++)
            for (int64_t y = 0; y < o->oh; y++)
                for (int64_t q = 0; q < o->ow; q++) {
                    int64_t y0, y1, x0, x1, tall, wide_;
                    window(o, y, o->h, o->oh, o->kh, o->sh, o->ph, &y0, &y1, &tall);
                    window(o, q, o->w, o->ow, o->kw, o->sw, o->pw, &x0, &x1, &wide_);
                    const int64_t at = i * s->ys + c * area_out(o) + y * o->ow + q;
                    const int64_t from = i * s->xs + c * area_in(o);
                    const float part = dx ? dy[at] / (tall * wide_) : 0;
                    float sum = 0;
                    for (int64_t a = y0; a < y1; a++)
                        for (int64_t b = x0; b < x1; b++) {
                            if (dx) dx[from + a * o->w + b] += part;
                            else sum += s->x[from + a * o->w + b];
                        }
                    if (!dx) s->y[at] = sum / (tall * wide_);
                }
}

/* ---- any layer --------------------------------------------------------------------------------------------------- */
static void forward_layer(const stage *s, int64_t n, int keep, float *scratch) {
    switch (s->o->kind) {
    case BLOCK: { call c = block_call(s, n, keep, scratch); block_forward(&c); break; }
    case CONV: conv_layer(s, n, scratch); break;
    case NORM: norm_layer(s, n, (double *)scratch); break;
    case GROUP: group_layer(s, n); break;
    case RELU:
        for (int64_t i = 0; i < n; i++) {
            float *y = s->y + i * s->ys;
            for (int64_t j = 0; j < s->o->oc * area_out(s->o); j++) y[j] = y[j] < 0 ? 0 : y[j];
        }
        break;
    case MAX_POOL: max_layer(s, n); break;
    case MEAN_POOL: mean_pool(s, n, 0, 0); break;
    case LINEAR: linear_layer(s, n); break;
    }
}

/* dx is where the gradient of the input goes, or NULL; ReLU changes dy in place. */
static void backward_layer(const stage *s, int64_t n, float *dy, float *dx, float *scratch) {
    switch (s->o->kind) {
    case BLOCK: {
        call c = block_call(s, n, 1, scratch);
        c.dy = dy, c.dx = dx, c.dw = s->dweight, c.db = s->dbias, c.dgamma = s->dgamma, c.dbeta = s->dbeta;
        block_backward(&c);
        break;
    }
    case CONV: conv_back(s, n, dy, dx, scratch); break;
    case NORM: norm_back(s, n, dy, dx, (double *)scratch); break;
    case GROUP: group_back(s, n, dy, dx); break;
    case RELU:
        for (int64_t i = 0; i < n; i++) {
            const float *y = s->y + i * s->ys;
            float *d = dy + i * s->ys;
            for (int64_t j = 0; j < s->o->oc * area_out(s->o); j++) d[j] = y[j] <= 0 ? 0 : d[j];
        }
        break;
    case MAX_POOL: if (dx) max_back(s, n, dy, dx); break;
    case MEAN_POOL: if (dx) mean_pool(s, n, dy, dx); break;
    case LINEAR: linear_back(s, n, dy, dx, scratch); break;
    }
}

/* Floats of scratch that a layer needs for n items. */
static int64_t scratch_size(const layer *o, int64_t n) {
    const int64_t p = area_out(o), C = o->oc;
    if (o->kind == CONV) return taps(o) * whole(p) + p * whole(taps(o)) + 4 * WIDE;
    if (o->kind == NORM) return 8 * C + 4 * WIDE;
    if (o->kind == LINEAR) return (o->oc + o->ic * area_in(o)) * whole(n) + 4 * WIDE;
    if (o->kind != BLOCK) return 0;
    int64_t sizes[3];
    call c = {.n = n, .ic = o->ic, .h = o->h, .w = o->w, .oc = o->oc, .k = o->kh, .pad = o->ph, .mode = o->mode, .keep = 1};
    block_sizes(&c, sizes);
    return (sizes[1] > sizes[2] ? sizes[1] : sizes[2]) + 4 * WIDE;
}

/* Floats that forward keeps for backward. */
static int64_t save_size(const layer *o, int64_t n, int keep) {
    if (o->kind == NORM) return 2 * whole(o->oc);
    if (o->kind == GROUP) return 2 * n * o->groups;
    if (o->kind != BLOCK) return 0;
    int64_t sizes[3];
    call c = {.n = n, .ic = o->ic, .h = o->h, .w = o->w, .oc = o->oc, .k = o->kh, .pad = o->ph, .mode = o->mode, .keep = keep};
    block_sizes(&c, sizes);
    return sizes[0];
}
