// A library that allocates, for programs that load it in a scope of its own.
#include <stddef.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);

// Neither is a jump, which would hide the caller.
int plugin_malloc(void **out, size_t bytes) {
    int code = cudaMalloc(out, bytes);
    return code == 0 && *out == NULL ? -1 : code;
}

int plugin_free(void *pointer) {
    int code = cudaFree(pointer);
    return pointer == NULL ? -1 : code;
}

#define CALLS      \
    block = NULL;  \
    if (cudaMalloc(&block, 100) != 0 || block == NULL || cudaFree(block) != 0) return -1;
#define EIGHT_TIMES(calls) calls calls calls calls calls calls calls calls

// Calls from more places than anything remembers.
int plugin_calls(void) {
    void *block;
    EIGHT_TIMES(EIGHT_TIMES(CALLS))
    EIGHT_TIMES(CALLS)
    return 0;
}
