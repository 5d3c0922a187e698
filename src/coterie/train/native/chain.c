/* Local training and scoring of a model that is a chain of layers, each as one call.
 *
 * A call copies the model, works on its copy and writes the result at its end, so nothing changes if it fails. All state
 * is in its arguments and in memory of its own; sums run in a fixed order.
 */
#include <stdlib.h>

enum { CROSS_ENTROPY, SQUARES, LOGISTIC, POISSON };
enum { DONE, BAD_TARGET, NO_MEMORY, ONE_VALUE };
enum { SGD, ADAM, ADAMW };

typedef struct { /* mirrored by library.Entry */
    int64_t size;
    int64_t outputs; /* of the weight of a linear layer, which is kept transposed; 0: any other entry */
    int64_t trained, pulled;
    double decay;
} entry;

typedef struct { /* mirrored by library.Chain */
    int64_t layers, entries, loss, item, outputs;
    const layer *layer;
    const entry *entry;
} chain;

typedef struct { /* mirrored by library.Training */
    const chain *chain;
    int64_t samples;
    const float *x;
    const void *y; /* int64 classes, or floats [samples, outputs] */
    const int64_t *order; /* [epochs, samples] */
    const int64_t *spans; /* [batches + 1]: where batches begin */
    int64_t batches, steps;
    const double *lr; /* [steps] */
    int64_t optimiser, nesterov;
    double momentum, beta1, beta2, eps, clip, pull; /* clip 0: none */
    float *const *value;        /* by entry; moved in place */
    const float *const *anchor; /* by entry; NULL if nothing pulls */
    float *const *first;        /* by entry: the optimiser's state, NULL: starts at zero and is not kept */
    float *const *second;
    double *count;
    double loss; /* out: sum over the steps */
} training;

typedef struct { /* mirrored by library.Scoring */
    const chain *chain;
    int64_t samples;
    const float *x;
    const void *y;
    float *const *value;
    float *outputs;       /* [samples, outputs], or NULL */
    int64_t *hits, *total; /* by class, or NULL */
    double loss;          /* out: sum over the samples */
} scoring;

typedef struct { float *base; int64_t used; } arena;

static float *take(arena *a, int64_t floats) { /* always followed by a whole vector */
    float *p = a->base ? a->base + a->used : 0;
    a->used += pieces(floats + 16, 16) * 16;
    return p;
}

INLINE int64_t stored_size(const entry *e) { return e->outputs ? e->size / e->outputs * whole(e->outputs) : e->size; }

/* Between an entry as it is outside and inside; what is added for whole vectors stays zero. */
static void copy_in(const entry *e, const float *from, float *to) {
    if (e->outputs) transpose(from, e->outputs, e->size / e->outputs, e->size / e->outputs, to, whole(e->outputs));
    else memcpy(to, from, sizeof(float) * e->size);
}
static void copy_out(const entry *e, const float *from, float *to) {
    if (e->outputs) transpose(from, e->size / e->outputs, e->outputs, whole(e->outputs), to, e->size / e->outputs);
    else memcpy(to, from, sizeof(float) * e->size);
}

typedef struct {
    float **w, **g, **first, **second, **anchor; /* by entry */
    stage *stage;
    float *x, *d[2], *scratch;
} memory;

