/* Convolution + bias + optional batch norm + ReLU + 2x2 max-pool as one operation, and its backward.
 *
 * Everything works image by image, so that what one stage writes the next one still finds in cache. All state is in the
 * arguments; nothing is shared between calls, and sums run in a fixed order.
 */
#include "dense.c"
#include "sparse.c"
#include <math.h>

enum { PLAIN, EVAL, TRAIN }; /* no batch norm; with running statistics; with those of the batch */

typedef struct { /* mirrored by library.Call */
    int64_t n, ic, h, w, oc, k, pad, mode, keep;
    double eps, momentum;
    const float *x, *weight, *bias, *gamma, *beta;
    float *running_mean, *running_var;
    float *y, *save, *scratch;
    const float *dy;
    float *dx, *dw, *db, *dgamma, *dbeta;
} call;

typedef struct {
    int64_t hp, wp, row, run, oh, ow, ph, pw, p, ocp, vecs, patch, frame; /* sizes: see plan() */
    int64_t image, hits, pixels;                                         /* floats per image of x, of at/sel, of z */
    float *stats, *x, *sel, *z;
    int32_t *at;
} layout;

INLINE int64_t round_up(int64_t n) { return pieces(n, 16) * 16; }

/* Where things are in `save`; returns its size in floats. */
static int64_t plan(const call *c, layout *l) {
    l->hp = c->h + 2 * c->pad, l->wp = c->w + 2 * c->pad;
    l->row = l->wp * c->ic, l->run = c->k * c->ic;
    l->oh = l->hp - c->k + 1, l->ow = l->wp - c->k + 1;
    l->ph = l->oh / 2, l->pw = l->ow / 2, l->p = l->ph * l->pw;
    l->ocp = pieces(c->oc, LANES) * LANES;
    l->vecs = pieces(l->run, LANES);                      /* of one kernel row */
    l->patch = pieces((c->k + 1) * c->ic, LANES);         /* vectors of one row of what a window's gradient reaches */
    l->frame = (c->k + 2) * c->ic + LANES;                /* one row of a kernel in its frame of zeros */
    l->image = round_up(l->hp * l->row + 4 * LANES);      /* vectors may reach past the last pixel */
    l->hits = round_up((c->mode == TRAIN ? l->ocp : c->oc) * l->p);
    l->pixels = l->oh * l->ow * l->ocp;
    const int64_t images = c->keep ? c->n : 1;
    float *at = c->save;
    l->stats = at, at += 4 * l->ocp; /* scale, shift, mean, 1 / std */
    l->x = at, at += images * l->image;
    /* y * wp + x of the maximum, -1 where ReLU is silent: [oc, p], or [p, ocp] with batch statistics */
    l->at = (int32_t *)at, at += images * l->hits;
    l->sel = at, at += c->mode == TRAIN ? images * l->hits : 0; /* [p, ocp]: the maximum before normalisation */
    l->z = at, at += (c->mode == TRAIN ? c->n : 1) * l->pixels;
    return round_up(at - c->save);
}

/* One padded channels-last image. Vectors of 8 channels overlap what comes after them: blocks of channels go from last
 * to first and pixels from left to right, so that the right values are written last. */
static void pack_image(const call *c, const layout *l, const float *x, float *to) {
    const int64_t ic = c->ic, w = c->w, area = c->h * w;
    if (c->pad) memset(to, 0, sizeof(float) * l->hp * l->row);
    for (int64_t y = 0; y < c->h; y++, x += w) {
        float *r = to + (y + c->pad) * l->row + c->pad * ic;
        if (ic == 1) memcpy(r, x, sizeof(float) * w);
        else if (w < LANES)
            for (int64_t i = 0; i < ic; i++)
                for (int64_t j = 0; j < w; j++) r[j * ic + i] = x[i * area + j];
        else
            for (int64_t b = (ic - 1) / LANES * LANES; b >= 0; b -= LANES)
                for (int64_t j = 0; j < w; j += LANES) {
                    const int64_t a = least(j, w - LANES);
                    vec v[LANES];
                    for (int64_t i = 0; i < LANES; i++) v[i] = b + i < ic ? load(x + (b + i) * area + a) : splat(0);
                    transpose8(v);
                    for (int64_t i = 0; i < LANES; i++) store(r + (a + i) * ic + b, v[i]);
                }
    }
}

/* The reverse of channels_first; lanes without a channel become zero. */
static void channels_last(const float *in, int64_t n, int64_t channels, float *out, int64_t step) {
    for (int64_t b = 0; b < channels; b += LANES)
        for (int64_t i = 0; i < n; i += LANES) {
            const int64_t a = n < LANES ? 0 : least(i, n - LANES), many = least(n, LANES);
            vec v[LANES];
            for (int64_t j = 0; j < LANES; j++) {
                v[j] = splat(0);
                if (b + j >= channels) continue;
                if (n < LANES) memcpy(&v[j], in + (b + j) * n, sizeof(float) * n);
                else v[j] = load(in + (b + j) * n + a);
            }
            transpose8(v);
            for (int64_t j = 0; j < many; j++) store(out + (a + j) * step + b, v[j]);
        }
}

