/* All kernels for one instruction set. The build compiles this file once for each, with ISA as the end of the names. */
#include "block.c"
#include "gemm.c"
#include "layers.c"
#include "chain.c"

#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) NAMED(name, ISA)

void EXPORT(coterie_sizes)(call *c, int64_t *out) { block_sizes(c, out); }
void EXPORT(coterie_forward)(call *c) { block_forward(c); }
void EXPORT(coterie_backward)(call *c) { block_backward(c); }
int64_t EXPORT(coterie_train)(training *t) { return train_chain(t); }
int64_t EXPORT(coterie_score)(scoring *t) { return score_chain(t); }