/* Lay out the memory of a call for n items at once; with an arena without base only its size is found. */
static void lay_out(const chain *m, int64_t n, int train, int states, int pull, arena *a, memory *to) {
    const int64_t pointers = pieces(5 * m->entries * sizeof(float *) + m->layers * sizeof(stage), sizeof(float));
    char *p = (char *)take(a, pointers);
    if (p) {
        memset(p, 0, pointers * sizeof(float));
        to->stage = (stage *)p, p += m->layers * sizeof(stage);
        to->w = (float **)p, to->g = to->w + m->entries, to->first = to->g + m->entries;
        to->second = to->first + m->entries, to->anchor = to->second + m->entries;
    }
    for (int64_t e = 0; e < m->entries; e++) {
        const entry *t = m->entry + e;
        const int64_t size = stored_size(t);
        float *own[5] = {take(a, size), 0, 0, 0, 0};
        if (train && t->trained) {
            own[1] = take(a, size);
            for (int i = 0; i < states; i++) own[2 + i] = take(a, size);
        }
        if (train && pull && t->pulled) own[4] = take(a, size);
        if (!a->base) continue;
        to->w[e] = own[0], to->g[e] = own[1], to->first[e] = own[2], to->second[e] = own[3], to->anchor[e] = own[4];
        for (int i = 0; i < 5; i++)
            if (own[i]) memset(own[i], 0, sizeof(float) * (size + WIDE));
    }
    int64_t largest = m->item, scratch = 0, stride = m->item;
    float *x = take(a, n * m->item);
    if (a->base) to->x = x;
    int needs = 0;
    for (int64_t i = 0; i < m->layers; i++) {
        const layer *o = m->layer + i;
        const int64_t size = o->oc * o->oh * o->ow;
        const int same = o->kind == NORM || o->kind == GROUP || o->kind == RELU;
        const int64_t ys = o->kind == LINEAR ? whole(o->oc) : same ? stride : size;
        float *y = o->kind == RELU ? x : take(a, n * ys);
        float *save = take(a, save_size(o, n, train));
        float *at = o->kind == MAX_POOL && train ? take(a, n * ys) : 0;
        if (a->base) {
            stage *s = to->stage + i;
            const int64_t number[6] = {o->weight, o->bias, o->gamma, o->beta, o->mean, o->var};
            float **own[6] = {&s->weight, &s->bias, &s->gamma, &s->beta, &s->mean, &s->var};
            float **slope[4] = {&s->dweight, &s->dbias, &s->dgamma, &s->dbeta};
            s->o = o, s->x = x, s->y = y, s->xs = stride, s->ys = ys, s->save = save, s->at = (int32_t *)at;
            s->needs_dx = needs;
            for (int k = 0; k < 6; k++) *own[k] = number[k] < 0 ? 0 : to->w[number[k]];
            for (int k = 0; k < 4; k++) {
                *slope[k] = number[k] < 0 ? 0 : to->g[number[k]];
                needs |= *slope[k] != 0;
            }
        }
        const int64_t more = scratch_size(o, n);
        if (more > scratch) scratch = more;
        if (ys > largest) largest = ys;
        x = y, stride = ys;
    }
    for (int i = 0; i < 2 && train; i++) {
        float *d = take(a, n * largest);
        if (a->base) to->d[i] = d;
    }
    float *rest = take(a, scratch);
    if (a->base) to->scratch = rest;
}

static int allocate(const chain *m, int64_t n, int train, int states, int pull, memory *to, void **block) {
    arena a = {0, 0};
    lay_out(m, n, train, states, pull, &a, to);
    if (posix_memalign(block, 64, sizeof(float) * a.used)) return NO_MEMORY;
    a.base = *block, a.used = 0;
    lay_out(m, n, train, states, pull, &a, to);
    return DONE;
}

/* ---- losses ------------------------------------------------------------------------------------------------------ */
static int targets_fit(const chain *m, const void *y, int64_t samples) {
    const int64_t *label = y;
    for (int64_t i = 0; m->loss == CROSS_ENTROPY && i < samples; i++)
        if (label[i] < 0 || label[i] >= m->outputs) return 0;
    return 1;
}

/* Sum of a sample's loss over its outputs z; d gets the gradient times `scale` if it is given. */
static double loss_of(const chain *m, const float *z, const void *y, int64_t at, float *d, double scale) {
    const int64_t n = m->outputs;
    double sum = 0;
    if (m->loss == CROSS_ENTROPY) {
        const int64_t label = ((const int64_t *)y)[at];
        float top = z[0];
        for (int64_t j = 1; j < n; j++) top = z[j] > top ? z[j] : top;
        for (int64_t j = 0; j < n; j++) sum += exp((double)z[j] - top);
        for (int64_t j = 0; d && j < n; j++) d[j] = (float)((exp((double)z[j] - top) / sum - (j == label)) * scale);
        return log(sum) + top - z[label];
    }
    const float *t = (const float *)y + at * n;
    for (int64_t j = 0; j < n; j++) {
        double slope;
        if (m->loss == SQUARES) {
            slope = (double)z[j] - t[j], sum += slope * slope, slope *= 2;
        } else if (m->loss == LOGISTIC) {
            const double small = exp(-fabs((double)z[j]));
            sum += (z[j] > 0 ? z[j] : 0) - (double)z[j] * t[j] + log1p(small);
            slope = (z[j] >= 0 ? 1 : small) / (1 + small) - t[j];
        } else {
            const double rate = exp(z[j]);
            sum += rate - (double)t[j] * z[j] + (t[j] == 0 ? 0 : t[j] * log(t[j])) - t[j];
            slope = rate - t[j];
        }
        if (d) d[j] = (float)(slope * scale / n);
    }
    return sum / n;
}