/* out[c, i] = in[i, c] for n places and the real channels; `in` can be read in whole vectors. */
static void channels_first(const float *in, int64_t step, int64_t n, int64_t channels, float *out, int64_t out_step) {
    if (n < LANES) {
        for (int64_t c = 0; c < channels; c++)
            for (int64_t i = 0; i < n; i++) out[c * out_step + i] = in[i * step + c];
        return;
    }
    for (int64_t b = 0; b < channels; b += LANES)
        for (int64_t i = 0; i < n; i += LANES) {
            const int64_t a = least(i, n - LANES), real = least(LANES, channels - b);
            vec v[LANES];
            for (int64_t j = 0; j < LANES; j++) v[j] = load(in + (a + j) * step + b);
            transpose8(v);
            for (int64_t j = 0; j < real; j++) store(out + (b + j) * out_step + a, v[j]);
        }
}

static void unpack_image(const call *c, const layout *l, const float *from, float *x) {
    for (int64_t y = 0; y < c->h; y++)
        channels_first(from + (y + c->pad) * l->row + c->pad * c->ic, c->ic, c->w, c->ic, x + y * c->w, c->h * c->w);
}

/* Copies the kernel of output channel o: element (ky, t) of the run goes to to[ky * sk + t * st]. */
static void pack_kernel(const call *c, int64_t o, float factor, float *to, int64_t sk, int64_t st) {
    const float *from = c->weight + o * c->ic * c->k * c->k;
    for (int64_t i = 0; i < c->ic; i++)
        for (int64_t ky = 0; ky < c->k; ky++)
            for (int64_t kx = 0; kx < c->k; kx++) to[ky * sk + (kx * c->ic + i) * st] = factor * *from++;
}

static void pack_forward(const call *c, const layout *l, float *w, float *bias) {
    memset(w, 0, sizeof(float) * c->k * l->run * l->ocp);
    for (int64_t o = 0; o < l->ocp; o++) bias[o] = o < c->oc && c->bias ? c->bias[o] : 0;
    for (int64_t o = 0; narrow(c->oc, c->pad, l->ow) && o < c->oc; o++)
        for (int64_t i = 0; i < c->k * l->run; i++) w[i * c->oc + o] = c->weight[o * c->k * l->run + i];
    for (int64_t o = 0; !narrow(c->oc, c->pad, l->ow) && o < c->oc; o++) {
        const int64_t first = o / 16 * 16, width = least(16, l->ocp - first);
        pack_kernel(c, o, 1, w + first * c->k * l->run + o - first, l->run * width, width);
    }
}

