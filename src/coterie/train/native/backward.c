/* The backward of the block: included by block.c. */

/* Sum of g over batch and positions, without batch statistics. */
static void reduce_plain(const call *c, const layout *l, double *sum) {
    for (int64_t n = 0; n < c->n; n++)
        for (int64_t o = 0; o < c->oc; o++) {
            const float *dy = c->dy + (n * c->oc + o) * l->p;
            const int32_t *at = l->at + n * l->hits + o * l->p;
            vec s = splat(0);
            float rest = 0;
            int64_t i = 0;
            for (; i + LANES <= l->p; i += LANES) s += (vec)((ivec)load(dy + i) & ((ivec)load((float *)at + i) >= 0));
            for (; i < l->p; i++) rest += at[i] >= 0 ? dy[i] : 0;
            sum[o] += total(s) + rest;
        }
}

/* Sums of g and of g times the deviation of the chosen value: all that batch norm needs to know of the other images. */
static void reduce_norm(const call *c, const layout *l, double *sum, double *dot, float *dy) {
    for (int64_t n = 0; n < c->n; n++) {
        const float *at = (float *)l->at + n * l->hits, *sel = l->sel + n * l->hits;
        channels_last(c->dy + n * c->oc * l->p, l->p, c->oc, dy, l->ocp);
        for (int64_t o = 0; o < l->ocp; o += LANES) {
            const vec mu = load(l->stats + 2 * l->ocp + o);
            vec s = splat(0), d = splat(0);
            for (int64_t i = o; i < l->p * l->ocp; i += l->ocp) {
                const vec g = (vec)((ivec)load(dy + i) & ((ivec)load(at + i) >= 0));
                s += g, d += g * (load(sel + i) - mu);
            }
            for (int j = 0; j < LANES; j++) sum[o + j] += s[j], dot[o + j] += d[j];
        }
    }
}