/* ---- training ---------------------------------------------------------------------------------------------------- */
static void gather(const training *t, const int64_t *rows, int64_t n, float *x) {
    const int64_t item = t->chain->item;
    for (int64_t i = 0; i < n; i++) memcpy(x + i * item, t->x + rows[i] * item, sizeof(float) * item);
}

/* Add the pull's gradient; return its loss. */
static double pull_back(const training *t, const memory *m) {
    double sum = 0;
    for (int64_t e = 0; e < t->chain->entries; e++) {
        const float *w = m->w[e], *a = m->anchor[e];
        float *g = m->g[e];
        if (!a) continue;
        const int64_t n = stored_size(t->chain->entry + e);
        const float strength = (float)t->pull;
        double part = 0;
        for (int64_t b = 0; b < n; b += 4096) { /* short sums, so that float32 is enough for each */
            const int64_t end = least(b + 4096, n);
            vec s = splat(0);
            float rest = 0;
            int64_t i = b;
            for (; i + LANES <= end; i += LANES) {
                const vec d = load(w + i) - load(a + i);
                s += d * d;
                if (g) store(g + i, load(g + i) + splat(strength) * d);
            }
            for (; i < end; i++) {
                const float d = w[i] - a[i];
                rest += d * d;
                if (g) g[i] += strength * d;
            }
            part += (double)total(s) + rest;
        }
        sum += part;
    }
    return t->pull / 2 * sum;
}

static float clip_factor(const training *t, const memory *m) {
    double sum = 0;
    for (int64_t e = 0; e < t->chain->entries; e++) {
        if (!m->g[e]) continue;
        const int64_t n = stored_size(t->chain->entry + e);
        for (int64_t b = 0; b < n; b += 4096) sum += add(m->g[e] + b, least(4096, n - b), 0, 1);
    }
    const double factor = t->clip / (sqrt(sum) + 1e-6);
    return factor > 1 ? 1 : (float)factor; /* NaN stays NaN */
}

static void move(const training *t, const memory *m, int64_t e, double lr, float factor) {
    const entry *own = t->chain->entry + e;
    const int64_t n = stored_size(own);
    float *restrict w = m->w[e], *restrict g = m->g[e], *restrict a = m->first[e], *restrict b = m->second[e];
    const float decay = (float)own->decay, rate = (float)lr, mu = (float)t->momentum;
    if (t->optimiser == SGD && !a) {
        for (int64_t i = 0; i < n; i++) w[i] -= rate * (factor * g[i] + decay * w[i]);
    } else if (t->optimiser == SGD) {
        for (int64_t i = 0; i < n; i++) {
            const float s = factor * g[i] + decay * w[i];
            a[i] = mu * a[i] + s;
            w[i] -= rate * (t->nesterov ? s + mu * a[i] : a[i]);
        }
    } else {
        const double count = ++t->count[e];
        const float one = (float)(1 - t->beta1), two = (float)(1 - t->beta2), kept = (float)t->beta2, eps = (float)t->eps;
        const float step = (float)(lr / (1 - pow(t->beta1, count)));
        const float norm = (float)(1 / sqrt(1 - pow(t->beta2, count)));
        const float shrink = t->optimiser == ADAMW ? (float)(1 - lr * own->decay) : 1, l2 = t->optimiser == ADAM ? decay : 0;
        for (int64_t i = 0; i < n; i++) {
            const float s = factor * g[i] + l2 * w[i];
            a[i] += one * (s - a[i]);
            b[i] = kept * b[i] + two * s * s;
            w[i] = shrink * w[i] - step * a[i] / (norm * sqrtf(b[i]) + eps);
        }
    }
}

static double train_step(const training *t, memory *m, int64_t n, const int64_t *rows, double lr) {
    const chain *k = t->chain;
    const int direct = t->optimiser == SGD && t->momentum == 0 && t->clip <= 0 && t->pull == 0;
    double loss = 0;
    gather(t, rows, n, m->x);
    for (int64_t i = 0; i < k->layers; i++) forward_layer(m->stage + i, n, 1, m->scratch);
    const stage *last = m->stage + k->layers - 1;
    float *d = m->d[0], *other = m->d[1];
    for (int64_t i = 0; i < n; i++) loss += loss_of(k, last->y + i * last->ys, t->y, rows[i], d + i * last->ys, 1.0 / n);
    for (int64_t i = k->layers - 1; i >= 0; i--) {
        stage *s = m->stage + i;
        if (!s->needs_dx && !s->dweight && !s->dbias && !s->dgamma && !s->dbeta) break;
        s->step = direct && s->o->kind == LINEAR;
        if (s->step && s->dweight) s->keep = (float)(1 - lr * k->entry[s->o->weight].decay), s->rate = (float)lr;
        backward_layer(s, n, d, s->needs_dx ? other : 0, m->scratch);
        if (s->o->kind == RELU) continue;
        float *swap = d;
        d = other, other = swap;
    }
    loss /= n;
    if (t->pull != 0) loss += pull_back(t, m);
    const float factor = t->clip > 0 ? clip_factor(t, m) : 1;
    for (int64_t e = 0; e < k->entries; e++)
        if (m->g[e] && !(direct && k->entry[e].outputs)) move(t, m, e, lr, factor);
    return loss;
}

