/* The extension module. It is empty for Python: its functions are called by ctypes, which releases the GIL meanwhile. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

/* True if this processor has the instruction set. */
__attribute__((visibility("default"))) int coterie_supports(const char *name) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
    return !strcmp(name, "baseline") || !strcmp(name, "neon");
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", 0, -1, 0, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
