/* The backward of the block: included by block.c. */

/* Sums over batch and positions of g and of g times the deviation of the chosen value: all that batch norm needs. */
static void reduce(const call *c, const layout *l, double *sum, double *dot) {
    const float *mu = l->stats + 2 * l->ocp;
    for (int64_t o = 0; o < c->oc; o++) sum[o] = dot[o] = 0;
    for (int64_t n = 0; n < c->n; n++)
        for (int64_t o = 0; o < c->oc; o++) {
            const float *dy = c->dy + (n * c->oc + o) * l->p, *sel = l->sel + n * l->hits + o * l->p;
            const int32_t *at = l->at + n * l->hits + o * l->p;
            vec s = splat(0), d = splat(0);
            float rs = 0, rd = 0;
            int64_t i = 0;
            for (; i + LANES <= l->p; i += LANES) {
                ivec a;
                memcpy(&a, at + i, sizeof a);
                const vec g = (vec)((ivec)load(dy + i) & (a >= 0));
                s += g;
                if (c->mode == TRAIN) d += g * (load(sel + i) - mu[o]);
            }
            for (; i < l->p; i++) {
                const float g = at[i] >= 0 ? dy[i] : 0;
                rs += g;
                if (c->mode == TRAIN) rd += g * (sel[i] - mu[o]);
            }
            sum[o] += total(s) + rs, dot[o] += total(d) + rd;
        }
}

/* dw in PyTorch's order from either packed order: element (o, ky, t) is at o * so + ky * sk + t * st. */
static void unpack_weight(const call *c, const float *from, int64_t so, int64_t sk, int64_t st) {
    for (int64_t o = 0; o < c->oc; o++)
        for (int64_t i = 0; i < c->ic; i++)
            for (int64_t ky = 0; ky < c->k; ky++)
                for (int64_t kx = 0; kx < c->k; kx++)
                    c->dw[((o * c->ic + i) * c->k + ky) * c->k + kx] = from[o * so + ky * sk + (kx * c->ic + i) * st];
}

/* Batch norm with batch statistics: dz = scale g + slope (z - mean) + level, dense. */
static void backward_dense(const call *c, const layout *l, const float *slope, const float *level, float *work) {
    float *dz = work, *dw = dz + l->oh * l->wp * l->ocp, *w = dw + c->k * l->run * l->ocp;
    float *dx = w + c->k * l->vecs * c->oc * LANES;
    const float *scale = l->stats, *mu = l->stats + 2 * l->ocp;
    const int64_t blocks = pieces(l->vecs, 4), zr = l->wp * l->ocp;
    memset(dw, 0, sizeof(float) * c->k * l->run * l->ocp);
    for (int64_t ky = 0; c->dx && ky < c->k; ky++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t v = cut(l->vecs, blocks, b), width = (cut(l->vecs, blocks, b + 1) - v) * LANES;
            float *to = w + (ky * l->vecs + v) * c->oc * LANES;
            for (int64_t o = 0; o < c->oc; o++)
                for (int64_t j = 0; j < width; j++)
                    to[o * width + j] = v * LANES + j < l->run ? tap(c, o, ky, v * LANES + j) : 0;
        }
    for (int64_t n = 0; n < c->n; n++) {
        const float *z = l->z + n * l->pixels, *dy = c->dy + n * c->oc * l->p;
        const int32_t *at = l->at + n * l->hits;
        for (int64_t o = 0; o < l->ocp; o += LANES) {
            const vec s = load(slope + o), e = load(level + o), m = load(mu + o);
            for (int64_t y = 0; y < l->oh; y++)
                for (int64_t x = 0; x < l->ow; x++)
                    store(dz + y * zr + x * l->ocp + o, s * (load(z + (y * l->ow + x) * l->ocp + o) - m) + e);
        }
        for (int64_t o = 0; o < c->oc; o++)
            for (int64_t i = 0; i < l->p; i++)
                if (at[o * l->p + i] >= 0) dz[at[o * l->p + i] * l->ocp + o] += scale[o] * dy[o * l->p + i];
        if (c->dw) conv_weight(l->x + n * l->image, c->ic, l->row, dz, zr, l->ocp, l->oh, l->ow, c->k, dw);
        if (c->dx) {
            memset(dx, 0, sizeof(float) * l->image);
            conv_input(dz, zr, l->ocp, l->oh, l->ow, c->ic, c->k, w, c->oc, dx, l->row);
            unpack_image(c, l, dx, c->dx + n * c->ic * c->h * c->w);
        }
    }
    if (c->dw) unpack_weight(c, dw, 1, l->run * l->ocp, l->ocp);
}

