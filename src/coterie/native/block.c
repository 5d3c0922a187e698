/* Convolution + bias + optional batch norm + ReLU + 2x2 max-pool as one operation, and its backward.
 *
 * Everything works image by image, so that what one stage writes the next one still finds in cache. All state is in the
 * arguments; nothing is shared between calls, and sums run in a fixed order.
 */
#include "dense.c"
#include "sparse.c"
#include <math.h>

enum { PLAIN, EVAL, TRAIN }; /* no batch norm; with running statistics; with those of the batch */

typedef struct { /* mirrored by coterie.native.build.Call */
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
    l->hits = round_up(c->oc * l->p);
    l->pixels = l->oh * l->ow * l->ocp;
    const int64_t images = c->keep ? c->n : 1;
    float *at = c->save;
    l->stats = at, at += 4 * l->ocp; /* scale, shift, mean, 1 / std */
    l->x = at, at += images * l->image;
    l->at = (int32_t *)at, at += images * l->hits; /* y * wp + x of the maximum, -1 where ReLU is silent */
    l->sel = at, at += c->mode == TRAIN ? images * l->hits : 0; /* the maximum before normalisation */
    l->z = at, at += (c->mode == TRAIN ? c->n : 1) * l->pixels;
    return at - c->save;
}

static void pack_image(const call *c, const layout *l, const float *x, float *to) {
    if (c->pad) memset(to, 0, sizeof(float) * l->hp * l->row);
    for (int64_t y = 0; y < c->h; y++) {
        float *r = to + (y + c->pad) * l->row + c->pad * c->ic;
        if (c->ic == 1) memcpy(r, x + y * c->w, sizeof(float) * c->w);
        else
            for (int64_t i = 0; i < c->ic; i++)
                for (int64_t j = 0; j < c->w; j++) r[j * c->ic + i] = x[(i * c->h + y) * c->w + j];
    }
}

static void unpack_image(const call *c, const layout *l, const float *from, float *x) {
    for (int64_t i = 0; i < c->ic; i++)
        for (int64_t y = 0; y < c->h; y++) {
            const float *r = from + (y + c->pad) * l->row + c->pad * c->ic + i;
            for (int64_t j = 0; j < c->w; j++) x[(i * c->h + y) * c->w + j] = r[j * c->ic];
        }
}

/* Weight element of channel o, kernel row ky, place t of the run. */
INLINE float tap(const call *c, int64_t o, int64_t ky, int64_t t) {
    return c->weight[((o * c->ic + t % c->ic) * c->k + ky) * c->k + t / c->ic];
}

static void pack_forward(const call *c, const layout *l, float *w, float *bias) {
    for (int64_t o = 0; o < l->ocp; o++) {
        const int64_t first = o / 16 * 16, width = least(16, l->ocp - first);
        bias[o] = o < c->oc && c->bias ? c->bias[o] : 0;
        for (int64_t i = 0; i < c->k * l->run; i++)
            w[first * c->k * l->run + i * width + o - first] = o < c->oc ? tap(c, o, i / l->run, i % l->run) : 0;
    }
}