static int one_value(const training *t) {
    for (int64_t i = 0; i < t->chain->layers; i++) {
        const layer *o = t->chain->layer + i;
        for (int64_t b = 0; b < t->batches; b++)
            if (o->kind == NORM && o->mode == TRAIN && (t->spans[b + 1] - t->spans[b]) * area_out(o) < 2) return 1;
    }
    return 0;
}

static int train_chain(training *t) {
    const chain *k = t->chain;
    memory m = {0};
    void *block = 0;
    int64_t largest = 1;
    if (!targets_fit(k, t->y, t->samples)) return BAD_TARGET;
    if (one_value(t)) return ONE_VALUE;
    for (int64_t b = 0; b < t->batches; b++)
        if (t->spans[b + 1] - t->spans[b] > largest) largest = t->spans[b + 1] - t->spans[b];
    const int states = t->optimiser == SGD ? t->momentum != 0 : 2;
    if (allocate(k, largest, 1, states, t->pull != 0, &m, &block)) return NO_MEMORY;
    for (int64_t e = 0; e < k->entries; e++) {
        const entry *own = k->entry + e;
        copy_in(own, t->value[e], m.w[e]);
        if (m.anchor[e]) copy_in(own, t->anchor[e], m.anchor[e]);
        if (m.first[e] && t->first && t->first[e]) copy_in(own, t->first[e], m.first[e]);
        if (m.second[e] && t->second && t->second[e]) copy_in(own, t->second[e], m.second[e]);
    }
    t->loss = 0;
    for (int64_t i = 0; i < t->steps; i++) {
        const int64_t b = i % t->batches;
        const int64_t *rows = t->order + i / t->batches * t->samples + t->spans[b];
        t->loss += train_step(t, &m, t->spans[b + 1] - t->spans[b], rows, t->lr[i]);
    }
    for (int64_t e = 0; e < k->entries; e++) {
        const entry *own = k->entry + e;
        copy_out(own, m.w[e], t->value[e]);
        if (m.first[e] && t->first && t->first[e]) copy_out(own, m.first[e], t->first[e]);
        if (m.second[e] && t->second && t->second[e]) copy_out(own, m.second[e], t->second[e]);
    }
    free(block);
    return DONE;
}

/* ---- scoring ----------------------------------------------------------------------------------------------------- */
enum { TOGETHER = 32 }; /* items in one pass; results do not depend on it */

static int score_chain(scoring *t) {
    const chain *k = t->chain;
    memory m = {0};
    void *block = 0;
    if (t->y && !targets_fit(k, t->y, t->samples)) return BAD_TARGET;
    if (allocate(k, least(t->samples, TOGETHER) + 1, 0, 0, 0, &m, &block)) return NO_MEMORY;
    for (int64_t e = 0; e < k->entries; e++) copy_in(k->entry + e, t->value[e], m.w[e]);
    t->loss = 0;
    const stage *last = m.stage + k->layers - 1;
    for (int64_t a = 0; a < t->samples; a += TOGETHER) {
        const int64_t n = least(TOGETHER, t->samples - a);
        memcpy(m.x, t->x + a * k->item, sizeof(float) * n * k->item);
        for (int64_t i = 0; i < k->layers; i++) forward_layer(m.stage + i, n, 0, m.scratch);
        for (int64_t i = 0; i < n; i++) {
            const float *z = last->y + i * last->ys;
            if (t->outputs) memcpy(t->outputs + (a + i) * k->outputs, z, sizeof(float) * k->outputs);
            if (t->y) t->loss += loss_of(k, z, t->y, a + i, 0, 0);
            if (!t->hits) continue;
            const int64_t label = ((const int64_t *)t->y)[a + i];
            int64_t best = 0; /* like PyTorch the first maximum, or the first NaN */
            for (int64_t j = 1; j < k->outputs; j++)
                if (z[j] > z[best] || (z[j] != z[j] && z[best] == z[best])) best = j;
            t->total[label]++, t->hits[label] += best == label;
        }
    }
    free(block);
    return DONE;
}