/* Without batch statistics dz is scale g and lives only where a window has its maximum. */
static void backward_sparse(const call *c, const layout *l, const double *sum, float *work) {
    const int64_t kernel = c->k * l->vecs * LANES, framed = (c->k + 2) * l->frame;
    float *dw = work, *w = dw + c->oc * kernel, *dx = w + c->oc * framed + LANES;
    hit *hits = (hit *)(dx + l->image);
    const float *scale = l->stats, *mu = l->stats + 2 * l->ocp, *inv = mu + l->ocp;
    const int weights = c->dw || c->dgamma;
    memset(dw, 0, sizeof(float) * c->oc * kernel);
    if (c->dx) {
        memset(w, 0, sizeof(float) * (c->oc * framed + LANES));
        for (int64_t o = 0; o < c->oc; o++)
            for (int64_t ky = 0; ky < c->k; ky++)
                for (int64_t t = 0; t < l->run; t++)
                    w[o * framed + (ky + 1) * l->frame + c->ic + t] = scale[o] * tap(c, o, ky, t);
    }
    for (int64_t n = 0; n < c->n; n++) {
        const float *dy = c->dy + n * c->oc * l->p;
        const int32_t *at = l->at + n * l->hits;
        for (int64_t o = 0; weights && o < c->oc; o++) {
            int64_t count = 0;
            for (int64_t i = 0; i < l->p; i++) {
                const int32_t q = at[o * l->p + i];
                hits[count] = (hit){q * (int32_t)c->ic, dy[o * l->p + i]};
                count += q >= 0;
            }
            sparse_weight(l->x + n * l->image, l->row, c->k, l->vecs, hits, count, dw + o * kernel);
        }
        if (!c->dx) continue;
        memset(dx, 0, sizeof(float) * l->image);
        for (int64_t i = 0; i < l->p; i++) {
            const int64_t y = 2 * (i / l->pw), x = 2 * (i % l->pw), first = y * l->wp + x;
            int64_t count = 0;
            for (int64_t o = 0; o < c->oc; o++) {
                const int64_t q = at[o * l->p + i], d = q - first, below = d >= l->wp, right = d - below * l->wp;
                hits[count].at = (int32_t)(o * framed + (1 - below) * l->frame + (1 - right) * c->ic);
                hits[count].g = dy[o * l->p + i];
                count += q >= 0;
            }
            sparse_input(w, c->k, l->patch, l->frame, hits, count, dx + first * c->ic, l->row);
        }
        unpack_image(c, l, dx, c->dx + n * c->ic * c->h * c->w);
    }
    for (int64_t o = 0; c->dgamma && o < c->oc; o++) { /* sum of g z is the kernel times its own unscaled gradient */
        double dot = ((c->bias ? c->bias[o] : 0) - mu[o]) * sum[o];
        for (int64_t ky = 0; ky < c->k; ky++)
            for (int64_t t = 0; t < l->run; t++) dot += (double)tap(c, o, ky, t) * dw[o * kernel + ky * l->vecs * LANES + t];
        c->dgamma[o] = (float)(dot * inv[o]);
    }
    if (!c->dw) return;
    for (int64_t o = 0; o < c->oc; o++)
        for (int64_t i = 0; i < kernel; i++) dw[o * kernel + i] *= scale[o];
    unpack_weight(c, dw, kernel, l->vecs * LANES, 1);
}

/* Fills those of dx, dw, db, dgamma, dbeta that are not NULL; `save` is what forward left there. */
void coterie_backward(call *c) {
    layout l;
    plan(c, &l);
    double *sum = (double *)c->scratch, *dot = sum + l.ocp;
    float *slope = (float *)(dot + l.ocp), *level = slope + l.ocp, *work = level + l.ocp;
    const float *scale = l.stats, *inv = l.stats + 3 * l.ocp;
    const double m = (double)c->n * l.oh * l.ow;
    memset(c->scratch, 0, sizeof(float) * 6 * l.ocp);
    reduce(c, &l, sum, dot);
    for (int64_t o = 0; o < c->oc; o++) {
        if (c->mode == TRAIN) {
            slope[o] = (float)(-scale[o] * inv[o] * inv[o] * dot[o] / m);
            level[o] = (float)(-scale[o] * sum[o] / m);
            if (c->dgamma) c->dgamma[o] = (float)(dot[o] * inv[o]);
        }
        if (c->dbeta) c->dbeta[o] = (float)sum[o];
        /* batch norm takes away what a bias adds: its gradient is zero */
        if (c->db) c->db[o] = c->mode == TRAIN ? 0 : (float)(scale[o] * sum[o]);
    }
    if (c->mode != TRAIN) backward_sparse(c, &l, sum, work);
    else if (c->dx || c->dw) backward_dense(c, &l, slope, level, work);
}