/* Mean and sum of squared deviations per channel, image by image (stable for any mean). */
static void add_moments(const layout *l, const float *z, int64_t before, double *mean, double *m2) {
    const int64_t m = l->oh * l->ow;
    for (int64_t c = 0; c < l->ocp; c += LANES) {
        vec s0 = splat(0), s1 = splat(0);
        int64_t i = 0;
        for (; i + 2 <= m; i += 2) s0 += load(z + i * l->ocp + c), s1 += load(z + (i + 1) * l->ocp + c);
        if (i < m) s0 += load(z + i * l->ocp + c);
        const vec here = (s0 + s1) / splat((float)m);
        s0 = s1 = splat(0);
        for (i = 0; i + 2 <= m; i += 2) {
            const vec d0 = load(z + i * l->ocp + c) - here, d1 = load(z + (i + 1) * l->ocp + c) - here;
            s0 += d0 * d0, s1 += d1 * d1;
        }
        if (i < m) { const vec d = load(z + i * l->ocp + c) - here; s0 += d * d; }
        const vec q = s0 + s1;
        for (int j = 0; j < LANES; j++) {
            const double d = here[j] - mean[c + j], part = (double)m / (before + m);
            mean[c + j] += d * part;
            m2[c + j] += q[j] + d * d * before * part;
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

/* out[c, p] = in[p, c] for the real channels. */
static void channels_first(const float *in, int64_t p, int64_t ocp, int64_t oc, float *out) {
    for (int64_t c = 0; c < oc; c++)
        for (int64_t i = 0; i < p; i++) out[c * p + i] = in[i * ocp + c];
}

/* Normalise, pool, ReLU of one image. Like PyTorch the first of equal maxima wins and NaN spreads. */
static void pool(const call *c, const layout *l, const float *z, float *y, float *at, float *sel, float *tmp) {
    const int64_t zr = l->ow * l->ocp, size = l->p * l->ocp;
    for (int64_t o = 0; o < l->ocp; o += LANES) {
        const vec scale = load(l->stats + o), shift = load(l->stats + l->ocp + o);
        for (int64_t i = 0; i < l->ph; i++)
            for (int64_t j = 0; j < l->pw; j++) {
                const float *q = z + 2 * i * zr + 2 * j * l->ocp + o;
                const int32_t first = (int32_t)(2 * i * l->wp + 2 * j), wp = (int32_t)l->wp;
                const vec z4[4] = {load(q), load(q + l->ocp), load(q + zr), load(q + zr + l->ocp)};
                const int32_t p4[4] = {first, first + 1, first + wp, first + wp + 1};
                vec raw = z4[0], top = raw * scale + shift;
                ivec place = first - (ivec){0};
                for (int b = 1; b < 4; b++) {
                    const vec v = z4[b] * scale + shift;
                    const ivec more = (v > top) | (v != v);
                    top = pick(more, v, top), raw = pick(more, z4[b], raw);
                    place = (more & p4[b]) | (~more & place);
                }
                const ivec silent = top <= splat(0);
                float *t = tmp + (i * l->pw + j) * l->ocp + o;
                store(t, pick(silent, splat(0), top));
                store(t + size, (vec)(place | silent));
                store(t + 2 * size, raw);
            }
    }
    channels_first(tmp, l->p, l->ocp, c->oc, y);
    if (c->keep) channels_first(tmp + size, l->p, l->ocp, c->oc, at);
    if (c->keep && c->mode == TRAIN) channels_first(tmp + 2 * size, l->p, l->ocp, c->oc, sel);
}

/* Sizes in floats of save, of the scratch of forward and of the scratch of backward. */
void coterie_sizes(call *c, int64_t *out) {
    layout l;
    out[0] = plan(c, &l);
    out[1] = c->k * l.run * l.ocp + 5 * l.ocp + 3 * l.p * l.ocp;
    const int64_t dense = l.oh * l.wp * l.ocp + c->k * l.run * l.ocp + c->k * l.vecs * c->oc * LANES;
    const int64_t sparse = c->oc * (c->k * l.vecs * LANES + (c->k + 2) * l.frame) + 2 * (l.p + c->oc) + 2 * LANES;
    out[2] = l.image + (c->mode == TRAIN ? dense : sparse) + 8 * l.ocp;
}

void coterie_forward(call *c) {
    layout l;
    plan(c, &l);
    double *mean = (double *)c->scratch, *m2 = mean + l.ocp;
    float *bias = (float *)(m2 + l.ocp), *tmp = bias + l.ocp, *w = tmp + 3 * l.p * l.ocp;
    const int64_t image = c->keep ? l.image : 0, hits = c->keep ? l.hits : 0, pixels = c->mode == TRAIN ? l.pixels : 0;
    pack_forward(c, &l, w, bias);
    for (int64_t o = 0; o < l.ocp; o++) mean[o] = m2[o] = 0;
    if (c->mode != TRAIN) set_stats(c, &l, mean, m2);
    for (int64_t i = 0; i < c->n; i++) {
        float *x = l.x + i * image, *z = l.z + i * pixels;
        pack_image(c, &l, c->x + i * c->ic * c->h * c->w, x);
        conv_forward(x, c->ic, l.row, c->k, w, bias, z, l.oh, l.ow, l.ocp);
        if (c->mode == TRAIN) add_moments(&l, z, i * l.oh * l.ow, mean, m2);
        else pool(c, &l, z, c->y + i * c->oc * l.p, (float *)l.at + i * hits, 0, tmp);
    }
    if (c->mode != TRAIN) return;
    set_stats(c, &l, mean, m2);
    for (int64_t i = 0; i < c->n; i++)
        pool(c, &l, l.z + i * pixels, c->y + i * c->oc * l.p, (float *)l.at + i * hits, l.sel + i * hits, tmp);
}

#include "backward.c"