/* dz of one image: scale g + slope (z - mean) + level, where only the last two reach every position. */
static void norm_gradient(const call *c, const layout *l, int64_t n, const float *slope, const float *level, float *dy,
                          float *dz) {
    const float *z = l->z + n * l->pixels, *at = (float *)l->at + n * l->hits;
    const int64_t zr = l->wp * l->ocp, from = l->ow * l->ocp;
    const int32_t wp = (int32_t)l->wp;
    const ivec zero = {0}, corner[4] = {zero, zero + 1, zero + wp, zero + (wp + 1)};
    channels_last(c->dy + n * c->oc * l->p, l->p, c->oc, dy, l->ocp);
    for (int64_t o = 0; o < l->ocp; o += LANES) {
        const vec scale = load(l->stats + o), mu = load(l->stats + 2 * l->ocp + o);
        const vec s = load(slope + o), e = load(level + o);
        for (int64_t i = 0; i < l->ph; i++)
            for (int64_t j = 0; j < l->pw; j++) {
                const int64_t w = (i * l->pw + j) * l->ocp + o;
                const vec g = scale * load(dy + w);
                const ivec place = (ivec)load(at + w) - (int32_t)(2 * i * wp + 2 * j);
                for (int b = 0; b < 4; b++) {
                    const int64_t y = 2 * i + b / 2, x = (2 * j + b % 2) * l->ocp + o;
                    const vec here = (vec)((ivec)g & (place == corner[b]));
                    store(dz + y * zr + x, s * (load(z + y * from + x) - mu) + e + here);
                }
            }
        for (int64_t y = 0; y < l->oh; y++) /* the last row and column of odd sizes are in no window */
            for (int64_t x = y < 2 * l->ph ? 2 * l->pw : 0; x < l->ow; x++)
                store(dz + y * zr + x * l->ocp + o, s * (load(z + y * from + x * l->ocp + o) - mu) + e);
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

/* The weight as conv_input wants it. */
static void pack_input(const call *c, const layout *l, float *w, float *row) {
    const int64_t blocks = pieces(l->vecs, 4), width = l->vecs * LANES;
    for (int64_t o = 0; o < c->oc; o++) {
        memset(row, 0, sizeof(float) * c->k * width);
        pack_kernel(c, o, 1, row, width, 1);
        for (int64_t ky = 0; ky < c->k; ky++)
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t v = cut(l->vecs, blocks, b), size = (cut(l->vecs, blocks, b + 1) - v) * LANES;
                memcpy(w + (ky * l->vecs + v) * c->oc * LANES + o * size, row + ky * width + v * LANES,
                       sizeof(float) * size);
            }
    }
}

/* Batch norm with batch statistics: a dense dz. */
static void backward_dense(const call *c, const layout *l, const float *slope, const float *level, float *work) {
    float *dy = work, *dz = dy + l->p * l->ocp, *dw = dz + l->oh * l->wp * l->ocp, *w = dw + c->k * l->run * l->ocp;
    float *dx = w + c->k * l->vecs * c->oc * LANES;
    const int64_t zr = l->wp * l->ocp;
    memset(dw, 0, sizeof(float) * c->k * l->run * l->ocp);
    if (c->dx) pack_input(c, l, w, dx);
    for (int64_t n = 0; n < c->n; n++) {
        norm_gradient(c, l, n, slope, level, dy, dz);
        if (c->dw) conv_weight(l->x + n * l->image, c->ic, l->row, dz, zr, l->ocp, l->oh, l->ow, c->k, dw);
        if (!c->dx) continue;
        memset(dx, 0, sizeof(float) * l->image);
        conv_input(dz, zr, l->ocp, l->oh, l->ow, c->ic, c->k, w, c->oc, dx, l->row);
        unpack_image(c, l, dx, c->dx + n * c->ic * c->h * c->w);
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
            pack_kernel(c, o, scale[o], w + o * framed + l->frame + c->ic, l->frame, 1);
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
            if (count) sparse_weight(l->x + n * l->image, l->row, c->k, l->vecs, hits, count, dw + o * kernel);
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
            if (count) sparse_input(w, c->k, l->patch, l->frame, hits, count, dx + first * c->ic, l->row);
        }
        unpack_image(c, l, dx, c->dx + n * c->ic * c->h * c->w);
    }
    for (int64_t o = 0; c->dgamma && o < c->oc; o++) { /* sum of g z is the kernel times its own unscaled gradient */
        double dot = ((c->bias ? c->bias[o] : 0) - mu[o]) * sum[o];
        const float *weight = c->weight + o * c->ic * c->k * c->k;
        for (int64_t i = 0; i < c->ic; i++)
            for (int64_t ky = 0; ky < c->k; ky++)
                for (int64_t kx = 0; kx < c->k; kx++)
                    dot += (double)*weight++ * dw[o * kernel + ky * l->vecs * LANES + kx * c->ic + i];
        c->dgamma[o] = (float)(dot * inv[o]);
    }
    if (!c->dw) return;
    for (int64_t o = 0; o < c->oc; o++)
        for (int64_t i = 0; i < kernel; i++) dw[o * kernel + i] *= scale[o];
    unpack_weight(c, dw, kernel, l->vecs * LANES, 1);
}

/* Fills those of dx, dw, db, dgamma, dbeta that are not NULL; `save` is what forward left there. */
static void block_backward(call *c) {
    layout l;
    plan(c, &l);
    double *sum = (double *)c->scratch, *dot = sum + l.ocp;
    float *slope = (float *)(dot + l.ocp), *level = slope + l.ocp, *work = level + l.ocp;
    const float *scale = l.stats, *inv = l.stats + 3 * l.ocp;
    const double m = (double)c->n * l.oh * l.ow;
    memset(c->scratch, 0, sizeof(float) * 6 * l.ocp);
    if (c->mode == TRAIN) reduce_norm(c, &l, sum, dot, work);
    else reduce_plain(c, &l, sum);
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