/* Sum over m pixels of deviations or of their squares; eight sums, so that no addition waits for the one before. */
INLINE vec add_up(const int square, const float *z, int64_t m, int64_t step, vec from) {
    vec s[8];
    for (int j = 0; j < 8; j++) s[j] = splat(0);
    int64_t i = 0;
    for (; i + 8 <= m; i += 8)
        for (int j = 0; j < 8; j++, z += step) {
            const vec d = load(z) - from;
            s[j] += square ? d * d : d;
        }
    for (; i < m; i++, z += step) {
        const vec d = load(z) - from;
        s[0] += square ? d * d : d;
    }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

/* Mean and sum of squared deviations per channel, image by image (stable for any mean). */
static void add_moments(const layout *l, const float *z, int64_t before, double *mean, double *m2) {
    const int64_t m = l->oh * l->ow;
    const double part = (double)m / (before + m);
    for (int64_t c = 0; c < l->ocp; c += LANES) {
        const vec here = add_up(0, z + c, m, l->ocp, splat(0)) / splat((float)m);
        const vec squares = add_up(1, z + c, m, l->ocp, here);
        for (int j = 0; j < LANES; j++) {
            const double d = here[j] - mean[c + j];
            mean[c + j] += d * part;
            m2[c + j] += squares[j] + d * d * before * part;
        }
    }
}

/* scale, shift, mean and 1 / std of the epilogue; moves the running statistics when the batch's are used. */
static void set_stats(const call *c, const layout *l, const double *mean, const double *m2) {
    float *scale = l->stats, *shift = scale + l->ocp, *mu = shift + l->ocp, *inv = mu + l->ocp;
    const double m = (double)c->n * l->oh * l->ow;
    memset(scale, 0, sizeof(float) * 4 * l->ocp);
    for (int64_t o = 0; o < c->oc; o++) {
        if (c->mode == PLAIN) { scale[o] = inv[o] = 1; continue; }
        double e = c->mode == TRAIN ? mean[o] : c->running_mean[o];
        const double v = c->mode == TRAIN ? m2[o] / m : c->running_var[o];
        mu[o] = (float)e, inv[o] = (float)(1 / sqrt(v + c->eps));
        scale[o] = inv[o] * (c->gamma ? c->gamma[o] : 1);
        shift[o] = (c->beta ? c->beta[o] : 0) - (float)e * scale[o];
        if (c->mode == TRAIN && c->running_mean) {
            c->running_mean[o] = (float)((1 - c->momentum) * c->running_mean[o] + c->momentum * e);
            c->running_var[o] = (float)((1 - c->momentum) * c->running_var[o] + c->momentum * m2[o] / (m - 1));
        }
    }
}

/* Normalise, pool, ReLU of one image. Like PyTorch the first of equal maxima wins and NaN spreads. */
static void pool(const call *c, const layout *l, const float *z, float *y, float *at, float *sel, float *tmp) {
    const int64_t zr = l->ow * l->ocp, size = l->p * l->ocp;
    float *place_at = c->mode == TRAIN ? at : tmp + size;
    for (int64_t o = 0; o < l->ocp; o += LANES) {
        const vec scale = load(l->stats + o), shift = load(l->stats + l->ocp + o);
        const int32_t wp = (int32_t)l->wp;
        const ivec zero = {0}, corner[4] = {zero, zero + 1, zero + wp, zero + (wp + 1)};
        for (int64_t i = 0; i < l->ph; i++)
            for (int64_t j = 0; j < l->pw; j++) {
                const float *q = z + 2 * i * zr + 2 * j * l->ocp + o;
                const vec z4[4] = {load(q), load(q + l->ocp), load(q + zr), load(q + zr + l->ocp)};
                vec raw = z4[0], top = raw * scale + shift, place = (vec)zero;
                for (int b = 1; b < 4; b++) {
                    const vec v = z4[b] * scale + shift;
                    const ivec more = (v > top) | (v != v);
                    top = pick(more, v, top), raw = pick(more, z4[b], raw), place = pick(more, (vec)corner[b], place);
                }
                const ivec silent = top <= splat(0);
                float *t = tmp + (i * l->pw + j) * l->ocp + o;
                store(t, pick(silent, splat(0), top));
                store(place_at + (t - tmp), (vec)(((ivec)place + (int32_t)(2 * i * wp + 2 * j)) | silent));
                if (sel) store(sel + (t - tmp), raw);
            }
    }
    channels_first(tmp, l->ocp, l->p, c->oc, y, l->p);
    if (c->keep && c->mode != TRAIN) channels_first(tmp + size, l->ocp, l->p, c->oc, at, l->p);
}

/* Sizes in floats of save, of the scratch of forward and of the scratch of backward. */
static void block_sizes(const call *c, int64_t *out) {
    layout l;
    out[0] = plan(c, &l);
    out[1] = c->k * l.run * l.ocp + 5 * l.ocp + 2 * l.p * l.ocp;
    const int64_t dense = (l.oh * l.wp + l.p) * l.ocp + c->k * l.run * l.ocp + c->k * l.vecs * c->oc * LANES;
    const int64_t sparse = c->oc * (c->k * l.vecs * LANES + (c->k + 2) * l.frame) + 2 * (l.p + c->oc) + 2 * LANES;
    out[2] = l.image + (c->mode == TRAIN ? dense : sparse) + 8 * l.ocp;
}

static void block_forward(call *c) {
    layout l;
    plan(c, &l);
    double *mean = (double *)c->scratch, *m2 = mean + l.ocp;
    float *bias = (float *)(m2 + l.ocp), *tmp = bias + l.ocp, *w = tmp + 2 * l.p * l.ocp;
    const int64_t image = c->keep ? l.image : 0, hits = c->keep ? l.hits : 0, pixels = c->mode == TRAIN ? l.pixels : 0;
    pack_forward(c, &l, w, bias);
    for (int64_t o = 0; o < l.ocp; o++) mean[o] = m2[o] = 0;
    if (c->mode != TRAIN) set_stats(c, &l, mean, m2);
    for (int64_t i = 0; i < c->n; i++) {
        float *x = l.x + i * image, *z = l.z + i * pixels;
        const float *from = c->x + i * c->ic * c->h * c->w;
        const int direct = narrow(c->oc, c->pad, l.ow);
        if (c->keep || !direct) pack_image(c, &l, from, x);
        if (direct) conv_narrow(from, c->ic, c->h, c->w, c->k, w, c->oc, bias, z, l.oh, l.ow);
        else conv_forward(x, c->ic, l.row, c->k, w, bias, z, l.oh, l.ow, l.ocp);
        if (c->mode == TRAIN) add_moments(&l, z, i * l.oh * l.ow, mean, m2);
        else pool(c, &l, z, c->y + i * c->oc * l.p, (float *)l.at + i * hits, 0, tmp);
    }
    if (c->mode != TRAIN) return;
    set_stats(c, &l, mean, m2);
    for (int64_t i = 0; i < c->n; i++)
        pool(c, &l, l.z + i * pixels, c->y + i * c->oc * l.p, (float *)l.at + i * hits, l.sel + i * hits,
             tmp);
}

#include "backward.c"
